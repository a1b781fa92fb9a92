"""The one evaluator of every algorithm.

Models are chosen with training (or held-out) data and scored with test data; test labels never pick a model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dfca.core.learning.inputs import Samples, change, tensors_of
from dfca.core.rng import stream
from dfca.data.clients import Split

Add = Callable[[Tensor], Tensor]
"""Adds up what several processes have: `Shards.sum`."""


def alone(tensor: Tensor) -> Tensor:
    """Add up what one process has."""
    return tensor


class Distribution(NamedTuple):
    """Test samples of one true cluster, from all its clients: a part to pick a model with, a part to score it on."""

    held_out: tuple[Samples, Tensor]
    test: tuple[Samples, Tensor]


def distributions(
    split: Split, samples: int, seed: int, members: range | None = None, add: Add = alone
) -> list[Distribution]:
    """Draw up to `samples` test samples of each true cluster, one half to pick with and one half to score.

    Empty where the true clusters are unknown, or a cluster has fewer than two test samples. With `members`, only their
    samples are here, and `add` puts those of all together.
    """
    if split.clusters is None:
        return []
    test, drawn_sets = split.test, []
    here = range(test.clients) if members is None else members
    for cluster in range(int(split.clusters.max()) + 1):
        holders = (split.clusters == cluster).nonzero()[:, 0].tolist()
        ends = list(accumulate((test.sizes[client] for client in holders), initial=0))
        if ends[-1] < 2:
            return []
        drawn = torch.randperm(ends[-1], generator=stream(seed, "evaluation", cluster))[:samples].tolist()
        x, y = change(test.of(holders[0])[0], partial(_blank, len(drawn))), _blank(len(drawn), test.y)
        for position, sample in enumerate(drawn):
            place = bisect_right(ends, sample) - 1
            if holders[place] in here:
                xs, ys = test.of(holders[place])
                for whole, part in zip((*tensors_of(x), y), (*tensors_of(xs), ys), strict=True):
                    whole[position] = part[sample - ends[place]]
        x, y, half = change(x, add), add(y), len(drawn) // 2
        drawn_sets.append(Distribution((x[:half], y[:half]), (x[half:], y[half:])))
    return drawn_sets


def _blank(count: int, like: Tensor) -> Tensor:
    """Make room for `count` rows."""
    return like.new_zeros(count, *like.shape[1:])


def cluster_accuracy(assignments: Tensor, truth: Tensor) -> float:
    """Share of clients in the right cluster, under the best one-to-one matching of found and true clusters."""
    counts = confusion(assignments, truth).numpy()
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return float(counts[rows, columns].sum() / len(truth))


def adjusted_rand_index(assignments: Tensor, truth: Tensor) -> float:
    """Agreement of two partitions corrected for chance: 1 for equal ones, about 0 for random ones."""
    return _rand_index(tuple(truth.tolist()), tuple(assignments.tolist()))


@lru_cache(16)  # most evaluations see the assignments of the one before
def _rand_index(truth: tuple[int, ...], assigned: tuple[int, ...]) -> float:
    from sklearn.metrics import adjusted_rand_score  # late: it takes as long to import as torch does

    return float(adjusted_rand_score(truth, assigned))


def confusion(assignments: Tensor, truth: Tensor) -> Tensor:
    """Count the clients of each found (row) and true (column) cluster."""
    rows, columns = int(assignments.max()) + 1, int(truth.max()) + 1
    return torch.bincount(assignments * columns + truth, minlength=rows * columns).view(rows, columns)


def average(models: Tensor, clients: int, add: Add = alone) -> Tensor:
    """Average one cluster's model over all clients, as a matrix product: (L, P) -> (P,)."""
    return add(torch.full((len(models),), 1 / clients, dtype=models.dtype, device=models.device) @ models)


def disagreement(bank: Tensor, clients: int | None = None, add: Add = alone, rows: int = 16) -> Tensor:
    """Compute Disp_j = 1/N sum_i ||theta_ij - mean_i theta_ij||^2 of every cluster: (m, L, P) -> (m,)."""
    clients = clients or bank.shape[1]
    total = torch.zeros(len(bank), dtype=torch.float64)
    for j, models in enumerate(bank):
        mean = average(models, clients, add)
        for block in models.split(rows):
            total[j] += torch.linalg.vector_norm(block - mean, dim=1).cpu().double().square().sum()
    return add(total) / clients


class Drift:
    """Measure how far mixing moves the network's averages, relative to them (Lemma 3 says 0).

    `before` and `after` see every block of columns (L, w) that is mixed; a cluster that none is shown of stands still.
    """

    def __init__(self, bank: Tensor, clients: int) -> None:
        models, _, size = bank.shape
        self._clients = clients
        self._means = torch.zeros(2, models, size, dtype=bank.dtype, device=bank.device)

    def before(self, cluster: int, columns: slice, block: Tensor) -> None:
        """Look at a block that is about to be mixed."""
        self._means[0, cluster, columns] = average(block, self._clients)

    def after(self, cluster: int, columns: slice, block: Tensor) -> None:
        """Look at a block that was mixed."""
        self._means[1, cluster, columns] = average(block, self._clients)

    def result(self, add: Add = alone) -> Tensor:
        """Compute ||after - before|| / ||before|| of every cluster: (m,)."""
        return drift(*add(self._means))


def drift(before: Tensor, after: Tensor) -> Tensor:
    """Compare averages before and after mixing: (m, P) x 2 -> (m,)."""
    moved: Tensor = torch.linalg.vector_norm(after - before, dim=1)
    size: Tensor = torch.linalg.vector_norm(before, dim=1)
    return moved / size.clamp_min(torch.finfo(before.dtype).tiny)
