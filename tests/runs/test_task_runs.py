"""Experiments with another task than classification: read, run, stopped and continued, in virtual time, reported."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dfca.base.errors import ConfigError, ModelError
from dfca.data.partitions import make_split
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment, load_experiment, read_stored
from dfca.models import mlp
from dfca.report.formats import comma_separated, markdown
from dfca.report.page import write_report
from dfca.report.rows import RunReport
from dfca.runs.replay import replay_run
from dfca.runs.runner import run
from dfca.runs.signals import Interrupted
from dfca.runs.sink import NullSink
from dfca.runs.store.metric import ShownMetric
from dfca.runs.store.reading import load_run

SMALL = {
    "clients": 6,
    "clusters": 2,
    "rounds": 6,
    "algorithms": ["dfca-gi", "dfedavgm", "local"],
    "data": {"name": "forecast", "samples_per_client": 24, "test_samples_per_client": 10},
    "model": {"hidden": 4},
    "local": {"steps": 2, "learning_rate": 0.05},
    "topology": {"name": "ring"},
    "evaluation": {"every": 2, "samples": 20},
}
VIRTUAL = {"world": {"trace": True, "compute": {"step_s": 1.0}}, "clock": {"target": 0.79}}


def small(**values: Any) -> Experiment:
    return Experiment("small", "default", Config.of(SMALL | values))


class StopAt(NullSink):
    """Interrupt a run after a round."""

    def finish_round(self, trial: Any, round: int, metrics: Any, time_s: float = 0.0) -> None:
        if round == 3:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small"
    run(small(seeds=2), path, workers=1)
    return path


def test_tables_show_the_metric_and_its_direction(folder: Path) -> None:
    stored = load_run(folder)
    rows = {trial.algorithm: trial for trial in stored.trials if trial.seed == 0}
    assert rows["local"].metric == ShownMetric("RMSE", "rmse", False, False)
    text = markdown(RunReport.of(stored))
    assert re.search(r"\| *algorithm *\|.*\| *RMSE *\|", text)
    assert "accuracy" not in text
    means = {name: [trial["rmse"] for trial in stored.trials if trial.algorithm == name] for name in rows}
    best = min(("dfca-gi", "dfedavgm"), key=lambda name: sum(means[name]))
    line = next(line for line in text.splitlines() if line.startswith(f"| {best} "))
    assert "**" in line  # less is better
    assert "less RMSE is better" in text
    assert comma_separated(RunReport.of(stored)).splitlines()[0].split(",")[4:6] == ["rmse_mean", "rmse_std"]
    page = write_report(stored.folder).read_text()
    assert "RMSE of the model that each client would use" in page
    assert "accuracy-by-round" not in page


def test_a_run_that_was_stopped_ends_with_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(small(seeds=2), tmp_path / "again", StopAt(), workers=1)
    run(small(seeds=2), tmp_path / "again", workers=1)
    kept = ("algorithm", "seed", "rmse", "all_models_rmse", "train_loss")
    first, second = (
        [{key: row[key] for key in kept} for row in load_run(path).trials] for path in (folder, tmp_path / "again")
    )
    assert first == second


def test_a_target_in_virtual_time_is_reached_from_above(tmp_path: Path) -> None:
    joiner = {"late_joiners": [{"client": 3, "at_s": 4.0}]}
    experiment = small(algorithms=["dfca-gi"], **(VIRTUAL | {"world": VIRTUAL["world"] | joiner}))
    run(experiment, tmp_path / "virtual", workers=1)
    stored = load_run(tmp_path / "virtual")
    (row,) = stored.trials
    lines = [line for line in stored.metrics if line["rmse"] <= 0.79]
    assert row.target == row["target"] == 0.79
    assert row["time_to_target_s"] == lines[0]["time_s"] > stored.metrics[0]["time_s"]
    assert "3" in row["caught_up_s"]
    text = markdown(RunReport.of(stored))
    assert "RMSE 0.79 after" in " ".join(text.split())
    page = write_report(stored.folder).read_text()
    assert "RMSE against virtual time." in page
    assert "ccuracy against" not in page
    assert [result.difference for result in replay_run(tmp_path / "virtual")] == [""]


def test_scores_that_are_not_finite_are_dashes(tmp_path: Path) -> None:
    run(small(algorithms=["dfedavgm"], local={"steps": 20, "learning_rate": 3.0}), tmp_path / "far", workers=1)
    far = load_run(tmp_path / "far")
    assert far.trials[0].score is None or far.trials[0].score > 1
    assert "RMSE" in markdown(RunReport.of(far))


def test_a_start_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    given, path = mlp((1, 16), 1, 4), tmp_path / "start.safetensors"
    save_file(given.state_dict(), path)
    none = {"steps": 0, "learning_rate": 0.1}
    experiment = small(algorithms=["local"], rounds=1, local=none, model={"hidden": 4, "start_from": str(path)})
    run(experiment, tmp_path / "run", workers=1)
    first = load_run(tmp_path / "run").trials[0]["rmse"]
    run(small(algorithms=["local"], rounds=1, local=none), tmp_path / "fresh", workers=1)
    assert first != load_run(tmp_path / "fresh").trials[0]["rmse"]
    experiment_file = tmp_path / "file.toml"
    experiment_file.write_text(experiment.config.to_toml())
    loaded = load_experiment(experiment_file)
    save_file(mlp((1, 16), 1, 4).state_dict(), path)
    with pytest.raises(ModelError, match="is not the file that the run began with"):
        run(loaded, tmp_path / "changed", workers=1)
    config = experiment.config
    split = make_split(config.data, 6, 2, 0)
    scores = [(given(x).detach().flatten() - y).square().mean().sqrt() for x, y in map(split.test.of, range(6))]
    assert first == pytest.approx(float(torch.stack(scores).double().mean()), rel=1e-6)


# --- configs


def test_a_task_may_be_its_name() -> None:
    short, long = Config.of(SMALL | {"task": "regression"}), Config.of(SMALL | {"task": {"name": "regression"}})
    assert short == long == read_stored(short.to_toml())[0]
    task = Config.of(SMALL | {"task": {"metric": "mae", "unit": "mm"}}).learning_task()
    assert task is not None
    assert (task.name, task.metric.name, task.metric.unit) == ("regression", "MAE", "mm")
    assert Config.of(SMALL).learning_task() is None  # what the data says
    assert "task" not in Config.of(SMALL).values()  # so that digests of older runs stay what they are


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"task": "classification"}, 'the task is "classification", and data "forecast" is for "regression"'),
        ({"task": {"loss": "bce"}}, 'the task is "multilabel", and data "forecast" is for "regression"'),
        ({"task": {"name": "regression", "loss": "bce"}}, 'its loss or metric is one of "multilabel"'),
        ({"task": {"metric": "rsme"}}, 'unknown metric "rsme"; did you mean "rmse"'),
        ({"task": {"metric": "nowhere:f"}}, 'task.metric "nowhere:f" cannot be imported'),
        ({"task": {"nam": "regression"}}, 'unknown key in [task] "nam"; did you mean "name"'),
        ({"data": {"name": "digits"}, "task": "regression"}, 'data "digits" is for "classification"'),
        (VIRTUAL | {"clock": {"target_accuracy": 0.5}}, "target_accuracy is for accuracies; for RMSE use clock.target"),
        ({"data": {"name": "forecast", "partition": "dirichlet"}}, 'partition = "dirichlet" does not fit forecast'),
        ({"data": {"name": "forecast", "transform": "rotation"}}, 'transform "rotation" does not fit forecast'),
    ],
)
def test_configs_that_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        Config.of(SMALL | values).check_imports()


def test_a_sweep_compares_one_metric(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(small().config.to_toml() + '[grid]\n"task.metric" = ["rmse", "mae"]\n')
    with pytest.raises(ConfigError, match="compares one metric, got MAE and RMSE"):
        load_experiment(path)


def test_the_forecast_preset_is_a_regression() -> None:
    config = load_experiment("forecast").config
    task = config.learning_task()
    assert task is not None
    assert task.metric.key == "rmse"
