"""All algorithms, one paper per file. A new one is one file and one line here; the contract tests pick it up."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from dfca.algorithms.dfca import dfca, dfca_fi, dfca_gi, dfca_li
from dfca.algorithms.dfedavgm import dfedavgm
from dfca.algorithms.fedavg import fedavg
from dfca.algorithms.fedspd import fedspd
from dfca.algorithms.ifca import ifca
from dfca.algorithms.local import local
from dfca.algorithms.oracle import oracle
from dfca.core.algorithm import Algorithm
from dfca.errors import unknown

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "dfca": dfca,
    "dfca-fi": dfca_fi,
    "dfca-gi": dfca_gi,
    "dfca-li": dfca_li,
    "ifca": ifca,
    "fedspd": fedspd,
    "dfedavgm": dfedavgm,
    "fedavg": fedavg,
    "local": local,
    "oracle": oracle,
}


def get(name: str, **options: object) -> Algorithm:
    """Make an algorithm by name; options are the keywords of its function.

    Raises ConfigError on an unknown name or option, with the known ones.
    """
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    known = inspect.signature(ALGORITHMS[name]).parameters
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known)
    return ALGORITHMS[name](**options)
