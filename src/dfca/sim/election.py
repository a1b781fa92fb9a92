"""The election of `core.election` for all clients at once: what every client concludes once all messages have arrived.

`testing.elect` runs the same election as messages between sans-I/O electors; a test says that both end alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx
import torch
from torch import Tensor

from dfca.core.election import ElectionOptions, Parts, bid, cast, divide, lot, verdict
from dfca.core.rng import stream
from dfca.data.clients import ClientData
from dfca.sim.engine import Engine, finetuned


@dataclass(frozen=True)
class Turn:
    """One candidate: who, its bid, how many clients it helped, the test statistic, and whether it was accepted."""

    candidate: int
    bid: float
    support: int
    z: float
    accepted: bool


@dataclass(frozen=True)
class Outcome:
    """The elected centres (k, P), the candidates as they stood, and what the messages of `core.elector` cost."""

    centres: Tensor
    turns: tuple[Turn, ...]
    models_sent: int
    scalars_sent: int


def elect(
    engine: Engine,
    start: Tensor,
    data: ClientData,
    graph: nx.Graph,
    seed: int,
    clusters: int | None,
    options: ElectionOptions,
) -> Outcome:
    """Elect centres among the clients of one connected graph.

    start (P,) is what all warm up from. With `clusters` given that many centres are elected as long as there are
    candidates; with None the verdicts say when to stop.
    """
    members = sorted(graph)
    parts = [divide(data.sizes[i], stream(seed, "parts", i)) for i in members]
    warm, bidding, voting = (take_parts(data, members, parts, name) for name in Parts._fields)
    own = warm_up(engine, start, warm, options.warmup_steps)
    alone = [losses[0] for losses in engine.sample_losses(own[None], bidding)]

    first = min(range(len(members)), key=lambda position: (lot(seed, members[position]), members[position]))
    turns = [Turn(members[first], 0.0, 0, 0.0, accepted=True)]
    scalars = scalars_of_turn(graph, {i: -float(lot(seed, i)) for i in members}, centres=0)
    chosen, refused, misses = [first], set[int](), 0
    on_bids = _losses_of(engine, own[first], bidding)
    on_votes = _losses_of(engine, own[first], voting)
    most = min(options.most if clusters is None else clusters, len(members))
    while len(chosen) < most:
        forced = misses >= options.patience
        if forced and clusters is None:
            break  # where so many were asked for, it goes on by bids alone
        barred = {*chosen} if forced else {*chosen, *refused}
        bids = {p: bid(on_bids[p], alone[p]) for p in range(len(members)) if p not in barred}
        if not bids:
            misses = options.patience  # everybody has stood
            continue
        candidate = max(bids, key=lambda position: (bids[position], -members[position]))
        new_bids = _losses_of(engine, own[candidate], bidding)
        new_votes = _losses_of(engine, own[candidate], voting)
        votes = [
            cast(on_bids[p], alone[p], new_bids[p][0], on_votes[p], new_votes[p][0]) for p in range(len(members))
        ]  # fmt: skip
        found = verdict(votes, candidate, options)
        accepted = found.accepted or forced
        scalars += scalars_of_turn(graph, {members[p]: value for p, value in bids.items()}, len(chosen))
        turns.append(Turn(members[candidate], bids[candidate], found.support, found.z, accepted))
        if not accepted:
            refused.add(candidate)
            misses += 1
            continue
        misses = misses if forced else 0
        chosen.append(candidate)
        on_bids = [torch.cat(pair) for pair in zip(on_bids, new_bids, strict=True)]
        on_votes = [torch.cat(pair) for pair in zip(on_votes, new_votes, strict=True)]
    return Outcome(own[chosen].clone(), tuple(turns), len(turns) * (len(members) - 1), scalars)


def scalars_of_turn(graph: nx.Graph, bids: Mapping[int, float], centres: int) -> int:
    """Count the scalars of one turn of `core.elector` on a connected graph: bids, announcements, requests, votes."""
    clients, ends = len(graph), 2 * int(graph.number_of_edges())
    votes = clients * ends * (5 + 2 * centres) if centres else 0
    return 2 * _bid_messages(graph, bids) + 2 * ends + 2 * (clients - 1) + votes


def _bid_messages(graph: nx.Graph, bids: Mapping[int, float]) -> int:
    """Count the messages of the bidding: everybody forwards every improvement to all neighbours, hop by hop."""
    best = {i: (value, -i) for i, value in bids.items()}
    outgoing = {i: [best[i]] if i in best else [] for i in graph}
    messages = 0
    while any(outgoing.values()):
        messages += sum(len(sent) * int(graph.degree(i)) for i, sent in outgoing.items())
        incoming = {i: [bid for m in sorted(graph.neighbors(i)) for bid in outgoing[m]] for i in graph}
        outgoing = {i: [] for i in graph}
        for i, heard in incoming.items():
            for word in heard:
                if i not in best or word > best[i]:
                    best[i] = word
                    outgoing[i].append(word)
    return messages


def warm_up(engine: Engine, start: Tensor, warm: ClientData, steps: int) -> Tensor:
    """Train every client's model from the common start: (C, P)."""
    own = finetuned(engine, start.expand(len(warm.sizes), -1), warm, steps)
    return torch.where(own.isfinite().all(dim=1, keepdim=True), own, start)  # diverged: it stands with the start


def _losses_of(engine: Engine, model: Tensor, data: ClientData) -> list[Tensor]:
    """Compute the losses per sample of one model at every client: C tensors (1, n_i)."""
    return engine.sample_losses(model[None, None], data)


def take_parts(data: ClientData, members: Sequence[int], parts: Sequence[Parts], name: str) -> ClientData:
    """Copy one part of the samples of some clients."""
    rows = [getattr(part, name).to(data.y.device) for part in parts]
    pieces = [data.of(i) for i in members]
    x = torch.cat([x[mine] for (x, _), mine in zip(pieces, rows, strict=True)])
    y = torch.cat([y[mine] for (_, y), mine in zip(pieces, rows, strict=True)])
    return ClientData(x, y, tuple(accumulate((len(mine) for mine in rows), initial=0)))
