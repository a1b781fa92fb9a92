"""Options of clients and elections as plain records, and names of rules: reading an experiment does not need torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dfca.base.errors import ConfigError

WeightRule = Literal["uniform", "metropolis"]
WEIGHT_RULES: tuple[WeightRule, ...] = ("uniform", "metropolis")
Share = Literal["trained", "all", "relay"]
SHARES: tuple[Share, ...] = ("trained", "all", "relay")
RobustRule = Literal["none", "clip", "trimmed", "median"]
ROBUST_RULES: tuple[RobustRule, ...] = ("none", "clip", "trimmed", "median")
LIAR_SHARE = 0.2
"""Robust folds and elections are made for liars up to this share."""
PersonalSteps = int | Literal["auto"]
MOST_PERSONAL_STEPS = 10_000


def check_personal_steps(steps: object, key: str = "personal_steps") -> None:
    """Refuse what is no number of personal steps (`rules.personal`).

    Raises ConfigError.
    """
    number = isinstance(steps, int) and not isinstance(steps, bool) and 0 <= steps <= MOST_PERSONAL_STEPS
    if not number and steps != "auto":
        raise ConfigError(f'{key} must be "auto" or an integer in 0..{MOST_PERSONAL_STEPS}, got {steps!r}')


@dataclass(frozen=True)
class Augment:
    """Random changes of images in the local steps of a round. Models are chosen and scored on unchanged images."""

    crop: int | None = None  # side of a random square; models are then chosen and scored on centre crops
    flip: bool = False  # mirror every second image, on average, left to right
    brightness: float = 0.0  # largest number that is added to all pixels of an image, or subtracted
    contrast: tuple[float, float] = (1.0, 1.0)  # bounds of the factor by which pixels differ from their channel's mean

    def __post_init__(self) -> None:
        low, high = self.contrast
        if self.crop is not None and self.crop < 1:
            raise ConfigError(f"data.augment.crop must be >= 1, got {self.crop}")
        if not 0 <= self.brightness < math.inf:
            raise ConfigError(f"data.augment.brightness must be >= 0 and finite, got {self.brightness}")
        if not 0 <= low <= high < math.inf:
            raise ConfigError(f"data.augment.contrast must be two factors 0 <= low <= high, got {low} and {high}")


def check_images(augment: Augment, shape: object) -> None:
    """Refuse an augmentation for samples of another shape than images that are large enough.

    Raises:
        ConfigError: With what a sample is.
    """
    if not isinstance(shape, tuple) or len(shape) != 3 or not all(isinstance(size, int) for size in shape):
        raise ConfigError(
            f"data.augment is for images (channels, height, width), and a sample has shape {shape}; leave it out"
        )
    _, height, width = shape
    if augment.crop is not None and augment.crop > min(height, width):
        raise ConfigError(
            f"data.augment.crop must be <= {min(height, width)}, the smaller side of the images ({height} x {width}), "
            f"got {augment.crop}"
        )


@dataclass(frozen=True)
class LocalOptions:
    """How a client trains: the paper's tau is `steps`, its gamma is `learning_rate`.

    batch_size None is the paper's full batch. With mini-batches, `steps` still counts gradient steps; the batches run
    through fresh permutations of the client's samples. `epochs` counts passes over the samples and replaces `steps`:
    every sample is in one batch of a pass, and the last batch of a pass may be smaller. `decay` multiplies the learning
    rate after every round. `layer_decay` replaces `weight_decay` for tensors and layers of the model, by name.
    """

    steps: int = 5
    learning_rate: float = 0.1
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int | None = None
    decay: float = 1.0
    layer_decay: Mapping[str, float] | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 0:
            raise ConfigError(f"local.epochs must be >= 0, got {self.epochs}")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"local.decay must be in (0, 1], got {self.decay}")
        for name, value in (self.layer_decay or {}).items():
            if not value >= 0:
                raise ConfigError(f"local.layer_decay.{name} must be >= 0, got {value}")
        if self.steps < 0:
            raise ConfigError(f"local.steps must be >= 0, got {self.steps}")
        if not self.learning_rate > 0:
            raise ConfigError(f"local.learning_rate must be > 0, got {self.learning_rate}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f'local.batch_size must be >= 1 or "full", got {self.batch_size}')
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"local.momentum must be in [0, 1), got {self.momentum}")
        if not self.weight_decay >= 0:
            raise ConfigError(f"local.weight_decay must be >= 0, got {self.weight_decay}")

    def batch_of(self, samples: int) -> int | None:
        """Return how many of a client's samples a step takes; None: all."""
        return self.batch_size if self.batch_size is not None and self.batch_size < samples else None

    def steps_of(self, samples: int) -> int:
        """Count the gradient steps of a round.

        Args:
            samples: The number of the client's samples.

        Returns:
            `steps`, or the batches of `epochs` passes.
        """
        if self.epochs is None:
            return self.steps
        return self.epochs * -(-samples // (self.batch_of(samples) or max(1, samples)))

    @property
    def passes(self) -> int:
        """Count the full-batch steps that are as many passes over the samples."""
        return self.steps if self.epochs is None else self.epochs

    def at(self, round: int) -> LocalOptions:
        """Settle the learning rate of a round.

        Args:
            round: The client's round, from 0.

        Returns:
            The options with a learning rate of `learning_rate` * `decay`^round.
        """
        return self if self.decay == 1 else replace(self, learning_rate=self.learning_rate * self.decay**round)

    def full_batch(self, steps: int, **changes: Any) -> LocalOptions:
        """Make the options of steps outside of rounds, such as a warm-up.

        Args:
            steps: The number of gradient steps.
            **changes: Options that differ.

        Returns:
            These options with full batches, and without epochs, augmentation and momentum.
        """
        usual = {"epochs": None, "batch_size": None, "momentum": 0.0, "augment": None}
        return replace(self, steps=steps, **usual | changes)


@dataclass(frozen=True)
class ElectionOptions:
    """How centres are elected.

    warmup_steps: local steps of every client before the election; warmup_momentum: of them, begun anew as often as in
    training. level: error rate of one verdict. support: clients that a new centre must help, its own included.
    patience: rejected candidates in a row that end the election. most: largest number of clusters that an automatic
    election opens. bounded: votes are bounded and candidates that stand in vain are borne, so that a share LIAR_SHARE
    of liars does not decide (`rules.election`). unasked: so many centres are accepted whatever the verdicts.
    """

    warmup_steps: int = 50
    level: float = 0.001
    support: int = 2
    patience: int = 5
    most: int = 16
    bounded: bool = False
    unasked: int = 0
    warmup_momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ConfigError(f"warmup_steps must be >= 1, got {self.warmup_steps}")
        if not 0 <= self.warmup_momentum < 1:
            raise ConfigError(f"warmup_momentum must be in [0, 1), got {self.warmup_momentum}")
        if not 0 < self.level < 0.5:
            raise ConfigError(f"level must be in (0, 0.5), got {self.level}")
        for name, value in (("support", self.support), ("patience", self.patience), ("most", self.most)):
            if value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")

    def warmup(self, local: LocalOptions) -> list[LocalOptions]:
        """List the stages of the warm-up of a client that trains with `local`, on full batches."""
        length = max(1, local.passes) if self.warmup_momentum else self.warmup_steps
        begins = range(0, self.warmup_steps, length)
        momentum = self.warmup_momentum
        return [local.full_batch(min(length, self.warmup_steps - begin), momentum=momentum) for begin in begins]

    def among(self, voters: int) -> ElectionOptions:
        """Return the options of an election of so many voters: where votes are bounded, liars may stand in vain too."""
        return replace(self, patience=self.patience + self.liars(voters)) if self.bounded else self

    def liars(self, voters: int) -> int:
        """Return how many of so many voters may lie: none where votes are not bounded."""
        return math.ceil(LIAR_SHARE * voters) if self.bounded else 0


@dataclass(frozen=True)
class MergeOptions:
    """How clusters that are not worth their data are merged while training goes on (`rules.merging`).

    opens: clusters that the election opens before it asks for verdicts, at most one for 3 clients. first: rounds of
    training before the first survey. every: rounds between two surveys. worth: clusters worth less are merged. steps:
    personal steps before a model is judged.
    """

    opens: int = 8
    first: int = 10
    every: int = 2
    worth: float = 0.2
    steps: int = 50

    def __post_init__(self) -> None:
        for name, fewest in (("opens", 2), ("first", 1), ("every", 1), ("steps", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < fewest:
                raise ConfigError(f"{name} of merging must be an integer >= {fewest}, got {value!r}")
        if not self.worth > 0:
            raise ConfigError(f"worth of merging must be > 0, got {self.worth!r}")

    def opened(self, clients: int) -> int:
        """Count the clusters that so many clients open: with fewer than 3 each, nobody could tell what one is worth."""
        return min(self.opens, max(2, clients // 3))
