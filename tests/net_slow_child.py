"""One of two devices of test_net_slow.py, in a process and a network namespace of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from net_world import SWARM, Device, make_device, until, update

from dfca.node.net.options import NetOptions, Swarm
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster
from dfca.peer.messages import Nothing


def prepare(folder: Path, addresses: tuple[str, str], ports: tuple[int, int], floats: int) -> None:
    """Make the devices, in order of their IDs, and a roster that both know."""
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
    """Device 0 sends models, each when the last one has been answered; device 1 answers. Prints seconds per model."""
    device, floats = await connect(folder, place)
    node, walls, processor = device.node, [], []
    for i in range(count):
        message = update(i, size=floats, round=i) if place == 0 else Nothing(i)
        start, used = time.perf_counter(), time.process_time()
        if place == 0:
            device.transport.send(next(iter(node.up())), message)
        while not node.messages:
            node.changed.clear()
            await node.changed.wait()
        node.messages.clear()
        if place == 1:
            device.transport.send(next(iter(node.up())), message)
        walls.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    print(json.dumps({"walls": walls, "processor": processor}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await device.transport.stop()


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
