"""Finished trials of other run folders: take them over instead of running them again, or show several runs together.

A trial is known by its algorithm, its seed and the digest of its complete config, so a table and a figure of the same
runs share them, and seeds that were run on several machines make one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dfca.base.errors import RunError
from dfca.experiment.load import read_stored
from dfca.experiment.sweep import Trial
from dfca.runs.store.folder import RunFolder
from dfca.runs.store.metric import metric_key
from dfca.runs.store.reading import Run, load_run

HEAD = ("algorithm", "seed", "point", "digest")


def adopt(folder: RunFolder, other: Path, trials: Sequence[Trial]) -> int:
    """Copy those of the trials that another run folder has finished and this one has not; returns how many.

    Raises:
        RunError: if the other is not a run folder, or damaged.
    """
    there, finished = load_run(other), folder.finished()
    rows = {(row["algorithm"], row["seed"], row.get("digest")): row for row in there.summary["runs"] if row["finished"]}
    count = 0
    for trial in trials:
        row = rows.get((trial.algorithm, trial.seed, trial.point.digest))
        if row is None or trial.key in finished:
            continue
        digest = trial.point.digest
        for name, graph in there.topology.items():
            if graph.get("digest", digest) == digest and name.rpartition("/")[2] == str(trial.seed):
                stored = {key: value for key, value in graph.items() if key != "digest"}
                folder.store_topology(trial.point, trial.seed, stored)
        key = trial.algorithm, trial.seed, digest
        lines = (each for each in there.metrics if (each["algorithm"], each["seed"], each.get("digest", digest)) == key)
        folder.metrics.put(trial, map(_without_head, lines))
        folder.finish(trial, trial.head | {"digest": digest} | _without_head(row))
        count += 1
    return count


def join(runs: Sequence[Run]) -> Run:
    """Lay runs of one config together: the trials of all, as if one run had made them.

    Raises:
        RunError: if their configs differ in a key that no sweep varies, naming the keys, or one trial has two results.
    """
    joined = runs[0]
    for run in runs[1:]:
        joined = _join(joined, run)
    return joined


def _join(first: Run, second: Run) -> Run:
    (config, sweep), (other, other_sweep) = read_stored(first.config_text), read_stored(second.config_text)
    varied = {key for each in (sweep, other_sweep) for table in (each.grid, *each.points) for key in table}
    differences = config.differences(other, leave_out=varied)
    if bool(sweep) != bool(other_sweep):
        differences = [f"only {'there' if sweep else 'here'} {', '.join(sorted(varied))} is varied"]
    if differences:
        raise RunError(
            f"{first.folder} (there) and {second.folder} (here) cannot be averaged: {', '.join(differences)}; "
            "report them one by one"
        )
    rows = {_key(row): row for row in first.summary["runs"]}
    for row in second.summary["runs"]:
        mine = rows.get(_key(row))
        both = mine is not None and mine.get("finished") and row.get("finished")
        key = metric_key(row)
        if both and mine is not None and mine.get(key) != row[key]:
            raise RunError(
                f"{first.folder} and {second.folder} cannot be averaged: both hold {row['algorithm']}, seed "
                f"{row['seed']}, with {key} {mine.get(key)} and {row[key]}; report them one by one"
            )
        if mine is None or not mine.get("finished"):
            rows[_key(row)] = row
    points = {point["digest"]: dict(point) for point in first.summary.get("points", ())}
    for point in second.summary.get("points", ()):
        known = points.setdefault(point["digest"], dict(point))
        for key in ("algorithms", "seeds"):
            known[key] = list(dict.fromkeys([*known[key], *point[key]]))
    lists = {key: list(dict.fromkeys([*getattr(config, key), *getattr(other, key)])) for key in ("algorithms", "seeds")}
    summary = first.summary | {"runs": list(rows.values())} | ({"points": list(points.values())} if points else {})
    for key in ("histories", "graphs"):
        known = {_key(each): each for each in (*second.summary[key], *first.summary[key])}
        summary[key] = list(known.values())
    lines = {(*_key(line), line["round"]): line for line in (*second.metrics, *first.metrics)}
    return replace(
        first,
        config=first.config | lists,
        summary=summary,
        metrics=list(lines.values()),
        topology=second.topology | first.topology,
    )


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record.get("algorithm"), record["seed"], record.get("digest")


def _without_head(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in HEAD}
