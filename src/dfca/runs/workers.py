"""Trials in several processes: the parent hands out groups and owns the run folder, the workers compute.

    parent -> worker    "setup", "group", "stop", "end"
    worker -> parent    the calls of a `PipeSink`, then "done"; or "stopped", "broken"

Messages are JSON on a socket pair, so floats keep every bit. A worker writes the files of its own trial: its metrics,
checkpoints and models. A worker whose parent is gone, also by kill -9, sees the end of the socket and exits at once. A
worker that dies fails its trial; the rest of its group is handed out again.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from dfca.base.errors import RunError
from dfca.base.memory import available_bytes, keep_freed_memory
from dfca.experiment.config import Config
from dfca.experiment.sweep import Point, TrialGroup
from dfca.runs.signals import Interrupted, StopSignal
from dfca.runs.sink import PipeSink, deliver
from dfca.runs.store.folder import RunFolder
from dfca.runs.trials import RunContext, run_group

POLL_S = 0.2
PATIENCE_S = 5.0


class Pool:
    """Worker processes, at most `workers`; a careful pool starts the next one only where memory allows it."""

    def __init__(self, context: RunContext, workers: int, threads: int, careful: bool) -> None:
        assert context.folder is not None
        self._sink, self._stop = context.sink, context.stop
        self._setup = ("setup", str(context.folder.path.resolve()), threads, context.save_models, sys.path)
        self._workers, self._threads, self._careful = workers, threads, careful
        self._groups: deque[TrialGroup] = deque()
        self._hired: list[_Worker] = []
        self._stopped: list[str] = []

    def run(self, groups: Sequence[TrialGroup]) -> None:
        """Run all groups.

        Raises RunError if the disk cannot be written; Interrupted if the stop signal was requested; every trial under
        way is stored.
        """
        self._groups = deque(groups)
        stopping = False
        try:
            with self._stop.deferred():
                while self._hired or self._groups:
                    if self._stop.requested and not stopping:
                        stopping = True
                        self._groups.clear()
                        for worker in self._hired:
                            worker.send("stop")
                    elif self._groups and len(self._hired) < self._workers:
                        self._hire()
                    ready = wait([worker.connection for worker in self._hired], timeout=POLL_S)
                    for worker in [worker for worker in self._hired if worker.connection in ready]:
                        self._receive(worker)
        finally:
            for worker in self._hired:
                worker.close()
        if stopping:
            more = f" and {len(self._stopped) - 1} more under way" if len(self._stopped) > 1 else ""
            raise Interrupted((self._stopped[0] if self._stopped else "between two trials") + more)

    def _hire(self) -> None:
        if self._careful and self._hired:
            sizes = [worker.peak_bytes for worker in self._hired]
            available = available_bytes()
            if 0 in sizes or (available is not None and available < 2 * max(sizes)):
                return
        worker = _Worker(self._threads)
        worker.send(*self._setup)
        self._hired.append(worker)
        self._assign(worker)

    def _assign(self, worker: _Worker) -> None:
        if self._groups:
            worker.take(self._groups.popleft())
        else:
            worker.send("end")
            self._dismiss(worker)

    def _dismiss(self, worker: _Worker) -> None:
        self._hired.remove(worker)
        worker.close()

    def _receive(self, worker: _Worker) -> None:
        """Do what one message of a worker asks for."""
        try:
            kind, *content = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._replace(worker)
            return
        assert worker.group is not None
        match kind:
            case "memory":
                worker.peak_bytes = content[0]
            case "done":
                self._assign(worker)
            case "stopped":
                self._stopped.append(content[0])
                self._dismiss(worker)
            case "broken":
                raise RunError(content[0])
            case _:
                deliver((kind, *content), worker.group, self._sink)
                if kind in ("finish_trial", "fail_trial"):
                    worker.left.remove(content[0])

    def _replace(self, worker: _Worker) -> None:
        """Fail the trial of a worker that died, and hand out the rest of its group again."""
        self._dismiss(worker)
        code, group = worker.process.returncode, worker.group
        if group is None or not worker.left:
            return
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        out_of_memory = "; out of memory? try fewer --workers" if code == -signal.SIGKILL else ""
        name, *rest = worker.left
        self._sink.fail_trial(group.trial(name), f"the worker process ended {how}{out_of_memory}")
        if rest:
            self._groups.appendleft(TrialGroup(group.point, group.seed, tuple(rest)))


class _Worker:
    """A worker process as its parent sees it."""

    def __init__(self, threads: int) -> None:
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "dfca.runs.workers", str(theirs.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        # a process group of its own: Ctrl-C on the terminal reaches the parent alone, which asks the workers to stop.
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
        theirs.close()
        self.group: TrialGroup | None = None
        self.left: list[str] = []  # the algorithms of the group that have not ended
        self.peak_bytes = 0

    def take(self, group: TrialGroup) -> None:
        self.group, self.left = group, list(group.algorithms)
        self.send("group", group.point.config.values(), group.point.at, group.seed, group.algorithms)

    def send(self, *message: Any) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            return  # it died: what is received next is the end of its socket

    def close(self) -> None:
        """Close the socket, which ends the worker, and wait for it."""
        self.connection.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Parent:
    """The parent of this process, as a worker sees it."""

    def __init__(self, connection: Connection, stop: StopSignal) -> None:
        self._connection, self._stop = connection, stop
        self.messages: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        """Receive until the parent is gone, then end this process wherever it is."""
        while True:
            try:
                message = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            if message[0] == "stop":
                self._stop.request()
            else:
                self.messages.put(message)

    def send(self, *message: Any) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            os._exit(0)


def work(connection: Connection) -> None:
    """Be a worker: take groups from the parent until it sends "end" or is gone."""
    stop = StopSignal()
    stop.await_alarm()
    parent = _Parent(connection, stop)
    _, path, threads, save_models, sys.path[:] = parent.messages.get()
    torch.set_num_threads(threads)
    keep_freed_memory()
    context = RunContext(PipeSink(parent.send), RunFolder(Path(path)), stop, save_models, tolerant=True)
    while True:
        kind, *content = parent.messages.get()
        if kind == "end":
            return
        values, at, seed, names = content
        try:
            run_group(TrialGroup(Point(Config.of(values), at), seed, tuple(names)), context)
        except Interrupted as interrupted:
            parent.send("stopped", str(interrupted))
            return
        except RunError as error:
            parent.send("broken", str(error))
            return
        parent.send("done")


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))
