"""What a node takes from its machine: clock, disk, threads, random numbers, a door. Simulations replace them."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dfca.node.disk.disk import SYSTEM_DISK, Disk
from dfca.node.trust.handshake import Listen, TlsDoor


class OneThread(Executor):
    """Runs calls one after the other in a daemon thread: unlike a `ThreadPoolExecutor`, it does not delay the exit."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after the current call."""
        if cancel_futures:
            while not self._calls.empty():
                entry = self._calls.get()
                if entry is not None:
                    entry[0].cancel()
        self._calls.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del entry, future, call  # a result is large, and the next call may come much later


def start_threads(name: str, count: int = 1) -> Executor:
    """Start threads; a single one does not keep the process alive."""
    return OneThread(name) if count == 1 else ThreadPoolExecutor(count, name)


@dataclass(frozen=True)
class Surroundings:
    """What a node takes from its machine."""

    steady: Callable[[], float] = time.monotonic  # seconds that never go back; waiting is the event loop's part
    wall: Callable[[], float] = time.time  # seconds since 1970
    disk: Disk = SYSTEM_DISK
    threads: Callable[[str, int], Executor] = start_threads
    random_bits: Callable[[int], int] = secrets.randbits
    listen: Listen = TlsDoor


SYSTEM = Surroundings()
