"""One of two devices of test_net_slow.py, in a process and a network namespace of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc.aio
from net_world import SWARM, Device, make_device, until, update

from dfca.node.net.links.grpc_wire import Handshakes, handlers_of, make_channel, make_server
from dfca.node.net.options import NetOptions, Swarm
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster
from dfca.node.wire.frames import READ
from dfca.peer.records.messages import Nothing


def prepare(folder: Path, addresses: tuple[str, str], ports: tuple[int, ...], floats: int) -> None:
    """Make the devices, in order of their IDs, and a roster that both know; a third port is for bare gRPC."""
    made = sorted((Identity.create(folder / f"made{i}") for i in range(2)), key=lambda identity: identity.id)
    roster = Roster.found(made[0], SWARM, "d0")
    roster.introduce(made[0], made[1].certificate, "d1", may_introduce=True)
    for i, identity in enumerate(made):
        roster.announce(identity, [f"{addresses[i]}:{ports[i]}"])
        identity.folder.rename(folder / f"d{i}")
    roster.save(folder / "roster.json")
    (folder / "facts.json").write_text(json.dumps({"addresses": addresses, "ports": ports, "floats": floats}))


async def connect(folder: Path, place: int) -> tuple[Device, int]:
    """Start one of the devices; returns it and the floats of a model once it has its neighbour."""
    facts = json.loads((folder / "facts.json").read_text())
    options = NetOptions(host=facts["addresses"][place], port=facts["ports"][place])
    identity, roster = Identity.load(folder / f"d{place}"), Roster.load(folder / "roster.json")
    device = make_device(identity, roster, identity.folder, options, Swarm(SWARM, facts["floats"]))
    await device.transport.start()
    device.transport.open(device.node)
    await until(device.node.up, 30)
    print(json.dumps({"connected": True}), flush=True)
    return device, facts["floats"]


async def exchange(folder: Path, place: int, count: int) -> None:
    """Device 0 sends models, each when the last one has been answered; device 1 answers. Prints seconds per model.

    After each, device 1 reads as many bytes from device 0 over bare gRPC with the same TLS, and answers once more.
    """
    device, floats = await connect(folder, place)
    bare = await open_bare(folder, place, b"m" * (4 * floats))
    node, walls, processor, bare_walls = device.node, [], [], []

    async def heard() -> None:
        while not node.messages:
            node.changed.clear()
            await node.changed.wait()
        node.messages.clear()

    for i in range(count):
        message = update(i, size=floats, round=i) if place == 0 else Nothing(i)
        start, used = time.perf_counter(), time.process_time()
        if place == 0:
            device.transport.send(next(iter(node.up())), message)
        await heard()
        if place == 1:
            device.transport.send(next(iter(node.up())), message)
        walls.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
        if place == 0:
            await heard()
            continue
        start = time.perf_counter()
        assert await read_bare(bare) == 4 * floats
        bare_walls.append(time.perf_counter() - start)
        device.transport.send(next(iter(node.up())), message)
    print(json.dumps({"walls": walls, "processor": processor, "bare": bare_walls}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await (bare.stop(0) if place == 0 else bare.close())
    await device.transport.stop()


async def open_bare(folder: Path, place: int, data: bytes) -> Any:
    """Make the end of a bare connection: of device 0 a server that streams bytes in chunks, of device 1 a channel."""
    facts = json.loads((folder / "facts.json").read_text())
    identity, roster = Identity.load(folder / f"d{place}"), Roster.load(folder / "roster.json")
    options = NetOptions(host="127.0.0.1", port=facts["ports"][2])

    async def read(_request: bytes, context: Any) -> None:
        for at in range(0, len(data), options.chunk_bytes):
            await context.write(data[at : at + options.chunk_bytes])

    if place == 0:
        server, _ = make_server(identity, roster, options, Handshakes(), handlers_of(read, read, read))
        await server.start()
        return server
    other = Identity.load(folder / "d0")
    return make_channel(identity, other.id, other.certificate, f"{options.host}:{options.port}", insecure=False)


async def read_bare(channel: Any) -> int:
    """Read everything, and do nothing with it; returns how many bytes came."""
    call, received = channel.unary_stream(READ)(b""), 0
    while (message := await call.read()) is not grpc.aio.EOF:
        received += len(message)
    return received


async def main(folder: Path, place: int) -> None:
    """Connect; send an update when a line comes in, and print what arrived."""
    device, floats = await connect(folder, place)
    reading = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    waiting = asyncio.ensure_future(until(lambda: device.node.messages, 60))
    await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
        device.transport.send(next(iter(device.node.up())), update(3, size=floats))
        await asyncio.sleep(60)
    model = device.node.messages[0][1].message.model
    resumed = device.transport.status()["resumed_bytes"]
    events = [kind for kind, _ in device.node.events]
    print(json.dumps({"fits": bool((model == 3).all()), "resumed": resumed, "events": events}), flush=True)
    await asyncio.sleep(60)
