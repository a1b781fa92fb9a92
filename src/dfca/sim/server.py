"""The server in virtual time: it gathers a round's uploads, ends the round, and hands its models down."""

from __future__ import annotations

import torch

from dfca.core.client import Message
from dfca.sim.fleet import TIMEOUT, Packet, Send, Stage
from dfca.sim.network import SERVER


class Server:
    """The server's rounds. served: its bank (m, P) as of the last round's end."""

    def __init__(self, stage: Stage, send: Send, timeout_s: float | None) -> None:
        self.stage, self.nodes, self.fleet = stage, stage.nodes, stage.fleet
        self.send, self.timeout_s = send, timeout_s
        self.served = stage.fleet.states[SERVER].bank

    def upload(self, i: int, packet: Packet) -> None:
        server, message = self.nodes[SERVER], packet.message
        if message.round != server.round or i in server.arrived:
            self.stage.note("drop", SERVER, i, message.cluster, message.round)
            return
        if not server.arrived and self.timeout_s is not None:
            self.stage.push(self.stage.now + self.timeout_s, TIMEOUT, SERVER, server.round)
        server.arrived.add(i)
        if packet.kind == "nothing":
            self.stage.note("nothing", SERVER, i, message.cluster, message.round)
        else:
            self.stage.note("fold", SERVER, i, message.cluster, message.round)
            self.stage.fold(SERVER, message)
        self.check()

    def awaited(self) -> list[int]:
        server = self.nodes[SERVER]
        here = (i for i in range(self.stage.clients) if self.nodes[i].here and i not in server.arrived)
        return [i for i in here if self.stage.takes_part(i, server.round)]

    def check(self) -> None:
        """End the server's round where all its clients have reported, those that sit it out included."""
        server, nodes = self.nodes[SERVER], self.nodes[: self.stage.clients]
        began = all(node.round > server.round for node in nodes if node.here)
        if server.round < self.stage.rounds and began and any(node.here for node in nodes) and not self.awaited():
            self.broadcast()

    def broadcast(self) -> None:
        server = self.nodes[SERVER]
        self.stage.note("broadcast", SERVER, round=server.round)
        self.served = self.fleet.states[SERVER].bank
        self.fleet.sit(SERVER)
        server.round += 1
        server.arrived.clear()
        for i in range(self.stage.clients):
            if self.nodes[i].here:
                self.hand_down(i)

    def hand_down(self, i: int) -> None:
        """Send a client the server's models as of the last round's end, with the number of the round that runs."""
        begun = Message(SERVER, -1, self.nodes[SERVER].round, 0, torch.empty(0))
        self.send(SERVER, i, Packet("bank", begun, bank=self.served))

    def download(self, i: int, packet: Packet) -> None:
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
        self.stage.go_on(i)
