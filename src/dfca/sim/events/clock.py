"""The virtual clock: events wait in a heap, by time, then by kind, then in the order in which they were made."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

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
