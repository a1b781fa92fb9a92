"""One node: drives a peer with a transport, a worker and a store, in an asyncio event loop.

The node carries out what the peer wants, in the order that keeps it safe: what must be saved is saved before a message
leaves. Work runs in a thread, one job at a time; the event loop goes on serving messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from dfca.node.transport import Transport
from dfca.peer.machine import Machine
from dfca.peer.peer import Peer
from dfca.peer.state import Saved, State
from dfca.peer.work import Draw, Job, Note, Rest, Train, WarmUp


class Work(Protocol):
    """Computes jobs: `node.worker.Worker`, or a double of it."""

    def run(self, job: Job, bank: Tensor | None) -> Any:
        """Do a job; returns its result."""


class MemoryStore:
    """Keeps the last save, for tests; what a device has on its disk."""

    def __init__(self) -> None:
        self.saved: Saved | None = None

    def save(self, saved: Saved) -> None:
        """Keep a save; it is durable when this returns."""
        self.saved = saved


class Node:
    """One participant that runs.

    duration: how long a long job takes in virtual time; work is then done inline when that time has passed. Without it,
    work is done in a thread of the node's own. note: called with every note of the peer.
    """

    def __init__(
        self,
        machine: Machine,
        work: Work,
        transport: Transport,
        store: MemoryStore | None = None,
        duration: Callable[[Job], float] | None = None,
        note: Callable[[Note], None] = lambda note: None,
    ) -> None:
        self.machine, self._work, self._transport, self._store = machine, work, transport, store
        self._duration, self._note = duration, note
        self._executor: Executor | None = None if duration else ThreadPoolExecutor(1)
        self._timer: asyncio.TimerHandle | None = None
        self._asked_for_quiet = False
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: asyncio.Future[None] | None = None

    async def run(self, late: bool = False) -> None:
        """Run until all rounds are done, or until `stop`. Raises what a job raised."""
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self.machine.begin(loop.time(), late)
        self._carry_out()
        self._transport.open(self)
        await self._done

    def stop(self) -> None:
        """End, with what was saved last."""
        self._stopped = True
        self._transport.close()
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # What the transport calls.

    def connected(self, neighbour: int) -> None:
        """A neighbour is in reach."""
        self.machine.connected(neighbour, self._now())
        self._carry_out()

    def disconnected(self, neighbour: int) -> None:
        """A neighbour is out of reach."""
        self.machine.disconnected(neighbour, self._now())
        self._carry_out()

    def received(self, sender: int, message: Any) -> None:
        """A message has come."""
        self.machine.receive(sender, message, self._now())
        self._carry_out()

    # What the machine wants.

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _carry_out(self) -> None:
        ready = self.machine.ready()
        if ready.save and self._store is not None and isinstance(self.machine, Peer):
            self._store.save(self.machine.save())
        for neighbour, message in ready.messages:
            self._transport.send(neighbour, message)
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
            self._finish_inline(job)  # takes no time, and nobody need see a peer that has not begun
        elif self._duration is None:
            task = loop.create_task(self._compute(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(job, Train | Rest | WarmUp):
            loop.call_later(self._duration(job), self._finish_inline, job)
        else:
            self._finish_inline(job)

    def _finish_inline(self, job: Job) -> None:
        if not isinstance(job, Train | Rest | WarmUp) or self.machine.job is job:
            self._finish(job, self._work.run(job, self.machine.bank))

    async def _compute(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._executor, self._work.run, job, self.machine.bank)
        except Exception as error:
            if self._done is not None and not self._done.done():
                self._done.set_exception(error)
            return
        self._finish(job, result)

    def _finish(self, job: Job, result: Any) -> None:
        if self._stopped:  # a successor may speak for this participant
            return
        self.machine.finished(job, result, self._now())
        self._carry_out()

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
            self.machine.wake(max(self._now(), due))
            self._carry_out()
