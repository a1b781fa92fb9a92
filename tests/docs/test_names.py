"""Names: what documents and docstrings name in backticks exists, and a class name means one class."""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import dfca
from dfca import algorithms

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "dfca"
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.endswith("_pb2.py")]
SCRIPTS = [path for folder in ("benchmarks", "docs", "tests") for path in (ROOT / folder).rglob("*.py")]
PAGES = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != "CHANGELOG.md"]

# Tables of experiment files and of node.toml: `data.path` is a key, not a module.
TABLES = """
    algorithm checkpoint clock data evaluation liars limits local log mixing model network personal privacy task
    topology training world
"""
# Folders and files that dfca writes, and those of examples: nothing of the repository.
WRITTEN = """
    NAME.part bench.json bench.md build/site certificate.pem checkpoint/ config.toml control.json damaged/
    environment.json export/ facts.json figures/ key.pem labels.txt metrics.jsonl metrics/ models/ node.log node.toml
    partial/ pump2.request.json report.html roster.json runs/bench runs/quickstart/report.html samples.py
    src/dfca/algorithms/curious.py state/ status.json summary.json swarm/ tensorboard/ timeline/ topology.json trace/
    wandb/
"""
ELSEWHERE = {"FederatedDataset"}  # of flwr-datasets
SERVICE = "dfca.wire.v1.Peer"
# Class names that exist twice, each with the reason why.
TWICE = {
    "Result": "the protocol's is stored by name; users call the other",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def classes() -> list[tuple[Path, ast.ClassDef]]:
    return [(path, node) for path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]


@cache
def class_members() -> dict[str, set[str]]:
    """Return the names that every class of the package defines or assigns, with those of its bases."""
    members: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for _, node in classes():
        bases[node.name] |= {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases}
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                members[node.name].add(inner.name)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                members[node.name].add(inner.id)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                members[node.name].add(inner.attr)
    for _ in range(4):
        for name in list(members):
            members[name] |= set().union(*(members[base] for base in bases[name] if base in members))
    return members


@cache
def fields() -> set[str]:
    return set().union(*class_members().values(), algorithms.OPTIONS)


MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in SOURCES}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}
FOLDERS = {part for name in MODULES for part in name.split(".")}
FILES = [
    path.relative_to(ROOT).as_posix() for part in ("*", "src/**/*", "docs/*", "tests/**/*") for path in ROOT.glob(part)
]


def is_known(name: str) -> bool:
    """Return whether a backticked name with a dot or a slash exists: a file, a module, a class's member or a key."""
    if name in WRITTEN.split() or name == SERVICE:
        return True
    if "/" in name:
        return (
            any((place / name).exists() for place in (ROOT, PACKAGE.parent, PACKAGE))
            or (PACKAGE / f"{name}.py").exists()
        )
    if re.search(r"\.(py|md|toml|json|proto|yml|txt|typed|cff|sh)$", name):
        return any(file == name or file.endswith(f"/{name}") for file in FILES)
    first, _, rest = name.removeprefix("dfca.").partition(".")
    first = "StoredRun" if first == "run" else first  # docs/python.md
    if first in class_members():
        return not rest or rest in class_members()[first]
    if name.removeprefix("dfca.") in dfca.__all__ or rest in class_members().get(first.capitalize(), ()):
        return True  # `setting.evaluate_every` is a field of a `Setting`
    if first in TABLES.split() and name.rpartition(".")[2] in fields():
        return True
    if first not in FOLDERS and not name.startswith("dfca."):
        return True  # of another library, or an example
    return is_attribute(name)


def is_attribute(name: str) -> bool:
    """Return whether a dotted name is a module of the package, from any folder on, or something that one defines."""
    parts = name.split(".")
    for module, path in MODULES.items():
        for length in range(1, len(parts) + 1):
            if f".{module}".endswith("." + ".".join(parts[:length])):
                names = defined(path)
                rest = parts[length:]
                if not rest or (rest[0] in names and (len(rest) == 1 or rest[1] in class_members().get(rest[0], ()))):
                    return True
    return False


@cache
def defined(path: Path) -> set[str]:
    """Return the names at the top level of a module."""
    names = set()
    for node in tree(path).body:
        for inner in ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                names.add(inner.name)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
            elif isinstance(inner, ast.alias):
                names.add((inner.asname or inner.name).partition(".")[0])
    return names


@pytest.mark.parametrize("path", [*PAGES, PACKAGE], ids=lambda path: path.name)
def test_names_in_backticks_exist(path: Path) -> None:
    paths = [*SOURCES, *SCRIPTS] if path == PACKAGE else [path]
    unknown = {
        f"{place.relative_to(ROOT)}: {name}"
        for place in paths
        for name in re.findall(r"`([A-Za-z_][\w./-]*[./][\w./-]*)`", place.read_text(encoding="utf-8"))
        if not is_known(name)
    }
    assert not unknown, "\n".join(sorted(unknown))


def test_classes_in_backticks_exist() -> None:
    known = set(class_members()).union(*(defined(path) for path in SOURCES))
    known |= set(re.findall(r"\w+", (PACKAGE / "node/wire/wire.proto").read_text(encoding="utf-8"))) | ELSEWHERE
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*PAGES, *SOURCES)
        for name in re.findall(r"`([A-Z][a-z]+[A-Z]\w*)`", path.read_text(encoding="utf-8"))
        if name not in known and name not in dir(builtins)
    }
    assert not unknown, "\n".join(sorted(unknown))


def test_a_class_name_means_one_class() -> None:
    places = defaultdict(list)
    for path, node in classes():
        places[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in TWICE} == {}
    assert [name for name, why in TWICE.items() if len(places[name]) < 2] == []


def test_the_table_of_the_design_names_modules_that_exist() -> None:
    """A row is about one folder: its lower-case words in backticks are modules or folders of it."""
    rows = re.findall(r"^\| `([a-z_./]+)` \| (.*) \|$", (ROOT / "DESIGN.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = [(folder, word) for folder, text in rows for word in re.findall(r"`([a-z_]+)`", text)]
    assert len(named) > 30
    assert [
        (folder, word)
        for folder, word in named
        if not (PACKAGE / folder / f"{word}.py").exists() and not (PACKAGE / folder / word).is_dir()
    ] == []


def test_no_merge_has_left_its_marks() -> None:
    """In a docstring or a page neither a formatter nor a type checker would find them."""
    marks = re.compile(r"^\s*(<{7} |>{7} )", re.MULTILINE)
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*SOURCES, *SCRIPTS, *PAGES)}
    assert [name for name, text in texts.items() if marks.search(text)] == []


def test_few_tables_may_hold_anything() -> None:
    """What is read from a file is parsed at the edge into records; above it, types say what a table holds."""
    rooms = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in ("api", "report", "runs", "sim")]
    lines = [line for path in rooms for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum(bool(re.search(r"\b(dict|Mapping)\[str, Any\]", line)) for line in lines) < 60
