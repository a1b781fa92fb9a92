"""Names of engines, of the places of a bank, and of lies: reading an experiment does not need torch."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from dfca.base.table import Table, option

EngineName = Literal["auto", "stacked", "loop", "threads"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
Place = Literal["memory", "disk", "auto"]
PLACES: tuple[Place, ...] = get_args(Place)
LiarKind = Literal["flip-signs", "noise", "swap-labels", "stale", "self-vote"]


class LiarOptions(Table):
    """Clients that lie (`sim.liars`), the same in every run with a seed; scores are those of the honest."""

    called: ClassVar[str] = "liars.{}"

    share: float = option(
        ge=0,
        lt=1,
        advice="somebody must be honest",
        description="of the clients that lie; who they are follows the seed",
    )
    kind: LiarKind = option(
        description="what they do: send models with flipped signs or with noise, train on swapped labels, send their "
        "first model for ever, or claim in elections that only their own model fits"
    )
    scale: float = option(
        default=1.0, gt=0, description="standard deviation of the noise that is added to every weight"
    )
