"""PENS: performance-based neighbour selection (Onoszko, Karlsson, Mogren, Zec; FL-ICML 2021).

One model per client. In the first T1 rounds client i
  1. receives the models of n random peers and scores them on its own training data
  2. averages its own with the m that have the lowest losses, by numbers of samples, and counts who was picked
Then its neighbours are those that were picked more often than by chance, N_i = {j : count_j > T1 m / N}, and in every
round it averages with n random ones of them.

Clients choose freely among all others, an overlay beside the graph; with `peers = "neighbours"` they are limited to the
neighbours that they have in it. Not in virtual time, where peers have no way to ask for each other's models.

Differs from the paper in: local steps come before the exchange of a round instead of after it (the same sequence,
shifted); full-batch steps by default, as for all algorithms here. A client that nobody was picked often enough for goes
on alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dfca.algorithms.fedavg import ONE_EACH
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm
from dfca.core.rules.choosing import Among, PeerAverage, PeerChoice, PeerDraw, Received, by_samples, draw_uniformly

if TYPE_CHECKING:
    from torch import Tensor


def pens(
    selection_rounds: int = 10, sampled: int = 10, best: int = 2, peers: Among = "any", momentum: float | None = None
) -> Algorithm:
    """PENS: one model per client, averaged with those of peers that were good on its data in the first rounds."""
    for name, value in (("selection_rounds", selection_rounds), ("sampled", sampled), ("best", best)):
        if value < 1:
            raise ConfigError(f"algorithm.pens.{name} must be >= 1, got {value}")
    if best > sampled:
        raise ConfigError(f"algorithm.pens.best must be <= sampled ({sampled}), got {best}")
    return replace(
        ONE_EACH,
        name="pens",
        momentum=momentum,
        memory=no_picks,
        peers=PeerChoice(
            partial(_draw, selection_rounds, sampled, best), partial(_merge, selection_rounds, best), among=peers
        ),
    )


def no_picks(models: int, clients: int) -> Tensor:
    """Begin with no client picked: (N,)."""
    import torch  # late: names and options do without

    return torch.zeros(clients, dtype=torch.float64)


def _draw(selection_rounds: int, sampled: int, best: int, view: PeerDraw) -> list[int]:
    candidates = list(view.candidates)
    if view.round >= selection_rounds:
        chance = selection_rounds * best / len(view.memory)
        candidates = [j for j in candidates if view.memory[j] > chance]
    return draw_uniformly(view, candidates, sampled)


def _merge(selection_rounds: int, best: int, received: Received) -> PeerAverage:
    import torch

    weights, memory = torch.ones(len(received.peers) + 1, dtype=torch.bool), received.memory.clone()
    if received.round < selection_rounds:
        known = received.losses.double().nan_to_num(nan=torch.inf)
        picked = known.argsort(stable=True)[:best].tolist()
        weights[1:] = False
        for place in picked:
            weights[1 + place] = True
            memory[received.peers[place]] += 1
    return PeerAverage(by_samples(received.sizes * weights), memory)
