"""The `[data]` table of an experiment."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PartitionName = Literal["rotated", "owner", "uneven", "dirichlet"]
TransformName = Literal["auto", "none", "rotation", "axis-rotation", "label-permutation"]
Skew = Literal["none", "consistent", "inconsistent"]


class DataOptions(BaseModel):
    """Which data, who holds what, and how the clusters differ."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field("digits", description="the data set: `dfca data list` shows them")
    distributions: int | None = Field(
        None, ge=1, description="true clusters in the data; default: as many as `clusters`, which may then not be auto"
    )
    partition: PartitionName = Field(
        "rotated",
        description="rotated: each cluster deals a fresh permutation of the whole set evenly to its clients (IFCA's "
        "split); uneven: likewise with lognormal sizes; dirichlet: likewise with label mixes drawn per client; owner: "
        "one writer or subject per client",
    )
    samples_per_client: int | None = Field(
        None,
        ge=1,
        description="training samples of a client (uneven: their mean); default: as many as the deal gives",
    )
    test_samples_per_client: int | None = Field(
        None, ge=1, description="test samples of a client; default: as many as the deal gives"
    )
    transform: TransformName = Field(
        "auto",
        description="how clusters differ; auto: axis-rotation for sensor windows, rotation for images, none for images "
        "under partition owner",
    )
    angles: tuple[float, ...] | None = Field(
        None,
        strict=False,  # TOML has lists, not tuples
        description="degrees of rotation, one per cluster; default: j * 360 / clusters for cluster j",
    )
    skew: Skew = Field(
        "none",
        description="a share 1 - alpha of each client's samples has another cluster's transform; consistent: the same "
        "other one for a whole cluster; inconsistent: drawn per client",
    )
    alpha: float = Field(1.0, gt=0, le=1, description="share of a client's samples with its own cluster's transform")
    spread: float = Field(
        0.5,
        ge=0,
        le=5,
        description="uneven: sizes in a cluster are proportional to lognormal(0, spread) draws",
    )
    concentration: float = Field(
        0.5, gt=0, description="dirichlet: label mixes are Dirichlet(concentration); small is one-sided"
    )
    minimum_samples: int = Field(1, ge=1, description="owner: owners with fewer samples are left out")
    test_share: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="share of the samples kept for testing where the data set has no test part, and of each owner's "
        "samples under partition owner",
    )

    drift_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the clients whose samples change half-way to a distribution not seen before",
    )
    drift_at: float = Field(0.5, gt=0, lt=1, description="when they change, as a share of the rounds")
    drift_angle: float = Field(45.0, description="degrees of rotation of the distribution that they change to")

    @model_validator(mode="after")
    def _check_pairs(self) -> DataOptions:
        if self.skew == "none" and self.alpha < 1:
            raise ValueError(f'alpha must be 1 without skew, got {self.alpha}; set skew = "consistent"')
        if self.skew != "none" and self.transform == "none":
            raise ValueError(f'skew = "{self.skew}" needs a transform other than "none"')
        if self.angles is not None and self.transform in ("none", "label-permutation"):
            raise ValueError(f'angles have no meaning with transform = "{self.transform}"; leave them out')
        if self.drift_share and self.transform in ("none", "label-permutation"):
            raise ValueError(f'drift_share needs a rotation, got transform = "{self.transform}"')
        return self
