"""The work of one participant: what its peer asks for, computed by the definitions of `core`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dfca.core.client import Client, effective
from dfca.core.learning.deployment import deploy, measure_in_slices, steps_of
from dfca.core.learning.local import local_steps, sample_losses
from dfca.core.learning.params import initial
from dfca.core.rng import Noise, seeded, stream
from dfca.core.rules.election import Parts, divide
from dfca.core.rules.merging import observe_in_slices
from dfca.core.rules.personal import Pair, plain
from dfca.core.state import ClientState
from dfca.peer.records import work as jobs

SLICES = 4  # work beside the rounds is done in slices of a fourth of a round's steps
MOST_PERSONAL_SAMPLES = 4096  # personal steps are full-batch steps on at most this many samples


@dataclass
class Worker:
    """Computes jobs on the samples of one client. bank (m, P): the peer's models, which no job changes."""

    client: Client
    memory: Tensor | None = None  # of the algorithm, for a bank of `models` models; lost by a restart
    models: int = 0
    seen: Client | None = None  # the client with the samples that it trains on, once samples are held out
    unseen: Client | None = None  # the client with its held-out samples
    personal: Tensor | None = None  # the model after the last step
    held: Pair | None = None  # samples to pick the last step on; None: samples of the client

    def __post_init__(self) -> None:
        # The jobs say which samples are held out.
        self.client = replace(self.client, hold_out_until=None, chooses_unseen=False)
        self.layout = self.client.rules.layout

    def run(self, job: jobs.Job, bank: Tensor | None) -> Any:
        """Do a job; returns its result."""
        if isinstance(job, jobs.Train):
            assert bank is not None
            return self._train(job, bank)
        if isinstance(job, jobs.WarmUp | jobs.Observe | jobs.Curve):
            *_, result = self.slices(job)
            return result
        if isinstance(job, jobs.Score):
            return self._losses(job, job.models)
        if isinstance(job, jobs.Draw):
            return self.client.start().bank
        if isinstance(job, jobs.Personalise):
            assert bank is not None
            samples = few((self.client.x, self.client.y), self.client)
            deployed = deploy(self.client, bank, samples, job.closed)[1]
            self.personal = steps_of(self.client).take(deployed, samples, job.steps)
            return None
        assert isinstance(job, jobs.Rest)
        return None

    def _train(self, job: jobs.Train, bank: Tensor) -> jobs.Trained:
        client, bank = self._client(job.held_out), self._whole(bank)
        if self.memory is None or len(bank) != self.models:
            self.memory, self.models = client.first_memory(len(bank)), len(bank)
        looks = self.unseen if job.unseen and self.unseen is not None and len(self.unseen.y) else client
        view = looks.view(replace(ClientState.of(bank, self.memory), round=job.round, closed=job.closed))
        choice = client.algorithm.decide(view)
        model = client.train(bank, choice, job.round)
        self.memory = self.memory if choice.memory is None else choice.memory
        losses = view.losses.nan_to_num(nan=float("inf"))
        lowest = float(losses.min()) if len(losses) else float("inf")
        fine = bool(torch.isfinite(model).all())
        return jobs.Trained(choice.cluster, fine, model, lowest, len(client.y), tuple(losses.tolist()))

    def _whole(self, bank: Tensor) -> Tensor:
        """Draw the private columns of models that were taken over: a neighbour keeps its own."""
        private = () if self.layout is None else self.layout.private
        lacking = [j for j, model in enumerate(bank) if private and not any(model[part].any() for part in private)]
        if not lacking or self.layout is None:
            return bank
        drawn, whole = self.client.start().bank, bank.clone()
        for j in lacking:
            whole[j] = self.layout.fill(bank[j], drawn[j % len(drawn)])
        return whole

    def slices(self, job: jobs.Job) -> Iterator[Any]:
        """Do a job of the background in short slices, between which rounds are trained; the last yields its result."""
        if isinstance(job, jobs.WarmUp):
            return self._warm_up(job)
        if isinstance(job, jobs.Observe):
            return self._observe(job)
        assert isinstance(job, jobs.Curve)
        return self._measure(job)

    def _measure(self, job: jobs.Curve) -> Iterator[jobs.OwnCurve | None]:
        train, held = self.client.divided() if self.held is None else ((self.client.x, self.client.y), self.held)
        for measured in measure_in_slices(self.client, job.models, few(train, self.client), held, job.closed):
            yield None if measured is None else jobs.OwnCurve(*measured)

    def _observe(self, job: jobs.Observe) -> Iterator[tuple[tuple[float, ...], float] | None]:
        seen, merging = self._client(held_out=True), self.client.algorithm.merging
        assert self.unseen is not None
        assert merging is not None  # else nobody surveys
        if not len(self.unseen.y):
            yield None
            return
        local = plain(effective(seen.method.local, seen.algorithm), merging.steps)
        samples = (seen.x, seen.y), (self.unseen.x, self.unseen.y)
        steps = max(1, seen.method.local.steps // SLICES)
        own, partner = job.models
        slices = observe_in_slices(seen.model, own, partner, job.share, *samples, local, steps)
        noise = Noise(seen.seed, "noise", seen.id, -1)
        judged = None
        while judged is None:
            with noise:
                judged = next(slices)
            yield judged

    def _warm_up(self, job: jobs.WarmUp) -> Iterator[jobs.Warm | None]:
        """Train a model from the common start; one that diverges is the start itself."""
        client, parts = self._client(job.held_out), self._parts(job)
        begin = initial(client.model, client.make_model, client.seed, "init", 0).to(client.x.device)
        own, x, y = begin, client.x[parts.warm], client.y[parts.warm]
        local = effective(client.method.local, client.algorithm)
        for stage, options in enumerate(client.algorithm.election.warmup(local)):
            with seeded(client.seed, "noise", client.id, -1 - stage):
                own = local_steps(client.model, own, x, y, options)
            yield None
        own = own if bool(torch.isfinite(own).all()) else begin
        yield jobs.Warm(own, self._losses(job, own[None]))

    def _losses(self, job: jobs.WarmUp | jobs.Score, models: Tensor) -> jobs.Losses:
        client, parts = self._client(job.held_out), self._parts(job)
        bid, vote = (
            sample_losses(client.model, models, client.x[rows], client.y[rows]) for rows in (parts.bid, parts.vote)
        )
        return jobs.Losses(bid, vote)

    def _parts(self, job: jobs.WarmUp | jobs.Score) -> Parts:
        client, when = self._client(job.held_out), () if job.stage is None else (job.stage,)
        return divide(len(client.y), stream(client.seed, "parts", client.id, *when))

    def _client(self, held_out: bool) -> Client:
        """Return the client with all samples, or with those that it does not hold out."""
        if not held_out:
            return self.client
        if self.seen is None:
            (x, y), (unseen_x, unseen_y) = self.client.divided()
            self.seen, self.unseen = replace(self.client, x=x, y=y), replace(self.client, x=unseen_x, y=unseen_y)
        return self.seen


def few(samples: Pair, client: Client) -> Pair:
    """Draw at most `MOST_PERSONAL_SAMPLES` samples for personal steps."""
    x, y = samples
    if len(y) <= MOST_PERSONAL_SAMPLES:
        return samples
    drawn = torch.randperm(len(y), generator=stream(client.seed, "personal", client.id))
    rows = drawn[:MOST_PERSONAL_SAMPLES].to(y.device)
    return x[rows], y[rows]
