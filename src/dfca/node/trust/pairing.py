"""Pairing: a device that holds an invite becomes a member. `docs/protocol-trust.md` has every byte of it.

A invites, B joins. B compares A's ID with the invite's before it sends anything; both prove the secret by HMAC over
both IDs and nonces, and never send it; B becomes a member only after it has seen the swarm's facts and wants to.

    A -> B   hello    version, nonce
    B -> A   join     certificate, name, addresses, nonce, proof, signature
    A -> B   welcome  swarm, root, proof; then the facts
    B -> A   accept   proof                                              (or: decline)
    A -> B   roster   number of records, proof; then the records
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from dfca.base.errors import ConfigError, DfcaError
from dfca.node.addresses import outgoing_hosts
from dfca.node.trust import records
from dfca.node.trust.handshake import (
    MAX_FACTS_BYTES,
    MAX_LINE,
    NONCE_BYTES,
    PROOF_BYTES,
    PROTOCOL,
    BadMessage,
    JoinRequest,
    Transcript,
    close,
    decode,
    encode,
    read_message,
    send_message,
)
from dfca.node.trust.identity import CERTIFICATE_FILE, KEY_FILE, Identity, check_certificate, verify
from dfca.node.trust.invite import LIFETIME_S, Invite
from dfca.node.trust.joining import Joined, PairingError, join
from dfca.node.trust.membership import Member
from dfca.node.trust.records import canonical
from dfca.node.trust.roster import Roster

__all__ = ["Joined", "PairingError", "PairingServer", "PairingSettings", "join"]

MAX_OPEN = 8
SPENT_KEPT = 64
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairingSettings:
    """How a device invites."""

    host: str | None = None
    """What the invite names as this device's address; None: the address that it would go out from."""
    bind: str = ""
    """Where to listen; empty: everywhere."""
    may_introduce: bool = False
    """Whether those who join may introduce others."""
    attempts: int = 5
    """After so many wrong secrets an invite is burnt."""
    connections: int = 32
    """So many at once; one more ends the oldest that has not proved the secret."""
    prove_s: float = 10.0
    """From the first byte to the proof of the secret, TLS included."""
    accept_s: float = 120.0
    """So long the other device may look at the facts (it may have to read its data)."""


@dataclass
class OpenInvite:
    """An invite that can still be used."""

    invite: Invite
    identity: Identity
    roster: Roster
    facts: bytes
    wrong: int = 0
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class Visit:
    """One connection to the pairing port."""

    task: asyncio.Task[None]
    proved: bool = False


class PairingRefused(Exception):
    """End a visit; the text is the reason that is counted and sent."""


class PairingServer:
    """Listens while an invite is open, and makes members of those who prove its secret.

    `on_joined(member, code)` is called when a device has become a member and before it is sent the roster: save the
    roster there. `refused` counts, by reason, what did not lead to a member.
    """

    def __init__(
        self,
        settings: PairingSettings | None = None,
        on_joined: Callable[[Member, str], None] | None = None,
    ) -> None:
        self.settings = settings or PairingSettings()
        self.on_joined = on_joined
        self.refused: Counter[str] = Counter()
        self._open: list[OpenInvite] = []
        self._spent: deque[tuple[Invite, str]] = deque(maxlen=SPENT_KEPT)
        self._visits: list[Visit] = []
        self._socket: socket.socket | None = None
        self._port = 0
        self._accepting: asyncio.Task[None] | None = None

    @property
    def invites(self) -> list[Invite]:
        """The invites that can still be used."""
        return [each.invite for each in self._open]

    async def open(
        self, identity: Identity, roster: Roster, facts: bytes, port: int = 0, lifetime_s: float = LIFETIME_S
    ) -> Invite:
        """Open an invite for one device and listen until it is used, expired or burnt.

        Where another one is open the port is that one's.

        Raises:
            ConfigError: if this device may not introduce, the port cannot be used, or too many invites are open.
        """
        if not roster.may_introduce(identity.id):
            raise ConfigError(
                "this device may not introduce others to its swarm; invite from one that may: "
                + (", ".join(each.name for each in roster.members().values() if each.may_introduce) or "none is left")
            )
        if len(self._open) >= MAX_OPEN:
            raise ConfigError(f"{MAX_OPEN} invites are open; use them or wait until they expire")
        if not 0 < len(facts) <= MAX_FACTS_BYTES:
            raise ConfigError(f"the facts of the swarm have {len(facts)} bytes; 1 to {MAX_FACTS_BYTES} can be sent")
        if self._socket is None:
            if self._accepting is not None:  # when it has ended the port is closed
                await asyncio.gather(self._accepting, return_exceptions=True)
            self._start_listening(identity, port)
        host = self.settings.host or next(iter(outgoing_hosts()), "127.0.0.1")
        each = OpenInvite(Invite.make(host, self._port, identity.id), identity, roster, facts)
        each.timer = asyncio.get_running_loop().call_later(lifetime_s, self._spend, each, "expired")
        self._open.append(each)
        return each.invite

    async def close(self) -> None:
        """Close all invites and the port."""
        for each in tuple(self._open):
            self._spend(each, "closed")
        self._stop_listening()
        tasks = [visit.task for visit in self._visits]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *((self._accepting,) if self._accepting else ()), return_exceptions=True)
        self._accepting = None

    def _spend(self, each: OpenInvite, why: str) -> None:
        """Take an invite out of use; with the last one the port closes."""
        if each not in self._open:
            return
        self._open.remove(each)
        self._spent.append((each.invite, why))
        if each.timer is not None:
            each.timer.cancel()
        if not self._open:
            self._stop_listening()

    def _start_listening(self, identity: Identity, port: int) -> None:
        context = _context(identity)
        listening = _listen(self.settings.bind, port)
        self._socket, self._port = listening, listening.getsockname()[1]
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listening, context))
        self._accepting.add_done_callback(lambda _: listening.close())

    def _stop_listening(self) -> None:
        if self._socket is not None and self._accepting is not None:
            self._accepting.cancel()
            self._socket = None

    async def _accept(self, listening: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # too many open files, or the other end is gone already
                await asyncio.sleep(0.1)
                continue
            if not self._make_room():
                connection.close()
                continue
            visit = Visit(loop.create_task(self._serve(connection, context)))
            self._visits.append(visit)
            visit.task.add_done_callback(partial(self._forget, visit))

    def _make_room(self) -> bool:
        """Return whether there is room for one more visit, if need be instead of one that has proved nothing."""
        if len(self._visits) < self.settings.connections:
            return True
        self.refused["too many connections"] += 1
        oldest = next((visit for visit in self._visits if not visit.proved), None)
        if oldest is None:
            return False
        oldest.task.cancel()
        self._visits.remove(oldest)
        return True

    def _forget(self, visit: Visit, _: asyncio.Task[None]) -> None:
        if visit in self._visits:
            self._visits.remove(visit)

    async def _serve(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        """Serve one connection; whatever it does, the server goes on."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_LINE, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        deadline = loop.time() + self.settings.prove_s
        writer = None
        try:
            async with asyncio.timeout_at(deadline):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol, connection, ssl=context, ssl_handshake_timeout=self.settings.prove_s
                )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            await self._talk(reader, writer, deadline)
        except PairingRefused as error:
            await self._refuse(writer, str(error))
        except BadMessage as error:
            await self._refuse(writer, str(error))
        except TimeoutError:
            await self._refuse(writer, "too slow")
        except (OSError, EOFError):  # also what TLS says of garbage
            self.refused["no TLS" if writer is None else "connection lost"] += 1
        except Exception:
            log.exception("pairing failed")
            await self._refuse(writer, "failed")
        finally:
            if writer is None:
                connection.close()
            else:
                await close(writer)

    async def _refuse(self, writer: asyncio.StreamWriter | None, reason: str) -> None:
        self.refused[reason] += 1
        log.info("pairing refused: %s", reason)
        if writer is not None:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await send_message(writer, {"refused": reason})

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: float) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        async with asyncio.timeout_at(deadline):
            await send_message(writer, {"dfca": PROTOCOL, "nonce": encode(nonce)})
            request = JoinRequest.from_message(await read_message(reader))
        each, transcript = self._check(request, nonce)
        task = asyncio.current_task()
        for visit in self._visits:
            visit.proved = visit.proved or visit.task is task
        swarm, root = each.roster.swarm, each.roster.root
        proof = transcript.proof(each.invite.secret, "welcome", swarm.encode(), root.encode(), each.facts)
        welcome: dict[str, Any] = {"swarm": swarm, "root": root, "facts": len(each.facts), "proof": encode(proof)}
        await send_message(writer, welcome, more=each.facts)
        async with asyncio.timeout(self.settings.accept_s):
            answer = await read_message(reader)
        if "decline" in answer:
            raise PairingRefused("declined")
        accepted = transcript.proof(each.invite.secret, "accept")
        if not hmac.compare_digest(decode(answer, "accept", PROOF_BYTES), accepted):
            raise PairingRefused("wrong secret")
        self._introduce(each, request, transcript.code())
        lines = [records.to_bytes(record) for record in each.roster.records()]
        proof = transcript.proof(each.invite.secret, "roster", canonical(*lines))
        head = {"records": len(lines), "proof": encode(proof)}
        await send_message(writer, head, more=b"".join(line + b"\n" for line in lines))

    def _check(self, request: JoinRequest, nonce: bytes) -> tuple[OpenInvite, Transcript]:
        """Return the invite whose secret the request proves."""
        try:
            joiner = check_certificate(request.certificate)
        except ValueError as error:
            raise PairingRefused("certificate") from error
        fields = request.fields()
        found, transcript = None, None
        for each in self._open:
            transcript = Transcript(each.identity.id, joiner, nonce, request.nonce)
            if hmac.compare_digest(request.proof, transcript.proof(each.invite.secret, "join", *fields)):
                found = each
                break
        if found is None or transcript is None:
            raise PairingRefused(self._why_unknown(request, nonce, joiner))
        if joiner == found.identity.id:
            raise PairingRefused("itself")
        if found.roster.is_removed(joiner):
            raise PairingRefused("removed")
        if not verify(request.certificate, transcript.bytes_for("join", *fields), request.signature):
            raise PairingRefused("signature")
        return found, transcript

    def _why_unknown(self, request: JoinRequest, nonce: bytes, joiner: str) -> str:
        """Return why no open invite fits: one of the past, or a wrong secret, which counts against all open ones."""
        for invite, why in self._spent:
            transcript = Transcript(invite.id, joiner, nonce, request.nonce)
            if hmac.compare_digest(request.proof, transcript.proof(invite.secret, "join", *request.fields())):
                return why
        for each in tuple(self._open):
            each.wrong += 1
            if each.wrong >= self.settings.attempts:
                self._spend(each, "burnt")
                self.refused["burnt"] += 1
        return "wrong secret"

    def _introduce(self, each: OpenInvite, request: JoinRequest, code: str) -> None:
        if each not in self._open:  # another device was faster, or the time is over
            raise PairingRefused(next((why for invite, why in self._spent if invite == each.invite), "used"))
        try:
            member = each.roster.introduce(
                each.identity, request.certificate, request.name, request.addresses, self.settings.may_introduce
            )
        except DfcaError as error:
            log.warning("a device that knows the secret cannot be introduced: %s", error)
            raise PairingRefused("not introduced") from error
        self._spend(each, "used")
        if self.on_joined is not None:
            self.on_joined(member, code)


def _context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity.folder / CERTIFICATE_FILE, identity.folder / KEY_FILE)
    return context


def _listen(bind: str, port: int) -> socket.socket:
    try:
        if bind:
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            listening = socket.create_server((bind, port), family=family)
        elif socket.has_dualstack_ipv6():
            listening = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listening = socket.create_server(("", port))
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        raise ConfigError(
            f"cannot listen for a new device on {bind or 'any address'} port {port}: "
            f"{os.strerror(number) if number else error}; choose another port for pairing"
        ) from error
    listening.setblocking(False)
    return listening
