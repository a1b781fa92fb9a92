"""The transport of real nodes: links over gRPC with mutual TLS between the members of a roster.

    transport = GrpcTransport(identity, roster, swarm, NetOptions(), folder)
    address = await transport.start()
    node = Node(peer, worker, transport)        # which calls open, send, when_quiet and close

Everything uses one stream per link (`links`), whichever end dialled: small messages, and models, which are announced
and then read in parts between other frames (`sender`, `puller`). The node knows neighbours by number, the network by
device ID. Everything runs in one event loop; two threads encode and check models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dfca.base.errors import ConfigError
from dfca.node.addresses import join_address
from dfca.node.net.claims import find_lie, is_told_by, signed
from dfca.node.net.gossip import Gossip, notice_frame
from dfca.node.net.graph import SwarmGraph
from dfca.node.net.limits import Penalties, Refusals
from dfca.node.net.links.dialer import Dialer, Neighbours
from dfca.node.net.links.grpc_wire import GrpcWire
from dfca.node.net.links.link import Greeting, LinkDown, NetLink
from dfca.node.net.links.timing import FalseAlarms, SteadyClock
from dfca.node.net.links.wire import Wire
from dfca.node.net.local import LinkTraffic, Local
from dfca.node.net.options import NetOptions, Swarm
from dfca.node.net.service import PeerService
from dfca.node.net.transfer.partials import Partials
from dfca.node.net.transfer.puller import Puller
from dfca.node.net.transfer.sender import Sender
from dfca.node.surroundings import SYSTEM, Surroundings
from dfca.node.transport import TransportInputs
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import MOST_SHOWN, Roster
from dfca.node.wire import codec
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import Refused
from dfca.peer.records.messages import Alarm

ASKED = 2  # members that a node asks for others that it does not know
TICK_S = 0.25
DOUBT_S = 2.0  # time for a neighbour that claims unknown voters to send their roster records
DTYPES = {torch.float32: pb.FLOAT32, torch.float64: pb.FLOAT64}


class GrpcTransport:
    """The links of one node, see `node.transport`. folder: of the node; it holds partial models.

    on_neighbours: called with the numbers of the neighbours when they change: before `connected` of a new one, after
    `disconnected` of one that left. on_devices: called when the number of devices ever introduced changes.
    summarise: returns what the node does, as JSON for members that ask. reference_norm: returns the norm of a sound
    model or None; a received model with a far larger norm is refused.
    """

    def __init__(
        self,
        identity: Identity,
        roster: Roster,
        swarm: Swarm,
        options: NetOptions,
        folder: Path,
        wire: Wire | None = None,
        around: Surroundings = SYSTEM,
    ) -> None:
        self.on_neighbours: Callable[[tuple[int, ...]], None] = lambda numbers: None
        self.on_devices: Callable[[int], None] = lambda count: None
        self.reference_norm: Callable[[], float | None] = lambda: None
        self.summarise: Callable[[], str] = lambda: ""
        self.address = ""
        self._identity, self._roster, self._swarm, self._options = identity, roster, swarm, options
        self._folder, self._around = folder, around
        self._wire = wire if wire is not None else GrpcWire(identity, roster, options)
        self._node: TransportInputs | None = None
        self._running = False
        self._numbers: dict[int, NetLink] = {}
        self._reported: tuple[int, ...] | None = None
        self._devices = 0
        self._doubted: dict[NetLink, tuple[Any, float]] = {}
        self._last: dict[str, str] = {}
        self._alarms = FalseAlarms()
        self._graph = SwarmGraph(identity.id, options.degree)
        self._discovery: Any = None

    async def start(self) -> str:
        """Start to listen; returns the address. Calls are refused until `open`.

        Raises ConfigError if the node cannot listen there; RunError if its folder cannot be written.
        """
        options, loop = self._options, asyncio.get_running_loop()
        clock = self._clock = SteadyClock(TICK_S, loop.time())
        swarm = self._swarm
        greeting = Greeting(swarm.swarm_id, swarm.size, DTYPES[swarm.dtype], swarm.software, options.parts)
        self._local = Local(
            self._identity,
            self._roster,
            options,
            greeting,
            Refusals(),
            Penalties(options.penalty_s, options.most_penalty_s),
            LinkTraffic(),
            lambda: clock.read(loop.time()),
            self._wire,
            self._around,
        )
        self._executor = self._around.threads("dfca-net", 2)
        self._neighbours = Neighbours(self._up, self._down, self._frame)
        self._dialer = Dialer(self._local, self._neighbours)
        self._sender = Sender(self._local, self._swarm, self._neighbours.links, self._executor)
        limits = options.disk_bytes, options.least_chunk_bytes, options.buffer_bytes
        partials = Partials(self._folder / "partial", *limits, self._around)
        partials.prepare()
        self._puller = Puller(self._local, self._swarm, self._dialer, partials, self._executor, self._deliver)
        self._puller.reference_norm = lambda: self.reference_norm()
        self._gossip = Gossip(self._roster, lambda: self._neighbours.links.values(), self._local.now)
        self._service = PeerService(self._local, self._neighbours, self._dialer, self._sender.offers)
        self._service.summarise = lambda: self.summarise()
        port = await self._wire.serve(self._service.talk, self._service.read, self._service.probe)
        self._running = True
        self.address = join_address(options.host, port)
        self._unsubscribe = self._roster.subscribe(self._roster_changed)
        self._ticker = asyncio.ensure_future(self._tick())
        if options.discovery:
            await self._discover(port)
        return self.address

    async def _discover(self, port: int) -> None:
        from dfca.node.net.discovery import Discovery

        try:
            self._discovery = Discovery(self._identity.id, self._swarm.swarm_id, port, self.discovered)
            await self._discovery.start(self._options.host)
        except ConfigError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Break all links and end everything; partial models stay on the disk."""
        self.close()
        if not self._running:
            return
        self._running = False
        self._unsubscribe()
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        if self._discovery is not None:
            await self._discovery.stop()
        await self._dialer.close()
        await self._puller.close()
        await self._wire.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    # The contract of node/transport.py.

    def open(self, node: TransportInputs) -> None:
        self._node, self._devices = node, 0
        self._service.is_open = True
        self._rewire()

    def send(self, neighbour: int, message: Any) -> None:
        link = self._numbers.get(neighbour)
        if isinstance(message, Alarm):
            message = signed(message, self._identity, self._swarm.swarm_id)
        if link is not None and not link.down and message is not None:
            self._sender.send(link, message)

    def when_quiet(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)

    def close(self) -> None:
        self._node = None  # it is not called any more
        if self._running:
            self._service.is_open = False
            self._dialer.want(set())
            self._neighbours.end_all(LinkDown("closed"))

    def block(self, members: Collection[str], seconds: float) -> None:
        """Cut the links with some members and keep them out for some seconds, as a broken network would."""
        for member in members:
            self._local.penalties.keep_out(member, self._local.now() + seconds)
            link = self._neighbours.links.get(member)
            if link is not None:
                self._neighbours.end(link, LinkDown("closed", "blocked by its user"))

    # For screens and metrics.

    def status(self) -> dict[str, Any]:
        """Describe the network: address, refusals by reason, all bytes, and every neighbour, linked or wanted."""
        members, links, traffic = self._roster.members(), self._neighbours.links.values(), self._local.traffic
        listed = {*self._neighbours.links, *self._wanted()}
        return {
            "address": self.address,
            "refused": dict(self._local.refusals.total),
            "starved_s": round(self._clock.lost_s, 3),
            "cached_bytes": self._sender.offers.bytes,
            "packed": self._sender.packed,
            "resumed_bytes": self._puller.resumed,
            "bytes_in": traffic.gone_received + traffic.received.total() + sum(link.bytes_in for link in links),
            "bytes_out": traffic.gone_sent + traffic.sent.total() + sum(link.bytes_out for link in links),
            "silent_s": {id: self._silent_s(id) for id in {*self._neighbours.links, *traffic.heard}},
            "neighbours": {id: self._describe(id, members[id].name) for id in sorted(listed) if id in members},
        }

    def discovered(self, member: str, addresses: tuple[str, ...]) -> None:
        """Take the addresses that discovery found for a member; they only say where to dial."""
        if self._roster.member(member) is not None:
            self._dialer.discovered[member] = addresses
            self._neighbours.wake()

    def _describe(self, member: str, name: str) -> dict[str, Any]:
        link, traffic = self._neighbours.links.get(member), self._local.traffic
        return {
            "name": name,
            "state": "up" if link else "dead" if member in self._dialer.dead() else "down",
            "address": self._dialer.reached.get(member) or next(iter(self._dialer.addresses(member)), ""),
            "dialled": link.dialled if link else None,
            "walled": link is not None and not link.dialled and member not in self._dialer.reached,
            "rtt_s": link.rtt.mean if link else None,
            "silent_s": self._silent_s(member),
            "bytes_in": (link.bytes_in if link else 0) + traffic.received[member],
            "bytes_out": (link.bytes_out if link else 0) + traffic.sent[member],
            "queued": link.queued if link else 0,
            "refused": self._local.refusals.of(member),
            "pulls": self._puller.pulls.of(member),
            "last_error": self._dialer.errors.get(member) or self._last.get(member, ""),
        }

    def _silent_s(self, member: str) -> float | None:
        """Return how long ago something came from a member; None if nothing has since the start."""
        link, heard = self._neighbours.links.get(member), self._local.traffic.heard.get(member)
        if link is not None:
            return round(self._local.now() - link.detector.heard, 3)
        return None if heard is None else round(max(0.0, self._around.wall() - heard), 3)

    # The graph.

    def _wanted(self, dead: set[str] | None = None) -> set[str]:
        """Return the members to link to; the automatic graph skips dead ones."""
        members, own = self._roster.members(), self._identity.id
        if own not in members:
            return set()
        if self._options.neighbours == "auto":
            return self._graph.links(members, dead or set())
        named = [self._roster.by_name(name) for name in self._options.neighbours]
        wanted = {member.id for member in named if member is not None} - {own}
        if None in named or not all(self._dialer.addresses(id) for id in wanted):
            # A neighbour or its address is unknown: link to other members, whose rosters may have it.
            known = [id for id in sorted(members) if id != own and self._dialer.addresses(id)]
            wanted |= set(known[:ASKED])
        return wanted

    def _rewire(self) -> None:
        """Dial the wanted members, and report the neighbours if they changed."""
        if self._node is None:
            return
        if (devices := len(self._roster.introduced())) != self._devices:
            self._devices = devices
            self._call(self.on_devices, devices)
        members = self._roster.members()
        dead = {id for id in self._dialer.dead() if id in members}
        current = self._wanted(dead)
        # Dead ones too, with growing pauses: they may come back, and one that nobody dials would not be known as dead.
        self._dialer.want(current | self._wanted() | dead)
        numbers = tuple(sorted(members[id].number for id in current | set(self._neighbours.links) if id in members))
        if numbers != self._reported and self._node is not None:
            self._reported = numbers
            self._call(self.on_neighbours, numbers)

    def _roster_changed(self) -> None:
        members = self._roster.members()
        own = self._identity.id in members
        for member, link in list(self._neighbours.links.items()):
            if member not in members or not own:
                link.parting = notice_frame(self._roster, member)
                link.on_parted = partial(self._roster.note_shown, member, MOST_SHOWN)
                self._neighbours.end(link, LinkDown("member", "no longer a member of the swarm"))
                self._forget(member)
        self._gossip.spread()
        self._neighbours.wake()
        self._rewire()

    def _forget(self, member: str) -> None:
        for part in (self._sender.offers, self._gossip, self._dialer, self._service, self._local.traffic, self._alarms):
            part.forget(member)
        self._local.refusals.forget(member)
        self._last.pop(member, None)

    async def _tick(self) -> None:
        loop, ticks = asyncio.get_running_loop(), 0
        while True:
            await asyncio.sleep(TICK_S)
            self._clock.tick(loop.time())
            ticks += 1
            for link in list(self._neighbours.links.values()):
                if (why := link.silence()) is not None:
                    self._neighbours.end(link, why)
            self._puller.check()
            self._gossip.spread()
            for link in list(self._doubted):
                self._judge(link, late=True)
            for _ in range(self._wire.take_failed()):
                self._local.refusals.add("handshake")
            if ticks % 4 == 0:
                self._sender.prune()
                self._rewire()

    # What happens on links.

    def _up(self, link: NetLink) -> None:
        self._numbers[link.number] = link
        link.detector.doubled = self._alarms.begin(link.member, self._local.now())
        self._rewire()
        if self._node is not None:
            self._call(self._node.connected, link.number)
        self._sender.greet(link)  # behind what the node says when a link opens
        self._gossip.greet(link)

    def _down(self, link: NetLink, why: LinkDown) -> None:
        self._numbers.pop(link.number, None)
        self._doubted.pop(link, None)
        self._last[link.member] = str(why)
        if why.reason == "silent":
            self._alarms.end(link.member, self._local.now())
        heard = self._around.wall() - (self._local.now() - link.detector.heard)
        self._local.traffic.end_link(link.member, link.bytes_in, link.bytes_out, heard)
        if why.guilty:
            self._local.refusals.add(why.reason, link.member)
            self._local.penalties.punish(link.member, self._local.now())
        for part in (self._sender, self._puller, self._gossip):
            part.lose(link)
        if self._node is not None:
            self._call(self._node.disconnected, link.number)
        self._rewire()

    def _frame(self, link: NetLink, frame: pb.Frame) -> None:
        kind = frame.WhichOneof("kind")
        if kind == "message":
            decoded = codec.decode(frame.message)
            if decoded.needs_model:
                raise Refused("unasked", "a message that must be announced")
            self._deliver(link, decoded.message())
        elif kind == "announce":
            self._puller.announce(link, frame.announce)
        elif kind == "withdraw":
            self._puller.withdraw(link, frame.withdraw.number)
        elif kind == "want":
            self._sender.want(link, frame.want)
        elif kind == "received":
            self._sender.received(link, frame.received.number)
        elif kind == "unavailable":
            self._sender.unavailable(link, frame.unavailable.number)
        elif kind == "roster_digest":
            self._gossip.take_digest(link, frame.roster_digest.digest)
        elif kind == "roster_records":
            for _ in self._gossip.take_records(link, frame.roster_records.records, self._local.now()):
                self._local.refusals.add("roster", link.member)
            self._judge(link, late=False)

    def _judge(self, link: NetLink, late: bool) -> None:
        """End a link that carried an impossible claim; it is a lie once the roster has had time to arrive."""
        message, until = self._doubted.get(link, (None, 0.0))
        lie = find_lie(message, self._roster.introduced())
        if message is not None and lie is None:
            self._neighbours.end(link, LinkDown("closed", "what it said is known to be possible now"))
        elif lie is not None and late and self._local.now() >= until:
            self._neighbours.end(link, LinkDown(lie.reason, lie.text, guilty=True))

    def _is_believed(self, link: NetLink, message: Any) -> bool:
        """Return whether a message can be true by the roster; after one that cannot, take nothing from its link."""
        if link in self._doubted:
            return False
        if isinstance(message, Alarm) and self._roster.by_number(message.origin) is None:
            self._local.refusals.add("member", link.member)  # the sender may not know of a removal yet
            return False
        if isinstance(message, Alarm) and not is_told_by(message, link.number, self._roster, self._swarm.swarm_id):
            self._local.refusals.add("proof", link.member)
            return False
        if find_lie(message, self._roster.introduced()) is None:
            return True
        self._doubted[link] = (message, self._local.now() + DOUBT_S)
        return False

    def _deliver(self, link: NetLink, message: Any) -> None:
        if self._node is None or link.down or not self._is_believed(link, message):
            return
        if not self._call(self._node.received, link.number, message):
            self._neighbours.end(link, LinkDown("failed", "a message on which this node failed", guilty=True))

    def _call(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Call the node; return whether it worked. The event loop's handler is told what it raised."""
        try:
            function(*arguments)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler({"message": "the node failed", "exception": error})
            return False
        return True
