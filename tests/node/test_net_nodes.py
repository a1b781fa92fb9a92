"""Whole nodes over gRPC: the same banks as the synchronous simulator, with real sockets, certificates and threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from memory_nodes import assert_banks, make_nodes
from net_world import FAST, SWARM, World, until, world
from toy import make_toy_setting

from dfca.node.net.options import Swarm
from dfca.node.transport import TransportInputs
from dfca.peer.records.messages import Nothing, Update
from dfca.peer.records.work import Job, Train


class Renumbered:
    """A transport that is linked already, with neighbours that are called 0, 1, 2... as the simulator's clients are.

    A peer begins with the neighbours that it has; to compute what the simulator does it must have all.
    """

    def __init__(self, net: World, place: int) -> None:
        self._device = net.devices[place]
        self._transport = self._device.transport
        self._numbers = [device.number for device in net.devices]

    def open(self, node: TransportInputs) -> None:
        recorder, place = self._device.node, self._numbers.index
        recorder.on_message = lambda sender, message: node.received(place(sender), message)
        for number in sorted(map(place, recorder.up())):
            node.connected(number)
        for sender, message in list(recorder.messages):
            node.received(place(sender), message)

    def send(self, neighbour: int, message: Any) -> None:
        self._transport.send(self._numbers[neighbour], message)

    def when_quiet(self, call: Callable[[], None]) -> None:
        self._transport.when_quiet(call)

    def close(self) -> None:
        self._transport.close()


class Patient:
    """Work that begins a round when everybody has received everything of the round before.

    The newest update of a neighbour takes the place of one that has not been read: what is lost to a fast neighbour the
    simulator does not lose.
    """

    def __init__(self, work: Any, net: World) -> None:
        self._work, self._found = work, net

    def run(self, job: Job, bank: torch.Tensor | None) -> Any:
        while isinstance(job, Train) and job.round and not self._is_complete(job.round - 1):
            time.sleep(0.002)
        return self._work.run(job, bank)

    def _is_complete(self, round: int) -> bool:
        def has(message: Any) -> bool:
            if isinstance(message, Update):
                return bool(message.message.round == round)
            return isinstance(message, Nothing) and message.round == round

        others = len(self._found.devices) - 1
        return all(sum(has(m) for _, m in list(d.node.messages)) >= others for d in self._found.devices)


class Network:
    """What `make_nodes` asks for transports."""

    def __init__(self, net: World) -> None:
        self._found = net

    def transport(self, place: int) -> Renumbered:
        return Renumbered(self._found, place)


@pytest.mark.parametrize(
    ("algorithm", "codec"), [("dfca-gi", "none"), ("dfca-auto", "none"), ("dfca-gi", "top-k"), ("dfca-gi", "1-bit")]
)
def test_nodes_over_grpc_equal_the_synchronous_simulator(
    tmp_path: Path, algorithm: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit where everybody waits for all; with elections and relays, in what they agree on."""
    # The roster does not know peers by the numbers that they have here.
    monkeypatch.setattr("dfca.node.net.transport.find_lie", lambda message, introduced: None)
    setting = make_toy_setting(algorithm, rounds=3, codec=codec, keep=0.1)
    setting = replace(setting, graph=nx.complete_graph(setting.clients))
    size = sum(parameter.numel() for parameter in setting.make_model().parameters())
    declared = None if setting.codec is None else setting.codec.bytes(size)
    swarm = Swarm(SWARM, size, torch.float64, "float64", payload_bytes=declared)

    async def run() -> None:
        # All in one process: on a busy machine nobody answers in time, and a round without a neighbour is another.
        patience = {"least_silence_s": 600.0, "most_silence_s": 600.0, "least_read_s": 600.0, "most_read_s": 600.0}
        options = replace(FAST, degree=4 * setting.clients, **patience)
        async with world(tmp_path, setting.clients, options, swarm) as net:
            await until(net.connected, 60)
            nodes = make_nodes(setting, Network(net), timed=False)  # type: ignore[arg-type]
            for node in nodes.values():
                node._work = Patient(node._work, net)
            await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes.values())), 300)
            for node in nodes.values():
                node.stop()
            assert not any(kind == "disconnected" for device in net.devices for kind, _ in device.node.events)
            if algorithm == "dfca-gi":
                assert_banks(setting, nodes)
            assert len({node.machine.lineage for node in nodes.values()}) == 1  # type: ignore[attr-defined]
            assert [node.machine.round for node in nodes.values()] == [3] * setting.clients
            assert not any(device.transport.status()["refused"] for device in net.devices)

    asyncio.run(run())
