"""The `[data]` table of an experiment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from dfca.base.errors import ConfigError
from dfca.base.options import ExplainedModel
from dfca.core.method import Augment
from dfca.data.registry import SampleKind

PartitionName = Literal["rotated", "owner", "uneven", "dirichlet"]
TransformName = Literal[
    "auto", "none", "rotation", "axis-rotation", "label-permutation", "label-swap", "noise", "blur", "dynamics"
]
TURNS = ("auto", "rotation", "axis-rotation", "dynamics")
"""Transforms that have angles; auto may mean one of them."""
GRADED = ("label-swap", "noise", "blur")
"""Transforms of which clusters have more or less."""
Skew = Literal["none", "consistent", "inconsistent", "mixed"]


class DataOptions(ExplainedModel):
    """Which data, who holds what, and how the clusters differ: the keys of `[data]` in an experiment file.

    Example:
        >>> import dfca
        >>> dfca.DataOptions(name="digits", samples_per_client=60).partition
        'rotated'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(default="digits", description="the data set: `dfca data list` shows them")
    factory: str | None = Field(
        default=None,
        description='data of your own, "package.module:function" with arguments (clients, seed): it returns a Split, a '
        "list with the samples of each client, or arrays; all other keys but test_share and distributions are then "
        "without meaning",
    )
    distributions: int | None = Field(
        default=None,
        ge=1,
        description="true clusters in the data; default: as many as `clusters`, which may then not be auto",
    )
    partition: PartitionName = Field(
        default="rotated",
        description="rotated: each cluster deals a fresh permutation of the whole set evenly to its clients (IFCA's "
        "split); uneven: likewise with lognormal sizes; dirichlet: likewise with label mixes drawn per client; owner: "
        "one writer or subject per client",
    )
    samples_per_client: int | None = Field(
        default=None,
        ge=1,
        description="training samples of a client (uneven: their mean); default: as many as the deal gives",
    )
    test_samples_per_client: int | None = Field(
        default=None, ge=1, description="test samples of a client; default: as many as the deal gives"
    )
    transform: TransformName = Field(
        default="auto",
        description="how clusters differ; auto: axis-rotation for sensor windows, dynamics for series to forecast, "
        "rotation for images, none for images under partition owner; label-permutation: all labels in another order; "
        "label-swap: some pairs of labels swapped; noise: normal noise added; blur: images averaged over 3 x 3 pixels",
    )
    levels: tuple[Annotated[float, Field(ge=0, le=100)], ...] | None = Field(
        default=None,
        strict=False,  # TOML has lists, not tuples
        description="how much of the transform each cluster has: standard deviations of noise (default 0, 0.15, 0.3, "
        "...), times of blur (0, 1, 2, ...), pairs of swapped labels (0, 1, 1, ...)",
    )
    cluster_shares: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        default=None,
        strict=False,
        description="how the clients divide into clusters, one number per cluster ([3, 2, 1]); default: evenly",
    )
    placement: Literal["random", "blocks"] = Field(
        default="random",
        description="which clients are of a cluster: random, or blocks of consecutive numbers, which are near each "
        "other on a ring or torus",
    )
    angles: tuple[float, ...] | None = Field(
        default=None,
        strict=False,  # TOML has lists, not tuples
        description="degrees of rotation, one per cluster; default: j * 360 / clusters for cluster j",
    )
    skew: Skew = Field(
        default="none",
        description="a share 1 - alpha of each client's samples has another cluster's transform; consistent: the same "
        "other one for a whole cluster; inconsistent: drawn per client; mixed: likewise, and the share of its own "
        "is drawn per client too, evenly from alpha to 1",
    )
    alpha: float = Field(
        default=1.0, gt=0, le=1, description="share of a client's samples with its own cluster's transform"
    )
    spread: float = Field(
        default=0.5,
        ge=0,
        le=5,
        description="uneven: sizes in a cluster are proportional to lognormal(0, spread) draws",
    )
    concentration: float = Field(
        default=0.5, gt=0, description="dirichlet: label mixes are Dirichlet(concentration); small is one-sided"
    )
    minimum_samples: int = Field(default=1, ge=1, description="owner: owners with fewer samples are left out")
    test_share: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="share of the samples kept for testing where the data set has no test part, and of each owner's "
        "samples under partition owner",
    )

    augment: Augment | None = Field(
        default=None,
        description="random changes of images in the local steps of every round: a table with crop, flip, brightness "
        "and contrast; clusters are chosen and models scored on unchanged images, or on the centres of a crop's size",
    )
    drift_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the clients whose samples change half-way to a distribution not seen before",
    )
    drift_at: float = Field(default=0.5, gt=0, lt=1, description="when they change, as a share of the rounds")
    drift_angle: float = Field(default=45.0, description="degrees of rotation of the distribution that they change to")

    @model_validator(mode="before")
    @classmethod
    def _name_own_data(cls, values: Any) -> Any:
        """Call data of the user's own by the name of its function, unless it has one; tables and reports show it."""
        if isinstance(values, dict) and isinstance(values.get("factory"), str) and "name" not in values:
            return {**values, "name": values["factory"]}
        return values

    @model_validator(mode="after")
    def _check_pairs(self) -> DataOptions:
        if self.factory is not None and (given := sorted(self.model_fields_set & _OF_NAMED_DATA & self._changed())):
            raise ValueError(f"{given[0]} has no meaning with factory, which says itself who holds what; leave it out")
        if self.skew == "none" and self.alpha < 1:
            raise ValueError(f'alpha must be 1 without skew, got {self.alpha}; set skew = "consistent"')
        if self.skew != "none" and self.transform == "none":
            raise ValueError(f'skew = "{self.skew}" needs a transform other than "none"')
        if self.angles is not None and self.transform not in TURNS:
            raise ValueError(f'angles have no meaning with transform = "{self.transform}"; leave them out')
        if self.levels is not None and self.transform not in GRADED:
            raise ValueError(
                f'levels have no meaning with transform = "{self.transform}"; leave them out, or use '
                f"{', '.join(GRADED)}"
            )
        if self.drift_share and self.transform not in TURNS:
            raise ValueError(f'drift_share needs a rotation, got transform = "{self.transform}"')
        return self

    def _changed(self) -> set[str]:
        """Name the keys that have another value than their default; a stored config gives all of them."""
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}


# What divides a named data set among clients.
_OF_NAMED_DATA = set(DataOptions.model_fields) - {"factory", "name", "distributions", "test_share", "augment"}


def resolve(options: DataOptions, kind: SampleKind) -> TransformName:
    """Return which transform `auto` means, and refuse one that does not fit the kind of data."""
    name = options.transform
    if (kind == "series") != (name == "dynamics") and (kind != "series" or name != "auto"):
        fits = 'use "dynamics"' if kind == "series" else 'it is for data "forecast"'
        raise ConfigError(f'transform "{name}" does not fit {options.name} ({kind}); {fits}')
    if kind == "series":
        return "dynamics"
    if name == "auto":
        if kind == "window":
            name = "axis-rotation"
        else:
            name = "none" if options.partition == "owner" else "rotation"
    if (name, kind) in (("rotation", "window"), ("axis-rotation", "image")):
        fitting = "axis-rotation" if kind == "window" else "rotation"
        raise ConfigError(f'transform "{name}" does not fit {options.name} ({kind}s); use "{fitting}"')
    if name == "blur" and kind != "image":
        raise ConfigError(f'transform "blur" does not fit {options.name} ({kind}s); it is for images')
    if name == "none" and options.skew != "none":
        raise ConfigError(f'skew "{options.skew}" needs a transform; set data.transform')
    return name


def refuse_options(options: DataOptions) -> None:
    """Refuse options that need labels, images or owners. Raises ConfigError."""
    wrong = {
        "partition": (options.partition != "rotated", f'"{options.partition}"', "it deals labelled samples or owners"),
        "skew": (options.skew != "none", f'"{options.skew}"', "it mixes the transforms of images"),
        "angles": (options.angles is not None, str(options.angles), "they turn images"),
    }
    for key, (given, value, reason) in wrong.items():
        if given:
            raise ConfigError(
                f"data.{key} = {value} does not fit {options.name}, which has numbers to forecast and no labels: "
                f"{reason}; leave it out"
            )
