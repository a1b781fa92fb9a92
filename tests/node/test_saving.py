"""Nothing leaves a node before what it rests on is on the disk; what saves cost; lives are never used twice.

Every test here fails without one line of the source (`tests/mutants`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_peers import make_saved

from dfca.base.files import atomic_write, replacing
from dfca.core.state import Message
from dfca.node.disk.save_file import Damaged
from dfca.node.disk.saving import MOST_HELD, SaveThenSend
from dfca.node.disk.store import CannotSave, DiskStore, _tensors
from dfca.peer.records.messages import Update
from dfca.peer.state import Saved


class ByHand(Executor):
    """Saves when it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, call: Any, /, *args: Any, **_: Any) -> Future[Any]:
        self.calls.append((Future(), call, args))
        return self.calls[-1][0]

    def work(self) -> None:
        future, call, args = self.calls.pop(0)
        try:
            future.set_result(call(*args))
        except CannotSave as error:
            future.set_exception(error)


class Rounds:
    """A store that notes the rounds of what it saved, and may be full."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.full = False

    def save(self, saved: Saved) -> None:
        if self.full:
            raise CannotSave("no space left")
        self.saved.append(saved.round)


def update(round: int, cluster: int) -> Update:
    return Update(Message(0, cluster, round, 1, torch.zeros(2)), 1)


async def turn() -> None:
    """Let everything that is due in the event loop happen."""
    for _ in range(10):
        await asyncio.sleep(0)


def make(executor: Executor | None) -> tuple[SaveThenSend, Rounds, list[Any]]:
    store, sent = Rounds(), list[Any]()
    return SaveThenSend(store, lambda neighbour, message: sent.append((neighbour, message)), executor, 0.0), store, sent


def test_a_message_waits_for_its_own_save_and_not_for_an_older_one() -> None:
    async def scenario() -> None:
        disk = ByHand()
        saving, store, sent = make(disk)
        saving.put(make_saved(1), [(1, "of the first")])
        await turn()
        saving.put(make_saved(2), [(1, "of the second")])
        saving.put(None, [(1, "after it")])
        assert sent == []
        disk.work()
        await turn()
        assert sent == [(1, "of the first")]
        assert not await saving.flush(0.0)
        disk.work()
        await turn()
        assert sent == [(1, "of the first"), (1, "of the second"), (1, "after it")]
        assert store.saved == [1, 2]
        assert await saving.flush(0.0)
        saving.put(None, [(1, "at once")])
        assert sent[-1] == (1, "at once")
        saving.put(make_saved(3), [(1, "of the third")])
        await turn()
        disk.work()
        await turn()
        assert sent[-1] == (1, "of the third")

    asyncio.run(scenario())


def test_a_node_without_a_store_sends_at_once() -> None:
    sent: list[Any] = []
    saving = SaveThenSend(None, lambda neighbour, message: sent.append((neighbour, message)), None)
    saving.put(make_saved(1), [(1, "one")])
    assert sent == [(1, "one")]


def test_of_updates_that_wait_the_newest_of_a_neighbour_and_cluster_stay() -> None:
    saving, store, sent = make(None)
    store.full = True
    saving.put(make_saved(1), [(1, "small")])
    saving.put(None, [(n, update(1, cluster)) for n in (1, 2) for cluster in (0, 1)])
    for round in (2, 3):
        saving.put(None, [(1, update(round, 0))])
    store.full = False
    saving.put(make_saved(2), [])
    kept = [(n, message.message.cluster, message.message.round) for n, message in sent[1:]]
    assert sent[0] == (1, "small")
    assert kept == [(1, 1, 1), (2, 0, 1), (2, 1, 1), (1, 0, 2), (1, 0, 3)]


def test_a_save_that_waits_is_given_up_at_the_end() -> None:
    async def scenario() -> None:
        disk = ByHand()
        saving, _, sent = make(disk)
        saving.put(make_saved(1), [(1, "one")])
        await turn()
        saving.close()
        await turn()
        assert disk.calls[0][0].cancelled()
        assert sent == []

    asyncio.run(scenario())


def test_a_save_that_failed_is_made_again_and_a_newer_one_takes_its_place() -> None:
    async def scenario() -> None:
        disk = ByHand()
        saving, store, sent = make(disk)
        store.full = True
        saving.put(make_saved(1), [(1, "one")])
        await turn()
        disk.work()
        await turn()
        assert saving.problem == "no space left"
        store.full = False
        saving.put(make_saved(2), [(1, "two")])
        while disk.calls:
            disk.work()
            await turn()
        assert saving.problem is None
        assert store.saved[-1] == 2
        assert sent == [(1, "one"), (1, "two")]

    asyncio.run(scenario())


def test_in_virtual_time_a_save_is_made_in_the_call() -> None:
    saving, store, sent = make(None)
    saving.put(make_saved(1), [(1, "one")])
    assert (store.saved, sent) == ([1], [(1, "one")])
    store.full = True
    saving.put(make_saved(2), [(1, "two"), (2, "two")])
    assert (saving.problem, len(sent)) == ("no space left", 1)
    saving.forget(2)
    store.full = False
    saving.put(make_saved(3), [])
    assert (saving.problem, sent) == (None, [(1, "one"), (1, "two")])


def test_messages_that_wait_for_a_full_disk_are_bounded_and_dropped_at_the_end() -> None:
    saving, store, sent = make(None)
    store.full = True
    saving.put(make_saved(1), [(1, number) for number in range(MOST_HELD + 3)])
    assert saving.lost == 3
    saving.close()
    store.full = False
    saving.put(make_saved(2), [])
    assert sent == []


def test_a_file_is_flushed_before_it_takes_its_place_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, move = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_move(old: Any, new: Any) -> None:
        done.append("move")
        move(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_move)
    with replacing(tmp_path / "save") as file:
        file.write(b"models")
    assert done == ["file", "move", "folder"]
    done.clear()
    atomic_write(tmp_path / "summary.json", "{}")
    assert done == ["file", "move", "folder"]


def test_saves_are_counted_with_what_they_cost(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "deep" / "folder")
    begin = time.perf_counter()
    for round in (1, 2, 3):
        store.save(make_saved(round))
    assert 0 < store.seconds < time.perf_counter() - begin
    sizes = [path.stat().st_size for path in sorted(store.folder.glob("*.safetensors"))]
    assert store.saves == 3
    assert sum(sizes) < store.written_bytes <= 2 * sum(sizes)


def test_a_life_is_one_more_than_any_before(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "deep" / "folder")
    assert [store.next_life(None), store.next_life(None)] == [0, 1]
    assert store.next_life(make_saved()) == 3  # the save is of life 2
    assert DiskStore(tmp_path / "other").next_life(make_saved()) == 3


def test_a_life_after_lost_files_is_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    damaged = DiskStore(tmp_path, ["peer.1.safetensors is passed over"])
    assert damaged.next_life(make_saved()) == 3  # one save is whole
    (tmp_path / "life.json").unlink()
    assert damaged.next_life(None) == 5001
    (tmp_path / "life.json").write_text("{")
    again = DiskStore(tmp_path)
    assert again.next_life(None) == 5001
    assert again.warnings == ["life.json is passed over: it is not readable"]


def test_temporary_files_of_a_killed_process_are_removed_and_a_folder_in_the_way_is_moved_aside(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.save(make_saved())
    (tmp_path / ".peer.0.safetensors.77.tmp").write_text("half")
    for name in (".hidden", "notes.tmp"):
        (tmp_path / name).write_text("not ours")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "peer.0.safetensors").symlink_to(tmp_path / "elsewhere")
    store.clean()
    names = [".hidden", "elsewhere", "notes.tmp", "peer.0.safetensors", "peer.1.safetensors"]
    assert (sorted(path.name for path in tmp_path.iterdir()), store.warnings) == (names, [])
    (tmp_path / "peer.0.safetensors").unlink()
    (tmp_path / "peer.0.safetensors").mkdir()
    store.clean()
    (aside,) = tmp_path.glob("peer.0.*")
    assert store.warnings == [f"peer.0.safetensors was a folder and is {aside.name} now"]
    store.save(make_saved(4))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_a_file_that_is_shorter_or_longer_than_its_models_is_damaged() -> None:
    form = {"bank": ["F32", [2, 1]], "own": None}
    assert _tensors(bytearray(12), 4, form)["bank"].shape == (2, 1)
    for size in (8, 11, 13):
        with pytest.raises(Damaged, match="its size is not that of its models"):
            _tensors(bytearray(size), 4, form)


def test_a_save_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, reason in (
        (OSError(errno.EACCES, "Permission denied"), ": Permission denied;"),
        (OSError("odd"), ": odd;"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", _raising(error))
            with pytest.raises(CannotSave, match=reason):
                DiskStore(tmp_path).save(make_saved())


def _raising(error: OSError) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail
