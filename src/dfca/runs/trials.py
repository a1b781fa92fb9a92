"""Run trials: those of one point and seed share its data and graph; each continues where it was stopped.

A trial's own files (metrics, checkpoints, models) are written here; what all trials of a run share is written by the
sinks of the process that owns the run folder (`runs.sink`). The trials may run in that process or in another one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dfca import algorithms, topology
from dfca.base.errors import ConfigError, DfcaError, RunError, explain_batch_norm
from dfca.base.files import Stream
from dfca.core.client import effective
from dfca.core.learning.params import FlatModel
from dfca.core.learning.task import ACCURACY
from dfca.data.clients import Split
from dfca.data.partitions import make_split
from dfca.experiment.sweep import Point, Trial, TrialGroup
from dfca.experiment.variants import options_of
from dfca.model_options import ModelOptions, make_factory
from dfca.runs.signals import Interrupted, StopSignal
from dfca.runs.sink import RunSink
from dfca.runs.store.checkpoints import Checkpoint
from dfca.runs.store.folder import RunFolder
from dfca.runs.store.models import ARCHITECTURE, CONSTANT, describe, named
from dfca.runs.store.rows import GraphTable, TrialRow
from dfca.runs.virtual import VirtualTrial
from dfca.sim.metrics_table import EvaluationRow, JsonObject
from dfca.sim.notes import diverged_clients, notes_of_scores
from dfca.sim.rounds.ranks import my_device
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.sim.shards import AgreedError, Alone, Shards, keep

CHECKPOINT_SHARE = 0.05  # of the time at most
IN_SUMMARY = (
    "accuracy",
    "accuracy_before_personal",
    "all_models_accuracy",
    "cluster_accuracy",
    "adjusted_rand_index",
    "peers_of_own_cluster",
    "live_clusters",
    "models",
    "train_loss",
    "F_global",
    "messages_sent",
    "bytes_sent",
    "start_bytes",
    "scalars_sent",
    "server_bytes_sent",
    "model_bytes",
    "payload_bytes",
    "epsilon",
)


@dataclass(frozen=True)
class RunContext:
    """What all trials of a run share."""

    sink: RunSink
    folder: RunFolder | None  # None on a rank that writes nothing
    stop: StopSignal
    save_models: bool = False
    tolerant: bool = False  # a trial that fails is reported and the others continue

    def fail(self, trial: Trial, error: Exception) -> None:
        """Report that a trial failed; raise the error unless the run is tolerant."""
        if not self.tolerant:
            raise error
        self.sink.fail_trial(trial, sentence(error))

    def heed_stop(self, where: str, shards: Shards) -> None:
        """Raise Interrupted if a stop was requested on any rank."""
        if shards.either(self.stop.requested):
            raise Interrupted(where)


def run_group(group: TrialGroup, context: RunContext, share_out: Callable[[int], Shards] = Alone) -> None:
    """Run the trials of a group; its split and graph are freed on return.

    All ranks of a run make this call; only the first has the folder. share_out: makes this rank's share of a number of
    clients. Raises RunError if the disk cannot be written, or another rank is lost; Interrupted if a stop was
    requested: the state is stored.
    """
    shards = share_out(group.point.config.clients)
    context.heed_stop(f"before {group.trials[0]}", shards)
    try:
        with shards.agreed():
            workload = Workload.of(group, context.sink, shards)
    except RunError:
        raise
    except Exception as error:
        for trial in group.trials:
            context.fail(trial, error)
        return
    for trial in group.trials:
        context.heed_stop(f"before {trial}", shards)
        try:
            run_trial(trial, workload.setting(trial, context.folder), context, shards)
        except RunError:
            raise
        except Exception as error:
            if shards.ranks > 1 and not isinstance(error, AgreedError):
                raise RunError(sentence(error)) from error  # the other ranks are in the middle of something
            context.fail(trial, error)


class RoundsTrial:
    """A synchronous simulation as a trial runs it; `VirtualTrial` has the same methods."""

    STATE = 1  # the version of `state`
    time_s = 0.0  # there is no clock

    def __init__(self, setting: Setting, shards: Shards) -> None:
        self.simulation = Simulation(setting, shards)
        self.step, self.state, self.restore = self.simulation.step, self.simulation.state, self.simulation.restore

    @property
    def flat(self) -> FlatModel:
        return self.simulation.flat

    @property
    def place(self) -> str:
        """How far it is, in words."""
        return f"round {self.simulation.round} of {self.simulation.setting.rounds}"

    def stream(self) -> Stream:
        """Return the banks of all ranks."""
        return Stream(self.simulation.bank_shape(), self.simulation.banks.dtype, self.simulation.rows())

    def finish(self) -> JsonObject:
        """Return what else the row of the finished trial has."""
        return {}


def _make(trial: Trial, setting: Setting, folder: RunFolder | None, shards: Shards) -> RoundsTrial | VirtualTrial:
    if trial.point.config.world is None:
        return RoundsTrial(setting, shards)
    if folder is None or shards.ranks > 1:
        raise ConfigError("an experiment with a [world] runs in one process; start it without torchrun")
    return VirtualTrial(trial, setting, folder)


def run_trial(trial: Trial, setting: Setting, context: RunContext, shards: Shards) -> None:
    """Run one trial from its last good checkpoint, or from the start, to its last round."""
    group, sink, folder = TrialGroup(trial.point, trial.seed, (trial.algorithm,)), context.sink, context.folder
    clock = Stopwatch()
    sink.prepare_trial(trial)
    with clock.running():
        with explain_batch_norm():
            driven = _make(trial, setting, folder, shards)
        checkpoint, warnings = folder.checkpoints.latest(trial, driven.STATE) if folder else (None, [])
        for warning in warnings:
            sink.note(warning)
        if shards.share(checkpoint is not None):
            driven.restore(*((checkpoint.tensors, checkpoint.facts) if checkpoint else (None, None)))
            clock.seconds += checkpoint.seconds if checkpoint else 0.0
            sink.note(f"{trial}: continues after {driven.place}")
        del checkpoint
    _pass_on(driven.simulation.notes, sink, group)
    if folder:
        folder.metrics.rewind(trial, driven.simulation.round, driven.time_s)
    sink.start_trial(trial, driven.simulation.round, driven.time_s)
    # A signal waits for the end of the round, for a moment: half a round cannot be stored, a finished trial is kept.
    with context.stop.deferred():
        metrics = _step_to_the_end(trial, driven, context, shards, clock)
        goal = trial.point.config.clock
        target = None if goal is None else goal.target
        scored = notes_of_scores(setting.learns.metric, metrics.score, target)
        _pass_on([*driven.simulation.notes, *scored], sink, group)
        if context.save_models:
            bank = named(driven.stream(), driven.flat, setting.algorithm.exchange == "server")
            tensors: dict[str, Tensor | Stream] = {"bank": bank}
            tensors |= {CONSTANT + name: tensor for name, tensor in driven.flat.frozen.items()}
            if folder:
                folder.save_models(trial, tensors, describe(trial, setting, driven.flat, metrics))
            else:
                deque(bank.pieces, maxlen=0)  # the first rank writes them
        config = trial.point.config
        metric = setting.learns.metric
        keys = (metric.key, f"{metric.key}_before_personal", f"all_models_{metric.key}", *IN_SUMMARY)
        row = trial.head | {"digest": trial.point.digest} | {key: metrics[key] for key in keys if key in metrics}
        if metric != ACCURACY:
            row["metric"] = metric.facts()
        known = config.data.factory is not None and setting.split.clusters is not None
        true = setting.true_clusters if known else config.distributions
        row |= {"clusters": true, "rounds": config.rounds, "seconds": round(clock.seconds, 3)}
        row["momentum"] = effective(setting.local, setting.algorithm).momentum
        row["diverged_clients"] = diverged_clients(driven.simulation.notes)
        sink.finish_trial(trial, TrialRow.of(row | driven.finish() | {"finished": True}))


def _step_to_the_end(
    trial: Trial, driven: RoundsTrial | VirtualTrial, context: RunContext, shards: Shards, clock: Stopwatch
) -> EvaluationRow:
    """Run all rounds, with checkpoints on the way, and return the last metrics."""
    folder, last = context.folder, EvaluationRow.of({"round": driven.simulation.round})
    cadence = Cadence(trial.point.config.checkpoint.every_s)
    while not driven.simulation.done:
        before = driven.place
        try:
            with clock.running(), explain_batch_norm(), context.stop.abandonable(shards.ranks == 1):
                metrics = driven.step()
        except Interrupted:
            raise Interrupted(f"after {before} of {trial}, which continues from its last checkpoint") from None
        if metrics is not None:
            last = metrics
            if folder:
                folder.metrics.append(trial, metrics.stored)
        context.sink.finish_round(trial, driven.simulation.round, metrics, driven.time_s)
        due = context.stop.requested or (shards.rank == 0 and cadence.due())
        if driven.simulation.done or not shards.either(due):
            continue
        tensors, facts = driven.state()
        bank = driven.stream()
        with cadence.measured():
            if folder:
                checkpoint = Checkpoint(driven.simulation.round, clock.seconds, tensors, facts, bank, driven.STATE)
                folder.checkpoints.save(trial, checkpoint)
            else:
                deque(bank.pieces, maxlen=0)  # the first rank writes them
        context.heed_stop(f"at {driven.place} of {trial}", shards)
    return last


def sentence(error: Exception) -> str:
    """Describe in one line what went wrong."""
    text = " ".join(str(error).split())
    return text if isinstance(error, DfcaError) else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class Workload:
    """What the trials of a group share: the data, the graph and the model."""

    point: Point
    split: Split
    drift: tuple[int, Split] | None
    graph: Any
    make_model: Callable[[], Any]

    @classmethod
    def of(cls, group: TrialGroup, sink: RunSink, shards: Shards) -> Workload:
        """Make it, and report the graph."""
        config, seed = group.point.config, group.seed
        given = (config.data, config.clients, config.distributions, seed)
        split = keep(make_split(*given, task=config.learning_task()), shards.members)
        drift = None
        if config.data.drift_share:
            later = make_split(*given, drifted=True)
            drift = (max(1, round(config.data.drift_at * config.rounds)), keep(later, shards.members))
        graph = topology.make_graph(config.topology, config.clients, seed)
        facts = topology.describe(graph, split.clusters)
        edges = sorted([i, j] for i, j in graph.edges)
        ends = split if drift is None else drift[1]  # reports compare with what the clients hold at the end
        true = None if ends.clusters is None else ends.clusters.tolist()
        sink.start_group(group, GraphTable(facts=facts, edges=edges, clusters=true))
        if group.point.at is None:  # a sweep has hundreds
            sink.note(f"graph: {topology.summary(facts)}", group)
        _pass_on(split.notes, sink, group)
        if config.model.factory is not None and (idle := sorted(_changed(config.model) & ARCHITECTURE - {"factory"})):
            sink.note(f"model.{idle[0]} does nothing beside model.factory, which makes the model", group)
        augment = config.data.augment
        crop = None if augment is None else augment.crop
        make_model = make_factory(config.model, split.train.shape, split.classes, crop)
        return cls(group.point, split, drift, graph, make_model)

    def setting(self, trial: Trial, folder: RunFolder | None = None) -> Setting:
        label = trial.algorithm
        config, options = self.point.config.of_row(label), options_of(self.point.config.algorithm.get(label, {}))
        return config.mixing.narrowed(
            Setting,
            split=self.split,
            graph=self.graph,
            make_model=self.make_model,
            algorithm=replace(algorithms.get(algorithms.base_of(label), **options), name=label),
            clusters=None if config.clusters == "auto" else config.clusters,
            rounds=config.rounds,
            seed=trial.seed,
            drift=self.drift,
            local=config.local.options(config.data.augment),
            participation=config.participation,
            quiet_rounds=config.mixing.quiet_rounds or 0,
            personal_steps=None if config.personal is None else config.personal.steps,
            evaluate_every=config.evaluation.every,
            evaluation_samples=config.evaluation.samples,
            device=my_device(config.device),
            engine=config.engine,
            task=config.learning_task(),
            bank=config.bank,
            liars=config.liars,
            privacy=config.privacy,
            bank_folder=None if folder is None else folder.path,
        )


def _changed(options: ModelOptions) -> set[str]:
    """Return the keys that have another value than their default."""
    usual = ModelOptions()
    return {name for name in ModelOptions.model_fields if getattr(options, name) != getattr(usual, name)}


def _pass_on(notes: Sequence[str], sink: RunSink, group: TrialGroup) -> None:
    for note in notes:
        sink.note(note, group)


class Stopwatch:
    """The seconds that a trial has taken, over all parts of it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what the block takes."""
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began


class Cadence:
    """When to store a checkpoint: at least `every_s` apart, and for at most CHECKPOINT_SHARE of the time."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last = clock()
        self._cost_s = 0.0

    def due(self) -> bool:
        return self._clock() - self._last >= max(self._every_s, self._cost_s / CHECKPOINT_SHARE)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what a checkpoint costs and start the next wait."""
        began = self._clock()
        yield
        self._last = self._clock()
        self._cost_s = self._last - began
