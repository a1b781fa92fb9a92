"""What happens to a device in its life, as docs/deploy.md describes it: a restored backup, a moved address, a new disk
under its old name, data whose columns change, a clock that jumps. (Certificates: test_live_trust.py.)"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

from net_world import FAST, SIZE, SWARM, make_device, until, update, world
from node_swarm import make_swarm, memory_service, write_samples
from node_swarm import until as until_true

from dfca.node.disk.folder import NodeFolder
from dfca.node.memory import MemoryNetwork
from dfca.node.net.options import Swarm
from dfca.node.service import Service
from dfca.node.task.config import NodeConfig
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster


def rounds(service: Service) -> int:
    return service.node.machine.round if hasattr(service, "node") else 0


def test_a_restored_backup_catches_up(tmp_path: Path) -> None:
    folders = make_swarm(tmp_path, (0, 0, 0))
    path, copy = folders[2].path, tmp_path / "copy"

    async def scenario() -> None:
        network = MemoryNetwork(())
        services = [memory_service(network, folder) for folder in folders]
        tasks = [asyncio.create_task(service.run()) for service in services]

        async def end(place: int) -> None:
            services[place].stop()
            await tasks[place]

        def start(place: int) -> None:
            services[place] = memory_service(network, NodeFolder.load(path))
            tasks[place] = asyncio.create_task(services[place].run())

        await until_true(lambda: rounds(services[2]) >= 3)
        await end(2)
        shutil.copytree(path, copy)
        start(2)
        await until_true(lambda: rounds(services[2]) >= 15)
        await end(2)
        shutil.rmtree(path)
        copy.rename(path)
        goal = rounds(services[0]) + 3
        start(2)
        await until_true(lambda: min(map(rounds, services)) >= goal)
        machines = [service.node.machine for service in services]
        assert len({machine.lineage for machine in machines}) == 1
        assert services[2].status()["problems"] == []
        for service in services:
            service.stop()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_a_moved_address_spreads_by_itself(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3) as net:
            await until(net.connected)
            for place in (0, 2):  # the one that dials, and one that is dialled
                before = net.devices[place]
                await before.transport.stop()
                device = make_device(before.identity, before.roster, before.identity.folder, FAST, Swarm(SWARM, SIZE))
                address = await device.transport.start()
                assert address != before.address
                net.devices[place] = device
                device.roster.announce(before.identity, [address])
                device.transport.open(device.node)
                await until(net.connected)
                await until(
                    lambda address=address, id=before.identity.id: all(
                        device.roster.members()[id].addresses == (address,) for device in net.devices
                    )
                )
            first, second, third = net.devices
            first.transport.send(third.number, update(1))
            second.transport.send(first.number, update(2))
            await until(lambda: third.node.messages and first.node.messages)

    asyncio.run(run())


def test_a_device_with_a_new_disk_takes_its_old_name_once_the_old_one_is_removed(tmp_path: Path) -> None:
    founder, old, new = (Identity.create(tmp_path / name) for name in ("kitchen", "old", "new"))
    roster = Roster.found(founder, SWARM, "kitchen")
    roster.introduce(founder, old.certificate, "garage")
    roster.introduce(founder, new.certificate, "garage")
    names = {member.id: member.name for member in roster.members().values()}
    assert names[old.id] == f"garage~{old.id[:7]}"
    assert names[new.id] == f"garage~{new.id[:7]}"
    assert roster.by_name("garage") is None  # nobody removes the wrong one
    roster.remove(founder, roster.by_name(names[old.id]).id)  # type: ignore[union-attr]
    assert roster.member(new.id).name == "garage"  # type: ignore[union-attr]


def test_data_whose_columns_change_is_reported_and_the_node_continues(tmp_path: Path) -> None:
    (folder,) = make_swarm(tmp_path, (0,))
    config = folder.config
    quick = NodeConfig.checked({**config.plain(), "training": {**config.training.plain(), "reread_s": 0.05}})
    data = Path(config.data.path)
    good = data.read_text()

    async def scenario() -> None:
        service = memory_service(MemoryNetwork(()), replace(folder, config=quick))
        task = asyncio.create_task(service.run())
        await until_true(lambda: rounds(service) >= 2)
        data.write_text(good.replace("a,b,c,activity", "a,b,activity,renamed"))
        await until_true(lambda: any("the data has changed and cannot be used" in text for text in problems(service)))
        after = rounds(service)
        await until_true(lambda: rounds(service) >= after + 2)
        write_samples(data, 0, seed=9)
        await until_true(lambda: problems(service) == [])
        assert service.status()["samples"]["rereads"] == 1
        service.stop()
        await task

    asyncio.run(scenario())


def problems(service: Service) -> list[str]:
    return list(service.status()["problems"])


def test_a_clock_that_jumps_does_not_hide_a_new_address(tmp_path: Path) -> None:
    """Addresses are ordered by the device's clock; after a jump back by years the newest still counts."""
    founder, device = (Identity.create(tmp_path / name) for name in ("kitchen", "garage"))
    roster = Roster.found(founder, SWARM, "kitchen")
    roster.introduce(founder, device.certificate, "garage")
    other = roster.copy()
    for number, now in enumerate((2_000_000_000.0, 1.0, 2_000_000_000.0 + 1, 0.0)):
        roster.announce(device, [f"192.0.2.{number}:7447"], now)
        assert other.merge(roster.records()) == []
        assert other.member(device.id).addresses == (f"192.0.2.{number}:7447",)  # type: ignore[union-attr]
