"""The plan of a swarm: one folder per node with its own samples, the facts that all nodes share, and what runs them.

    OUT/                     a run folder, like a simulation's
    OUT/nodes/node-00/       node.toml, key, certificate, roster, state, log: what a device has
    OUT/samples/node-00/     train.npz, test.npz: the samples of client 0

Nodes share nothing but what they send each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from dfca.base.errors import ConfigError
from dfca.base.imports import is_import
from dfca.core.learning.task import ACCURACY, CLASSIFICATION
from dfca.core.method import MixingOptions
from dfca.experiment.load import Experiment
from dfca.experiment.sweep import Point, Trial, TrialGroup
from dfca.node.task.config import NodeConfig
from dfca.node.task.facts import ALGORITHMS, Facts
from dfca.node.task.learner import code_digest, measured
from dfca.runs.sink import RunSink
from dfca.runs.trials import Workload
from dfca.sim.setting import Setting
from dfca.sim.shards import Alone


@dataclass(frozen=True)
class SwarmPlan:
    """One trial as a swarm: its experiment, its setting, and its run folder."""

    experiment: Experiment
    trial: Trial
    setting: Setting
    out: Path

    @property
    def names(self) -> list[str]:
        return [f"node-{i:02d}" for i in range(self.setting.clients)]

    def folder(self, client: int) -> Path:
        return self.out / "nodes" / self.names[client]

    def samples(self, client: int) -> Path:
        return self.out / "samples" / self.names[client]

    def neighbours(self, client: int) -> list[str]:
        """Name the neighbours of a client on the experiment's graph."""
        return [self.names[j] for j in sorted(self.setting.graph.neighbors(client))]

    def write_samples(self, client: int) -> None:
        folder = self.samples(client)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in (("train", self.setting.split.train), ("test", self.setting.split.test)):
            x, y = data.of(client)
            np.savez(folder / f"{name}.npz", x=_plain(x), y=_plain(y))

    def node_config(self, client: int) -> NodeConfig:
        """Make the settings of a node: any free port on the loopback, and its neighbours by name."""
        network = {"host": "127.0.0.1", "port": 0, "invite_port": 0, "neighbours": self.neighbours(client)}
        samples = self.samples(client).absolute()
        data = {"path": str(samples / "train.npz"), "test": str(samples / "test.npz"), "held_out": 0.0}
        codec = self.trial.point.config.mixing.codec
        training = {"reread_s": 0.0, "codec": codec if is_import(codec) else None}
        limits = {"write_bytes_per_day": 0}
        sections = {"data": data, "network": network, "training": training, "limits": limits}
        return NodeConfig.checked({"name": self.names[client], **sections})

    def facts(self, founder: str) -> Facts:
        """Make the facts of the swarm from the experiment."""
        setting, config = self.setting, self.trial.point.config
        facts = Facts.checked(
            {
                **config.mixing.narrowed(MixingOptions, aggregation="sequential").plain(),
                "codec_digest": code_digest(config.mixing.codec) if is_import(config.mixing.codec) else "",
                "name": f"swarm-{self.experiment.name}",
                "founder": founder,
                "seed": self.trial.seed,
                "algorithm": self.trial.algorithm,
                "clusters": setting.clusters,
                "rounds": config.rounds,
                "starts_with": setting.clients,
                "model": _model_facts(config.model),
                "inputs": {"shape": list(setting.split.train.x.shape[1:]), "kind": "array"},
                "classes": [str(name) for name in range(setting.split.classes)],
                "local": config.local.plain() | {"batch_size": config.local.options().batch_size},
                "augment": None if config.data.augment is None else config.data.augment.plain(),
                "privacy": None if setting.privacy is None else setting.privacy.plain(),
                "merging": None if setting.merging is None else asdict(setting.merging),
                "personal": setting.last_steps,
            }
        )
        return measured(facts)


def make_plan(experiment: Experiment, out: Path, sink: RunSink) -> SwarmPlan:
    """Plan an experiment's first algorithm and seed, a node for each client.

    Raises ConfigError for what nodes cannot run: a sweep, virtual time, an algorithm with a server, drift.
    """
    if experiment.sweep:
        raise ConfigError("a swarm runs one point of an experiment, and this one is a sweep; use a file without a grid")
    config = experiment.config
    if config.world is not None:
        raise ConfigError("a swarm runs in real time, and this experiment has a [world]; leave [world] and [clock] out")
    if config.metric != ACCURACY or (config.learning_task() or CLASSIFICATION) != CLASSIFICATION:
        raise ConfigError("a swarm of nodes classifies, and this experiment has another task; use `dfca run`")
    if config.model.start_from is not None:
        raise ConfigError("nodes start from fresh models: leave model.start_from out")
    if config.liars is not None:
        raise ConfigError("nodes of a swarm do not lie: leave [liars] out, or use `dfca run`")
    if config.data.drift_share:
        raise ConfigError("a swarm has no drift yet: set data.drift_share = 0")
    if config.mixing.quiet_rounds:
        raise ConfigError(
            f"nodes have no quiet rounds yet, got mixing.quiet_rounds = {config.mixing.quiet_rounds}; set it to 0"
        )
    if config.participation < 1:
        raise ConfigError(f"in a swarm every node takes part, got participation = {config.participation}; use 1.0")
    algorithm = config.algorithms[0]
    if algorithm not in ALGORITHMS:
        raise ConfigError(f'nodes cannot run "{algorithm}"; use --algorithm with one of {", ".join(ALGORITHMS)}')
    trial = Trial(algorithm, config.seeds[0], Point(config))
    group = TrialGroup(trial.point, trial.seed, (algorithm,))
    workload = Workload.of(group, sink, Alone(config.clients))
    return SwarmPlan(experiment, trial, replace(workload.setting(trial), aggregation="sequential"), out)


def _model_facts(options: Any) -> dict[str, Any]:
    """Translate the [model] table of an experiment."""
    if options.factory is not None:
        return {"name": "factory", "factory": options.factory, "standardise": options.standardise}
    kept = {"name": options.name, "channels": list(options.channels), "standardise": options.standardise}
    return kept | {"hidden": [options.hidden]}


def _plain(samples: Tensor) -> np.ndarray[Any, Any]:
    return samples.detach().cpu().numpy()


class NodeStatus(NamedTuple):
    """What a node reports about itself."""

    state: str = "starting"
    round: int = 0
    clusters: int = 0
    cluster: int | None = None
    accuracy: float | None = None
    links: int = 0  # neighbours in reach
    sent_bytes: int = 0
    refused: int = 0
    lives: int = 1  # how often it was started
    error: str = ""  # the last one
    staleness: float | None = None  # mean age of the models that it folds, in updates


class Fleet(Protocol):
    """The nodes of a swarm."""

    async def start(self) -> None:
        """Make all members of a swarm and start them."""

    async def status(self) -> list[NodeStatus]:
        """Return the status of every node; one that does not answer is "down"."""

    async def kill(self, client: int) -> None:
        """Kill a node (kill -9), and start it again."""

    async def cut(self, links: Sequence[tuple[int, int]], seconds: float) -> None:
        """Cut links for some seconds."""

    async def stop(self) -> None:
        """End all nodes, with their last save on the disk. Raises RunError for one that does not end."""
