"""One node: drives a peer with a transport, a worker and a store, in an asyncio event loop.

The node carries out what the peer wants, in a safe order: a save is on the disk before a message leaves (`saving`).
Work runs in a thread, one job at a time, beside the event loop. Every input of the peer passes through `_input`, where
it can be recorded (`record`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, Protocol

from torch import Tensor

from dfca.node.disk.record import Recorder
from dfca.node.disk.saving import SaveThenSend
from dfca.node.disk.store import DiskStore
from dfca.node.surroundings import start_threads
from dfca.node.transport import Transport
from dfca.node.work.guard import ModelGuard
from dfca.node.work.pace import Idling, Pace
from dfca.peer.machine import Machine
from dfca.peer.peer import Peer
from dfca.peer.records.work import LONG, Draw, Job, Note, Rest, Train
from dfca.peer.state import State

MOST_EARLY = 2000  # inputs that are kept for a peer that has not begun


class JobRunner(Protocol):
    """Computes jobs: `node.work.worker.Worker`, or a double of it."""

    def run(self, job: Job, bank: Tensor | None) -> Any:
        """Do a job; returns its result."""

    def slices(self, job: Job) -> Iterator[Any]:
        """Do a job piece by piece; the last one yields its result."""


class Node:
    """One participant that runs.

    duration: how long a long job takes in virtual time; work is then done inline when that time has passed. Without it,
    work is done in a thread of the node's own. note: called with every note of the peer. idling: when it rests.
    threads: starts threads, by name and count.
    """

    def __init__(
        self,
        machine: Machine,
        work: JobRunner,
        transport: Transport,
        store: DiskStore | None = None,
        duration: Callable[[Job], float] | None = None,
        note: Callable[[Note], None] = lambda note: None,
        pace: Pace | None = None,
        idling: Idling | None = None,
        threads: Callable[[str, int], Executor] = start_threads,
    ) -> None:
        self.machine, self._work, self._transport, self._store = machine, work, transport, store
        self._duration, self._note, self.pace, self.idling = duration, note, pace or Pace(), idling or Idling(0.0)
        self._executor: Executor | None = None if duration else threads("work", 1)
        self._disk: Executor | None = None if duration or store is None else threads("disk", 1)
        self.saving = SaveThenSend(store, transport.send, self._disk, self.pace.retry_s)
        self.record: Recorder | None = None
        self.guard: ModelGuard | None = None  # scores models of neighbours that are watched
        self.linked: set[int] = set()  # the neighbours in reach, also while the peer has not begun
        self._met: set[int] = set()  # neighbours that have been in reach
        self._timer: asyncio.TimerHandle | None = None
        self._asked_for_quiet = False
        self._round_began = -math.inf
        self._stopped = self._ending = False
        self._opened = False
        self._early: list[tuple[str, tuple[Any, ...]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: asyncio.Future[None] | None = None
        self.failure: Exception | None = None  # what made the node unable to go on, also after its last round

    async def run(self, late: bool = False) -> None:
        """Run until all rounds are done, or until `stop`. Raises what a job or an input raised (`failure`).

        After the last round the node keeps serving its neighbours until `stop`.
        """
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        now = loop.time()
        if self.record is not None:
            self.record.input(now, "begin", late)
        self.machine.begin(now, late)
        self._carry_out()
        early, self._early = self._early, []
        for kind, values in early:
            self._input(kind, *values)
        if not self._opened:
            self.open()
        await self._done

    def open(self) -> None:
        """Open the transport before `run`; inputs are kept until the peer has begun."""
        self._opened = True
        self._transport.open(self)

    async def finish(self, timeout_s: float) -> bool:
        """Save what the peer knows now, wait for the disk at most `timeout_s`, then stop.

        A round in progress is abandoned. Returns whether everything is on the disk.
        """
        if isinstance(self.machine, Peer) and not self._stopped and not self._ending:
            self._ending = True  # further inputs would ask for another save
            self.saving.put(self.machine.save(), ())
        saved = await self.saving.flush(timeout_s)
        self.stop()
        return saved

    def stop(self) -> None:
        """End with the last save."""
        if self._stopped:
            return
        self._stopped = True
        self._transport.close()
        self.saving.close()
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for executor in (self._executor, self._disk):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def rewire(self, neighbours: tuple[int, ...]) -> None:
        """Tell the peer that the graph around it changed."""
        if isinstance(self.machine, Peer):
            self._input("rewire", neighbours)

    def limit_peers(self, most: int) -> None:
        """Tell the peer how many devices the roster has."""
        if isinstance(self.machine, Peer):
            self._input("limit_peers", most)

    # What the transport calls (`TransportInputs`).

    def connected(self, neighbour: int) -> None:
        self.linked.add(neighbour)
        if neighbour not in self._met:
            self._met.add(neighbour)
            self.idling.wake()
        self.saving.forget(neighbour)
        self._input("connected", neighbour)

    def disconnected(self, neighbour: int) -> None:
        self.linked.discard(neighbour)
        self.saving.forget(neighbour)
        self._input("disconnected", neighbour)

    def received(self, sender: int, message: Any) -> None:
        self.idling.compare(sender, message, self.machine.bank)
        if self.guard is None or not self.guard.doubts(sender, message):
            self._input("receive", sender, message)
        elif self._executor is None:
            self._input("receive", sender, self.guard.admit(sender, message))
        else:
            self._start(self._check(self.guard, sender, message))

    async def _check(self, guard: ModelGuard, sender: int, message: Any) -> None:
        """Score a model of a neighbour that is watched before the peer gets it."""
        loop = asyncio.get_running_loop()
        try:
            admitted = await loop.run_in_executor(self._executor, guard.admit, sender, message)
        except Exception as error:
            self._fail(error)
            return
        if sender in self.linked:
            self._input("receive", sender, admitted)

    def _keep_early(self, kind: str, values: tuple[Any, ...]) -> None:
        """Keep an input for a peer that has not begun; if there are too many, open all links anew."""
        self._early.append((kind, values))
        if len(self._early) > MOST_EARLY:
            self._early = [early for early in self._early if early[0] == "rewire"][-1:]
            self._transport.close()
            self._transport.open(self)

    # What the machine wants.

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _input(self, kind: str, *values: Any, now: float | None = None) -> None:
        """Hand the machine an input and carry out what it then wants."""
        if self._stopped or self._ending:  # a successor may already run
            return
        if self._done is None:
            self._keep_early(kind, values)
            return
        now = self._now() if now is None else now
        try:
            if self.record is not None:
                self.record.input(now, kind, *values)
            getattr(self.machine, kind)(*values, now)
            self._carry_out()
            if self.idling.rest_s and isinstance(self.machine, Peer) and self.machine.is_stirred:
                self.idling.wake()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End `run` with an error: the caller would drop it, and the node would wait for ever."""
        self.failure = self.failure or error
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _carry_out(self) -> None:
        ready = self.machine.ready()
        is_kept = ready.save and self._store is not None
        saved = self.machine.save() if is_kept and isinstance(self.machine, Peer) else None
        if self.record is not None:
            self.record.output(ready, saved)
        self.saving.put(saved, ready.messages)
        for note in ready.notes:
            self._note(note)
        for job in ready.work:
            self._begin(job)
        self._plan_wake()
        if self.machine.state is State.DONE and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _begin(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(job, Draw):
            self._finish_inline(job)  # takes no time
        elif self._duration is None:
            beside = job is self.machine.background
            self._start(self._compute_beside(job) if beside else self._compute(job))
        elif isinstance(job, LONG):
            loop.call_later(self._duration(job), self._finish_inline, job)
        else:
            self._finish_inline(job)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _finish_inline(self, job: Job) -> None:
        if not self._stopped and (not isinstance(job, LONG) or self.machine.runs(job)):
            self._input("finished", job, self._work.run(job, self.machine.bank))

    async def _compute(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(job, Train | Rest):
                await self._pause()
            if isinstance(job, LONG) and not self.machine.runs(job):
                return  # cancelled before it began
            result = await loop.run_in_executor(self._executor, self._work.run, job, self.machine.bank)
        except Exception as error:
            self._fail(error)
            return
        self._input("finished", job, result)

    async def _compute_beside(self, job: Job) -> None:
        """Do a job beside the rounds, slice by slice: what else is to be computed comes in between."""
        loop, slices = asyncio.get_running_loop(), self._work.slices(job)
        result = None
        try:
            while self.machine.background is job:
                piece = await loop.run_in_executor(self._executor, next, slices, job)
                if piece is job:  # there is no more
                    self._input("finished", job, result)
                    return
                result = piece
        except Exception as error:
            self._fail(error)

    async def _pause(self) -> None:
        pause = self.pace.wait_s(self._round_began, self._now())
        if pause > 0:
            await asyncio.sleep(pause)
        await self.idling.rest()
        self._round_began = self._now()

    def _plan_wake(self) -> None:
        due = self.machine.next_wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is None:
            return
        if due > self._now():
            self._timer = asyncio.get_running_loop().call_at(due, self._wake)
        elif not self._asked_for_quiet:
            self._asked_for_quiet = True
            self._transport.when_quiet(self._wake)

    def _wake(self) -> None:
        self._asked_for_quiet = False
        due = self.machine.next_wake()
        if due is not None:
            self._input("wake", now=max(self._now(), due))
