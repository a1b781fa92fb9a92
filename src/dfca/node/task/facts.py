"""The facts of a swarm: what all its members share, and what never changes.

Facts are JSON. The name of a swarm is the SHA-256 of their canonical bytes (sorted keys, no spaces), so a device that
knows the name can check facts from any source. Facts run no code: a model or codec of the founder's
own (`model.factory`, `codec`) is a name that each device must allow in its own settings.

    facts = Facts.from_bytes(data)
    model = build(facts)                                      # learner.py: the model, checked against the facts
    options = facts.peer_options(number, neighbours)          # for `peer.Peer`
    client = facts.client(number, degree, (x, y), model)      # for `node.work.worker.Worker`
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from dfca.base.errors import ConfigError
from dfca.base.imports import is_import
from dfca.base.renamed import current, earlier, refuse_earlier
from dfca.base.table import Table, option
from dfca.base.validation import check
from dfca.core.method import (
    CODECS,
    MOST_PERSONAL_STEPS,
    OPTIMIZERS,
    Augment,
    ElectionOptions,
    ElectionRule,
    MergeOptions,
    Method,
    MixingOptions,
    PrivacyOptions,
    StepTable,
    check_images,
)
from dfca.core.rules.staleness import Staleness

if TYPE_CHECKING:
    from torch import Tensor

    from dfca.core.algorithm import Algorithm
    from dfca.core.client import Client
    from dfca.core.codec import Codec
    from dfca.core.learning.parts import Layout
    from dfca.node.task.learner import Architecture
    from dfca.peer.records.options import PeerOptions

VERSION = 1  # of these facts and of the protocol between nodes; nodes of different versions refuse each other
SwarmAlgorithm = Literal["dfca-auto", "dfca-fi", "dfca-gi", "dfca-li", "dfedavgm", "local"]
"""Those that need neither a server nor the true clusters."""
SwarmTask = Literal["classification", "regression", "forecasting", "multilabel"]
ALGORITHMS: tuple[str, ...] = get_args(SwarmAlgorithm)
PRIVATE = ("dfca-gi", "dfca-li", "dfedavgm")
"""Those that send nothing but models that they trained: epsilon is of these."""
LARGEST = 16 * 2**20  # bytes of facts that are read: names and scaling of 100,000 features take 7 MB
MOST_FLOATS = 2**29  # the largest model, 2 GiB: facts that are received cannot ask for more memory than that
MOST_FEATURES = 1_000_000
FOREVER = 2**53  # the rounds of a swarm that never ends

Name = Annotated[str, Field(min_length=1, max_length=200)]
Size = Annotated[int, Field(ge=1, le=65_536, strict=True)]


class ModelFacts(Table):
    """Which model, and how large; `size` and `digest` tell whether two devices build the same one."""

    name: Literal["mlp", "cnn", "cnn-tutorial", "cnn1d", "factory"] = option(
        default="mlp", description="mlp, cnn, cnn-tutorial, cnn1d, or factory"
    )
    hidden: tuple[Size, ...] = option(
        default=(100,), strict=False, min_length=1, max_length=8, description="of the hidden layers; a cnn has one"
    )
    channels: tuple[Size, Size] = option(default=(32, 64), strict=False, description="filters of the two convolutions")
    factory: str | None = option(
        default=None, max_length=200, description='"package.module:function", called as make(shape, classes)'
    )
    standardise: bool = option(default=False, since=3, description="standardise each sample before the first layer")
    size: int = option(default=0, ge=0, le=MOST_FLOATS, description="P: floats of one model; 0 until it is built")
    digest: str = option(
        default="",
        pattern=r"^[0-9a-f]{0,64}$",
        description="SHA-256 of the tensors' names and shapes, and of the values of constants",
    )
    weights: str | None = option(
        default=None,
        since=3,
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of the safetensors file that all devices start from; none: they start afresh",
    )

    def __post_init__(self) -> None:
        if (self.name == "factory") != (self.factory is not None):
            raise ValueError('factory is given exactly where name is "factory"')
        if self.name != "mlp" and len(self.hidden) != 1:
            raise ValueError(f"hidden has one layer in a {self.name}, got {len(self.hidden)}")


class InputFacts(Table):
    """What one sample is: named features in this order, or an array of a shape."""

    features: tuple[Name, ...] = option(default=(), strict=False, max_length=MOST_FEATURES, description="columns")
    shape: tuple[Size, ...] = option(default=(), strict=False, max_length=4, description="of an array without names")
    ignored: tuple[Name, ...] = option(default=(), strict=False, max_length=1000, description="columns to leave out")
    kind: Literal["table", "array", "images", "tokens", "series"] = option(
        default="table",
        description="images: 0..255, channels first; tokens: integers, which are not scaled; series: rows in the order "
        "of time",
    )
    window: int = option(
        default=0, ge=0, le=65_536, since=3, description="rows that a forecast looks at, of the target and the features"
    )
    horizon: int = option(default=0, ge=0, le=2**31, since=3, description="rows ahead that a forecast is of")

    def __post_init__(self) -> None:
        series = self.kind == "series"
        if series != (self.window > 0) or series != (self.horizon > 0):
            raise ValueError("window and horizon are >= 1 for a series, and for nothing else")
        if bool(self.features) == bool(self.shape) and not (series and not self.shape):
            raise ValueError("give features or shape, one of the two")
        if len(set(self.features)) < len(self.features):
            raise ValueError(f"the feature {Counter(self.features).most_common(1)[0][0]!a} stands there twice")
        if math.prod(self.sample_shape) > MOST_FEATURES:
            raise ValueError(f"a sample must have at most {MOST_FEATURES} numbers, got {math.prod(self.sample_shape)}")
        if (self.kind == "table") != bool(self.features) and not series:
            raise ValueError(f'kind "{self.kind}" and {"features" if self.features else "a shape"} do not fit')

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        if self.kind == "series":
            return 1 + len(self.features), self.window
        return self.shape or (len(self.features),)


class ScalingFacts(Table):
    """x' = curve((x - mean) / scale): one number for all, one per feature, or one per channel (first dimension)."""

    mean: tuple[float, ...] = option(default=(0.0,), strict=False, min_length=1, max_length=MOST_FEATURES)
    scale: tuple[Annotated[float, Field(gt=0)], ...] = option(
        default=(1.0,), strict=False, min_length=1, max_length=MOST_FEATURES
    )

    curve: Literal["asinh", "linear", "none"] = "asinh"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.scale):
            raise ValueError(f"mean and scale must be of one length, got {len(self.mean)} and {len(self.scale)}")
        # What a float32 cannot hold would become infinite on its way into the model.
        if any(abs(value) > 3e38 for value in self.mean) or any(not 1e-37 < value < 3e38 for value in self.scale):
            raise ValueError("mean and scale must be numbers that a float32 holds, and scale at least 1e-37")


class TargetFacts(Table):
    """How the numbers that are predicted are scaled, by those of the founder: y' = (y - mean) / scale."""

    mean: float = option(default=0.0, ge=-1e30, le=1e30)
    scale: float = option(default=1.0, gt=1e-30, le=1e30)


MANY_STEPS = {"le": 1_000_000}


class LocalFacts(
    StepTable,
    steps={"ge": 1, "le": 100_000, "description": "steps between two exchanges; default: 20, without epochs"},
    learning_rate={"le": 1e6},
    batch_size={"default": 32},
    weight_decay={"le": 1e6},
    epochs={"ge": 1, "le": 100_000},
):
    """How a member trains between two exchanges.

    The defaults reach 0.94 on 12 devices with digits turned four ways (`pytest -m slow -k turned_digits`); mini-batches
    cost the same on a device with a million samples.
    """

    usual_steps: ClassVar[int] = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f'optimizer must be {", ".join(OPTIMIZERS)}: facts run no code, got "{self.optimizer}"')


class ElectionFacts(ElectionRule, warmup_steps=MANY_STEPS, most={"le": 1024}):
    """How the members elect the models that clusters begin with (`rules.election`)."""

    quorum: float = option(default=0.8, gt=0, le=1, description="share of the members that must have warmed up")


class MergingFacts(MergeOptions, opens={"le": 36}, first=MANY_STEPS, every=MANY_STEPS, steps=MANY_STEPS):
    """How the members merge clusters that are not worth their data (`rules.merging`)."""


class StalenessFacts(Staleness, after={"default": 4.0}):
    """How a message weighs by its age."""


class Facts(MixingOptions, aggregation={"default": "sequential"}, kw_only=True):
    """What all members of a swarm share."""

    version: int = option(default=VERSION, ge=1)
    name: str = option(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="of the swarm, for people")
    founder: str = option(pattern=r"^[a-z2-7]{52}$", description="device ID of the founder, or ID of the authority")
    nonce: str = option(
        default_factory=lambda: secrets.token_hex(16),
        pattern=r"^[0-9a-f]{32}$",
        description="makes two swarms two, even if all else is equal",
    )
    seed: int = option(default=0, ge=0, lt=2**63)
    algorithm: SwarmAlgorithm = "dfca-auto"
    clusters: int | None = option(default=None, ge=1, le=1024, description="none: found by the members")
    rounds: int = option(default=0, ge=0, le=FOREVER, description="0: for ever")
    starts_with: int = option(
        default=1, ge=1, le=100_000, description="members that must have joined before anybody begins to train"
    )
    model: ModelFacts = ModelFacts()
    inputs: InputFacts
    task: SwarmTask = option(default="classification", since=2, description="what is predicted")
    label: str = option(
        default="label",
        min_length=1,
        max_length=4096,
        description="the column with the class, the number or the series, where a device names no other; several "
        "labels with commas between",
    )
    classes: tuple[Name, ...] = option(
        default=(), strict=False, max_length=65_536, description="or labels; none where numbers are predicted"
    )
    target: TargetFacts = TargetFacts()
    scaling: ScalingFacts = ScalingFacts()
    local: LocalFacts = LocalFacts()
    augment: Augment | None = option(
        default=None, since=3, description="random changes of images while a member trains: crop, flip, ..."
    )
    personal: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_PERSONAL_STEPS)] = option(
        default=0,
        since=2,
        description="steps of a member on its own samples before it uses its model; auto: it picks them",
    )
    privacy: PrivacyOptions | None = option(
        default=None, since=3, description="how members clip and noise what they send; none: they do not"
    )
    election: ElectionFacts = ElectionFacts()
    revives: bool | None = option(default=None, description="open clusters later too; none: as the algorithm says")
    merging: MergingFacts | None = option(
        default=None, since=2, description="how clusters are merged; none: the election decides how many there are"
    )
    timeout_s: float | None = option(default=None, gt=0, description='how long "batch" waits; none: for ever')
    staleness: StalenessFacts = StalenessFacts()
    codec_digest: str = option(
        default="",
        since=3,
        pattern=r"^([0-9a-f]{64})?$",
        description="SHA-256 of the source of a codec that is code of the founder's",
    )
    payload: Literal["float32", "bf16", "int8"] = "float32"
    compression: Literal["none", "zstd"] = "none"

    def __post_init__(self) -> None:
        if self.task == "classification" and len(self.classes) < 2:
            raise ValueError(f"classes must be at least 2 long, got {len(self.classes)}")
        if self.task == "multilabel" and not self.classes:
            raise ValueError("classes must name at least one label")
        if self.predicts_numbers and self.classes:
            raise ValueError(f"a {self.task} has no classes")
        if not self.predicts_numbers and self.target != TargetFacts():
            raise ValueError("target is for a regression")
        if (self.task == "forecasting") != (self.inputs.kind == "series"):
            raise ValueError("a forecasting has inputs of kind series, and nothing else has")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError(f"the class {Counter(self.classes).most_common(1)[0][0]!a} stands there twice")
        if self.clusters is None and self.algorithm in ("dfca-gi", "dfca-li"):
            raise ValueError(f'clusters must be given for "{self.algorithm}"; "dfca-auto" finds them')
        if self.private is not None and self.algorithm not in (*PRIVATE, "local"):
            raise ValueError(f'private is for {", ".join(PRIVATE)}, got "{self.algorithm}"; leave it out')
        try:
            re.compile(self.private or "")
        except re.error as error:
            raise ValueError(
                f'private must be "head", "adapters" or a regular expression, got "{self.private}": {error}'
            ) from None
        if self.codec not in CODECS and not is_import(self.codec):
            raise ValueError(f'codec must be {", ".join(CODECS)} or "module:function", got "{self.codec}"')
        if self.private is not None and self.codec != "none":
            raise ValueError(f'codecs are of whole models, got "{self.codec}" with private; leave one of the two out')
        if is_import(self.codec) != bool(self.codec_digest):
            raise ValueError(f'codec_digest is given exactly where codec is "module:function", got "{self.codec}"')
        if self.privacy is not None and self.algorithm not in PRIVATE:
            raise ValueError(
                f'privacy is for {", ".join(PRIVATE)}, got "{self.algorithm}", which sends losses or nothing: epsilon '
                "would not cover it"
            )
        if self.privacy is not None and self.personal == "auto":
            raise ValueError('personal "auto" sends losses, which epsilon would not cover; give a number of steps')
        shape, count = self.inputs.sample_shape, len(self.scaling.mean)
        if count not in (1, shape[0]):
            raise ValueError(f"scaling must have 1 number or {shape[0]} (the first dimension), got {count}")
        if self.augment is not None:
            check_images(self.augment, shape)

    # Bytes and names.

    def to_bytes(self) -> bytes:
        """Write the canonical bytes: JSON with sorted keys and without spaces, ASCII."""
        # Without keys that came later and have their defaults: a swarm keeps the name that it had before them.
        plain = self.as_of(1)
        if not self.predicts_numbers:
            del plain["target"]
        plain["algorithm"] = earlier(self.algorithm)  # so are the bytes of a swarm of 0.2, and its nodes may join
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Facts:
        """Read facts that somebody handed on. Raises ConfigError with everything that is wrong."""
        if len(data) > LARGEST:
            raise ConfigError(f"the swarm's facts must be at most {LARGEST} bytes, got {len(data)}")
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the swarm's facts are not JSON ({error}); ask for a new invite") from None
        if not isinstance(content, dict):
            raise ConfigError(f"the swarm's facts must be a table, got a {type(content).__name__}")
        version = content.get("version")
        if isinstance(version, int) and not isinstance(version, bool) and version != VERSION:
            older = "this device" if version > VERSION else "the other devices"
            raise ConfigError(
                f"the swarm speaks version {version} of the protocol and this dfca version {VERSION}; upgrade {older}"
            )
        if isinstance(content.get("algorithm"), str):
            content["algorithm"] = current(content["algorithm"])
        return cls.checked(content)

    @classmethod
    def checked(cls, content: dict[str, Any]) -> Facts:
        """Make facts from a table. Raises ConfigError with everything that is wrong."""
        refuse_earlier(content.get("algorithm"))
        return check(content, cls, "the swarm's facts")

    @property
    def swarm_id(self) -> str:
        """The name of the swarm: SHA-256 of the canonical bytes in lower-case base32, 52 characters."""
        return base64.b32encode(hashlib.sha256(self.to_bytes()).digest()).decode().rstrip("=").lower()

    # What a driver needs.

    @property
    def predicts_numbers(self) -> bool:
        """Whether one number is predicted, on a scale of the swarm's."""
        return self.task in ("regression", "forecasting")

    def describe_task(self) -> str:
        """Say in a few words what is predicted."""
        if self.task == "forecasting":
            return f"forecasts {self.label} {self.inputs.horizon} ahead from {self.inputs.window}"
        if self.task == "regression":
            return f"predicts {self.label}"
        return f"{len(self.classes)} {'labels' if self.task == 'multilabel' else 'classes'}"

    @property
    def outputs(self) -> int:
        """How many numbers the model gives for a sample."""
        return len(self.classes) or 1

    @property
    def crop(self) -> int | None:
        """The side of the centres of images that the model sees; None: all."""
        return None if self.augment is None else self.augment.crop

    @property
    def model_size(self) -> int:
        """P: floats of one model."""
        if self.model.size == 0:
            raise ConfigError("the swarm's facts do not say how large the model is; the founder must build it first")
        return self.model.size

    def make_algorithm(self) -> Algorithm:
        """Make the algorithm's record, with the swarm's own way of electing."""
        from dfca import algorithms
        from dfca.core.rules.surveys import merging_of

        algorithm = algorithms.get(self.algorithm)
        surveys = algorithm.merging and self.merging and self.merging.narrowed(MergeOptions)
        return replace(
            algorithm if self.private is None else algorithm.keeping(self.private),
            election=self.election.narrowed(ElectionOptions, bounded=self.robust != "none"),
            revives=algorithm.revives if self.revives is None else self.revives and algorithm.start == "elected",
            merging=merging_of(surveys, self.rounds or None, self.clusters),
        )

    def method(self, codec: Codec | None = None) -> Method:
        """Settle what the members run: the algorithm's options with the swarm's. codec: `learner.trusted_codec`."""
        algorithm = self.make_algorithm()
        return self.narrowed(
            Method,
            local=self.local.options(self.augment),
            staleness=self.staleness.narrowed(Staleness),
            election=algorithm.election,
            revives=algorithm.revives,
            quorum=self.election.quorum,
            merging=algorithm.merging,
            codec=codec,
        )

    def peer_options(
        self,
        number: int,
        neighbours: Sequence[int],
        codec: Codec | None = None,
        layout: Layout | None = None,
        **changes: Any,
    ) -> PeerOptions:
        """Make what `peer.Peer` needs to know.

        codec: `learner.trusted_codec`; layout: of a model of which members keep a part; changes: other fields of
        `PeerOptions`.
        """
        from dfca.core.exchange import rules_of
        from dfca.peer.records.options import PeerOptions

        algorithm, method = self.make_algorithm(), self.method(codec)
        known = self.clusters if algorithm.start == "elected" else algorithm.bank_size(self.clusters or 1)
        options = PeerOptions(
            rules=rules_of(number, len(neighbours), algorithm, method, layout, seed=self.seed),
            neighbours=tuple(neighbours),
            size=self.model_size,
            start=algorithm.start,
            rounds=self.rounds or FOREVER,
            seed=self.seed,
            clusters=known,
            method=method,
        )
        return replace(options, **changes)

    def client(self, number: int, degree: int, samples: tuple[Tensor, Tensor], model: Architecture) -> Client:
        """Make the client that a `Worker` computes for: samples x (n, *shape), scaled, and y (n,)."""
        from dfca.core.client import Client
        from dfca.node.task.learner import secret_noise

        return Client(
            id=number,
            degree=degree,
            x=samples[0],
            y=samples[1],
            model=model.flat,
            make_model=model.make,
            algorithm=self.make_algorithm(),
            clusters=self.clusters or 1,
            seed=self.seed,
            method=self.method(),
            secret_noise=secret_noise,
        )
