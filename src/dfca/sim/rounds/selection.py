"""The exchange of methods whose clients choose their peers (`rules.choosing`), for all clients of a round at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import networkx as nx
import torch
from torch import Tensor

from dfca.base.errors import ConfigError
from dfca.core.rng import stream
from dfca.core.rules.choosing import PeerChoice, PeerDraw, Received
from dfca.data.clients import ClientData
from dfca.metrics import Drift
from dfca.sim.rounds.exchange import Sent
from dfca.sim.shards import portions
from dfca.sim.start import Start
from dfca.sim.traffic import Traffic


class Selection:
    """Who asks whom, and what comes of it."""

    def __init__(self, start: Start, choice: PeerChoice) -> None:
        if start.shards.ranks > 1:
            raise ConfigError(
                f"{start.setting.algorithm.name} chooses its peers by their models, which only one process can; "
                "run it without torchrun"
            )
        self.start, self.choice = start, choice
        self.chosen = 0  # peers averaged with since the last evaluation
        self.alike = 0  # those of them that belong to the same true cluster

    def exchange_(self, banks: Tensor, sent: Sent, traffic: Traffic, drift: Drift | None = None) -> None:
        """Draw, score and average in place: banks (1, N, P)."""
        memory, whole, graph = self.start.memory, slice(0, banks.shape[2]), self.start.setting.graph
        assert memory is not None  # `Algorithm` checked it
        if drift is not None:
            drift.before(0, whole, banks[0])
        drawn = self._draw(sent, memory)
        before, told = banks[0].clone(), memory.clone()
        everybody = torch.tensor([j for peers in drawn.values() for j in peers]).long()
        asked = torch.bincount(everybody, minlength=len(before))
        traffic.count(asked, torch.zeros_like(asked))
        if self.choice.tells:
            traffic.scalars += int(asked.sum()) * memory.shape[1]
        losses, sizes = self._losses(before, drawn), torch.tensor(self.start.train.sizes)
        for i, peers in drawn.items():
            own, rows = torch.cat([sizes[[i]], sizes[peers]]), before[[i, *peers]]
            near, random = sorted(graph.adj[i]), partial(stream, self.start.setting.seed, "merge", i, sent.now)
            score = partial(self._score, i, rows)
            seen = Received(i, sent.now, peers, losses[i], own, told[i], told[peers], near, random, score)
            average = self.choice.average(seen)
            memory[i] = average.memory
            banks[0, i] = average.weights.to(rows) @ rows
            chosen = [peer for peer, weight in zip(peers, average.weights[1:].tolist(), strict=True) if weight]
            self.chosen += len(chosen)
            if (truth := self.start.truth) is not None:
                self.alike += int((truth[chosen] == truth[i]).sum())
        if drift is not None:
            drift.after(0, whole, banks[0])

    def row(self) -> dict[str, float | None]:
        """Return the share of chosen peers that belong to the own true cluster, since it was asked for last."""
        share = self.alike / self.chosen if self.chosen and self.start.truth is not None else None
        self.chosen = self.alike = 0
        return {"peers_of_own_cluster": share}

    def _draw(self, sent: Sent, memory: Tensor) -> dict[int, list[int]]:
        """Let every client of the round draw among those that have a model to send."""
        setting, senders = self.start.setting, sent.senders.nonzero()[:, 0].tolist()
        drawn = {}
        for i in sent.receivers.nonzero()[:, 0].tolist():
            candidates = candidates_of(self.choice, setting.graph, i, senders)
            random = partial(stream, setting.seed, "peers", i, sent.now)
            near = [j for j in candidates if setting.graph.has_edge(i, j)]
            drawn[i] = self.choice.ask(PeerDraw(i, sent.now, candidates, memory[i], random, near))
        return drawn

    def _score(self, client: int, models: Tensor, weights: Tensor) -> Tensor:
        """Compute the losses (s,) of averages of models (n + 1, P) by weights (s, n + 1), on the client's samples."""
        averages = weights.to(models) @ models
        return self.start.engine.losses(averages[:, None], self._samples([client]))[0].cpu()

    def _samples(self, clients: Sequence[int]) -> ClientData:
        """Return the samples that clients score models on: those of training, or those that they hold out, if any."""
        start = self.start
        held = start.divided[1] if self.choice.unseen else None
        data = held if held is not None and all(held.sizes[i] for i in clients) else start.train
        return data if len(clients) == data.clients else data.subset(clients)

    def _losses(self, models: Tensor, drawn: dict[int, list[int]]) -> dict[int, Tensor]:
        """Compute the losses of the models (N, P) that clients have drawn, on their own samples: (n,) per client."""
        start, losses = self.start, {i: torch.zeros(0) for i in drawn}
        groups: dict[tuple[int, bool], list[int]] = {}
        held = self.start.divided[1].sizes if self.choice.unseen else self.start.train.sizes
        for i, peers in drawn.items():
            groups.setdefault((len(peers), bool(held[i])), []).append(i)
        for (many, _), clients in groups.items():
            for some in portions(clients if many else [], many * models.shape[1] * models.element_size()):
                bank = models[torch.tensor([drawn[i] for i in some]).T]
                losses |= dict(zip(some, start.engine.losses(bank, self._samples(some)).cpu(), strict=True))
        return losses


def candidates_of(choice: PeerChoice, graph: nx.Graph, client: int, senders: list[int]) -> list[int]:
    """List whom a client may ask: those that have a model to send, of all others or of its neighbours."""
    return [j for j in senders if j != client and (choice.among == "any" or graph.has_edge(client, j))]
