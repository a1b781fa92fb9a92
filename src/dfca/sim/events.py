"""The asynchronous simulator: a virtual clock and an event queue drive the sans-I/O clients of `core.client`.

Each client runs its own rounds at its own pace. A round: choose and train (takes the world's compute time), send, then

  sequential   fold what came while it trained and go on at once; what comes later waits in the mailbox
  batch        wait until every neighbour in reach has sent its model of this round, or for `timeout_s`, fold, go on

With a server (ifca, fedavg, oracle) the clients upload what they trained, the server waits for all clients of the round
that are in reach, takes the mean of each cluster and sends all models to everybody: it is bound by the slowest. Its own
uplink is not shared: a client's download takes its own bandwidth.

**Order.** Events at the same instant are handled by kind: changes of the world, ends of training, departures, arrivals,
timeouts, evaluations, starts of rounds; within a kind in the order in which they were made. So models that are trained
at the same instant all meet before the next round begins, and in the ideal world this simulator computes what the
synchronous one does (a test says so, for every algorithm).

**Mailbox.** A message of an older round than the newest seen from its sender for its cluster is dropped, so duplicates
and overtaken messages do nothing. While a client trains, its mailbox keeps the newest message per sender and cluster;
under `batch`, where a neighbour can be one round ahead, the newest two. An uplink that cannot keep up drops the models
that were overtaken before they left. So memory is bounded by the banks, the graph's edges and what is on its way.

**Staleness.** A message of round t reaches a client whose last local update was round s: age d = max(0, s - t), and its
share in the running average is scaled by w(d): a' = a + w(d) (x - a) / (r + 1), r = folds of this cluster + 1; under
Metropolis weights a' = a + w(d) w_im (x - own). w = 1 is the paper's rule.

**Churn.** A client that leaves loses the work of its round, its mailbox and its outbox. When it returns it goes on with
the round that its neighbours are in. A client without models (a late joiner, or one that returns empty) asks all
neighbours for all their models, folds what comes as equals, and begins once each cluster has come, as a rule with the
bank of the first that answers; what was asked for is repeated until it arrives, so it suffers delays but no loss.
Neighbours know who is in reach: nobody waits for a client that is away.

Refused for now: share "relay", revival and drift. An election is held before the clock starts, free of delays.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dfca.core.client import Client, ClientState, Message, participates, usable
from dfca.errors import ConfigError, RunError, unknown
from dfca.sim.engine import Engine
from dfca.sim.network import FLOAT_BYTES, SERVER, World, check_clients, draw
from dfca.sim.result import Metrics
from dfca.sim.rounds import Setting, Simulation
from dfca.testing import make_clients

StalenessKind = Literal["constant", "polynomial", "hinge"]
STALENESS_KINDS: tuple[StalenessKind, ...] = ("constant", "polynomial", "hinge")
MAX_EVENTS = 100_000_000
"""A run ends here at the latest: no setting may run for ever."""

CHANGE, FINISH, DEPART, DELIVER, TIMEOUT, EVALUATE, START = range(7)
"""The kinds of events, in the order in which those of one instant are handled."""

KINDS = frozenset((
    "absent", "leave", "return", "split", "heal", "start", "finish", "sit", "queue", "send", "lost", "hold", "fold",
    "corrupt", "drop", "nothing", "timeout", "jump", "answer", "take", "afresh", "broadcast", "download", "evaluate",
))  # fmt: skip
"""What a record can say."""


class Record(NamedTuple):
    """One line of a trace: what happened to `client` at `time`; peer, cluster and round where they mean something.

    number: of models that were asked for, the sender's count of messages.
    """

    time: float
    kind: str
    client: int
    peer: int = -2
    cluster: int = -1
    round: int = -1
    number: int = -1


@dataclass(frozen=True)
class Staleness:
    """How a message of age d weighs.

    constant 1; polynomial (1 + d)**-power; hinge 1 up to d = `after`, then 1 / (1 + power (d - after)).

    >>> Staleness("polynomial", power=0.5).weight(3)
    0.5
    """

    kind: StalenessKind = "constant"
    power: float = 0.5
    after: int = 4

    def __post_init__(self) -> None:
        if self.kind not in STALENESS_KINDS:
            raise unknown("staleness", self.kind, STALENESS_KINDS)
        if not (0 <= self.power < math.inf):
            raise ConfigError(f"staleness.power must be >= 0 and finite, got {self.power}")
        if self.after < 0:
            raise ConfigError(f"staleness.after must be >= 0 rounds, got {self.after}")

    def weight(self, age: int) -> float:
        """Weigh a message by its age in rounds: w(age) in (0, 1]."""
        if self.kind == "constant" or age <= 0:
            return 1.0
        if self.kind == "polynomial":
            return float((1 + age) ** -self.power)
        return 1.0 if age <= self.after else 1 / (1 + self.power * (age - self.after))


def discounted(message: Message, state: ClientState, weight: float) -> Message:
    """Pull a model towards the receiver's, so that folding it moves the average by `weight` times as much.

    x' = a + w (x - a), a the copy that the fold rule subtracts. A message that is not usable stays as it is.
    """
    if weight == 1 or not usable(message, state.bank):
        return message
    own = state.own.get(message.cluster, state.bank[message.cluster])
    return replace(message, model=own + weight * (message.model - own))


def corrupted(message: Message, seed: int, receiver: int) -> Message:
    """Break a payload as a bad link does: a NaN in it, or numbers missing at the end."""
    if draw(seed, "corrupt", message.sender, receiver, message.cluster, message.round) < 0.5:
        return replace(message, model=message.model[:-1])
    broken = message.model.clone()
    broken[len(broken) // 2] = math.nan
    return replace(message, model=broken)


@dataclass(frozen=True)
class EventResult:
    """A finished run against virtual time.

    metrics: rows with time_s, accuracy, cluster_accuracy, bytes_sent, ... as in the synchronous simulator; banks
    (m, N, P), (m, 1, P) with a server; assignments (N,), -1 where a client never trained; idle_shares (N,): of the time
    that a client was there, the part in which it did not train; staleness: how many folds had which age; records: how
    many events of each kind; rejected: messages that clients refused; trace: all records, if asked for.
    """

    metrics: Metrics
    banks: Tensor
    assignments: Tensor
    rounds: list[int]
    time_s: float
    idle_shares: list[float]
    staleness: dict[int, int]
    records: dict[str, int]
    rejected: int
    trace: list[Record] | None

    @property
    def events(self) -> int:
        """Count the records."""
        return sum(self.records.values())

    def time_to(self, accuracy: float) -> float | None:
        """Tell when the mean accuracy was first seen at or above a target, in seconds; None: never."""
        return self._first(accuracy, "time_s")

    def bytes_to(self, accuracy: float) -> float | None:
        """Tell how many bytes had been sent by then, the server's included; None: never."""
        sent, served = self._first(accuracy, "bytes_sent"), self._first(accuracy, "server_bytes_sent")
        return None if sent is None or served is None else sent + served

    def _first(self, accuracy: float, column: str) -> float | None:
        return next((row[column] for row in self.metrics if row["accuracy"] >= accuracy), None)


def write_trace(path: str | Path, trace: Iterable[Record]) -> None:
    """Write a trace as JSON lines."""
    with Path(path).open("w") as file:
        file.writelines(json.dumps(record._asdict()) + "\n" for record in trace)


def read_trace(path: str | Path) -> list[Record]:
    """Read a trace. Raises ConfigError with the number of the first line that is not a record."""
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            found.append(Record(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number} is not a record of a trace: {error}") from error
    return found


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
        self.engine = _WatchedEngine(engine.model, engine.local, engine.seed, engine.stacked)

    def score(self, banks: Tensor, ledger: _Ledger, holding: Sequence[int], changed: int) -> dict[str, Any]:
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


class _Ledger:
    """Counts what the records say; a run and its replay keep the same books."""

    def __init__(self, clients: int, models: int, keep: bool) -> None:
        self.clients = clients
        self.trace: list[Record] | None = [] if keep else None
        self.kinds: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        self.sent_by_client, self.sent_by_cluster = [0] * clients, [0] * models
        self.server_models, self.finished = 0, 0
        self.time = 0.0
        self._busy, self._began = [0.0] * clients, [math.nan] * clients
        self._away, self._left = [0.0] * clients, [math.nan] * clients

    @property
    def rounds_done(self) -> int:
        """How many rounds the clients have done on average, rounded down."""
        return self.finished // self.clients

    def note(self, record: Record) -> None:
        time, kind, client, cluster = record[0], record[1], record[2], record[4]
        self.time = time
        self.kinds[kind] += 1
        if self.trace is not None:
            self.trace.append(record)
        if kind == "send" or kind == "answer":
            if client == SERVER:
                self.server_models += len(self.sent_by_cluster)
            elif cluster >= 0:
                self.sent_by_client[client] += 1
                self.sent_by_cluster[cluster] += 1
        elif kind == "start":
            self._began[client] = time
        elif kind in ("finish", "sit", "leave", "absent"):
            if kind in ("finish", "sit"):
                self.finished += 1
            else:
                self._left[client] = time
            if kind != "sit" and self._began[client] == self._began[client]:
                self._busy[client] += time - self._began[client]
            self._began[client] = math.nan
        elif kind == "return":
            self._away[client] += time - self._left[client]
            self._left[client] = math.nan

    def idle_shares(self) -> list[float]:
        """Tell for each client the part of its time here in which it did not train."""
        shares = []
        for i in range(self.clients):
            busy = self._busy[i] + (self.time - self._began[i] if self._began[i] == self._began[i] else 0.0)
            away = self._away[i] + (self.time - self._left[i] if self._left[i] == self._left[i] else 0.0)
            shares.append(1 - busy / (self.time - away) if self.time > away else 0.0)
        return shares


class _Fleet:
    """The clients and their states, the server's last; knows nothing of time. `dry`: nothing is computed."""

    def __init__(self, setting: Setting, staleness: Staleness, dry: bool) -> None:
        self.seed, self.staleness, self.dry = setting.seed, staleness, dry
        self.evaluator = _Evaluator(setting)
        self.models, self.size = self.evaluator.models, self.evaluator.flat.size
        self.shared = setting.algorithm.exchange == "server"
        # A server gets what a client trained, whatever neighbours would share (as in `sim.rounds`).
        self.clients: list[Client] = make_clients(replace(setting, share="trained") if self.shared else setting)
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

    def evaluate(self, ledger: _Ledger, holding: Sequence[int]) -> dict[str, Any]:
        row = {} if self.dry else self.evaluator.score(self.banks(), ledger, holding, self.changed)
        self.changed = 0
        return {"time_s": ledger.time, **row}


class _Packet(NamedTuple):
    """What travels: one model (`kind` "model", "answer"), word that there is none ("nothing"), or a server's bank."""

    kind: Literal["model", "answer", "nothing", "bank"]
    message: Message
    parts: int = 1
    bank: Tensor | None = None
    number: int = 0


@dataclass(slots=True)
class _Node:
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
    outbox: dict[tuple[int, int], _Packet] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    pending: _Packet | None = None


class EventSimulation:
    """A simulation in virtual time: `run` until `until_s` seconds or until every client has done `rounds` rounds.

    Without either, the setting's rounds. `setting.aggregation` says sequential or batch. evaluate_every_s None:
    whenever clients have done `setting.evaluate_every` more rounds on average. trace: keep all records in the result.
    replay: the records of an earlier run of the same setting; nothing is drawn and no clock runs, the records are
    carried out, and the result is bit-identical. dry: nothing is trained, folded or scored: the clockwork alone.
    """

    def __init__(
        self,
        setting: Setting,
        world: World | None = None,
        *,
        until_s: float | None = None,
        rounds: int | None = None,
        timeout_s: float | None = None,
        staleness: Staleness | None = None,
        evaluate_every_s: float | None = None,
        trace: bool = False,
        replay: Sequence[Record] | None = None,
        dry: bool = False,
        max_events: int = MAX_EVENTS,
    ) -> None:
        _check_setting(setting)
        for name, value in (("until_s", until_s), ("evaluate_every_s", evaluate_every_s)):
            if value is not None and not (0 < value < math.inf):
                raise ConfigError(f"{name} must be > 0 and finite, got {value}")
        if rounds is not None and rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {rounds}")
        self.setting, self.world, self.timeout_s = setting, world or World(), timeout_s
        self.until_s = math.inf if until_s is None else until_s
        self.rounds = rounds or (setting.rounds if until_s is None else sys.maxsize)
        self.every_s, self.max_events, self.replay = evaluate_every_s, max_events, replay
        self.fleet = _Fleet(setting, staleness or Staleness(), dry)
        clients, seed = setting.clients, setting.seed
        self.server = self.fleet.shared
        degrees = [1] * clients if self.server else [setting.graph.degree(i) for i in range(clients)]
        if self.fleet.silent:
            degrees = [0] * clients
        self.model_bytes = self.fleet.size * FLOAT_BYTES
        self.world.check(degrees, self.model_bytes, timeout_s)
        self.ledger = _Ledger(clients, self.fleet.models, trace)
        self.metrics = Metrics()
        self.handled = 0
        self._near = [sorted(setting.graph.neighbors(i)) if degrees[i] else [] for i in range(clients)]
        self._batch = setting.aggregation == "batch"
        self._seed, self._faults, self._link = seed, self.world.faults, self.world.link
        slowdowns = self.world.compute.slowdowns(seed, clients)
        steps = max(1, setting.local.steps)
        self._round_s = [self.world.compute.step_s * steps * slowdown for slowdown in slowdowns]
        self._bandwidths = self._link.bandwidths(clients)
        self._nodes = [_Node() for _ in range(clients + self.server)]
        self._queue: list[tuple[float, int, int, int, int, Any]] = []
        self._made, self._live, self._changes = 0, 0, 0
        self._now = 0.0
        self._split: list[list[int]] = []
        self._served = self.fleet.states[-1].bank
        self._scored_at = -1
        self._due = setting.evaluate_every * clients

    def run(self) -> EventResult:
        """Run to the end.

        Raises RunError where nobody can go on before the end, with who waits for whom, or after `max_events` events.
        """
        if self.handled or self.ledger.kinds:
            raise RunError("this simulation has been run; make a new one")
        if self.replay is not None:
            self._replay(self.replay)
        else:
            self._begin()
            self._loop()
        fleet = self.fleet
        assignments = [state.assignment for state in fleet.states[: self.setting.clients]]
        return EventResult(
            metrics=self.metrics,
            banks=fleet.banks(),
            assignments=torch.tensor([-1 if each is None else each for each in assignments]),
            rounds=[node.round for node in self._nodes[: self.setting.clients]],
            time_s=self.ledger.time,
            idle_shares=self.ledger.idle_shares(),
            staleness=dict(sorted(self.ledger.ages.items())),
            records=dict(self.ledger.kinds),
            rejected=sum(state.rejected for state in fleet.states),
            trace=self.ledger.trace,
        )

    # The clock.

    def _push(self, time: float, rank: int, client: int, payload: Any = None) -> None:
        self._made += 1
        if rank == CHANGE:
            self._changes += 1
        elif rank != EVALUATE:
            self._live += 1
        heapq.heappush(self._queue, (time, rank, self._made, client, self._nodes[client].epoch, payload))

    def _note(
        self, kind: str, client: int, peer: int = -2, cluster: int = -1, round: int = -1, number: int = -1
    ) -> None:
        self.ledger.note(Record(self._now, kind, client, peer, cluster, round, number))

    def _begin(self) -> None:
        world, clients = self.world, self.setting.clients
        late = {each.client: each.at_s for each in world.late_joiners}
        for i, at_s in sorted(late.items()):
            self._note("absent", i)
            node = self._nodes[i]
            node.here = node.holds = False
            self.fleet.empty(i)
            self._push(at_s, CHANGE, i, "return")
        for number, partition in enumerate(world.partitions):
            self._push(partition.begin_s, CHANGE, 0, ("split", number))
            if partition.end_s < math.inf:
                self._push(partition.end_s, CHANGE, 0, ("heal", number))
        if self.every_s is not None:
            self._push(self.every_s, EVALUATE, 0)
        for i in range(clients):
            if i not in late:
                self._plan_leave(i)
                self._push(0.0, START, i)

    def _loop(self) -> None:
        handlers: dict[int, Callable[[int, Any], None]] = {
            FINISH: self._on_finish,
            DEPART: self._on_depart,
            DELIVER: self._on_deliver,
            TIMEOUT: self._on_timeout,
            START: self._on_start,
        }
        queue, nodes = self._queue, self._nodes
        while True:
            if not self._live and (self._all_done() or not self._changes):
                if not self._all_done():
                    self._diagnose()
                break
            time, rank, _, client, epoch, payload = heapq.heappop(queue)
            if time > self.until_s:
                break
            self._now = time
            self.handled += 1
            if self.handled > self.max_events:
                raise RunError(
                    f"stopped after max_events = {self.max_events} events, at {self._now:g} s of virtual time and "
                    f"{self.ledger.rounds_done} rounds on average; end sooner by until_s or rounds, or raise max_events"
                )
            if rank == CHANGE:
                self._changes -= 1
                self._on_change(client, payload)
            elif rank == EVALUATE:
                self._evaluate()
                if self.every_s is not None:
                    self._push(self._now + self.every_s, EVALUATE, 0)
            else:
                self._live -= 1
                if epoch == nodes[client].epoch or rank == DELIVER:
                    handlers[rank](client, payload)
        self._now = self.until_s if self.until_s < math.inf else self._now
        if self._scored_at != self.ledger.kinds.total():
            self._evaluate()

    def _all_done(self) -> bool:
        if self.server and self._nodes[SERVER].round >= self.rounds:
            return True
        return all(node.done for node in self._nodes[: self.setting.clients])

    def _evaluate(self) -> None:
        self._note("evaluate", SERVER)
        self._score()
        self._scored_at = self.ledger.kinds.total()

    def _score(self) -> None:
        holding = [i for i in range(self.setting.clients) if self._nodes[i].holds]
        self.metrics.append(self.fleet.evaluate(self.ledger, holding))

    # Rounds.

    def _on_start(self, i: int, _: Any) -> None:
        node = self._nodes[i]
        node.busy = True
        if self.server and not self._takes_part(i, node.round):
            self._sit(i)
            self._check_server()
            return
        self._note("start", i, round=node.round)
        noise = self.world.compute.noise(self._seed, i, node.round)
        self._push(self._now + self._round_s[i] * noise, FINISH, i)

    def _sit(self, i: int) -> None:
        node = self._nodes[i]
        node.busy = False
        self._note("sit", i, round=node.round)
        self.fleet.sit(i)
        node.round += 1
        self._count_round()

    def _on_finish(self, i: int, _: Any) -> None:
        node = self._nodes[i]
        if not self._takes_part(i, node.round):
            self._sit(i)
            self._go_on(i)
            return
        node.busy, now = False, node.round
        self._note("finish", i, round=now)
        messages = self.fleet.train(i, now)
        node.round += 1
        self._count_round()
        if self.fleet.silent:
            self._go_on(i)
            return
        packets = [_Packet("model", message, len(messages)) for message in messages]
        if not packets:  # training diverged: say so, so that nobody waits
            packets = [_Packet("nothing", Message(i, -1, now, self.fleet.clients[i].degree, torch.empty(0)))]
        for peer in [SERVER] if self.server else self._near[i]:
            if self._in_reach(i, peer):
                for packet in packets:
                    self._send(i, peer, packet)
        if self.server:
            if node.pending is not None:
                self._download(i, node.pending)
        elif self._batch:
            node.waiting = now
            if self.timeout_s is not None:
                self._push(self._now + self.timeout_s, TIMEOUT, i, now)
            self._try_close(i)
        else:
            self._fold_mailbox(i, now=sys.maxsize)
            self._go_on(i)

    def _count_round(self) -> None:
        if self.every_s is None and self.ledger.finished >= self._due:
            self._due += self.setting.evaluate_every * self.setting.clients
            self._push(self._now, EVALUATE, 0)

    def _go_on(self, i: int) -> None:
        node = self._nodes[i]
        if node.round >= self.rounds:
            node.done = True
        else:
            self._push(self._now, START, i)

    def _takes_part(self, i: int, round: int) -> bool:
        rate = self.setting.participation
        return rate >= 1 or participates(self._seed, i, round, rate)

    def _fold_mailbox(self, i: int, now: int) -> None:
        """Fold the newest message of each sender and cluster up to a round; keep the later ones."""
        mailbox = self._nodes[i].mailbox
        for key in sorted(mailbox):
            ready = [message for message in mailbox[key] if message.round <= now]
            if ready:
                self._fold(i, ready[-1])
                mailbox[key] = [message for message in mailbox[key] if message.round > now]
                if not mailbox[key]:
                    del mailbox[key]

    def _fold(self, i: int, message: Message) -> None:
        self._note("fold", i, message.sender, message.cluster, message.round)
        self._apply_fold(i, message, self._nodes[i].round)

    def _apply_fold(self, i: int, message: Message, round: int) -> None:
        age = 0 if i == SERVER else max(0, round - 1 - message.round)
        self.ledger.ages[age] += 1
        self.fleet.fold(i, message, age)

    # Batch: who waits for whom.

    def _expects(self, i: int, peer: int, now: int) -> bool:
        node, other = self._nodes[i], self._nodes[peer]
        newest, clusters, parts = node.heard.get(peer, (-1, (), 1))
        if newest > now or (newest == now and len(clusters) >= parts) or node.since.get(peer, 0) > now:
            return False
        return self._in_reach(i, peer) and not other.seeking and self._takes_part(peer, now)

    def _try_close(self, i: int) -> None:
        """See anew whom a waiting client waits for; end the wait if it is nobody."""
        node = self._nodes[i]
        if node.waiting is not None:
            node.missing = {peer for peer in self._near[i] if self._expects(i, peer, node.waiting)}
            if not node.missing:
                self._close(i)

    def _close(self, i: int) -> None:
        node = self._nodes[i]
        assert node.waiting is not None
        self._fold_mailbox(i, node.waiting)
        node.waiting = None
        self._go_on(i)

    def _on_timeout(self, i: int, now: int) -> None:
        node = self._nodes[i]
        if i == SERVER:
            if node.round == now:
                self._note("timeout", SERVER, round=now)
                self._broadcast()
        elif node.waiting == now:
            self._note("timeout", i, round=now)
            self._close(i)

    # Messages.

    def _in_reach(self, i: int, peer: int) -> bool:
        if not self._nodes[i].here or not self._nodes[peer].here:
            return False
        return not self._split or i == SERVER or peer == SERVER or all(side[i] == side[peer] for side in self._split)

    def _send(self, i: int, peer: int, packet: _Packet) -> None:
        """Hand a packet to the uplink, behind what waits there; it replaces an older model to the same peer."""
        message, node, asked = packet.message, self._nodes[i], packet.kind == "answer"
        node.sent += 1
        packet = _Packet(packet.kind, message, packet.parts, packet.bank, node.sent)
        if asked:
            self._note("answer", i, peer, message.cluster, message.round, packet.number)
        if packet.kind == "nothing" or i == SERVER or self._bandwidths[i] == math.inf:
            self._travel(i, peer, packet)
            return
        key = (peer, message.cluster + (self.fleet.models if asked else 0))
        if key in node.outbox:
            overtaken = node.outbox[key].message
            self._note("drop", i, peer, overtaken.cluster, overtaken.round)
        self._note("queue", i, peer, message.cluster, message.round)
        node.outbox[key] = packet
        if not node.sending:
            self._next_departure(i)

    def _next_departure(self, i: int) -> None:
        node = self._nodes[i]
        node.sending = bool(node.outbox)
        if node.sending:
            peer, _ = key = next(iter(node.outbox))
            packet = node.outbox.pop(key)
            self._push(self._now + self.model_bytes / self._bandwidths[i], DEPART, i, (peer, packet))

    def _on_depart(self, i: int, payload: tuple[int, _Packet]) -> None:
        self._travel(i, *payload)
        self._next_departure(i)

    def _travel(self, i: int, peer: int, packet: _Packet) -> None:
        """Put a packet on its way, through what the world does to it."""
        seed, number, faults = self._seed, packet.number, self._faults
        if packet.kind != "answer":
            self._note("send", i, peer, packet.message.cluster, packet.message.round)
        delay = self._link.latency(seed, i, peer, number)
        if i == SERVER:
            delay += self.fleet.models * self.model_bytes / self._bandwidths[peer]
        safe = packet.kind == "answer"
        if not safe and faults.loss and draw(seed, "loss", i, peer, number) < faults.loss:
            self._note("lost", peer, i, packet.message.cluster, packet.message.round)
            return
        if not safe and faults.duplication and draw(seed, "duplication", i, peer, number) < faults.duplication:
            later = self._link.latency(seed, i, peer, -number)
            self._push(self._now + later, DELIVER, peer, (i, packet))
        self._push(self._now + delay, DELIVER, peer, (i, packet))

    def _on_deliver(self, i: int, payload: tuple[int, _Packet]) -> None:
        sender, packet = payload
        message, node = packet.message, self._nodes[i]
        if not self._in_reach(i, sender):
            self._note("lost", i, sender, message.cluster, message.round)
            node.asked.discard(sender)
        elif packet.kind == "answer":
            self._take(i, sender, packet)
        elif packet.kind != "nothing" and self._is_corrupt(i, sender, packet):
            self._note("corrupt", i, sender, message.cluster, message.round)
            if packet.bank is None and not self.fleet.dry:
                self.fleet.fold(i, corrupted(message, self._seed, i), 0)
        elif packet.kind == "bank":
            if node.busy:
                node.pending = packet
            else:
                self._download(i, packet)
        elif i == SERVER:
            self._upload(sender, packet)
        else:
            self._receive(i, sender, packet)

    def _is_corrupt(self, i: int, sender: int, packet: _Packet) -> bool:
        share = self._faults.corruption
        return bool(share) and draw(self._seed, "corruption", sender, i, packet.number) < share

    def _receive(self, i: int, sender: int, packet: _Packet) -> None:
        """Take in a neighbour's model: fold it, keep it for later, or drop it."""
        message, node = packet.message, self._nodes[i]
        j, round = message.cluster, message.round
        if node.seeking or round <= node.newest.get((sender, j), -1) or not self._takes_part(i, round):
            self._note("drop", i, sender, j, round)
            return
        node.newest[sender, j] = round
        if packet.kind == "nothing":
            self._note("nothing", i, sender, j, round)
        elif node.busy or self._batch:
            self._note("hold", i, sender, j, round)
            kept = node.mailbox.setdefault((sender, j), [])
            kept.append(message)
            if len(kept) > (2 if self._batch else 1):
                del kept[0]
        else:
            self._fold(i, message)
        if self._batch:
            newest, clusters, _ = node.heard.get(sender, (-1, set(), 1))
            if round > newest:
                node.heard[sender] = (round, {j}, packet.parts)
            elif round == newest:
                clusters.add(j)
            if node.waiting is not None and sender in node.missing and not self._expects(i, sender, node.waiting):
                node.missing.discard(sender)
                if not node.missing:
                    self._close(i)

    # The server.

    def _upload(self, i: int, packet: _Packet) -> None:
        server, message = self._nodes[SERVER], packet.message
        if message.round != server.round or i in server.arrived:
            self._note("drop", SERVER, i, message.cluster, message.round)
            return
        if not server.arrived and self.timeout_s is not None:
            self._push(self._now + self.timeout_s, TIMEOUT, SERVER, server.round)
        server.arrived.add(i)
        if packet.kind == "nothing":
            self._note("nothing", SERVER, i, message.cluster, message.round)
        else:
            self._fold(SERVER, message)
        self._check_server()

    def _awaited(self) -> list[int]:
        server = self._nodes[SERVER]
        here = (i for i in range(self.setting.clients) if self._nodes[i].here and i not in server.arrived)
        return [i for i in here if self._takes_part(i, server.round)]

    def _check_server(self) -> None:
        """End the server's round where all its clients have reported, those that sit it out included."""
        server, nodes = self._nodes[SERVER], self._nodes[: self.setting.clients]
        began = all(node.round > server.round for node in nodes if node.here)
        if server.round < self.rounds and began and any(node.here for node in nodes) and not self._awaited():
            self._broadcast()

    def _broadcast(self) -> None:
        server = self._nodes[SERVER]
        self._note("broadcast", SERVER, round=server.round)
        self._served = self.fleet.states[SERVER].bank
        self.fleet.sit(SERVER)
        server.round += 1
        server.arrived.clear()
        for i in range(self.setting.clients):
            if self._nodes[i].here:
                self._hand_down(i)

    def _hand_down(self, i: int) -> None:
        """Send a client the server's models as of the last round's end, with the number of the round that runs."""
        begun = Message(SERVER, -1, self._nodes[SERVER].round, 0, torch.empty(0))
        self._send(SERVER, i, _Packet("bank", begun, bank=self._served))

    def _download(self, i: int, packet: _Packet) -> None:
        node, round = self._nodes[i], packet.message.round
        assert packet.bank is not None
        node.pending = None
        if node.done or round < node.newest.get((SERVER, -1), 0):
            self._note("drop", i, SERVER, round=round)
            return
        node.newest[SERVER, -1] = round + 1
        self._note("download", i, SERVER, round=round)
        self.fleet.adopt(i, packet.bank, round)
        node.round, node.holds = round, True
        self._go_on(i)

    # Who is there.

    def _plan_leave(self, i: int) -> None:
        if self.world.churn.leaves_per_s:
            node = self._nodes[i]
            node.stays += 1
            self._push(self._now + self.world.churn.stay(self._seed, i, node.stays), CHANGE, i, "leave")

    def _on_change(self, i: int, payload: Any) -> None:
        if payload == "leave":
            self._leave(i)
        elif payload == "return":
            self._return(i)
        else:
            self._repartition(*payload)

    def _leave(self, i: int) -> None:
        node, churn = self._nodes[i], self.world.churn
        self._note("leave", i, cluster=0 if churn.keeps else -1)
        node.here = node.busy = node.seeking = node.sending = False
        node.waiting, node.pending = None, None
        node.epoch += 1
        for store in (node.mailbox, node.outbox, node.asked, node.taken):
            store.clear()
        if not churn.keeps:
            node.holds = False
            self.fleet.empty(i)
        self._push(self._now + churn.absence(self._seed, i, node.stays), CHANGE, i, "return")
        if self.server:
            self._check_server()
        for peer in self._near[i]:
            self._nodes[peer].asked.discard(i)
            self._try_close(peer)
        self._ask_again()

    def _return(self, i: int) -> None:
        node = self._nodes[i]
        node.here = True
        self._note("return", i)
        self._plan_leave(i)
        if self.server:
            node.newest.pop((SERVER, -1), None)
            self._hand_down(i)
        elif node.holds:
            self._meet(i)
            self._resume(i)
        else:
            node.seeking = True
        self._ask_again()

    def _resume(self, i: int) -> None:
        node = self._nodes[i]
        if not node.done:
            self._go_on(i)

    def _meet(self, i: int) -> None:
        """Join the round that the neighbours are in, and agree from which round on to expect each other's models."""
        node = self._nodes[i]
        near = [peer for peer in self._near[i] if self._in_reach(i, peer) and not self._nodes[peer].seeking]
        newest = max((min(self._nodes[peer].round, self.rounds - 1) for peer in near), default=0)
        if newest > node.round:
            node.round = newest
            self._note("jump", i, round=newest)
            self.fleet.jump(i, newest)
        for peer in near:
            node.since[peer], self._nodes[peer].since[i] = self._nodes[peer].round, node.round

    def _repartition(self, what: str, number: int) -> None:
        self._note(what, 0, round=number)
        side = self.world.partitions[number].sides(self.setting.clients)
        if what == "split":
            self._split.append(side)
        else:
            self._split.remove(side)
            for i, near in enumerate(self._near):
                for peer in near:
                    if side[i] != side[peer]:
                        self._nodes[i].since[peer] = self._nodes[peer].round
        for i in range(self.setting.clients):
            self._try_close(i)
        self._ask_again()

    def _ask_again(self) -> None:
        """Let every client without models ask the neighbours that have some and were not asked."""
        for i, node in enumerate(self._nodes[: self.setting.clients]):
            if not node.seeking:
                continue
            if not any(self._nodes[peer].holds for peer in self._near[i]):
                self._note("afresh", i)
                self.fleet.afresh(i)
                self._settle_in(i)
                continue
            for peer in self._near[i]:
                if self._nodes[peer].holds and peer not in node.asked and self._in_reach(i, peer):
                    node.asked.add(peer)
                    for message in self.fleet.copies(peer, self._nodes[peer].round):
                        self._send(peer, i, _Packet("answer", message))

    def _take(self, i: int, sender: int, packet: _Packet) -> None:
        """Fold a model that was asked for; begin once each cluster has come."""
        node, message = self._nodes[i], packet.message
        if not node.seeking:
            self._note("drop", i, sender, message.cluster, message.round)
            return
        self._note("take", i, sender, message.cluster, message.round, packet.number)
        self.fleet.fold(i, message, 0)
        node.taken.add(message.cluster)
        if len(node.taken) == self.fleet.models:
            self._settle_in(i)

    def _settle_in(self, i: int) -> None:
        node = self._nodes[i]
        node.seeking, node.holds = False, True
        node.taken.clear()
        node.asked.clear()
        self._meet(i)
        self._resume(i)

    # When nobody can go on.

    def _diagnose(self) -> None:
        """Raise RunError with who waits for whom."""
        waits = []
        if self.server and (awaited := self._awaited()):
            waits.append(f"the server waits for round {self._nodes[SERVER].round} of {_names(awaited)}")
        for i, node in enumerate(self._nodes[: self.setting.clients]):
            if node.seeking:
                waits.append(f"client {i} waits for the models of {_names(self._near[i])}")
            elif node.waiting is not None:
                waits.append(f"client {i} waits for round {node.waiting} of {_names(sorted(node.missing))}")
            elif self.server and node.here and not node.done:
                waits.append(f"client {i} waits for the server")
        shown = "; ".join(waits[:6]) + (f"; and {len(waits) - 6} more" if len(waits) > 6 else "")
        lost = self.ledger.kinds["lost"] + self.ledger.kinds["corrupt"]
        way_out = "give timeout_s" if self.server else 'give timeout_s, or use aggregation "sequential"'
        raise RunError(
            f"nobody can go on at {self._now:g} s: {shown} ({lost} messages were lost or broken on the way); {way_out}"
        )

    # Replay.

    def _replay(self, records: Sequence[Record]) -> None:
        """Carry out records instead of events. A model is kept from its training to its last use."""
        clients, fleet = self.setting.clients, self.fleet
        uses: Counter[tuple[int, int, int]] = Counter()
        for record in records:
            if record.kind not in KINDS:
                raise unknown("kind of a trace", record.kind, KINDS)
            check_clients("the trace", (c for c in record[2:4] if c >= 0), clients)
            if record.kind in ("fold", "corrupt") and record.cluster >= 0:
                uses[record.peer, record.cluster, record.round] += 1
        sent: dict[tuple[int, int, int], Message] = {}
        answers: dict[tuple[int, int], Message] = {}
        banks: dict[int, Tensor] = {0: fleet.states[-1].bank}
        for record in records:
            time, kind, i, peer, j, round, number = record
            self._now = time
            self.ledger.note(record)
            key = (peer, j, round)
            try:
                if kind == "finish":
                    made = ((message, (i, message.cluster, round)) for message in fleet.train(i, round))
                    sent.update({name: message for message, name in made if uses[name]})
                    self._nodes[i].round = round + 1
                elif kind == "sit":
                    fleet.sit(i)
                    self._nodes[i].round = round + 1
                elif kind == "fold":
                    self._apply_fold(i, sent[key], self._nodes[i].round)
                elif kind == "corrupt" and j >= 0:
                    if not fleet.dry:
                        fleet.fold(i, corrupted(sent[key], self._seed, i), 0)
                elif kind in ("absent", "leave"):
                    if j < 0:
                        fleet.empty(i)
                        self._nodes[i].holds = False
                elif kind == "afresh":
                    fleet.afresh(i)
                    self._nodes[i].holds = True
                elif kind == "answer":
                    answers[i, number] = fleet.copies(i, round)[j]
                elif kind == "take":
                    fleet.fold(i, answers.pop((peer, number)), 0)
                    self._nodes[i].taken.add(j)
                    if len(self._nodes[i].taken) == fleet.models:
                        self._nodes[i].holds = True
                        self._nodes[i].taken.clear()
                elif kind == "jump":
                    fleet.jump(i, round)
                    self._nodes[i].round = round
                elif kind == "broadcast":
                    banks[round + 1] = fleet.states[SERVER].bank
                    fleet.sit(SERVER)
                elif kind == "download":
                    fleet.adopt(i, banks[round], round)
                    self._nodes[i].round, self._nodes[i].holds = round, True
                elif kind == "evaluate":
                    self._score()
            except KeyError as error:
                raise ConfigError(
                    f"the trace has a {kind} at {time:g} s of a model that nobody made before ({error}); "
                    "it is cut or of another run"
                ) from error
            if kind in ("fold", "corrupt") and j >= 0:
                uses[key] -= 1
                if not uses[key]:
                    sent.pop(key, None)


def _check_setting(setting: Setting) -> None:
    """Raise ConfigError for what does not run in virtual time yet."""
    algorithm = setting.algorithm
    if "relay" in (algorithm.share, setting.share) and algorithm.exchange == "gossip":
        raise ConfigError(
            f'{algorithm.name} with share "relay" cannot run in virtual time yet; use share "trained" or "all", '
            'or algorithm "dfca-fi"'
        )
    if algorithm.revives:
        raise ConfigError(
            f'{algorithm.name} opens clusters while it runs, which virtual time cannot yet; use "dfca-fi"'
        )
    if setting.drift is not None:
        raise ConfigError("a drift cannot happen in virtual time yet; leave it out")


def _names(clients: Sequence[int]) -> str:
    shown = ", ".join(str(i) for i in clients[:4]) + (f" and {len(clients) - 4} more" if len(clients) > 4 else "")
    return f"client {shown}" if len(clients) == 1 else f"clients {shown}"
