"""Scores of a state of the simulation: what its clients would deploy, and how good all their models are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dfca import metrics
from dfca.core.learning.inputs import moved
from dfca.core.learning.local import infer, lowest
from dfca.core.learning.params import FlatModel
from dfca.core.learning.task import Task
from dfca.core.rng import stream
from dfca.data.clients import ClientData, Split
from dfca.sim.metrics_table import JsonObject
from dfca.sim.personal import LastSteps
from dfca.sim.shards import PIECE_BYTES, members_of, within
from dfca.sim.start import Start

EVALUATION_SHARE = 0.08
"""What the evaluations of a run may cost beside its rounds, in passes of samples: a tenth of the time, less a margin
for what is not counted (with 0.1, 0.105 to 0.13 of the time was measured)."""
LAST_SHARE = 0.75  # what the last of them may take of that
FEWEST_SCORED = 4  # clients that are scored on every distribution in any case
WALK = 25  # passes of a sample that take as long as walking through a model (784-100-10 and 784-200-10)
HIGH_LOSS = 10
"""A training loss above this many times that of guessing, such as log(classes), is noted: divergence that stays
finite."""
SMALL_LOSS = 1e-6  # A loss below is no divergence, however little there is to guess


class Scores(NamedTuple):
    """The scores of a state. In `row` the score has the key of the task's metric, "accuracy" or another."""

    row: JsonObject
    by_client: Tensor  # (N,), of what clients would deploy, NaN where not scored
    before: Tensor  # (N,), the same without the personal last step


class Scope(NamedTuple):
    """Whose models an evaluation scores: on their own test samples, and on every distribution."""

    own: Sequence[int]
    everywhere: Sequence[int]


class Evaluator:
    """Scores banks (m, L, P), or a server's (m, 1, P), on the members' samples; any driver may own the banks."""

    def __init__(self, start: Start) -> None:
        self.start, self.setting, self.shards = start, start.setting, start.shards
        self.engine, self.shared = start.engine, start.shared
        guess = self.start.flat.task.guess(start.setting.split.train.y, start.setting.split.classes)
        self.high_loss = float("inf") if guess is None else HIGH_LOSS * max(guess, SMALL_LOSS)
        self.metric = self.start.flat.task.metric
        self.high_losses: set[int] = set()  # clients whose training loss was above `high_loss` or not finite; noted
        self.highest_loss = 0.0  # of these
        self.honest = None if start.liars is None else torch.tensor(start.liars.honest)
        self.use_split(start.setting.split)

    def use_split(self, split: Split) -> None:
        """Draw the test samples of every distribution of a split; the members' own are those of `Start`."""
        setting = self.setting
        drawn = metrics.distributions(
            split, setting.evaluation_samples, setting.seed, self.shards.members, self.shards.sum
        )
        device, dtype = setting.device, setting.dtype
        self.distributions = [
            metrics.Distribution(*((moved(x, device, dtype), moved(y, device, dtype)) for x, y in distribution))
            for distribution in drawn
        ]

    def scope(self, models: int, final: bool) -> Scope:
        """Choose whose models are scored: as many as keep all evaluations of a run within EVALUATION_SHARE of what its
        rounds cost, counted in forward passes of one sample; never by a clock.

        A round costs m passes of every training sample, and its steps. An evaluation costs those m passes too unless
        the next round assigns by them, a walk through the banks, and one pass of each test sample; scoring a client
        on d distributions with s samples each costs d (m + 1) s / 2. The last evaluation comes first: up to LAST_SHARE
        of everything. Everybody is scored on its own test samples, also where it makes a model of its own for that
        (`personal`), but before the end no more of those than half of an evaluation pays for, or FEWEST_SCORED. At the
        end fine-tuning is not counted, for it is the last part of the algorithm. Virtual time scores everybody at every
        evaluation: its reports follow single clients, and which evaluation is the last is not known in advance.
        """
        setting, clients, algorithm = self.setting, self.setting.clients, self.setting.algorithm
        samples, tests = (sum(data.sizes) for data in (setting.split.train, setting.split.test))
        looks = 0 if algorithm.needs == "nothing" or models == 1 else models * samples
        whole = EVALUATION_SHARE * setting.rounds * (looks + self.engine.passes(setting.split.train.sizes))
        per_client = sum(len(drawn.held_out[1]) * models + len(drawn.test[1]) for drawn in self.distributions)
        fixed = tests + WALK * models * clients
        last = min(LAST_SHARE * whole, fixed + models * samples + per_client * clients)
        others = -(-setting.rounds // setting.evaluate_every) - 1
        budget = last if final else (whole - last) / max(1, others)
        order = torch.randperm(clients, generator=stream(setting.seed, "scored")).tolist()
        own, fewest = clients, min(clients, FEWEST_SCORED)
        if algorithm.personal is not None and not final:
            passes = self.engine.finetuning_passes(algorithm.finetuning, setting.split.train.sizes) / clients
            own = min(clients, max(fewest, int(budget / 2 / max(1, passes))))
            budget /= 2
        if not per_client or self.shared:
            return Scope(sorted(order[:own]), range(clients))
        reused = algorithm.needs == "losses" and not final
        many = int((budget - fixed - (0 if reused else models * samples)) / per_client)
        return Scope(sorted(order[:own]), sorted(order[: min(clients, max(fewest, many))]))

    def score(
        self,
        banks: Tensor,
        assignments: Tensor,
        scope: Scope | None = None,
        losses: Tensor | None = None,
        last_step: LastSteps | None = None,
        closed: Tensor | None = None,
    ) -> Scores:
        """Score the banks; assignments (N,) are the models that the clients trained last, -1 for none.

        scope: whose models, everybody's if not given. losses (L, m): of the members' models on their training samples,
        where they are known. last_step: the personal last step, where clients take it before they are scored. closed
        (m, N) bool: clusters that are; their losses are infinite, and given.
        """
        members, models = self.shards.members, len(banks)
        shut = None if closed is None else closed[:, list(members)]
        kept_models = models if closed is None else int((~closed).sum(dim=0).max())
        truth = self.start.truth if self.setting.algorithm.models == "clusters" else None
        losses, chosen, deployed = self.deploy(banks, losses)
        scope = scope or Scope(range(self.setting.clients), range(self.setting.clients))
        plain = scored = self._on_own(banks, deployed, within(members, scope.own))
        if last_step is not None:
            scored = self._on_own(banks, lambda some: last_step.take(deployed(some), some), within(members, scope.own))
        picked = losses.cpu().gather(1, chosen[:, None])[:, 0]
        trained = assignments[list(members)]
        trained = torch.where(trained < 0, chosen, trained).clamp_max(models - 1)
        kept = losses.cpu().gather(1, trained[:, None])[:, 0]
        elsewhere = self.on_distributions(banks, scope.everywhere, shut)
        mine = (chosen, picked, kept, scored.cpu(), plain.cpu())
        columns = (*(column.double() for column in mine), *elsewhere)
        gathered = self.shards.gather(torch.stack(columns, dim=1)).T.contiguous()
        picks, picked, kept, scores, before, others = gathered[0].long(), *gathered[1:5], gathered[5:]
        self._note_high(picked)
        picks_of_all, honest = picks, self.honest
        if honest is not None:
            picks, picked, kept, scores, others = (
                column[..., honest] for column in (picks, picked, kept, scores, others)
            )
            truth = None if truth is None else truth[honest]
        known, key = scores[~scores.isnan()], self.metric.key
        row = {
            key: float(known.mean()),
            f"{key}_std_over_clients": float(known.std(correction=0)),
            f"{key}_by_cluster": _by_cluster(scores, picks, models),
            f"all_models_{key}": float(others.nanmean()) if len(others) else None,
            "cluster_accuracy": None if truth is None else metrics.cluster_accuracy(picks, truth),
            "adjusted_rand_index": None if truth is None else metrics.adjusted_rand_index(picks, truth),
            "live_clusters": len(set(picks.tolist())),
            "models": kept_models,
            "train_loss": float(picked.mean()),
            "F_global": float(picked.sum()),
            "F_before_assignment": float(kept.sum()),
            "disagreement": self._disagreement(banks, closed),
            "assignments": picks_of_all.tolist(),
        }
        return Scores(row, gathered[3], before)

    def score_holders(
        self, banks: Tensor, assignments: Tensor, holding: Sequence[int], personal: LastSteps, final: bool
    ) -> JsonObject:
        """Score the banks where only the clients `holding` hold models: the row, with the mean score over them; final:
        they take their personal last step, where they have one."""
        last_step, key = personal if final and personal.active else None, self.metric.key
        scores = self.score(banks, assignments, last_step=last_step)
        if (liars := self.start.liars) is not None:
            holding = [client for client in holding if client not in liars]
        held, picks = list(holding), torch.tensor(scores.row["assignments"])
        holders = scores.by_client[list(holding)] if holding else torch.zeros(1, dtype=torch.float64)
        nobody = not holding and not self.metric.higher_is_better  # then 0 would be the best of scores
        return {
            **scores.row,
            key: None if nobody else float(holders.mean()),
            f"{key}_std_over_clients": None if nobody else float(holders.std(correction=0)),
            f"{key}_by_cluster": _by_cluster(scores.by_client[held], picks[held], len(banks)),
            f"{key}_by_client": scores.by_client.tolist(),
            "clients": len(holding),
            **({f"{key}_before_personal": _mean(scores.before[held])} if personal.active else {}),
            **({} if last_step is None else {f"{key}_before_personal_by_client": scores.before.tolist()}),
            **({} if last_step is None else last_step.row()),
        }

    def _note_high(self, losses: Tensor) -> None:
        """Remember which clients' training losses (N,) say that training diverged."""
        known = losses.nan_to_num(nan=float("inf"))
        if high := (known > self.high_loss).nonzero()[:, 0].tolist():
            self.high_losses |= set(high)
            self.highest_loss = max(self.highest_loss, float(known.max()))

    def _on_own(self, banks: Tensor, deployed: Callable[[Sequence[int]], Tensor], here: Sequence[int]) -> Tensor:
        """Score what some members deploy on their own test samples: (L,), NaN for the others."""
        if (mixture := self.setting.algorithm.mixture) is not None and self.start.memory is not None:
            weights = [mixture(self.start.memory[client]) for client in self.shards.members]
            return mixed_scores(self.start.flat, banks, weights, self.start.test, here)
        if len(here) == len(self.shards.members):
            return self.engine.scores(deployed, self.start.test)
        scores = torch.full((len(self.shards.members),), float("nan"), dtype=torch.float64)
        if here:
            some = self.start.test.subset(here)
            scores[list(here)] = self.engine.scores(
                lambda places: deployed([here[place] for place in places]), some
            ).cpu()
        return scores

    def on_distributions(self, banks: Tensor, clients: Sequence[int], closed: Tensor | None = None) -> list[Tensor]:
        """Score the banks of some clients on every true distribution: (L,) each, NaN for other members; closed (m, L)
        bool: models that do not count."""
        members, (models, _, size) = self.shards.members, banks.shape
        if not self.distributions:
            return []
        if self.shared:
            return [self.engine.score_on(banks, *drawn).expand(len(members)) for drawn in self.distributions]
        scores = torch.full((len(self.distributions), len(members)), float("nan"), dtype=torch.float64)
        here = torch.tensor(within(members, clients), dtype=torch.int64)
        rows = max(1, 2 * PIECE_BYTES // (models * size * banks.element_size()))
        for some in torch.split(here, rows) if len(here) else ():
            whole = int(some[-1] - some[0]) + 1 == len(some)  # one after the other: a view instead of a copy
            part = banks[:, some[0] : some[-1] + 1] if whole else banks[:, some.to(banks.device)]
            for row, distribution in zip(scores, self.distributions, strict=True):
                shut = None if closed is None else closed[:, some]
                row[some] = self.engine.score_on(part, *distribution, closed=shut)
        return list(scores)

    def deploy(
        self,
        banks: Tensor,
        losses: Tensor | None,
        data: ClientData | None = None,
        clients: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Callable[[Sequence[int]], Tensor]]:
        """Choose what every member deploys: training losses (L, m), the picks (L,), and how to gather the vectors.

        data, clients: the samples of some clients, whose banks these are, in place of those of all members.
        """
        algorithm, members = self.setting.algorithm, self.shards.members if clients is None else clients
        train = self.start.train if data is None else data
        if (personal := algorithm.personal) is not None:
            by_sample = self.engine.sample_losses(banks, train)

            def personalise(some: Sequence[int]) -> Tensor:
                mixed = torch.stack([personal(banks[:, 0 if self.shared else i], by_sample[i]) for i in some])
                run = range(some[0], some[-1] + 1)
                mine = members_of(train, run) if len(run) == len(some) else train.subset(some)
                return self.engine.personalised(mixed, mine, algorithm.finetuning, [members[i] for i in some])

            losses = torch.stack([samples.mean(dim=1) for samples in by_sample])
            return losses, _lowest_of_rows(losses), personalise
        if losses is None:
            losses = self.engine.losses(banks, train)
        truth = self.start.truth if algorithm.informed else None
        picks = _lowest_of_rows(losses) if truth is None else truth[list(members)]
        if algorithm.mixture is not None and self.start.memory is not None:
            mixed = (algorithm.mixture(self.start.memory[client]) for client in members)
            picks = torch.tensor([int(weights.argmax()) for weights in mixed])
        columns = picks.to(banks.device)
        rows = torch.zeros_like(columns) if self.shared else torch.arange(len(members), device=banks.device)
        return losses, picks, lambda some: banks[columns[list(some)], rows[list(some)]]

    def _disagreement(self, banks: Tensor, closed: Tensor | None) -> list[float]:
        if self.shared:
            return [0.0] * len(banks)
        shut = [False] * len(banks) if closed is None else closed.all(dim=1).tolist()
        clients, add = self.setting.clients, self.shards.sum
        if self.honest is not None:  # then there is one rank
            banks, clients = banks[:, self.honest.to(banks.device)], len(self.honest)
        if not any(shut):
            return metrics.disagreement(banks, clients, add).tolist()
        return [
            0.0 if gone else float(metrics.disagreement(banks[j : j + 1], clients, add)) for j, gone in enumerate(shut)
        ]


def _mean(scores: Tensor) -> float | None:
    return float(scores.mean()) if len(scores) else None


def _lowest_of_rows(losses: Tensor) -> Tensor:
    return torch.tensor([lowest(row) for row in losses])


def _by_cluster(scores: Tensor, picks: Tensor, models: int) -> list[float | None]:
    """Average the known scores (N,) over the clients that picked each model: (m,), None where there is none."""
    known = [scores[(picks == model) & ~scores.isnan()] for model in range(models)]
    return [float(own.mean()) if len(own) else None for own in known]


def mix_outputs(task: Task, outputs: Tensor, weights: Tensor) -> Tensor:
    """Mix the outputs of m models by their weights: (m, n, ...), (m,) -> (n, ...).

    Of classes and tokens, log sum_s w_s softmax(z_s): outputs whose softmax is the mixture. Of labels, the same for
    each on its own; of numbers and anything else, sum_s w_s z_s.
    """
    share = weights.to(outputs).view(-1, *[1] * (outputs.dim() - 1))
    tiny = torch.finfo(outputs.dtype).tiny
    if task.targets in ("classes", "tokens"):
        return (share * outputs.softmax(dim=-1)).sum(dim=0).clamp_min(tiny).log()
    if task.targets == "labels":
        yes = (share * outputs.sigmoid()).sum(dim=0).clamp_min(tiny)
        no = (share * (-outputs).sigmoid()).sum(dim=0).clamp_min(tiny)
        return yes.log() - no.log()
    return (share * outputs).sum(dim=0)


def mixed_scores(
    model: FlatModel, banks: Tensor, weights: Sequence[Tensor], data: ClientData, here: Sequence[int]
) -> Tensor:
    """Score the mixtures of some clients on their samples: banks (m, L, P) -> (L,), NaN for the others."""
    scores = torch.full((banks.shape[1],), float("nan"), dtype=torch.float64)
    with torch.no_grad():
        for i in here:
            x, y = data.of(i)
            outputs = torch.stack([infer(model, vector, x, "score") for vector in banks[:, i]])
            mixed = mix_outputs(model.task, outputs, weights[i])
            scores[i] = model.task.metric.score(mixed[None], y[None])[0].cpu()
    return scores
