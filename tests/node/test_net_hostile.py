"""Neighbours that lie, flood, stall or are none: refused, counted by reason, and the others do not notice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from net_world import FAST, SIZE, SWARM, Device, World, until, update, world

from dfca.core.rules.relay import Offer
from dfca.node.net.links.grpc_wire import CHANNEL_OPTIONS, make_channel
from dfca.node.net.links.link import Greeting, close_frame, serialize
from dfca.node.net.links.parts import Outgoing, PacedSize
from dfca.node.net.options import NetOptions, Swarm
from dfca.node.net.transfer.chunks import read_part, write_part
from dfca.node.trust.identity import Identity
from dfca.node.wire import codec, frames
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import Refused
from dfca.peer.records.messages import Copy, Nothing

GREETING = Greeting(SWARM, SIZE, pb.FLOAT32, "villain", parts=False)  # its models are read by calls
HEARTBEAT = serialize(pb.Frame(heartbeat=pb.Heartbeat(number=1)))


def refused(device: Device) -> dict[str, int]:
    counts: dict[str, int] = device.transport.status()["refused"]
    return counts


@asynccontextmanager
async def with_villain(folder: Path, options: NetOptions = FAST) -> AsyncIterator[tuple[World, Device, Identity, Any]]:
    """Run two honest devices and a member whose frames a test writes itself; yields its call to the first one."""
    async with world(folder, 3, options) as net:
        await until(net.connected)
        villain = net.devices.pop(0)  # with the smallest ID: a call by another is turned away while a node dials it
        await villain.transport.stop()
        victim = net.devices[0]
        await until(net.connected)
        channel = make_channel(
            villain.identity, victim.identity.id, victim.identity.certificate, victim.address, insecure=False
        )
        yield net, victim, villain.identity, channel
        await channel.close()
        # The honest ones still have each other.
        other = net.devices[1]
        assert ("disconnected", other.number) not in victim.node.events
        other.transport.send(victim.number, Nothing(99))
        await until(lambda: any(m == Nothing(99) for _, m in victim.node.messages))


async def talk(channel: Any, *sent: bytes) -> str:
    """Send frames on a new stream; returns the reason with which it is closed, "" for none.

    INTERNAL: the other end closed while this one was writing, and gRPC lost its last words.
    """
    call = channel.stream_stream(frames.TALK)()
    with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        for frame in sent:
            await call.write(frame)
    try:
        async with asyncio.timeout(30):
            while (data := await call.read()) is not grpc.aio.EOF:
                frame = frames.parse(data)
                if frame.WhichOneof("kind") == "close":
                    return str(frame.close.reason)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    finally:
        call.cancel()
    return ""


def announce(**changes: Any) -> bytes:
    values = {
        "number": 1,
        "message": codec.encode(update(1))[0],
        "name": bytes(32),
        "size": 100,
        "encoding": pb.ENCODING_FLOAT32,
    }
    return serialize(pb.Frame(announce=pb.Announce(**(values | changes))))


BAD_HELLOS = {
    "swarm": replace(GREETING, swarm="another").hello(1),
    "model": replace(GREETING, size=SIZE + 1).hello(1),
    "version": serialize(
        pb.Frame(hello=pb.LinkHello(protocol=99, swarm=SWARM, model_size=SIZE, dtype=pb.FLOAT32, epoch=1))
    ),
    "unasked": HEARTBEAT,
    "malformed": b"\xff" * 20,
    "kind": b"",
}


def test_links_with_another_swarm_model_or_version_are_refused_with_the_reason(tmp_path: Path) -> None:
    async def run() -> None:
        async with with_villain(tmp_path) as (_, victim, identity, channel):
            for reason, hello in BAD_HELLOS.items():
                assert await talk(channel, hello) == reason
            assert refused(victim) == dict.fromkeys(BAD_HELLOS, 1)
            assert victim.transport.status()["neighbours"][identity.id]["state"] == "down"

    asyncio.run(run())


def test_closing_during_the_handshake_breaks_no_rule(tmp_path: Path) -> None:
    """A dialler may learn between its hello and its first heartbeat that it is no longer wanted."""

    async def run() -> None:
        async with with_villain(tmp_path) as (_, victim, _, channel):
            before = len(victim.node.events)
            for sent in ((close_frame("member"),), (GREETING.hello(1), close_frame("member"))):
                assert await talk(channel, *sent) == ""
            assert refused(victim) == {}
            assert victim.node.events[before:] == []

    asyncio.run(run())


COPY = Copy(replace(update(1).message, offer=Offer(1, 2, 3)))
BAD_FRAMES = {
    "ten gigabytes": ("size", announce(size=10 * 2**30)),
    "ten gigabytes in rows": ("shape", announce(size=10 * 2**30, rows=4000)),
    "an announcement of a small message": ("unasked", announce(message=codec.encode(Nothing(1))[0])),
    "an announcement of garbage": ("malformed", announce(message=b"\xff\xff")),
    "a large message without its model": ("unasked", serialize(pb.Frame(message=codec.encode(COPY)[0]))),
    "a message of garbage": ("malformed", serialize(pb.Frame(message=b"\xff\xff\xff"))),
    "a second hello": ("unasked", GREETING.hello(2)),
    "garbage": ("malformed", b"\xff" * 30),
    "a large frame": ("too_large", serialize(pb.Frame(message=bytes(2**18)))),
    "a chunk that was not asked for": ("unasked", write_part(memoryview(b"x" * 100), 0, 100, 1)),
    "an empty chunk": ("field", serialize(pb.Frame(chunk=pb.Chunk(offset=1)))),
    "a large chunk": ("too_large", serialize(pb.Frame(chunk=pb.Chunk(data=bytes(2**20 + 200))))),
    "half a chunk": ("malformed", write_part(memoryview(b"x" * 100), 0, 100, 1)[:50]),
    "a chunk and a heartbeat": ("malformed", HEARTBEAT + write_part(memoryview(b"x" * 100), 0, 100, 1)),
    "a request without bytes": ("field", serialize(pb.Frame(want=pb.Want(number=1, offset=7, until=7)))),
}


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_frames_that_break_the_rules_end_the_link_and_keep_the_member_out(tmp_path: Path, kind: str) -> None:
    reason, frame = BAD_FRAMES[kind]

    async def run() -> None:
        async with with_villain(tmp_path) as (_, victim, identity, channel):
            before = len(victim.node.events)
            assert await talk(channel, GREETING.hello(1), HEARTBEAT, frame) in (reason, "INTERNAL")
            assert refused(victim) == {reason: 1}
            assert victim.node.events[before:] == [
                ("connected", identity.number),
                ("disconnected", identity.number),
            ]
            assert await talk(channel, GREETING.hello(2), HEARTBEAT) in ("RESOURCE_EXHAUSTED", "INTERNAL")
            assert refused(victim)["rate"] == 1

    asyncio.run(run())


def test_a_flood_of_frames_ends_the_link(tmp_path: Path) -> None:
    async def run() -> None:
        # Bounds so low that frames exceed them however slowly a busy machine reads.
        async with with_villain(tmp_path, replace(FAST, frames_per_s=5.0, frames_burst=500)) as (_, victim, _, channel):
            flood = [serialize(pb.Frame(message=codec.encode(Nothing(i))[0])) for i in range(3000)]
            await talk(channel, GREETING.hello(1), HEARTBEAT, *flood)
            assert refused(victim) == {"rate": 1}

    asyncio.run(run())


def test_a_frame_beyond_all_bounds_is_not_even_read(tmp_path: Path) -> None:
    async def run() -> None:
        async with with_villain(tmp_path) as (_, victim, identity, channel):
            await talk(channel, GREETING.hello(1), HEARTBEAT, bytes(2**20))
            await until(lambda: identity.number not in victim.node.up())

    asyncio.run(run())


def test_a_member_can_read_only_models_that_were_announced_to_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with with_villain(tmp_path) as (net, victim, _, channel):
            offers = victim.transport._sender.offers
            victim.transport.send(net.devices[1].number, update(1))
            await until(lambda: net.devices[1].node.messages)
            read = channel.unary_stream(frames.READ)
            for request, code in (
                (pb.ReadRequest(name=bytes(32)).SerializeToString(), grpc.StatusCode.NOT_FOUND),
                (b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
                (pb.ReadRequest(name=b"short").SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await read(request).read()
                assert error.value.code() == code
            assert len(offers) == 0

    asyncio.run(run())


def test_strangers_and_strange_certificates_do_not_get_in_and_are_counted(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as net:
            await until(net.connected)
            victim = net.devices[0]
            certificate, target = victim.identity.certificate, victim.identity.id
            victim.transport._wire._handshakes._patience_s = 0.3
            stranger = Identity.create(tmp_path / "stranger")
            options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", target)]
            channels = [
                make_channel(stranger, target, certificate, victim.address, insecure=False),
                grpc.aio.secure_channel(victim.address, grpc.ssl_channel_credentials(certificate), options=options),
                grpc.aio.insecure_channel(victim.address, options=CHANNEL_OPTIONS),
            ]
            for channel in channels:
                assert await talk(channel, GREETING.hello(1)) == "UNAVAILABLE"
                await channel.close()
            reader, writer = await asyncio.open_connection(*victim.address.split(":"))
            writer.write(os.urandom(500))
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            await until(lambda: refused(victim).get("handshake", 0) >= 4)
            assert ("disconnected", net.devices[1].number) not in victim.node.events

    asyncio.run(run())


def test_a_neighbour_that_does_not_read_costs_a_bounded_queue_and_then_its_link(tmp_path: Path) -> None:
    async def run() -> None:
        async with with_villain(tmp_path, replace(FAST, queued_frames=100)) as (_, victim, identity, channel):
            call = channel.stream_stream(frames.TALK)()
            await call.write(GREETING.hello(1))
            await call.write(HEARTBEAT)
            await until(lambda: identity.number in victim.node.up())
            link = victim.transport._neighbours.links[identity.id]
            large = Nothing(1, (), tuple(range(1000)))
            async with asyncio.timeout(60):
                while not link.down:
                    victim.transport.send(identity.number, large)
                    await asyncio.sleep(0)
            assert link.queued <= 101
            assert "slow" in victim.transport._last[identity.id]
            assert identity.number not in victim.node.up()
            call.cancel()

    asyncio.run(run())


# Members that announce models and send something else.

QUICK: dict[str, Any] = {"least_read_s": 0.15, "most_read_s": 1.0, "read_attempts": 3}  # ten times as fast as usual


def read_from(spoil: Callable[[Device], None], folder: Path, swarm: Swarm, reason: str, **options: Any) -> None:
    """Let a spoilt device announce a model; the reader must refuse it for the reason."""

    async def run() -> None:
        async with world(folder, 3, replace(FAST, **options), swarm) as net:
            await until(net.connected)
            liar, reader, other = net.devices
            spoil(liar)
            liar.transport.send(reader.number, update(1, size=swarm.size))
            await asyncio.sleep(0)
            other.transport.send(reader.number, update(2, size=swarm.size))
            await until(lambda: reader.node.messages)
            await until(lambda: liar.number not in reader.node.up())
            assert refused(reader)[reason] == 1
            assert [sender for sender, _ in reader.node.messages] == [other.number]
            assert ("disconnected", other.number) not in reader.node.events
            kept = [path.stat().st_size for path in (reader.identity.folder / "partial").iterdir()]
            assert sum(kept) < 1000

    asyncio.run(run())


@pytest.mark.parametrize("parts", [True, False])
def test_other_bytes_than_announced_are_refused(tmp_path: Path, parts: bool) -> None:
    def spoil(device: Device) -> None:
        offers = device.transport._sender.offers
        for name in ("data", "announced"):
            honest = getattr(offers, name)
            setattr(offers, name, lambda member, key, honest=honest: bytes(len(honest(member, key) or b"")))

    read_from(spoil, tmp_path, Swarm(SWARM, 50_000), "digest", parts=parts)


def test_a_chunk_from_elsewhere_is_refused(tmp_path: Path) -> None:
    def spoil(device: Device) -> None:
        for link in device.transport._neighbours.links.values():
            move(link.outgoing)

    def move(outgoing: Outgoing) -> None:
        honest = outgoing.next

        def next_part() -> bytes | None:
            part = honest()
            return part and write_part(memoryview(bytes(100_000)), 5, 1000, read_part(part)[2])

        outgoing.next = next_part  # type: ignore[method-assign]

    read_from(spoil, tmp_path, Swarm(SWARM, 50_000), "size")


def test_a_reader_that_asks_for_too_much_is_refused(tmp_path: Path) -> None:
    """Beyond the end; for many models at once; what was never announced is withdrawn."""

    async def run() -> None:
        async with with_villain(tmp_path) as (_, victim, identity, channel):
            hello = replace(GREETING, parts=True).hello(1)
            for number, until_byte, reason in ((1, 10**6, "size"), (7, 10, "")):
                victim.transport._local.penalties.keep_out(identity.id, 0.0)
                call = channel.stream_stream(frames.TALK)()
                for frame in (hello, HEARTBEAT):
                    await call.write(frame)
                await until(lambda: identity.number in victim.node.up())
                victim.transport.send(identity.number, update(1))
                kinds = []
                while "announce" not in kinds:
                    kinds.append(frames.parse(await call.read()).WhichOneof("kind"))
                await call.write(serialize(pb.Frame(want=pb.Want(number=number, until=until_byte))))
                while kinds[-1] not in ("close", "withdraw"):
                    answer = frames.parse(await call.read())
                    kinds.append(answer.WhichOneof("kind"))
                assert kinds[-1] == ("close" if reason else "withdraw")
                assert answer.close.reason == reason
                call.cancel()
                await until(lambda: identity.number not in victim.node.up())

    asyncio.run(run())


def test_a_reader_gets_few_models_at_once_and_each_in_turn() -> None:
    outgoing = Outgoing(NetOptions(reads_per_member=2, least_chunk_bytes=4))
    for number in (1, 2):
        assert outgoing.want(pb.Want(number=number, until=8), lambda: bytes(20))
    with pytest.raises(Refused, match="more than 2 models"):
        outgoing.want(pb.Want(number=3, until=8), lambda: bytes(20))
    assert not outgoing.want(pb.Want(number=3, until=8), lambda: None)
    parts = [read_part(part)[1:] for part in iter(outgoing.next, None)]
    assert parts == [(0, 1), (0, 2), (4, 1), (4, 2)]
    assert outgoing.want(pb.Want(number=1, offset=8, until=12), lambda: None)  # extended
    outgoing.drop(2)
    assert [read_part(part)[1:] for part in iter(outgoing.next, None)] == [(8, 1)]


def test_a_model_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    def spoil(device: Device) -> None:
        async def encode(model: torch.Tensor, encoding: str) -> tuple[bytes, bytes]:
            import hashlib

            from dfca.node.wire import payload

            data = bytearray(payload.pack(model))
            data[-4:] = b"\x00\x00\xc0\x7f"  # NaN
            return hashlib.sha256(data).digest(), bytes(data)

        device.transport._sender._encode = encode  # type: ignore[method-assign]

    read_from(spoil, tmp_path, Swarm(SWARM, SIZE), "not_finite")


@pytest.mark.parametrize("amount", [0, 1])
def test_a_byte_per_second_on_the_link_is_cut_off(tmp_path: Path, amount: int) -> None:
    def spoil(device: Device) -> None:
        for link in device.transport._neighbours.links.values():
            drip(link.outgoing, link.wake)

    def drip(outgoing: Outgoing, wake: Callable[[], None]) -> None:
        sent = iter(range(1000))
        outgoing.chunk = PacedSize(1, 1, 1)
        honest, loop = outgoing.next, asyncio.get_running_loop()

        def next_part() -> bytes | None:
            loop.call_later(0.05, wake)
            return honest() if amount and next(sent) % 2 else None

        outgoing.next = next_part  # type: ignore[method-assign]

    read_from(spoil, tmp_path, Swarm(SWARM, 50_000), "deadline", **QUICK)


@pytest.mark.parametrize("amount", [0, 1])
def test_a_byte_per_second_is_cut_off(tmp_path: Path, amount: int) -> None:
    def spoil(device: Device) -> None:
        async def drip(member: str, request: bytes, context: Any) -> None:
            wanted = frames.parse_read(request)
            for i in range(1000):
                await asyncio.sleep(0.05)
                if amount:
                    await context.write(pb.Chunk(data=b"x", offset=wanted.offset + i).SerializeToString())

        device.transport._service._send_payload = drip  # type: ignore[method-assign]

    read_from(spoil, tmp_path, Swarm(SWARM, 50_000), "deadline", parts=False, **QUICK)
