"""The wire of real nodes: gRPC with mutual TLS. Certificates decide who may connect, and the roster on every call.

A channel trusts the certificate of one member. The server accepts connections of the devices in the roster and answers
members only. The ID of a caller is the digest of the key in its certificate, never what a message says.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

# Before grpc is loaded: it would write every failed handshake of a stranger to the terminal.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio

from dfca.base.errors import ConfigError, DataError
from dfca.node.addresses import is_loopback, join_address, split_address
from dfca.node.net.links.wire import Code, InStream, OnProbe, OnRead, OnTalk, StreamBroken, StreamCancelled, StreamEnded
from dfca.node.net.options import NetOptions
from dfca.node.trust.identity import Identity, device_id
from dfca.node.trust.roster import Roster
from dfca.node.wire.frames import MOST_CHUNK_BYTES, MOST_FRAME_BYTES, READ, SERVICE, TALK

ID_HEADER = "dfca-device"  # metadata with the caller's ID where there is no TLS
ROOTS_S = 1.0  # the least time between two sets of roots of a server
SETTLE_S = 0.1  # how long new roots wait for handshakes that have just begun with the old ones
MESSAGE_BYTES = max(MOST_CHUNK_BYTES, MOST_FRAME_BYTES) + 1024

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel: a new channel leaves a stuck connection
    ("grpc.max_metadata_size", 8192),
]
SERVER_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else two nodes could share a port, each with half of the calls
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_allowed_incoming_connections", 512),  # the rest wait in the backlog: the disk needs descriptors too
    ("grpc.max_metadata_size", 8192),
]


class Handshakes:
    """Counts handshakes without a following call: no certificate, a foreign one, no TLS at all.

    gRPC does not report a failed handshake, but asks for the certificates when one begins, in its own threads.
    """

    def __init__(self, patience_s: float = 6.0) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._begun: deque[float] = deque(maxlen=1 << 16)
        self._connections: OrderedDict[str, None] = OrderedDict()

    def begin(self) -> None:
        """Note that a handshake begins."""
        with self._lock:
            self._begun.append(time.monotonic())

    def call(self, connection: str) -> None:
        """Note a call; connection: the caller's address and port."""
        with self._lock:
            if connection not in self._connections:
                self._connections[connection] = None
                if self._begun:
                    self._begun.popleft()
                if len(self._connections) > 1024:
                    self._connections.popitem(last=False)

    def take_failed(self) -> int:
        """Return how many handshakes have failed since the last call of this."""
        failed = 0
        with self._lock:
            while self._begun and time.monotonic() - self._begun[0] > self._patience_s:
                self._begun.popleft()
                failed += 1
        return failed


def make_server(
    identity: Identity, roster: Roster, options: NetOptions, handshakes: Handshakes, handlers: Any
) -> tuple[Any, int]:
    """Make a server that listens; returns it and its port.

    Raises:
        ConfigError: if the port is not free or the host not one of this machine.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handlers,))
    address = join_address(options.host, options.port)
    try:
        if options.insecure:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _server_credentials(identity, roster, handshakes))
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigError(
            f"cannot listen on {address}: the port is in use or the host is not an address of this machine; stop the "
            "other program, or choose another port or host in [network] of node.toml"
        )
    return server, port


def _server_credentials(identity: Identity, roster: Roster, handshakes: Handshakes) -> Any:
    """Make credentials whose roots are the certificates of the roster when a handshake begins."""
    # A removed device stays among the roots until it was shown its removal. Membership is checked at every call.
    #
    # gRPC frees the old roots while another thread may be about to use them (grpc issue 36693, open; grpcio 1.85 aborts
    # with "Check failed: prior > 0"). It calls `fetch` under a mutex and leaves the mutex before the thread takes its
    # reference to the roots. So new roots are returned only if they differ, at most once in ROOTS_S, and after a pause
    # of SETTLE_S inside the mutex: threads that passed `fetch` before have taken their reference by then. This narrows
    # the gap; it cannot be closed from outside of gRPC.

    def roots() -> bytes:
        # Without any root no certificate would be required: use the own one if nobody else is known.
        return b"".join(roster.certificates() or [identity.certificate])

    def configuration(trusted: bytes) -> Any:
        return grpc.ssl_server_certificate_configuration([(identity.key, identity.certificate)], trusted)

    current, since = roots(), time.monotonic()
    lock = threading.Lock()

    def fetch() -> Any:
        """Return the roots if they have changed, else None."""
        nonlocal current, since
        handshakes.begin()
        with lock:
            newest, now = roots(), time.monotonic()
            if newest == current or now - since < ROOTS_S:
                return None
            time.sleep(SETTLE_S)
            current, since = newest, time.monotonic()
        return configuration(newest)

    return grpc.dynamic_ssl_server_credentials(configuration(current), fetch, require_client_authentication=True)


def make_channel(identity: Identity, member: str, certificate: bytes, address: str, insecure: bool) -> Any:
    """Make a channel that only the given member can answer. Raises ConfigError for plain text to another machine."""
    if insecure:
        if not is_loopback(split_address(address)[0]):
            raise ConfigError(f"insecure is for loopback only, got the address {address}; drop insecure")
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(certificate, identity.key, identity.certificate)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", member)]
    return grpc.aio.secure_channel(address, credentials, options=options)


def call_metadata(identity: Identity, insecure: bool) -> Any:
    """Return the metadata of a call: empty under TLS."""
    return ((ID_HEADER, identity.id),) if insecure else None


def caller_of(context: Any, insecure: bool) -> str | None:
    """Return the ID of a caller: the digest of the key in its certificate."""
    if insecure:
        claimed = dict(context.invocation_metadata()).get(ID_HEADER)
        return claimed if isinstance(claimed, str) else None
    certificates = context.auth_context().get("x509_pem_cert")
    if not certificates:
        return None
    try:
        return device_id(certificates[0])
    except DataError:
        return None


def handlers_of(talk: Callable[..., Any], read: Callable[..., Any], probe: Callable[..., Any]) -> Any:
    """Make the handlers of the service; requests and answers are bytes."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Talk": grpc.stream_stream_rpc_method_handler(talk),
            "Read": grpc.unary_stream_rpc_method_handler(read),
            "Probe": grpc.unary_unary_rpc_method_handler(probe),
        },
    )


_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)  # raised by a stream that has ended


def _broken(error: BaseException) -> StreamBroken:
    if isinstance(error, grpc.aio.AioRpcError):
        return StreamBroken((error.details() or "")[:200], error.code().name.lower())
    return StreamBroken(str(error)[:200])


class _GrpcStream:
    """A client's call, or a server's context."""

    def __init__(self, call: Any, caller: str | None = None) -> None:
        self._call, self.caller = call, caller

    async def read(self) -> bytes:
        try:
            data = await self._call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise StreamCancelled from None
        except _BROKEN as error:
            raise _broken(error) from error
        if data is grpc.aio.EOF:
            raise StreamEnded
        return bytes(data)

    async def write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except _BROKEN as error:
            raise _broken(error) from error

    def cancel(self) -> None:
        self._call.cancel()

    async def abort(self, code: Code, text: str) -> None:
        await self._call.abort(grpc.StatusCode[code.upper()], text)


class _GrpcConnection:
    def __init__(self, channel: Any, metadata: Any) -> None:
        self._channel, self._metadata = channel, metadata

    def talk(self) -> _GrpcStream:
        return _GrpcStream(self._channel.stream_stream(TALK)(metadata=self._metadata))

    def read(self, request: bytes) -> _GrpcStream:
        return _GrpcStream(self._channel.unary_stream(READ)(request, metadata=self._metadata))

    async def close(self) -> None:
        await self._channel.close()


class GrpcWire:
    """The calls of one node over gRPC, see `Wire`."""

    def __init__(self, identity: Identity, roster: Roster, options: NetOptions) -> None:
        self._identity, self._roster, self._options = identity, roster, options
        self._handshakes = Handshakes()
        self._server: Any = None

    async def serve(self, talk: OnTalk, read: OnRead, probe: OnProbe) -> int:
        async def on_talk(_requests: Any, context: Any) -> None:
            await talk(self._accept(context))

        async def on_read(request: bytes, context: Any) -> None:
            await read(request, self._accept(context))

        async def on_probe(request: bytes, context: Any) -> bytes:
            return await probe(request, self._accept(context))

        handlers = handlers_of(on_talk, on_read, on_probe)
        self._server, port = make_server(self._identity, self._roster, self._options, self._handshakes, handlers)
        await self._server.start()
        return port

    def _accept(self, context: Any) -> InStream:
        self._handshakes.call(context.peer())
        return _GrpcStream(context, caller_of(context, self._options.insecure))

    def connect(self, member: str, certificate: bytes, address: str) -> _GrpcConnection:
        insecure = self._options.insecure
        channel = make_channel(self._identity, member, certificate, address, insecure)
        return _GrpcConnection(channel, call_metadata(self._identity, insecure))

    def take_failed(self) -> int:
        return self._handshakes.take_failed()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.5)
