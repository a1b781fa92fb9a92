"""A hostile member for tests: real nodes on loopback, and one whose frames and payloads a test makes."""

from __future__ import annotations

import asyncio
import io
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
from node_swarm import make_swarm, until

from dfca.node.disk.folder import NodeFolder
from dfca.node.net import service
from dfca.node.net.limits import Penalties
from dfca.node.net.links.grpc_wire import Handshakes, handlers_of, make_channel, make_server
from dfca.node.net.links.link import Greeting, NetLink, serialize
from dfca.node.net.options import NetOptions
from dfca.node.net.transfer.chunks import write_chunk
from dfca.node.net.transport import GrpcTransport
from dfca.node.run import make_transport
from dfca.node.service import Service, ServiceOptions
from dfca.node.wire import frames
from dfca.node.wire import wire_pb2 as pb

BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
READS_FILE = "reads.json"
"""Where `attack_child` writes what `count_reads` has counted."""
HEARTBEAT = serialize(pb.Frame(heartbeat=pb.Heartbeat(number=1)))


class Line:
    """A link of the villain: it reads what comes, to notice when the other end is gone."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        with suppress(*BROKEN):
            while await self._call.read() is not grpc.aio.EOF:
                continue

    @property
    def ended(self) -> bool:
        return self._reading.done()

    async def say(self, *sent: bytes) -> bool:
        """Write frames; returns whether the link took them."""
        for frame in sent:
            writing = asyncio.ensure_future(self._call.write(frame))
            await asyncio.wait([writing, self._reading], return_when=asyncio.FIRST_COMPLETED)
            if not writing.done() or writing.exception() is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                return False
        return True

    async def end(self) -> None:
        self._call.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@dataclass(frozen=True)
class Target:
    """A node that is attacked: who it is, and where."""

    id: str
    certificate: bytes
    port: int

    @classmethod
    def of(cls, service: Service) -> Target:
        known = service.folder.identity
        return cls(known.id, known.certificate, service.port)


def take_limits_away(patch: Callable[[Any, str, Any], None]) -> None:
    """Let hostile members come back at once and say as much as they like, so that everything they say is read.

    A claim that cannot be true ends the link at once: a node that waits for the records of others hears nothing.
    """
    believed = GrpcTransport._is_believed

    def is_believed(self: GrpcTransport, link: NetLink, message: Any) -> bool:
        limited = believed(self, link, message)
        if link in self._doubted:
            self._doubted[link] = (message, float("-inf"))
            self._judge(link, late=True)
        return limited

    patch(GrpcTransport, "_is_believed", is_believed)
    patch(Penalties, "punish", lambda self, member, now: None)
    patch(service, "CALLS_PER_S", 1e9)
    patch(service, "CALLS_BURST", 1e9)


def count_reads(patch: Callable[[Any, str, Any], None]) -> Counter[str]:
    """Count the frames that links read, by the member that sent them, hellos and first heartbeats aside."""
    reads: Counter[str] = Counter()
    read = NetLink._read

    async def counted(self: NetLink, handle: Any) -> None:
        self._stream = _CountedStream(self._stream, lambda: reads.update([self.member]))
        await read(self, handle)

    patch(NetLink, "_read", counted)
    return reads


class _CountedStream:
    def __init__(self, stream: Any, note: Callable[[], None]) -> None:
        self._stream, self._note, self.write = stream, note, stream.write

    async def read(self) -> Any:
        data = await self._stream.read()
        self._note()
        return data


@dataclass
class Villain:
    """A member with a valid certificate that says and serves whatever it likes.

    replies: by the name of a payload, its bytes; read: instead of them, what answers a Read.
    """

    folder: NodeFolder
    greeting: Greeting
    replies: dict[bytes, bytes] = field(default_factory=dict)
    read: Callable[[bytes, Any], Any] | None = None
    address: str = ""
    _channels: dict[str, Any] = field(default_factory=dict)
    _server: Any = None

    @classmethod
    def of(cls, folder: NodeFolder) -> Villain:
        facts = folder.facts
        return cls(folder, Greeting(facts.swarm_id, facts.model_size, pb.FLOAT32, "villain", parts=False))

    async def listen(self, port: int = 0) -> None:
        """Serve payloads."""

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "villain")

        options = NetOptions(host="127.0.0.1", port=port)
        handlers = handlers_of(refuse, self._serve, refuse)
        identity, roster = self.folder.identity, self.folder.roster
        self._server, port = make_server(identity, roster, options, Handshakes(), handlers)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    async def _serve(self, request: bytes, context: Any) -> None:
        if self.read is not None:
            await self.read(request, context)
            return
        wanted = frames.parse_read(request)
        data = self.replies.get(wanted.name)
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "")
            return
        for offset in range(wanted.offset, len(data), 2**18):
            await context.write(write_chunk(memoryview(data), offset, 2**18))

    def channel(self, victim: Target) -> Any:
        """Return the channel to a node."""
        if victim.id not in self._channels:
            address = f"127.0.0.1:{victim.port}"
            self._channels[victim.id] = make_channel(
                self.folder.identity, victim.id, victim.certificate, address, insecure=False
            )
        return self._channels[victim.id]

    async def dial(self, victim: Service | Target) -> Line | None:
        """Begin a link, whatever was on it before; None where the node keeps this member out."""
        target = Target.of(victim) if isinstance(victim, Service) else victim
        call = self.channel(target).stream_stream(frames.TALK)()
        try:
            async with asyncio.timeout(10):
                await call.write(self.greeting.hello(1))
                first = await call.read()
                if first is not grpc.aio.EOF and frames.parse(first).WhichOneof("kind") == "hello":
                    await call.write(HEARTBEAT)
                    return Line(call)
        except (TimeoutError, *BROKEN):
            pass
        call.cancel()
        return None

    async def reach(self, victim: Service | Target) -> Line:
        """Begin a link; again where the node turns this member away because it is dialling itself."""
        async with asyncio.timeout(20):
            while (line := await self.dial(victim)) is None:
                await asyncio.sleep(0.1)
        return line

    async def close(self) -> None:
        for channel in self._channels.values():
            with suppress(Exception):
                await channel.close()
        await self._server.stop(0)


@dataclass
class Attack:
    """Honest nodes that run, and the villain."""

    honest: list[Service]
    villain: Villain
    errors: list[Any]

    def rounds(self) -> list[int]:
        return [node.node.machine.round for node in self.honest]

    def refused(self) -> dict[str, int]:
        """Add up the refusals of all honest nodes by reason."""
        counts: dict[str, int] = {}
        for node in self.honest:
            for reason, count in node.status()["refused"].items():
                counts[reason] = counts.get(reason, 0) + count
        return counts

    async def settle(self) -> None:
        """Wait until the honest nodes have saved, sent, read and folded everything."""
        still = 0
        while still < 10:
            await asyncio.sleep(0.03)
            busy = (
                node.node._tasks
                or node.node.saving._done != node.node.saving._asked
                or node.transport.status()["cached_bytes"]  # type: ignore[attr-defined]
                for node in self.honest
            )
            still = 0 if any(busy) else still + 1

    async def rate(self, seconds: float) -> float:
        """Measure the rounds per second of the honest nodes."""
        before, loop = sum(self.rounds()), asyncio.get_running_loop()
        begin = loop.time()
        await asyncio.sleep(seconds)
        return (sum(self.rounds()) - before) / (loop.time() - begin)

    async def slowdown(self, attack: Callable[[], AbstractAsyncContextManager[Any]], bound: float) -> list[float]:
        """Measure how many times as fast the honest nodes are without an attack as under it, until that is below bound.

        At most six times: other programs on this machine slow one half of a measurement or the other, an attack that
        works slows the same half of all.
        """
        ratios: list[float] = []
        while len(ratios) < 6 and not (ratios and ratios[-1] < bound):
            async with attack():
                loud = await self.rate(1.0)
            quiet = await self.rate(1.0)
            ratios.append(quiet / loud if loud else float("inf"))
        return ratios


@asynccontextmanager
async def attack(folder: Path, honest: int = 2, agreed: dict[str, Any] | None = None) -> AsyncIterator[Attack]:
    """Run honest nodes until all train; the last member of their swarm is the villain."""
    folders = make_swarm(folder, [0] * (honest + 1), agreed=agreed)
    services = [Service(device, ServiceOptions(log_stream=io.StringIO()), make_transport) for device in folders[:-1]]
    last = NodeFolder.load(folders[-1].path)
    villain = Villain.of(last)
    errors: list[Any] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()

    def note_error(_: Any, context: dict[str, Any]) -> None:
        # gRPC has one queue for all event loops of a process: what was left of the loop of a test before is no error.
        if str(context.get("exception")) != "Event loop is closed":
            errors.append(context)

    loop.set_exception_handler(note_error)
    tasks = [asyncio.create_task(node.run()) for node in services]
    try:
        await until(lambda: all(node.port for node in services) or any(task.done() for task in tasks))
        await villain.listen()
        last.roster.announce(last.identity, [villain.address])
        for node in services:
            last.roster.merge(node.folder.roster.records())
        for node in services:
            node.folder.roster.merge(last.roster.records())
        await until(lambda: all(node.node.machine.round >= 2 for node in services), 90)
        yield Attack(services, villain, errors)
    finally:
        for node in services:
            node.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        await villain.close()
        loop.set_exception_handler(before)
