"""The inviting end of a pairing: a device with an invite becomes a member. docs/protocol-trust.md has every byte of it.

A invites, B joins. B checks A's ID before it sends anything; both prove the secret by HMAC over both IDs and nonces,
and never send it; B becomes a member only after it has seen and accepted the swarm's facts.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from dfca.base.errors import ConfigError, DfcaError
from dfca.node.addresses import outgoing_hosts
from dfca.node.trust import handshake, records
from dfca.node.trust.handshake import PROTOCOL, BadMessage, Door, JoinRequest, Knock, Listen, TlsDoor, Transcript
from dfca.node.trust.identity import Identity, check_certificate, verify
from dfca.node.trust.invite import LIFETIME_S, Invite
from dfca.node.trust.membership import Member
from dfca.node.trust.records import canonical
from dfca.node.trust.roster import Roster

MAX_OPEN = 8
SPENT_KEPT = 64
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairingSettings:
    """How a device invites."""

    host: str | None = None  # the address in the invite; None: the one that this device sends from
    bind: str = ""  # where to listen; empty: everywhere
    may_introduce: bool = False  # whether devices that join may introduce others
    attempts: int = 5  # wrong secrets after which an invite is burnt
    connections: int = 32  # at once; one more ends the oldest that has not proved the secret
    prove_s: float = 10.0  # from the first byte to the proof of the secret, TLS included
    accept_s: float = 120.0  # for the other device to check the facts against its data


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
    """Listens while an invite is open, and makes devices that prove its secret members.

    `on_joined(member, code)` is called when a device has become a member, before it is sent the roster: save the roster
    there; if that raises a DfcaError, the device is refused and may come again: one that is forgotten would be a member
    that nobody knows. `refused` counts the other attempts by reason.
    """

    def __init__(
        self,
        settings: PairingSettings | None = None,
        on_joined: Callable[[Member, str], None] | None = None,
        listen: Listen = TlsDoor,
    ) -> None:
        self.settings = settings or PairingSettings()
        self.on_joined = on_joined
        self._listen = listen
        self.refused: Counter[str] = Counter()
        self._open: list[OpenInvite] = []
        self._spent: deque[tuple[Invite, str]] = deque(maxlen=SPENT_KEPT)
        self._visits: list[Visit] = []
        self._door: Door | None = None
        self._accepting: asyncio.Task[None] | None = None

    @property
    def invites(self) -> list[Invite]:
        """The invites that can still be used."""
        return [entry.invite for entry in self._open]

    async def open(
        self, identity: Identity, roster: Roster, facts: bytes, port: int = 0, lifetime_s: float = LIFETIME_S
    ) -> Invite:
        """Open an invite for one device and listen until it is used, expired or burnt.

        If another one is open, `port` is ignored and that one's is used. Raises ConfigError if this device may not
        introduce, the port cannot be used, or too many invites are open.
        """
        if not roster.may_introduce(identity.id):
            raise ConfigError(
                "this device may not introduce others to its swarm; invite from one that may: "
                + (
                    ", ".join(other.name for other in roster.members().values() if other.may_introduce)
                    or "none is left"
                )
            )
        if len(self._open) >= MAX_OPEN:
            raise ConfigError(f"{MAX_OPEN} invites are open; use them or wait until they expire")
        if not 0 < len(facts) <= handshake.MAX_FACTS_BYTES:
            raise ConfigError(
                f"the facts of the swarm have {len(facts)} bytes; 1 to {handshake.MAX_FACTS_BYTES} can be sent"
            )
        if self._door is None:
            if self._accepting is not None:  # the port is closed when it has ended
                await asyncio.gather(self._accepting, return_exceptions=True)
            door = self._door = self._listen(identity, self.settings.bind, port)
            self._accepting = asyncio.get_running_loop().create_task(self._accept(door))
            self._accepting.add_done_callback(lambda _: door.close())
        host = self.settings.host or next(iter(outgoing_hosts()), "127.0.0.1")
        entry = OpenInvite(Invite.make(host, self._door.port, identity.id), identity, roster, facts)
        entry.timer = asyncio.get_running_loop().call_later(lifetime_s, self._spend, entry, "expired")
        self._open.append(entry)
        return entry.invite

    async def close(self) -> None:
        """Close all invites and the port."""
        for entry in tuple(self._open):
            self._spend(entry, "closed")
        self._stop_listening()
        tasks = [visit.task for visit in self._visits]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *((self._accepting,) if self._accepting else ()), return_exceptions=True)
        self._accepting = None

    def _spend(self, entry: OpenInvite, why: str) -> None:
        """Invalidate an invite; with the last one the port closes."""
        if entry not in self._open:
            return
        self._open.remove(entry)
        self._spent.append((entry.invite, why))
        if entry.timer is not None:
            entry.timer.cancel()
        if not self._open:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._door is not None and self._accepting is not None:
            self._accepting.cancel()
            self._door = None

    async def _accept(self, door: Door) -> None:
        while True:
            try:
                knock = await door.wait()
            except OSError:  # too many open files, or the other end is gone
                await asyncio.sleep(0.1)
                continue
            if not self._make_room():
                knock.close()
                continue
            visit = Visit(asyncio.get_running_loop().create_task(self._serve(knock)))
            self._visits.append(visit)
            visit.task.add_done_callback(lambda _, visit=visit: self._forget(visit))  # type: ignore[misc]

    def _make_room(self) -> bool:
        """Return whether there is room for one more visit; end one that has proved nothing if necessary."""
        if len(self._visits) < self.settings.connections:
            return True
        self.refused["too many connections"] += 1
        oldest = next((visit for visit in self._visits if not visit.proved), None)
        if oldest is None:
            return False
        oldest.task.cancel()
        self._visits.remove(oldest)
        return True

    def _forget(self, visit: Visit) -> None:
        if visit in self._visits:
            self._visits.remove(visit)

    async def _serve(self, knock: Knock) -> None:
        """Serve one connection; no error of it ends the server."""
        deadline = asyncio.get_running_loop().time() + self.settings.prove_s
        writer = None
        try:
            async with asyncio.timeout_at(deadline):
                reader, writer = await knock.enter(self.settings.prove_s)
            await self._talk(reader, writer, deadline)
        except (PairingRefused, BadMessage) as error:
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
                knock.close()
            else:
                await handshake.close(writer)

    async def _refuse(self, writer: asyncio.StreamWriter | None, reason: str) -> None:
        self.refused[reason] += 1
        log.info("pairing refused: %s", reason)
        if writer is not None:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await handshake.send_message(writer, {"refused": reason})

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: float) -> None:
        nonce = secrets.token_bytes(handshake.NONCE_BYTES)
        async with asyncio.timeout_at(deadline):
            await handshake.send_message(writer, {"dfca": PROTOCOL, "nonce": handshake.encode(nonce)})
            request = JoinRequest.from_message(await handshake.read_message(reader))
        entry, transcript = self._check(request, nonce)
        task = asyncio.current_task()
        for visit in self._visits:
            visit.proved = visit.proved or visit.task is task
        secret, swarm, root = entry.invite.secret, entry.roster.swarm, entry.roster.root
        proof = transcript.proof(secret, "welcome", swarm.encode(), root.encode(), entry.facts)
        welcome: dict[str, Any] = {
            "swarm": swarm,
            "root": root,
            "facts": len(entry.facts),
            "proof": handshake.encode(proof),
        }
        await handshake.send_message(writer, welcome, more=entry.facts)
        async with asyncio.timeout(self.settings.accept_s):
            answer = await handshake.read_message(reader)
        if "decline" in answer:
            raise PairingRefused("declined")
        if not hmac.compare_digest(
            handshake.decode(answer, "accept", handshake.PROOF_BYTES), transcript.proof(secret, "accept")
        ):
            raise PairingRefused("wrong secret")
        self._introduce(entry, request, transcript.code())
        lines = [records.to_bytes(record) for record in entry.roster.records()]
        proof = transcript.proof(secret, "roster", canonical(*lines))
        head = {"records": len(lines), "proof": handshake.encode(proof)}
        await handshake.send_message(writer, head, more=b"".join(line + b"\n" for line in lines))

    def _check(self, request: JoinRequest, nonce: bytes) -> tuple[OpenInvite, Transcript]:
        """Return the invite whose secret the request proves."""
        try:
            joiner = check_certificate(request.certificate)
        except ValueError as error:
            raise PairingRefused("certificate") from error
        proves = partial(_proves, request, nonce, joiner)
        entry = next((entry for entry in self._open if proves(entry.invite)), None)
        if entry is None:
            raise PairingRefused(self._why_unknown(proves))
        if joiner == entry.identity.id:
            raise PairingRefused("itself")
        if entry.roster.is_removed(joiner):
            raise PairingRefused("removed")
        transcript = Transcript(entry.identity.id, joiner, nonce, request.nonce)
        if not verify(request.certificate, transcript.bytes_for("join", *request.fields()), request.signature):
            raise PairingRefused("signature")
        return entry, transcript

    def _why_unknown(self, proves: Callable[[Invite], bool]) -> str:
        """Return why no open invite fits: a spent one, or a wrong secret, which counts against all open ones."""
        for invite, why in self._spent:
            if proves(invite):
                return why
        for entry in tuple(self._open):
            entry.wrong += 1
            if entry.wrong >= self.settings.attempts:
                self._spend(entry, "burnt")
                self.refused["burnt"] += 1
        return "wrong secret"

    def _introduce(self, entry: OpenInvite, request: JoinRequest, code: str) -> None:
        if entry not in self._open:  # another device was faster, or it expired
            raise PairingRefused(next((why for invite, why in self._spent if invite == entry.invite), "used"))
        try:
            member = entry.roster.introduce(
                entry.identity, request.certificate, request.name, request.addresses, self.settings.may_introduce
            )
            if self.on_joined is not None:
                self.on_joined(member, code)
        except DfcaError as error:
            log.warning("a device that knows the secret cannot be introduced: %s", error)
            raise PairingRefused("not introduced") from error
        self._spend(entry, "used")


def _proves(request: JoinRequest, nonce: bytes, joiner: str, invite: Invite) -> bool:
    transcript = Transcript(invite.id, joiner, nonce, request.nonce)
    return hmac.compare_digest(request.proof, transcript.proof(invite.secret, "join", *request.fields()))
