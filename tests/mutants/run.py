"""Small wrong changes of the source, each of which must fail a test: `make mutants`.

    python tests/mutants/run.py                 all of the tables beside this file
    python tests/mutants/run.py peer lineage    those whose name, file or table contains one of the words
    python tests/mutants/run.py --list peer     show them, run nothing
    python tests/mutants/run.py --survey FILE   try every mutant of the operators below in one source file

Tables are TOML files. A [[mutant]] replaces one text, which must occur once in its file. A [[functions]] entry is for
all mutants that the operators below make of a file's functions, or of some (`names`). Both name the tests to run;
`alive` says why a mutant that no test notices may stay. Mutants with the same tests share a process that has collected
these; each is tried in a fork of it, whose functions get the changed code. One that cannot be put there, or that no
test notices there, is tried again from the beginning, on a changed copy of the package.

    killed   a test fails, or takes too much time
    alive    no test fails: exit 1, unless the table gives a reason
    stale    its text is not in the source any more, or the reason is for a mutant that is killed: exit 1
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from compileall import compile_dir
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PRELOADED = ("pytest", "numpy", "torch", "torch.func", "networkx", "scipy.stats", "sklearn.datasets", "pydantic")
"""What tests import and no mutant changes: loaded once, before processes are forked."""
WAITS = 3
"""On a busy machine, or asleep, a process may take this many times the CPU time that it is given."""


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
    shutil.copytree(ROOT / "src" / "dfca", package)
    compile_dir(package, quiet=1)
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    return package


def survives(mutant: Mutant, package: Path, limit_s: float, show: bool) -> bool:
    """Run the tests of a mutant on a changed copy of the package; return whether all pass."""
    path = package / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()

    def run() -> int:
        _set_up(package, show)
        return _pytest(mutant.tests)

    try:
        return _in_fork(run, limit_s) == 0
    finally:
        path.write_text(before, encoding="utf-8")


def noticed(mutants: list[Mutant], package: Path, limit_s: float, show: bool) -> list[str]:
    """Try mutants that have the same tests in forks of one process that has collected these.

    Returns of every mutant "killed", "slow" for one that took too much time, or "" for one that is to be tried again;
    nothing where the tests fail without any change.
    """
    reader, writer = os.pipe()

    def serve() -> int:
        _set_up(package, show)
        with suppress(BaseException):
            _pytest(mutants[0].tests, "--collect-only")
        live = _functions_of(package)
        gc.freeze()  # pytest collects garbage ten times: not what is here already
        code = _in_fork(lambda: _pytest(mutants[0].tests), limit_s)
        os.write(writer, b"%d\n" % code)
        for mutant in mutants if code == 0 else ():
            code = _in_fork(lambda m=mutant: _with_patch(m, package, live), limit_s)  # type: ignore[misc]
            os.write(writer, b"%d\n" % code)
        return 0

    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(serve())
    os.close(writer)
    with os.fdopen(reader) as lines:
        first, *codes = [int(line) for line in lines]
    os.waitpid(child, 0)
    verdicts = {0: "", UNPATCHED << 8: "", SLOW: "slow"}
    return [verdicts.get(code, "killed") for code in codes] if first == 0 else []


UNPATCHED = 99
"""The exit code of a process whose functions could not get the changed code."""
SLOW = -1
"""The exit code of a process that took too much time."""


def _set_up(package: Path, show: bool) -> None:
    os.chdir(ROOT)
    if not show:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    paths = [str(package.parent), str(ROOT)]
    sys.path[:0] = paths
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}


def _pytest(tests: Iterable[str], *more: str) -> int:
    import pytest

    return int(pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *more, *tests]))


def _functions_of(package: Path) -> dict[str, list[FunctionType]]:
    """List the functions of the package that are loaded, by file."""
    found: dict[str, list[FunctionType]] = {}
    gc.unfreeze()  # what conftest.py has frozen is listed too
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(f"{package}{os.sep}"):
            found.setdefault(thing.__code__.co_filename, []).append(thing)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions below a piece of code, those in others after these."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _codes(part)


def _with_patch(mutant: Mutant, package: Path, live: dict[str, list[FunctionType]]) -> int:
    """Give the functions that a mutant changes its code, and run its tests."""
    path = str(package / mutant.file)
    before = compile((package / mutant.file).read_text(encoding="utf-8"), path, "exec")
    after = compile(mutant.source, path, "exec")
    old, new = list(_codes(before)), list(_codes(after))
    changed = [(one, other) for one, other in zip(old, new, strict=False) if one != other]
    patched = 0
    for function in live.get(path, ()) if len(old) == len(new) else ():
        for one, other in changed:
            if function.__code__ == one and function.__code__.co_freevars == other.co_freevars:
                function.__code__ = other
                patched += 1
    return _pytest(mutant.tests) if patched else UNPATCHED


def _in_fork(call: Callable[[], int], limit_s: float) -> int:
    """Call a function in a process of its own, which may use this much CPU time; return how it ended."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (round(limit_s), round(limit_s) + 1))
            code = call()
        except BaseException as error:
            print(repr(error))
        sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + WAITS * limit_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
            return SLOW if slow else status
        if time.monotonic() > end:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return SLOW
        time.sleep(0.005)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose table, file or name contains one of these")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("--show", action="store_true", help="show what pytest says")
    parser.add_argument("--survey", metavar="FILE", help="all mutants of one file below src/dfca; words: its functions")
    parser.add_argument("--tests", nargs="*", default=[], help="with --survey: the tests to run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of CPU time that a mutant's tests may take")
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
    counts = {"killed": 0, "killed by the limit": 0, "alive": 0, "alive with a reason": 0, "stale": 0}
    began = time.monotonic()

    def note(mutant: Mutant, verdict: str) -> None:
        counts[verdict] += 1
        if verdict in ("alive", "stale") or show:
            print(f"{verdict}: {mutant.file}: {mutant.name}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        package = prepare(Path(folder))
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            some = [mutant for mutant in mutants if mutant.tests == tests and mutant.source]
            verdicts = noticed(some, package, limit_s, show) if some else []
            if some and not verdicts:
                print(f"error: these tests fail without any change: {' '.join(tests)}")
                return 2
            again = f"{verdicts.count('')} of them are tried again" if "" in verdicts else "all are killed"
            print(f"{len(some)} mutants, {' '.join(tests)}: {again}" if some else "", flush=True)
            for mutant, verdict in zip(some, verdicts, strict=True):
                if not verdict and survives(mutant, package, limit_s, show):
                    note(mutant, "alive with a reason" if mutant.alive else "alive")
                elif mutant.alive:
                    note(mutant, "stale")
                else:
                    note(mutant, "killed by the limit" if verdict == "slow" else "killed")
        for mutant in mutants:
            if not mutant.source:
                note(mutant, "stale")
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + f" in {time.monotonic() - began:.0f} s")
    return int(counts["alive"] + counts["stale"] > 0)


if __name__ == "__main__":
    sys.exit(main())
