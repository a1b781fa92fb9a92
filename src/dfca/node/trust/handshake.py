"""What a pairing says, for both ends, and the doors through which it is said. See `pairing`.

Messages are lines of JSON with proofs, and end in a code of six characters. A door is where a device waits for
connections, with TLS on sockets; simulations have others.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from dfca.base.errors import ConfigError
from dfca.node.trust import records
from dfca.node.trust.identity import CERTIFICATE_FILE, KEY_FILE, Identity, encode_id
from dfca.node.trust.records import MalformedRecord, canonical

PROTOCOL = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_LINE = records.MAX_RECORD_BYTES + 2
MAX_FACTS_BYTES = 1 << 24
MAX_SWARM = 64
WRITE_S = 60.0


class BadMessage(ValueError):
    """A malformed message; the text is the reason that is counted."""


@dataclass(frozen=True)
class Transcript:
    """Identifies one pairing by both IDs and nonces, so that nothing from another pairing fits."""

    inviter: str
    joiner: str
    inviter_nonce: bytes
    joiner_nonce: bytes

    def bytes_for(self, purpose: str, *fields: bytes) -> bytes:
        """Return the bytes that a proof or signature for a purpose covers."""
        ids = (self.inviter.encode(), self.joiner.encode())
        return canonical(f"dfca pairing 1 {purpose}".encode(), *ids, self.inviter_nonce, self.joiner_nonce, *fields)

    def proof(self, secret: bytes, purpose: str, *fields: bytes) -> bytes:
        """Return HMAC-SHA256 with the invite's secret."""
        return hmac.digest(secret, self.bytes_for(purpose, *fields), "sha256")

    def code(self) -> str:
        """Return the six characters that both ends show."""
        return encode_id(hashlib.sha256(self.bytes_for("code")).digest())[:6].upper()


@dataclass(frozen=True)
class JoinRequest:
    """What the joining device sends about itself."""

    certificate: bytes
    name: str
    addresses: tuple[str, ...]
    version: str
    nonce: bytes
    proof: bytes = b""
    signature: bytes = b""

    def fields(self) -> tuple[bytes, ...]:
        """Return what proof and signature cover besides IDs and nonces."""
        addresses = canonical(*(address.encode() for address in self.addresses))
        return (self.certificate, self.name.encode(), addresses, self.version.encode())

    def to_message(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "certificate": self.certificate.decode("ascii"),
            "name": self.name,
            "addresses": list(self.addresses),
            "version": self.version,
            "nonce": encode(self.nonce),
            "proof": encode(self.proof),
            "signature": encode(self.signature),
        }

    @classmethod
    def from_message(cls, values: dict[str, Any]) -> JoinRequest:
        """Read a request and check its form. Raises BadMessage."""
        certificate, version = values.get("certificate"), values.get("version")
        if not isinstance(certificate, str) or not certificate.isascii():
            raise BadMessage("malformed")
        if not isinstance(version, str) or not version.isascii() or len(version) > 64:
            raise BadMessage("malformed")
        try:
            name, addresses = records.check_name(values.get("name")), records.check_addresses(values.get("addresses"))
        except MalformedRecord as error:
            raise BadMessage("malformed") from error
        return cls(
            certificate=certificate.encode(),
            name=name,
            addresses=addresses,
            version=version,
            nonce=decode(values, "nonce", NONCE_BYTES),
            proof=decode(values, "proof", PROOF_BYTES),
            signature=decode(values, "signature"),
        )


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Read one line. Raises BadMessage if it is longer than MAX_LINE, EOFError if the connection ends before."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise BadMessage("too long") from error


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read one JSON object on a line. Raises BadMessage for anything else."""
    line = await read_line(reader)
    try:
        values = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise BadMessage("malformed") from error
    if not isinstance(values, dict):
        raise BadMessage("malformed")
    return values


async def send_message(writer: asyncio.StreamWriter, values: dict[str, Any], more: bytes = b"") -> None:
    """Send one JSON object as a line, followed by `more`."""
    writer.write(json.dumps(values, separators=(",", ":")).encode() + b"\n" + more)
    async with asyncio.timeout(WRITE_S):
        await writer.drain()


async def close(writer: asyncio.StreamWriter) -> None:
    """End a connection without waiting for the other end."""
    writer.close()
    with suppress(OSError, TimeoutError, ssl.SSLError):
        async with asyncio.timeout(1):
            await writer.wait_closed()
    writer.transport.abort()


def encode(data: bytes) -> str:
    """Write bytes as text for JSON."""
    return base64.b64encode(data).decode()


def decode(values: dict[str, Any], key: str, size: int | None = None) -> bytes:
    """Read bytes from JSON. Raises BadMessage if they are missing, malformed, or of another size."""
    text = values.get(key)
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) and len(text) <= 200 else b""
    except (binascii.Error, ValueError):
        data = b""
    if not data or (size is not None and len(data) != size):
        raise BadMessage("malformed")
    return data


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Knock(Protocol):
    """A connection that has come and has proved nothing yet."""

    async def enter(self, within_s: float) -> Streams:
        """Prove the own identity. Raises OSError or TimeoutError."""

    def close(self) -> None:
        """End it before `enter`."""


class Door(Protocol):
    """Where a device waits for connections."""

    port: int

    async def wait(self) -> Knock:
        """Return the next one. Raises OSError."""

    def close(self) -> None:
        """Stop listening; connections that have come stay."""


Listen = Callable[[Identity, str, int], Door]
"""Opens a door at an address (empty: everywhere) and port (0: any). Raises ConfigError."""
Connect = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]]]
"""Connects with a host and port; returns also the certificate (DER) that the other end has proved. Raises OSError."""


class TlsDoor:
    """A door on a socket."""

    def __init__(self, identity: Identity, bind: str, port: int) -> None:
        self._context = server_context(identity)
        self._socket = _listen(bind, port)
        self.port: int = self._socket.getsockname()[1]

    async def wait(self) -> Knock:
        connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        return _TlsKnock(connection, self._context)

    def close(self) -> None:
        self._socket.close()


class _TlsKnock:
    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._connection, self._context, self.close = connection, context, connection.close

    async def enter(self, within_s: float) -> Streams:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_LINE, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, self._connection, ssl=self._context, ssl_handshake_timeout=within_s
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def connect_tls(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Connect by TLS. No authority signs certificates: the caller checks whose it is before it sends anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="", limit=MAX_LINE)
    return reader, writer, writer.get_extra_info("ssl_object").getpeercert(binary_form=True)


def server_context(identity: Identity) -> ssl.SSLContext:
    """Make the TLS settings of the device that invites."""
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
