"""The models of the paper, one for sensor windows, and any module of the user."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfca.base.errors import DfcaError, ModelError, place_of, unknown
from dfca.base.imports import import_function

if TYPE_CHECKING:  # an experiment is read and checked without torch, so functions import it themselves
    from torch import Tensor, nn

    from dfca.core.learning.params import Pretrained

MODELS = {
    "mlp": "one hidden layer and ReLU (the paper: 2048 units on MNIST and FEMNIST)",
    "cnn": "two blocks of conv 3x3 - ReLU - max-pool - batch norm, then a hidden layer (the paper: EMNIST, CIFAR-10)",
    "cnn-tutorial": "TensorFlow's tutorial CNN: two blocks of conv 5x5 and local response norm, then two hidden layers "
    "(the authors' code: CIFAR-10)",
    "cnn1d": "two blocks of conv - ReLU - max-pool over time, then a hidden layer (sensor windows)",
}


def cropped(shape: Any, crop: int | None) -> Any:
    """Return the shape of the centres of images of that shape."""
    return shape if crop is None else (shape[0], crop, crop)


def on_images(make: Callable[[], nn.Module], crop: int | None, standardise: bool) -> Callable[[], nn.Module]:
    """Let a model take whole images: it cuts out their centres and standardises them first.

    The layers of a sequence keep their names; those of any other module are in "network".
    """
    if crop is None and not standardise:
        return make

    def build() -> nn.Module:
        from torch import nn

        from dfca.core.learning.images import CentreCrop, Standardise

        network = make()
        layers: dict[str, nn.Module] = {} if crop is None else {"crop": CentreCrop(crop)}
        if standardise:
            layers["standardise"] = Standardise()
        layers |= dict(network.named_children()) if type(network) is nn.Sequential else {"network": network}
        return nn.Sequential(OrderedDict(layers))

    return build


def own_factory(path: str, shape: Any, classes: int) -> Callable[[], nn.Module]:
    """Make the function that builds a model of the user's own, "module:function"."""
    build = import_function(path, "model.factory")
    return lambda: _call(path, build, shape, classes)


def known_factory(
    name: str, shape: Any, classes: int, hidden: int, channels: tuple[int, int]
) -> Callable[[], nn.Module]:
    """Make the function that builds one of `MODELS`; see `model_options.make_factory`."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ModelError(
            f'model "{name}" takes one tensor per sample, got {shape}; give model.factory, a model of your own'
        )
    if name == "mlp":
        return lambda: mlp(shape, classes, hidden)
    if name == "cnn":
        _need(name, shape, dimensions=3, smallest=10)
        return lambda: cnn(shape, classes, hidden, channels)
    if name == "cnn-tutorial":
        _need(name, shape, dimensions=3, smallest=10)
        return lambda: cnn_tutorial(shape, classes, hidden, channels)
    _need(name, shape, dimensions=2, smallest=16)
    return lambda: cnn1d(shape, classes, hidden, channels)


def pretrained(make: Callable[[], nn.Module], start_from: Any) -> Pretrained:
    """Make a factory whose models start from given weights: a module, a state_dict, the path of a safetensors file, or
    a list of these, one per cluster. Weights of a model with frozen parts may lack trained tensors: these are drawn.

    Raises ModelError where the weights cannot be read, or are not those of the model.
    """
    from dfca.core.learning.params import Pretrained

    given = list(start_from) if isinstance(start_from, list | tuple) else [start_from]
    if not given:
        raise ModelError("start_from is an empty list; give weights, or leave it out")
    module = make()
    starts = tuple(_checked(_weights(weights), module) for weights in given)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and not all(starts[0][name].equal(start[name]) for start in starts[1:]):
            raise ModelError(
                f"start_from: {name!r} is frozen (requires_grad is False), so it must be the same in all given weights"
            )
    return Pretrained(make, starts)


def _weights(source: Any) -> dict[str, Tensor]:
    from torch import Tensor, nn

    if isinstance(source, nn.Module):
        return {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}
    if isinstance(source, Mapping):
        if bad := [name for name, value in source.items() if not isinstance(value, Tensor)]:
            raise ModelError(f"start_from must map names to tensors, {bad[0]!r} is {type(source[bad[0]]).__name__}")
        return {str(name): tensor.detach().clone() for name, tensor in source.items()}
    if not isinstance(source, str | Path):
        raise ModelError(
            f"start_from must be a module, a state_dict or the path of a safetensors file, got {type(source).__name__}"
        )
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(source)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"start_from {source} cannot be read as safetensors: {reason}") from None


def _checked(weights: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Compare weights with a module: the same names and shapes, and finite numbers."""
    wanted, parameters = module.state_dict(), dict(module.named_parameters())
    named = {**wanted, **parameters}
    drawn: set[str] = set()
    if not all(parameter.requires_grad for parameter in parameters.values()):
        drawn = {name for name, parameter in parameters.items() if parameter.requires_grad}
    for name in wanted:
        if name not in weights and name not in drawn and wanted[name].is_floating_point():
            raise ModelError(f"start_from has no {name!r}, which the model has; it must be of the same architecture")
    for name, tensor in weights.items():
        if name not in named:
            raise ModelError(f"start_from has {name!r}, which the model does not have; leave it out")
        if tensor.shape != named[name].shape:
            raise ModelError(
                f"start_from: {name!r} must have shape {tuple(named[name].shape)}, got {tuple(tensor.shape)}"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ModelError(f"start_from: {name!r} holds NaN or infinity; every number must be finite")
    buffers = dict(module.named_buffers())  # those that are not persistent have no place in a file
    return {**{name: buffer for name, buffer in buffers.items() if name not in weights}, **weights}


def looks_trained(module: nn.Module, fresh: nn.Module) -> bool:
    """Return whether a module was trained or loaded, as far as one can see next to a fresh one."""
    import torch

    if not module.training or any(parameter.grad is not None for parameter in module.parameters()):
        return True
    for mine, new in zip(module.state_dict().values(), fresh.state_dict().values(), strict=True):
        constant = bool((new == new.flatten()[0]).all()) if new.numel() else False
        if constant and new.numel() > 1 and not torch.equal(mine.cpu(), new.cpu()):
            return True
        if mine.numel() >= 1000 and mine.is_floating_point():
            ratio = float(mine.float().std() / new.float().std().clamp_min(1e-12))
            if not 0.8 < ratio < 1.25:
                return True
    return False


def mlp(shape: tuple[int, ...], classes: int, hidden: int = 2048) -> nn.Module:
    """Build the paper's MLP: inputs - hidden - ReLU - classes.

    Args:
        shape: The shape of a sample.
        classes: The number of outputs.
        hidden: The units of the hidden layer.

    Returns:
        A module that maps (n, *shape) to (n, classes).

    Example:
        >>> import dfca
        >>> sum(parameter.numel() for parameter in dfca.mlp((1, 8, 8), 10, hidden=32).parameters())
        2410
    """
    from torch import nn

    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )  # fmt: skip


def cnn(shape: tuple[int, ...], classes: int, hidden: int = 200, channels: tuple[int, int] = (32, 64)) -> nn.Module:
    """Build the paper's CNN for images: the order is the paper's, the widths those of its public code.

    Args:
        shape: The shape of a sample, (channels, height, width).
        classes: The number of outputs.
        hidden: The units of the hidden layer.
        channels: The channels of the two convolutions.

    Returns:
        A module that maps (n, *shape) to (n, classes).

    Example:
        >>> import dfca, torch
        >>> dfca.cnn((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    from torch import nn

    colours, height, width = shape
    first, second = channels
    pixels = (((height - 2) // 2 - 2) // 2) * (((width - 2) // 2 - 2) // 2)
    return nn.Sequential(
        nn.Conv2d(colours, first, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(first),
        nn.Conv2d(first, second, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(second),
        nn.Flatten(), nn.Linear(second * pixels, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def cnn_tutorial(
    shape: tuple[int, ...], classes: int, hidden: int = 384, channels: tuple[int, int] = (64, 64)
) -> nn.Module:
    """Build the CNN of TensorFlow's CIFAR-10 tutorial, with its start: what the paper's authors train on CIFAR-10.

    Its layers have names: conv1, conv2, dense1, dense2, output. The tutorial decays dense1.weight and dense2.weight by
    0.004 (`layer_decay`).

    Args:
        shape: The shape of a sample, (channels, height, width).
        classes: The number of outputs.
        hidden: The units of the first hidden layer; the second has half of them.
        channels: The channels of the two convolutions.

    Returns:
        A module that maps (n, *shape) to (n, classes).

    Example:
        >>> import dfca.models, torch
        >>> dfca.models.cnn_tutorial((3, 24, 24), 10)(torch.zeros(2, 3, 24, 24)).shape
        torch.Size([2, 10])
    """
    from torch import nn

    colours, height, width = shape
    first, second = channels
    pixels = (height // 4) * (width // 4)
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(colours, first, 5, padding=2), "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(3, 2, ceil_mode=True), "norm1": nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
        "conv2": nn.Conv2d(first, second, 5, padding=2), "relu2": nn.ReLU(),
        "norm2": nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0), "pool2": nn.MaxPool2d(3, 2, ceil_mode=True),
        "flatten": nn.Flatten(),
        "dense1": nn.Linear(second * pixels, hidden), "relu3": nn.ReLU(),
        "dense2": nn.Linear(hidden, max(1, hidden // 2)), "relu4": nn.ReLU(),
        "output": nn.Linear(max(1, hidden // 2), classes),
    }  # fmt: skip
    starts = {"conv1": (0.05, 0.0), "conv2": (0.05, 0.1), "dense1": (0.04, 0.1), "dense2": (0.04, 0.1)}
    for name, (deviation, bias) in (starts | {"output": (2 / hidden, 0.0)}).items():
        layer: Any = layers[name]
        nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        nn.init.constant_(layer.bias, bias)
    return nn.Sequential(OrderedDict(layers))


def cnn1d(shape: tuple[int, ...], classes: int, hidden: int = 100, channels: tuple[int, int] = (32, 64)) -> nn.Module:
    """Build a CNN over time for sensor windows.

    Args:
        shape: The shape of a sample, (channels, time).
        classes: The number of outputs.
        hidden: The units of the hidden layer.
        channels: The channels of the two convolutions.

    Returns:
        A module that maps (n, *shape) to (n, classes).

    Example:
        >>> import dfca, torch
        >>> dfca.cnn1d((6, 128), 6)(torch.zeros(2, 6, 128)).shape
        torch.Size([2, 6])
    """
    from torch import nn

    sensors, time = shape
    first, second = channels
    steps = ((time - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv1d(sensors, first, 5), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(first, second, 5), nn.ReLU(), nn.MaxPool1d(2),
        nn.Flatten(), nn.Linear(second * steps, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def _need(name: str, shape: tuple[int, ...], dimensions: int, smallest: int) -> None:
    if len(shape) != dimensions or min(shape[1:]) < smallest:
        raise ModelError(
            f'model "{name}" needs samples with {dimensions} dimensions, all but the first >= {smallest}, '
            f'got {tuple(shape)}; "mlp" takes any shape'
        )


def _call(path: str, build: Callable[..., nn.Module], shape: Any, classes: int) -> nn.Module:
    from torch import nn

    try:
        module = build(shape, classes)
    except DfcaError:
        raise
    except Exception as error:
        raise ModelError(
            f'model.factory "{path}" failed with {type(error).__name__}: {error}{place_of(error)}; '
            f"it is called as make(shape, classes), here make({shape}, {classes})"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f'model.factory "{path}" must return a torch.nn.Module, got {type(module).__name__}')
    return module
