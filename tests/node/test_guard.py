"""A node that notices that its models have collapsed goes back to its last good ones, and names who did it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dfca.core.state import Message
from dfca.node.operate.metrics import metrics_of
from dfca.node.operate.status import _facts
from dfca.node.work.guard import FILE, LEAST, MOST_RETURNS, SAVE_S, TRUSTED, ModelGuard
from dfca.peer.records.messages import Nothing, Update
from dfca.peer.records.work import Note

GUESS = 1.0


def bank(value: float) -> Tensor:
    return torch.full((2, 3), value)


def update(cluster: int, value: float) -> Update:
    return Update(Message(7, cluster, 0, 2, torch.full((3,), value)), 1)


def make(folder: Path, lineage: Any = "first", now: float = 0.0) -> ModelGuard:
    guard = ModelGuard(GUESS, folder, lambda: now)
    guard.lineage = lambda: lineage
    guard.score = lambda model: float(model.abs().max())
    return guard


def begin(guard: ModelGuard) -> None:
    for _ in range(LEAST):
        assert torch.equal(guard.settle(bank(0.2), 0, 0.2), bank(0.2))


def fold(guard: ModelGuard, sender: int) -> None:
    guard.note(Note(kind="fold", other=sender, cluster=0, round=1, number=0.0))


def test_models_that_collapse_are_replaced_by_the_last_good_ones_and_the_sender_is_watched(tmp_path: Path) -> None:
    guard = make(tmp_path)
    fold(guard, 1)
    begin(guard)
    assert torch.equal(guard.settle(bank(0.6), 0, 0.6), bank(0.6))  # worse, and no collapse: 0.2 + 0.5
    for sender in (2, 3):
        fold(guard, sender)
    assert torch.equal(guard.settle(bank(9.0), 0, 0.8), bank(0.2))
    assert torch.equal(guard.settle(bank(9.0), 0, math.nan), bank(0.2))
    assert set(guard.watched) == {2, 3}  # what was folded before the models were good is not to blame
    assert guard.returns == 2
    assert guard.doubts(2, update(0, 1.0))
    assert not guard.doubts(1, update(0, 1.0))
    assert not guard.doubts(2, update(1, 1.0))  # a model of another cluster need not fit
    assert not guard.doubts(2, Nothing(1))


def test_a_watched_neighbour_is_heard_again_once_its_models_are_sound(tmp_path: Path) -> None:
    guard = make(tmp_path)
    begin(guard)
    fold(guard, 2)
    guard.settle(bank(9.0), 0, 9.0)
    poison = update(0, 5.0)._replace(lineage=(), freshness=(4,))
    assert guard.admit(2, poison) == Nothing(0, (), (4,))  # nobody waits for what is left out
    several = guard.admit(2, poison._replace(parts=2))
    assert isinstance(several, Update)
    assert several.message.model.tolist() == [pytest.approx(0.2)] * 3
    (sentence,) = guard.problems(lambda number: "garage", Path("kitchen")).values()
    assert sentence == (
        "models of garage would ruin this device's (held-out loss 5, with its own 0.2) and are left out; its data is "
        "of another kind, or it is broken or lies: then remove it: dfca node remove kitchen garage"
    )
    assert guard.left_out(str) == {"2": 2}
    sound = update(0, 0.1)
    for _ in range(TRUSTED):
        assert guard.doubts(2, update(0, 0.1))
        assert guard.admit(2, sound) is sound
    assert guard.watched == {}
    assert guard.problems(str, tmp_path) == {}


def test_losses_are_compared_within_one_lineage_and_data_set(tmp_path: Path) -> None:
    guard = make(tmp_path)
    begin(guard)
    guard.lineage = lambda: "second"  # an election has opened other models
    assert torch.equal(guard.settle(bank(9.0), 0, 9.0), bank(9.0))
    guard.forget()  # the data was read again
    assert torch.equal(guard.settle(bank(20.0), 0, 20.0), bank(20.0))
    assert torch.equal(guard.settle(bank(1.0), 0, None), bank(1.0))  # nothing is held out
    assert guard.returns == 0


def test_a_lasting_change_becomes_the_new_normal(tmp_path: Path) -> None:
    guard = make(tmp_path)
    begin(guard)
    fold(guard, 2)
    for _ in range(MOST_RETURNS):
        assert torch.equal(guard.settle(bank(9.0), 0, 9.0), bank(0.2))
    assert torch.equal(guard.settle(bank(9.0), 0, 9.0), bank(9.0))
    assert guard.watched == {}


def test_good_models_outlive_the_process(tmp_path: Path) -> None:
    begin(make(tmp_path))
    later = make(tmp_path)
    fold(later, 2)
    assert torch.equal(later.settle(bank(9.0), 0, 9.0), bank(0.2))
    other = make(tmp_path, lineage="second")
    assert torch.equal(other.settle(bank(9.0), 0, 9.0), bank(9.0))
    for damaged in (b"", b"\xff" * 100, (tmp_path / FILE).read_bytes()[:-5]):
        (tmp_path / FILE).write_bytes(damaged)
        assert torch.equal(make(tmp_path).settle(bank(9.0), 0, 9.0), bank(9.0))


def test_good_models_are_written_seldom(tmp_path: Path) -> None:
    guard = make(tmp_path)
    begin(guard)
    (tmp_path / FILE).unlink()
    guard.settle(bank(0.1), 0, 0.1)
    assert not (tmp_path / FILE).exists()
    guard._now = lambda: SAVE_S + 1
    guard.settle(bank(0.1), 0, 0.1)
    assert (tmp_path / FILE).exists()


def test_status_and_metrics_name_it() -> None:
    status = {"returns": 2, "left_out": {"garage": 5}, "members": 3}
    rows = dict(_facts(status))
    assert rows["guard"] == "went back to its last good models 2 times; left out: 5 of garage"
    assert "guard" not in dict(_facts({"returns": 0, "members": 3}))
    families = {family.name: family for family in metrics_of(status)}
    (sample,) = families["dfca_left_out"].samples
    assert (sample.labels, sample.value) == ({"neighbour": "garage"}, 5)
    assert families["dfca_returns"].samples[0].value == 2
