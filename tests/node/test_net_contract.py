"""The contract of node/transport.py, asked of every transport alike: in memory, and over gRPC with real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from net_world import FAST, SIZE, SWARM, Recorder, until, update, world

from dfca.core.rules.election import Tally
from dfca.core.rules.merging import Survey
from dfca.core.rules.relay import Offer
from dfca.core.state import Message
from dfca.node.memory import MemoryNetwork
from dfca.node.net.options import Swarm
from dfca.node.transport import Transport
from dfca.peer.records import messages
from dfca.peer.records.lineage import Entry
from dfca.peer.records.messages import Nothing, Update


@dataclass
class Net:
    """Three linked nodes. cut, heal: break the links of the first two, and mend them."""

    numbers: list[int]
    nodes: list[Recorder]
    transports: list[Transport]
    cut: Callable[[], None]
    heal: Callable[[], None]

    def linked(self) -> bool:
        return all(len(node.up()) == 2 for node in self.nodes)


@asynccontextmanager
async def in_memory(folder: Path) -> AsyncIterator[Net]:
    network = MemoryNetwork([(0, 1), (1, 2), (0, 2)])
    nodes = [Recorder() for _ in range(3)]
    transports = [network.transport(i) for i in range(3)]
    for node, transport in zip(nodes, transports, strict=True):
        transport.open(node)
    yield Net([0, 1, 2], nodes, transports, lambda: network.cut(0, 1), lambda: network.heal(0, 1))


@asynccontextmanager
async def over_grpc(folder: Path) -> AsyncIterator[Net]:
    async with world(folder, 3, replace(FAST, dead_after_s=60.0), proxied=True) as net:
        one, two = net.devices[:2]

        def cut() -> None:
            # The third reaches both directly, by what discovery would find.
            for proxy in net.proxies[:2]:
                proxy.refusing = True
                proxy.cut()

        def heal() -> None:
            for proxy in net.proxies[:2]:
                proxy.refusing = False

        third = net.devices[2]
        for device in (one, two):
            third.transport.discovered(device.identity.id, (device.address,))
        yield Net(
            [device.number for device in net.devices],
            [device.node for device in net.devices],
            [device.transport for device in net.devices],
            cut,
            heal,
        )


Make = Callable[[Path], AbstractAsyncContextManager[Net]]
each_transport = pytest.mark.parametrize("make", [in_memory, over_grpc])


def run(make: Make, folder: Path, check: Callable[[Net], Any]) -> None:
    async def main() -> None:
        async with make(folder) as net:
            await until(net.linked)
            await check(net)

    asyncio.run(main())


def every_message(root: int) -> list[Any]:
    """Make one message of every kind; root: the number of a device that may have held an election."""
    lineage = (Entry(3, 0, root, 2, 5, (0, 1)),)
    key, turn = messages.Key(1, 2, -3, root, 5), messages.Turn(4, True, 1)
    model = torch.arange(SIZE, dtype=torch.float32)
    sent = Message(4, 1, 2, 3, model, Offer(1, 2, 3), 6)
    tally = Tally(1, 2, 3, (10**20,), (10**30,), (1,), (2,), (-(10**20),), (3,), (1,), (4,), (5,), (6,))
    return [
        messages.Hello(1, 2, 3, lineage),
        messages.Update(replace(sent, offer=None), 1, lineage, 0.5, (1, 2), ((0, Offer(1, 2, 3)),)),
        messages.Nothing(1, lineage, (1,), ()),
        messages.CopyRequest(1, lineage),
        messages.Copy(sent, lineage),
        messages.BankRequest((1, 2)),
        messages.BankRequest(None),
        messages.BankCopy(sent, 1, 2, lineage),
        messages.Declined(None),
        messages.Probe(key, lineage, messages.Call((1,), 2)),
        messages.Count(key, 2, 1, (turn,)),
        messages.Refuse(key),
        messages.Open(key, 3, (turn,)),
        messages.Centre(key, 1, 2, model),
        messages.Bid(key, 1, 0.5, None),
        messages.Stand(key, 1, 2),
        messages.Candidate(key, 1, 2, 0.25, model + 1),
        messages.Votes(key, 1, tally),
        messages.Decision(key, 1, turn, True),
        messages.Question(key, (2, 1), (1, 0)),
        messages.Answer(key, Survey((0, 1), (2, 1), (5, -(10**20)) * 6, (3, 4))),
        messages.Result(key, lineage[0]),
        messages.Alarm(root, 2, True, lineage),
        messages.Curves(30, 1, 2, 3, tuple(0.5 * value for value in range(18)), lineage),
        messages.Served(3, torch.stack([model, model + 2])),
        messages.Report(3, replace(sent, offer=None)),
        messages.Report(3, None),
    ]


def plain(message: Any) -> Any:
    """Return a message as values that compare; the age of an update grows on the way, and an alarm is signed."""
    if isinstance(message, messages.Alarm):
        message = message._replace(proof=None)
    if isinstance(message, Update):
        message = message._replace(age_s=0.0)
    if isinstance(message, torch.Tensor):
        return message.tolist()
    if isinstance(message, Message):
        return [plain(getattr(message, name)) for name in message.__dataclass_fields__]
    if isinstance(message, tuple):
        return [type(message).__name__, *(plain(part) for part in message)]
    return message


@each_transport
def test_every_kind_of_message_arrives_once_and_whole(make: Make, tmp_path: Path) -> None:
    assert {type(message) for message in every_message(1)} == set(messages.KINDS)

    async def check(net: Net) -> None:
        sent = every_message(net.numbers[0])
        for message in sent:
            net.transports[0].send(net.numbers[1], message)
        await until(lambda: len(net.nodes[1].messages) == len(sent))
        await asyncio.sleep(0.1)
        assert {sender for sender, _ in net.nodes[1].messages} == {net.numbers[0]}
        got = sorted(repr(plain(message)) for _, message in net.nodes[1].messages)
        assert got == sorted(repr(plain(message)) for message in sent)
        assert net.nodes[2].messages == []

    run(make, tmp_path, check)


@each_transport
def test_small_messages_arrive_in_order_both_ways_among_large_ones(make: Make, tmp_path: Path) -> None:
    async def check(net: Net) -> None:
        for i in range(300):
            for a, b in ((0, 1), (1, 0), (2, 0)):
                net.transports[a].send(net.numbers[b], Nothing(i))
                if i % 50 == 0:
                    net.transports[a].send(net.numbers[b], update(i, cluster=i))
        await until(lambda: [len(node.messages) for node in net.nodes] == [612, 306, 0])
        for node, senders in ((net.nodes[0], (1, 2)), (net.nodes[1], (0,))):
            for sender in senders:
                got = [m for number, m in node.messages if number == net.numbers[sender]]
                assert [m.round for m in got if isinstance(m, Nothing)] == list(range(300))
                assert {m.message.cluster for m in got if isinstance(m, Update)} == set(range(0, 300, 50))

    run(make, tmp_path, check)


@each_transport
def test_of_many_updates_of_a_cluster_the_newest_arrives_in_any_case(make: Make, tmp_path: Path) -> None:
    async def check(net: Net) -> None:
        for i in range(40):
            net.transports[0].send(net.numbers[1], update(i, round=i))
        await until(lambda: net.nodes[1].messages and net.nodes[1].messages[-1][1].message.round == 39)
        rounds = [m.message.round for _, m in net.nodes[1].messages]
        assert rounds == sorted(set(rounds))

    run(make, tmp_path, check)


@each_transport
def test_a_cut_is_reported_at_both_ends_and_so_is_the_next_epoch(make: Make, tmp_path: Path) -> None:
    async def check(net: Net) -> None:
        first, second = net.nodes[:2]
        net.cut()
        await until(lambda: net.numbers[1] not in first.up() and net.numbers[0] not in second.up())
        net.transports[0].send(net.numbers[1], Nothing(1))  # out of reach: lost
        net.heal()
        await until(net.linked)
        net.transports[0].send(net.numbers[1], Nothing(2))
        net.transports[1].send(net.numbers[0], Nothing(3))
        await until(lambda: second.messages and first.messages)
        assert [m.round for _, m in second.messages] == [2]
        assert [m.round for _, m in first.messages] == [3]

    run(make, tmp_path, check)


@each_transport
def test_what_is_sent_when_a_link_opens_comes_before_everything_else(make: Make, tmp_path: Path) -> None:
    async def check(net: Net) -> None:
        first, second = net.nodes[:2]
        original = first.connected

        def connected(number: int) -> None:
            original(number)
            net.transports[0].send(number, messages.Hello(9, 9, 0))

        first.connected = connected  # type: ignore[method-assign]
        net.cut()
        await until(lambda: net.numbers[1] not in first.up() and net.numbers[0] not in second.up())
        net.heal()
        await until(net.linked)
        net.transports[0].send(net.numbers[1], Nothing(1))
        await until(lambda: len(second.messages) == 2)
        assert [type(m).__name__ for _, m in second.messages] == ["Hello", "Nothing"]

    run(make, tmp_path, check)


@each_transport
def test_one_that_closes_is_called_no_more_and_its_neighbours_learn_of_it(make: Make, tmp_path: Path) -> None:
    async def check(net: Net) -> None:
        quiet = asyncio.Event()
        net.transports[1].when_quiet(quiet.set)
        await asyncio.wait_for(quiet.wait(), 60)
        before = list(net.nodes[2].events)
        net.transports[2].close()
        await until(lambda: all(net.numbers[2] not in node.up() for node in net.nodes[:2]))
        net.transports[0].send(net.numbers[2], Nothing(1))
        await asyncio.sleep(0.1)
        assert net.nodes[2].events == before
        assert net.nodes[2].messages == []
        assert net.nodes[0].up() == {net.numbers[1]}

    run(make, tmp_path, check)


def test_the_worlds_of_both_are_of_the_same_size() -> None:
    assert Swarm(SWARM, SIZE).size == len(update(1).message.model)
