"""Run folders: what a run leaves on disk, and how it is continued after anything but the loss of the disk.

    config.toml       the complete config
    environment.json  the machine and the versions
    metrics/          <trial>.jsonl: one line per evaluated round (`runs.store.metrics`)
    summary.json      the form of the folder, one row per finished or failed trial
    topology.json     the graph of each seed
    checkpoint/       <trial>/round-000120.safetensors and .json, the last two (`runs.store.checkpoints`)
    models/           <trial>.safetensors, where asked for (`runs.store.models`)
    tensorboard/, wandb/    what `--log` wrote (`runs.trackers`); export/, what `dfca export` did
    trace/            <trial>.jsonl: every event of a trial in virtual time, where asked for
    timeline/         <trial>.json: what the report draws as lanes, of the first seed in virtual time
    report.html       made from the above, its figures of virtual time also as figures/*.svg

A trial is named "<algorithm>-<seed>"; in a sweep the name ends in the first digits of its digest. There, config.toml
holds the base and the tables of the sweep, summary.json lists the points asked for last, every line and row names its
point and its digest, and graphs are found under "<label>/<seed>".

A line of metrics counts once the summary or a checkpoint has reached its round. So every file may be ahead of the next
one, never behind, and what is ahead is dropped and computed again to the same bits. The files of one trial are written
by the process that runs it, all others by the one that holds the lock.

Forms ("form" in summary.json): 1, of version 0.1, has one metrics.jsonl instead of metrics/; it is read as it is and
becomes 2 when the run is continued. A newer form than `FORM` is refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor

from dfca.base.errors import ConfigError, RunError
from dfca.base.files import (
    NO_LINKS,
    Stream,
    atomic_save,
    atomic_write,
    explain_write_errors,
    read_text,
    remove_leftovers,
    text_sha256,
)
from dfca.base.renamed import renamed
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment, read_stored
from dfca.experiment.sweep import Point, Sweep, Trial, trial_file
from dfca.runs.store.checkpoints import Checkpoints
from dfca.runs.store.metrics import FOLDER as METRICS
from dfca.runs.store.metrics import OLD as OLD_METRICS
from dfca.runs.store.metrics import MetricsFiles, count_lines, read_metrics
from dfca.runs.store.rows import GraphTable, TrialRow
from dfca.sim.metrics_table import JsonObject, without_nan

OURS = (
    "config.toml",
    "environment.json",
    OLD_METRICS,
    METRICS,
    "summary.json",
    "topology.json",
    "checkpoint",
    "models",
    "trace",
    "timeline",
    "tensorboard",
    "wandb",
    "export",
    "figures",
    "report.html",
)
LOCK = ".lock"
FORM = 2  # of the run folder; a change that old code cannot read raises it


def check_form(folder: Path, summary: JsonObject, version: str = "unknown") -> None:
    """Refuse a run folder that a newer version of dfca has written."""
    form = summary.get("form", 1)
    if not isinstance(form, int) or not 1 <= form <= FORM:
        raise RunError(
            f"{folder} was written by a newer version of dfca (form {form}, this one reads 1 to {FORM}); use that "
            f"version ({version}), or --out for another folder"
        )


def is_row(value: object) -> bool:
    """Return whether this is a row of a summary: of an algorithm and a seed, with numbers where there must be some."""
    if not isinstance(value, dict) or not isinstance(value.get("algorithm"), str) or type(value.get("seed")) is not int:
        return False
    try:
        TrialRow.of(value)
    except (TypeError, ValueError, AttributeError):
        return False
    return True


def _aside(path: Path) -> str:
    return f"restore it, or `dfca repair {path.parent}` moves it aside"


def stored_text(path: Path) -> str:
    """Read a file of a run folder. Raises RunError where it is missing or cannot be read."""
    try:
        return read_text(path)
    except FileNotFoundError:
        raise RunError(
            f"{path.parent} is not a complete run folder: {path.name} is missing; run the same `dfca run` command again"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RunError(f"{path} cannot be read: {reason}; restore it or run again") from error


def read_json(path: Path) -> JsonObject:
    """Read a JSON object of a run folder. Raises RunError if it is not one."""
    try:
        value = json.loads(stored_text(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON ({error}); {_aside(path)}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} must hold a JSON object, got {type(value).__name__}; {_aside(path)}")
    return value


def write_json(path: Path, value: JsonObject) -> None:
    """Write a JSON file of a run folder."""
    atomic_write(path, json.dumps(without_nan(value), indent=1) + "\n")


def read_summary(path: Path) -> JsonObject:
    """Read summary.json, with today's names of algorithms. Raises RunError where it has no rows."""
    summary: JsonObject = renamed(read_json(path))
    runs = summary.get("runs")
    if not isinstance(runs, list) or not all(map(is_row, runs)):
        raise RunError(f'{path} has no list "runs" of rows; {_aside(path)}')
    return summary


def read_experiment(path: Path) -> Experiment:
    """Read the experiment of a run folder. Raises RunError if it is none, or its config.toml cannot be read."""
    try:
        config, sweep = read_stored(read_text(path / "config.toml"))
    except FileNotFoundError:
        raise RunError(f"{path} is not a run folder (it has no config.toml); `dfca run` makes one") from None
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(f"{path / 'config.toml'} cannot be read ({reason}); restore it: it says what was run") from error
    return Experiment(path.resolve().name, "default", config, sweep)


class RunFolder:
    """A folder that this process alone writes to, from `open_` until `close`.

    Workers and readers make one without opening it, for the files of their trial and for what is stored.
    """

    def __init__(self, path: Path, swept: bool = False) -> None:
        self.path = path
        self.metrics = MetricsFiles(path)
        self.checkpoints = Checkpoints(path)
        self._lock: FileLock | None = None
        self._swept = swept

    @classmethod
    def locked(cls, path: str | Path, swept: bool) -> RunFolder:
        """Take a folder that exists as it is, without preparing it for an experiment; `close` releases it.

        Raises RunError if another process writes to it, or it is no run folder.
        """
        folder = cls(Path(path), swept)
        folder._refuse_strangers()
        folder._take_lock()
        return folder

    @classmethod
    def open_(cls, path: str | Path, experiment: Experiment, resume: bool = True) -> RunFolder:
        """Create a run folder or continue in one of the same config; `resume=False` starts it afresh.

        Trials that the folder has and the experiment does not name stay: `algorithms` and `seeds` of its config grow.
        The points of a sweep may come and go, as long as a change of its base leaves every finished trial wanted.
        Raises RunError if another process writes to it, or it holds another config or something else.
        """
        folder = cls(Path(path))
        folder._refuse_strangers()
        if not resume and (folder.path / "config.toml").exists():
            folder._refuse_to_discard()
        with explain_write_errors(folder.path / LOCK):
            folder.path.mkdir(parents=True, exist_ok=True)
        folder._take_lock()
        try:
            folder._prepare(experiment, resume)
        except BaseException:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """Release the folder to other processes."""
        if self._lock is not None:
            with suppress(OSError):  # there is none, or trials have checkpoints
                (self.path / "checkpoint").rmdir()
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- results

    def rows(self) -> list[TrialRow]:
        """Return the rows of the finished trials."""
        return [row for row in map(TrialRow.of, self.summary()["runs"]) if row.finished]

    def summary(self) -> JsonObject:
        """Read summary.json; without the file, the summary of a run that has finished no trial."""
        path = self.path / "summary.json"
        return read_summary(path) if path.exists() else {"runs": []}

    def check_form(self) -> None:
        environment = self._read_json("environment.json", {})
        check_form(self.path, self.summary(), environment.get("dfca", "unknown"))

    def finished(self) -> set[tuple[str, int, str]]:
        """Return the keys of the finished trials that have all their lines of metrics; the others are run again."""
        return {row.key(self._swept) for row in self.rows() if not self.lacks_lines(row)}

    def metrics_file(self, row: TrialRow) -> Path:
        return trial_file(self.path / METRICS, ".jsonl", *row.key(self._swept))

    def lacks_lines(self, row: TrialRow) -> bool:
        """Return whether lines of metrics of a finished trial are missing or damaged; old rows do not say how many."""
        return row.lines is not None and count_lines(self.metrics_file(row)) < row.lines

    def finish(self, trial: Trial, row: JsonObject) -> None:
        """Put the row of a finished trial into the summary, with the number of its lines of metrics, then forget its
        checkpoints."""
        self._put_row(trial, {**row, "lines": self.metrics.count(trial)})
        self.checkpoints.forget(trial)

    def fail(self, trial: Trial, error: str) -> None:
        """Put the row of a failed trial into the summary; its checkpoints stay."""
        self._put_row(trial, trial.head | {"digest": trial.point.digest, "finished": False, "error": error})

    def store_topology(self, point: Point, seed: int, graph: GraphTable) -> None:
        graphs = renamed(self._read_json("topology.json", {}))
        if point.at is None:
            if str(seed) not in graphs:
                write_json(self.path / "topology.json", graphs | {str(seed): dict(graph)})
            return
        name = f"{point.label}/{seed}"
        if graphs.get(name, {}).get("digest") != point.digest:
            entry = {"digest": point.digest, **graph}
            atomic_write(self.path / "topology.json", json.dumps(without_nan(graphs | {name: entry})) + "\n")

    def save_models(self, trial: Trial, tensors: Mapping[str, Tensor | Stream], metadata: Mapping[str, str]) -> None:
        """Store the final bank of a trial, (models, N, P), as `runs.store.models` names and describes it."""
        atomic_save(trial.file(self.path / "models", ".safetensors"), tensors, metadata)

    def has_models(self, trial: Trial) -> bool:
        return trial.file(self.path / "models", ".safetensors").exists()

    def recorded_threads(self) -> int | None:
        """Return how many threads the run began with; None where nothing, or no number, is recorded."""
        stored = self._read_json("environment.json", {})
        threads = stored.get("threads")
        return threads if isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1 else None

    def store_environment(self, facts: JsonObject) -> list[str]:
        """Store where the run takes place; return what has changed since its last part, in words.

        The places of earlier parts are kept under "earlier": a run that was continued elsewhere shows it.
        """
        stored = self._read_json("environment.json", {})
        if not stored:
            write_json(self.path / "environment.json", facts)
            return []
        earlier = stored.pop("earlier", [])
        changed = [key for key in facts if stored.get(key) != facts[key]]
        if changed:
            write_json(self.path / "environment.json", {**facts, "earlier": [*earlier, stored]})
        return [f"{key} {stored.get(key)} -> {facts[key]}" for key in changed]

    # --- inside

    def _put_row(self, trial: Trial, row: JsonObject) -> None:
        summary = self.summary()
        others = [other for other in summary["runs"] if TrialRow.of(other).key(self._swept) != trial.key]
        write_json(self.path / "summary.json", summary | {"runs": [*others, row]})

    def _take_lock(self) -> None:
        """Lock the folder; the system releases it with the process, also after kill -9.

        The lock file stays: were it deleted, one process could hold the deleted file and another its successor.
        """
        path = self.path / LOCK
        with explain_write_errors(path):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666))
        owner = read_text(path, errors="replace").strip()
        lock = FileLock(path, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise RunError(
                f"{self.path} is in use by another dfca process ({owner or 'unknown'}); wait for it, stop it, or use "
                "--out for another folder"
            ) from None
        except (OSError, NotImplementedError):
            return  # a file system without locks
        self._lock = lock
        with explain_write_errors(path):
            path.write_text(f"process {os.getpid()}", encoding="utf-8")

    def _refuse_strangers(self) -> None:
        """Refuse a folder that --out names and that is not a run folder."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise RunError(f"{self.path} is a file, not a folder; use --out for another place")
        beginnings = (LOCK, ".config.toml.")  # all that a run leaves if it is killed at once
        strangers = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith(beginnings))
        if strangers and not (self.path / "config.toml").exists():
            raise RunError(
                f"{self.path} is not empty and not a run folder (it has {strangers[0]} but no config.toml); use --out "
                "for another folder"
            )
        for name in (LOCK, *OURS):
            if (self.path / name).is_symlink():
                raise RunError(f"{self.path / name} is a link, and a run writes to no link; remove it or use --out")

    def _refuse_to_discard(self) -> None:
        """Discard only what carries this program's mark: a config of ours, or the head of a summary."""
        with suppress(ConfigError, OSError, UnicodeDecodeError):
            read_stored(read_text(self.path / "config.toml"))
            return
        with suppress(RunError, OSError, UnicodeDecodeError):
            if {"config_sha256", "runs"} <= self._read_json("summary.json", {}).keys():
                return
        raise RunError(
            f"{self.path} is not a run folder of dfca (config.toml is no config, and summary.json is not ours), so "
            "--no-resume does not empty it; use --out for another folder"
        )

    def _prepare(self, experiment: Experiment, resume: bool) -> None:
        remove_leftovers(self.path)
        has_config = (self.path / "config.toml").exists()
        self._swept = bool(experiment.sweep)
        if not resume:
            self._clear()
        if resume and has_config:
            self.check_form()
            experiment = self._extend(experiment)
        text = experiment.to_toml()
        path = self.path / "config.toml"
        if not path.exists() or read_text(path) != text:
            atomic_write(path, text)
        # A report of a run that has just begun finds every file.
        with explain_write_errors(self.path / METRICS):
            self.metrics.prepare(self._swept)
        if not (self.path / "topology.json").exists():
            write_json(self.path / "topology.json", {})
        old = self.summary()
        # What failed is tried again.
        new = head_of(experiment) | {"runs": [row for row in old["runs"] if "error" not in row]}
        if old != new:
            write_json(self.path / "summary.json", new)

    def _extend(self, here: Experiment) -> Experiment:
        """Check that the folder's config gives the same numbers and lay both lists of trials together."""
        path = self.path / "config.toml"
        advice = "use --out for another folder, or --no-resume to discard this one"
        try:
            there, sweep = read_stored(read_text(path))
            differences = self._differences(there, sweep, here)
        except ConfigError as error:
            raise RunError(f"{path} cannot be used: {error}; {advice}") from error
        if differences and not self._has_work():
            self._clear()
            return here
        if differences:
            raise RunError(f"{self.path} holds a run of another config: {', '.join(differences)}; {advice}")
        lists = {
            "algorithms": tuple(dict.fromkeys(there.algorithms + here.config.algorithms)),
            "seeds": tuple(dict.fromkeys(there.seeds + here.config.seeds)),
        }
        return replace(here, config=here.config.model_copy(update=lists))

    def _differences(self, there: Config, sweep: Sweep, here: Experiment) -> list[str]:
        """Describe what keeps the trials of the folder from being trials of this experiment."""
        if bool(sweep) != bool(here.sweep):
            return [f"it has {'a' if sweep else 'no'} sweep there and {'a' if here.sweep else 'no'} sweep here"]
        differences = there.differences(here.config, leave_out={*sweep.grid, *here.sweep.grid})
        if not differences or not sweep:
            return differences
        wanted = {point.digest for point in here.points}
        lost = {point.digest for point in sweep.expand(there)} - wanted
        return differences if any(row.digest in lost for row in self.rows()) else []

    def _has_work(self) -> bool:
        """Return whether there is anything to lose: a run that failed at its start leaves only its config."""
        return bool(self.rows() or read_metrics(self.path)) or self.checkpoints.any()

    def _clear(self) -> None:
        # config.toml goes last: until then the folder is known as a run folder.
        for name in reversed(OURS):
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _read_json(self, name: str, missing: JsonObject) -> JsonObject:
        path = self.path / name
        return read_json(path) if path.exists() else missing


def head_of(experiment: Experiment) -> JsonObject:
    """Return what begins a summary."""
    head: JsonObject = {"form": FORM, "experiment": experiment.name, "scale": experiment.scale}
    head["config_sha256"] = text_sha256(experiment.to_toml())
    if experiment.changes:
        head["changes"] = list(experiment.changes)
    if experiment.folder is not None and any(point.config.imports for point in experiment.points):
        head["modules"] = str(experiment.folder)  # for `dfca.load_run`, which makes modules again
    if experiment.sweep:
        return head | {"points": [point.facts() for point in experiment.points]}
    config = experiment.config
    head |= {"clients": config.clients, "clusters": config.distributions, "digest": config.digest()}
    return head | ({"auto": True} if config.clusters == "auto" else {}) | config.virtual_facts()
