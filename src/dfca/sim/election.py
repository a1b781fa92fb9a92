"""The election of `core.election` for all clients at once: what every client concludes once all messages have arrived.

`testing.elect` runs the same election as messages between sans-I/O electors; a test says that both end alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dfca.core.election import ElectionOptions, Parts, bid, cast, divide, lot, verdict
from dfca.core.rng import stream
from dfca.data.clients import ClientData
from dfca.sim.engine import Engine


@dataclass(frozen=True)
class Turn:
    """One candidate: who, with which bid, how many clients it helped, the test statistic, and whether it was accepted."""

    candidate: int
    bid: float
    support: int
    z: float
    accepted: bool


@dataclass(frozen=True)
class Outcome:
    """The elected centres (k, P), the candidates in the order they stood, and what was sent.

    models_flooded counts the models that were flooded (each reaches every client of the component once); scalars the
    numbers that one client sent to all.
    """

    centres: Tensor
    turns: tuple[Turn, ...]

    @property
    def models_flooded(self) -> int:
        """Count the models that travelled: the first centre's and every candidate's."""
        return len(self.turns)


def elect(
    engine: Engine,
    start: Tensor,
    data: ClientData,
    members: Sequence[int],
    seed: int,
    clusters: int | None,
    options: ElectionOptions,
) -> Outcome:
    """Elect centres among the members of one connected component.

    start (P,) is what all warm up from. With `clusters` given that many centres are elected as long as there are
    candidates; with None the verdicts say when to stop.
    """
    parts = [divide(data.sizes[i], stream(seed, "parts", i)) for i in members]
    warm, bidding, voting = (_take(data, members, [getattr(p, name) for p in parts]) for name in Parts._fields)
    own = _warm_up(engine, start, warm, options.warmup_steps)
    alone = [losses[0] for losses in engine.sample_losses(own[None], bidding)]

    first = min(range(len(members)), key=lambda position: (lot(seed, members[position]), members[position]))
    turns = [Turn(members[first], 0.0, 0, 0.0, accepted=True)]
    chosen, refused, misses = [first], set[int](), 0
    on_bids = _losses_of(engine, own[first], bidding)
    on_votes = _losses_of(engine, own[first], voting)
    most = min(options.most if clusters is None else clusters, len(members))
    while len(chosen) < most and misses < options.patience:
        bids = {
            position: bid(on_bids[position], alone[position])
            for position in range(len(members))
            if position not in chosen and position not in refused
        }
        if not bids:
            break
        candidate = max(bids, key=lambda position: (bids[position], -members[position]))
        new_bids = _losses_of(engine, own[candidate], bidding)
        new_votes = _losses_of(engine, own[candidate], voting)
        votes = [
            cast(on_bids[p], alone[p], new_bids[p][0], on_votes[p], new_votes[p][0]) for p in range(len(members))
        ]  # fmt: skip
        found = verdict(votes, candidate, options)
        turns.append(Turn(members[candidate], bids[candidate], found.support, found.z, found.accepted))
        if not found.accepted:
            refused.add(candidate)
            misses += 1
            continue
        misses = 0
        chosen.append(candidate)
        on_bids = [torch.cat(pair) for pair in zip(on_bids, new_bids, strict=True)]
        on_votes = [torch.cat(pair) for pair in zip(on_votes, new_votes, strict=True)]
    if clusters is not None:
        chosen += [p for p in _by_bid(on_bids, alone, members) if p not in chosen][: clusters - len(chosen)]
    return Outcome(own[chosen].clone(), tuple(turns))


def _by_bid(on_bids: Sequence[Tensor], alone: Sequence[Tensor], members: Sequence[int]) -> list[int]:
    """Order clients by bid, the largest first: who fills up the centres that were asked for but not found."""
    bids = [bid(on_bids[p], alone[p]) for p in range(len(members))]
    return sorted(range(len(members)), key=lambda p: (-bids[p], members[p]))


def _warm_up(engine: Engine, start: Tensor, warm: ClientData, steps: int) -> Tensor:
    """Train every client's model from the common start: (C, P)."""
    from dfca.sim.engine import finetuned

    return finetuned(engine, start.expand(len(warm.sizes), -1), warm, steps)


def _losses_of(engine: Engine, model: Tensor, data: ClientData) -> list[Tensor]:
    """Compute the losses per sample of one model at every client: C tensors (1, n_i)."""
    return engine.sample_losses(model[None, None], data)


def _take(data: ClientData, members: Sequence[int], indices: Sequence[Tensor]) -> ClientData:
    """Copy some samples of some clients."""
    pieces = [data.of(i) for i in members]
    x = torch.cat([x[rows] for (x, _), rows in zip(pieces, indices, strict=True)])
    y = torch.cat([y[rows] for (_, y), rows in zip(pieces, indices, strict=True)])
    offsets = [0]
    for rows in indices:
        offsets.append(offsets[-1] + len(rows))
    return ClientData(x, y, tuple(offsets))
