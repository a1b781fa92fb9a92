"""What clients observe in a survey (`rules.merging.observe`), for many of them in one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dfca.core.rules.merging import EXCESSES, at_least, choose_without, compare, judge, judge_each
from dfca.sim.shards import PIECE_BYTES, samples_of
from dfca.sim.start import Start


def observe_all(
    start: Start, places: Sequence[int], own: Tensor, partners: Tensor, shares: Sequence[float], steps: int
) -> Tensor:
    """Judge pairs of models for members that hold samples out.

    Args:
        start: What the simulation began with.
        places: Of the C members.
        own: The models that they follow, (C, P).
        partners: The others, (C, P).
        shares: How much these weigh in the averages.
        steps: Personal steps.

    Returns:
        The excess and the optimism of each, (C, EXCESSES + 1).
    """
    judged = torch.empty(len(places), EXCESSES + 1, dtype=torch.float64)
    rows = max(1, 16 * PIECE_BYTES // (start.flat.size * own.element_size()))
    for begin in range(0, len(places), rows):
        some = slice(begin, min(len(places), begin + rows))
        weights = torch.tensor(shares[some], dtype=own.dtype, device=own.device)[:, None]
        judged[some] = _observe(start, places[some], own[some], partners[some], weights, steps)
    return judged


def _observe(start: Start, places: Sequence[int], own: Tensor, partners: Tensor, weights: Tensor, steps: int) -> Tensor:
    engine, clients, task = start.engine, [start.members[place] for place in places], start.flat.task
    train, held = (samples_of(data, places) for data in start.divided)
    plain = [own, partners, torch.lerp(own, partners, weights)]
    tuned = [engine.finetuned(vectors, train, steps, clients) for vectors in plain]
    trained = engine.rated(partial(judge, task), tuned[0], train).cpu()
    losses = [[engine.rated_each(partial(judge_each, task), model, held) for model in some] for some in (plain, tuned)]
    chosen_by = [engine.sample_losses(vectors[None], held) for vectors in plain[:2]]
    said = torch.empty(len(places), EXCESSES + 1, dtype=torch.float64)
    for row in range(len(places)):
        mine = torch.stack([torch.stack([of_clients[row] for of_clients in some]) for some in losses])
        chosen = choose_without(torch.cat([of_clients[row] for of_clients in chosen_by]), 0)
        said[row, :-1] = torch.tensor(compare(mine, chosen, task), dtype=torch.float64)
        said[row, -1] = at_least(task, float(mine[1, 0].mean() - trained[row]))
    return said
