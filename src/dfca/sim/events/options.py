"""How a run in virtual time goes, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dfca.base.errors import ConfigError
from dfca.peer.records.staleness import Staleness

if TYPE_CHECKING:
    from dfca.sim.events.books import Line

MAX_EVENTS = 100_000_000
"""A run ends here at the latest: no setting may run for ever."""


@dataclass(frozen=True)
class EventOptions:
    """What an `EventSimulation` is asked for besides its setting and its world.

    It ends after `until_s` seconds, or when every client has done `rounds` rounds; without either, the setting's
    rounds. timeout_s: how long `batch`, or a server, waits for others, None: for ever. evaluate_every_s None: whenever
    clients have done `setting.evaluate_every` more rounds on average. quorum: the share of the clients that an election
    waits for. trace: keep all records. replay: the trace of an earlier run of the same setting; nothing is drawn and no
    clock runs, the peers are driven by it, and the result is bit-identical. dry: nothing is trained, elected or scored:
    the clockwork alone.
    """

    until_s: float | None = None
    rounds: int | None = None
    timeout_s: float | None = None
    staleness: Staleness = field(default_factory=Staleness)
    evaluate_every_s: float | None = None
    quorum: float = 0.8
    trace: bool = False
    replay: Sequence[Line] | None = None
    dry: bool = False
    max_events: int = MAX_EVENTS

    def __post_init__(self) -> None:
        for name in ("until_s", "evaluate_every_s"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise ConfigError(f"{name} must be > 0 and finite, got {value}")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {self.rounds}")
        if not 0 < self.quorum <= 1:
            raise ConfigError(f"quorum must be in (0, 1], got {self.quorum}")
