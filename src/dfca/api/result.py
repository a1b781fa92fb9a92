"""What `simulate` returns: the metrics as a table, the banks of all clients, and the models in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dfca.api.arguments import check_client
from dfca.api.exporting import Exportable, Format, check_format, holders
from dfca.base.errors import ConfigError
from dfca.base.notebook import number, table
from dfca.core.learning.params import FlatModel
from dfca.sim.metrics_table import Metrics, plain_scores

SHOWN = ("cluster_accuracy", "live_clusters", "train_loss", "time_s", "bytes_sent")


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """A finished simulation; it can be pickled (without `simulation`).

    banks: all models, (k, N, P), or (k, 1, P) where a server keeps one for all. module: an nn.Module of the
    architecture. shape: of a sample, None where it is several tensors. notes: what the user should know, once.
    simulation: the simulator itself, None in a result that was unpickled.
    """

    metrics: Metrics
    algorithm: str
    seed: int
    banks: Tensor
    module: nn.Module
    classes: int
    shape: tuple[int, ...] | None
    notes: tuple[str, ...] = ()
    simulation: Any = None

    @property
    def accuracy(self) -> float:
        """The mean test accuracy over clients after the last round, in 0..1."""
        if self.metrics.metric != "accuracy":
            raise AttributeError(f"this task has no accuracy; result.score is its {self.metrics.metric}")
        return self.score

    @property
    def score(self) -> float:
        """The mean over clients of the task's metric on test data after the last round: accuracy, RMSE, ..."""
        return float(self.metrics[-1][self.metrics.metric])

    @property
    def assignments(self) -> Tensor:
        """The cluster whose model fits each client best after the last round: (N,)."""
        return torch.tensor(self.metrics[-1]["assignments"])

    @cached_property
    def flat(self) -> FlatModel:
        """The architecture as a function of a vector (P,)."""
        return FlatModel(self.module)

    def bank(self, client: int) -> Tensor:
        """Copy all models that a client holds: (k, P)."""
        client = check_client(client, len(self.metrics[-1]["assignments"]))
        return self.banks[:, 0 if self.banks.shape[1] == 1 else client].clone()

    def model(self, client: int, cluster: int | None = None) -> nn.Module:
        """Make a module, ready to deploy, from one of a client's models; by default the one that fits it best."""
        bank = self.bank(client)
        chosen = int(self.assignments[client]) if cluster is None else cluster
        if not 0 <= chosen < len(bank):
            raise ConfigError(f"cluster must be in 0..{len(bank) - 1}, got {chosen}")
        return self.flat.to_module(bank[chosen])

    def personal_model(self, client: int) -> nn.Module:
        """Make the module that a client deploys: the one that fits it best, after the personal last step.

        Raises ConfigError where the simulation is gone (after pickling).
        """
        make = getattr(self.simulation, "personal_model", None)
        if make is None:
            raise ConfigError("personal models need a simulation that is still there; use model(client)")
        made: nn.Module = make(client)
        return made

    def export(
        self,
        folder: str | Path,
        format: Format = "safetensors",
        client: int | None = None,
        cluster: int | None = None,
    ) -> list[Path]:
        """Write models as files and return their paths: safetensors by the names of the state dict, or ONNX.

        By default one file per cluster that somebody uses, the copy of the first client that uses it; with `client`
        the model that fits it best, or its copy of `cluster`. The metadata names algorithm, seed, cluster, client,
        accuracy and model.

        Raises ConfigError for an unknown format, client or cluster, or a module that cannot be ONNX.
        """
        check_format(format)
        own = plain_scores(self.metrics[-1], self.metrics.metric)
        written = []
        for holder, j in holders(self.assignments.tolist(), client, cluster):
            bank = self.bank(holder)
            if not 0 <= j < len(bank):
                raise ConfigError(f"cluster must be in 0..{len(bank) - 1}, got {j}")
            deployed = int(self.assignments[holder]) == j and len(own) > holder
            facts = {
                "algorithm": self.algorithm,
                "seed": self.seed,
                "cluster": j,
                "client": holder,
                "by_client": client is not None,
                self.metrics.metric: own[holder] if deployed else None,
                "round": self.metrics[-1]["round"],
                "classes": self.classes,
                "model": str(self.module),
            }
            written.append(Exportable(self.flat, bank[j], facts, self.shape).write(Path(folder), format))
        return written

    def __getstate__(self) -> dict[str, Any]:
        stored = {field.name: getattr(self, field.name) for field in fields(self)}
        return stored | {"simulation": None, "banks": self.banks.clone()}

    def __repr__(self) -> str:
        last, key = self.metrics[-1], self.metrics.metric
        clients, used = len(last["assignments"]), len(set(last["assignments"]))
        return (
            f"Result({self.algorithm}, seed {self.seed}: {key} {number(last[key])} after {last['round']} rounds, "
            f"{clients} clients use {used} of {len(self.banks)} models)"
        )

    def _repr_html_(self) -> str:
        key = self.metrics.metric
        names = ["round", key, f"all_models_{key}", *SHOWN]
        columns = [name for name in names if any(row.get(name) is not None for row in self.metrics)]
        rows = [[number(row.get(name)) for name in columns] for row in few(self.metrics)]
        return table(repr(self), columns, rows, self.notes)

    def without_simulation(self) -> Result:
        """Copy the result without the simulator, which holds all samples."""
        return replace(self, simulation=None)


def few(rows: Sequence[Any], most: int = 10) -> list[Any]:
    """Choose at most so many rows, evenly, with the last one."""
    step = -(-len(rows) // most) if rows else 1
    return list(rows[::-1][::step][::-1])
