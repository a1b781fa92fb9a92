"""The finished trials of a result file, and some of them by algorithm and point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dfca.report.results import stored_run
from dfca.runs.store.rows import TrialRow

ROOT = Path(__file__).parent.parent
Runs = list[TrialRow]


def load(name: str) -> Runs:
    """Read the finished trials of a result file, each with its point; none where there is no such file."""
    path = ROOT / "results" / f"{name}.json"
    if not path.exists():
        return []
    return [trial for trial in stored_run(path).trials if trial.finished]


def of(runs: Runs, **wanted: Any) -> Runs:
    """Select trials by algorithm and by keys of their point (dots as double underscores)."""
    algorithm = wanted.pop("algorithm", None)
    keys = {key.replace("__", "."): value for key, value in wanted.items()}
    return [
        run
        for run in runs
        if algorithm in (None, run.algorithm) and all(run.point.get(key) == value for key, value in keys.items())
    ]
