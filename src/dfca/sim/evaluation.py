"""Scores of a state of the simulation: what its clients would deploy, and how good all their models are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca import metrics
from dfca.core.local import lowest
from dfca.core.rng import stream
from dfca.data.clients import ClientData, Split
from dfca.sim.engine import Engine
from dfca.sim.setting import Setting
from dfca.sim.shards import PIECE_BYTES, Shards, members_of, within

EVALUATION_SHARE = 0.1
"""What the evaluations of a run may cost beside its rounds, in passes of samples."""
FEWEST_SCORED = 8
"""So many clients are scored on every distribution in any case."""


class Scores(NamedTuple):
    """What is found: row, the metrics; losses (L, m), of the members' models on their training samples; accuracies
    (N,), of what every client would deploy."""

    row: dict[str, Any]
    losses: Tensor
    accuracies: Tensor


class Evaluator:
    """Scores banks (m, L, P), or a server's (m, 1, P), on the samples that the members `hold`."""

    def __init__(self, setting: Setting, engine: Engine, shards: Shards) -> None:
        self.setting, self.engine, self.shards = setting, engine, shards
        self.shared = setting.algorithm.exchange == "server"

    def hold(self, split: Split, train: ClientData, test: ClientData) -> None:
        """Take over a split, of which train and test are the members' part."""
        setting = self.setting
        self.train, self.test, self.truth = train, test, split.clusters
        found = metrics.distributions(
            split, setting.evaluation_samples, setting.seed, self.shards.members, self.shards.sum
        )
        kind = setting.dtype if split.test.x.is_floating_point() else None
        self.distributions = [
            metrics.Distribution(*((x.to(setting.device, kind), y.to(setting.device)) for x, y in distribution))
            for distribution in found
        ]

    def affordable(self, models: int) -> Sequence[int]:
        """Choose the clients that are scored on every distribution: as many as keep an evaluation within
        EVALUATION_SHARE of the sample passes of the rounds since the last one.

        A round takes n (m + 3 steps) passes of a client's n samples (a gradient is worth two forward passes), scoring a
        client with s samples of each of d distributions d (m + 1) s / 2, and its own test samples one each.
        """
        setting, clients = self.setting, self.setting.clients
        each = sum(len(found.held_out[1]) * models + len(found.test[1]) for found in self.distributions)
        if not each or self.shared:
            return range(clients)
        samples, tests = (sum(data.sizes) for data in (setting.split.train, setting.split.test))
        passes = setting.evaluate_every * samples * (models + 3 * setting.local.steps)
        many = int((EVALUATION_SHARE * passes - tests) / each)
        order = torch.randperm(clients, generator=stream(setting.seed, "scored"))
        return sorted(order[: max(min(clients, FEWEST_SCORED), many)].tolist())

    def score(self, banks: Tensor, assignments: Tensor, everywhere: Sequence[int] | None = None) -> Scores:
        """Score the banks of all clients; assignments (N,) are the models that they trained last, -1 for none.

        everywhere: the clients whose models are scored on every distribution, all if not given.
        """
        members, models = self.shards.members, len(banks)
        truth = self.truth if self.setting.algorithm.models == "clusters" else None
        losses, chosen, deployed = self._deploy(banks)
        scored = self.engine.accuracy(deployed, self.test)
        picked = losses.cpu().gather(1, chosen[:, None])[:, 0]
        trained = assignments[list(members)]
        trained = torch.where(trained < 0, chosen, trained).clamp_max(models - 1)
        kept = losses.cpu().gather(1, trained[:, None])[:, 0]
        elsewhere = self.on_distributions(banks, everywhere or range(self.setting.clients))
        columns = (chosen.double(), picked.double(), kept.double(), scored.cpu().double(), *elsewhere)
        found = self.shards.gather(torch.stack(columns, dim=1)).T.contiguous()
        picks, picked, kept, accuracies, others = found[0].long(), found[1], found[2], found[3], found[4:]
        row = {
            "accuracy": float(accuracies.mean()),
            "accuracy_std_over_clients": float(accuracies.std(correction=0)),
            "all_models_accuracy": float(others.nanmean()) if len(others) else None,
            "cluster_accuracy": None if truth is None else metrics.cluster_accuracy(picks, truth),
            "adjusted_rand_index": None if truth is None else metrics.adjusted_rand_index(picks, truth),
            "live_clusters": len(set(picks.tolist())),
            "models": models,
            "train_loss": float(picked.mean()),
            "F_global": float(picked.sum()),
            "F_before_assignment": float(kept.sum()),
            "disagreement": self._disagreement(banks),
            "assignments": picks.tolist(),
        }
        return Scores(row, losses, accuracies)

    def on_distributions(self, banks: Tensor, clients: Sequence[int]) -> list[Tensor]:
        """Score the banks of some clients on every true distribution: (L,) each, NaN for other members."""
        members, (models, _, size) = self.shards.members, banks.shape
        if not self.distributions:
            return []
        if self.shared:
            return [self.engine.score_on(banks, *found).expand(len(members)) for found in self.distributions]
        scores = torch.full((len(self.distributions), len(members)), float("nan"), dtype=torch.float64)
        here = torch.tensor(within(members, clients), dtype=torch.int64)
        rows = max(1, 16 * PIECE_BYTES // (models * size * banks.element_size()))
        for some in torch.split(here, rows) if len(here) else ():
            whole = int(some[-1] - some[0]) + 1 == len(some)  # one after the other: a view instead of a copy
            part = banks[:, some[0] : some[-1] + 1] if whole else banks[:, some.to(banks.device)]
            for row, distribution in zip(scores, self.distributions, strict=True):
                row[some] = self.engine.score_on(part, *distribution)
        return list(scores)

    def _deploy(self, banks: Tensor) -> tuple[Tensor, Tensor, Callable[[Sequence[int]], Tensor]]:
        """Settle what every member deploys: training losses (L, m), the picks (L,), and how to gather the vectors."""
        algorithm, members = self.setting.algorithm, self.shards.members
        if (personal := algorithm.personal) is not None:
            each = self.engine.sample_losses(banks, self.train)

            def personalise(some: Sequence[int]) -> Tensor:
                run = range(some[0], some[-1] + 1)
                mixed = torch.stack([personal(banks[:, 0 if self.shared else i], each[i]) for i in run])
                data = members_of(self.train, run)
                return self.engine.finetuned(mixed, data, algorithm.finetune_steps, members[run.start])

            losses = torch.stack([samples.mean(dim=1) for samples in each])
            return losses, _lowest_of_rows(losses), personalise
        losses = self.engine.losses(banks, self.train)
        told = self.truth[members.start : members.stop] if algorithm.informed and self.truth is not None else None
        picks = _lowest_of_rows(losses) if told is None else told
        columns = picks.to(banks.device)
        rows = torch.zeros_like(columns) if self.shared else torch.arange(len(members), device=banks.device)
        return losses, picks, lambda some: banks[columns[some[0] : some[-1] + 1], rows[some[0] : some[-1] + 1]]

    def _disagreement(self, banks: Tensor) -> list[float]:
        if self.shared:
            return [0.0] * len(banks)
        return metrics.disagreement(banks, self.setting.clients, self.shards.sum).tolist()


def _lowest_of_rows(losses: Tensor) -> Tensor:
    return torch.tensor([lowest(row) for row in losses])
