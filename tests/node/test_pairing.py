"""Pairing over real sockets on loopback: between friends, and under attack."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfca.base.errors import ConfigError, DataError
from dfca.node.trust import handshake, pairing
from dfca.node.trust.handshake import BadMessage, JoinRequest, Transcript, server_context
from dfca.node.trust.identity import Identity, encode_id, peer_number
from dfca.node.trust.invite import Invite, qr
from dfca.node.trust.joining import CURES, Joined, PairingError, join
from dfca.node.trust.membership import Member
from dfca.node.trust.pairing import PairingServer, PairingSettings
from dfca.node.trust.records import Contact, Introduction, Removal, sign_record
from dfca.node.trust.roster import Roster, RosterReason

SWARM = "s" * 52
FACTS = b'{"name":"home"}' * 20_000  # 300 kB: more than a line may have
LOCAL = PairingSettings(host="127.0.0.1", bind="127.0.0.1")
FEW = replace(LOCAL, connections=8, attempts=3)
HASTY = replace(LOCAL, prove_s=0.3)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("people")
    return [Identity.create(folder / str(number)) for number in range(4)]


class Home:
    """A device that invites, and what became of it."""

    def __init__(self, identity: Identity, settings: PairingSettings = LOCAL) -> None:
        self.identity = identity
        self.roster = Roster.found(identity, SWARM, "kitchen", ["192.0.2.1:7447"])
        self.joined: list[tuple[Member, str]] = []
        self.server = PairingServer(settings, lambda member, code: self.joined.append((member, code)))

    async def invite(self, lifetime_s: float = 60, port: int = 0) -> Invite:
        return await self.server.open(self.identity, self.roster, FACTS, port, lifetime_s)


def at_home(of: Identity, act: Callable[[Home], Awaitable[None]], settings: PairingSettings = LOCAL) -> Home:
    """Act with a device that invites, and close it; nothing may be left running."""

    async def run() -> Home:
        home = Home(of, settings)
        try:
            async with asyncio.timeout(30):
                await act(home)
        finally:
            await home.server.close()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        return home

    return asyncio.run(run())


@contextmanager
def refused(reason: str) -> Iterator[None]:
    with pytest.raises(PairingError) as caught:
        yield
    assert caught.value.reason == reason, caught.value


def with_secret(invite: Invite, secret: bytes = b"x" * 16) -> Invite:
    return replace(invite, secret=secret)


async def enter(invite: Invite | str, identity: Identity, name: str = "garage") -> Joined:
    return await join(invite, identity, name, ["192.0.2.2:7447"], lambda facts: None)


async def attack(invite: Invite, *lines: bytes, tls: bool = True, pause_s: float = 0) -> bytes:
    """Connect, send what there is, and return everything that comes back."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(invite.host, invite.port, ssl=context if tls else None)
    received = b""
    with suppress(OSError):
        for line in lines:
            writer.write(line)
            await writer.drain()
            await asyncio.sleep(pause_s)
        received = await reader.read(-1)
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
    return received


# Between friends


def test_a_device_joins(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        seen: list[bytes] = []
        invite = await home.invite()
        cpu = time.process_time()
        joined = await join(str(invite), people[1], "garage", ["192.0.2.2:7447"], seen.append)
        assert time.process_time() - cpu < 1  # both ends; 0.03 s where nothing else runs
        assert seen == [joined.facts] == [FACTS]
        assert joined.inviter.name == "kitchen"
        assert joined.roster.digest() == home.roster.digest()
        ((member, code),) = home.joined
        assert (member.id, member.name, member.addresses) == (people[1].id, "garage", ("192.0.2.2:7447",))
        assert not member.may_introduce
        assert code == joined.code
        assert len(code) == 6
        assert home.server.invites == []
        with refused("unreachable"):  # used: nobody listens any more
            await enter(invite, people[2])
        again = await home.invite(port=invite.port)
        with refused("used"):
            await enter(replace(again, secret=invite.secret), people[2])
        other = await enter(again, people[2], "attic")
        assert sorted(member.name for member in other.roster.members().values()) == ["attic", "garage", "kitchen"]
        assert home.server.refused == {"used": 1}

    at_home(people[0], act)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=32, max_size=32), min_size=2, max_size=4, unique=True))
def test_six_characters_for_every_pairing(nonces: list[bytes]) -> None:
    """Other nonces or IDs, other characters (up to one chance in a thousand million)."""
    a, b = encode_id(nonces[0]), encode_id(nonces[1])
    same = {Transcript(a, b, nonces[0], nonces[1]).code() for _ in range(2)}
    assert len(same) == 1
    codes = [Transcript(a, b, x, y).code() for x in nonces for y in nonces] + [Transcript(b, a, *nonces[:2]).code()]
    assert len(set(codes)) == len(codes)


def test_facts_that_do_not_fit_make_no_member(people: list[Identity]) -> None:
    def decline(facts: bytes) -> None:
        raise DataError("column x is missing")

    async def act(home: Home) -> None:
        invite = await home.invite()
        with pytest.raises(DataError, match="column x"):
            await join(invite, people[1], "garage", [], decline)
        assert len(home.roster.members()) == 1
        await enter(invite, people[1])  # the invite is still good
        assert home.server.refused == {"declined": 1}

    at_home(people[0], act)


def test_only_one_device_per_invite(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        invite = await home.invite()
        results = await asyncio.gather(*(enter(invite, person) for person in people[1:]), return_exceptions=True)
        assert sum(isinstance(result, Joined) for result in results) == 1
        lost = [result.reason for result in results if isinstance(result, PairingError)]
        assert len(lost) == 2
        assert set(lost) <= {"used", "unreachable", "connection lost"}
        assert len(home.roster.members()) == 2

    at_home(people[0], act)


def test_several_invites_share_a_port(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        first, second = await home.invite(), await home.invite()
        assert first.port == second.port
        await enter(second, people[1], "b")
        await enter(first, people[2], "c")
        for _ in range(pairing.MAX_OPEN):
            await home.invite()
        with pytest.raises(ConfigError, match="8 invites are open"):
            await home.invite()

    at_home(people[0], act)


def test_members_that_may_invite_and_where(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        invite = await home.invite()
        other = Home(people[1])
        with pytest.raises(ConfigError, match=f"port {invite.port}: Address already in use; choose another port"):
            await other.invite(port=invite.port)
        home.roster.introduce(people[0], people[1].certificate, "garage")
        with pytest.raises(ConfigError, match="may not introduce others to its swarm; invite from one that may: kitc"):
            await home.server.open(people[1], home.roster, FACTS)

    at_home(people[0], act)


# Invites


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["192.0.2.1", "kitchen.local", "2001:db8::7", "fe80::1%eth0", "localhost"]),
    st.integers(1, 65535),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=16, max_size=16),
)
def test_an_invite_is_read_as_it_was_written(host: str, port: int, digest: bytes, secret: bytes) -> None:
    invite = Invite(host, port, encode_id(digest), secret)
    assert Invite.parse(f" {invite}\n") == invite
    assert secret.hex() not in repr(invite)
    assert repr(secret) not in repr(invite)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: "",
        lambda line: line[:-1],
        lambda line: line + "a",
        lambda line: line.replace("dfca1", "dfca2"),
        lambda line: line.replace(":7448", ":0"),
        lambda line: line.replace(":7448", ":70000"),
        lambda line: line.replace("192.0.2.1", "a b"),
        lambda line: line.replace("192.0.2.1", ""),
        lambda line: line.upper(),
        lambda line: line[:-1] + "b",  # bits that no secret has
        lambda line: "x" * 100_000,
    ],
)
def test_a_damaged_invite_is_explained(spoil: Callable[[str], str]) -> None:
    line = str(Invite("192.0.2.1", 7448, "a" * 52, bytes(16)))
    with pytest.raises(ConfigError, match="copy the whole line") as caught:
        Invite.parse(spoil(line))
    assert len(str(caught.value)) < 300


def test_the_code_fits_a_terminal() -> None:
    rows = qr(Invite("192.0.2.100", 65535, "a" * 52, bytes(16))).splitlines()
    assert len(rows) <= 24
    assert max(map(len, rows)) <= 50


# Under attack


def test_a_wrong_secret_a_few_times_burns_the_invite(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        invite = await home.invite()
        for _ in range(FEW.attempts):
            with refused("wrong secret"):
                await enter(with_secret(invite), people[1])
        with refused("unreachable"):
            await enter(invite, people[1])
        again = await home.invite(port=invite.port)
        with refused("burnt"):
            await enter(replace(again, secret=invite.secret), people[1])
        await enter(again, people[1])
        assert home.server.refused == {"wrong secret": 3, "burnt": 2}

    at_home(people[0], act, FEW)


def test_an_expired_invite(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        invite = await home.invite(lifetime_s=0.02)
        while home.server.invites:
            await asyncio.sleep(0.01)
        with refused("unreachable"):
            await enter(invite, people[1])
        again = await home.invite(port=invite.port)
        with refused("expired"):
            await enter(replace(again, secret=invite.secret), people[1])

    assert at_home(people[0], act).server.refused == {"expired": 1}


def test_an_invite_that_expires_while_facts_are_read(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        loop = asyncio.get_running_loop()

        def expire(facts: bytes) -> None:
            loop.call_soon_threadsafe(home.server._spend, home.server._open[0], "expired")
            while home.server.invites:
                time.sleep(0.01)

        with refused("expired"):
            await join(await home.invite(), people[1], "garage", [], expire)
        assert len(home.roster.members()) == 1

    at_home(people[0], act)


def test_a_man_in_the_middle_gets_nothing(people: list[Identity]) -> None:
    """Another certificate at the invite's address: the joining device sends not one byte through TLS."""
    got = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(b'{"dfca":1,"nonce":"' + b"A" * 43 + b'="}\n')
            got.append(await reader.read(-1))
        writer.transport.abort()

    async def run() -> None:
        server = await asyncio.start_server(record, "127.0.0.1", 0, ssl=server_context(people[2]))
        invite = Invite.make("127.0.0.1", server.sockets[0].getsockname()[1], people[0].id)
        with refused("other device"):
            await enter(invite, people[1])
        await asyncio.sleep(0.05)
        server.close()
        await server.wait_closed()

    asyncio.run(run())
    assert got in ([], [b""])


def test_a_recorded_request_is_worth_nothing(people: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    original = handshake.JoinRequest.to_message
    monkeypatch.setattr(handshake.JoinRequest, "to_message", lambda self: sent.append(original(self)) or original(self))

    async def act(home: Home) -> None:
        invite = await home.invite()
        with pytest.raises(DataError):
            await join(invite, people[1], "garage", [], lambda facts: (_ for _ in ()).throw(DataError("no")))
        assert b"wrong secret" in await attack(invite, json.dumps(sent[0]).encode() + b"\n")
        stolen = sent[0] | {"name": "other"}
        assert b"wrong secret" in await attack(invite, json.dumps(stolen).encode() + b"\n")
        assert len(home.roster.members()) == 1

    at_home(people[0], act)


def test_garbage_is_refused_and_the_server_lives(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        invite = await home.invite()
        assert await attack(invite, b"GET / HTTP/1.0\r\n\r\n", tls=False) != b"x"
        for line in (b"garbage\n", b"[]\n", b"{}\n", b"[" * 60_000 + b"\n", b"\xff\xfe\n", b'{"nonce":"\\ud800"}\n'):
            assert b'"refused":"malformed"' in await attack(invite, line)
        await attack(invite, b"x" * 10_000_000)
        home.server.settings = HASTY
        drip = await attack(invite, *[b"{"] * 50, pause_s=0.05)
        assert b'"refused":"too slow"' in drip or home.server.refused["too slow"]
        home.server.settings = LOCAL
        await enter(invite, people[1])
        assert home.server.refused["malformed"] == 6
        assert home.server.refused["too long"] == 1
        assert home.server.refused["too slow"] >= 1
        assert home.server.refused["no TLS"] == 1

    at_home(people[0], act)


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.lists(st.text(max_size=9), max_size=2)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([field.name for field in fields(JoinRequest)]), VALUES, max_size=3))
def test_a_request_is_read_or_refused(changes: dict[str, Any]) -> None:
    good = JoinRequest(b"certificate", "garage", ("192.0.2.1:1",), "1", bytes(32), bytes(32), b"signature")
    assert JoinRequest.from_message(good.to_message()) == good
    with suppress(BadMessage):  # and nothing else
        read = JoinRequest.from_message(good.to_message() | changes)
        assert JoinRequest.from_message(read.to_message()) == read
        assert read.fields()


def test_many_connections_do_not_keep_a_device_out(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        invite = await home.invite()
        idle = [await asyncio.open_connection(invite.host, invite.port) for _ in range(60)]
        await enter(invite, people[1])
        assert home.server.refused["too many connections"] >= 60 - FEW.connections
        for _, writer in idle:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    at_home(people[0], act, FEW)


def test_a_removed_device_stays_out(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        home.roster.introduce(people[0], people[1].certificate, "garage")
        home.roster.remove(people[0], people[1].id)
        with refused("removed"):
            await enter(await home.invite(), people[1])

    at_home(people[0], act)


def test_the_certificate_of_another_device_is_refused(people: list[Identity]) -> None:
    async def act(home: Home) -> None:
        borrowed = replace(people[1], certificate=people[2].certificate, id=people[2].id)
        with refused("refused"):
            await enter(await home.invite(), borrowed)
        with refused("refused"):
            await enter(await home.invite(), people[0])

    assert at_home(people[0], act).server.refused == {"signature": 1, "itself": 1}


@pytest.mark.parametrize("purpose", ["welcome", "roster"])
def test_an_inviter_that_does_not_know_the_secret_is_refused(
    people: list[Identity], monkeypatch: pytest.MonkeyPatch, purpose: str
) -> None:
    class Liar(Transcript):
        def proof(self, secret: bytes, purpose_: str, *fields: bytes) -> bytes:
            return super().proof(bytes(16) if purpose_ == purpose else secret, purpose_, *fields)

    monkeypatch.setattr(pairing, "Transcript", Liar)

    async def act(home: Home) -> None:
        with refused("wrong secret"):
            await enter(await home.invite(), people[1])

    at_home(people[0], act)


def test_a_roster_with_forged_records_is_refused(people: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(home: Home) -> None:
        forged = sign_record(Removal(people[0].id, people[0].id, ()), people[2], SWARM)
        records = home.roster.records
        monkeypatch.setattr(home.roster, "records", lambda: [*records(), forged])
        with refused("roster"):
            await enter(await home.invite(), people[1])

    at_home(people[0], act)


def test_another_version_is_explained(people: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(home: Home) -> None:
        monkeypatch.setattr(pairing, "PROTOCOL", 2)
        with pytest.raises(PairingError, match="by version '2' of the protocol, this device by 1; install the same"):
            await enter(await home.invite(), people[1])

    at_home(people[0], act)


def test_a_bad_name_or_address_is_refused_before_anything_is_sent(people: list[Identity], tmp_path: Path) -> None:
    invite = Invite.make("127.0.0.1", 9, people[0].id)
    for name, address in (("", "192.0.2.1:1"), ("a", "nowhere")):
        with pytest.raises(ConfigError, match="must"):
            asyncio.run(join(invite, people[1], name, [address], lambda facts: None))


def test_the_vectors_of_the_protocol_page() -> None:
    """What another language is tested with is what this one does."""
    page = (Path(__file__).parents[2] / "docs" / "protocol-trust.md").read_text()
    values = json.loads(page.rpartition("```json\n")[2].partition("```")[0])
    a, b, swarm = values["inviter"], values["joiner"], values["swarm"]
    nonces = [bytes.fromhex(values[f"{who}_nonce"]) for who in ("inviter", "joiner")]
    transcript = Transcript(a, b, *nonces)
    certificate = b"CERTIFICATE\n"
    introduction = Introduction(b, "garage", certificate, ("192.0.2.2:7447",), True, True, a, 3)
    contact = Contact(b, ("[2001:db8::1]:1",), 7).signed_bytes(swarm)
    assert values == values | {
        "number_of_joiner": peer_number(b),
        "code": transcript.code(),
        "accept": transcript.proof(bytes.fromhex(values["secret"]), "accept").hex(),
        "introduction": hashlib.sha256(introduction.signed_bytes(swarm)).hexdigest(),
        "removal": hashlib.sha256(Removal(b, a, (a, b)).signed_bytes(swarm)).hexdigest(),
        "contact": hashlib.sha256(contact).hexdigest(),
        "contact_bytes": contact.hex(),
    }
    for reason in (*RosterReason, *CURES):
        assert reason in " ".join(page.split()), reason
