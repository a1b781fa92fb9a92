"""How a run in virtual time goes, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dfca.base.table import Table, option
from dfca.core.rules.staleness import Staleness

MAX_EVENTS = 100_000_000
"""A run ends here at the latest."""


class ClockOptions(Table, kw_only=True):
    """When a run in virtual time ends, waits and is evaluated.

    It ends after `until_s`, or when every client has done its rounds; a client that has done them stops.
    """

    until_s: float | None = option(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="virtual seconds after which the run ends; default: after rounds",
    )
    timeout_s: float | None = option(
        default=None, gt=0, description="how long batch and a server wait; default: for ever"
    )
    staleness: Staleness = Staleness()
    evaluate_every_s: float | None = option(
        default=None, gt=0, allow_inf_nan=False, description="default: evaluation.every rounds on average"
    )
    quorum: float = option(
        default=0.8, gt=0, le=1, description="share of the clients in reach that an election waits for"
    )


class EventOptions(ClockOptions, kw_only=True):
    """What an `EventSimulation` is asked for besides its setting and its world."""

    rounds: int | None = option(default=None, ge=1)  # of every client; None: the setting's
    trace: bool = False  # keep all records
    replay: Sequence[Any] | None = None  # lines of a trace, which drive the peers: the result is bit-identical
    dry: bool = False  # nothing is trained, elected or scored: the clockwork alone
    max_events: int = MAX_EVENTS
