"""Models in parts on a link: what is asked for, what comes, and in which order (`node/net/links/parts`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dfca.node.net.links.parts import MOST_LEFT_BYTES, MOST_WINDOW_BYTES, Incoming, Outgoing, PacedSize
from dfca.node.net.links.wire import StreamCancelled
from dfca.node.net.options import NetOptions
from dfca.node.net.transfer.chunks import read_part, write_part
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import Refused

OPTIONS = NetOptions(least_chunk_bytes=4, chunk_bytes=64, reads_per_member=2)


def test_a_size_follows_the_speed_within_bounds() -> None:
    size, sizes = PacedSize(8, 4, 32), []
    for seconds in (0.04, 0.05, 0.04, 0.04, 0.3, 0.31, 0.31, 0.31, 0.31):
        size.observe(seconds)
        sizes.append(size.bytes)
    assert sizes == [16, 16, 32, 32, 32, 16, 8, 4, 4]
    assert PacedSize.chunk(OPTIONS).bytes == 4
    window = PacedSize.window(OPTIONS)
    assert window.bytes == 16
    for _ in range(30):
        window.observe(1.0)
    assert window.bytes == 8
    for _ in range(30):
        window.observe(0.0)
    assert window.bytes == MOST_WINDOW_BYTES


# What is sent.


def want(number: int, offset: int, until: int) -> pb.Want:
    return pb.Want(number=number, offset=offset, until=until)


def parts(outgoing: Outgoing) -> list[tuple[int, int, bytes]]:
    """Take all parts that are to be written: (number, offset, bytes)."""
    numbered = []
    while (part := outgoing.next()) is not None:
        data, offset, number = read_part(part)
        numbered.append((number, offset, bytes(data)))
    return numbered


def test_requested_parts_leave_in_turns_and_nothing_else_does() -> None:
    outgoing, loads = Outgoing(OPTIONS), []

    def load() -> bytes:
        loads.append(0)
        return b"abcdefghij"

    assert outgoing.next() is None
    assert outgoing.want(want(1, 0, 6), load)
    assert outgoing.want(want(2, 4, 10), load)
    assert parts(outgoing) == [(1, 0, b"abcd"), (2, 4, b"efgh"), (1, 4, b"ef"), (2, 8, b"ij")]
    assert outgoing.want(want(1, 6, 8), load)  # the next window
    assert outgoing.want(want(1, 8, 10), load)  # and one more, before anything has left
    assert parts(outgoing) == [(1, 6, b"ghij")]
    assert outgoing.want(want(1, 2, 4), load)  # the reader begins again after a stall
    assert parts(outgoing) == [(1, 2, b"cd")]
    assert len(loads) == 2  # each once


def test_requests_that_cannot_be_met_are_refused() -> None:
    outgoing = Outgoing(OPTIONS)
    assert not outgoing.want(want(1, 0, 4), lambda: None)  # withdrawn
    with pytest.raises(Refused, match="byte 11 of 10 is asked for"):
        outgoing.want(want(1, 0, 11), lambda: bytes(10))
    outgoing.want(want(1, 0, 10), lambda: bytes(10))
    outgoing.want(want(2, 0, 4), lambda: bytes(10))
    with pytest.raises(Refused, match="more than 2 models are read at once"):
        outgoing.want(want(3, 0, 4), lambda: bytes(10))
    outgoing.drop(1)
    outgoing.drop(9)
    assert outgoing.want(want(3, 0, 4), lambda: bytes(10))
    assert {number for number, *_ in parts(outgoing)} == {2, 3}


# What is read.


class Reader:
    """One end that reads, with a clock of its own and what it has asked for."""

    def __init__(self, size: int, offset: int = 0, trip_s: float = 0.0) -> None:
        self.now, self.asked = 0.0, list[tuple[int, int, int]]()
        self.incoming, self.data = Incoming(self._say, lambda: self.now, lambda: trip_s), bytes(range(size))
        self.window = PacedSize.window(OPTIONS)
        self.reader = self.incoming.read(7, offset, size, self.window)

    def _say(self, frame: pb.Frame) -> None:
        self.asked.append((frame.want.number, frame.want.offset, frame.want.until))

    def come(self, offset: int, size: int, number: int = 7) -> None:
        part = write_part(memoryview(self.data), offset, size, number)
        assert self.incoming.take(part) == size

    async def read(self) -> tuple[bytes, int]:
        data, offset = await self.reader.read()
        return bytes(data), offset


def carry_out(run: Any) -> None:
    asyncio.run(run())


def test_a_window_ahead_is_asked_for_once_half_of_the_last_is_taken() -> None:
    async def run() -> None:
        one = Reader(40, offset=2)
        waiting = asyncio.ensure_future(one.read())
        await asyncio.sleep(0)
        assert one.asked == [(7, 2, 18)]
        one.come(2, 7)
        assert await waiting == (one.data[2:9], 2)
        one.come(9, 1)
        one.now = 0.1
        assert await one.read() == (one.data[9:10], 9)
        assert len(one.asked) == 1  # more than half of the window is ahead
        one.come(10, 8)
        assert await one.read() == (one.data[10:18], 10)
        assert one.asked[1:] == [(7, 18, 26)]
        one.now = 0.12  # fast: the window doubles
        one.come(18, 8)
        await one.read()
        assert one.asked[2:] == [(7, 26, 34)]
        assert one.window.bytes == 32
        one.come(26, 8)
        await one.read()
        assert one.asked[3:] == [(7, 34, 40)]  # no more than there is
        one.come(34, 6)
        assert not one.reader.is_done
        await one.read()
        assert one.reader.is_done
        assert len(one.asked) == 4

    carry_out(run)


@pytest.mark.parametrize(("took_s", "window"), [(0.82, 32), (0.9, 16), (1.11, 8)])
def test_a_round_trip_is_no_slowness(took_s: float, window: int) -> None:
    async def run() -> None:
        one = Reader(40, trip_s=0.8)
        waiting = asyncio.ensure_future(one.read())
        await asyncio.sleep(0)
        one.now = took_s
        one.come(0, 16)
        await waiting
        assert one.window.bytes == window

    carry_out(run)


def test_a_read_that_is_cancelled_may_be_made_again() -> None:
    async def run() -> None:
        one = Reader(16)
        waiting = asyncio.ensure_future(one.read())
        await asyncio.sleep(0)
        one.reader.cancel()
        with pytest.raises(StreamCancelled):
            await waiting
        again = asyncio.ensure_future(one.read())
        await asyncio.sleep(0)
        one.come(0, 4)
        assert await again == (one.data[:4], 0)
        assert one.asked == [(7, 0, 16)]  # what is on its way is not asked for twice

    carry_out(run)


def test_unrequested_parts_are_refused_and_those_of_an_ended_read_dropped() -> None:
    async def run() -> None:
        one = Reader(40)
        with pytest.raises(Refused, match="a chunk that was not asked for"):
            one.come(0, 1)
        one = Reader(40)
        waiting = asyncio.ensure_future(one.read())
        await asyncio.sleep(0)
        one.incoming.end(7)
        one.come(0, 15)
        one.come(15, 1, number=8)  # of a read that it does not know
        with pytest.raises(Refused, match="a chunk that was not asked for"):
            one.come(16, 1)
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        one = Reader(40, offset=2)
        one.incoming.ask(7, 2, 4)
        one.come(2, 2)
        with pytest.raises(Refused, match="a chunk that was not asked for"):
            one.come(4, 1)
        one = Reader(40)
        for number in range(3):  # what may come is bounded, whatever was asked for
            one.incoming.ask(number, 0, MOST_LEFT_BYTES)
        assert one.incoming._left == MOST_LEFT_BYTES

    carry_out(run)
