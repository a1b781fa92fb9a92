"""The one config of an experiment: frozen, typed, complete, stored with the result.

Every number that changes a curve is a key. An unknown key stops the run and lists the known ones; a value out of range
is reported with its key, its value and its bound. `experiment.load` reads it from presets, files and the command line.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import tomllib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from dfca import algorithms as registry
from dfca.core.local import LocalOptions
from dfca.data import DataOptions
from dfca.data.registry import source_of
from dfca.data.transforms import resolve
from dfca.errors import ConfigError, unknown
from dfca.experiment.problems import explain, show
from dfca.experiment.world import ClockConfig, Section, WorldConfig, check_world
from dfca.models import MODELS, ModelOptions
from dfca.sim.bank import Place
from dfca.sim.engine import EngineName
from dfca.topology import TopologyOptions, check_topology

# Keys that choose which trials are run or what they are called: no number of a trial depends on them.
NOT_IN_DIGEST = ("title", "description", "algorithms", "seeds", "checkpoint", "bank")
ONLY_SHOWN = ("trace", "timeline")  # of the world

Options = TypeVar("Options", bound=BaseModel)


class LocalConfig(Section):
    """How a client trains."""

    steps: int = Field(5, ge=0, description="gradient steps of a client per round")
    learning_rate: float = Field(0.1, gt=0, description="step size of SGD")
    batch_size: Literal["full"] | Annotated[int, Field(ge=1)] = Field(
        "full", description="samples of one step; full: all of the client's"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD, begun anew in every round")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty of SGD")

    def options(self) -> LocalOptions:
        """Translate into the options of the core, where a full batch is None."""
        values = self.model_dump()
        return LocalOptions(**values | {"batch_size": None if self.batch_size == "full" else self.batch_size})


class MixingConfig(Section):
    """How models of neighbours are averaged.

    `batch` is the default: in a synchronous round both aggregations are equal up to rounding, and the closed form is
    one matrix product; a `sequential` round is computed by it too where weights are "metropolis", or models are relayed
    or all shared. `share` is what a client hands on: the model that it "trained" (the paper's rule), "all" its models,
    or "relay": also the freshest copy of a model to a neighbour that has no trainer of it beside it.
    """

    weights: Literal["uniform", "metropolis"] = Field(
        "uniform", description="weight of each copy in an average; metropolis: by the degrees of both ends of a link"
    )
    aggregation: Literal["batch", "sequential"] = Field(
        "batch", description="batch: wait for all neighbours of a round; sequential: fold what came and go on"
    )
    share: Literal["trained", "all", "relay"] = Field(
        "trained",
        description="what a client hands on: the model that it trained, all its models, or also relayed copies of a "
        "model to neighbours that have no trainer of it beside them",
    )


class EvaluationConfig(Section):
    """When and on how many samples of each distribution the metrics are computed."""

    every: int = Field(10, ge=1, description="rounds between two evaluations; the last round is always evaluated")
    samples: int = Field(200, ge=2, description="samples of each true distribution that all models are scored on")


class CheckpointConfig(Section):
    """How often a running trial is saved."""

    every_s: float = Field(30.0, ge=0, description="seconds between two checkpoints, at most 5 % of the time")


def _defaults(section: type[Options]) -> Options:
    """Make the field of a section whose keys all have defaults."""
    return Field(default_factory=lambda: section.model_validate({}))


class Config(Section):
    """An experiment: one trial for each algorithm and seed."""

    title: str = Field("", description="one line for tables and reports")
    description: str = Field("", description="a paragraph for the report")
    clients: int = Field(ge=1, description="number of clients")
    clusters: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        description="models that every client keeps; auto: found by the election of dfca"
    )
    rounds: int = Field(ge=1, description="rounds of every client")
    participation: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    algorithms: tuple[str, ...] = Field(min_length=1, description="which algorithms: `dfca list` shows them")
    seeds: tuple[int, ...] = Field(
        (0,), min_length=1, description="a number (3 is 0, 1, 2) or a list; data, graph, start and batches follow it"
    )
    device: str = Field(
        "cpu", pattern=r"^(cpu|auto|mps|cuda(:\d+)?)$", description="cpu, cuda, cuda:N, mps, or auto: a GPU if any"
    )
    engine: EngineName = Field(
        "auto", description="how local work is executed; auto: many small models in one call, large ones one by one"
    )
    bank: Place = Field("auto", description="where all models are kept; auto: on disk where memory is too small")
    data: DataOptions = _defaults(DataOptions)
    model: ModelOptions = _defaults(ModelOptions)
    local: LocalConfig = _defaults(LocalConfig)
    topology: TopologyOptions = _defaults(TopologyOptions)
    mixing: MixingConfig = _defaults(MixingConfig)
    evaluation: EvaluationConfig = _defaults(EvaluationConfig)
    checkpoint: CheckpointConfig = _defaults(CheckpointConfig)
    world: WorldConfig | None = None
    clock: ClockConfig | None = None
    algorithm: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="options of single algorithms: [algorithm.NAME]"
    )

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_seeds(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ConfigError(f"seeds must be >= 1 or a list of integers, got {value}")
            return tuple(range(value))
        return tuple(value) if isinstance(value, list) else value

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if min(seeds) < 0:
            raise ConfigError(f"seeds must be >= 0, got {min(seeds)}")
        _refuse_repetition("seeds", seeds)
        return seeds

    @field_validator("algorithms", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("algorithms")
    @classmethod
    def _check_algorithms(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in registry.ALGORITHMS:
                raise unknown("algorithm", name, registry.ALGORITHMS)
        _refuse_repetition("algorithms", names)
        return names

    @field_validator("algorithm")
    @classmethod
    def _check_options(cls, tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, options in tables.items():
            _check_kinds(name, options)
            registry.get(name, **options)
        return tables

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        for key, value in (("clusters", self.clusters), ("data.distributions", self.data.distributions)):
            if isinstance(value, int) and value > self.clients:
                raise ConfigError(
                    f"{key} must be <= clients ({self.clients}), got {value}; lower {key} or raise clients"
                )
        # Without a transform nobody knows the true clusters, so there is no number to give.
        known = resolve(self.data, source_of(self.data.name).kind) != "none"
        if known and self.clusters == "auto" and self.data.distributions is None:
            raise ConfigError(
                'clusters = "auto" needs data.distributions, the number of true clusters that the data is made with; '
                "give it, or a number of clusters"
            )
        if self.model.factory is None and self.model.name not in MODELS:
            raise unknown("model", self.model.name, MODELS)
        check_topology(self.topology, self.clients)
        check_world(self.world, self.clock, self.clients)
        return self

    @property
    def distributions(self) -> int:
        """The number of true clusters that the data is made with."""
        return self.data.distributions or (1 if self.clusters == "auto" else self.clusters)

    def virtual_facts(self) -> dict[str, Any]:
        """Return the resolved world and its clock, as the summary keeps them; nothing without a world."""
        if self.world is None:
            return {}
        clock = ClockConfig.of(self.clock).model_dump(mode="json", exclude_none=True)
        return {"world": self.world.facts(self.clients), "clock": clock}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Check the values of an experiment file.

        Raises:
            ConfigError: with the first problem in one sentence.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise explain(error, cls) from None

    @classmethod
    def from_toml(cls, text: str) -> Config:
        """Read what `to_toml` wrote."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not valid TOML: {error}") from None
        return cls.of(values)

    def values(self) -> dict[str, Any]:
        """Return every key with its value as TOML and JSON know it; TOML has no null, so None is an absent key."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        """Write the complete config: `Config.from_toml(config.to_toml()) == config`."""
        return tomli_w.dumps(self.values())

    def digest(self) -> str:
        """Hash everything that can change a number of a trial; of a world, what its preset stands for."""
        numbers = self._numbers() | ({"world": self.world.facts(self.clients)} if self.world else {})
        text = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, here: Config, leave_out: Collection[str] = ()) -> list[str]:
        """Name the keys on which the numbers of this (stored) config and of the one given now would differ."""
        old, new = flatten(self._numbers()), flatten(here._numbers())
        keys = [key for key in sorted(old | new) if old.get(key) != new.get(key) and key not in leave_out]
        return [f"{key} is {_shown(old, key)} there and {_shown(new, key)} here" for key in keys]

    def _numbers(self) -> dict[str, Any]:
        numbers = {key: value for key, value in self.values().items() if key not in NOT_IN_DIGEST}
        if self.world is not None:
            numbers["world"] = {key: value for key, value in numbers["world"].items() if key not in ONLY_SHOWN}
        return numbers


def _check_kinds(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a value of another kind than the option's default; an unknown name is left to the registry."""
    make = registry.ALGORITHMS.get(name)
    known = inspect.signature(make).parameters if make else {}
    for key in options.keys() & known.keys():
        value, whole = options[key], isinstance(known[key].default, int)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (whole and not isinstance(value, int)):
            demand = "an integer" if whole else "a finite number"
            raise ConfigError(f"algorithm.{name}.{key} must be {demand}, got {show(value)}")


def _refuse_repetition(key: str, values: tuple[Any, ...]) -> None:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ConfigError(f"{key} must not repeat a value, got {show(twice)} {values.count(twice)} times")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn tables into dotted keys.

    >>> flatten({"clients": 3, "data": {"name": "digits"}})
    {'clients': 3, 'data.name': 'digits'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return show(flat[key]) if key in flat else "not set"
