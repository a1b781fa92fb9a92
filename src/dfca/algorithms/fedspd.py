"""FedSPD: soft clustering for personalised decentralised learning (Lin, Yagan, Joe-Wong; UAI 2025).

Client i holds S models and mixture weights u_i. Each round:
  1. every data point goes to the model with the lowest loss on it; u_is is the share of points of s
  2. draw s with probability u_is, take tau local steps of model s on the points of s, send it to the neighbours
  3. average model s with the neighbours that drew the same s
At the end the personal model is sum_s u_is theta_is, fine-tuned on all data of the client. The epochs are those of the
authors' public code: 5 times 5, in batches of 50, with momentum 0.5, at half the learning rate and, after three of the
five, at 0.8 of that.

Differs from the paper in: step 1 stands at the start of a round instead of its end (the same sequence, shifted); a
client averages what its neighbours send of any model, not only of the one that it drew; full-batch steps by default, as
for all algorithms here. The personal model is made anew for every evaluation.
Differs from the public code in: clients draw s by u_is, as in the paper, where the code divides them at random into
equal parts; all clients start alike, and points go to the lowest loss from the first round on, where the code begins
with random groups and trains all models in the first round; no point is moved to fill a group; nothing is held out;
batches are of equal size; clusters are not aligned, for the code's step pairs those that are least alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm, Choice, View
from dfca.core.method import FineTuning

if TYPE_CHECKING:
    from torch import Tensor


def fedspd(finetune_epochs: int = 25, finetune_batch: int = 50, momentum: float | None = None) -> Algorithm:
    """FedSPD: soft clusters; every data point has its model, a client deploys their mixture, fine-tuned."""
    for name, value, fewest in (("finetune_epochs", finetune_epochs, 0), ("finetune_batch", finetune_batch, 1)):
        if value < fewest:
            raise ConfigError(f"algorithm.fedspd.{name} must be >= {fewest}, got {value}")
    return Algorithm(
        "fedspd",
        start="shared",
        exchange="gossip",
        choose=draw_cluster,
        needs="samples",
        personal=mixture,
        finetuning=FineTuning(finetune_epochs, finetune_batch),
        momentum=momentum,
    )


def draw_cluster(view: View) -> Choice:
    """Draw s with probability u_is, the share of the client's points whose lowest loss is model s."""
    import torch  # late, as below: names and options do without

    assert view.sample_losses is not None  # the record says needs="samples"
    points = owners(view.sample_losses)
    drawn = points[torch.randint(len(points), (), generator=view.random())]
    return Choice(int(drawn), points == drawn)


def mixture(bank: Tensor, sample_losses: Tensor) -> Tensor:
    """Mix the models by their shares: sum_s u_is theta_is; bank (S, P), sample_losses (S, n) -> (P,)."""
    import torch

    shares = torch.bincount(owners(sample_losses), minlength=len(bank)).to(bank.dtype) / sample_losses.shape[1]
    return shares @ bank


def owners(sample_losses: Tensor) -> Tensor:
    """Assign every point to the model with the lowest loss on it, the lowest index on ties: (S, n) -> (n,)."""
    import torch

    known = sample_losses.nan_to_num(nan=float("inf"))
    ties = known == known.min(dim=0, keepdim=True).values
    return ties.to(torch.uint8).argmax(dim=0)
