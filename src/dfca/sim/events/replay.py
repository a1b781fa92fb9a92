"""The trace of a run as a file, and its replay: the peers are driven by what went into them, without clock or links.

A replay does the work again, in the same calls of the engine, and keeps the same books: everything is bit-identical.
What the peers say of themselves must be what the trace says; what the world and the links did is taken from it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dfca.base.errors import ConfigError, unknown
from dfca.sim.events.books import INPUTS, KINDS, Input, Line, TraceRecord
from dfca.sim.events.host import Done, PeerHost
from dfca.sim.events.links import Parcel
from dfca.sim.events.world import SERVER, check_clients


def to_line(record: Line) -> str:
    """Write one line of a trace; what has its default is left out."""
    kind = type(record)
    default = kind._field_defaults
    shown = {name: value for name, value in record._asdict().items() if default.get(name, ...) != value}
    if kind is Input:
        shown = {"time": record.time, "input": shown.pop("kind"), **shown}
    return json.dumps(shown, separators=(",", ":")) + "\n"


def from_line(line: str) -> Line:
    """Read one line of a trace. Raises ValueError or TypeError if it is not one."""
    fields = json.loads(line)
    if "input" in fields:
        return Input(kind=fields.pop("input"), **fields)
    return TraceRecord(**fields)


def read_trace(path: str | Path) -> list[Line]:
    """Read a trace. Raises ConfigError with the number of the first line that is not a record."""
    lines: list[Line] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            lines.append(from_line(line))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number} is not a record of a trace: {error}") from error
    return lines


class Replay:
    """Drives the peers by a trace; keeps: who leaves keeps its models.

    uses: how often each message will be received; kept: those that will be; calls: whose jobs are done in which call,
    and when they end; results: what came of the jobs that are being handed out. Raises ConfigError where the trace
    cannot be of this setting, or is cut.
    """

    def __init__(self, host: PeerHost, trace: Sequence[Line], keeps: bool) -> None:
        self.host, self.trace, self.keeps = host, trace, keeps
        self.uses: Counter[tuple[int, int]] = Counter()
        self.calls: dict[int, list[tuple[float, int]]] = {}
        has_server = len(host.peers) > host.books.clients
        for line in trace:
            known = INPUTS if isinstance(line, Input) else KINDS
            if line.kind not in known:
                raise unknown("kind of a trace", line.kind, known)
            nobody = line.client == SERVER and (has_server or not isinstance(line, Input))
            ids = ([] if nobody else [line.client]) + ([line[3]] if line[3] >= 0 else [])
            check_clients("the trace", ids, host.books.clients)
            if isinstance(line, Input) and line.kind == "receive":
                self.uses[line.peer, line.number] += 1
            elif isinstance(line, Input) and line.kind in ("finished", "observed", "unused"):
                end_s = math.inf if line.kind == "unused" else line.time
                self.calls.setdefault(line.number, []).append((end_s, line.client))
        self.kept: dict[tuple[int, int], Any] = {}
        self.results: deque[Done] = deque()
        host.send, host.begun, host.noted = self._keep, lambda i, job: None, deque()

    def _keep(self, i: int, receivers: tuple[int, ...], message: Any, first: int) -> None:
        for number in range(first, first + len(receivers)):
            if self.uses[i, number]:
                self.kept[i, number] = message

    def run(self) -> None:
        """Carry out all lines."""
        host, books = self.host, self.host.books
        assert host.noted is not None
        for line in self.trace:
            host.now = line.time
            if line.kind == "unused":
                continue
            if isinstance(line, Input):
                if host.noted:
                    raise self._differs(line, f"after it, client says {host.noted[0][0]}")
                self._drive(line)
            elif host.noted:
                note = host.noted.popleft()
                if (line.kind, *line[3:]) != note:
                    raise self._differs(line, f"the replay has a {note[0]}")
            elif line.kind == "evaluate":
                host.evaluate(final=line.number == 1)
            elif line.kind == "drift":
                host.drift(line.client)
            else:
                books.note(*line)
                if line.kind == "leave":
                    self._check_there(line)
                    host.leave(line.client, self.keeps)

    def _drive(self, line: Input) -> None:
        host, i = self.host, line.client
        if line.kind == "begin":
            host.begin(i, late=bool(line.number))
            return
        self._check_there(line)
        if line.kind == "wake":
            host.feed(i, "wake")
        elif line.kind in ("connected", "disconnected"):
            host.feed(i, line.kind, line.peer)
        elif line.kind == "receive":
            key = (line.peer, line.number)
            if key not in self.kept:
                raise self._differs(line, f"client {line.peer} has sent no message of number {line.number} before")
            self.uses[key] -= 1
            message = self.kept[key] if self.uses[key] else self.kept.pop(key)
            parcel = Parcel(line.peer, (i,), message, line.number, (0,), waited_s=line.waited_s)
            host.receive(parcel, (0,), line.broken)
        else:
            self._finish(line)

    def _finish(self, line: Input) -> None:
        """End a job; the first of a call does the work of all."""
        if not self.results:
            if line.kind == "scored":
                self.results.extend(self.host.do_short_jobs())
            elif line.kind == "observed":
                self.results.extend(self.host.do_background([client for _, client in self.calls[line.number]]))
            elif line.client in self.host.ahead:
                self.results.extend(self.host.do_jobs([line.client]))
            else:
                self._do_call(line)
        if not self.results or self.results[0].client != line.client:
            raise self._differs(line, "it has nothing to do")
        self.host.finish(self.results.popleft())

    def _do_call(self, line: Input) -> None:
        """Do the jobs of a call: of those that end now, and of others that end later or never."""
        jobs = self.calls[line.number]
        for _, client in jobs:
            peer = self.host.peers[client]
            if peer is None or peer.job is None:
                raise self._differs(line, f"client {client} has nothing to do")
        now = [client for end_s, client in jobs if end_s == line.time]
        self.results.extend(self.host.do_jobs(now, [client for end_s, client in jobs if end_s != line.time]))

    def _check_there(self, line: Line) -> None:
        if self.host.peers[line.client] is None:
            raise self._differs(line, "it is not there")

    @staticmethod
    def _differs(line: Line, why: str) -> ConfigError:
        who = "the server" if line.client == SERVER else f"client {line.client}"
        return ConfigError(
            f"the trace has a {line.kind} of {who} at {line.time:g} s, but {why}; it is cut or of another run"
        )
