"""`peers`: every client takes the same local steps and mixes with its neighbours, here and in other libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from dfca.bench.baselines.environments import PEERS, Peer, environment_of, script_of
from dfca.bench.baselines.work import LEARNING_RATE, Work
from dfca.bench.child import measure_rounds, run_script
from dfca.bench.rows import Row, Skip
from dfca.bench.timing import Tick
from dfca.bench.worlds import World

OURS = "dfca"


@dataclass(frozen=True)
class Plan:
    """The works, the peers, and how often each is started; a start runs `work.rounds` rounds and drops the first."""

    works: tuple[Work, ...]
    peers: tuple[Peer, ...]
    repeats: int
    cache: Path

    @property
    def count(self) -> int:
        """Count the rows."""
        return len(self.works) * len(self.peers)


def plan(quick: bool, cache: Path) -> Plan:
    """Choose the sizes."""
    threads = torch.get_num_threads()
    work = Work(clients=20, hidden=200, samples=200, batch=50, degree=10, rounds=8, threads=threads)
    if quick:
        return Plan((replace(work, rounds=3),), PEERS, 1, cache)
    works = tuple(replace(work, clients=n, hidden=h) for h in (200, 2048) for n in (20, 100))
    return Plan(works, PEERS, 3, cache)


def rows(plan: Plan, tick: Tick) -> Iterator[Row]:
    """Install what is missing, then measure work by work."""
    pythons: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    for peer in plan.peers:
        tick(f"environment of {peer.name}")
        try:
            pythons[peer.name] = environment_of(peer, plan.cache)
        except Skip as reason:
            reasons[peer.name] = str(reason)
    for work in plan.works:
        yield from rows_of(work, plan.peers, pythons, dict(reasons), plan.repeats, tick)


def rows_of(
    work: Work, peers: Sequence[Peer], pythons: dict[str, Path], reasons: dict[str, str], repeats: int, tick: Tick
) -> Iterator[Row]:
    """Compare all peers at one work: each repeat starts ours, then every peer."""
    name = f"MLP {work.hidden}, N = {work.clients}"
    about = f"{work.samples} samples per client, {work.steps} steps of {work.batch}, degree {work.degree}; per round"
    seconds: dict[str, list[float]] = {OURS: [], **{peer.name: [] for peer in peers}}
    for repeat in range(repeats):
        tick(f"{name}: dfca, {repeat + 1} of {repeats}")
        seconds[OURS].append(ours(work))
        for peer in peers:
            if peer.name in reasons:
                continue
            tick(f"{name}: {peer.name}, {repeat + 1} of {repeats}")
            try:
                seconds[peer.name].append(theirs(peer, pythons[peer.name], work))
            except Skip as reason:
                reasons[peer.name] = str(reason)
    for peer in peers:
        title, details = f"{name}, {peer.name}", {"differs": peer.differs, "work": asdict(work)}
        if peer.name in reasons:
            yield Row(title, about, details=details, skipped=reasons[peer.name])
            continue
        values = {OURS: seconds[OURS], peer.name: seconds[peer.name]}
        yield Row(title, about, values, of=peer.name, to=OURS, least=peer.least, details=details)


def ours(work: Work) -> float:
    """Time our round: one model per client (k = 1), uniform weights over all neighbours."""
    world = World(
        hidden=work.hidden,
        clients=work.clients,
        samples=work.samples,
        batch_size=work.batch,
        steps=work.steps,
        degree=work.degree,
        learning_rate=LEARNING_RATE,
    )
    return float(median(measure_rounds(world, work.rounds - 1, work.threads)["seconds"]))


def theirs(peer: Peer, python: Path, work: Work) -> float:
    """Time a peer's round, scaled to all clients where fewer trained."""
    settings = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ""}
    found = run_script([str(python), str(script_of(peer)), json.dumps(asdict(work))], settings, longest_s=1200)
    expected = work.clients * len(found["seconds"])
    if not found["trained"]:
        raise Skip(f"{peer.name} trained no client")
    return float(median(found["seconds"]) * expected / found["trained"])
