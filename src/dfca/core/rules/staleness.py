"""How a message weighs by its age.

A message of age d moves the running average by w(d) times as much: a' = a + w(d) (x - a) / (r + 1), r = folds of this
cluster + 1; under Metropolis weights a' = a + w(d) w_im (x - own). w = 1 is the paper's rule. The age is measured in

  updates   local updates that the receiver has made since the sender's update ended (the default). A straggler's fresh
            model is of age 0 however many rounds it is behind; a model that waited while its receiver trained, of age 1
  rounds    the receiver's last round minus the sender's: what a protocol without clocks knows. A straggler that is 10
            times slower falls behind by 9 rounds in 10, and such an age silences it for ever
  seconds   time since the sender's update ended: what the sender says when it sends, and what the message waited since

In the ideal world all three are 0 for every message.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from dfca.base.errors import ConfigError
from dfca.base.table import Table, option


class Staleness(Table):
    """How a message of age d weighs, and what the age is measured in.

    constant 1; polynomial (1 + d)**-power; hinge 1 up to d = `after`, then 1 / (1 + power (d - after)).

    >>> Staleness("polynomial", power=0.5).weight(3)
    0.5
    """

    called: ClassVar[str] = "staleness.{}"

    kind: Literal["constant", "polynomial", "hinge"] = option(
        default="constant", called="staleness", description="constant: all models weigh alike, however old"
    )
    power: float = option(
        default=0.5, ge=0, allow_inf_nan=False, description="polynomial, hinge: how fast the weight falls with the age"
    )
    after: float = option(default=4, ge=0, allow_inf_nan=False, description="hinge: the age from which it falls")
    unit: Literal["updates", "rounds", "seconds"] = option(
        default="updates",
        called="unit of staleness",
        description="what the age counts: the receiver's updates, rounds, seconds",
    )

    def __post_init__(self) -> None:
        if not (0 <= self.after < math.inf):
            raise ConfigError(f"staleness.after must be >= 0 {self.unit} and finite, got {self.after}")
        super().__post_init__()

    def weight(self, age: float) -> float:
        """Weigh a message by its age: w(age) in (0, 1]."""
        if self.kind == "constant" or age <= 0:
            return 1.0
        if self.kind == "polynomial":
            return float((1 + age) ** -self.power)
        return 1.0 if age <= self.after else 1 / (1 + self.power * (age - self.after))
