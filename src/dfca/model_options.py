"""Which model an experiment has: names and bounds, read and checked without torch, and the function that builds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from dfca.base.errors import ModelError
from dfca.base.files import sha256
from dfca.base.options import ExplainedModel
from dfca.models import MODELS, cropped, known_factory, on_images, own_factory, pretrained

if TYPE_CHECKING:
    from torch import nn

Filters = Annotated[int, Field(ge=1, strict=True)]


class ModelOptions(ExplainedModel):
    """Which model, and how large."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(default="mlp", description=f"one of {', '.join(MODELS)}")
    hidden: int = Field(default=200, ge=1, description="units of the hidden layer")
    channels: tuple[Filters, Filters] = Field(
        default=(32, 64),
        strict=False,  # TOML has lists, not tuples
        description="filters of the two convolutions",
    )
    standardise: bool = Field(
        default=False, description="standardise each sample before the first layer: (x - mean) / standard deviation"
    )
    start_from: str | Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        default=None,
        description="weights to start from instead of fresh ones: a safetensors file, or a list of one per cluster",
    )
    start_sha256: Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        default=None, description="SHA-256 of those files; `dfca run` finds it, so that a changed file is noticed"
    )
    factory: str | None = Field(
        default=None, description='a module of your own, "package.module:function" with arguments (shape, classes)'
    )


def make_factory(options: ModelOptions, shape: Any, classes: int, crop: int | None = None) -> Callable[[], nn.Module]:
    """Make the function that builds one fresh model for samples of that shape: a tuple of numbers, or a tuple or dict
    of such shapes where a sample is several tensors. crop: the side of the centres of images that the model sees.

    Raises ConfigError for an unknown name, ModelError for a model that does not fit the shape.
    """
    seen = cropped(shape, crop)
    if options.factory is not None:
        make = own_factory(options.factory, seen, classes)
    else:
        make = known_factory(options.name, seen, classes, options.hidden, options.channels)
    make = on_images(make, crop, options.standardise)
    if options.start_from is None:
        return make
    if options.start_sha256 is not None and options.start_sha256 != start_digests(options):
        raise ModelError(
            f"model.start_from ({options.start_from}) is not the file that the run began with, its SHA-256 differs; "
            "restore it, or run into another folder"
        )
    return pretrained(make, options.start_from)


def start_digests(options: ModelOptions) -> tuple[str, ...]:
    """Hash the files that models start from. Raises ModelError where one cannot be read."""
    given = options.start_from or ()
    digests = []
    for path in (given,) if isinstance(given, str) else given:
        try:
            digests.append(sha256(Path(path)))
        except OSError as error:
            raise ModelError(f"start_from {path} cannot be read: {error.strerror or error}") from None
    return tuple(digests)
