"""What a peer does, and what of it survives a crash."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from dfca.core.state import is_finite
from dfca.peer.curves import CurvePool
from dfca.peer.records.lineage import Lineage
from dfca.peer.records.options import PeerOptions
from dfca.peer.revival import DriftDetector

VERSION = 1  # of what `Peer.save` returns
FRESHNESS = ("stamps", "origins", "folded", "updates")  # what a save keeps of every model, by cluster


class State(Enum):
    """What a peer does: see `peer.py`."""

    EMPTY = "empty"
    WARMING = "warming"
    ELECTING = "electing"
    PAUSED = "paused"
    TRAINING = "training"
    WAITING = "waiting"
    DONE = "done"


@dataclass(frozen=True)
class Saved:
    """What a peer needs on the disk to continue after a crash."""

    version: int  # of this record
    seed: int  # of the swarm
    incarnation: int  # of the peer that saved
    round: int  # the next that it trains
    lineage: Lineage  # where its models come from
    bank: Tensor | None  # its models (m, P)
    assignment: int | None = None  # the cluster that it trained last
    stamps: tuple[int, ...] = ()  # as in `ClientState`, by cluster
    origins: tuple[int, ...] = ()
    folded: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    detector: DriftDetector = field(default_factory=DriftDetector)  # see `Elections`, as the next two
    voted: bool = True
    own: Tensor | None = None  # (P,)
    survey_at: int = 0  # see `Surveys`, as the next
    samples: int = 0
    curves: CurvePool = field(default_factory=CurvePool)  # see `LastStep`

    def problem(self, options: PeerOptions) -> str | None:
        """Return why a peer with these options cannot continue from here, None if it can."""
        bank, own = self.bank, self.own
        if self.version != VERSION:
            return "a save of another version"
        if self.seed != options.seed:
            return "a save of another swarm"
        if bank is not None and (bank.dim() != 2 or bank.shape[1] != options.size or not len(bank)):
            return "a save of another model"
        if bank is not None and not bool(torch.isfinite(bank).all()):
            return "a save that is not finite"
        if own is not None and not (own.shape == (options.size,) and is_finite(own)):
            return "a save of another model"
        return None
