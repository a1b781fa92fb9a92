"""Mutated frames of hostile members on live mTLS links: the bank stays as it is, the process lives, others continue.

A node ends a link at the first frame that breaks a rule and reads nothing that is behind it, so frames are counted
where the node reads them. Over mTLS the member then dials again on the same connection (a stream, not a handshake);
several members do so at once. Inside the process of a node the frames come from a stream in memory: nothing is lost
between a frame that is refused and the next link, and `pytest -m slow tests/node/test_live_fuzz.py` has 100,000 read.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import mutations as fuzz
import pytest
import torch
from attack_world import READS_FILE, Attack, Line, Target, Villain, attack, count_reads, take_limits_away
from node_processes import wait_for_round
from node_swarm import make_swarm, until
from toy import free_port

from dfca.node.disk.folder import NodeFolder
from dfca.node.net.links.link import NetLink
from dfca.node.net.links.wire import StreamEnded
from dfca.node.operate.control import call
from dfca.peer.records.lineage import Entry

VILLAINS = 4
MOST_SLOWER, LEAST_RTT_S = 10.0, 0.05
"""An honest round trip under attack: largest ratio to the quiet one, and seconds below which it does not matter."""


def frames_by(root: int) -> list[bytes]:
    """Make valid frames whose elections are those of a device of the swarm: others are refused before the peer."""
    changes = {"lineage": (Entry(2, 1, root, 3, 7, (0, 1)),), "base": (), "key": fuzz.KEY._replace(root=root)}
    return fuzz.valid_frames(
        [message._replace(**{k: v for k, v in changes.items() if k in message._fields}) for message in fuzz.VALID]
    )


def mutants(villain: Villain, seed: int) -> Iterator[bytes]:
    """Make mutated frames of a member, without end."""
    rng, valid = random.Random(seed), frames_by(villain.folder.identity.number)
    while True:
        yield rng.choice(fuzz.FRAME_MUTATIONS)(rng.choice(valid), rng)


async def mutate(villain: Villain, victim: Target, seed: int, enough: Callable[[int], bool]) -> tuple[int, int]:
    """Write mutated frames to a node, on a new link after each refusal, until `enough(written)`.

    Returns how many were written, and the links.
    """
    written = links = 0
    line: Line | None = None
    for frame in mutants(villain, seed):
        if enough(written):
            break
        while line is None or line.ended:
            if line is not None:
                await line.end()
            line, links = await villain.dial(victim), links + 1
            if line is None:
                await asyncio.sleep(0.05)
        await line.say(frame)
        written += 1
    if line is not None:
        await line.end()
    return written, links


class Script:
    """A stream in memory: a frame is taken from `frames` when the node reads it. read: how many."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        self.read_frames, self.ended, self._frames = 0, False, frames

    async def read(self) -> Any:
        await asyncio.sleep(0)
        data = next(self._frames, None)
        if data is None:
            self.ended = True
            raise StreamEnded
        self.read_frames += 1
        return data

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0)


async def run_script(run: Attack, victim: Any, count: int, seed: int) -> tuple[int, int]:
    """Have a live node read this many mutated frames of the villain, a new link after each that it refuses.

    From the first byte on everything is what a real link does, but for gRPC. Returns the frames and the links.
    """
    transport, member = victim.transport, run.villain.folder.identity
    script, links = Script(islice(mutants(run.villain, seed), count)), 0
    while not script.ended:
        link = NetLink(member.id, member.number, script, transport._options, transport._local.now, dialled=False)
        await transport._neighbours.run(link)
        links += 1
    return script.read_frames, links


def honest_links(run: Attack) -> list[Any]:
    ids = [service.folder.identity.id for service in run.honest]
    return [service.transport._neighbours.links[id] for service, id in zip(run.honest, reversed(ids), strict=True)]  # type: ignore[attr-defined]


def test_mutated_frames_on_live_links_leave_the_bank_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_limits_away(monkeypatch.setattr)
    read = count_reads(monkeypatch.setattr)

    async def go() -> None:
        async with attack(tmp_path, agreed={"rounds": 3}) as run:
            await until(lambda: run.rounds() == [3, 3])
            await run.settle()
            banks = [service.node.machine.bank.clone() for service in run.honest]  # type: ignore[union-attr]
            before = honest_links(run)
            targets = [Target.of(service) for service in run.honest]
            member = run.villain.folder.identity.id
            attacks = (
                mutate(run.villain, target, i, lambda _: read[member] >= 300) for i, target in enumerate(targets)
            )
            counts = await asyncio.gather(*attacks)
            links = sum(links for _, links in counts)
            for bank, service in zip(banks, run.honest, strict=True):
                assert torch.equal(bank, service.node.machine.bank)
            refused = run.refused()
            written = sum(written for written, _ in counts)
            print(f"{read[member]} frames read of {written} written, {links} links, {refused}")
            assert run.errors == []
            assert "failed" not in refused
            assert sum(refused.values()) > links / 4
            assert {"malformed", "field", "number"} <= set(refused)
            assert honest_links(run) == before  # the link between the honest ones is the same all the time

    asyncio.run(go())


@pytest.mark.slow
def test_100_000_mutated_frames_are_read_by_a_live_node_and_leave_its_bank_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream in memory feeds a node that has a real link with an honest one: every frame is read."""
    take_limits_away(monkeypatch.setattr)
    count = int(os.environ.get("DFCA_FUZZ", "100000"))

    async def go() -> None:
        async with attack(tmp_path, agreed={"rounds": 3}) as run:
            await until(lambda: run.rounds() == [3, 3])
            await run.settle()
            victim, before, refused = run.honest[0], honest_links(run), Counter(run.honest[0].status()["refused"])
            bank = victim.node.machine.bank.clone()  # type: ignore[union-attr]
            begin = time.process_time()
            read, links = await run_script(run, victim, count, seed=1)
            refused = Counter(victim.status()["refused"]) - refused
            took = time.process_time() - begin
            print(f"{read} frames read in {took:.0f} s of processor time, {links} links, {dict(refused)}")
            assert read == count
            assert run.errors == []
            assert torch.equal(bank, victim.node.machine.bank)
            assert not {"failed", "rate"} & set(refused)
            assert {"malformed", "field", "number", "kind"} <= set(refused)
            assert honest_links(run) == before

    asyncio.run(go())


def rtt_s(path: Path, name: str) -> float:
    """Ask a node for its round trip to another."""
    return float(
        next(neighbour["rtt_s"] for neighbour in call(path, "status")["neighbours"] if neighbour["name"] == name)
    )


@pytest.mark.slow
def test_mutated_frames_over_tls_leave_a_node_process_as_it_is(tmp_path: Path) -> None:
    """4 hostile members, one victim that reads 5,000 frames of them, one honest neighbour of it."""
    count, port = int(os.environ.get("DFCA_FUZZ", "100000")) // 20, free_port(2 + VILLAINS)
    folders = make_swarm(tmp_path, [0] * (2 + VILLAINS), port, agreed={"rounds": 3})
    victim, neighbour = folders[:2]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        script = Path(__file__).parents[1] / "support" / "attack_child.py"
        running[:] = [
            subprocess.Popen([sys.executable, str(script), str(folder.path)]) for folder in (victim, neighbour)
        ]
        for folder, process in zip(folders, running, strict=False):
            wait_for_round(folder.path, process, 3)  # type: ignore[arg-type]
        time.sleep(5.0)  # the last models are folded, and round trips are known

    def stop() -> None:
        for folder, process in zip(folders, running, strict=False):
            call(folder.path, "stop")
            assert process.wait(20) == 0

    def read() -> int:
        reads = json.loads((victim.path / READS_FILE).read_text())
        return sum(reads.get(folder.identity.id, 0) for folder in folders[2:])

    async def go() -> tuple[int, int, list[float]]:
        villains = [Villain.of(NodeFolder.load(folder.path)) for folder in folders[2:]]
        for place, villain in enumerate(villains):
            await villain.listen(port + 2 + place)
        target = Target(victim.identity.id, victim.identity.certificate, port)
        attacks = asyncio.gather(
            *(mutate(villain, target, i, lambda _: done.is_set()) for i, villain in enumerate(villains))
        )
        done, seen = asyncio.Event(), []
        while not done.is_set():
            await asyncio.wait([attacks], timeout=2.0)
            seen.append(await asyncio.to_thread(rtt_s, neighbour.path, "node0"))
            if attacks.done() or await asyncio.to_thread(read) >= count:
                done.set()
        counts = await attacks
        for villain in villains:
            await villain.close()
        return sum(written for written, _ in counts), sum(links for _, links in counts), seen

    try:
        start()
        stop()  # now everything is on the disk
        start()
        quiet, saved = rtt_s(neighbour.path, "node0"), victim.store().load()
        begin = time.monotonic()
        written, links, seen = asyncio.run(go())
        took = time.monotonic() - begin
        status = call(victim.path, "status")
        refused = status["refused"]
        print(
            f"{read()} frames read of {written} written, {links} links in {took:.0f} s; round trips {quiet:.4f} s, "
            f"then {seen}; {refused}"
        )
        assert read() >= count
        assert [process.poll() for process in running] == [None, None]
        assert "failed" not in refused
        assert sum(refused.values()) > links / 4
        assert {"malformed", "field", "number", "member"} <= set(refused)
        assert [neighbour["state"] for neighbour in status["neighbours"] if neighbour["name"] == "node1"] == ["up"]
        assert statistics.median(seen) < max(MOST_SLOWER * quiet, LEAST_RTT_S)
        stop()
        after = victim.store().load()
        assert saved is not None
        assert after is not None
        assert after.bank is not None
        assert saved.bank is not None
        assert torch.equal(saved.bank, after.bank)  # what it had in memory at the end
    finally:
        for process in running:
            process.kill()
            process.wait()
