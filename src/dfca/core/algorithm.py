"""What an algorithm is: a record of pure functions. Who executes it (a simulator, a node) is not its business.

A new algorithm is one record. This one is DFCA whose clients try a random model in one round of ten:

>>> import torch
>>> from dfca.core.algorithm import Algorithm, Choice, View
>>> from dfca.core.learning.local import lowest
>>> def explore(view: View) -> Choice:
...     if torch.rand((), generator=view.random()) < 0.1:
...         return Choice(int(torch.randint(len(view.losses), (), generator=view.random())))
...     return Choice(lowest(view.losses))
>>> curious = Algorithm("curious", start="shared", exchange="gossip", choose=explore)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from dfca.base.errors import ConfigError, unknown
from dfca.core.learning.parts import PARTS, Phase
from dfca.core.method import SHARES as SHARES
from dfca.core.method import (
    WEIGHT_RULES,
    ElectionOptions,
    FineTuning,
    MergeOptions,
    PersonalSteps,
    WeightRule,
    check_personal_steps,
)
from dfca.core.method import Share as Share
from dfca.core.rules.choosing import PeerChoice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfca.core.codec import Codec

FIELDS: dict[str, tuple[str | None, ...]] = {
    "start": ("shared", "own", "elected"),
    "exchange": ("gossip", "server", "none"),
    "models": ("clusters", "one"),
    "needs": ("nothing", "losses", "samples"),
    "weights": (None, *WEIGHT_RULES, "push"),
    "share": (None, *SHARES),
    "trains": ("chosen", "all"),
    "body": ("cluster", "common"),
}
"""The values that fields of an `Algorithm` may have."""
ADAPTERS = r"(^|\.)(lora_|adapter)|\.(down|up)$"
"""The names of the tensors of adapters: of peft, and of `dfca.text.encoder`."""


class View(NamedTuple):
    """What a client sees when it chooses.

    Attributes:
        losses: F_client of each of its models, (m,); empty for an algorithm that needs nothing.
        random: Opens the client's random stream of this round.
        sample_losses: The loss of each model on each sample, (m, n), for an algorithm that needs "samples".
        true_cluster: The client's true cluster, for an algorithm that is `informed`.
        memory: What the client remembers, for an algorithm with `memory`.

    Example:
        >>> import dfca, torch
        >>> view = dfca.View(torch.tensor([0.7, 0.2]), torch.Generator)
        >>> dfca.Choice(dfca.lowest(view.losses)).cluster
        1
    """

    losses: Tensor
    random: Callable[[], torch.Generator]
    sample_losses: Tensor | None = None
    true_cluster: int | None = None
    memory: Tensor | None = None


class Choice(NamedTuple):
    """What a client trains in a round.

    Attributes:
        cluster: The model that it trains.
        points: The samples that it trains on, (n,) bool; None: all.
        weights: How much each sample counts in the loss of each model, mean_d w_jd L(theta_j, d), (m, n); None: all
            alike.
        memory: What the client remembers after this round; None: no change.

    Example:
        >>> import dfca
        >>> dfca.Choice(2).points is None
        True
    """

    cluster: int
    points: Tensor | None = None
    weights: Tensor | None = None
    memory: Tensor | None = None


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as a record of pure functions.

    Attributes:
        name: Names its rows in tables and its files.
        start: "shared": all clients derive the same models from the seed. "own": every client draws its own.
            "elected": the clients elect them among models that they warmed up (`rules.election`), and their number
            too where it is not given.
        exchange: "gossip": with the neighbours on the graph. "server": all clients, and a client's own copy counts
            only if it trained it. "none".
        choose: Chooses which model a client trains, and on which samples.
        models: "clusters": a client keeps k models. "one".
        needs: What `choose` looks at: "nothing", the "losses" (m,), or the losses of all "samples" (m, n).
        informed: Whether clients know their true cluster.
        weights: The weight rule (`rules.mixing`); None: the experiment's. "push" is push-sum, for graphs whose links
            carry models one way.
        momentum: The momentum of the local steps; None: the experiment's.
        personal: Makes the model (P,) that a client deploys, from its bank (m, P) and its sample losses (m, n). None:
            it deploys the model with the lowest training loss.
        finetuning: How the personal model is fine-tuned on all samples of its client before it is deployed.
        share: What a client hands on: the model that it "trained", "all" its models, or "relay" (`rules.relay`).
            None: the experiment's.
        election: How centres are elected.
        revives: Whether a lost cluster or a new distribution can open a new centre during training.
        merging: How clusters that are not worth their data are merged (`rules.merging`); None: never.
        trains: "chosen": the model that a client chooses. "all" its models, each with the `weights` of the choice.
        head: Divides a model into body and head (`learning.parts`): the number of last layers that are its head, the
            prefix of their names, or a regular expression that is searched in the names of its tensors. None: it is
            not divided.
        body: "cluster": averaged like the head, with those that trained the same cluster. "common": all models of a
            client have the same body, which is averaged with that of every neighbour.
        private_head: Whether heads are neither sent nor averaged.
        schedule: The phases of a round's local steps, each of a part of the model; (): `local.steps` of all of it.
        memory: Makes the vector that a client remembers from round to round, from the numbers of models and of
            clients. None: nothing but its models.
        mixture: Makes the weights (m,) of a client's models in its predictions, from its memory. None: it deploys one
            model.
        peers: How clients choose whom they average with (`rules.choosing`); None: all that send, by the weight rule.
        personal_steps: The steps of the personal last step (`rules.personal`), where the experiment does not say.
        codec: What travels in place of a model (`core.codec`), where the experiment does not say; None: the model.

    Raises:
        ConfigError: If a value is unknown, or contradicts another.

    Example:
        >>> import dfca
        >>> mine = dfca.Algorithm(
        ...     "mine", start="own", exchange="gossip", choose=lambda view: dfca.Choice(dfca.lowest(view.losses))
        ... )
        >>> mine.bank_size(4)
        4
    """

    name: str
    start: Literal["shared", "own", "elected"]
    exchange: Literal["gossip", "server", "none"]
    choose: Callable[[View], Choice]
    models: Literal["clusters", "one"] = "clusters"
    needs: Literal["nothing", "losses", "samples"] = "losses"
    informed: bool = False
    weights: WeightRule | Literal["push"] | None = None
    momentum: float | None = None
    personal: Callable[[Tensor, Tensor], Tensor] | None = None
    finetuning: FineTuning = field(default_factory=FineTuning)
    share: Share | None = None
    election: ElectionOptions = field(default_factory=ElectionOptions)
    revives: bool = False
    merging: MergeOptions | None = None
    trains: Literal["chosen", "all"] = "chosen"
    head: int | str | re.Pattern[str] | None = None
    body: Literal["cluster", "common"] = "cluster"
    private_head: bool = False
    schedule: tuple[Phase, ...] = ()
    memory: Callable[[int, int], Tensor] | None = None
    mixture: Callable[[Tensor], Tensor] | None = None
    peers: PeerChoice | None = None
    personal_steps: PersonalSteps = 0
    codec: Codec | None = None

    def __post_init__(self) -> None:
        """Refuse values that no field knows: a typing mistake would otherwise run as something else."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.:-][\w .,:+=()%-]*", self.name):
            raise ConfigError(
                f"name of an algorithm must be letters, digits and -_.: (it names files), got {self.name!r}"
            )
        for field_name, known in FIELDS.items():
            value = getattr(self, field_name)
            if value not in known:
                raise unknown(f"{field_name} of algorithm {self.name}", value, map(str, known))
        for field_name, optional in (("choose", False), ("personal", True), ("memory", True), ("mixture", True)):
            value = getattr(self, field_name)
            if not callable(value) and not (optional and value is None):
                raise ConfigError(f"{field_name} of algorithm {self.name} must be a function, got {value!r}")
        for field_name in ("informed", "revives", "private_head"):
            if not isinstance(getattr(self, field_name), bool):
                raise ConfigError(
                    f"{field_name} of algorithm {self.name} must be True or False, got {getattr(self, field_name)!r}"
                )
        if self.momentum is not None and not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ConfigError(f"momentum of algorithm {self.name} must be in [0, 1), got {self.momentum!r}")
        check_personal_steps(self.personal_steps, f"personal_steps of algorithm {self.name}")
        if not isinstance(self.finetuning, FineTuning):
            raise ConfigError(f"finetuning of algorithm {self.name} must be FineTuning, got {self.finetuning!r}")
        if not isinstance(self.election, ElectionOptions):
            raise ConfigError(f"election of algorithm {self.name} must be ElectionOptions, got {self.election!r}")
        if not isinstance(self.merging, MergeOptions | None):
            raise ConfigError(f"merging of algorithm {self.name} must be MergeOptions or None, got {self.merging!r}")
        self._check_parts()
        self._check_together()

    def _check_parts(self) -> None:
        """Refuse a head, a body or phases that make no sense."""
        head, name = self.head, self.name
        if head is not None and not isinstance(head, str | re.Pattern) and not (type(head) is int and head >= 1):
            raise ConfigError(
                f"head of algorithm {name} must be a number of layers >= 1 or the prefix of their names, got {head!r}"
            )
        for phase in self.schedule:
            part, steps = phase
            if part not in PARTS or not (steps is None or (type(steps) is int and steps >= 0)):
                raise ConfigError(
                    f"schedule of algorithm {name} must have phases of {'|'.join(PARTS)} with steps >= 0, got {phase!r}"
                )
        divided = self.body == "common" or self.private_head or any(part != "all" for part, _ in self.schedule)
        if divided and head is None:
            raise ConfigError(f"algorithm {name} treats parts of a model, and does not say where its head begins: head")
        if (self.body == "common" or self.private_head) and (
            self.exchange != "gossip" or self.start == "elected" or self.share != "trained"
        ):
            raise ConfigError(
                f'algorithm {name} averages parts of a model, which needs exchange="gossip", share="trained" and a '
                f'start that is drawn, got exchange="{self.exchange}", share="{self.share}", start="{self.start}"'
            )

    def _check_together(self) -> None:
        """Refuse values that contradict each other."""
        if self.start == "elected" and (self.exchange != "gossip" or self.models != "clusters"):
            raise ConfigError(
                f'algorithm {self.name} elects its start, which needs exchange="gossip" and models="clusters", got '
                f'exchange="{self.exchange}" and models="{self.models}"'
            )
        if self.revives and self.start != "elected":
            raise ConfigError(f'algorithm {self.name} revives clusters, which needs start="elected"')
        if self.merging is not None and (self.start, self.needs) != ("elected", "losses"):
            raise ConfigError(f'algorithm {self.name} merges clusters, which needs start="elected" and needs="losses"')
        if self.trains == "all" and (self.exchange == "server" or (self.exchange == "gossip" and self.share != "all")):
            raise ConfigError(
                f'algorithm {self.name} trains all models, which needs exchange="gossip" with share="all", or '
                f'exchange="none", got exchange="{self.exchange}" and share="{self.share}"'
            )
        if self.peers is not None and (self.exchange != "gossip" or self.models != "one" or self.memory is None):
            raise ConfigError(
                f'algorithm {self.name} chooses its peers, which needs exchange="gossip", models="one" and a memory, '
                f'got exchange="{self.exchange}", models="{self.models}"'
            )
        if self.weights == "push" and (
            (self.exchange, self.models, self.share, self.body, self.peers)
            != ("gossip", "one", "trained", "cluster", None)
        ):
            raise ConfigError(
                f'algorithm {self.name} weighs by push-sum, which needs exchange="gossip", models="one" and '
                f'share="trained", got exchange="{self.exchange}", models="{self.models}", share="{self.share}"'
            )
        if self.mixture is not None and self.memory is None:
            raise ConfigError(f"algorithm {self.name} has a mixture of its memory, and no memory")

    def keeping(self, private: str) -> Algorithm:
        """Let clients keep some tensors of a model to themselves.

        Args:
            private: "head", the last layer, "adapters" as peft and `dfca.text` name them, or a regular expression that
                is searched in the names of tensors.

        Returns:
            The algorithm with a private head; one that exchanges nothing stays as it is.

        Raises:
            ConfigError: If the expression is not valid, or the algorithm does not average models by columns.
        """
        if self.exchange == "none":
            return self
        try:
            head = 1 if private == "head" else re.compile(ADAPTERS if private == "adapters" else private)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f'mixing.private must be "head", "adapters" or a regular expression, got {private!r}: {error}'
            ) from None
        fits = self.exchange == "gossip" and self.start != "elected" and self.share in (None, "trained")
        if not fits or self.head is not None or self.peers is not None:
            raise ConfigError(
                f"mixing.private is for algorithms that gossip whole models and draw their starts (dfca-gi, dfca-li, "
                f"dfedavgm), got {private!r} for {self.name}; leave one of the two out"
            )
        return replace(self, head=head, private_head=True, share="trained")

    def decide(self, view: View) -> Choice:
        """Call `choose` and check its result, so that drivers can trust it.

        Args:
            view: What the client sees.

        Returns:
            The choice.

        Raises:
            ConfigError: If it is no choice among the client's models.
        """
        choice = self.choose(view)
        models = len(view.losses)  # 0: it needs no losses
        if (
            not isinstance(choice, Choice)
            or type(choice.cluster) is not int
            or choice.cluster < 0
            or (models and choice.cluster >= models)
        ):
            bound = f"in 0..{models - 1}" if models else ">= 0"
            raise ConfigError(
                f"choose of algorithm {self.name} must return a Choice whose cluster is an int {bound}, got {choice!r}"
            )
        return choice

    def steps(self, local_steps: int, models: int) -> int:
        """Count the gradient steps of a client's round.

        Args:
            local_steps: The experiment's number of steps.
            models: The number of models that the client keeps.

        Returns:
            The steps of all phases and of all models that are trained.
        """
        per_model = sum(local_steps if phase.steps is None else phase.steps for phase in self.schedule or (Phase(),))
        return per_model * (models if self.trains == "all" else 1)

    def bank_size(self, clusters: int) -> int:
        """Count the models that a client keeps.

        Args:
            clusters: The number of clusters, k.

        Returns:
            k, or 1 where a client keeps one model.
        """
        return clusters if self.models == "clusters" else 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
