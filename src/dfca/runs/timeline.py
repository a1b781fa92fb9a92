"""The timeline of a few clients: what the report draws as lanes, gathered from the records of a run.

A timeline is a small table of its own (`timeline/<trial>.json`), so a report needs no trace:

    lanes    [{"client": 7, "note": "10x slower"}, ...], -1 is the server
    spans    [client, what, begin_s, end_s], what: "train", "send", "offline"; everything else is waiting
    arrows   [sender, receiver, left_s, came_s, fate], fate: "used", "unused", "lost"
    begin_s, end_s
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import networkx as nx

from dfca.core.algorithm import Algorithm
from dfca.experiment.world import TimelineConfig
from dfca.sim.events.books import Line, TraceRecord
from dfca.sim.events.world import SERVER, World
from dfca.sim.metrics_table import JsonObject

ROUNDS = 10  # of an undisturbed client, where the config does not say how long the window is
MAX_ARROWS = 1500  # beyond, a picture is a scribble

USED = ("fold", "hold", "take", "download", "relay")
UNUSED = ("drop",)
LOST = ("lost", "corrupt")


def choose_lanes(options: TimelineConfig, world: World, graph: nx.Graph, seed: int) -> list[int]:
    """Choose clients to draw: those that something happens to, then their neighbours, then any; in ascending order."""
    clients = len(graph)
    if options.clients is not None:
        return sorted(options.clients)
    slowdowns = world.compute.slowdowns(seed, clients)
    slow = sorted((i for i in range(clients) if slowdowns[i] > 1), key=lambda i: (-slowdowns[i], i))
    chosen = [joiner.client for joiner in world.late_joiners][: options.lanes // 2] + slow[: max(1, options.lanes // 4)]
    if world.partitions:  # as many of each side
        sides = world.partitions[0].sides(clients)
        groups = [[i for i in range(clients) if sides[i] == side] for side in sorted(set(sides))]
        chosen += [i for group in groups for i in group[: max(1, options.lanes // len(groups))]]
    queue = chosen or [0]
    reached = list(dict.fromkeys(queue))
    for i in reached:  # grows while it is walked: breadth first
        reached += [peer for peer in sorted(graph.neighbors(i)) if peer not in reached]
    order = dict.fromkeys([*reached, *range(clients)])
    return sorted(list(order)[: options.lanes])


def usual_span(algorithm: Algorithm, steps: int, step_s: float) -> float:
    """Compute how long ROUNDS rounds of an undisturbed client take, with the warm-up before them if there is one."""
    warmup = algorithm.election.warmup_steps if algorithm.start == "elected" else 0
    return step_s * (warmup + ROUNDS * max(1, steps))


class Timeline:
    """Gathers the window of a run for some clients, record by record."""

    def __init__(self, options: TimelineConfig, lanes: Sequence[int], span_s: float, send_s: Sequence[float]) -> None:
        """span_s: the length of the window where the options do not give it; send_s: of a model by each uplink (N,)."""
        self.lanes, self._send_s = list(lanes), send_s
        self._shown = {*lanes, SERVER}
        self.begin_s = options.begin_s
        self.end_s = options.begin_s + (span_s if options.span_s is None else options.span_s)
        self._spans: list[list[Any]] = []
        self._arrows: list[list[Any]] = []
        self._open: dict[str, float] = {}  # "train 7", "offline 7": since when
        self._under_way: dict[str, list[float]] = {}  # "sender receiver cluster round": when it left
        self._server = False
        self.over = False  # nothing more can be added

    def add(self, records: Iterable[Line]) -> None:
        for record in records:
            time, kind, i, peer = record[:4]
            if time > self.end_s:
                self.over = True
                return
            if i not in self._shown or not isinstance(record, TraceRecord):
                continue
            self._server = self._server or (kind == "send" and SERVER in (i, peer))
            if kind in ("start", "warm", "measure", "tune"):
                self._open[f"train {i}"] = time
            elif kind in ("finish", "sit", "warmed", "switch", "measured", "tuned"):
                self._close("train", i, time)
            elif kind in ("leave", "absent"):
                self._close("train", i, time)
                self._open[f"offline {i}"] = time
            elif kind == "return":
                self._close("offline", i, time)
            elif kind in ("send", "repeat") and i != SERVER and self._send_s[i]:
                self._span(i, "send", time - self._send_s[i], time)
            if peer in self._shown:
                self._message(record)

    def _message(self, record: TraceRecord) -> None:
        time, kind, i, peer, cluster, round = record[:6]
        if kind in ("send", "repeat", "answer"):
            self._under_way.setdefault(f"{i} {peer} {cluster} {round}", []).append(time)
            return
        fate = "used" if kind in USED else "lost" if kind in LOST else "unused" if kind in UNUSED else ""
        # A server's bank is known by its round alone.
        left = self._under_way.get(f"{peer} {i} {cluster} {round}") or (
            self._under_way.get(f"{peer} {i} -1 {round}") if peer == SERVER else None
        )
        if not fate or not left:
            return
        begin = left.pop(0)
        if time >= self.begin_s and len(self._arrows) < MAX_ARROWS:
            self._arrows.append([peer, i, begin, time, fate])

    def _close(self, what: str, client: int, time: float) -> None:
        begin = self._open.pop(f"{what} {client}", None)
        if begin is not None:
            self._span(client, what, begin, time)

    def _span(self, client: int, what: str, begin: float, end: float) -> None:
        if end > self.begin_s:
            self._spans.append([client, what, max(begin, self.begin_s), min(end, self.end_s)])

    def table(self, slowdowns: Sequence[float], joins: Mapping[int, float]) -> JsonObject:
        """Make the table; what is open at its end lasts to it."""
        spans = list(self._spans)
        for key, begin in self._open.items():
            what, client = key.split()
            if begin < self.end_s:
                spans.append([int(client), what, max(begin, self.begin_s), self.end_s])

        def note(i: int) -> str:
            slow = f"{slowdowns[i]:g}x slower" if slowdowns[i] != 1 else ""
            return ", ".join(part for part in (slow, f"joins at {joins[i]:g} s" if i in joins else "") if part)

        lanes = [{"client": i, "note": note(i)} for i in self.lanes]
        lanes += [{"client": SERVER, "note": ""}] if self._server else []
        spans = [[c, w, round(b, 6), round(e, 6)] for c, w, b, e in spans]
        arrows = [[i, j, round(b, 6), round(e, 6), fate] for i, j, b, e, fate in self._arrows]
        return {"begin_s": self.begin_s, "end_s": self.end_s, "lanes": lanes, "spans": spans, "arrows": arrows}

    def state(self) -> JsonObject:
        return {
            "spans": self._spans,
            "arrows": self._arrows,
            "open": self._open,
            "under_way": self._under_way if not self.over else {},
            "server": self._server,
            "over": self.over,
        }

    def restore(self, state: JsonObject) -> None:
        """Continue from `state`; what it lacks is as at the start."""
        self._spans = list(state.get("spans", ()))
        self._arrows = list(state.get("arrows", ()))
        self._open = dict(state.get("open", {}))
        self._under_way = dict(state.get("under_way", {}))
        self._server = bool(state.get("server", False))
        self.over = bool(state.get("over", False))


def uplink_seconds(world: World, clients: int, model_bytes: int) -> list[float]:
    """Compute how long each client's uplink needs for one model: (N,)."""
    return [0.0 if math.isinf(rate) else model_bytes / rate for rate in world.link.bandwidths(clients)]
