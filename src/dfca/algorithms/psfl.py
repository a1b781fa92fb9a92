"""PSFL: proximity-based self-federated learning (Domini, Aguzzi, Farabegoli, Viroli, Esterle; ACSOS 2024, IoT 2025).

One model per client, no number of clusters. F_i(theta_j) is the loss of a neighbour's model on samples that i holds out
of training, and d_ij = F_i(theta_j) + F_j(theta_i) the cross-loss of a link. Each round, after its local steps, i
  1. hears of every neighbour j which leader l_j it follows, and at which distance D_j
  2. follows the lowest of: itself at distance 0, and every l_j with D_j + d_ij < threshold, at that distance
     (leaders elect themselves; a region reaches as far as cross-losses, summed along the path, stay below it)
  3. every P-th round:  theta_i <- 0.1 theta_i + 0.9 mean of the models of its region
FBFL (LMCS 2025) is the same with distances in space in the place of cross-losses.

Who follows whom spreads with the models, one hop per round. Not in virtual time, where peers have no way to ask for
each other's models.

Differs from the paper in: members average the models of their region themselves, where there the leader collects the
models along the links, averages, and sends the mean back: the same mean, with fewer hops and, in large regions, more
bytes. The lower number of a client wins, there the lower of random numbers; full-batch steps by default.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dfca.algorithms.fedavg import ONE_EACH
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm
from dfca.core.rules.choosing import PeerAverage, PeerChoice, PeerDraw, Received

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 0.1
"""What a client keeps of its own model where it takes that of its region."""


def psfl(threshold: float = 4.0, every: int = 5, momentum: float | None = None) -> Algorithm:
    """PSFL: neighbours with a low cross-loss elect leaders, and every region averages its models."""
    if not (threshold > 0 and math.isfinite(threshold)):
        raise ConfigError(f"algorithm.psfl.threshold must be > 0, got {threshold}")
    if every < 1:
        raise ConfigError(f"algorithm.psfl.every must be >= 1, got {every}")
    return replace(
        ONE_EACH,
        name="psfl",
        momentum=momentum,
        memory=nothing_known,
        peers=PeerChoice(
            partial(_draw, every), partial(_merge, threshold, every), tells=True, unseen=True, uses_graph=True
        ),
    )


class Known(NamedTuple):
    """What a client remembers: views of its memory (3 N + 1,)."""

    losses: Tensor  # (N,): F_i(theta_j) when it last saw it, NaN before
    leaders: Tensor  # (N,): whom j follows, as far as it has heard; -1: not heard
    stamps: Tensor  # (N,): as of which round
    distance: Tensor  # (1,): its own, to its leader


def known(memory: Tensor) -> Known:
    """Read a memory."""
    clients = len(memory) // 3
    return Known(memory[:clients], memory[clients : 2 * clients], memory[2 * clients : -1], memory[-1:])


def nothing_known(models: int, clients: int) -> Tensor:
    """Begin without having heard of anybody: (3 N + 1,)."""
    import torch  # late: names and options do without

    return torch.cat([torch.full((clients,), math.nan), torch.full((2 * clients,), -1.0), torch.zeros(1)]).double()


def _is_due(every: int, round: int) -> bool:
    return (round + 1) % every == 0


def _draw(every: int, view: PeerDraw) -> list[int]:
    leaders, near = known(view.memory).leaders, set(view.neighbours)
    mine = leaders[view.client]
    return [
        j for j in view.candidates if j in near or (_is_due(every, view.round) and mine >= 0 and leaders[j] == mine)
    ]


def _merge(threshold: float, every: int, received: Received) -> PeerAverage:
    import torch

    i, memory, near = received.client, received.memory.clone(), set(received.neighbours)
    own, leader, distance = known(memory), i, 0.0
    told = {peer: known(memories) for peer, memories in zip(received.peers, received.memories, strict=True)}
    losses = dict(zip(received.peers, received.losses.tolist(), strict=True))
    for j in sorted(near & told.keys()):
        own.losses[j] = losses[j]
        reached = float(told[j].distance) + losses[j] + float(told[j].losses[i])
        follows = int(told[j].leaders[j])
        if 0 <= follows != i and reached < threshold and (follows, reached) < (leader, distance):
            leader, distance = follows, reached
        fresher = told[j].stamps > own.stamps
        own.leaders[fresher], own.stamps[fresher] = told[j].leaders[fresher], told[j].stamps[fresher]
    own.leaders[i], own.stamps[i], own.distance[0] = float(leader), float(received.round), distance
    weights = torch.zeros(1 + len(received.peers), dtype=torch.float64)
    weights[0] = 1.0
    members = [1 + place for place, j in enumerate(received.peers) if int(told[j].leaders[j]) == leader]
    if _is_due(every, received.round) and members:
        weights[[0, *members]] = (1 - KEPT) / (1 + len(members))
        weights[0] += KEPT
    return PeerAverage(weights, memory)
