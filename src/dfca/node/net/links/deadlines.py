"""How long to wait for the next piece of a model: from the times that pieces took, as TCP times its segments.

deadline = mean + 4 deviations, within bounds; twice as long after each one that was missed (RFC 6298)
"""

from __future__ import annotations

import random

from dfca.node.net.links.detector import Estimate


class Deadline:
    """The waiting time for one neighbour's pieces."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.least_s, self.most_s = least_s, most_s
        self._times = Estimate()
        self._misses = 0

    @property
    def seconds(self) -> float:
        """How long to wait now; before anything was observed: half of the longest."""
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
    """Pauses between attempts: twice as long each time up to a bound, each drawn from the upper half of its span."""

    def __init__(self, first_s: float, most_s: float, draw: random.Random) -> None:
        self.first_s, self.most_s = first_s, most_s
        self._draw, self._failures = draw, 0

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._failures = 0

    def next(self) -> float:
        """Return the next pause."""
        span = min(self.most_s, self.first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return span * (0.5 + 0.5 * self._draw.random())
