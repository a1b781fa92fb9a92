"""Put newly measured trials into a file of results: python docs/merge_results.py FILE RUN [RUN ...].

The file need not be there yet. `--scale NAME` says which scale of its preset a run has measured where it was asked for
in another way (`--set`): refused where its settings are not those of that scale.

Rows of an algorithm and seed that a run folder has finished take the place of those in the file, or come beside them;
all others stay. Every row says on which commit it was measured. Refused where a setting or a graph of the two differs:
rows of a table must share both.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from dfca.algorithms import base_of
from dfca.experiment.load import load_experiment
from dfca.experiment.variants import flatten
from dfca.report.results import save_results, stored_run
from dfca.report.rows import RunReport
from dfca.report.virtual.summary import VirtualResults, is_virtual
from dfca.runs.store.reading import Run, load_run
from dfca.runs.store.rows import GraphFacts, History, TrialRow

OF_ROWS = (
    "title",
    "description",
    "grid",
    "points",
    "algorithm",
    "seeds",
    "clusters",
    "device",
    "engine",
    "bank",
    "personal",
)
"""Keys, and beginnings of keys, that say which rows there are, not in which world; a point names its clusters."""
OF_GRAPHS = ("nodes", "edges", "components", "spectral_gap")


def merge(old: Run, new: Run) -> Run:
    """Lay the trials of a run over those of a file of results.

    Raises SystemExit where the two differ in their setting or in a graph.
    """
    name, scale = new.experiment, new.head["scale"]
    _refuse("experiments", [old.experiment, old.head["scale"]], [name, scale])
    mine, theirs = flatten(old.config), flatten(new.config)
    both = [key for key in mine if key in theirs and not key.startswith(OF_ROWS)]
    _refuse("settings", {key: mine[key] for key in both}, {key: theirs[key] for key in both})
    graphs = [{_at(run, graph): _facts(graph) for graph in run.graphs} for run in (old, new)]
    common = graphs[0].keys() & graphs[1].keys()
    _refuse("graphs", *({key: facts[key] for key in common} for facts in graphs))

    chosen = load_experiment(name, scale if scale != "default" else None)
    digests = {repr(point.at or {}): point.digest for point in chosen.points}
    trials: dict[tuple[str, int, str], TrialRow] = {}
    for run in (old, new):
        for trial in run.trials:
            if trial.finished:
                key = trial.algorithm, trial.seed, repr(trial.point)
                trials[key] = trial.changed(**_of_commit(trial, run), digest=digests[key[2]])
    everywhere = (name for point in chosen.points for name in point.config.algorithms)
    measured_names = (trial.algorithm for trial in trials.values())
    order = list(dict.fromkeys([*chosen.config.algorithms, *everywhere, *measured_names]))
    places = list(digests.values())
    virtual = is_virtual(new)  # its tables have one variant after the other, the others one point

    def rank(trial: TrialRow) -> tuple[int, int]:
        place, name = places.index(trial.digest), order.index(trial.algorithm)
        return (name, place) if virtual else (place, name)

    ordered = sorted(trials.values(), key=rank)
    measured = {trial.algorithm for trial in ordered}
    seeds = sorted({trial.seed for trial in ordered})
    head = dict(new.head)
    if new.swept:
        points = {repr(point.at): point.stored for run in (old, new) for point in run.points}
        head["points"] = [
            {**points[at], "digest": digest, "algorithms": _names(ordered, digest), "seeds": seeds}
            for at, digest in digests.items()
            if at in points
        ]
    else:
        head["digest"] = places[0]
    if virtual:
        kept = [VirtualResults.of(run).kept() for run in (old, new)]
        anew = {(trial.algorithm, trial.seed, repr(trial.point)) for trial in new.trials if trial.finished}
        for what in ("courses", "timelines"):
            before, after = ({(c["algorithm"], c["seed"], repr(c["point"])): c for c in each[what]} for each in kept)
            drawn = {key: course for key, course in before.items() if key not in anew} | after
            keys = ((trial.algorithm, trial.seed, repr(trial.point)) for trial in ordered)
            head[what] = [drawn[key] for key in keys if key in drawn]
    curves = {
        (curve.algorithm, *_at(run, curve)): replace(curve, digest=_digest(run, curve, digests))
        for run in (old, new)
        for curve in run.histories
    }
    graphs_by_place = {
        _at(run, graph): replace(graph, digest=_digest(run, graph, digests))
        for run in (old, new)
        for graph in run.graphs
    }
    config = new.config | {"algorithms": [name for name in order if name in measured], "seeds": seeds}
    return replace(
        new,
        config=config,
        config_text=tomli_w.dumps(config),
        head=head,
        trials=ordered,
        histories=list(curves.values()),
        graphs=list(graphs_by_place.values()),
    )


def at_scale(run: Run, scale: str) -> Run:
    """Return a run as one of a scale of its preset.

    Raises SystemExit where its settings are not those of the scale.
    """
    chosen = load_experiment(run.experiment, scale)
    ours, preset = flatten(run.config), flatten(chosen.config.values())
    keys = [key for key in {**ours, **preset} if not key.startswith(OF_ROWS)]
    _refuse("settings", {key: preset.get(key) for key in keys}, {key: ours.get(key) for key in keys})
    config = chosen.config.values() | {key: run.config[key] for key in ("algorithms", "seeds")}
    head = {key: value for key, value in run.head.items() if key != "changes"} | {"scale": scale}
    return replace(run, config=config, config_text=tomli_w.dumps(config), head=head)


def _names(trials: Sequence[TrialRow], digest: str) -> list[str]:
    """List the algorithms of the trials of one point, in their order."""
    return list(dict.fromkeys(trial.algorithm for trial in trials if trial.digest == digest))


def _of_commit(trial: TrialRow, run: Run) -> dict[str, Any]:
    """Return what the file knows of a trial: its commit, and its momentum, which files of version 0.1 lack."""
    known = {"commit": trial.get("commit", run.environment.get("commit"))}
    if "momentum" not in trial:
        known["momentum"] = 0.9 if base_of(trial.algorithm) == "dfedavgm" else run.config["local"].get("momentum", 0.0)
    return known


def _at(run: Run, record: History | GraphFacts) -> tuple[int, str]:
    """Name the seed and the point of a record."""
    points = {point.digest: repr(point.at) for point in run.points} if run.swept else {}
    return record.seed, points.get(record.digest, "{}")


def _digest(run: Run, record: History | GraphFacts, digests: Mapping[str, str]) -> str:
    """Return the digest that this version gives to the point of a record."""
    return digests[_at(run, record)[1]] if record.digest else ""


def _facts(graph: GraphFacts) -> dict[str, float]:
    return {key: round(graph.facts[key], 9) for key in OF_GRAPHS}


def _refuse(what: str, here: Any, there: Any) -> None:
    if here != there:
        raise SystemExit(f"the {what} differ: the file has {here}, the run {there}; rows of a table must share them")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--scale", help="the scale that the runs have measured")
    given = parser.parse_args(arguments)
    merged = stored_run(given.file) if given.file.exists() else None
    for folder in given.runs:
        run = load_run(folder) if given.scale is None else at_scale(load_run(folder), given.scale)
        merged = merge(run if merged is None else merged, run)
    assert merged is not None
    save_results(RunReport.of(merged), given.file)


if __name__ == "__main__":
    main()
