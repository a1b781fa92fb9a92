"""How packets travel: uplinks, delays, faults, and the repeating of what somebody waits for.

A trained model is sent once: the next round brings a newer one. What was asked for (answers, copies, a server's bank)
and words (of elections, of relays) are repeated until they are acknowledged: the sender waits `Link.retry_s` for the
acknowledgement (which costs nothing and is lost as often as anything else) and sends again, at most `TRIES` times. A
broken payload fails its checksum and counts as lost. Words for one neighbour gather until the instant is over, and no
client sends words more often than once per latency: a flood of votes is a few packets per link.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from dfca.core.elector import Announcement, Ballot, Bid, Candidacy
from dfca.sim.events.snapshot import Packer, Unpacker
from dfca.sim.events.stage import DELIVER, DEPART, FLUSH, Packet, Stage, Tag, Word
from dfca.sim.events.world import SERVER, draw

RELIABLE = frozenset(("answer", "copy", "bank", "words"))
TRIES = 30
"""A sender gives up after so many; at 50 % loss both ways, one packet in 6,000 gets so far."""


class Transport:
    """The links. alive: how many words of each election are on their way.

    deliver: called with (receiver, sender, packet); hushed: called with an election of which no word travels any more.
    """

    def __init__(self, stage: Stage, model_bytes: int) -> None:
        self.stage, self.nodes, self.model_bytes = stage, stage.nodes, model_bytes
        self.link, self.faults, self.seed = stage.world.link, stage.world.faults, stage.seed
        self.bandwidths = self.link.bandwidths(stage.clients)
        self.retry_s = self.link.retry_s
        self._numbers = self.link.spread > 0 or any(vars(self.faults).values())  # else nothing is drawn
        self.alive: Counter[Tag] = Counter()
        self.deliver: Callable[[int, int, Packet], None]
        self.hushed: Callable[[Tag], None]

    # Sending.

    def send(self, i: int, peer: int, packet: Packet) -> None:
        """Hand a packet to the uplink, behind what waits there; a model replaces an older one to the same peer."""
        message, node = packet.message, self.nodes[i]
        node.sent += 1
        if self._numbers or packet.kind in RELIABLE:
            packet = packet._replace(number=node.sent)
        if packet.kind in ("answer", "copy"):
            self.stage.note("answer", i, peer, message.cluster, message.round, packet.number)
        self._enqueue(i, peer, packet)

    def tell(self, i: int, peer: int, what: Any, of: Tag | None = None) -> None:
        """Tell a neighbour something that it needs to know."""
        node = self.nodes[i]
        if not self.stage.in_reach(i, peer):
            return
        if of is not None:
            self.alive[of] += 1
        if not node.words:
            self.stage.push(max(self.stage.now, node.flushed_s + self.link.latency_s), FLUSH, i)
        node.words.setdefault(peer, []).append(Word(what, of))

    def tell_all(self, i: int, what: Any, of: Tag | None = None, but: int | None = None) -> None:
        """Tell all neighbours, but the one that it came from."""
        for peer in self.stage.near[i]:
            if peer != but:
                self.tell(i, peer, what, of)

    def on_flush(self, i: int, _: Any) -> None:
        """Send the words that gathered, one packet per neighbour."""
        node, words = self.nodes[i], self.nodes[i].words
        node.words, node.flushed_s = {}, self.stage.now
        for peer, told in words.items():
            self.send(i, peer, Packet("words", self.stage.nothing(i), words=tuple(told)))

    def _enqueue(self, i: int, peer: int, packet: Packet) -> None:
        message, node = packet.message, self.nodes[i]
        if packet.kind == "nothing" or i == SERVER or self.bandwidths[i] == math.inf:
            self._travel(i, peer, packet)
            return
        key = (peer, message.cluster, packet.number if packet.kind in RELIABLE else 0)
        if key in node.outbox:
            overtaken = node.outbox[key].message
            self.stage.note("drop", i, peer, overtaken.cluster, overtaken.round)
        if packet.kind != "words":
            self.stage.note("queue", i, peer, message.cluster, message.round)
        node.outbox[key] = packet
        if not node.sending:
            self._next_departure(i)

    def _next_departure(self, i: int) -> None:
        node = self.nodes[i]
        node.sending = bool(node.outbox)
        if node.sending:
            peer = (key := next(iter(node.outbox)))[0]
            packet = node.outbox.pop(key)
            self.stage.push(self.stage.now + self._bytes(packet) / self.bandwidths[i], DEPART, i, (peer, packet, False))

    def on_depart(self, i: int, payload: tuple[int, Packet, bool]) -> None:
        """Let a packet leave the uplink, or begin to repeat one."""
        peer, packet, again = payload
        if again:
            self._enqueue(i, peer, packet)
            return
        self._travel(i, peer, packet)
        self._next_departure(i)

    def _bytes(self, packet: Packet) -> float:
        if packet.kind == "words":
            models = sum(isinstance(word.what, Candidacy) for word in packet.words)
            return models * self.model_bytes + 4 * scalars(packet.words)
        return self.model_bytes + 8 * len(packet.offers or ())

    # On the way.

    def _travel(self, i: int, peer: int, packet: Packet) -> None:
        """Put a packet on its way, through what the world does to it."""
        stage, seed, number, faults, message = self.stage, self.seed, packet.number, self.faults, packet.message
        reliable = packet.kind in RELIABLE
        self._count(i, peer, packet)
        delay = self.link.latency(seed, i, peer, number + packet.tries * 1_000_003)
        if i == SERVER:
            delay += stage.fleet.models * self.model_bytes / self.bandwidths[peer]
        if faults.loss and draw(seed, "loss", i, peer, number, packet.tries) < faults.loss:
            stage.note("lost", peer, i, message.cluster, message.round)
            if reliable:
                self._repeat(i, peer, packet)
            return
        if not reliable and faults.duplication and draw(seed, "duplication", i, peer, number) < faults.duplication:
            later = self.link.latency(seed, i, peer, -number)
            stage.push(stage.now + later, DELIVER, peer, (i, packet))
        stage.push(stage.now + delay, DELIVER, peer, (i, packet))

    def _count(self, i: int, peer: int, packet: Packet) -> None:
        stage, message = self.stage, packet.message
        if packet.kind == "words":
            stage.note("words", i, peer, number=scalars(packet.words))
            for word in packet.words:
                if isinstance(word.what, Candidacy):
                    stage.note("candidacy", i, peer)
        elif packet.tries:
            stage.note("repeat", i, peer, message.cluster, message.round)
        elif packet.kind not in ("answer", "copy"):
            stage.note("send", i, peer, message.cluster, message.round, 2 * len(packet.offers or ()))

    def on_deliver(self, i: int, payload: tuple[int, Packet]) -> None:
        """Let a packet arrive."""
        sender, packet = payload
        stage, message = self.stage, packet.message
        if not stage.in_reach(i, sender):
            stage.note("lost", i, sender, message.cluster, message.round)
            self.nodes[i].asked.discard(sender)
            self.forget(packet)
            return
        if packet.kind in RELIABLE:
            if self.is_corrupt(i, sender, packet):
                stage.note("corrupt", i, sender)
                self._repeat(sender, i, packet)
                return
            if self.faults.loss and draw(self.seed, "ack", i, sender, packet.number, packet.tries) < self.faults.loss:
                self._repeat(sender, i, packet._replace(delivered=True))
            if packet.delivered:
                return  # once is enough
        self.deliver(i, sender, packet)
        self.forget(packet)

    def _repeat(self, i: int, peer: int, packet: Packet) -> None:
        """Send again after the time that an acknowledgement takes."""
        if packet.tries >= TRIES or not self.stage.in_reach(i, peer):
            if not packet.delivered:
                self.nodes[peer].asked.discard(i)
                self.forget(packet)
            return
        later = packet._replace(tries=packet.tries + 1)
        self.stage.push(self.stage.now + self.retry_s, DEPART, i, (peer, later, True))

    def is_corrupt(self, i: int, sender: int, packet: Packet) -> bool:
        """Draw whether a payload broke on its way."""
        share = self.faults.corruption
        return bool(share) and draw(self.seed, "corruption", sender, i, packet.number, packet.tries) < share

    def forget(self, packet: Packet) -> None:
        """Note that a packet travels no more."""
        if not packet.delivered:
            self.hush(packet.words)

    def hush(self, words: Iterable[Word]) -> None:
        """Note that words travel no more."""
        for word in words:
            if word.of is not None:
                self.alive[word.of] -= 1
                if not self.alive[word.of]:
                    self.hushed(word.of)

    def drop_all(self, i: int) -> None:
        """Forget everything that a client was about to send: it has left."""
        node = self.nodes[i]
        packets, words = list(node.outbox.values()), [word for told in node.words.values() for word in told]
        node.outbox, node.words, node.sending = {}, {}, False
        self.hush(words)
        for packet in packets:
            self.forget(packet)

    def pack(self, packer: Packer) -> Any:
        """Give everything that a checkpoint needs."""
        return packer.pack(dict(self.alive))

    def restore(self, packed: Any, unpacker: Unpacker) -> None:
        """Continue from what `pack` gave."""
        self.alive = Counter(unpacker.unpack(packed))


def scalars(words: Iterable[Word]) -> int:
    """Count the numbers that words consist of; the model of a candidacy is counted as a model."""
    return sum(_scalars(word.what) for word in words)


def _scalars(what: Any) -> int:
    if isinstance(what, Ballot):
        return 5 + 2 * len(what.vote.totals)
    if isinstance(what, Candidacy):
        return 0
    if isinstance(what, Bid | Announcement):
        return 2
    return max(1, len(what)) if isinstance(what, tuple) else 2
