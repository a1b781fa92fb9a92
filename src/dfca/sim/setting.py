"""What one simulation runs: `Setting`, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import networkx as nx
import torch
from torch import nn

from dfca.base.errors import ConfigError, DataError
from dfca.base.imports import import_function
from dfca.base.table import option
from dfca.core.algorithm import Algorithm
from dfca.core.exchange import averages_whole_models, quiet_from, robust_rule
from dfca.core.learning.inputs import shape_of
from dfca.core.learning.params import Pretrained
from dfca.core.learning.task import Task
from dfca.core.method import (
    ElectionOptions,
    LocalOptions,
    MergeOptions,
    Method,
    MixingOptions,
    PersonalSteps,
    check_images,
    check_personal_steps,
)
from dfca.core.rng import seeded
from dfca.core.rules.surveys import merging_of
from dfca.data.clients import Split
from dfca.sim.local.choices import EngineName, LiarOptions, Place


class Setting(MixingOptions):
    """Everything one simulation needs; the fields that are not explained here are those of `[mixing]`.

    Attributes:
        split: Who holds which samples.
        graph: Who are neighbours: nodes 0..N-1.
        make_model: Builds a freshly initialised module on the CPU.
        algorithm: What the clients run.
        clusters: The number of models; None: found where the algorithm elects its start, else the true number.
        rounds: Rounds of every client.
        seed: Determines every random choice.
        local: How clients train.
        participation: Share of the clients that take part in a round.
        drift: A round, and the split that replaces `split` when it begins.
        evaluate_every: Rounds between two evaluations.
        evaluation_samples: Samples of each true distribution that all models are scored on.
        device: Where models are trained.
        engine: How local work is executed.
        dtype: Of all models.
        bank: Where the models are kept: in memory, on disk, or by their size.
        bank_folder: Of a bank on disk; None: a temporary one.
        task: What is learned; None: the task of the split.
        personal_steps: Steps of the personal last step; None: the algorithm's own.
        liars: Which clients lie, and how.
        quiet_rounds: The last rounds of methods that gossip, in which nobody trains.

    Example:
        >>> import dfca
        >>> setting = dfca.Setting(
        ...     split=dfca.make_split(dfca.DataOptions(samples_per_client=20), clients=6, clusters=2, seed=0),
        ...     graph=dfca.make_graph(dfca.TopologyOptions(name="ring"), clients=6, seed=0),
        ...     make_model=lambda: dfca.mlp((1, 8, 8), 10, 8),
        ...     algorithm=dfca.ALGORITHMS["dfca-gi"](),
        ...     clusters=2,
        ...     rounds=4,
        ... )
        >>> setting.clients, setting.method.weights
        (6, 'uniform')
    """

    split: Split
    graph: nx.Graph
    make_model: Callable[[], nn.Module]
    algorithm: Algorithm
    clusters: int | None
    rounds: int = option(ge=1)
    seed: int = 0
    local: LocalOptions = LocalOptions()
    participation: float = option(default=1.0, gt=0, le=1)
    drift: tuple[int, Split] | None = None
    evaluate_every: int = option(default=10, ge=1, called="evaluation.every")
    evaluation_samples: int = option(default=200, ge=2, called="evaluation.samples")
    device: str = "cpu"
    engine: EngineName = "auto"
    dtype: torch.dtype = torch.float32
    bank: Place = "auto"
    bank_folder: Path | None = None
    task: Task | None = None
    personal_steps: PersonalSteps | None = None
    liars: LiarOptions | None = None
    quiet_rounds: int = 0

    def __post_init__(self) -> None:
        clients = self.clients
        if self.private is not None:
            object.__setattr__(self, "algorithm", self.algorithm.keeping(self.private))
            object.__setattr__(self, "private", None)  # it is in the algorithm now
        if isinstance(named := self.local.optimizer, str) and ":" in named:
            make = import_function(named, "local.optimizer")
            object.__setattr__(self, "local", replace(self.local, optimizer=make))
        if self.clusters is not None and not 1 <= self.clusters <= clients:
            raise ConfigError(f"clusters must be in 1..{clients} (the number of clients), got {self.clusters}")
        must_know = self.algorithm.start != "elected" and self.algorithm.models == "clusters"
        if self.clusters is None and must_know and self.split.clusters is None:
            raise ConfigError(
                f"{self.algorithm.name} cannot find the number of clusters, and the data does not say it; give clusters"
            )
        if self.rounds >= 1 and (type(self.quiet_rounds) is not int or not 0 <= self.quiet_rounds < self.rounds):
            raise ConfigError(
                f"mixing.quiet_rounds must be an integer in 0..{self.rounds - 1}, got {self.quiet_rounds!r}"
            )
        if self.personal_steps is not None:
            check_personal_steps(self.personal_steps, "personal.steps")
        super().__post_init__()
        if self.local.learning_rate > (limit := torch.finfo(self.dtype).max):
            raise ConfigError(f"local.learning_rate must be <= {limit:.1e}, got {self.local.learning_rate}")
        if self.local.augment is not None:
            check_images(self.local.augment, shape_of(self.split.train.x))
        if self.bank == "disk" and self.device != "cpu":
            raise ConfigError(f'bank "disk" is for device "cpu", got device "{self.device}"; use bank "auto"')
        if sorted(self.graph.nodes) != list(range(clients)):
            raise ConfigError(
                f"the graph must have the nodes 0..{clients - 1}, one per client; it has {len(self.graph)}"
            )
        if self.graph.is_directed() or self.graph.is_multigraph() or nx.number_of_selfloops(self.graph):
            raise ConfigError(
                "the graph must be undirected, without loops and double edges; convert it by nx.Graph(graph)"
            )
        if self.algorithm.informed and self.split.clusters is None:
            raise DataError(
                f"{self.algorithm.name} needs true clusters, and this split has none; leave it out of `algorithms`"
            )
        if self.personal_steps and self.algorithm.mixture is not None:
            raise ConfigError(
                f"{self.algorithm.name} deploys several models at once, which have no personal last step, got "
                f"personal.steps = {self.personal_steps!r}; set it to 0, or leave {self.algorithm.name} out"
            )
        self._check_liars()
        self._check_task()

    def _check_liars(self) -> None:
        """Refuse guards and lies that an algorithm has no place for."""
        if self.liars is not None and self.liars.kind == "swap-labels" and self.learns.targets != "classes":
            raise ConfigError(
                f'liars of kind "swap-labels" need classes, and the task is "{self.learns.name}"; use another kind'
            )
        if averages_whole_models(self.algorithm):
            return
        for key, value in (("mixing.robust", self.robust), ("liars", self.liars and self.liars.kind)):
            if value not in ("none", "swap-labels", None):
                raise ConfigError(
                    f'{key} is for algorithms that average whole models with all neighbours, got "{value}" for '
                    f"{self.algorithm.name}; leave one of the two out"
                )

    def _check_task(self) -> None:
        ours, theirs = self.learns, self.split.task
        if ours.targets not in (theirs.targets, "any"):
            raise ConfigError(
                f'the task is "{ours.name}", and the data is made for "{theirs.name}"; '
                f'use task "{theirs.name}", or other data (Split.of_clients(..., task="{ours.name}"))'
            )
        if isinstance(self.make_model, Pretrained) and (count := len(self.make_model.starts)) > 1:
            if self.algorithm.start == "elected" or self.algorithm.models == "one":
                raise ConfigError(f"{self.algorithm.name} starts from one model, got start_from with {count}; give one")
            if (self.clusters or self.true_clusters) != count:
                raise ConfigError(
                    f"start_from must have one model, or one per cluster ({self.clusters or self.true_clusters}), "
                    f"got {count}"
                )

    @property
    def learns(self) -> Task:
        """What the models learn: the task that was given, else that of the split."""
        return self.task or self.split.task

    @cached_property
    def method(self) -> Method:
        """What the clients run: the algorithm's options with this setting's."""
        return self.narrowed(Method, revives=self.algorithm.revives, personal=self.last_steps)

    @property
    def election(self) -> ElectionOptions:
        """How centres are elected: what the algorithm says, with bounded votes where clients guard against liars."""
        guarded = robust_rule(self.algorithm, self.robust) != "none"
        return replace(self.algorithm.election, bounded=guarded)

    @property
    def last_steps(self) -> PersonalSteps:
        """The steps of the personal last step: those that were given, else the algorithm's; a mixture takes none."""
        if self.algorithm.mixture is not None:
            return 0
        return self.algorithm.personal_steps if self.personal_steps is None else self.personal_steps

    @property
    def merging(self) -> MergeOptions | None:
        """How clusters are merged.

        None where they are not: by the algorithm, with too few rounds, or where no more clusters can be opened than
        asked for. Then the verdict of the election decides.
        """
        return merging_of(self.algorithm.merging, self.rounds, self.clusters, self.clients)

    @property
    def quiet_from(self) -> int | None:
        """The round from which on clients only exchange; None: they train to the end."""
        return quiet_from(self.algorithm, self.rounds, self.quiet_rounds)

    @property
    def clients(self) -> int:
        """Count the clients."""
        return len(self.split.train.sizes)

    @property
    def true_clusters(self) -> int:
        """Count the true clusters, those after a drift included; 1 where they are unknown."""
        splits = [self.split, *(self.drift[1:] if self.drift else ())]
        return max(1 if split.clusters is None else int(split.clusters.max()) + 1 for split in splits)


def initial_module(setting: Setting) -> nn.Module:
    """Build the module that cluster 0 starts from; the architecture of all."""
    with seeded(setting.seed, "init", 0):
        return setting.make_model()
