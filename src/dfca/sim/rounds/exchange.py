"""What travels in a synchronous round, what it does to the banks, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import networkx as nx
import torch
from torch import Tensor

from dfca.core.client import share_rule, weight_rule
from dfca.core.mixing import Folder, Mixer, WeightedLinks, make_links
from dfca.core.relay import MANY, MAX_AGE, NEVER
from dfca.core.rng import stream
from dfca.metrics import Drift
from dfca.sim.setting import Setting
from dfca.sim.shards import ExchangePlan, Shards, is_in
from dfca.sim.traffic import Traffic

PlannedMixing = list[tuple[ExchangePlan, Mixer | Folder]]
"""What travels in a round, and what it does to this rank's clients."""


class Sent(NamedTuple):
    """Who takes part in a round: receivers (N,) bool; senders (N,) bool, those with a model to send; assignments (N,),
    the clusters that they trained; the round."""

    receivers: Tensor
    senders: Tensor
    assignments: Tensor
    now: int

    @classmethod
    def of(cls, present: Sequence[int], senders: Tensor, assignments: Tensor, now: int) -> Sent:
        """Describe a round in which the clients `present` receive."""
        receivers = torch.zeros_like(senders)
        receivers[list(present)] = True
        return cls(receivers, senders, assignments, now)


class Exchange:
    """The messages of all rounds so far; every rank keeps the same books.

    edges (2, E): the graph as (receiver, sender) in order, each edge in both directions. traffic: what was sent.
    stamps, origins, folded (m, N): what `core.relay` remembers of each copy.
    """

    def __init__(self, setting: Setting, models: int, shards: Shards) -> None:
        self.graph, self.seed, self.shards = setting.graph, setting.seed, shards
        self.weights = weight_rule(setting.algorithm, setting.weights)
        self.share = share_rule(setting.algorithm, setting.share)
        self.sequential = setting.aggregation == "sequential"
        clients = len(self.graph)
        links = nx.to_scipy_sparse_array(self.graph, nodelist=range(clients), weight=None, dtype=bool, format="coo")
        edges = torch.stack([torch.as_tensor(ends, dtype=torch.int64) for ends in (links.row, links.col)])
        self.edges = edges[:, (edges[0] * clients + edges[1]).argsort()].int()
        self.degrees = torch.bincount(edges[0], minlength=clients)
        self.traffic = Traffic.none(clients, models)
        self.stamps = torch.full((models, clients), NEVER)
        self.origins = torch.full((models, clients), MANY)
        self.folded = torch.full((models, clients), NEVER)

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return what a checkpoint needs: tensors, and numbers."""
        traffic = self.traffic
        tensors = {
            "messages_by_client": traffic.messages_by_client,
            "messages_by_cluster": traffic.messages_by_cluster,
            "stamps": self.stamps,
            "origins": self.origins,
            "folded": self.folded,
        }
        return tensors, {
            "server_messages": traffic.server_messages,
            "start_messages": traffic.start_messages,
            "scalars": traffic.scalars,
        }

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, int]) -> None:
        """Continue from a state."""
        self.traffic = Traffic(
            messages_by_client=tensors["messages_by_client"].clone(),
            messages_by_cluster=tensors["messages_by_cluster"].clone(),
            server_messages=facts["server_messages"],
            start_messages=facts["start_messages"],
            scalars=facts["scalars"],
        )
        self.stamps = tensors["stamps"].clone()
        self.origins = tensors["origins"].clone()
        self.folded = tensors["folded"].clone()

    def open_cluster_(self, slot: int) -> None:
        """Make room for a cluster that is new, or forget what was known of the one it replaces."""
        clients = self.stamps.shape[1]
        self.traffic.open_cluster(slot)
        if slot == len(self.stamps):
            self.stamps = torch.cat([self.stamps, torch.full((1, clients), NEVER)])
            self.origins = torch.cat([self.origins, torch.full((1, clients), MANY)])
            self.folded = torch.cat([self.folded, torch.full((1, clients), NEVER)])
        self.stamps[slot], self.origins[slot], self.folded[slot] = NEVER, MANY, NEVER

    def upload(self, present: Sequence[int], senders: Tensor, assignments: Tensor) -> None:
        """Count a round with a server: one model from each client, all models back."""
        self.traffic.count(senders.long(), assignments)
        self.traffic.server_messages += len(self.traffic.messages_by_cluster) * len(present)

    def gossip_(self, banks: Tensor, sent: Sent, drift: Drift | None = None) -> None:
        """Send, and mix in place what each client of the round receives: banks (m, L, P).

        `drift` sees every block of a bank before and after it is mixed.
        """
        rounds = self._plan_all(banks, sent.receivers) if self.share == "all" else self._plan(banks, sent)
        plans, mixers = [plan for plan, _ in rounds], [mixer for _, mixer in rounds]

        def mix_(number: int, columns: slice, incoming: Tensor) -> None:
            cluster = plans[number].cluster
            block = banks[cluster, :, columns]
            if drift is not None:
                drift.before(cluster, columns, block)
            mixers[number].apply_(block, incoming)
            if drift is not None:
                drift.after(cluster, columns, block)

        self.shards.exchange(banks, plans, mix_)

    def _plan(self, banks: Tensor, sent: Sent) -> PlannedMixing:
        """Find what everybody receives of every cluster that travels this round, and count it."""
        receivers, senders, assignments, now = sent
        self.traffic.count(torch.where(senders, self.degrees, 0), assignments)
        orders = self._arrivals(senders, receivers, now) if self.sequential and self.weights == "uniform" else None
        rounds = []
        for j in range(len(banks)):
            trainers = senders & (assignments == j)
            sources = self._relay_sources(j, banks[j], trainers, receivers, now) if self.share == "relay" else {}
            if not trainers.any() and not sources:
                continue
            links = self._links(trainers, receivers, sources)
            if len(links.sender):
                rounds.append(self._prepare(j, banks, links, None if sources else orders))
            if self.share == "relay":
                self._stamp(j, trainers, receivers, sources, now)
        if self.share == "relay":
            self.traffic.scalars += 2 * len(banks) * int(self.degrees[receivers].sum())
        return rounds

    def _plan_all(self, banks: Tensor, receivers: Tensor) -> PlannedMixing:
        """Send all models of every client of the round to all neighbours."""
        rounds = []
        for j in range(len(banks)):
            finite = self.shards.gather(torch.stack([torch.isfinite(model).all() for model in banks[j]])) & receivers
            links = self._links(finite, receivers, {})
            if len(links.sender):
                rounds.append(self._prepare(j, banks, links, None))
            self.traffic.count(torch.where(finite, self.degrees, 0), torch.full_like(self.degrees, j))
        return rounds

    def _links(self, trainers: Tensor, receivers: Tensor, sources: dict[int, int]) -> WeightedLinks:
        """Weigh what travels of one cluster: trainers by the weight rule, relayed copies as `core.relay` says."""
        links = make_links(self.edges, self.degrees, trainers, receivers, self.weights)
        if not sources:
            return links
        takers, givers = (torch.tensor(list(ids), dtype=torch.int64) for ids in (sources.keys(), sources.values()))
        share = torch.where(trainers[takers], 0.5, 1.0).double()
        relayed = WeightedLinks(takers, givers, share)
        return WeightedLinks(*(torch.cat(pair) for pair in zip(links, relayed, strict=True)))

    def _prepare(
        self, j: int, banks: Tensor, links: WeightedLinks, orders: Sequence[Sequence[int]] | None
    ) -> tuple[ExchangePlan, Mixer | Folder]:
        """Find whose models each rank needs, and prepare the mixing of this rank's clients."""
        shards = self.shards
        inside = [is_in(shards.of_rank(rank), links.receiver) for rank in range(shards.ranks)]
        needs = [torch.unique(links.sender[mask]) for mask in inside]
        sources = shards.order(needs[shards.rank])
        plan = ExchangePlan(j, needs)
        if orders is None:
            mine = WeightedLinks(*(part[inside[shards.rank]] for part in links))
            return plan, Mixer(mine, sources, shards.members.start, banks.shape[1], banks.dtype, banks.device)
        row = {client: position for position, client in enumerate(sources.tolist())}
        return plan, Folder([[row[m] for m in orders[i] if m in row] for i in shards.members])

    def _relay_sources(self, j: int, models: Tensor, trainers: Tensor, receivers: Tensor, now: int) -> dict[int, int]:
        """Find for each client without a trainer beside it whose copy it takes: `choose_offer` for all."""
        clients, (receiver, sender) = len(trainers), self.edges
        lacking = receivers & (torch.bincount(receiver[trainers[sender]], minlength=clients) == 0)
        stamps = self.stamps[j]
        newest = torch.where(trainers, self.folded[j], stamps)
        offered = lacking[receiver] & receivers[sender] & ~trainers[sender]
        i, m = self.edges[:, offered].long()
        echo_or_old = (self.origins[j][m] == i) | (now - stamps[m] > MAX_AGE)
        useful = (stamps[m] > newest[i]) & ~(trainers[i] & echo_or_old)
        i, m = i[useful], m[useful]
        # The freshest, and the lowest id on ties: stamps are at least 0 here.
        ranked = torch.full((clients,), -1).scatter_reduce_(0, i, stamps[m] * clients + clients - 1 - m, "amax")
        takers = (ranked >= 0).nonzero()[:, 0]
        givers = clients - 1 - ranked[takers] % clients
        self.traffic.messages_by_client.index_add_(0, givers, torch.ones_like(givers))
        self.traffic.messages_by_cluster[j] += len(takers)
        finite, first = torch.ones(len(models), dtype=torch.bool), self.shards.members.start
        for giver in set(givers.tolist()):
            if giver in self.shards.members:
                finite[giver - first] = torch.isfinite(models[giver - first]).all()
        fine = self.shards.gather(finite)
        return {taker: giver for taker, giver in zip(takers.tolist(), givers.tolist(), strict=True) if fine[giver]}

    def _stamp(self, j: int, trainers: Tensor, receivers: Tensor, sources: dict[int, int], now: int) -> None:
        """Note how fresh every copy of cluster j is after the round."""
        stamps, origins, clients = self.stamps[j].clone(), self.origins[j].clone(), len(trainers)
        receiver, sender = self.edges[:, receivers[self.edges[0]] & trainers[self.edges[1]]].long()
        counts = torch.bincount(receiver, minlength=clients) + trainers
        only = torch.zeros(clients, dtype=torch.int64).index_copy_(0, receiver, sender)  # looked at where it is one
        only = torch.where(trainers, torch.arange(clients), only)
        refreshed = counts > 0
        self.stamps[j][refreshed] = now
        self.origins[j][refreshed] = torch.where(counts == 1, only, MANY)[refreshed]
        for client, source in sources.items():
            if trainers[client]:
                self.folded[j, client] = stamps[source]
                self.origins[j, client] = MANY
            else:
                self.stamps[j, client], self.origins[j, client] = stamps[source], origins[source]

    def _arrivals(self, senders: Tensor, receivers: Tensor, now: int) -> list[list[int]]:
        """Draw for every member that receives the order in which its neighbours' models arrive."""
        orders: list[list[int]] = []
        for i in range(len(senders)):
            mine = bool(receivers[i]) and i in self.shards.members
            sources = sorted(m for m in self.graph.neighbors(i) if senders[m]) if mine else []
            shuffled = torch.randperm(len(sources), generator=stream(self.seed, "arrival", i, now)).tolist()
            orders.append([sources[position] for position in shuffled])
        return orders
