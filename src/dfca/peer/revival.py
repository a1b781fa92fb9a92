"""What a peer knows of losses and clusters, and when it calls a by-election by it (rules: `rules.revival`).

Besides a risen loss, a misfit raises the alarm: a peer that took over models without having voted for them warms up a
model of its own after `PAUSE` rounds, and after 2, 4, 8, ... times as many; it raises the alarm if that one fits its
samples better than all of them. Alarms travel from neighbour to neighbour, once per change, and are forgotten after
`FRESH` rounds.

Updates carry the newest round of every cluster that their sender knows of. A peer counts its own rounds since it last
saw a newer one, except those with less than half of its neighbours in reach. Models of slow or distant trainers are
rare, so the idle time must exceed what was seen between two of them. A peer that knows of a recent update takes no part
in the by-election for that cluster (`believes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dfca.core.rules.clusters import NEWEST, merge_values_
from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.merging import Plan
from dfca.core.rules.revival import PAUSE, ROUNDS, has_risen, is_due, is_lost, next_pause
from dfca.peer.records.messages import MOST_ROUND

FRESH = 20  # rounds after which an alarm that was not raised anew is forgotten
NOBODY = -2  # no neighbour: the peer called the election itself
HASTE = 8  # how many times as many rounds as this peer a caller may do
MOST_PAUSE = 2**20  # the longest pause of rounds after a futile call
MOST_ALARMS_OF_ONE = 8  # alarms of one peer that another takes in within a round of its own
UNSEEN_CLUSTER = {"newest": -1, "seen": -1, "idle": 0, "gaps": 0, "mourned": False}
"""What a detector remembers of a cluster, before anything is known of it."""


@dataclass
class DriftDetector:
    """A peer's memory of its own losses and of what it has heard of clusters and alarms."""

    lowest: float = math.inf  # lowest loss of its best model
    highest: float = -math.inf  # highest loss since the last election
    alarm: int = 0  # rounds in a row in which the loss has risen
    misfit: bool = False  # a model of its own fits better than those that it took over
    newest: list[int] = field(default_factory=list)  # by cluster: newest round of a local update that it knows of
    seen: list[int] = field(default_factory=list)  # the same at the end of its last round
    idle: list[int] = field(default_factory=list)  # rounds since that changed
    gaps: list[int] = field(default_factory=list)  # longest idle time that ended by itself
    mourned: list[bool] = field(default_factory=list)  # lost, and an election did not fill it
    last: int = -PAUSE  # round of the last election
    pause: int = PAUSE  # rounds after it in which none is called
    alarms: dict[int, tuple[int, bool, int]] = field(default_factory=dict)  # by peer: (number, raised, own round)

    def copy(self) -> DriftDetector:
        """Copy the memory, without the alarms of others."""
        lists: dict[str, Any] = {name: list(getattr(self, name)) for name in UNSEEN_CLUSTER}
        return replace(self, alarms={}, **lists)

    @property
    def alarmed(self) -> bool:
        """Whether this peer raises the alarm: no model fits it any more."""
        return self.alarm >= ROUNDS or self.misfit

    @property
    def unfit(self) -> bool:
        """Whether its loss has risen, or models that it took over do not fit."""
        return self.alarm > 0 or self.misfit

    def look(self, loss: float, mixed: bool = True) -> None:
        """Take in the loss of its best model on its training samples.

        mixed: the model was averaged with others since, or nobody is away. A peer that trains alone overfits its own
        samples: how low its loss gets then is no measure.
        """
        self.highest = max(self.highest, loss) if math.isfinite(loss) else self.highest
        self.alarm = self.alarm + 1 if has_risen(loss, self.lowest, self.highest) else 0
        if mixed:
            self.lowest = min(self.lowest, loss)

    def believes(self, lost: tuple[int, ...], round: int) -> bool:
        """Return whether clusters may be lost, as a neighbour says: this peer knows of no recent update."""
        return all(self.idle[j] >= ROUNDS or self.newest[j] < round - ROUNDS for j in lost if j < len(self.idle))

    def learn(self, freshness: tuple[int, ...]) -> None:
        """Take in the newest rounds that a neighbour knows of."""
        for j, round in enumerate(freshness[: len(self.newest)]):
            if self.newest[j] < round <= MOST_ROUND:
                self.newest[j] = round

    def is_news(self, origin: int, number: int) -> bool:
        """Return whether an alarm is newer than what is known of its origin."""
        return origin not in self.alarms or number > self.alarms[origin][0]

    def hear_alarm(self, origin: int, number: int, raised: bool, round: int) -> None:
        """Take in an alarm that is news."""
        self.alarms[origin] = (number, raised, round)

    def end_round(self, clusters: int, informed: bool = True, unwatched: Iterable[int] = ()) -> None:
        """Count for how long each cluster has been idle; informed: enough neighbours are in reach to know; unwatched:
        clusters that cannot be lost."""
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
        """Return whether to call a by-election after a round."""
        fresh = sum(raised and round - since < FRESH for _, raised, since in self.alarms.values())
        return is_due(fresh, options.support, bool(self.lost()), round - self.last, self.pause)

    def lost(self) -> tuple[int, ...]:
        """List the clusters that nobody trains and that no election has failed to fill yet."""
        known = enumerate(zip(self.idle, self.mourned, self.gaps, self.seen, strict=True))
        return tuple(j for j, (idle, given_up, gap, seen) in known if is_lost(idle, given_up, gap, seen >= 0))

    def close(self, round: int, clusters: int, opened: tuple[int, ...]) -> None:
        """End an election after which there are `clusters`; lost ones that it did not fill are given up."""
        for j in self.lost():
            self.mourned[j] = True
        self.grow(clusters)
        for j in opened:
            for name, value in UNSEEN_CLUSTER.items():
                getattr(self, name)[j] = value
        self.last, self.pause = round, next_pause(self.pause, bool(opened))
        self._forget_lowest()
        self.highest = -math.inf  # the models are others

    def merge(self, plan: Plan, order: Sequence[int]) -> None:
        """Take in what a survey decided: clusters are merged and closed; order: the old number of cluster 0, 1, ..."""
        merge_values_(self.newest, plan, NEWEST)
        newest = [self.newest[j] for j in order]
        for name, value in UNSEEN_CLUSTER.items():
            setattr(self, name, [value] * len(order))
        self.newest = newest
        self._forget_lowest()

    def _forget_lowest(self) -> None:
        """Measure the lowest loss anew; the highest since the last election stays."""
        self.alarm, self.lowest, self.misfit = 0, math.inf, False
        self.alarms = {origin: (number, False, since) for origin, (number, _, since) in self.alarms.items()}

    def grow(self, clusters: int) -> None:
        """Make room for clusters that are new."""
        more = clusters - len(self.idle)
        for name, value in UNSEEN_CLUSTER.items():
            getattr(self, name).extend([value] * more)


@dataclass
class Callers:
    """What a peer remembers of neighbours that brought calls of elections."""

    caller: int = NOBODY  # who brought the call of the election that runs
    futile: dict[int, tuple[int, int]] = field(default_factory=dict)  # by neighbour: pause after a futile call; when
    alarms: dict[int, int] = field(default_factory=dict)  # by peer: its alarms in the round that is counted
    counted: int = -1  # that round

    def is_heard(self, origin: int, round: int) -> bool:
        """Count an alarm of a peer; return whether it is not one of too many in a round."""
        if round != self.counted:
            self.alarms, self.counted = {}, round
        self.alarms[origin] = self.alarms.get(origin, 0) + 1
        return self.alarms[origin] <= MOST_ALARMS_OF_ONE

    def heeds(self, neighbour: int, round: int) -> bool:
        """Return whether to take part in an election that a neighbour calls, or hands on.

        After a futile call, only after a part of the pause that an honest caller makes: it may do more rounds.
        """
        pause, last = self.futile.get(neighbour, (0, 0))
        return round - last >= pause // HASTE

    def end_call(self, opened: bool, round: int) -> None:
        """Remember whether the election that a neighbour brought opened nothing; a neighbour that did not wait then
        waits twice as long the next time."""
        pause, last = self.futile.pop(self.caller, (PAUSE, 0))
        if not opened and self.caller != NOBODY:
            waited = round - last >= pause
            self.futile[self.caller] = (next_pause(PAUSE, False) if waited else min(2 * pause, MOST_PAUSE), round)
