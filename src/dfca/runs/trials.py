"""Run cells: those of one point and seed share its split and graph; each goes on wherever it was stopped.

Nothing here writes metrics or summaries: a `Desk` does, and there is one for the whole run. The cells may run in its
process or in another one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dfca import algorithms, data, models, topology
from dfca.data import Split
from dfca.errors import ConfigError, DfcaError, RunError
from dfca.experiment.sweep import Cell, Point
from dfca.files import Stream
from dfca.runs.signals import Interrupted, StopSignal
from dfca.runs.store import Checkpoint, RunFolder
from dfca.runs.virtual import Virtual
from dfca.sim.rounds.ranks import my_device
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.sim.shards import AgreedError, Alone, Shards, keep

CHECKPOINT_SHARE = 0.05  # of the time at most
IN_SUMMARY = (
    "accuracy",
    "all_models_accuracy",
    "cluster_accuracy",
    "adjusted_rand_index",
    "live_clusters",
    "found_clusters",
    "models",
    "train_loss",
    "F_global",
    "messages_sent",
    "bytes_sent",
    "start_bytes",
    "scalars_sent",
    "accuracy_per_gigabyte",
    "server_bytes_sent",
    "model_bytes",
)


@dataclass(frozen=True)
class Job:
    """Cells of one point and seed: what one process does in one go."""

    point: Point
    seed: int
    algorithms: tuple[str, ...]

    @property
    def cells(self) -> list[Cell]:
        """Give the cells in their order."""
        return [Cell(name, self.seed, self.point) for name in self.algorithms]


class Audience(Protocol):
    """The one who hears what the cells of a run share."""

    def note(self, text: str, job: Job | None = None) -> None:
        """Pass on what the user should know; `job` is given where it depends on the point and the seed."""

    def store_topology(self, job: Job, graph: dict[str, Any]) -> None:
        """Store the graph of a point and seed."""


class Desk(Audience, Protocol):
    """The one who writes down how the cells of a run go."""

    def begin(self, cell: Cell, round: int, time_s: float = 0.0) -> None:
        """Forget what is known of a cell beyond a round (and its virtual time): it goes on from there."""

    def finish_round(self, cell: Cell, round: int, metrics: dict[str, Any] | None, time_s: float = 0.0) -> None:
        """Store the metrics of a round (or of a moment of virtual time), where it was evaluated."""

    def settle(self) -> None:
        """Return when all of the above is on the disk."""

    def finish(self, cell: Cell, row: dict[str, Any]) -> None:
        """Store the row of a finished cell."""

    def fail(self, cell: Cell, error: Exception) -> None:
        """Store that a cell failed, or raise the error where nothing else is to go on."""


def run_job(
    job: Job,
    desk: Desk,
    folder: RunFolder | None,
    stop: StopSignal,
    save_models: bool,
    share_out: Callable[[int], Shards] = Alone,
) -> None:
    """Run the cells of a job; its split and graph are freed on return.

    `share_out` gives each rank its share of so many clients. All ranks of a run make this call; only the first has the
    folder, and its desk is the one that writes.

    Raises:
        RunError: if the disk cannot be written, or another rank is lost.
        Interrupted: if `stop` was requested; the state is stored.
    """
    shards = share_out(job.point.config.clients)
    heed(stop, f"before {job.cells[0]}", shards)
    try:
        with shards.agreed():
            scene = Scene.of(job, desk, shards)
    except RunError:
        raise
    except Exception as error:
        for cell in job.cells:
            desk.fail(cell, error)
        return
    for cell in job.cells:
        heed(stop, f"before {cell}", shards)
        try:
            run_cell(cell, scene.setting(cell, folder), desk, folder, stop, save_models, shards)
        except RunError:
            raise
        except Exception as error:
            if shards.ranks > 1 and not isinstance(error, AgreedError):
                raise RunError(sentence(error)) from error  # the other ranks are in the middle of something
            desk.fail(cell, error)


class Rounds(Simulation):
    """A synchronous simulation as a cell runs it."""

    time_s = 0.0  # there is no clock

    @property
    def place(self) -> str:
        """Say how far it is."""
        return f"round {self.round} of {self.setting.rounds}"

    def stream(self) -> Stream:
        """Give the banks of all ranks."""
        return Stream(self.bank_shape(), self.banks.dtype, self.rows())

    def finish(self) -> dict[str, Any]:
        """Give what else the row of the finished cell has."""
        return {}


def _simulation(cell: Cell, setting: Setting, folder: RunFolder | None, shards: Shards) -> Rounds | Virtual:
    if cell.point.config.world is None:
        return Rounds(setting, shards)
    if folder is None or shards.ranks > 1:
        raise ConfigError("an experiment with a [world] runs in one process; start it without torchrun")
    return Virtual(cell, setting, folder)


def run_cell(
    cell: Cell,
    setting: Setting,
    desk: Desk,
    folder: RunFolder | None,
    stop: StopSignal,
    save_models: bool,
    shards: Shards,
) -> None:
    """Run one cell from its last good checkpoint, or from the start, to its last round."""
    job, config = Job(cell.point, cell.seed, (cell.algorithm,)), cell.point.config
    checkpoint, warnings = folder.latest(cell) if folder else (None, [])
    for warning in warnings:
        desk.note(warning)
    seconds, began = 0.0, time.monotonic()
    simulation = _simulation(cell, setting, folder, shards)
    if shards.share(checkpoint is not None):
        state = (checkpoint.tensors, checkpoint.facts) if checkpoint else (None, None)
        simulation.restore(*state)
        seconds = checkpoint.seconds if checkpoint else 0.0
        del state
        desk.note(f"{cell}: goes on after {simulation.place}")
    del checkpoint
    _pass_on(simulation.notes, desk, job)
    desk.begin(cell, simulation.round, simulation.time_s)
    seconds += time.monotonic() - began
    cadence = Cadence(config.checkpoint.every_s)
    metrics: dict[str, Any] = {}

    def store() -> None:
        tensors, facts = simulation.state()
        bank = simulation.stream()
        desk.settle()  # a checkpoint may not be ahead of the metrics
        with cadence.measured():
            if folder:
                folder.save_checkpoint(cell, Checkpoint(simulation.round, seconds, tensors, facts, bank))
            else:
                deque(bank.pieces, maxlen=0)  # the first rank writes them

    # A signal waits for the end of the round: half a round cannot be stored, and a finished cell is kept.
    with stop.deferred():
        while not simulation.done:
            began = time.monotonic()
            measured = simulation.step()
            seconds += time.monotonic() - began
            metrics = measured or metrics
            desk.finish_round(cell, simulation.round, measured, simulation.time_s)
            due = stop.requested or (shards.rank == 0 and cadence.due())
            if not simulation.done and shards.either(due):
                store()
                heed(stop, f"at {simulation.place} of {cell}", shards)
        _pass_on(simulation.notes, desk, job)
        if save_models:
            bank = simulation.stream()
            if folder:
                folder.save_models(cell, bank)
            else:
                deque(bank.pieces, maxlen=0)
        row = cell.head | {"digest": cell.point.digest} | {key: metrics[key] for key in IN_SUMMARY if key in metrics}
        row |= {"clusters": config.distributions, "rounds": config.rounds, "seconds": round(seconds, 3)}
        row |= simulation.finish()
        desk.finish(cell, row | {"finished": True})


def heed(stop: StopSignal, where: str, shards: Shards) -> None:
    """Stop here if somebody asked for it, on any rank."""
    if shards.either(stop.requested):
        raise Interrupted(where)


def sentence(error: Exception) -> str:
    """Say in one line what went wrong."""
    text = " ".join(str(error).split())
    return text if isinstance(error, DfcaError) else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class Scene:
    """What the cells of a job share."""

    point: Point
    split: Split
    drift: tuple[int, Split] | None
    graph: Any
    make_model: Callable[[], Any]

    @classmethod
    def of(cls, job: Job, desk: Audience, shards: Shards) -> Scene:
        """Make it, and tell what it is."""
        config, seed = job.point.config, job.seed
        split = keep(data.make_split(config.data, config.clients, config.distributions, seed), shards.members)
        drift = None
        if config.data.drift_share:
            later = data.make_split(config.data, config.clients, config.distributions, seed, drifted=True)
            drift = (max(1, round(config.data.drift_at * config.rounds)), keep(later, shards.members))
        graph = topology.make_graph(config.topology, config.clients, seed)
        facts = topology.describe(graph, split.clusters)
        edges = sorted([i, j] for i, j in graph.edges)
        ends = split if drift is None else drift[1]  # reports compare with what the clients hold at the end
        true = None if ends.clusters is None else ends.clusters.tolist()
        desk.store_topology(job, {"facts": facts, "edges": edges, "clusters": true})
        if job.point.at is None:  # a sweep has hundreds
            desk.note(f"graph: {topology.summary(facts)}", job)
        _pass_on(split.notes, desk, job)
        make_model = models.make_factory(config.model, tuple(split.train.x.shape[1:]), split.classes)
        return cls(job.point, split, drift, graph, make_model)

    def setting(self, cell: Cell, folder: RunFolder | None = None) -> Setting:
        """Make the setting of one of the cells."""
        config = self.point.config
        return Setting(
            split=self.split,
            graph=self.graph,
            make_model=self.make_model,
            algorithm=algorithms.get(cell.algorithm, **config.algorithm.get(cell.algorithm, {})),
            clusters=None if config.clusters == "auto" else config.clusters,
            rounds=config.rounds,
            seed=cell.seed,
            share=config.mixing.share,
            drift=self.drift,
            local=config.local.options(),
            participation=config.participation,
            weights=config.mixing.weights,
            aggregation=config.mixing.aggregation,
            evaluate_every=config.evaluation.every,
            evaluation_samples=config.evaluation.samples,
            device=my_device(config.device),
            engine=config.engine,
            bank=config.bank,
            bank_folder=None if folder is None else folder.path,
        )


def _pass_on(notes: Sequence[str], desk: Audience, job: Job) -> None:
    for note in notes:
        desk.note(note, job)


class Cadence:
    """When to store a checkpoint: `every_s` apart, and so rarely that storing takes at most 5 % of the time."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last = clock()
        self._cost_s = 0.0

    def due(self) -> bool:
        """Tell whether it is time."""
        return self._clock() - self._last >= max(self._every_s, self._cost_s / CHECKPOINT_SHARE)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what a checkpoint costs and start the next wait."""
        began = self._clock()
        yield
        self._last = self._clock()
        self._cost_s = self._last - began
