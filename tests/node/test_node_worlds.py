"""Whole nodes in simulated worlds (`dfca faults --layer node`). CI also runs 50 fresh ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from dfca.base.errors import ConfigError
from dfca.cli import app
from dfca.faults.node.run import NodeRun, check_node_world, identity, shrink_node_world
from dfca.faults.node.world import NodeCrash, NodeWorld, Pairing, draw_node_world, read_node_world
from dfca.faults.world import Cut, describe
from dfca.node.disk.store import DiskStore
from dfca.node.memory import VirtualTimeLoop
from dfca.node.net.links.link import LinkDown, NetLink
from dfca.node.net.transfer.puller import Puller
from dfca.node.net.transport import GrpcTransport
from dfca.node.trust.handshake import Transcript


def carry_out(world: NodeWorld) -> NodeRun:
    run, loop = NodeRun(world), VirtualTimeLoop()
    loop.run_until_complete(run.run())
    loop.close()
    return run


@pytest.mark.parametrize("number", range(4))
def test_nodes_are_safe_and_recover(number: int) -> None:
    world = draw_node_world(number, seed=27)
    assert check_node_world(world) is None, describe(world)


@pytest.mark.parametrize(
    "line",
    [
        # A write of a partial model failed after its reader had been cancelled: an exception that nobody took.
        "NodeWorld(7, nodes=6, algorithm='dfca-gi', clusters=1, aggregation='batch', rounds=30, degree=3, "
        "delay_s=0.05, chunk_bytes=16, slow=((5, 1.0), (0, 1.0)), twice=0.2, full=0.05, broken=0.05)",
        # Messages that are seconds late now and then were taken for dead neighbours, over and over.
        "NodeWorld(43, nodes=4, clusters=2, aggregation='batch', delay_s=0.2, spread=1.0, chunk_bytes=5)",
        # The inviter's disk refused the roster with the paired device, and it was killed: nobody knew the device.
        "NodeWorld(8, nodes=2, crashes=(NodeCrash(0, 4.8, 0.5, 'kill'), NodeCrash(0, 6.3, 0.5, 'kill'), "
        "NodeCrash(0, 7.8, 0.5, 'kill')), full=0.3, pairings=(Pairing(1, 2.0),))",
        # Reading a model took longer than a round: each was replaced before the only neighbour had read it.
        "NodeWorld(4, nodes=2, groups=1, delay_s=0.2, pairings=(Pairing(node=1, at_s=20.57, by=0, wrong=6),))",
        # The same with several neighbours, of which only the slowest was slower than a round.
        "NodeWorld(1, nodes=4, groups=1, far=((2, 0.4),))",
    ],
)
def test_worlds_that_failed_once(line: str) -> None:
    assert check_node_world(read_node_world(line)) is None


def test_two_of_ten_that_read_no_models_cost_the_others_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, announce = {identity(node).id for node in (8, 9)}, Puller.announce

    def ignore(self: Puller, link: NetLink, announced: Any) -> None:
        if self._local.identity.id not in silent:
            announce(self, link, announced)

    monkeypatch.setattr(Puller, "announce", ignore)

    async def rounds() -> list[int]:
        run = NodeRun(NodeWorld(1, nodes=10, algorithm="dfca-gi", clusters=2))
        run.found()
        run._plan()
        await asyncio.sleep(15.0)
        before = run._rounds()
        await asyncio.sleep(12.0)
        after = run._rounds()
        await run._end()
        assert run.problem is None
        return [after[node] - before[node] for node in range(8)]

    loop = VirtualTimeLoop()
    done = loop.run_until_complete(rounds())
    loop.close()
    assert min(done) >= 39  # a round takes 0.3 s


def test_a_network_that_stalls_now_and_then_keeps_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    silent: Counter[tuple[str, str]] = Counter()
    down = GrpcTransport._down

    def count(self: GrpcTransport, link: NetLink, why: LinkDown) -> None:
        silent[self._identity.id, link.member] += why.reason == "silent"
        down(self, link, why)

    monkeypatch.setattr(GrpcTransport, "_down", count)
    assert check_node_world(NodeWorld(2, nodes=2, rounds=200, delay_s=0.2, spread=1.0)) is None
    assert max(silent.values()) == 1  # the next silence that long is allowed: each end learns from its own, once


PAIRED = NodeWorld(
    5,
    nodes=4,
    delay_s=0.05,
    spread=1.0,
    cuts=(Cut(5.0, 12.0, (3,)),),
    twice=0.5,
    walled=(3,),
    pairings=(Pairing(2, 4.0, 1, wrong=6), Pairing(3, 4.0)),
)


def test_devices_are_paired_over_the_network_and_wrong_secrets_burn_invites() -> None:
    run = carry_out(PAIRED)
    assert run.problem is None
    refused = run.devices[1].life.service._pairing.refused  # type: ignore[union-attr]
    assert refused["wrong secret"] >= 5
    assert refused["burnt"] == 1
    assert {identity(2).number, identity(3).number} <= {sender for sender, _ in run.folded}


@pytest.mark.parametrize(
    ("name", "wrong", "problem"),
    [
        ("proof", lambda *_: bytes(32), "node 2 joins with a wrong secret"),
        ("code", lambda self: str(id(self)), "node 0 does not show the code of node 2"),
    ],
)
def test_pairing_that_is_broken_is_noticed(
    name: str, wrong: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transcript, name, wrong)
    assert problem in str(carry_out(NodeWorld(1, pairings=(Pairing(2, 1.0, wrong=1),))).problem)


def test_slow_links_and_long_rounds_give_more_time_to_recover() -> None:
    # World 2 of these needs 360 s: a model takes 10 s per link, and an election crosses all of the ring in each turn.
    slow = NodeWorld(2, nodes=8, clusters=2, groups=1, degree=2, delay_s=0.2, spread=1.0, chunk_bytes=5)
    assert 900 < NodeRun(slow)._recovery_s() < 1000
    assert 380 < NodeRun(replace(slow, chunk_bytes=1 << 16))._recovery_s() < 390
    assert NodeRun(NodeWorld(2))._recovery_s() < 302
    assert NodeRun(NodeWorld(2, rounds=30, aggregation="batch", slow=((0, 3.0),)))._recovery_s() > 540


def test_a_line_makes_the_same_world_again() -> None:
    for number in range(50):
        world = draw_node_world(number)
        assert read_node_world(describe(world)) == world


def test_a_world_is_the_same_in_every_run() -> None:
    def rounds() -> list[tuple[int, int, int]]:
        run = carry_out(
            NodeWorld(5, nodes=3, spread=0.5, crashes=(NodeCrash(1, 9.0, 3.0),), pairings=(Pairing(2, 2.0),))
        )
        assert run.problem is None
        return [(machine.durable, machine.incarnation, len(machine.disk.files)) for machine in run.devices]

    assert rounds() == rounds()


def test_a_store_that_forgets_is_noticed_and_the_world_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    load = DiskStore.load

    def forget(self: Any) -> Any:
        load(self)

    monkeypatch.setattr(DiskStore, "load", forget)
    crash = NodeCrash(1, 20.0, 1.0, "kill")
    world = NodeWorld(3, nodes=3, spread=0.5, slow=((0, 1.0),), crashes=(crash,), resets=((0, 1, 3.0),))
    assert "node 1 restores round -1" in str(check_node_world(world))
    assert shrink_node_world(world, 20.0) == NodeWorld(3, nodes=2, crashes=(crash,))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("NodeWorld(", "a world must be a line such as NodeWorld(7, nodes=3)"),
        ("NodeWorld(1, planets=3)", "a world must be a line such as NodeWorld(7, nodes=3)"),
        ("NodeWorld(1, nodes=0)", "nodes must be >= 1 and <= 1000, got 0"),
        ("NodeWorld(1, slow=(1,))", "slow[0] must be a list, got 1"),
        ("NodeWorld(1, chunk_bytes=0)", "chunk_bytes must be >= 1, got 0"),
        ("NodeWorld(1, crashes=(NodeCrash(5, 1.0, 1.0),))", "has the nodes 0 to 2, got 5"),
        ("NodeWorld(1, crashes=(NodeCrash(1, 1.0, 1.0, 'fire'),))", "end of a node"),
        ("NodeWorld(1, removed=((0, 1.0),))", "node 0 founds the swarm"),
        ("NodeWorld(1, pairings=(Pairing(0, 1.0, 1),))", "node 0 founds the swarm"),
        ("NodeWorld(1, pairings=(Pairing(1, 1.0, 3),))", "has the nodes 0 to 2, got 3"),
        ("NodeWorld(1, late=((1, 2.0),), pairings=(Pairing(1, 1.0),))", "a node joins once"),
        ("NodeWorld(1, removed=((1, 2.0),), pairings=(Pairing(1, 1.0),))", "one that is paired is not removed"),
        ("NodeWorld(1, walled=(1,), pairings=(Pairing(2, 1.0, 1),))", "a node that invites is there all the time"),
        ("__import__('os').getcwd()", "no part of a world"),
    ],
)
def test_a_line_that_is_no_world_is_a_sentence(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_node_world(line)
    assert sentence in str(error.value)


def test_the_command_runs_worlds_of_nodes_and_refuses_other_layers() -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["faults", "--layer", "node", "--world", "NodeWorld(1, nodes=2)"])
    assert result.exit_code == 0
    assert "1 world, none failed" in result.output
    for arguments in (["--layer", "cake"], ["--layer", "node", "--harsh"]):
        result = runner.invoke(app, ["faults", *arguments])
        assert result.exit_code == 2
        assert "layer" in result.output
