"""How a message weighs by its age, and how a bad link breaks one.

A message of round t reaches a client whose last local update was round s: age d = max(0, s - t), and its share in the
running average is scaled by w(d): a' = a + w(d) (x - a) / (r + 1), r = folds of this cluster + 1; under Metropolis
weights a' = a + w(d) w_im (x - own). w = 1 is the paper's rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from dfca.core.client import ClientState, Message, usable
from dfca.errors import ConfigError, unknown
from dfca.sim.network import draw

StalenessKind = Literal["constant", "polynomial", "hinge"]
STALENESS_KINDS: tuple[StalenessKind, ...] = ("constant", "polynomial", "hinge")


@dataclass(frozen=True)
class Staleness:
    """How a message of age d weighs.

    constant 1; polynomial (1 + d)**-power; hinge 1 up to d = `after`, then 1 / (1 + power (d - after)).

    >>> Staleness("polynomial", power=0.5).weight(3)
    0.5
    """

    kind: StalenessKind = "constant"
    power: float = 0.5
    after: int = 4

    def __post_init__(self) -> None:
        if self.kind not in STALENESS_KINDS:
            raise unknown("staleness", self.kind, STALENESS_KINDS)
        if not (0 <= self.power < math.inf):
            raise ConfigError(f"staleness.power must be >= 0 and finite, got {self.power}")
        if self.after < 0:
            raise ConfigError(f"staleness.after must be >= 0 rounds, got {self.after}")

    def weight(self, age: int) -> float:
        """Weigh a message by its age in rounds: w(age) in (0, 1]."""
        if self.kind == "constant" or age <= 0:
            return 1.0
        if self.kind == "polynomial":
            return float((1 + age) ** -self.power)
        return 1.0 if age <= self.after else 1 / (1 + self.power * (age - self.after))


def discounted(message: Message, state: ClientState, weight: float) -> Message:
    """Pull a model towards the receiver's, so that folding it moves the average by `weight` times as much.

    x' = a + w (x - a), a the copy that the fold rule subtracts. A message that is not usable stays as it is.
    """
    if weight == 1 or not usable(message, state.bank):
        return message
    own = state.own.get(message.cluster, state.bank[message.cluster])
    return replace(message, model=own + weight * (message.model - own))


def corrupted(message: Message, seed: int, receiver: int) -> Message:
    """Break a payload as a bad link does: a NaN in it, or numbers missing at the end."""
    if draw(seed, "corrupt", message.sender, receiver, message.cluster, message.round) < 0.5:
        return replace(message, model=message.model[:-1])
    broken = message.model.clone()
    broken[len(broken) // 2] = math.nan
    return replace(message, model=broken)
