"""Repair a run folder: move what cannot be read aside, so that the same `dfca run` command continues.

Nothing is deleted: damaged files are moved to `damaged/`. What belongs to trials that are whole stays. The next run
computes a trial again if it has no row in the summary or lacks lines of metrics: from its last checkpoint where there
is one, to the same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from dfca.base.files import atomic_write, explain_write_errors, read_text, sha256
from dfca.experiment.load import Experiment
from dfca.runs.store.folder import RunFolder, head_of, is_row, read_experiment, write_json
from dfca.runs.store.metrics import FOLDER as METRICS
from dfca.runs.store.metrics import check_lines
from dfca.runs.store.rows import TrialRow, contradiction
from dfca.sim.metrics_table import JsonObject

ASIDE = "damaged"


def repair(run_folder: str | Path) -> list[str]:
    """Repair a run folder; returns what was done, one sentence each, none where all is well.

    Raises RunError if it is no run folder, another process writes to it, or its config.toml cannot be read.
    """
    path = Path(run_folder)
    experiment = read_experiment(path)
    folder = RunFolder.locked(path, swept=bool(experiment.sweep))
    try:
        return list(_repair(folder, experiment))
    finally:
        folder.close()


def _repair(folder: RunFolder, experiment: Experiment) -> Iterator[str]:
    path = folder.path
    for name in ("environment.json", "topology.json"):
        if (problem := _json_problem(path / name)) is not None:
            yield from _move_aside(path, path / name, problem)
            atomic_write(path / name, "{}\n")
    problem = _json_problem(path / "summary.json")
    summary: JsonObject = head_of(experiment) | {"runs": []}
    summary["config_sha256"] = sha256(path / "config.toml")  # as it stands: an older version may have written it
    if problem is None:
        stored = json.loads(read_text(path / "summary.json"))
        if isinstance(stored.get("runs"), list):
            summary = stored | {"runs": [row for row in stored["runs"] if is_row(row)]}
            problem = None if summary == stored else "rows are no rows of trials"
        else:
            problem = 'it has no list "runs"'
    if problem is not None:
        yield from _move_aside(path, path / "summary.json", problem)
        write_json(path / "summary.json", summary)
    for file in sorted((path / METRICS).glob("*.jsonl")):
        if (problem := check_lines(file)) is not None:
            yield from _move_aside(path, file, problem)
    yield from _drop_rows(folder)


def _drop_rows(folder: RunFolder) -> Iterator[str]:
    """Drop the rows of trials whose lines of metrics are missing or contradict the row."""
    summary = folder.summary()
    kept = []
    for values in summary["runs"]:
        row = TrialRow.of(values)
        file = folder.metrics_file(row)
        problem = "lines of metrics are missing" if row.finished and folder.lacks_lines(row) else None
        if problem is None and row.finished and (problem := _contradiction(row, file)) is not None:
            yield from _move_aside(folder.path, file, problem)
        if problem is None:
            kept.append(values)
        else:
            yield f"{row.algorithm}, seed {row.seed}: {problem}; the next `dfca run` computes it again"
    if len(kept) < len(summary["runs"]):
        yield from _move_aside(folder.path, folder.path / "summary.json", "it names trials that are not whole")
        write_json(folder.path / "summary.json", summary | {"runs": kept})


def _contradiction(row: TrialRow, file: Path) -> str | None:
    """Compare a row with the last line of metrics; None where they agree, or there is no line."""
    if not file.exists():
        return None
    lines = read_text(file, errors="replace").splitlines()
    last = json.loads(lines[-1]) if lines else {}
    key = contradiction(row, last)
    return None if key is None else f"{key} is {row[key]} in summary.json and {last[key]} in the metrics"


def _json_problem(path: Path) -> str | None:
    """Return why a file is no JSON object, None where it is one."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        return "it is missing"
    except (OSError, ValueError, RecursionError):
        return "it is not JSON"
    return None if isinstance(value, dict) else "it is no JSON object"


def _move_aside(path: Path, file: Path, problem: str) -> Iterator[str]:
    """Move a file to `damaged/`, under a name that is free there."""
    if not file.exists():
        yield f"{file.relative_to(path)}: {problem}; made anew"
        return
    with explain_write_errors(path / ASIDE):
        (path / ASIDE).mkdir(exist_ok=True)
        number, place = 0, path / ASIDE / file.name
        while place.exists() or place.is_symlink():
            number += 1
            place = path / ASIDE / f"{file.name}.{number}"
        os.rename(file, place)
    yield f"{file.relative_to(path)}: {problem}; moved to {place.relative_to(path)}"
