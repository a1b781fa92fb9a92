"""Carry out a world of whole nodes, and check it."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from dfca.base.errors import ConfigError, DfcaError
from dfca.faults.check import shrink_by, simpler
from dfca.faults.disk import FaultyDisk, PowerCut
from dfca.faults.node.wire import PORT, FaultyDoor, FaultyNetwork, FaultyWire
from dfca.faults.node.world import FAULTS_S, NodeWorld, Pairing
from dfca.faults.tiny import SIZE, TinyWork, Violation
from dfca.faults.world import without_last
from dfca.node.disk.folder import ROSTER, NodeFolder
from dfca.node.disk.save_file import STATE
from dfca.node.disk.store import DiskStore
from dfca.node.memory import VirtualTimeLoop
from dfca.node.net.links.timing import BACK_S
from dfca.node.operate.logs import Log
from dfca.node.run import make_transport
from dfca.node.service import Service, ServiceOptions
from dfca.node.surroundings import Surroundings
from dfca.node.task.config import DataConfig, NetworkConfig, NodeConfig, TrainingConfig
from dfca.node.task.facts import Facts, InputFacts, ModelFacts
from dfca.node.trust.identity import Identity
from dfca.node.trust.invite import SECRET_BYTES, Invite
from dfca.node.trust.joining import Joined, PairingError, join
from dfca.node.trust.roster import Roster
from dfca.peer.peer import Peer
from dfca.peer.records.work import Job, Note, Train, Trained
from dfca.peer.state import Saved, State

EPOCH = 1.7e9  # when worlds begin, in seconds since 1970
RECOVERY_S = 300.0  # time to recover after the last fault where messages take no time
HOPS = 8
"""How often models may have to cross all links of a ring, one after the other: they do in each turn of an election."""
MODEL_BYTES = 140  # of a model on its way
FOLD_S = 5.0  # how long `batch` waits for neighbours
LONGEST = 20.0  # no delay is longer, in medians
STALLS_S = 1.0  # where messages may take longer, links end for their silence, and are back in `BACK_S`
QUIET_ROUNDS = 10  # without a better loss, after which a node rests
LOOK_S = 2.0
MORE_ROUNDS = 3
END_S = 20.0  # time that a node has to end
AGAIN_S = 2.0
"""Pause before a node that ended with an error is started again, as a service manager does; or a pairing is."""

logging.getLogger("dfca.node.trust").addHandler(logging.NullHandler())  # refused pairings belong to worlds


@lru_cache(maxsize=64)
def identity(node: int) -> Identity:
    """Return the identity of a node: the same key in every process."""
    return Identity.of_key(ec.derive_private_key(1_000_003 * (node + 1), ec.SECP256R1()), Path(f"/{node}"))


class NodeWork(TinyWork):
    """The work of a device on tiny models, with what a status shows of it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.samples = SimpleNamespace(client=SimpleNamespace(y=self.x), held_out=0)
        self.loss: float | None = None
        self.recent_losses: tuple[float, ...] = ()
        self.report = self.personal = self.problem = None
        self.rereads = 0

    def is_stale(self) -> bool:
        """Return whether there are other samples than those that were read: never."""
        return False

    def move_to(self, group: int) -> None:
        super().move_to(group)
        self.x, self.mean = self.x.float(), self.mean.float()

    def run(self, job: Job, bank: Tensor | None) -> Any:
        result = super().run(job, bank)
        if isinstance(result, Trained):
            self.loss = result.loss
        return result.float() if isinstance(result, Tensor) else result

    def slices(self, job: Job) -> Iterator[Any]:
        """Do a job beside the rounds, in two pieces."""
        yield None
        yield self.run(job, None)


class WorldLog(Log):
    """Keeps the warnings of one life of a node."""

    def __init__(self) -> None:
        self.last_error = None
        self.warnings: list[str] = []
        self.started = False

    def _write(self, level: int, text: str, values: dict[str, Any]) -> None:
        self.started |= values.get("event") == "start"
        if level >= 30:
            self.warnings.append(text)
            self.last_error = {"text": text, "time": ""}

    def close(self) -> None:
        """There is nothing to close."""


@dataclass
class WorldDevice:
    """One device: what outlives the lives of its node."""

    node: int
    disk: FaultyDisk
    offset_s: float  # of its calendar
    durable: int = -1  # the round of the last save that the disk has promised to keep
    incarnation: int = -1
    torn: bool = False  # a save has lost its end although it was promised
    life: NodeLife | None = None
    removed: bool = False

    @property
    def path(self) -> Path:
        return Path(f"/{self.node}")


class NodeLife:
    """One process of a node. Once it is dead, nothing that it still does has an effect."""

    def __init__(self, run: NodeRun, device: WorldDevice) -> None:
        self.run, self.device, self.dead = run, device, False
        self.log, self.refused, self.refused_at = WorldLog(), 0, 0.0
        self.wire = FaultyWire(run.network, device.node, identity(device.node).id)
        self.service: Service | None = None
        self.task: asyncio.Task[None] | None = None

    def die(self, dark: bool) -> None:
        """End at once: by a signal that cannot be caught, or without power."""
        if self.dead:
            return
        self.dead = self.wire.gone = True
        self.run.network.leave(self.device.node, dark)
        if dark:
            self.device.torn |= self.device.disk.restart(STATE) is not None
        if self.service is not None:
            self.service.stop()  # what it still does reaches nobody

    # The clock of the device.

    def steady(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return EPOCH + asyncio.get_running_loop().time() + self.device.offset_s

    def listen(self, identity: Identity, bind: str, port: int) -> FaultyDoor:
        return FaultyDoor(self.run.network, identity, self.device.node, port)

    # Its threads.

    def threads(self, name: str, count: int) -> Executor:
        world, node = self.run.world, self.device.node

        def seconds(arguments: tuple[Any, ...]) -> float:
            if name == "disk":
                return world.save_s
            is_round = bool(arguments) and isinstance(arguments[0], Train)
            return dict(world.slow).get(node, 0.3) if is_round else 0.001

        return WorldThreads(self, seconds)


class WorldThreads(Executor):
    """Runs calls one after the other; each takes virtual time."""

    def __init__(self, life: NodeLife, seconds: Callable[[tuple[Any, ...]], float]) -> None:
        self._life, self._seconds, self._free_at = life, seconds, 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        loop, future = asyncio.get_running_loop(), Future[Any]()
        self._free_at = max(self._free_at, loop.time()) + self._seconds(args)
        loop.call_at(self._free_at, self._run, future, partial(fn, *args, **kwargs))
        return future

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if self._life.dead or not future.set_running_or_notify_cancel():
            future.cancel()
            return
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Calls that have been submitted still run: a thread cannot be stopped."""


class LifeDisk:
    """The disk as one life sees it: a dead one reaches nothing."""

    def __init__(self, life: NodeLife) -> None:
        self._life, self._disk = life, life.device.disk

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._disk, name))

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._life.dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return method(*arguments)

    @contextmanager
    def replacing(self, path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
        if self._life.dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        try:
            with self._disk.replacing(path, mode) as file:
                yield file
        except PowerCut:
            self._life.die(dark=True)
            self._life.run.later(self._life.run.random.uniform(0.5, 5.0), self._life.device)
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
        except OSError:
            if path.name.startswith("peer."):
                self._life.refused += 1
                self._life.refused_at = self._life.steady()
            raise


@dataclass
class WatchedStore(DiskStore):
    """A store of which every start is compared with what the disk had promised."""

    device: WorldDevice = field(kw_only=True)

    def save(self, saved: Saved) -> None:
        super().save(saved)
        self.device.durable, self.device.torn = saved.round, False

    def load(self) -> Saved | None:
        saved, device = super().load(), self.device
        restored = -1 if saved is None else saved.round
        if restored < device.durable and not device.torn:
            raise Violation(f"node {device.node} restores round {restored}, its disk had round {device.durable}")
        return saved

    def next_life(self, saved: Saved | None) -> int:
        life, device = super().next_life(saved), self.device
        if life <= device.incarnation:
            raise Violation(f"node {device.node} lives as {life} after {device.incarnation}")
        device.incarnation = life
        return life


@dataclass(frozen=True)
class WatchedFolder(NodeFolder):
    """A folder with a store that is watched."""

    device: WorldDevice = field(kw_only=True)

    def store(self) -> DiskStore:
        around = self.around
        return WatchedStore(self.path / STATE, disk=around.disk, now=around.wall, device=self.device)


class WatchedService(Service):
    """A service of which is known whose models it has folded. folded: sender and receiver."""

    folded: set[tuple[int, int]]

    def _note(self, note: Note) -> None:
        super()._note(note)
        if note.kind == "fold":
            self.folded.add((note.other, self.folder.identity.number))


class NodeRun:
    """One world on its way."""

    def __init__(self, world: NodeWorld) -> None:
        self.world, self.random = world, Random(f"run/{world.number}")
        self.problem: str | None = None
        self.is_over = False
        self.folded: set[tuple[int, int]] = set()  # numbers of senders and receivers
        self.network = FaultyNetwork(self.random, self._delay, self._held_s)
        self.network.half_open, self.network.twice = world.half_open, world.twice
        self.network.walled = {*world.walled}
        features = tuple(f"f{i}" for i in range(SIZE))
        self.facts = Facts(
            name="world",
            founder=identity(0).id,
            nonce=f"{world.number % 2**128:032x}",
            algorithm=cast(Any, world.algorithm),
            clusters=world.clusters,
            aggregation=cast(Any, world.aggregation),
            timeout_s=FOLD_S if world.aggregation == "batch" else None,
            rounds=world.rounds,
            starts_with=max(1, world.nodes - len(world.late) - len(world.removed) - len(world.pairings)),
            model=ModelFacts(size=SIZE),
            inputs=InputFacts(features=features),
            classes=("a", "b"),
        )
        offsets = dict(world.clocks)
        self.devices = [
            WorldDevice(i, self._disk(i, offsets.get(i, 0.0)), offsets.get(i, 0.0)) for i in range(world.nodes)
        ]

    def _disk(self, node: int, offset_s: float) -> FaultyDisk:
        world, rnd = self.world, Random(f"disk/{self.world.number}/{node}")
        disk = FaultyDisk(rnd, world.full, world.broken, world.power_cuts, world.torn)
        disk.now = lambda: EPOCH + offset_s + asyncio.get_running_loop().time()
        return disk

    def _delay(self, one: int, other: int) -> float:
        world, far = self.world, dict(self.world.far)
        drawn = world.delay_s * min(LONGEST, self.random.lognormvariate(0.0, world.spread)) if world.delay_s else 0.0
        return drawn + far.get(one, 0.0) + far.get(other, 0.0)

    def _held_s(self, one: int, other: int) -> float:
        now = asyncio.get_running_loop().time()
        return max((cut.end_s for cut in self.world.cuts if cut.splits(one, other, now)), default=now) - now

    def fail(self, problem: str) -> None:
        """Keep the first thing that is wrong."""
        self.problem = self.problem or f"{problem}, at {asyncio.get_running_loop().time():.1f} s"

    # The lives of nodes.

    def found(self) -> None:
        """Write the folders of all nodes that are there at the beginning."""
        late = {*dict(self.world.late), *(pairing.node for pairing in self.world.pairings)}
        inviting = {pairing.by for pairing in self.world.pairings}
        roster = Roster.found(identity(0), self.facts.swarm_id, "n0", [address(0)])
        for device in self.devices[1:]:
            if device.node not in late:
                introduce(roster, device.node, may_introduce=device.node in inviting)
        for device in self.devices:
            if device.node not in late:
                write(device, roster)

    def start(self, device: WorldDevice) -> None:
        """Start a node, unless it runs, is removed or has not joined yet."""
        if (device.life is not None and not device.life.dead) or device.removed or self.problem or self.is_over:
            return
        if device.path / ROSTER not in device.disk.files:
            return
        life = device.life = NodeLife(self, device)
        life.task = asyncio.get_running_loop().create_task(self._live(life))

    async def _live(self, life: NodeLife) -> None:
        device, node = life.device, life.device.node
        bits = Random(f"{node}/{device.incarnation}").getrandbits
        around = Surroundings(life.steady, life.wall, LifeDisk(life), life.threads, bits, life.listen)
        network = NetworkConfig(host=f"10.0.0.{node}", degree=self.world.degree)
        training = TrainingConfig(rest_s=self.world.rest_s)
        config = NodeConfig(name=f"n{node}", data=DataConfig(path="none"), network=network, training=training)
        try:
            roster = Roster.load(device.path / ROSTER, around.disk)
            folder = WatchedFolder(device.path, config, identity(node), self.facts, roster, around, device=device)
            folder.check_member()
            options = ServiceOptions(log=life.log, has_control=False)
            algorithm = self.facts.make_algorithm()
            models = algorithm.bank_size(self.facts.clusters or 1)
            changes: dict[str, Any] = {"parts": node not in self.world.old}
            changes |= {"least_chunk_bytes": self.world.chunk_bytes, "chunk_bytes": max(1024, self.world.chunk_bytes)}
            if self.world.chunk_bytes < 1024:
                changes |= {"buffer_bytes": 0}
            service = life.service = WatchedService(
                folder,
                options,
                lambda folder: make_transport(folder, life.wire, **changes),
                lambda folder: cast(Any, NodeWork(0, node, node % self.world.groups, algorithm.start, models)),
            )
            service.folded = self.folded
            service.idling.quiet_rounds = QUIET_ROUNDS
            await service.run()
        except Violation as violation:
            self.fail(str(violation))
        except Exception as error:
            self._judge(life, error)
        finally:
            self._check_honesty(life)
            if not life.dead:
                life.dead = True

    def _judge(self, life: NodeLife, error: Exception) -> None:
        """Judge why a node has ended: an error with a sentence, where the disk or its removal explains it."""
        device, may_fail = life.device, self.world.full or self.world.broken
        if life.dead:
            return
        if isinstance(error, ConfigError) and "was removed" in str(error):
            device.removed = True
            if not any(node == device.node for node, _ in self.world.removed):
                self.fail(f"node {device.node} is removed by nobody")
        elif isinstance(error, DfcaError) and may_fail and life.steady() < FAULTS_S + END_S:
            self.later(AGAIN_S, device)  # disks fail, or failed so lately that a node may be ending for it
        else:
            self.fail(f"node {device.node} ends: {type(error).__name__}: {error}")

    def _check_honesty(self, life: NodeLife) -> None:
        lasted = asyncio.get_running_loop().time() - life.refused_at
        if life.log.started and life.refused and lasted > 3.0 and not life.log.warnings and not self.problem:
            self.fail(f"node {life.device.node} says nothing of a disk that refuses saves")

    def later(self, seconds: float, device: WorldDevice) -> None:
        """Start a node after a time."""
        self.network.later(seconds, partial(self.start, device))

    # What happens.

    def _plan(self) -> None:
        loop, world = asyncio.get_running_loop(), self.world
        for device in self.devices:
            loop.call_at(0.0, self.start, device)
        for crash in world.crashes:
            loop.call_at(crash.at_s, self._crash, self.devices[crash.node], crash.how, crash.away_s)
        for one, other, at_s in world.resets:
            loop.call_at(at_s, self.network.reset, one, other)
        for node, at_s in world.late:
            loop.call_at(at_s, self._join, self.devices[node])
        for pairing in world.pairings:
            loop.call_at(pairing.at_s, lambda pairing=pairing: loop.create_task(self._pair(pairing)))  # type: ignore[misc]
        for node, at_s in world.removed:
            loop.call_at(at_s, self._remove, self.devices[node])
        loop.call_at(FAULTS_S, self._end_faults)

    def _crash(self, device: WorldDevice, how: str, away_s: float) -> None:
        life = device.life
        if life is None or life.dead:
            return
        if how == "stop":
            if life.service is not None:
                life.service.stop()
            self.later(away_s + END_S, device)
        else:
            life.die(dark=how == "power")
            self.later(away_s, device)

    def _service(self, node: int = 0) -> Service | None:
        life = self.devices[node].life
        return None if life is None or life.dead or life.service is None else life.service

    async def _pair(self, pairing: Pairing) -> None:
        """Have a member invite a device until it has joined."""
        wrong = pairing.wrong
        while not self.is_over:
            inviter = self._service(pairing.by)
            if inviter is not None and inviter.addresses:
                try:
                    invite = Invite.parse((await inviter._on_invite({"lifetime_s": 60.0}))["invite"])
                    await asyncio.sleep(self.random.uniform(1.0, 5.0))  # a person carries it
                    while wrong:
                        wrong -= 1
                        await self._knock_wrongly(pairing.node, invite, inviter)
                    joined = await self._knock(pairing.node, invite)
                except DfcaError:  # too many invites are open, or the pairing failed
                    joined = None
                if joined is not None:
                    shown = {(one["id"], one["code"]) for one in inviter._joined}
                    if (identity(pairing.node).id, joined.code) not in shown:
                        self.fail(f"node {pairing.by} does not show the code of node {pairing.node}")
                    write(self.devices[pairing.node], joined.roster)
                    self.start(self.devices[pairing.node])
                    return
            await asyncio.sleep(AGAIN_S)

    async def _knock(self, node: int, invite: Invite) -> Joined:
        def check(data: bytes) -> None:
            if Facts.from_bytes(data) != self.facts:
                self.fail(f"node {node} is sent other facts")

        connect = partial(self.network.connect, node)
        joined = await join(invite, identity(node), f"n{node}", [address(node)], check, connect)
        if (joined.roster.swarm, joined.roster.root) != (self.facts.swarm_id, self.facts.founder):
            self.fail(f"node {node} is sent the roster of another swarm")
        return joined

    async def _knock_wrongly(self, node: int, invite: Invite, inviter: Service) -> None:
        """Try a secret that is wrong: it must be refused."""
        try:
            await self._knock(node, replace(invite, secret=bytes(SECRET_BYTES)))
        except PairingError:
            if inviter.folder.roster.member(identity(node).id) is None:
                return
        self.fail(f"node {node} joins with a wrong secret")

    def _join(self, device: WorldDevice) -> None:
        """Have the founder introduce a node, as pairing does; later if it does not run."""
        founder = self._service()
        if founder is None:
            self.network.later(1.0, partial(self._join, device))
            return
        if founder.folder.roster.member(identity(device.node).id) is None:
            introduce(founder.folder.roster, device.node)
        try:
            founder.folder.save_roster()
        except DfcaError:  # a member that its founder forgets could not come back
            self.network.later(1.0, partial(self._join, device))
            return
        write(device, founder.folder.roster)
        self.start(device)

    def _remove(self, device: WorldDevice) -> None:
        founder, id = self._service(), identity(device.node).id
        try:
            if founder is not None and founder.folder.roster.member(id) is not None:
                founder.folder.roster.remove(identity(0), id)
            if founder is not None and founder.folder.roster.is_removed(id):
                founder.folder.save_roster()
                return
        except DfcaError:  # a removal that its founder forgets would be lost
            pass
        self.network.later(1.0, partial(self._remove, device))

    def _end_faults(self) -> None:
        self.network.half_open = self.network.twice = 0.0
        for device in self.devices:
            device.disk.full = device.disk.broken = device.disk.cut = 0.0

    # The check.

    async def run(self) -> None:
        """Carry the world out."""
        self.found()
        self._plan()
        await asyncio.sleep(FAULTS_S)
        end = asyncio.get_running_loop().time() + self._recovery_s()
        since: dict[int, int] | None = None  # rounds when everything was well first
        why = ""
        while not self.problem:
            why = self._unwell()
            if why:
                since = None
            elif since is None:
                since = self._rounds()
            elif self.world.rounds or all(self._rounds()[i] >= since[i] + MORE_ROUNDS for i in since):
                break
            if asyncio.get_running_loop().time() > end:
                self.fail(f"{why or 'rounds stand still'}, {self._recovery_s():g} s after the last fault")
                break
            await asyncio.sleep(LOOK_S)
        await self._end()

    def _recovery_s(self) -> float:
        """Return how long all may take to be well: to recover, on links as slow as these, and to do some rounds."""
        world = self.world
        delay_s = world.delay_s * math.exp(world.spread**2 / 2)  # the mean
        delay_s += 2 * max([0.0, *dict(world.far).values()])
        hop_s = delay_s * (3 + math.ceil(MODEL_BYTES / world.chunk_bytes))  # announced, asked for, piece by piece
        round_s = max([0.3, *dict(world.slow).values()]) + (FOLD_S if world.aggregation == "batch" else world.rest_s)
        return RECOVERY_S + HOPS * world.nodes * hop_s + (world.rounds or MORE_ROUNDS) * round_s

    def _expected(self) -> list[WorldDevice]:
        removed = {node for node, _ in self.world.removed}
        return [device for device in self.devices if device.node not in removed]

    def _peers(self) -> dict[int, Peer]:
        peers = {}
        for device in self._expected():
            life = device.life
            if life is not None and not life.dead and life.service is not None and hasattr(life.service, "node"):
                peer = life.service.node.machine
                assert isinstance(peer, Peer)
                peers[device.node] = peer
        return peers

    def _rounds(self) -> dict[int, int]:
        return {node: peer.round for node, peer in self._peers().items()}

    def _unwell(self) -> str:
        """Return what is not as it should be once faults have stopped; empty: nothing."""
        if self.network.failures:
            self.fail(self.network.failures[0])
        peers = self._peers()
        for device in self._expected():
            if device.node not in peers:
                return f"node {device.node} does not run"
        for node, peer in peers.items():
            if peer.bank is None:
                return f"node {node} has no models"
            if not bool(peer.bank.isfinite().all()):
                self.fail(f"node {node} has a broken model")
            if self.world.rounds and peer.state is not State.DONE:
                return f"node {node} is in round {peer.round} of {self.world.rounds}"
        if len({peer.lineage for peer in peers.values()}) > 1:
            return "nodes have different lineages"
        if problem := self._stranger():
            return problem
        walled = {f"n{node}" for node in self.world.walled}
        for device in self._expected():
            assert device.life is not None
            assert device.life.service is not None
            links = device.life.service.transport.status()["neighbours"]
            apart = walled if device.node in self.world.walled else set()  # neither can dial the other
            if down := [link["name"] for link in links.values() if self._is_down(link) and link["name"] not in apart]:
                return f"node {device.node} has no link with {down[0]}"
        return ""

    def _stranger(self) -> str:
        """Return which node that is paired or far is not known to all others, or whose models are not folded."""
        removed = {node for node, _ in self.world.removed}
        for node in {*(pairing.node for pairing in self.world.pairings), *dict(self.world.far)} - removed:
            for device in self._expected():
                service = self._service(device.node)
                if service is None or service.folder.roster.member(identity(node).id) is None:
                    return f"node {device.node} does not know node {node}"
            both = all(identity(node).number in {pair[i] for pair in self.folded} for i in (0, 1))
            if not self.world.rounds and len(self._expected()) > 1 and not both:
                return f"node {node} and the others do not fold each other's models"
        return ""

    def _is_down(self, link: dict[str, Any]) -> bool:
        """Return whether a link is down that should be up; where messages stall, for longer than a moment."""
        stalls = self.world.spread > 0 and self.world.delay_s * LONGEST > STALLS_S
        silent_s = link["silent_s"]
        return link["state"] != "up" and not (stalls and silent_s is not None and silent_s <= BACK_S)

    async def _end(self) -> None:
        """End all nodes in order: nobody hangs, and nothing is left."""
        self.is_over = True
        tasks = [device.life.task for device in self.devices if device.life is not None and device.life.task]
        for device in self.devices:
            if device.life is not None and not device.life.dead and device.life.service is not None:
                device.life.service.stop()
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=END_S)
            if hanging:
                self.fail(f"{len(hanging)} nodes do not end")
        await asyncio.sleep(END_S)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            self.fail(f"{len(left)} tasks are left: {left[0].get_coro()}")


def address(node: int) -> str:
    """Return where a node listens."""
    return f"10.0.0.{node}:{PORT}"


def introduce(roster: Roster, node: int, may_introduce: bool = False) -> None:
    """Have the founder introduce a node."""
    roster.introduce(identity(0), identity(node).certificate, f"n{node}", [address(node)], may_introduce)


def write(device: WorldDevice, roster: Roster) -> None:
    """Write the folder of a new node, on a disk that works."""
    disk = replace(device.disk, full=0.0, broken=0.0, cut=0.0)  # with the same files
    roster.save(device.path / ROSTER, disk)


def check_node_world(world: NodeWorld) -> str | None:
    """Carry a world out; return what is wrong, None if nothing is."""
    torch.set_num_threads(1)
    run, loop = NodeRun(world), VirtualTimeLoop()

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        run.fail(f"{context.get('message')}: {context.get('exception')!r}")

    loop.set_exception_handler(on_error)
    try:
        loop.run_until_complete(run.run())
    finally:
        loop.close()
    return run.problem


def shrink_node_world(world: NodeWorld, limit_s: float = 60.0) -> NodeWorld:
    """Take away what the failure of a world does not need."""
    return shrink_by(world, check_node_world, _smaller, limit_s)


def _smaller(world: NodeWorld) -> Iterator[NodeWorld]:
    if world.nodes > 2:
        yield without_last(world, "nodes")
    yield from simpler(world, ("number", "nodes", "algorithm", "clusters", "aggregation", "groups"))
