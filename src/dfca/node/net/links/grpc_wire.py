"""The wire of real nodes: gRPC with mutual TLS."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from dfca.node.net.links.channels import Handshakes, call_metadata, caller_of, handlers_of, make_channel, make_server
from dfca.node.net.links.wire import Code, InStream, OnProbe, OnRead, OnTalk, StreamBroken, StreamCancelled, StreamEnded
from dfca.node.net.options import NetOptions
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster
from dfca.node.wire.frames import READ, TALK

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
