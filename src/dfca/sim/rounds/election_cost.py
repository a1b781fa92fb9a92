"""What an election costs where every message arrives at once: the numbers that travel besides models.

The wave is played by the peers' own machines, without samples; what the turns send follows from its tree.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection

import networkx as nx
import torch

from dfca.core.rules.election import ElectionOptions, no_votes
from dfca.peer.records.messages import Bid, Call, Decision, Key, Open, Stand, Turn, Votes, scalars
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.election import Election

_KEY = Key(0, 0, 0, 0, 0)


class ElectionCost:
    """The cost of an election in a connected graph: `wave` to build the tree and to open, `turn` per candidate."""

    def __init__(self, graph: nx.Graph, seed: int, options: ElectionOptions, call: Call | None = None) -> None:
        self.clients = len(graph)
        peers, self.wave = _play_wave(graph, seed, options, call)
        self.wave += (self.clients - 1) * scalars(Open(_KEY, 0, (), 0 if call is None else None))
        self._parents = {i: peer.parent for i, peer in peers.items()}
        self._depths: dict[int, int] = {}
        for i in peers:
            path = [i]
            while path[-1] not in self._depths and (above := self._parents[path[-1]]) is not None:
                path.append(above)
            for depth, client in enumerate(reversed(path), self._depths.get(path[-1], 0)):
                self._depths[client] = depth

    def turn(self, standing: Collection[int], candidate: int, centres: int) -> int:
        """Count the scalars of one turn: bids up the tree, the call to stand down to the candidate, votes, decision."""
        bidding = set(standing)  # and everybody above them
        for i in standing:
            above = self._parents[i]
            while above is not None and above not in bidding:
                bidding.add(above)
                above = self._parents[above]
        edges = self.clients - 1
        bids = sum(self._depths[i] > 0 for i in bidding)
        return (
            bids * scalars(Bid(_KEY, 0, 0.0, 0))
            + (edges - bids) * scalars(Bid(_KEY, 0, 0.0, None))
            + self._depths[candidate] * scalars(Stand(_KEY, 0, 0))
            + edges * scalars(Votes(_KEY, 0, no_votes(centres)))
            + edges * scalars(Decision(_KEY, 0, Turn(0, accepted=True), done=False))
        )


def _play_wave(
    graph: nx.Graph, seed: int, options: ElectionOptions, call: Call | None
) -> tuple[dict[int, Election], int]:
    """Let everybody begin a wave at once, and deliver all that is sent in order; returns the peers, and the scalars."""
    nobody = {"quorum": 1.0, "answer_time": AnswerTime(1.0), "size": 0, "dtype": torch.float32, "base": ()}
    peers = {
        i: Election(i, seed, 0, None, options, call=call, links=set(graph.neighbors(i)), **nobody)  # type: ignore[arg-type]
        for i in sorted(graph)
    }
    under_way: deque[tuple[int, int, object]] = deque()
    total = 0

    def drain(i: int) -> None:
        nonlocal total
        counted, size = None, 0
        for to, message in peers[i].out:
            if message is not counted:  # most go to all neighbours
                counted, size = message, scalars(message)
            total += size
            under_way.append((i, to, message))
        peers[i].out = []

    collected = gc.isenabled()
    gc.disable()  # it would look at all queued messages again and again: 40 % of the time at N = 8,000
    try:
        for i, peer in peers.items():
            peer.begin(0.0)
            drain(i)
        while under_way:
            sender, receiver, message = under_way.popleft()
            peers[receiver].receive(sender, message, 0.0)
            drain(receiver)
    finally:
        if collected:
            gc.enable()
    return peers, total
