"""The models of the paper, one for sensor windows, and the door for any module of the user."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from dfca.errors import ConfigError, ModelError, unknown

MODELS = {
    "mlp": "one hidden layer and ReLU (the paper: 2048 units on MNIST and FEMNIST)",
    "cnn": "two blocks of conv 3x3 - ReLU - max-pool - batch norm, then a hidden layer (the paper: EMNIST, CIFAR-10)",
    "cnn1d": "two blocks of conv - ReLU - max-pool over time, then a hidden layer (sensor windows)",
}


Filters = Annotated[int, Field(ge=1, strict=True)]


class ModelOptions(BaseModel):
    """Which model, and how large."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field("mlp", description=f"one of {', '.join(MODELS)}")
    hidden: int = Field(200, ge=1, description="units of the hidden layer")
    channels: tuple[Filters, Filters] = Field(
        (32, 64),
        strict=False,  # TOML has lists, not tuples
        description="filters of the two convolutions",
    )
    factory: str | None = Field(
        None, description='a module of your own, "package.module:function" with arguments (shape, classes)'
    )


def make_factory(options: ModelOptions, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """Make the function that builds one fresh model for samples of that shape.

    Raises ConfigError for an unknown name, ModelError for a model that does not fit the shape.
    """
    if options.factory is not None:
        path, build = options.factory, _import(options.factory)
        return lambda: _call(path, build, shape, classes)
    if options.name == "mlp":
        return lambda: mlp(shape, classes, options.hidden)
    if options.name == "cnn":
        _need(options.name, shape, dimensions=3, smallest=10)
        return lambda: cnn(shape, classes, options.hidden, options.channels)
    if options.name == "cnn1d":
        _need(options.name, shape, dimensions=2, smallest=16)
        return lambda: cnn1d(shape, classes, options.hidden, options.channels)
    raise unknown("model", options.name, MODELS)


def mlp(shape: tuple[int, ...], classes: int, hidden: int = 2048) -> nn.Module:
    """Build the paper's MLP: inputs - hidden - ReLU - classes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )  # fmt: skip


def cnn(shape: tuple[int, ...], classes: int, hidden: int = 200, channels: tuple[int, int] = (32, 64)) -> nn.Module:
    """Build the paper's CNN for (channels, height, width): the order is the paper's, the widths the public code's."""
    colours, height, width = shape
    first, second = channels
    pixels = (((height - 2) // 2 - 2) // 2) * (((width - 2) // 2 - 2) // 2)
    return nn.Sequential(
        nn.Conv2d(colours, first, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(first),
        nn.Conv2d(first, second, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(second),
        nn.Flatten(), nn.Linear(second * pixels, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def cnn1d(shape: tuple[int, ...], classes: int, hidden: int = 100, channels: tuple[int, int] = (32, 64)) -> nn.Module:
    """Build a CNN over time for sensor windows (channels, time)."""
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


def _call(path: str, build: Callable[..., nn.Module], shape: tuple[int, ...], classes: int) -> nn.Module:
    try:
        module = build(shape, classes)
    except Exception as error:
        raise ModelError(
            f'model.factory "{path}" failed with {type(error).__name__}: {error}; '
            f"it is called as make(shape, classes), here make({shape}, {classes})"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f'model.factory "{path}" must return a torch.nn.Module, got {type(module).__name__}')
    return module


def _import(path: str) -> Callable[..., nn.Module]:
    module, _, function = path.partition(":")
    if not module or not function:
        raise ConfigError(f'model.factory must be "package.module:function", got "{path}"')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an experiment file stands beside the user's module; scripts lack this entry
    try:
        build: Callable[..., nn.Module] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'model.factory "{path}" cannot be imported from {os.getcwd()}: {error}') from error
    if not callable(build):
        raise ConfigError(f'model.factory "{path}" must be callable, got {type(build).__name__}')
    return build
