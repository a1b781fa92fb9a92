"""The queue of frames for one neighbour: bounded, whatever the neighbour does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Overflow(Exception):
    """The queue is full: the neighbour does not read, and the link must go down."""


class FrameQueue(Generic[T]):
    """A queue in which a newer value replaces one with the same key. Only values without a key count for the bounds."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._items: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()  # values and sizes, by key or serial number
        self._serial = 0
        self._count = self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, value: T, size: int) -> None:
        """Add a value that must arrive. Raises Overflow beyond the bounds."""
        if self._count >= self.most or self._bytes + size > self.most_bytes:
            raise Overflow(f"{self._count} frames with {self._bytes} bytes wait")
        self._serial += 1
        self._count += 1
        self._bytes += size
        self._items[self._serial] = (value, size)

    def replace(self, key: Hashable, value: T) -> None:
        """Add a value at the end, instead of the one with the same key."""
        self._items.pop(("key", key), None)
        self._items["key", key] = (value, 0)

    def get(self) -> T | None:
        """Take the first value, None if the queue is empty."""
        if not self._items:
            return None
        key, (value, size) = self._items.popitem(last=False)
        if not isinstance(key, tuple):
            self._count -= 1
            self._bytes -= size
        return value
