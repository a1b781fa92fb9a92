"""Make the pages of the docs site that are no files of docs/: a hook of mkdocs (`make site`).

README.md and its sisters are at the root of the repository, where the code host shows them; here they become pages, and
links between them and docs/ are rewritten. The page of the API names what `dfca.__all__` does.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from notebooks import markdown  # noqa: E402

PAGES = {"README.md": "index.md", "DESIGN.md": "design.md", "CONTRIBUTING.md": "contributing.md"}
PAGES |= {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security-policy.md", "MAINTAINERS.md": "maintainers.md"}
PAGES |= {"CODE_OF_CONDUCT.md": "conduct.md"}
KEYS = re.compile(r"<!-- keys -->\n(.*?)<!-- end keys -->", re.DOTALL)
GROUPS = {
    "Run": ("simulate", "Result", "Comparison", "Metrics", "load_run", "StoredRun"),
    "Data and graphs": (
        "Split",
        "ClientData",
        "split_from",
        "map_npz",
        "make_split",
        "DataOptions",
        "make_graph",
        "TopologyOptions",
    ),
    "Models and tasks": ("mlp", "cnn", "cnn1d", "Task", "make_task"),
    "Algorithms": ("ALGORITHMS", "Algorithm", "View", "Choice", "Codec", "LocalOptions", "lowest"),
    "One simulation, step by step": ("Setting", "Simulation"),
    "Errors": ("DfcaError", "DfcaWarning"),
}
FOR_TESTS = ("contracts.check_algorithm", "contracts.ContractError", "contracts.make_setting")
FOR_TESTS += ("testing.lockstep", "testing.make_clients", "testing.stack")
PROMISE = """
All public names of `import dfca`. [From Python](python.md) shows how they fit together.

**What is public**: the names on this page, the command line, the entry point group `dfca.algorithms`, and the files
that dfca reads and writes: experiment files, run folders, checkpoints and exported models. They change with a note in
the [changelog](changelog.md). Every other module, class and function is internal and may change in any release, with or
without a leading underscore. The package is typed (`py.typed`), so editors and type checkers know these names.
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if target == "index.md":  # the first page is a page alone: its width is for its tables
            text = "---\nhide: [navigation]\n---\n" + text
        files.append(File.generated(config, target, content=relink(text, ".")))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page = markdown(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"{path.stem}.md", content=page.replace("](../", "](")))
    files.append(File.generated(config, "api.md", content=api_page(public_names())))
    (keys,) = KEYS.findall((ROOT / "docs" / "experiments.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "keys.md", content=keys_page(keys)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/ that lead out of it; the long table of keys is a page of its own here."""
    # In tables a number and its deviation stay on one line.
    markdown = re.sub(r"(?m)^\|.*", lambda row: re.sub(r" ([±→=]) ", "\u00a0\\1\u00a0", row[0]), markdown)
    if page.file.src_uri in PAGES.values():
        return markdown
    return KEYS.sub("They have a page of their own: [Keys of experiment files](keys.md).", relink(markdown, "docs"))


def relink(text: str, folder: str) -> str:
    """Rewrite the links of a file in `folder` of the repository as links between pages of the site.

    >>> relink("[a](docs/deploy.md#upgrades) [b](#here)", ".")
    '[a](deploy.md#upgrades) [b](#here)'
    >>> relink("[a](../README.md) [b](deploy.md)", "docs")
    '[a](index.md) [b](deploy.md)'
    """

    def target(link: re.Match[str]) -> str:
        path, anchor = link[2], link[3]
        place = posixpath.normpath(posixpath.join(folder, path))
        page = PAGES.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else path)
        page = re.sub(r"^notebooks/(.*)\.ipynb$", r"\1.md", page)
        return f"{link[1]}{page}{anchor})"

    return re.sub(r"(\]\()(?![a-z]+:|/)([^)#\s]+)((?:#[^)\s]*)?)\)", target, text)


def public_names() -> list[str]:
    """Read the public names from `dfca/__init__.py`, without importing torch."""
    tree = ast.parse((ROOT / "src" / "dfca" / "__init__.py").read_text(encoding="utf-8"))
    (homes,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_HOMES"
    )
    return [name for names in ast.literal_eval(homes).values() for name in names]


def keys_page(table: str) -> str:
    """Write the page of all keys: one table for each table of an experiment file."""
    head, line, *rows = table.strip().splitlines()
    tables: dict[str, list[str]] = {}
    for row in rows:
        name = re.match(r"\| `([^`]+)`", row)
        assert name, row
        broken = f"<code>{name[1].replace('.', '.<wbr>')}</code>"  # at its dots, on a narrow screen
        row = row.replace(f"`{name[1]}`", broken, 1)
        tables.setdefault(name[1].partition(".")[0] if "." in name[1] else "", []).append(row)
    lines = [
        "# Keys of experiment files",
        "",
        "`dfca options [PREFIX]` prints the same. [Experiment files](experiments.md)",
    ]
    lines[-1] += " explains how files are written. `[]` marks the tables of a list."
    for name, members in tables.items():
        lines += ["", f"## `[{name}]`" if name else "## The top of the file", "", head, line, *members]
    return "\n".join(lines) + "\n"


def api_page(names: list[str]) -> str:
    """Write the page of the API: all public names, in groups, with a last group for names that have none."""
    known = {name for group in GROUPS.values() for name in group}
    groups = GROUPS | {"More": tuple(name for name in names if name not in known)}
    lines = ["# Python API", PROMISE.rstrip()]
    for title, members in groups.items():
        shown = [name for name in members if name in names]
        if shown:
            lines += ["", f"## {title}", *(f"\n::: dfca.{name}" for name in shown)]
    lines += ["", "## Tests of your own algorithms", *(f"\n::: dfca.{name}" for name in FOR_TESTS)]
    return "\n".join(lines) + "\n"
