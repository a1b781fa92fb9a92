"""Run folders: what a run leaves on disk, and how it is continued after anything but the loss of the disk.

    config.toml       the complete config
    environment.json  the machine and the versions
    metrics.jsonl     one line per evaluated round of a cell
    summary.json      one row per finished or failed cell
    topology.json     the graph of each seed
    checkpoint/       <algorithm>-<seed>/round-000120.safetensors and its facts in round-000120.json; the last two
    models/           <algorithm>-<seed>.safetensors, where asked for
    trace/            <algorithm>-<seed>.jsonl: every event of a cell in virtual time, where asked for
    timeline/         <algorithm>-<seed>.json: what the report draws as lanes, of the first seed in virtual time
    report.html       made from the above, its figures of virtual time also as figures/*.svg

In a sweep config.toml holds the base and the tables of the sweep, summary.json lists the points asked for last, every
line and row names its point and its digest, graphs are found under "<label>/<seed>", and the names of a cell end in the
first digits of its digest.

A checkpoint counts once its facts are there: they are written last and hold the checksum of the tensors. A line of
metrics.jsonl counts once the summary or a checkpoint has reached its round. So every file may be ahead of the next
one, never behind, and what is ahead is dropped and computed again to the same bits.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dfca.errors import ConfigError, RunError
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment, read_stored
from dfca.experiment.sweep import Cell, Point, Sweep
from dfca.files import (
    Stream,
    append_line,
    atomic_save,
    atomic_write,
    remove_leftovers,
    sha256,
    text_sha256,
    explain_write_errors,
)

OURS = (
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "summary.json",
    "topology.json",
    "checkpoint",
    "models",
    "trace",
    "timeline",
    "figures",
    "report.html",
)
LOCK = ".lock"
FORM = 1  # of the run folder; a change that old code cannot read raises it
KEPT = 2  # checkpoints of a running cell: the last one and the one before, in case the disk spoils the last


@dataclass(frozen=True)
class Checkpoint:
    """The state of a cell after a round. bank: the bank, where it is not among the tensors."""

    round: int
    seconds: float
    tensors: Mapping[str, Tensor]
    facts: dict[str, Any]
    bank: Stream | None = None


class RunFolder:
    """A folder that this process alone writes to, from `open_` until `close`."""

    def __init__(self, path: Path, swept: bool = False) -> None:
        self.path = path
        self._lock: int | None = None
        self._swept = swept

    @classmethod
    def open_(cls, path: str | Path, experiment: Experiment, resume: bool = True) -> RunFolder:
        """Create a run folder or continue in one of the same config; `resume=False` starts it afresh.

        Cells that the folder has and the experiment does not name stay: `algorithms` and `seeds` of its config grow.
        The points of a sweep may come and go, as long as a change of its base leaves every finished cell wanted.

        Raises:
            RunError: if another process writes to it, or it holds another config or something else.
        """
        folder = cls(Path(path))
        folder._refuse_strangers()
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
        """Let other processes write to the folder."""
        if self._lock is not None:
            with suppress(OSError):  # there is none, or cells have checkpoints
                (self.path / "checkpoint").rmdir()
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- results

    def rows(self) -> list[dict[str, Any]]:
        """Give the rows of the finished cells."""
        return [row for row in self.summary()["runs"] if row.get("finished")]

    def summary(self) -> dict[str, Any]:
        """Read summary.json; without the file, the summary of a run that has finished no cell."""
        summary: dict[str, Any] = self._read_json("summary.json", {"runs": []})
        if not isinstance(summary.get("runs"), list):
            raise RunError(f'{self.path / "summary.json"} has no list "runs"; restore the file or use --no-resume')
        return summary

    def finished(self) -> set[tuple[str, int, str]]:
        """Give the keys of the finished cells."""
        return {self.key_of(row) for row in self.rows()}

    def finish(self, cell: Cell, row: Mapping[str, Any]) -> None:
        """Put the row of a finished cell into the summary, then forget its checkpoints."""
        self._put_row(cell, row)
        shutil.rmtree(self._cell(cell), ignore_errors=True)

    def fail(self, cell: Cell, error: str) -> None:
        """Put the row of a failed cell into the summary; its checkpoints stay."""
        self._put_row(cell, cell.head | {"digest": cell.point.digest, "finished": False, "error": error})

    def append_metrics(self, cell: Cell, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        line = {**cell.head, **metrics}
        append_line(self.path / "metrics.jsonl", json.dumps(plain(line), separators=(",", ":")))

    def begun(self) -> set[tuple[str, int, str]]:
        """Give the keys of the cells that have metrics, and drop a last line that was cut off."""
        lines = self.metrics()
        self._write_metrics(lines)
        return {self.key_of(line) for line in lines}

    def metrics(self) -> list[dict[str, Any]]:
        """Read the lines of metrics.jsonl; a last line that was cut off does not count."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
        found: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                found += [json.loads(line)] if line else []
            except json.JSONDecodeError:
                if number == len(lines):
                    break
                raise RunError(f"{path}, line {number}, is not JSON; restore the file or use --no-resume") from None
        return found

    def rewind_metrics(self, cell: Cell, round: int, time_s: float = 0.0) -> None:
        """Drop the lines of a cell beyond a round (and a virtual time), and a last line that was cut off."""
        end = (round, time_s)
        lines = self.metrics()
        self._write_metrics(
            [each for each in lines if self.key_of(each) != cell.key or (each["round"], each.get("time_s", 0.0)) <= end]
        )

    def store_topology(self, point: Point, seed: int, graph: Mapping[str, Any]) -> None:
        """Store the facts, edges and true clusters of a seed's graph."""
        graphs = self._read_json("topology.json", {})
        if point.at is None:
            if str(seed) not in graphs:
                self._write_json("topology.json", graphs | {str(seed): dict(graph)})
            return
        name = f"{point.label}/{seed}"
        if graphs.get(name, {}).get("digest") != point.digest:
            entry = {"digest": point.digest, **graph}
            atomic_write(self.path / "topology.json", json.dumps(plain(graphs | {name: entry})) + "\n")

    def save_models(self, cell: Cell, bank: Tensor | Stream) -> None:
        """Store the final bank of a cell, (models, N, P)."""
        atomic_save(self.path / "models" / f"{cell.folder}.safetensors", {"bank": bank})

    def has_models(self, cell: Cell) -> bool:
        """Tell whether the final bank of a cell is stored."""
        return (self.path / "models" / f"{cell.folder}.safetensors").exists()

    def store_environment(self, facts: Mapping[str, Any]) -> list[str]:
        """Store where the run takes place; return what has changed since its last part, in words.

        The places of earlier parts are kept under "earlier": a run that was continued elsewhere shows it.
        """
        stored = self._read_json("environment.json", None)
        if stored is None:
            self._write_json("environment.json", facts)
            return []
        earlier = stored.pop("earlier", [])
        changed = [key for key in facts if stored.get(key) != facts[key]]
        if changed:
            self._write_json("environment.json", {**facts, "earlier": [*earlier, stored]})
        return [f"{key} {stored.get(key)} -> {facts[key]}" for key in changed]

    # --- checkpoints

    def save_checkpoint(self, cell: Cell, checkpoint: Checkpoint) -> None:
        """Store the state of a cell; the tensors first, then the facts that make them count."""
        folder = self._cell(cell)
        stem = f"round-{checkpoint.round:06}"
        bank = {} if checkpoint.bank is None else {"bank": checkpoint.bank}
        digest = atomic_save(folder / f"{stem}.safetensors", {**checkpoint.tensors, **bank})
        sidecar = {
            "round": checkpoint.round,
            "seconds": checkpoint.seconds,
            "sha256": digest,
            "facts": checkpoint.facts,
        }
        atomic_write(folder / f"{stem}.json", json.dumps(sidecar))
        for old in sorted(folder.glob("round-*.json"))[:-KEPT]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def latest(self, cell: Cell) -> tuple[Checkpoint | None, list[str]]:
        """Load the last good checkpoint of a cell, and say in words which ones were not good."""
        warnings: list[str] = []
        for sidecar in sorted(self._cell(cell).glob("round-*.json"), reverse=True):
            try:
                return _load(sidecar), warnings
            except (OSError, ValueError, KeyError) as error:
                reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
                name = sidecar.relative_to(self.path).with_suffix("")
                warnings.append(f"checkpoint {name} is damaged ({reason}) and is not used")
        return None, warnings

    # --- inside

    def _cell(self, cell: Cell) -> Path:
        return self.path / "checkpoint" / cell.folder

    def key_of(self, record: Mapping[str, Any]) -> tuple[str, int, str]:
        """Give the key of the cell that a row or a line belongs to."""
        return record["algorithm"], record["seed"], record.get("digest", "") if self._swept else ""

    def _put_row(self, cell: Cell, row: Mapping[str, Any]) -> None:
        summary = self.summary()
        others = [each for each in summary["runs"] if self.key_of(each) != cell.key]
        self._write_json("summary.json", summary | {"runs": [*others, row]})

    def _write_metrics(self, lines: list[dict[str, Any]]) -> None:
        path = self.path / "metrics.jsonl"
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            atomic_write(path, text)

    def _take_lock(self) -> None:
        path = self.path / LOCK
        with explain_write_errors(path):
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # The system releases it with the process, also after kill -9.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self.close()
            raise RunError(
                f"{self.path} is in use by another dfca process ({owner or 'unknown'}); wait for it, stop it, or use "
                "--out for another folder"
            ) from None
        except OSError:
            return  # a file system without locks
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()}".encode(), 0)

    def _refuse_strangers(self) -> None:
        """Touch nothing in a folder that is somebody's, only because --out names it."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise RunError(f"{self.path} is a file, not a folder; use --out for another place")
        beginnings = (LOCK, ".config.toml.tmp")  # all that a run leaves if it is killed at once
        strangers = sorted(entry.name for entry in self.path.iterdir() if entry.name not in beginnings)
        if strangers and not (self.path / "config.toml").exists():
            raise RunError(
                f"{self.path} is not empty and not a run folder (it has {strangers[0]} but no config.toml); use --out "
                "for another folder"
            )

    def _prepare(self, experiment: Experiment, resume: bool) -> None:
        remove_leftovers(self.path)
        has_config = (self.path / "config.toml").exists()
        self._swept = bool(experiment.sweep)
        if not resume:
            self._clear()
        if resume and has_config:
            experiment = self._extend(experiment)
        text = experiment.to_toml()
        path = self.path / "config.toml"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            atomic_write(path, text)
        # A report of a run that has just begun finds every file.
        (self.path / "metrics.jsonl").touch()
        if not (self.path / "topology.json").exists():
            self._write_json("topology.json", {})
        config = experiment.config
        head: dict[str, Any] = {"form": FORM, "experiment": experiment.name, "scale": experiment.scale}
        head["config_sha256"] = text_sha256(text)
        if experiment.sweep:
            head["points"] = [point.facts() for point in experiment.points]
        else:
            head |= {"clients": config.clients, "clusters": config.distributions, "digest": config.digest()}
            head |= {"auto": True} if config.clusters == "auto" else {}
            head |= config.virtual_facts()
        # What failed is tried again.
        runs = [row for row in self.summary()["runs"] if "error" not in row]
        if self.summary() != head | {"runs": runs}:
            self._write_json("summary.json", head | {"runs": runs})

    def _extend(self, here: Experiment) -> Experiment:
        """Check that the folder's config gives the same numbers and lay both lists of cells together."""
        path = self.path / "config.toml"
        ways_out = "use --out for another folder, or --no-resume to discard this one"
        try:
            there, sweep = read_stored(path.read_text(encoding="utf-8"))
            differences = self._differences(there, sweep, here)
        except ConfigError as error:
            raise RunError(f"{path} cannot be used: {error}; {ways_out}") from error
        if differences and not self._has_work():
            self._clear()
            return here
        if differences:
            raise RunError(f"{self.path} holds a run of another config: {', '.join(differences)}; {ways_out}")
        cells = {
            "algorithms": tuple(dict.fromkeys(there.algorithms + here.config.algorithms)),
            "seeds": tuple(dict.fromkeys(there.seeds + here.config.seeds)),
        }
        return replace(here, config=here.config.model_copy(update=cells))

    def _differences(self, there: Config, sweep: Sweep, here: Experiment) -> list[str]:
        """Say in words what keeps the cells of the folder from being cells of this experiment."""
        if bool(sweep) != bool(here.sweep):
            return [f"it has {'a' if sweep else 'no'} sweep there and {'a' if here.sweep else 'no'} sweep here"]
        differences = there.differences(here.config, leave_out={*sweep.grid, *here.sweep.grid})
        if not differences or not sweep:
            return differences
        wanted = {point.digest for point in here.points}
        lost = {point.digest for point in sweep.expand(there)} - wanted
        return differences if any(row.get("digest") in lost for row in self.rows()) else []

    def _has_work(self) -> bool:
        """Tell whether there is anything to lose: a run that failed at its start leaves only its config."""
        return bool(self.rows() or self.metrics()) or any(self.path.glob("checkpoint/*/round-*.json"))

    def _clear(self) -> None:
        # config.toml goes last: until then the folder is known as a run folder.
        for name in reversed(OURS):
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _read_json(self, name: str, missing: Any) -> Any:
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return missing
        except ValueError:
            raise RunError(f"{path} is not JSON; restore the file or use --no-resume") from None

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        atomic_write(self.path / name, json.dumps(plain(value), indent=1) + "\n")


def _load(sidecar: Path) -> Checkpoint:
    facts = json.loads(sidecar.read_text(encoding="utf-8"))
    path = sidecar.with_suffix(".safetensors")
    if sha256(path) != facts["sha256"]:
        raise ValueError("its checksum does not fit")
    return Checkpoint(facts["round"], facts["seconds"], load_file(path), facts["facts"])


def plain(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not know, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
