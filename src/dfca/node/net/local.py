"""What all parts of a node's network share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dfca.node.net.limits import Penalties, Refusals
from dfca.node.net.links.link import Greeting
from dfca.node.net.options import NetOptions
from dfca.node.net.traffic import LinkTraffic
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster


@dataclass(frozen=True)
class Local:
    """This node: who it is, whom it knows, what it allows. now: its steady clock (`detector`)."""

    identity: Identity
    roster: Roster
    options: NetOptions
    greeting: Greeting
    refusals: Refusals
    penalties: Penalties
    traffic: LinkTraffic
    now: Callable[[], float]
