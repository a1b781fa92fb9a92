"""Save before send: messages wait until the state that they depend on is on the disk.

A save runs in a thread, so that a slow disk does not stop the event loop. Requests in the meantime become one save of
the newest state. If the disk fails, the node keeps running, reports it in `problem`, retries every `retry_s` seconds,
and sends nothing that depends on the failed save. Later messages wait too, because links keep the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from dfca.node.disk.store import CannotSave, DiskStore
from dfca.peer.records.messages import Update
from dfca.peer.state import Saved

RETRY_S = 5.0
KEPT_UPDATES = 2  # waiting updates per cluster and neighbour: under `batch` a neighbour may be a round behind
MOST_HELD = 4096  # messages that wait for the disk; more are lost, and the neighbours' deadlines take over


class SaveThenSend:
    """Saves states and sends messages, in this order. executor: where saves run; None: inline, for virtual time."""

    def __init__(
        self,
        store: DiskStore | None,
        send: Callable[[int, Any], None],
        executor: Executor | None,
        retry_s: float = RETRY_S,
    ) -> None:
        self.store, self._send, self._executor, self._retry_s = store, send, executor, retry_s
        self._held: deque[tuple[int, int, Any]] = deque()  # (number of the save it waits for, neighbour, message)
        self._newest: Saved | None = None  # not being written yet
        self._asked = self._done = 0  # saves
        self._task: asyncio.Task[None] | None = None
        self.problem: str | None = None  # why the last save failed
        self.lost = 0  # messages beyond MOST_HELD

    def put(self, saved: Saved | None, messages: Sequence[tuple[int, Any]]) -> None:
        """Save, if there is something to save, then send."""
        if saved is not None and self.store is not None:
            self._asked += 1
            self._newest = saved
            if self._executor is None:
                self._save_inline()
            elif self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._save_all())
        for neighbour, message in messages:
            if self._done == self._asked:
                self._send(neighbour, message)
            else:
                self._hold(neighbour, message)

    def forget(self, neighbour: int) -> None:
        """Drop the messages that wait for a neighbour whose link went down: they belong to the old epoch."""
        self._held = deque(held for held in self._held if held[1] != neighbour)

    async def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until everything is saved and sent; return whether it is."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=timeout_s)
        return self._done == self._asked

    def close(self) -> None:
        """Drop everything that waits."""
        if self._task is not None:
            self._task.cancel()
        self._held.clear()

    def _hold(self, neighbour: int, message: Any) -> None:
        if isinstance(message, Update):  # the newest of a cluster are enough
            waiting = (held for held in self._held if held[1] == neighbour and isinstance(held[2], Update))
            same = [held for held in waiting if held[2].message.cluster == message.message.cluster]
            if len(same) >= KEPT_UPDATES:
                self._held = deque(held for held in self._held if held is not same[0])
        if len(self._held) >= MOST_HELD:
            self.lost += 1
        else:
            self._held.append((self._asked, neighbour, message))

    def _save_inline(self) -> None:
        saved, self._newest = self._newest, None
        assert saved is not None
        assert self.store is not None
        try:
            self.store.save(saved)
        except CannotSave as error:
            self.problem = str(error)
            return
        self._release(self._asked)

    async def _save_all(self) -> None:
        assert self.store is not None
        loop = asyncio.get_running_loop()
        while self._newest is not None:
            saved, ticket = self._newest, self._asked
            self._newest = None
            try:
                await loop.run_in_executor(self._executor, self.store.save, saved)
            except CannotSave as error:
                self.problem = str(error)
                self._newest = saved if self._newest is None else self._newest
                await asyncio.sleep(self._retry_s)
                continue
            self._release(ticket)

    def _release(self, ticket: int) -> None:
        self.problem, self._done = None, ticket
        while self._held and self._held[0][0] <= ticket:
            _, neighbour, message = self._held.popleft()
            self._send(neighbour, message)
