"""Real nodes over the network in memory: they compute what the simulators do, and survive what they must."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from memory_nodes import MemoryStore, assert_banks, make_nodes, network_of, options_of, run_all
from merge_worlds import make_world
from torch import Tensor
from toy import make_toy_setting, make_toy_split, quick

from dfca.algorithms import ALGORITHMS
from dfca.core.method import ElectionOptions
from dfca.core.rules.personal import GRID
from dfca.node.memory import MemoryNetwork, VirtualTimeLoop
from dfca.node.node import Node
from dfca.node.work.worker import Worker
from dfca.peer.machine import Memory
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import Entry
from dfca.peer.records.work import (
    Curve,
    Job,
    Losses,
    Note,
    OwnCurve,
    Score,
    Train,
    Trained,
    Warm,
    WarmUp,
)
from dfca.peer.state import VERSION, Saved, State
from dfca.testing import make_clients


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if ALGORITHMS[name]().peers is None])
def test_nodes_in_memory_equal_the_synchronous_simulator(algorithm: str) -> None:
    setting = make_toy_setting(quick(algorithm), rounds=3)
    nodes = make_nodes(setting, network_of(setting))
    run_all(nodes, VirtualTimeLoop())
    assert_banks(setting, nodes)


def test_nodes_in_memory_warm_up_with_momentum_as_the_synchronous_simulator_does() -> None:
    setting = make_toy_setting("dfca-fi", rounds=2)
    election = ElectionOptions(warmup_steps=8, warmup_momentum=0.9)
    setting = replace(setting, algorithm=replace(setting.algorithm, election=election))
    nodes = make_nodes(setting, network_of(setting))
    run_all(nodes, VirtualTimeLoop())
    assert_banks(setting, nodes)


@pytest.mark.parametrize("aggregation", ["batch", pytest.param("sequential", marks=pytest.mark.slow)])
def test_nodes_in_memory_merge_clusters_as_the_synchronous_simulator_does(aggregation: str) -> None:
    setting = make_world(personal_steps=0, dtype=torch.float64, rounds=12, aggregation=aggregation)
    nodes = make_nodes(setting, network_of(setting))
    run_all(nodes, VirtualTimeLoop())
    assert_banks(setting, nodes)
    lineages = {node.machine.lineage for node in nodes.values() if isinstance(node.machine, Peer)}
    ((_, *surveys),) = lineages
    assert any(survey.merges for survey in surveys)
    assert surveys[-1].last


def test_nodes_with_threads_equal_it_too_where_everybody_waits_for_all() -> None:
    setting = make_toy_setting("dfca-gi", rounds=3)
    nodes = make_nodes(setting, network_of(setting), timed=False)
    run_all(nodes, asyncio.new_event_loop())
    assert_banks(setting, nodes)


def test_a_cut_link_heals_and_two_halves_agree() -> None:
    setting = make_toy_setting(
        "dfca-fi", rounds=40, aggregation="sequential", split=make_toy_split(clients=6), graph=nx.path_graph(6)
    )
    network = network_of(setting)
    nodes = make_nodes(setting, network)

    async def cut_and_heal() -> None:
        network.cut(2, 3)
        await asyncio.sleep(70)
        assert len({node.machine.lineage for node in nodes.values()}) == 2  # type: ignore[attr-defined]
        network.heal(2, 3)

    async def everybody() -> None:
        await asyncio.gather(cut_and_heal(), *(node.run() for node in nodes.values()))

    loop = VirtualTimeLoop()
    loop.run_until_complete(everybody())
    loop.close()
    assert len({node.machine.lineage for node in nodes.values()}) == 1  # type: ignore[attr-defined]


def test_a_job_that_fails_ends_its_node_with_its_error() -> None:
    class Broken:
        def run(self, job: Job, bank: Tensor | None) -> Any:
            raise ValueError("no samples")

    setting = make_toy_setting("local", rounds=1)
    options = options_of(setting)[0]
    peer = Peer(options, Memory(options.size, options.dtype))

    async def one() -> None:
        node = Node(peer, Broken(), MemoryNetwork(()).transport(0))
        try:
            await node.run()
        finally:
            node.stop()

    with pytest.raises(ValueError, match="no samples"):
        asyncio.run(one())


def test_a_note_that_cannot_be_taken_ends_its_node_with_the_error() -> None:
    """Nobody awaits the task of a job: an error in what comes after it left the node waiting for ever."""
    setting = make_toy_setting("local", rounds=3)
    options = options_of(setting)[0]
    peer = Peer(options, Memory(options.size, options.dtype))

    def refuse(note: Note) -> None:
        if note.kind == "finish":
            raise KeyError("number")

    async def one() -> None:
        node = Node(peer, Worker(make_clients(setting)[0]), MemoryNetwork(()).transport(0), note=refuse)
        try:
            await asyncio.wait_for(node.run(), 30)
        finally:
            assert isinstance(node.failure, KeyError)
            node.stop()

    with pytest.raises(KeyError, match="number"):
        asyncio.run(one())


def test_a_node_that_was_killed_continues_from_its_store_and_its_old_work_is_lost() -> None:
    setting = make_toy_setting("dfca-gi", rounds=8, aggregation="sequential")
    network = network_of(setting)
    nodes = make_nodes(setting, network)
    killed, rounds = nodes[2], list[int]()

    async def kill_and_restart() -> None:
        await asyncio.sleep(3.5 * setting.local.steps)
        killed.stop()
        saved, options = killed._store.saved, killed.machine.options  # type: ignore[union-attr]
        assert saved is not None
        rounds.extend([saved.round, killed.machine.round])
        peer = Peer(options, Memory(options.size, options.dtype), incarnation=1, saved=saved)
        successor = Node(peer, killed._work, network.transport(2), MemoryStore(), killed._duration)
        await asyncio.sleep(0.25 * setting.local.steps)
        nodes[2] = successor
        await successor.run(late=True)

    async def everybody() -> None:
        await asyncio.gather(kill_and_restart(), *(node.run() for node in list(nodes.values())))

    loop = VirtualTimeLoop()
    loop.run_until_complete(everybody())
    loop.close()
    assert rounds == [3, 3]
    assert killed.machine.round == 3
    assert [node.machine.round for node in nodes.values()] == [8] * 6
    assert not any(node.machine.refused for node in nodes.values())


def test_a_node_without_a_vote_checks_again_after_twice_the_time_whether_the_models_fit() -> None:
    """A model that two kinds of devices pull to and fro fits by chance: looked at once, it was kept for ever."""
    setting = make_toy_setting("dfca-auto", rounds=100, aggregation="sequential")
    options = options_of(setting)[0]
    bank = torch.zeros(1, options.size, dtype=options.dtype)
    saved = Saved(VERSION, options.seed, 0, 0, (Entry(4, 1, 1, 0, 0, (0,)),), bank, voted=False)
    peer = Peer(options, Memory(options.size, options.dtype), 1, saved)
    now, looks, model = 0.0, list[int | None](), bank[0]
    losses = Losses(torch.full((2, 5), 0.1), torch.full((2, 5), 0.1))
    peer.begin(now, late=True)
    while peer.state is not State.DONE and now < 1000:
        now += 1.0
        results = {Train: Trained(0, True, model, 0.1, 5), WarmUp: Warm(model, losses), Score: losses}
        for job in peer.ready().work:
            looks += [job.stage] if isinstance(job, WarmUp) else []
            result = OwnCurve(0, 0, torch.zeros(len(GRID))) if isinstance(job, Curve) else results.get(type(job))
            peer.finished(job, result, now)
        peer.wake(now)
    assert peer.round == 100
    assert looks == [10, 20, 40, 80]
