"""Which model an experiment has: names and bounds, read and checked without torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from dfca.base.options import ExplainedModel
from dfca.models import MODELS

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
