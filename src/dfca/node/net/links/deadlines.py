"""How long to wait for the next piece of a model, learned from earlier pieces as TCP learns its timeouts (RFC 6298).

deadline = mean + 4 deviations, within bounds; doubled after each miss
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
