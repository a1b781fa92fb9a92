"""What clients observe in a survey (`core.merging.observe`), for many of them in one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dfca.core.merging import EXCESSES, at_least, choose_without, compare, judge, judge_each
from dfca.data.clients import ClientData
from dfca.sim.shards import PIECE_BYTES, members_of
from dfca.sim.start import Start


def observe_all(
    start: Start,
    banks: Tensor,
    places: Sequence[int],
    follows: Sequence[int],
    slots: Sequence[Sequence[int]],
    steps: int,
) -> Tensor:
    """Compute the optimism and the excess of members that hold samples out: (C, 1 + EXCESSES * m).

    banks (m, L, P); places: of the members; follows: the cluster of each; slots: those that are open for
    each; steps: personal steps. Of other clusters the excess is NaN.
    """
    found = torch.full((len(places), 1 + EXCESSES * len(banks)), float("nan"), dtype=torch.float64)
    rows = max(1, 16 * PIECE_BYTES // (start.flat.size * banks.element_size()))
    wanted = sorted(set().union(*slots))
    for begin in range(0, len(places), rows):
        some = range(begin, min(len(places), begin + rows))
        said = _judge(start, banks, [places[row] for row in some], wanted, steps)
        for row, (trained, held, plain) in zip(some, said, strict=True):
            place, mine = slots[row].index(follows[row]), [wanted.index(j) for j in slots[row]]
            losses, chosen = held[:, mine], choose_without(plain[mine], place)
            found[row, 0] = at_least(start.flat.task, float(losses[1, place].mean() - trained[mine[place]]))
            excess = torch.tensor(compare(losses, chosen, place), dtype=torch.float64)
            found[row, 1:].view(EXCESSES, -1)[:, list(slots[row])] = excess.view(EXCESSES, -1)
    return found


def _judge(
    start: Start, banks: Tensor, places: list[int], slots: Sequence[int], steps: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Judge some models of some members: for each member the mean losses on its training samples after personal steps
    (k,), the losses on held-out samples without and with them (2, k, n), and those that it chooses by (k, n)."""
    engine, clients, task = start.engine, [start.members[place] for place in places], start.flat.task
    train, held = (_of(data, places) for data in start.divided)
    trained, judged, plain = [], [], []
    for j in slots:
        vectors = banks[j][places]
        tuned = engine.finetuned(vectors, train, steps, clients)
        trained.append(engine.rated(partial(judge, task), tuned, train).cpu())
        judged.append([engine.rated_each(partial(judge_each, task), each, held) for each in (vectors, tuned)])
        plain.append(engine.sample_losses(vectors[None], held))
    return [
        (
            torch.stack([each[row] for each in trained]),
            torch.stack([torch.stack([each[step][row] for each in judged]) for step in range(2)]),
            torch.cat([each[row] for each in plain]),
        )
        for row in range(len(places))
    ]


def _of(data: ClientData, places: Sequence[int]) -> ClientData:
    """Take the samples of some members: a view where they follow one another."""
    run = range(places[0], places[-1] + 1)
    return members_of(data, run) if len(run) == len(places) else data.subset(places)
