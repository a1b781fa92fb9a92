"""Who is there: leaving, returning, partitions, and how a client without models gets some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dfca.sim.events.snapshot import storable
from dfca.sim.events.stage import CHANGE, Charter, Packet, Stage
from dfca.sim.events.transport import Transport
from dfca.sim.events.world import SERVER

if TYPE_CHECKING:
    from dfca.sim.events.elections import Elections
    from dfca.sim.events.server import Server


@storable
class Ask(NamedTuple):
    """The sender has no models, and asks for all of the receiver's."""

    client: int


class Attendance:
    """Moves clients in and out.

    look_again: called with each client whose wait may have ended because somebody is out of reach.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        server: Server | None,
        elections: Elections | None,
        look_again: Callable[[int], None],
    ) -> None:
        self.stage, self.nodes, self.near, self.fleet = stage, stage.nodes, stage.near, stage.fleet
        self.transport, self.server, self.elections, self.look_again = transport, server, elections, look_again
        self._part_of = {i: part for part in stage.parts for i in part}

    def plan_leave(self, i: int) -> None:
        """Draw when a client leaves."""
        churn = self.stage.world.churn
        if churn.leaves_per_s:
            node = self.nodes[i]
            node.stays += 1
            self.stage.push(self.stage.now + churn.stay(self.stage.seed, i, node.stays), CHANGE, i, ("leave", None))

    def on_change(self, i: int, payload: tuple[str, Any]) -> None:
        """Let the world change."""
        what, detail = payload
        if what == "leave":
            self._leave(i, detail)
        elif what == "return":
            self._return(i)
        else:
            self._repartition(what, detail)

    def _leave(self, i: int, until_s: float | None) -> None:
        node, churn = self.nodes[i], self.stage.world.churn
        keeps = churn.keeps and node.holds
        self.stage.note("leave", i, cluster=0 if keeps else -1)
        node.here = node.busy = node.seeking = node.warming = node.held = node.owes = node.closing = False
        node.waiting, node.pending = None, None
        node.epoch += 1
        self.transport.drop_all(i)
        for store in (node.mailbox, node.asked, node.taken, node.offers, node.wanted, node.copies):
            store.clear()
        if not keeps:
            node.holds = False
            self.fleet.empty(i)
        if until_s is None:
            until_s = self.stage.now + churn.absence(self.stage.seed, i, node.stays)
        self.stage.push(until_s, CHANGE, i, ("return", None))
        if self.server is not None:
            self.server.check()
        if self.elections is not None:
            self.elections.left(i)
        for peer in self.near[i]:
            self.nodes[peer].asked.discard(i)
            self.look_again(peer)
        self.ask_again()

    def _return(self, i: int) -> None:
        node = self.nodes[i]
        node.here = True
        self.stage.note("return", i)
        self.plan_leave(i)
        if self.server is not None:
            node.newest.pop((SERVER, -1), None)
            self.server.hand_down(i)
        elif node.holds:
            self._meet(i)
            self._resume(i)
        elif self.elections is None or not self.elections.joins(i):
            node.seeking = True
        self.ask_again()

    def _resume(self, i: int) -> None:
        node = self.nodes[i]
        if not node.done:
            self.stage.go_on(i)

    def _meet(self, i: int) -> None:
        """Join the round that the neighbours are in, and agree from which round on to expect each other's models."""
        node = self.nodes[i]
        near = [peer for peer in self.near[i] if self.stage.in_reach(i, peer) and not self.nodes[peer].seeking]
        newest = max((min(self.nodes[peer].round, self.stage.rounds - 1) for peer in near), default=0)
        if newest > node.round:
            node.round = newest
            self.stage.note("jump", i, round=newest)
            self.fleet.jump(i, newest)
        for peer in near:
            node.since[peer], self.nodes[peer].since[i] = self.nodes[peer].round, node.round

    def _repartition(self, what: str, number: int) -> None:
        self.stage.note(what, 0, round=number)
        self.stage.cut(number, closed=what == "split")
        partition = self.stage.world.partitions[number]
        side = partition.sides(self.stage.clients)
        if what == "heal":
            for i, near in enumerate(self.near):
                for peer in near:
                    if side[i] != side[peer]:
                        self.nodes[i].since[peer] = self.nodes[peer].round
            if self.server is not None:
                cut_off = [i for i, mine in enumerate(side) if mine != partition.server_side(self.stage.clients)]
                self.server.find_again(cut_off)
        elif self.server is not None:
            self.server.check()
        for i in range(self.stage.clients):
            self.look_again(i)
        self.ask_again()

    # Clients without models.

    def lose_faith(self, i: int, sender: int, charter: Charter) -> None:
        """Let a client that was outvoted in a partition give up its models and take those of that charter."""
        node = self.nodes[i]
        node.charter = charter
        self.stage.note("convert", i, sender)
        self.fleet.empty(i)
        node.holds = node.busy = node.warming = node.held = node.owes = node.closing = False
        node.epoch += 1
        node.seeking, node.waiting = True, None
        for store in (node.mailbox, node.asked, node.taken, node.wanted, node.copies):
            store.clear()
        self.transport.drop_all(i)
        for peer in self.near[i]:
            self.look_again(peer)
        self.ask_again()

    def ask_again(self) -> None:
        """Let every client without models ask the neighbours that have some and were not asked."""
        for i, node in enumerate(self.nodes[: self.stage.clients]):
            if not node.seeking:
                continue
            if not self._hopes(i):
                self.stage.note("afresh", i)
                self.fleet.afresh(i)
                self.settle_in(i)
                continue
            for peer in self.near[i]:
                fits = self.nodes[peer].holds and self.nodes[peer].charter >= node.charter
                if fits and peer not in node.asked and self.stage.in_reach(i, peer):
                    node.asked.add(peer)
                    self.transport.tell(i, peer, Ask(i))

    def _hopes(self, i: int) -> bool:
        """Tell whether somebody from whom a client could ever get models has some, or will be elected to have some."""
        if self.elections is not None and self.elections.pending(i):
            return True
        return any(self.nodes[other].holds for other in self._part_of[i])

    def answer(self, i: int, asker: int) -> None:
        """Send all models to a client that has none."""
        node = self.nodes[i]
        if not node.holds:
            self.nodes[asker].asked.discard(i)
            return
        for j in range(self.fleet.models):
            message = self.fleet.copy(i, j, node.round)
            self.transport.send(i, asker, Packet("answer", message, charter=node.charter))
        if self.elections is not None:
            self.elections.brief(i, asker)

    def take(self, i: int, sender: int, packet: Packet) -> None:
        """Fold a model that was asked for; begin once each cluster has come."""
        node, message = self.nodes[i], packet.message
        if not node.seeking or packet.charter < node.charter:
            self.stage.note("drop", i, sender, message.cluster, message.round)
            return
        if packet.charter > node.charter:  # what came from others is of another election
            node.charter = packet.charter
            node.taken.clear()
            self.stage.note("clear", i)
            self.fleet.empty(i)
        self.stage.note("take", i, sender, message.cluster, message.round, packet.number)
        self.fleet.take(i, message)
        node.taken.add(message.cluster)
        if len(node.taken) >= self.fleet.models:
            self.settle_in(i)

    def settle_in(self, i: int) -> None:
        """Let a client that has got its models begin."""
        node = self.nodes[i]
        node.seeking, node.holds = False, True
        self.fleet.settle(i)
        node.taken.clear()
        node.asked.clear()
        self._meet(i)
        self._resume(i)
        self.ask_again()

    def waits(self) -> list[str]:
        """Tell who waits for whom."""
        told = []
        if self.server and (awaited := self.server.awaited()):
            told.append(f"the server waits for round {self.nodes[SERVER].round} of {names(awaited)}")
        for i, node in enumerate(self.nodes[: self.stage.clients]):
            if node.seeking:
                told.append(f"client {i} waits for the models of {names(self.near[i])}")
            elif node.waiting is not None:
                for_copies = {peer for peer in node.wanted.values() if peer not in node.missing}
                missing = sorted(node.missing | for_copies)
                told.append(f"client {i} waits for round {node.waiting} of {names(missing)}")
            elif self.server and node.here and not node.done:
                told.append(f"client {i} waits for the server")
        return told + ([] if self.elections is None else self.elections.waits())


def names(clients: Sequence[int]) -> str:
    """Name some clients in a sentence."""
    shown = ", ".join(str(i) for i in clients[:4]) + (f" and {len(clients) - 4} more" if len(clients) > 4 else "")
    return f"client {shown}" if len(clients) == 1 else f"clients {shown}"
