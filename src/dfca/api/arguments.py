"""What `simulate` is called with: checked by the bounds and in the sentences of an experiment file, and made ready."""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import networkx as nx
import torch
from pydantic import Field
from torch import nn

from dfca import algorithms
from dfca.base.device import find_device
from dfca.base.errors import ConfigError, DfcaWarning, ModelError, place_of
from dfca.base.imports import call_own
from dfca.base.table import Table, option
from dfca.base.validation import check
from dfca.core.algorithm import Algorithm
from dfca.core.learning.local import LocalOptions
from dfca.core.learning.params import load_constants_
from dfca.core.learning.task import Task
from dfca.core.method import Augment, MethodKeywords, PersonalSteps, PrivacyOptions, StepTable
from dfca.core.rng import seeded
from dfca.data.clients import Split
from dfca.experiment.variants import label_of
from dfca.experiment.world import ClockConfig, WorldConfig
from dfca.models import looks_trained, on_images, pretrained
from dfca.sim.events.world import World
from dfca.sim.local.choices import EngineName, LiarOptions, Place
from dfca.tasks import LossLike, MetricLike
from dfca.topology import TopologyOptions, check_graphs, is_graphs, make_graph

Topology = TopologyOptions | Mapping[str, Any] | str | Callable[[int, int], Any] | Any  # or networkx graphs
Callback = Callable[[dict[str, Any]], object]
Checked = TypeVar("Checked")


class SimulateOptions(MethodKeywords, total=False):
    """The keyword arguments of `dfca.simulate` that may be left out, for editors and type checkers.

    Those that its docstring does not explain are fields of `dfca.Setting`.
    """

    clusters: int | Literal["auto"] | None
    topology: Topology
    augment: Augment | Mapping[str, Any] | None
    task: str | Task | None
    loss: LossLike
    metric: MetricLike
    start_from: Any
    world: World | Mapping[str, Any] | str | None
    clock: Mapping[str, Any] | ClockConfig | None
    progress: bool
    callback: Callback | None
    participation: float
    liars: LiarOptions | Mapping[str, Any] | None
    privacy: PrivacyOptions | Mapping[str, Any] | None
    personal_steps: PersonalSteps | None
    quiet_rounds: int
    drift: tuple[int, Split] | None
    evaluate_every: int | None
    evaluation_samples: int
    device: str | torch.device
    engine: EngineName
    dtype: torch.dtype
    bank: Place
    bank_folder: Path | None


class RunLength(Table):
    """How long a simulation is, and from which seed."""

    rounds: int = option(ge=1)
    seed: int = option(ge=0)
    clusters: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"


class Numbers(StepTable, RunLength):
    """The numbers of a simulation, with their bounds: those of local steps are declared by `StepTable`."""

    called: ClassVar[str] = "{}"

    batch_size: Literal["full"] | Annotated[int, Field(ge=1)] | None = None  # type: ignore[assignment]
    optimizer: str | Callable[..., Any] = "sgd"  # type: ignore[assignment]
    augment: Augment | None = None
    participation: float = option(default=1.0, gt=0, le=1)
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    evaluation_samples: int = option(default=200, ge=2)
    device: str = option(default="cpu", pattern=r"^(cpu|auto|mps|cuda(:\d+)?)$")

    def local(self) -> LocalOptions:
        return self.options(self.augment, batch_size=None if self.batch_size == "full" else self.batch_size)

    def every(self) -> int:
        """Return the rounds between two evaluations: of a short run a tenth of its rounds, so that it has a curve."""
        return self.evaluate_every or min(10, -(-self.rounds // 10))

    def k(self) -> int | None:
        """Return the number of clusters; None: it is found."""
        return None if self.clusters in (None, "auto") else int(self.clusters)


def check_numbers(**values: Any) -> Numbers:
    """Check the numbers; those of numpy and torch count as Python's.

    Raises ConfigError with every problem in one sentence.
    """
    numbers = checked(Numbers, {key: _plain(value) for key, value in values.items()})
    return numbers.changed(device=find_device(numbers.device, remedy='use device="auto"'))


def check_client(client: Any, clients: int) -> int:
    """Return the number of a client. Raises ConfigError if there is no such client."""
    try:
        number = operator.index(client)
    except TypeError:
        number = -1
    if not 0 <= number < clients:
        raise ConfigError(f"client must be in 0..{clients - 1}, got {client!r}")
    return number


def checked(table: type[Checked], values: Mapping[str, Any], prefix: str = "") -> Checked:
    """Check values by a table of the experiment file. Raises ConfigError with every problem in one sentence."""
    try:
        return check(dict(values), table)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def to_algorithm(algorithm: Any) -> Algorithm:
    """Accept a record, a name, "module:function", a function that makes a record, or a name with options.

    {"name": "fedavg", "momentum": 0.9, "label": "fedavg, momentum 0.9"}: so the same one can stand in a table twice.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, Mapping):
        label, options = label_of(algorithm)
        return replace(algorithms.get(algorithm["name"], **options), name=label)
    if isinstance(algorithm, str):
        return replace(algorithms.get(algorithm), name=algorithm)  # "module:function" too, as in a run folder
    if callable(algorithm):
        made = algorithm()
        if isinstance(made, Algorithm):
            return made
        raise ConfigError(f"algorithm is a function that must return an Algorithm, got {type(made).__name__}")
    raise ConfigError(f'algorithm must be a name such as "ifca", an Algorithm, or a list of these, got {algorithm!r}')


def to_graph(topology: Topology, clients: int, seed: int) -> nx.Graph:
    """Accept a graph over 0..N-1, several that are used in turn, a name, "module:function", options, or a function of
    (clients, seed)."""
    graph = topology
    if callable(graph) and not isinstance(graph, nx.Graph):
        graph = call_own(graph, clients, seed, "topology is a function that")
        if not is_graphs(graph):
            raise ConfigError(f"topology is a function that must return a networkx graph, got {type(graph).__name__}")
    if is_graphs(graph):
        return check_graphs(graph, clients)
    if isinstance(graph, str):
        graph = {"name": graph}
    if isinstance(graph, Mapping):
        graph = checked(TopologyOptions, graph, "topology: ")
    if not isinstance(graph, TopologyOptions):
        raise ConfigError(
            f'topology must be a name such as "ring", options such as {{"name": "erdos-renyi", "p": 0.2}}, or a '
            f"networkx graph, got {topology!r}"
        )
    return make_graph(graph, clients, seed)


def to_world(world: World | Mapping[str, Any] | str, clients: int) -> World:
    """Accept a world, the name of a preset, or what the table `[world]` of an experiment file has."""
    if isinstance(world, World):
        return world
    if isinstance(world, str):
        world = {"preset": world}
    if not isinstance(world, Mapping):
        raise ConfigError(f'world must be a name such as "wifi", a table, or a World, got {world!r}')
    return checked(WorldConfig, world, "world: ").over(clients)


def to_clock(clock: Mapping[str, Any] | ClockConfig | None) -> ClockConfig:
    """Accept what the table `[clock]` of an experiment file has."""
    return to_table(ClockConfig, {} if clock is None else clock, "clock", '{"until_s": 600}')


def to_table(table: type[Checked], values: Any, name: str, example: str) -> Checked:
    """Accept a table, or the content of one. Raises ConfigError with `example` for anything else."""
    if isinstance(values, table):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be a table such as {example}, got {values!r}")
    return checked(table, values, f"{name}: ")


def _plain(value: Any) -> Any:
    """Turn a number of numpy or torch into Python's, and a torch.device into its name."""
    if isinstance(value, torch.device):
        return str(value)
    try:
        return value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value
    except (ValueError, RuntimeError):  # an array
        return value


def make_starts(
    model: nn.Module | Callable[[], nn.Module], start_from: Any, crop: int | None = None
) -> Callable[[], nn.Module]:
    """Make the factory of a simulation's modules, which start afresh, or from given weights; crop: the side of the
    centres of images that they see.

    Warns of a module that looks trained and is started afresh.
    """
    if start_from is None:
        return on_images(fresh_copies(model) if isinstance(model, nn.Module) else _explained(model), crop, False)
    make = (lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else _explained(model)
    return pretrained(on_images(make, crop, False), start_from)


def _explained(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Make a factory whose errors say how it is called and where it failed; warns once of what it should not return."""
    name = getattr(build, "__name__", type(build).__name__)
    last: list[weakref.ref[nn.Module]] = []
    said: set[str] = set()

    def warn(text: str) -> None:
        if text not in said:
            said.add(text)
            warnings.warn(text, DfcaWarning, stacklevel=3)

    def make() -> nn.Module:
        try:
            made = build()
        except Exception as error:  # a user's own function
            raise ModelError(
                f"the model's function {name} fails with {type(error).__name__}: {error}{place_of(error)}; it is "
                "called without arguments and returns a torch.nn.Module"
            ) from error
        if not isinstance(made, nn.Module):
            raise ModelError(
                f"the model's function {name} returns {'nothing' if made is None else type(made).__name__}; it must "
                "return a torch.nn.Module"
            )
        if last and last[0]() is made:
            warn(
                f"the model's function {name} returns the same module again, so all models start alike and clusters "
                "cannot form; build a new one in it"
            )
        last[:] = [weakref.ref(made)]
        if narrow := {parameter.dtype for parameter in made.parameters()} & {torch.float16, torch.bfloat16}:
            warn(f"the module is of {narrow.pop()}, and models are trained in float32; dtype=... chooses another")
        return made

    return make


def fresh_copies(module: nn.Module) -> Callable[[], nn.Module]:
    """Make a factory of re-initialised copies of a module, with its own frozen parameters.

    Raises ModelError where some trained parameter belongs to a layer without `reset_parameters`.
    """
    frozen = {name: tensor.detach() for name, tensor in module.named_parameters() if not tensor.requires_grad}
    for name, layer in module.named_modules():
        trained = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        if trained and not callable(getattr(layer, "reset_parameters", None)):
            raise ModelError(
                f"layer {name!r} ({type(layer).__name__}) has no reset_parameters(), so the module cannot be "
                "started afresh; pass a function that builds it instead of the module"
            )

    def build() -> nn.Module:
        twin = copy.deepcopy(module)
        for layer in twin.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
        load_constants_(twin, frozen)
        return twin

    with seeded(0, "looks-trained"):
        if looks_trained(module, build()):
            warnings.warn(
                "the module looks trained, and its weights are not used: every model starts afresh; pass "
                "start_from=module to start from them, or a function that builds the module to say that they are not "
                "wanted",
                DfcaWarning,
                stacklevel=4,
            )
    return build
