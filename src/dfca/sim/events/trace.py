"""What happened in virtual time, line by line: records, their file, the books, a run's result, the replay."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dfca.core.client import Message
from dfca.errors import ConfigError, unknown
from dfca.sim.events.corruption import corrupted
from dfca.sim.events.snapshot import Packer, Unpacker
from dfca.sim.events.world import SERVER, check_clients
from dfca.sim.metrics_table import Metrics

if TYPE_CHECKING:
    from dfca.sim.events.stage import Stage

KINDS = frozenset((
    "absent", "leave", "return", "split", "heal", "start", "finish", "sit", "queue", "send", "lost", "hold", "fold",
    "corrupt", "drop", "nothing", "timeout", "jump", "answer", "take", "afresh", "broadcast", "download", "evaluate",
    "repeat", "words", "candidacy", "warm", "warmed", "elect", "adopt", "relay", "convert", "clear", "drift",
))  # fmt: skip
"""What a record can say."""
_IDLE = frozenset(("hold", "fold", "drop", "queue", "lost"))
"""The kinds that the books only count."""
_SENDS = frozenset(("send", "answer", "repeat"))
_STOPS = frozenset(("finish", "sit", "leave", "absent", "warmed", "convert"))


class Record(NamedTuple):
    """One line of a trace: what happened to `client` at `time`; peer, cluster and round where they mean something.

    number: of models that were asked for, the sender's count of messages; of words and of models that offers travel
    with, the scalars.
    """

    time: float
    kind: str
    client: int
    peer: int = -2
    cluster: int = -1
    round: int = -1
    number: int = -1


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


class Ledger:
    """Counts what the records say; a run and its replay keep the same books.

    start_models: models that elections sent; scalars: numbers that travelled besides models; away: clients that are
    away now; multiplications: those of all local work (`Fleet.work`), without rounds that were broken off.
    """

    def __init__(self, clients: int, models: int, keep: bool) -> None:
        self.clients = clients
        self.trace: list[Record] | None = [] if keep else None
        self.kinds: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        self.sent_by_client, self.sent_by_cluster = [0] * clients, [0] * models
        self.server_models, self.start_models, self.scalars, self.finished = 0, 0, 0, 0
        self.multiplications = 0
        self.time = 0.0
        self.away = 0
        self._busy, self._began = [0.0] * clients, [math.nan] * clients
        self._away, self._left = [0.0] * clients, [math.nan] * clients

    @property
    def rounds_done(self) -> int:
        """How many rounds the clients have done on average, rounded down."""
        return self.finished // self.clients

    def open_cluster(self, cluster: int) -> None:
        """Make room in the books for a cluster that is new."""
        self.sent_by_cluster += [0] * (cluster + 1 - len(self.sent_by_cluster))

    def note(self, time: float, kind: str, client: int, peer: int, cluster: int, round: int, number: int) -> None:
        """Enter a record into the books."""
        self.time = time
        self.kinds[kind] += 1
        if self.trace is not None:
            self.trace.append(Record(time, kind, client, peer, cluster, round, number))
        if kind in _IDLE:
            return
        if kind in _SENDS:
            if client == SERVER:
                self.server_models += len(self.sent_by_cluster)
            elif cluster >= 0:
                self.sent_by_client[client] += 1
                self.sent_by_cluster[cluster] += 1
            if kind == "send":
                self.scalars += max(0, number)
        elif kind == "start" or kind == "warm":
            self._began[client] = time
        elif kind in _STOPS:
            if kind in ("finish", "sit"):
                self.finished += 1
            elif kind in ("leave", "absent"):
                self._left[client] = time
                self.away += 1
            if kind != "sit" and self._began[client] == self._began[client]:
                self._busy[client] += time - self._began[client]
            self._began[client] = math.nan
        elif kind == "return":
            self._away[client] += time - self._left[client]
            self._left[client] = math.nan
            self.away -= 1
        elif kind == "words":
            self.scalars += number
        elif kind == "candidacy":
            self.start_models += 1

    def busy_s(self) -> list[float]:
        """Tell for how many seconds each client has trained so far, broken-off rounds included."""
        return [
            done + (self.time - began if began == began else 0.0)
            for done, began in zip(self._busy, self._began, strict=True)
        ]

    def idle_shares(self) -> list[float]:
        """Tell for each client the part of its time here in which it did not train."""
        shares = []
        for i, busy in enumerate(self.busy_s()):
            away = self._away[i] + (self.time - self._left[i] if self._left[i] == self._left[i] else 0.0)
            shares.append(1 - busy / (self.time - away) if self.time > away else 0.0)
        return shares

    def pack(self, packer: Packer) -> Any:
        """Give everything that a checkpoint needs."""
        books = {**vars(self), "kinds": dict(self.kinds), "ages": dict(self.ages)}
        books["trace"] = None if self.trace is None else [list(record) for record in self.trace]
        return packer.pack(books)

    def restore(self, packed: Any, unpacker: Unpacker) -> None:
        """Continue from what `pack` gave; the records that were handed over before are not in it."""
        values = unpacker.unpack(packed)
        kept = values.pop("trace")
        if self.trace is not None:
            self.trace = [Record(*record) for record in kept or []]
        values["kinds"], values["ages"] = Counter(values["kinds"]), Counter(values["ages"])
        for name, value in values.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class EventResult:
    """A finished run against virtual time.

    metrics: rows with time_s, accuracy, cluster_accuracy, bytes_sent, ... as in the synchronous simulator; banks
    (m, N, P), (m, 1, P) with a server; assignments (N,), -1 where a client never trained; idle_shares (N,): of the time
    that a client was there, the part in which it did not train; compute_s (N,): for how long each trained, warm-ups and
    rounds that were broken off included; staleness: how many folds had which age (seconds rounded down); records: how
    many events of each kind; rejected: messages that clients refused; trace: all records, if asked for and not taken.
    """

    metrics: Metrics
    banks: Tensor
    assignments: Tensor
    rounds: list[int]
    time_s: float
    idle_shares: list[float]
    compute_s: list[float]
    staleness: dict[int, int]
    records: dict[str, int]
    rejected: int
    trace: list[Record] | None

    def time_to(self, accuracy: float) -> float | None:
        """Tell when the mean accuracy was first seen at or above a target, in seconds; None: never."""
        return self._first(accuracy, "time_s")

    def bytes_to(self, accuracy: float) -> float | None:
        """Tell how many bytes had been sent by then, the server's included; None: never."""
        sent, served = self._first(accuracy, "bytes_sent"), self._first(accuracy, "server_bytes_sent")
        return None if sent is None or served is None else sent + served

    def compute_to(self, accuracy: float) -> float | None:
        """Tell how many seconds all clients together had trained by then: what stands for energy; None: never."""
        return self._first(accuracy, "compute_s")

    def catch_up_s(self, client: int, joined_s: float, share: float = 0.95) -> float | None:
        """Tell how long a late joiner needed to reach that share of the others' mean accuracy; None: never.

        Seen at the evaluations: no finer than they are.
        """
        for row in self.metrics:
            if row["time_s"] < joined_s or client in row["without_models"]:
                continue
            others = [
                score
                for i, score in enumerate(row["accuracy_by_client"])
                if i != client and i not in row["without_models"]
            ]
            if others and row["accuracy_by_client"][client] >= share * sum(others) / len(others):
                return float(row["time_s"] - joined_s)
        return None

    def _first(self, accuracy: float, column: str) -> float | None:
        return next((row[column] for row in self.metrics if row["accuracy"] >= accuracy), None)


def replay(stage: Stage, records: Sequence[Record]) -> None:
    """Carry out records instead of events. A model is kept from its training to its last use."""
    clients, fleet, nodes = stage.clients, stage.fleet, stage.nodes
    uses: Counter[tuple[int, int, int]] = Counter()
    asked_for: set[tuple[int, int]] = set()
    downloads: Counter[int] = Counter()
    for record in records:
        if record.kind not in KINDS:
            raise unknown("kind of a trace", record.kind, KINDS)
        check_clients("the trace", (c for c in record[2:4] if c >= 0), clients)
        if record.kind in ("fold", "corrupt") and record.cluster >= 0:
            uses[record.peer, record.cluster, record.round] += 1
        elif record.kind in ("take", "relay", "adopt"):
            asked_for.add((record.peer, record.number))
        elif record.kind == "download":
            downloads[record.round] += 1
    sent: dict[tuple[int, int, int], tuple[Message, float]] = {}
    answers: dict[tuple[int, int], Message] = {}
    banks: dict[int, Tensor] = {0: fleet.states[0].bank}
    for record in records:
        time, kind, i, peer, j, round, number = record
        stage.now = time
        stage.ledger.note(*record)
        key = (peer, j, round)
        try:
            if kind == "finish":
                stage.ledger.multiplications += fleet.work(i)
                made = ((message, (i, message.cluster, round)) for message in fleet.train(i, round))
                sent.update({name: (message, time) for message, name in made if uses[name]})
                nodes[i].round = round + 1
                stage.finished(i)
            elif kind == "start":
                fleet.forget_warmed()
            elif kind == "sit":
                fleet.sit(i)
                nodes[i].round = round + 1
            elif kind == "fold":
                stage.fold(i, *sent[key])
            elif kind == "corrupt" and j >= 0:
                if not fleet.dry:
                    fleet.refuse(i, corrupted(sent[key][0], stage.seed, i))
            elif kind in ("absent", "leave", "convert", "clear"):
                if j < 0:
                    fleet.empty(i)
                    nodes[i].holds = False
                nodes[i].taken.clear()
            elif kind == "afresh":
                fleet.afresh(i)
                nodes[i].holds = True
                fleet.settle(i)
            elif kind == "answer":
                if (i, number) in asked_for:
                    answers[i, number] = fleet.copy(i, j, round)
            elif kind == "take":
                fleet.take(i, answers.pop((peer, number)))
                nodes[i].taken.add(j)
                if len(nodes[i].taken) >= fleet.models:
                    nodes[i].holds = True
                    fleet.settle(i)
                    nodes[i].taken.clear()
            elif kind == "relay":
                fleet.relay(i, answers.pop((peer, number)))
            elif kind == "adopt":
                stage.ledger.open_cluster(j)
                fleet.open_cluster(i, j, answers.pop((peer, number)).model)
            elif kind == "elect":
                stage.ledger.open_cluster(j)
                fleet.open_cluster(i, j, fleet.warmed(peer, None if round < 0 else round))
                nodes[i].holds = True
                fleet.settle(i)
            elif kind == "drift":
                fleet.drift()
            elif kind == "jump":
                fleet.jump(i, round)
                nodes[i].round = round
            elif kind == "broadcast":
                if downloads[round + 1]:
                    banks[round + 1] = fleet.states[SERVER].bank.clone()
                fleet.sit(SERVER)
            elif kind == "download":
                fleet.adopt(i, banks[round], round)
                nodes[i].round, nodes[i].holds = round, True
                fleet.settle(i)
                downloads[round] -= 1
                if not downloads[round]:
                    del banks[round]
            elif kind == "evaluate":
                stage.score()
        except KeyError as error:
            raise ConfigError(
                f"the trace has a {kind} at {time:g} s of a model that nobody made before ({error}); "
                "it is cut or of another run"
            ) from error
        if kind in ("fold", "corrupt") and j >= 0:
            uses[key] -= 1
            if not uses[key]:
                sent.pop(key, None)
