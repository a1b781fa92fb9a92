"""Surveys (`rules.merging`) for all clients at once: which clusters are worth their data, and when they are held.

What a survey sends is counted as one turn on a wave (`peer.waves`): the sums up the tree, the decision down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dfca.core.method import MergeOptions
from dfca.core.rules.merging import EXCESSES, Observation, Plan, decide, nothing, observes, order_of, total, unsettled
from dfca.core.rules.surveys import Schedule, is_settled
from dfca.peer.records.messages import Call
from dfca.sim.observing import Asked, observe_all
from dfca.sim.rounds.election_cost import ElectionCost
from dfca.sim.start import Start

KEY_SCALARS = 5  # numbers that name the wave in every message of it


class SurveyRounds:
    """The surveys of a run; every rank knows the same.

    parts: the connected parts of the graph; centres: how many each of them has elected.
    """

    def __init__(
        self, start: Start, options: MergeOptions, parts: Sequence[Sequence[int]], centres: Sequence[int]
    ) -> None:
        self.start, self.options, self.parts = start, options, parts
        self.closed = torch.zeros(max(centres), start.setting.clients, dtype=torch.bool)  # (m, N), alike within a part
        for part, many in zip(parts, centres, strict=True):
            self.closed[many:, list(part)] = True
        self.schedule = Schedule(options, start.setting.rounds, options.first, over=self._settled())
        self.grown = torch.zeros(start.setting.clients, dtype=torch.bool)  # (N,): a by-election has opened a cluster
        self.log: list[dict[str, Any]] = []  # the surveys of the first part
        self._waves: dict[int, int] = {}  # by part: scalars of a wave

    @property
    def over(self) -> bool:
        """Whether no survey is held until a cluster is opened."""
        return self.schedule.over

    @property
    def everywhere(self) -> set[int]:
        """The clusters that are closed for all clients."""
        return {j for j, closed in enumerate(self.closed) if bool(closed.all())}

    def slots(self, part: Sequence[int]) -> tuple[int, ...]:
        """List the clusters that are open in a part of the graph."""
        return tuple((~self.closed[:, part[0]]).nonzero()[:, 0].tolist())

    def losses(self, banks: Tensor) -> Tensor:
        """Compute the losses that members choose a cluster by until the last survey: (L, m), on held-out samples.

        A client that holds none out has those on its training samples.
        """
        start, closed = self.start, self.everywhere
        assert start.held is not None  # until the last survey
        without = [place for place, size in enumerate(start.held.sizes) if not size]
        if len(without) == len(start.held.sizes):
            return start.engine.losses(banks, start.train, closed=closed)
        losses = start.engine.losses(banks, start.held, closed=closed)
        if without:
            losses[without] = start.engine.losses(banks[:, without], start.train.subset(without), closed=closed)
        return losses

    def survey(
        self, banks: Tensor, assignments: Tensor, now: int, unfit: Collection[int] = ()
    ) -> tuple[list[Plan], int]:
        """Ask all clients after `now` rounds; returns what every part of the graph decides, and the numbers sent.

        banks (m, L, P): of the members; assignments (N,); unfit: the clients whose loss has risen.
        """
        said = self._ask(banks, assignments, now)
        setting, plans, scalars, alone = self.start.setting, [], 0, set[int]()
        for number, part in enumerate(self.parts):
            slots = self.slots(part)
            observed = (_observation(said[client], slots)._replace(unfit=client in unfit) for client in part)
            heard = total(slots, observed)
            grown = bool(self.grown[part[0]])
            alone |= (left := unsettled(heard, None if grown else setting.clusters, self.schedule.quiet))
            plans.append(plan := decide(heard, self.options, setting.clusters, left, grown))
            self.closed[list(plan.closed), part[0]] = True
            self.closed[:, list(part)] = self.closed[:, part[0], None]
            scalars += self._scalars(number, slots, plan)
        pairs = [[merge.into, merge.closed, round(merge.worth, 4)] for merge in plans[0].merges]
        left_open = len(self.slots(self.parts[0]))
        self.log.append({"round": now, "merged": pairs, "empty": list(plans[0].empty), "left": left_open})
        merged = any(plan.merges for plan in plans)
        self.schedule = self.schedule.after(now, merged, alone, self._settled())
        return plans, scalars

    def renumber(self) -> list[tuple[Sequence[int], list[int]]]:
        """Number the clusters of every part anew after the last survey; returns the parts and their `order_of`."""
        orders, clusters = [], len(self.closed)
        for part in self.parts:
            orders.append((part, order_of(clusters, set(range(clusters)) - set(self.slots(part)))))
        for part, order in orders:
            self.closed[:, list(part)] = self.closed[order][:, list(part)]
        self.closed = self.closed[~self.closed.all(dim=1)].clone()
        return orders

    def reopen(self, slot: int, part: Sequence[int], now: int) -> None:
        """Note that an election opened a cluster in a part of the graph, after `now` rounds."""
        if slot == len(self.closed):
            self.closed = torch.cat([self.closed, torch.ones_like(self.closed[:1])])
        self.closed[slot, list(part)] = False
        self.grown[list(part)] = True
        self.schedule = self.schedule.reopened(now)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs, besides the log."""
        return {
            "merging.closed": self.closed,
            "merging.due": torch.tensor(self.schedule.due),
            "merging.quiet": torch.tensor(self.schedule.quiet),
            "merging.over": torch.tensor(self.over),
            "merging.grown": self.grown,
        }

    def restore(self, tensors: Mapping[str, Tensor], log: Sequence[dict[str, Any]]) -> None:
        """Continue from a state."""
        self.closed = tensors["merging.closed"].clone()
        due = int(tensors.get("merging.due", self.schedule.due))  # a checkpoint of an earlier version has neither
        quiet = int(tensors.get("merging.quiet", 0))
        self.schedule = replace(self.schedule, due=due, quiet=quiet, over=bool(tensors["merging.over"]))
        self.grown = tensors.get("merging.grown", self.grown).clone()
        self.log = list(log)

    def _settled(self) -> bool:
        """Return whether there is nothing left to merge."""
        return all(is_settled(len(self.slots(part)), self.start.setting.clusters) for part in self.parts)

    def _ask(self, banks: Tensor, assignments: Tensor, now: int) -> Tensor:
        """Gather what all clients say: (N, 3 + EXCESSES * m), the cluster, the samples, the optimism, the excess."""
        start, members = self.start, self.start.members
        assert start.held is not None  # until the last survey
        mine = torch.full((len(members), 3 + EXCESSES * len(banks)), float("nan"), dtype=torch.float64)
        mine[:, 0] = assignments[list(members)].double()
        mine[:, 1] = torch.tensor(start.train.sizes, dtype=torch.float64)
        chosen, counts = self._observers(assignments, now)
        here = [place for place, client in enumerate(members) if client in chosen and start.held.sizes[place]]
        follows = [int(assignments[members[place]]) for place in here]
        asked = [counts[members[place]] for place in here]
        mine[here, 2:] = observe_all(start, banks, here, follows, asked, self.options.steps)
        return start.shards.gather(mine)

    def _observers(self, assignments: Tensor, now: int) -> tuple[set[int], dict[int, Asked]]:
        """Draw who takes personal steps: some followers of every cluster of every part; and what clients are asked."""
        seed, chosen, asked = self.start.setting.seed, set[int](), dict[int, Asked]()
        for part in self.parts:
            slots = self.slots(part)
            groups = [[client for client in part if assignments[client] == slot] for slot in slots]
            asked |= dict.fromkeys(part, (slots, tuple(map(len, groups))))
            for group in groups:
                chosen.update(client for client in group if observes(seed, now, client, len(group)))
        return chosen, asked

    def _scalars(self, number: int, slots: Sequence[int], plan: Plan) -> int:
        """Count the numbers that a survey sends in a part of the graph: a wave, the sums up, the decision down."""
        setting = self.start.setting
        if number not in self._waves:
            graph, call = setting.graph.subgraph(self.parts[number]), Call((), len(self.closed))
            self._waves[number] = ElectionCost(graph, setting.seed, setting.algorithm.election, call).wave
        up = sum(map(len, nothing(slots)))
        down = len(plan.empty) + sum(map(len, plan.merges))
        return self._waves[number] + (len(self.parts[number]) - 1) * (2 * KEY_SCALARS + up + down)


def _observation(said: Tensor, slots: Sequence[int]) -> Observation:
    """Read what one client says of the clusters that are open: (3 + EXCESSES * m,)."""
    follows, samples, optimism = said[:3].tolist()
    excess = said[3:].view(EXCESSES, -1)[:, list(slots)].flatten().tolist()
    return Observation(int(follows), int(samples), tuple(excess), optimism)
