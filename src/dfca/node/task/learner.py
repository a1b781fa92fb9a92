"""The model of a swarm on one device: built from the facts, scored on held-out samples, used for predictions."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.abc import SourceLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dfca import codecs
from dfca.base.accountant import check_accountant
from dfca.base.errors import ConfigError, DataError, ModelError
from dfca.base.files import sha256, tensor_bytes
from dfca.base.imports import is_import
from dfca.core.codec import Codec
from dfca.core.learning.local import infer, losses, lowest
from dfca.core.learning.params import FlatModel
from dfca.core.learning.parts import layout_of
from dfca.core.learning.task import TASKS
from dfca.core.rng import seeded
from dfca.models import cropped, known_factory, on_images, own_factory, pretrained
from dfca.node.task.facts import MOST_FLOATS, Facts, ModelFacts, TargetFacts
from dfca.node.task.scaling import Scaling

BLOCK = 4096  # samples that are scored at a time: predictions of a large file need little memory


UNSCALED = TargetFacts()


@dataclass(frozen=True)
class Architecture:
    """A model as the core uses it: a pure function of a flat vector, and how to make a fresh one.

    target: how the numbers are scaled that it predicts, if it does.
    """

    flat: FlatModel
    make: Callable[[], nn.Module]
    target: TargetFacts = UNSCALED

    @property
    def predicts(self) -> str:
        """What is predicted: "classes", "numbers" or "labels"."""
        return self.flat.task.targets

    def answer(self, outputs: Tensor) -> Tensor:
        """Make of outputs (n, ...) the probabilities of classes or labels (n, classes), or numbers (n,) in the data's
        unit."""
        if self.predicts == "numbers":
            return outputs.flatten() * self.target.scale + self.target.mean
        return outputs.sigmoid() if self.predicts == "labels" else outputs.softmax(dim=1)


def build(facts: Facts, allowed: str | None = None, weights: str | None = None) -> Architecture:
    """Build the model of a swarm.

    allowed, weights: the factory and the file of weights that this device's own settings name; facts alone never run
    code.

    Raises ConfigError or ModelError where it is another model than the swarm's, or this device lacks the accountant
    that the swarm's privacy needs.
    """
    if facts.privacy is not None:
        check_accountant()
    model, digest = _make(facts, allowed, weights)
    if model.flat.size != facts.model.size or digest != facts.model.digest:
        raise ModelError(
            f"the model built here has {model.flat.size} floats and the swarm's has {facts.model.size}, or its tensors "
            f"have other names or shapes, or its frozen ones other values; {_cure(facts.model)}"
        )
    task = "regression" if facts.predicts_numbers else facts.task
    layout_of(model.flat, facts.make_algorithm())  # a pattern of `private` may fit no tensor, or every one
    return replace(model, flat=model.flat.for_task(TASKS[task]), target=facts.target)


def measured(facts: Facts, weights: str | None = None) -> Facts:
    """Fill in the size and digest of a swarm's model by building it once: what the founder does."""
    built, digest = _make(facts, facts.model.factory, weights)
    return facts.changed(model=facts.model.changed(size=built.flat.size, digest=digest))


def _make(facts: Facts, allowed: str | None, weights: str | None) -> tuple[Architecture, str]:
    model, shape, crop = facts.model, facts.inputs.sample_shape, facts.crop
    make = on_images(_factory(model, cropped(shape, crop), facts.outputs, allowed), crop, model.standardise)
    if model.factory is None:
        with torch.device("meta"):  # no memory is taken before the size is known
            _check_size(make())
    if model.weights is not None or weights is not None:
        make = pretrained(make, _checked_weights(model.weights, weights))
    with seeded(facts.seed, "init", 0):
        module = make()
    _check_size(module)
    flat = FlatModel(module)
    if flat.dtype != torch.float32:
        raise ModelError(f"the model of a swarm must be of float32, got {flat.dtype}; convert it by module.float()")
    dtype = torch.int64 if facts.inputs.kind == "tokens" else None
    _check_outputs(module, torch.zeros(2, *shape, dtype=dtype), facts.outputs)
    layout: list[list[Any]] = [[name, list(size)] for name, size in zip(flat.names, flat.shapes, strict=True)]
    if flat.frozen:
        layout.append(["constants", constants_digest(flat)])
    return Architecture(flat, make), hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def constants_digest(flat: FlatModel) -> str:
    """Hash the names, types and values of constants by SHA-256."""
    digest = hashlib.sha256()
    for name, tensor in sorted(flat.constants.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _checked_weights(wanted: str | None, path: str | None) -> str:
    """Return the path of the weights, if it is the file with the SHA-256 that the swarm's facts name."""
    if wanted is None:
        raise ConfigError("the swarm's models start afresh; leave training.weights out of node.toml")
    if path is None:
        raise ConfigError(
            f"the swarm's model starts from a file of weights with the SHA-256 {wanted}; get it from the founder and "
            "set training.weights in node.toml to its path (or join with --weights)"
        )
    if (digest := weights_digest(path)) != wanted:
        raise ModelError(f"{path} has the SHA-256 {digest}, and the swarm's weights {wanted}; take the founder's file")
    return path


def weights_digest(path: str) -> str:
    """Hash a file of weights. Raises ModelError where it cannot be read."""
    try:
        return sha256(Path(path))
    except OSError as error:
        raise ModelError(f"the weights {path} cannot be read: {error.strerror or error}") from None


def trusted_codec(facts: Facts, allowed: str | None = None) -> Codec | None:
    """Make what codes the models of a swarm; None: nothing does.

    allowed: the codec that this device's own settings name; facts alone never run code. Of a codec that is code, the
    source of its module must be the founder's; what that imports is not compared.

    Raises ConfigError where it is not allowed, another one, or no codec.
    """
    if is_import(facts.codec):
        if allowed != facts.codec:
            named = "names none" if allowed is None else f'names "{allowed}"'
            raise ConfigError(
                f'what members send is coded by code of the founder, "{facts.codec}", and node.toml of this device '
                f'{named}; if you have that module and trust it, set codec = "{facts.codec}" in [training] there (or '
                f"join with --set training.codec={facts.codec})"
            )
        if (digest := code_digest(facts.codec)) != facts.codec_digest:
            raise ConfigError(
                f'the module of the codec "{facts.codec}" has the SHA-256 {digest} here and {facts.codec_digest} at '
                "the founder; take the founder's file"
            )
    codec = codecs.get(facts.codec, facts.keep)
    if codec is not None and facts.model.size:
        codec.declared(facts.model.size)
    return codec


def code_digest(path: str) -> str:
    """Hash the source of the module of "module:function" by SHA-256, without running it. Raises ConfigError."""
    module = path.partition(":")[0]
    try:
        spec = find_spec(module)
        source = spec and isinstance(spec.loader, SourceLoader) and spec.loader.get_source(module)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f'the module of "{path}" cannot be read: {error}') from None
    if not source:
        raise ConfigError(f'there is no Python module "{module}", of "{path}", here; put its file where Python looks')
    return hashlib.sha256(source.encode()).hexdigest()


def _factory(model: ModelFacts, shape: tuple[int, ...], classes: int, allowed: str | None) -> Callable[[], nn.Module]:
    if model.factory is not None:
        if allowed != model.factory:
            named = "names none" if allowed is None else f'names "{allowed}"'
            raise ConfigError(
                f'the swarm\'s model is code of its founder, "{model.factory}", and node.toml of this device {named}; '
                f'if you have that module and trust it, set factory = "{model.factory}" there (or join with --factory)'
            )
        return own_factory(model.factory, shape, classes)
    if model.name == "mlp" and len(model.hidden) > 1:
        return lambda: deep_mlp(shape, classes, model.hidden)
    return known_factory(model.name, shape, classes, model.hidden[0], model.channels)


def deep_mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """Build an MLP with several hidden layers: inputs - (hidden - ReLU)* - classes."""
    sizes = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for inner, outer in zip(sizes, hidden, strict=False):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def _check_size(module: nn.Module) -> None:
    floats = sum(tensor.numel() for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point())
    if floats > MOST_FLOATS:
        raise ModelError(f"a model must have at most {MOST_FLOATS} floats, got {floats}; take smaller layers")


def _check_outputs(module: nn.Module, zeros: Tensor, classes: int) -> None:
    """Run two samples of zeros: a module of the user's own may not fit."""
    module = module.eval()
    try:
        with torch.no_grad():
            outputs = module(zeros)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(f"the model cannot take samples of shape {tuple(zeros.shape[1:])}: {error}") from None
    if not isinstance(outputs, Tensor) or outputs.shape != (2, classes):
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(f"the model must give one row of {classes} numbers per sample, (2, {classes}), got {got}")


def check_tokens(model: Architecture, tokens: Tensor) -> None:
    """Raise DataError where the model does not know the largest of the tokens (n, T)."""
    largest = tokens[int(tokens.amax(dim=1).argmax())][None]
    try:
        with torch.no_grad():
            model.flat.to_module(torch.zeros(model.flat.size))(largest)
    except (RuntimeError, IndexError) as error:
        raise DataError(
            f"the model fails on the token {int(largest.max())} ({error}); give tokens of its own vocabulary"
        ) from None


def _cure(model: ModelFacts) -> str:
    if model.factory is not None:
        return f'take the same version of "{model.factory}" as the founder'
    return "ask for a new invite, and use the same version of dfca on all devices"


class HeldOutScore(NamedTuple):
    """One model on held-out samples: accuracy, RMSE of numbers in the data's unit, or F1 of labels; mean loss."""

    accuracy: float | None
    loss: float
    rmse: float | None = None
    f1: float | None = None


@dataclass(frozen=True)
class HeldOutReport:
    """What a device knows of its models: the cluster that fits its training samples best, and all held-out scores.

    `own` is the score of the chosen cluster; None where nothing is held out.
    """

    cluster: int
    scores: tuple[HeldOutScore, ...]

    @property
    def own(self) -> HeldOutScore | None:
        """The held-out score of the chosen cluster."""
        return self.scores[self.cluster] if self.scores else None


def choose_cluster(model: Architecture, bank: Tensor, samples: tuple[Tensor, Tensor]) -> int:
    """Pick the model of a bank (m, P) with the lowest loss on training samples: the device's own cluster."""
    if len(bank) == 1 or len(samples[1]) == 0:
        return 0
    return lowest(losses(model.flat, bank, *samples))


def evaluate(
    model: Architecture, bank: Tensor, train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]
) -> HeldOutReport:
    """Choose a cluster with training samples and score every model of a bank (m, P) on held-out ones."""
    return HeldOutReport(choose_cluster(model, bank, train), score_all(model, bank, held_out))


def score_all(model: Architecture, bank: Tensor, held_out: tuple[Tensor, Tensor]) -> tuple[HeldOutScore, ...]:
    """Score models (m, P) on held-out samples; nothing where there are none."""
    return tuple(_score(model, vector, *held_out) for vector in bank) if len(held_out[1]) else ()


def _score(model: Architecture, vector: Tensor, x: Tensor, y: Tensor) -> HeldOutScore:
    hits, said, total, task = 0, 0, 0.0, model.flat.task
    for start in range(0, len(y), BLOCK):
        rows = slice(start, start + BLOCK)
        with torch.no_grad():
            outputs = infer(model.flat, vector, x[rows], "score")
            total += float(task.loss(outputs, y[rows]).sum())
        if model.predicts == "labels":
            positive, true = outputs > 0, y[rows] > 0.5
            hits, said = hits + int((positive & true).sum()), said + int(positive.sum() + true.sum())
        elif model.predicts == "classes":
            hits += int((outputs.argmax(dim=1) == y[rows]).sum())
    loss = total / len(y)
    if model.predicts == "numbers":
        return HeldOutScore(None, loss, rmse=model.target.scale * math.sqrt(loss))
    if model.predicts == "labels":
        return HeldOutScore(None, loss, f1=2 * hits / said if said else 1.0)
    return HeldOutScore(hits / len(y), loss)


class Predictions(NamedTuple):
    """For each sample: its class as the place in `facts.classes` (n,), and the probability of that (n,); of labels, the
    probabilities (n, labels); of a regression or forecast, the number (n,) in the data's unit."""

    classes: Tensor
    probabilities: Tensor
    values: Tensor | None = None


def predict(model: Architecture, vector: Tensor, x: Tensor, scaling: Scaling) -> Predictions:
    """Predict raw samples x (n, *shape), which are scaled here, by one model (P,)."""
    classes, values = [torch.empty(0, dtype=torch.int64)], []
    for start in range(0, max(1, len(x)), BLOCK):
        with torch.no_grad():
            outputs = infer(model.flat, vector, scaling.apply(x[start : start + BLOCK]), "score")
        answer = model.answer(outputs.double() if model.predicts == "numbers" else outputs)
        if model.predicts == "classes":
            answer, place = answer.max(dim=1)
            classes.append(place)
        values.append(answer)
    if model.predicts == "numbers":
        return Predictions(classes[0], torch.empty(0), torch.cat(values))
    return Predictions(torch.cat(classes), torch.cat(values))


def secret_noise(size: int) -> Tensor:
    """Draw the noise of [privacy], standard normal (size,), by the inverse of the distribution.

    It is from the operating system, so that nobody who knows the swarm's seed knows it.
    """
    if not size:
        return torch.zeros(0, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(os.urandom(8 * size)), dtype=torch.int64) & (2**53 - 1)
    drawn: Tensor = torch.special.ndtri((bits.double() + 0.5) / 2**53)
    return drawn
