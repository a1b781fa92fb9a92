"""What to cite: the paper whose algorithm this is, and the software, as BibTeX. CITATION.cff says the same."""

from __future__ import annotations

from dfca import __version__

PAPER = """@article{kirch2026dfca,
  title = {{DFCA}: Decentralized Federated Clustering Algorithm},
  author = {Kirch, Jonas and Becker, Sebastian and Rodrigues, Tiago Koketsu and Harmeling, Stefan},
  journal = {IEEE Internet of Things Journal},
  note = {Accepted for publication},
}
"""
SOFTWARE = f"""@software{{dfca,
  title = {{dfca: clustered federated learning without a server}},
  author = {{{{The dfca maintainers}}}},
  version = {{{__version__}}},
  license = {{Apache-2.0}},
}}
"""


def bibtex() -> str:
    return f"{PAPER}\n{SOFTWARE}"
