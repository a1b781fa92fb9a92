"""Attacks on whole nodes over real links and disks; the attacker is a member, or a stranger."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_world import Attack, Line, attack
from node_processes import start, wait_for_round
from node_swarm import make_swarm, until
from toy import free_port

from dfca.base.errors import RunError
from dfca.core.rules.election import Tally
from dfca.core.rules.relay import Offer
from dfca.core.state import Message
from dfca.node.net.limits import Bucket
from dfca.node.net.links.link import serialize
from dfca.node.operate.control import ControlServer
from dfca.node.service import Service
from dfca.node.wire import codec, payload
from dfca.node.wire import wire_pb2 as pb
from dfca.peer.records import messages as m
from dfca.peer.records.lineage import Entry


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def let_it_talk(run: Attack) -> None:
    """Take away what keeps the villain out, so that everything it says is read."""
    for service in run.honest:
        transport: Any = service.transport
        transport._local.penalties.punish = lambda member, now: None
        transport._service._calls.clear()
        for link in transport._neighbours.links.values():
            link._rate = Bucket(1e9, 1e9, 0.0)


# Members that lie, and strangers: the others go on.


def frames_of(*messages: Any) -> list[bytes]:
    return [serialize(pb.Frame(message=codec.encode(message)[0])) for message in messages]


def absurd(number: int) -> list[bytes]:
    """Make messages that a codec takes, with claims that cannot be true."""
    far, keys = 2**53, m.Key(2**32, 2**14, 2**53, 5, 2**53)
    lineage = tuple(Entry(far, i, i, i, i, tuple(range(20))) for i in range(300))
    offers = tuple((0, Offer(number, i, i)) for i in range(2000))
    tally = Tally(far, far, far, *[(2**50,) * 300] * 10)
    return frames_of(
        m.Hello(far, far, far, lineage),
        m.Hello(0, far, 1, ()),
        m.Nothing(2**40, lineage[:150], tuple(range(4000)), offers),
        m.Nothing(far, (), (far,) * 4000, offers),
        m.CopyRequest(far, lineage),
        m.BankRequest(tuple(range(4096))),
        m.Declined(far),
        m.Probe(keys, lineage, m.Call((), 4096)),
        m.Probe(keys._replace(attempt=900), (), None),
        m.Count(keys, 2**20, 0),
        m.Open(keys, 2**20, (m.Turn(1, True, 4095),) * 10),
        m.Bid(keys, far, float("inf"), 3),
        m.Stand(keys, far, far),
        m.Votes(keys, far, tally),
        m.Decision(keys, far, m.Turn(1, True, 4095), True),
        *(m.Alarm(i, far, True, lineage[:1]) for i in range(20)),
    )


def roster_noise() -> list[bytes]:
    digest = serialize(pb.Frame(roster_digest=pb.RosterDigest(digest=os.urandom(16).hex())))
    return [digest, serialize(pb.Frame(roster_records=pb.RosterRecords(records=[os.urandom(300)] * 20)))]


def announcements(number: int, size: int) -> list[bytes]:
    """Make announcements of models that will never be served."""
    frames = []
    for cluster in range(4):
        update = m.Update(Message(number, cluster, 2**30, 2, torch.zeros(size)), 4)
        announce = pb.Announce(
            number=1 + cluster, message=codec.encode(update)[0], name=os.urandom(32), size=1000, encoding=1
        )
        frames.append(serialize(pb.Frame(announce=announce)))
    return frames


async def pester(
    run: Attack, victim: Service, make: Callable[[], list[bytes]], pause_s: float, active: asyncio.Event
) -> None:
    """Send the same lies again and again, on new links where the node ends one."""
    line: Line | None = None
    while await active.wait():
        if line is None or line.ended:
            line = await run.villain.dial(victim)
        if line is None or not await line.say(*make()):
            await asyncio.sleep(0.2)
        await asyncio.sleep(pause_s)


async def stall(request: bytes, context: Any) -> None:
    await asyncio.sleep(3600)


def test_a_member_that_lies_does_not_stop_or_slow_the_others(tmp_path: Path) -> None:
    async def go() -> None:
        async with attack(tmp_path) as run:
            number, size = run.villain.folder.identity.number, run.villain.greeting.size
            run.villain.read = stall
            lies, active = absurd(number), asyncio.Event()

            def lie() -> list[bytes]:
                return lies + roster_noise() + announcements(number, size)

            @asynccontextmanager
            async def pests() -> AsyncIterator[None]:
                active.set()
                yield
                active.clear()

            tasks = [asyncio.create_task(pester(run, service, lie, 0.2, active)) for service in run.honest]
            async with pests():
                await asyncio.sleep(0.5)
            before = resident_mb()
            slowdown = await run.slowdown(pests, 2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            print(f"slowed {slowdown} times; {run.refused()}")
            assert run.errors == []
            assert slowdown[-1] < 2
            assert resident_mb() - before < 40
            lineages = {service.node.machine.lineage for service in run.honest}  # type: ignore[attr-defined]
            assert len(lineages) == 1
            for service in run.honest:
                assert service.node.machine.bank is not None
                assert bool(torch.isfinite(service.node.machine.bank).all())

    asyncio.run(go())


def test_a_model_out_of_all_proportion_is_refused(tmp_path: Path) -> None:
    async def go() -> None:
        async with attack(tmp_path, agreed={"rounds": 3}) as run:
            await until(lambda: run.rounds() == [3, 3])
            await run.settle()
            victim = run.honest[0]
            peer: Any = victim.node.machine
            bank = peer.bank.clone()
            number, size = run.villain.folder.identity.number, run.villain.greeting.size
            for model, reason in ((torch.full((size,), 1e30), "norm"), (torch.zeros(2, size), "shape")):
                let_it_talk(run)
                data = payload.pack(model)
                name = bytes.fromhex(payload.name(data))
                run.villain.replies[name] = data
                update = m.Update(Message(number, 0, 5, 2, torch.zeros(size)), 1, peer.lineage)
                rows = len(model) if model.dim() == 2 else 0
                told = pb.Announce(
                    number=1, message=codec.encode(update)[0], name=name, size=len(data), encoding=1, rows=rows
                )
                line = await run.villain.reach(victim)
                await line.say(serialize(pb.Frame(announce=told)))
                await until(lambda reason=reason: run.refused().get(reason, 0) == 1)  # type: ignore[misc]
                await line.end()
            assert torch.equal(peer.bank, bank)

    asyncio.run(go())


def test_a_thousand_strangers_do_not_slow_the_others(tmp_path: Path) -> None:
    async def go() -> None:
        async with attack(tmp_path) as run:
            victim = run.honest[0]

            @asynccontextmanager
            async def strangers() -> AsyncIterator[None]:
                opened = []
                for i in range(1000):
                    _, writer = await asyncio.open_connection("127.0.0.1", victim.port)
                    if i % 2:
                        writer.write(b"\x16\x03\x01\x02\x00" if i % 3 else b"GET / HTTP/1.1\r\n\r\n")
                    opened.append(writer)
                yield
                links = [
                    neighbour["state"] for neighbour in victim.status()["neighbours"] if neighbour["name"] != "node2"
                ]
                assert links == ["up"]
                for writer in opened:
                    writer.transport.abort()

            slowdown = await run.slowdown(strangers, 2)
            print(f"slowed {slowdown} times by 1,000 half-open connections")
            assert slowdown[-1] < 2

    asyncio.run(go())


@pytest.mark.slow
def test_kill_9_twenty_times_at_random_moments_of_a_swarm(tmp_path: Path) -> None:
    folders = make_swarm(tmp_path, (0, 1, 0), free_port(3))
    draw = random.Random(0)
    paths = [folder.path for folder in folders]
    running = [start(path) for path in paths]
    try:
        models = [wait_for_round(path, process, 3)["clusters"] for path, process in zip(paths, running, strict=True)]
        for _ in range(20):
            victim = draw.randrange(3)
            time.sleep(draw.uniform(0, 1.0))
            running[victim].kill()
            running[victim].communicate()
            saved = folders[victim].store().load()
            assert saved is not None
            assert saved.bank is not None
            assert len(saved.bank) >= min(models)
            assert bool(torch.isfinite(saved.bank).all())
            running[victim] = start(paths[victim])
        rounds = [folder.store().load().round for folder in folders]  # type: ignore[union-attr]
        statuses = [
            wait_for_round(path, process, least + 2)
            for path, process, least in zip(paths, running, rounds, strict=True)
        ]
        assert len({status["clusters"] for status in statuses}) == 1
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_a_control_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "control.json").mkdir()
    with pytest.raises(RunError, match=r"control\.json: Is a directory; make the folder writable"):
        asyncio.run(ControlServer(tmp_path, {}).open())
