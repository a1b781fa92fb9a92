"""Rogue members against honest nodes over loopback: rounds per second and accuracy before, during and after an attack.

`python -m benchmarks rogue` runs every attack on a swarm of its own; `--only NAME` one of them. A rogue is a member
with a valid certificate that says what it likes, to everybody, at up to about 1 MB/s.
"""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is loaded

from dfca.base.errors import RunError, unknown
from dfca.core.rules.election import SCALE
from dfca.core.rules.merging import EXCESSES, NOBODY, Merge, Plan, Poll, Survey
from dfca.core.state import Message
from dfca.node.disk import folder as folders
from dfca.node.disk.folder import NodeFolder
from dfca.node.net.links.link import NetLink
from dfca.node.net.transport import GrpcTransport
from dfca.node.operate.commands import init_node
from dfca.node.run import make_transport
from dfca.node.service import Service, ServiceOptions
from dfca.node.task.founding import Founding, JoinPlan, join_swarm
from dfca.node.trust.identity import Identity
from dfca.node.wire import wire_pb2 as pb
from dfca.peer.records.lineage import Entry, extended, layout_of
from dfca.peer.records.messages import Alarm, Answer, Call, Count, Hello, Key, Nothing, Probe, Question, Result, Update

HONEST, KINDS, SAMPLES = 8, 2, 200
TICK_S = 0.25
LEARN_ROUNDS, EARLY_ROUNDS = 30, 3  # before the first measurement; where surveys are to come: they end soon


def write_samples(path: Path, kind: int, seed: int) -> str:
    """Write samples of a kind: the second has the labels of the first, swapped."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(SAMPLES, 3))
    walks = (x[:, 0] + 0.5 * x[:, 1] > 0) == (kind == 0)
    rows = (f"{','.join(f'{v:.4f}' for v in row)},{'walk' if w else 'rest'}" for row, w in zip(x, walks, strict=True))
    path.write_text("\n".join(["a,b,c,activity", *rows]) + "\n")
    return str(path)


def make_folders(folder: Path, count: int, robust: str, surveys: bool) -> list[NodeFolder]:
    """Make the folders of a swarm of devices on this machine; surveys: it finds the number of clusters by itself."""
    network = {"host": "127.0.0.1", "port": 0, "invite_port": 0}
    settings = {"network": network, "training": {"pause_s": 0.4, "reread_s": 0.0}, "log": {"level": "warning"}}
    agreed = {"starts_with": HONEST, "robust": robust, "personal": 0}
    names = [folder / f"node{i}" for i in range(count)]
    data = [write_samples(folder / f"{i}.csv", i % KINDS, seed=i) for i in range(count)]
    clusters = None if surveys else KINDS
    init_node(names[0], Founding(data[0], "activity", settings=settings, hidden=(8,), clusters=clusters, agreed=agreed))
    founder = NodeFolder.load(names[0])
    for name, file in zip(names[1:], data[1:], strict=True):
        folders.prepare(name)
        identity = Identity.create(name)
        founder.roster.introduce(founder.identity, identity.certificate, name.name)
        founder.save_roster()
        config = join_swarm(name, founder.facts, JoinPlan(file, settings=settings))
        folders.write(name, config, founder.facts, founder.roster)
    records = founder.roster.records()
    for name in names[1:]:
        loaded = NodeFolder.load(name)
        loaded.roster.merge(records)
        loaded.save_roster()
    return [NodeFolder.load(name) for name in names]


@dataclass
class Rogue:
    """A member that listens, and says what an attack tells it to; see `node.transport.TransportInputs`."""

    number: int
    transport: GrpcTransport
    honest: list[int]
    random: Random = field(default_factory=lambda: Random(0))
    linked: set[int] = field(default_factory=set)
    hello: Hello | None = None  # the newest that came
    update: Update | None = None
    asked: deque[tuple[int, Probe | Question]] = field(default_factory=lambda: deque(maxlen=64))  # in surveys, by whom
    announced: dict[NetLink, pb.Announce] = field(default_factory=dict)  # models that it reads

    def connected(self, neighbour: int) -> None:
        self.linked.add(neighbour)

    def disconnected(self, neighbour: int) -> None:
        self.linked.discard(neighbour)

    def received(self, sender: int, message: Any) -> None:
        if isinstance(message, Hello) and (self.hello is None or message.round >= self.hello.round):
            self.hello = message
        elif isinstance(message, Update):
            self.update = message
            self.hello = self.hello and self.hello._replace(lineage=message.lineage)
        elif isinstance(message, Question) or (isinstance(message, Probe) and message.call and message.call.survey):
            self.asked.append((sender, message))

    def tell(self, make: Callable[[Hello], Any]) -> None:
        """Send everybody a message that is made of the newest hello."""
        if self.hello is not None:
            for neighbour in [*self.linked]:
                self.transport.send(neighbour, make(self.hello))

    def send_model(self, change: Callable[[Tensor], Tensor]) -> None:
        """Send everybody an update like the newest that came, with another model."""
        if self.update is not None:
            heard = self.update.message
            model = Message(self.number, heard.cluster, heard.round + 1, heard.degree, change(heard.model))
            for neighbour in [*self.linked]:
                self.transport.send(neighbour, self.update._replace(message=model, age_s=0.0, parts=1))

    def links(self) -> list[NetLink]:
        """Return its links, for what a message cannot say."""
        return [*self.transport._neighbours.links.values()]


Attack = Callable[[Rogue, int], None]  # called every TICK_S with the number of the tick
SECOND = round(1 / TICK_S)


def by_elections(rogue: Rogue, tick: int, root: int | None = None) -> None:
    """Call by-elections that nobody needs, and answer nothing."""
    if tick % SECOND == 0:
        key = Key(tick, 0, rogue.random.getrandbits(62), rogue.number if root is None else root, 1)
        rogue.tell(lambda hello: Probe(key, hello.lineage, Call((), hello.clusters)))


def by_elections_of_others(rogue: Rogue, tick: int) -> None:
    """The same in the names of honest members."""
    by_elections(rogue, tick, rogue.random.choice(rogue.honest))


def _survey(rogue: Rogue, key: Key) -> None:
    rogue.tell(lambda hello: Probe(key, hello.lineage, Call((), hello.clusters, _layout(hello).closed, survey=True)))


def _layout(hello: Hello) -> Any:
    return layout_of(hello.lineage)


def survey_waves(rogue: Rogue, tick: int) -> None:
    """Begin surveys all the time, in its own name and those of honest members, and answer nothing."""
    root = rogue.number if tick % 2 else rogue.random.choice(rogue.honest)
    _survey(rogue, Key(tick, 0, rogue.random.getrandbits(62), root, 1))


def false_results(rogue: Rogue, tick: int) -> None:
    """Begin surveys, and decide without an answer that the clusters are merged."""
    key = Key(1 + tick // SECOND, 0, 2**62, rogue.number, 1)
    if tick % SECOND == 0:
        _survey(rogue, key)
    elif tick % SECOND == SECOND - 1 and rogue.hello is not None:
        slots = len(_open_slots(rogue.hello))
        rogue.tell(lambda hello: Question(key, (HONEST,) * slots, (NOBODY,) * slots))
        if (entry := _merged(rogue.hello, key)) is not None:
            rogue.tell(lambda hello: Result(key, entry))


def false_lineages(rogue: Rogue, tick: int) -> None:
    """Claim a survey that merged clusters, and that nobody held."""
    entry = None if rogue.hello is None else _merged(rogue.hello, Key(tick, 0, 0, rogue.number, 1))
    if entry is not None:
        rogue.tell(lambda hello: hello._replace(lineage=extended(hello.lineage, entry)))


def _open_slots(hello: Hello) -> list[int]:
    layout = _layout(hello)
    return [slot for slot in range(layout.models) if slot not in layout.closed]


def _merged(hello: Hello, key: Key) -> Entry | None:
    """Make the result of a survey that merges the first and the last cluster; None where there is one left."""
    slots = _open_slots(hello)
    plan = Plan((Merge(slots[0], slots[-1], 0.5, 0.0),), ())
    changed = _layout(hello).changed_by(plan, False)
    entry = Entry(HONEST, key.attempt, key.root, key.incarnation, 0, changed, *plan, False)
    return entry if len(slots) > 1 else None


def false_answers(rogue: Rogue, _: int) -> None:
    """Answer every survey as a neighbour would whose samples say that all clusters are to be merged."""
    while rogue.asked:
        sender, asked = rogue.asked.popleft()
        if isinstance(asked, Probe) and asked.call is not None:
            closed = asked.call.closed
            slots = tuple(slot for slot in range(asked.call.clusters) if slot not in closed)
            k, many = len(slots), SAMPLES * HONEST
            alike = Poll(slots, (1,) * k, (many,) * k, (0,) * k, (1,) * k, (-1000 * SCALE,) * k**2)
            rogue.transport.send(sender, Count(asked.key, k, k, (), alike))
        elif isinstance(asked, Question) and rogue.hello is not None:
            layout = _layout(rogue.hello)
            slots = tuple(slot for slot in range(layout.models) if slot not in layout.closed)
            k = len(slots)
            said = Survey(slots, (1,) * k, (-1000 * SCALE,) * (EXCESSES * k), (1000 * SCALE,) * k)
            rogue.transport.send(sender, Answer(asked.key, said))


def alarms(rogue: Rogue, tick: int) -> None:
    """Raise alarms in everybody's name, and its own."""
    proof = rogue.random.randbytes(70)
    for origin in rogue.honest:
        rogue.tell(lambda hello, origin=origin: Alarm(origin, 10**9 + tick, True, hello.lineage, proof))  # type: ignore[misc]
    rogue.tell(lambda hello: Alarm(rogue.number, tick, tick % 2 == 0, hello.lineage))


def large_models(rogue: Rogue, _: int) -> None:
    """Send random models with 100 times the norm of a sound one."""

    def change(model: Tensor) -> Tensor:
        noise = torch.randn_like(model)
        scaled: Tensor = noise * (100 * model.norm() / noise.norm())
        return scaled

    rogue.send_model(change)


def flipped_models(rogue: Rogue, _: int) -> None:
    """Send models with the signs flipped."""
    rogue.send_model(torch.neg)


def broken_models(rogue: Rogue, tick: int) -> None:
    """Send models that are not finite, or of another size."""
    rogue.send_model((lambda model: model[:-1]) if tick % 2 else (lambda model: torch.full_like(model, torch.nan)))


def flood(rogue: Rogue, tick: int) -> None:
    """Send 160 messages a second to everybody."""
    for number in range(round(160 * TICK_S)):
        rogue.tell(lambda hello, number=number: Nothing(hello.round + number, hello.lineage))  # type: ignore[misc]


def warped_hellos(rogue: Rogue, tick: int) -> None:
    """Claim rounds of a far future and other lives."""
    rogue.tell(lambda hello: hello._replace(incarnation=tick, round=2**50 + tick))


def garbage(rogue: Rogue, _: int) -> None:
    """Send bytes that are no frames."""
    for link in rogue.links():
        link.send_made(lambda: os.urandom(200), 200)


def forged_records(rogue: Rogue, tick: int) -> None:
    """Hand on roster records that nobody signed."""
    for link in rogue.links():
        link.send(pb.Frame(roster_records=pb.RosterRecords(records=[os.urandom(300) for _ in range(4)])))


def false_offers(rogue: Rogue, _: int) -> None:
    """Announce models, and send none of their bytes."""
    for link in rogue.links():
        link.outgoing.next = lambda: None  # type: ignore[method-assign]
    rogue.send_model(torch.clone)


def slow_reader(rogue: Rogue, tick: int) -> None:
    """Ask for two bytes of a model four times a second, and for another model every five seconds: never read one."""
    _read_nothing(rogue)
    for link, announce in [*rogue.announced.items()]:
        if tick % (5 * SECOND) == 0:
            link.send(pb.Frame(unavailable=pb.Unavailable(number=rogue.announced.pop(link).number)))
        else:
            place = rogue.random.randrange(announce.size - 2)
            link.send(pb.Frame(want=pb.Want(number=announce.number, offset=place, until=place + 2)))


def stalled_reader(rogue: Rogue, _: int) -> None:
    """Stop reading its streams; heartbeats still leave."""
    _read_nothing(rogue)

    async def never() -> bytes:
        await asyncio.sleep(3600.0)
        return b""

    for link in rogue.links():
        link._stream.read = never  # type: ignore[method-assign]


def _read_nothing(rogue: Rogue) -> None:
    puller = rogue.transport._puller
    rogue.announced = {link: announce for link, announce in rogue.announced.items() if not link.down}
    puller.announce = rogue.announced.setdefault  # type: ignore[method-assign, assignment]
    for link in rogue.links():
        link.incoming.take = lambda message: 1 << 16  # type: ignore[method-assign]


def flapping(rogue: Rogue, tick: int) -> None:
    """Break all links twice a second, and dial again."""
    if tick % 2 == 0:
        members = [link.member for link in rogue.links()]
        rogue.transport.block(members, 0.05)


ATTACKS: dict[str, Attack] = {
    "nothing": lambda rogue, tick: None,
    "by-elections": by_elections,
    "by-elections-of-others": by_elections_of_others,
    "alarms": alarms,
    "large-models": large_models,
    "flipped-models": flipped_models,
    "broken-models": broken_models,
    "flood": flood,
    "warped-hellos": warped_hellos,
    "garbage": garbage,
    "forged-records": forged_records,
    "false-offers": false_offers,
    "flapping": flapping,
    "slow-reader": slow_reader,
    "stalled-reader": stalled_reader,
    "survey-waves": survey_waves,
    "false-results": false_results,
    "false-answers": false_answers,
    "false-lineages": false_lineages,
}
SURVEYED = ("survey-waves", "false-results", "false-answers")  # against swarms that hold surveys


@dataclass(frozen=True)
class Phase:
    """What the honest did in one phase."""

    rate: float  # rounds per second of one node
    accuracy: float  # mean on held-out samples, at its end


@dataclass(frozen=True)
class Attacked:
    """One attack: before, during, after."""

    name: str
    phases: tuple[Phase, Phase, Phase]
    bytes_per_s: float  # of all rogues

    def row(self) -> str:
        """Write a row of the table."""
        rates = ", ".join(f"{phase.rate:.2f}" for phase in self.phases)
        scores = ", ".join(f"{phase.accuracy:.0%}" for phase in self.phases)
        kept = self.phases[1].rate / self.phases[0].rate if self.phases[0].rate else 0.0
        return f"| {self.name} | {rates} | {kept:.0%} | {scores} | {self.bytes_per_s / 1000:.1f} |"


HEAD = """| attack | rounds/s before, during, after | kept | accuracy before, during, after | kB/s sent |
|---|---|---|---|---|"""


@asynccontextmanager
async def honest_swarm(
    folder: Path, rogues: int, robust: str, surveys: bool = False
) -> AsyncIterator[tuple[list[Service], list[Rogue]]]:
    """Run honest nodes until they have learned something; then rogues join, which are silent yet."""
    made = make_folders(folder, HONEST + rogues, robust, surveys)
    services = [Service(each, ServiceOptions(log_stream=io.StringIO()), make_transport) for each in made[:HONEST]]
    tasks = [asyncio.create_task(service.run()) for service in services]
    members: list[Rogue] = []
    try:
        await _until(lambda: all(service.port for service in services))
        names = tuple(each.path.name for each in made[:HONEST])
        for one in services:
            for other in services:
                one.folder.roster.merge(other.folder.roster.records())
        await _until(lambda: min(_rounds(services)) >= (EARLY_ROUNDS if surveys else LEARN_ROUNDS))
        for each in made[HONEST:]:
            transport = make_transport(each, neighbours=names)
            assert isinstance(transport, GrpcTransport)
            address = await transport.start()
            each.roster.merge(services[0].folder.roster.records())
            each.roster.announce(each.identity, [address])
            rogue = Rogue(each.identity.number, transport, [service.folder.identity.number for service in services])
            transport.open(rogue)
            members.append(rogue)
        await _until(lambda: all(len(rogue.linked) == HONEST and rogue.update is not None for rogue in members))
        yield services, members
    finally:
        for rogue in members:
            await rogue.transport.stop()
        for service in services:
            service.stop()
        await asyncio.gather(*tasks, return_exceptions=True)


async def attack(name: str, seconds: float, rogues: int = 1, robust: str = "clip") -> Attacked:
    """Measure one attack; raises RunError if the swarm does not start."""
    act = ATTACKS[name]
    with tempfile.TemporaryDirectory() as folder:
        async with honest_swarm(Path(folder), rogues, robust, name in SURVEYED) as (services, members):
            before = await _measure(services, seconds / 4 if name in SURVEYED else seconds)
            sent = sum(rogue.transport.status()["bytes_out"] for rogue in members)
            acting = [asyncio.create_task(_act(rogue, act)) for rogue in members]
            during = await _measure(services, 2 * seconds)
            for task in acting:
                task.cancel()
            await asyncio.gather(*acting, return_exceptions=True)
            sent = sum(rogue.transport.status()["bytes_out"] for rogue in members) - sent
            after = await _measure(services, seconds)
    return Attacked(name, (before, during, after), sent / (2 * seconds))


async def _act(rogue: Rogue, act: Attack) -> None:
    tick = 0
    while True:
        act(rogue, tick)
        tick += 1
        await asyncio.sleep(TICK_S)


async def _measure(services: list[Service], seconds: float) -> Phase:
    loop, rounds = asyncio.get_running_loop(), _rounds(services)
    begin = loop.time()
    await asyncio.sleep(seconds)
    done = sum(_rounds(services)) - sum(rounds)
    scores = [service.status()["accuracy"] for service in services]
    return Phase(done / len(services) / (loop.time() - begin), fmean(score for score in scores if score is not None))


def _rounds(services: list[Service]) -> list[int]:
    return [service.node.machine.round if hasattr(service, "node") else 0 for service in services]


async def _until(is_true: Callable[[], bool], seconds: float = 120.0) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not is_true():
        if loop.time() > end:
            raise RunError(f"the swarm did not start within {seconds:.0f} s; are other programs using the processor?")
        await asyncio.sleep(0.1)


def print_table(only: list[str], seconds: float, rogues: int, robust: str, show: Callable[[str], None]) -> None:
    """Run attacks, all if none are named, and show the table row by row."""
    for name in only:
        if name not in ATTACKS:
            raise unknown("attack", name, tuple(ATTACKS))
    torch.set_num_threads(1)
    show(
        f"{HONEST} honest nodes, {rogues} rogue, robust = {robust}, {seconds:g} s before and after, twice that during\n"
    )
    show(HEAD)
    for name in only or ATTACKS:
        show(asyncio.run(attack(name, seconds, rogues, robust)).row())
