"""Models on a link: the reader asks for bytes, and they come in parts between the other frames.

The reader asks for a window ahead of what it has taken. So no more than a window is on its way, frames behind it wait
for a fraction of a second, and a reader whose disk is slow slows the sender down. The window follows the link's speed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from dfca.node.net.links.wire import StreamCancelled
from dfca.node.net.options import NetOptions
from dfca.node.net.transfer.chunks import read_part, write_part
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import Refused

FAST_S, SLOW_S = 0.05, 0.3  # what takes less doubles in size (a chunk, a window), what takes more is halved
MOST_WINDOW_BYTES = 8 << 20
MOST_LEFT_BYTES = 8 * MOST_WINDOW_BYTES  # asked for on a link and not here yet


class PacedSize:
    """A number of bytes that follows the speed of a link."""

    def __init__(self, first: int, least: int, most: int) -> None:
        self.bytes, self._least, self._most = first, least, most

    def observe(self, seconds: float) -> None:
        """Note how long it took."""
        if seconds < FAST_S:
            self.bytes = min(2 * self.bytes, self._most)
        elif seconds > SLOW_S:
            self.bytes = max(self.bytes // 2, self._least)

    @classmethod
    def chunk(cls, options: NetOptions) -> PacedSize:
        """Make the size of a chunk."""
        return cls(options.least_chunk_bytes, options.least_chunk_bytes, options.chunk_bytes)

    @classmethod
    def window(cls, options: NetOptions) -> PacedSize:
        """Make the size of a window."""
        return cls(4 * options.least_chunk_bytes, 2 * options.least_chunk_bytes, MOST_WINDOW_BYTES)


@dataclass
class _Transfer:
    data: memoryview
    next: int = 0
    until: int = 0


class Outgoing:
    """The models that a neighbour reads on a link, at most `reads_per_member`; each gets its turn."""

    def __init__(self, options: NetOptions) -> None:
        self.chunk = PacedSize.chunk(options)
        self._most = options.reads_per_member
        self._transfers: OrderedDict[int, _Transfer] = OrderedDict()

    def want(self, want: pb.Want, load: Callable[[], bytes | None]) -> bool:
        """Take a request; returns whether there is such a payload. Raises Refused."""
        transfer = self._transfers.get(want.number)
        if transfer is None:
            data = load()
            if data is None:
                return False
            if len(self._transfers) >= self._most:
                raise Refused("rate", f"more than {self._most} models are read at once")
            transfer = self._transfers[want.number] = _Transfer(memoryview(data))
        if want.until > len(transfer.data):
            raise Refused("size", f"byte {want.until} of {len(transfer.data)} is asked for")
        if want.offset != transfer.until:
            transfer.next = want.offset
        transfer.until = want.until
        return True

    def drop(self, number: int) -> None:
        """Forget an announcement."""
        self._transfers.pop(number, None)

    def next(self) -> bytes | None:
        """Return the next part to write, None if nothing is asked for."""
        for number, transfer in self._transfers.items():
            if transfer.next < transfer.until:
                size = min(self.chunk.bytes, transfer.until - transfer.next)
                part = write_part(transfer.data, transfer.next, size, number)
                transfer.next += size
                self._transfers.move_to_end(number)
                return part
        return None


class Incoming:
    """The models that this node reads on a link. say: sends a frame to the neighbour; trip_s: its least round trip."""

    def __init__(
        self, say: Callable[[pb.Frame], None], now: Callable[[], float], trip_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.now, self.trip_s = now, trip_s
        self._say = say
        self._readers: dict[int, PartReader] = {}
        self._left = 0  # bytes asked for that have not come

    def read(self, number: int, offset: int, size: int, window: PacedSize) -> PartReader:
        """Begin to read an announcement."""
        reader = self._readers[number] = PartReader(self, number, offset, size, window)
        return reader

    def end(self, number: int) -> None:
        """Stop reading an announcement; what is on its way is dropped."""
        self._readers.pop(number, None)

    def ask(self, number: int, offset: int, until: int) -> None:
        """Ask for more bytes."""
        self._left = min(self._left + until - offset, MOST_LEFT_BYTES)
        self._say(pb.Frame(want=pb.Want(number=number, offset=offset, until=until)))

    def take(self, message: bytes) -> int:
        """Take a frame with a chunk; returns the bytes of the chunk. Raises Refused."""
        data, offset, number = read_part(message)
        self._left -= len(data)
        if self._left < 0:
            raise Refused("unasked", "a chunk that was not asked for")
        reader = self._readers.get(number)
        if reader is not None:
            reader.put(data, offset)
        return len(data)


class PartReader:
    """One payload that is read on a link."""

    def __init__(self, incoming: Incoming, number: int, offset: int, size: int, window: PacedSize) -> None:
        self._incoming, self._number, self._size, self._window = incoming, number, size, window
        self._taken = self._until = offset
        self._parts: deque[tuple[memoryview, int]] = deque()
        self._changed = asyncio.Event()
        self._stalled = False
        self._asked: deque[tuple[int, float]] = deque()  # up to where, and when, of what has not come

    @property
    def is_done(self) -> bool:
        """Whether everything has been taken."""
        return self._taken >= self._size

    def put(self, data: memoryview, offset: int) -> None:
        """Add a part that has come."""
        self._parts.append((data, offset))
        self._changed.set()

    async def read(self) -> tuple[memoryview, int]:
        """Return the next part and its offset. Raises StreamCancelled after `cancel`; then this may be called again."""
        self._ask()
        self._stalled = False
        while not self._parts:
            if self._stalled:
                raise StreamCancelled
            self._changed.clear()
            await self._changed.wait()
        data, offset = self._parts.popleft()
        self._taken += len(data)
        while self._asked and self._asked[0][0] <= self._taken:  # beyond a round trip: how long what is ahead takes
            self._window.observe(self._incoming.now() - self._asked.popleft()[1] - self._incoming.trip_s())
        return data, offset

    def cancel(self) -> None:
        """End the `read` that waits."""
        self._stalled = True
        self._changed.set()

    def _ask(self) -> None:
        """Keep a window ahead of what has been taken."""
        window = self._window.bytes
        until = min(self._size, self._taken + window)
        if until > self._until and self._until - self._taken <= window // 2:
            self._incoming.ask(self._number, self._until, until)
            self._until = until
            self._asked.append((until, self._incoming.now()))
