"""The one evaluator of every algorithm.

Models are chosen with training (or held-out) data and scored with test data; nobody picks a model with test labels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfca.core.rng import stream
from dfca.data.clients import Split


class Distribution(NamedTuple):
    """Test samples of one true cluster, from all its clients: a part to pick a model with, a part to score it on."""

    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def distributions(split: Split, samples: int, seed: int) -> list[Distribution]:
    """Draw up to `samples` test samples of each true cluster, one half to pick with and one half to score.

    Empty where nobody knows the true clusters, or a cluster has fewer than two test samples.
    """
    if split.clusters is None:
        return []
    found = []
    for cluster in range(int(split.clusters.max()) + 1):
        members = (split.clusters == cluster).nonzero()[:, 0].tolist()
        x = torch.cat([split.test.of(client)[0] for client in members]) if members else torch.empty(0)
        y = torch.cat([split.test.of(client)[1] for client in members]) if members else torch.empty(0)
        if len(y) < 2:
            return []
        order = torch.randperm(len(y), generator=stream(seed, "evaluation", cluster))[:samples].to(y.device)
        half = len(order) // 2
        first, second = order[:half], order[half:]
        found.append(Distribution((x[first], y[first]), (x[second], y[second])))
    return found


def cluster_accuracy(assignments: Tensor, truth: Tensor) -> float:
    """Share of clients in the right cluster, under the best one-to-one matching of found and true clusters."""
    from scipy.optimize import linear_sum_assignment

    counts = confusion(assignments, truth).numpy()
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return float(counts[rows, columns].sum() / len(truth))


def adjusted_rand_index(assignments: Tensor, truth: Tensor) -> float:
    """Agreement of two partitions corrected for chance: 1 for equal ones, about 0 for random ones."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(truth.numpy(), assignments.numpy()))


def confusion(assignments: Tensor, truth: Tensor) -> Tensor:
    """Count the clients of each found (row) and true (column) cluster."""
    rows, columns = int(assignments.max()) + 1, int(truth.max()) + 1
    return torch.bincount(assignments * columns + truth, minlength=rows * columns).view(rows, columns)


def averages(bank: Tensor) -> Tensor:
    """Average each cluster's model over all clients, as matrix products: (m, N, P) -> (m, P)."""
    clients = bank.shape[1]
    share = torch.full((clients,), 1 / clients, dtype=bank.dtype, device=bank.device)
    return torch.stack([share @ models for models in bank])


def disagreement(bank: Tensor, rows: int = 16) -> Tensor:
    """Compute Disp_j = 1/N sum_i ||theta_ij - mean_i theta_ij||^2 of every cluster: (m, N, P) -> (m,)."""
    means = averages(bank)
    total = torch.zeros(len(bank), dtype=torch.float64)
    for j, models in enumerate(bank):
        for begin in range(0, models.shape[0], rows):
            apart = torch.linalg.vector_norm(models[begin : begin + rows] - means[j], dim=1)
            total[j] += apart.cpu().double().square().sum()
    return total / bank.shape[1]


def drift(before: Tensor, after: Tensor) -> Tensor:
    """Measure how far mixing moved the network's averages, relative to them (Lemma 3 says 0): (m, P) x 2 -> (m,)."""
    moved: Tensor = torch.linalg.vector_norm(after - before, dim=1)
    size: Tensor = torch.linalg.vector_norm(before, dim=1)
    return moved / size.clamp_min(torch.finfo(before.dtype).tiny)
