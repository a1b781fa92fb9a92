"""What a client remembers between two events, and the message that carries one model.

States are values: nothing is changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dfca.core.rules.clusters import COPIES, merge_values_
from dfca.core.rules.merging import Plan, merge_
from dfca.core.rules.relay import Offer

T = TypeVar("T")


class once(Generic[T]):
    """Compute an attribute when it is first asked for: `cached_property` without its lock, which takes longer."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.name = compute, compute.__name__

    def __get__(self, owner: Any, kind: type) -> T:
        value = owner.__dict__[self.name] = self.compute(owner)
        return value


@dataclass(frozen=True)
class Message:
    """One model on its way."""

    sender: int
    cluster: int
    round: int  # in which it was sent: its version
    degree: int  # the sender's
    model: Tensor
    offer: Offer | None = None  # of a relayed copy, what the sender had offered
    updates: int = 0  # local updates of the sender itself behind the model

    @once
    def form(self) -> tuple[int, torch.dtype]:
        """How many numbers the model has (-1: it is no vector), and of which type."""
        return len(self.model) if self.model.dim() == 1 else -1, self.model.dtype

    @once
    def finite(self) -> bool:
        """Whether the model holds finite numbers only; computed once for all receivers of the same message."""
        return not self.model.is_floating_point() or is_finite(self.model)


@dataclass(frozen=True)
class PushedMessage(Message):
    """One model on its way, with the mass that push-sum sends along (`rules.mixing`)."""

    mass: float = 1.0


@dataclass(frozen=True)
class ClientState:
    """What a client remembers between two events; tuples have one entry per cluster."""

    bank: Tensor  # (m, P)
    counts: tuple[int, ...]  # folds since the last local update
    own: dict[int, Tensor] = field(default_factory=dict)  # copies before the first fold, or before the local steps, if
    # the weight rule needs them
    assignment: int | None = None  # the cluster chosen last
    trained: int | None = None  # the same; None where this round's update diverged, or there was none
    round: int = 0
    rejected: int = 0  # messages that could not be used
    stamps: tuple[int, ...] = ()  # round of the newest update behind a copy (`rules.relay`)
    origins: tuple[int, ...] = ()  # the client that made it alone, or MANY
    folded: tuple[int, ...] = ()  # stamp of the last relayed copy that was folded
    updates: tuple[int, ...] = ()  # local updates of its own
    common: int = 0  # folds into the columns that all clusters share
    memory: Tensor | None = None  # what the algorithm lets a client remember
    personal_steps: int = 0  # of the personal last step
    closed: tuple[int, ...] = ()  # clusters that are not chosen and not sent (`rules.merging`)
    distances: dict[int, tuple[float, ...]] = field(default_factory=dict)  # of recent folds (`rules.robust`)
    mass: float = 1.0  # mu of push-sum (`rules.mixing`)
    sent: dict[int, Tensor] = field(default_factory=dict)  # by cluster, the last model sent (`core.codec`)
    received: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by sender and cluster, the last one

    @staticmethod
    def of(bank: Tensor, memory: Tensor | None = None) -> ClientState:
        """Begin with a bank (m, P), and a memory where the algorithm has one."""
        m = len(bank)
        fresh: dict[str, Any] = {name: (rule.fresh,) * m for name, rule in COPIES.items()}
        return ClientState(bank, (0,) * m, memory=memory, **fresh)

    def with_model(self, cluster: int, bank: Tensor) -> ClientState:
        """Note that a cluster of the bank was opened; a bank that has grown by one has it at the end."""

        def put(values: tuple[int, ...], value: float) -> tuple[float, ...]:
            return (*values[:cluster], value, *values[cluster + 1 :])

        return changed(
            self._without({cluster}),
            bank=bank,
            counts=put(self.counts, 0),
            closed=tuple(j for j in self.closed if j != cluster),
            **{name: put(getattr(self, name), rule.fresh) for name, rule in COPIES.items()},
        )

    def renumbered(self, order: Sequence[int], clusters: int) -> ClientState:
        """Number clusters anew and keep the first `clusters` of them; order: the old numbers of cluster 0, 1, ..."""
        kept, place = order[:clusters], {j: number for number, j in enumerate(order)}

        def numbered(j: int | None) -> int | None:
            return None if j is None or place[j] >= clusters else place[j]

        return changed(
            self,
            bank=self.bank[kept],
            own={place[j]: model for j, model in self.own.items() if j in kept},
            assignment=numbered(self.assignment),
            trained=numbered(self.trained),
            closed=tuple(sorted(place[j] for j in self.closed if place[j] < clusters)),
            distances={place[j]: recent for j, recent in self.distances.items() if j in kept},
            sent={place[j]: model for j, model in self.sent.items() if j in kept},
            received={(i, place[j]): model for (i, j), model in self.received.items() if j in kept},
            **{name: tuple(getattr(self, name)[j] for j in kept) for name in ("counts", *COPIES)},
        )

    def merged(self, plan: Plan) -> ClientState:
        """Merge and close clusters as a survey has decided (`rules.merging`)."""
        bank, became = self.bank.clone(), {merge.closed: merge.into for merge in plan.merges}
        merge_(bank, plan.merges)
        copies = {name: list(getattr(self, name)) for name in COPIES}
        for name, rule in COPIES.items():
            merge_values_(copies[name], plan, rule)
        return changed(
            self._without({*plan.closed, *became.values()}),
            bank=bank,
            assignment=None if self.assignment is None else became.get(self.assignment, self.assignment),
            trained=None if self.trained is None else became.get(self.trained, self.trained),
            closed=tuple(sorted({*self.closed, *plan.closed})),
            **{name: tuple(values) for name, values in copies.items()},
        )

    def _without(self, clusters: set[int]) -> ClientState:
        """Forget what recent folds left of clusters whose models are others now."""
        own = {j: model for j, model in self.own.items() if j not in clusters}
        distances = {j: recent for j, recent in self.distances.items() if j not in clusters}
        sent = {j: model for j, model in self.sent.items() if j not in clusters}
        received = {key: model for key, model in self.received.items() if key[1] not in clusters}
        return changed(self, own=own, distances=distances, sent=sent, received=received)


def changed(state: ClientState, **changes: Any) -> ClientState:
    """Do what `replace` does in a tenth of the time: a fold is one of many."""
    later = object.__new__(ClientState)
    later.__dict__.update(state.__dict__, **changes)
    return later


def fits(message: Message, bank: Tensor) -> bool:
    """Return whether a message is for a cluster of ours, with a model of our size and type."""
    clusters, size = bank.shape
    return 0 <= message.cluster < clusters and message.form == (size, bank.dtype) and message.degree >= 0


def usable(message: Message, bank: Tensor) -> bool:
    """Return whether a message can be folded: it `fits`, and its model holds finite numbers only."""
    return fits(message, bank) and message.finite


def is_finite(model: Tensor) -> bool:
    """Return whether a model holds finite numbers only, and none so large that a difference of two overflows.

    A finite squared norm says so; any other model is looked at again.
    """
    flat = model.flatten()
    if not flat.numel() or math.isfinite(float(torch.dot(flat, flat))):
        return True
    return bool(flat.abs().max() <= torch.finfo(flat.dtype).max / 4)
