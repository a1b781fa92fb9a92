"""Trackers: the numbers of every evaluated round, for TensorBoard, Weights & Biases, trackio or MLflow.

    dfca run quickstart --log tensorboard --log wandb

Each trial is one run of the tracker, named as its files are. A tracker is a sink (`runs.sink`) with three methods of
its own: `open`, `log` and `close`. Their libraries are imported only when they are asked for. One that cannot be opened
ends the run at its start; one that fails later is left out with one sentence, and the run continues.
"""

from __future__ import annotations

import importlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dfca.base.errors import ConfigError, unknown
from dfca.experiment.sweep import Trial
from dfca.experiment.variants import flatten
from dfca.runs.sink import RunSink
from dfca.runs.store.rows import TrialRow
from dfca.sim.metrics_table import EvaluationRow

PROJECT = "dfca"
MOST_PARAMETERS = 100  # of MLflow in one call


class Tracker(RunSink):
    """A sink that keeps one open run of a tracker for each trial under way.

    folder: the run folder; experiment: its name; report: receives a sentence for the user.
    """

    name = ""
    module = ""
    extra = ""

    def __init__(self, folder: Path, experiment: str, report: Callable[[str], None]) -> None:
        self.folder, self.experiment, self._report = folder, experiment, report
        self._open: dict[tuple[str, int, str], Any] = {}
        self._opened = self._broken = False
        self.library = _import(self.module, self.name, self.extra)

    def open(self, trial: Trial, round: int) -> Any:
        """Begin or continue the run of a trial after `round` rounds."""
        raise NotImplementedError

    def log(self, run: Any, round: int, numbers: Mapping[str, float]) -> None:
        """Store the numbers of a round."""
        raise NotImplementedError

    def close(self, run: Any, failed: bool) -> None:
        """End the run of a trial."""
        raise NotImplementedError

    def start_run(self, trials: Sequence[Trial], finished: int) -> None:
        """Say that what was computed before is not logged again."""
        if finished:
            whole = "all" if finished == len(trials) else f"{finished} of {len(trials)}"
            self._report(
                f"--log {self.name}: {whole} trials were finished before this command and are not logged by it; "
                "another --out logs all of them"
            )

    def start_trial(self, trial: Trial, round: int, time_s: float = 0.0) -> None:
        """Open a run; the first one that cannot be opened ends everything, for nothing is lost yet."""
        if self._opened:
            self._try(lambda: self._open.update({trial.key: self.open(trial, round)}))
            return
        try:
            self._open[trial.key] = self.open(trial, round)
        except Exception as error:
            raise ConfigError(f"--log {self.name} cannot begin: {_line(error)}; set it up, or leave it out") from error
        self._opened = True

    def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
        if metrics is not None and trial.key in self._open:
            self._try(lambda: self.log(self._open[trial.key], round, numbers_of(metrics)))

    def finish_trial(self, trial: Trial, row: TrialRow) -> None:
        self._close(trial.key, failed=False)

    def fail_trial(self, trial: Trial, error: str) -> None:
        self._close(trial.key, failed=True)

    def end_run(self) -> None:
        """Close what is still open: the run was stopped."""
        for key in list(self._open):
            self._close(key, failed=True)

    def _close(self, key: tuple[str, int, str], failed: bool) -> None:
        run = self._open.pop(key, None)
        if run is not None:
            self._try(lambda: self.close(run, failed))

    def _try(self, call: Callable[[], None]) -> None:
        """Do something with the tracker; the run is worth more than its log."""
        if self._broken:
            return
        try:
            call()
        except Exception as error:
            self._broken = True
            self._report(
                f"--log {self.name} has stopped ({_line(error)}); the run continues, and its folder has all numbers"
            )


class TensorBoard(Tracker):
    """Event files in tensorboard/ of the run folder: `tensorboard --logdir RUN/tensorboard`."""

    name, module, extra = "tensorboard", "torch.utils.tensorboard", "tensorboard"

    def open(self, trial: Trial, round: int) -> Any:
        """Make a writer; where a trial continues, what was written beyond its checkpoint is hidden."""
        place = trial.file(self.folder / "tensorboard")
        writer = self.library.SummaryWriter(str(place), purge_step=round + 1 if round else None)
        if not round:
            writer.add_text("config", f"```toml\n{trial.point.config.to_toml()}```")
        return writer

    def log(self, run: Any, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            run.add_scalar(name, value, round)
        run.flush()

    def close(self, run: Any, failed: bool) -> None:
        run.close()


class Wandb(Tracker):
    """Weights & Biases: WANDB_MODE=offline keeps everything in wandb/ of the run folder."""

    name = module = extra = "wandb"

    def open(self, trial: Trial, round: int) -> Any:
        wanted = {
            "project": PROJECT,
            "name": trial.name,
            "group": self.experiment,
            "config": trial.point.config.values(),
            "dir": str(self.folder),
            "reinit": "create_new",
        }
        known = inspect.signature(self.library.init).parameters
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
            wanted = {key: value for key, value in wanted.items() if key in known}
        return self.library.init(**wanted)

    def log(self, run: Any, round: int, numbers: Mapping[str, float]) -> None:
        run.log(dict(numbers), step=round)

    def close(self, run: Any, failed: bool) -> None:
        if "exit_code" in inspect.signature(run.finish).parameters:
            run.finish(exit_code=1 if failed else 0)
        else:
            run.finish()


class Trackio(Tracker):
    """trackio, which has the interface of Weights & Biases and keeps everything on this machine."""

    name = module = extra = "trackio"
    open, log, close = Wandb.open, Wandb.log, Wandb.close


class Mlflow(Tracker):
    """MLflow: MLFLOW_TRACKING_URI says where, as for all its clients."""

    name = module = extra = "mlflow"

    def __init__(self, folder: Path, experiment: str, report: Callable[[str], None]) -> None:
        super().__init__(folder, experiment, report)
        self._client: Any = None
        self._place: Any = None

    def open(self, trial: Trial, round: int) -> Any:
        """Create a run by the client, which knows no "current" run: several may be open."""
        if self._client is None:
            self._client = self.library.MlflowClient()
            known = self._client.get_experiment_by_name(PROJECT)
            self._place = known.experiment_id if known is not None else self._client.create_experiment(PROJECT)
        tags = {"experiment": self.experiment, "folder": str(self.folder)}
        run = self._client.create_run(self._place, run_name=trial.name, tags=tags).info.run_id
        values = {**flatten(trial.point.config.values()), "algorithm": trial.algorithm, "seed": trial.seed}
        parameters = [self.library.entities.Param(key, str(value)[:500]) for key, value in values.items()]
        for begin in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(run, params=parameters[begin : begin + MOST_PARAMETERS])
        return run

    def log(self, run: Any, round: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metric = self.library.entities.Metric
        self._client.log_batch(run, metrics=[metric(name, value, now, round) for name, value in numbers.items()])

    def close(self, run: Any, failed: bool) -> None:
        self._client.set_terminated(run, status="FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, Wandb, Trackio, Mlflow)}


def make_tracker(name: str, folder: Path, experiment: str, report: Callable[[str], None]) -> Tracker:
    """Make the tracker of that name. Raises ConfigError for an unknown one, or where its library is not installed."""
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    return TRACKERS[name](folder, experiment, report)


def numbers_of(record: Mapping[str, object]) -> dict[str, float]:
    """Keep the finite numbers of a record, those of inner tables as "table/name".

    >>> numbers_of({"round": 2, "accuracy": 0.5, "assignments": [0, 1], "seconds": {"train": 1.5}})
    {'accuracy': 0.5, 'seconds/train': 1.5}
    """
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{inner}": number for inner, number in numbers_of(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[name] = float(value)
    numbers.pop("round", None)  # it is the step
    return numbers


def _import(module: str, name: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--log {name} needs its library ({error}): pip install 'dfca[{extra}]'") from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
