"""Which samples a client holds out of training: to judge what training on the others has reached.

Every part that judges on held-out samples (the worth of clusters, the steps of a personal model) asks here, so that all
of them hold out the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfca.core.rng import stream

FEWEST = 5
"""With fewer samples a client holds out none."""


def held_out(samples: int, seed: int, client: int) -> Tensor:
    """Draw the fifth of a client's samples that it holds out: (n,) bool; none where it has fewer than `FEWEST`.

    Clients with equally many samples hold out equally many.
    """
    mask = torch.zeros(samples, dtype=torch.bool)
    mask[torch.randperm(samples, generator=stream(seed, "held-out", client))[: samples // FEWEST]] = True
    return mask
