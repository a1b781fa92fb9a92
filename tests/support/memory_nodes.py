"""Nodes in one process, linked by the memory transport."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dfca.node.memory import MemoryNetwork, VirtualTimeLoop
from dfca.node.node import Node
from dfca.node.task.config import NodeConfig
from dfca.node.task.dataset import DeviceSamples, load
from dfca.node.task.facts import Facts
from dfca.node.task.founding import JoinPlan, join_swarm
from dfca.node.task.learner import Architecture, HeldOutScore, build, evaluate
from dfca.node.work.worker import Worker
from dfca.peer.machine import Machine, Memory
from dfca.peer.peer import Peer
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import (
    Curve,
    Job,
    Observe,
    Personalise,
    WarmUp,
)
from dfca.peer.server import Server, ServerClient
from dfca.peer.state import Saved
from dfca.sim.events.host import peer_options
from dfca.sim.events.pool import ClientPool
from dfca.sim.events.simulation import neighbours_of
from dfca.sim.events.world import SERVER
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.testing import make_clients


class MemoryStore:
    """Keeps the last save."""

    def __init__(self) -> None:
        self.saved: Saved | None = None

    def save(self, saved: Saved) -> None:
        self.saved = saved


def options_of(setting: Setting) -> list[PeerOptions]:
    return peer_options(setting, ClientPool(setting, dry=False), neighbours_of(setting), rounds=setting.rounds)


def make_nodes(setting: Setting, network: MemoryNetwork, timed: bool = True) -> dict[int, Node]:
    """Make a node for every client of a setting, and for the server where there is one."""
    algorithm, clients = setting.algorithm, make_clients(setting)
    nodes = {}
    for options in options_of(setting):
        i = options.id
        worker = Worker(clients[max(0, i)])

        def duration(job: Job) -> float:
            if isinstance(job, Observe | Curve) or (isinstance(job, WarmUp) and job.stage is not None):
                return 0.0  # beside the rounds: it is there in time
            if isinstance(job, Personalise):
                return float(job.steps)
            steps = algorithm.election.warmup_steps if isinstance(job, WarmUp) else setting.local.steps
            return float(steps)

        memory = Memory(options.size, options.dtype)
        kind: type[Machine] = Peer
        if algorithm.exchange == "server":
            kind = Server if i == SERVER else ServerClient
        machine = kind(options, memory)
        nodes[i] = Node(machine, worker, network.transport(i), MemoryStore(), duration if timed else None)
    return nodes


def run_devices(facts: Facts, samples: Sequence[DeviceSamples], model: Architecture) -> dict[int, Node]:
    """Run a node for each device's samples, all linked with all, a second a job, until their rounds are done."""
    devices = range(len(samples))
    network = MemoryNetwork((i, j) for i in devices for j in range(i))
    nodes = {}
    for i in devices:
        options = facts.peer_options(i, [j for j in devices if j != i])
        peer = Peer(options, lambda rows: torch.zeros(rows, facts.model_size))
        worker = Worker(facts.client(i, 3, samples[i].train, model))
        nodes[i] = Node(peer, worker, network.transport(i), duration=lambda job: 1.0)
    run_all(nodes, VirtualTimeLoop())
    return nodes


def end_in_two_clusters(
    folder: Path, paths: Sequence[str], founder: NodeConfig, facts: Facts
) -> list[tuple[str, NodeConfig, HeldOutScore, Tensor]]:
    """Let four devices join and run: 0 and 2 must end in one cluster, 1 and 3 in the other.

    Returns of each the path of its data, its config, how its own model does, and that model.
    """
    configs = [founder, *(join_swarm(folder / f"n{i}", facts, JoinPlan(paths[i])) for i in range(1, 4))]
    model, samples = build(facts), [load(config, folder, facts) for config in configs]
    clusters, ends = [], []
    for i, node in run_devices(facts, samples, model).items():
        bank = node.machine.bank
        assert bank is not None
        report = evaluate(model, bank, samples[i].train, samples[i].held_out)
        clusters.append(report.cluster)
        assert report.own is not None
        assert report.own.accuracy is None
        ends.append((paths[i], configs[i], report.own, bank[report.cluster]))
    assert clusters[0] == clusters[2] != clusters[1] == clusters[3]
    return ends


def network_of(setting: Setting) -> MemoryNetwork:
    if setting.algorithm.exchange == "server":
        return MemoryNetwork((SERVER, i) for i in range(setting.clients))
    return MemoryNetwork(setting.graph.edges if setting.algorithm.exchange == "gossip" else ())


def run_all(nodes: dict[int, Node], loop: asyncio.AbstractEventLoop) -> None:
    async def everybody() -> None:
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes.values())), 10_000)
        for node in nodes.values():
            node.stop()

    try:
        loop.run_until_complete(everybody())
    finally:
        loop.close()


def assert_banks(setting: Setting, nodes: dict[int, Node]) -> None:
    simulation = Simulation(setting)
    for _ in range(setting.rounds):
        simulation.step()
    for i, node in nodes.items():
        bank = node.machine.bank
        assert bank is not None
        if setting.algorithm.exchange == "server":
            torch.testing.assert_close(bank, simulation.banks[:, 0], rtol=1e-9, atol=1e-11)
        else:
            torch.testing.assert_close(bank, simulation.banks[: len(bank), i], rtol=1e-9, atol=1e-11)
            assert node.machine.assignment == simulation.assignments[i]
