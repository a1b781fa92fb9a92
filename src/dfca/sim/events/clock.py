"""The virtual clock: events wait in a heap, by time, then by kind, then in the order in which they were made; and how a
client's compute is shared by its rounds and what it observes beside them."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any

from dfca.peer.records.work import Job

CHANGE, NOTICE, FINISH, DEPART, DELIVER = range(5)
"""The kinds of events, in the order in which those of one instant are handled: changes of the world, what the failure
detector notices, ends of jobs, departures from uplinks, deliveries."""

Event = tuple[Any, ...]
"""(time, kind, number, ...): what follows belongs to the kind. Plain tuples, for there are many."""


class Clock:
    """The time, and the events to come. changes: how many of them are changes of the world."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[Event] = []
        self.made = 0
        self.changes = 0

    def push(self, time: float, kind: int, *payload: Any) -> None:
        """Plan an event."""
        self.made = made = self.made + 1
        if kind == CHANGE:
            self.changes += 1
        heappush(self.queue, (time, kind, made, *payload))

    def pop(self) -> Event:
        """Take the next event out."""
        event = heappop(self.queue)
        if event[1] == CHANGE:
            self.changes -= 1
        return event

    @property
    def live(self) -> int:
        """Count the events to come that are no changes of the world."""
        return len(self.queue) - self.changes


class Processor:
    """The compute of one client while it observes: a job alone has all of it.

    Of two at once, the one in the background has the share `background`, and the other the rest.
    """

    def __init__(self, background: float, now: float) -> None:
        self.background, self.now = background, now
        self.rounds: tuple[Job, float] | None = None  # the job of its rounds, and how many seconds of it are left
        self.beside: tuple[Job, float] | None = None  # the same of what it observes
        self.planned: list[tuple[Job, float]] = []  # when they end, as long as no other begins or ends

    def advance(self, now: float) -> None:
        """Work until a time."""
        passed, self.now = now - self.now, now
        mine, other = self._rates()
        self.rounds = self.rounds and (self.rounds[0], max(0.0, self.rounds[1] - passed * mine))
        self.beside = self.beside and (self.beside[0], max(0.0, self.beside[1] - passed * other))

    def drop(self, job: Job | None, background: Job | None) -> None:
        """Forget what was broken off: what the client's peer runs now is given."""
        self.rounds = self.rounds if self.rounds is not None and self.rounds[0] is job else None
        self.beside = self.beside if self.beside is not None and self.beside[0] is background else None

    def ends(self) -> list[tuple[Job, float]]:
        """Return when the jobs end, as long as no other begins or ends."""
        jobs = zip((self.rounds, self.beside), self._rates(), strict=True)
        return [(job[0], self.now + job[1] / rate) for job, rate in jobs if job is not None]

    def state(self, client: int) -> tuple[int, float, float | None, float | None]:
        """Return what a checkpoint needs."""
        rounds_s, beside_s = (None if job is None else job[1] for job in (self.rounds, self.beside))
        return client, self.now, rounds_s, beside_s

    def restore(self, job: Job | None, rounds_s: float | None, background: Job | None, beside_s: float | None) -> None:
        """Continue from a state, with the jobs that the client's peer runs."""
        self.rounds = None if job is None or rounds_s is None else (job, rounds_s)
        self.beside = None if background is None or beside_s is None else (background, beside_s)
        self.planned = self.ends()

    def _rates(self) -> tuple[float, float]:
        if self.rounds is None or self.beside is None:
            return 1.0, 1.0
        return 1.0 - self.background, self.background or math.inf
