"""What an election costs where every message arrives at once: the numbers that travel besides models.

The wave is that of the peers' own machines (`peer.waves.wave`), as tests hold it; what the turns send follows from its
tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import networkx as nx

from dfca.core.rules.election import lot, no_votes
from dfca.peer.records.messages import Bid, Call, Count, Decision, Key, Open, Probe, Stand, Turn, Votes, scalars

_KEY = Key(0, 0, 0, 0, 0)


class ElectionCost:
    """The cost of an election in a connected graph: `wave` to build the tree and to open, `turn` per candidate."""

    def __init__(self, graph: nx.Graph, seed: int, call: Call | None = None) -> None:
        self.clients = len(graph)
        self._parents, probes, counts = _play_wave(graph, seed)
        self.wave = probes * scalars(Probe(_KEY, (), call)) + counts * scalars(Count(_KEY, 0, 0, ()))
        self.wave += (self.clients - 1) * scalars(Open(_KEY, 0, (), 0 if call is None else None))
        self._depths: dict[int, int] = {}
        for i in self._parents:
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


def _play_wave(graph: nx.Graph, seed: int) -> tuple[dict[int, int | None], int, int]:
    """Let everybody begin a wave at once, and deliver all that is sent in order; returns the parents in the tree of the
    best one, and how many probes and counts were sent.

    About N log N messages: a client joins about log N waves before the best one reaches it. Whoever has heard of its
    wave from all neighbours sends its parent a count.
    """
    ids = sorted(graph)
    place = {client: i for i, client in enumerate(ids)}
    neighbours = [sorted(place[neighbour] for neighbour in graph.neighbors(client)) for client in ids]
    joined = [0] * len(ids)  # the wave that a client is in: the larger wins
    for rank, client in enumerate(sorted(ids, key=lambda client: (-lot(seed, client), client))):
        joined[place[client]] = rank
    heard, parents = [0] * len(ids), [-1] * len(ids)
    under_way = deque(zip(range(len(ids)), joined, neighbours, strict=True))
    probes, counts = 2 * graph.number_of_edges(), 0
    while under_way:
        sender, wave, receivers = under_way.popleft()
        for i in receivers:
            if wave < joined[i]:
                continue
            if wave > joined[i]:
                joined[i], parents[i], heard[i] = wave, sender, 0
                others = [neighbour for neighbour in neighbours[i] if neighbour != sender]
                under_way.append((i, wave, others))
                probes += len(others)
            heard[i] += 1
            if heard[i] == len(neighbours[i]) and parents[i] >= 0:
                under_way.append((i, wave, [parents[i]]))
                counts += 1
    return {ids[i]: None if above < 0 else ids[above] for i, above in enumerate(parents)}, probes, counts
