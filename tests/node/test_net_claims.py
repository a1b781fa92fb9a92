"""What members claim about their swarm is held against its roster: voters, elections, alarms, addresses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from net_world import FAST, SIZE, SWARM, make_device, until, world

from dfca.core.state import Message
from dfca.node.net import transport
from dfca.node.net.claims import find_lie, is_told_by, signed
from dfca.node.net.gossip import SPREAD_S
from dfca.node.net.options import Swarm
from dfca.node.trust.identity import Identity
from dfca.node.trust.records import to_bytes
from dfca.node.trust.roster import Roster
from dfca.peer.records import messages as m
from dfca.peer.records.lineage import FOLDED, Entry


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "DOUBT_S", 1.5)


KNOWN = frozenset({5, 6, 7})
MODEL = torch.zeros(SIZE)


def lineage(voters: int, root: int = 5) -> tuple[Entry, ...]:
    return (Entry(2, 0, 6, 0, 1, (0,)), Entry(voters, 0, root, 0, 1, (1,)))


def claims(told: tuple[Entry, ...]) -> list[Any]:
    """Make every kind of message that names a lineage."""
    sent = Message(5, 0, 1, 2, MODEL)
    key = m.Key(0, 0, 0, 5, 0)
    return [
        m.Hello(0, 1, 2, told),
        m.Update(sent, 1, told),
        m.Nothing(1, told),
        m.CopyRequest(0, told),
        m.Copy(sent, told),
        m.BankCopy(sent, 1, 2, told),
        m.Probe(key, told),
        m.Alarm(5, 1, True, told),
        m.Curves(3, 0, 1, 0, (), told),
    ]


def test_a_lineage_has_no_more_voters_than_devices_and_a_root_among_them() -> None:
    kinds = {kind for kind in m.KINDS if {"lineage", "base"} & set(kind._fields)}
    assert {type(claim) for claim in claims(())} == kinds
    for claim in claims(lineage(3)):
        assert find_lie(claim, KNOWN) is None
    for told, reason in ((lineage(4), "number"), (lineage(2**53), "number"), (lineage(3, root=8), "member")):
        for claim in claims(told):
            lie = find_lie(claim, KNOWN)
            assert lie is not None
            assert lie.reason == reason


def test_a_fold_has_no_more_votes_than_devices_could_cast() -> None:
    for votes, told in ((30, None), (31, "number")):
        lie = find_lie(m.Hello(0, 1, 2, (*lineage(3), Entry(FOLDED, 10, 5, votes, 0, (0, 1)))), KNOWN)
        assert (None if lie is None else lie.reason) == told


def test_an_election_is_held_by_a_device_with_no_more_voters_than_there_are() -> None:
    key = m.Key(0, 0, 0, 5, 0)
    assert find_lie(m.Open(key, 3, ()), KNOWN) is None
    assert find_lie(m.Count(key, 2**20, 2**20), KNOWN) is None  # the peer itself counts no more than there are
    assert str(find_lie(m.Open(key, 4, ()), KNOWN)) == "number: an election with 4 voters, of 3 devices"
    for message in (m.Refuse(key._replace(root=9)), m.Bid(key._replace(root=9), 0, 1.0, 5)):
        assert str(find_lie(message, KNOWN)) == "member: an election by 9, which was never introduced"


def test_a_member_that_claims_too_many_voters_is_not_heard_and_kept_out(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3) as net:
            await until(net.connected)
            liar, victim, other = net.devices
            told = (Entry(2**40, 0, liar.number, 0, 1, (0,)),)
            liar.transport.send(victim.number, m.Hello(0, 5, 1, told))
            liar.transport.send(victim.number, m.Nothing(5))
            await until(lambda: victim.transport.status()["refused"].get("number") == 1)
            assert [message for sender, message in victim.node.messages if sender == liar.number] == []
            assert liar.number not in victim.node.up()
            assert victim.transport._local.penalties.left_s(liar.identity.id, victim.transport._local.now()) > 0
            assert other.number in victim.node.up()

    asyncio.run(run())


def test_an_alarm_counts_from_the_device_it_is_about_or_with_its_signature(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3) as net:
            await until(net.connected)
            origin, bearer, victim = net.devices
            origin.transport.send(bearer.number, m.Alarm(origin.number, 1, True))
            await until(lambda: bearer.node.messages)
            ((_, told),) = bearer.node.messages
            assert told.proof
            forged = [
                told._replace(proof=None),  # never leaves the bearer
                told._replace(number=2),
                told._replace(raised=False),
                told._replace(origin=victim.number),
                told._replace(lineage=lineage(3)[:1]),
                told._replace(proof=b"forged"),
                told,
            ]
            for alarm in forged:
                bearer.transport.send(victim.number, alarm)
            await until(lambda: victim.node.messages)
            assert victim.node.messages == [(bearer.number, told)]
            assert victim.transport.status()["refused"] == {"proof": 5}

    asyncio.run(run())


def test_an_alarm_without_a_signature_counts_from_the_link_of_its_origin(tmp_path: Path) -> None:
    """Version 0.2 signs none."""
    roster = Roster.found(one := Identity.create(tmp_path / "one"), "s" * 52, "one")
    roster.introduce(one, (other := Identity.create(tmp_path / "other")).certificate, "other")
    alarm = m.Alarm(other.number, 1, True)
    assert is_told_by(alarm, other.number, roster, "s" * 52)
    assert not is_told_by(alarm, one.number, roster, "s" * 52)
    ours = signed(alarm, other, "s" * 52)
    assert ours is not None
    assert is_told_by(ours, one.number, roster, "s" * 52)
    assert not is_told_by(ours, one.number, roster, "t" * 52)


def test_an_alarm_about_no_member_is_dropped_and_its_bearer_is_not_blamed(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as net:
            await until(net.connected)
            liar, victim = net.devices
            for origin in range(1000, 1500):
                liar.transport.send(victim.number, m.Alarm(origin, 1, True, proof=b"forged"))
            last = m.Alarm(liar.number, 1, True)
            liar.transport.send(victim.number, last)
            await until(lambda: victim.node.messages)
            assert [message._replace(proof=None) for _, message in victim.node.messages] == [last]
            assert victim.transport.status()["refused"] == {"member": 500}
            assert victim.node.up() == {liar.number}

    asyncio.run(run())


@pytest.mark.parametrize("comes", [True, False])
def test_a_member_with_more_records_has_time_to_send_them(tmp_path: Path, comes: bool) -> None:
    """An honest neighbour that voted with devices that this one has not heard of is linked anew, and believed."""

    async def run() -> None:
        async with world(tmp_path, 2) as net:
            await until(net.connected)
            ahead, behind = net.devices
            news = [Identity.create(tmp_path / f"new{i}") for i in range(2)]
            for identity in news if comes else ():
                ahead.roster.introduce(net.founder, identity.certificate, "new")
            said = m.Hello(0, 5, 1, (Entry(4, 0, ahead.number, 0, 1, (0,)),))
            ahead.transport.send(behind.number, said)  # overtakes the records
            if comes:
                await until(
                    lambda: ("disconnected", ahead.number) in behind.node.events and ahead.number in behind.node.up()
                )
                assert behind.transport.status()["refused"] == {}
                ahead.transport.send(behind.number, said)
                await until(lambda: behind.node.messages)
            else:
                await until(lambda: behind.transport.status()["refused"] == {"number": 1})

    asyncio.run(run())


def test_a_flood_of_new_addresses_costs_the_others_little(tmp_path: Path) -> None:
    """A member signs a new address again and again: each link carries the last of them, not all, and not the roster."""

    async def run() -> None:
        async with world(tmp_path, 3) as net:
            await until(net.connected)
            liar, victim, other = net.devices
            await until(lambda: len({device.roster.digest() for device in net.devices}) == 1)
            before = other.transport.status()["neighbours"][victim.identity.id]["bytes_in"]
            whole = sum(len(to_bytes(record)) for record in liar.roster.records())
            begin = other.transport._local.now()
            for port in range(1, 301):
                liar.roster.announce(liar.identity, [f"192.0.2.1:{port}"])
                await asyncio.sleep(0.005)
            await until(lambda: other.roster.member(liar.identity.id).addresses == ("192.0.2.1:300",))  # type: ignore[union-attr]
            await until(lambda: len({device.roster.digest() for device in net.devices}) == 1)
            after = other.transport.status()["neighbours"][victim.identity.id]["bytes_in"]
            spreads = 2 + (other.transport._local.now() - begin) / SPREAD_S  # some 5; all rosters would be 300
            print(f"{after - before} bytes, a roster of {whole}, {spreads:.1f} spreads")
            assert after - before < spreads * whole
            assert len(other.node.up()) == 2

    asyncio.run(run())


def test_a_new_device_changes_how_many_can_vote(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as net:
            counts: list[int] = []
            first = net.devices[0]
            first.transport.on_devices = counts.append
            first.transport.open(first.node)
            identity = Identity.create(tmp_path / "new")
            first.roster.introduce(net.founder, identity.certificate, "new")
            first.roster.remove(net.founder, identity.id)
            assert counts == [2, 3]
            assert make_device(identity, first.roster.copy(), tmp_path, FAST, Swarm(SWARM, SIZE)).number in (
                first.roster.introduced()
            )

    asyncio.run(run())
