"""A world full of faults: drawn from its number, written as one line, read again."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from typing import Annotated, Any, Literal, TypeVar

import networkx as nx
from pydantic import Field

from dfca.base.errors import ConfigError, unknown
from dfca.base.renamed import refuse_earlier
from dfca.base.table import Table, option
from dfca.base.validation import check
from dfca.peer.records.options import ENDLESS

Record = TypeVar("Record", bound=Table)
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MOST_PEERS = 1000
"""No world has more, so that every line is carried out or refused."""
FAULTS_S = 60.0  # when faults stop, unless a world says otherwise
ENDING = 24  # rounds of a world that ends: the steps of the personal last step are picked in the middle of the faults
CRASHES = ("any", "before save", "during save", "after save", "in election")
"""When a peer dies, from the time of the crash on: at once, around its next save, or in its next election or survey."""


class Crash(Table):
    """A peer dies and returns after a time."""

    peer: int
    at_s: float
    away_s: Seconds
    keeps: Literal["save", "old", "nothing"]  # what was saved last, or before
    when: str = "any"  # one of CRASHES


class Cut(Table):
    """No message passes between some peers and the others."""

    begin_s: float
    end_s: float
    side: tuple[int, ...]

    def splits(self, one: int, other: int, now: float) -> bool:
        """Return whether nothing passes between two peers now."""
        return self.begin_s <= now < self.end_s and (one in self.side) != (other in self.side)


class FaultWorld(Table):
    """One world: every field that has its default is a fault less."""

    number: int
    peers: int = option(default=5, ge=1, le=MOST_PEERS)
    edges: tuple[tuple[int, int], ...] = ()
    algorithm: str = "dfca-auto"
    aggregation: Literal["sequential", "batch"] = "sequential"
    share: Literal["trained", "all", "relay"] = "trained"
    weights: Literal["uniform", "metropolis"] = "uniform"
    clusters: int | None = option(default=None, ge=1)
    groups: int = option(default=2, ge=1)
    participation: float = option(default=1.0, gt=0, le=1)
    delay_s: float = option(default=0.05, ge=0)
    spread: float = option(default=0.0, ge=0)  # of the logarithm of a delay
    loss: float = option(default=0.0, ge=0, le=1)
    duplication: float = option(default=0.0, ge=0, le=1)
    corruption: float = option(default=0.0, ge=0, le=1)
    slow: tuple[tuple[int, Positive], ...] = ()  # (peer, seconds of a round)
    crashes: tuple[Crash, ...] = ()
    cuts: tuple[Cut, ...] = ()
    late: tuple[tuple[int, Seconds], ...] = ()  # (peer, when it joins)
    jumps: tuple[tuple[int, Seconds, float], ...] = ()  # (peer, when, by how much its clock jumps)
    garbage: tuple[int, ...] = ()  # peers that send garbage
    liars: tuple[int, ...] = ()  # peers that lie about their lineage
    flaps: int = option(default=0, ge=0)  # links that break once, for a moment
    drift_s: float = option(default=0.0, ge=0)  # when the samples change
    swap: int = -1  # which peer is replaced by a copy of its state
    rewires: int = option(default=0, ge=0)  # edges that come or go
    merges: bool = False
    rounds: int = option(default=0, ge=0)  # after which peers take a personal last step, or `ENDLESS`; 0: nobody does
    robust: Literal["none", "clip", "trimmed", "median"] = "none"
    staleness: Literal["", "polynomial updates", "hinge rounds", "polynomial seconds"] = ""  # kind and unit
    faults_s: float = option(default=FAULTS_S, gt=0)  # when faults stop
    longest: float = option(default=8.0, ge=1)  # the longest delay, in medians
    save_s: float = option(default=0.0, ge=0)  # how long a save takes
    one_way: tuple[tuple[int, int, Share], ...] = ()  # (sender, receiver, share of the messages that is lost)
    flapping: tuple[tuple[int, int, Positive], ...] = ()  # (peer, peer, how often their link breaks, in seconds)
    rates: tuple[tuple[int, Positive], ...] = ()  # (peer, how fast its clock runs)


ALGORITHMS = ("dfca-auto", "dfca-fi", "dfca-gi", "dfca-li", "dfedavgm", "local", "ifca")
ELECTED = ("dfca-auto", "dfca-fi")


def draw_world(number: int, seed: int = 0, harsh: bool = False) -> FaultWorld:
    """Draw the world of a number.

    Args:
        number: which one.
        seed: other worlds for every seed.
        harsh: draw more peers, longer delays and faults, and more kinds of them.
    """
    rnd = random.Random(f"{seed}/{number}/harsh" if harsh else f"{seed}/{number}")
    n = rnd.randint(2, 16) if harsh else rnd.choice((2, 3, 4, 5, 6, 7, 8, 10, 12))
    faults_s = rnd.choice((20.0, FAULTS_S, FAULTS_S, 150.0, 600.0)) if harsh else FAULTS_S
    graph = _draw_graph(rnd, n)
    algorithm = rnd.choice((*ALGORITHMS, "dfca-auto", "dfca-auto", "dfca-fi"))

    def some(chance: float, most: int) -> list[int]:
        return rnd.sample(range(n), min(n, rnd.randint(1, most))) if rnd.random() < chance else []

    def moment() -> float:
        return rnd.choice((0.0, min(faults_s, rnd.expovariate(1 / 15)), rnd.uniform(0, faults_s)))

    def crash(peer: int) -> Crash:
        when = rnd.choice(CRASHES if harsh else ("any", "before save", "after save"))
        return Crash(
            peer, moment(), rnd.expovariate(1 / 15) + 0.5, rnd.choice(("save", "save", "old", "nothing")), when
        )

    late = tuple((i, round(rnd.uniform(0.1, faults_s / 2), 3)) for i in some(0.3, max(1, n // 3)))
    most_cut = n if algorithm == "ifca" else n - 1  # a cut around everybody separates nobody, but from a server
    cuts = tuple(
        Cut(begin, begin + rnd.expovariate(1 / 25) + 0.1, tuple(sorted(rnd.sample(range(n), rnd.randint(1, most_cut)))))
        for begin in (moment() for _ in range(rnd.choice((0, 0, 1, 1, 2))))
    )
    world = FaultWorld(
        number,
        n,
        tuple(sorted((min(e), max(e)) for e in graph.edges)),
        algorithm,
        aggregation=rnd.choice(("sequential", "batch")),
        share=rnd.choice(("trained", "all", "relay")),
        weights=rnd.choice(("uniform", "metropolis")),
        clusters=rnd.choice((None, 2, 3)) if algorithm in ELECTED else rnd.choice((1, 2, 3)),
        groups=rnd.choice((1, 2, 2, 3)),
        participation=rnd.choice((1.0, 1.0, 1.0, 0.7)),
        delay_s=rnd.choice((0.0, 0.01, 0.3, 1.5)),
        spread=rnd.choice((0.0, 0.5, 1.5)),
        loss=rnd.choice((0.0, 0.0, 0.1, 0.4)),
        duplication=rnd.choice((0.0, 0.0, 0.2)),
        corruption=rnd.choice((0.0, 0.0, 0.1, 0.3)),
        slow=tuple((i, rnd.choice((3.0, 10.0, 20.0))) for i in some(0.4, max(1, n // 2))),
        crashes=tuple(crash(i) for i in some(0.5, n) for _ in range(rnd.randint(1, 2))),
        cuts=cuts,
        late=late[1:] if len(late) == n else late,
        jumps=tuple((i, moment(), rnd.choice((-50.0, -5.0, 7.0, 500.0))) for i in some(0.2, 1)),
        garbage=tuple(some(0.15, 1)),
        liars=tuple(some(0.15, 1)),
        flaps=rnd.choice((0, 0, 0, 5)),
        drift_s=rnd.choice((0.0, 0.0, rnd.uniform(10, FAULTS_S))),
        swap=rnd.choice((-1, rnd.randrange(2000))),
        rewires=rnd.choice((0, 0, 0, 1, 4)),
        merges=rnd.random() < 0.5 and algorithm == "dfca-auto",
        rounds=rnd.choice((0, 0, 0, ENDING, ENDING, ENDLESS)),
        faults_s=faults_s,
    )
    if harsh:
        world = _harsher(world, rnd)
    lied = world.garbage or world.liars  # a peer that has ended never takes back what it said
    return replace(world, rounds=ENDLESS) if lied and 0 < world.rounds < ENDLESS else world


def _harsher(world: FaultWorld, rnd: random.Random) -> FaultWorld:
    n = world.peers

    def chosen(chance: float) -> bool:
        return rnd.random() < chance

    def some(chance: float, most: int) -> list[int]:
        return rnd.sample(range(n), min(n, rnd.randint(1, most))) if chosen(chance) else []

    edges = [(-1, i) for i in range(n)] if world.algorithm == "ifca" else list(world.edges)
    directed = [edge if chosen(0.5) else edge[::-1] for edge in edges]
    counts = (None, 1, 2, 3, 4, 5, 6) if world.algorithm in ELECTED else (1, 2, 3, 4, 5, 6)
    return replace(
        world,
        clusters=rnd.choice(counts),
        groups=rnd.randint(1, 4),
        spread=rnd.choice((0.0, 0.5, 1.5, 2.5)),
        longest=rnd.choice((8.0, 50.0)),
        garbage=tuple(some(0.15, max(1, n // 4))),
        liars=tuple(some(0.2, max(1, n // 4))),
        rounds=rnd.choice((0, 0, rnd.randint(10, 200), ENDLESS)),
        robust=rnd.choice(("none", "none", "clip", "trimmed", "median")),
        staleness=rnd.choice(("", "", "polynomial updates", "hinge rounds", "polynomial seconds")),
        save_s=rnd.choice((0.0, 0.0, 0.1, 3.0)),
        one_way=tuple((*edge, rnd.choice((0.3, 0.9))) for edge in directed if chosen(0.15)) if chosen(0.4) else (),
        flapping=tuple((*edge, rnd.choice((2.0, 7.0, 30.0))) for edge in edges if chosen(0.1)) if chosen(0.4) else (),
        rates=tuple((i, rnd.choice((0.5, 0.9, 1.1, 2.0))) for i in some(0.3, n)),
    )


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


def describe(world: Any) -> str:
    """Write a world as one line that makes it again: the fields that differ from the simplest world."""
    bare = type(world)(world.number)
    changed = [
        (f.name, getattr(world, f.name)) for f in fields(world) if getattr(world, f.name) != getattr(bare, f.name)
    ]
    return (
        f"{type(world).__name__}({', '.join([str(world.number), *(f'{name}={value!r}' for name, value in changed)])})"
    )


def read_world(line: str) -> FaultWorld:
    """Read a world that `describe` wrote.

    Raises ConfigError where the line is something else.
    """
    world = read_record(line, FaultWorld, (FaultWorld, Crash, Cut), "FaultWorld(7, peers=3)")
    _check(world)
    return world


def read_record(line: str, kind: type[Record], kinds: tuple[type, ...], example: str) -> Record:
    """Evaluate literals, and calls of some records; nothing else. Raises ConfigError."""
    records: dict[str, Any] = {record.__name__: record for record in kinds}

    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(map(read, node.elts))
        if not isinstance(node, ast.Call):
            return ast.literal_eval(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in records:
            raise ValueError(f"{name or 'this'} is no part of a world")
        named = {word.arg or "**": read(word.value) for word in node.keywords}
        return signature(records[name]).bind(*map(read, node.args), **named).arguments

    try:
        body = ast.parse(line.strip(), mode="eval").body
        given = read(body)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"a world must be a line such as {example}, got {line!r}: {error}") from None
    if not (isinstance(body, ast.Call) and isinstance(body.func, ast.Name) and body.func.id == kind.__name__):
        raise ConfigError(f"a world must be a line such as {example}, got {line!r}")
    return check(given, kind)


def _check(world: FaultWorld) -> None:
    """Raise ConfigError where a world names a peer that it does not have, or something that does not exist."""
    refuse_earlier(world.algorithm)
    for what, name, known in (
        ("algorithm", world.algorithm, ALGORITHMS),
        *(("moment of a crash", crash.when, CRASHES) for crash in world.crashes),
    ):
        if name not in known:
            raise unknown(what, name, known)
    if loops := [edge for edge in world.edges if edge[0] == edge[1]]:
        raise ConfigError(f"an edge joins two peers, got {loops[0]}")
    links = ("one_way", "flapping") if world.algorithm == "ifca" else ()
    check_peers("peers", [i for name, i in peers_in(world) if not (i == -1 and name in links)], world.peers)


LINKS = ("edges", "one_way", "flapping", "resets")
"""Fields whose entries begin with two peers. Those of others begin with one, are one, or are records."""


def peers_of(name: str, entry: Any) -> tuple[int, ...]:
    """Return the peers, or nodes, that an entry of a field of a world is about."""
    if is_dataclass(entry):
        parts = vars(entry)
        return (*parts.get("side", ()), *(parts[key] for key in ("peer", "node", "by") if key in parts))
    return entry[: 2 if name in LINKS else 1] if isinstance(entry, tuple) else (entry,)


def peers_in(world: Any) -> list[tuple[str, int]]:
    """List all peers that the fields of a world name, with the fields."""
    return [(name, i) for name, entries in _entries(world).items() for entry in entries for i in peers_of(name, entry)]


def _entries(world: Any) -> dict[str, tuple[Any, ...]]:
    return {name: value for name, value in vars(world).items() if isinstance(value, tuple)}


def check_peers(what: str, named: Iterable[int], count: int) -> None:
    """Raise ConfigError where a world names a peer that it does not have."""
    if strange := sorted(i for i in named if not 0 <= i < count):
        raise ConfigError(f"a world of {count} {what} has the {what} 0 to {count - 1}, got {strange[0]}")


def without_last(world: Record, count: str) -> Record:
    """Take away the last peer, with everything that happens to it. count: the field with the number of peers."""
    last = getattr(world, count) - 1
    changes: dict[str, Any] = {count: last}
    for name, entries in _entries(world).items():
        thinned = (replace(e, side=tuple(i for i in e.side if i != last)) if isinstance(e, Cut) else e for e in entries)
        changes[name] = tuple(entry for entry in thinned if last not in peers_of(name, entry))
    return replace(world, **changes)  # type: ignore[type-var]
