"""Put trials that were measured anew into a file of results: python docs/merge_results.py FILE RUN [RUN ...].

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
from dfca.experiment.config import flatten
from dfca.experiment.load import load_experiment
from dfca.report.results import save_results, stored_run
from dfca.runs.store.reading import Run, load_run

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
Row = dict[str, Any]


def merge(old: Run, new: Run) -> Run:
    """Lay the trials of a run over those of a file of results.

    Raises SystemExit where the two differ in their setting or in a graph.
    """
    name, scale = new.summary["experiment"], new.summary["scale"]
    _refuse("experiments", [old.summary["experiment"], old.summary["scale"]], [name, scale])
    mine, theirs = flatten(old.config), flatten(new.config)
    both = [key for key in mine if key in theirs and not key.startswith(OF_ROWS)]
    _refuse("settings", {key: mine[key] for key in both}, {key: theirs[key] for key in both})
    graphs = [{_at(run, graph): _facts(graph) for graph in run.summary["graphs"]} for run in (old, new)]
    common = graphs[0].keys() & graphs[1].keys()
    _refuse("graphs", *({key: each[key] for key in common} for each in graphs))

    chosen = load_experiment(name, scale if scale != "default" else None)
    digests = {repr(point.at or {}): point.digest for point in chosen.points}
    rows: dict[tuple[Any, ...], Row] = {}
    for run in (old, new):
        for row in run.summary["runs"]:
            if row.get("finished"):
                key = row["algorithm"], row["seed"], repr(row.get("point", {}))
                rows[key] = _of_commit(row, run) | {"digest": digests[key[2]]}
    everywhere = (name for point in chosen.points for name in point.config.algorithms)
    order = list(dict.fromkeys([*chosen.config.algorithms, *everywhere]))
    ordered = sorted(
        rows.values(), key=lambda row: (list(digests.values()).index(row["digest"]), order.index(row["algorithm"]))
    )
    measured = {row["algorithm"] for row in ordered}
    names = [each for each in order if each in measured]
    seeds = sorted({row["seed"] for row in ordered})
    summary = new.summary | {"runs": ordered}
    if "points" in summary:
        points = {repr(each["point"]): each for run in (old, new) for each in run.summary["points"]}
        summary["points"] = [
            points[at] | {"digest": digest, "algorithms": _names(ordered, digest), "seeds": seeds}
            for at, digest in digests.items()
            if at in points
        ]
    else:
        summary["digest"] = next(iter(digests.values()))
    for part in ("histories", "graphs"):
        found = {
            (each.get("algorithm"), each["seed"], _at(run, each)): run
            for run in (old, new)
            for each in run.summary[part]
        }
        summary[part] = [
            each | ({"digest": digests[_at(run, each)[1]]} if "digest" in each else {})
            for run in (old, new)
            for each in run.summary[part]
            if found[each.get("algorithm"), each["seed"], _at(run, each)] is run
        ]
    config = new.config | {"algorithms": names, "seeds": seeds}
    return replace(new, config=config, config_text=tomli_w.dumps(config), summary=summary)


def _names(rows: Sequence[Row], digest: str) -> list[str]:
    """List the algorithms of the rows of one point, in their order."""
    return list(dict.fromkeys(row["algorithm"] for row in rows if row["digest"] == digest))


def _of_commit(row: Row, run: Run) -> Row:
    """Write into a row what the file knows of it: its commit, and its momentum, which files of version 0.1 lack."""
    known = {"commit": run.environment.get("commit")} | row
    if "momentum" not in known:
        known["momentum"] = 0.9 if base_of(row["algorithm"]) == "dfedavgm" else run.config["local"].get("momentum", 0.0)
    return known


def _at(run: Run, record: Mapping[str, Any]) -> tuple[int, str]:
    """Name the seed and the point of a record."""
    points = {point["digest"]: repr(point["point"]) for point in run.summary.get("points", ())}
    return record["seed"], points.get(str(record.get("digest")), "{}")


def _facts(graph: Mapping[str, Any]) -> Row:
    return {key: round(graph[key], 9) for key in OF_GRAPHS}


def _refuse(what: str, here: Any, there: Any) -> None:
    if here != there:
        raise SystemExit(f"the {what} differ: the file has {here}, the run {there}; rows of a table must share them")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    merged = stored_run(given.file)
    for folder in given.runs:
        merged = merge(merged, load_run(folder))
    save_results(merged, given.file)


if __name__ == "__main__":
    main()
