"""What clients observe in a survey (`core.merging.observe`), for many of them in one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dfca.core.merging import judge
from dfca.data.clients import ClientData
from dfca.sim.shards import PIECE_BYTES, members_of
from dfca.sim.start import Start


def observe_all(
    start: Start, banks: Tensor, places: Sequence[int], follows: Sequence[int], slots: Sequence[int], steps: int
) -> Tensor:
    """Compute the optimism and the losses after personal steps of members that hold samples out: (C, 1 + m).

    banks (m, L, P); places: of the members; follows: the cluster of each; slots: the clusters that are open; steps:
    personal steps. Of others the loss is NaN.
    """
    found = torch.full((len(places), 1 + len(banks)), float("nan"), dtype=torch.float64)
    rows = max(1, 16 * PIECE_BYTES // (start.flat.size * banks.element_size()))
    for begin in range(0, len(places), rows):
        some = range(begin, min(len(places), begin + rows))
        here = [places[row] for row in some]
        found[begin : some.stop] = _observe(start, banks, here, [follows[row] for row in some], slots, steps)
    return found


def _observe(
    start: Start, banks: Tensor, places: list[int], follows: list[int], slots: Sequence[int], steps: int
) -> Tensor:
    engine, clients, rate = start.engine, [start.members[place] for place in places], partial(judge, start.flat.task)
    train, held = (_of(data, places) for data in start.divided)
    vectors = banks[follows, places]
    found = torch.full((len(places), 1 + len(banks)), float("nan"), dtype=torch.float64)
    found[:, 0] = (engine.rated(rate, vectors, held) - engine.rated(rate, vectors, train)).cpu()
    for j in slots:
        tuned = engine.finetuned(banks[j][places], train, steps, clients)
        found[:, 1 + j] = engine.rated(rate, tuned, held).cpu()
    return found


def _of(data: ClientData, places: Sequence[int]) -> ClientData:
    """Take the samples of some members: a view where they follow one another."""
    run = range(places[0], places[-1] + 1)
    return members_of(data, run) if len(run) == len(places) else data.subset(places)
