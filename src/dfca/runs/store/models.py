"""The final models of a trial: models/<trial>.safetensors, every tensor by its name, with what one needs to use them.

    client.3.cluster.0.net.0.weight    a tensor of a client's copy of a cluster's model
    cluster.0.net.0.weight             the same where a server keeps one for all
    constant.net.1.weight              a frozen parameter, the same in all models

The metadata (`describe`) names the algorithm, seed, cluster of each client and the model, so the file serves without
its run folder. Version 0.2 stored one tensor "bank" (m, N, P) without names; so are banks of too many tensors for the
header of a file. Both are read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dfca.base.errors import ConfigError, RunError
from dfca.base.files import Stream, open_regular
from dfca.base.renamed import renamed
from dfca.core.learning.params import FlatModel
from dfca.experiment.sweep import Trial
from dfca.model_options import ModelOptions
from dfca.sim.metrics_table import EvaluationRow, JsonObject
from dfca.sim.setting import Setting

FORMAT = "dfca-models-1"
MOST_NAMED = 400_000  # tensors: the header of safetensors may have 100 MB
FOLDER = "models"
CONSTANT = "constant."
ARCHITECTURE = {"name", "hidden", "channels"}


def named(bank: Stream, flat: FlatModel, shared: bool) -> Stream:
    """Give the tensors in a bank (m, N, P), or a server's (m, 1, P), their names."""
    models, rows, _ = bank.shape
    if models * rows * len(flat.names) > MOST_NAMED:
        return bank
    tensors = [(name, tuple(shape)) for name, shape in zip(flat.names, flat.shapes, strict=True)]
    heads = [_head(j, i, shared) for j in range(models) for i in range(rows)]
    return replace(bank, parts=[(head + name, shape) for head in heads for name, shape in tensors])


def architecture(model: ModelOptions) -> JsonObject:
    """Return the options that make the architecture: of a user's own model, its function."""
    values = model.model_dump(mode="json", include={"factory"} if model.factory else ARCHITECTURE)
    return {**values, "standardise": True} if model.standardise else values


def describe(trial: Trial, setting: Setting, flat: FlatModel, metrics: EvaluationRow) -> dict[str, str]:
    """Make the metadata; values are JSON where they are not plain text."""
    shape = getattr(setting.split.train.x, "shape", None)
    model, augment = trial.point.config.model, trial.point.config.data.augment
    facts: JsonObject = {
        "seed": trial.seed,
        "shape": None if shape is None else list(shape[1:]),
        "classes": setting.split.classes,
        "shared": setting.algorithm.exchange == "server",
        "model": architecture(model),
        "parameters": [[name, list(size)] for name, size in zip(flat.names, flat.shapes, strict=True)],
        "round": metrics.get("round"),
        # of the models in the file: a personal last step is not in it
        "accuracy": metrics.get("accuracy_before_personal", metrics.get("accuracy")),
        "accuracy_by_client": metrics.plain_scores or None if metrics.metric == "accuracy" else None,
        "assignments": metrics.get("assignments"),
    }
    if augment is not None and augment.crop is not None:
        facts["crop"] = augment.crop
    return {
        "format": FORMAT,
        "algorithm": trial.algorithm,
        "point": trial.point.label,
        **{key: json.dumps(value) for key, value in facts.items()},
    }


@dataclass(frozen=True)
class StoredModels:
    """The models of one trial on the disk, read one at a time."""

    path: Path
    facts: JsonObject  # the metadata, values parsed; empty in a file of version 0.2
    shared: bool  # a server keeps one model per cluster for all clients

    @classmethod
    def open(cls, path: Path, shared: bool = False) -> StoredModels:
        """Read what a file says of itself; `shared` where it does not say whether a server keeps the models.

        Raises RunError where there is none, or it is damaged.
        """
        if not path.exists():
            raise RunError(
                f"{path.parent.parent} has no models of {path.stem}; run it again with --save-models (and --no-resume, "
                "or another --out)"
            )
        try:
            os.close(open_regular(path, follow_links=False))
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                plain = ("format", "algorithm", "point")
                facts = {key: value if key in plain else json.loads(value) for key, value in metadata.items()}
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({error}); run it again with --save-models") from error
        facts = renamed(facts)
        if facts and facts.get("format") != FORMAT:
            raise RunError(f"{path} has the format {facts.get('format')}, this version reads {FORMAT}")
        return cls(path, facts, bool(facts.get("shared", shared)))

    def vector(self, client: int, cluster: int) -> Tensor:
        """Read one model, (P,). Raises ConfigError for a client or a cluster that is not there."""
        with safe_open(self.path, "pt") as file:
            names = set(file.keys())
            if "bank" in names:
                bank = file.get_slice("bank")
                models, rows, _ = bank.get_shape()
                self._check(client, cluster, rows, models)
                return torch.as_tensor(bank[cluster, 0 if self.shared else client]).clone()
            rows, models = self._count(names)
            self._check(client, cluster, rows, models)
            head = _head(cluster, client, self.shared)
            return torch.cat([file.get_tensor(head + name).reshape(-1) for name, _ in self.facts["parameters"]])

    def bank(self, client: int) -> Tensor:
        """Read all models that a client holds, (m, P)."""
        return torch.stack([self.vector(client, cluster) for cluster in range(self.models)])

    def constants(self) -> dict[str, Tensor]:
        """Read the frozen parameters, by name."""
        with safe_open(self.path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(CONSTANT)]  # noqa: SIM118  it is no mapping
            return {name.removeprefix(CONSTANT): file.get_tensor(name) for name in names}

    @property
    def models(self) -> int:
        """Count the models that each client holds."""
        with safe_open(self.path, "pt") as file:
            names = set(file.keys())
            return int(file.get_slice("bank").get_shape()[0]) if "bank" in names else self._count(names)[1]

    def _count(self, names: set[str]) -> tuple[int, int]:
        """Count clients and clusters by the names of the first parameter."""
        first = self.facts["parameters"][0][0]
        heads = [name.removesuffix(first).split(".") for name in names if name.endswith(f".{first}")]
        heads = [head for head in heads if head[0] in ("client", "cluster")]
        clients = {int(head[1]) for head in heads if head[0] == "client"} or {0}
        clusters = {int(head[head.index("cluster") + 1]) for head in heads if "cluster" in head}
        return len(clients), len(clusters)

    def _check(self, client: int, cluster: int, rows: int, models: int) -> None:
        if client < 0 or (not self.shared and client >= rows):
            raise ConfigError(f"client must be in 0..{rows - 1}, got {client}")
        if not 0 <= cluster < models:
            raise ConfigError(f"cluster must be in 0..{models - 1}, got {cluster}")


def _head(cluster: int, client: int, shared: bool) -> str:
    return f"cluster.{cluster}." if shared else f"client.{client}.cluster.{cluster}."
