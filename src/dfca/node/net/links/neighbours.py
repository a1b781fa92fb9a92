"""The links that are up: one per member, each reported up once and down once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from dfca.node.net.links.link import LinkDown, NetLink
from dfca.node.wire import wire_pb2 as pb


class Neighbours:
    """Runs links. up, down, frame: what happens on them; down comes before the next up of the same member."""

    def __init__(
        self,
        up: Callable[[NetLink], None],
        down: Callable[[NetLink, LinkDown], None],
        frame: Callable[[NetLink, pb.Frame], None],
    ) -> None:
        self.links: dict[str, NetLink] = {}
        self._up, self._down, self._frame = up, down, frame
        self._changed = asyncio.Event()

    async def run(self, link: NetLink) -> LinkDown:
        """Run a link whose handshake is complete, in place of an older one of the same member; returns why it ended."""
        old = self.links.get(link.member)
        if old is not None:
            self.end(old, LinkDown("replaced"))
        self.links[link.member] = link
        self.wake()
        try:
            self._up(link)
            return await link.run(partial(self._frame, link), partial(self._lower, link))
        finally:
            self._lower(link, LinkDown("closed"))

    def end(self, link: NetLink, why: LinkDown) -> None:
        """Take a link down, and report it at once."""
        link.end(why)
        self._lower(link, why)

    def end_all(self, why: LinkDown) -> None:
        """Take all links down."""
        for link in list(self.links.values()):
            self.end(link, why)

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until a link goes up or down, at most `timeout_s`."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):  # not wait_for, which in Python 3.11 may swallow a cancellation
                await changed.wait()
        except TimeoutError:
            return

    def _lower(self, link: NetLink, why: LinkDown) -> None:
        if self.links.get(link.member) is link:
            link.down = True
            del self.links[link.member]
            self.wake()
            self._down(link, why)

    def wake(self) -> None:
        """Wake everything that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
