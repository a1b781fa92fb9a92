"""Run an experiment: every trial that its folder has not finished, in this process or in several.

For each point and seed the split and the graph are made once and shared by all algorithms. A trial that the summary has
is skipped; a trial with a checkpoint continues from it, bit-identical to a run that was never stopped.

Workers: `auto` is 1 for an experiment without a sweep and on a GPU, else one process per core, each with its share of
the threads, as long as there is memory (`workers.Pool`). Trials are independent, so processes use all cores where
threads inside small models do not: twice the trials per second on two cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from dfca.base.errors import ConfigError, RunError
from dfca.data.registry import catalogue
from dfca.data.sources import load
from dfca.experiment.load import Experiment
from dfca.experiment.sweep import Trial, TrialGroup
from dfca.runs.reuse import adopt
from dfca.runs.signals import Interrupted, StopSignal
from dfca.runs.sink import Broadcast, FolderSink, NullSink, RunSink
from dfca.runs.store.environment import environment
from dfca.runs.store.folder import RunFolder
from dfca.runs.threads import choose_threads
from dfca.runs.trials import RunContext, run_group
from dfca.runs.workers import Pool
from dfca.sim.metrics_table import JsonObject
from dfca.sim.rounds.ranks import Ranks, joined, launched, my_rank
from dfca.sim.shards import Alone

Workers = int | Literal["auto"]


def run(
    experiment: Experiment,
    out: str | Path,
    sink: RunSink | None = None,
    resume: bool = True,
    save_models: bool = False,
    workers: Workers = "auto",
    reuse: Sequence[Path] = (),
) -> JsonObject:
    """Run every trial that neither the folder nor those to `reuse` have finished, and return the summary.

    In a sweep, or with several workers, a trial that fails gets a row with its "error" and the others continue. Raises
    RunError if the folder cannot be used or written; DataError if the data of no point is on this machine; Interrupted
    after SIGINT or SIGTERM; the state is stored and the same call continues.
    """
    _require_data(experiment)
    lead = partial(_lead, experiment, out, sink or NullSink(), resume, save_models, reuse)
    if not launched():
        return lead(workers)
    if workers not in ("auto", 1):
        raise ConfigError(f"--workers must be 1 where several ranks share each trial, got {workers}; leave it out")
    with joined(experiment.config.device):
        if my_rank():
            _follow(experiment, save_models)
            return {"runs": []}
        return lead(1)


def _lead(
    experiment: Experiment,
    out: str | Path,
    listener: RunSink,
    resume: bool,
    save_models: bool,
    reuse: Sequence[Path],
    workers: Workers,
) -> JsonObject:
    """Run an experiment as the one process, or the first rank, that owns the run folder."""
    with RunFolder.open_(out, experiment, resume) as folder, StopSignal() as stop:
        sink = Broadcast(FolderSink(folder), listener)
        stop.on_request = partial(
            listener.note, "stopping: after this round, or in two seconds; Ctrl-C again stops at once"
        )
        trials = _trials(experiment)
        for other in reuse:
            sink.note(f"{adopt(folder, other, trials)} of {len(trials)} trials are taken from {other}")
        finished = folder.finished()
        missing = [trial for trial in trials if trial.key not in finished]
        processes, ranks = _count_workers(workers, experiment, len(missing)), _count_ranks()
        threads = torch.get_num_threads() if ranks > 1 else choose_threads(folder, experiment, processes)
        torch.set_num_threads(threads)
        _note_environment(folder, sink, experiment.config.device, threads, ranks)
        if save_models:
            _note_unsaved_models(folder, sink, [trial for trial in trials if trial.key in finished])
        context = RunContext(sink, folder, stop, save_models, tolerant=bool(experiment.sweep) or processes > 1)
        sink.start_run(trials, len(trials) - len(missing))
        try:
            if processes > 1:
                Pool(context, processes, threads, careful=workers == "auto").run(make_groups(missing, processes))
            else:
                _run_here(context, missing, ranks)
        except Interrupted as interrupted:
            raise Interrupted(f"interrupted {interrupted}; the same command continues") from None
        finally:
            sink.end_run()
        return folder.summary()


def _run_here(context: RunContext, trials: Sequence[Trial], ranks: int) -> None:
    """Run trials in this process, which may be the first of several ranks."""
    if ranks > 1:
        Ranks(ranks).share([context.tolerant, [_name(trial) for trial in trials]])
    for group in make_groups(trials, 1):
        run_group(group, context, Ranks if ranks > 1 else Alone)


def _follow(experiment: Experiment, save_models: bool) -> None:
    """Take part in a run as one of the ranks that write nothing.

    Raises RunError if this machine has another experiment than the first rank, or another rank is lost.
    """
    tolerant, names = Ranks(_count_ranks()).share(None)
    here = {_name(trial): trial for trial in _trials(experiment)}
    if strangers := [name for name in names if name not in here]:
        raise RunError(
            f"the first rank runs {strangers[0]}, which is no trial here; give every rank the same experiment"
        )
    with StopSignal() as stop:
        context = RunContext(NullSink(), None, stop, save_models, tolerant)
        for group in make_groups([here[name] for name in names], 1):
            run_group(group, context, Ranks)


def _require_data(experiment: Experiment) -> None:
    """Refuse to begin where every trial would fail: one sentence instead of one per trial."""
    here = {entry.name for entry in catalogue() if entry.ready}
    if any(point.config.data.factory for point in experiment.points):
        return
    wanted = list(dict.fromkeys(point.config.data.name for point in experiment.points))
    if not here.intersection(wanted):
        load(wanted[0])  # raises, with the ways to get it


def _trials(experiment: Experiment) -> list[Trial]:
    return [
        Trial(name, seed, point)
        for point in experiment.points
        for seed in point.config.seeds
        for name in point.config.algorithms
    ]


def _name(trial: Trial) -> str:
    return f"{trial.algorithm}, seed {trial.seed}, config {trial.point.digest}"


def _count_ranks() -> int:
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def make_groups(trials: Sequence[Trial], workers: int) -> list[TrialGroup]:
    """Group trials of one point and seed; where that leaves workers idle, each trial is a group."""
    together: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        together.setdefault((trial.point.digest, trial.seed), []).append(trial)
    if len(together) < workers:
        return [TrialGroup(trial.point, trial.seed, (trial.algorithm,)) for trial in trials]
    return [
        TrialGroup(group[0].point, group[0].seed, tuple(trial.algorithm for trial in group))
        for group in together.values()
    ]


def _count_workers(workers: Workers, experiment: Experiment, trials: int) -> int:
    if workers == "auto":
        alone = not experiment.sweep or experiment.config.device != "cpu"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = 1 if alone else cores
    return max(1, min(workers, trials))


def _note_environment(folder: RunFolder, sink: RunSink, device: str, threads: int, ranks: int) -> None:
    """Store where the run takes place, and note what has changed since its last part."""
    facts = environment(device) | {"threads": threads} | ({"ranks": ranks} if ranks > 1 else {})
    if changed := folder.store_environment(facts):
        sink.note(f"since this run began: {', '.join(changed)}; its last digits may differ from an unbroken run")


def _note_unsaved_models(folder: RunFolder, sink: RunSink, finished: Sequence[Trial]) -> None:
    if unsaved := [trial for trial in finished if not folder.has_models(trial)]:
        sink.note(
            f"trials that were finished without --save-models are not run again ({len(unsaved)}, first: "
            f"{unsaved[0]}); --no-resume runs everything anew"
        )
