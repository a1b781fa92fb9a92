"""Reviving: a lost cluster, or a distribution that is new, opens a centre while training goes on.

Every client remembers its lowest loss so far. Where the loss of its best model stays above `ALARM` times that for
`ROUNDS` rounds in a row, its distribution has changed to one that no model fits, and it calls an election. So does a
cluster that nobody has trained for `ROUNDS` rounds. All clients then warm up a model anew and vote as at the start
(`election`), with the k models that they hold as centres; only those that raised the alarm may stand, or everybody
if a cluster was lost. An accepted candidate takes the place of a lost cluster, else it opens a new one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import networkx as nx
import torch
from torch import Tensor

from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.revival import ALARM, LOST_SHARE, PAUSE, ROUNDS
from dfca.peer.records.messages import Call
from dfca.sim.rounds.election import ElectionResult, ElectionSetup, Electorate, Limits


class Revival:
    """What the clients watch: lowest (N,), highest (N,) and alarm (N,) per client, idle (m,) rounds per cluster."""

    def __init__(self, clients: int, clusters: int) -> None:
        self.lowest = torch.full((clients,), float("inf"), dtype=torch.float64)
        self.highest = -self.lowest
        self.alarm = torch.zeros(clients, dtype=torch.int64)
        self.idle = torch.zeros(clusters, dtype=torch.int64)
        self.mourned = torch.zeros(clusters, dtype=torch.bool)
        self.last = torch.tensor(-PAUSE)
        self.pause = torch.tensor(PAUSE)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs."""
        return {
            "revival.lowest": self.lowest,
            "revival.highest": self.highest,
            "revival.alarm": self.alarm,
            "revival.idle": self.idle,
            "revival.mourned": self.mourned,
            "revival.last": self.last,
            "revival.pause": self.pause,
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        self.lowest = tensors["revival.lowest"].clone()
        self.highest = tensors.get("revival.highest", torch.full_like(self.lowest, -torch.inf)).clone()
        self.alarm = tensors["revival.alarm"].clone()
        self.idle = tensors["revival.idle"].clone()
        self.mourned = tensors["revival.mourned"].clone()
        self.last = tensors["revival.last"].clone()
        self.pause = tensors["revival.pause"].clone()

    def watch(self, losses: Tensor, clients: Sequence[int]) -> None:
        """Look at the lowest losses (N,) that some clients assign by."""
        some, before = list(clients), self.lowest[list(clients)]
        own = losses[some]
        high = self.highest[some] = torch.where(
            own.isfinite(), torch.maximum(self.highest[some], own), self.highest[some]
        )
        drifted = (own > ALARM * before) & (own - before > LOST_SHARE * (high - before))
        self.alarm[some] = torch.where(drifted, self.alarm[some] + 1, 0)
        self.lowest[some] = torch.minimum(before, own)

    def calls_election(
        self, assignments: Tensor, options: ElectionOptions, now: int, closed: Collection[int] = ()
    ) -> bool:
        """Count idle rounds, and return whether enough clients raise the alarm or a cluster was lost; one that is
        closed is not."""
        trained = torch.bincount(assignments[assignments >= 0], minlength=len(self.idle)) > 0
        self.idle = torch.where(trained, 0, self.idle + 1)
        self.mourned &= ~trained
        self.idle[list(closed)] = 0
        if now - int(self.last) < int(self.pause):
            return False
        return int((self.alarm >= ROUNDS).sum()) >= options.support or bool(self._lost().any())

    def elect(
        self, setup: ElectionSetup, graph: nx.Graph, banks: Tensor, now: int, closed: Collection[int] = ()
    ) -> tuple[list[tuple[int, Tensor]], ElectionResult]:
        """Hold an election among the clients of one connected graph.

        banks (m, L, P) are those of the members of this rank; closed: the clusters that are. Returns the (slot, centre)
        that it opens, and what it cost.
        """
        lost = self._lost().nonzero()[:, 0].tolist()
        standing = {p for p, client in enumerate(sorted(graph)) if lost or self.alarm[client] >= ROUNDS}
        if not standing:
            return [], ElectionResult(banks[:0, 0], (), 0, 0)
        clients = Electorate(setup, graph, now, Call(tuple(lost), len(banks)))
        known = [j for j in range(len(banks)) if j not in closed]
        clients.use_banks(banks, known)
        new = range(len(banks), max(len(banks), setup.options.most))
        slots = [*lost, *sorted(closed), *new]
        held = clients.hold_turns(standing, Limits(len(slots), held=len(known)))
        opened = zip(slots, (each.model for each in held if each.turn.accepted), strict=False)
        turns = tuple(each.turn for each in held)
        scalars = clients.cost.wave + sum(each.scalars for each in held)
        return list(opened), ElectionResult(banks[:0, 0], turns, len(turns) * (len(graph) - 1), scalars)

    @property
    def unfit(self) -> set[int]:
        """The clients whose loss is above what raises the alarm, if it stays there."""
        return set(self.alarm.nonzero()[:, 0].tolist())

    def forget_lowest(self, clients: Sequence[int]) -> None:
        """Let some clients learn anew what a low loss is, after a survey; how much was learned since the last election
        is known."""
        self.alarm[list(clients)] = 0
        self.lowest[list(clients)] = float("inf")

    def renumber(self, clusters: int) -> None:
        """Go on with so many clusters, all of which have followers."""
        self.idle = torch.zeros(clusters, dtype=torch.int64)
        self.mourned = torch.zeros(clusters, dtype=torch.bool)

    def close(self, now: int, clusters: int, opened: Sequence[int]) -> None:
        """End an election after which there are so many clusters; what nobody filled is not asked for again."""
        self.last = torch.tensor(now)
        self.pause = torch.tensor(PAUSE) if opened else 2 * self.pause
        self.forget_lowest(range(len(self.lowest)))  # also that of clients that changed
        self.highest.fill_(float("-inf"))
        self.mourned |= self._lost()
        grown = clusters - len(self.idle)
        self.idle = torch.cat([self.idle, torch.zeros(grown, dtype=torch.int64)])
        self.mourned = torch.cat([self.mourned, torch.zeros(grown, dtype=torch.bool)])
        self.idle[list(opened)], self.mourned[list(opened)] = 0, False

    def _lost(self) -> Tensor:
        """Find the clusters that nobody trains and that no election has failed to fill yet."""
        return (self.idle >= ROUNDS) & ~self.mourned
