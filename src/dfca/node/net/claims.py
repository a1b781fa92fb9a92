"""What messages claim about the swarm, compared with the roster: who there is, and how many can have voted.

A peer knows nothing of rosters: for it a lineage with more voters is the better one, whoever says so. Here a lineage
with more voters than devices were ever introduced, or an election that no device of the roster has held, is refused
before the peer sees it. This is a bound and no proof: a member that claims no more than there are devices is believed.
Removed devices count too, because what they voted for lives on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dfca.node.wire.refused import Refused
from dfca.peer.records.lineage import Lineage
from dfca.peer.records.messages import Result


def find_lie(message: Any, introduced: Collection[int]) -> Refused | None:
    """Return why a message cannot be true; introduced: the numbers of all devices that were ever introduced."""
    key = getattr(message, "key", None)
    if key is not None and key.root not in introduced:
        return Refused("member", f"an election by {key.root}, which was never introduced")
    voters = getattr(message, "voters", 0)
    if voters > len(introduced):
        return Refused("number", f"an election with {voters} voters, of {len(introduced)} devices")
    lineage: Lineage = getattr(message, "lineage", ()) or getattr(message, "base", ())
    if isinstance(message, Result):
        lineage = (message.entry,)
    for entry in lineage:
        if entry.voters > len(introduced):
            return Refused("number", f"a lineage with {entry.voters} voters, of {len(introduced)} devices")
        if entry.root not in introduced:
            return Refused("member", f"a lineage of {entry.root}, which was never introduced")
    return None
