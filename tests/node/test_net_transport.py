"""Real transports with real certificates over real sockets: what they promise to nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from net_world import until, update, world

from dfca.peer.records.messages import Hello, Nothing


def test_two_devices_connect_and_exchange_small_and_large_messages(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as net:
            one, two = net.devices
            await until(net.connected)
            for i in range(50):
                one.transport.send(two.number, Nothing(i))
            two.transport.send(one.number, Hello(1, 2, 3))
            one.transport.send(two.number, update(5))
            await until(lambda: len(two.node.messages) == 51)
            await until(lambda: one.node.messages)
            assert one.node.messages == [(two.number, Hello(1, 2, 3))]
            assert [m.round for _, m in two.node.messages if isinstance(m, Nothing)] == list(range(50))
            (got,) = (m for _, m in two.node.messages if not isinstance(m, Nothing))
            assert torch.equal(got.message.model, torch.full((1000,), 5.0))
            assert got.age_s >= 0
            assert one.transport.status()["refused"] == {}

    asyncio.run(run())
