"""Discovery by mDNS on loopback: members find each other's addresses, and an address from it earns no trust."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from net_world import FAST, SIZE, SWARM, make_device, until

from dfca.node.net.discovery import Discovery
from dfca.node.net.options import Swarm
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster


def test_members_without_known_addresses_find_each_other_and_a_liar_delays_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        identities = sorted((Identity.create(tmp_path / f"d{i}") for i in range(2)), key=lambda identity: identity.id)
        roster = Roster.found(identities[0], SWARM, "d0")
        roster.introduce(identities[0], identities[1].certificate, "d1")
        devices, options = [], replace(FAST, discovery=True)
        try:
            for identity in identities:
                device = make_device(identity, roster.copy(), identity.folder, options, Swarm(SWARM, SIZE))
                await device.transport.start()
                devices.append(device)
                device.transport.open(device.node)
            await until(lambda: all(device.node.up() for device in devices))
            # Addresses of others than members are not even kept.
            stranger = Identity.create(tmp_path / "stranger")
            devices[0].transport.discovered(stranger.id, ("127.0.0.1:1",))
            assert stranger.id not in devices[0].transport._dialer.discovered
        finally:
            await asyncio.gather(*(device.transport.stop() for device in devices))

    asyncio.run(run())


def test_another_swarm_on_the_same_network_is_not_reported(tmp_path: Path) -> None:
    async def run() -> None:
        reported: list[str] = []
        one = Discovery("a" * 52, SWARM, 7001, lambda member, addresses: reported.append(member))
        other = Discovery("b" * 52, "another", 7002, lambda member, addresses: None)
        same = Discovery("c" * 52, SWARM, 7003, lambda member, addresses: None)
        try:
            for discovery in (one, other, same):
                await discovery.start("127.0.0.1")
            await until(lambda: reported)
            await asyncio.sleep(0.3)
            assert set(reported) == {"c" * 52}
        finally:
            await asyncio.gather(*(discovery.stop() for discovery in (one, other, same)))

    asyncio.run(run())
