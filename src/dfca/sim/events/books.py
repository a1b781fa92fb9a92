"""What happened in virtual time: records, the books that they fill, and a run's result.

A trace is a list of records, in order: what went into each peer (`Input`), and what came of it (`TraceRecord`): the
notes of the peer, then what the links did. The inputs are enough to drive the peers again (`sim.events.replay`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.peer.records.work import NOTES
from dfca.sim.events.world import SERVER
from dfca.sim.metrics_table import Metrics
from dfca.sim.traffic import Traffic

_OF_WORLD = ("absent", "leave", "return", "split", "heal", "drift", "evaluate")
_OF_LINKS = ("queue", "overtaken", "send", "lost", "corrupt", "repeat", "answer", "candidacy")
KINDS = frozenset((*_OF_WORLD, *_OF_LINKS, *NOTES))
"""What a record can say."""
INPUTS = frozenset(
    ("begin", "connected", "disconnected", "receive", "finished", "observed", "scored", "wake", "unused")
)
"""What can go into a peer; "scored" is the end of a short job; "unused" does not: a job that was done before its end,
and never ended."""
_SENDS = frozenset(("send", "answer", "repeat"))
_STOPS = frozenset(("finish", "sit", "leave", "absent", "warmed", "switch", "tuned"))
_new = tuple.__new__  # records are made in a third of the time: there are many
_BOOKED = _SENDS | _STOPS | {"start", "warm", "tune", "return", "candidacy"}


class TraceRecord(NamedTuple):
    """What happened to `client` at `time`; peer, cluster and round where they mean something.

    number: of a fold, the age of the model; of models that leave, how many.
    """

    time: float
    kind: str
    client: int
    peer: int = -2
    cluster: int = -1
    round: int = -1
    number: float = -1


class Input(NamedTuple):
    """What went into the peer of `client` at `time`.

    peer: the neighbour that it came from, or that came or went. number: of a message, the sender's count of all that it
    ever sent; of finished work, the call of the engine that did it; of a begin, 1 where it joins late. waited_s: how
    long a message waited for the uplink; broken: whether a link broke it.
    """

    time: float
    kind: str
    client: int
    peer: int = -2
    number: int = -1
    waited_s: float = 0.0
    broken: bool = False


Line = TraceRecord | Input


class RunLog:
    """Counts what happens; a run and its replay keep the same books.

    start_models: models that elections sent; scalars: numbers that travelled besides models; away: clients that are
    away now; multiplications: those of all rounds (`ClientPool.work`), without rounds that were broken off.
    """

    def __init__(self, clients: int, keep: bool) -> None:
        self.clients = clients
        self.trace: list[Line] | None = [] if keep else None
        self.kinds: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        self.sent_by_client, self.sent_by_cluster = [0] * clients, [0]
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

    def note(
        self,
        time: float,
        kind: str,
        client: int,
        peer: int = -2,
        cluster: int = -1,
        round: int = -1,
        number: float = -1,
    ) -> None:
        """Enter what happened into the books."""
        self.enter(time, client, ((kind, peer, cluster, round, number),))

    def enter(self, time: float, client: int, notes: Sequence[tuple[str, int, int, int, float]]) -> None:
        """Enter what happened to one client, in order: (kind, peer, cluster, round, number)."""
        self.time = time
        if self.trace is not None:
            self.trace += [_new(TraceRecord, (time, kind, client, *about)) for kind, *about in notes]
        kinds, held, fresh = self.kinds, 0, 0  # most are of these two
        for kind, _, cluster, _, number in notes:
            if kind == "hold":
                held += 1
            elif kind == "fold" and not number:
                fresh += 1
            else:
                kinds[kind] += 1
                if kind == "fold":
                    self.ages[int(number)] += 1
                elif kind in _BOOKED:
                    self._book(time, kind, client, cluster, number)
        if held:
            kinds["hold"] += held
        if fresh:
            kinds["fold"] += fresh
            self.ages[0] += fresh

    def note_update(
        self, time: float, kind: str, client: int, receivers: Sequence[int], cluster: int, round: int, number: int = -1
    ) -> None:
        """Enter what happens to an update on its way to some neighbours: "queue" or "send"; there are many."""
        if self.trace is not None or client == SERVER:
            for peer in receivers:
                self.note(time, kind, client, peer, cluster, round, number)
            return
        self.time = time
        self.kinds[kind] += len(receivers)
        if kind == "send":
            self._count(client, cluster, len(receivers))

    def _book(self, time: float, kind: str, client: int, cluster: int, number: float) -> None:
        if kind in _SENDS:
            if client == SERVER:
                self.server_models += int(number)
            else:
                self._count(client, cluster, 1)
        elif kind == "candidacy":
            self.start_models += 1
        elif client == SERVER:
            return
        elif kind in ("start", "warm", "tune"):
            self._began[client] = time
        elif kind == "return":
            self._away[client] += time - self._left[client]
            self._left[client] = math.nan
            self.away -= 1
        else:
            self._stop(time, kind, client)

    def _count(self, client: int, cluster: int, models: int) -> None:
        if cluster >= 0:
            self.sent_by_client[client] += models
            if cluster >= len(self.sent_by_cluster):
                self.sent_by_cluster += [0] * (cluster + 1 - len(self.sent_by_cluster))
            self.sent_by_cluster[cluster] += models

    def _stop(self, time: float, kind: str, client: int) -> None:
        if kind in ("finish", "sit"):
            self.finished += 1
        elif kind in ("leave", "absent"):
            self._left[client] = time
            self.away += 1
        if kind != "sit" and self._began[client] == self._began[client]:
            self._busy[client] += time - self._began[client]
        self._began[client] = math.nan

    def busy_s(self) -> list[float]:
        """Return for how many seconds each client has trained so far, broken-off rounds included."""
        return [
            done + (self.time - began if began == began else 0.0)
            for done, began in zip(self._busy, self._began, strict=True)
        ]

    def idle_shares(self) -> list[float]:
        """Return for each client the part of its time here in which it did not train."""
        shares = []
        for i, busy in enumerate(self.busy_s()):
            away = self._away[i] + (self.time - self._left[i] if self._left[i] == self._left[i] else 0.0)
            shares.append(1 - busy / (self.time - away) if self.time > away else 0.0)
        return shares

    def traffic(self, model_bytes: int, models: int, payload_bytes: int | None = None) -> dict[str, int | list[int]]:
        """Return the metrics of what was sent so far; models: how many clusters the row lists; payload_bytes: of a
        codec, which is not for copies that were asked for."""
        dense = 0 if self.server_models else self.kinds["answer"] + self.kinds["repeat"]
        by_cluster = self.sent_by_cluster + [0] * (models - len(self.sent_by_cluster))
        sent = Traffic(
            torch.tensor(self.sent_by_client),
            torch.tensor(by_cluster),
            self.server_models,
            self.start_models,
            self.scalars,
            max(0, sum(self.sent_by_client) - dense),
        )
        return sent.row(model_bytes, payload_bytes)

    def times(self) -> dict[str, Any]:
        """Return how the clients spent their time so far; fold_ages: the ages of all folded models, summed."""
        idle = self.idle_shares()
        return {
            "away": self.away,
            "away_clients": [i for i, left in enumerate(self._left) if left == left],
            "folds": sum(self.ages.values()),
            "fold_ages": sum(age * number for age, number in self.ages.items()),
            "idle_share": sum(idle) / len(idle),
            "compute_s": sum(self.busy_s()),
            "multiplications": self.multiplications,
        }

    def take_trace(self) -> list[Line]:
        """Hand over the trace since the last call, and forget it."""
        taken = self.trace or []
        if self.trace is not None:
            self.trace = []
        return taken

    def state(self) -> dict[str, Any]:
        """Return everything that a checkpoint needs."""
        return dict(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; the trace that was handed over before is not in it."""
        keep = self.trace is not None
        vars(self).update(state)
        self.trace = (self.trace or []) if keep else None


@dataclass(frozen=True)
class EventResult:
    """A finished run against virtual time.

    metrics: rows with time_s, accuracy, cluster_accuracy, bytes_sent, ... as in the synchronous simulator; banks
    (m, N, P), (m, 1, P) with a server; assignments (N,), -1 where a client never trained; idle_shares (N,): of the time
    that a client was there, the part in which it did not train; compute_s (N,): for how long each trained, warm-ups and
    rounds that were broken off included; staleness: how many folds had which age (seconds rounded down); records: how
    many events of each kind; rejected: messages that clients refused; trace: all of it, if asked for and not taken.
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
    trace: list[Line] | None
