"""How fast a node does its rounds: pauses, and a limit on what it writes, so that flash does not wear out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dfca.node.disk.saving import RETRY_S

DAY_S = 86_400.0
SAVE_OVERHEAD_BYTES = 18_000
"""What the file system writes besides, for each save: journal, inode, folder. Measured on ext4 by the counter of its
device, for files of 8 kB, 67 kB and 2 MB."""
BURST_SHARE = 0.01
"""Of a day's writes, so many may come at once: a new swarm learns fast, and settles then."""


class WriteBudget:
    """A bucket of bytes that fills at a constant rate: what was written is taken out, and rounds wait if it is empty.

    written: how many bytes have been written in how many saves, counted up. A node that begins with saved models begins
    with a tenth of the burst, or one that is restarted all the time would never be limited.
    """

    def __init__(self, bytes_per_day: float, written: Callable[[], tuple[int, int]], fresh: bool = True) -> None:
        self._per_s, self._written = bytes_per_day / DAY_S, written
        self._most = BURST_SHARE * bytes_per_day
        self._level = self._most if fresh else self._most / 10
        self._seen, self._at = 0, 0.0

    def wait_s(self, now: float) -> float:
        """Return how long the next round must wait for the disk's sake; 0 where it may begin."""
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
    """How a node runs. pause_s: between two rounds, so that a device has time for something else; least_round_s: from
    the begin of a round to that of the next, so that rounds of a millisecond do not flood the neighbours; retry_s:
    until a save that failed is tried again; budget: of what is written; unread_s: how long a round waits at most until
    all neighbours but one have read the last update. Rounds that are faster than the links would replace most updates
    before anybody has read them; one neighbour that is dead or slow delays nothing."""

    pause_s: float = 0.0
    least_round_s: float = 0.0
    retry_s: float = RETRY_S
    budget: WriteBudget | None = None
    unread_s: float = 0.5

    def wait_s(self, round_began: float, now: float) -> float:
        """Return how long the next round must wait."""
        budget_s = 0.0 if self.budget is None else self.budget.wait_s(now)
        return max(self.pause_s, budget_s, round_began + self.least_round_s - now)
