"""A save of a peer with something in every field."""

from __future__ import annotations

import torch

from dfca.peer.records.lineage import Entry
from dfca.peer.revival import DriftDetector
from dfca.peer.state import Saved


def make_saved(round: int = 3, bank: torch.Tensor | None = None) -> Saved:
    detector = DriftDetector(lowest=0.25, newest=[3, -1], seen=[2, -1], idle=[0, 4], gaps=[1, 0], mourned=[False, True])
    lineage = (Entry(5, 1, 2**62 + 7, 0, 2**47 + 1, (0, 1)),)
    bank = torch.arange(6.0).view(2, 3) * round if bank is None else bank
    return Saved(1, 7, 2, round, lineage, bank, 1, (3, -1), (4, -2), (1, 1), (3, 0), detector, False)
