"""Replay the traces of a run folder: carry out what they record, and compare every number with what the run wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dfca.base.errors import RunError
from dfca.experiment.sweep import Trial, TrialGroup
from dfca.runs.sink import NullSink
from dfca.runs.store.folder import RunFolder, read_experiment
from dfca.runs.store.metrics import read_metrics
from dfca.runs.trials import Workload
from dfca.runs.virtual import simulation_of
from dfca.sim.events.replay import read_trace
from dfca.sim.metrics_table import EvaluationRow, JsonObject, without_nan
from dfca.sim.shards import Alone

MOST_THREADS = 1024
NOT_COMPARED = ("seconds",)  # of the machine, not of the clock


class ReplayResult(NamedTuple):
    """What the replay of one trial gave: how many records and rows, and the first difference in words, or none."""

    trial: Trial
    records: int
    rows: int
    difference: str


def replay_run(out: str | Path, wanted: Callable[[Trial], bool] = lambda trial: True) -> Iterator[ReplayResult]:
    """Replay every finished trial of a run folder that has a trace, with the threads that the run recorded.

    Raises RunError if there is none; ConfigError if a trace cannot be carried out: it is cut, or names clients that are
    not there.
    """
    path = Path(out)
    experiment = read_experiment(path)
    swept = bool(experiment.sweep)
    folder = RunFolder(path, swept)

    def trace_of(trial: Trial) -> Path:
        return trial.file(path / "trace", ".jsonl")

    folder.check_form()
    if threads := folder.recorded_threads():  # another number of threads rounds in another way
        torch.set_num_threads(min(threads, MOST_THREADS))
    finished, lines, traces = folder.finished(), read_metrics(path), 0
    for point in experiment.points:
        for seed in point.config.seeds:
            trials = [Trial(name, seed, point) for name in point.config.algorithms]
            traced = [trial for trial in trials if trial.key in finished and trace_of(trial).exists() and wanted(trial)]
            if not traced:
                continue
            traces += len(traced)
            workload = Workload.of(
                TrialGroup(point, seed, tuple(trial.algorithm for trial in traced)),
                NullSink(),
                Alone(point.config.clients),
            )
            for trial in traced:
                records = read_trace(trace_of(trial))
                result = simulation_of(trial, workload.setting(trial), trace=False, replay=records).run()
                rows = [json.loads(json.dumps(without_nan(row))) for row in result.metrics]
                written = [line for line in lines if line.key(swept) == trial.key]
                yield ReplayResult(trial, len(records), len(rows), _difference(written, rows))
    if not traces:
        raise RunError(
            f"{path} has no trace of a finished trial; run it with --set world.trace=true (and --no-resume, or --out)"
        )


def _difference(written: Sequence[EvaluationRow], rows: Sequence[JsonObject]) -> str:
    if len(written) != len(rows):
        return f"the run has {len(written)} rows of metrics and the replay {len(rows)}"
    for line, row in zip(written, rows, strict=True):
        for key, value in row.items():
            if key not in NOT_COMPARED and line.get(key) != value:
                return f"{key} at {row['time_s']:g} s is {line.get(key)} in the run and {value} in the replay"
    return ""
