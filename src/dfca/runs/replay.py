"""Replay the traces of a run folder: carry out what they record, and compare every number with what the run wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dfca.errors import RunError
from dfca.experiment.load import Experiment, read_stored
from dfca.experiment.sweep import Cell
from dfca.runs.store import RunFolder, plain
from dfca.runs.trials import Job, Scene
from dfca.runs.virtual import simulation_of
from dfca.sim.events.replay import read_trace
from dfca.sim.shards import Alone

NOT_COMPARED = ("seconds",)  # of the machine, not of the clock


class Verdict(NamedTuple):
    """What the replay of one cell gave: how many records and rows, and the first difference in words, or none."""

    cell: Cell
    records: int
    rows: int
    difference: str


class _Quiet:
    """Hears what a scene tells, and says nothing: the run has said it."""

    def note(self, text: str, job: Job | None = None) -> None: ...
    def store_topology(self, job: Job, graph: dict[str, Any]) -> None: ...


def replay_run(out: str | Path, wanted: Callable[[Cell], bool] = lambda cell: True) -> Iterator[Verdict]:
    """Replay every finished cell of a run folder that has a trace.

    Raises:
        RunError: if there is none.
        ConfigError: if a trace cannot be carried out: it is cut, or names clients that are not there.
    """
    path = Path(out)
    if not (path / "config.toml").exists():
        raise RunError(f"{path} is not a run folder (it has no config.toml); `dfca run` makes one")
    config, sweep = read_stored((path / "config.toml").read_text(encoding="utf-8"))
    experiment = Experiment(path.name, "default", config, sweep)
    folder = RunFolder(path, swept=bool(sweep))
    finished, lines, found = folder.finished(), folder.metrics(), False
    for point in experiment.points:
        for seed in point.config.seeds:
            cells = [Cell(name, seed, point) for name in point.config.algorithms]
            traced = [cell for cell in cells if cell.key in finished and trace_of(path, cell).exists() and wanted(cell)]
            if not traced:
                continue
            found = True
            scene = Scene.of(
                Job(point, seed, tuple(cell.algorithm for cell in traced)), _Quiet(), Alone(point.config.clients)
            )
            for cell in traced:
                records = read_trace(trace_of(path, cell))
                result = simulation_of(cell, scene.setting(cell), trace=False, replay=records).run()
                rows = [json.loads(json.dumps(plain(row))) for row in result.metrics]
                written = [line for line in lines if folder.key_of(line) == cell.key]
                yield Verdict(cell, len(records), len(rows), _difference(written, rows))
    if not found:
        raise RunError(
            f"{path} has no trace of a finished cell; run it with --set world.trace=true (and --no-resume, or --out)"
        )


def trace_of(folder: Path, cell: Cell) -> Path:
    """Tell where the trace of a cell is."""
    return folder / "trace" / f"{cell.folder}.jsonl"


def _difference(written: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    if len(written) != len(rows):
        return f"the run has {len(written)} rows of metrics and the replay {len(rows)}"
    for line, row in zip(written, rows, strict=True):
        for key, value in row.items():
            if key not in NOT_COMPARED and line.get(key) != value:
                return f"{key} at {row['time_s']:g} s is {line.get(key)} in the run and {value} in the replay"
    return ""
