"""Run an experiment: every cell that its folder has not finished, in this process or in several.

For each point and seed the split and the graph are made once and shared by all algorithms. A cell that the summary has
is skipped; a cell with a checkpoint goes on from it, bit-identical to a run that was never stopped.

Workers: `auto` is 1 for an experiment without a sweep and on a GPU, else one process per core, each with its share of
the threads, as long as there is memory (`workers.Pool`). Cells are independent, so processes use all cores where
threads inside small models do not: twice the cells per second on two cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from dfca import data
from dfca.errors import ConfigError, RunError
from dfca.experiment.load import Experiment
from dfca.experiment.sweep import Cell
from dfca.runs.environment import environment
from dfca.runs.reuse import adopt
from dfca.runs.signals import Interrupted, StopSignal
from dfca.runs.store import RunFolder
from dfca.runs.trials import Job, run_job, sentence
from dfca.runs.workers import Pool
from dfca.sim.rounds.ranks import Ranks, joined, launched, my_rank
from dfca.sim.shards import Alone

Workers = int | Literal["auto"]


class Listener(Protocol):
    """Who is told how the run goes."""

    def note(self, text: str) -> None:
        """Hear something that the user should know once."""

    def start(self, cells: Sequence[Cell], finished: int) -> None:
        """Hear which cells there are, and how many of them are finished already."""

    def start_cell(self, cell: Cell, round: int, time_s: float = 0.0) -> None:
        """Hear that a cell starts, after `round` rounds (and virtual seconds) that an earlier run did."""

    def finish_round(self, cell: Cell, round: int, metrics: dict[str, Any] | None, time_s: float = 0.0) -> None:
        """Hear that a round is done; the metrics where it was evaluated. In virtual time: how far the clock is."""

    def finish_cell(self, cell: Cell, row: dict[str, Any]) -> None:
        """Hear the result of a cell."""

    def fail_cell(self, cell: Cell, sentence: str) -> None:
        """Hear that a cell failed."""


class Silence:
    """Listen to nothing."""

    def note(self, text: str) -> None: ...
    def start(self, cells: Sequence[Cell], finished: int) -> None: ...
    def start_cell(self, cell: Cell, round: int, time_s: float = 0.0) -> None: ...
    def finish_round(self, cell: Cell, round: int, metrics: dict[str, Any] | None, time_s: float = 0.0) -> None: ...
    def finish_cell(self, cell: Cell, row: dict[str, Any]) -> None: ...
    def fail_cell(self, cell: Cell, sentence: str) -> None: ...


def run(
    experiment: Experiment,
    out: str | Path,
    listener: Listener | None = None,
    resume: bool = True,
    save_models: bool = False,
    workers: Workers = "auto",
    reuse: Sequence[Path] = (),
) -> dict[str, Any]:
    """Run every cell that neither the folder nor those to `reuse` have finished, and return the summary.

    In a sweep, or with several workers, a cell that fails gets a row with its "error" and the others go on.

    Raises:
        RunError: if the folder cannot be used or written.
        DataError: if the data of no point is on this machine.
        Interrupted: after SIGINT or SIGTERM; the state is stored and the same call continues.
    """
    _require_data(experiment)
    if launched():
        if workers not in ("auto", 1):
            raise ConfigError(f"--workers must be 1 where several ranks share each cell, got {workers}; leave it out")
        with joined(experiment.config.device):
            if my_rank():
                _follow(experiment, save_models)
                return {"runs": []}
            return _lead(experiment, out, listener or Silence(), resume, save_models, 1, reuse)
    return _lead(experiment, out, listener or Silence(), resume, save_models, workers, reuse)


def _lead(
    experiment: Experiment,
    out: str | Path,
    listener: Listener,
    resume: bool,
    save_models: bool,
    workers: Workers,
    reuse: Sequence[Path],
) -> dict[str, Any]:
    """Run an experiment as the one process, or the first rank, that owns the run folder."""
    with RunFolder.open_(out, experiment, resume) as folder, StopSignal() as stop:
        stop.on_request = partial(listener.note, "stopping after this round; Ctrl-C again stops at once")
        cells = _cells(experiment)
        for other in reuse:
            count = adopt(folder, other, cells)
            listener.note(f"{count} of {len(cells)} cells are taken from {other}")
        finished = folder.finished()
        missing = [cell for cell in cells if cell.key not in finished]
        ranks = _count_ranks()
        hands = _count_workers(workers, experiment, len(missing))
        threads = max(1, torch.get_num_threads() // hands)
        desk = RunDesk(folder, listener, tolerant=bool(experiment.sweep) or hands > 1)
        facts = environment(experiment.config.device) | {"threads": threads}
        desk.tell_environment(facts | ({"ranks": ranks} if ranks > 1 else {}))
        if save_models:
            desk.tell_unsaved_models([cell for cell in cells if cell.key in finished])
        listener.start(cells, len(cells) - len(missing))
        jobs = make_jobs(missing, hands)
        if ranks > 1:
            Ranks(ranks).share([bool(experiment.sweep), [_name(cell) for cell in missing]])
        try:
            if hands == 1:
                for job in jobs:
                    run_job(job, desk, folder, stop, save_models, Ranks if ranks > 1 else Alone)
            else:
                Pool(folder, desk, stop, hands, threads, save_models, careful=workers == "auto").run(jobs)
        except Interrupted as interrupted:
            raise Interrupted(f"interrupted {interrupted}; the same command continues") from None
        return folder.summary()


def _require_data(experiment: Experiment) -> None:
    """Refuse to begin where every cell would fail: one sentence instead of one per cell."""
    here = {entry.name for entry in data.catalogue() if entry.ready}
    wanted = list(dict.fromkeys(point.config.data.name for point in experiment.points))
    if not here.intersection(wanted):
        data.load(wanted[0])  # raises, with the ways to get it


def _follow(experiment: Experiment, save_models: bool) -> None:
    """Take part in a run as one of the ranks that write nothing.

    Raises:
        RunError: if this machine has another experiment than the first rank, or another rank is lost.
    """
    tolerant, names = Ranks(_count_ranks()).share(None)
    here = {_name(cell): cell for cell in _cells(experiment)}
    if strangers := [name for name in names if name not in here]:
        raise RunError(
            f"the first rank runs {strangers[0]}, which is no cell here; give every rank the same experiment"
        )
    with StopSignal() as stop:
        for job in make_jobs([here[name] for name in names], 1):
            run_job(job, Shadow(tolerant), None, stop, save_models, Ranks)


def _cells(experiment: Experiment) -> list[Cell]:
    return [
        Cell(name, seed, point)
        for point in experiment.points
        for seed in point.config.seeds
        for name in point.config.algorithms
    ]


def _name(cell: Cell) -> str:
    return f"{cell.algorithm}, seed {cell.seed}, config {cell.point.digest}"


def _count_ranks() -> int:
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def make_jobs(cells: Sequence[Cell], workers: int) -> list[Job]:
    """Group cells of one point and seed; where that leaves workers idle, each cell is a job."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.point.digest, cell.seed), []).append(cell)
    jobs = [Job(group[0].point, group[0].seed, tuple(cell.algorithm for cell in group)) for group in groups.values()]
    return jobs if len(jobs) >= workers else [Job(cell.point, cell.seed, (cell.algorithm,)) for cell in cells]


def _count_workers(workers: Workers, experiment: Experiment, cells: int) -> int:
    if workers == "auto":
        alone = not experiment.sweep or experiment.config.device != "cpu"
        workers = (
            1 if alone else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    return max(1, min(workers, cells))


class Shadow:
    """The desk of a rank that writes nothing."""

    def __init__(self, tolerant: bool) -> None:
        self._tolerant = tolerant

    def note(self, text: str, job: Job | None = None) -> None: ...
    def store_topology(self, job: Job, graph: dict[str, Any]) -> None: ...
    def begin(self, cell: Cell, round: int, time_s: float = 0.0) -> None: ...
    def finish_round(self, cell: Cell, round: int, metrics: dict[str, Any] | None, time_s: float = 0.0) -> None: ...
    def settle(self) -> None: ...
    def finish(self, cell: Cell, row: dict[str, Any]) -> None: ...

    def fail(self, cell: Cell, error: Exception) -> None:
        """Go on where the first rank goes on."""
        if not self._tolerant:
            raise error


class RunDesk:
    """The only one who writes metrics.jsonl, summary.json and topology.json of a run."""

    def __init__(self, folder: RunFolder, listener: Listener, tolerant: bool) -> None:
        self._folder = folder
        self._listener = listener
        self._tolerant = tolerant
        self._begun = folder.begun()
        self._told: set[str] = set()
        self._first: Job | None = None

    def note(self, text: str, job: Job | None = None) -> None:
        """Pass on a note that was not told before; name the point and the seed where an earlier one told otherwise."""
        self._first = self._first or job
        if text in self._told:
            return
        self._told.add(text)
        where = [] if job is None else [job.point.label] if job.point.label else []
        if job is not None and self._first is not None and job.seed != self._first.seed:
            where.append(f"seed {job.seed}")
        self._listener.note(f"{', '.join(where)}: {text}" if where else text)

    def store_topology(self, job: Job, graph: dict[str, Any]) -> None:
        """Store the graph of a point and seed."""
        self._folder.store_topology(job.point, job.seed, graph)

    def begin(self, cell: Cell, round: int, time_s: float = 0.0) -> None:
        """Drop the lines of metrics beyond a round and a virtual time."""
        if cell.key in self._begun:
            self._folder.rewind_metrics(cell, round, time_s)
        self._listener.start_cell(cell, round, time_s)

    def finish_round(self, cell: Cell, round: int, metrics: dict[str, Any] | None, time_s: float = 0.0) -> None:
        """Store the metrics of an evaluated round."""
        if metrics is not None:
            self._folder.append_metrics(cell, metrics)
        self._listener.finish_round(cell, round, metrics, time_s)

    def settle(self) -> None:
        """Do nothing: every line is flushed when it is written."""

    def finish(self, cell: Cell, row: dict[str, Any]) -> None:
        """Store the row of a finished cell."""
        self._folder.finish(cell, row)
        self._listener.finish_cell(cell, row)

    def fail(self, cell: Cell, error: Exception) -> None:
        """Store that a cell failed; without a sweep, the run fails with it."""
        if not self._tolerant:
            raise error
        told = sentence(error)
        self._folder.fail(cell, told)
        self._listener.fail_cell(cell, told)

    def tell_environment(self, facts: dict[str, Any]) -> None:
        """Store where the run takes place, and say what has changed since its last part."""
        changed = self._folder.store_environment(facts)
        if changed:
            self.note(f"since this run began: {', '.join(changed)}; its last digits may differ from an unbroken run")

    def tell_unsaved_models(self, finished: Sequence[Cell]) -> None:
        """Say which finished cells have no models."""
        unsaved = [cell for cell in finished if not self._folder.has_models(cell)]
        if unsaved:
            self.note(
                f"cells that were finished without --save-models are not run again ({len(unsaved)}, first: "
                f"{unsaved[0]}); --no-resume runs everything anew"
            )
