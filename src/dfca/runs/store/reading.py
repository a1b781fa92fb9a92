"""Read a run folder once, for tables, figures and pages: `load_run` makes a `Run`.

A trial that is not finished gets a row with its last evaluated round, so that a run can be looked at while it goes on.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from dfca.base.errors import ConfigError, RunError
from dfca.base.files import text_sha256
from dfca.base.renamed import renamed
from dfca.experiment.load import read_stored
from dfca.experiment.sweep import merge, nest, trial_file
from dfca.runs.store.folder import check_form, is_row
from dfca.runs.store.histories import graphs, histories
from dfca.runs.store.metric import metric_key
from dfca.runs.store.metrics import read_metrics


@dataclass(frozen=True)
class Run:
    """What a run folder holds, read once.

    `summary` is summary.json with more: its `runs` also have a row for each trial that is not finished, `histories`
    are the curves by round and `graphs` the facts of the graphs. A file of saved results has the same keys.
    """

    folder: Path
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    topology: dict[str, Any]

    @property
    def swept(self) -> bool:
        """Return whether the run is a sweep."""
        return "points" in self.summary

    @property
    def algorithms(self) -> list[str]:
        """Return the algorithms that have begun, in the order of the config."""
        begun = {run["algorithm"]: None for run in self.summary["runs"]}
        asked = [name for name in self.config.get("algorithms", []) if name in begun]
        return [*asked, *(name for name in begun if name not in asked)]

    @property
    def seeds(self) -> list[int]:
        """Return the seeds that were asked for."""
        seeds = self.config.get("seeds", 1)
        return list(range(seeds)) if isinstance(seeds, int) else list(seeds)

    @property
    def trial_counts(self) -> tuple[int, int]:
        """Count the finished trials and those asked for."""
        if self.swept:
            return count_trials(self.summary)
        finished = {(run["algorithm"], run["seed"]) for run in self.summary["runs"] if run.get("finished")}
        asked = {(name, seed) for name in self.config.get("algorithms", []) for seed in self.seeds}
        return len(finished), len(asked | finished | {(run["algorithm"], run["seed"]) for run in self.summary["runs"]})

    @cached_property
    def timelines(self) -> list[dict[str, Any]]:
        """Read the timelines of the finished trials in virtual time, each with the head of its row."""
        found = []
        for row in self.summary["runs"]:
            path = self.file_of(row, "timeline", ".json")
            if row.get("finished") and path.exists():
                head = {key: row[key] for key in ("algorithm", "seed", "point") if key in row}
                found.append(head | _read_json(path))
        return found

    def file_of(self, row: Mapping[str, Any], folder: str, suffix: str) -> Path:
        """Return where the file of a row's trial is, in one of the folders of the run."""
        digest = row["digest"] if self.swept else ""
        return trial_file(self.folder / folder, suffix, row["algorithm"], row["seed"], digest)

    def at(self, point: Mapping[str, Any]) -> Run:
        """Return the part of a sweep that belongs to one of its points, with that point's config."""
        digest = point["digest"]
        rows = [row for row in self.summary["runs"] if row.get("digest") == digest]
        config = self._configs.get(digest) or merge(self.config, nest(point["point"]))
        return replace(
            self,
            config={key: value for key, value in config.items() if key not in ("grid", "points")}
            | {"algorithms": point["algorithms"], "seeds": point["seeds"]},
            summary={"runs": rows, **{key: point[key] for key in ("clients", "clusters")}},
            metrics=[line for line in self.metrics if line.get("digest") == digest],
            topology={
                name.rpartition("/")[2]: graph for name, graph in self.topology.items() if graph.get("digest") == digest
            },
        )

    @cached_property
    def _configs(self) -> dict[str, dict[str, Any]]:
        """Return the complete config of each point by its digest; none where this version cannot read the file."""
        try:
            config, sweep = read_stored(self.config_text)
            return {point.digest: point.config.values() for point in sweep.expand(config)}
        except ConfigError:
            return {}


def count_trials(summary: Mapping[str, Any]) -> tuple[int, int]:
    """Count the finished trials of a sweep and those asked for or begun."""
    finished = asked = 0
    for point in summary["points"]:
        runs = [run for run in summary["runs"] if run.get("digest") == point["digest"]]
        trials = {(name, seed) for name in point["algorithms"] for seed in point["seeds"]}
        asked += len(trials | {(run["algorithm"], run["seed"]) for run in runs})
        finished += sum(bool(run.get("finished")) for run in runs)
    return finished, asked


def load_run(run_folder: str | Path) -> Run:
    """Read a run folder; a trial that is not finished gets a row with its last evaluated round.

    Raises:
        RunError: if a file is missing or damaged.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise RunError(
            f"{folder} is not a run folder: there is no such directory; give the folder that `dfca run` wrote"
        )
    if not any((folder / name).exists() for name in ("config.toml", "summary.json")):
        raise RunError(f"{folder} is not a run folder (it has no summary.json); `dfca run` makes one")
    config_text = _read(folder / "config.toml")
    try:
        stored = tomllib.loads(config_text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{folder / 'config.toml'} is not valid TOML ({error}); restore it or run again") from error
    config = renamed(stored)
    summary = renamed(_read_json(folder / "summary.json"))
    if not isinstance(summary.get("runs"), list) or not all(map(is_row, summary["runs"])):
        raise RunError(
            f'{folder / "summary.json"} has no list "runs" of rows; restore it, or use `dfca repair {folder}`'
        )
    environment = _read_json(folder / "environment.json")
    check_form(folder, summary, environment.get("dfca", "unknown"))
    with understood(folder):
        metrics = _read_metrics(folder, summary)
        run = Run(
            folder=folder,
            config=config,
            config_text=config_text,
            environment=environment,
            summary=summary,
            metrics=metrics,
            topology=renamed(_read_json(folder / "topology.json")),
        )
        _refuse_edited(run)
        summary["runs"] = _with_unfinished(summary, metrics, config)
        if not run.swept:
            summary.setdefault("clients", config.get("clients"))
        shown = config_text if config == stored else tomli_w.dumps(config)
        more = {"histories": histories(metrics), "graphs": graphs(run.topology)}
        return replace(run, config_text=shown, summary=summary | more)


@contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with files that cannot be understood into one sentence.

    Raises:
        RunError: instead of any error of a value that is missing or of another kind.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RunError(
            f"{folder} holds files of another version or edited by hand ({type(error).__name__}: {error}); restore "
            f"them, or `dfca repair {folder}` moves them aside and the same `dfca run` command computes them again"
        ) from error


def _refuse_edited(run: Run) -> None:
    """Check that the files of a folder were written by one run: their form, the config, rows against metrics."""
    summary = run.summary
    if summary.get("config_sha256") not in (None, text_sha256(run.config_text)):
        raise RunError(
            f"{run.folder / 'config.toml'} was edited after the run, so its numbers would be shown with the wrong "
            "config; restore it, or use another folder for another config"
        )
    last = {(line["algorithm"], line["seed"], line.get("digest")): line for line in run.metrics}
    lines = Counter((line["algorithm"], line["seed"], line.get("digest")) for line in run.metrics)
    for row in summary["runs"]:
        trial = row["algorithm"], row["seed"], row.get("digest") if run.swept else None
        line = last.get(trial)
        if row.get("finished") and isinstance(row.get("lines"), int) and lines[trial] < row["lines"]:
            raise RunError(
                f"{run.folder} lacks lines of metrics: {row['algorithm']}, seed {row['seed']}, has {lines[trial]} of "
                f"{row['lines']}; restore the file, or the same `dfca run` command computes that trial again"
            )
        for key in (metric_key(row), "cluster_accuracy") if line is not None and row.get("finished") else ():
            if key in row and key in line and row[key] != line[key]:  # type: ignore[operator,index]
                raise RunError(
                    f"{run.folder} was edited by hand: {key} of {row['algorithm']}, seed {row['seed']}, is {row[key]} "
                    f"in summary.json and {line[key]} in metrics.jsonl; restore them or run again"  # type: ignore[index]
                )


def _with_unfinished(
    summary: Mapping[str, Any], metrics: list[dict[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Add a row for each trial that has metrics and no row yet, from its last evaluated round; in the config's order.

    Of a sweep, trials of points that are no longer asked for are left out.
    """
    points = {point["digest"]: point for point in summary.get("points", ())}

    def key(record: Mapping[str, Any]) -> tuple[str, int, str]:
        return record["algorithm"], record["seed"], record["digest"] if points else ""

    rows = [row for row in summary["runs"] if not points or row.get("digest") in points]
    known = {key(row): {"finished": False, **row} for row in rows}
    last = {key(line): line for line in metrics if not points or line.get("digest") in points}
    for trial, line in last.items():
        if trial in known and not known[trial].get("error"):
            continue
        point = points.get(trial[2], {})
        known[trial] = {
            **{name: line.get(name) for name in ("algorithm", "seed", "models", "live_clusters", "bytes_sent")},
            **{
                name: line.get(name)
                for name in (metric_key(line), f"all_models_{metric_key(line)}", "cluster_accuracy")
            },
            **({"point": point["point"], "digest": trial[2]} if points else {}),
            "clusters": point.get("clusters") or (config.get("data") or {}).get("distributions") or config["clusters"],
            "rounds": line["round"],
            "seconds": sum((line.get("seconds") or {}).values()) or None,
            **known.get(trial, {}),
            "finished": False,
        }
    order = list(config.get("algorithms", []))
    return sorted(
        known.values(), key=lambda row: order.index(row["algorithm"]) if row["algorithm"] in order else len(order)
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunError(
            f"{path.parent} is not a complete run folder: {path.name} is missing; run the same `dfca run` command again"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RunError(f"{path} cannot be read: {reason}; restore it or run again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is not valid JSON ({error}); restore it, or `dfca repair {path.parent}` moves it aside"
        ) from error
    if not isinstance(value, dict):
        raise RunError(
            f"{path} must hold a JSON object, got {type(value).__name__}; restore it, or `dfca repair {path.parent}` "
            "moves it aside"
        )
    return value


def _read_metrics(folder: Path, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not any((folder / name).exists() for name in ("metrics.jsonl", "metrics")):
        name = "metrics.jsonl" if summary.get("form", 1) == 1 else "metrics"
        raise RunError(
            f"{folder} is not a complete run folder: {name} is missing; run the same `dfca run` command again"
        )
    rows = [row for row in summary["runs"] if isinstance(row, dict) and {"algorithm", "seed"} <= row.keys()]
    return read_metrics(folder, rows)
