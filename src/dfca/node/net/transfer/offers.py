"""The encoded models that neighbours may read from this node: one copy for all readers.

An offer is one announcement to one member. The newest update per member and cluster is kept while the member is out of
reach: it is announced again when the link is back, and the member resumes where it was cut off.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from dfca.node.wire import wire_pb2 as pb


@dataclass
class ModelOffer:
    """One announcement to one member."""

    member: str
    name: bytes  # SHA-256 of the payload
    message: pb.PeerMessage  # without its model
    cluster: int | None  # of an update; None for a message that must arrive
    rows: int  # 0: one model (P,); m: several (m, P)
    since: float  # when it was sent
    encoding: str = "float32"
    age_s: float = 0.0  # of an update when it was sent
    number: int = 0  # of the announcement on the link; 0 before it left
    announced: float = 0.0  # when the announcement left
    done: bool = False  # read or withdrawn


@dataclass
class _Payload:
    data: bytes
    offers: list[ModelOffer] = field(default_factory=list)


class Offers:
    """Encoded models by the digest that names them, bounded in bytes; the oldest leave first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._payloads: OrderedDict[bytes, _Payload] = OrderedDict()
        self._newest: dict[tuple[str, int], ModelOffer] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def add(self, offer: ModelOffer, data: bytes) -> list[ModelOffer]:
        """Keep an offer and its payload; returns the offers that were dropped to make room."""
        if offer.cluster is not None:
            old = self._newest.get((offer.member, offer.cluster))
            if old is not None:
                self.drop(old)
            self._newest[offer.member, offer.cluster] = offer
        payload = self._payloads.get(offer.name)
        if payload is None:
            payload = self._payloads[offer.name] = _Payload(data)
            self.bytes += len(data)
        payload.offers.append(offer)
        return self._make_room(offer.name)

    def data(self, member: str, name: bytes) -> bytes | None:
        """Return the payload of a name that a member may read, or None."""
        payload = self._payloads.get(name)
        if payload is None or not any(offer.member == member for offer in payload.offers):
            return None
        return payload.data

    def announced(self, member: str, number: int) -> bytes | None:
        """Return the payload with this number of announcement to a member, or None."""
        named = (offer.name for offer in self.all() if offer.member == member and offer.number == number)
        name = next(named, None)
        return None if name is None else self._payloads[name].data

    def size(self, name: bytes) -> int:
        """Return the size of a payload in bytes."""
        return len(self._payloads[name].data)

    def drop(self, offer: ModelOffer) -> None:
        """Withdraw an offer; a payload without readers is deleted."""
        offer.done = True
        if offer.cluster is not None and self._newest.get((offer.member, offer.cluster)) is offer:
            del self._newest[offer.member, offer.cluster]
        payload = self._payloads.get(offer.name)
        if payload is None:
            return
        payload.offers = [other for other in payload.offers if other is not offer]
        if not payload.offers:
            del self._payloads[offer.name]
            self.bytes -= len(payload.data)

    def take(self, member: str, number: int) -> ModelOffer | None:
        """Withdraw and return the offer with this number of announcement to a member."""
        offer = next((offer for offer in self.of(member) if offer.number == number), None)
        if offer is not None:
            self.drop(offer)
        return offer

    def of(self, member: str) -> list[ModelOffer]:
        """Return the offers of a member, oldest first."""
        return sorted((offer for offer in self.all() if offer.member == member), key=lambda offer: offer.since)

    def all(self) -> list[ModelOffer]:
        """Return all offers."""
        return [offer for payload in self._payloads.values() for offer in payload.offers]

    def lose_link(self, member: str) -> None:
        """Drop the offers of a link that went down; updates stay for the next epoch."""
        for offer in self.of(member):
            offer.number = 0
            if offer.cluster is None:
                self.drop(offer)

    def forget(self, member: str) -> None:
        """Drop all offers of a member."""
        self.drop_older(member, math.inf)

    def drop_older(self, member: str, before: float) -> None:
        """Drop a member's offers that were sent before a moment."""
        for offer in self.of(member):
            if offer.since < before:
                self.drop(offer)

    def _make_room(self, keep: bytes) -> list[ModelOffer]:
        dropped: list[ModelOffer] = []
        while self.bytes > self.most_bytes and len(self._payloads) > 1:
            name = next(name for name in self._payloads if name != keep)
            for offer in list(self._payloads[name].offers):
                dropped.append(offer)
                self.drop(offer)
        return dropped
