"""Cells in several processes: the parent hands out jobs and writes everything down, the workers compute.

    parent -> worker    setup, job, "ack", "stop", "end"
    worker -> parent    what a `Desk` is told, then "done"; or "stopped", "broken"

Messages are JSON on a socket pair, so floats keep every bit. A worker writes only the checkpoints and models of its own
cell, and asks for an "ack" before a checkpoint: then the parent has written all metrics up to it. A worker whose parent
is gone, also by kill -9, sees the end of the socket and exits at once. A worker that dies fails its cell; the rest of
its job is handed out again.
"""

from __future__ import annotations

import json
import os
import queue
import resource
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

from dfca.errors import RunError
from dfca.experiment.config import Config
from dfca.experiment.sweep import Cell, Point
from dfca.runs.signals import Interrupted, StopSignal
from dfca.runs.store import RunFolder
from dfca.runs.trials import Desk, Job, run_job, sentence
from dfca.sim.bank import available_bytes

POLL_S = 0.2
PATIENCE_S = 5.0


class Pool:
    """Worker processes, at most `workers`; a careful pool starts the next one only where memory allows it."""

    def __init__(
        self,
        folder: RunFolder,
        desk: Desk,
        stop: StopSignal,
        workers: int,
        threads: int,
        save_models: bool,
        careful: bool,
    ) -> None:
        self._folder, self._desk, self._stop = folder, desk, stop
        self._workers, self._threads, self._save_models, self._careful = workers, threads, save_models, careful
        self._jobs: deque[Job] = deque()
        self._hands: list[_Hand] = []
        self._stopped: list[str] = []

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs.

        Raises:
            RunError: if the disk cannot be written.
            Interrupted: if the stop signal was requested; every cell under way is stored.
        """
        self._jobs = deque(jobs)
        told = False
        try:
            with self._stop.deferred():
                while self._hands or self._jobs:
                    if self._stop.requested and not told:
                        told = True
                        self._jobs.clear()
                        for hand in self._hands:
                            hand.send("stop")
                    elif self._jobs and len(self._hands) < self._workers:
                        self._hire()
                    heard = wait([hand.connection for hand in self._hands], timeout=POLL_S)
                    for hand in [hand for hand in self._hands if hand.connection in heard]:
                        self._hear(hand)
        finally:
            for hand in self._hands:
                hand.close()
        if told:
            more = f" and {len(self._stopped) - 1} more under way" if len(self._stopped) > 1 else ""
            raise Interrupted((self._stopped[0] if self._stopped else "between two cells") + more)

    def _hire(self) -> None:
        if self._careful and self._hands:
            sizes = [hand.peak_bytes for hand in self._hands]
            available = available_bytes()
            if 0 in sizes or (available is not None and available < 2 * max(sizes)):
                return
        hand = _Hand(self._threads)
        hand.send("setup", str(self._folder.path.resolve()), self._threads, self._save_models, sys.path)
        self._hands.append(hand)
        self._assign(hand)

    def _assign(self, hand: _Hand) -> None:
        if self._jobs:
            hand.take(self._jobs.popleft())
        else:
            hand.send("end")
            self._dismiss(hand)

    def _dismiss(self, hand: _Hand) -> None:
        self._hands.remove(hand)
        hand.close()

    def _hear(self, hand: _Hand) -> None:
        """Do what one message of a worker asks for."""
        try:
            kind, *content = json.loads(hand.connection.recv_bytes())
        except (EOFError, OSError):
            self._bury(hand)
            return
        desk, job = self._desk, hand.job
        assert job is not None
        match kind:
            case "note":
                desk.note(content[0], job if content[1] else None)
            case "topology":
                desk.store_topology(job, content[0])
            case "begin":
                desk.begin(hand.cell(content[0]), content[1], content[2])
            case "round":
                hand.peak_bytes = content[4]
                desk.finish_round(hand.cell(content[0]), content[1], content[2], content[3])
            case "settle":
                hand.send("ack")
            case "finish":
                desk.finish(hand.cell(content[0]), content[1])
                hand.left.remove(content[0])
            case "fail":
                desk.fail(hand.cell(content[0]), CellError(content[1]))
                hand.left.remove(content[0])
            case "done":
                self._assign(hand)
            case "stopped":
                self._stopped.append(content[0])
                self._dismiss(hand)
            case "broken":
                raise RunError(content[0])

    def _bury(self, hand: _Hand) -> None:
        """Fail the cell of a worker that died, and hand out the rest of its job again."""
        self._dismiss(hand)
        code = hand.process.returncode
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        if hand.job is None or not hand.left:
            return
        name, *rest = hand.left
        out_of_memory = "; out of memory? try fewer --workers" if code == -signal.SIGKILL else ""
        self._desk.fail(hand.cell(name), CellError(f"the worker process ended {how}{out_of_memory}"))
        if rest:
            self._jobs.appendleft(Job(hand.job.point, hand.job.seed, tuple(rest)))


class CellError(RunError):
    """What a worker tells of a failure, already in words."""


class _Hand:
    """A worker process as its parent sees it."""

    def __init__(self, threads: int) -> None:
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "dfca.runs.worker", str(theirs.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        # A group of its own: Ctrl-C on the terminal reaches the parent alone, which asks the workers to stop.
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
        theirs.close()
        self.job: Job | None = None
        self.left: list[str] = []
        self.peak_bytes = 0

    def take(self, job: Job) -> None:
        self.job, self.left = job, list(job.algorithms)
        self.send("job", job.point.config.values(), job.point.at, job.seed, job.algorithms)

    def cell(self, algorithm: str) -> Cell:
        assert self.job is not None
        return Cell(algorithm, self.job.seed, self.job.point)

    def send(self, *message: Any) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            return  # it died: the next thing heard of it is the end of its socket

    def close(self) -> None:
        """Close the socket, which ends the worker, and wait for it."""
        self.connection.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Wire:
    """The desk of a worker: everything goes to the parent."""

    def __init__(self, connection: Connection, stop: StopSignal) -> None:
        self._connection, self._stop = connection, stop
        self._acks = threading.Semaphore(0)
        self.inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def listen(self) -> None:
        """Receive until the parent is gone, then end this process wherever it is."""
        while True:
            try:
                message = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            match message[0]:
                case "ack":
                    self._acks.release()
                case "stop":
                    self._stop.requested = True
                case _:
                    self.inbox.put(message)

    def send(self, *message: Any) -> None:
        """Send a message; a parent that is gone is noticed by `listen`."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            os._exit(0)

    def note(self, text: str, job: Job | None = None) -> None:
        """See Desk."""
        self.send("note", text, job is not None)

    def store_topology(self, job: Job, graph: dict[str, Any]) -> None:
        """See Desk."""
        self.send("topology", graph)

    def begin(self, cell: Cell, round: int, time_s: float = 0.0) -> None:
        """See Desk."""
        self.send("begin", cell.algorithm, round, time_s)

    def finish_round(self, cell: Cell, round: int, metrics: dict[str, Any] | None, time_s: float = 0.0) -> None:
        """See Desk."""
        self.send("round", cell.algorithm, round, metrics, time_s, _peak_bytes())

    def settle(self) -> None:
        """Wait until the parent has written everything sent so far."""
        self.send("settle")
        self._acks.acquire()

    def finish(self, cell: Cell, row: dict[str, Any]) -> None:
        """See Desk."""
        self.send("finish", cell.algorithm, row)

    def fail(self, cell: Cell, error: Exception) -> None:
        """See Desk."""
        self.send("fail", cell.algorithm, sentence(error))


def work(connection: Connection) -> None:
    """Be a worker: take jobs from the parent until it says "end" or is gone."""
    import torch

    stop = StopSignal()
    wire = Wire(connection, stop)
    threading.Thread(target=wire.listen, daemon=True).start()
    _, path, threads, save_models, sys.path[:] = wire.inbox.get()
    torch.set_num_threads(threads)
    folder = RunFolder(Path(path))
    while True:
        kind, *content = wire.inbox.get()
        if kind == "end":
            return
        values, at, seed, names = content
        try:
            run_job(Job(Point(Config.of(values), at), seed, tuple(names)), wire, folder, stop, save_models)
        except Interrupted as interrupted:
            wire.send("stopped", str(interrupted))
            return
        except RunError as error:
            wire.send("broken", str(error))
            return
        wire.send("done")


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
