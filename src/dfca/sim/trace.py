"""What happened in virtual time, line by line: records, their file, the books, a run's result, the replay."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from dfca.core.client import Message
from dfca.errors import ConfigError, unknown
from dfca.sim.network import SERVER, check_clients
from dfca.sim.result import Metrics
from dfca.sim.staleness import corrupted

if TYPE_CHECKING:
    from dfca.sim.fleet import Stage

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


def replay(stage: Stage, records: Sequence[Record]) -> None:
    """Carry out records instead of events. A model is kept from its training to its last use."""
    clients, fleet, nodes = stage.clients, stage.fleet, stage.nodes
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
        stage.now = time
        stage.ledger.note(record)
        key = (peer, j, round)
        try:
            if kind == "finish":
                made = ((message, (i, message.cluster, round)) for message in fleet.train(i, round))
                sent.update({name: message for message, name in made if uses[name]})
                nodes[i].round = round + 1
            elif kind == "sit":
                fleet.sit(i)
                nodes[i].round = round + 1
            elif kind == "fold":
                stage.fold(i, sent[key])
            elif kind == "corrupt" and j >= 0:
                if not fleet.dry:
                    fleet.fold(i, corrupted(sent[key], stage.seed, i), 0)
            elif kind in ("absent", "leave"):
                if j < 0:
                    fleet.empty(i)
                    nodes[i].holds = False
            elif kind == "afresh":
                fleet.afresh(i)
                nodes[i].holds = True
            elif kind == "answer":
                answers[i, number] = fleet.copies(i, round)[j]
            elif kind == "take":
                fleet.fold(i, answers.pop((peer, number)), 0)
                nodes[i].taken.add(j)
                if len(nodes[i].taken) == fleet.models:
                    nodes[i].holds = True
                    nodes[i].taken.clear()
            elif kind == "jump":
                fleet.jump(i, round)
                nodes[i].round = round
            elif kind == "broadcast":
                banks[round + 1] = fleet.states[SERVER].bank
                fleet.sit(SERVER)
            elif kind == "download":
                fleet.adopt(i, banks[round], round)
                nodes[i].round, nodes[i].holds = round, True
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
