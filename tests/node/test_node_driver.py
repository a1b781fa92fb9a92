"""The driver of a node: what is recorded can be replayed, work can be paused and abandoned, data may change."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from memory_nodes import MemoryStore, make_nodes, network_of, options_of
from toy import make_toy_setting, make_toy_split

from dfca.base.errors import ConfigError, DataError
from dfca.node.disk.record import Recorder, digest_of_save, first_difference, read_recording
from dfca.node.disk.store import CannotSave, DiskStore
from dfca.node.memory import MemoryNetwork, VirtualTimeLoop
from dfca.node.node import Node
from dfca.node.surroundings import OneThread
from dfca.node.work.local_work import LocalWork, WorkSamples
from dfca.node.work.pace import Pace
from dfca.node.work.worker import Worker
from dfca.peer.machine import Memory, drive
from dfca.peer.peer import Peer
from dfca.peer.records.work import Job, Note, Train
from dfca.peer.state import Saved
from dfca.testing import make_clients


def test_a_recorded_node_replays_bit_by_bit(tmp_path: Path) -> None:
    setting = make_toy_setting(
        "dfca-fi", rounds=6, aggregation="sequential", split=make_toy_split(clients=4), graph=nx.path_graph(4)
    )
    network = network_of(setting)
    nodes = make_nodes(setting, network)
    chosen = nodes[1]
    chosen.record = recorder = Recorder(tmp_path / "record", chosen.machine, None)

    async def everybody() -> None:
        async def cut() -> None:
            await asyncio.sleep(100)
            network.cut(1, 2)
            await asyncio.sleep(10)
            network.heal(1, 2)

        await asyncio.gather(cut(), *(node.run() for node in nodes.values()))
        for node in nodes.values():
            node.stop()

    loop = VirtualTimeLoop()
    loop.run_until_complete(everybody())
    loop.close()
    recorder.close()
    recording = read_recording(tmp_path / "record")
    assert recording.complete
    assert recording.options == chosen.machine.options
    peer = Peer(recording.options, Memory(recording.options.size, recording.options.dtype))
    list(drive(peer, recording.inputs))
    assert isinstance(chosen.machine, Peer)
    assert digest_of_save(peer.save()) == digest_of_save(chosen.machine.save())
    assert len(recording.checks) >= 6
    fresh = Peer(recording.options, Memory(recording.options.size, recording.options.dtype))
    assert first_difference(recording, fresh) is None


def test_a_recording_ends_at_its_limit_and_one_that_is_cut_is_read_up_to_there(tmp_path: Path) -> None:
    options = options_of(make_toy_setting("local", rounds=1))[0]
    peer = Peer(options, Memory(options.size, options.dtype))
    recorder = Recorder(tmp_path / "record", peer, None, most_bytes=2000)
    for number in range(1000):
        recorder.input(float(number), "wake")
    recorder.close()
    data = (tmp_path / "record").read_bytes()
    assert len(data) <= 2000
    recording = read_recording(tmp_path / "record")
    assert 0 < len(recording.inputs) < 1000
    assert not recording.complete
    (tmp_path / "cut").write_bytes(data[:-3])
    assert len(read_recording(tmp_path / "cut").inputs) == len(recording.inputs) - 1
    (tmp_path / "none").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="is not a recording of a node"):
        read_recording(tmp_path / "none")


class Scripted:
    """Work that takes as long as the test wants."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.trains: list[int] = []
        self.free = threading.Event()

    def run(self, job: Job, bank: torch.Tensor | None) -> Any:
        if isinstance(job, Train):
            self.trains.append(job.round)
            if job.round == 2:
                self.free.wait(30)
        return self._worker.run(job, bank)


def make_alone(store: Any, rounds: int = 5, pace: Pace | None = None) -> tuple[Node, Scripted]:
    setting = make_toy_setting("local", rounds=rounds)
    options = options_of(setting)[0]
    work = Scripted(Worker(make_clients(setting)[0]))
    peer = Peer(options, Memory(options.size, options.dtype))
    return Node(peer, work, MemoryNetwork(()).transport(0), store, pace=pace), work


async def seconds_of(node: Node) -> float:
    """Run a node to the end; returns how long it took."""
    begin = time.monotonic()
    await node.run()
    node.stop()
    return time.monotonic() - begin


def test_a_round_in_progress_is_abandoned_at_the_end_and_what_was_done_is_on_the_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        node, work = make_alone(DiskStore(tmp_path))
        running = asyncio.create_task(node.run())
        while 2 not in work.trains:
            await asyncio.sleep(0.005)
        assert await node.finish(5)
        await running
        work.free.set()

    asyncio.run(scenario())
    saved = DiskStore(tmp_path).load()
    assert saved is not None
    assert saved.round == 2


def test_a_full_disk_stops_neither_training_nor_the_node() -> None:
    class Full(MemoryStore):
        def save(self, saved: Saved) -> None:
            raise CannotSave("no space left")

    async def scenario() -> None:
        node, work = make_alone(Full(), pace=Pace(retry_s=0.01))
        work.free.set()
        await node.run()
        assert node.machine.round == 5
        while node.saving.problem is None:
            await asyncio.sleep(0.01)
        assert node.saving.problem == "no space left"
        assert not await node.finish(0.05)

    asyncio.run(scenario())


def test_a_node_pauses_between_rounds() -> None:
    async def scenario() -> float:
        node, work = make_alone(None, rounds=3, pace=Pace(pause_s=0.05))
        work.free.set()
        return await seconds_of(node)

    assert asyncio.run(scenario()) >= 0.15


def test_a_node_hears_that_the_graph_has_changed() -> None:
    setting = make_toy_setting("dfca-gi", rounds=4, aggregation="sequential")
    network = MemoryNetwork([(0, 1)])
    nodes = make_nodes(setting, network)
    notes = list[Note]()

    async def scenario() -> None:
        pair = [nodes[0], nodes[1]]
        for i, node in enumerate(pair):
            node.machine = Peer(
                replace(node.machine.options, neighbours=()), Memory(node.machine.options.size, torch.float64)
            )
            node._note = notes.append
            node.rewire((1 - i,))
        await asyncio.gather(*(node.run() for node in pair))

    loop = VirtualTimeLoop()
    loop.run_until_complete(scenario())
    loop.close()
    assert any(note.kind == "fold" and note.other == 1 for note in notes)


def test_data_is_read_again_between_rounds_and_bad_data_is_not_taken() -> None:
    setting = make_toy_setting("local", rounds=1)
    clients = make_clients(setting)
    news: list[Any] = [
        None,
        WorkSamples(clients[1], 3, lambda bank: ("second", len(bank))),
        DataError("no label"),
        None,
    ]

    def refresh() -> WorkSamples | None:
        newer = news.pop(0)
        if isinstance(newer, Exception):
            raise newer
        return newer

    times = iter([0.0, 0.0, 1.0, 5.0, 20.0, 20.0, 21.0, 22.0])
    work = LocalWork(WorkSamples(clients[0], 3, lambda bank: ("first", len(bank))), refresh, lambda: next(times))
    bank = clients[0].start().bank
    first = work.run(Train(0), bank)
    assert work.report == ("first", len(bank))
    second = work.run(Train(0), bank)  # the time for scores has not come again
    assert work.report == ("first", len(bank))
    assert not torch.equal(first.model, second.model)
    third = work.run(Train(0), bank)
    assert work.report == ("second", len(bank))
    assert work.problem is not None
    assert "cannot be used: no label; the node continues with its earlier data" in work.problem
    assert torch.equal(second.model, third.model)
    assert work.rereads == 1


def test_one_thread_does_not_wait_at_the_end() -> None:
    thread, gate, ran = OneThread("test"), threading.Event(), list[int]()
    first = thread.submit(gate.wait, 30)
    second = thread.submit(ran.append, 1)
    while not first.running():
        pass
    thread.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    gate.set()
    assert first.result(5) is True
    assert ran == []
