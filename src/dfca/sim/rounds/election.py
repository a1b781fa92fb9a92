"""The election of `rules.election` for all clients at once: what every client concludes once all messages have arrived.

`peer.waves.election` holds the same election by messages; `tests/sim/test_elections_events.py` holds the two equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import networkx as nx
import torch
from torch import Tensor

from dfca.core.rng import stream
from dfca.core.rules.election import ElectionOptions, Parts, Vote, bid, cast, divide, lot, no_votes, verdict
from dfca.core.rules.turns import Seats, standing, start_seats
from dfca.data.clients import ClientData
from dfca.peer.records.messages import Bid, Call, Count, Decision, Key, Open, Probe, Stand, Turn, Votes, scalars
from dfca.sim.liars import Liars
from dfca.sim.local.engine import Engine
from dfca.sim.shards import Shards, members_of, portions
from dfca.sim.start import take_rows

_KEY = Key(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class TurnRecord:
    """What became of one candidate."""

    candidate: int
    bid: float
    support: int  # clients that prefer it
    z: float  # the test statistic
    accepted: bool


@dataclass(frozen=True)
class ElectionResult:
    """What an election of the start has decided, and what its messages cost."""

    centres: Tensor  # (k, P)
    turns: tuple[TurnRecord, ...]  # the candidates as they stood
    models_sent: int
    scalars_sent: int


@dataclass(frozen=True)
class ElectionSetup:
    """What all elections of a simulation share."""

    engine: Engine
    start: Tensor  # (P,): all warm up from it
    data: ClientData  # samples of the members of this rank
    seed: int
    options: ElectionOptions
    shards: Shards
    liars: Liars | None = None


class TurnResult(NamedTuple):
    """A turn that was held."""

    model: Tensor  # (P,): the candidate's
    record: TurnRecord
    scalars: int  # that the turn sent


class Electorate:
    """The clients of one connected graph: every rank computes for its own, and gathers the bids and votes of all.

    Clients are known by their position in `ids`. A client's warmed-up model is not kept: it is warmed up again where it
    stands for election. round, call: when a by-election is held, and for what; None: it is the election of a start.
    """

    def __init__(
        self, setup: ElectionSetup, graph: nx.Graph, round: int | None = None, call: Call | None = None
    ) -> None:
        self.ids, self._setup = sorted(graph), setup
        self._engine, self._shards, members = setup.engine, setup.shards, setup.shards.members
        self._here = [position for position, client in enumerate(self.ids) if client in members]  # of this rank
        self._rows = [self.ids[position] - members.start for position in self._here]  # of the banks
        self._stage, when = round, () if round is None else (round,)
        with self._shards.agreed():
            parts = [
                divide(setup.data.sizes[row], stream(setup.seed, "parts", members.start + row, *when))
                for row in self._rows
            ]
        self._warm, self._bidding, self._voting = (
            take_rows(setup.data, self._rows, [getattr(part, name) for part in parts]) for name in Parts._fields
        )
        self._own_losses: list[Tensor] = []
        for some in portions(range(len(self._rows)), setup.start.nbytes):
            assert isinstance(some, range)
            losses = self._engine.sample_losses(self._warm_up(some)[None], members_of(self._bidding, some))
            self._own_losses += [own[0] for own in losses]
        for _, mine in self._claimants(self._own_losses):
            mine.zero_()
        self._on_bids: list[Tensor] = []  # by client: losses (c, n_i) of the centres on the bidding part
        self._on_votes: list[Tensor] = []  # the same on the voting part
        self._new: tuple[list[Tensor], list[Tensor]] = ([], [])  # both, of the model that is looked at: (1, n_i)
        self.centres = 0
        self.cost = ElectionCost(graph, setup.seed, call)

    def use_banks(self, banks: Tensor, slots: Sequence[int]) -> None:
        """Take the clients' own models of some clusters as centres: banks (m, L, P) of the members of this rank."""
        place = None if len(self._rows) == banks.shape[1] else self._rows

        def losses_on(part: ClientData) -> list[Tensor]:
            by_slot = [self._engine.sample_losses(banks[j : j + 1], part, place) for j in slots] if self._rows else []
            losses = [torch.cat(mine) for mine in zip(*by_slot, strict=True)]
            self._claim_(losses, None)
            return losses

        self._on_bids, self._on_votes = losses_on(self._bidding), losses_on(self._voting)
        self.centres = len(slots)

    def open(self, model: Tensor, position: int) -> None:
        """Take one model as the first centre; position: whose it is."""
        self._look(model, position)
        self._on_bids, self._on_votes = self._new
        self.centres = 1

    def model(self, position: int) -> Tensor:
        """Warm up the model of one client, (P,), on the rank that holds it, and send it to all."""
        mine = position in self._here
        row = self._here.index(position) if mine else 0
        model = self._warm_up(range(row, row + 1))[0] if mine else torch.empty_like(self._setup.start)
        return self._shards.broadcast(model, self.ids[position])

    def bids(self, standing: Collection[int]) -> dict[int, float]:
        """Gather the bids of those that stand."""
        mine = [
            [bid(centres, own) if position in standing else 0.0]
            for position, centres, own in zip(self._here, self._on_bids, self._own_losses, strict=True)
        ]
        bids = self._gather(mine, 1)
        return {position: bids[position][0] for position in sorted(standing)}

    def votes(self, model: Tensor, candidate: int) -> list[Vote]:
        """Gather the votes of all clients on the model of a candidate, by its position."""
        self._look(model, candidate)
        mine, bounded = [], self._setup.options.bounded
        for centres, own, new_bid, on_votes, new_vote in zip(
            self._on_bids, self._own_losses, self._new[0], self._on_votes, self._new[1], strict=True
        ):
            vote = cast(centres, own, new_bid[0], on_votes, new_vote[0], bounded)
            mine.append([vote.follows, vote.gain, vote.left, vote.samples, *vote.totals, *vote.squares])
        rows, c = self._gather(mine, 4 + 2 * self.centres), self.centres
        return [
            Vote(int(row[0]), row[1], row[2], int(row[3]), tuple(row[4 : 4 + c]), tuple(row[4 + c :])) for row in rows
        ]

    def hold_turns(self, may_stand: Collection[int], seats: Seats, held: int = 0, first: int = -1) -> list[TurnResult]:
        """Hold turns until the election is over (`rules.turns`).

        held: how many centres the clients held before (`rules.election.decide`); first: the position of the first
        centre, which was accepted without a turn; -1: there is none.
        """
        turns: list[TurnResult] = []
        log: list[tuple[int | None, bool]] = [] if first < 0 else [(self.ids[first], True)]
        patience = self._setup.options.among(len(self.ids)).patience
        while not (rule := standing(log, seats, patience)).over:
            candidates = {position for position in may_stand if self.ids[position] not in rule.barred}
            if candidates:
                turns.append(self._turn(candidates, rule.forced, held))
                log.append((turns[-1].record.candidate, turns[-1].record.accepted))
            else:
                log.append((None, False))
        return turns

    def _turn(self, candidates: Collection[int], forced: bool, held: int) -> TurnResult:
        """Hold one turn: the highest bid stands, and if it is accepted, or forced, its model is one more centre."""
        bids = self.bids(candidates)
        candidate = max(bids, key=lambda position: (bids[position], -position))
        model = self.model(candidate)
        decision = verdict(self.votes(model, candidate), candidate, self._setup.options, held)
        scalars = self.cost.turn([self.ids[p] for p in candidates], self.ids[candidate], self.centres)
        accepted = decision.accepted or forced
        if accepted:  # the losses of the model that was voted on are those of one more centre
            self._on_bids = [torch.cat(pair) for pair in zip(self._on_bids, self._new[0], strict=True)]
            self._on_votes = [torch.cat(pair) for pair in zip(self._on_votes, self._new[1], strict=True)]
            self.centres += 1
        record = TurnRecord(self.ids[candidate], bids[candidate], decision.support, decision.z, accepted)
        return TurnResult(model, record, scalars)

    def _look(self, model: Tensor, position: int) -> None:
        """Compute the losses per sample of one client's model at every client: tensors (1, n_i)."""
        bank, losses = model[None, None], self._engine.sample_losses
        self._new = losses(bank, self._bidding), losses(bank, self._voting)
        for seen in self._new:
            self._claim_(seen, position)

    def _claim_(self, losses: Sequence[Tensor], position: int | None) -> None:
        """Let clients that lie about losses claim theirs; position: whose models they are of, None: those of banks."""
        for place, mine in self._claimants(losses):
            assert self._setup.liars is not None
            self._setup.liars.claim_(mine, [place == position] * len(mine))

    def _claimants(self, losses: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """List the clients that lie about losses, by position, with their losses."""
        liars = self._setup.liars
        if liars is None or not liars.lie_about_losses:
            return []
        return [(p, mine) for p, mine in zip(self._here, losses, strict=True) if self.ids[p] in liars]

    def _gather(self, mine: list[list[float]], width: int) -> list[list[float]]:
        """Gather a row of numbers per client."""
        rows = torch.zeros(len(self._shards.members), width, dtype=torch.float64)
        if mine:
            rows[self._rows] = torch.tensor(mine, dtype=torch.float64)
        everybody: list[list[float]] = self._shards.gather(rows)[self.ids].tolist()
        return everybody

    def _warm_up(self, some: range) -> Tensor:
        """Train the models of some of this rank's clients from the common start: (C, P)."""
        first = self._here[0] + some.start
        data, start = members_of(self._warm, some), self._setup.start
        own = self._engine.warmed_up(start.expand(len(some), -1), data, self._setup.options, first)
        for model in own:
            if not model.isfinite().all():
                model.copy_(start)  # diverged: it stands with the start
        if (liars := self._setup.liars) is not None:
            for place, model in zip(some, own, strict=True):
                model.copy_(liars.tell_warm(self.ids[self._here[place]], self._stage, model))
        return own


def elect(setup: ElectionSetup, graph: nx.Graph, clusters: int | None, unasked: int = 0) -> ElectionResult:
    """Elect centres among the clients of one connected graph.

    clusters: how many are asked for, None: the verdicts decide; unasked: how many are accepted without a vote.
    """
    electorate, seed = Electorate(setup, graph), setup.seed
    ids = electorate.ids
    first = min(range(len(ids)), key=lambda position: (lot(seed, ids[position]), ids[position]))
    centre = electorate.model(first)
    electorate.open(centre, first)
    seats = start_seats(clusters, setup.options.most, unasked)
    held = electorate.hold_turns(range(len(ids)), seats, first=first)
    records = (TurnRecord(ids[first], 0.0, 0, 0.0, accepted=True), *(turn.record for turn in held))
    scalars = electorate.cost.wave + sum(turn.scalars for turn in held)  # the first centre follows the wave
    centres = [centre, *(turn.model for turn in held if turn.record.accepted)]
    return ElectionResult(torch.stack(centres), records, len(records) * (len(ids) - 1), scalars)


class ElectionCost:
    """The numbers that an election sends besides models in a connected graph: `wave` to build the tree and to open,
    `turn` per candidate. The wave is that of the peers' own machines (`peer.waves.wave`), as tests hold it."""

    def __init__(self, graph: nx.Graph, seed: int, call: Call | None = None) -> None:
        self.clients = len(graph)
        self._parents, probes, counts = _play_wave(graph, seed)
        self.wave = probes * scalars(Probe(_KEY, (), call)) + counts * scalars(Count(_KEY, 0, 0, ()))
        self.wave += (self.clients - 1) * scalars(Open(_KEY, 0, (), 0 if call is None else None))
        self._depths: dict[int, int] = {}
        for i in self._parents:
            path = [i]
            while path[-1] not in self._depths and (above := self._parents[path[-1]]) is not None:
                path.append(above)
            for depth, client in enumerate(reversed(path), self._depths.get(path[-1], 0)):
                self._depths[client] = depth

    def turn(self, standing: Collection[int], candidate: int, centres: int) -> int:
        """Count the scalars of one turn: bids up the tree, the call to stand down to the candidate, votes, decision."""
        bidding = set(standing)  # and everybody above them
        for i in standing:
            above = self._parents[i]
            while above is not None and above not in bidding:
                bidding.add(above)
                above = self._parents[above]
        edges = self.clients - 1
        bids = sum(self._depths[i] > 0 for i in bidding)
        return (
            bids * scalars(Bid(_KEY, 0, 0.0, 0))
            + (edges - bids) * scalars(Bid(_KEY, 0, 0.0, None))
            + self._depths[candidate] * scalars(Stand(_KEY, 0, 0))
            + edges * scalars(Votes(_KEY, 0, no_votes(centres)))
            + edges * scalars(Decision(_KEY, 0, Turn(0, accepted=True), done=False))
        )


def _play_wave(graph: nx.Graph, seed: int) -> tuple[dict[int, int | None], int, int]:
    """Let everybody begin a wave at once, and deliver all that is sent in order; returns the parents in the tree of the
    best one, and how many probes and counts were sent.

    About N log N messages: a client joins about log N waves before the best one reaches it. Whoever has heard of its
    wave from all neighbours sends its parent a count.
    """
    ids = sorted(graph)
    place = {client: i for i, client in enumerate(ids)}
    neighbours = [sorted(place[neighbour] for neighbour in graph.neighbors(client)) for client in ids]
    joined = [0] * len(ids)  # the wave that a client is in: the larger wins
    for rank, client in enumerate(sorted(ids, key=lambda client: (-lot(seed, client), client))):
        joined[place[client]] = rank
    heard, parents = [0] * len(ids), [-1] * len(ids)
    under_way = deque(zip(range(len(ids)), joined, neighbours, strict=True))
    probes, counts = 2 * graph.number_of_edges(), 0
    while under_way:
        sender, wave, receivers = under_way.popleft()
        for i in receivers:
            if wave < joined[i]:
                continue
            if wave > joined[i]:
                joined[i], parents[i], heard[i] = wave, sender, 0
                others = [neighbour for neighbour in neighbours[i] if neighbour != sender]
                under_way.append((i, wave, others))
                probes += len(others)
            heard[i] += 1
            if heard[i] == len(neighbours[i]) and parents[i] >= 0:
                under_way.append((i, wave, [parents[i]]))
                counts += 1
    return {ids[i]: None if above < 0 else ids[above] for i, above in enumerate(parents)}, probes, counts
