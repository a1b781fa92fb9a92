"""Hand a model on: as safetensors with everything one needs to use it, or as ONNX that takes raw inputs.

ONNX: input `input` (n, *shape) float32, raw as in the device's data; outputs `probabilities` (n, classes) and `class`
(n,) int64, the place in the metadata's `classes`; of several labels, `probabilities` (n, labels); of a regression or a
forecast, `value` (n,) in the data's unit. Scaling is part of the graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dfca.base.table import Table
from dfca.export import write_onnx, write_safetensors
from dfca.node.operate.status import SCORES
from dfca.node.task.config import NodeConfig, absolute
from dfca.node.task.csv_table import write_csv
from dfca.node.task.dataset import DeviceSamples as DeviceSamples
from dfca.node.task.dataset import load_inputs
from dfca.node.task.facts import Facts
from dfca.node.task.learner import Architecture, HeldOutScore, Predictions, predict, score_all
from dfca.node.task.scaling import Scaling


@dataclass(frozen=True)
class Exported:
    """One model of a bank: vector (P,), whose cluster and round it is; steps: the personal steps that were taken from
    it; scores: how it does on held-out samples without them and with them, where there are some."""

    facts: Facts
    model: Architecture
    vector: Tensor
    cluster: int
    round: int
    steps: int = 0
    scores: tuple[HeldOutScore, ...] = ()

    def describe(self) -> str:
        """Say in a line which model this is."""
        origin = f"cluster {self.cluster}, round {self.round}"
        if not self.steps:
            return f"{origin}, as the swarm has it"
        origin += f", after {self.steps} personal steps"
        if not self.scores:
            return origin
        before, after = self.scores
        shown = [f"loss {before.loss:.4g} -> {after.loss:.4g}"]
        for key, (title, form) in SCORES.items():
            if getattr(before, key) is not None:
                shown.append(f"{title} {getattr(before, key):{form}} -> {getattr(after, key):{form}}")
        return f"{origin} (held-out {', '.join(shown)})"

    def metadata(self) -> dict[str, str]:
        """Describe the model for its users; values are JSON where they are not plain text."""
        facts = self.facts
        return {
            "format": "dfca-model-1",
            "swarm": facts.swarm_id,
            "swarm_name": facts.name,
            "cluster": str(self.cluster),
            "round": str(self.round),
            "personal_steps": str(self.steps),
            "classes": json.dumps(facts.classes),
            "features": json.dumps(facts.inputs.features),
            "shape": json.dumps(facts.inputs.sample_shape),
            "kind": facts.inputs.kind,
            "mean": json.dumps(facts.scaling.mean),
            "scale": json.dumps(facts.scaling.scale),
            "curve": facts.scaling.curve,
            "model": _compact(facts.model),
            "task": facts.task,
            **({"target": _compact(facts.target)} if facts.predicts_numbers else {}),
            **({"horizon": str(facts.inputs.horizon)} if facts.inputs.horizon else {}),
        }


def _compact(section: Table) -> str:
    return json.dumps(section.plain(), separators=(",", ":"))


def personalised(exported: Exported, samples: DeviceSamples, number: int, steps: int) -> Exported:
    """Take personal steps from a model on the training samples of a device; one that becomes non-finite is left."""
    from dfca.core.learning.deployment import steps_of
    from dfca.node.work.worker import few

    client = exported.facts.client(number, 0, samples.train, exported.model)
    vector = steps_of(client).take(exported.vector, few(samples.train, client), steps)
    both = torch.stack([exported.vector, vector])
    return replace(exported, vector=vector, steps=steps, scores=score_all(exported.model, both, samples.held_out))


def to_safetensors(exported: Exported, path: Path) -> None:
    """Write the tensors by the names of the module's state dict, and the metadata."""
    write_safetensors(path, exported.model.flat, exported.vector, exported.metadata())


def to_onnx(exported: Exported, path: Path) -> None:
    """Write an ONNX model that takes raw inputs.

    Raises ConfigError where the library is missing or the module cannot be exported.
    """
    shape = exported.facts.inputs.sample_shape
    names = {"numbers": ("value",), "labels": ("probabilities",)}.get(
        exported.model.predicts, ("probabilities", "class")
    )
    write_onnx(path, Deployed(exported), shape, names, exported.metadata())


class Deployed(nn.Module):
    """The model with its scaling before and `Architecture.answer` behind: raw (n, *shape) -> (n, classes), and for
    classes the best (n,)."""

    mean: Tensor
    scale: Tensor

    def __init__(self, exported: Exported) -> None:
        super().__init__()
        scaling = Scaling.of(exported.facts.scaling, exported.facts.inputs)
        self.register_buffer("mean", scaling.mean)
        self.register_buffer("scale", scaling.scale)
        self.curve = scaling.curve
        self.model = exported.model
        self.module = exported.model.flat.to_module(exported.vector.detach().cpu())

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Scale in double precision as devices do, and run the model."""
        scaled = Scaling(self.mean, self.scale, self.curve).apply(x)
        answer = self.model.answer(self.module(scaled))
        return (answer, answer.argmax(dim=1)) if self.model.predicts == "classes" else answer


def predict_file(exported: Exported, path: str, config: NodeConfig, folder: Path) -> str:
    """Predict the samples of a file by a model; returns CSV with a row per sample, in the file's order.

    path: as the user typed it; classes and additional columns in the file are ignored.

    Raises DataError where the samples do not fit.
    """
    asked = config.data.changed(path=absolute(path), format="auto", test=None)
    facts = exported.facts
    x, scaling = load_inputs(config.changed(data=asked), folder, facts), Scaling.of(facts.scaling, facts.inputs)
    return predictions_csv(facts, predict(exported.model, exported.vector.detach().cpu(), x, scaling))


def predictions_csv(facts: Facts, predictions: Predictions) -> str:
    """Write predictions as CSV: the row (from 1), its class and the probability of that class, the probability of each
    label, or its number; a forecast is of a row further down, of the last windows beyond the end of the file."""
    if predictions.values is not None:
        first = facts.inputs.window + facts.inputs.horizon or 1
        values = enumerate(predictions.values.tolist(), first)
        return write_csv(("row", "value"), ((row, f"{value:.9g}") for row, value in values))
    if facts.task == "multilabel":
        chances = enumerate(predictions.probabilities.tolist(), 1)
        return write_csv(
            ("row", *facts.classes), ((row, *(f"{chance:.6f}" for chance in all_)) for row, all_ in chances)
        )
    pairs = zip(predictions.classes.tolist(), predictions.probabilities.tolist(), strict=True)
    rows: Iterator[tuple[Any, ...]] = (
        (row, facts.classes[place], f"{chance:.6f}") for row, (place, chance) in enumerate(pairs, 1)
    )
    return write_csv(("row", "class", "probability"), rows)
