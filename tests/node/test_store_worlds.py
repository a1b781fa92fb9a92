"""The store of a node on a simulated disk: random faults by seed; a failing seed is a test."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from saved_peers import make_saved

from dfca.faults.disk import FaultyDisk, PowerCut
from dfca.node.disk.save_file import Damaged, save_paths
from dfca.node.disk.saving import SaveThenSend
from dfca.node.disk.store import CannotSave, DiskStore, read_save
from dfca.peer.records.messages import Hello

FOLDER = Path("/node/state")
LIVES, ROUNDS = 12, 8


def round_of(store: DiskStore) -> int:
    saved = store.load()
    return 0 if saved is None else saved.round


def generations(disk: FaultyDisk) -> tuple[int, int]:
    """Return the rounds of the two saves, 0 for one that is missing or damaged; the newest last."""
    rounds = [0, 0]
    for path in save_paths(FOLDER):
        with suppress(Damaged, FileNotFoundError):
            rounds.append(read_save(path, disk)[1].round)
    return tuple(sorted(rounds)[-2:])  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(60))
def test_after_any_power_cut_the_last_save_or_the_one_under_way_is_loaded(seed: int) -> None:
    random = Random(seed)
    disk = FaultyDisk(random, full=0.1, broken=0.1, cut=0.3)
    durable, tried, lives = 0, 0, [-1]
    for _ in range(LIVES):
        store = DiskStore(FOLDER, disk=disk)
        store.clean()
        assert not any(name.endswith(".tmp") for name in disk.names(FOLDER))
        assert durable <= round_of(store) <= tried
        assert store.warnings == []
        durable = tried = round_of(store)
        try:
            lives.append(store.next_life(store.load()))
            assert lives[-1] > lives[-2]
            for _ in range(ROUNDS):
                tried += 1
                try:
                    store.save(make_saved(tried))
                    durable = tried
                except CannotSave:
                    assert durable <= round_of(DiskStore(FOLDER, disk=disk)) < tried
        except CannotSave:
            lives.append(lives[-1])
        except PowerCut:
            disk.restart()


@pytest.mark.parametrize("seed", range(60))
def test_a_disk_that_lies_costs_one_save_at_most(seed: int) -> None:
    random = Random(seed)
    disk = FaultyDisk(random, full=0.1, cut=0.3, torn=0.5)
    least, tried = 0, 0
    for _ in range(LIVES):
        store = DiskStore(FOLDER, disk=disk)
        assert least <= round_of(store) <= tried
        before, durable = generations(disk)
        tried = durable
        try:
            for _ in range(ROUNDS):
                tried += 1
                try:
                    store.save(make_saved(tried))
                    before, durable = durable, tried
                except CannotSave:
                    assert round_of(DiskStore(FOLDER, disk=disk)) == durable
            least = durable
        except PowerCut:
            least = durable if disk.restart() is None else before


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_sent_that_a_power_cut_could_undo(seed: int) -> None:
    random = Random(seed)
    disk = FaultyDisk(random, full=0.2, broken=0.2, cut=0.2)
    sent: list[int] = []

    def send(neighbour: int, message: Any) -> None:
        sent.append(message.round)

    for _ in range(LIVES):
        store = DiskStore(FOLDER, disk=disk)
        first = round_of(store)
        assert all(round <= first for round in sent)
        assert sent == sorted(sent)
        saving = SaveThenSend(store, send, executor=None)
        state = first
        try:
            for round in range(first + 1, first + ROUNDS):
                state = round if random.random() < 0.7 else state  # else a message that needs no save of its own
                saving.put(make_saved(round) if state == round else None, [(1, Hello(0, state, 0))])
                assert saving.problem is None or sent[-1:] != [state]
        except PowerCut:
            disk.restart()
