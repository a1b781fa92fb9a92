"""Run a simulation from Python: `simulate` returns a result with the metrics as a table, the banks and the models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import networkx as nx
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from dfca import algorithms
from dfca.core.algorithm import Algorithm
from dfca.core.local import LocalOptions
from dfca.data.clients import Split
from dfca.errors import ConfigError, ModelError, unknown
from dfca.sim.metrics_table import Metrics
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.topology import TopologyOptions, make_graph


@dataclass(frozen=True)
class Result:
    """A finished simulation."""

    metrics: Metrics
    simulation: Simulation

    @property
    def accuracy(self) -> float:
        """The mean test accuracy over clients after the last round, in 0..1."""
        return float(self.metrics[-1]["accuracy"])

    @property
    def assignments(self) -> Tensor:
        """The cluster whose model fits each client best after the last round: (N,)."""
        return torch.tensor(self.metrics[-1]["assignments"])

    def bank(self, client: int) -> Tensor:
        """Copy all models that a client holds: (k, P)."""
        return self.simulation.bank(client)

    def model(self, client: int, cluster: int | None = None) -> nn.Module:
        """Make a module, ready to deploy, from one of a client's models; by default the one that fits it best."""
        return self.simulation.model(client, int(self.assignments[client]) if cluster is None else cluster)


def simulate(
    model: nn.Module | Callable[[], nn.Module],
    data: Split,
    algorithm: str | Algorithm = "dfca-gi",
    *,
    clusters: int | Literal["auto"] | None = "auto",
    rounds: int,
    topology: nx.Graph | TopologyOptions | Mapping[str, Any] | str = "erdos-renyi",
    seed: int = 0,
    steps: int = 5,
    learning_rate: float = 0.1,
    batch_size: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> Result:
    """Run one algorithm on one split.

    model: a function that builds a fresh module, or a module (its layers are re-initialised for every start).
    clusters: how many; "auto": found by the clients where the algorithm can (dfca, dfca-fi), else the true number.
    topology: a networkx graph with nodes 0..N-1, a name, or options: {"name": "erdos-renyi", "p": 0.2}.
    options: further fields of `Setting`: participation, weights, aggregation, evaluate_every, device, engine, ...
    on_metrics: called with the metrics of every evaluated round.
    """
    known = {field.name for field in fields(Setting)}
    for option in options:
        if option not in known:
            raise unknown("option of simulate", option, known)
    graph = topology
    if not isinstance(graph, nx.Graph):
        chosen = {"name": graph} if isinstance(graph, str) else graph
        if not isinstance(chosen, TopologyOptions):
            try:
                chosen = TopologyOptions(**chosen)
            except ValidationError as error:
                problem = error.errors()[0]
                key = ".".join(str(part) for part in problem["loc"])
                raise ConfigError(f"topology.{key}: {problem['msg']}, got {problem['input']!r}") from None
        graph = make_graph(chosen, len(data.train.sizes), seed)
    setting = Setting(
        split=data,
        graph=graph,
        make_model=fresh_copies(model) if isinstance(model, nn.Module) else model,
        algorithm=algorithms.get(algorithm) if isinstance(algorithm, str) else algorithm,
        clusters=None if clusters == "auto" else clusters,
        rounds=rounds,
        seed=seed,
        local=LocalOptions(steps, learning_rate, batch_size, momentum, weight_decay),
        **options,
    )
    simulation, rows = Simulation(setting), Metrics()
    while not simulation.done:
        row = simulation.step()
        if row is not None:
            rows.append(row)
            if on_metrics is not None:
                on_metrics(row)
    return Result(rows, simulation)


def fresh_copies(module: nn.Module) -> Callable[[], nn.Module]:
    """Make a factory of re-initialised copies of a module.

    Raises ModelError where some parameter belongs to a layer without `reset_parameters`.
    """
    for name, layer in module.named_modules():
        owned = list(layer.parameters(recurse=False))
        if owned and not callable(getattr(layer, "reset_parameters", None)):
            raise ModelError(
                f"layer {name!r} ({type(layer).__name__}) has no reset_parameters(), so the module cannot be "
                "started afresh; pass a function that builds it instead of the module"
            )

    def build() -> nn.Module:
        twin = copy.deepcopy(module)
        for layer in twin.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
        return twin

    return build
