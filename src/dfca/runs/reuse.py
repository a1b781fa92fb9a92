"""Finished trials of other run folders: copy them instead of running them again, or show several runs together.

A trial is known by its algorithm, its seed and the digest of its complete config, so a table and a figure of the same
runs share them, and seeds that were run on several machines make one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dfca.base.errors import RunError
from dfca.experiment.load import read_stored
from dfca.experiment.sweep import Trial
from dfca.runs.store.folder import RunFolder
from dfca.runs.store.reading import Run, load_run
from dfca.runs.store.rows import GraphTable
from dfca.sim.metrics_table import JsonObject, StoredRow

HEAD = ("algorithm", "seed", "point", "digest")


def adopt(folder: RunFolder, other: Path, trials: Sequence[Trial]) -> int:
    """Copy those of the trials that another run folder has finished and this one has not; returns how many.

    Raises RunError if the other is not a run folder, or damaged.
    """
    there, finished = load_run(other), folder.finished()
    rows = {row.key(swept=True): row for row in there.trials if row.finished}
    count = 0
    for trial in trials:
        digest = trial.point.digest
        row = rows.get((trial.algorithm, trial.seed, digest))
        if row is None or trial.key in finished:
            continue
        for name, graph in there.topology.items():
            if graph.get("digest", digest) == digest and name.rpartition("/")[2] == str(trial.seed):
                stored = GraphTable(facts=graph["facts"], edges=graph["edges"], clusters=graph.get("clusters"))
                folder.store_topology(trial.point, trial.seed, stored)
        key = trial.algorithm, trial.seed
        lines = (line for line in there.metrics if (line.algorithm, line.seed) == key and line.digest in ("", digest))
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
    varied = {key for part in (sweep, other_sweep) for table in (part.grid, *part.points) for key in table}
    differences = config.differences(other, leave_out=varied)
    if bool(sweep) != bool(other_sweep):
        differences = [f"only {'there' if sweep else 'here'} {', '.join(sorted(varied))} is varied"]
    if differences:
        raise RunError(
            f"{first.folder} (there) and {second.folder} (here) cannot be averaged: {', '.join(differences)}; "
            "report them one by one"
        )
    trials = {row.key(swept=True): row for row in first.trials}
    for row in second.trials:
        mine = trials.get(row.key(swept=True))
        if mine is not None and mine.finished and row.finished and mine.score != row.score:
            raise RunError(
                f"{first.folder} and {second.folder} cannot be averaged: both hold {row.algorithm}, seed {row.seed}, "
                f"with {row.metric.key} {mine.score} and {row.score}; report them one by one"
            )
        if mine is None or not mine.finished:
            trials[row.key(swept=True)] = row
    lists = {key: list(dict.fromkeys([*getattr(config, key), *getattr(other, key)])) for key in ("algorithms", "seeds")}
    lines = {(*row.key(swept=True), row.round): row for row in (*second.metrics, *first.metrics)}
    curves = {(row.algorithm, row.seed, row.digest): row for row in (*second.histories, *first.histories)}
    graphs = {(graph.seed, graph.digest): graph for graph in (*second.graphs, *first.graphs)}
    return replace(
        first,
        config=first.config | lists,
        head=first.head | ({"points": _join_points(first, second)} if first.swept else {}),
        trials=list(trials.values()),
        metrics=list(lines.values()),
        topology=second.topology | first.topology,
        histories=list(curves.values()),
        graphs=list(graphs.values()),
    )


def _join_points(first: Run, second: Run) -> list[JsonObject]:
    """Return the points of two sweeps; a point of both has the algorithms and seeds of both."""
    points = {point["digest"]: dict(point) for point in first.head["points"]}
    for point in second.head.get("points", ()):
        known = points.setdefault(point["digest"], dict(point))
        for key in ("algorithms", "seeds"):
            known[key] = list(dict.fromkeys([*known[key], *point[key]]))
    return list(points.values())


def _without_head(record: StoredRow) -> JsonObject:
    return {key: value for key, value in record.items() if key not in HEAD}
