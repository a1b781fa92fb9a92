"""How messages reach a node's neighbours: the contract that every transport keeps.

Messages to a neighbour arrive once and in order, or the link goes down at both ends. A link has an epoch: what belongs
to an older one is lost, and the next begins with `connected` at both ends. Of `Update`s, the newest per sender and
cluster wins; one that has not left when a newer one is sent may be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class TransportInputs(Protocol):
    """What a transport calls: a node."""

    def connected(self, neighbour: int) -> None:
        """A neighbour is in reach."""

    def disconnected(self, neighbour: int) -> None:
        """A neighbour is out of reach; messages in flight are lost."""

    def received(self, sender: int, message: Any) -> None:
        """A message has arrived."""


class Transport(Protocol):
    """The links of one node. All calls are made in the event loop's thread, and none of them blocks."""

    def open(self, node: TransportInputs) -> None:
        """Start to connect."""

    def send(self, neighbour: int, message: Any) -> None:
        """Send a message to a neighbour; it is lost if the neighbour is out of reach."""

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Call back once everything that has arrived has been handled."""

    def close(self) -> None:
        """Break all links."""
