"""How models of one cluster are merged: one by one (`fold`), or all of a synchronous round at once (`mix`).

Client i merges cluster j with the neighbours N_ij that trained j this round:

  uniform      theta_i <- 1/(|N_ij|+1) (theta_i + sum_m theta_m)      the paper's batch rule; row-stochastic
  metropolis   theta_i <- theta_i + sum_m (theta_m - theta_i) / (1 + max(d_i, d_m)),   d the degrees in the graph

The uniform rule does not preserve the network's average. Metropolis weights are symmetric, so they preserve the average
of the clients that trained j; a client that only listens moves towards its neighbours and no rule that sends nothing
back can be doubly stochastic for it. Where all clients train one model the matrix is doubly stochastic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

WeightRule = Literal["uniform", "metropolis"]
WEIGHT_RULES: tuple[WeightRule, ...] = ("uniform", "metropolis")
BLOCK_BYTES = 32 * 2**20
"""Scratch of one block of `mix_`: large enough for full-speed matrix products, small beside any bank."""


def fold(average: Tensor, count: int, incoming: Tensor) -> tuple[Tensor, int]:
    """Fold one received model into a running average: a' = (r a + x) / (r + 1), r = count + 1.

    count is the number of models folded since the client's last local update: own copy and neighbours weigh the same.
    A count of -1 says that the own copy does not count (r = 0): the first model replaces it.
    """
    r = count + 1
    if r == 0:
        return incoming.clone(), r
    return average + (incoming - average) / (r + 1), r


def fold_weighted(average: Tensor, own: Tensor, incoming: Tensor, weight: float) -> Tensor:
    """Fold one received model with a fixed weight: a' = a + w (x - own), own the copy before the first fold."""
    return average + weight * (incoming - own)


def fold_(average: Tensor, count: int, incoming: Tensor, weight: float = 1.0) -> int:
    """Fold in place, in one pass: a += w (x - a) / (r + 1), r = count + 1; returns r. w = 1 is `fold`.

    weight in [0, 1] discounts a model that is stale. Where r = 0 the first model replaces the own one, whatever its w.
    """
    r = count + 1
    if r == 0:
        average.copy_(incoming)
    else:
        average.lerp_(incoming, weight / (r + 1))
    return r


def fold_weighted_(average: Tensor, own: Tensor, incoming: Tensor, weight: float) -> None:
    """Fold in place with a fixed weight: a += w (x - own); `fold_weighted` is its pure twin."""
    average.add_(incoming, alpha=weight).sub_(own, alpha=weight)


def metropolis_weight(degree: int, other_degree: int) -> float:
    """Weigh an edge by the larger degree of its ends: w = 1 / (1 + max(d_i, d_m))."""
    return 1.0 / (1 + max(degree, other_degree))


def mixing_weights(
    adjacency: Tensor, senders: Tensor, receivers: Tensor, rule: WeightRule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Write all folds of one cluster in a round as weights: theta' = own * theta + others @ theta[senders].

    adjacency (N, N) bool, senders and receivers (N,) bool -> own (N,), others (N, S) with S the number of senders.
    A client that does not receive keeps its model: own = 1, others = 0.
    """
    heard = adjacency[:, senders] & receivers[:, None]
    if rule == "uniform":
        own = 1.0 / (heard.sum(dim=1).to(dtype) + 1)
        return own, heard.to(dtype) * own[:, None]
    degrees = adjacency.sum(dim=1)
    larger = torch.maximum(degrees[:, None], degrees[senders][None, :]).to(dtype)
    others = heard.to(dtype) / (1 + larger)
    return 1 - others.sum(dim=1), others


def mix(models: Tensor, senders: Tensor, own: Tensor, others: Tensor) -> Tensor:
    """Apply mixing weights: models (N, P), senders (N,) bool -> (N, P)."""
    return own[:, None] * models + others @ models[senders]


def mix_(models: Tensor, senders: Tensor, own: Tensor, others: Tensor, block_bytes: int = BLOCK_BYTES) -> None:
    """Apply mixing weights in place, a block of columns at a time: no second copy of the bank."""
    rows, size = models.shape
    width = max(1, block_bytes // (models.element_size() * max(1, rows)))
    for begin in range(0, size, width):
        block = models[:, begin : begin + width]
        incoming = block[senders]  # a copy: what was sent is a snapshot
        block.mul_(own[:, None]).addmm_(others, incoming)


def fold_in_order_(models: Tensor, senders: Tensor, arrivals: Sequence[Sequence[int]]) -> None:
    """Fold what each client receives in its own order of arrival, in place: the paper's sequential aggregation.

    models (N, P), senders (N,) bool, arrivals[i] the clients whose models of this cluster reach i, in order.
    """
    snapshot = dict(zip(senders.nonzero()[:, 0].tolist(), models[senders], strict=True))
    for receiver, order in enumerate(arrivals):
        average, count = models[receiver], 0
        for sender in order:
            average, count = fold(average, count, snapshot[sender])
        models[receiver] = average
