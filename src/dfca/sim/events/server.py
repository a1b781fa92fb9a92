"""The server in virtual time: it gathers a round's uploads, ends the round, and hands its models down.

A round begins when the server hands its models down, and ends when all clients in reach have reported, or `timeout_s`
later, with what has come. A partition leaves the server on one side (`network.Partition`): it does not wait for the
others, and hands them its models when the partition heals.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dfca.sim.events.snapshot import Packer, Unpacker
from dfca.sim.events.stage import TIMEOUT, Packet, Stage
from dfca.sim.events.transport import Transport
from dfca.sim.events.world import SERVER


class Server:
    """The server's rounds. served: its bank (m, P) as of the last round's end."""

    def __init__(self, stage: Stage, transport: Transport, timeout_s: float | None) -> None:
        self.stage, self.nodes, self.fleet = stage, stage.nodes, stage.fleet
        self.transport, self.timeout_s = transport, timeout_s
        self.served = stage.fleet.states[0].bank

    def begin_round(self) -> None:
        """Let the time of a round run."""
        if self.timeout_s is not None:
            self.stage.push(self.stage.now + self.timeout_s, TIMEOUT, SERVER, self.nodes[SERVER].round)

    def upload(self, i: int, packet: Packet) -> None:
        """Take in what a client trained."""
        server, message = self.nodes[SERVER], packet.message
        if message.round != server.round or i in server.arrived:
            self.stage.note("drop", SERVER, i, message.cluster, message.round)
            return
        server.arrived.add(i)
        if packet.kind == "nothing":
            self.stage.note("nothing", SERVER, i, message.cluster, message.round)
        else:
            self.stage.note("fold", SERVER, i, message.cluster, message.round)
            self.stage.fold(SERVER, message, packet.made_s)
        self.check()

    def _in_reach(self) -> list[int]:
        return [i for i in range(self.stage.clients) if self.stage.in_reach(i, SERVER)]

    def awaited(self) -> list[int]:
        """List the clients whose upload is still to come."""
        server = self.nodes[SERVER]
        return [i for i in self._in_reach() if i not in server.arrived and self.stage.takes_part(i, server.round)]

    def check(self) -> None:
        """End the server's round where all its clients have reported, those that sit it out included."""
        server, near = self.nodes[SERVER], self._in_reach()
        began = all(self.nodes[i].round > server.round for i in near)
        if server.round < self.stage.rounds and near and began and not self.awaited():
            self.broadcast()

    def broadcast(self) -> None:
        """End the round: hand the models down to everybody in reach."""
        server = self.nodes[SERVER]
        self.stage.note("broadcast", SERVER, round=server.round)
        self.served = self.fleet.states[SERVER].bank.clone()
        self.fleet.sit(SERVER)
        server.round += 1
        server.arrived.clear()
        for i in self._in_reach():
            self.hand_down(i)
        if server.round < self.stage.rounds:
            self.begin_round()

    def hand_down(self, i: int) -> None:
        """Send a client the server's models as of the last round's end, with the number of the round that runs."""
        if self.stage.in_reach(i, SERVER):
            begun = self.stage.nothing(SERVER, round=self.nodes[SERVER].round)
            self.transport.send(SERVER, i, Packet("bank", begun, bank=self.served))

    def find_again(self, clients: Iterable[int]) -> None:
        """Hand the models to clients that were cut off; those whose upload got lost train again."""
        for i in clients:
            if not self.nodes[i].busy and i not in self.nodes[SERVER].arrived:
                self.nodes[i].newest.pop((SERVER, -1), None)
            self.hand_down(i)

    def download(self, i: int, packet: Packet) -> None:
        """Let a client begin with the models that it got."""
        node, round = self.nodes[i], packet.message.round
        assert packet.bank is not None
        node.pending = None
        if node.done or round < node.newest.get((SERVER, -1), 0):
            self.stage.note("drop", i, SERVER, round=round)
            return
        node.newest[SERVER, -1] = round + 1
        self.stage.note("download", i, SERVER, round=round)
        self.fleet.adopt(i, packet.bank, round)
        node.round, node.holds = round, True
        self.fleet.settle(i)
        self.stage.go_on(i)

    def pack(self, packer: Packer) -> Any:
        """Give everything that a checkpoint needs."""
        return packer.pack(self.served)

    def restore(self, packed: Any, unpacker: Unpacker) -> None:
        """Continue from what `pack` gave."""
        self.served = unpacker.unpack(packed)
