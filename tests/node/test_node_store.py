"""The store of a node: whatever happens to the disk, the next life finds the old state or the new one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from saved_peers import make_saved

from dfca.core.state import Message
from dfca.node.disk import store as store_module
from dfca.node.disk.save_file import digest, last_save, save_paths
from dfca.node.disk.saving import SaveThenSend
from dfca.node.disk.store import CannotSave, DiskStore, _parts, read_save
from dfca.node.surroundings import OneThread
from dfca.peer.records.messages import Hello, Update
from dfca.peer.state import Saved


def same(one: Saved, other: Saved) -> bool:
    assert (one.bank is None) == (other.bank is None)
    assert (one.own is None) == (other.own is None)
    equal = one.bank is None or other.bank is None or torch.equal(one.bank, other.bank)
    equal = equal and (one.own is None or other.own is None or torch.equal(one.own, other.own))
    return equal and replace(one, bank=None, own=None) == replace(other, bank=None, own=None)


def test_everything_comes_back_field_by_field(tmp_path: Path) -> None:
    own = torch.rand(3)
    saves = (make_saved(), replace(make_saved(), bank=None), make_saved(bank=torch.rand(4, 5)))
    for number, saved in enumerate((*saves, replace(saves[0], own=own), replace(saves[1], own=own))):
        store = DiskStore(tmp_path / str(number))
        assert store.load() is None
        store.save(saved)
        again = DiskStore(tmp_path / str(number))
        loaded = again.load()
        assert loaded is not None
        assert same(loaded, saved)
        assert again.warnings == []


def test_a_save_from_before_warmed_up_models_is_read(tmp_path: Path) -> None:
    header, data = (bytes(part) for part in _parts(make_saved(), 4))
    facts = json.loads(json.loads(header[8:])["__metadata__"]["facts"])
    del facts["own"], facts["saved"]["is"]["own"]
    text = json.dumps(facts | {"form": 1})
    old = json.dumps({"__metadata__": {"facts": text, "sha256": digest(text, data)}}).encode()
    (tmp_path / "peer.0.safetensors").write_bytes(len(old).to_bytes(8, "little") + old + data)
    serial, loaded = read_save(tmp_path / "peer.0.safetensors")
    assert serial == 4
    assert same(loaded, make_saved())


def test_the_round_of_the_newest_whole_save_is_read_without_its_models(tmp_path: Path) -> None:
    assert last_save(tmp_path) is None
    store = DiskStore(tmp_path)
    for round in (3, 4, 5):
        store.save(make_saved(round))
    assert (last_save(tmp_path) or {})["round"] == 5
    older, newest = sorted(save_paths(tmp_path), key=lambda path: read_save(path)[0])
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")  # what a start passes over is passed over here
    assert (last_save(tmp_path) or {})["round"] == 4
    for garbage in (b"", b"x" * 100, (40).to_bytes(8, "little") + b"{}" + b" " * 38):
        older.write_bytes(garbage)
        assert last_save(tmp_path) is None
    older.unlink()
    older.symlink_to("/dev/zero")
    assert last_save(tmp_path) is None


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.save(make_saved())
    (path,) = tmp_path.glob("*.safetensors")
    assert torch.equal(load_file(path)["bank"], make_saved().bank)  # type: ignore[arg-type]


def test_saves_go_to_the_two_files_in_turn_also_in_the_next_life(tmp_path: Path) -> None:
    for round in range(1, 6):
        store = DiskStore(tmp_path)
        before = store.load()
        assert before is None or before.round == round - 1
        store.save(make_saved(round))
    assert sorted(read_save(path)[1].round for path in tmp_path.glob("*.safetensors")) == [4, 5]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_newest_file_gives_the_older_one(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("state")
    store = DiskStore(folder)
    store.save(make_saved(1))
    store.save(make_saved(2))
    path = folder / "peer.0.safetensors"
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:place])
    else:
        flip = data.draw(st.integers(1, 255))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
    again = DiskStore(folder)
    loaded = again.load()
    assert loaded is not None
    if same(loaded, make_saved(2)):  # a byte that means nothing: padding, or a name that is not used
        assert again.warnings == []
    else:
        assert same(loaded, make_saved(1))
        assert len(again.warnings) == 1
        assert again.warnings[0].startswith("peer.0.safetensors is passed over: ")


def test_a_save_of_a_newer_form_is_passed_over_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "FORM", 9)
        DiskStore(tmp_path).save(make_saved())
    store = DiskStore(tmp_path)
    assert store.load() is None
    assert "written by another version of dfca (form 9, this one reads 1 to 2)" in store.warnings[0]


def test_a_life_that_cannot_begin_says_that_the_node_must_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the folder's place")
    with pytest.raises(CannotSave, match="make the folder writable, then start the node again"):
        DiskStore(tmp_path / "state").next_life(None)


def test_links_are_not_followed(tmp_path: Path) -> None:
    DiskStore(tmp_path / "other").save(make_saved())
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "peer.1.safetensors").symlink_to(tmp_path / "other" / "peer.1.safetensors")
    store = DiskStore(folder)
    assert store.load() is None
    assert store.warnings == ["peer.1.safetensors is passed over: it is a link, not a regular file"]


@pytest.mark.parametrize("number", range(12))
def test_whichever_call_of_the_system_fails_the_old_or_the_new_state_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Let the number-th call of a save fail, as on a full disk."""
    store = DiskStore(tmp_path)
    store.save(make_saved(1))
    store.save(make_saved(2))
    count = 0

    def failing(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "fsync", "replace", "close"):
            patch.setattr(os, name, failing(getattr(os, name)))
        patch.setattr(Path, "open", failing(Path.open))
        patch.setattr(store_module, "_parts", lambda *args: iter([failing(bytes)(part) for part in _parts(*args)]))
        problem = ""
        try:
            store.save(make_saved(3))
        except CannotSave as error:
            problem = str(error)
    failed = bool(problem)
    assert not failed or ("no space left for the models" in problem and "the node continues by itself" in problem)
    loaded = DiskStore(tmp_path).load()
    assert loaded is not None
    assert failed == (count > number)
    assert any(same(loaded, make_saved(round)) for round in ((2, 3) if failed else (3,)))
    assert not list(tmp_path.glob(".*.tmp"))
    store.save(make_saved(4))  # it saves again once there is room
    assert same(DiskStore(tmp_path).load(), make_saved(4))  # type: ignore[arg-type]


def test_every_life_has_a_number_of_its_own(tmp_path: Path) -> None:
    lives = []
    for _ in range(3):
        store = DiskStore(tmp_path)
        saved = store.load()
        lives.append(store.next_life(saved))
        if lives[-1] == 1:
            store.save(replace(make_saved(), incarnation=1))
    assert lives == [0, 1, 2]
    (tmp_path / "life.json").write_text("{")
    store = DiskStore(tmp_path)
    assert store.next_life(store.load()) > 10**9
    assert store.warnings == ["life.json is passed over: it is not readable"]


class SlowStore:
    """Saves when it is let, or fails."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.full = False

    def save(self, saved: Saved) -> None:
        if self.full:
            raise CannotSave("no space left")
        self.rounds.append(saved.round)


def update(round: int, cluster: int = 0) -> Update:
    return Update(Message(0, cluster, round, 1, torch.zeros(2)), 1)


def test_nothing_leaves_before_what_it_rests_on_is_saved_and_a_full_disk_stops_no_node() -> None:
    async def scenario() -> None:
        store, sent, thread = SlowStore(), list[tuple[int, Any]](), OneThread("disk")
        saving = SaveThenSend(store, lambda neighbour, message: sent.append((neighbour, message)), thread, retry_s=0.01)
        saving.put(None, [(1, "first")])
        assert sent == [(1, "first")]
        store.full = True
        saving.put(make_saved(1), [(1, update(1)), (2, update(1))])
        saving.put(None, [(1, Hello(0, 1, 1, ()))])
        saving.put(make_saved(2), [(1, update(2)), (2, update(2))])
        saving.put(make_saved(3), [(1, update(3)), (2, update(3))])
        while saving.problem is None:
            await asyncio.sleep(0.001)
        assert saving.problem == "no space left"
        assert len(sent) == 1
        saving.forget(2)  # its link went down
        store.full = False
        assert await saving.flush(5)
        assert saving.problem is None
        assert store.rounds == [3]  # the newest is enough; of updates, the newest two
        assert [(n, type(message).__name__) for n, message in sent[1:]] == [(1, "Hello"), (1, "Update"), (1, "Update")]
        assert [update.message.round for _, update in sent[2:]] == [2, 3]
        thread.shutdown()

    asyncio.run(scenario())


def test_facts_of_a_file_can_be_read_by_people(tmp_path: Path) -> None:
    DiskStore(tmp_path).save(make_saved())
    data = (tmp_path / "peer.1.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts = json.loads(header["__metadata__"]["facts"])
    assert facts["saved"]["is"]["round"] == 3


def test_only_temporary_files_are_removed(tmp_path: Path) -> None:
    for name in (".keep", "note.tmp", ".peer.0.safetensors.7.tmp"):
        (tmp_path / name).write_text("x")
    DiskStore(tmp_path).clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".keep", "note.tmp"]
