"""Write models of a simulation or a run folder as files: safetensors with names and metadata, or ONNX."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from dfca.api.arguments import check_client
from dfca.base.errors import ConfigError, unknown
from dfca.core.learning.params import FlatModel
from dfca.export import write_onnx, write_safetensors

Format = Literal["safetensors", "onnx"]
FORMATS = {"safetensors": "safetensors", "onnx": "onnx"}  # and how their files end


@dataclass(frozen=True)
class Exportable:
    """One model (P,) and what is known of it.

    facts: algorithm, seed, cluster, client, accuracy, model, ...; shape: of a sample, None where it is several tensors.
    """

    flat: FlatModel
    vector: Tensor
    facts: Mapping[str, Any]
    shape: Sequence[int] | None

    def write(self, folder: Path, format: Format) -> Path:
        """Write the file and return its path: "dfca-auto-seed0-cluster1.safetensors"."""
        facts = self.facts
        client = f"-client{facts['client']}" if facts.get("by_client") else ""
        name = f"{str(facts['algorithm']).replace(':', '.')}-seed{facts['seed']}-cluster{facts['cluster']}{client}"
        path = folder / f"{name}.{FORMATS[format]}"
        metadata = _metadata(facts, self.shape)
        if format == "safetensors":
            write_safetensors(path, self.flat, self.vector, metadata)
            return path
        if self.shape is None:
            raise ConfigError("a model of several inputs cannot be written as ONNX here; export it as safetensors")
        module = self.flat.to_module(self.vector.detach().cpu())
        write_onnx(path, module, self.shape, ("output",), metadata)
        return path


def check_format(format: str) -> None:
    """Raise ConfigError for a format that does not exist."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)


def holders(assignments: Sequence[int], client: int | None, cluster: int | None) -> list[tuple[int, int]]:
    """Choose whose copies of which clusters are written: (client, cluster).

    Without either: of each cluster in use, the copy of the first client that uses it. A client: the model
    that fits it best, or its copy of that cluster. A cluster: the copy of the first client that uses it. Nobody is
    chosen by test scores.
    """
    if client is not None:
        client = check_client(client, len(assignments))
        return [(client, int(assignments[client]) if cluster is None else cluster)]
    first: dict[int, int] = {}
    for i, own in enumerate(assignments):
        first.setdefault(int(own), i)
    if cluster is None:
        return [(holder, own) for own, holder in sorted(first.items())]
    return [(first.get(cluster, 0), cluster)]


def _metadata(facts: Mapping[str, Any], shape: Sequence[int] | None) -> dict[str, str]:
    known = {key: value for key, value in facts.items() if value is not None and key != "by_client"}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in known.items()}
    return {"format": "dfca-model-1", **texts, "shape": json.dumps(None if shape is None else list(shape))}
