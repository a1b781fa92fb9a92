"""FedSPD: soft clustering for personalised decentralised learning (Lin, Yagan, Joe-Wong; UAI 2025).

Client i holds S models and mixture weights u_i. Each round:
  1. every data point goes to the model with the lowest loss on it; u_is is the share of points of s
  2. draw s with probability u_is, take tau local steps of model s on the points of s, send it to the neighbours
  3. average model s with the neighbours that drew the same s
At the end the personal model is sum_s u_is theta_is, fine-tuned by a few local steps on all data of the client.

Differs from the paper in: step 1 stands at the start of a round instead of its end (the same sequence, shifted);
full-batch steps by default, as for all algorithms here. The personal model is made anew for every evaluation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfca.core.algorithm import Algorithm, Choice, View
from dfca.errors import ConfigError


def fedspd(finetune_steps: int = 5) -> Algorithm:
    """FedSPD: soft clusters; every data point has its model, a client deploys their mixture, fine-tuned."""
    if finetune_steps < 0:
        raise ConfigError(f"algorithm.fedspd.finetune_steps must be >= 0, got {finetune_steps}")
    return Algorithm(
        "fedspd",
        start="shared",
        exchange="gossip",
        choose=draw_cluster,
        needs="samples",
        personal=mixture,
        finetune_steps=finetune_steps,
    )


def draw_cluster(view: View) -> Choice:
    """Draw s with probability u_is, the share of the client's points whose lowest loss is model s."""
    assert view.sample_losses is not None  # the record says needs="samples"
    points = owners(view.sample_losses)
    drawn = points[torch.randint(len(points), (), generator=view.random())]
    return Choice(int(drawn), points == drawn)


def mixture(bank: Tensor, sample_losses: Tensor) -> Tensor:
    """Mix the models by their shares: sum_s u_is theta_is; bank (S, P), sample_losses (S, n) -> (P,)."""
    shares = torch.bincount(owners(sample_losses), minlength=len(bank)).to(bank.dtype) / sample_losses.shape[1]
    return shares @ bank


def owners(sample_losses: Tensor) -> Tensor:
    """Assign every point to the model with the lowest loss on it, the lowest index on ties: (S, n) -> (n,)."""
    known = sample_losses.nan_to_num(nan=float("inf"))
    ties = known == known.min(dim=0, keepdim=True).values
    return ties.to(torch.uint8).argmax(dim=0)
