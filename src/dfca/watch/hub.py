"""Poll a source while pages are open, and send every change to all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from dfca.watch.run_source import Source

FASTEST_S, SLOWEST_S = 0.5, 1.5  # seconds between two polls; the slowest keeps the delay under two seconds
SHARE = 0.01  # of a core, at most, for polling (up to SLOWEST_S)
MOST_KEPT = 50
QUIET_S = 10.0  # without a change for this long, a sign of life is sent; it also detects pages that are gone


class Hub:
    """One thread polls; any number wait for changes."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._changes: list[dict[str, Any]] = []
        self._first = 0  # the number of the oldest change that is kept
        self._watchers = 0
        self._thread: threading.Thread | None = None

    def follow(self) -> Iterator[dict[str, Any] | None]:
        """Yield everything once, then every change; None as a sign of life."""
        with self._lock:
            self._watchers += 1
            self._look()
            at, whole = self._first + len(self._changes), self.source.whole()
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_on, daemon=True)
                self._thread.start()
        try:
            yield whole | {"all": True}
            while True:
                with self._lock:
                    if at == self._first + len(self._changes):
                        self._news.wait(QUIET_S)
                    missed = at < self._first
                    news = [self.source.whole() | {"all": True}] if missed else self._changes[at - self._first :]
                    at = self._first + len(self._changes)
                yield from news
                if not news:
                    yield None
        finally:
            with self._lock:
                self._watchers -= 1

    def frames(self, trial: str, after: int) -> dict[str, Any] | None:
        with self._lock:
            return self.source.frames(trial, after)

    def graph(self, trial: str) -> dict[str, Any] | None:
        with self._lock:
            return self.source.graph(trial)

    def publish(self, change: dict[str, Any]) -> None:
        """Hand a change that is not the source's to all who watch."""
        with self._lock:
            self._add(change)

    def _add(self, change: dict[str, Any]) -> None:
        self._changes.append(change)
        if len(self._changes) > MOST_KEPT:  # who is slower gets everything again
            self._first += len(self._changes) - MOST_KEPT
            del self._changes[:-MOST_KEPT]
        self._news.notify_all()

    def _look(self) -> None:
        change = self.source.poll()
        if change:
            self._add(change)

    def _look_on(self) -> None:
        """Poll until no page is open."""
        while True:
            began = time.thread_time()
            with self._lock:
                if not self._watchers:
                    self._thread = None
                    return
                self._look()
            cost = time.thread_time() - began
            time.sleep(min(max(FASTEST_S, cost / SHARE), SLOWEST_S))
