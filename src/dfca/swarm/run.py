"""Run a swarm: start its nodes, watch them, inject faults, and write a run folder like a simulation's.

plan        the samples of every node, the facts of the swarm
            a fleet starts, asks, kills and stops nodes (`processes` or `memory`)
scores      the saves of all nodes, scored like a simulation
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from dfca.base.errors import ConfigError, RunError
from dfca.base.files import atomic_write
from dfca.experiment.load import Experiment
from dfca.runs.signals import Interrupted, StopSignal
from dfca.runs.sink import Broadcast, FolderSink, RunSink
from dfca.runs.store.environment import environment
from dfca.runs.store.folder import RunFolder
from dfca.runs.store.rows import TrialRow
from dfca.runs.trials import IN_SUMMARY
from dfca.sim.metrics_table import EvaluationRow
from dfca.swarm.plan import Fleet, NodeStatus, SwarmPlan, make_plan
from dfca.swarm.scores import Scorer, Snapshot, take


@dataclass(frozen=True)
class FaultOptions:
    """Which faults happen how often."""

    kill_every_s: float | None = None  # seconds between two kills; None: never
    cut_every_s: float | None = None  # seconds between two cuts of half the links; None: never
    seed: int = 0


class FaultPlan:
    """Draws the faults of a swarm, one after the other."""

    def __init__(self, options: FaultOptions, clients: int, edges: Sequence[tuple[int, int]]) -> None:
        self.options, self._clients = options, clients
        self._edges = sorted(edges)
        self._random = Random(f"{options.seed}/swarm")
        self._next_kill = options.kill_every_s
        self._next_cut = options.cut_every_s
        self.kills = 0
        self.cuts = 0

    def victim(self, now_s: float) -> int | None:
        """Return which node to kill now, or None."""
        if self._next_kill is None or now_s < self._next_kill:
            return None
        assert self.options.kill_every_s is not None
        self._next_kill = now_s + self.options.kill_every_s
        self.kills += 1
        return self._random.randrange(self._clients)

    def links(self, now_s: float) -> list[tuple[int, int]] | None:
        """Return which links to cut now, for half of the time until the next cut, or None."""
        if self._next_cut is None or now_s < self._next_cut:
            return None
        assert self.options.cut_every_s is not None
        self._next_cut = now_s + self.options.cut_every_s
        self.cuts += 1
        return self._random.sample(self._edges, len(self._edges) // 2)


POLL_S = 0.5
SCORE_EVERY_S = 2.0


@dataclass(frozen=True)
class SwarmOptions:
    """How a swarm is run."""

    nodes: int
    transport: Literal["grpc", "memory"] = "grpc"
    faults: FaultOptions = field(default_factory=FaultOptions)
    limit_s: float | None = None  # taking longer is an error; None: no limit


@dataclass
class Progress:
    """What a live table shows."""

    elapsed_s: float
    rounds: int
    nodes: list[NodeStatus]
    row: dict[str, Any] | None  # the newest metrics
    kills: int
    cuts: int


def run_swarm(
    experiment: Experiment,
    out: Path,
    options: SwarmOptions,
    show: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Run the first algorithm and seed of an experiment on real nodes; returns the summary of the run folder.

    Raises ConfigError for what nodes cannot run; RunError if the folder holds a swarm already, nodes fail, or the limit
    is over; Interrupted after SIGINT or SIGTERM, when all nodes have ended.
    """
    if (out / "nodes").exists():
        raise RunError(f"{out} holds a swarm already; use another --out, or remove the folder")
    experiment = with_nodes(experiment, options.nodes)
    with RunFolder.open_(out, experiment, resume=True) as folder:
        listener = Broadcast(FolderSink(folder))
        plan = make_plan(experiment, out, listener)
        folder.store_environment(environment("cpu") | {"transport": options.transport})
        listener.start_run([plan.trial], 0)
        listener.start_trial(plan.trial, 0)
        fleet = _make_fleet(plan, options)
        try:
            row = asyncio.run(_until_signal(_Run(plan, fleet, options, folder, listener, show).run()))
        finally:
            listener.end_run()
        if row is None:
            raise Interrupted(f"interrupted; all nodes have ended; to begin again, remove {out} or use another --out")
        listener.finish_trial(plan.trial, TrialRow.of(row))
        return folder.summary()


async def _until_signal(run: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Run a swarm. SIGINT or SIGTERM ends its nodes, and this returns None; a second signal kills them."""
    loop, task, signals = asyncio.get_running_loop(), asyncio.ensure_future(run), []

    def end(number: int) -> None:
        signals.append(number)
        task.cancel()

    if threading.current_thread() is threading.main_thread():
        for number in StopSignal.SIGNALS:
            loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not signals:
            raise
        return None


def with_nodes(experiment: Experiment, nodes: int) -> Experiment:
    """Change the number of clients, and keep one algorithm and one seed."""
    if nodes < 2:
        raise ConfigError(f"--nodes must be >= 2, got {nodes}")
    config = experiment.config
    values = config.values() | {"clients": nodes, "algorithms": [config.algorithms[0]], "seeds": [config.seeds[0]]}
    return Experiment(experiment.name, experiment.scale, type(config).of(values), experiment.sweep)


def _make_fleet(plan: SwarmPlan, options: SwarmOptions) -> Fleet:
    if options.transport == "memory":
        from dfca.swarm.memory import MemoryFleet

        return MemoryFleet(plan)
    from dfca.swarm.processes import ProcessFleet

    return ProcessFleet(plan)


class _Run:
    """One swarm from its start to its end."""

    def __init__(
        self,
        plan: SwarmPlan,
        fleet: Fleet,
        options: SwarmOptions,
        folder: RunFolder,
        sink: RunSink,
        show: Callable[[Progress], None],
    ) -> None:
        self.plan, self.fleet, self.options = plan, fleet, options
        self.folder, self.sink, self.show = folder, sink, show
        self.faults = FaultPlan(options.faults, plan.setting.clients, list(plan.setting.graph.edges))
        self.scorer = Scorer(plan)
        self.row: dict[str, Any] | None = None
        self._finished: set[int] = set()  # nodes that have done their rounds, also if they were killed since
        self.began = self._scored_s = 0.0

    async def run(self) -> dict[str, Any]:
        """Run the swarm; returns the row of the finished trial."""
        try:
            await self.fleet.start()
            self.began = time.monotonic()
            nodes = await self._watch()
        finally:
            await self.fleet.stop()
        seconds = time.monotonic() - self.began
        snapshot = take(self.plan)
        self._check(snapshot)
        self._score(snapshot, seconds, nodes)
        return self._finish(snapshot, nodes, seconds)

    async def _watch(self) -> list[NodeStatus]:
        """Follow the nodes until all have done their rounds."""
        rounds = self.plan.trial.point.config.rounds
        while True:
            now = time.monotonic() - self.began
            nodes = await self.fleet.status()
            if now - self._scored_s >= SCORE_EVERY_S:
                self._scored_s = now
                self._score(take(self.plan), now, nodes)
            self.show(Progress(now, rounds, nodes, self.row, self.faults.kills, self.faults.cuts))
            done = {i for i, node in enumerate(nodes) if node.state == "done"}
            self._finished |= done
            if len(done) == len(nodes):
                return nodes
            if self.options.limit_s is not None and now > self.options.limit_s:
                raise RunError(f"the swarm was not done after {self.options.limit_s:g} s: {_who(self.plan, nodes)}")
            if len(self._finished) < len(nodes):
                await self._disturb(now)
            await asyncio.sleep(POLL_S)

    async def _disturb(self, now: float) -> None:
        victim = self.faults.victim(now)
        if victim is not None:
            await self.fleet.kill(victim)
        links = self.faults.links(now)
        if links is not None:
            assert self.options.faults.cut_every_s is not None
            await self.fleet.cut(links, self.options.faults.cut_every_s / 2)

    def _score(self, snapshot: Snapshot, now: float, nodes: list[NodeStatus]) -> None:
        row = self.scorer.row(snapshot, round(now, 3))
        if row is None or (self.row is not None and row["round"] < self.row["round"]):
            return
        away = [i for i, node in enumerate(nodes) if node.state == "down"]
        ages = [node.staleness for node in nodes if node.staleness is not None]
        row |= {"bytes_sent": sum(node.sent_bytes for node in nodes), "away": len(away), "away_clients": away}
        row |= {"staleness": sum(ages) / len(ages) if ages else None}
        self.folder.metrics.append(self.plan.trial, row)
        self.row = row
        self.sink.finish_round(self.plan.trial, row["round"], EvaluationRow.of(row))

    def _check(self, snapshot: Snapshot) -> None:
        """Raise RunError if a node ended without models or before its last round."""
        rounds = self.plan.trial.point.config.rounds
        for i, saved in enumerate(snapshot.saves):
            name = self.plan.names[i]
            if saved is None or saved.bank is None:
                raise RunError(f"{name} ended without models; see {self.plan.folder(i) / 'node.log'}")
            if saved.round < rounds:
                raise RunError(f"{name} ended in round {saved.round} of {rounds}; see {self.plan.folder(i)}")

    def _finish(self, snapshot: Snapshot, nodes: list[NodeStatus], seconds: float) -> dict[str, Any]:
        """Write nodes.json and make the row of the trial."""
        assert self.row is not None
        trial, config = self.plan.trial, self.plan.trial.point.config
        members = [dict(node._asdict(), name=name) for name, node in zip(self.plan.names, nodes, strict=True)]
        atomic_write(self.plan.out / "nodes.json", json.dumps(members, indent=1) + "\n")
        scores = {key: self.row[key] for key in IN_SUMMARY if key in self.row}
        return {
            **trial.head,
            "digest": trial.point.digest,
            **scores,
            "clusters": config.distributions,
            "rounds": config.rounds,
            "seconds": round(seconds, 3),
            "bytes_sent": sum(node.sent_bytes for node in nodes),
            "nodes": self.options.transport,
            "kills": self.faults.kills,
            "cuts": self.faults.cuts,
            "lineages": snapshot.lineages,
            "refused": sum(node.refused for node in nodes),
            "finished": True,
        }


def _who(plan: SwarmPlan, nodes: list[NodeStatus]) -> str:
    late = [
        f"{name} is {node.state} in round {node.round}{f' ({node.error})' if node.error else ''}"
        for name, node in zip(plan.names, nodes, strict=True)
        if node.state != "done"
    ]
    return "; ".join(late[:4]) + (f"; and {len(late) - 4} more" if len(late) > 4 else "")
