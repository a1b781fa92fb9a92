"""Whether a neighbour is alive, from the gaps between its heartbeats, and how long to wait for what it is to send.

    silence allowed = mean + 4 deviations of the gaps, within bounds; doubled after each false alarm (`FalseAlarms`)
    deadline        = mean + 4 deviations of the times that pieces of a model took, within bounds; doubled by each miss

A node that was starved of processor time (a busy machine, a suspended laptop) hears nobody. So time in which its event
loop did not run does not count as silence (`SteadyClock`).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

BACK_S = 10.0  # who is back this soon was not dead: keeping the link would have been no worse
MOST_DOUBLED = 2  # a dead neighbour is noticed within 20 s, whatever its network was like before
FORGET_S = 600.0  # after the last false alarm


class SteadyClock:
    """Time without the moments in which the event loop was late: t = now - lost.

    `tick` is called every `period_s`; lateness beyond `slack_s` is lost time.
    """

    def __init__(self, period_s: float, now: float, slack_s: float = 0.1) -> None:
        self.period_s, self.slack_s = period_s, slack_s
        self.lost_s = 0.0
        self._due = now + period_s

    def tick(self, now: float) -> None:
        """Record that the event loop runs now."""
        self.lost_s += max(0.0, now - self._due - self.slack_s)
        self._due = now + self.period_s

    def read(self, now: float) -> float:
        """Return the steady time; it never decreases, and stops when the next tick is overdue."""
        return min(now, self._due + self.slack_s) - self.lost_s


@dataclass
class Estimate:
    """A running mean and mean deviation, with the gains of RFC 6298: 1/8 and 1/4."""

    mean: float | None = None
    deviation: float = 0.0

    def add(self, value: float) -> None:
        """Take one more observation."""
        if self.mean is None:
            self.mean, self.deviation = value, value / 2
            return
        self.deviation += (abs(value - self.mean) - self.deviation) / 4
        self.mean += (value - self.mean) / 8

    def bound(self, otherwise: float) -> float:
        """Return mean + 4 deviations, a bound that the next value rarely exceeds."""
        return otherwise if self.mean is None else self.mean + 4 * self.deviation


class Detector:
    """Decides when a silent neighbour counts as dead. All times are of a `SteadyClock`."""

    def __init__(self, now: float, least_s: float, most_s: float) -> None:
        self.least_s, self.most_s = least_s, most_s
        self.doubled = 0  # false alarms about this neighbour
        self.heard = now
        self._gaps = Estimate()
        self._beat: float | None = None

    def hear(self, now: float) -> None:
        """Note any sign of life."""
        self.heard = max(self.heard, now)

    def beat(self, now: float) -> None:
        """Note a heartbeat."""
        self.hear(now)
        if self._beat is not None:
            self._gaps.add(now - self._beat)
        self._beat = now

    @property
    def allowed_s(self) -> float:
        """How long the neighbour may be silent."""
        return min(self.most_s, max(self.least_s, self._gaps.bound(self.most_s))) * 2.0**self.doubled

    def is_dead(self, now: float) -> bool:
        """Return whether it has been silent for too long."""
        return now - self.heard > self.allowed_s


class FalseAlarms:
    """Counts how often members that counted as dead were back at once: a network that stalls for seconds now and then.

    Each doubles the silence that is allowed, as TCP doubles its time-out after each that was too short (RFC 6298, 5.5).
    Each end learns from its own: what stalls one direction need not stall the other, and where both stall, a link ends
    once more.
    """

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}  # when a link ended in silence, by member
        self._counted: dict[str, tuple[int, float]] = {}  # how many, and when the last one was

    def end(self, member: str, now: float) -> None:
        """Note that a link ended in silence."""
        self._ended[member] = now

    def begin(self, member: str, now: float) -> int:
        """Note that a member has a link again; returns the false alarms about it that count."""
        many, last = self._counted.get(member, (0, now))
        if now - last > FORGET_S:
            many = 0
        if now - self._ended.pop(member, -math.inf) <= BACK_S:
            many = min(MOST_DOUBLED, many + 1)
            last = now
        self._counted[member] = many, last
        return many

    def forget(self, member: str) -> None:
        """Forget a removed member."""
        self._ended.pop(member, None)
        self._counted.pop(member, None)


class Deadline:
    """The waiting time for one neighbour's pieces."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.least_s, self.most_s = least_s, most_s
        self._times = Estimate()
        self._misses = 0

    @property
    def seconds(self) -> float:
        """How long to wait now; half of the longest before the first observation."""
        seconds = max(self.least_s, self._times.bound(self.most_s / 2))
        return min(self.most_s, seconds * 2.0 ** min(self._misses, 16))

    def observe(self, seconds: float) -> None:
        """Note how long a piece took."""
        self._times.add(seconds)
        self._misses = 0

    def miss(self) -> None:
        """Note that a piece did not come in time."""
        self._misses += 1


class Backoff:
    """Pauses between attempts: the span doubles up to a bound, a pause is drawn from its upper half."""

    def __init__(self, first_s: float, most_s: float, draw: random.Random) -> None:
        self.first_s, self.most_s = first_s, most_s
        self._draw, self._failures = draw, 0

    def reset(self) -> None:
        """Start again with the shortest pause."""
        self._failures = 0

    def next(self) -> float:
        """Return the next pause."""
        span = min(self.most_s, self.first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return span * (0.5 + 0.5 * self._draw.random())
