"""The links that are up, and what keeps them so: dialling, again after a pause; members that are out of reach.

Of two members the one with the smaller ID dials. The other waits and dials only if nothing comes: it may be the only
one that wants the link, or that can reach the other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dfca.base.errors import ConfigError
from dfca.node.net.links.link import REMOVED, LinkDown, NetLink, read_frame, write_frame
from dfca.node.net.links.timing import Backoff
from dfca.node.net.links.wire import Connection
from dfca.node.net.local import Local
from dfca.node.trust.identity import expired_on
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import Refused


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


log = logging.getLogger(__name__)
LASTING_S = 10.0  # after a link that lasted this long, pauses start again with the shortest
SHORT_S, SHORT_PAUSE_S = 30.0, 0.75  # most breaks are short: for the first seconds pauses stay short
FRESH_S = 0.5


class Dialer:
    """Dials members."""

    def __init__(self, local: Local, neighbours: Neighbours) -> None:
        self._local, self._neighbours = local, neighbours
        self._options = local.options
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._unreached: dict[str, float] = {}
        self._attempts: dict[str, int] = {}
        self.discovered: dict[str, tuple[str, ...]] = {}  # addresses that discovery has found, by member
        self._dialling: dict[str, float] = {}
        self.reached: dict[str, str] = {}  # the address at which a member answered last
        self.errors: dict[str, str] = {}  # why the last attempt to dial a member failed

    def want(self, members: set[str]) -> None:
        """Keep links with these members, and drop the others that this node dialled."""
        for member in set(self._tasks) - members:
            task = self._tasks.pop(member)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            self._unreached.pop(member, None)
            self.errors.pop(member, None)
        for member in sorted(members - set(self._tasks)):
            self._tasks[member] = asyncio.ensure_future(self._keep(member))

    def dead(self) -> set[str]:
        """Return the members that have been out of reach for long."""
        limit = self._local.now() - self._options.dead_after_s
        links = self._neighbours.links
        return {member for member, since in self._unreached.items() if since < limit and member not in links}

    def is_dialling(self, member: str) -> bool:
        """Return whether an attempt has just begun; an older one may never succeed."""
        return self._local.now() - self._dialling.get(member, float("-inf")) < FRESH_S

    def forget(self, member: str) -> None:
        """Forget the addresses of a removed member."""
        for table in (self.discovered, self.reached, self._attempts):
            table.pop(member, None)

    def addresses(self, member: str) -> list[str]:
        """List the addresses of a member: where it answered last, what it announced, what discovery found.

        Behind two routers both may be 192.168.1.2: an address that is this device's own too is left out.
        """
        known, own = self._local.roster.member(member), self._local.roster.member(self._local.identity.id)
        reached, discovered = self.reached.get(member), self.discovered.get(member, ())
        listed = [*([reached] if reached else []), *(known.addresses if known else ()), *discovered]
        return [address for address in dict.fromkeys(listed) if own is None or address not in own.addresses]

    async def close(self) -> None:
        """End all attempts."""
        self.want(set())
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _keep(self, member: str) -> None:
        draw = random.Random(self._local.around.random_bits(64))
        backoff = Backoff(0.25, self._options.most_backoff_s, draw)
        smaller = self._local.identity.id < member
        while True:
            link = self._neighbours.links.get(member)
            if link is not None:
                self._unreached.pop(member, None)
                if self._local.now() - link.since > LASTING_S:
                    backoff.reset()
                await self._neighbours.wait_change(LASTING_S)
                continue
            self._unreached.setdefault(member, self._local.now())
            kept_out = self._local.penalties.left_s(member, self._local.now())
            if kept_out or not smaller:
                await self._wait_for(member, max(kept_out, 0.0 if smaller else self._options.patience_s))
            if member not in self._neighbours.links:
                await self._dial(member)
            if member not in self._neighbours.links:
                away = self._local.now() - self._unreached.get(member, self._local.now())
                pause = backoff.next()
                await self._wait_for(member, pause if away > SHORT_S else min(pause, SHORT_PAUSE_S))

    async def _wait_for(self, member: str, seconds: float) -> None:
        """Wait, at most until the member is linked."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while member not in self._neighbours.links and loop.time() < until:
            await self._neighbours.wait_change(until - loop.time())

    async def _dial(self, member: str) -> None:
        """Try one address; if the link comes up, run it until it goes down."""
        known, addresses = self._local.roster.member(member), self.addresses(member)
        if known is None or not addresses:
            self.errors[member] = "no address is known"
            return
        if day := expired_on(known.certificate):
            self.errors[member] = (
                f"its certificate expired on {day}; set the clock of this machine if it is wrong, else make that "
                "device anew in an empty folder and pair it"
            )
            return
        attempt = self._attempts.get(member, 0)
        address = addresses[attempt % len(addresses)]
        connection = None
        try:
            connection = self._local.wire.connect(member, known.certificate, address)
            await self._talk(member, known.number, address, connection)
        except (LinkDown, ConfigError) as error:
            self.errors[member] = f"{address}: {error}"
            self._attempts[member] = attempt + 1
        except Refused as error:
            self._local.refusals.add(error.reason, member)
            self.errors[member] = f"{address}: {error}"
        except TimeoutError:
            self.errors[member] = f"{address}: no answer in time"
            self._attempts[member] = attempt + 1
        except Exception as error:  # a fault of this program: keep dialling
            log.exception("the link with %s failed", member)
            self._local.refusals.add("failed", member)
            self.errors[member] = f"{address}: {type(error).__name__}: {error}"
            self._attempts[member] = attempt + 1
        finally:
            self._dialling.pop(member, None)
            if connection is not None:
                with suppress(Exception):
                    await connection.close()

    async def _talk(self, member: str, number: int, address: str, connection: Connection) -> None:
        options = self._options
        span = min(options.most_dial_s, options.dial_s * (1 + self._attempts.get(member, 0) // 4))
        self._dialling[member] = self._local.now()
        call = connection.talk()
        try:
            epoch = self._local.around.random_bits(63)
            async with asyncio.timeout(span):
                await write_frame(call, self._local.greeting.hello(epoch))
                frame = await read_frame(call)
            if frame.WhichOneof("kind") == "roster_records":  # do they prove the removal of this device?
                self._local.roster.merge(list(frame.roster_records.records))
                if self._local.roster.member(self._local.identity.id) is None:
                    raise LinkDown("member", REMOVED)
            if self._local.greeting.check(frame) != epoch:
                raise Refused("epoch", "the answer to another hello")
            self._dialling.pop(member, None)
            if member in self._neighbours.links:
                raise LinkDown("closed", "it came up the other way round")
            self.reached[member] = address
            self._unreached.pop(member, None)
            self.errors.pop(member, None)
            steady, in_parts = self._local.around.steady, self._local.greeting.agrees_on_parts(frame)
            link = NetLink(member, number, call, options, self._local.now, True, steady, in_parts)
            await self._neighbours.run(link)
        finally:
            call.cancel()
