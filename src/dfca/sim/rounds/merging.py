"""Surveys (`rules.merging`) for all clients at once: which clusters are worth their data, and when they are held.

A survey is decided at once, on the models of its round, and takes effect some rounds later (`rules.surveys`). What it
sends is counted as a wave (`peer.waves`): the poll up the tree, the question down, the sums up, the decision down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.core.method import MergeOptions
from dfca.core.rules.merging import (
    EXCESSES,
    NOBODY,
    Merge,
    Observation,
    Opinion,
    Plan,
    Poll,
    decide,
    observes,
    order_of,
    pair_up,
    poll,
    share_of,
    total,
    unsettled,
)
from dfca.core.rules.surveys import LAG, Schedule
from dfca.peer.records.messages import Call
from dfca.sim.personal import observe_all
from dfca.sim.rounds.election import ElectionCost
from dfca.sim.start import Start

KEY_SCALARS = 5  # numbers that name the wave in every message of it


class Pending(NamedTuple):
    """What a survey has decided, before it takes effect."""

    at: int  # after how many rounds it does
    plans: tuple[Plan, ...]  # by part of the graph
    alone: tuple[int, ...]  # the unsettled clusters that were left alone


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
        self.schedule = Schedule(options, start.setting.rounds, options.first, over=self._left() == 1)
        self.pending: Pending | None = None  # the survey that is yet to take effect
        self.losses = self._unknown()  # (N, m): what clients last chose by, NaN before
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

    def held_losses(self, banks: Tensor) -> Tensor:
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

    def note_losses(self, clients: Sequence[int], losses: Tensor) -> None:
        """Take in what some clients chose by in this round: losses (N, m)."""
        self.losses[list(clients)] = losses[list(clients)]

    def is_due(self, now: int) -> bool:
        """Return whether a survey begins after `now` rounds."""
        return self.pending is None and self.schedule.is_due(now)

    def survey(self, banks: Tensor, assignments: Tensor, now: int, unfit: Collection[int] = ()) -> int:
        """Survey all clients after `now` rounds, and return how many numbers were sent.

        banks (m, L, P): of the members; assignments (N,): what all clients follow; unfit: the clients whose loss has
        risen.
        """
        plans, scalars, alone = [], 0, set[int]()
        heard = self._poll(assignments, unfit)
        partners = []
        for said in heard:
            alone |= (left := unsettled(said, self.schedule.quiet))
            partners.append(pair_up(said, left, self.schedule.quiet))
        observed = self._observe(banks, assignments, heard, partners, now)
        for number, (part, said) in enumerate(zip(self.parts, heard, strict=True)):
            observations = (Observation(int(assignments[i]), *observed[i]) for i in part if i in observed)
            survey = total(said.slots, observations)
            plans.append(decide(said, survey, partners[number], self.options))
            scalars += self._scalars(number, said, sum(map(len, survey)), plans[-1])
        self.pending = Pending(now + LAG, tuple(plans), tuple(sorted(alone)))
        return scalars

    def take(self, now: int) -> tuple[Plan, ...]:
        """Return what takes effect after `now` rounds, by part of the graph; nothing where no survey does."""
        if self.pending is None or self.pending.at > now:
            return ()
        (_, plans, alone), self.pending = self.pending, None
        for part, plan in zip(self.parts, plans, strict=True):
            self.closed[list(plan.closed), part[0]] = True
            self.closed[:, list(part)] = self.closed[:, part[0], None]
        pairs = [[merge.into, merge.closed, round(merge.worth, 4)] for merge in plans[0].merges]
        left_open = len(self.slots(self.parts[0]))
        self.log.append({"round": now, "merged": pairs, "empty": list(plans[0].empty), "left": left_open})
        merged = any(plan.merges for plan in plans)
        self.schedule = self.schedule.after(now, merged, alone, self._left())
        self.losses = self._unknown()
        return plans

    def renumber(self) -> list[tuple[Sequence[int], list[int]]]:
        """Number the clusters of every part anew after the last survey; returns the parts and their `order_of`."""
        orders, clusters = [], len(self.closed)
        for part in self.parts:
            orders.append((part, order_of(clusters, set(range(clusters)) - set(self.slots(part)))))
        for part, order in orders:
            self.closed[:, list(part)] = self.closed[order][:, list(part)]
        self.closed = self.closed[~self.closed.all(dim=1)].clone()
        self.losses = self._unknown()
        return orders

    def reopen(self, slot: int, part: Sequence[int], now: int) -> None:
        """Note that an election opened a cluster in a part of the graph, after `now` rounds."""
        if slot == len(self.closed):
            self.closed = torch.cat([self.closed, torch.ones_like(self.closed[:1])])
        self.closed[slot, list(part)] = False
        self.pending, self.losses = None, self._unknown()  # what was asked was about other clusters
        self.schedule = self.schedule.reopened(now)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides tensors."""
        pending = self.pending
        waits = None if pending is None else [pending.at, [list(plan) for plan in pending.plans], list(pending.alone)]
        return {"merges": list(self.log), "survey": waits}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs."""
        return {
            "merging.closed": self.closed,
            "merging.due": torch.tensor(self.schedule.due),
            "merging.quiet": torch.tensor(self.schedule.quiet),
            "merging.over": torch.tensor(self.over),
            "merging.losses": self.losses,
        }

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.closed = tensors["merging.closed"].clone()
        due = int(tensors.get("merging.due", self.schedule.due))  # a checkpoint of an earlier version has neither
        quiet = int(tensors.get("merging.quiet", 0))
        self.schedule = replace(self.schedule, due=due, quiet=quiet, over=bool(tensors["merging.over"]))
        self.log = list(facts["merges"])
        if (waits := facts.get("survey")) is not None:  # since version 0.3
            plans = (Plan(tuple(Merge(*merge) for merge in merges), tuple(empty)) for merges, empty in waits[1])
            self.pending = Pending(waits[0], tuple(plans), tuple(waits[2]))
        self.losses = tensors.get("merging.losses", self._unknown()).clone()

    def _left(self) -> int:
        """Count the clusters that are open in the part of the graph that has most."""
        return max(len(self.slots(part)) for part in self.parts)

    def _unknown(self) -> Tensor:
        return torch.full((self.start.setting.clients, len(self.closed)), float("nan"), dtype=torch.float64)

    def _poll(self, assignments: Tensor, unfit: Collection[int]) -> list[Poll]:
        """Ask all clients what they know by themselves, in every part of the graph."""
        sizes = self.start.shards.gather(torch.tensor(self.start.train.sizes)).tolist()
        losses = self.losses.tolist()
        polls = []
        for part in self.parts:
            slots = self.slots(part)
            opinions = (
                Opinion(int(assignments[i]), sizes[i], tuple(losses[i][j] for j in slots), i in unfit) for i in part
            )
            polls.append(poll(slots, opinions))
        return polls

    def _observe(
        self, banks: Tensor, assignments: Tensor, heard: Sequence[Poll], partners: Sequence[Sequence[int]], now: int
    ) -> dict[int, tuple[tuple[float, ...], float]]:
        """Let observers judge the pairs; returns, by client, the excess and the optimism."""
        start, asked = self.start, dict[int, tuple[int, float]]()
        assert start.held is not None  # until the last survey
        for part, said, others in zip(self.parts, heard, partners, strict=True):
            for client in part:
                follows = int(assignments[client])
                place = said.slots.index(follows) if follows in said.slots else None
                if place is None or others[place] == NOBODY:
                    continue
                followers, joining = said.followers[place], said.followers[said.slots.index(others[place])]
                if observes(start.setting.seed, now, client, followers):
                    asked[client] = others[place], share_of(followers, joining)
        members = start.members
        here = [place for place, client in enumerate(members) if client in asked and start.held.sizes[place]]
        mine = torch.full((len(members), EXCESSES + 1), float("nan"), dtype=torch.float64)
        clients = [members[place] for place in here]
        own = banks[[int(assignments[client]) for client in clients], here]
        other = banks[[asked[client][0] for client in clients], here]
        shares = [asked[client][1] for client in clients]
        mine[here] = observe_all(start, here, own, other, shares, self.options.steps)
        rows = start.shards.gather(mine).tolist()
        return {client: (tuple(rows[client][:-1]), rows[client][-1]) for client in asked}

    def _scalars(self, number: int, heard: Poll, sums: int, plan: Plan) -> int:
        """Count the numbers that a survey sends in a part of the graph."""
        setting = self.start.setting
        if number not in self._waves:
            graph, call = setting.graph.subgraph(self.parts[number]), Call((), len(self.closed))
            self._waves[number] = ElectionCost(graph, setting.seed, call).wave
        polled, asked = sum(map(len, heard)), 2 * len(heard.slots)
        down = len(plan.empty) + sum(map(len, plan.merges))
        return self._waves[number] + (len(self.parts[number]) - 1) * (3 * KEY_SCALARS + polled + asked + sums + down)
