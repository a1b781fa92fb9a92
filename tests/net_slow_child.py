"""One of two devices of test_net_slow.py, in a process and a network namespace of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from net_world import SWARM, make_device, until, update

from dfca.node.net.options import NetOptions, Swarm
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster


def prepare(folder: Path, addresses: tuple[str, str], port: int, floats: int) -> None:
    """Make the devices, in order of their IDs, and a roster that both know."""
    made = sorted((Identity.create(folder / f"made{i}") for i in range(2)), key=lambda identity: identity.id)
    roster = Roster.found(made[0], SWARM, "d0")
    roster.introduce(made[0], made[1].certificate, "d1", may_introduce=True)
    for i, identity in enumerate(made):
        roster.announce(identity, [f"{addresses[i]}:{port}"])
        identity.folder.rename(folder / f"d{i}")
    roster.save(folder / "roster.json")
    (folder / "facts.json").write_text(json.dumps({"addresses": addresses, "port": port, "floats": floats}))


async def main(folder: Path, place: int) -> None:
    """Connect; send an update when a line comes in, and print what arrived."""
    facts = json.loads((folder / "facts.json").read_text())
    options = NetOptions(host=facts["addresses"][place], port=facts["port"])
    identity, roster = Identity.load(folder / f"d{place}"), Roster.load(folder / "roster.json")
    device = make_device(identity, roster, identity.folder, options, Swarm(SWARM, facts["floats"]))
    await device.transport.start()
    device.transport.open(device.node)
    await until(device.node.up, 30)
    print(json.dumps({"connected": True}), flush=True)
    reading = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    waiting = asyncio.ensure_future(until(lambda: device.node.messages, 60))
    await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
        device.transport.send(next(iter(device.node.up())), update(3, size=facts["floats"]))
        await asyncio.sleep(60)
    model = device.node.messages[0][1].message.model
    resumed = device.transport.status()["resumed_bytes"]
    events = [kind for kind, _ in device.node.events]
    print(json.dumps({"fits": bool((model == 3).all()), "resumed": resumed, "events": events}), flush=True)
    await asyncio.sleep(60)
