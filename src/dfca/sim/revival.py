"""Reviving: a lost cluster, or a distribution that is new, opens a centre while training goes on.

Every client remembers its lowest loss so far. Where the loss of its best model stays above `ALARM` times that for
`ROUNDS` rounds in a row, its distribution has changed to one that no model fits, and it calls an election. So does a
cluster that nobody has trained for `ROUNDS` rounds. All clients then warm up a model anew and vote as at the start
(`core.election`), with the k models that they hold as centres; only those that raised the alarm may stand, or everybody
if a cluster was lost. An accepted candidate takes the place of a lost cluster, else it opens a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import torch
from torch import Tensor

from dfca.core.election import ElectionOptions, Parts, bid, cast, divide, verdict
from dfca.core.rng import stream
from dfca.data.clients import ClientData
from dfca.sim.election import Outcome, Turn, scalars_of_turn, take_parts, warm_up
from dfca.sim.engine import Engine

ALARM = 1.5
ROUNDS = 3
PAUSE = 10
"""Rounds between two elections: a new centre needs some to be trained before it is judged. Twice as many after each
election that opened nothing, so that a false alarm costs little."""


class Revival:
    """What the clients watch: lowest (N,) and alarm (N,) per client, idle (m,) rounds per cluster."""

    def __init__(self, clients: int, clusters: int) -> None:
        self.lowest = torch.full((clients,), float("inf"), dtype=torch.float64)
        self.alarm = torch.zeros(clients, dtype=torch.int64)
        self.idle = torch.zeros(clusters, dtype=torch.int64)
        self.mourned = torch.zeros(clusters, dtype=torch.bool)
        self.last = torch.tensor(-PAUSE)
        self.pause = torch.tensor(PAUSE)

    def state(self) -> dict[str, Tensor]:
        """Give what a checkpoint needs."""
        return {f"revival.{name}": value for name, value in vars(self).items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from a state."""
        for name in vars(self):
            setattr(self, name, tensors[f"revival.{name}"].clone())

    def watch(self, losses: Tensor, clients: Sequence[int]) -> None:
        """Look at the losses (C, m) that some clients assign by."""
        own = losses.cpu().double().nan_to_num(nan=float("inf")).min(dim=1).values
        some, before = list(clients), self.lowest[list(clients)]
        self.alarm[some] = torch.where(own > ALARM * before, self.alarm[some] + 1, 0)
        self.lowest[some] = torch.minimum(before, own)

    def calls_election(self, assignments: Tensor, options: ElectionOptions, now: int) -> bool:
        """Count idle rounds, and tell whether enough clients raise the alarm or a cluster was lost."""
        trained = torch.bincount(assignments[assignments >= 0], minlength=len(self.idle)) > 0
        self.idle = torch.where(trained, 0, self.idle + 1)
        self.mourned &= ~trained
        if now - int(self.last) < int(self.pause):
            return False
        return int((self.alarm >= ROUNDS).sum()) >= options.support or bool(self._lost().any())

    def elect(
        self,
        engine: Engine,
        start: Tensor,
        data: ClientData,
        banks: Tensor,
        graph: nx.Graph,
        seed: int,
        options: ElectionOptions,
        now: int,
    ) -> tuple[list[tuple[int, Tensor]], Outcome]:
        """Hold an election among the clients of one connected graph.

        Returns the (slot, centre) that it opens, and what it cost.
        """
        members = sorted(graph)
        positions = range(len(members))
        lost = self._lost().nonzero()[:, 0].tolist()
        stand = {p for p in positions if lost or self.alarm[members[p]] >= ROUNDS}
        if not stand:
            return [], Outcome(banks[:0, 0], (), 0, 0)
        place = None if len(members) == banks.shape[1] else members
        parts = [divide(data.sizes[i], stream(seed, "parts", i, now)) for i in members]
        warm, bidding, voting = (take_parts(data, members, parts, name) for name in Parts._fields)
        own = warm_up(engine, start, warm, options.warmup_steps)
        alone = [losses[0] for losses in engine.sample_losses(own[None], bidding)]
        on_bids, on_votes = (engine.sample_losses(banks, part, place) for part in (bidding, voting))
        turns: list[Turn] = []
        opened: list[tuple[int, Tensor]] = []
        clusters, misses, scalars = len(banks), 0, 0
        while stand and misses < options.patience and (lost or clusters < options.most):
            bids = {p: bid(on_bids[p], alone[p]) for p in stand}
            candidate = max(bids, key=lambda p: (bids[p], -p))
            stand.remove(candidate)
            new_bids = engine.sample_losses(own[candidate][None, None], bidding)
            new_votes = engine.sample_losses(own[candidate][None, None], voting)
            votes = [cast(on_bids[p], alone[p], new_bids[p][0], on_votes[p], new_votes[p][0]) for p in positions]
            found = verdict(votes, candidate, options, followed_only=True)
            scalars += scalars_of_turn(graph, {members[p]: value for p, value in bids.items()}, on_bids[0].shape[0])
            turns.append(Turn(members[candidate], bids[candidate], found.support, found.z, found.accepted))
            if not found.accepted:
                misses += 1
                continue
            misses, slot = 0, lost.pop(0) if lost else clusters
            clusters = max(clusters, slot + 1)
            opened.append((slot, own[candidate].clone()))
            on_bids = [torch.cat(pair) for pair in zip(on_bids, new_bids, strict=True)]
            on_votes = [torch.cat(pair) for pair in zip(on_votes, new_votes, strict=True)]
        return opened, Outcome(own[:0], tuple(turns), len(turns) * (len(members) - 1), scalars)

    def close(self, now: int, clusters: int, opened: Sequence[int]) -> None:
        """End an election after which there are so many clusters; what nobody filled is not asked for again."""
        self.last = torch.tensor(now)
        self.pause = torch.tensor(PAUSE) if opened else 2 * self.pause
        self.alarm.zero_()
        self.lowest.fill_(float("inf"))  # what is low is learned anew, also by those that changed
        self.mourned |= self._lost()
        grown = clusters - len(self.idle)
        self.idle = torch.cat([self.idle, torch.zeros(grown, dtype=torch.int64)])
        self.mourned = torch.cat([self.mourned, torch.zeros(grown, dtype=torch.bool)])
        self.idle[list(opened)], self.mourned[list(opened)] = 0, False

    def _lost(self) -> Tensor:
        """Find the clusters that nobody trains and that no election has failed to fill yet."""
        return (self.idle >= ROUNDS) & ~self.mourned
