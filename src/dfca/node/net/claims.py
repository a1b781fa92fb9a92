"""What messages claim about the swarm, compared with the roster: who exists, and how many can have voted.

A peer knows no roster and takes the lineage with more voters for the better one. A lineage with more voters than
devices ever introduced, or an election by an unknown device, is refused before the peer sees it. This is a bound, not a
proof. Removed devices count too, because what they voted for is still in use.
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
        held, voters = (entry.attempt, entry.incarnation) if entry.is_fold else (1, entry.voters)
        if voters > held * len(introduced):
            return Refused("number", f"a lineage with {voters} voters, of {len(introduced)} devices")
        if entry.root not in introduced:
            return Refused("member", f"a lineage of {entry.root}, which was never introduced")
    return None
