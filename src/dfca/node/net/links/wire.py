"""What the network's logic needs of a wire: calls to members, and answers to theirs. gRPC is one (`grpc_wire`).

A talk is a stream of frames both ways. A read is a request that is answered by chunks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

Code = Literal[
    "not_found", "invalid_argument", "permission_denied", "resource_exhausted", "unavailable", "deadline_exceeded"
]


class StreamEnded(Exception):
    """The other end has ended the stream in order."""


class StreamBroken(Exception):
    """The stream broke, could not be opened, or was refused. code: why, as gRPC names it."""

    def __init__(self, text: str = "", code: str = "") -> None:
        super().__init__(text)
        self.code = code


class StreamCancelled(StreamBroken):
    """This end has cancelled the stream."""


class CallStream(Protocol):
    """One end of a call."""

    async def read(self) -> bytes:
        """Return the next message. Raises StreamEnded or StreamBroken."""

    async def write(self, message: bytes) -> None:
        """Write a message; waits while the other end does not read. Raises StreamBroken."""


class OutStream(CallStream, Protocol):
    """The end of a call at the node that made it."""

    def cancel(self) -> None:
        """End the call; a read that waits raises StreamCancelled."""


class InStream(CallStream, Protocol):
    """The end of a call at the node that answers it."""

    caller: str | None  # the device ID that the other end has proved

    async def abort(self, code: Code, text: str) -> None:
        """Refuse the call. Always raises; the exception must pass."""


class Connection(Protocol):
    """A connection with one member. Opening it is part of the first call."""

    def talk(self) -> OutStream:
        """Open a talk."""

    def read(self, request: bytes) -> OutStream:
        """Ask for a payload."""

    async def close(self) -> None:
        """End the connection with all its calls."""


OnTalk = Callable[[InStream], Awaitable[None]]
OnRead = Callable[[bytes, InStream], Awaitable[None]]
OnProbe = Callable[[bytes, InStream], Awaitable[bytes]]


class Wire(Protocol):
    """The calls of one node."""

    async def serve(self, talk: OnTalk, read: OnRead, probe: OnProbe) -> int:
        """Answer calls; returns the port. Raises ConfigError if the node cannot listen there."""

    def connect(self, member: str, certificate: bytes, address: str) -> Connection:
        """Make a connection that only the given member can answer. Raises ConfigError for an address out of bounds."""

    def take_failed(self) -> int:
        """Return how many handshakes have failed since the last call of this."""

    async def stop(self) -> None:
        """Stop answering, and end all calls of others."""
