"""A world full of faults: drawn from its number, written as one line, read again."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import networkx as nx

from dfca.base.errors import ConfigError, unknown
from dfca.base.renamed import refuse_earlier
from dfca.peer.records.options import ENDLESS

FAULTS_S = 60.0
"""Faults stop at this time."""
ENDING = 24
"""Rounds of a world that ends: the steps of the personal last step are picked in the middle of the faults."""


@dataclass(frozen=True)
class Crash:
    """A peer dies at a time, or at its save of that number, before it or after it; it returns after `away_s`.

    keeps: "save": what was saved last; "old": the save before; "nothing".
    """

    peer: int
    at_s: float
    away_s: float
    keeps: str
    when: str = "any"


@dataclass(frozen=True)
class Cut:
    """No message passes between some peers and the others."""

    begin_s: float
    end_s: float
    side: tuple[int, ...]


@dataclass(frozen=True)
class FaultWorld:
    """One world; every field that is empty or zero is a fault less.

    rounds: after which peers take a personal last step, or `ENDLESS`; 0: nobody does.
    """

    number: int
    peers: int = 5
    edges: tuple[tuple[int, int], ...] = ()
    algorithm: str = "dfca-auto"
    aggregation: str = "sequential"
    share: str = "trained"
    weights: str = "uniform"
    clusters: int | None = None
    groups: int = 2
    participation: float = 1.0
    delay_s: float = 0.05
    spread: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    corruption: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()
    crashes: tuple[Crash, ...] = ()
    cuts: tuple[Cut, ...] = ()
    late: tuple[tuple[int, float], ...] = ()
    jumps: tuple[tuple[int, float, float], ...] = ()
    garbage: tuple[int, ...] = ()
    liars: tuple[int, ...] = ()
    flaps: int = 0
    drift_s: float = 0.0
    swap: int = -1
    rewires: int = 0
    merges: bool = False
    rounds: int = 0


ALGORITHMS = ("dfca-auto", "dfca-fi", "dfca-gi", "dfca-li", "dfedavgm", "local", "ifca")


def draw_world(number: int, seed: int = 0) -> FaultWorld:
    """Draw the world of that number."""
    rnd = random.Random(f"{seed}/{number}")
    n = rnd.choice((2, 3, 4, 5, 6, 7, 8, 10, 12))
    graph = _draw_graph(rnd, n)
    algorithm = rnd.choice((*ALGORITHMS, "dfca-auto", "dfca-auto", "dfca-fi"))

    def some(chance: float, most: int) -> list[int]:
        return rnd.sample(range(n), min(n, rnd.randint(1, most))) if rnd.random() < chance else []

    def moment() -> float:
        return rnd.choice((0.0, rnd.expovariate(1 / 15), rnd.uniform(0, FAULTS_S)))

    def crash(peer: int) -> Crash:
        return Crash(
            peer,
            moment(),
            rnd.expovariate(1 / 15) + 0.5,
            rnd.choice(("save", "save", "old", "nothing")),
            rnd.choice(("any", "before save", "after save")),
        )

    late = tuple((i, round(rnd.uniform(0.1, FAULTS_S / 2), 3)) for i in some(0.3, max(1, n // 3)))
    if len(late) == n:
        late = late[1:]
    cuts = tuple(
        Cut(begin, begin + rnd.expovariate(1 / 25) + 0.1, tuple(sorted(rnd.sample(range(n), rnd.randint(1, n)))))
        for begin in (moment() for _ in range(rnd.choice((0, 0, 1, 1, 2))))
    )
    world = FaultWorld(
        number,
        n,
        tuple(sorted((min(e), max(e)) for e in graph.edges)),
        algorithm,
        rnd.choice(("sequential", "batch")),
        rnd.choice(("trained", "all", "relay")),
        rnd.choice(("uniform", "metropolis")),
        rnd.choice((None, 2, 3)) if algorithm in ("dfca-auto", "dfca-fi") else rnd.choice((1, 2, 3)),
        rnd.choice((1, 2, 2, 3)),
        rnd.choice((1.0, 1.0, 1.0, 0.7)),
        rnd.choice((0.0, 0.01, 0.3, 1.5)),
        rnd.choice((0.0, 0.5, 1.5)),
        rnd.choice((0.0, 0.0, 0.1, 0.4)),
        rnd.choice((0.0, 0.0, 0.2)),
        rnd.choice((0.0, 0.0, 0.1, 0.3)),
        tuple((i, rnd.choice((3.0, 10.0, 20.0))) for i in some(0.4, max(1, n // 2))),
        tuple(crash(i) for i in some(0.5, n) for _ in range(rnd.randint(1, 2))),
        cuts,
        late,
        tuple((i, moment(), rnd.choice((-50.0, -5.0, 7.0, 500.0))) for i in some(0.2, 1)),
        tuple(some(0.15, 1)),
        tuple(some(0.15, 1)),
        rnd.choice((0, 0, 0, 5)),
        rnd.choice((0.0, 0.0, rnd.uniform(10, FAULTS_S))),
        rnd.choice((-1, rnd.randrange(2000))),
        rnd.choice((0, 0, 0, 1, 4)),
        rnd.random() < 0.5 and algorithm == "dfca-auto",
        rnd.choice((0, 0, 0, ENDING, ENDING, ENDLESS)),
    )
    lied = world.rounds == ENDING and (world.garbage or world.liars)  # who has ended never takes back what it said
    return replace(world, rounds=ENDLESS) if lied else world


def _draw_graph(rnd: random.Random, n: int) -> nx.Graph:
    kind = rnd.random()
    if kind < 0.15:
        return nx.path_graph(n)
    if kind < 0.3:
        return nx.cycle_graph(n) if n > 2 else nx.path_graph(n)
    if kind < 0.4:
        return nx.complete_graph(n)
    if kind < 0.5:
        return nx.star_graph(n - 1)
    return nx.gnp_random_graph(n, rnd.uniform(0.2, 0.8), seed=rnd.randrange(10**6))


def describe(world: FaultWorld) -> str:
    """Write a world as one line that makes it again: the fields that differ from the simplest world."""
    bare = FaultWorld(world.number)
    shown = [f"{each.name}={getattr(world, each.name)!r}" for each in fields(FaultWorld)]
    kept = [
        s
        for s, each in zip(shown, fields(FaultWorld), strict=True)
        if getattr(world, each.name) != getattr(bare, each.name)
    ]
    return f"FaultWorld({', '.join([str(world.number), *kept])})"


def read_world(line: str) -> FaultWorld:
    """Read a world that `describe` wrote.

    Raises ConfigError where the line is something else.
    """
    try:
        world = _read(ast.parse(line.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"a world must be a line such as FaultWorld(7, peers=3), got {line!r}: {error}") from None
    if not isinstance(world, FaultWorld):
        raise ConfigError(f"a world must be a line such as FaultWorld(7, peers=3), got {line!r}")
    _check_ids(world)
    return world


def _read(node: ast.expr) -> Any:
    """Evaluate literals, and calls of the three records; nothing else."""
    if isinstance(node, ast.Tuple):
        return tuple(_read(each) for each in node.elts)
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    records: dict[str, Any] = {each.__name__: each for each in (FaultWorld, Crash, Cut)}
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in records:
        raise ValueError(f"{name or 'this'} is no part of a world")
    return records[name](*map(_read, node.args), **{each.arg or "**": _read(each.value) for each in node.keywords})


def _check_ids(world: FaultWorld) -> None:
    """Raise ConfigError where a world names a peer that it does not have, or an algorithm that does not exist."""
    refuse_earlier(world.algorithm)
    if world.algorithm not in ALGORITHMS:
        raise unknown("algorithm", world.algorithm, ALGORITHMS)
    pairs = [each[0] for each in (*world.slow, *world.late, *world.jumps)]
    crashed = [crash.peer for crash in world.crashes]
    ids = {*chain(*world.edges), *pairs, *crashed, *chain(*(cut.side for cut in world.cuts)), *world.garbage}
    strange = sorted(i for i in {*ids, *world.liars} if not 0 <= i < world.peers)
    if strange:
        raise ConfigError(f"a world of {world.peers} peers has the peers 0 to {world.peers - 1}, got {strange[0]}")
