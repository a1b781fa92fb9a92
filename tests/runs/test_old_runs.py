"""Run folders of version 0.1 (one metrics.jsonl for all trials): read, reported, continued and reused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Listener

from dfca.experiment.load import Experiment, read_stored
from dfca.report.page import write_report
from dfca.report.rows import RunReport
from dfca.runs.runner import run
from dfca.runs.store.folder import FORM
from dfca.runs.store.metrics import read_metrics
from dfca.runs.store.reading import load_run

OLD = Path(__file__).parents[1] / "fixtures" / "run-0.1"


def old_run(name: str, tmp_path: Path) -> tuple[Path, Experiment]:
    out = tmp_path / "old"
    shutil.copytree(OLD / name, out)
    config, sweep = read_stored((out / "config.toml").read_text())
    return out, Experiment("small", "default", config, sweep)


def more_seeds(experiment: Experiment) -> Experiment:
    return Experiment("small", "default", experiment.config.model_copy(update={"seeds": (0, 1)}))


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.parametrize(("name", "trials", "lines"), [("rounds", 2, 4), ("virtual", 1, 3)])
def test_an_old_run_is_read_and_reported_as_it_is(name: str, trials: int, lines: int, tmp_path: Path) -> None:
    out, _ = old_run(name, tmp_path)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    old = load_run(out)
    assert (len(old.trials), len(old.metrics)) == (trials, lines)
    assert all(trial.finished for trial in old.trials)
    assert len(RunReport.of(old).rows) == trials
    page = write_report(out).read_text()
    assert all(trial.algorithm in page for trial in old.trials)
    assert before.items() <= {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}.items()


@pytest.mark.parametrize("name", ["rounds", "virtual"])
def test_an_old_run_is_continued_and_takes_the_new_form(name: str, tmp_path: Path) -> None:
    out, experiment = old_run(name, tmp_path)
    before, listener = load_run(out), Listener()
    run(more_seeds(experiment), out, listener)
    assert [(seed, round) for _, seed, round in listener.trials] == [(1, 0)] * len(before.trials)
    after = load_run(out)
    assert after.head["form"] == FORM
    assert not (out / "metrics.jsonl").exists()
    assert [line for line in after.metrics if line["seed"] == 0] == before.metrics
    assert [trial for trial in after.trials if trial.seed == 0] == before.trials
    assert all(row.runs == 2 for row in RunReport.of(after).rows)
    assert "2 of 2 runs" not in write_report(out).read_text(), "nothing is unfinished"


def test_an_old_run_that_was_cut_off_while_it_took_the_new_form(tmp_path: Path) -> None:
    out, experiment = old_run("rounds", tmp_path)
    before = load_run(out).metrics
    (out / "metrics").mkdir()
    (out / "metrics" / "ifca-0.jsonl").write_text(json.dumps(before[-1].stored) + "\n")
    assert load_run(out).metrics == before
    run(experiment, out)
    assert read_metrics(out) == before


@pytest.mark.parametrize("name", ["rounds", "virtual"])
def test_an_old_run_is_reused(name: str, tmp_path: Path) -> None:
    out, experiment = old_run(name, tmp_path)
    listener = Listener()
    run(experiment, tmp_path / "new", listener, reuse=[out])
    assert listener.trials == []
    assert numbers(load_run(tmp_path / "new").metrics) == numbers(load_run(out).metrics)
    assert (out / "metrics.jsonl").exists(), "the folder that is reused stays as it is"
