"""Names of engines, of the places of a bank, and of lies: reading an experiment does not need torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dfca.base.errors import ConfigError, unknown

EngineName = Literal["auto", "stacked", "loop", "threads"]
ENGINES: tuple[EngineName, ...] = ("auto", "stacked", "loop", "threads")
Place = Literal["memory", "disk", "auto"]
PLACES: tuple[Place, ...] = ("memory", "disk", "auto")
LiarKind = Literal["flip-signs", "noise", "swap-labels", "stale", "self-vote"]
LIAR_KINDS: tuple[LiarKind, ...] = ("flip-signs", "noise", "swap-labels", "stale", "self-vote")


@dataclass(frozen=True)
class LiarOptions:
    """Clients that lie (`sim.liars`): a share of them, the same in every run with a seed; scale: of the noise."""

    share: float
    kind: LiarKind
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in LIAR_KINDS:
            raise unknown("liars.kind", self.kind, LIAR_KINDS)
        if not 0 <= self.share < 1:
            raise ConfigError(f"liars.share must be in [0, 1), got {self.share}; somebody must be honest")
        if not self.scale > 0:
            raise ConfigError(f"liars.scale must be > 0, got {self.scale}")
