"""Alarms that others hand on: signed by the device that they are about.

An alarm counts from the link of that device, or with its signature. Version 0.2 signs nothing: its alarms reach its
neighbours only.
"""

from __future__ import annotations

from dfca.node.trust.identity import Identity, verify
from dfca.node.trust.roster import Roster
from dfca.peer.records.messages import Alarm


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
