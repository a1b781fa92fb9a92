"""Small wrong changes of the source, each of which must fail a test: `make mutants`.

    python tests/mutants/run.py                 all of the tables beside this file
    python tests/mutants/run.py peer lineage    those whose name, file or table contains one of the words
    python tests/mutants/run.py --list peer     show them, run nothing
    python tests/mutants/run.py --survey FILE   try every mutant of the operators below in one source file

Tables are TOML files. A [[mutant]] replaces one text, which must occur once in its file. A [[functions]] entry is for
all mutants that the operators below make of a file's functions, or of some (`names`). Both name the tests to run;
`alive` says why a mutant that no test notices may stay. Each mutant is applied to a copy of the package, in a process
of its own.

    killed   a test fails, or runs for longer than the limit
    alive    no test fails: exit 1, unless the table gives a reason
    stale    its text is not in the source any more, or the reason is for a mutant that is killed: exit 1
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from compileall import compile_dir
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PRELOADED = ("pytest", "numpy", "torch", "torch.func", "networkx", "scipy.stats", "sklearn.datasets", "pydantic")
"""What tests import and no mutant changes: loaded once, before processes are forked."""


@dataclass(frozen=True)
class Mutant:
    """One wrong change."""

    table: str  # the file that lists it
    name: str  # what it does
    file: str  # below src/dfca
    source: str  # of that file, with the change; empty where the text is not there
    tests: tuple[str, ...]  # what should fail
    alive: str = ""  # why it may survive


# Operators.

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
SIGNS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}


class Source:
    """A source file, and what the operators make of it."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self._lines = [0]
        for line in self.text.encode().splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._bytes = self.text.encode()

    def functions(self, names: Iterable[str] | None) -> Iterator[tuple[str, ast.FunctionDef]]:
        """Yield the functions of these names ("Class.method"; None: all)."""

        def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, f"{prefix}{child.name}.")
                elif isinstance(child, ast.FunctionDef):
                    yield f"{prefix}{child.name}", child

        wanted = None if names is None else set(names)
        for name, function in walk(ast.parse(self.text), ""):
            if wanted is None or name in wanted:
                yield name, function

    def mutants(self, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
        """Yield what the operators make of a function: (what changes, the whole source)."""
        counts: dict[str, int] = {}
        for node in self._body(function):
            for place, what, new in self._changes(node):
                what = " ".join(what.split())
                counts[what] = counts.get(what, 0) + 1
                what += f" ({counts[what]})" if counts[what] > 1 else ""
                start, end = place
                yield what, (self._bytes[:start] + new.encode() + self._bytes[end:]).decode()

    @staticmethod
    def _body(function: ast.FunctionDef) -> Iterator[ast.AST]:
        """Yield the nodes of a function; but for assertions, errors and `strict=`: they say what is true anyway."""
        nodes: list[ast.AST] = list(reversed(function.body))
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Assert | ast.Raise) or (isinstance(node, ast.keyword) and node.arg == "strict"):
                continue
            yield node
            nodes += reversed(list(ast.iter_child_nodes(node)))

    def _place(self, node: Any) -> tuple[int, int]:
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _code(self, node: Any) -> str:
        start, end = self._place(node)
        return self._bytes[start:end].decode()

    def _swapped(self, node: Any, left: Any, right: Any, old: str, new: str) -> tuple[tuple[int, int], str, str]:
        """Replace the sign between two operands; brackets around them stay."""
        (start, end), first, second = self._place(node), self._place(left)[1], self._place(right)[0]
        sign = self._bytes[first:second].decode().replace(old, new, 1)
        code = self._bytes[start:first].decode() + sign + self._bytes[second:end].decode()
        return (start, end), f"{self._code(left)} {old} {self._code(right)} -> {new}", code

    def _changes(self, node: ast.AST) -> Iterator[tuple[tuple[int, int], str, str]]:
        """Yield where a node is replaced, what that is called, and the new code."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            old, new = SIGNS[type(node.ops[0])], SIGNS[COMPARISONS[type(node.ops[0])]]
            yield self._swapped(node, node.left, node.comparators[0], old, new)
        elif isinstance(node, ast.BoolOp):
            for gone in range(len(node.values)):
                kept = [self._code(value) for place, value in enumerate(node.values) if place != gone]
                word = " and " if isinstance(node.op, ast.And) else " or "
                joined = word.join(f"({code})" for code in kept)
                yield self._place(node), f"without{word}{self._code(node.values[gone])}", f"({joined})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            code = self._code(node.operand)
            yield self._place(node), f"not {code} -> {code}", f"bool({code})"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            text = isinstance(node.left, ast.JoinedStr | ast.List | ast.Tuple)
            if not text and not isinstance(getattr(node.left, "value", None), str | bytes):
                old, new = "+-" if isinstance(node.op, ast.Add) else "-+"
                yield self._swapped(node, node.left, node.right, old, new)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            other = "max" if node.func.id == "min" else "min"
            yield self._place(node), f"{self._code(node)} -> {other}", other + self._code(node)[3:]
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._place(node), f"{node.value} -> {not node.value}", str(not node.value)
        elif _can_go(node):
            yield self._place(node), f"no {self._code(node)}", "pass"


def _can_go(node: ast.AST) -> bool:
    """Return whether every name is still bound without a statement: a call, or an assignment to fields or items."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if not isinstance(node, ast.Assign):
        return isinstance(node, ast.AugAssign)
    parts = [part for target in node.targets for part in getattr(target, "elts", [target])]
    return all(isinstance(part, ast.Attribute | ast.Subscript) for part in parts)


# Tables.


def read_tables(package: Path) -> Iterator[Mutant]:
    """Yield the mutants of all tables, in order."""
    for path in sorted(HERE.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        usual = table.get("tests", [])
        for entry in table.get("mutant", []):
            text = (package / entry["file"]).read_text(encoding="utf-8")
            changed = text.replace(entry["old"], entry["new"]) if text.count(entry["old"]) == 1 else ""
            tests = tuple(entry.get("tests", usual))
            yield Mutant(path.stem, entry["name"], entry["file"], changed, tests, entry.get("alive", ""))
        for entry in table.get("functions", []):
            yield from _of_functions(package, path.stem, entry, usual)


def _of_functions(package: Path, table: str, entry: dict[str, Any], usual: list[str]) -> Iterator[Mutant]:
    source, alive, tests = (
        Source(package / entry["file"]),
        dict(entry.get("alive", {})),
        tuple(entry.get("tests", usual)),
    )
    names = entry.get("names")
    for name in sorted({*(names or ())} - {name for name, _ in source.functions(names)}):
        yield Mutant(table, name, entry["file"], "", tests)
    for name, function in source.functions(names):
        for what, changed in source.mutants(function):
            full = f"{name}: {what}"
            yield Mutant(table, full, entry["file"], changed, tests, alive.pop(full, ""))
    for name in alive:
        yield Mutant(table, name, entry["file"], "", tests)


# Runs.


def prepare(folder: Path) -> Path:
    """Copy the package, compiled; return the copy."""
    package = folder / "src" / "dfca"
    shutil.copytree(ROOT / "src" / "dfca", package, ignore=shutil.ignore_patterns("__pycache__"))
    compile_dir(package, quiet=1)
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    return package


def survives(mutant: Mutant, package: Path, limit_s: float, show: bool) -> bool:
    """Run the tests of a mutant in a forked process; return whether all pass."""
    path = package / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    child = os.fork()
    if child == 0:
        code = _run_tests(mutant, package, show)
        sys.stdout.flush()
        os._exit(code)
    try:
        return _wait(child, limit_s) == 0
    finally:
        path.write_text(before, encoding="utf-8")


def _run_tests(mutant: Mutant, package: Path, show: bool) -> int:
    os.setpgid(0, 0)
    os.chdir(ROOT)
    if not show:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    paths = [str(package.parent), str(ROOT)]
    sys.path[:0] = paths
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
    try:
        import pytest

        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *mutant.tests]))
    except BaseException as error:
        print(repr(error))
        return 1


def _wait(child: int, limit_s: float) -> int:
    """Wait for a process, and end it with its children where it takes too long."""
    end = time.monotonic() + limit_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > end:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1
        time.sleep(0.02)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose table, file or name contains one of these")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("--show", action="store_true", help="show what pytest says")
    parser.add_argument("--survey", metavar="FILE", help="all mutants of one file below src/dfca; words: its functions")
    parser.add_argument("--tests", nargs="*", default=[], help="with --survey: the tests to run")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a mutant counts as killed")
    options = parser.parse_args()
    package = ROOT / "src" / "dfca"
    if options.survey:
        entry = {"file": options.survey, "tests": options.tests}
        names = [name for name, _ in Source(package / options.survey).functions(options.words or None)]
        mutants = list(_of_functions(package, "survey", entry | {"names": names}, []))
    else:
        mutants = list(read_tables(package))
        if options.words:
            mutants = [m for m in mutants if any(word in f"{m.table} {m.file} {m.name}" for word in options.words)]
    if options.list:
        print(*(f"{m.table}: {m.file}: {m.name}" for m in mutants), sep="\n")
        return 0
    return _try_all(mutants, options.limit, options.show)


def _try_all(mutants: list[Mutant], limit_s: float, show: bool) -> int:
    counts = {"killed": 0, "alive": 0, "alive with a reason": 0, "stale": 0}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        package = prepare(Path(folder))
        for tests in sorted({mutant.tests for mutant in mutants if mutant.source}):
            some = next(mutant for mutant in mutants if mutant.tests == tests and mutant.source)
            unchanged = replace(some, source=(package / some.file).read_text(encoding="utf-8"))
            if not survives(unchanged, package, limit_s, show):
                print(f"error: these tests fail without any change: {' '.join(tests)}")
                return 2
        for mutant in mutants:
            if not mutant.source:
                verdict = "stale"
            elif survives(mutant, package, limit_s, show):
                verdict = "alive with a reason" if mutant.alive else "alive"
            else:
                verdict = "stale" if mutant.alive else "killed"
            counts[verdict] += 1
            if verdict in ("alive", "stale") or show:
                print(f"{verdict}: {mutant.file}: {mutant.name}", flush=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + f" in {time.monotonic() - began:.0f} s")
    return int(counts["alive"] + counts["stale"] > 0)


if __name__ == "__main__":
    sys.exit(main())
