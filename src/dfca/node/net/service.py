"""What other nodes call: Talk opens a link, Read hands out a model to a neighbour of version 0.2, Probe answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from dfca.node.net.gossip import notice_frame
from dfca.node.net.limits import Bucket
from dfca.node.net.links.dialer import Dialer, Neighbours
from dfca.node.net.links.link import REMOVED, LinkDown, NetLink, check_open, close_frame, read_frame, write_frame
from dfca.node.net.links.parts import PacedSize
from dfca.node.net.links.wire import Code, InStream, StreamBroken
from dfca.node.net.local import Local
from dfca.node.net.probe import answer_probe
from dfca.node.net.transfer.chunks import write_chunk
from dfca.node.net.transfer.offers import Offers
from dfca.node.wire.frames import Refused, parse_read

CALLS_PER_S, CALLS_BURST = 20.0, 200
NOTICES_PER_S, NOTICES_BURST = 0.5, 20  # for all removed devices together: each notice searches the roster


class PeerService:
    """Answers calls of members; everything else is refused and counted."""

    def __init__(self, local: Local, neighbours: Neighbours, dialer: Dialer, offers: Offers) -> None:
        options = local.options
        self.is_open = False
        self.summarise: Callable[[], str] = lambda: ""  # says what this node does, for members that ask
        self._local, self._options = local, options
        self._neighbours, self._dialer, self._offers = neighbours, dialer, offers
        self._calls: dict[str, Bucket] = {}
        self._reads: Counter[str] = Counter()
        self._probing: set[str] = set()
        self._notices = Bucket(NOTICES_PER_S, NOTICES_BURST, local.now())

    def forget(self, member: str) -> None:
        """Forget a removed member."""
        self._calls.pop(member, None)

    async def talk(self, call: InStream) -> None:
        """Run a link that another node dialled."""
        if await self._turn_away(call):
            return
        member = await self._admit(call)
        try:
            link = await self._greet(member, call)
        except Refused as error:
            self._local.refusals.add(error.reason, member)
            await self._last_word(call, close_frame(error.reason, error.text))
            return
        except (LinkDown, TimeoutError):
            return
        if link is not None:
            await self._neighbours.run(link)

    async def read(self, request: bytes, call: InStream) -> None:
        """Send a payload from an offset on, in chunks that grow while they leave fast."""
        member = await self._admit(call)
        if self._reads[member] >= self._options.reads_per_member:
            await self._refuse(call, "rate", member, "resource_exhausted")
        self._reads[member] += 1
        try:
            await self._send_payload(member, request, call)
        finally:
            self._reads[member] -= 1

    async def probe(self, request: bytes, call: InStream) -> bytes:
        """Return the time, and whether the caller can be reached from here."""
        member = await self._admit(call)
        if member in self._probing:  # a probe makes this node dial: one at a time
            await self._refuse(call, "rate", member, "resource_exhausted")
        self._probing.add(member)
        try:
            return await answer_probe(self._local, member, request, self.summarise)
        except Refused as error:
            await self._refuse(call, error.reason, member, "invalid_argument")
            return b""
        finally:
            self._probing.discard(member)

    async def _send_payload(self, member: str, request: bytes, call: InStream) -> None:
        try:
            wanted = parse_read(request)
        except Refused as error:
            await self._refuse(call, error.reason, member, "invalid_argument")
            return
        data = self._offers.data(member, wanted.name)
        if data is None or wanted.offset > len(data):
            await call.abort("not_found", "not announced, or withdrawn")
            return
        view, offset, size = memoryview(data), wanted.offset, PacedSize.chunk(self._options)
        loop = asyncio.get_running_loop()
        while offset < len(view):
            begin = loop.time()
            try:
                async with asyncio.timeout(3 * self._options.most_read_s):
                    await call.write(write_chunk(view, offset, size.bytes))
            except StreamBroken:  # the reader is gone
                return
            except TimeoutError:
                await self._refuse(call, "deadline", member, "deadline_exceeded")
            if self._local.roster.member(member) is None:
                await self._refuse(call, "member", None, "permission_denied")
            sent = min(size.bytes, len(view) - offset)
            offset += sent
            self._local.traffic.sent[member] += sent
            size.observe(loop.time() - begin)

    async def _admit(self, call: InStream) -> str:
        """Return the caller if it is a member, else refuse the call."""
        caller = call.caller
        if caller is None or caller == self._local.identity.id or self._local.roster.member(caller) is None:
            await self._refuse(call, "member", None, "permission_denied")
        assert caller is not None
        if not self.is_open:
            await call.abort("unavailable", "not open yet")
        now = self._local.now()
        calls = self._calls.setdefault(caller, Bucket(CALLS_PER_S, CALLS_BURST, now))
        if not calls.take(now) or self._local.penalties.left_s(caller, now):
            await self._refuse(call, "rate", caller, "resource_exhausted")
        return caller

    async def _turn_away(self, call: InStream) -> bool:
        """Send a removed caller the records that prove its removal, rate limited; return whether this was done."""
        caller = call.caller
        notice = None if caller is None else notice_frame(self._local.roster, caller)
        if notice is None or not self._notices.take(self._local.now()):
            return False
        self._local.refusals.add("member")
        assert caller is not None
        if await self._last_word(call, notice):
            self._local.roster.note_shown(caller)
        await self._last_word(call, close_frame("member", REMOVED))
        return True

    async def _refuse(self, call: InStream, reason: str, member: str | None, code: Code) -> None:
        self._local.refusals.add(reason, member)
        await call.abort(code, reason)

    async def _greet(self, member: str, call: InStream) -> NetLink | None:
        """Do the handshake of a link; None if there are too many links, or this node is dialling the caller."""
        options = self._options
        async with asyncio.timeout(options.most_dial_s):
            hello = await read_frame(call)
            epoch = self._local.greeting.check(hello)
            if self._local.identity.id < member and self._dialer.is_dialling(member):
                await self._last_word(call, close_frame("", "this node dials itself"))
                return None
            if member not in self._neighbours.links and len(self._neighbours.links) >= options.links:
                await self._last_word(call, close_frame("rate", f"{options.links} links are the most"))
                return None
            await write_frame(call, self._local.greeting.hello(epoch))
            first = await read_frame(call)
        check_open(first)
        if first.WhichOneof("kind") != "heartbeat":
            raise Refused("unasked", "the first frame after the hello is not a heartbeat")
        known = self._local.roster.member(member)
        if known is None:  # removed in the meantime
            raise Refused("member")
        steady, in_parts = self._local.around.steady, self._local.greeting.agrees_on_parts(hello)
        return NetLink(member, known.number, call, options, self._local.now, False, steady, in_parts)

    async def _last_word(self, call: InStream, frame: bytes) -> bool:
        """Write a frame to a caller that may be gone; return whether it was written."""
        try:
            async with asyncio.timeout(0.5):
                await write_frame(call, frame)
        except (LinkDown, TimeoutError):
            return False
        return True
