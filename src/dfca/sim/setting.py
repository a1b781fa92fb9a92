"""What one simulation runs: `Setting`, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import nn

from dfca import codecs
from dfca.base.accountant import check_accountant
from dfca.base.errors import ConfigError, DataError
from dfca.base.imports import import_function
from dfca.base.table import option
from dfca.core.algorithm import Algorithm
from dfca.core.exchange import Receivers, averages_whole_models, quiet_from, robust_rule, share_rule, weight_rule
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
    PrivacyOptions,
    check_images,
    check_personal_steps,
)
from dfca.core.rng import seeded
from dfca.core.rules.personal import release_round
from dfca.core.rules.surveys import LAG, merging_of
from dfca.data.clients import Split
from dfca.sim.local.choices import EngineName, LiarOptions, Place
from dfca.topology import check_graphs, is_one_way, receivers_of


class Setting(MixingOptions):
    """Everything one simulation needs; the fields that are not explained here are those of `[mixing]`.

    Attributes:
        split: Who holds which samples.
        graph: Who are neighbours: nodes 0..N-1. A directed one carries models along its edges.
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
        codec: What travels in place of a trained model: a name, or a `Codec`.
        privacy: How updates are clipped and noised before they are sent; None: they are not.

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
    privacy: PrivacyOptions | None = None
    codec: Any = field(default="none", kw_only=True)  # a record from here on; None: models travel as they are

    def __post_init__(self) -> None:
        clients = self.clients
        if self.private is not None:
            object.__setattr__(self, "algorithm", self.algorithm.keeping(self.private))
            object.__setattr__(self, "private", None)  # it is in the algorithm now
        if isinstance(named := self.local.optimizer, str) and ":" in named:
            make = import_function(named, "local.optimizer")
            object.__setattr__(self, "local", replace(self.local, optimizer=make))
        object.__setattr__(self, "codec", codecs.get(self.codec, self.keep) or self.algorithm.codec)
        self._check_codec()
        if self.privacy is not None and self.algorithm.exchange == "none":
            object.__setattr__(self, "privacy", None)  # nothing is sent
        self._check_privacy()
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
        object.__setattr__(self, "graph", check_graphs(self.graph, clients))
        self._check_directions()
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

    def _check_directions(self) -> None:
        """Refuse links that carry models one way, or not in all rounds, for algorithms that cannot use them."""
        algorithm, phases = self.algorithm, self.graph.graph.get("receivers")
        if phases is None or algorithm.exchange != "gossip" or (algorithm.peers and algorithm.peers.among == "any"):
            return
        if algorithm.start == "elected" or share_rule(algorithm, self.share) == "relay":
            raise ConfigError(
                f"{algorithm.name} elects its start or asks neighbours for copies, which needs links that carry models "
                "both ways in all rounds; use dfca-gi, dfca-li or dfedpgp, or another topology"
            )
        if weight_rule(algorithm, self.weights) == "metropolis" and is_one_way(self.graph):
            raise ConfigError(
                f"{algorithm.name} uses Metropolis weights, which need links that carry models both ways; use "
                'mixing.weights = "uniform" where the algorithm leaves the choice, dfedpgp, or another topology'
            )

    def _check_codec(self) -> None:
        """Refuse a codec that an algorithm, or another option, has no place for."""
        codec, algorithm = self.codec, self.algorithm
        if codec is None:
            return
        if algorithm.exchange == "server" and codec.remembers:
            raise ConfigError(
                f"codec {codec.name} fills in what was not sent from the receiver's own copy, and a server has none of "
                f"its own: for {algorithm.name} use bf16 or int8"
            )
        got = {
            f"{algorithm.name} with mixing.private, or its own private head": algorithm.private_head,
            algorithm.name: algorithm.exchange == "gossip"
            and not algorithm.private_head
            and not (averages_whole_models(algorithm) and algorithm.trains == "chosen"),
            f'mixing.robust = "{self.robust}"': self.robust != "none",
            "[liars]": self.liars is not None,
        }
        if any(got.values()):
            raise ConfigError(
                f"codec {codec.name} is for honest clients that average whole models, got "
                f"{' and '.join(what for what, is_so in got.items() if is_so)}; leave the codec or that out"
            )

    def _check_privacy(self) -> None:
        """Refuse epsilon where more is sent than what it covers."""
        algorithm = self.algorithm
        if self.privacy is None:
            return
        check_accountant()
        if algorithm.start == "elected" or algorithm.peers is not None or algorithm.trains == "all":
            raise ConfigError(
                f"{algorithm.name} sends losses or models beside its noised updates, which epsilon would not cover; "
                "with [privacy] use dfca-gi, dfca-li, dfedavgm, ifca or fedavg"
            )
        if self.last_steps == "auto":
            raise ConfigError(
                'personal.steps = "auto" sends losses on held-out samples, which epsilon would not cover; with '
                "[privacy] give a number of steps"
            )

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

    def check_opened(self, opened: int) -> None:
        """Refuse a checkpoint of version 0.2, which opened more clusters than asked for and merged them later.

        Args:
            opened: How many its election has opened.

        Raises:
            ConfigError: With both numbers.
        """
        if self.clusters is not None and opened > self.clusters:
            raise ConfigError(
                f"the checkpoint's election opened {opened} clusters where {self.clusters} are asked for, to merge "
                f"some later, which this version does not; begin anew with --no-resume"
            )

    @property
    def merging(self) -> MergeOptions | None:
        """How clusters are merged.

        None where they are not: by the algorithm, with too few rounds, or where their number is given.
        """
        return merging_of(self.algorithm.merging, self.rounds, self.clusters)

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


def hold_out_until(setting: Setting) -> int | None:
    """Return the round before which clients hold samples out of training, to pick the steps of the personal last step
    or to choose their peers; None: never. Surveys of clusters hold them out too."""
    release, peers = release_round(setting.last_steps, setting.rounds), setting.algorithm.peers
    if release is not None:
        return release + LAG
    return setting.rounds if peers is not None and peers.unseen else None


def receivers_in(setting: Setting, client: int) -> Receivers:
    """List to whom a client sends its models, where that is not all neighbours in every round, or must be known."""
    algorithm, graph = setting.algorithm, setting.graph
    if algorithm.exchange != "gossip":
        return ()
    always = (tuple(sorted(graph.neighbors(client))),) if algorithm.weights == "push" else ()
    return receivers_of(graph, client) or always


def initial_module(setting: Setting) -> nn.Module:
    """Build the module that cluster 0 starts from; the architecture of all."""
    with seeded(setting.seed, "init", 0):
        return setting.make_model()
