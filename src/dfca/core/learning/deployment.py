"""What one client deploys: the model that fits it best, or what its algorithm makes of all of them; and its curve.

`sim.evaluation` and `sim.personal` do the same for all clients at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dfca.core.client import Client, effective
from dfca.core.learning.local import draw_steps, local_steps, losses, lowest, sample_losses
from dfca.core.rules.personal import GRID, Pair, PlainSteps


def deploy(client: Client, bank: Tensor, samples: Pair, closed: Sequence[int] = ()) -> tuple[int, Tensor]:
    """Choose what a client deploys from a bank (m, P), by its samples: the cluster, and the model (P,)."""
    means = losses(client.model, bank, *samples)
    means[list(closed)] = torch.inf
    informed = client.algorithm.informed and client.true_cluster is not None
    cluster = client.true_cluster if informed and client.true_cluster is not None else lowest(means)
    if client.algorithm.personal is None:
        return cluster, bank[cluster]
    vector = client.algorithm.personal(bank, sample_losses(client.model, bank, *samples))
    for stage, options in enumerate(client.algorithm.finetuning.stages(client.method.local, len(samples[1]))):
        batches = draw_steps(len(samples[1]), options, client.seed, client.id, -1 - stage).batches
        vector = local_steps(client.model, vector, *samples, options, batches)
    return cluster, vector


def measure_in_slices(
    client: Client, bank: Tensor, train: Pair, held: Pair, closed: Sequence[int] = ()
) -> Iterator[tuple[int, int, Tensor] | None]:
    """Measure the curve of personal steps: the cluster, how many samples are held out, and the losses (G,), NaN where
    none are. Yields None after every point, and the result at the end."""
    cluster, vector = deploy(client, bank, train, closed)
    losses = torch.full((len(GRID),), torch.nan, dtype=torch.float64)
    for place, loss in enumerate(steps_of(client).curve(vector, train, held)) if len(held[1]) else ():
        losses[place] = loss
        yield None
    yield cluster, len(held[1]), losses


def steps_of(client: Client) -> PlainSteps:
    """Make the personal steps of a client."""
    return PlainSteps(client.model, effective(client.method.local, client.algorithm), client.seed, client.id)
