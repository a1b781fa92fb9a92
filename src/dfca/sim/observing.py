"""What clients observe in a survey (`rules.merging.observe`), for many of them in one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dfca.core.rules.merging import EXCESSES, at_least, choose_without, compare, judge, judge_each, shares_of
from dfca.sim.shards import PIECE_BYTES, samples_of
from dfca.sim.start import Start

Asked = tuple[tuple[int, ...], tuple[int, ...]]
"""What a client is asked about: the clusters that are open, and how many clients follow them."""


class _Judged(NamedTuple):
    """What one member thinks of k models."""

    trained: Tensor  # (k,): mean losses on its training samples after personal steps
    held: Tensor  # (2, k, n): losses on held-out samples without and with them
    averaged: Tensor  # (2, k, n): the same of the averages with the model that it follows
    plain: Tensor  # (k, n): losses that it chooses by


def observe_all(
    start: Start, banks: Tensor, places: Sequence[int], follows: Sequence[int], asked: Sequence[Asked], steps: int
) -> Tensor:
    """Compute the optimism and the excess of members that hold samples out: (C, 1 + EXCESSES * m).

    `rules.merging.observe` does the same for one client; `tests/core/test_merging.py` holds the two equal. banks
    (m, L, P): of the members; places: the C members that observe; follows, asked: of each of them; steps: personal
    ones. The excess of clusters that a member is not asked about is NaN.
    """
    said = torch.full((len(places), 1 + EXCESSES * len(banks)), float("nan"), dtype=torch.float64)
    rows = max(1, 16 * PIECE_BYTES // (start.flat.size * banks.element_size()))
    task, wanted = start.flat.task, sorted({slot for slots, _ in asked for slot in slots})
    shares = torch.zeros(len(banks), len(places), dtype=banks.dtype, device=banks.device)
    for row, (slots, followers) in enumerate(asked):
        weights = shares_of(followers, slots.index(follows[row]))
        shares[list(slots), row] = torch.tensor(weights, dtype=banks.dtype, device=banks.device)
    for begin in range(0, len(places), rows):
        some = slice(begin, min(len(places), begin + rows))
        all_judged = _judge(start, banks, places[some], follows[some], wanted, shares[:, some], steps)
        for row, judged in enumerate(all_judged, begin):
            slots = asked[row][0]
            place, mine = slots.index(follows[row]), [wanted.index(j) for j in slots]
            losses, chosen = judged.held[:, mine], choose_without(judged.plain[mine], place)
            said[row, 0] = at_least(task, float(losses[1, place].mean() - judged.trained[mine[place]]))
            excess = compare(losses, judged.averaged[:, mine], chosen, place, task)
            table = torch.tensor(excess, dtype=torch.float64).view(EXCESSES, -1)
            said[row, 1:].view(EXCESSES, -1)[:, list(slots)] = table
    return said


def _judge(
    start: Start,
    banks: Tensor,
    places: Sequence[int],
    follows: Sequence[int],
    slots: Sequence[int],
    shares: Tensor,
    steps: int,
) -> list[_Judged]:
    """Judge some models of some members; shares (m, C): weights of models in their average with what members follow."""
    engine, clients, task = start.engine, [start.members[place] for place in places], start.flat.task
    train, held = (samples_of(data, places) for data in start.divided)
    own = banks[list(follows), list(places)]
    trained, judged, averaged, plain = [], [], [], []

    def before_and_after(vectors: Tensor, tuned: Tensor) -> list[list[Tensor]]:
        return [engine.rated_each(partial(judge_each, task), models, held) for models in (vectors, tuned)]

    for j in slots:
        vectors = banks[j][list(places)]
        tuned = engine.finetuned(vectors, train, steps, clients)
        trained.append(engine.rated(partial(judge, task), tuned, train).cpu())
        judged.append(before_and_after(vectors, tuned))
        average = torch.lerp(own, vectors, shares[j][:, None])
        averaged.append(before_and_after(average, engine.finetuned(average, train, steps, clients)))
        plain.append(engine.sample_losses(vectors[None], held))

    def of(row: int, pairs: Sequence[Sequence[Sequence[Tensor]]]) -> Tensor:
        return torch.stack([torch.stack([pair[step][row] for pair in pairs]) for step in range(2)])

    return [
        _Judged(
            torch.stack([losses[row] for losses in trained]),
            of(row, judged),
            of(row, averaged),
            torch.cat([losses[row] for losses in plain]),
        )
        for row in range(len(places))
    ]
