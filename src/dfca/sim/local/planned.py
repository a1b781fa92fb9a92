"""Local work that is not simply the steps of one model: stages that train a part of it, or all models of a client.

What one client does is `core.client.Client.train`; here many are stacked into one call where the engine can.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dfca.core.algorithm import Choice
from dfca.core.client import stage_names
from dfca.core.learning.local import Drawn, TrainingSet, draw_steps, local_steps_
from dfca.core.learning.parts import Stage
from dfca.core.rng import seeded
from dfca.sim.local.engine import CHUNK_BYTES, Engine, LocalTask, TrainedChunk, finite, later_epochs, slices


def work(
    engine: Engine, task: LocalTask, places: Sequence[int], stages: Sequence[Stage] | None, every: bool
) -> Iterator[TrainedChunk]:
    """Choose and train for some clients: what `Engine.work` does, also in stages, and for `every` model of a client."""
    if stages is None:
        return engine.work(task, places)
    return _Planned(engine, task, places, stages, every).work()


def quiet(engine: Engine, stages: tuple[Stage, ...] | None) -> tuple[Engine, tuple[Stage, ...] | None]:
    """Make an engine and stages that choose and take no step."""
    still = Engine(engine.model, replace(engine.local, steps=0, epochs=None), engine.seed, engine.how)
    return still, stages and tuple(
        stage._replace(options=replace(stage.options, steps=0, epochs=None)) for stage in stages
    )


class _Planned:
    """The local work of a round, in stages. every: all models of a client are trained."""

    def __init__(
        self, engine: Engine, task: LocalTask, places: Sequence[int], stages: Sequence[Stage], every: bool
    ) -> None:
        self.engine, self.task, self.places = engine, task, list(places)
        self.stages, self.every = stages, every

    def work(self) -> Iterator[TrainedChunk]:
        """Choose for all, then train some at a time."""
        if not self.places:
            return
        begin = time.perf_counter()
        means, choices = self._choose()
        looked_s = time.perf_counter() - begin
        whole = self.engine.stacked and all(choice.points is None for choice in choices)
        size = self._chunk_size() if whole else 1
        for chunk in self.task.of_one_rate(slices(len(self.places), size), self.engine.local):
            first, some = chunk.start, range(chunk.start, chunk.stop)
            chosen = choices[chunk]
            vectors = self._vectors(some, chosen)
            if whole:
                self._train_stacked_(vectors, some, chosen)
            else:
                self._train_alone_(vectors[0], first, chosen[0])
            fine = finite(vectors.flatten(1))
            trained = vectors if self.every else vectors[:, 0]
            yield TrainedChunk(some, chosen, means[first : some.stop], looked_s, fine, trained)
            looked_s = 0.0

    def _choose(self) -> tuple[Tensor, list[Choice]]:
        """Compute what the clients look at, as far as they need it, and choose: mean losses (C, m), choices."""
        task, engine, places = self.task, self.engine, self.places
        means = torch.zeros(len(places), len(task.bank))
        samples: Sequence[Tensor | None] = [None] * len(places)
        if task.known is not None:
            means = task.known
        elif task.needs != "nothing":
            everybody = len(places) == task.data.clients
            data = task.data if everybody else task.data.subset(places)
            of_all = engine.sample_losses(task.bank, data, None if everybody or task.shared else places)
            means = torch.stack([losses.mean(dim=1) for losses in of_all])
            samples = of_all if task.needs == "samples" else samples
        return means, [task.choose(*seen) for seen in zip(range(len(places)), means, samples, strict=True)]

    def _vectors(self, some: range, choices: Sequence[Choice]) -> Tensor:
        """Copy the models that some clients train: (C, m, P), or (C, 1, P) of those that they chose."""
        bank = self.task.bank
        rows = [0 if self.task.shared else self.places[position] for position in some]
        if self.every:
            return bank[:, rows].transpose(0, 1).clone()
        return bank[[choice.cluster for choice in choices], rows][:, None].clone()

    def _train_stacked_(self, vectors: Tensor, some: range, choices: Sequence[Choice]) -> None:
        """Train in place: vectors (C, m, P) of the clients at some positions."""
        stacked = self.task.data.stacked()
        assert stacked is not None  # the engine stacks them
        places = [self.places[position] for position in some]
        x, y = (tensor[places] for tensor in stacked)
        for number, (options, frozen) in enumerate(self.stages):
            rounds = zip(places, self.task.rounds(some), strict=True)
            names = [stage_names(self.task.first + place, round, number) for place, round in rounds]
            drawn = [draw_steps(y.shape[1], options, self.engine.seed, *name) for name in names]
            batches, changes = Drawn.stacked(drawn, y.device)
            for j in range(vectors.shape[1]):
                rows = [choice.weights[j] for choice in choices if choice.weights is not None]
                weights = torch.stack(rows).to(vectors) if rows else None
                data = TrainingSet(x, y, batches, weights=weights, frozen=frozen, changes=changes)
                models = vectors[:, j].contiguous()
                self.engine.stacked_steps_(models, data, options.at(self.task.rounds(some)[0]))
                vectors[:, j] = models

    def _train_alone_(self, vectors: Tensor, position: int, choice: Choice) -> None:
        """Train the models of one client in place: vectors (m, P)."""
        engine, model, place = self.engine, self.engine.model, self.places[position]
        (round,) = self.task.rounds([position])
        x, y = self.task.data.of(place, round)
        read = self.task.reader(place, round)
        if choice.points is not None:
            x, y = x[choice.points], y[choice.points]
        for number, (options, frozen) in enumerate(self.stages):
            names = stage_names(self.task.first + place, round, number)
            batches, changes = draw_steps(len(y), options, engine.seed, *names)
            later = later_epochs(read, x, choice.points, options)
            for j, vector in enumerate(vectors):
                weights = None if choice.weights is None else choice.weights[j].to(vector)
                data = TrainingSet(x, y, batches, weights=weights, frozen=frozen, changes=changes, later=later)
                with seeded(engine.seed, "noise", *names):
                    local_steps_(model, vector, data, options.at(round))

    def _chunk_size(self) -> int:
        """Count the clients of one stacked call, whose models and activations stay near the cache."""
        bank, data = self.task.bank, self.task.data
        models = len(bank) if self.every else 1
        numbers = models * 2 * bank.shape[2] + data.sizes[0] * (data.nbytes // max(1, 8 * len(data.y)) + 1)
        return max(1, CHUNK_BYTES // (bank.element_size() * numbers))
