"""Models on fast links with long round trips, on the simulated network."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.net_world import Recorder, update

from dfca.faults.disk import FaultyDisk
from dfca.faults.node.run import address, identity, introduce
from dfca.faults.node.wire import PORT, FaultyNetwork, FaultyWire
from dfca.node.memory import VirtualTimeLoop
from dfca.node.net.options import NetOptions, Swarm
from dfca.node.net.transport import GrpcTransport
from dfca.node.surroundings import Surroundings
from dfca.node.trust.roster import Roster

SIZE = 4 << 20  # 16 MB


class AtOnce(Executor):
    """Runs calls where they are submitted; they take no time."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


def read_loop_clock() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("trip_s", "most_s"), [(0.01, 2.0), (0.8, 16.0)])
def test_a_fast_link_is_fast_however_long_its_round_trip(trip_s: float, most_s: float) -> None:
    async def run() -> float:
        network = FaultyNetwork(Random(0), lambda one, other: trip_s / 2, lambda one, other: 0.0)
        roster = Roster.found(identity(0), "s" * 52, "n0", [address(0)])
        introduce(roster, 1)
        around = Surroundings(
            steady=read_loop_clock,
            wall=read_loop_clock,
            disk=FaultyDisk(Random(0)),
            threads=lambda name, count: AtOnce(),
            random_bits=Random(0).getrandbits,
        )
        ends = []
        for node in (0, 1):
            options = NetOptions(host=f"10.0.0.{node}", port=PORT)
            wire = FaultyWire(network, node, identity(node).id)
            swarm = Swarm("s" * 52, SIZE)
            ends.append(GrpcTransport(identity(node), roster.copy(), swarm, options, Path(f"/{node}"), wire, around))
            await ends[-1].start()
        inputs = [Recorder(), Recorder()]
        for end, heard in zip(ends, inputs, strict=True):
            end.open(heard)
        await asyncio.sleep(20.0)  # the link is up, and its round trip known
        begin = asyncio.get_running_loop().time()
        ends[0].send(identity(1).number, update(1, size=SIZE))
        while not inputs[1].messages and asyncio.get_running_loop().time() < begin + 60.0:
            await asyncio.sleep(0.01)
        took_s = asyncio.get_running_loop().time() - begin
        for end in ends:
            await end.stop()
        return took_s

    loop = VirtualTimeLoop()
    try:
        assert loop.run_until_complete(run()) < most_s
    finally:
        loop.close()
