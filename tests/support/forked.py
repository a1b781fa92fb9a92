"""Processes of the command line that begin with everything loaded: real ones, to be killed, without seconds of imports.

They are forked from a server (`multiprocessing`), which imports once what a run needs. `Forked` is watched as a
`subprocess.Popen` is; what it prints is in two files.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LOADED = ["torch", "sklearn.datasets", "sklearn.metrics", "dfca.cli.run", "dfca.report.page", "dfca.runs.runner"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(LOADED)


def _run(command: Sequence[str], environment: Mapping[str, str], printed: Sequence[str]) -> None:
    """Run what `python COMMAND` would, in a process that was just forked."""
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True) for number in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environment)
    kind, what, *rest = command
    sys.argv = [what, *rest]
    if kind == "-c":
        exec(what, {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(kind, run_name="__main__")


class Forked:
    """One process. out, err: the files of what it prints."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], folder: Path, name: str) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        words = list(map(str, command))
        paths = [str(self.out), str(self.err)]
        self._process = _context.Process(target=_run, args=(words, dict(environment), paths), name=name)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for_output(self, text: str, seconds: float = 120.0) -> None:
        """Wait until it has printed something."""
        end = time.monotonic() + seconds
        while text not in (self.out.read_text() if self.out.exists() else ""):
            assert self.poll() is None, self.err.read_text()
            assert time.monotonic() < end
            time.sleep(0.01)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; returns what it has printed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.out.read_text(), self.err.read_text()
