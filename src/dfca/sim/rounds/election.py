"""The election of `core.election` for all clients at once: what every client concludes once all messages have arrived.

`testing.elect` runs the same election as messages between sans-I/O electors; a test says that both end alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import networkx as nx
import torch
from torch import Tensor

from dfca.core.election import ElectionOptions, Parts, Vote, bid, cast, divide, lot, verdict
from dfca.core.rng import stream
from dfca.data.clients import ClientData
from dfca.sim.engine import Engine
from dfca.sim.shards import PIECE_BYTES, Shards, members_of


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


class Candidacy(NamedTuple):
    """One turn of an election: where the candidate stands among the clients, its model (P,), and what the turn cost."""

    position: int
    model: Tensor
    turn: Turn
    scalars: int


class Electorate:
    """The clients of one connected graph: every rank computes for its own, and hears the bids and votes of the others.

    Clients are known by their position in `ids`. A client's warmed-up model is not kept: it is warmed up again where it
    stands for election. data: the samples of the members of this rank, in order.
    """

    def __init__(
        self,
        engine: Engine,
        start: Tensor,
        data: ClientData,
        graph: nx.Graph,
        seed: int,
        steps: int,
        shards: Shards,
        *stage: int,
    ) -> None:
        self.ids, self._graph = sorted(graph), graph
        self._engine, self._start, self._steps, self._shards = engine, start, steps, shards
        self._here = [position for position, client in enumerate(self.ids) if client in shards.members]
        mine = [self.ids[position] - shards.members.start for position in self._here]
        with shards.agreed():
            parts = [
                divide(data.sizes[i], stream(seed, "parts", shards.members.start + i, *stage)) for i in mine
            ]  # fmt: skip
        self._warm, self._bidding, self._voting = (_take_parts(data, mine, parts, name) for name in Parts._fields)
        self._alone: list[Tensor] = []
        rows = max(1, 16 * PIECE_BYTES // (start.numel() * start.element_size()))
        for begin in range(0, len(mine), rows):
            some = range(begin, min(len(mine), begin + rows))
            losses = engine.sample_losses(self._warm_up(some)[None], members_of(self._bidding, some))
            self._alone += [each[0] for each in losses]
        self._on_bids: list[Tensor] = []
        self._on_votes: list[Tensor] = []
        self._new: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.centres = 0

    def hold(self, banks: Tensor) -> None:
        """Take the models that the clients hold as centres: banks (m, L, P) of the members of this rank."""
        rows = [self.ids[position] - self._shards.members.start for position in self._here]
        place = None if len(rows) == banks.shape[1] else rows
        self._on_bids, self._on_votes = (
            self._engine.sample_losses(banks, part, place) if rows else [] for part in (self._bidding, self._voting)
        )
        self.centres = len(banks)

    def open(self, model: Tensor) -> None:
        """Take one model as the first centre."""
        self._look(model)
        self._on_bids, self._on_votes = self._new
        self.centres = 1

    def model(self, position: int) -> Tensor:
        """Warm up the model of one client, (P,), and give it to all."""
        mine = position in self._here
        row = self._here.index(position) if mine else 0
        model = self._warm_up(range(row, row + 1))[0] if mine else torch.empty_like(self._start)
        return self._shards.tell(model, self.ids[position])

    def bids(self, standing: Collection[int]) -> dict[int, float]:
        """Hear the bids of those that stand."""
        mine = [
            [bid(centres, own) if position in standing else 0.0]
            for position, centres, own in zip(self._here, self._on_bids, self._alone, strict=True)
        ]
        heard = self._hear(mine, 1)
        return {position: heard[position][0] for position in sorted(standing)}

    def votes(self, model: Tensor) -> list[Vote]:
        """Hear what everybody says of a candidate's model."""
        self._look(model)
        mine = []
        for centres, own, new_bid, on_votes, new_vote in zip(
            self._on_bids, self._alone, self._new[0], self._on_votes, self._new[1], strict=True
        ):
            vote = cast(centres, own, new_bid[0], on_votes, new_vote[0])
            mine.append([vote.follows, vote.gain, vote.left, vote.samples, *vote.totals, *vote.squares])
        heard, c = self._hear(mine, 4 + 2 * self.centres), self.centres
        return [
            Vote(int(row[0]), row[1], row[2], int(row[3]), tuple(row[4 : 4 + c]), tuple(row[4 + c :])) for row in heard
        ]

    def turn(
        self, standing: Collection[int], options: ElectionOptions, forced: bool = False, followed_only: bool = False
    ) -> Candidacy:
        """Hold one turn: the highest bid stands, and if it is accepted its model is one more centre.

        forced: it is, whatever the verdict. followed_only: see `verdict`.
        """
        bids = self.bids(standing)
        candidate = max(bids, key=lambda position: (bids[position], -position))
        model = self.model(candidate)
        found = verdict(self.votes(model), candidate, options, followed_only)
        scalars = scalars_of_turn(self._graph, {self.ids[p]: value for p, value in bids.items()}, self.centres)
        turn = Turn(self.ids[candidate], bids[candidate], found.support, found.z, found.accepted or forced)
        if turn.accepted:
            self._accept()
        return Candidacy(candidate, model, turn, scalars)

    def _accept(self) -> None:
        """Make the model that was voted on last one more centre."""
        self._on_bids = [torch.cat(pair) for pair in zip(self._on_bids, self._new[0], strict=True)]
        self._on_votes = [torch.cat(pair) for pair in zip(self._on_votes, self._new[1], strict=True)]
        self.centres += 1

    def _look(self, model: Tensor) -> None:
        """Compute the losses per sample of one model at every client: tensors (1, n_i)."""
        bank, losses = model[None, None], self._engine.sample_losses
        self._new = losses(bank, self._bidding), losses(bank, self._voting)

    def _hear(self, mine: list[list[float]], width: int) -> list[list[float]]:
        """Put numbers of all clients together, one row each."""
        rows = torch.zeros(len(self._shards.members), width, dtype=torch.float64)
        if mine:
            rows[[self.ids[position] - self._shards.members.start for position in self._here]] = torch.tensor(
                mine, dtype=torch.float64
            )
        found: list[list[float]] = self._shards.gather(rows)[self.ids].tolist()
        return found

    def _warm_up(self, some: range) -> Tensor:
        """Train the models of some of this rank's clients from the common start: (C, P)."""
        first = self._here[0] + some.start
        data, start = members_of(self._warm, some), self._start
        own = self._engine.finetuned(start.expand(len(some), -1), data, self._steps, first)
        for model in own:
            if not model.isfinite().all():
                model.copy_(start)  # diverged: it stands with the start
        return own


def elect(
    engine: Engine,
    start: Tensor,
    data: ClientData,
    graph: nx.Graph,
    seed: int,
    clusters: int | None,
    options: ElectionOptions,
    shards: Shards,
) -> Outcome:
    """Elect centres among the clients of one connected graph.

    start (P,) is what all warm up from; data are the samples of the members of this rank. With `clusters` given that
    many centres are elected as long as there are candidates; with None the verdicts say when to stop.
    """
    clients = Electorate(engine, start, data, graph, seed, options.warmup_steps, shards)
    ids = clients.ids
    first = min(range(len(ids)), key=lambda position: (lot(seed, ids[position]), ids[position]))
    turns = [Turn(ids[first], 0.0, 0, 0.0, accepted=True)]
    scalars = scalars_of_turn(graph, {i: -float(lot(seed, i)) for i in ids}, centres=0)
    chosen, refused, misses = {first: clients.model(first)}, set[int](), 0
    clients.open(chosen[first])
    most = min(options.most if clusters is None else clusters, len(ids))
    while len(chosen) < most:
        forced = misses >= options.patience
        if forced and clusters is None:
            break  # where so many were asked for, it goes on by bids alone
        barred = {*chosen} if forced else {*chosen, *refused}
        standing = {position for position in range(len(ids)) if position not in barred}
        if not standing:
            misses = options.patience  # everybody has stood
            continue
        candidacy = clients.turn(standing, options, forced=forced)
        turns.append(candidacy.turn)
        scalars += candidacy.scalars
        if not candidacy.turn.accepted:
            refused.add(candidacy.position)
            misses += 1
            continue
        misses = misses if forced else 0
        chosen[candidacy.position] = candidacy.model
    return Outcome(torch.stack([*chosen.values()]), tuple(turns), len(turns) * (len(ids) - 1), scalars)


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


def _take_parts(data: ClientData, clients: Sequence[int], parts: Sequence[Parts], name: str) -> ClientData:
    """Copy one part of the samples of some clients."""
    if not clients:
        return data.subset(())
    rows = [getattr(part, name).to(data.y.device) for part in parts]
    pieces = [data.of(i) for i in clients]
    x = torch.cat([x[mine] for (x, _), mine in zip(pieces, rows, strict=True)])
    y = torch.cat([y[mine] for (_, y), mine in zip(pieces, rows, strict=True)])
    return ClientData(x, y, tuple(accumulate((len(mine) for mine in rows), initial=0)))
