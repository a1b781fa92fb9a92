"""What a run folder does not lose: lines of metrics, the checkpoint of a trial without a row, a trial that failed.

Every test here fails without one line of the source (`tests/mutants`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dfca.base.errors import RunError
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment
from dfca.experiment.sweep import Point, Trial
from dfca.runs.store.checkpoints import Checkpoint
from dfca.runs.store.folder import RunFolder

EXPERIMENT = Experiment(
    "tiny", "default", Config.of({"clients": 8, "clusters": 2, "rounds": 3, "algorithms": ["local"]})
)
TRIAL = Trial("local", 0, Point(EXPERIMENT.config))
ROW = {"algorithm": "local", "seed": 0, "finished": True}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    with RunFolder.open_(tmp_path / "run", EXPERIMENT) as opened:
        yield opened


def test_a_finished_trial_whose_lines_are_missing_is_run_again(folder: RunFolder) -> None:
    for round in (1, 2, 3):
        folder.metrics.append(TRIAL, {"round": round, "accuracy": 0.5})
    folder.finish(TRIAL, ROW)
    assert folder.finished() == {TRIAL.key}
    path = TRIAL.file(folder.path / "metrics", ".jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert folder.finished() == set()
    path.unlink()
    assert folder.finished() == set()


def test_the_checkpoints_of_a_trial_stay_until_its_row_is_written(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.checkpoints.save(TRIAL, Checkpoint(2, 1.5, {"bank": torch.zeros(2, 8, 5)}, {}))

    def fail(*_: Any) -> None:
        raise RunError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("dfca.runs.store.folder.write_json", fail)
        with pytest.raises(RunError, match="no space left"):
            folder.finish(TRIAL, ROW)
    kept, warnings = folder.checkpoints.latest(TRIAL)
    assert warnings == []
    assert kept is not None
    folder.finish(TRIAL, ROW)
    assert folder.checkpoints.latest(TRIAL) == (None, [])


def test_a_trial_that_failed_keeps_its_checkpoints_and_is_tried_again(folder: RunFolder) -> None:
    folder.checkpoints.save(TRIAL, Checkpoint(2, 1.5, {"bank": torch.zeros(2, 8, 5)}, {}))
    folder.fail(TRIAL, "the loss is not finite")
    assert [row["error"] for row in folder.summary()["runs"]] == ["the loss is not finite"]
    assert folder.finished() == set()
    path = folder.path
    folder.close()
    with RunFolder.open_(path, EXPERIMENT) as again:
        assert again.summary()["runs"] == []
        assert again.checkpoints.latest(TRIAL)[0] is not None


def test_an_old_checkpoint_without_tensors_does_not_stop_the_next(folder: RunFolder) -> None:
    for round in (1, 2, 3):
        folder.checkpoints.save(TRIAL, Checkpoint(round, 1.5, {"bank": torch.zeros(2, 8, 5)}, {}))
        (TRIAL.file(folder.path / "checkpoint") / "round-000001.safetensors").unlink(missing_ok=True)
    assert sorted(path.name for path in TRIAL.file(folder.path / "checkpoint").iterdir()) == [
        f"round-00000{round}.{ending}" for round in (2, 3) for ending in ("json", "safetensors")
    ]


@pytest.mark.parametrize("change", [{"round": "2"}, {"round": 2.0}, {"seconds": "1.5"}, {"seconds": None}])
def test_a_checkpoint_whose_round_or_seconds_are_no_numbers_is_damaged(folder: RunFolder, change: Any) -> None:
    folder.checkpoints.save(TRIAL, Checkpoint(2, 1.5, {"bank": torch.zeros(2, 8, 5)}, {}))
    path = TRIAL.file(folder.path / "checkpoint") / "round-000002.json"
    stored = json.loads(path.read_text()) | change
    del stored["check"]  # as in version 0.1
    path.write_text(json.dumps(stored))
    kept, (warning,) = folder.checkpoints.latest(TRIAL)
    assert kept is None
    assert "its round or its seconds are no numbers" in warning


def test_the_order_of_keys_in_a_checkpoint_does_not_matter(folder: RunFolder) -> None:
    folder.checkpoints.save(TRIAL, Checkpoint(2, 1.5, {"bank": torch.zeros(2, 8, 5)}, {"one": 1, "two": 2}))
    path = TRIAL.file(folder.path / "checkpoint") / "round-000002.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    kept, warnings = folder.checkpoints.latest(TRIAL)
    assert warnings == []
    assert kept is not None
