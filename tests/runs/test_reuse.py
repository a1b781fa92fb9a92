"""Cells of other folders: taken over, shown together, or refused; and folders that cannot be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reports import report_of
from tiny_runs import TINY

from dfca.base.errors import DataError, RunError
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment
from dfca.experiment.sweep import Sweep
from dfca.report.rows import RunReport
from dfca.runs.replay import replay_run
from dfca.runs.reuse import join
from dfca.runs.runner import run
from dfca.runs.sink import NullSink
from dfca.runs.store.folder import FORM
from dfca.runs.store.metrics import read_metrics
from dfca.runs.store.reading import load_run

BASE = {**TINY, "algorithms": ["dfca-li", "local"], "rounds": 3}


def experiment(grid: Any = None, **values: Any) -> Experiment:
    return Experiment("tiny", "default", Config.of(BASE | values), Sweep.of({"grid": grid} if grid else {}))


def lines(out: Path) -> list[dict[str, Any]]:
    """Read the metrics of a folder without the seconds."""
    read = read_metrics(out)
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read]


class Notes(NullSink):
    def __init__(self) -> None:
        self.started: list[str] = []
        self.notes: list[str] = []

    def note(self, text: str, group: Any = None) -> None:
        self.notes.append(text)

    def start_trial(self, trial: Any, round: int, time_s: float = 0.0) -> None:
        self.started.append(str(trial))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "swept"
    run(experiment({"clusters": [1, 2]}), out, workers=1)
    return out


def test_a_figure_takes_the_trials_of_a_table_and_has_its_bits(tmp_path: Path, swept: Path) -> None:
    alone, taken, received = tmp_path / "alone", tmp_path / "taken", Notes()
    run(experiment(clusters=2), alone)
    run(experiment(clusters=2), taken, received, reuse=[swept])
    assert received.started == []
    assert f"{len(BASE['algorithms']) * len(load_run(alone).seeds)} of " in received.notes[0]
    assert lines(alone) == lines(taken)
    assert load_run(alone).topology == load_run(taken).topology


def test_a_sweep_takes_what_a_single_run_has_and_runs_the_rest(tmp_path: Path, swept: Path) -> None:
    single, taken, received = tmp_path / "single", tmp_path / "taken", Notes()
    run(experiment(clusters=2, algorithms=["local"]), single)
    run(experiment({"clusters": [1, 2]}), taken, received, workers=1, reuse=[single])
    assert not [trial for trial in received.started if "local" in trial and "clusters=2" in trial]
    assert [row.score.mean for row in report_of(taken).rows] == [row.score.mean for row in report_of(swept).rows]


def test_seeds_of_two_folders_make_one_table(tmp_path: Path) -> None:
    for name, seeds in (("a", [0]), ("b", [1]), ("both", [0, 1])):
        run(experiment(seeds=seeds), tmp_path / name)
    joined = join([load_run(tmp_path / "a"), load_run(tmp_path / "b")])
    ours, theirs = RunReport.of(joined).rows, report_of(tmp_path / "both").rows
    assert [(row.algorithm, row.runs, row.score) for row in ours] == [
        (row.algorithm, row.runs, row.score) for row in theirs
    ]
    assert joined.trial_counts == (4, 4)


def test_runs_of_other_configs_are_not_averaged_and_the_keys_are_named(tmp_path: Path, swept: Path) -> None:
    run(experiment(seeds=[0]), tmp_path / "a")
    run(experiment(seeds=[1], local={"steps": 2, "learning_rate": 0.7}), tmp_path / "b")
    with pytest.raises(RunError, match=r"be averaged: .*local.learning_rate is 0.1 there and 0.7 here.*one by one"):
        join([load_run(tmp_path / "a"), load_run(tmp_path / "b")])
    with pytest.raises(RunError, match="only here clusters is varied"):
        join([load_run(tmp_path / "a"), load_run(swept)])


def test_one_trial_with_two_results_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        run(experiment(seeds=[0]), tmp_path / name)
    for path in (tmp_path / "b" / "summary.json", *(tmp_path / "b" / "metrics").iterdir()):
        path.write_text(path.read_text().replace('"accuracy":', '"accuracy": 0.5, "was":'))
    with pytest.raises(RunError, match=r"both hold dfca-li, seed 0, with accuracy"):
        join([load_run(tmp_path / "a"), load_run(tmp_path / "b")])


def test_edited_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "a"
    run(experiment(seeds=[0]), out)
    summary, config = (out / "summary.json").read_text(), (out / "config.toml").read_text()
    edited = json.loads(summary)
    edited["runs"][0]["accuracy"] = 0.99
    (out / "summary.json").write_text(json.dumps(edited))
    with pytest.raises(RunError, match=r"edited by hand: accuracy of dfca-li, seed 0, is 0.99 in summary.json and"):
        load_run(out)
    (out / "summary.json").write_text(json.dumps(json.loads(summary) | {"form": FORM + 1}))
    newer = rf"written by a newer version of dfca \(form {FORM + 1}, this one reads 1 to {FORM}\); use that version \(0"
    for read in (load_run, lambda out: run(experiment(seeds=[0]), out), lambda out: next(replay_run(out))):
        with pytest.raises(RunError, match=newer):
            read(out)
    (out / "summary.json").write_text(summary)
    (out / "config.toml").write_text(config.replace("rounds = 3", "rounds = 9"))
    with pytest.raises(RunError, match=r"config.toml was edited after the run"):
        load_run(out)


@pytest.mark.parametrize("grid", [None, {"clusters": [1, 2]}])
def test_without_the_data_a_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grid: Any) -> None:
    monkeypatch.setenv("DFCA_DATA", str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"mnist is not in the cache .*dfca data fetch mnist.*dfca data import FILE"):
        run(experiment(grid, data={"name": "mnist"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
