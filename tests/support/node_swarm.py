"""Small swarms of real nodes for tests: folders as pairing makes them, and a transport in memory for whole services."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dfca.node.disk import folder as folders
from dfca.node.disk.folder import NodeFolder
from dfca.node.memory import MemoryNetwork
from dfca.node.operate.commands import init_node
from dfca.node.service import Service, ServiceOptions
from dfca.node.task.founding import Founding, JoinPlan, join_swarm
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster


def write_samples(path: Path, cluster: int, seed: int, samples: int = 120) -> str:
    """Write samples of one of two distributions: the second has the labels of the first swapped."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, 3))
    first = (x[:, 0] + 0.5 * x[:, 1] > 0) == (cluster == 0)
    rows = [
        ",".join([*(f"{value:.4f}" for value in row), "walk" if w else "rest"]) for row, w in zip(x, first, strict=True)
    ]
    path.write_text("\n".join(["a,b,c,activity", *rows]) + "\n")
    return str(path)


def make_swarm(
    folder: Path,
    clusters: Iterable[int],
    port: int = 0,
    agreed: dict[str, Any] | None = None,
    trusted: dict[str, str] | None = None,
) -> list[NodeFolder]:
    """Make the folders of a swarm, the first its founder; ports count up from `port`; trusted: code that all allow."""
    # Clusters that are merged on the way are not what these tests are about.
    agreed = {"local": {"steps": 5}, "election": {"warmup_steps": 20}, "merging": None} | (agreed or {})
    made: list[NodeFolder] = []
    for i, cluster in enumerate(clusters):
        path, data = folder / f"node{i}", write_samples(folder / f"{i}.csv", cluster, seed=i)
        network = {"host": "127.0.0.1", "port": port and port + i, "invite_port": 0}
        training = {"pause_s": 0.0, "reread_s": 0.0} | (trusted or {})
        settings = {"network": network, "training": training, "log": {"level": "debug"}}
        if not made:
            init_node(path, Founding(data, "activity", settings=settings, hidden=(8,), agreed=agreed))
        else:
            first = NodeFolder.load(made[0].path)
            folders.prepare(path)
            identity = Identity.create(path)
            addresses = [f"127.0.0.1:{port + i}"] if port else []
            first.roster.introduce(first.identity, identity.certificate, path.name, addresses)
            first.save_roster()
            config = join_swarm(path, first.facts, JoinPlan(data, settings=settings))
            folders.write(path, config, first.facts, first.roster)
        made.append(NodeFolder.load(path))
    members = NodeFolder.load(made[0].path).roster.records()
    for device in made:
        device.roster.merge(members)
        device.save_roster()
    return [NodeFolder.load(device.path) for device in made]


class MemoryServiceTransport:
    """A node's place in a network in memory, as a service wants it: everybody is everybody's neighbour."""

    def __init__(self, network: MemoryNetwork, roster: Roster, own: str) -> None:
        self._roster, self._own = roster, own
        numbers = {member.number for member in roster.members().values()}
        network.edges |= {frozenset((a, b)) for a in numbers for b in numbers if a != b}
        number = next(member.number for member in roster.members().values() if member.id == own)
        self._inner = network.transport(number)
        self.on_neighbours: Callable[[tuple[int, ...]], None] = lambda numbers: None
        self.open, self.send = self._inner.open, self._inner.send
        self.when_quiet, self.close = self._inner.when_quiet, self._inner.close

    async def start(self) -> str:
        return "127.0.0.1:7447"

    async def stop(self) -> None:
        return

    def status(self) -> dict[str, Any]:
        others = [id for id in self._roster.members() if id != self._own]
        links = {id: {"state": "up", "bytes_in": 5} for id in others}
        traffic = {"bytes_in": 5 * len(others), "bytes_out": 0, "silent_s": dict.fromkeys(others, 0.0)}
        return {"refused": {"model": 1}, "neighbours": links, **traffic}


def memory_service(network: MemoryNetwork, folder: NodeFolder, **options: Any) -> Service:
    """Make a service over a network in memory."""
    return Service(
        folder,
        ServiceOptions(log_stream=io.StringIO(), **options),
        lambda service: MemoryServiceTransport(network, service.roster, service.identity.id),  # type: ignore[arg-type, return-value]
    )


async def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "it did not come true in time"
        await asyncio.sleep(0.02)
