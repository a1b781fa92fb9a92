"""What `simulate` returns: the metrics as a table, the banks of all clients, and the models in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dfca.api.arguments import check_client
from dfca.api.exporting import Exportable, Format, check_format, holders
from dfca.api.showing import Shown
from dfca.base.errors import ConfigError
from dfca.base.notebook import number, table
from dfca.core.client import effective
from dfca.core.learning.params import FlatModel
from dfca.sim.metrics_table import Metrics

if TYPE_CHECKING:
    import pandas as pd

SHOWN = ("cluster_accuracy", "live_clusters", "train_loss", "time_s")


@dataclass(frozen=True, eq=False, repr=False)
class Result(Shown):
    """A finished simulation; it can be pickled (without `simulation`).

    Attributes:
        evaluations: A record per evaluated round, with the numbers of each client; `metrics` is their table.
        algorithm: The name of the algorithm.
        seed: The seed.
        banks: All models, (k, N, P), or (k, 1, P) where a server keeps one for all.
        module: A module of the architecture.
        classes: The number of classes, or of outputs.
        shape: The shape of a sample; None where a sample is several tensors.
        notes: What the user should know about this run.
        simulation: The simulator itself; None in a result that was unpickled.
        momentum: Of the local steps.
        last_step: Whether clients took a personal last step.
        partial: Whether it was interrupted: evaluations end before the last round, models are those of that moment.

    Example:
        >>> import dfca
        >>> split = dfca.make_split(dfca.DataOptions(samples_per_client=20), clients=6, clusters=2, seed=0)
        >>> result = dfca.simulate(lambda: dfca.mlp((1, 8, 8), 10, 8), split, "ifca", rounds=2)
        >>> result.bank(0).shape, result.model(0, cluster=1)[1].out_features
        (torch.Size([2, 610]), 8)
    """

    evaluations: Metrics
    algorithm: str
    seed: int
    banks: Tensor
    module: nn.Module
    classes: int
    shape: tuple[int, ...] | None
    notes: tuple[str, ...] = ()
    simulation: Any = None
    momentum: float | None = None
    last_step: bool | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if self.simulation is not None:
            setting = self.simulation.setting
            object.__setattr__(self, "momentum", effective(setting.local, setting.algorithm).momentum)
            object.__setattr__(self, "last_step", bool(setting.last_steps))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per evaluated round, with its numbers; `evaluations.to_pandas(by="client")` has a row per client."""
        return self.evaluations.to_pandas()

    @property
    def megabytes_per_client(self) -> float | None:
        """What a client sent and received until the last evaluation, the mean over clients, in millions of bytes."""
        traffic = self.evaluations[-1].traffic
        return None if traffic is None else traffic / 1e6

    @property
    def accuracy(self) -> float:
        """The mean test accuracy over clients after the last round, in 0..1."""
        if self.evaluations.metric != "accuracy":
            raise AttributeError(f"this task has no accuracy; result.score is its {self.evaluations.metric}")
        return self.score

    @property
    def score(self) -> float:
        """The mean over clients of the task's metric on test data after the last round: accuracy, RMSE, ..."""
        return float(self.evaluations[-1].score)

    @property
    def assignments(self) -> Tensor:
        """The cluster whose model fits each client best after the last round: (N,)."""
        return torch.tensor(self.evaluations[-1].assignments)

    @cached_property
    def flat(self) -> FlatModel:
        """The architecture as a function of a vector (P,)."""
        return FlatModel(self.module)

    def bank(self, client: int) -> Tensor:
        """Copy all models of a client.

        Args:
            client: The number of the client.

        Returns:
            The models, (k, P).

        Raises:
            ConfigError: If there is no such client.
        """
        client = check_client(client, len(self.evaluations[-1].assignments))
        return self.banks[:, 0 if self.banks.shape[1] == 1 else client].clone()

    def model(self, client: int, cluster: int | None = None) -> nn.Module:
        """Make a module, ready to deploy, from one of a client's models.

        Args:
            client: The number of the client.
            cluster: Which of its models; None: the one that fits it best.

        Returns:
            A new module.

        Raises:
            ConfigError: If there is no such client or cluster.
        """
        bank = self.bank(client)
        chosen = int(self.assignments[client]) if cluster is None else cluster
        if not 0 <= chosen < len(bank):
            raise ConfigError(f"cluster must be in 0..{len(bank) - 1}, got {chosen}")
        return self.flat.to_module(bank[chosen])

    def personal_model(self, client: int) -> nn.Module:
        """Make the module that a client deploys: the one that fits it best, after the personal last step.

        Args:
            client: The number of the client.

        Returns:
            A new module.

        Raises:
            ConfigError: If there is no such client, or the result was unpickled and has no simulation.
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
        """Write models as files, with algorithm, seed, cluster, client, score and model as metadata.

        Args:
            folder: Where the files go.
            format: "safetensors", with the tensor names of the state dict, or "onnx".
            client: Whose model; None: for every cluster in use, the copy of the first client that uses it.
            cluster: Which model of the client; None: the one that fits it best.

        Returns:
            The paths of the files.

        Raises:
            ConfigError: If the format, client or cluster is unknown, or the module cannot be written as ONNX.
        """
        check_format(format)
        own = self.evaluations[-1].plain_scores
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
                self.evaluations.metric: own[holder] if deployed else None,
                "round": self.evaluations[-1].round,
                "classes": self.classes,
                "model": str(self.module),
            }
            written.append(Exportable(self.flat, bank[j], facts, self.shape).write(Path(folder), format))
        return written

    @property
    def _results(self) -> Sequence[Result]:
        return [self]

    def __getstate__(self) -> dict[str, Any]:
        stored = {field.name: getattr(self, field.name) for field in fields(self)}
        return stored | {"simulation": None, "banks": self.banks.clone()}

    def __repr__(self) -> str:
        last = self.evaluations[-1]
        clients, used = len(last.assignments), len(set(last.assignments))
        return (
            f"Result({self.algorithm}, seed {self.seed}: {last.metric} {number(last.score)} after {last.round} rounds"
            f"{' (interrupted)' if self.partial else ''}, "
            f"{clients} clients use {used} of {len(self.banks)} models)"
        )

    def _repr_html_(self) -> str:
        key = self.evaluations.metric
        names = ["round", key, f"all_models_{key}", *SHOWN]
        columns = [name for name in names if any(row.get(name) is not None for row in self.evaluations)]
        rows = [
            [*(number(row.get(name)) for name in columns), number(None if row.traffic is None else row.traffic / 1e6)]
            for row in few(self.evaluations)
        ]
        return table(repr(self), [*columns, "MB per client"], rows, self.notes)


def few(rows: Sequence[Any], most: int = 10) -> list[Any]:
    """Choose at most `most` rows, evenly spaced, with the last one."""
    step = -(-len(rows) // most) if rows else 1
    return list(rows[::-1][::step][::-1])
