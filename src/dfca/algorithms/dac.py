"""DAC: decentralised adaptive clustering of deep networks (Zec, Ekblom, Willbo, Mogren, Girdzijauskas; 2022).

One model per client, and similarities s_ij that it remembers. In round t client i
  1. draws n peers without replacement with probabilities softmax(tau_t s_i), s_ij = 0 for those it knows nothing of;
     tau_t = 2 tau / (1 + e^(-0.2 t)) - tau + 1, so that the first draw is nearly uniform and later ones are not
  2. receives their models and similarities; s_ij <- 1 / L_i(theta_j) on its own training data; for a j that it has
     never seen and drawn peers have, s_ij <- s_kj of the drawn k with the largest s_ik
  3. averages its own model with the drawn ones by numbers of samples

Clients choose freely among all others, an overlay beside the graph; with `peers = "neighbours"` they are limited to the
neighbours that they have in it. Not in virtual time, where peers have no way to ask for each other's models.

Differs from the paper in: local steps come before the exchange of a round instead of after it (the same sequence,
shifted); full-batch steps by default, as for all algorithms here. tau is 10: full-batch training drives losses far
down, and with 30 the similarities 1 / L draw the same peers for ever before the right ones are known (40 clients of 2
rotations, three seeds: 94 % of the last choices from the own cluster, with 10 all).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dfca.algorithms.fedavg import ONE_EACH
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm
from dfca.core.rules.choosing import Among, PeerAverage, PeerChoice, PeerDraw, Received, by_samples

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_LOSS = 1e-6
"""A loss below counts as this: similarities stay finite."""


def dac(sampled: int = 5, tau: float = 10.0, peers: Among = "any", momentum: float | None = None) -> Algorithm:
    """DAC: one model per client, averaged with those of peers drawn by how well their models did on its data."""
    if sampled < 1:
        raise ConfigError(f"algorithm.dac.sampled must be >= 1, got {sampled}")
    if not (tau >= 1 and math.isfinite(tau)):
        raise ConfigError(f"algorithm.dac.tau must be >= 1, got {tau}")
    return replace(
        ONE_EACH,
        name="dac",
        momentum=momentum,
        memory=no_similarities,
        peers=PeerChoice(partial(_draw, sampled, tau), _merge, among=peers, tells=True),
    )


def no_similarities(models: int, clients: int) -> Tensor:
    """Begin without similarities: (N,) of NaN."""
    import torch  # late: names and options do without

    return torch.full((clients,), math.nan, dtype=torch.float64)


def temperature(tau: float, round: int) -> float:
    """Compute tau_t = 2 tau / (1 + e^(-0.2 t)) - tau + 1: 1 at first, tau + 1 in the end."""
    return 2 * tau / (1 + math.exp(-0.2 * round)) - tau + 1


def _draw(sampled: int, tau: float, view: PeerDraw) -> list[int]:
    """Draw without replacement by softmax(tau_t s): the largest tau_t s_j + G_j, G_j of the Gumbel distribution."""
    import torch

    candidates = list(view.candidates)
    scores = temperature(tau, view.round) * view.memory[candidates].nan_to_num(nan=0.0)
    uniform = torch.rand(len(candidates), generator=view.random(), dtype=torch.float64)
    keys = scores - (-uniform.clamp(1e-300, 1 - 1e-16).log()).log()
    return sorted(candidates[place] for place in keys.argsort(descending=True, stable=True)[:sampled].tolist())


def _merge(received: Received) -> PeerAverage:
    import torch

    peers, memory = list(received.peers), received.memory.clone()
    losses = received.losses.double()
    seen = torch.where(losses.isfinite(), 1 / losses.clamp_min(SMALLEST_LOSS), 0.0)
    memory[peers] = seen
    for place in seen.argsort(descending=True, stable=True).tolist():  # the most alike first: others fill gaps only
        told = received.memories[place]
        gaps = memory.isnan() & ~told.isnan()
        gaps[received.client] = False
        memory[gaps] = told[gaps]
    return PeerAverage(by_samples(received.sizes), memory)
