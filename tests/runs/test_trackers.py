"""Trackers: fakes with the libraries' interfaces receive every evaluated round; a tracker that fails costs nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_runs import tiny

from dfca.base.errors import ConfigError
from dfca.experiment.sweep import Trial
from dfca.runs.runner import run
from dfca.runs.sink import Broadcast, NullSink
from dfca.runs.store.metrics import read_metrics
from dfca.runs.store.rows import TrialRow
from dfca.runs.trackers import TRACKERS, make_tracker, numbers_of
from dfca.sim.metrics_table import EvaluationRow


class Calls:
    """Remembers what a tracker was asked to store: (run, step, numbers)."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.logged: list[tuple[str, int, dict[str, float]]] = []
        self.closed: list[tuple[str, Any]] = []


def fake_tensorboard(calls: Calls) -> ModuleType:
    class SummaryWriter:
        def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
            self.name = Path(log_dir).name
            calls.opened.append({"name": self.name, "purge_step": purge_step})

        def add_text(self, tag: str, text: str) -> None:
            assert "rounds = " in text

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            calls.logged.append((self.name, step, {tag: value}))

        def flush(self) -> None: ...

        def close(self) -> None:
            calls.closed.append((self.name, None))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    return module


def fake_wandb(calls: Calls) -> ModuleType:
    class Run:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, data: dict[str, float], step: int | None = None) -> None:
            assert step is not None
            calls.logged.append((self.name, step, data))

        def finish(self, exit_code: int | None = None) -> None:
            calls.closed.append((self.name, exit_code))

    def init(project: str, name: str, group: str, config: dict, dir: str, reinit: str) -> Run:
        assert (project, reinit) == ("dfca", "create_new")
        calls.opened.append({"name": name, "group": group, "rounds": config["rounds"]})
        return Run(name)

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    return module


def fake_trackio(calls: Calls) -> ModuleType:
    class Run:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            assert step is not None
            calls.logged.append((self.name, step, metrics))

        def finish(self) -> None:
            calls.closed.append((self.name, None))

    def init(project: str, name: str | None = None, config: dict | None = None) -> Run:
        calls.opened.append({"name": name})
        return Run(name or "")

    module = ModuleType("trackio")
    module.init = init  # type: ignore[attr-defined]
    return module


def fake_mlflow(calls: Calls) -> ModuleType:
    class MlflowClient:
        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str]) -> Any:
            assert experiment_id == "7"
            calls.opened.append({"name": run_name})
            return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100
            if metrics:
                calls.logged.append((run_id, metrics[0][3], {name: value for name, value, *_ in metrics}))

        def set_terminated(self, run_id: str, status: str) -> None:
            calls.closed.append((run_id, status))

    module = ModuleType("mlflow")
    module.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    module.entities = SimpleNamespace(  # type: ignore[attr-defined]
        Metric=lambda key, value, timestamp, step: (key, value, timestamp, step), Param=lambda key, value: (key, value)
    )
    return module


FAKES = {"tensorboard": fake_tensorboard, "wandb": fake_wandb, "trackio": fake_trackio, "mlflow": fake_mlflow}


def fake(name: str, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setitem(sys.modules, TRACKERS[name].module, FAKES[name](calls))
    return calls


def merged(calls: Calls) -> dict[tuple[str, int], dict[str, float]]:
    by_step: dict[tuple[str, int], dict[str, float]] = {}
    for name, step, numbers in calls.logged:
        by_step.setdefault((name, step), {}).update(numbers)
    return by_step


@pytest.mark.parametrize("name", FAKES)
def test_a_tracker_gets_the_numbers_of_the_run_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake(name, monkeypatch)
    tracker = make_tracker(name, tmp_path / "run", "tiny", pytest.fail)
    run(tiny(rounds=2), tmp_path / "run", Broadcast(tracker, NullSink()))
    assert [opened["name"] for opened in calls.opened] == ["dfca-li-0", "ifca-0"]
    lines = read_metrics(tmp_path / "run")
    assert merged(calls) == {
        (f"{line['algorithm']}-{line['seed']}", line["round"]): {
            key: value for key, value in numbers_of(line).items() if key != "seed"
        }
        for line in lines
    }
    assert all("accuracy" in numbers and "seconds/train" in numbers for numbers in merged(calls).values())
    done = {"wandb": 0, "mlflow": "FINISHED"}.get(name)
    assert calls.closed == [("dfca-li-0", done), ("ifca-0", done)]


def trial() -> Trial:
    experiment = tiny()
    return Trial("ifca", 0, experiment.points[0])


def test_a_trial_that_goes_on_hides_what_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake("tensorboard", monkeypatch)
    tracker = make_tracker("tensorboard", tmp_path, "tiny", pytest.fail)
    tracker.start_trial(trial(), 6)
    assert calls.opened == [{"name": "ifca-0", "purge_step": 7}]


def test_trials_that_were_finished_before_are_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("wandb", monkeypatch)
    told: list[str] = []
    run(tiny(rounds=1, algorithms=["ifca"]), tmp_path / "run")
    for algorithms in (["ifca"], ["ifca", "local"]):
        tracker = make_tracker("wandb", tmp_path / "run", "tiny", told.append)
        run(tiny(rounds=1, algorithms=algorithms), tmp_path / "run", tracker)
    assert [line.partition(" trials")[0] for line in told] == ["--log wandb: all", "--log wandb: 1 of 2"]


def test_a_tracker_that_fails_later_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("wandb", monkeypatch)
    told: list[str] = []
    tracker = make_tracker("wandb", tmp_path, "tiny", told.append)
    tracker.start_trial(trial(), 0)
    monkeypatch.setattr(tracker, "log", lambda *_: 1 / 0)
    tracker.finish_round(trial(), 1, EvaluationRow.of({"round": 1, "accuracy": 0.5}))
    tracker.finish_round(trial(), 2, EvaluationRow.of({"round": 2, "accuracy": 0.5}))
    tracker.finish_trial(trial(), TrialRow.of(trial().head))
    assert told == [
        "--log wandb has stopped (ZeroDivisionError: division by zero); the run continues, and its folder has all "
        "numbers"
    ]


def test_a_run_that_is_stopped_closes_its_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake("mlflow", monkeypatch)
    tracker = make_tracker("mlflow", tmp_path, "tiny", pytest.fail)
    tracker.start_trial(trial(), 0)
    tracker.end_run()
    assert calls.closed == [("ifca-0", "FAILED")]


def test_a_tracker_that_cannot_begin_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("wandb", monkeypatch)
    tracker = make_tracker("wandb", tmp_path, "tiny", pytest.fail)
    monkeypatch.setattr(tracker, "open", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match="--log wandb cannot begin: ZeroDivisionError: division by zero; set it up"):
        tracker.start_trial(trial(), 0)


def test_what_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--log wandb needs its library .*: pip install 'dfca\[wandb\]'"):
        make_tracker("wandb", tmp_path, "tiny", pytest.fail)
    with pytest.raises(ConfigError, match='unknown tracker "tensorbord"; did you mean "tensorboard"'):
        make_tracker("tensorbord", tmp_path, "tiny", pytest.fail)


def test_numbers_are_what_trackers_can_draw() -> None:
    record = {"round": 3, "accuracy": 0.5, "none": None, "nan": float("nan"), "flag": True, "list": [1], "name": "x"}
    assert numbers_of(record | {"seconds": {"mix": 2, "deep": {"a": 1}}}) == {
        "accuracy": 0.5, "seconds/mix": 2.0, "seconds/deep/a": 1.0
    }  # fmt: skip


@pytest.mark.slow
def test_real_tensorboard_reads_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = make_tracker("tensorboard", tmp_path / "run", "tiny", pytest.fail)
    run(tiny(rounds=2), tmp_path / "run", Broadcast(tracker, NullSink()))
    events = EventAccumulator(str(tmp_path / "run/tensorboard/ifca-0"))
    events.Reload()
    line = [row for row in read_metrics(tmp_path / "run") if row["algorithm"] == "ifca"][-1]
    (point,) = events.Scalars("accuracy")
    assert (point.step, point.value) == (2, pytest.approx(line["accuracy"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_real_mlflow_keeps_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    run(tiny(rounds=2), tmp_path / "run", make_tracker("mlflow", tmp_path / "run", "tiny", pytest.fail))
    client = mlflow.MlflowClient()
    place = client.get_experiment_by_name("dfca").experiment_id
    runs = {mlflow_run.info.run_name: mlflow_run for mlflow_run in client.search_runs([place])}
    line = [row for row in read_metrics(tmp_path / "run") if row["algorithm"] == "ifca"][-1]
    assert runs["ifca-0"].data.metrics["accuracy"] == line["accuracy"]
    assert runs["ifca-0"].data.params["clients"] == "6"
    assert runs["ifca-0"].info.status == "FINISHED"
