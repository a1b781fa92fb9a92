"""The encoded models that neighbours may read from this node: one copy for all readers.

An offer is one announcement to one member. Of its updates of one cluster two are kept at most: the one that it reads,
and behind it the newest, which is announced when the other is read or its time is over. While the member is out of
reach they are kept for some time: they are announced again when the link is back, and it resumes where it was cut off.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
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
    asked: bool = False  # the member has asked for bytes of it
    due: float = math.inf  # of an update: when the time to read it is over
    kept: float = math.inf  # until when, while the member is out of reach
    done: bool = False  # read or withdrawn

    @property
    def is_held(self) -> bool:
        """Whether the member may be reading it, so that newer ones wait."""
        return self.asked or self.number > 0


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
        self._updates: dict[tuple[str, int], list[ModelOffer]] = {}  # by member and cluster, oldest first

    def __len__(self) -> int:
        return len(self._payloads)

    def add(self, offer: ModelOffer, data: bytes) -> list[ModelOffer]:
        """Keep an offer and its payload; returns the offers that were dropped to make room."""
        if offer.cluster is not None:
            updates = self._updates.setdefault((offer.member, offer.cluster), [])
            updates.append(offer)
            self._drop_replaced(updates)
        payload = self._payloads.get(offer.name)
        if payload is None:
            payload = self._payloads[offer.name] = _Payload(data)
            self.bytes += len(data)
        payload.offers.append(offer)
        return self._make_room(offer.name)

    def data(self, member: str, name: bytes) -> bytes | None:
        """Return the payload of a name that a member may read, or None."""
        return self._ask(offer for offer in self.of(member) if offer.name == name)

    def announced(self, member: str, number: int) -> bytes | None:
        """Return the payload with this number of announcement that a member asks for, or None."""
        return self._ask(offer for offer in self.of(member) if offer.number == number)

    def first(self, member: str, cluster: int) -> ModelOffer | None:
        """Return the update of a cluster that a member is to read now, or None."""
        return next(iter(self._updates.get((member, cluster), ())), None)

    def size(self, name: bytes) -> int:
        """Return the size of a payload in bytes."""
        return len(self._payloads[name].data)

    def drop(self, offer: ModelOffer) -> None:
        """Withdraw an offer; a payload without readers is deleted."""
        offer.done = True
        if offer.cluster is not None and (updates := self._updates.get((offer.member, offer.cluster))):
            updates[:] = [other for other in updates if other is not offer]
            if not updates:
                del self._updates[offer.member, offer.cluster]
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

    def lose_link(self, member: str, kept: float) -> None:
        """Drop the offers of a link that went down; updates stay for the next epoch, if it begins soon enough."""
        for offer in self.of(member):
            offer.number, offer.kept = 0, kept
            if offer.cluster is None:
                self.drop(offer)
            else:
                self._drop_replaced(self._updates[member, offer.cluster])

    def forget(self, member: str) -> None:
        """Drop all offers of a member."""
        for offer in self.of(member):
            self.drop(offer)

    def _ask(self, offers: Iterable[ModelOffer]) -> bytes | None:
        """Note that the member asks for the first of some offers, and return its payload."""
        for offer in offers:
            offer.asked = True
            return self._payloads[offer.name].data
        return None

    def _drop_replaced(self, updates: list[ModelOffer]) -> None:
        """Drop the updates that the member does not read, but for the newest."""
        for old in updates[:-1]:
            if not old.is_held:
                self.drop(old)

    def _make_room(self, keep: bytes) -> list[ModelOffer]:
        dropped: list[ModelOffer] = []
        while self.bytes > self.most_bytes and len(self._payloads) > 1:
            name = next(name for name in self._payloads if name != keep)
            for offer in list(self._payloads[name].offers):
                dropped.append(offer)
                self.drop(offer)
        return dropped
