"""Save before send: messages wait until what they rest on is on the disk.

A save runs in a thread, so that a slow disk does not stop the event loop. Saves that are asked for meanwhile are one:
the newest state. Where the disk refuses, the node goes on, says so in `problem`, tries again every `retry_s` seconds,
and sends nothing that rests on what could not be saved. Everything behind it waits too, because links keep the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

from dfca.node.disk.store import CannotSave
from dfca.peer.records.messages import Update
from dfca.peer.state import Saved

RETRY_S = 5.0
KEPT_UPDATES = 2
"""Updates of one cluster that wait for one neighbour: under `batch` it may be a round behind."""
MOST_HELD = 4096
"""Messages that wait for the disk; further ones are lost, and the neighbours' own deadlines help them."""


class Store(Protocol):
    """Keeps saves: `node.disk.store.DiskStore`, or `MemoryStore`."""

    def save(self, saved: Saved) -> None:
        """Keep a save; it is durable when this returns. Raises CannotSave."""


class SaveThenSend:
    """What is to be saved and sent. executor: where saves run; None: in the call itself, for virtual time.

    problem: why the last save failed, None where it did not. lost: messages that could not wait any longer.
    """

    def __init__(
        self,
        store: Store | None,
        send: Callable[[int, Any], None],
        executor: Executor | None,
        retry_s: float = RETRY_S,
    ) -> None:
        self.store, self._send, self._executor, self._retry_s = store, send, executor, retry_s
        self._held: deque[tuple[int, int, Any]] = deque()
        self._newest: Saved | None = None
        self._asked = self._done = 0
        self._task: asyncio.Task[None] | None = None
        self.problem: str | None = None
        self.lost = 0

    def put(self, saved: Saved | None, messages: Sequence[tuple[int, Any]]) -> None:
        """Save, where there is something to save, then send; in this order."""
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
        """Drop what waits for a neighbour: its link went down, and what belongs to the old epoch is lost."""
        self._held = deque(each for each in self._held if each[1] != neighbour)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything is saved and sent, at most for a time; return whether it is."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=timeout_s)
        return self._done == self._asked

    def close(self) -> None:
        """Give up what waits."""
        if self._task is not None:
            self._task.cancel()
        self._held.clear()

    def _hold(self, neighbour: int, message: Any) -> None:
        if isinstance(message, Update):  # the newest of a cluster are enough
            cluster = message.message.cluster
            same = [
                each
                for each in self._held
                if each[1] == neighbour and isinstance(each[2], Update) and each[2].message.cluster == cluster
            ]
            if len(same) >= KEPT_UPDATES:
                self._held = deque(each for each in self._held if each is not same[0])
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
        """Send what waited for a save that is done."""
        self.problem, self._done = None, ticket
        while self._held and self._held[0][0] <= ticket:
            _, neighbour, message = self._held.popleft()
            self._send(neighbour, message)
