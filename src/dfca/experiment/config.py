"""The one config of an experiment: frozen, typed, complete, stored with the result.

Every number that changes a curve is a key. An unknown key stops the run and lists the known ones; a value out of range
is reported with its key, its value and its bound. `experiment.load` reads it from presets, files and the command line.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dfca import algorithms as registry
from dfca.base.errors import ConfigError, unknown
from dfca.base.imports import check_name, import_function, is_import
from dfca.base.renamed import earlier
from dfca.base.table import Table, option
from dfca.base.validation import check, dump, show
from dfca.core.learning.task import LOSSES, METRICS, TASKS, Metric, Task
from dfca.core.method import (
    MOST_PERSONAL_STEPS,
    WEIGHTS_NEED_ROUNDS,
    Augment,
    LocalOptions,
    MixingOptions,
    PrivacyOptions,
    StepTable,
    check_images,
)
from dfca.data.options import DataOptions, refuse_options, resolve
from dfca.data.registry import source_of
from dfca.experiment.variants import check_label, flatten, merge, options_of, sections_of, unfold
from dfca.experiment.world import ClockConfig, WorldConfig, check_world
from dfca.model_options import ModelOptions
from dfca.models import MODELS
from dfca.sim.local.choices import EngineName, LiarOptions, Place
from dfca.tasks import make_task
from dfca.topology_options import TopologyOptions, check_topology

# Keys that choose which trials are run or what they are called: no number of a trial depends on them.
MOST_SEEDS = 10_000
NOT_IN_DIGEST = ("title", "description", "algorithms", "seeds", "checkpoint", "bank")
ONLY_SHOWN = ("trace", "timeline")  # of the world


class LocalConfig(StepTable):
    """How a client trains; a full batch, which the core calls None, is "full"."""

    batch_size: Literal["full"] | Annotated[int, Field(ge=1)] = option(  # type: ignore[assignment]
        default="full", description="samples of one step; full: all of the client's"
    )

    def options(self, augment: Augment | None = None, **changes: Any) -> LocalOptions:
        return super().options(augment, batch_size=None if self.batch_size == "full" else self.batch_size, **changes)


class MixingConfig(MixingOptions, kw_only=True):
    """How models of neighbours are averaged."""

    quiet_rounds: int | None = option(
        default=None,
        ge=0,
        description="last rounds of methods that gossip, in which clients only exchange: nobody trains, and the copies "
        "of a model come nearer to their mean; default: 0",
    )


class PersonalConfig(Table):
    """The personal last step: every client fine-tunes its copy of the model that it deploys, for its own use.

    "auto" holds a fifth of every client's samples out of training until three quarters of the rounds are done, and
    picks the steps there; the last quarter trains on everything.
    """

    steps: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_PERSONAL_STEPS)] | None = option(
        default=None,
        description="full-batch steps of every client on its own samples after the last round; auto: picked from 0 to "
        "200 on held-out samples; default: auto for dfca-auto, 0 for the others",
    )


class EvaluationConfig(Table):
    """When and on how many samples of each distribution the metrics are computed."""

    every: int = option(
        default=10, ge=1, description="rounds between two evaluations; the last round is always evaluated"
    )
    samples: int = option(
        default=200, ge=2, description="samples of each true distribution that all models are scored on"
    )


class TaskConfig(Table):
    """What is learned: the loss by which models are trained and chosen, the metric by which they are shown.

    `task = "regression"` is short for a table with that name.
    """

    name: Literal["classification", "regression", "multilabel", "tokens", "custom"] | None = option(
        default=None, description="what the targets are; default: what the data says, or the loss; custom: anything"
    )
    loss: str | None = option(
        default=None,
        description="of a sample: cross-entropy, mse, mae, huber, bce, token-cross-entropy, or "
        '"package.module:function", called as loss(outputs, targets), one number per sample; default: that of the task',
    )
    metric: str | None = option(
        default=None,
        description="accuracy, rmse, mse, mae, r2, f1, exact-match, token-accuracy, perplexity, loss, or "
        '"package.module:function", called as metric(outputs, targets) per client; default: that of the task',
    )
    higher_is_better: bool | None = option(
        default=None, description="of a metric of your own; default: its attribute of this name, else true"
    )
    unit: str | None = option(default=None, max_length=20, description="shown behind the metric, such as °C")


class CheckpointConfig(Table):
    """How often a running trial is saved."""

    every_s: float = option(default=30.0, ge=0, description="seconds between two checkpoints, at most 5 % of the time")


class Config(BaseModel):
    """An experiment: one trial for each algorithm and seed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    title: str = Field("", description="one line for tables and reports")
    description: str = Field("", description="a paragraph for the report")
    clients: int = Field(ge=1, le=1_000_000, description="number of clients")
    clusters: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        description="models that every client keeps; auto: found by the election of dfca-auto"
    )
    rounds: int = Field(ge=1, description="rounds of every client")
    participation: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    algorithms: tuple[str, ...] = Field(
        strict=False,
        min_length=1,
        description='which algorithms: `dfca list` shows them; your own is "package.module:function"; one with options '
        'of its own, for a row of its own: `{name = "fedavg", momentum = 0.9, label = "fedavg, momentum 0.9"}`',
    )
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
    task: TaskConfig | None = None
    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    local: LocalConfig = LocalConfig()
    topology: TopologyOptions = TopologyOptions()
    mixing: MixingConfig = MixingConfig()
    liars: LiarOptions | None = None
    privacy: PrivacyOptions | None = None
    personal: PersonalConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    world: WorldConfig | None = None
    clock: ClockConfig | None = None
    algorithm: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description='options of single algorithms: [algorithm.NAME], or [algorithm."LABEL"] for one row of a table; '
        "the sections local, mixing and personal may stand there too",
    )

    @model_validator(mode="before")
    @classmethod
    def _unfold(cls, values: Any) -> Any:
        return unfold(values) if isinstance(values, Mapping) else values

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_seeds(cls, value: Any) -> Any:
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if is_count and value < 1:
            raise ConfigError(f"seeds must be >= 1 or a list of integers, got {value}")
        count = value if is_count else len(value) if isinstance(value, list | tuple) else 0
        if count > MOST_SEEDS:
            raise ConfigError(f"at most {MOST_SEEDS} seeds fit into one run, got {count}; use several folders")
        return tuple(range(value)) if is_count else tuple(value) if isinstance(value, list) else value

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if min(seeds) < 0:
            raise ConfigError(f"seeds must be >= 0, got {min(seeds)}")
        _refuse_repetition("seeds", seeds)
        return seeds

    @field_validator("task", mode="before")
    @classmethod
    def _named_task(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("algorithms")
    @classmethod
    def _check_algorithms(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for label in names:
            name = registry.base_of(label)
            if is_import(name):
                check_name(name, "an algorithm")  # a stored config imports nothing; `experiment.load` does
            else:
                registry.maker(name)  # raises, with the known ones
            if name != label:
                check_label(label)
        _refuse_repetition("algorithms", names)
        return names

    @field_validator("algorithm")
    @classmethod
    def _check_options(cls, tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for label, table in tables.items():
            name, options = registry.base_of(label), options_of(table)
            if is_import(name):
                check_name(name, f"[algorithm.{show(name)}]")
                continue
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
        # Without a transform the true clusters are unknown: there is no number to give.
        known = self.data.factory is None and resolve(self.data, source_of(self.data.name).kind) != "none"
        if known and self.clusters == "auto" and self.data.distributions is None:
            raise ConfigError(
                'clusters = "auto" needs data.distributions, the number of true clusters that the data is made with; '
                "give it, or a number of clusters"
            )
        if self.data.augment is not None and self.data.factory is None:
            check_images(self.data.augment, source_of(self.data.name).shape)
        if self.model.factory is None and self.model.name not in MODELS:
            raise unknown("model", self.model.name, MODELS)
        check_topology(self.topology, self.clients)
        check_world(self.world, self.clock, self.clients)
        if self.world is not None and self.mixing.weights == "samples":
            raise ConfigError(WEIGHTS_NEED_ROUNDS)
        for label in self.algorithms:
            if label != registry.base_of(label) and label not in self.algorithm:
                raise ConfigError(
                    f'algorithms has {show(label)}, which needs options of its own: give [algorithm."{label}"], '
                    f'or the name alone: "{registry.base_of(label)}"'
                )
        for label in self.algorithm:
            self.of_row(label)  # raises
        self._check_peers()
        if not self._own_task_functions():  # a stored config imports nothing; `check_imports` does
            self._check_task()
        return self

    def _check_peers(self) -> None:
        """Refuse algorithms that cannot run in virtual time; a stored config imports nothing, the simulator does."""
        for name in map(registry.base_of, self.algorithms if self.world is not None else ()):
            if not is_import(name) and registry.maker(name)().peers is not None:
                raise ConfigError(
                    f"{name} chooses its peers by the losses of their models, which no peer in virtual time can ask "
                    "for; leave it out of `algorithms`, or run it without [world]"
                )

    def _check_task(self) -> None:
        task, given = self.learning_task(), TASKS[self._data_task or "classification"]
        if self._data_task is not None and source_of(self.data.name).kind == "series":
            refuse_options(self.data)
        if task is not None and task.targets not in (given.targets, "any") and self._data_task is not None:
            raise ConfigError(
                f'the task is "{task.name}", and data "{self.data.name}" is for "{given.name}"; '
                f"leave [task] out, or take other data"
            )
        metric = self.metric
        clock = self.clock or ClockConfig()
        if clock.target_accuracy is not None and metric.key != "accuracy":
            raise ConfigError(f"clock.target_accuracy is for accuracies; for {metric.name} use clock.target")
        if clock.target_accuracy is not None and clock.target is not None:
            raise ConfigError("clock.target_accuracy and clock.target are one goal; give one of them")

    def _own_task_functions(self) -> list[tuple[str, str]]:
        """Name the loss and the metric that are functions of the user's own; nothing is imported."""
        values = {} if self.task is None else {"task.loss": self.task.loss, "task.metric": self.task.metric}
        functions = [(key, name) for key, name in values.items() if name is not None and is_import(name)]
        for key, name in functions:
            check_name(name, key)
        return functions

    @property
    def _data_task(self) -> str | None:
        """What the data is for; None: data of the user's own, which may be for anything."""
        return None if self.data.factory is not None else source_of(self.data.name).task

    @property
    def metric(self) -> Metric:
        """The metric of the task, or else of the data."""
        return (self.learning_task() or TASKS[self._data_task or "classification"]).metric

    def learning_task(self) -> Task | None:
        """Make the task that [task] describes; None: that of the data."""
        if self.task is None:
            return None
        values = self.task.plain()
        if values["name"] is None and not {values["loss"], values["metric"]} & {*LOSSES, *METRICS, *TASKS}:
            values["name"] = self._data_task
        return make_task(**values)

    @property
    def distributions(self) -> int:
        """The number of true clusters that the data is made with."""
        return self.data.distributions or (1 if self.clusters == "auto" else self.clusters)

    @property
    def imports(self) -> list[tuple[str, str]]:
        """The keys that name functions of the user's own, with those names; algorithms first."""
        keys = {
            "data.factory": self.data.factory,
            "model.factory": self.model.factory,
            "topology.name": self.topology.name,
        }
        named = [*(("algorithms", registry.base_of(label)) for label in self.algorithms), *keys.items()]
        return [(key, name) for key, name in named if name is not None and (is_import(name) or key.endswith("factory"))]

    def check_imports(self) -> None:
        """Import whatever of the user's own the config names, which runs its code.

        Raises ConfigError where that cannot be imported, or is no algorithm.
        """
        for label in self.algorithms:
            if is_import(registry.base_of(label)):
                registry.get(registry.base_of(label), **options_of(self.algorithm.get(label, {})))
        for key, name in self.imports:
            if key != "algorithms":
                import_function(name, key)
        self._check_task()

    def of_row(self, label: str) -> Config:
        """Return the config of one algorithm: this one, with what [algorithm."LABEL"] has of its sections.

        Raises ConfigError.
        """
        own = sections_of(self.algorithm.get(label, {}))
        if not own:
            return self
        plain = self.values() | {"algorithms": [registry.base_of(label)], "algorithm": {}}
        merged = {key: merge(plain.get(key, {}), section) for key, section in own.items()}
        try:
            return Config.of(plain | merged)
        except ConfigError as error:
            raise ConfigError(f'[algorithm."{label}"]: {error}') from None

    def virtual_facts(self) -> dict[str, Any]:
        """Return the resolved world and its clock, as the summary keeps them; nothing without a world."""
        if self.world is None:
            return {}
        return {"world": self.world.facts(self.clients), "clock": dump(self.clock or ClockConfig())}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Check the values of an experiment file. Raises ConfigError with everything that is wrong."""
        return check(dict(values), cls)

    def values(self) -> dict[str, Any]:
        """Return every key with its value as TOML and JSON know it; TOML has no null, so None is an absent key."""
        return self._as_of(2)

    def to_toml(self) -> str:
        """Write the complete config: `experiment.load.read_stored` reads it."""
        return tomli_w.dumps(self.values())

    def digest(self) -> str:
        """Hash everything that can change a number of a trial; of a world, what its preset stands for."""
        numbers = self._numbers() | ({"world": self.world.facts(self.clients)} if self.world else {})
        numbers["algorithm"] = {earlier(label): table for label, table in numbers["algorithm"].items()}
        text = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, here: Config, leave_out: Collection[str] = ()) -> list[str]:
        """Name the keys on which the numbers of this (stored) config and of the one given now would differ."""
        old, new = flatten(self._numbers()), flatten(here._numbers())
        keys = [key for key in sorted(old | new) if old.get(key) != new.get(key) and key not in leave_out]
        return [f"{key} is {_shown(old, key)} there and {_shown(new, key)} here" for key in keys]

    def _as_of(self, release: int) -> dict[str, Any]:
        """Return every key with its value, without those that are newer than a release and have their default."""
        values = self.model_dump(mode="json", exclude_none=True)
        for name, section in self:
            if isinstance(section, Table):
                kept = section.as_of(release)
                values[name] = {key: value for key, value in values[name].items() if key in kept}
        later = (("model", "standardise"), ("topology", "directed"), ("topology", "graphs"), ("data", "placement"))
        for name, key in later:  # since 0.3
            section = getattr(self, name)
            if getattr(section, key) == type(section).model_fields[key].default:
                del values[name][key]
        return values

    def _numbers(self) -> dict[str, Any]:
        numbers = {key: value for key, value in self._as_of(1).items() if key not in NOT_IN_DIGEST}
        if self.world is not None:
            numbers["world"] = {key: value for key, value in numbers["world"].items() if key not in ONLY_SHOWN}
        return numbers


def _check_kinds(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a value of another kind than the option's default; an unknown name is left to the registry."""
    known = inspect.signature(registry.maker(name)).parameters
    for key in options.keys() & known.keys():
        value, whole = options[key], isinstance(known[key].default, int)
        if isinstance(known[key].default, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"algorithm.{name}.{key} must be true or false, got {show(value)}")
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (whole and not isinstance(value, int)):
            demand = "an integer" if whole else "a finite number"
            raise ConfigError(f"algorithm.{name}.{key} must be {demand}, got {show(value)}")


def _refuse_repetition(key: str, values: tuple[Any, ...]) -> None:
    twice, count = Counter(values).most_common(1)[0] if values else (None, 0)
    if count > 1:
        raise ConfigError(f"{key} must not repeat a value, got {show(twice)} {count} times")


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return show(flat[key]) if key in flat else "not set"
