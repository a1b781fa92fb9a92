"""Real transports on loopback for tests: devices with keys of their own, a recorder in place of the node, a proxy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from dfca.core.state import Message
from dfca.node.net.options import NetOptions, Swarm
from dfca.node.net.transport import GrpcTransport
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster
from dfca.peer.records.messages import Update

SIZE = 1000
SWARM = "swarm-of-tests"
# Patient with silence: on a busy machine, nobody is to count as dead but in the tests of that.
FAST = NetOptions(host="127.0.0.1", port=0, patience_s=0.5, least_silence_s=30.0, most_silence_s=30.0)


def update(number: int, cluster: int = 0, size: int = SIZE, round: int = 0) -> Update:
    """Make an update whose model holds one number."""
    return Update(Message(7, cluster, round, 2, torch.full((size,), float(number))), 1)


class Recorder:
    """A node that writes down what it is called with."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.messages: list[tuple[int, Any]] = []
        self.neighbours: list[tuple[int, ...]] = []
        self.changed = asyncio.Event()
        self.on_message: Callable[[int, Any], None] = lambda sender, message: None

    def connected(self, neighbour: int) -> None:
        self._note(("connected", neighbour))

    def disconnected(self, neighbour: int) -> None:
        self._note(("disconnected", neighbour))

    def received(self, sender: int, message: Any) -> None:
        self.messages.append((sender, message))
        self.on_message(sender, message)
        self.changed.set()

    def up(self) -> set[int]:
        """Return who is connected; checks that each one's events alternate."""
        numbers: set[int] = set()
        for kind, number in self.events:
            if kind == "connected":
                assert number not in numbers
                numbers.add(number)
            else:
                numbers.remove(number)
        return numbers

    def _note(self, event: tuple[str, int]) -> None:
        self.events.append(event)
        self.changed.set()


@dataclass
class Device:
    """One device: its identity, its own copy of the roster, its transport."""

    identity: Identity
    roster: Roster
    transport: GrpcTransport
    node: Recorder
    address: str = ""

    @property
    def number(self) -> int:
        return self.identity.number


@dataclass
class World:
    """Devices of one swarm, sorted by ID; founder: the one that introduced the others."""

    devices: list[Device]
    founder: Identity
    proxies: list[Proxy] = field(default_factory=list)

    def connected(self) -> bool:
        """Return whether everybody is connected with everybody."""
        return all(len(device.node.up()) == len(self.devices) - 1 for device in self.devices)


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition, which real time brings about: soon, or late on a machine that has other work."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


def make_device(identity: Identity, roster: Roster, folder: Path, options: NetOptions, swarm: Swarm) -> Device:
    transport = GrpcTransport(identity, roster, swarm, options, folder)
    node = Recorder()
    transport.on_neighbours = node.neighbours.append
    return Device(identity, roster, transport, node)


@asynccontextmanager
async def world(
    folder: Path, count: int, options: NetOptions = FAST, swarm: Swarm | None = None, proxied: bool = False
) -> AsyncIterator[World]:
    """Run devices that know each other; proxied: each is reached through a proxy of its own."""
    swarm = swarm or Swarm(SWARM, SIZE)
    identities = sorted((Identity.create(folder / f"d{i}") for i in range(count)), key=lambda identity: identity.id)
    roster = Roster.found(identities[0], swarm.swarm_id, "d0")
    for i, identity in enumerate(identities[1:], 1):
        roster.introduce(identities[0], identity.certificate, f"d{i}", may_introduce=True)
    net = World([], identities[0])
    try:
        for identity in identities:
            device = make_device(identity, roster.copy(), identity.folder, options, swarm)
            device.address = await device.transport.start()
            net.devices.append(device)
            if proxied:
                net.proxies.append(await Proxy.start(device.address))
        for i, device in enumerate(net.devices):
            roster.announce(device.identity, [net.proxies[i].address if proxied else device.address])
        for device in net.devices:
            device.roster.merge(roster.records())
            device.transport.open(device.node)
        yield net
    finally:
        await asyncio.gather(*(device.transport.stop() for device in net.devices))
        for proxy in net.proxies:
            await proxy.stop()


class Proxy:
    """A TCP proxy that can cut connections, refuse new ones, hold everything, or let bytes through slowly."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.refusing = False
        self.bytes_per_s: float | None = None
        self.carried = 0
        self.hold_at: int | None = None
        self.address = ""

    @classmethod
    async def start(cls, target: str) -> Proxy:
        proxy = cls(target)
        proxy._server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
        proxy.address = f"127.0.0.1:{proxy._server.sockets[0].getsockname()[1]}"
        return proxy

    def stall(self) -> None:
        """Hold everything, as a cable that was pulled does."""
        self.flowing.clear()

    def stall_after(self, size: float) -> None:
        """Hold everything once this many more bytes have come through: however busy the machine, no more do."""
        self.hold_at = self.carried + int(size)

    def resume(self) -> None:
        self.hold_at = None
        self.flowing.set()

    def cut(self) -> None:
        """Break all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()  # also what a task that was cancelled before it began was to close

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.current_task())  # type: ignore[arg-type]
        self._writers.add(writer)
        try:
            if self.refusing:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        for pair in ((reader, far_writer), (far_reader, writer)):
            self._keep(asyncio.ensure_future(self._carry(*pair)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                amount = 1 << 16 if self.bytes_per_s is None else max(1, int(self.bytes_per_s / 20))
                data = await reader.read(amount)
                await self.flowing.wait()
                if not data:
                    break
                writer.write(data)
                self.carried += len(data)
                if self.hold_at is not None and self.carried >= self.hold_at:
                    self.stall()
                await writer.drain()
                if self.bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
