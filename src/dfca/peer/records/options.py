"""What does not change about a peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.core.rules.personal import release_round

ENDLESS = 2**50  # from this number on there is no last round
FIRST = 32  # the first curve is measured before this round, where rounds do not end


@dataclass(frozen=True)
class PeerOptions:
    """Who a peer is and what it runs."""

    rules: Rules
    neighbours: tuple[int, ...]  # in the graph when it begins, present or not (later: `Peer.rewire`)
    size: int  # P: floats of one model
    start: Literal["shared", "own", "elected"]
    rounds: int
    seed: int
    clusters: int | None  # of a drawn start: the models that it begins with; of an elected one: asked for, None: found
    dtype: torch.dtype = torch.float32
    method: Method = field(default_factory=Method)
    join_s: float = 10.0  # how long a peer without models waits for a neighbour with some, or for the first word
    hang_s: float = 60.0  # how long it waits for an answer before it has learned how long answers take (`deadline`)

    @cached_property
    def release(self) -> int | None:
        """The round before which the personal steps are picked, where they are: a last quarter there is only of rounds
        that end."""
        return release_round(self.method.personal, self.rounds) if self.rounds < ENDLESS else None

    def due(self, round: int) -> int | None:
        """Return the round before which the curve is measured that counts in a round; None: there is none yet.

        Where rounds do not end there is no release: curves are measured anew whenever the rounds have doubled.
        """
        if self.method.personal == "auto" and self.rounds >= ENDLESS:
            return 2 ** (round.bit_length() - 1) if round >= FIRST else None
        return self.release if self.release is not None and round >= self.release else None

    @property
    def id(self) -> int:
        """The peer's own id."""
        return self.rules.id
