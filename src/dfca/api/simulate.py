"""Run simulations from Python: one algorithm and seed, or several of each, in rounds or in virtual time."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, Unpack, overload

from torch import nn

from dfca.api.arguments import (
    Callback,
    Numbers,
    SimulateOptions,
    Topology,
    check_numbers,
    make_starts,
    to_algorithm,
    to_clock,
    to_graph,
    to_table,
    to_world,
)
from dfca.api.comparison import Comparison
from dfca.api.result import Result
from dfca.base.errors import (
    ConfigError,
    DataError,
    DfcaError,
    DfcaWarning,
    ModelError,
    explain_batch_norm,
    place_of,
    unknown,
)
from dfca.core.algorithm import Algorithm
from dfca.core.learning.task import Task
from dfca.core.method import Augment, PrivacyOptions
from dfca.data.clients import Split
from dfca.data.own import split_from
from dfca.experiment.world import ClockConfig
from dfca.runs.signals import Interrupted, StopSignal
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import World
from dfca.sim.local.choices import LiarOptions
from dfca.sim.metrics_table import Metrics
from dfca.sim.notes import WarningNote, notes_of_scores
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.tasks import LossLike, MetricLike, choose_task

ModelLike = nn.Module | Callable[[], nn.Module]
DataLike = Split | Any
AlgorithmLike = str | Algorithm | Mapping[str, Any] | Callable[[], Algorithm]


@overload
def simulate(
    model: ModelLike,
    data: DataLike,
    algorithm: AlgorithmLike = ...,
    *,
    rounds: int,
    seed: int = ...,
    **options: Unpack[SimulateOptions],
) -> Result: ...


@overload
def simulate(
    model: ModelLike,
    data: DataLike,
    algorithm: list[Any] | tuple[AlgorithmLike, ...],
    *,
    rounds: int,
    seed: int | Sequence[int] = ...,
    **options: Unpack[SimulateOptions],
) -> Comparison: ...


@overload
def simulate(
    model: ModelLike,
    data: DataLike,
    algorithm: AlgorithmLike = ...,
    *,
    rounds: int,
    seed: Sequence[int],
    **options: Unpack[SimulateOptions],
) -> Comparison: ...


def simulate(
    model: ModelLike,
    data: DataLike,
    algorithm: AlgorithmLike | list[Any] | tuple[AlgorithmLike, ...] = "dfca-auto",
    *,
    rounds: int,
    clusters: int | Literal["auto"] | None = "auto",
    topology: Topology = "erdos-renyi",
    seed: int | Sequence[int] = 0,
    steps: int | None = None,
    epochs: int | None = None,
    learning_rate: float = 0.1,
    decay: float = 1.0,
    batch_size: int | Literal["full"] | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    layer_decay: Mapping[str, float] | None = None,
    augment: Augment | Mapping[str, Any] | None = None,
    task: str | Task | None = None,
    loss: LossLike = None,
    metric: MetricLike = None,
    start_from: Any = None,
    world: World | Mapping[str, Any] | str | None = None,
    clock: Mapping[str, Any] | ClockConfig | None = None,
    progress: bool = False,
    callback: Callback | None = None,
    **options: Any,
) -> Result | Comparison:
    """Run an algorithm on data; lists of algorithms or seeds are compared.

    "dfca-gi" and "dfca-li" are the paper's DFCA; "dfca-auto", the default, is ours and recommended: it elects the
    starts, finds the number of clusters and fine-tunes at the end (docs/beyond.md).

    What may be wrong (clients without neighbours, divergence) is warned of as `DfcaWarning`. Ctrl-C, or the stop button
    of a notebook, ends it within two seconds with what it has: `result.partial`.

    Args:
        model: A function that builds a fresh module, or a module. The layers of a module are re-initialised for every
            start, unless start_from is given. Frozen parameters (requires_grad False) are constants: those of the
            module, of start_from, or of the first module that the function builds; they are not sent.
        data: A `Split`, anything that `split_from` takes, or a function of the seed that returns one of these.
        algorithm: A name (`dfca list`), "module:function", an `Algorithm`, or a list of these. A name with options:
            {"name": "dfedavgm", "momentum": 0.5, "label": "dfedavgm, less momentum"}.
        rounds: Rounds of training and exchange.
        clusters: The number of models. "auto": the clients find it where the algorithm can (dfca-auto, dfca-fi);
            otherwise the true number.
        topology: A networkx graph with nodes 0..N-1, a name, options ({"name": "erdos-renyi", "p": 0.2}),
            "module:function", or a function of (clients, seed).
        seed: Determines every random choice. A list of seeds gives a `Comparison`.
        steps: Gradient steps of a client per round; default: 5, without epochs.
        epochs: Passes over the client's samples per round, in batches, instead of steps.
        learning_rate: Of these steps.
        decay: The factor of the learning rate after every round.
        batch_size: Samples per step; "full" or None: all samples of the client.
        momentum: Of these steps.
        weight_decay: Of these steps.
        layer_decay: Weight decay of single layers or tensors, by name, instead: {"2.weight": 0.004}.
        augment: Random changes of images in these steps: {"crop": 24, "flip": True, "brightness": 0.2, "contrast":
            (0.2, 1.8)}. With a crop the model is one of cropped images; it is chosen and scored on their centres.
        task: "classification", "regression", "multilabel" or "tokens", where the split does not say.
        loss: Another loss: a name, "module:function" or a function (docs/tasks.md).
        metric: Another metric, likewise.
        start_from: Pretrained weights: a module, a state_dict, the path of a safetensors file, or a list of these, one
            per cluster.
        world: Run in virtual time: the name of a world ("wifi"), a table as `[world]` of an experiment file, or a
            `World`. `aggregation` is then "sequential" by default.
        clock: When a run in virtual time ends and is evaluated, as the table `[clock]`: {"until_s": 600}.
        progress: Show a progress bar, in notebooks too.
        callback: Called with the record of every evaluated round: algorithm, seed, round, accuracy, ...
        **options: Further keys of `SimulateOptions`: optimizer ("adam", or a class of torch.optim), clip,
            warmup_rounds, cosine_rounds, precision, participation, weights, aggregation, share, robust, private, codec,
            keep, liars, privacy, evaluate_every (default: a tenth of the rounds, at most 10), device, ... With liars,
            scores are those of the honest clients.

    Returns:
        A `Result` for one algorithm and one seed, a `Comparison` if either is a list.

    Raises:
        ConfigError: If an argument is unknown or out of bounds.
        ModelError: If the model cannot be built, or does not fit the data.
        DataError: If the data cannot be used.

    Example:
        >>> import dfca
        >>> split = dfca.make_split(dfca.DataOptions(samples_per_client=20), clients=6, clusters=2, seed=0)
        >>> result = dfca.simulate(
        ...     lambda: dfca.mlp((1, 8, 8), 10, 8), split, "dfca-gi", rounds=2, clusters=2, topology="ring"
        ... )
        >>> result.algorithm, result.banks.shape
        ('dfca-gi', torch.Size([2, 6, 610]))
    """
    several = isinstance(algorithm, list | tuple) or isinstance(seed, list | tuple | range)
    chosen = [to_algorithm(named) for named in (algorithm if isinstance(algorithm, list | tuple) else [algorithm])]
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
        "epochs": epochs,
        "decay": decay,
        "layer_decay": layer_decay,
        "augment": augment,
        **{name: options.pop(name) for name in Numbers.descriptions() if name in options},
    }
    _check_options(options)
    if options.get("liars") is not None:
        options["liars"] = to_table(LiarOptions, options["liars"], "liars", '{"share": 0.2, "kind": "noise"}')
    if options.get("privacy") is not None:
        options["privacy"] = to_table(PrivacyOptions, options["privacy"], "privacy", '{"noise": 1.0, "clip": 0.5}')
    if clock is not None and world is None:
        raise ConfigError('clock needs a world, which makes a run happen in virtual time; give world="ideal"')
    if not callable(model):
        raise ModelError(f"model must be a torch.nn.Module or a function that builds one, got {type(model).__name__}")
    if callback is not None and not callable(callback):
        raise ConfigError(f"callback must be a function of a record, got {callback!r}")
    if world is not None:
        options = {"aggregation": "sequential", **options}
    results = []
    plans = [check_numbers(seed=one, **numbers) for one in seeds]
    augment = plans[0].local().augment
    build = make_starts(model, start_from, None if augment is None else augment.crop)
    bar = _bar(progress, len(chosen) * len(seeds) * plans[0].rounds)
    # The first Ctrl-C ends what is under way, wherever it is, and keeps the results; a second one raises.
    with bar as advance, StopSignal() as stop, suppress(Interrupted), stop.deferred():
        for plan in plans:
            with stop.abandonable():
                split = split_from(_of_seed(data, plan.seed), seed=plan.seed, task=task)
                options["task"] = choose_task(split.task, task, loss, metric)
                graph = to_graph(topology, split.train.clients, plan.seed)
            for record in chosen:
                setting = _setting(plan, split, graph, build, record, options)
                result = _run(setting, world, clock, callback, advance, stop)
                results += [] if result is None else [result]
                if stop.requested:
                    raise Interrupted
    if not results:
        raise KeyboardInterrupt("interrupted before the first evaluation; evaluate_every=1 evaluates every round")
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
        evaluate_every=plan.every(),
        evaluation_samples=plan.evaluation_samples,
        device=plan.device,
        **options,
    )


def _run(
    setting: Setting,
    world: Any,
    clock: Any,
    callback: Callback | None,
    advance: Callable[[int, str], None],
    stop: StopSignal,
) -> Result | None:
    """Step to the end, or until the user interrupts it; None where nothing was evaluated until then.

    Raises Interrupted in the start.
    """
    simulation: Simulation | EventSimulation
    metric = setting.learns.metric
    advance(0, f"{setting.algorithm.name}: start")
    goal = to_clock(clock)
    with explain_batch_norm(), stop.abandonable():
        if world is None:
            simulation = Simulation(setting)
        else:
            options = goal.event_options(setting.rounds)
            simulation = EventSimulation(setting, to_world(world, setting.clients), options)
    name, metrics, done = setting.algorithm.name, Metrics(), 0
    warned: set[str] = set()
    _warn(simulation.notes, warned)
    while not simulation.done and not stop.requested:
        try:
            with explain_batch_norm(), stop.abandonable():
                row = simulation.step()
        except Interrupted:
            break
        advance(min(simulation.round, setting.rounds) - done, name)
        done = min(simulation.round, setting.rounds)
        if row is not None:
            metrics.append(row)
            if callback is not None:
                try:
                    with stop.abandonable():
                        callback({"algorithm": name, "seed": setting.seed, **row})
                except Interrupted:
                    break
    notes = [*simulation.notes, *notes_of_scores(metric, metrics[-1].score if metrics else None, goal.target)]
    if partial := not simulation.done:
        notes.append(
            WarningNote("partial", f"interrupted after round {done} of {setting.rounds}: the result is partial")
        )
        if not metrics:
            return None
    else:
        advance(setting.rounds - done, name)  # a clock may end a run sooner
    _warn(notes, warned)
    flat = simulation.flat if isinstance(simulation, Simulation) else simulation.pool.flat
    banks, shape = simulation.banks, getattr(setting.split.train.x, "shape", None)
    return Result(
        evaluations=metrics,
        algorithm=name,
        seed=setting.seed,
        banks=banks,
        module=flat.to_module(banks[0, 0]),
        classes=setting.split.classes,
        shape=None if shape is None else tuple(shape[1:]),
        notes=tuple(notes),
        simulation=simulation,
        partial=partial,
    )


def _warn(notes: Sequence[str], warned: set[str]) -> None:
    for note in notes:
        if isinstance(note, WarningNote) and note.kind not in warned:
            warned.add(note.kind)
            warnings.warn(str(note), DfcaWarning, stacklevel=4)


def _check_lists(algorithms: Sequence[Algorithm], seeds: Sequence[Any]) -> None:
    if not algorithms or not seeds:
        raise ConfigError(f"{'seed' if algorithms else 'algorithm'} is an empty list; give at least 1")
    for kind, values in (("algorithm", [record.name for record in algorithms]), ("seed", list(seeds))):
        if twice := [value for value in values if values.count(value) > 1]:
            raise ConfigError(f"{kind} must not repeat a value, got {twice[0]!r} {values.count(twice[0])} times")


def _check_options(options: Mapping[str, Any]) -> None:
    for option in options:
        if option not in SimulateOptions.__annotations__:
            named = set(inspect.signature(simulate).parameters) - {"options"}
            raise unknown("option of simulate", option, named | set(SimulateOptions.__annotations__))


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
    except ValueError:  # a builtin without a signature
        pass
    try:
        return data(seed)
    except DfcaError:
        raise
    except Exception as error:  # a user's own function
        raise DataError(f"data(seed) failed with {type(error).__name__}: {error}{place_of(error)}") from error


@contextmanager
def _bar(wanted: bool, rounds: int) -> Iterator[Callable[[int, str], None]]:
    """Show a bar over the rounds of all simulations."""
    if not wanted:
        yield lambda rounds, name: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=rounds, unit="round") as bar:

        def advance(rounds: int, name: str) -> None:
            bar.set_description_str(name, refresh=not rounds)  # a start is seen before it has taken its time
            bar.update(rounds)

        yield advance
