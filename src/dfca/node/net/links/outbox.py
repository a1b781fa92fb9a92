"""What waits to be written to one neighbour: bounded, whatever the neighbour does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Overflow(Exception):
    """More waits than the bound: the neighbour does not read, and the link must go down."""


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T
    size: int


class Outbox(Generic[T]):
    """A queue in which a newer value replaces one with the same key that has not left.

    Only what has no key counts for the bounds: values with keys are as many as there are keys.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._items: OrderedDict[Hashable, _Item[T]] = OrderedDict()
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
        self._items[self._serial] = _Item(value, size)

    def replace(self, key: Hashable, value: T) -> T | None:
        """Add a value behind all others; returns the one with the same key that it replaces."""
        old = self._items.pop(("key", key), None)
        self._items[("key", key)] = _Item(value, 0)
        return None if old is None else old.value

    def get(self) -> T | None:
        """Take the first value, None if nothing waits."""
        if not self._items:
            return None
        key, item = self._items.popitem(last=False)
        if not isinstance(key, tuple):
            self._count -= 1
            self._bytes -= item.size
        return item.value
