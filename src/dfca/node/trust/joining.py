"""The joining end of a pairing. See `pairing`."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from dfca.base.errors import ConfigError, DfcaError
from dfca.node.trust import handshake, records
from dfca.node.trust.handshake import BadMessage, Connect, JoinRequest, Transcript, connect_tls
from dfca.node.trust.identity import Identity, check_certificate, is_device_id, short
from dfca.node.trust.invite import Invite
from dfca.node.trust.membership import Member
from dfca.node.trust.records import MalformedRecord, canonical
from dfca.node.trust.roster import MAX_RECORDS, Roster

CONNECT_S = 10.0
ANSWER_S = 15.0
ROSTER_S = 60.0
CURES = {
    "wrong secret": "copy the whole line again; after a few wrong secrets an invite is burnt",
    "used": "the invite was used before: every device needs one of its own",
    "expired": "the invite is too old: make a new one",
    "burnt": "too many wrong secrets were tried: make a new invite",
    "removed": "that is final: make a new device in an empty folder, and pair that one with another invite",
    "not introduced": "the inviting device says why in its log",
}  # what to do, by the reasons of the inviting device


class PairingError(DfcaError):
    """A pairing failed; `reason` is the short word that is counted."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True)
class Joined:
    """What a device has after it joined. The caller must compare swarm and root of the roster with the facts."""

    facts: bytes
    roster: Roster  # checked; it contains this device and the inviter
    code: str  # both ends show the same six characters
    inviter: Member


async def join(
    invite: str | Invite,
    identity: Identity,
    name: str,
    addresses: Iterable[str],
    check_facts: Callable[[bytes], None],
    connect: Connect = connect_tls,
) -> Joined:
    """Join the swarm of an invite; `check_facts` gets the swarm's facts (in a thread) and raises to decline.

    Raises ConfigError if the invite, the name or an address is malformed; PairingError if the pairing fails; the
    sentence says why and what to do; DfcaError for what `check_facts` raises; the device is not a member then.
    """
    invite = Invite.parse(invite) if isinstance(invite, str) else invite
    try:
        request = (records.check_name(name), records.check_addresses(list(addresses)))
    except MalformedRecord as error:
        raise ConfigError(f"{error}; got name {name!r}") from error
    reader, writer = await _connect(invite, connect)
    try:
        return await _join(JoinSession(invite, identity, reader, writer), request, check_facts)
    except BadMessage as error:
        raise PairingError(
            "malformed", f"{_place(invite)} sent something that is no pairing ({error}); use the same dfca at both ends"
        ) from error
    except TimeoutError as error:
        raise PairingError(
            "too slow", f"{_place(invite)} does not answer any more; make a new invite and try again"
        ) from error
    except (OSError, EOFError) as error:
        raise PairingError(
            "connection lost", f"the connection to {_place(invite)} was lost ({error}); try again, with a new invite"
        ) from error
    finally:
        await handshake.close(writer)


@dataclass(frozen=True)
class JoinSession:
    """One attempt to join."""

    invite: Invite
    identity: Identity
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def receive(self, within_s: float) -> dict[str, Any]:
        """Read a message. Raises PairingError for a refusal."""
        async with asyncio.timeout(within_s):
            values = await handshake.read_message(self.reader)
        if "refused" in values:
            raise _refusal(self.invite, str(values["refused"])[:200])
        return values


async def _join(
    joining: JoinSession, request: tuple[str, tuple[str, ...]], check_facts: Callable[[bytes], None]
) -> Joined:
    invite, identity, reader, writer = joining.invite, joining.identity, joining.reader, joining.writer
    hello = await joining.receive(ANSWER_S)
    if hello.get("dfca") != handshake.PROTOCOL:
        raise PairingError(
            "version",
            f"{_place(invite)} pairs by version {str(hello.get('dfca'))[:9]!r} of the protocol, this device by "
            f"{handshake.PROTOCOL}; install the same dfca at both ends",
        )
    transcript, sent = _make_request(invite, identity, request, handshake.decode(hello, "nonce", handshake.NONCE_BYTES))
    await handshake.send_message(writer, sent.to_message())
    welcome = await joining.receive(ANSWER_S)
    swarm, root, size = welcome.get("swarm"), welcome.get("root"), welcome.get("facts")
    if not isinstance(swarm, str) or not 0 < len(swarm) <= handshake.MAX_SWARM or not isinstance(root, str):
        raise BadMessage("malformed")
    if not is_device_id(root) or not isinstance(size, int) or not 0 <= size <= handshake.MAX_FACTS_BYTES:
        raise BadMessage("malformed")
    async with asyncio.timeout(ROSTER_S):
        facts = await reader.readexactly(size)
    expected = transcript.proof(invite.secret, "welcome", swarm.encode(), root.encode(), facts)
    _compare(invite, handshake.decode(welcome, "proof", handshake.PROOF_BYTES), expected)
    try:
        await asyncio.to_thread(check_facts, facts)
    except BaseException:
        with suppress(OSError, TimeoutError):
            await handshake.send_message(writer, {"decline": True})
        raise
    await handshake.send_message(writer, {"accept": handshake.encode(transcript.proof(invite.secret, "accept"))})
    roster = await _receive_roster(joining, transcript, Roster(swarm, root))
    inviter = roster.member(invite.id)
    if inviter is None or identity.id not in roster.members():
        raise PairingError("roster", f"{_place(invite)} sent a roster without itself or this device; try a new invite")
    return Joined(facts, roster, transcript.code(), inviter)


def _make_request(
    invite: Invite, identity: Identity, request: tuple[str, tuple[str, ...]], inviter_nonce: bytes
) -> tuple[Transcript, JoinRequest]:
    nonce = secrets.token_bytes(handshake.NONCE_BYTES)
    transcript = Transcript(invite.id, identity.id, inviter_nonce, nonce)
    try:
        version = metadata.version("dfca")
    except metadata.PackageNotFoundError:  # run from its sources
        version = "unknown"
    plain = JoinRequest(identity.certificate, *request, version, nonce)
    fields = plain.fields()
    return transcript, replace(
        plain,
        proof=transcript.proof(invite.secret, "join", *fields),
        signature=identity.sign(transcript.bytes_for("join", *fields)),
    )


async def _receive_roster(joining: JoinSession, transcript: Transcript, roster: Roster) -> Roster:
    head = await joining.receive(ROSTER_S)
    count = head.get("records")
    if not isinstance(count, int) or not 0 < count <= MAX_RECORDS:
        raise BadMessage("malformed")
    lines = []
    async with asyncio.timeout(ROSTER_S):
        for _ in range(count):
            lines.append((await handshake.read_line(joining.reader)).rstrip(b"\n"))
    _compare(
        joining.invite,
        handshake.decode(head, "proof", handshake.PROOF_BYTES),
        transcript.proof(joining.invite.secret, "roster", canonical(*lines)),
    )
    reasons = roster.merge(lines)
    if reasons:
        raise PairingError(
            "roster",
            f"{len(reasons)} of {count} records of the roster of {_place(joining.invite)} do not hold ({reasons[0]}); "
            "do not join this swarm, or pair with another member of it",
        )
    return roster


async def _connect(invite: Invite, connect: Connect) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and check that it is the device of the invite before anything is sent to it."""
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer, der = await connect(invite.host, invite.port)
    except (OSError, TimeoutError) as error:
        detail = f" ({error})" if str(error) else ""
        raise PairingError(
            "unreachable",
            f"no invite is open at {invite.host} port {invite.port}{detail}; it may be used or expired: make a new one "
            "with `dfca node invite`, and check that this device reaches that address",
        ) from error
    try:
        other = check_certificate(ssl.DER_cert_to_PEM_cert(der).encode())
    except ValueError:
        other = ""
    if not hmac.compare_digest(other.encode(), invite.id.encode()):
        writer.transport.abort()
        raise PairingError(
            "other device",
            f"{invite.host} port {invite.port} is not device {short(invite.id)} of the invite but "
            f"{short(other) or 'something else'}; nothing was sent to it: make a new invite and check the address",
        )
    return reader, writer


def _compare(invite: Invite, proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise PairingError(
            "wrong secret", f"{_place(invite)} does not know the secret of this invite; make a new one and use it once"
        )


def _refusal(invite: Invite, text: str) -> PairingError:
    reason = text if text in CURES else "refused"
    readable = "".join(filter(str.isprintable, text))
    cure = CURES.get(text, "make a new invite and try again")
    return PairingError(reason, f"{_place(invite)} refused this device: {readable}; {cure}")


def _place(invite: Invite) -> str:
    return f"device {short(invite.id)} at {invite.host} port {invite.port}"
