"""Run an experiment: one cell for each algorithm and seed, continued wherever it was stopped.

For each seed the split and the graph are made once and shared by all algorithms. A cell that the summary has is
skipped; a cell with a checkpoint goes on from it, bit-identical to a run that was never stopped.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dfca import algorithms, data, models, topology
from dfca.experiment.config import Config
from dfca.experiment.environment import environment
from dfca.experiment.load import Experiment
from dfca.experiment.store import Checkpoint, RunFolder
from dfca.sim import Setting, Simulation

CHECKPOINT_SHARE = 0.05  # of the time at most
IN_SUMMARY = (
    "accuracy",
    "all_models_accuracy",
    "cluster_accuracy",
    "adjusted_rand_index",
    "live_clusters",
    "models",
    "train_loss",
    "F_global",
    "messages_sent",
    "bytes_sent",
    "server_bytes_sent",
    "model_bytes",
)


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; the message says where, and how to go on."""


class Listener(Protocol):
    """Who is told how the run goes."""

    def note(self, text: str) -> None:
        """Hear something that the user should know once."""

    def start(self, cells: int, finished: int, rounds: int) -> None:
        """Hear how many cells there are, how many are finished already, and how many rounds each has."""

    def start_cell(self, algorithm: str, seed: int, round: int) -> None:
        """Hear that a cell starts, after `round` rounds that an earlier run did."""

    def finish_round(self, round: int, metrics: dict[str, Any] | None) -> None:
        """Hear that a round is done; the metrics where it was evaluated."""

    def finish_cell(self, row: dict[str, Any]) -> None:
        """Hear the result of a cell."""


class Silence:
    """Listen to nothing."""

    def note(self, text: str) -> None: ...
    def start(self, cells: int, finished: int, rounds: int) -> None: ...
    def start_cell(self, algorithm: str, seed: int, round: int) -> None: ...
    def finish_round(self, round: int, metrics: dict[str, Any] | None) -> None: ...
    def finish_cell(self, row: dict[str, Any]) -> None: ...


def run(
    experiment: Experiment,
    out: str | Path,
    listener: Listener | None = None,
    resume: bool = True,
    save_models: bool = False,
) -> dict[str, Any]:
    """Run every cell that the folder has not finished, and return the summary.

    Raises:
        RunError: if the folder cannot be used or written.
        Interrupted: after SIGINT or SIGTERM; the state is stored and the same call continues.
    """
    with RunFolder.open_(out, experiment, resume) as folder, StopSignal() as stop:
        listener = listener or Silence()
        stop.on_request = partial(listener.note, "stopping after this round; Ctrl-C again stops at once")
        _Run(experiment.config, folder, listener, stop, save_models).all_cells()
        return folder.summary()


@dataclass
class _Run:
    config: Config
    folder: RunFolder
    listener: Listener
    stop: StopSignal
    save_models: bool

    def __post_init__(self) -> None:
        self._told: set[str] = set()

    def all_cells(self) -> None:
        config = self.config
        self._tell_environment()
        finished = {(row["algorithm"], row["seed"]) for row in self.folder.rows()}
        wanted = [(algorithm, seed) for seed in config.seeds for algorithm in config.algorithms]
        self._tell_unsaved_models([cell for cell in wanted if cell in finished])
        self.listener.start(len(wanted), sum(cell in finished for cell in wanted), config.rounds)
        for seed in config.seeds:
            missing = [name for name in config.algorithms if (name, seed) not in finished]
            if missing:
                self._heed_stop(f"before seed {seed}")
                self._seed(seed, missing)

    def _seed(self, seed: int, names: Sequence[str]) -> None:
        """Run the missing cells of one seed; its split and graph are freed on return."""
        config = self.config
        split = data.make_split(config.data, config.clients, config.distributions, seed)
        drift = None
        if config.data.drift_share:
            later = data.make_split(config.data, config.clients, config.distributions, seed, drifted=True)
            drift = (max(1, round(config.data.drift_at * config.rounds)), later)
        graph = topology.make_graph(config.topology, config.clients, seed)
        facts = topology.describe(graph, split.clusters)
        self.folder.store_topology(
            seed,
            {
                "facts": facts,
                "edges": sorted([i, j] for i, j in graph.edges),
                "clusters": None if split.clusters is None else split.clusters.tolist(),
            },
        )
        self._tell([f"graph: {topology.summary(facts)}", *split.notes], seed)
        make_model = models.make_factory(config.model, tuple(split.train.x.shape[1:]), split.classes)
        for name in names:
            setting = Setting(
                split=split,
                graph=graph,
                make_model=make_model,
                algorithm=algorithms.get(name, **config.algorithm.get(name, {})),
                clusters=None if config.clusters == "auto" else config.clusters,
                rounds=config.rounds,
                seed=seed,
                share=config.mixing.share,
                drift=drift,
                local=config.local.options(),
                participation=config.participation,
                weights=config.mixing.weights,
                aggregation=config.mixing.aggregation,
                evaluate_every=config.evaluation.every,
                evaluation_samples=config.evaluation.samples,
                device=config.device,
                engine=config.engine,
            )
            self._heed_stop(f"before {name}, seed {seed}")
            self._cell(name, seed, setting)

    def _cell(self, name: str, seed: int, setting: Setting) -> None:
        """Run one cell from its last good checkpoint, or from the start, to its last round."""
        folder, rounds = self.folder, self.config.rounds
        checkpoint, warnings = folder.latest(name, seed)
        self._tell(warnings)
        folder.rewind_metrics(name, seed, checkpoint.round if checkpoint else 0)
        seconds, began = 0.0, time.monotonic()
        simulation = Simulation(setting)
        if checkpoint:
            simulation.restore(checkpoint.tensors, checkpoint.facts)
            seconds = checkpoint.seconds
            self._tell([f"{name}, seed {seed}: goes on after round {checkpoint.round} of {rounds}"])
        del checkpoint
        self._tell(simulation.notes, seed)
        self.listener.start_cell(name, seed, simulation.round)
        seconds += time.monotonic() - began
        cadence = Cadence(self.config.checkpoint.every_s)
        metrics: dict[str, Any] = {}

        def store() -> None:
            tensors, facts = simulation.state()
            with cadence.measured():
                folder.save_checkpoint(name, seed, Checkpoint(simulation.round, seconds, tensors, facts))

        # A signal waits for the end of the round: half a round cannot be stored, and a finished cell is kept.
        with self.stop.deferred():
            while simulation.round < rounds:
                began = time.monotonic()
                measured = simulation.step()
                seconds += time.monotonic() - began
                if measured is not None:
                    metrics = measured
                    folder.append_metrics(name, seed, measured)
                self.listener.finish_round(simulation.round, measured)
                if simulation.round < rounds and (cadence.due() or self.stop.requested):
                    store()
                    self._heed_stop(f"at round {simulation.round} of {rounds} of {name}, seed {seed}")
            self._tell(simulation.notes, seed)
            if self.save_models:
                folder.save_models(name, seed, simulation.state()[0]["bank"])
            row = {"algorithm": name, "seed": seed} | {key: metrics[key] for key in IN_SUMMARY if key in metrics}
            row |= {"clusters": self.config.distributions, "rounds": rounds, "seconds": round(seconds, 3), "finished": True}
            folder.finish(row)
            self.listener.finish_cell(row)

    def _heed_stop(self, where: str) -> None:
        if self.stop.requested:
            raise Interrupted(f"interrupted {where}; the same command continues")

    def _tell(self, notes: Sequence[str], seed: int | None = None) -> None:
        """Pass on notes that were not told before; name the seed of one that an earlier seed told otherwise."""
        first = self.config.seeds[0]
        for note in notes:
            if note not in self._told:
                self._told.add(note)
                self.listener.note(note if seed is None or seed == first else f"seed {seed}: {note}")

    def _tell_environment(self) -> None:
        changed = self.folder.store_environment(environment(self.config.device))
        if changed:
            self._tell([f"since this run began: {', '.join(changed)}; its last digits may differ from an unbroken run"])

    def _tell_unsaved_models(self, finished: Sequence[tuple[str, int]]) -> None:
        unsaved = [cell for cell in finished if not self.folder.has_models(*cell)] if self.save_models else []
        if unsaved:
            name, seed = unsaved[0]
            self._tell(
                [
                    f"cells that were finished without --save-models are not run again ({len(unsaved)}, first: {name}, "
                    f"seed {seed}); --no-resume runs everything anew"
                ]
            )


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


class StopSignal:
    """Turn SIGINT and SIGTERM into a KeyboardInterrupt at a moment when nothing is half done.

    Inside `deferred` the first signal only sets `requested`; a second one does not wait.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self.on_request: Callable[[], None] | None = None
        self._busy = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Only the main thread may handle signals; elsewhere they stay what they are.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block finish before a first signal counts."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _handle(self, *_: object) -> None:
        if self.requested or not self._busy:
            raise KeyboardInterrupt
        self.requested = True
        if self.on_request is not None:
            # A signal in the middle of a print cannot print.
            with suppress(RuntimeError):
                self.on_request()
