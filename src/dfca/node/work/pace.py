"""How fast a node does its rounds: pauses, and a limit on writes, so that flash does not wear out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dfca.node.disk.saving import RETRY_S

DAY_S = 86_400.0
SAVE_OVERHEAD_BYTES = 18_000  # journal, inode, folder per save; measured on ext4 for files of 8 kB, 67 kB and 2 MB
BURST_SHARE = 0.01  # of a day's writes that may come at once: a new swarm learns fast and then settles


class WriteBudget:
    """A bucket of bytes that fills at a constant rate; writes drain it, and rounds wait while it is empty.

    written: returns the total of bytes written and of saves. A node with saved models starts with a tenth of the burst,
    else one that restarts all the time would never be limited.
    """

    def __init__(self, bytes_per_day: float, written: Callable[[], tuple[int, int]], fresh: bool = True) -> None:
        self._per_s, self._written = bytes_per_day / DAY_S, written
        self._most = BURST_SHARE * bytes_per_day
        self._level = self._most if fresh else self._most / 10
        self._seen, self._at = 0, 0.0

    def wait_s(self, now: float) -> float:
        """Return how long the next round must wait for the budget."""
        if not self._per_s:
            return 0.0
        total, saves = self._written()
        spent = total + saves * SAVE_OVERHEAD_BYTES
        gained = (now - self._at) * self._per_s if self._at else 0.0
        self._level = min(self._most, self._level + gained) - (spent - self._seen)
        self._seen, self._at = spent, now
        return max(0.0, -self._level / self._per_s)


@dataclass(frozen=True)
class Pace:
    """How fast a node runs.

    A round waits until all neighbours but one have read the last update: rounds faster than the links would replace
    most updates unread, and one dead or slow neighbour must not delay it.
    """

    pause_s: float = 0.0  # between two rounds
    least_round_s: float = 0.0  # between the starts of two rounds, so that short rounds do not flood the neighbours
    retry_s: float = RETRY_S  # until a failed save is tried again
    budget: WriteBudget | None = None
    unread_s: float = 0.5  # the longest wait for neighbours to read the last update

    def wait_s(self, round_began: float, now: float) -> float:
        """Return how long the next round must wait."""
        budget_s = 0.0 if self.budget is None else self.budget.wait_s(now)
        return max(self.pause_s, budget_s, round_began + self.least_round_s - now)
