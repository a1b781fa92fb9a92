"""What clients observe in a survey (`rules.merging.observe`), for many of them in one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dfca.core.rules.merging import EXCESSES, at_least, choose_without, compare, judge, judge_each, shares_of
from dfca.data.clients import ClientData
from dfca.sim.shards import PIECE_BYTES, members_of
from dfca.sim.start import Start

Asked = tuple[tuple[int, ...], tuple[int, ...]]
"""What a client is asked about: the clusters that are open, and how many follow each of them."""


class _Judged(NamedTuple):
    """What one member thinks of k models: the mean losses on its training samples after personal steps (k,), the losses
    on held-out samples without and with them (2, k, n), the same of the averages with the model that it follows, and
    those that it chooses by (k, n)."""

    trained: Tensor
    held: Tensor
    averaged: Tensor
    plain: Tensor


def observe_all(
    start: Start,
    banks: Tensor,
    places: Sequence[int],
    follows: Sequence[int],
    asked: Sequence[Asked],
    steps: int,
) -> Tensor:
    """Compute the optimism and the excess of members that hold samples out: (C, 1 + EXCESSES * m).

    banks (m, L, P); places: of the members; follows: the cluster of each; asked: what about; steps: personal steps. Of
    other clusters the excess is NaN.
    """
    found = torch.full((len(places), 1 + EXCESSES * len(banks)), float("nan"), dtype=torch.float64)
    rows = max(1, 16 * PIECE_BYTES // (start.flat.size * banks.element_size()))
    task, wanted = start.flat.task, sorted({slot for slots, _ in asked for slot in slots})
    shares = torch.zeros(len(banks), len(places), dtype=banks.dtype, device=banks.device)
    for row, (slots, followers) in enumerate(asked):
        each = shares_of(followers, slots.index(follows[row]))
        shares[list(slots), row] = torch.tensor(each, dtype=banks.dtype, device=banks.device)
    for begin in range(0, len(places), rows):
        some = slice(begin, min(len(places), begin + rows))
        said = _judge(start, banks, places[some], follows[some], wanted, shares[:, some], steps)
        for row, judged in enumerate(said, begin):
            slots = asked[row][0]
            place, mine = slots.index(follows[row]), [wanted.index(j) for j in slots]
            losses, chosen = judged.held[:, mine], choose_without(judged.plain[mine], place)
            found[row, 0] = at_least(task, float(losses[1, place].mean() - judged.trained[mine[place]]))
            excess = compare(losses, judged.averaged[:, mine], chosen, place, task)
            table = torch.tensor(excess, dtype=torch.float64).view(EXCESSES, -1)
            found[row, 1:].view(EXCESSES, -1)[:, list(slots)] = table
    return found


def _judge(
    start: Start,
    banks: Tensor,
    places: Sequence[int],
    follows: Sequence[int],
    slots: Sequence[int],
    shares: Tensor,
    steps: int,
) -> list[_Judged]:
    """Judge some models of some members; shares (m, C): how much each weighs in its average with what they follow."""
    engine, clients, task = start.engine, [start.members[place] for place in places], start.flat.task
    train, held = (_of(data, places) for data in start.divided)
    own = banks[list(follows), list(places)]
    trained, judged, averaged, plain = [], [], [], []

    def before_and_after(vectors: Tensor, tuned: Tensor) -> list[list[Tensor]]:
        return [engine.rated_each(partial(judge_each, task), each, held) for each in (vectors, tuned)]

    for j in slots:
        vectors = banks[j][list(places)]
        tuned = engine.finetuned(vectors, train, steps, clients)
        trained.append(engine.rated(partial(judge, task), tuned, train).cpu())
        judged.append(before_and_after(vectors, tuned))
        average = torch.lerp(own, vectors, shares[j][:, None])
        averaged.append(before_and_after(average, engine.finetuned(average, train, steps, clients)))
        plain.append(engine.sample_losses(vectors[None], held))

    def of(row: int, pairs: Sequence[Sequence[Sequence[Tensor]]]) -> Tensor:
        return torch.stack([torch.stack([each[step][row] for each in pairs]) for step in range(2)])

    return [
        _Judged(
            torch.stack([each[row] for each in trained]),
            of(row, judged),
            of(row, averaged),
            torch.cat([each[row] for each in plain]),
        )
        for row in range(len(places))
    ]


def _of(data: ClientData, places: Sequence[int]) -> ClientData:
    """Take the samples of some members: a view where they follow one another."""
    run = range(places[0], places[-1] + 1)
    return members_of(data, run) if len(run) == len(places) else data.subset(places)
