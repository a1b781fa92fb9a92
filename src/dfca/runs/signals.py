"""Stopping: SIGINT and SIGTERM count at moments when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dfca.base.errors import RankLost

GRACE_S = 1.0  # how long a stop waits for the end of a round, which is stored then
ALARM = getattr(signal, "SIGALRM", None)  # None on Windows, where a stop waits for the end of the round


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; the message says where."""


class StopSignal:
    """Turn SIGINT and SIGTERM into a KeyboardInterrupt at a moment when nothing is half done.

    Inside `deferred` the first signal only sets `requested`; a second one does not wait. Inside `abandonable`, which is
    for work that can be done again, a request waits for GRACE_S at most.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self.on_request: Callable[[], None] | None = None
        self._busy = self._abandonable = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Only the main thread may handle signals; elsewhere they stay what they are.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
            self.await_alarm()
        return self

    def await_alarm(self) -> None:
        """Let `request` end what is abandonable; call it in the main thread."""
        if ALARM is not None:
            self._before[ALARM] = signal.signal(ALARM, self._abandon)

    def request(self) -> None:
        """Ask for a stop, from any thread."""
        self.requested = True
        if ALARM in self._before:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def __exit__(self, _: object, error: object, __: object) -> None:
        if ALARM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
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
        except RankLost:
            raise  # still busy: its last words come before the SIGTERM of torchrun
        except BaseException:
            self._busy = False
            raise
        self._busy = False

    @contextmanager
    def abandonable(self, wanted: bool = True) -> Iterator[None]:
        """Let a stop end the block in its middle, once it has waited: with Interrupted."""
        self._abandonable = wanted
        try:
            yield
        finally:
            self._abandonable = False

    def _abandon(self, *_: object) -> None:
        if self._abandonable:
            self._abandonable = False
            raise Interrupted

    def _handle(self, *_: object) -> None:
        if self.requested or not self._busy:
            raise KeyboardInterrupt
        self.request()
        if self.on_request is not None:
            # A signal in the middle of a print cannot print.
            with suppress(RuntimeError):
                self.on_request()
