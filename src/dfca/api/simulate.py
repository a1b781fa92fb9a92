"""Run simulations from Python: one algorithm and seed, or several of each, in rounds or in virtual time."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from dfca.api.arguments import Numbers, Topology, check_numbers, to_algorithm, to_clock, to_graph, to_liars, to_world
from dfca.api.comparison import Comparison
from dfca.api.result import Result
from dfca.base.errors import ConfigError, DfcaWarning, ModelError, unknown
from dfca.core.algorithm import Algorithm
from dfca.core.learning.task import Task
from dfca.data.clients import Split
from dfca.data.own import split_from
from dfca.experiment.world import ClockConfig
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import World
from dfca.sim.metrics_table import Metrics
from dfca.sim.notes import Alarm
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.sim.simulate import make_starts
from dfca.tasks import LossLike, MetricLike, choose_task

Callback = Callable[[dict[str, Any]], object]
AlgorithmLike = str | Algorithm | Mapping[str, Any] | Callable[[], Algorithm]


def simulate(
    model: nn.Module | Callable[[], nn.Module],
    data: Split | Any,
    algorithm: AlgorithmLike | Sequence[AlgorithmLike] = "dfca-auto",
    *,
    rounds: int,
    clusters: int | Literal["auto"] | None = "auto",
    topology: Topology = "erdos-renyi",
    seed: int | Sequence[int] = 0,
    steps: int = 5,
    learning_rate: float = 0.1,
    batch_size: int | Literal["full"] | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    task: str | Task | None = None,
    loss: LossLike = None,
    metric: MetricLike = None,
    start_from: Any = None,
    world: World | Mapping[str, Any] | str | None = None,
    clock: Mapping[str, Any] | ClockConfig | None = None,
    progress: bool = False,
    callback: Callback | None = None,
    **options: Any,
) -> Any:
    """Run an algorithm on data, and return a `Result`; with a list of algorithms or seeds, a `Comparison`.

    "dfca-gi" and "dfca-li" are the paper's DFCA; "dfca-auto", the default, is ours and recommended: it elects the
    starts, finds the number of clusters and fine-tunes at the end (docs/beyond.md).

    model: a function that builds a fresh module, or a module (its layers are re-initialised for every start, unless
    start_from is given: a module, a state_dict, the path of a safetensors file, or a list of one per cluster).
    data: a `Split`, or whatever `split_from` takes; or a function of the seed that returns it.
    algorithm: a name (`dfca list`), "module:function", an `Algorithm`, or a list of these; a name with options of its
    own is {"name": "dfedavgm", "momentum": 0.5, "label": "dfedavgm, less momentum"}.
    clusters: how many; "auto": found by the clients where the algorithm can (dfca-auto, dfca-fi), else the true number.
    topology: a networkx graph with nodes 0..N-1, a name, options ({"name": "erdos-renyi", "p": 0.2}), "module:function"
    or a function of (clients, seed).
    task, loss, metric: what is learned, where the split does not say ("classification", "regression", "multilabel",
    "tokens"), and another loss or metric: a name, "module:function" or a function (docs/tasks.md).
    world, clock: run in virtual time, in a world by its name ("wifi"), a table as `[world]` of an experiment file has
    it, or a `World`; clock: as the table `[clock]`, {"until_s": 600}. There `aggregation` is "sequential" by default.
    progress: show a bar. callback: called with the record of every evaluated round: algorithm, seed, round, accuracy...
    options: further fields of `Setting`: participation, weights, aggregation, share, robust, evaluate_every, ...;
    liars: as the table `[liars]`, {"share": 0.2, "kind": "flip-signs"}: scores are then those of the honest.

    What may be wrong (clients without neighbours, divergence) is warned of as `DfcaWarning`.

    Raises ConfigError, ModelError or DataError, each with a sentence that names the value and what to do.
    """
    several = isinstance(algorithm, list | tuple) or isinstance(seed, list | tuple | range)
    chosen = [to_algorithm(each) for each in (algorithm if isinstance(algorithm, list | tuple) else [algorithm])]
    seeds = list(seed) if isinstance(seed, list | tuple | range) else [seed]
    _check_lists(chosen, seeds)
    numbers = {
        "rounds": rounds,
        "clusters": clusters,
        "steps": steps,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "momentum": momentum,
        "weight_decay": weight_decay,
        **{name: options.pop(name) for name in Numbers.model_fields if name in options},
    }
    _check_options(options)
    if options.get("liars") is not None:
        options["liars"] = to_liars(options["liars"])
    if clock is not None and world is None:
        raise ConfigError('clock needs a world, which makes a run happen in virtual time; give world="ideal"')
    if not callable(model):
        raise ModelError(f"model must be a torch.nn.Module or a function that builds one, got {type(model).__name__}")
    if callback is not None and not callable(callback):
        raise ConfigError(f"callback must be a function of a record, got {callback!r}")
    build = make_starts(model, start_from)
    if world is not None:
        options = {"aggregation": "sequential", **options}
    results = []
    plans = [check_numbers(seed=each, **numbers) for each in seeds]
    with _bar(progress, len(chosen) * len(seeds) * plans[0].rounds) as advance:
        for plan in plans:
            split = split_from(_of_seed(data, plan.seed), seed=plan.seed, task=task)
            options["task"] = choose_task(split.task, task, loss, metric)
            graph = to_graph(topology, split.train.clients, plan.seed)
            for each in chosen:
                setting = _setting(plan, split, graph, build, each, options)
                driver = _driver(setting, world, clock)
                results.append(_run(driver, callback, advance))
    return Comparison(results) if several else results[0]


def _setting(
    plan: Numbers, split: Split, graph: Any, build: Callable[[], nn.Module], algorithm: Algorithm, options: Any
) -> Setting:
    return Setting(
        split=split,
        graph=graph,
        make_model=build,
        algorithm=algorithm,
        clusters=plan.k(),
        rounds=plan.rounds,
        seed=plan.seed,
        local=plan.local(),
        participation=plan.participation,
        evaluate_every=plan.evaluate_every,
        evaluation_samples=plan.evaluation_samples,
        device=plan.device,
        **options,
    )


@dataclass(frozen=True)
class _Driver:
    """A simulator, by rounds or in virtual time, as `_run` sees it."""

    simulation: Simulation | EventSimulation
    setting: Setting

    def result(self, rows: Metrics) -> Result:
        simulation, setting = self.simulation, self.setting
        flat = simulation.flat if isinstance(simulation, Simulation) else simulation.pool.flat
        banks = simulation.banks
        shape = getattr(setting.split.train.x, "shape", None)
        return Result(
            metrics=rows,
            algorithm=setting.algorithm.name,
            seed=setting.seed,
            banks=banks,
            module=flat.to_module(banks[0, 0]),
            classes=setting.split.classes,
            shape=None if shape is None else tuple(shape[1:]),
            notes=tuple(simulation.notes),
            simulation=simulation,
        )


def _driver(setting: Setting, world: Any, clock: Any) -> _Driver:
    if world is None:
        return _Driver(Simulation(setting), setting)
    options = to_clock(clock).event_options(setting.rounds)
    return _Driver(EventSimulation(setting, to_world(world, setting.clients), options), setting)


def _run(driver: _Driver, callback: Callback | None, advance: Callable[[int, str], None]) -> Result:
    """Step to the end; warn once of whatever may be wrong."""
    simulation, rows = driver.simulation, Metrics()
    head = {"algorithm": driver.setting.algorithm.name, "seed": driver.setting.seed}
    warned: set[str] = set()
    _warn(simulation.notes, warned)
    done = 0
    while not simulation.done:
        row = simulation.step()
        advance(min(simulation.round, driver.setting.rounds) - done, str(head["algorithm"]))
        done = min(simulation.round, driver.setting.rounds)
        if row is not None:
            rows.append(row)
            if callback is not None:
                callback({**head, **row})
    advance(driver.setting.rounds - done, str(head["algorithm"]))  # a clock may end a run sooner
    _warn(simulation.notes, warned)
    return driver.result(rows)


def _warn(notes: Sequence[str], warned: set[str]) -> None:
    for note in notes:
        if isinstance(note, Alarm) and note.kind not in warned:
            warned.add(note.kind)
            warnings.warn(str(note), DfcaWarning, stacklevel=4)


def _check_lists(algorithms: Sequence[Algorithm], seeds: Sequence[Any]) -> None:
    if not algorithms or not seeds:
        raise ConfigError(f"{'seed' if algorithms else 'algorithm'} is an empty list; give at least 1")
    for kind, values in (("algorithm", [each.name for each in algorithms]), ("seed", list(seeds))):
        if twice := [value for value in values if values.count(value) > 1]:
            raise ConfigError(f"{kind} must not repeat a value, got {twice[0]!r} {values.count(twice[0])} times")


def _check_options(options: Mapping[str, Any]) -> None:
    taken = {"split", "graph", "make_model", "algorithm", "local"}
    known = {field.name for field in fields(Setting)} - taken | set(Numbers.model_fields)
    for option in options:
        if option not in known:
            named = set(inspect.signature(simulate).parameters) - {"options"}
            raise unknown("option of simulate", option, known | named)


def _of_seed(data: Any, seed: int) -> Any:
    """Call a function of the seed; return anything else as it is."""
    if not callable(data) or hasattr(data, "load_partition"):
        return data
    try:
        inspect.signature(data).bind(seed)
    except TypeError as error:
        raise ConfigError(
            f"data is called as data(seed), which it cannot be: {error}; of a function of (clients, seed), as "
            "data.factory has it, give lambda seed: function(clients, seed)"
        ) from None
    except ValueError:  # nobody knows its arguments
        pass
    return data(seed)


@contextmanager
def _bar(wanted: bool, rounds: int) -> Iterator[Callable[[int, str], None]]:
    """Show a bar over the rounds of all simulations, where it is wanted."""
    if not wanted:
        yield lambda rounds, name: None
        return
    from tqdm import tqdm

    with tqdm(total=rounds, unit="round") as bar:

        def advance(rounds: int, name: str) -> None:
            bar.set_description_str(name, refresh=False)
            bar.update(rounds)

        yield advance
