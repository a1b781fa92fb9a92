"""What travels in a synchronous round, what it does to the banks, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from dfca.core.algorithm import Algorithm, Share
from dfca.core.mixing import WeightRule, fold_in_order_, mix_, mixing_weights
from dfca.core.relay import MANY, MAX_AGE, NEVER
from dfca.core.rng import stream


class Exchange:
    """The messages of all rounds so far.

    messages_by_client (N,), messages_by_cluster (m,): models that clients sent. server_messages: models that a server
    sent. scalars: numbers that clients sent. stamps, origins, folded (m, N): what `core.relay` remembers of each copy.
    """

    def __init__(
        self,
        graph: nx.Graph,
        algorithm: Algorithm,
        models: int,
        weights: WeightRule,
        aggregation: str,
        share: Share,
        seed: int,
        device: str,
    ) -> None:
        clients = len(graph)
        self.graph, self.algorithm, self.seed = graph, algorithm, seed
        self.weights, self.sequential, self.share = weights, aggregation == "sequential", share
        dense = nx.to_scipy_sparse_array(graph, nodelist=range(clients), weight=None, dtype=bool).toarray()
        self.adjacency = torch.from_numpy(dense).to(device)
        self.degrees = self.adjacency.sum(dim=1).cpu()
        self.messages_by_client = torch.zeros(clients, dtype=torch.int64)
        self.messages_by_cluster = torch.zeros(models, dtype=torch.int64)
        self.server_messages = 0
        self.scalars = 0
        self.stamps = torch.full((models, clients), NEVER)
        self.origins = torch.full((models, clients), MANY)
        self.folded = torch.full((models, clients), NEVER)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give what a checkpoint needs."""
        tensors = {
            name: getattr(self, name)
            for name in ("messages_by_client", "messages_by_cluster", "stamps", "origins", "folded")
        }
        return tensors, {"server_messages": self.server_messages, "scalars": self.scalars}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Continue from a state."""
        for name in ("messages_by_client", "messages_by_cluster", "stamps", "origins", "folded"):
            setattr(self, name, tensors[name].clone())
        self.server_messages, self.scalars = facts["server_messages"], facts["scalars"]

    def open_cluster_(self, slot: int) -> None:
        """Make room for a cluster that is new, or forget what was known of the one it replaces."""
        clients = self.stamps.shape[1]
        if slot == len(self.messages_by_cluster):
            self.messages_by_cluster = torch.cat([self.messages_by_cluster, torch.zeros(1, dtype=torch.int64)])
            self.stamps = torch.cat([self.stamps, torch.full((1, clients), NEVER)])
            self.origins = torch.cat([self.origins, torch.full((1, clients), MANY)])
            self.folded = torch.cat([self.folded, torch.full((1, clients), NEVER)])
        self.stamps[slot], self.origins[slot], self.folded[slot] = NEVER, MANY, NEVER

    def upload(self, present: Sequence[int], senders: Tensor, assignments: Tensor) -> None:
        """Count a round with a server: one model from each client, all models back."""
        self._count(senders.long(), assignments)
        self.server_messages += len(self.messages_by_cluster) * len(present)

    def gossip_(self, banks: Tensor, present: Sequence[int], senders: Tensor, assignments: Tensor, now: int) -> None:
        """Send, and mix in place what each client of the round receives: banks (m, N, P), senders (N,) bool."""
        receivers = torch.zeros_like(senders)
        receivers[list(present)] = True
        if self.share == "all":
            self._gossip_all_(banks, receivers)
            return
        self._count(torch.where(senders, self.degrees, 0), assignments)
        orders = self._arrivals(senders, receivers, now) if self.sequential else None
        for j in range(len(banks)):
            trainers = senders & (assignments == j)
            sources = self._relay_sources(j, banks[j], trainers, receivers, now) if self.share == "relay" else {}
            if not trainers.any() and not sources:
                continue
            if orders is not None and self.weights == "uniform" and not sources:
                fold_in_order_(
                    banks[j], trainers.to(banks.device), [[m for m in order if trainers[m]] for order in orders]
                )
            else:
                self._mix_(banks[j], trainers, receivers, sources)
            if self.share == "relay":
                self._stamp(j, trainers, receivers, sources, now)
        if self.share == "relay":
            self.scalars += 2 * len(banks) * int(self.degrees[receivers].sum())

    def _mix_(self, models: Tensor, trainers: Tensor, receivers: Tensor, sources: dict[int, int]) -> None:
        """Mix one cluster: trainers by the weight rule, relayed copies as `core.relay` says."""
        device = models.device
        own, others = mixing_weights(
            self.adjacency, trainers.to(device), receivers.to(device), self.weights, models.dtype
        )
        senders = trainers.clone()
        senders[list(sources.values())] = True
        if sources:
            column_of = {client: column for column, client in enumerate(senders.nonzero()[:, 0].tolist())}
            wide = torch.zeros(len(models), len(column_of), dtype=models.dtype, device=device)
            wide[:, [column_of[m] for m in trainers.nonzero()[:, 0].tolist()]] = others
            others = wide
            for client, source in sources.items():
                share = 0.5 if trainers[client] else 1.0
                own[client] = 1 - share
                others[client, column_of[source]] = share
        mix_(models, senders.to(device), own, others)

    def _relay_sources(self, j: int, models: Tensor, trainers: Tensor, receivers: Tensor, now: int) -> dict[int, int]:
        """Find for each client without a trainer beside it whose copy it takes: `choose_offer` for all."""
        near = self.adjacency.cpu()
        lacking = receivers & ~near[:, trainers].any(dim=1)
        rows = lacking.nonzero()[:, 0]
        if not len(rows):
            return {}
        stamps = self.stamps[j]
        offered = near[rows] & receivers[None, :] & ~trainers[None, :]
        newest = torch.where(trainers[rows], self.folded[j, rows], stamps[rows])
        useful = offered & (stamps[None, :] > newest[:, None])
        echo_or_old = (self.origins[j][None, :] == rows[:, None]) | (now - stamps[None, :] > MAX_AGE)
        useful &= ~(trainers[rows][:, None] & echo_or_old)
        freshness = torch.where(useful, stamps[None, :].expand_as(useful), NEVER - 1)
        best = freshness.max(dim=1).values
        first = (freshness == best[:, None]).to(torch.uint8).argmax(dim=1)  # the lowest id on ties
        taken = {int(i): int(m) for i, m, stamp in zip(rows, first, best, strict=True) if stamp > NEVER - 1}
        for source in taken.values():
            self.messages_by_client[source] += 1
        self.messages_by_cluster[j] += len(taken)
        fine = {source: bool(torch.isfinite(models[source]).all()) for source in set(taken.values())}
        return {client: source for client, source in taken.items() if fine[source]}

    def _stamp(self, j: int, trainers: Tensor, receivers: Tensor, sources: dict[int, int], now: int) -> None:
        """Note how fresh every copy of cluster j is after the round."""
        stamps, origins = self.stamps[j].clone(), self.origins[j].clone()
        heard = self.adjacency.cpu()[:, trainers] & receivers[:, None]
        counts = heard.sum(dim=1) + trainers
        ids = trainers.nonzero()[:, 0]
        only = ids[heard.to(torch.uint8).argmax(dim=1)] if len(ids) else torch.zeros_like(counts)
        only = torch.where(trainers, torch.arange(len(trainers)), only)
        refreshed = counts > 0
        self.stamps[j][refreshed] = now
        self.origins[j][refreshed] = torch.where(counts == 1, only, MANY)[refreshed]
        for client, source in sources.items():
            if trainers[client]:
                self.folded[j, client] = stamps[source]
                self.origins[j, client] = MANY
            else:
                self.stamps[j, client], self.origins[j, client] = stamps[source], origins[source]

    def _gossip_all_(self, banks: Tensor, receivers: Tensor) -> None:
        """Let every client of the round send all its models to all neighbours."""
        for j in range(len(banks)):
            finite = torch.isfinite(banks[j]).all(dim=1).cpu() & receivers
            self._mix_(banks[j], finite, receivers, {})
            self._count(torch.where(finite, self.degrees, 0), torch.full_like(self.degrees, j))

    def _arrivals(self, senders: Tensor, receivers: Tensor, now: int) -> list[list[int]]:
        """Draw for every receiver the order in which its neighbours' models arrive."""
        orders: list[list[int]] = []
        for i in range(len(senders)):
            heard = sorted(m for m in self.graph.neighbors(i) if senders[m]) if receivers[i] else []
            shuffled = torch.randperm(len(heard), generator=stream(self.seed, "arrival", i, now)).tolist()
            orders.append([heard[position] for position in shuffled])
        return orders

    def _count(self, copies: Tensor, clusters: Tensor) -> None:
        """Count models sent: copies (N,) by each client, of clusters (N,)."""
        sent = copies > 0
        self.messages_by_client += copies
        self.messages_by_cluster.index_add_(0, clusters[sent], copies[sent])
