"""What breaks is noticed, repaired and resumed: cuts, stalls, crashes, starvation, members that go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch
from net_world import FAST, SIZE, SWARM, Device, World, make_device, until, update, world

from dfca.base.errors import ConfigError
from dfca.node.net.links.grpc_wire import make_channel
from dfca.node.net.options import NetOptions, Swarm
from dfca.node.net.transport import GrpcTransport
from dfca.node.trust.identity import Identity
from dfca.node.wire.frames import READ
from dfca.peer.records.messages import Nothing, Served, Update

LARGE = Swarm(SWARM, 500_000)  # 2 MB
SLOW = 2e6
HALF = 1.2e6  # at least 0.4 MB of chunks are whole then, however large they are
PATIENT = replace(FAST, patience_s=30.0, dial_s=15.0, most_dial_s=15.0, least_read_s=30.0, most_read_s=60.0)


def partial_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "partial").iterdir())


@asynccontextmanager
async def half_sent(folder: Path, reader: int = 1) -> AsyncIterator[tuple[World, Device, Device]]:
    """Stall a large model when its reader has a good part of it; yields the devices, the source and the reader."""
    async with world(folder, 2, PATIENT, swarm=LARGE, proxied=True) as net:
        await until(net.connected)
        source, sink = net.devices[1 - reader], net.devices[reader]
        net.proxies[1].stall_after(HALF)  # of the one that is dialled
        source.transport.send(sink.number, update(3, size=LARGE.size))

        def got() -> int:
            neighbours = sink.transport.status()["neighbours"].values()
            return sum(pull["got"] for neighbour in neighbours for pull in neighbour["pulls"])

        await until(lambda: 3e5 < got() < 1.9e6)
        yield net, source, sink


@pytest.mark.parametrize("reader", [0, 1])
def test_a_model_that_was_cut_off_is_read_on_where_it_ended(tmp_path: Path, reader: int) -> None:
    async def run() -> None:
        async with half_sent(tmp_path, reader) as (net, source, sink):
            for link in net.proxies:
                link.cut()
            net.proxies[1].resume()
            await until(lambda: sink.node.messages)
            assert sink.node.events.count(("disconnected", source.number)) == 1
            (model,) = (m.message.model for _, m in sink.node.messages)
            assert torch.equal(model, torch.full((LARGE.size,), 3.0))
            status = sink.transport.status()
            assert status["resumed_bytes"] > 2e5
            read = status["neighbours"][source.identity.id]["bytes_in"]
            assert read < 2e6 + 3e5  # nothing twice but the chunk that was cut
            await until(lambda: source.transport.status()["cached_bytes"] == 0)
            assert partial_bytes(sink.identity.folder) == 0

    asyncio.run(run())


def test_a_reader_that_was_killed_resumes_from_its_disk(tmp_path: Path) -> None:
    async def run() -> None:
        async with half_sent(tmp_path) as (net, _, sink):
            await sink.transport.stop()
            net.proxies[1].resume()
            successor = make_device(sink.identity, sink.roster, sink.identity.folder, FAST, LARGE)
            address = await successor.transport.start()
            net.devices[1] = successor
            successor.roster.announce(sink.identity, [address])
            successor.transport.open(successor.node)
            await until(lambda: successor.node.messages)
            assert successor.transport.status()["resumed_bytes"] > 2e5

    asyncio.run(run())


def test_what_a_crash_left_damaged_is_read_again_from_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        async with half_sent(tmp_path) as (net, _, sink):
            for proxy in net.proxies:
                proxy.refusing = True
                proxy.cut()
            await until(lambda: not sink.node.up() and partial_bytes(sink.identity.folder))
            (path,) = (sink.identity.folder / "partial").iterdir()
            path.write_bytes(bytes(path.stat().st_size))  # zeros, as after a power cut
            for proxy in net.proxies:
                proxy.refusing = False
                proxy.resume()
            await until(lambda: sink.node.messages)
            assert sink.transport.status()["refused"] == {}

    asyncio.run(run())


def test_a_message_that_must_arrive_is_lost_with_its_link_and_an_update_is_not(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, swarm=LARGE, proxied=True) as net:
            await until(net.connected)
            source, sink = net.devices
            net.proxies[1].bytes_per_s = SLOW
            source.transport.send(sink.number, Served(1, torch.ones(2, LARGE.size)))
            source.transport.send(sink.number, update(3, size=LARGE.size))
            await asyncio.sleep(0.2)
            for proxy in net.proxies:
                proxy.cut()
            net.proxies[1].bytes_per_s = None
            await until(lambda: sink.node.messages)
            await asyncio.sleep(0.2)
            assert [type(m).__name__ for _, m in sink.node.messages] == ["Update"]
            assert sink.node.messages[0][1].age_s > 0.2  # it has waited
            assert sink.node.events.count(("disconnected", source.number)) == 1

    asyncio.run(run())


def test_a_dead_neighbour_is_noticed_within_five_seconds_at_both_ends(tmp_path: Path) -> None:
    """Five seconds in which the event loop runs."""
    noticed: dict[int, float] = {}

    def note_end(device: Device, start: float) -> None:
        original = device.node.disconnected

        def disconnected(neighbour: int) -> None:
            noticed[device.number] = device.transport._local.now() - start
            original(neighbour)

        device.node.disconnected = disconnected  # type: ignore[method-assign]

    default = NetOptions()
    impatient = replace(
        FAST, heartbeat_s=0.2, least_silence_s=default.least_silence_s, most_silence_s=default.most_silence_s
    )

    async def run() -> None:
        async with world(tmp_path, 2, impatient, proxied=True) as net:
            await until(net.connected)
            await asyncio.sleep(0.7)  # a few heartbeats
            for device in net.devices:
                note_end(device, device.transport._local.now())
            for proxy in net.proxies:
                proxy.stall()
            await until(lambda: not any(device.node.up() for device in net.devices))
            assert len(noticed) == 2
            assert max(noticed.values()) < 5
            for proxy in net.proxies:
                proxy.cut()
                proxy.resume()
            await until(net.connected)

    asyncio.run(run())


def test_a_node_that_starved_distrusts_its_own_clock_and_keeps_its_links(tmp_path: Path) -> None:
    quick = replace(FAST, heartbeat_s=0.1, least_silence_s=2.0, most_silence_s=2.0)

    async def run() -> None:
        async with world(tmp_path, 2, quick) as net:
            await until(net.connected)
            await asyncio.sleep(0.2)
            time.sleep(2.5)  # the event loop does not run: neither of the two hears the other
            await asyncio.sleep(0.5)
            net.devices[0].transport.send(net.devices[1].number, Nothing(1))
            await until(lambda: net.devices[1].node.messages)
            assert all(("disconnected", d.number) not in e.node.events for d in net.devices for e in net.devices)
            assert net.devices[0].transport.status()["starved_s"] > 1.5

    asyncio.run(run())


def test_one_model_for_all_neighbours_is_encoded_once_and_forgotten_when_all_have_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3) as net:
            await until(net.connected)
            first, *others = net.devices
            message = update(1)
            for other in others:
                first.transport.send(other.number, message)
            await until(lambda: all(other.node.messages for other in others))
            assert first.transport.status()["packed"] == 1
            await until(lambda: first.transport.status()["cached_bytes"] == 0)

    asyncio.run(run())


# Members come and go.


def test_a_removed_member_is_cut_off_at_once_and_cannot_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3) as net:
            await until(net.connected)
            first, second, third = net.devices
            third.roster.merge = lambda received: []  # type: ignore[method-assign]
            first.roster.remove(first.identity, third.identity.id)
            assert first.node.up() == {second.number}  # in the same moment
            await until(lambda: second.node.up() == {first.number})
            await until(lambda: not third.node.up())
            # It does not believe it, and tries with all its might.
            assert third.roster.member(first.identity.id) is not None
            await asyncio.sleep(2.0)
            assert third.node.up() == set()
            assert first.node.up() == {second.number}
            assert first.node.neighbours[-1] == (second.number,)
            first.transport.send(second.number, Nothing(1))
            await until(lambda: second.node.messages)
            # It has been shown the removal, and is a stranger to TLS from now on.
            assert third.identity.certificate not in first.roster.certificates()
            channel = make_channel(third.identity, first.identity.id, first.identity.certificate, first.address, False)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_stream(READ)(b"").read()
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            await channel.close()

    asyncio.run(run())


@pytest.mark.parametrize("away", [False, True])
def test_a_removed_member_is_shown_the_removal_and_nothing_else(tmp_path: Path, away: bool) -> None:
    """Over its link, or where it dials after it was away: the signed records, and no others since."""

    async def run() -> None:
        async with world(tmp_path, 3) as net:
            await until(net.connected)
            first, second, third = net.devices
            if away:
                await third.transport.stop()
                await until(lambda: len(first.node.up()) == len(second.node.up()) == 1)
            first.roster.remove(net.founder, third.identity.id)
            later = Identity.create(tmp_path / "later")
            first.roster.introduce(net.founder, later.certificate, "later")
            if away:
                await third.transport.start()
                third.transport.open(third.node)
            await until(lambda: third.roster.is_removed(third.identity.id))
            assert third.roster.member(later.id) is None
            if away:  # of all that dialled, only the removed one was refused
                assert {"member"} == set(first.transport.status()["refused"]) | set(
                    second.transport.status()["refused"]
                )
            await until(lambda: not third.transport._neighbours.links)
            assert third.transport.status()["neighbours"] == {}

    asyncio.run(run())


def test_a_new_member_is_introduced_by_gossip(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as net:
            await until(net.connected)
            first, second = net.devices
            identity = Identity.create(tmp_path / "new")
            first.roster.introduce(net.founder, identity.certificate, "new")
            new = make_device(identity, first.roster.copy(), tmp_path / "new", FAST, Swarm(SWARM, SIZE))
            address = await new.transport.start()
            net.devices.append(new)
            new.roster.announce(identity, [address])
            new.transport.open(new.node)
            await until(net.connected)
            await until(lambda: len({device.roster.digest() for device in net.devices}) == 1)
            assert second.roster.member(identity.id).addresses == (address,)  # type: ignore[union-attr]
            assert second.node.neighbours[-1] == tuple(sorted((first.number, new.number)))

    asyncio.run(run())


def test_the_ring_closes_over_a_dead_member_and_opens_when_it_is_back(tmp_path: Path) -> None:
    ring = replace(FAST, degree=2, dead_after_s=1.0)

    async def run() -> None:
        async with world(tmp_path, 4, ring) as net:
            numbers = [device.number for device in net.devices]

            def linked(i: int) -> set[int]:
                return {numbers.index(number) for number in net.devices[i].node.up()}

            await until(lambda: [linked(i) for i in range(4)] == [{1, 3}, {0, 2}, {1, 3}, {0, 2}])
            gone = net.devices[1]
            await gone.transport.stop()
            await until(lambda: [linked(i) for i in (0, 2, 3)] == [{2, 3}, {0, 3}, {0, 2}])
            assert numbers[1] not in net.devices[0].node.neighbours[-1]
            back = make_device(gone.identity, gone.roster, gone.identity.folder, ring, Swarm(SWARM, SIZE))
            address = await back.transport.start()
            back.roster.announce(gone.identity, [address])
            back.transport.open(back.node)
            net.devices[1] = back
            await until(lambda: [linked(i) for i in range(4)] == [{1, 3}, {0, 2}, {1, 3}, {0, 2}])

    asyncio.run(run())


def test_named_neighbours_are_dialled_and_any_member_that_dials_is_accepted(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3, replace(FAST, neighbours=("d1",))) as net:
            numbers = [device.number for device in net.devices]
            up = [{numbers[1]}, {numbers[0], numbers[2]}, {numbers[1]}]
            await until(lambda: [device.node.up() for device in net.devices] == up)
            assert net.devices[1].node.neighbours[-1] == tuple(sorted((numbers[0], numbers[2])))

    asyncio.run(run())


def test_a_device_that_can_only_dial_out_sends_and_reads_models(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3, proxied=True) as net:
            walled, *others = net.devices
            net.proxies[0].refusing = True
            await until(net.connected)
            for other in others:
                walled.transport.send(other.number, update(1))
                other.transport.send(walled.number, update(2))
                walled.transport.send(other.number, Served(1, torch.ones(2, SIZE)))  # must arrive
            await until(lambda: all(len(other.node.messages) == 2 for other in others))
            await until(lambda: len(walled.node.messages) == 2)
            for device in net.devices:
                status = device.transport.status()
                assert status["refused"] == {}
                walls = [
                    neighbour["walled"] for neighbour in status["neighbours"].values() if neighbour["name"] == "d0"
                ]
                assert walls == ([] if device is walled else [True])
            await until(lambda: walled.transport.status()["cached_bytes"] == 0)

    asyncio.run(run())


def test_a_small_message_overtakes_a_large_model(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, PATIENT, swarm=LARGE, proxied=True) as net:
            await until(net.connected)
            net.proxies[1].bytes_per_s = SLOW
            for source, sink in (net.devices, net.devices[::-1]):
                source.transport.send(sink.number, update(3, size=LARGE.size))
                await until(lambda sink=sink: any(n["pulls"] for n in sink.transport.status()["neighbours"].values()))
                source.transport.send(sink.number, Nothing(1))
                await until(lambda sink=sink: len(sink.node.messages) == 2)
                assert [type(message) for _, message in sink.node.messages] == [Nothing, Update]

    asyncio.run(run())


@pytest.mark.parametrize("old", [0, 1])
def test_models_travel_both_ways_between_a_node_and_one_of_version_02(tmp_path: Path, old: int) -> None:
    """The older one reads and is read by calls of their own."""

    async def run() -> None:
        async with world(tmp_path, 2) as net:
            await until(net.connected)
            before = net.devices[old]
            await before.transport.stop()
            options = replace(FAST, parts=False)
            device = make_device(before.identity, before.roster, before.identity.folder, options, Swarm(SWARM, SIZE))
            net.devices[old] = device
            device.roster.announce(before.identity, [await device.transport.start()])
            device.transport.open(device.node)
            await until(net.connected)
            one, two = net.devices
            one.transport.send(two.number, update(1))
            two.transport.send(one.number, update(2))
            await until(lambda: one.node.messages and two.node.messages)
            assert not any(
                link.in_parts for member in net.devices for link in member.transport._neighbours.links.values()
            )

    asyncio.run(run())


def test_a_neighbour_of_version_02_that_cannot_be_reached_back_loses_updates_and_keeps_its_link(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, replace(FAST, parts=False), proxied=True) as net:
            await until(net.connected)
            dialler, listener = net.devices  # models are read from the dialler on a connection to it
            net.proxies[0].refusing = True
            dialler.transport.send(listener.number, update(1))
            dialler.transport.send(listener.number, Nothing(1))
            await until(lambda: listener.transport.status()["refused"].get("unreachable"))
            await until(lambda: dialler.transport.status()["cached_bytes"] == 0)
            assert [m for _, m in listener.node.messages] == [Nothing(1)]
            assert net.connected()
            net.proxies[0].refusing = False
            dialler.transport.send(listener.number, update(2))
            await until(lambda: len(listener.node.messages) == 2)

    asyncio.run(run())


# Listening.


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1) as net:
            device = net.devices[0]
            port = int(device.address.rpartition(":")[2])
            options = NetOptions(host="127.0.0.1", port=port)
            other = GrpcTransport(device.identity, device.roster, Swarm(SWARM, SIZE), options, tmp_path)
            with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: the port is in use"):
                await other.start()

    asyncio.run(run())


def test_plain_text_on_loopback_where_it_is_asked_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, replace(FAST, insecure=True)) as net:
            await until(net.connected)
            one, two = net.devices
            one.transport.send(two.number, update(1))
            await until(lambda: two.node.messages)

    asyncio.run(run())
