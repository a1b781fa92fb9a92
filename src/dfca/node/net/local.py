"""What all parts of a node's network share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dfca.node.net.limits import Penalties, Refusals
from dfca.node.net.links.link import Greeting
from dfca.node.net.links.wire import Wire
from dfca.node.net.options import NetOptions
from dfca.node.surroundings import Surroundings
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster


@dataclass
class LinkTraffic:
    """Bytes by member since the node started. The sums only grow: they include links and members that are gone."""

    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    heard: dict[str, float] = field(default_factory=dict)  # when links that are down were last heard, since 1970
    gone_received: int = 0
    gone_sent: int = 0

    def end_link(self, member: str, received: int, sent: int, heard: float) -> None:
        """Take over the counts of a link that went down."""
        self.received[member] += received
        self.sent[member] += sent
        self.heard[member] = heard

    def forget(self, member: str) -> None:
        """Drop the counts of a removed member; the sums stay."""
        self.gone_received += self.received.pop(member, 0)
        self.gone_sent += self.sent.pop(member, 0)
        self.heard.pop(member, None)


@dataclass(frozen=True)
class Local:
    """This node: its identity, roster, options and counters. now: its steady clock (`timing`)."""

    identity: Identity
    roster: Roster
    options: NetOptions
    greeting: Greeting
    refusals: Refusals
    penalties: Penalties
    traffic: LinkTraffic
    now: Callable[[], float]
    wire: Wire
    around: Surroundings
