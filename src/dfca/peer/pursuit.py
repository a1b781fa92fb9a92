"""Taking over a neighbour's models: of a peer without any, and of one whose lineage lost against the neighbour's.

A peer keeps its own models, and goes on training them, until all that it asked for are here: a neighbour that promises
more than it sends costs nothing but the wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dfca.core.state import is_finite
from dfca.peer.records.lineage import Clusters, Lineage, layout_of, opened_since
from dfca.peer.records.messages import BankCopy
from dfca.peer.records.options import PeerOptions

MOST_CLUSTERS = 4096
"""Nobody holds more models than this."""
LOWER = "of a lower lineage"
"""What is wrong with a model that is of no use, or was sent before the source took the lineage that is asked for."""


@dataclass
class Pursuit:
    """Models that a peer has asked for.

    source: whom; lineage: of the models; since, until: when it was last answered, or asked, and how long it waits;
    needed: the clusters asked for, None: all; taken: what has come; clusters, closed: how many models the source holds,
    and which of them nobody has any use for; round: the round that it is in.
    """

    source: int
    lineage: Lineage
    since: float
    until: float
    needed: tuple[int, ...] | None = None
    taken: dict[int, BankCopy] = field(default_factory=dict)
    clusters: int = 0
    round: int = 0
    closed: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all models are here."""
        wanted = [j for j in range(self.clusters) if j not in self.closed] if self.needed is None else self.needed
        return self.clusters > 0 and all(j in self.taken for j in wanted)

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
        if copy.clusters != known.models or copy.clusters > MOST_CLUSTERS or message.cluster >= copy.clusters:
            return "another number of models"
        if model.shape != (options.size,) or model.dtype != options.dtype:
            return "does not fit"
        if not is_finite(model):
            return "not finite"
        if message.sender != self.source:
            return "in another's name"
        if mine is not None and not copy.lineage > mine:
            return LOWER
        if copy.lineage != self.lineage or (self.clusters and copy.clusters != self.clusters):
            if copy.lineage < self.lineage:
                return LOWER
            self.lineage, self.taken, self.needed = copy.lineage, {}, opened_since(copy.lineage, mine)
        self.clusters, self.closed, self.round = copy.clusters, known.closed, copy.round
        self.taken[message.cluster] = copy
        return None
