"""Predictions of several models at once: sum_s w_s softmax f_s(x), or sum_s w_s f_s(x) where outputs are no scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dfca.core.learning.local import infer
from dfca.core.learning.params import FlatModel
from dfca.core.learning.task import Task
from dfca.data.clients import ClientData


def mix_outputs(task: Task, outputs: Tensor, weights: Tensor) -> Tensor:
    """Mix the outputs of m models by their weights: (m, n, ...), (m,) -> (n, ...).

    Of classes and tokens, log sum_s w_s softmax(z_s): outputs whose softmax is the mixture. Of labels, the same for
    each on its own; of numbers and anything else, sum_s w_s z_s.
    """
    share = weights.to(outputs).view(-1, *[1] * (outputs.dim() - 1))
    tiny = torch.finfo(outputs.dtype).tiny
    if task.targets in ("classes", "tokens"):
        return (share * outputs.softmax(dim=-1)).sum(dim=0).clamp_min(tiny).log()
    if task.targets == "labels":
        yes = (share * outputs.sigmoid()).sum(dim=0).clamp_min(tiny)
        no = (share * (-outputs).sigmoid()).sum(dim=0).clamp_min(tiny)
        return yes.log() - no.log()
    return (share * outputs).sum(dim=0)


def mixed_scores(
    model: FlatModel, banks: Tensor, weights: Sequence[Tensor], data: ClientData, here: Sequence[int]
) -> Tensor:
    """Score the mixtures of some clients on their samples: banks (m, L, P) -> (L,), NaN for the others."""
    scores = torch.full((banks.shape[1],), float("nan"), dtype=torch.float64)
    with torch.no_grad():
        for i in here:
            x, y = data.of(i)
            outputs = torch.stack([infer(model, vector, x, "score") for vector in banks[:, i]])
            mixed = mix_outputs(model.task, outputs, weights[i])
            scores[i] = model.task.metric.score(mixed[None], y[None])[0].cpu()
    return scores
