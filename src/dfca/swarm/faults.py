"""Faults of a swarm on request: nodes are killed and links cut, drawn by the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class FaultOptions:
    """Which faults happen how often."""

    kill_every_s: float | None = None  # seconds between two kills; None: never
    cut_every_s: float | None = None  # seconds between two cuts of half the links; None: never
    seed: int = 0


class FaultPlan:
    """Draws the faults of a swarm, one after the other."""

    def __init__(self, options: FaultOptions, clients: int, edges: Sequence[tuple[int, int]]) -> None:
        self.options, self._clients = options, clients
        self._edges = sorted(edges)
        self._random = Random(f"{options.seed}/swarm")
        self._next_kill = options.kill_every_s
        self._next_cut = options.cut_every_s
        self.kills = 0
        self.cuts = 0

    def victim(self, now_s: float) -> int | None:
        """Return which node to kill now, or None."""
        if self._next_kill is None or now_s < self._next_kill:
            return None
        assert self.options.kill_every_s is not None
        self._next_kill = now_s + self.options.kill_every_s
        self.kills += 1
        return self._random.randrange(self._clients)

    def links(self, now_s: float) -> list[tuple[int, int]] | None:
        """Return which links to cut now, for half of the time until the next cut, or None."""
        if self._next_cut is None or now_s < self._next_cut:
            return None
        assert self.options.cut_every_s is not None
        self._next_cut = now_s + self.options.cut_every_s
        self.cuts += 1
        return self._random.sample(self._edges, len(self._edges) // 2)
