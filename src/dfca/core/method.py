"""How a method runs, as frozen records; reading an experiment needs no torch.

Each option is declared here once, with its default, bounds and meaning. An experiment's TOML, `simulate`, a swarm's
facts and `dfca options` read these declarations; where one of them differs, it declares the difference only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypedDict, get_args

from dfca.base.errors import ConfigError, unknown
from dfca.base.table import Table, option
from dfca.core.rules.staleness import Staleness

WeightRule = Literal["uniform", "metropolis", "samples"]
WEIGHT_RULES: tuple[WeightRule, ...] = get_args(WeightRule)
WEIGHTS_NEED_ROUNDS = (
    'mixing.weights = "samples" needs synchronous rounds: in virtual time and in a swarm a number of samples would be '
    'what a neighbour claims; use "uniform" or "metropolis"'
)
Share = Literal["trained", "all", "relay"]
SHARES: tuple[Share, ...] = get_args(Share)
RobustRule = Literal["none", "clip", "trimmed", "median"]
LIAR_SHARE = 0.2
"""Robust folds and elections are made for liars up to this share."""
PersonalSteps = int | Literal["auto"]
Precision = Literal["float32", "bf16"]
OPTIMIZERS = ("sgd", "adam", "adamw")
CODECS = ("none", "bf16", "int8", "1-bit", "top-k", "random-k")
MOST_PERSONAL_STEPS = 10_000
STAGE_EPOCHS = 5  # momentum is reset after each stage of fine-tuning
DECAY_STAGES = 3  # the learning rate decays after this many stages


def check_personal_steps(steps: object, key: str = "personal_steps") -> None:
    """Refuse what is not a number of personal steps (`rules.personal`).

    Raises ConfigError with the value and the bound.
    """
    number = isinstance(steps, int) and not isinstance(steps, bool) and 0 <= steps <= MOST_PERSONAL_STEPS
    if not number and steps != "auto":
        raise ConfigError(f'{key} must be "auto" or an integer in 0..{MOST_PERSONAL_STEPS}, got {steps!r}')


class Augment(Table):
    """Random changes of images in the local steps of a round. Models are chosen and scored on unchanged images."""

    called: ClassVar[str] = "data.augment.{}"

    crop: int | None = option(
        default=None, ge=1, description="side of a random square; models are then chosen and scored on centre crops"
    )
    flip: bool = option(default=False, description="mirror every second image, on average, left to right")
    brightness: float = option(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="largest number that is added to all pixels of an image, or subtracted",
    )
    contrast: tuple[float, float] = option(
        default=(1.0, 1.0),
        strict=False,
        description="bounds of the factor by which pixels differ from their channel's mean",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.contrast
        if not 0 <= low <= high < math.inf:
            raise ConfigError(f"data.augment.contrast must be two factors 0 <= low <= high, got {low} and {high}")


def check_images(augment: Augment, shape: object) -> None:
    """Refuse an augmentation for samples of another shape than images that are large enough.

    Raises ConfigError with what a sample is.
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


class StepTable(Table):
    """How local steps are taken, in a file, where `steps` and `epochs` exclude each other."""

    called: ClassVar[str] = "local.{}"
    usual_steps: ClassVar[int] = 5

    steps: int | None = option(
        default=None, ge=0, description="gradient steps of a client per round; default: 5, where no epochs are given"
    )
    learning_rate: float = option(default=0.1, gt=0, description="step size of SGD")
    batch_size: int | None = option(
        default=None, ge=1, demand='>= 1 or "full"', description="samples of one step; none: all"
    )
    momentum: float = option(default=0.0, ge=0, lt=1, description="of SGD")
    weight_decay: float = option(default=0.0, ge=0, description="L2 penalty of SGD")
    epochs: int | None = option(
        default=None, ge=0, since=3, description="passes over the client's samples per round, instead of steps"
    )
    decay: float = option(default=1.0, gt=0, le=1, since=3, description="factor of the learning rate after every round")
    layer_decay: Mapping[str, float] | None = option(
        default=None, since=3, description="weight decay of single layers or tensors of the model, by name"
    )

    optimizer: str = option(
        default="sgd",
        since=3,
        description='sgd, adam, adamw, or "module:function" that is called as a class of torch.optim is',
    )
    optimizer_state: Literal["fresh", "kept"] = option(
        default="fresh",
        since=3,
        description="momentum and moments of the optimiser: begun anew in every round, or kept by each client while it "
        "trains the same cluster",
    )
    clip: float | None = option(
        default=None, gt=0, since=3, description="largest norm of a gradient; larger ones are scaled down to it"
    )
    warmup_rounds: int = option(
        default=0, ge=0, since=3, description="rounds in which the learning rate grows to its full size"
    )
    cosine_rounds: int | None = option(
        default=None, ge=1, since=3, description="rounds in which the learning rate falls to almost 0 along a cosine"
    )
    precision: Precision = option(
        default="float32",
        since=3,
        description="of the passes of local steps; bf16: in bfloat16, by autocast, while weights and choices stay as "
        "they are",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS and ":" not in self.optimizer:
            raise unknown("local.optimizer", self.optimizer, (*OPTIMIZERS, "module:function"))
        for name, value in (self.layer_decay or {}).items():
            if not value >= 0:
                raise ConfigError(f"local.layer_decay.{name} must be >= 0, got {value}")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", self.usual_steps)
        self._check_steps()

    def _check_steps(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"local.steps and local.epochs exclude each other, got {self.steps} and {self.epochs}; leave one out"
            )
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(
                f'local.momentum is of optimizer "sgd", got {self.momentum} and "{self.optimizer}"; leave one out'
            )

    def options(self, augment: Augment | None = None, **changes: Any) -> LocalOptions:
        """Return the options of the core."""
        steps = self.usual_steps if self.steps is None else self.steps
        return self.narrowed(LocalOptions, **{"steps": steps, "augment": augment} | changes)


class LocalOptions(StepTable):
    """How a client trains: the paper's tau is `steps`, its gamma is `learning_rate`.

    With mini-batches, `steps` still counts gradient steps; the batches run through fresh permutations of the client's
    samples. A batch_size of None is the paper's full batch. `epochs` counts passes over the samples: every sample is in
    one batch of a pass, and the last batch of a pass may be smaller.

    Example:
        >>> import dfca
        >>> local = dfca.LocalOptions(epochs=2, batch_size=32, learning_rate=0.2, decay=0.5)
        >>> local.steps_of(samples=100), local.at(round=1).learning_rate
        (8, 0.1)
    """

    steps: int = option(default=5, ge=0, description="gradient steps of a client per round")
    augment: Augment | None = option(default=None, description="random changes of images")
    optimizer: str | Callable[..., Any] = option(  # type: ignore[assignment]
        default="sgd", description="sgd, adam, adamw, or what makes one, called as a class of torch.optim is"
    )

    def _check_steps(self) -> None:
        """Let `epochs` stand beside the default of `steps`, which it replaces."""

    def batch_of(self, samples: int) -> int | None:
        """Count the samples of a step.

        Args:
            samples: The number of the client's samples.

        Returns:
            The size of a batch; None: all samples.
        """
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

    @property
    def written_out(self) -> bool:
        """Whether `learning.dense` has these steps written out: plain SGD."""
        plain = self.optimizer == "sgd" and self.clip is None and self.augment is None
        return plain and self.precision == "float32" and not self.keeps_state

    @property
    def keeps_state(self) -> bool:
        """Whether the optimiser has a state that lasts from round to round."""
        return self.optimizer_state == "kept" and (self.optimizer != "sgd" or self.momentum > 0)

    @property
    def constant_rate(self) -> bool:
        """Whether the learning rate is the same in all rounds."""
        return self.decay == 1 and not self.warmup_rounds and self.cosine_rounds is None

    def at(self, round: int) -> LocalOptions:
        """Settle the learning rate of a round.

        Args:
            round: The client's round r, from 0.

        Returns:
            The options with a learning rate of `learning_rate` * `decay`^r * min(1, (r + 1) / (`warmup_rounds` + 1))
            * (1 + cos(pi r / R)) / 2, R = `cosine_rounds`; from round R - 1 on the cosine stays as it is there.
        """
        if self.constant_rate:
            return self
        rate = self.learning_rate * self.decay**round
        if round < self.warmup_rounds:
            rate *= (round + 1) / (self.warmup_rounds + 1)
        if self.cosine_rounds is not None:
            rate *= (1 + math.cos(math.pi * min(round, self.cosine_rounds - 1) / self.cosine_rounds)) / 2
        return replace(self, learning_rate=rate)

    def full_batch(self, steps: int, **changes: Any) -> LocalOptions:
        """Make the options of steps outside of rounds, such as a warm-up.

        Args:
            steps: The number of gradient steps.
            **changes: Options that differ.

        Returns:
            These options with full batches, and without epochs, augmentation, momentum and what was kept.
        """
        usual = {"epochs": None, "batch_size": None, "momentum": 0.0, "augment": None, "optimizer_state": "fresh"}
        return replace(self, steps=steps, **usual | changes)


class FineTuning(Table):
    """How a deployed model is fine-tuned: in stages of 5 epochs, each of which begins with fresh momentum.

    The learning rate is `rate` times that of training, and `decay` times as large after every third stage. A batch has
    at most `batch_size` samples: an epoch of n samples is ceil(n / batch_size) steps on batches of equal size.
    """

    called: ClassVar[str] = "{} of fine-tuning"

    epochs: int = option(default=0, ge=0, demand="an integer >= 0")
    batch_size: int = option(default=50, ge=1, demand="an integer >= 1")
    rate: float = option(default=0.5, gt=0, le=10)
    momentum: float = option(default=0.5, ge=0, lt=1)
    decay: float = option(default=0.8, gt=0, le=1)

    def stages(self, local: LocalOptions, samples: int) -> list[LocalOptions]:
        """List the local steps of every stage, for a client with n = `samples` that trains with `local`."""
        steps = -(-samples // self.batch_size)
        batch = -(-samples // steps)
        return [
            local.full_batch(
                steps * min(STAGE_EPOCHS, self.epochs - begin),
                batch_size=batch,
                momentum=self.momentum,
                learning_rate=local.learning_rate * self.rate * self.decay ** (stage // DECAY_STAGES),
            )
            for stage, begin in enumerate(range(0, self.epochs, STAGE_EPOCHS))
        ]


class MixingOptions(Table, kw_only=True):
    """How models of neighbours are averaged.

    In a synchronous round both aggregations are equal up to rounding, and the closed form of `batch` is one matrix
    product. It also computes a `sequential` round where weights are "metropolis", or models are relayed or all shared.
    """

    weights: WeightRule = option(
        default="uniform",
        description="weight of each copy in an average; metropolis: by the degrees of both ends of a link; samples: by "
        "the samples of its client, as McMahan's FedAvg, also on a server; not in virtual time and swarms",
    )
    aggregation: Literal["batch", "sequential"] = option(
        default="batch",
        description="batch: wait for all neighbours of a round; sequential: fold what came and continue",
    )
    share: Share = option(
        default="trained",
        description="what a client hands on: the model that it trained, all its models, or also relayed copies of a "
        "model to neighbours with few trainers of it beside them",
    )
    robust: RobustRule = option(
        default="none",
        since=2,
        description="how clients guard against neighbours that lie: clip what comes to the usual distance from the own "
        "copy, or trimmed mean or median of each weight; then votes of elections are bounded too",
    )
    private: str | None = option(
        default=None,
        since=3,
        description='tensors of the model that each client trains and keeps to itself: "head", the last layer, '
        '"adapters", as peft names them, or a regular expression that is searched in their names; for methods that '
        "gossip and draw their starts",
    )
    codec: str = option(
        default="none",
        since=3,
        description='what travels in place of a trained model: none, bf16, int8, 1-bit, top-k, random-k, or "module:'
        'function" of your own that returns a dfca.Codec; elections and copies that are asked for stay exact',
    )
    keep: float = option(
        default=0.01, gt=0, le=1, since=3, description="share of a model's numbers that top-k and random-k send"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        named = isinstance(self.codec, str) and (self.codec in CODECS or ":" in self.codec)
        if not named and self.codec is not None and not callable(getattr(self.codec, "outgoing", None)):
            raise unknown("mixing.codec", self.codec, (*CODECS, "module:function"))


class ElectionRule(Table):
    """When a candidate becomes a centre."""

    warmup_steps: int = option(default=50, ge=1, description="local steps of every client before the election")
    level: float = option(default=0.001, gt=0, lt=0.5, description="error rate of one verdict")
    support: int = option(default=2, ge=1, description="clients that a new centre must help, its own included")
    patience: int = option(default=5, ge=1, description="rejected candidates in a row that end the election")
    most: int = option(default=16, ge=1, description="largest number of clusters that an automatic election opens")


class ElectionOptions(ElectionRule):
    """How centres are elected (`rules.election`)."""

    bounded: bool = False  # votes are bounded and more rejected candidates tolerated: a share LIAR_SHARE may lie
    unasked: int = 0  # number of centres accepted without a vote
    warmup_momentum: float = option(default=0.0, ge=0, lt=1)  # begun anew as often as in training

    def warmup(self, local: LocalOptions) -> list[LocalOptions]:
        """List the stages of the warm-up of a client that trains with `local`, on full batches."""
        length = max(1, local.passes) if self.warmup_momentum else self.warmup_steps
        begins = range(0, self.warmup_steps, length)
        momentum = self.warmup_momentum
        return [local.full_batch(min(length, self.warmup_steps - begin), momentum=momentum) for begin in begins]

    def among(self, voters: int) -> ElectionOptions:
        """Return the options for this number of voters: where votes are bounded, liars may be rejected too."""
        return replace(self, patience=self.patience + self.liars(voters)) if self.bounded else self

    def liars(self, voters: int) -> int:
        """Return how many of the voters may lie: none where votes are not bounded."""
        return math.ceil(LIAR_SHARE * voters) if self.bounded else 0


class MergeOptions(Table):
    """How clusters that are not worth their data are merged during training (`rules.merging`)."""

    called: ClassVar[str] = "{} of merging"

    opens: int = option(
        default=8, ge=2, demand="an integer >= 2", description="clusters to begin with, at most one for 3 members"
    )
    first: int = option(default=10, ge=1, demand="an integer >= 1", description="rounds before the first survey")
    every: int = option(default=2, ge=1, demand="an integer >= 1", description="rounds between two surveys")
    worth: float = option(default=0.2, gt=0, description="clusters worth less are merged")
    steps: int = option(
        default=50, ge=0, demand="an integer >= 0", description="personal steps before a model is judged"
    )

    def opened(self, clients: int) -> int:
        """Count the clusters that this number of clients opens: the worth of one with fewer than 3 is unknown."""
        return min(self.opens, max(2, clients // 3))


class PrivacyOptions(Table):
    """Differential privacy of the models that clients send (`core.privacy`)."""

    called: ClassVar[str] = "privacy.{}"

    noise: float = option(
        gt=0,
        allow_inf_nan=False,
        advice="without noise epsilon is infinite; to bound gradients alone use local.clip",
        description="standard deviation of the noise that is added to every update, in units of `clip`",
    )
    clip: float = option(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="largest norm of an update; larger ones are scaled down to it",
    )
    delta: float = option(default=1e-5, gt=0, lt=1, description="probability with which epsilon may fail to hold")


class MethodKeywords(TypedDict, total=False):
    """Options of `StepTable` and `MixingOptions` as `simulate` takes them: for editors, which read no declarations."""

    steps: int | None
    epochs: int | None
    learning_rate: float
    decay: float
    batch_size: int | Literal["full"] | None
    momentum: float
    weight_decay: float
    layer_decay: Mapping[str, float] | None
    optimizer: str | Callable[..., Any]
    optimizer_state: Literal["fresh", "kept"]
    clip: float | None
    warmup_rounds: int
    cosine_rounds: int | None
    precision: Precision
    weights: WeightRule
    aggregation: Literal["batch", "sequential"]
    share: Share
    robust: RobustRule
    private: str | None
    codec: str | Any
    keep: float


class Method(MixingOptions, kw_only=True):
    """How a method runs, settled: what the algorithm says, with what the experiment or the swarm changes.

    `Setting.method` and `Facts.method` make it; `PeerOptions` and `Client` hold it, so that a new field reaches every
    driver.
    """

    local: LocalOptions = LocalOptions()
    participation: float = option(default=1.0, gt=0, le=1)  # share of the clients that take part in a round
    timeout_s: float | None = option(default=None, gt=0)  # how long `batch` and a server wait; None: for ever
    staleness: Staleness = Staleness()
    election: ElectionOptions = ElectionOptions()
    quorum: float = option(default=0.8, gt=0, le=1)  # share of a wave that must have warmed up before an election opens
    revives: bool = False  # clusters are opened later, too
    merging: MergeOptions | None = None  # None: clusters are not merged
    personal: PersonalSteps = 0  # of the personal last step
    privacy: PrivacyOptions | None = None  # None: updates are sent as they are
    codec: Any = None  # a `core.codec.Codec`; None: models travel as they are

    @property
    def observation(self) -> float:
        """What it takes to judge one model in a survey, in rounds of training."""
        return 1.0 if self.merging is None else self.merging.steps / max(1, self.local.passes)
