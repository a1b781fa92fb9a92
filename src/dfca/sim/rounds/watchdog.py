"""A watchdog for calls that never return, and for a launcher that is gone.

Python handles a signal between two of its own steps. A rank that hangs inside gloo therefore does not see the SIGTERM
by which torchrun ends the ranks that outlive another one, and is killed 30 s later without a message. A thread sees it
instead, through the file that the C half of the signal handler writes to, and ends the process in time to say why.

A torchrun that is killed sends no signal. The thread notices that this process has another parent, and sends it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

GRACE_S = 20.0  # seconds from SIGTERM on in which a call may still return; torchrun kills after 30

PATIENCE_S = 5.0  # seconds that one call must have taken to count as one that never returns

LOOK_S = 1.0  # between two looks at whether the launcher is alive


class Watchdog:
    """Ends this process with a sentence if it was asked to end and a marked call does not return, while entered."""

    def __init__(self, sentence: Callable[[], str], status: int) -> None:
        self._sentence, self._status = sentence, status
        self._called_at: float | None = None
        self._asked_at: float | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._asked_at, self._over = None, False
        self._launcher = os.getppid()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        # Only the main thread may handle signals.
        self._handles_signals = threading.current_thread() is threading.main_thread()
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False) if self._handles_signals else -1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        if self._handles_signals:
            signal.set_wakeup_fd(self._before)
        self._over = True
        os.write(self._write_end, b"\0")
        self._thread.join()
        self._thread = None
        os.close(self._read_end)
        os.close(self._write_end)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Mark a call that may never return."""
        self._called_at = time.monotonic()
        try:
            yield
        finally:
            self._called_at = None

    def expire(self) -> None:
        """Start the grace period now, as a SIGTERM does."""
        if self._thread is not None and self._asked_at is None:
            self._asked_at = time.monotonic()
            os.write(self._write_end, b"\0")

    def _watch(self) -> None:
        while not self._over:
            select.select([self._read_end], [], [], LOOK_S if self._asked_at is None else PATIENCE_S / 10)
            if signal.SIGTERM in self._read() and self._asked_at is None:
                self._asked_at = time.monotonic()
            if os.getppid() != self._launcher and self._asked_at is None:
                self._asked_at = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)
            now, called_at = time.monotonic(), self._called_at
            if self._asked_at is None or called_at is None:
                continue
            if now - self._asked_at >= GRACE_S and now - called_at >= PATIENCE_S:
                self._leave()

    def _read(self) -> bytes:
        try:
            return os.read(self._read_end, 512)
        except BlockingIOError:
            return b""

    def _leave(self) -> NoReturn:
        sys.stderr.write(f"error: {self._sentence()}\n")
        sys.stderr.flush()
        os._exit(self._status)  # the main thread hangs: it cannot clean up
