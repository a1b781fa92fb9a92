"""A client's mail: models, copies and words as they arrive, who waits for whom, and when what came is folded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dfca.sim.events.attendance import Ask
from dfca.sim.events.corruption import corrupted
from dfca.sim.events.stage import ASK, CLOSE, Packet, Stage, Word
from dfca.sim.events.transport import Transport
from dfca.sim.events.watch import Regret, Want

if TYPE_CHECKING:
    from dfca.sim.events.attendance import Attendance
    from dfca.sim.events.elections import Elections
    from dfca.sim.events.server import Server


class Mailroom:
    """Takes in what arrives. end_round: called with a client whose wait under `batch` is over."""

    attendance: Attendance

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        server: Server | None,
        elections: Elections | None,
        end_round: Callable[[int], None],
    ) -> None:
        self.stage, self.nodes, self.near, self.fleet = stage, stage.nodes, stage.near, stage.fleet
        self.transport, self.server, self.elections, self.end_round = transport, server, elections, end_round
        self._batch = stage.setting.aggregation == "batch"
        transport.deliver = self.deliver

    # Folding.

    def plan_close(self, i: int) -> None:
        """Fold what has come at the end of this instant."""
        node = self.nodes[i]
        if not node.closing:
            node.closing = True
            self.stage.push(self.stage.now, CLOSE, i)

    def on_close(self, i: int, _: Any) -> None:
        """Fold what has come; under batch, end the wait."""
        node = self.nodes[i]
        node.closing = False
        if self._batch and node.waiting is None:
            return
        now = sys.maxsize if node.waiting is None else node.waiting
        self._fold_mailbox(i, now)
        node.offers = {peer: each for peer, each in node.offers.items() if each[0] > now}
        copies, node.copies = node.copies, []
        for packet in copies:
            self._relay(i, packet)
        if node.waiting is not None:
            node.waiting = None
            node.wanted.clear()
            self.end_round(i)

    def _fold_mailbox(self, i: int, now: int) -> None:
        """Fold the newest message of each sender and cluster up to a round; keep the later ones."""
        mailbox = self.nodes[i].mailbox
        later: dict[tuple[int, int], list[Packet]] = {}
        for key in sorted(mailbox, key=itemgetter(1, 0)):  # cluster by cluster: the model stays in the cache
            kept = mailbox[key]
            while kept and kept[-1].message.round > now:
                later.setdefault(key, []).insert(0, kept.pop())
            if kept:
                message = kept[-1].message
                self.stage.note("fold", i, message.sender, message.cluster, message.round)
                self.stage.fold(i, message, kept[-1].made_s)
        self.nodes[i].mailbox = later

    def _relay(self, i: int, packet: Packet) -> None:
        message = packet.message
        taken = self.fleet.dry or self.fleet.relay(i, message)
        self.stage.note("relay" if taken else "drop", i, message.sender, message.cluster, message.round, packet.number)

    # Batch: who waits for whom.

    def _expects(self, i: int, peer: int, now: int) -> bool:
        node, other = self.nodes[i], self.nodes[peer]
        newest, clusters, parts = node.heard.get(peer, (-1, (), 1))
        if newest > now or (newest == now and len(clusters) >= parts) or node.since.get(peer, 0) > now:
            return False
        return self.stage.in_reach(i, peer) and other.holds and self.stage.takes_part(peer, now)

    def try_close(self, i: int) -> None:
        """See anew whom a waiting client waits for; end the wait if it is nobody."""
        node = self.nodes[i]
        if node.waiting is not None:
            node.missing = {peer for peer in self.near[i] if self._expects(i, peer, node.waiting)}
            node.wanted = {j: peer for j, peer in node.wanted.items() if self.stage.in_reach(i, peer)}
            self._check_wait(i)

    def _check_wait(self, i: int) -> None:
        """Go on where nobody is waited for: ask for copies, then fold."""
        node = self.nodes[i]
        if node.waiting is None or node.missing or node.closing:
            return
        if not self.fleet.relays:
            self.plan_close(i)
        elif node.inquired != node.waiting:
            node.inquired = node.waiting
            self.stage.push(self.stage.now, ASK, i)
        elif not node.wanted:
            self.plan_close(i)

    def on_ask(self, i: int, _: Any) -> None:
        """Ask for the copies of models that no neighbour has trained."""
        node = self.nodes[i]
        now = sys.maxsize if node.waiting is None else node.waiting
        fresh = {j for (_, j), kept in node.mailbox.items() if any(packet.message.round <= now for packet in kept)}
        for j in range(self.fleet.models):
            if j not in fresh and j not in node.wanted:
                offered = [
                    offers[j]
                    for peer, (round, offers) in sorted(node.offers.items())
                    if j in offers and round <= now and self.stage.in_reach(i, peer)
                ]
                chosen = self.fleet.wants(i, j, offered)
                if chosen is not None:
                    node.wanted[j] = chosen.sender
                    self.transport.tell(i, chosen.sender, Want(i, j))
        if self._batch and not node.wanted:
            self._check_wait(i)

    # Arrivals.

    def deliver(self, i: int, sender: int, packet: Packet) -> None:
        """Hand a packet that has arrived to who it is for."""
        message, node = packet.message, self.nodes[i]
        if packet.kind == "words":
            for word in packet.words:
                self._hear(i, sender, word)
        elif packet.kind == "answer":
            self.attendance.take(i, sender, packet)
        elif packet.kind == "copy":
            self._receive_copy(i, sender, packet)
        elif packet.kind == "bank":
            assert self.server is not None
            if node.busy:
                node.pending = packet
            else:
                self.server.download(i, packet)
        elif packet.kind != "nothing" and self.transport.is_corrupt(i, sender, packet):
            self.stage.note("corrupt", i, sender, message.cluster, message.round)
            if not self.fleet.dry:
                self.fleet.refuse(i, corrupted(message, self.stage.seed, i))
        elif self.server:
            self.server.upload(sender, packet)
        else:
            self._receive(i, sender, packet)

    def _hear(self, i: int, sender: int, word: Word) -> None:
        """Take in a word: a request, or something of an election."""
        what = word.what
        if isinstance(what, Ask):
            self.attendance.answer(i, what.client)
        elif isinstance(what, Want):
            if self.nodes[i].holds:
                node = self.nodes[i]
                message = self.fleet.copy(i, what.cluster, node.round)
                self.transport.send(i, sender, Packet("copy", message, charter=node.charter))
            else:
                self.transport.tell(i, sender, Regret(i, what.cluster))
        elif isinstance(what, Regret):
            self.nodes[i].wanted.pop(what.cluster, None)
            self._check_wait(i)
        elif self.elections is not None:
            self.elections.hear(i, sender, word)

    def _receive(self, i: int, sender: int, packet: Packet) -> None:
        """Take in a neighbour's model: keep it until it is folded, or drop it."""
        message, node = packet.message, self.nodes[i]
        j, round = message.cluster, message.round
        known = self.elections is None or not node.holds or self.elections.compare(i, sender, packet.charter, j)
        stale = round <= node.newest.get((sender, j), -1)
        if not node.holds or not known or stale or not self.stage.takes_part(i, round):
            self.stage.note("drop", i, sender, j, round)
            return
        node.newest[sender, j] = round
        if packet.offers is not None:
            node.offers[sender] = (round, packet.offers)
        if packet.kind == "nothing":
            self.stage.note("nothing", i, sender, j, round)
        else:
            self.stage.note("hold", i, sender, j, round)
            kept = node.mailbox.setdefault((sender, j), [])
            kept.append(packet)
            if len(kept) > (2 if self._batch else 1):
                del kept[0]
            if not (self._batch or node.busy or node.warming):
                self.plan_close(i)
        if self._batch:
            newest, clusters, _ = node.heard.get(sender, (-1, set(), 1))
            if round > newest:
                node.heard[sender] = (round, {j}, packet.parts)
            elif round == newest:
                clusters.add(j)
            if node.waiting is not None and sender in node.missing and not self._expects(i, sender, node.waiting):
                node.missing.discard(sender)
                self._check_wait(i)

    def _receive_copy(self, i: int, sender: int, packet: Packet) -> None:
        """Take in a copy that was asked for."""
        node, j = self.nodes[i], packet.message.cluster
        asked = node.wanted.pop(j, None) == sender
        if asked and node.holds and (self.elections is None or not self.elections.adopt(i, sender, packet)):
            node.copies.append(packet)
            if not (self._batch or node.busy or node.warming):
                self.plan_close(i)
        self._check_wait(i)
