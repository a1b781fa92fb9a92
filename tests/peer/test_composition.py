"""How a peer is composed, read off the syntax tree: who inherits from whom, and who writes what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import dfca

PACKAGE = Path(dfca.__file__).parent
PARTS = {
    "copies": "CopyDesk",
    "cycle": "RoundCycle",
    "elections": "Elections",
    "joiner": "Joiner",
    "last_step": "LastStep",
    "surveys": "Surveys",
}
MACHINES = {"Machine", "Peer", "Server", "ServerClient"}
HELD = ("state", "job", "copies")
"""What a participant does and holds: it alone writes that."""


def _source(module: str) -> Path:
    return PACKAGE / "peer" / f"{module}.py"


@cache
def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def _class_of(module: str) -> ast.ClassDef:
    return next(node for node in _classes(_source(module)) if node.name == PARTS[module])


def _assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that are assigned, or deleted, in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _fields(part: ast.ClassDef) -> dict[str, int]:
    """Return the fields that a part makes in `__init__`, with their lines."""
    made = next(node for node in part.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return {node.attr: node.lineno for node in _assigned(made) if _is_self(node)}


def test_no_class_has_more_than_two_of_our_own_above_it() -> None:
    bases: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in _classes(path):
            names = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
            bases.setdefault(node.name, set()).update(names - {node.name})

    def chain(name: str) -> list[str]:
        return [name, *max((chain(base) for base in bases[name] if base in bases), key=len, default=[])]

    longest = max((chain(name) for name in bases), key=len)
    assert len(longest) <= 3, longest


@pytest.mark.parametrize("module", PARTS)
def test_a_part_says_what_each_of_its_few_fields_is(module: str) -> None:
    lines, fields = _source(module).read_text().splitlines(), _fields(_class_of(module))
    assert 2 <= len(fields) <= 9
    assert [name for name, line in fields.items() if "  # " not in lines[line - 1]] == []


@pytest.mark.parametrize("module", PARTS)
def test_a_part_imports_no_other_part_nor_the_peer(module: str) -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(_source(module).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    assert imported.isdisjoint(f"dfca.peer.{other}" for other in {*PARTS, "peer", "server"} - {module})


def test_a_part_writes_its_own_fields_only_and_no_other_code_writes_them() -> None:
    owned = {field for module in PARTS for field in _fields(_class_of(module))}
    for path in (PACKAGE / "peer").glob("*.py"):
        for node in _classes(path):
            mine = _fields(node) if node.name in PARTS.values() else None
            for target in _assigned(node):
                if _is_self(target):
                    assert mine is None or target.attr in mine, f"{node.name} has no field {target.attr}"
                elif mine is not None or node.name in MACHINES:
                    assert target.attr not in owned, f"{node.name} writes the field {target.attr} of a part"


def test_a_participant_alone_writes_its_state() -> None:
    for path in (PACKAGE / "peer").rglob("*.py"):
        for node in _classes(path):
            for target in _assigned(node):
                if target.attr in (*HELD, "lineage"):
                    assert _is_self(target), f"{node.name} writes {target.attr} of another"
                assert target.attr not in HELD or node.name in MACHINES, f"{node.name} writes {target.attr}"


def test_handlers_of_messages_write_no_field_of_a_peer() -> None:
    for target in _assigned(ast.parse(_source("heard").read_text())):
        owner = target.value.id if isinstance(target.value, ast.Name) else ""
        assert owner == "known", f"heard writes {owner}.{target.attr}"  # what a neighbour has said


@pytest.mark.parametrize("driver", ["faults", "node", "sim", "swarm"])
def test_a_driver_writes_no_field_of_a_participant(driver: str) -> None:
    for path in (PACKAGE / driver).rglob("*.py"):
        for target in _assigned(ast.parse(path.read_text())):
            owner = target.value.attr if isinstance(target.value, ast.Attribute) else getattr(target.value, "id", "")
            assert owner not in ("peer", "machine"), f"{path.name} writes {owner}.{target.attr}"
