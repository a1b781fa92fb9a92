"""Taking over a neighbour's models: of a peer without any, and of one whose lineage lost against the neighbour's.

A peer keeps and trains its own models until all that it asked for are here: a neighbour that promises more than it
sends costs nothing but the wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dfca.core.state import is_finite
from dfca.peer.records.lineage import Clusters, Lineage, aligned, layout_of, opened_since
from dfca.peer.records.messages import BankCopy
from dfca.peer.records.options import PeerOptions

LOWER = "of a lower lineage"
"""The problem of a model that is of no use, or was sent before the source took the lineage that is asked for."""


@dataclass
class Pursuit:
    """Models that a peer has asked for."""

    source: int  # the neighbour that was asked
    lineage: Lineage  # of the models
    since: float  # when it was asked, or last answered
    until: float  # how long the next answer is waited for
    needed: tuple[int, ...] | None = None  # the clusters asked for, None: all
    taken: dict[int, BankCopy] = field(default_factory=dict)  # by cluster, what has come
    clusters: int = 0  # how many models the source holds
    round: int = 0  # the round that it is in
    closed: tuple[int, ...] = ()  # the clusters that are closed there

    @property
    def complete(self) -> bool:
        """Whether all models are here."""
        wanted = [j for j in range(self.clusters) if j not in self.closed] if self.needed is None else self.needed
        return self.clusters > 0 and all(j in self.taken for j in wanted)

    def prolong(self, now: float) -> None:
        """Wait for the next model as long as for this one."""
        self.since, self.until = now, self.until + now - self.since

    def align(self, other: Lineage) -> None:
        """Fold the lineage of the models as far as another one of the same history."""
        self.lineage = aligned(self.lineage, other)

    def models(self) -> list[Tensor]:
        """Return the models, in order; in the places of closed clusters, any."""
        some = next(iter(self.taken.values()))
        return [self.taken.get(j, some).message.model for j in range(self.clusters)]

    def take(self, copy: BankCopy, options: PeerOptions, mine: Lineage | None) -> str | None:
        """Take in a model; return what is wrong with it, if anything. mine: the peer's own lineage, None without
        models.

        Where the source has held another election since, only models of the newer lineage count.
        """
        message, model = copy.message, copy.message.model
        drawn = options.start != "elected" and not copy.lineage
        known = Clusters(options.clusters or 0) if drawn else layout_of(copy.lineage)
        if copy.clusters != known.models or message.cluster >= copy.clusters:
            return "another number of models"
        if model.shape != (options.size,) or model.dtype != options.dtype:
            return "does not fit"
        if not is_finite(model):
            return "not finite"
        if message.sender != self.source:
            return "in another's name"
        if mine is not None and not copy.lineage > mine:
            return LOWER
        self.align(copy.lineage)
        if copy.lineage != self.lineage:
            if copy.lineage < self.lineage:
                return LOWER
            self.lineage, self.taken, self.needed = copy.lineage, {}, opened_since(copy.lineage, mine)
        self.clusters, self.closed, self.round = copy.clusters, known.closed, copy.round
        self.taken[message.cluster] = copy
        return None
