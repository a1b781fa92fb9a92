"""What messages claim about the swarm, compared with the roster: who exists, who can have voted, whose alarm it is.

A peer knows no roster and takes the lineage with more voters for the better one. A lineage with more voters than
devices ever introduced, or an election by an unknown device, is refused before the peer sees it. This is a bound, not a
proof. Removed devices count too, because what they voted for is still in use.

An alarm counts from the link of the device that it is about, or with its signature. Version 0.2 signs nothing: its
alarms reach its neighbours only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dfca.node.trust.identity import Identity, verify
from dfca.node.trust.roster import Roster
from dfca.node.wire.frames import Refused
from dfca.peer.records.lineage import Lineage
from dfca.peer.records.messages import Alarm, Result


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


def signed(alarm: Alarm, identity: Identity, swarm_id: str) -> Alarm | None:
    """Return an alarm as it leaves this device: signed if it is its own; None for one that nobody would believe."""
    if alarm.origin != identity.number or alarm.proof is not None:
        return None if alarm.proof is None else alarm
    return alarm._replace(proof=identity.sign(_said(alarm, swarm_id)))


def is_told_by(alarm: Alarm, sender: int, roster: Roster, swarm_id: str) -> bool:
    """Return whether an alarm that a member sent is of the device that it is about."""
    member = roster.by_number(alarm.origin)
    if member is None or alarm.proof is None:
        return member is not None and alarm.origin == sender
    return verify(member.certificate, _said(alarm, swarm_id), alarm.proof)


def _said(alarm: Alarm, swarm_id: str) -> bytes:
    """Write what is signed; of the lineage its last entry, which digests the models."""
    models = [entry[:5] for entry in alarm.lineage[-1:]]
    return f"dfca alarm {swarm_id} {alarm.origin} {alarm.number} {int(alarm.raised)} {models}".encode()
