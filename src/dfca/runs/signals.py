"""Stopping: SIGINT and SIGTERM count at moments when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dfca.base.errors import RankLost


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; the message says where."""


class StopSignal:
    """Turn SIGINT and SIGTERM into a KeyboardInterrupt at a moment when nothing is half done.

    Inside `deferred` the first signal only sets `requested`; a second one does not wait.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self.on_request: Callable[[], None] | None = None
        self._busy = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Only the main thread may handle signals; elsewhere they stay what they are.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        for number, handler in self._before.items():
            # torchrun terminates the ranks that outlive another: what they have to say comes first
            last_words = isinstance(error, RankLost) and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if last_words else handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Finish the block before a first signal counts."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _handle(self, *_: object) -> None:
        if self.requested or not self._busy:
            raise KeyboardInterrupt
        self.requested = True
        if self.on_request is not None:
            # A signal in the middle of a print cannot print.
            with suppress(RuntimeError):
                self.on_request()
