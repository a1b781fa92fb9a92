"""What held-out samples say, for all clients at once: the personal last step of `rules.personal`, picked on them and
taken at the end, and what clients observe in a survey (`rules.merging.observe`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dfca.core.rules.merging import EXCESSES, at_least, choose_without, compare, judge, judge_each
from dfca.core.rules.personal import FIRST_SCALARS, GRID, LATER_SCALARS, SWEEPS, pick, release_round
from dfca.data.clients import ClientData
from dfca.sim.local.engine import Engine, finite
from dfca.sim.shards import PIECE_BYTES, portions, samples_of
from dfca.sim.start import Start

Gather = Callable[[Sequence[int]], Tensor]
"""Gathers the models (C, P) that some members deploy, by their places among the members."""


class LastSteps:
    """The personal last step of the clients of a simulation of `rounds` rounds; 0: it ends by time."""

    def __init__(self, start: Start, rounds: int) -> None:
        self.start, self.setting = start, start.setting
        asked = start.setting.last_steps
        # the steps are picked before this round, and from it on clients train on everything; None: they always do
        self.release = release_round(asked, rounds)
        self.steps = torch.full((start.setting.clients,), 0 if asked == "auto" else asked)  # 0 until they are picked

    @property
    def active(self) -> bool:
        """Return whether clients take such a step, or may."""
        return self.release is not None or bool(self.steps.any())

    def pick(self, deployed: Gather, clusters: Tensor) -> int:
        """Pick the steps of all clients; clusters (L,): of the models that members deploy. Returns the numbers sent."""
        start, shards = self.start, self.start.shards
        assert start.held is not None  # until now
        mine = torch.zeros(len(start.members), len(GRID) + 2, dtype=torch.float64)
        mine[:, 0], mine[:, 1] = clusters.double(), torch.tensor(start.held.sizes, dtype=torch.float64)
        holders = [place for place, size in enumerate(start.held.sizes) if size]
        for some in portions(holders, start.flat.size * start.train.y.element_size()):
            clients = [start.members[place] for place in some]
            held, train = samples_of(start.held, some), samples_of(start.train, some)
            mine[some, 2:] = measure_curves(start.engine, deployed(some), train, held, clients).cpu()
        everybody = shards.gather(mine)
        chosen, sizes, curves = everybody[:, 0].long(), everybody[:, 1].long(), everybody[:, 2:]
        known = sizes > 0
        sound = known & curves.isfinite().all(dim=1)
        pools = pooled(curves, sound, chosen, self._pairs())
        picked = torch.tensor([pick(*curve) for curve in zip(curves, sizes.tolist(), pools, strict=True)])
        self.steps = torch.where(known, picked, 0)
        return self._scalars(chosen, known, sound)

    def take(self, vectors: Tensor, places: Sequence[int]) -> Tensor:
        """Take the steps of some members from the models (C, P) that they deploy; a client whose model becomes
        non-finite keeps what it had."""
        start, taken = self.start, vectors.clone()
        steps = self.steps[[start.members[place] for place in places]]
        for count in sorted(set(steps.tolist()) - {0}):
            some = (steps == count).nonzero()[:, 0].tolist()
            here = [places[i] for i in some]
            moved = self._steps(vectors[some], here, count)
            fine = torch.tensor(finite(moved), device=vectors.device)
            taken[some] = torch.where(fine[:, None], moved, vectors[some])
        return taken

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs."""
        return {"personal.steps": self.steps} if self.active else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        if "personal.steps" in tensors:  # since version 0.4
            self.steps = tensors["personal.steps"].clone()

    def row(self) -> dict[str, list[int]]:
        """Return the metrics of the last step: the steps of every client."""
        return {"personal_steps_by_client": self.steps.tolist()}

    def _steps(self, vectors: Tensor, places: Sequence[int], steps: int) -> Tensor:
        clients = [self.start.members[place] for place in places]
        return self.start.engine.personal_steps(vectors, samples_of(self.start.train, places), steps, clients)

    def _pairs(self) -> Tensor | None:
        """List who sends its curve to whom, (E, 2); None: everybody to everybody, through a server."""
        if self.setting.algorithm.exchange == "server":
            return None
        edges = list(self.setting.graph.edges) if self.setting.algorithm.exchange == "gossip" else []
        one_way = torch.tensor(edges, dtype=torch.int64).view(-1, 2)
        return torch.cat([one_way, one_way.flip(1)])

    def _scalars(self, clusters: Tensor, known: Tensor, sound: Tensor) -> int:
        """Count the numbers that clients send to pool their curves: to a server, or to their neighbours."""
        pairs = self._pairs()
        if pairs is None:
            return FIRST_SCALARS * int(known.sum())
        alike = len(alike_pairs(pairs, clusters, sound))
        return FIRST_SCALARS * int(known[pairs[:, 0]].sum()) + LATER_SCALARS * alike


def measure_curves(
    engine: Engine, vectors: Tensor, train: ClientData, held: ClientData, clients: Sequence[int]
) -> Tensor:
    """Measure the curves of clients that hold samples out, from the models (C, P) that they deploy: (C, G)."""
    losses = [engine.deployed_losses(vectors, held)]
    for begin, end in pairwise(GRID):
        vectors = engine.personal_steps(vectors, train, end - begin, clients)
        losses.append(engine.deployed_losses(vectors, held))
    return torch.stack(losses, dim=1)


def pooled(curves: Tensor, sound: Tensor, clusters: Tensor, pairs: Tensor | None) -> Tensor:
    """Pool the curves of every cluster: (N, G) -> (N, G); tests hold it equal to `rules.personal.average`.

    sound (N,): whose curve is finite, the others keep their own; clusters (N,): what clients deploy; pairs (E, 2): who
    sends to whom, both ways; None: a server has the mean of all.
    """
    if pairs is None:
        size = int(clusters.max()) + 1
        given = torch.where(sound[:, None], curves, 0.0)
        total = torch.zeros(size, curves.shape[1], dtype=curves.dtype).index_add_(0, clusters, given)
        count = torch.zeros(size, dtype=curves.dtype).index_add_(0, clusters, sound.to(curves.dtype))
        return torch.where(sound[:, None], (total / count[:, None])[clusters], curves)
    senders, receivers = alike_pairs(pairs, clusters, sound).T
    degrees = torch.bincount(receivers, minlength=len(curves))
    weights = 1 / (1 + torch.maximum(degrees[senders], degrees[receivers])).to(curves.dtype)
    pool = curves.clone()
    for _ in range(SWEEPS):
        pool = pool.index_add(0, receivers, weights[:, None] * (pool[senders] - pool[receivers]))
    return pool


def alike_pairs(pairs: Tensor, clusters: Tensor, sound: Tensor) -> Tensor:
    """Keep the pairs (E, 2) of clients of one cluster whose curves are both finite."""
    one, two = pairs.T
    return pairs[sound[one] & sound[two] & (clusters[one] == clusters[two])]


def observe_all(
    start: Start, places: Sequence[int], own: Tensor, partners: Tensor, shares: Sequence[float], steps: int
) -> Tensor:
    """Judge pairs of models for C members, by their places, that hold samples out: those that they follow and others,
    (C, P), which weigh `shares` in the averages. Returns the excess and the optimism of each, (C, EXCESSES + 1)."""
    judged = torch.empty(len(places), EXCESSES + 1, dtype=torch.float64)
    rows = max(1, 16 * PIECE_BYTES // (start.flat.size * own.element_size()))
    for begin in range(0, len(places), rows):
        some = slice(begin, min(len(places), begin + rows))
        weights = torch.tensor(shares[some], dtype=own.dtype, device=own.device)[:, None]
        judged[some] = _observe(start, places[some], own[some], partners[some], weights, steps)
    return judged


def _observe(start: Start, places: Sequence[int], own: Tensor, partners: Tensor, weights: Tensor, steps: int) -> Tensor:
    engine, clients, task = start.engine, [start.members[place] for place in places], start.flat.task
    train, held = (samples_of(data, places) for data in start.divided)
    plain = [own, partners, torch.lerp(own, partners, weights)]
    tuned = [engine.finetuned(vectors, train, steps, clients) for vectors in plain]
    trained = engine.rated(partial(judge, task), tuned[0], train).cpu()
    losses = [[engine.rated_each(partial(judge_each, task), model, held) for model in some] for some in (plain, tuned)]
    chosen_by = [engine.sample_losses(vectors[None], held) for vectors in plain[:2]]
    said = torch.empty(len(places), EXCESSES + 1, dtype=torch.float64)
    for row in range(len(places)):
        mine = torch.stack([torch.stack([of_clients[row] for of_clients in some]) for some in losses])
        chosen = choose_without(torch.cat([of_clients[row] for of_clients in chosen_by]), 0)
        said[row, :-1] = torch.tensor(compare(mine, chosen, task), dtype=torch.float64)
        said[row, -1] = at_least(task, float(mine[1, 0].mean() - trained[row]))
    return said
