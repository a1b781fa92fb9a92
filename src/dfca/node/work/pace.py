"""How fast a node does its rounds: pauses, a limit on writes, so that flash does not wear out, and rest when nothing is
learned."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from dfca.node.disk.saving import RETRY_S
from dfca.peer.records.messages import Update

DAY_S = 86_400.0
SAVE_OVERHEAD_BYTES = 18_000  # journal, inode, folder per save; measured on ext4 for files of 8 kB, 67 kB and 2 MB
BURST_SHARE = 0.01  # of a day's writes that may come at once: a new swarm learns fast and then settles
QUIET_ROUNDS = 500  # without a better loss, after which a node rests between rounds
FIRST_REST_S = 2.0
RECENT = 10  # losses, whose median counts
GAIN, RISE = (
    0.01,
    0.1,
)  # shares: of the best loss that a better one is below it, of that of guessing that a worse is above
FAR = 2.0  # times farther than when the rest began: a model that is clearly another


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


class Idling:
    """Makes the rounds of a node rare while nothing is learned: rests of 2, 4, 8, ... seconds, at most `most_s`.

    r is the median of the last RECENT losses. It is better if it is below (1 - GAIN) best - least. After `quiet_rounds`
    rounds without a better one the node rests. It is back at full pace at once when r improves, or the loss rises by
    RISE times that of guessing; and when `wake` is called: for new data, an election, a neighbour that is new, or a
    model that is clearly another.

    most_s: 0: it never rests. guess: the loss of guessing. least: the smallest gain that counts.
    """

    def __init__(self, most_s: float, guess: float = math.inf, least: float = 0.0) -> None:
        self.rest_s = 0.0  # now between two rounds
        self.quiet_rounds = QUIET_ROUNDS
        self._most_s, self._rise, self._least = most_s, RISE * guess, least
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._best, self._quiet = math.inf, 0
        self._distances: dict[int, float] = {}  # by neighbour, that of its first model since the rest began
        self._woken = asyncio.Event()

    def learned(self, loss: float | None) -> None:
        """Take in the loss of a round."""
        if loss is not None:
            self._losses.append(loss)
            usual = median(self._losses)
            better = usual < (1 - GAIN) * self._best - self._least
            if better or (loss if self.rest_s else usual) > self._best + self._rise:
                self._best = usual if better or not self.rest_s else loss
                self.wake()
                return
        self._quiet += 1
        if self._quiet >= self.quiet_rounds:
            self.rest_s = min(self._most_s, 2 * self.rest_s or FIRST_REST_S)

    def wake(self) -> None:
        """Return to full pace."""
        self.rest_s, self._quiet = 0.0, 0
        self._distances.clear()
        self._woken.set()

    def compare(self, sender: int, message: Any, bank: Tensor | None) -> None:
        """Wake up where a neighbour's model is clearly another than when the rest began."""
        if not self.rest_s or bank is None or not isinstance(message, Update):
            return
        model, cluster = message.message.model, message.message.cluster
        if not 0 <= cluster < len(bank) or (model.shape, model.dtype) != (bank.shape[1:], bank.dtype):
            return  # the payload of a codec, or what the peer will refuse
        distance = float((model - bank[cluster]).norm())
        if not distance <= FAR * self._distances.setdefault(sender, distance) + GAIN * float(bank[cluster].norm()):
            self.wake()

    async def rest(self) -> None:
        """Wait, unless somebody wakes it up."""
        self._woken.clear()
        if self.rest_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self.rest_s)


@dataclass(frozen=True)
class Pace:
    """How fast a node runs. No round waits until neighbours have read the last update."""

    pause_s: float = 0.0  # between two rounds
    least_round_s: float = 0.0  # between the starts of two rounds, so that short rounds do not flood the neighbours
    retry_s: float = RETRY_S  # until a failed save is tried again
    budget: WriteBudget | None = None

    def wait_s(self, round_began: float, now: float) -> float:
        """Return how long the next round must wait."""
        budget_s = 0.0 if self.budget is None else self.budget.wait_s(now)
        return max(self.pause_s, budget_s, round_began + self.least_round_s - now)
