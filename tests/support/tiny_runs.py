"""An experiment of a second, and a listener for its events."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dfca.experiment.config import Config
from dfca.experiment.load import Experiment
from dfca.experiment.sweep import Trial
from dfca.runs.sink import NullSink
from dfca.runs.store.metrics import read_metrics
from dfca.runs.store.rows import TrialRow
from dfca.sim.metrics_table import EvaluationRow

TINY = {
    "clients": 6,
    "clusters": 2,
    "rounds": 6,
    "algorithms": ["dfca-li", "ifca"],
    "seeds": [0],
    "data": {"name": "digits", "samples_per_client": 20, "test_samples_per_client": 10},
    "model": {"name": "mlp", "hidden": 4},
    "local": {"steps": 2, "batch_size": 8, "momentum": 0.5},
    "topology": {"name": "erdos-renyi", "p": 0.6},
    "evaluation": {"every": 2, "samples": 20},
    "participation": 0.7,
}


def tiny(**values: Any) -> Experiment:
    return Experiment("tiny", "default", Config.of(TINY | values))


class Listener(NullSink):
    """Record what is received, and act at a round."""

    def __init__(self, act: Callable[[int], None] = lambda round: None) -> None:
        self.notes: list[str] = []
        self.trials: list[tuple[str, int, int]] = []
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._act = act

    def note(self, text: str, group: Any = None) -> None:
        self.notes.append(text)

    def start_trial(self, trial: Trial, round: int, time_s: float = 0.0) -> None:
        self.trials.append((trial.algorithm, trial.seed, round))

    def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
        self._act(round)

    def finish_trial(self, trial: Trial, row: TrialRow) -> None:
        self.rows.append(row)

    def fail_trial(self, trial: Trial, sentence: str) -> None:
        self.failures.append(f"{trial}: {sentence}")


def numbers(out: Path) -> Any:
    """Read everything that must be equal to the bit: the metrics and the summary without the seconds, the models."""
    summary = json.loads((out / "summary.json").read_text())
    read = read_metrics(out, list(map(TrialRow.of, summary["runs"])))
    lines = [dict(line) for line in read]
    assert len(lines) == sum(len(path.read_text().splitlines()) for path in (out / "metrics").iterdir()), "none twice"
    for row in (*lines, *summary["runs"]):
        assert row.pop("seconds", None) or row.get("error") or "time_s" in row
    models = {
        path.name: {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
        for path in sorted((out / "models").iterdir())
    }
    return lines, summary, models
