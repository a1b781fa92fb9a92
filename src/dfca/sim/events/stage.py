"""What the parts of the event simulator share: where each client stands (`Node`), what travels, the clock's queue."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import networkx as nx
import torch
from torch import Tensor

from dfca.core.client import Message, participates
from dfca.core.relay import Offer
from dfca.peer.staleness import Staleness
from dfca.sim.events.fleet import Fleet
from dfca.sim.events.snapshot import Packer, Unpacker, storable
from dfca.sim.events.trace import Ledger
from dfca.sim.events.world import SERVER, World
from dfca.sim.metrics_table import Metrics
from dfca.sim.setting import Setting

CHANGE, FINISH, DEPART, DELIVER, FLUSH, ASK, CLOSE, TIMEOUT, WATCH, SETTLE, EVALUATE, START = range(12)
"""The kinds of events, in the order in which those of one instant are handled."""
REMEMBERED = 64
"""Of how many local updates a client remembers the end: older models are all of this age."""

Charter = tuple[tuple[int, int, int, tuple[int, ...]], ...]
"""Where a client's clusters come from, election by election: (number of voters, minus the first candidate that was
accepted, the number of the election in its part of the graph, the clusters that it opened)."""
Tag = tuple[int, int, int]
"""An election: the part of the graph (by its first client), which in a row, and the attempt to hold it."""


@storable
class Word(NamedTuple):
    """Scalars that one client tells a neighbour; `of` is the election that it belongs to, if any."""

    what: Any
    of: Tag | None = None


@storable
class Packet(NamedTuple):
    """What travels.

    kind: a "model" that was trained; word that there is none ("nothing"); an "answer" to a client without models; a
    "copy" that a client wanted; a server's "bank"; "words". made_s: when its model was trained; offers: what else its
    sender has (`core.relay`); tries: how often it was repeated; delivered: whether one of these arrived.
    """

    kind: Literal["model", "nothing", "answer", "copy", "bank", "words"]
    message: Message
    parts: int = 1
    bank: Tensor | None = None
    number: int = 0
    made_s: float = 0.0
    offers: dict[int, Offer] | None = None
    words: tuple[Word, ...] = ()
    charter: Charter = ()
    tries: int = 0
    delivered: bool = False


@storable
@dataclass(slots=True)
class Node:
    """What the driver knows of one client (or the server) besides its state.

    round: the round that it trains or will train next; waiting: the round whose messages it waits for; epoch: counts
    absences, so that events of an earlier life are ignored; newest: the newest round seen by (sender, cluster); heard:
    the newest round heard of from a sender, and the clusters of it that came; since: the first round that a neighbour
    can still be expected to send; missing: the neighbours it waits for; outbox: what waits for the uplink; asked and
    taken: whom it asked for models, and the clusters that came; arrived: who has uploaded; pending: a bank that came
    while it trained; finishes: when its last local updates ended; closing: whether its mailbox is about to be folded;
    inquired: the last round for which it asked for copies; offers: what each neighbour has, as of which round; wanted:
    whom it asked for a copy of a cluster; copies: those that came; words: what it will tell each neighbour; flushed_s:
    when it last did; warming: whether it trains for an election; held: whether it may not begin a round until the
    election is over; owes: whether it would have begun one; charter: the elections that its clusters come from.
    """

    here: bool = True
    holds: bool = True
    busy: bool = False
    done: bool = False
    seeking: bool = False
    round: int = 0
    waiting: int | None = None
    epoch: int = 0
    stays: int = 0
    sent: int = 0
    sending: bool = False
    newest: dict[tuple[int, int], int] = field(default_factory=dict)
    heard: dict[int, tuple[int, set[int], int]] = field(default_factory=dict)
    mailbox: dict[tuple[int, int], list[Packet]] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    outbox: dict[tuple[int, int, int], Packet] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    pending: Packet | None = None
    finishes: list[float] = field(default_factory=list)
    closing: bool = False
    inquired: int = -1
    offers: dict[int, tuple[int, dict[int, Offer]]] = field(default_factory=dict)
    wanted: dict[int, int] = field(default_factory=dict)
    copies: list[Packet] = field(default_factory=list)
    words: dict[int, list[Word]] = field(default_factory=dict)
    flushed_s: float = -1.0
    warming: bool = False
    held: bool = False
    owes: bool = False
    charter: Charter = ()


class Stage:
    """What the parts of the simulator share: clients and their neighbours, the world, the books, the clock's queue.

    live: how many events wait that carry the run on; changes: how many of the world. Neither counts evaluations.
    """

    def __init__(
        self, setting: Setting, world: World, fleet: Fleet, staleness: Staleness, rounds: int, keep: bool
    ) -> None:
        self.setting, self.world, self.fleet, self.rounds = setting, world, fleet, rounds
        self.staleness, self.seed, self.clients = staleness, setting.seed, setting.clients
        self.talks = not (fleet.shared or fleet.silent)
        self.near = [sorted(setting.graph.neighbors(i)) if self.talks else [] for i in range(self.clients)]
        self.parts = sorted(tuple(sorted(part)) for part in nx.connected_components(setting.graph))
        self.ledger, self.metrics = Ledger(self.clients, fleet.models, keep), Metrics()
        self.nodes = [Node() for _ in range(self.clients + fleet.shared)]
        self.queue: list[tuple[float, int, int, int, int, Any]] = []
        self.made, self.live, self.changes = 0, 0, 0
        self.now = 0.0
        self.cuts: set[int] = set()
        self._sides: list[list[int]] = []

    def push(self, time: float, rank: int, client: int, payload: Any = None) -> None:
        """Plan an event."""
        self.made += 1
        if rank == CHANGE:
            self.changes += 1
        elif rank != EVALUATE:
            self.live += 1
        heapq.heappush(self.queue, (time, rank, self.made, client, self.nodes[client].epoch, payload))

    def note(
        self, kind: str, client: int, peer: int = -2, cluster: int = -1, round: int = -1, number: int = -1
    ) -> None:
        """Write down what happens now."""
        self.ledger.note(self.now, kind, client, peer, cluster, round, number)

    def go_on(self, i: int) -> None:
        """Let a client begin its next round, if there is one."""
        node = self.nodes[i]
        if node.round >= self.rounds:
            node.done = True
        else:
            self.push(self.now, START, i)

    def finished(self, i: int) -> None:
        """Note that a local update of a client ends now."""
        finishes = self.nodes[i].finishes
        finishes.append(self.now)
        if len(finishes) > REMEMBERED:
            del finishes[0]

    def takes_part(self, i: int, round: int) -> bool:
        rate = self.setting.participation
        return rate >= 1 or participates(self.seed, i, round, rate)

    def cut(self, number: int, closed: bool) -> None:
        """Let a partition of the world begin or end."""
        (self.cuts.add if closed else self.cuts.discard)(number)
        cuts = [self.world.partitions[each] for each in sorted(self.cuts)]
        self._sides = [[*cut.sides(self.clients), cut.server_side(self.clients)] for cut in cuts]  # the server's last

    def in_reach(self, i: int, peer: int) -> bool:
        """Tell whether a message can pass between two clients (or a client and the server) now."""
        if not self.nodes[i].here or not self.nodes[peer].here:
            return False
        return not self._sides or all(side[i] == side[peer] for side in self._sides)

    def age(self, i: int, message: Message, made_s: float) -> float:
        """Measure how old a message is for a client; at the server all are of age 0."""
        if i == SERVER:
            return 0
        if self.staleness.unit == "seconds":
            return self.now - made_s
        node = self.nodes[i]
        behind = max(0, node.round - 1 - message.round)
        if self.staleness.unit == "rounds" or not behind:
            return behind
        return min(behind, len(node.finishes) - bisect_right(node.finishes, made_s))

    def fold(self, i: int, message: Message, made_s: float) -> None:
        """Fold a message by its age."""
        age = self.age(i, message, made_s)
        self.ledger.ages[int(age)] += 1
        self.fleet.fold(i, message, self.staleness.weight(age))

    def score(self) -> dict[str, Any]:
        """Add a row to the metrics."""
        ledger, nodes = self.ledger, self.nodes[: self.clients]
        holding = [i for i, node in enumerate(nodes) if node.holds]
        found = self.fleet.evaluate(ledger, holding)
        idle = ledger.idle_shares()
        row = {
            "time_s": ledger.time,
            **found,
            "without_models": [i for i, node in enumerate(nodes) if not node.holds],
            "away": ledger.away,
            "idle_share": sum(idle) / len(idle),
            "compute_s": sum(ledger.busy_s()),
            "multiplications": ledger.multiplications,
        }
        self.metrics.append(row)
        return row

    def nothing(self, i: int, cluster: int = -1, round: int = -1) -> Message:
        """Make a message without a model."""
        return Message(i, cluster, round, self.fleet.clients[i].degree, torch.empty(0))

    def pack(self, packer: Packer) -> dict[str, Any]:
        """Give everything that a checkpoint needs."""
        names = ("queue", "made", "live", "changes", "now", "cuts", "nodes", "metrics")
        return {
            name: packer.pack(list(getattr(self, name)) if name == "metrics" else getattr(self, name)) for name in names
        }

    def restore(self, packed: dict[str, Any], unpacker: Unpacker) -> None:
        """Continue from what `pack` gave."""
        values = {name: unpacker.unpack(value) for name, value in packed.items()}
        self.metrics[:] = values.pop("metrics")
        self.nodes[:] = values.pop("nodes")
        self.queue[:] = values.pop("queue")
        cuts = values.pop("cuts")
        for name, value in values.items():
            setattr(self, name, value)
        for number in cuts:
            self.cut(number, closed=True)
