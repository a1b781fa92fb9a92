"""The finished trials of a result file, and some of them by algorithm and point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dfca.report.results import load_results

ROOT = Path(__file__).parent.parent
Runs = list[dict[str, Any]]


def load(name: str) -> Runs:
    """Read the finished trials of a result file, each with its point; none where there is no such file."""
    path = ROOT / "results" / f"{name}.json"
    if not path.exists():
        return []
    return [run for run in load_results(path)["runs"] if run.get("finished")]


def found(run: dict[str, Any]) -> bool:
    """Return whether every client ended in its cluster."""
    return run["cluster_accuracy"] is not None and run["cluster_accuracy"] >= 0.999


def of(runs: Runs, **wanted: Any) -> Runs:
    """Select trials by algorithm and by keys of their point (dots as double underscores)."""
    algorithm = wanted.pop("algorithm", None)
    keys = {key.replace("__", "."): value for key, value in wanted.items()}
    return [
        run
        for run in runs
        if (algorithm is None or run["algorithm"] == algorithm)
        and all(run.get("point", {}).get(key) == value for key, value in keys.items())
    ]
