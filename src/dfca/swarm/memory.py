"""The nodes of a swarm as tasks of this process, linked by the memory transport: same peers, workers and stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from dfca.node.disk.store import DiskStore
from dfca.node.memory import MemoryNetwork
from dfca.node.node import Node
from dfca.node.run import WORK_THREADS
from dfca.node.task.learner import build, trusted_codec
from dfca.node.work.worker import Worker
from dfca.peer.machine import Memory
from dfca.peer.peer import Peer
from dfca.swarm.plan import NodeStatus, SwarmPlan

STOP_S = 10.0
NOBODY = "a" * 52  # the founder of a swarm without devices


class MemoryFleet:
    """Nodes as tasks: client i is peer i."""

    def __init__(self, plan: SwarmPlan) -> None:
        self.plan = plan
        self._facts = plan.facts(NOBODY)
        self._model = build(self._facts, self._facts.model.factory)
        self._network = MemoryNetwork(plan.setting.graph.edges)
        self._nodes: dict[int, Node] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._lives = [0] * plan.setting.clients
        self._healing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for i in range(self.plan.setting.clients):
            self._start(i)

    async def status(self) -> list[NodeStatus]:
        """Return the status of every node. Raises what a job of one has raised."""
        for task in self._tasks.values():
            if task.done():
                task.result()
        return [self._status(i) for i in sorted(self._nodes)]

    def _status(self, client: int) -> NodeStatus:
        peer = self._nodes[client].machine
        return NodeStatus(
            state=peer.state.value,
            round=peer.round,
            clusters=0 if peer.bank is None else len(peer.bank),
            cluster=peer.assignment,
            links=len(peer.links),
            refused=sum(peer.refused.values()),
            lives=self._lives[client],
        )

    async def kill(self, client: int) -> None:
        """End a node without a last save, and start it again from its disk."""
        self._nodes[client].stop()
        self._tasks[client].cancel()
        self._start(client)

    async def cut(self, links: Sequence[tuple[int, int]], seconds: float) -> None:
        for one, other in links:
            self._network.cut(one, other)

        async def heal() -> None:
            await asyncio.sleep(seconds)
            for one, other in links:
                self._network.heal(one, other)

        task = asyncio.create_task(heal())
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def stop(self) -> None:
        for task in self._healing:
            task.cancel()
        for node in self._nodes.values():
            await node.finish(10.0)
        for thread in threading.enumerate():
            if thread.name in WORK_THREADS:  # it may be inside torch, which must not see a dying interpreter
                await asyncio.to_thread(thread.join, STOP_S)

    def _start(self, client: int) -> None:
        setting = self.plan.setting
        store = DiskStore(self.plan.folder(client) / "state")
        saved = store.load()
        neighbours = tuple(sorted(setting.graph.neighbors(client)))
        samples = setting.split.train.of(client)
        worker = Worker(self._facts.client(client, len(neighbours), samples, self._model))
        codec = trusted_codec(self._facts, self._facts.codec)
        options = self._facts.peer_options(client, neighbours, codec, worker.layout)
        peer = Peer(options, Memory(options.size, options.dtype), store.next_life(saved), saved)
        node = Node(peer, worker, self._network.transport(client), store)
        self._nodes[client] = node
        self._tasks[client] = asyncio.get_running_loop().create_task(node.run())
        self._lives[client] += 1
