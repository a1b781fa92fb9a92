"""The curves of `rules.personal` among peers: what a peer knows of its own and of its neighbours', and what it picks.

A peer sends its curve to all neighbours. When it has those of all neighbours with models, it knows which of them are
alike (they deploy the same cluster of the same elections), and sends these their number. Then it sweeps: row t of all
that are alike and in reach makes its own row t + 1, which it sends to them. No round waits for this. A sweep waits for
late neighbours, not for those out of reach; a link that comes up brings all rows at once. The steps are picked at the
end, with what has come by then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dfca.core.rules.personal import GRID, SWEEPS, average, pick
from dfca.peer.records.lineage import Lineage, compatible
from dfca.peer.records.messages import MOST_LOSS, Curves
from dfca.peer.records.work import OwnCurve

UNKNOWN = -1  # the degree of a peer that does not know yet who is alike; the cluster of one that has no curve
NO_CURVE = OwnCurve(UNKNOWN, 0, torch.full((len(GRID),), torch.nan, dtype=torch.float64))
Row = tuple[float, ...]


@dataclass
class Heard:
    """What a neighbour has sent."""

    due: int  # as in `Curves`
    cluster: int
    lineage: Lineage
    degree: int = UNKNOWN
    rows: dict[int, Row] = field(default_factory=dict)  # by the number of sweeps behind them


@dataclass
class CurvePool:
    """The curve of a peer and those of its neighbours."""

    due: int = -1  # the round before which it was measured
    cluster: int = UNKNOWN  # the cluster that the peer deployed then
    samples: int = 0  # how many it holds out
    lineage: Lineage = ()  # of that cluster
    rows: list[Row] = field(default_factory=list)  # the curve after 0, 1, ... sweeps; none before it is measured
    degree: int = UNKNOWN  # how many neighbours are alike
    picked: int | None = None  # the steps, once they are picked
    tried: int = 0  # how often a measurement was begun
    heard: dict[int, Heard] = field(default_factory=dict)  # by neighbour, what came

    def copy(self) -> CurvePool:
        """Copy what survives a restart: neighbours send their rows again."""
        return replace(self, rows=list(self.rows), heard={})

    @property
    def measured(self) -> bool:
        """Whether the own curve is known."""
        return bool(self.rows)

    @property
    def sound(self) -> bool:
        """Whether there is a curve to average: samples are held out, and all its losses are numbers."""
        return self.samples > 0 and all(abs(value) <= MOST_LOSS for value in self.rows[0])

    def begin(self, due: int, curve: OwnCurve, lineage: Lineage) -> None:
        """Take in the own curve."""
        self.due, self.cluster, self.samples, self.lineage = due, curve.cluster, curve.samples, lineage
        self.rows, self.degree, self.picked, self.tried = [tuple(curve.losses.tolist())], UNKNOWN, None, 0

    def settle(self, steps: int) -> bool:
        """Pick steps for good, if a curve was measured and none are picked; return whether that is so."""
        settles = self.measured and self.picked is None
        self.picked = steps if settles else self.picked
        return settles

    def take_mean(self, message: Curves) -> bool:
        """Take the mean of the cluster in place of what sweeps would bring; return False for one of another curve."""
        if not self.measured or not self.sound or (message.due, message.cluster) != (self.due, self.cluster):
            return False
        if len(message.values) == len(GRID):
            self.rows = [self.rows[0], message.values]
        return True

    def take(self, sender: int, message: Curves) -> None:
        """Take in what a neighbour sent; a first row begins anew, and what is older than that is of no use."""
        known, due = self.heard.get(sender), message.due
        begins = message.first == 0 and (message.values or message.cluster == UNKNOWN)
        if known is None or due > known.due or (due == known.due and begins):
            known = self.heard[sender] = Heard(due, message.cluster, message.lineage)
        elif due < known.due or message.cluster != known.cluster:
            return
        known.degree = max(known.degree, message.degree)
        count = len(GRID)
        for place in range(len(message.values) // count):
            known.rows[message.first + place] = message.values[place * count : (place + 1) * count]

    def forget_strangers(self, neighbours: Collection[int]) -> None:
        """Forget what those sent that are no neighbours any more."""
        self.heard = {n: heard for n, heard in self.heard.items() if n in neighbours}

    def everything(self) -> Curves:
        """Make the message for a link that comes up: all rows so far."""
        return self._message(0, self.rows[:SWEEPS])

    def advance(self, waited: Collection[int], linked: Collection[int]) -> Iterator[tuple[list[int], Curves]]:
        """Sweep as far as what is here allows; yields what is to be sent to whom.

        waited: the neighbours whose curves are waited for; linked: all in reach.
        """
        if not self.measured or not self.sound:
            return
        if self.degree == UNKNOWN:
            if any(n not in self.heard or self.heard[n].due < self.due for n in waited):
                return
            near = self.alike(linked)
            self.degree = len(near)
            yield self._receivers(linked), self._message(0, [])
        while len(self.rows) <= SWEEPS:
            near, sweep = self.alike(linked), len(self.rows) - 1
            if not near or any(sweep not in self.heard[n].rows or self.heard[n].degree == UNKNOWN for n in near):
                return
            others = [(self.heard[n].rows[sweep], self.heard[n].degree) for n in near]
            self.rows.append(_averaged(self.rows[-1], others))
            if len(self.rows) <= SWEEPS:
                yield self._receivers(linked), self._message(sweep + 1, self.rows[-1:])

    @property
    def steps(self) -> int:
        """The steps that were picked; before the end, those that would be picked now."""
        return self.pick() if self.picked is None else self.picked

    def pick(self) -> int:
        """Pick the steps with what is here: where sweeps are missing, one more with the newest rows of all alike."""
        if not self.measured or not self.samples:
            return 0
        pool = self.rows[-1]
        if self.sound and len(self.rows) <= SWEEPS:
            near = [self.heard[n] for n in self.alike(self.heard)]
            newest = [(heard.rows[max(heard.rows)], max(heard.degree, len(near))) for heard in near if heard.rows]
            pool = _averaged(pool, newest)
        return pick(_tensor(self.rows[0]), self.samples, _tensor(pool))

    def alike(self, among: Collection[int]) -> list[int]:
        """List the neighbours whose curves are of the same cluster; none where there is no curve."""
        if self.cluster == UNKNOWN:
            return []
        known = {n: self.heard[n] for n in sorted(among) if n in self.heard}
        return [
            n
            for n, heard in known.items()
            if (heard.due, heard.cluster) == (self.due, self.cluster)
            and compatible(self.lineage, heard.lineage, self.cluster)
        ]

    def _receivers(self, linked: Collection[int]) -> list[int]:
        """List who is to be sent a new row: those that are alike, or whose curve may be on its way."""
        unheard = {n for n in linked if n not in self.heard or self.heard[n].due < self.due}
        return sorted(unheard.union(self.alike(linked)))

    def _message(self, first: int, rows: list[Row]) -> Curves:
        if not self.sound:
            return Curves(self.due, UNKNOWN, 0, 0, (), self.lineage)
        values = tuple(value for row in rows for value in row)
        return Curves(self.due, self.cluster, self.degree, first, values, self.lineage)


def _averaged(row: Row, others: list[tuple[Row, int]]) -> Row:
    return tuple(average(_tensor(row), [(_tensor(other), degree) for other, degree in others]).tolist())


def _tensor(row: Row) -> Tensor:
    return torch.tensor(row, dtype=torch.float64)
