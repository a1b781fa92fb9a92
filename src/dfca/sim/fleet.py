"""The clients of the event simulator: their models (`Fleet`), where each of them stands (`Node`), and who is there.

`Stage` is what all parts of the simulator share: the clients, the books and the clock with its queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from dfca.core.client import Client, ClientState, Message, participates
from dfca.core.params import FlatModel
from dfca.sim.engine import Engine
from dfca.sim.network import SERVER, World
from dfca.sim.result import Metrics
from dfca.sim.rounds import Setting, Simulation, initial_module
from dfca.sim.staleness import Staleness, discounted
from dfca.sim.trace import Ledger, Record

if TYPE_CHECKING:
    from dfca.sim.server import Server

CHANGE, FINISH, DEPART, DELIVER, TIMEOUT, EVALUATE, START = range(7)
"""The kinds of events, in the order in which those of one instant are handled."""


def make_clients(setting: Setting) -> list[Client]:
    """Make the clients of a setting."""
    flat = FlatModel(initial_module(setting).to(setting.dtype))
    train = setting.split.train.to("cpu", setting.dtype)
    truth = setting.split.clusters
    told = setting.clusters is None or setting.algorithm.informed
    return [
        Client(
            id=i,
            degree=setting.graph.degree(i),
            x=train.of(i)[0],
            y=train.of(i)[1],
            model=flat,
            make_model=setting.make_model,
            algorithm=setting.algorithm,
            clusters=setting.true_clusters if told else setting.clusters or 1,
            local=setting.local,
            seed=setting.seed,
            weights=setting.weights,
            share=setting.share,
            true_cluster=None if truth is None else int(truth[i]),
        )
        for i in range(setting.clients)
    ]


class _WatchedEngine(Engine):
    """An engine that remembers the last scores, client by client."""

    scores: Tensor = torch.empty(0)

    def accuracy(self, deployed: Any, data: Any) -> Tensor:
        self.scores = super().accuracy(deployed, data)
        return self.scores


class _Evaluator(Simulation):
    """The evaluator of the synchronous simulator, and its start, for banks that other drivers fill."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        engine = self.engine
        self.engine = _WatchedEngine(engine.model, engine.local, engine.seed, engine.how)

    def score(self, banks: Tensor, ledger: Ledger, holding: Sequence[int], changed: int) -> dict[str, Any]:
        """Score banks (m, N, P) or (m, 1, P): one row. The mean accuracy is over the clients that hold models."""
        self.banks, self.round, self.changed = banks.to(self.setting.device), ledger.rounds_done, changed
        self.exchange.messages_by_client = torch.tensor(ledger.sent_by_client)
        self.exchange.messages_by_cluster = torch.tensor(ledger.sent_by_cluster)
        self.exchange.server_messages = ledger.server_models
        row = self._evaluate()
        assert isinstance(self.engine, _WatchedEngine)
        scores = self.engine.scores[list(holding)] if holding else torch.zeros(1, dtype=torch.float64)
        row["accuracy"], row["accuracy_std_over_clients"] = float(scores.mean()), float(scores.std(correction=0))
        return {**row, "accuracy_by_client": self.engine.scores.tolist(), "clients": len(holding)}


class Fleet:
    """The clients and their states, the server's last; knows nothing of time. `dry`: nothing is computed."""

    def __init__(self, setting: Setting, staleness: Staleness, dry: bool) -> None:
        self.seed, self.staleness, self.dry = setting.seed, staleness, dry
        self.evaluator = _Evaluator(setting)
        self.models, self.size = self.evaluator.models, self.evaluator.flat.size
        self.shared = setting.algorithm.exchange == "server"
        self.clients = make_clients(setting)
        self.silent = setting.algorithm.exchange == "none"
        if self.shared:
            self.clients.append(replace(self.clients[0], id=SERVER))
        self.states = [ClientState.of(self.evaluator.bank(max(0, client.id)).cpu()) for client in self.clients]
        self.starts = [state.bank for state in self.states]
        self.changed = 0
        if self.shared:
            self.sit(SERVER)

    def train(self, i: int, round: int) -> list[Message]:
        if self.dry:
            empty = torch.empty(0)
            return [] if self.silent else [Message(i, i % self.models, round, self.clients[i].degree, empty)]
        before = self.states[i].assignment
        self.states[i], messages = self.clients[i].start_round(self.states[i])
        self.changed += before is not None and before != self.states[i].assignment
        return messages

    def sit(self, i: int) -> None:
        """Let a client sit a round out; the server always does: its own copy does not count."""
        if not self.dry:
            self.states[i] = self.clients[i].skip_round(self.states[i])

    def fold(self, i: int, message: Message, age: int) -> None:
        if not self.dry:
            state = self.states[i]
            self.states[i] = self.clients[i].receive(state, discounted(message, state, self.staleness.weight(age)))

    def empty(self, i: int) -> None:
        """Take all models away; the first that comes replaces nothing (a count of -1)."""
        self.states[i] = replace(
            ClientState.of(torch.zeros_like(self.states[i].bank)),
            counts=(-1,) * self.models,
            round=self.states[i].round,
            rejected=self.states[i].rejected,
        )

    def afresh(self, i: int) -> None:
        self.states[i] = replace(ClientState.of(self.starts[i]), round=self.states[i].round)

    def jump(self, i: int, round: int) -> None:
        self.states[i] = replace(self.states[i], round=round)

    def copies(self, i: int, round: int) -> list[Message]:
        """Hand out all models of a client as they are now."""
        degree = self.clients[i].degree
        return [Message(i, j, round, degree, model) for j, model in enumerate(self.states[i].bank)]

    def adopt(self, i: int, bank: Tensor, round: int) -> None:
        self.states[i] = replace(self.states[i], bank=bank, round=round)

    def banks(self) -> Tensor:
        """Stack what is evaluated: (m, N, P), or the server's (m, 1, P)."""
        states = self.states[-1:] if self.shared else self.states
        return torch.stack([state.bank for state in states], dim=1)

    def evaluate(self, ledger: Ledger, holding: Sequence[int]) -> dict[str, Any]:
        row = {} if self.dry else self.evaluator.score(self.banks(), ledger, holding, self.changed)
        self.changed = 0
        return {"time_s": ledger.time, **row}


class Packet(NamedTuple):
    """What travels: one model (`kind` "model", "answer"), word that there is none ("nothing"), or a server's bank."""

    kind: Literal["model", "answer", "nothing", "bank"]
    message: Message
    parts: int = 1
    bank: Tensor | None = None
    number: int = 0


@dataclass(slots=True)
class Node:
    """What the driver knows of one client (or the server) besides its state.

    round: the round that it trains or will train next; waiting: the round whose messages it waits for; epoch: counts
    absences, so that events of an earlier life are ignored; newest: the newest round seen by (sender, cluster); heard:
    the newest round heard of from a sender, and the clusters of it that came; since: the first round that a neighbour
    can still be expected to send; missing: the neighbours it waits for; outbox: what waits for the uplink; asked and
    taken: whom it asked for models, and the clusters that came; arrived: who has uploaded; pending: a bank that came
    while it trained.
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
    mailbox: dict[tuple[int, int], list[Message]] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    outbox: dict[tuple[int, int], Packet] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    pending: Packet | None = None


class Stage:
    """What the parts of the simulator share: clients and their neighbours, the world, the books, the clock's queue.

    live: how many events wait that carry the run on; changes: how many of the world. Neither counts evaluations.
    """

    def __init__(self, setting: Setting, world: World, fleet: Fleet, rounds: int, keep: bool) -> None:
        self.setting, self.world, self.fleet, self.rounds = setting, world, fleet, rounds
        self.seed, self.clients = setting.seed, setting.clients
        talks = not (fleet.shared or fleet.silent)
        self.near = [sorted(setting.graph.neighbors(i)) if talks else [] for i in range(self.clients)]
        self.ledger, self.metrics = Ledger(self.clients, fleet.models, keep), Metrics()
        self.nodes = [Node() for _ in range(self.clients + fleet.shared)]
        self.queue: list[tuple[float, int, int, int, int, Any]] = []
        self.made, self.live, self.changes = 0, 0, 0
        self.now = 0.0
        self.split: list[list[int]] = []

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
        self.ledger.note(Record(self.now, kind, client, peer, cluster, round, number))

    def go_on(self, i: int) -> None:
        """Let a client begin its next round, if there is one."""
        node = self.nodes[i]
        if node.round >= self.rounds:
            node.done = True
        else:
            self.push(self.now, START, i)

    def takes_part(self, i: int, round: int) -> bool:
        rate = self.setting.participation
        return rate >= 1 or participates(self.seed, i, round, rate)

    def in_reach(self, i: int, peer: int) -> bool:
        if not self.nodes[i].here or not self.nodes[peer].here:
            return False
        return not self.split or i == SERVER or peer == SERVER or all(side[i] == side[peer] for side in self.split)

    def fold(self, i: int, message: Message) -> None:
        """Fold a message by its age; at the server all are of age 0."""
        age = 0 if i == SERVER else max(0, self.nodes[i].round - 1 - message.round)
        self.ledger.ages[age] += 1
        self.fleet.fold(i, message, age)

    def score(self) -> None:
        """Add a row to the metrics."""
        holding = [i for i in range(self.clients) if self.nodes[i].holds]
        self.metrics.append(self.fleet.evaluate(self.ledger, holding))


Send = Callable[[int, int, Packet], None]
"""Hand a packet of a client (or the server) for a peer to its uplink."""


class Attendance:
    """Who is there: leaving, returning, partitions, and how a client without models gets some.

    look_again: called with each client whose wait may have ended because somebody is out of reach.
    """

    def __init__(self, stage: Stage, send: Send, server: Server | None, look_again: Callable[[int], None]) -> None:
        self.stage, self.nodes, self.near, self.fleet = stage, stage.nodes, stage.near, stage.fleet
        self.send, self.server, self.look_again = send, server, look_again

    def plan_leave(self, i: int) -> None:
        if self.stage.world.churn.leaves_per_s:
            node = self.nodes[i]
            node.stays += 1
            self.stage.push(
                self.stage.now + self.stage.world.churn.stay(self.stage.seed, i, node.stays), CHANGE, i, "leave"
            )

    def on_change(self, i: int, payload: Any) -> None:
        if payload == "leave":
            self._leave(i)
        elif payload == "return":
            self._return(i)
        else:
            self._repartition(*payload)

    def _leave(self, i: int) -> None:
        node, churn = self.nodes[i], self.stage.world.churn
        self.stage.note("leave", i, cluster=0 if churn.keeps else -1)
        node.here = node.busy = node.seeking = node.sending = False
        node.waiting, node.pending = None, None
        node.epoch += 1
        for store in (node.mailbox, node.outbox, node.asked, node.taken):
            store.clear()
        if not churn.keeps:
            node.holds = False
            self.fleet.empty(i)
        self.stage.push(self.stage.now + churn.absence(self.stage.seed, i, node.stays), CHANGE, i, "return")
        if self.server is not None:
            self.server.check()
        for peer in self.near[i]:
            self.nodes[peer].asked.discard(i)
            self.look_again(peer)
        self.ask_again()

    def _return(self, i: int) -> None:
        node = self.nodes[i]
        node.here = True
        self.stage.note("return", i)
        self.plan_leave(i)
        if self.server is not None:
            node.newest.pop((SERVER, -1), None)
            self.server.hand_down(i)
        elif node.holds:
            self._meet(i)
            self._resume(i)
        else:
            node.seeking = True
        self.ask_again()

    def _resume(self, i: int) -> None:
        node = self.nodes[i]
        if not node.done:
            self.stage.go_on(i)

    def _meet(self, i: int) -> None:
        """Join the round that the neighbours are in, and agree from which round on to expect each other's models."""
        node = self.nodes[i]
        near = [peer for peer in self.near[i] if self.stage.in_reach(i, peer) and not self.nodes[peer].seeking]
        newest = max((min(self.nodes[peer].round, self.stage.rounds - 1) for peer in near), default=0)
        if newest > node.round:
            node.round = newest
            self.stage.note("jump", i, round=newest)
            self.fleet.jump(i, newest)
        for peer in near:
            node.since[peer], self.nodes[peer].since[i] = self.nodes[peer].round, node.round

    def _repartition(self, what: str, number: int) -> None:
        self.stage.note(what, 0, round=number)
        side = self.stage.world.partitions[number].sides(self.stage.clients)
        if what == "split":
            self.stage.split.append(side)
        else:
            self.stage.split.remove(side)
            for i, near in enumerate(self.near):
                for peer in near:
                    if side[i] != side[peer]:
                        self.nodes[i].since[peer] = self.nodes[peer].round
        for i in range(self.stage.clients):
            self.look_again(i)
        self.ask_again()

    def ask_again(self) -> None:
        """Let every client without models ask the neighbours that have some and were not asked."""
        for i, node in enumerate(self.nodes[: self.stage.clients]):
            if not node.seeking:
                continue
            if not any(self.nodes[peer].holds for peer in self.near[i]):
                self.stage.note("afresh", i)
                self.fleet.afresh(i)
                self.settle_in(i)
                continue
            for peer in self.near[i]:
                if self.nodes[peer].holds and peer not in node.asked and self.stage.in_reach(i, peer):
                    node.asked.add(peer)
                    for message in self.fleet.copies(peer, self.nodes[peer].round):
                        self.send(peer, i, Packet("answer", message))

    def take(self, i: int, sender: int, packet: Packet) -> None:
        """Fold a model that was asked for; begin once each cluster has come."""
        node, message = self.nodes[i], packet.message
        if not node.seeking:
            self.stage.note("drop", i, sender, message.cluster, message.round)
            return
        self.stage.note("take", i, sender, message.cluster, message.round, packet.number)
        self.fleet.fold(i, message, 0)
        node.taken.add(message.cluster)
        if len(node.taken) == self.fleet.models:
            self.settle_in(i)

    def settle_in(self, i: int) -> None:
        node = self.nodes[i]
        node.seeking, node.holds = False, True
        node.taken.clear()
        node.asked.clear()
        self._meet(i)
        self._resume(i)

    def waits(self) -> list[str]:
        """Tell who waits for whom."""
        told = []
        if self.server and (awaited := self.server.awaited()):
            told.append(f"the server waits for round {self.nodes[SERVER].round} of {_names(awaited)}")
        for i, node in enumerate(self.nodes[: self.stage.clients]):
            if node.seeking:
                told.append(f"client {i} waits for the models of {_names(self.near[i])}")
            elif node.waiting is not None:
                told.append(f"client {i} waits for round {node.waiting} of {_names(sorted(node.missing))}")
            elif self.server and node.here and not node.done:
                told.append(f"client {i} waits for the server")
        return told


def _names(clients: Sequence[int]) -> str:
    shown = ", ".join(str(i) for i in clients[:4]) + (f" and {len(clients) - 4} more" if len(clients) > 4 else "")
    return f"client {shown}" if len(clients) == 1 else f"clients {shown}"
