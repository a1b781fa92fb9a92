"""A network in memory with the faults of real ones: delays, cuts, resets, half-open connections, calls that come twice.

A call is two streams that keep their order, as TCP does. Calls overtake each other. Models travel on talks.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, cast

from dfca.node.addresses import split_address
from dfca.node.net.links.wire import Code, OnProbe, OnRead, OnTalk, StreamBroken, StreamCancelled, StreamEnded
from dfca.node.trust.handshake import MAX_LINE, Knock, Streams
from dfca.node.trust.identity import Identity

MOST_QUEUED = 64  # messages on their way, before a writer waits
PORT = 7447


class _Aborted(Exception):
    """A handler has refused a call."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class FaultyNetwork:
    """The network between the nodes of a world.

    delay(one, other): draws the seconds of one message between two nodes. held_s(one, other): how long nothing passes.
    """

    def __init__(self, random: Random, delay: Callable[[int, int], float], held_s: Callable[[int, int], float]) -> None:
        self.random, self.delay, self.held_s = random, delay, held_s
        self.half_open = 0.0  # share of broken connections of which one end never hears
        self.twice = 0.0  # share of talks that arrive a second time
        self.open: dict[tuple[int, int], FaultyWire | FaultyDoor] = {}  # what answers, by node and port
        self.dark: set[int] = set()  # nodes without power: nobody refuses a call
        self.walled: set[int] = set()  # nodes that no call reaches: they can only call others
        self.calls: set[_Call] = set()
        self.failures: list[str] = []  # what handlers have raised

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something after a time."""
        asyncio.get_running_loop().call_later(seconds, act)

    def reset(self, one: int, other: int) -> None:
        """Break all calls between two nodes."""
        for call in [*self.calls]:
            if {call.near.node, call.far.node} == {one, other}:
                call.snap()

    def leave(self, node: int, dark: bool) -> None:
        """End a node: its system closes its connections, or nobody does, for want of power."""
        self.open = {place: what for place, what in self.open.items() if place[0] != node}
        for call in [*self.calls]:
            if node in (call.near.node, call.far.node):
                call.leave(node, silently=dark)
        if dark:
            self.dark.add(node)

    async def connect(
        self, node: int, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Connect a device that joins, see `node.trust.handshake.Connect`."""
        call = _Call(self, node, None, (_node_of(host), port), None)
        self.later(call.delay() + call.delay() + call.delay(), partial(call.dial, None))
        try:
            certificate = await call.near.read()
        except (StreamBroken, StreamEnded) as error:
            raise ConnectionRefusedError(str(error)) from error
        except BaseException:
            call.near.cancel()
            raise
        return *_Stream(call.near, call.near.cancel).pair(), certificate


class _End:
    """One end of a call."""

    def __init__(self, call: _Call, node: int, caller: str | None) -> None:
        self.node, self.caller, self._call = node, caller, call
        self._inbox: deque[bytes | Exception] = deque()
        self._changed: asyncio.Event = asyncio.Event()
        self._coming: deque[tuple[float, bytes | Exception]] = deque()  # (when it arrives, what)
        self.over: Exception | None = None

    async def read(self) -> bytes:
        while not self._inbox:
            if self.over is not None:
                raise self.over
            self._changed.clear()
            await self._changed.wait()
        item = self._inbox.popleft()
        self._call.other(self)._changed.set()
        if isinstance(item, Exception):
            self.over = item
            raise item
        return item

    async def write(self, message: bytes) -> None:
        other = self._call.other(self)
        while len(other._coming) + len(other._inbox) >= MOST_QUEUED and self.over is None:
            self._changed.clear()
            await self._changed.wait()
        if self.over is not None:
            raise self.over if isinstance(self.over, StreamBroken) else StreamBroken("the stream has ended")
        self._call.note(self, message)
        other.expect(message)

    async def abort(self, code: Code, text: str) -> None:
        raise _Aborted(code, text)

    def cancel(self) -> None:
        if self.over is None:
            self.fail(StreamCancelled())
            self._call.hang_up(self)

    def expect(self, item: bytes | Exception) -> None:
        """Let something arrive, after everything that was sent before."""
        loop = asyncio.get_running_loop()
        self._coming.append((loop.time() + self._call.delay(), item))
        if len(self._coming) == 1:
            loop.call_at(self._coming[0][0], self._arrive)

    def _arrive(self) -> None:
        """Take what has come; what a cut holds up is sent again until it passes."""
        loop = asyncio.get_running_loop()
        if (held := self._call.network.held_s(self._call.other(self).node, self.node)) > 0:
            loop.call_later(held, self._arrive)
            return
        while self._coming and self._coming[0][0] <= loop.time():
            _, item = self._coming.popleft()
            if self.over is None:
                self._inbox.append(item)
                self._changed.set()
                if isinstance(item, StreamBroken):
                    self._call.ended(self)
        if self._coming:
            loop.call_at(self._coming[0][0], self._arrive)

    def fail(self, error: Exception) -> None:
        """End this end at once."""
        if self.over is None:
            self.over = error
            self._inbox.clear()
            self._changed.set()
            self._call.ended(self)


class _Call:
    """A talk, a read or a pairing between two nodes. near: who made it; far: who answers; place: node and port."""

    def __init__(
        self, network: FaultyNetwork, node: int, caller: str | None, place: tuple[int, int], request: bytes | None
    ) -> None:
        self.network, self.place, self.request = network, place, request
        self.near, self.far = _End(self, node, None), _End(self, place[0], caller)
        self.task: asyncio.Task[None] | None = None
        self._first: list[bytes] = []  # what the caller has written at first
        network.calls.add(self)

    def delay(self) -> float:
        return self.network.delay(self.near.node, self.far.node)

    def other(self, end: _End) -> _End:
        return self.far if end is self.near else self.near

    def note(self, end: _End, message: bytes) -> None:
        if end is self.near and len(self._first) < 2:
            self._first.append(message)

    def dial(self, member: str | None) -> None:
        """Reach the other node, unless it is gone or another one than the given member."""
        network, node = self.network, self.far.node
        if self.near.over is not None or node in network.walled:
            return
        held = network.held_s(self.near.node, node)
        if held > 0:
            network.later(held, partial(self.dial, member))
            return
        there = network.open.get(self.place)
        if there is not None and member in (None, there.id):
            self.answer(there)
            if self.request is None and network.random.random() < network.twice:
                network.later(network.random.uniform(0.1, 3.0), partial(self._repeat, there))
        elif node not in network.dark:
            self.near.expect(StreamBroken("connection refused", "unavailable"))

    def _repeat(self, there: FaultyWire | FaultyDoor) -> None:
        """Let the first messages of this call arrive once more, as another one that breaks soon."""
        network = self.network
        if network.open.get(self.place) is not there:
            return
        ghost = _Call(network, self.near.node, self.far.caller, self.place, None)
        ghost.answer(there)
        for message in self._first:
            ghost.far.expect(message)
        network.later(1.0, ghost.snap)

    def answer(self, there: FaultyWire | FaultyDoor) -> None:
        self.task = asyncio.get_running_loop().create_task(self._answer(there))
        there.answering.add(self.task)
        self.task.add_done_callback(there.answering.discard)

    async def _answer(self, there: FaultyWire | FaultyDoor) -> None:
        last: Exception = StreamEnded()
        try:
            if self.request is None:
                await there.on_talk(self.far)
            elif isinstance(there, FaultyWire):
                await there.on_read(self.request, self.far)
        except _Aborted as error:
            last = StreamBroken(str(error), error.code)
        except asyncio.CancelledError:
            last = StreamBroken("cancelled", "cancelled")
        except StreamBroken:
            last = StreamBroken("broken", "unknown")
        except Exception as error:
            self.network.failures.append(f"a call fails at node {there.node}: {type(error).__name__}: {error}")
            last = StreamBroken("unknown", "unknown")
        if self.far.over is None:
            self.far.over = StreamBroken("the call has ended")
            self.near.expect(last)

    def hang_up(self, end: _End) -> None:
        """One end has cancelled: the other hears of it in time."""
        self.other(end).expect(StreamBroken("cancelled", "cancelled"))

    def ended(self, end: _End) -> None:
        """An end is over: the node that answers leaves its handler."""
        if end is self.far and self.task is not None:
            self.task.cancel()
        if self.near.over is not None and self.far.over is not None:
            self.network.calls.discard(self)

    def snap(self) -> None:
        """Break: each end hears of it at its own time, or one of them never."""
        ends = [self.near, self.far]
        if self.network.random.random() < self.network.half_open:
            ends.pop(self.network.random.randrange(2))
        for end in ends:
            self.network.later(self.delay(), partial(end.fail, StreamBroken("reset", "unavailable")))

    def leave(self, node: int, silently: bool) -> None:
        """A node ends. What it has sent is lost, and its own end does nothing any more."""
        own, other = (self.near, self.far) if node == self.near.node else (self.far, self.near)
        own.over = own.over or StreamBroken("gone", "unavailable")
        own._changed.set()
        if not silently:
            self.network.later(self.delay(), partial(other.fail, StreamBroken("reset", "unavailable")))
        self.ended(own)


class _FaultyConnection:
    def __init__(self, wire: FaultyWire, member: str, node: int) -> None:
        self._wire, self._member, self._node = wire, member, node
        self._calls: list[_Call] = []

    def talk(self) -> _End:
        return self._open(None)

    def read(self, request: bytes) -> _End:
        return self._open(request)

    def _open(self, request: bytes | None) -> _End:
        network = self._wire.network
        call = _Call(network, self._wire.node, self._wire.id, (self._node, PORT), request)
        if self._wire.gone:
            call.near.over = StreamBroken("gone", "unavailable")
            network.calls.discard(call)
            return call.near
        self._calls = [call for call in self._calls if call in network.calls]
        handshake = 0.0 if self._calls else call.delay() + call.delay()
        self._calls.append(call)
        network.later(handshake + call.delay(), partial(call.dial, self._member))
        return call.near

    async def close(self) -> None:
        for call in self._calls:
            call.near.cancel()


class FaultyWire:
    """The calls of one life of a node, see `node.net.links.wire.Wire`. Node i has the address 10.0.0.i."""

    on_talk: OnTalk
    on_read: OnRead

    def __init__(self, network: FaultyNetwork, node: int, id: str) -> None:
        self.network, self.node, self.id = network, node, id
        self.gone = False  # the machine has ended
        self.answering: set[asyncio.Task[None]] = set()

    async def serve(self, talk: OnTalk, read: OnRead, probe: OnProbe) -> int:
        self.on_talk, self.on_read = talk, read
        if not self.gone:
            self.network.open[self.node, PORT] = self
            self.network.dark.discard(self.node)
        return PORT

    def connect(self, member: str, certificate: bytes, address: str) -> Any:
        return _FaultyConnection(self, member, _node_of(split_address(address)[0]))

    def take_failed(self) -> int:
        return 0

    async def stop(self) -> None:
        if self.network.open.get((self.node, PORT)) is self:
            self.network.leave(self.node, dark=False)
        for task in self.answering:
            task.cancel()
        await asyncio.gather(*self.answering, return_exceptions=True)


class FaultyDoor:
    """Where a node waits for devices that join, see `node.trust.handshake.Door`."""

    def __init__(self, network: FaultyNetwork, identity: Identity, node: int, port: int) -> None:
        self.network, self.node, self.port, self.id = network, node, port, identity.id
        self.certificate = ssl.PEM_cert_to_DER_cert(identity.certificate.decode())
        self.answering: set[asyncio.Task[None]] = set()
        self._knocks: asyncio.Queue[Knock] = asyncio.Queue()
        network.open[node, port] = self

    async def on_talk(self, end: _End) -> None:
        over = asyncio.Event()
        self._knocks.put_nowait(_FaultyKnock(self, end, over.set))
        await over.wait()

    async def wait(self) -> Knock:
        return await self._knocks.get()

    def close(self) -> None:
        if self.network.open.get((self.node, self.port)) is self:
            del self.network.open[self.node, self.port]


class _FaultyKnock:
    def __init__(self, door: FaultyDoor, end: _End, close: Callable[[], None]) -> None:
        self._door, self._end, self.close = door, end, close

    async def enter(self, within_s: float) -> Streams:
        try:
            await self._end.write(self._door.certificate)
        except StreamBroken as error:
            raise ConnectionResetError(str(error)) from error
        return _Stream(self._end, self.close).pair()


class _Stream:
    """An end of a call as a stream of bytes: a StreamWriter and its reader."""

    def __init__(self, end: _End, close: Callable[[], None]) -> None:
        self.transport, self.reader = self, asyncio.StreamReader(limit=MAX_LINE)
        self._end, self._close, self._unsent = end, close, b""
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def pair(self) -> Streams:
        return self.reader, cast(asyncio.StreamWriter, self)

    async def _read(self) -> None:
        try:
            while True:
                self.reader.feed_data(await self._end.read())
        except StreamEnded:
            self.reader.feed_eof()
        except StreamBroken as error:
            self.reader.set_exception(ConnectionResetError(str(error)))

    def write(self, data: bytes) -> None:
        self._unsent += data

    async def drain(self) -> None:
        data, self._unsent = self._unsent, b""
        try:
            await self._end.write(data)
        except StreamBroken as error:
            raise ConnectionResetError(str(error)) from error

    def close(self) -> None:
        self._reading.cancel()
        self._close()

    abort = close

    async def wait_closed(self) -> None:
        with suppress(asyncio.CancelledError):
            await self._reading


def _node_of(host: str) -> int:
    return int(host.rpartition(".")[2])
