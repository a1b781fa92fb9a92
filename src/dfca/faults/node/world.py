"""A world of whole nodes: drawn from its number, written as one line, read again."""

from __future__ import annotations

import random
from typing import Literal

from dfca.base.errors import ConfigError, unknown
from dfca.base.table import Table, option
from dfca.faults.world import MOST_PEERS, Cut, Positive, Seconds, check_peers, peers_in, read_record

FAULTS_S = 40.0  # when faults stop
ENDS = ("power", "kill", "stop")  # how a node ends: without power, by SIGKILL, or by its user
ALGORITHMS = ("dfca-auto", "dfca-fi", "dfca-gi", "dfca-li", "dfedavgm")


class NodeCrash(Table):
    """A node ends, and starts again after a time."""

    node: int
    at_s: float
    away_s: Seconds
    how: str = "power"  # one of ENDS


class Pairing(Table):
    """A node joins the running swarm with an invite of a member, after some attempts with wrong secrets."""

    node: int
    at_s: float
    by: int = 0
    wrong: int = option(default=0, ge=0)


class NodeWorld(Table):
    """One world: every field that has its default is a fault less."""

    number: int
    nodes: int = option(default=3, ge=1, le=MOST_PEERS)
    algorithm: str = "dfca-auto"
    clusters: int | None = option(default=None, ge=1)
    aggregation: Literal["sequential", "batch"] = "sequential"
    groups: int = option(default=2, ge=1)
    rounds: int = option(default=0, ge=0)  # 0: for ever
    degree: int = option(default=6, ge=1)
    delay_s: float = option(default=0.005, ge=0)
    spread: float = option(default=0.0, ge=0)  # of the logarithm of a delay
    chunk_bytes: int = option(default=1 << 16, ge=1)  # small: a model comes in pieces, kept on the disk meanwhile
    slow: tuple[tuple[int, Positive], ...] = ()  # (node, seconds of a round)
    save_s: float = option(default=0.0, ge=0)  # how long a save takes
    late: tuple[tuple[int, Seconds], ...] = ()  # (node, when the founder introduces it)
    crashes: tuple[NodeCrash, ...] = ()
    cuts: tuple[Cut, ...] = ()
    resets: tuple[tuple[int, int, float], ...] = ()  # (node, node, when their connections break)
    half_open: float = option(default=0.0, ge=0, le=1)  # share of broken connections of which one end never hears
    twice: float = option(default=0.0, ge=0, le=1)  # share of talks that arrive a second time
    full: float = option(default=0.0, ge=0, le=1)  # share of writes for which a disk has no room
    broken: float = option(default=0.0, ge=0, le=1)  # share of writes that fail
    power_cuts: float = option(default=0.0, ge=0, le=1)  # share of writes in which a node loses its power
    torn: float = option(default=0.0, ge=0, le=1)  # share of power cuts after which the last file has lost its end
    clocks: tuple[tuple[int, float], ...] = ()  # (node, by how much its calendar is wrong)
    removed: tuple[tuple[int, float], ...] = ()  # (node, when the founder removes it)
    walled: tuple[int, ...] = ()  # nodes that can only dial out, as behind a router
    old: tuple[int, ...] = ()  # nodes that do not send models on links, as until 0.2
    pairings: tuple[Pairing, ...] = ()
    far: tuple[tuple[int, Seconds], ...] = ()  # (node, seconds that each of its messages takes longer, either way)
    rest_s: float = option(default=0.0, ge=0)  # longest rest between rounds, once they bring nothing


def draw_node_world(number: int, seed: int = 0) -> NodeWorld:
    """Draw the world of a number; other worlds for every seed."""
    rnd = random.Random(f"node/{seed}/{number}")
    n = rnd.choice((2, 3, 4, 5, 6, 8))
    algorithm = rnd.choice((*ALGORITHMS, "dfca-auto"))

    def some(chance: float, most: int, first: int = 0) -> list[int]:
        return rnd.sample(range(first, n), min(n - first, rnd.randint(1, most))) if rnd.random() < chance else []

    def moment(most: float = FAULTS_S) -> float:
        return round(rnd.choice((rnd.uniform(0, most), rnd.expovariate(1 / 5) % most)), 2)

    def crash(node: int) -> NodeCrash:
        return NodeCrash(node, moment(), round(rnd.expovariate(1 / 5) + 0.1, 2), rnd.choice(ENDS))

    cuts = []
    for _ in range(rnd.choice((0, 0, 1, 2))):
        begin = moment()
        side = tuple(sorted(rnd.sample(range(n), rnd.randint(1, n - 1))))
        cuts.append(Cut(begin, min(FAULTS_S, round(begin + rnd.expovariate(1 / 10), 2)), side))
    resets: list[tuple[int, int, float]] = []
    for _ in range(rnd.choice((0, 0, 1, 5))):
        one, other = rnd.sample(range(n), 2)
        resets.append((one, other, moment()))
    late = some(0.3, max(1, n // 3), 1)
    removed = [node for node in some(0.15, 1, 1) if n - len(late) > 2]
    walls = random.Random(f"walls/{seed}/{number}")
    walled = walls.sample(range(1, n), walls.randint(1, n - 1)) if walls.random() < 0.3 else []
    old = walls.sample(range(n), walls.randint(1, n)) if not walled and walls.random() < 0.3 else []
    ways = random.Random(f"ways/{seed}/{number}")
    pairs = random.Random(f"pairs/{seed}/{number}")
    staying = [node for node in range(1, n) if node not in (*late, *removed)]
    joining = pairs.sample(staying, min(len(staying), pairs.randint(1, 2))) if pairs.random() < 0.4 else []
    inviting = [0, *(node for node in staying if node not in (*joining, *walled))]
    return NodeWorld(
        number,
        n,
        algorithm,
        clusters=rnd.choice((None, 2)) if algorithm in ("dfca-auto", "dfca-fi") else rnd.choice((1, 2)),
        aggregation=rnd.choice(("sequential", "batch")),
        groups=rnd.choice((1, 2, 2)),
        rounds=rnd.choice((0, 0, 30)),
        degree=rnd.choice((2, 3, 6)),
        delay_s=rnd.choice((0.001, 0.005, 0.05, 0.2)),
        spread=rnd.choice((0.0, 0.5, 1.0)),
        chunk_bytes=rnd.choice((1 << 16, 1 << 16, 16, 5)),
        slow=tuple((i, rnd.choice((1.0, 3.0))) for i in some(0.3, max(1, n // 2))),
        save_s=rnd.choice((0.0, 0.0, 0.05, 0.5)),
        late=tuple((i, moment(FAULTS_S / 2)) for i in late),
        crashes=tuple(crash(i) for i in some(0.6, n) for _ in range(rnd.randint(1, 2))),
        cuts=tuple(cuts),
        resets=tuple(resets),
        half_open=rnd.choice((0.0, 0.3)),
        twice=rnd.choice((0.0, 0.0, 0.2)),
        full=rnd.choice((0.0, 0.0, 0.05, 0.3)),
        broken=rnd.choice((0.0, 0.0, 0.05)),
        power_cuts=rnd.choice((0.0, 0.0, 0.01)),
        torn=rnd.choice((0.0, 0.0, 0.5)),
        clocks=tuple((i, rnd.choice((-1e6, -60.0, 3600.0))) for i in some(0.2, 2)),
        removed=tuple((i, moment()) for i in removed if i not in late),
        walled=tuple(sorted(walled)),
        old=tuple(sorted(old)),
        pairings=tuple(
            Pairing(i, round(pairs.uniform(0, FAULTS_S), 2), pairs.choice(inviting), pairs.choice((0, 0, 1, 6)))
            for i in joining
        ),
        far=((ways.randrange(n), ways.choice((0.2, 0.4))),) if ways.random() < 0.3 else (),
        rest_s=random.Random(f"rest/{seed}/{number}").choice((0.0, 0.0, 10.0, 60.0)),
    )


def read_node_world(line: str) -> NodeWorld:
    """Read a world that `describe` wrote. Raises ConfigError where the line is something else."""
    world = read_record(line, NodeWorld, (NodeWorld, NodeCrash, Pairing, Cut), "NodeWorld(7, nodes=3)")
    for what, name, known in (
        ("algorithm", world.algorithm, ALGORITHMS),
        *(("end of a node", crash.how, ENDS) for crash in world.crashes),
    ):
        if name not in known:
            raise unknown(what, name, known)
    check_peers("nodes", (i for _, i in peers_in(world)), world.nodes)
    joining = [pairing.node for pairing in world.pairings]
    coming, removed = [*(node for node, _ in world.late), *joining], [node for node, _ in world.removed]
    if 0 in (*coming, *removed):
        raise ConfigError("node 0 founds the swarm: it is neither late nor removed, and joins by no pairing")
    if strange := sorted({*joining} & {*removed}) or sorted(i for i in {*coming} if coming.count(i) > 1):
        raise ConfigError(f"a node joins once, and one that is paired is not removed; got node {strange[0]}")
    if strange := sorted({pairing.by for pairing in world.pairings} & {*coming, *removed, *world.walled}):
        raise ConfigError(f"a node that invites is there all the time, and in reach; node {strange[0]} is not")
    if 0 in world.walled or (world.walled and world.old):
        raise ConfigError(
            "node 0 is not walled: the others must reach it; a walled node and an old one share no models"
        )
    return world
