"""DPFL: decentralised personalised federated learning (Kharrat, Canini, Horvath; AISTATS 2025).

One model per client. R_i(S) = -F_i(mean of the models of S by numbers of samples) on samples that i holds out of
training. Every P-th round client i, after its local steps, chooses whom it averages with by a randomised double greedy:
  X = {i}, Y = {i} and all candidates; for every candidate j in random order
    a = max(0, R_i(X + j) - R_i(X)),   b = max(0, R_i(Y - j) - R_i(Y))
    with probability a / (a + b) (1 where both are 0)   X <- X + j,   else   Y <- Y - j;   stop at B peers in X
and theta_i <- the mean of X by numbers of samples. The first time all clients are candidates; from then on those that
were chosen then. In the other rounds it trains alone.

Clients choose freely among all others, an overlay beside the graph; with `peers = "neighbours"` they are limited to the
neighbours that they have in it. Not in virtual time, where peers have no way to ask for each other's models.

Differs from the paper in: all models are asked for at once in the first choice, where the paper asks in batches that
keep to the budget (its public code does as here); a fifth of the samples is held out; full-batch steps by default, as
for all algorithms here. `budget` counts the others, the paper's B_c the client too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dfca.algorithms.fedavg import ONE_EACH
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm
from dfca.core.rules.choosing import Among, PeerAverage, PeerChoice, PeerDraw, Received, by_samples

if TYPE_CHECKING:
    from torch import Tensor


def dpfl(budget: int = 10, every: int = 2, peers: Among = "any", momentum: float | None = None) -> Algorithm:
    """DPFL: one model per client, averaged with the few whose average lowers its loss on held-out samples."""
    for name, value in (("budget", budget), ("every", every)):
        if value < 1:
            raise ConfigError(f"algorithm.dpfl.{name} must be >= 1, got {value}")
    return replace(
        ONE_EACH,
        name="dpfl",
        momentum=momentum,
        memory=nobody_chosen,
        peers=PeerChoice(partial(_draw, every), partial(_merge, budget), among=peers, unseen=True),
    )


def nobody_chosen(models: int, clients: int) -> Tensor:
    """Begin before the first choice: (N,) of -1; later 1 for those that were chosen, else 0."""
    import torch  # late: names and options do without

    return torch.full((clients,), -1.0, dtype=torch.float64)


def _draw(every: int, view: PeerDraw) -> list[int]:
    if view.round == 0 or view.round % every:
        return []
    return [j for j in view.candidates if view.memory[j] != 0]


def _merge(budget: int, received: Received) -> PeerAverage:
    import torch

    memory, chosen = received.memory.clone(), double_greedy(budget, received)
    if len(received.peers) and (memory < 0).any():
        memory.zero_()
        memory[[peer for peer, taken in zip(received.peers, chosen[1:].tolist(), strict=True) if taken]] = 1.0
    return PeerAverage(by_samples(received.sizes * chosen.to(torch.float64)), memory)


def double_greedy(budget: int, received: Received) -> Tensor:
    """Choose at most `budget` peers as the equation above says: (n + 1,) bool, the client itself first."""
    import torch

    n, random = len(received.peers), received.random()
    inner, outer = torch.zeros(n + 1, dtype=torch.bool), torch.ones(n + 1, dtype=torch.bool)
    inner[0], outer[1:] = True, received.losses.isfinite()
    if not n:
        return inner
    sizes = received.sizes.double()

    def rewards(*sets: Tensor) -> list[float]:
        weights = torch.stack([by_samples(sizes * chosen) for chosen in sets])
        return (-received.score(weights).double()).tolist()

    reward_x, reward_y = rewards(inner, outer)
    for j in (1 + torch.randperm(n, generator=random)).tolist():
        if not outer[j]:
            continue
        larger, smaller = inner.clone(), outer.clone()
        larger[j], smaller[j] = True, False
        with_j, without_j = rewards(larger, smaller)
        a, b = max(0.0, with_j - reward_x), max(0.0, without_j - reward_y)
        draw = float(torch.rand((), generator=random, dtype=torch.float64))
        if draw < (a / (a + b) if a + b else 1.0):
            inner, reward_x = larger, with_j
        else:
            outer, reward_y = smaller, without_j
        if int(inner.sum()) > budget:
            break
    return inner
