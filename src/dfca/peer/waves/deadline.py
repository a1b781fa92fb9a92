"""How long a peer waits for an answer: learned from the answers that came, as TCP learns its time-out (RFC 6298)."""

from __future__ import annotations

from dataclasses import dataclass

FLOOR = 0.25  # no deadline is shorter than this part of the initial one: fast answers say little about the next model
LATEST = 8.0
"""A late answer counts as no later than this many deadlines: the clock may have jumped, or the device have slept."""
MOST_S = 3600.0  # no deadline is longer, but for an initial one that is


@dataclass
class AnswerTime:
    """How long answers took: mean and mean deviation, exponentially weighted.

    deadline = (mean + 4 deviation) 2^doubled, between a floor and a cap; `initial_s` before the first answer. doubled:
    the time-outs since the last answer in time that turned out to be false.
    """

    initial_s: float
    mean_s: float | None = None
    deviation_s: float = 0.0
    doubled: int = 0

    @property
    def deadline_s(self) -> float:
        """How long to wait for the next answer."""
        learned = self.initial_s if self.mean_s is None else self.mean_s + 4 * self.deviation_s
        learned = max(learned, FLOOR * self.initial_s) * 2.0**self.doubled
        return min(learned, max(MOST_S, self.initial_s))

    def observe(self, seconds: float) -> None:
        """Take in how long an answer took that came in time."""
        self._learn(seconds)
        self.doubled = 0

    def observe_late(self, seconds: float) -> None:
        """Take in an answer that was no longer waited for."""
        self._learn(min(seconds, LATEST * self.deadline_s))
        self.doubled = min(10, self.doubled + 1)

    def _learn(self, seconds: float) -> None:
        if self.mean_s is None:
            self.mean_s, self.deviation_s = seconds, seconds / 2
        else:
            self.deviation_s += (abs(seconds - self.mean_s) - self.deviation_s) / 4
            self.mean_s += (seconds - self.mean_s) / 8
