"""The personal last step: after the last round a client fine-tunes its copy of the model that it deploys, for its own
use; what comes of it is never sent.

Client i takes s_i plain steps (full batch, no momentum) on all its samples. With theta_i^s its model after s steps on
the samples that it trains on, c(i) the cluster that it deploys, and H_i the samples that it holds out of training
(`learning.local.held_out`) for the first three quarters of the rounds:

  C_i(s)  = 1/|H_i| sum over d in H_i of L(theta_i^s, d)                                  for s in GRID: its curve
  P_i(s)  = C_i(s), then SWEEPS times  P_i <- P_i + sum over neighbours m with c(m) = c(i) of w_im (P_m - P_i)
  S_i(s)  = |H_i| C_i(s) + POOL * P_i(s)
  s_i     = argmin_s S_i(s)  where that is below (1 - GAIN) S_i(0),  else 0

with Metropolis weights w_im: P_i comes near the mean curve of the cluster. L is the loss that clusters are judged by
(`rules.merging.judge`). A client that holds nothing out takes no steps. docs/auto.md (section 5) says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dfca.core.learning.inputs import Samples
from dfca.core.learning.local import infer, local_steps, lowest
from dfca.core.learning.params import FlatModel
from dfca.core.method import LocalOptions, PersonalSteps
from dfca.core.rng import seeded
from dfca.core.rules.merging import judge
from dfca.core.rules.mixing import metropolis_weight

GRID = (0, 1, 2, 5, 10, 20, 50, 100, 200)  # the numbers of steps to pick from
POOL = 50  # number of held-out samples that the pool of curves is worth
GAIN = 0.02  # steps are taken where they lower the score by more than this share of it
SWEEPS = 10  # how often clients of a cluster average their curves with their neighbours'
FIRST_SCALARS = len(GRID) + 1  # numbers that a client sends to every neighbour: its curve, and its cluster
LATER_SCALARS = 1 + (SWEEPS - 1) * len(GRID)  # then to those of its cluster: their number, and a curve per sweep
FEWEST_ROUNDS = 4  # with fewer rounds there is no last quarter: nothing is held out, and nothing picked
AFTER = -1  # the round whose random streams belong to steps after the last one

Pair = tuple[Samples, Tensor]  # samples x (n, *shape) and their targets y (n, ...)


def release_round(steps: PersonalSteps, rounds: int) -> int | None:
    """Return the round beside which the curve is measured; the next trains on everything. None: nothing is held out."""
    return rounds * 3 // 4 if steps == "auto" and rounds >= FEWEST_ROUNDS else None


def plain(local: LocalOptions, steps: int) -> LocalOptions:
    """Make the options of personal steps: those of training, with full batches and without momentum."""
    return local.full_batch(steps)


class PlainSteps:
    """The plain steps of one client, for its own use."""

    def __init__(self, model: FlatModel, local: LocalOptions, seed: int, client: int) -> None:
        self.model, self.local, self.seed, self.client = model, local, seed, client

    def take(self, vector: Tensor, samples: Pair, steps: int) -> Tensor:
        """Take personal steps from a model (P,); one that becomes non-finite is left as it was."""
        moved = self._steps(vector, samples, steps)
        return moved if bool(torch.isfinite(moved).all()) else vector

    def curve(self, vector: Tensor, train: Pair, held: Pair) -> Iterator[Tensor]:
        """Yield C(s) for the steps of the grid one after the other, from a model (P,), in double precision."""
        yield self._loss(vector, held)
        for begin, end in pairwise(GRID):
            vector = self._steps(vector, train, end - begin)
            yield self._loss(vector, held)

    def _steps(self, vector: Tensor, samples: Pair, steps: int) -> Tensor:
        with seeded(self.seed, "noise", self.client, AFTER):
            return local_steps(self.model, vector, *samples, plain(self.local, steps))

    def _loss(self, vector: Tensor, held: Pair) -> Tensor:
        with torch.no_grad():
            return judge(self.model.task, infer(self.model, vector, held[0], "score")[None], held[1][None])[0]


def average(pool: Tensor, others: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Average a pooled curve (G,) once with those of neighbours of the same cluster: curves, and how many neighbours of
    the cluster those have. Curves that are not finite are neither sent nor averaged."""
    degree = len(others)
    return pool + sum((metropolis_weight(degree, theirs) * (other - pool) for other, theirs in others), 0 * pool)


def pick(curve: Tensor, held: int, pool: Tensor) -> int:
    """Pick s_i by the own curve (G,), on `held` samples, and the pool (G,).

    Steps after which the own loss is not finite are not taken. Ties: the fewest.
    """
    scores = held * curve + POOL * pool
    best = lowest(scores)
    return 0 if scores[best] >= (1 - GAIN) * scores[0] else GRID[best]
