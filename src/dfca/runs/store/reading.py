"""Read a run folder once, for tables, figures and pages: `load_run` makes a `Run`.

A trial that is not finished gets a row with its last evaluated round: a run can be looked at while it is running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import tomli_w

from dfca.base.errors import ConfigError, DfcaError, RunError
from dfca.base.files import text_sha256
from dfca.base.renamed import renamed
from dfca.base.validation import parse_toml
from dfca.experiment.load import read_stored
from dfca.experiment.sweep import trial_file
from dfca.experiment.variants import merge, nest
from dfca.runs.store.folder import check_form, read_json, read_summary, stored_text
from dfca.runs.store.metric import ACCURACY, ShownMetric
from dfca.runs.store.metrics import read_metrics
from dfca.runs.store.rows import (
    GraphFacts,
    GraphTable,
    History,
    PointRow,
    TrialRow,
    contradiction,
    graph_facts,
    histories,
)
from dfca.sim.metrics_table import ALL_MODELS, EvaluationRow, JsonObject


@dataclass(frozen=True)
class Run:
    """What a run folder, or a file of results, holds, read once."""

    folder: Path
    config: JsonObject
    config_text: str
    environment: JsonObject
    head: JsonObject  # summary.json, or the file of results, without what follows
    trials: Sequence[TrialRow]  # also those that are not finished
    metrics: Sequence[EvaluationRow]
    topology: dict[str, GraphTable]  # empty in a file of results
    histories: Sequence[History]
    graphs: Sequence[GraphFacts]

    @property
    def experiment(self) -> str:
        return str(self.head.get("experiment", ""))

    @property
    def swept(self) -> bool:
        return "points" in self.head

    @cached_property
    def points(self) -> list[PointRow]:
        """The points of a sweep; without one, the run itself."""
        whole = {"algorithms": self.config.get("algorithms", ()), "seeds": self.seeds, **self.head}
        return list(map(PointRow.of, self.head["points"] if self.swept else [whole]))

    @property
    def varying(self) -> list[str]:
        """The keys that vary in a sweep, in the order in which the points name them; those of the grid last."""
        places = [point.at for point in self.points]
        return sorted(
            dict.fromkeys(key for at in places for key in at), key=lambda key: all(key in at for at in places)
        )

    @cached_property
    def metric(self) -> ShownMetric:
        return metric_of_trials(self.trials)

    @property
    def algorithms(self) -> list[str]:
        """The algorithms that have begun, in the order of the config."""
        begun = dict.fromkeys(trial.algorithm for trial in self.trials)
        asked = [name for name in self.config.get("algorithms", []) if name in begun]
        return [*asked, *(name for name in begun if name not in asked)]

    @property
    def seeds(self) -> list[int]:
        """The seeds that were asked for."""
        seeds = self.config.get("seeds", 1)
        return list(range(seeds)) if isinstance(seeds, int) else list(seeds)

    @property
    def trial_counts(self) -> tuple[int, int]:
        """How many trials are finished, and how many were asked for or have begun."""
        finished = asked = 0
        for point in self.points:
            trials = self.trials_at(point)
            wanted = {(name, seed) for name in point.algorithms for seed in point.seeds}
            asked += len(wanted | {(trial.algorithm, trial.seed) for trial in trials})
            finished += sum(trial.finished for trial in trials)
        return finished, asked

    def trials_at(self, point: PointRow) -> list[TrialRow]:
        """Return the trials of a point; of a run without a sweep, all."""
        return [trial for trial in self.trials if not self.swept or trial.digest == point.digest]

    def file_of(self, trial: TrialRow, folder: str, suffix: str) -> Path:
        """Return where a file of a trial is, in one of the folders of the run."""
        return trial_file(self.folder / folder, suffix, *trial.key(self.swept))

    def at(self, point: PointRow) -> Run:
        """Return the part of a sweep that belongs to one of its points, with that point's config."""
        config = self._configs.get(point.digest) or merge(self.config, nest(dict(point.at)))
        return replace(
            self,
            config={key: value for key, value in config.items() if key not in ("grid", "points")}
            | {"algorithms": list(point.algorithms), "seeds": list(point.seeds)},
            head={"clients": point.clients, "clusters": point.clusters},
            trials=self.trials_at(point),
            metrics=[row for row in self.metrics if row.digest == point.digest],
            topology={
                name.rpartition("/")[2]: graph
                for name, graph in self.topology.items()
                if graph.get("digest") == point.digest
            },
        )

    @cached_property
    def _configs(self) -> dict[str, JsonObject]:
        """The complete config of each point by its digest; none where this version cannot read the file."""
        try:
            config, sweep = read_stored(self.config_text)
            return {point.digest: point.config.values() for point in sweep.expand(config)}
        except ConfigError:
            return {}


def metric_of_trials(trials: Sequence[TrialRow]) -> ShownMetric:
    """Return the metric of trials: that of the first that describes it, else of the first that is not accuracy."""
    described = (trial.metric for trial in trials if "metric" in trial)
    return next(described, None) or next((t.metric for t in trials if t.metric != ACCURACY), ACCURACY)


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
    config_text = stored_text(folder / "config.toml")
    try:
        stored = parse_toml(config_text)
    except ValueError as error:
        raise RunError(f"{folder / 'config.toml'} is not valid TOML ({error}); restore it or run again") from error
    config, summary = renamed(stored), read_summary(folder / "summary.json")
    environment = read_json(folder / "environment.json")
    check_form(folder, summary, environment.get("dfca", "unknown"))
    with understood(folder):
        if summary.get("config_sha256") not in (None, text_sha256(config_text)):
            raise RunError(
                f"{folder / 'config.toml'} was edited after the run, so its numbers would be shown with the wrong "
                "config; restore it, or use another folder for another config"
            )
        rows = [TrialRow.of({"finished": False, **row}) for row in summary["runs"]]
        metrics, topology = _read_metrics(folder, summary, rows), renamed(read_json(folder / "topology.json"))
        head = {key: value for key, value in summary.items() if key != "runs"}
        if "points" not in head:
            head.setdefault("clients", config.get("clients"))
        shown = config_text if config == stored else tomli_w.dumps(config)
        run = Run(folder, config, shown, environment, head, rows, metrics, topology, [], [])
        _refuse_edited(run)
        return replace(run, trials=_with_unfinished(run), histories=histories(metrics), graphs=graph_facts(topology))


@contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with files that cannot be understood into one sentence.

    Raises RunError instead of any error of a value that is missing or of another kind.
    """
    try:
        yield
    except DfcaError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RunError(
            f"{folder} holds files of another version or edited by hand ({type(error).__name__}: {error}); restore "
            f"them, or `dfca repair {folder}` moves them aside and the same `dfca run` command computes them again"
        ) from error


def _refuse_edited(run: Run) -> None:
    """Check that the rows and the metrics of a folder were written by one run."""
    last = {(line.algorithm, line.seed, line.digest): line for line in run.metrics}
    lines = Counter((line.algorithm, line.seed, line.digest) for line in run.metrics)
    for row in run.trials:
        trial = row.key(run.swept)
        if not row.finished:
            continue
        if row.lines is not None and lines[trial] < row.lines:
            raise RunError(
                f"{run.folder} lacks lines of metrics: {row.algorithm}, seed {row.seed}, has {lines[trial]} of "
                f"{row.lines}; restore the file, or the same `dfca run` command computes that trial again"
            )
        if trial in last and (key := contradiction(row, last[trial])) is not None:
            raise RunError(
                f"{run.folder} was edited by hand: {key} of {row.algorithm}, seed {row.seed}, is {row[key]} "
                f"in summary.json and {last[trial][key]} in metrics.jsonl; restore them or run again"
            )


def _with_unfinished(run: Run) -> list[TrialRow]:
    """Add a row for each trial that has metrics and no row yet, from its last evaluated round; in the config's order.

    Of a sweep, trials of points that are no longer asked for are left out.
    """
    points = {point.digest if run.swept else "": point for point in run.points}
    rows = {row.key(run.swept): row for row in run.trials if not run.swept or row.digest in points}
    last = {line.key(run.swept): line for line in run.metrics if not run.swept or line.digest in points}
    for trial, line in last.items():
        known = rows.get(trial)
        if known is None or known.error:
            rows[trial] = _unfinished(run, line, points[trial[2]], {} if known is None else known.stored)
    order = list(run.config.get("algorithms", []))
    return sorted(rows.values(), key=lambda row: order.index(row.algorithm) if row.algorithm in order else len(order))


def _unfinished(run: Run, line: EvaluationRow, point: PointRow, known: JsonObject) -> TrialRow:
    """Make the row of a trial that is not finished; `known`: the row of one that failed."""
    kept = ("algorithm", "seed", "models", "live_clusters", "bytes_sent")
    scores = (line.metric, ALL_MODELS + line.metric, "cluster_accuracy")
    true = point.clusters if run.swept else None
    return TrialRow.of(
        {
            **{name: line.get(name) for name in (*kept, *scores)},
            **({"point": point.at, "digest": point.digest} if run.swept else {}),
            "clusters": true or (run.config.get("data") or {}).get("distributions") or run.config["clusters"],
            "rounds": line.round,
            "seconds": sum((line.get("seconds") or {}).values()) or None,
            **known,
            "finished": False,
        }
    )


def _read_metrics(folder: Path, summary: JsonObject, rows: Sequence[TrialRow]) -> list[EvaluationRow]:
    if not any((folder / name).exists() for name in ("metrics.jsonl", "metrics")):
        name = "metrics.jsonl" if summary.get("form", 1) == 1 else "metrics"
        raise RunError(
            f"{folder} is not a complete run folder: {name} is missing; run the same `dfca run` command again"
        )
    return read_metrics(folder, rows)
