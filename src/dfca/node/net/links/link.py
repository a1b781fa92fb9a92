"""One link: a Talk stream with one neighbour, from the first frame to the last. A new stream is a new epoch.

The dialling node sends a `LinkHello`, the other answers with its own; the dialler's first heartbeat completes the
handshake, so that both ends know of the link. Then frames flow both ways, in order, until one end stops: by `Close`, by
silence, by a refused frame, or because its queue is full.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from dfca.node.net.limits import Bucket
from dfca.node.net.links.parts import Incoming, Outgoing
from dfca.node.net.links.timing import Detector, Estimate
from dfca.node.net.links.wire import CallStream, StreamBroken, StreamEnded
from dfca.node.net.options import NetOptions
from dfca.node.net.transfer.chunks import is_part
from dfca.node.wire import frames
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import REASONS, Refused

REMOVED = "removed from the swarm"
MakeFrame = Callable[[], bytes | None]  # called when the frame leaves; None: it is not needed any more


class LinkDown(Exception):
    """The link ended. reason: a word for the counters; guilty: the neighbour broke a rule."""

    def __init__(self, reason: str, text: str = "", guilty: bool = False) -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason, self.text, self.guilty = reason, text, guilty


@dataclass(frozen=True)
class Greeting:
    """What both ends of a link must agree on."""

    swarm: str
    size: int
    dtype: int
    software: str
    parts: bool = True  # models travel on the link; until 0.2 they were read by calls of their own

    def hello(self, epoch: int) -> bytes:
        """Serialise the first frame."""
        hello = pb.LinkHello(
            protocol=frames.PROTOCOL,
            swarm=self.swarm,
            model_size=self.size,
            dtype=self.dtype,  # type: ignore[arg-type]
            epoch=epoch,
            software=self.software,
            parts=self.parts,
        )
        return serialize(pb.Frame(hello=hello))

    def check(self, frame: pb.Frame) -> int:
        """Check the first frame of the other end; returns its epoch. Raises Refused."""
        check_open(frame)
        if frame.WhichOneof("kind") != "hello":
            raise Refused("unasked", "the first frame is not a hello")
        hello = frame.hello
        if hello.protocol != frames.PROTOCOL:
            raise Refused("version", f"protocol {hello.protocol}, this is {frames.PROTOCOL}: update the older one")
        if hello.swarm != self.swarm:
            raise Refused("swarm", "another swarm")
        if (hello.model_size, hello.dtype) != (self.size, self.dtype):
            raise Refused("model", f"a model of {hello.model_size} floats, this is {self.size}")
        return hello.epoch

    def agrees_on_parts(self, frame: pb.Frame) -> bool:
        """Return whether models travel on the link with the sender of a hello."""
        return self.parts and frame.hello.parts


def serialize(frame: pb.Frame) -> bytes:
    """Serialise a frame."""
    data: bytes = frame.SerializeToString()
    return data


def close_frame(reason: str, text: str = "") -> bytes:
    """Serialise the last frame of a stream."""
    known = reason if reason in REASONS else ""
    return serialize(pb.Frame(close=pb.Close(reason=known, text=text[: frames.MOST_TEXT])))


def check_open(frame: pb.Frame) -> None:
    """Raise LinkDown for a frame that closes the link, which may come at any moment."""
    if frame.WhichOneof("kind") == "close":
        raise LinkDown(frame.close.reason or "closed", frame.close.text)


async def read_frame(stream: CallStream) -> pb.Frame:
    """Read and parse a frame. Raises LinkDown at the end of the stream, Refused for anything else than a frame."""
    return frames.parse(await read_message(stream))


async def read_message(stream: CallStream) -> bytes:
    """Read the bytes of a frame. Raises LinkDown at the end of the stream."""
    try:
        return await stream.read()
    except StreamEnded as error:
        raise LinkDown("closed") from error
    except StreamBroken as error:
        raise LinkDown("broken", str(error)) from error


async def write_frame(stream: CallStream, frame: bytes) -> None:
    """Write a frame. Raises LinkDown if the stream has ended."""
    try:
        await stream.write(frame)
    except StreamBroken as error:
        raise LinkDown("broken", str(error)) from error


class Overflow(Exception):
    """The queue is full: the neighbour does not read, and the link must go down."""


class FrameQueue:
    """What makes the frames for one neighbour: newer ones replace those with the same key, which count for no bound."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._items: OrderedDict[Hashable, tuple[MakeFrame, int]] = OrderedDict()  # and sizes, by key or serial number
        self._serial = 0
        self._count = self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, value: MakeFrame, size: int) -> None:
        """Add a frame that must arrive. Raises Overflow beyond the bounds."""
        if self._count >= self.most or self._bytes + size > self.most_bytes:
            raise Overflow(f"{self._count} frames with {self._bytes} bytes wait")
        self._serial += 1
        self._count += 1
        self._bytes += size
        self._items[self._serial] = (value, size)

    def replace(self, key: Hashable, value: MakeFrame) -> None:
        """Add a frame at the end, instead of the one with the same key."""
        self._items.pop(("key", key), None)
        self._items["key", key] = (value, 0)

    def get(self) -> MakeFrame | None:
        """Take the first one, None if the queue is empty."""
        if not self._items:
            return None
        key, (value, size) = self._items.popitem(last=False)
        if not isinstance(key, tuple):
            self._count -= 1
            self._bytes -= size
        return value


class NetLink:
    """One epoch of the link with one member. now: the steady clock of the node; spent: the machine's, for its share."""

    def __init__(
        self,
        member: str,
        number: int,
        stream: CallStream,
        options: NetOptions,
        now: Callable[[], float],
        dialled: bool,
        spent: Callable[[], float] = time.perf_counter,
        in_parts: bool = False,
    ) -> None:
        self.member, self.number, self.dialled, self._spent = member, number, dialled, spent
        self.in_parts = in_parts  # models travel on this link, both ends said so
        self.incoming, self.outgoing = Incoming(self.send, now, lambda: self.least_rtt_s), Outgoing(options)
        self.bytes_in = self.bytes_out = 0
        self.announced = 0
        self.down = False
        self.rtt, self.least_rtt_s = Estimate(), 0.0
        self._stream, self._options, self._now = stream, options, now
        self.since = now()
        self.detector = Detector(now(), options.least_silence_s, options.most_silence_s)
        self._rate = Bucket(options.frames_per_s, options.frames_burst, now())
        self._time = Bucket(options.share, options.share_burst_s, now())
        self._outbox = FrameQueue(options.queued_frames, options.queued_bytes)
        self._something = asyncio.Event()
        self._end: asyncio.Future[LinkDown] = asyncio.get_running_loop().create_future()
        self._beats = 0
        self._sent_beats: OrderedDict[int, float] = OrderedDict()
        self._heard_beat, self._heard_at = 0, now()
        self._last_frame: bytes | None = None
        self.parting: bytes | None = None  # written before the last frame if this end takes the link down
        self.on_parted: Callable[[], None] = lambda: None  # called when `parting` has been written
        self._outbox.put(self._make_beat, 0)  # completes the handshake

    # What others call.

    def send(self, frame: pb.Frame) -> None:
        """Queue a frame that must arrive; if the queue is full, the link goes down."""
        data = serialize(frame)
        self.send_made(lambda: data, len(data))

    def send_made(self, make: MakeFrame, size: int) -> None:
        """Queue a frame that is made when it leaves."""
        try:
            self._outbox.put(make, size)
        except Overflow as error:
            self.end(LinkDown("slow", str(error)))
        self._something.set()

    def send_newest(self, key: Hashable, make: MakeFrame) -> None:
        """Queue a frame that a newer one with the same key replaces."""
        self._outbox.replace(key, make)
        self._something.set()

    def wake(self) -> None:
        """Let the writing task look for something to write."""
        self._something.set()

    def end(self, reason: LinkDown) -> None:
        """Take the link down."""
        if not self._end.done():
            self._last_frame = close_frame(reason.reason, reason.text)
            self._end.set_result(reason)

    def silence(self) -> LinkDown | None:
        """Return why the link must go down, if the neighbour has been silent for too long."""
        if not self.detector.is_dead(self._now()):
            return None
        return LinkDown("silent", f"nothing for {self._now() - self.detector.heard:.1f} s")

    @property
    def queued(self) -> int:
        """The number of queued frames."""
        return len(self._outbox)

    # The life of a link.

    async def run(self, handle: Callable[[pb.Frame], None], report: Callable[[LinkDown], None]) -> LinkDown:
        """Exchange frames until the link goes down; returns why, after it was reported. handle may raise Refused."""
        tasks = [asyncio.ensure_future(part) for part in (self._read(handle), self._write(), self._beat())]
        try:
            ends: list[asyncio.Future[Any]] = [*tasks, self._end]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            why = self._why(tasks)
            self.down = True
            report(why)
            self._something.set()
            # The writing task sends the last frames: cancelling a read or write would end the call at once.
            await asyncio.wait(tasks[1:2], timeout=0.5)
            return why
        finally:
            if not self.down:  # cancelled: report it before anything that takes time
                self.down = True
                report(LinkDown("closed"))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
            if not self._end.done():
                self._end.cancel()

    def _why(self, tasks: list[asyncio.Task[None]]) -> LinkDown:
        if self._end.done():
            return self._end.result()
        for ended in tasks:
            error = ended.exception() if ended.done() and not ended.cancelled() else None
            if isinstance(error, LinkDown):
                return error
            if isinstance(error, Refused):
                self._last_frame = close_frame(error.reason, error.text)
                return LinkDown(error.reason, error.text, guilty=True)
            if error is not None:  # a fault of this program ends this link only
                asyncio.get_running_loop().call_exception_handler({"message": "a link failed", "exception": error})
                return LinkDown("failed", f"{type(error).__name__}: {error}")
        return LinkDown("closed")

    async def _read(self, handle: Callable[[pb.Frame], None]) -> None:
        while True:
            message = await read_message(self._stream)
            now = self._now()
            self.bytes_in += len(message)
            if is_part(message):
                self.detector.hear(now)
                if self.incoming.take(message) < self._options.least_chunk_bytes:
                    self._count_frame(now)
                continue
            frame = frames.parse(message)
            self._count_frame(now)
            kind = frame.WhichOneof("kind")
            if kind == "heartbeat":
                self._hear_beat(frame.heartbeat, now)
                continue
            self.detector.hear(now)
            check_open(frame)
            if kind == "hello":
                raise Refused("unasked", "a second hello")
            begin = self._spent()
            handle(frame)
            spent = self._spent() - begin
            if not self._time.take(self._now(), spent):
                await asyncio.sleep(spent / self._options.share)  # slow the sender down

    def _count_frame(self, now: float) -> None:
        if not self._rate.take(now):
            raise Refused("rate", f"more than {self._options.frames_per_s:.0f} frames per second")

    async def _write(self) -> None:
        """Write frames as they come; parts of models when there are no others."""
        while not self.down:
            make = self._outbox.get()
            data = make() if make is not None else self.outgoing.next()
            if data is not None:
                self.bytes_out += len(data)
                begin = self._now()
                await write_frame(self._stream, data)
                if make is None:
                    self.outgoing.chunk.observe(self._now() - begin)
            elif make is None:
                self._something.clear()
                await self._something.wait()
        for data in (self.parting, self._last_frame):
            if data is not None:
                await write_frame(self._stream, data)
                if data is self.parting:
                    self.on_parted()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            self.send_newest("heartbeat", self._make_beat)

    def _make_beat(self) -> bytes:
        now = self._now()
        self._beats += 1
        self._sent_beats[self._beats] = now
        if len(self._sent_beats) > 16:
            self._sent_beats.popitem(last=False)
        held = max(0, round(1e6 * (now - self._heard_at)))
        beat = pb.Heartbeat(number=self._beats, echo=self._heard_beat, held_us=held)
        return serialize(pb.Frame(heartbeat=beat))

    def _hear_beat(self, beat: pb.Heartbeat, now: float) -> None:
        self.detector.beat(now)
        if beat.number > self._heard_beat:
            self._heard_beat, self._heard_at = beat.number, now
        sent = self._sent_beats.pop(beat.echo, None)
        if sent is not None:
            trip_s = max(0.0, now - sent - beat.held_us / 1e6)
            self.least_rtt_s = trip_s if self.rtt.mean is None else min(self.least_rtt_s, trip_s)
            self.rtt.add(trip_s)
