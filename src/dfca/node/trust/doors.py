"""The doors of pairing: connections that a device waits for or makes, with TLS on sockets. Simulations have others."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Protocol

from dfca.base.errors import ConfigError
from dfca.node.trust.handshake import MAX_LINE
from dfca.node.trust.identity import CERTIFICATE_FILE, KEY_FILE, Identity

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
