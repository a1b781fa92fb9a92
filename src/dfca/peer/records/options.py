"""What does not change about a peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from dfca.core.exchange import Rules
from dfca.core.options import MergeOptions, PersonalSteps
from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.personal import release_round
from dfca.peer.records.staleness import Staleness

ENDLESS = 2**50
"""So many rounds never end."""
FIRST = 32
"""The first curve is measured before this round, where rounds do not end."""


@dataclass(frozen=True)
class PeerOptions:
    """Who a peer is and what it runs.

    neighbours: those of the graph when it begins, whether they are there or not (later: `Peer.rewire`). size, dtype:
    P floats of one model.
    clusters: for a drawn start the models that it begins with, for an elected one the number asked for (None: found).
    timeout_s: how long `batch` waits for its neighbours, None: for ever. quorum: the share of the peers of a wave that
    must have warmed up before an election opens. join_s: how long a peer without models waits for a neighbour that has
    some, and at most for the neighbours' first word. hang_s: how long it waits for an answer before it has learned how
    long answers take (`deadline`): then an election is begun again, or a request is given up. merging: how clusters are
    merged, None: they are not; observation: what it takes to judge one model in a survey, in rounds of training.
    personal: the steps of the personal last step.
    """

    rules: Rules
    neighbours: tuple[int, ...]
    size: int
    start: Literal["shared", "own", "elected"]
    rounds: int
    seed: int
    clusters: int | None
    dtype: torch.dtype = torch.float32
    aggregation: Literal["batch", "sequential"] = "batch"
    timeout_s: float | None = None
    participation: float = 1.0
    staleness: Staleness = field(default_factory=Staleness)
    election: ElectionOptions = field(default_factory=ElectionOptions)
    revives: bool = False
    quorum: float = 0.8
    join_s: float = 10.0
    hang_s: float = 60.0
    merging: MergeOptions | None = None
    observation: float = 1.0
    personal: PersonalSteps = 0

    @cached_property
    def release(self) -> int | None:
        """The round before which the personal steps are picked, where they are: a last quarter there is only of rounds
        that end."""
        return release_round(self.personal, self.rounds) if self.rounds < ENDLESS else None

    def due(self, round: int) -> int | None:
        """Return the round before which the curve is measured that counts in a round; None: there is none yet.

        Where rounds do not end there is no release: curves are measured anew whenever the rounds have doubled.
        """
        if self.personal == "auto" and self.rounds >= ENDLESS:
            return 2 ** (round.bit_length() - 1) if round >= FIRST else None
        return self.release if self.release is not None and round >= self.release else None

    @property
    def id(self) -> int:
        """The peer's own id."""
        return self.rules.id
