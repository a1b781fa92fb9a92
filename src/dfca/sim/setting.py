"""What one simulation runs: `Setting`, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx
import torch
from torch import nn

from dfca.core.algorithm import SHARES, Algorithm, Share
from dfca.core.local import LocalOptions
from dfca.core.mixing import WEIGHT_RULES, WeightRule
from dfca.core.rng import seeded
from dfca.data.clients import Split
from dfca.errors import ConfigError, DataError, unknown
from dfca.sim.bank import PLACES, Place
from dfca.sim.engine import ENGINES, EngineName

AGGREGATIONS = ("batch", "sequential")


@dataclass(frozen=True)
class Setting:
    """Everything one simulation needs.

    make_model builds a freshly initialised module on the CPU. clusters None: found by the clients where the algorithm
    elects its start, else the true number. drift: a round, and the split that replaces `split` when it begins.
    bank: where the models lie (`sim.bank`); bank_folder: the folder of a bank on disk, a temporary one if not given.
    """

    split: Split
    graph: nx.Graph
    make_model: Callable[[], nn.Module]
    algorithm: Algorithm
    clusters: int | None
    rounds: int
    seed: int = 0
    local: LocalOptions = field(default_factory=LocalOptions)
    participation: float = 1.0
    weights: WeightRule = "uniform"
    aggregation: str = "batch"
    share: Share = "trained"
    drift: tuple[int, Split] | None = None
    evaluate_every: int = 10
    evaluation_samples: int = 200
    device: str = "cpu"
    engine: EngineName = "auto"
    dtype: torch.dtype = torch.float32
    bank: Place = "auto"
    bank_folder: Path | None = None

    def __post_init__(self) -> None:
        clients = self.clients
        if self.clusters is not None and not 1 <= self.clusters <= clients:
            raise ConfigError(f"clusters must be in 1..{clients} (the number of clients), got {self.clusters}")
        must_know = self.algorithm.start != "elected" and self.algorithm.models == "clusters"
        if self.clusters is None and must_know and self.split.clusters is None:
            raise ConfigError(
                f"{self.algorithm.name} cannot find the number of clusters, and nobody knows it here; give clusters"
            )
        if self.rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {self.rounds}")
        if not 0 < self.participation <= 1:
            raise ConfigError(f"participation must be in (0, 1], got {self.participation}")
        if self.evaluate_every < 1:
            raise ConfigError(f"evaluation.every must be >= 1, got {self.evaluate_every}")
        if self.evaluation_samples < 2:
            raise ConfigError(f"evaluation.samples must be >= 2, got {self.evaluation_samples}")
        if self.local.learning_rate > (limit := torch.finfo(self.dtype).max):
            raise ConfigError(f"local.learning_rate must be <= {limit:.1e}, got {self.local.learning_rate}")
        for kind, value, known in (
            ("weights", self.weights, WEIGHT_RULES),
            ("aggregation", self.aggregation, AGGREGATIONS),
            ("share", self.share, SHARES),
            ("engine", self.engine, ENGINES),
            ("bank", self.bank, PLACES),
        ):
            if value not in known:
                raise unknown(kind, value, known)
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

    @property
    def clients(self) -> int:
        """Count the clients."""
        return len(self.split.train.sizes)

    @property
    def true_clusters(self) -> int:
        """Count the true clusters, those after a drift included; 1 where nobody knows."""
        splits = [self.split, *(self.drift[1:] if self.drift else ())]
        return max(1 if split.clusters is None else int(split.clusters.max()) + 1 for split in splits)


def initial_module(setting: Setting) -> nn.Module:
    """Build the module that cluster 0 starts from; the architecture of all."""
    with seeded(setting.seed, "init", 0):
        return setting.make_model()
