"""When a by-election is due: a distribution is new, a cluster was lost, or models were taken that do not fit.

A peer remembers its lowest and highest loss. Where the loss of its best model stays above `ALARM` times the lowest, and
above `LOST_SHARE` of the way up to the highest, for `ROUNDS` rounds in a row, no model fits it any more and it raises
the alarm. So does a peer that took over models without having voted for them, if a model of its own, warmed up after
`PAUSE` rounds, or 2, 4, 8, ... times as many, fits its samples better than all of them (`misfit`). Alarms travel from
neighbour to neighbour, once per change, and are forgotten after `FRESH` rounds.

A cluster is lost when nobody trains it: updates carry the newest round of every cluster that their sender knows of, and
the peer counts its own rounds since it last saw a newer one, but for those with less than half of its neighbours in
reach. Models of slow or far-away trainers come seldom, so the count must exceed what was seen between two of them
before; one that was never seen is waited for longer. Who knows better takes no part in the by-election (`believes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.merging import Plan
from dfca.core.rules.revival import ALARM, LOST_SHARE, PAUSE, ROUNDS

UNSEEN = 10
"""Rounds after which a cluster that nobody was ever known to train counts as lost."""
FRESH = 20
"""Rounds after which an alarm that was not raised anew is forgotten."""
UNSEEN_CLUSTER = {"newest": -1, "seen": -1, "idle": 0, "gaps": 0, "mourned": False}
"""What a detector remembers of a cluster, before anything is known of it."""


@dataclass
class DriftDetector:
    """A peer's memory: its lowest loss, since how many rounds it is above it, and what it knows of the others.

    newest: by cluster, the newest round of a local update that it knows of; idle: rounds since that changed; gaps: the
    longest idle time that ended by itself; mourned: lost clusters that an election did not fill; last, pause: when an
    election was held last, and for how many rounds none is called; alarms: by peer, the number of its last alarm,
    whether it is raised, and the own round in which it came.
    """

    lowest: float = math.inf
    highest: float = -math.inf
    alarm: int = 0
    misfit: bool = False
    newest: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    mourned: list[bool] = field(default_factory=list)
    last: int = -PAUSE
    pause: int = PAUSE
    alarms: dict[int, tuple[int, bool, int]] = field(default_factory=dict)

    def copy(self) -> DriftDetector:
        """Copy the memory, without the alarms of others."""
        lists: dict[str, Any] = {name: list(getattr(self, name)) for name in UNSEEN_CLUSTER}
        return replace(self, alarms={}, **lists)

    @property
    def alarmed(self) -> bool:
        """Whether no model fits this peer any more."""
        return self.alarm >= ROUNDS or self.misfit

    @property
    def unfit(self) -> bool:
        """Whether its loss is above what raises the alarm, if it stays there."""
        return self.alarm > 0 or self.misfit

    def look(self, loss: float, mixed: bool = True) -> None:
        """Take in the loss of one's best model; mixed: it was averaged with others since, or nobody is away.

        Who trains a model alone for a while overfits it: how low its loss gets then is nothing to compare with.
        """
        self.highest = max(self.highest, loss) if math.isfinite(loss) else self.highest
        rise, learned = loss - self.lowest, self.highest - self.lowest
        self.alarm = self.alarm + 1 if loss > ALARM * self.lowest and rise > LOST_SHARE * learned else 0
        if mixed:
            self.lowest = min(self.lowest, loss)

    def believes(self, lost: tuple[int, ...], round: int) -> bool:
        """Return whether clusters may be lost of which a neighbour says so: this peer knows of no recent update."""
        return all(self.idle[j] >= ROUNDS or self.newest[j] < round - ROUNDS for j in lost if j < len(self.idle))

    def learn(self, freshness: tuple[int, ...], limit: int) -> None:
        """Take in what a neighbour knows of who trains what; no round beyond `limit` is believed."""
        for j, round in enumerate(freshness[: len(self.newest)]):
            if self.newest[j] < round <= limit:
                self.newest[j] = round

    def hear_alarm(self, origin: int, number: int, raised: bool, round: int) -> bool:
        """Take in an alarm; return whether it is news."""
        if origin in self.alarms and number <= self.alarms[origin][0]:
            return False
        self.alarms[origin] = (number, raised, round)
        return True

    def end_round(self, clusters: int, informed: bool = True, unwatched: Iterable[int] = ()) -> None:
        """Count for how long each cluster has been idle; informed: enough neighbours are in reach to know.

        unwatched: those that cannot be lost.
        """
        self.grow(clusters)
        for j in range(clusters):
            if self.newest[j] > self.seen[j]:
                self.gaps[j] = max(self.gaps[j], self.idle[j])
                self.seen[j], self.idle[j], self.mourned[j] = self.newest[j], 0, False
            elif informed:
                self.idle[j] += 1
        for j in unwatched:
            self.idle[j] = 0

    def is_due(self, round: int, options: ElectionOptions) -> bool:
        """Return whether enough peers raise the alarm, or a cluster was lost, and the last election is long ago."""
        if round - self.last < self.pause:
            return False
        fresh = sum(raised and round - since < FRESH for _, raised, since in self.alarms.values())
        return fresh >= options.support or bool(self.lost())

    def lost(self) -> tuple[int, ...]:
        """List the clusters that nobody trains and that no election has failed to fill yet."""
        found = []
        for j, idle in enumerate(self.idle):
            bound = UNSEEN if self.seen[j] < 0 else ROUNDS + 2 * self.gaps[j]
            if idle >= bound and not self.mourned[j]:
                found.append(j)
        return tuple(found)

    def close(self, round: int, clusters: int, opened: tuple[int, ...]) -> None:
        """End an election after which there are so many clusters; what nobody filled is not asked for again."""
        for j in self.lost():
            self.mourned[j] = True
        self.grow(clusters)
        for j in opened:
            for name, value in UNSEEN_CLUSTER.items():
                getattr(self, name)[j] = value
        self.last, self.pause = round, PAUSE if opened else 2 * self.pause
        self._forget_lowest()
        self.highest = -math.inf  # the models are others

    def merge(self, plan: Plan, order: Sequence[int]) -> None:
        """Take in what a survey decided: clusters are merged and closed; order: which of them are 0, 1, ... now."""
        for into, closed, *_ in plan.merges:
            self.newest[into] = max(self.newest[into], self.newest[closed])
        for j in plan.closed:
            self.newest[j] = UNSEEN_CLUSTER["newest"]
        newest = [self.newest[j] for j in order]
        for name, value in UNSEEN_CLUSTER.items():
            setattr(self, name, [value] * len(order))
        self.newest = newest
        self._forget_lowest()

    def _forget_lowest(self) -> None:
        """Learn what a low loss is; how much was learned since the last election is known."""
        self.alarm, self.lowest, self.misfit = 0, math.inf, False
        self.alarms = {origin: (number, False, since) for origin, (number, _, since) in self.alarms.items()}

    def grow(self, clusters: int) -> None:
        """Make room for clusters that are new."""
        more = clusters - len(self.idle)
        for name, value in UNSEEN_CLUSTER.items():
            getattr(self, name).extend([value] * more)
