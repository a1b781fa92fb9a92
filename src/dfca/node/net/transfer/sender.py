"""Sends messages: small ones at once; models are encoded in a thread, announced, and kept until they have been read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dfca.node.net.links.link import LinkDown, NetLink, serialize
from dfca.node.net.local import Local
from dfca.node.net.options import Swarm
from dfca.node.net.transfer.offers import ModelOffer, Offers
from dfca.node.wire import codec, payload
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import ANNOUNCED, CODED, Refused
from dfca.peer.records.messages import Update

KEEP_UPDATE_S = 60.0  # how long an update waits for a neighbour that is out of reach
LEAST_BYTES_PER_S = 1600.0  # who still reads an update this slowly after that time gets the next one


class Sender:
    """Sends messages on links. links: those that are up, by member."""

    def __init__(self, local: Local, swarm: Swarm, links: dict[str, NetLink], executor: Executor) -> None:
        self.offers = Offers(local.options.cache_bytes)
        self.packed = 0  # how many models have been encoded
        self._local, self._swarm, self._links, self._executor = local, swarm, links, executor
        self._newest: dict[tuple[str, int], ModelOffer] = {}
        self._exact = "float64" if swarm.dtype == torch.float64 else "float32"
        self._packing: dict[tuple[int, str], tuple[Tensor, int, asyncio.Future[tuple[bytes, bytes]]]] = {}

    def send(self, link: NetLink, message: Any) -> None:
        """Send a message; if it cannot be encoded the link goes down."""
        try:
            proto, model = codec.to_proto(message), codec.model_of(message)
        except Refused as error:
            self._local.refusals.add("own")
            link.end(LinkDown("own", str(error)))
            return
        if model is None:
            link.send(pb.Frame(message=proto.SerializeToString()))
            return
        offer = ModelOffer(
            member=link.member,
            name=b"",
            message=proto,
            cluster=message.message.cluster if isinstance(message, Update) else None,
            rows=0 if model.dim() == 1 else len(model),
            since=self._local.now(),
            encoding=self._encoding_of(message, model),
            age_s=message.age_s if isinstance(message, Update) else 0.0,
        )
        if offer.cluster is not None:
            self._newest[link.member, offer.cluster] = offer
        self._pack(model, offer.encoding).add_done_callback(partial(self._announce_packed, link, offer))

    def greet(self, link: NetLink) -> None:
        """On a link that came up, announce again the updates that were not read in the last epoch."""
        for offer in self.offers.of(link.member):
            self._announce_next(link, offer.cluster)

    def lose(self, link: NetLink) -> None:
        """Drop the offers of a link that went down."""
        self.offers.lose_link(link.member, self._local.now() + KEEP_UPDATE_S)

    def prune(self) -> None:
        """Drop updates whose time is over: their readers are out of reach, or too slow."""
        now = self._local.now()
        for offer in self.offers.all():
            if now > offer.due or (now > offer.kept and offer.member not in self._links):
                self.offers.drop(offer)
                self._withdraw(offer)

    def want(self, link: NetLink, want: pb.Want) -> None:
        """Send bytes that a neighbour asks for. Raises Refused."""
        if link.outgoing.want(want, lambda: self.offers.announced(link.member, want.number)):
            link.wake()
        else:
            link.send(pb.Frame(withdraw=pb.Withdraw(number=want.number)))

    def received(self, link: NetLink, number: int) -> None:
        """Note that a neighbour has read an announcement."""
        self._take(link, number)

    def unavailable(self, link: NetLink, number: int) -> None:
        """Note that a neighbour will not read an announcement: only updates may be lost, else the link goes down."""
        offer = self._take(link, number)
        if offer is not None and offer.cluster is None:
            link.end(LinkDown("unread", "the neighbour could not read a message that must arrive"))

    def _take(self, link: NetLink, number: int) -> ModelOffer | None:
        link.outgoing.drop(number)
        offer = self.offers.take(link.member, number)
        if offer is not None:
            self._announce_next(link, offer.cluster)
        return offer

    def _encoding_of(self, message: Any, model: Tensor) -> str:
        if model.dtype == torch.uint8:
            return CODED
        return self._exact if isinstance(message, codec.EXACT) else self._swarm.encoding

    # Encoding, once for all neighbours that get the same model.

    def _pack(self, model: Tensor, encoding: str) -> asyncio.Future[tuple[bytes, bytes]]:
        key = (id(model), encoding)
        packed, version, future = self._packing.get(key, (None, 0, None))
        if packed is model and version == model._version and future is not None:
            return future
        self.packed += 1
        future = asyncio.ensure_future(self._encode(model, encoding))
        self._packing[key] = (model, model._version, future)  # the reference keeps the id from being reused
        future.add_done_callback(lambda _: self._packing.pop(key, None))
        return future

    async def _encode(self, model: Tensor, encoding: str) -> tuple[bytes, bytes]:
        """Digest and copy a model in parallel: both release the interpreter's lock."""
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._executor)
        cut = self._swarm.cut(model)
        pieces = await in_thread(payload.pieces, cut, encoding, self._swarm.compress, self._swarm.tail)
        name, data = await asyncio.gather(in_thread(payload.name, pieces), in_thread(b"".join, pieces))
        return bytes.fromhex(name), data

    def _announce_packed(self, link: NetLink, offer: ModelOffer, packed: asyncio.Future[tuple[bytes, bytes]]) -> None:
        if packed.cancelled():
            return
        error = packed.exception()
        if error is not None:
            self._local.refusals.add("own")
            if offer.cluster is None:
                link.end(LinkDown("own", str(error)))
            return
        if offer.cluster is not None:
            if self._newest.get((link.member, offer.cluster)) is not offer:
                return  # replaced while it was encoded
            del self._newest[link.member, offer.cluster]
        if link.down and (offer.cluster is None or self._local.roster.member(link.member) is None):
            return
        offer.name, data = packed.result()
        for dropped in self.offers.add(offer, data):
            self._withdraw(dropped)
        current = self._links.get(link.member)
        if current is None:
            offer.kept = self._local.now() + KEEP_UPDATE_S
        elif offer.cluster is not None:
            self._announce_next(current, offer.cluster)
        elif current is link:
            self._announce(link, offer)

    def _withdraw(self, offer: ModelOffer) -> None:
        link = self._links.get(offer.member)
        if link is None:
            return
        if offer.cluster is None:
            link.end(LinkDown("slow", "the models that it has not read take too much room"))
        elif offer.number:
            link.outgoing.drop(offer.number)
            link.send(pb.Frame(withdraw=pb.Withdraw(number=offer.number)))
            self._announce_next(link, offer.cluster)

    def _announce_next(self, link: NetLink, cluster: int | None) -> None:
        """Announce the newest update of a cluster, unless the neighbour reads an earlier one."""
        offer = None if cluster is None else self.offers.first(link.member, cluster)
        if offer is not None and not offer.number:
            self._announce(link, offer)

    def _announce(self, link: NetLink, offer: ModelOffer) -> None:
        make: Callable[[], bytes | None] = partial(self._make_announce, link, offer)
        if offer.cluster is None:
            link.send_made(make, 512)
        else:
            link.send_newest(("update", offer.cluster), make)

    def _make_announce(self, link: NetLink, offer: ModelOffer) -> bytes | None:
        """Make the announcement when it leaves, with the age of the update at that time."""
        if offer.done:
            return None
        if offer.cluster is not None:
            offer.message.update.age_s = offer.age_s + max(0.0, self._local.now() - offer.since)
        link.announced += 1
        offer.number, size = link.announced, self.offers.size(offer.name)
        if offer.cluster is not None:
            offer.due = min(offer.due, self._local.now() + KEEP_UPDATE_S + size / LEAST_BYTES_PER_S)
        announce = pb.Announce(
            number=offer.number,
            message=offer.message.SerializeToString(),
            name=offer.name,
            size=size,
            encoding=ANNOUNCED[offer.encoding],
            rows=offer.rows,
        )
        return serialize(pb.Frame(announce=announce))
