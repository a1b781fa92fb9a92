"""How local work is executed: many clients in one call (`stacked`), one after the other (`loop`), or several of them at
the same time on one core each (`threads`).

All compute what `learning.local` defines (tested). Stacked calls pay off where a client's own tensors are too small
to keep the machine busy. A loop keeps them in cache, serves models whose layers do not batch well (grouped convolution)
or that draw random numbers while training (dropout), and clients with unequal numbers of samples. Threads do the same
where there are several cores, for operations scale worse over cores than clients do.

The choice depends on the model, the data, the device and the number of threads alone, never on a clock: the same run
gives the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dfca.base.errors import ConfigError, DfcaError
from dfca.core.algorithm import Choice
from dfca.core.learning.dense import BatchOrder
from dfca.core.learning.images import CentreCrop, Standardise, augmented
from dfca.core.learning.inputs import Lazy, tensors_of
from dfca.core.learning.inputs import Samples as Inputs
from dfca.core.learning.local import (
    Drawn,
    Forward,
    LaterEpochs,
    LocalOptions,
    Samples,
    TrainingSet,
    autocast,
    batch_at,
    draw_steps,
    forward,
    infer,
    local_steps_,
    local_steps_in_place_,
    lowest,
    sample_losses,
    score,
    span,
    spans,
    weight_decays,
)
from dfca.core.learning.optimisers import Kept, check_optimiser, make_stepper
from dfca.core.learning.params import FlatModel
from dfca.core.learning.task import Loss
from dfca.core.method import ElectionOptions, FineTuning
from dfca.core.rng import seeded
from dfca.core.rules.merging import judge
from dfca.core.rules.personal import GRID, plain
from dfca.data.clients import ClientData, products_fit
from dfca.sim.local import cores
from dfca.sim.local.choices import ENGINES as ENGINES
from dfca.sim.local.choices import EngineName as EngineName

STACKED_WORK = 2e7
"""Below this many multiplications per step and client (samples x P) stacking by `vmap` beats a loop. Networks of linear
layers, which need no `vmap`, are faster stacked at any size (784-200-10 and 784-2048-10, 20 to 1,000 samples)."""
CHUNK_BYTES = 64 * 2**20
"""Parameters and activations of one stacked call: small enough to stay near the cache, large enough to batch."""
ALONE_FROM = 16
"""A stacked call of this many clients keeps all cores busy. Smaller calls, of larger models, run at the same time on
one core each, which takes 0.83 to 0.92 of the time (784-400-10 to 784-2048-10, 300 to 1,000 samples, 2 cores)."""
CORE_CHUNKS = 4
"""By how much such calls are smaller than others, for a core has less cache: up to 1.15 times faster with 300 samples,
no slower with 1,000. Not with mini-batches, which are small: there as large calls take 0.8 of the time (2048 units)."""

_STACKABLE = (
    nn.Linear,
    nn.Flatten,
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.LayerNorm,
    nn.Identity,
    CentreCrop,
    Standardise,
)

Needs = Literal["losses", "samples", "nothing"]
T = TypeVar("T")
Chooser = Callable[[int, Tensor, Tensor | None], Choice]
"""Chooses what a client trains: (position, mean losses (m,), losses per sample (m, n) or None) -> Choice."""


class LocalTask(NamedTuple):
    """What the clients of a round are to do: each chooses a model and trains it.

    bank (m, C, P), or (m, 1, P) where all clients share one; data: the samples of the C clients, the first of which has
    the id `first`; round: of all, or of each that takes part; needs: what `choose` wants to see; known: mean losses, a
    row (m,) for every client that takes part, where they were computed before; in_place: what is trained may be written
    to the bank at once; closed: clusters that nobody chooses, whose losses are infinite.
    """

    bank: Tensor
    data: ClientData
    choose: Chooser
    round: int | Sequence[int]
    needs: Needs = "losses"
    known: Tensor | None = None
    first: int = 0
    in_place: bool = False
    closed: Collection[int] = ()

    @property
    def shared(self) -> bool:
        """Return whether all clients have one bank."""
        return self.bank.shape[1] == 1

    def rounds(self, positions: Sequence[int]) -> list[int]:
        """The rounds of some that take part."""
        return [self.round if isinstance(self.round, int) else self.round[position] for position in positions]

    def reader(self, place: int, round: int) -> LaterEpochs | None:
        """Return what reads a client's samples in an epoch of a round, None where they stay as they are."""
        if not isinstance(self.data.x, Lazy) or self.data.x.fixed:
            return None
        return lambda epoch: self.data.of(place, round, epoch)[0]

    def of_one_rate(self, chunks: Sequence[slice], local: LocalOptions) -> Sequence[slice]:
        """Cut chunks of positions where rounds differ, if the learning rate depends on the round."""
        if local.constant_rate or isinstance(self.round, int):
            return chunks
        rounds = self.round
        runs = (list(run) for chunk in chunks for _, run in groupby(range(chunk.start, chunk.stop), rounds.__getitem__))
        return [slice(run[0], run[-1] + 1) for run in runs]

    @property
    def open(self) -> list[int]:
        """The clusters to choose from."""
        return [j for j in range(len(self.bank)) if j not in self.closed]

    def spread(self, losses: Tensor) -> Tensor:
        """Put the losses of the clusters that are open (..., k) among those of all (..., m), infinite for the rest."""
        if not self.closed:
            return losses
        of_all = losses.new_full((*losses.shape[:-1], len(self.bank)), math.inf)
        of_all[..., self.open] = losses
        return of_all


class TrainedChunk(NamedTuple):
    """What some clients of a round have done: their positions, what they chose by which losses (C, m), and in how many
    seconds; whose model is finite, and the trained models (C, P), or None where the finite ones are in the bank
    already; (C, m, P) where all are trained."""

    positions: Sequence[int]
    choices: Sequence[Choice]
    losses: Tensor
    looked_s: float
    fine: Sequence[bool]
    vectors: Tensor | None


class LocalRound(NamedTuple):
    """What local steps are taken on: samples x, y of one client or stacked of several, how, and in which rounds of
    theirs (-1: after the last); products: the inner products of all of x, where they are known; read: what reads x in
    another epoch (`LocalTask.reader`)."""

    x: Any  # Samples; stacked, one tensor
    y: Tensor
    options: LocalOptions
    rounds: Sequence[int]
    products: Tensor | None = None
    read: LaterEpochs | None = None


class _Chunk(NamedTuple):
    """The clients of one stacked call: positions among those that take part, places in the bank, ids; their samples and
    models (m, C, P) or (m, 1, P).

    order: of the samples x, y that a forward pass sees, where it is not their own. reusable: whether the first step can
    continue from that pass.
    """

    positions: range
    places: Sequence[int]
    ids: Sequence[int]
    pick: slice | Tensor
    local: LocalRound
    models: Tensor
    x: Tensor
    y: Tensor
    reusable: bool = True
    order: BatchOrder | None = None


class _Losses(NamedTuple):
    """What clients choose by: mean losses (m,) or (C, m), losses per sample where the algorithm needs them, and the
    forward passes that training can continue from, by cluster."""

    means: Tensor
    samples: Sequence[Tensor | None]
    passes: dict[int, Forward]


class Engine:
    """Runs losses and local steps for many clients.

    models are given as `bank` (m, C, P) for C clients, or (m, 1, P) where all clients share one bank.
    """

    def __init__(self, model: FlatModel, local: LocalOptions, seed: int, how: str) -> None:
        self.model, self.local, self.seed, self.how = model, local, seed, how
        self.workers = torch.get_num_threads()
        self.kept = Kept()
        weight_decays(model, local)  # raises, as the next
        check_optimiser(local)

    @property
    def stacked(self) -> bool:
        """Return whether clients are batched into one call."""
        return self.how == "stacked"

    def losses(
        self, bank: Tensor, data: ClientData, rows: Sequence[int] | None = None, closed: Collection[int] = ()
    ) -> Tensor:
        """Compute F_client of each model of each client on its data: (C, m), infinite for models that are closed."""
        if not closed:
            return torch.stack([losses.mean(dim=1) for losses in self.sample_losses(bank, data, rows)])
        losses = [
            torch.full((data.clients, 1), math.inf, dtype=bank.dtype, device=bank.device)
            if j in closed
            else self.losses(bank[j : j + 1], data, rows)
            for j in range(len(bank))
        ]
        return torch.cat(losses, dim=1)

    def sample_losses(self, bank: Tensor, data: ClientData, rows: Sequence[int] | None = None) -> list[Tensor]:
        """Compute the loss of each model on each sample of its client: C tensors (m, n_i).

        rows: where in the bank the clients of `data` stand, if not one after the other; no more than a chunk of the
        bank is copied.
        """
        clients, shared = len(data.sizes), bank.shape[1] == 1
        stacked = data.stacked() if self.stacked else None
        if stacked is None:
            places = [0] * clients if shared else rows or range(clients)
            jobs = (partial(sample_losses, self.model, bank[:, places[i]], *data.of(i)) for i in range(clients))
            return list(self._each(jobs))

        with torch.no_grad():
            losses = [
                self._stacked_losses(self._part(bank, rows, chunk), stacked[0][chunk], stacked[1][chunk])
                for chunk in self._chunks(clients, stacked[0], bank.shape[0])
            ]
        return list(torch.cat(losses))

    @staticmethod
    def _part(bank: Tensor, rows: Sequence[int] | None, chunk: slice) -> Tensor:
        """Take the models of a chunk of clients: (m, C, P), or (m, 1, P) where they share one bank."""
        if bank.shape[1] == 1:
            return bank
        return bank[:, chunk] if rows is None else bank[:, list(rows[chunk])]

    def _stacked_losses(self, bank: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Compute the losses of each model of C clients: bank (m, C, P) or (m, 1, P), x (C, n, *shape) -> (C, m, n)."""
        if self.model.dense is not None:
            outputs = [infer(self.model, models.expand(len(x), -1), x, "objective") for models in bank]
            return _losses_of(self.model.task.loss, outputs, y)

        def one_model(vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return self.model.task.loss(infer(self.model, vector, x, "objective"), y)

        each_model, shared = vmap(one_model, in_dims=(0, None, None)), bank.shape[1] == 1
        each_client = vmap(each_model, in_dims=(None if shared else 1, 0, 0))
        return each_client(bank[:, 0] if shared else bank, x, y)

    def work(self, task: LocalTask, places: Sequence[int]) -> Iterator[TrainedChunk]:
        """Choose and train for some clients at a time; the forward pass that picks a model is the first step's too.

        places: the clients of the task that take part.
        """
        batched = self.local.batch_size is not None or self.local.augment is not None
        stacked = task.data.stacked() if self.stacked else None
        one = len(places) == 1 and not batched and self.model.dense is not None  # a stack of one has nothing to gain
        if stacked is None or one or (batched and task.needs == "samples"):
            yield from self._each(partial(self._work_alone, task, *place) for place in enumerate(places))
            return
        chunks = self._chunks(len(places), stacked[0], 1)
        several = len(chunks) >= max(2, self.workers) and chunks[0].stop < ALONE_FROM
        together = several and why_not_threads(self.model, task.bank.device.type) is None
        if together:
            smaller = CORE_CHUNKS if self.local.batch_of(task.data.sizes[0]) is None else 1
            chunks = cores.even(len(places), self.workers * -(-smaller * len(chunks) // self.workers))
            self._spans(task.data)  # what is computed once is there before threads need it
        jobs = (
            partial(self._work_stacked, task, stacked, chunk, places[chunk])
            for chunk in task.of_one_rate(chunks, self.local)
        )
        yield from self._each(jobs, together)

    def _work_alone(self, task: LocalTask, position: int, place: int) -> TrainedChunk:
        begin = time.perf_counter()
        rounds = task.rounds([position])
        x, y = task.data.of(place, *rounds)
        models = task.bank[:, 0 if task.shared else place]
        looked = self._look_alone(task, position, models, x, y)
        choice = task.choose(position, looked.means, looked.samples[0])
        looked_s = self._share_of(begin)
        begun = looked.passes.get(choice.cluster) if choice.points is None else None
        vector = models[choice.cluster].clone()
        products = task.data.products if self.stacked and self._spans(task.data) else None
        products = None if products is None else products[place]
        local = LocalRound(x, y, self.local.at(*rounds), rounds, products, task.reader(place, *rounds))
        self._train_alone_(vector, local, choice, task.first + place, begun)
        fine = math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())
        return TrainedChunk([position], [choice], looked.means[None], looked_s, [fine], vector[None])

    def _look_alone(self, task: LocalTask, position: int, models: Tensor, x: Inputs, y: Tensor) -> _Losses:
        """Compute the losses of models (m, P) -> (m,), and keep the pass of the lowest where training can use it."""
        model = self.model
        if task.known is not None:
            return _Losses(task.known[position], [None], {})
        if task.needs == "nothing":
            return _Losses(torch.zeros(len(models)), [None], {})
        if task.closed:
            models = models[task.open]
        reusable = self.local.batch_size is None and self.local.augment is None and self.local.passes > 0
        reusable &= (model.dense is None or self.local.written_out) and self.local.precision == "float32"
        if task.needs == "samples" or model.noisy or not reusable:
            samples = sample_losses(model, models, x, y)
            return _Losses(task.spread(samples.mean(dim=1)), [samples if task.needs == "samples" else None], {})
        if model.dense is not None and isinstance(x, Tensor):
            several = forward(model, models, x.expand(len(models), *x.shape))
            passes = {j: Forward(z[:0], [z]) for j, z in zip(task.open, several.tensors[0], strict=True)}
            losses = _losses_of(model.task.loss, [several.outputs], y.expand(len(models), *y.shape))
            return _Losses(task.spread(losses[:, 0].mean(dim=1)), [None], passes)
        losses_of: list[Tensor] = []
        best = float("inf")
        kept: dict[int, Forward] = {}
        for j, vector in zip(task.open, models, strict=True):
            passed = forward(model, vector, x)
            losses_of.append(model.task.loss(passed.outputs.detach(), y))
            loss = float(losses_of[-1].mean())
            if loss < best:
                best, kept = loss, {j: passed}
        return _Losses(task.spread(torch.stack(losses_of).mean(dim=1)), [None], kept)

    def _work_stacked(
        self, task: LocalTask, stacked: tuple[Tensor, Tensor], chunk: slice, places: Sequence[int]
    ) -> TrainedChunk:
        begin = time.perf_counter()
        bank, some = task.bank, self._make_chunk(task, stacked, chunk, places)
        looked = self._look_stacked(task, some)
        choices = [task.choose(*client) for client in zip(some.positions, looked.means, looked.samples, strict=True)]
        chosen = torch.tensor([choice.cluster for choice in choices], device=bank.device)
        begun = None
        if looked.passes and all(choice.points is None for choice in choices):
            begun = _chosen_pass(looked.passes, chosen)
        looked_s = self._share_of(begin)
        rows = chosen * bank.shape[1] + (0 if task.shared else torch.tensor(places, device=bank.device))
        models = bank.view(-1, bank.shape[2])
        vectors = models.index_select(0, rows) if not task.in_place else None
        if begun is not None and not task.shared and self._spans(task.data):
            products = None if task.data.products is None else task.data.products[some.pick]
            samples = Samples(some.x, some.y, task.data.largest[list(places)], products)
            if vectors is not None:
                models, rows = vectors, torch.arange(len(rows), device=bank.device)
            fine = local_steps_in_place_(self.model, models, rows, samples, some.local.options, begun, some.order)
            return TrainedChunk(some.positions, choices, looked.means, looked_s, fine, vectors)
        if vectors is None:
            vectors = models.index_select(0, rows)
        self._train_stacked_(vectors, some.local, choices, some.ids, begun)
        fine = finite(vectors)
        for i, choice in enumerate(choices):
            if not fine[i] and choice.points is not None:
                # A point that weighs 0 makes NaN where the model is infinite on it: steps without it decide.
                vectors[i] = models[rows[i]]
                local = some.local._replace(x=some.local.x[i], y=some.local.y[i], rounds=some.local.rounds[i : i + 1])
                self._train_alone_(vectors[i], local, choice, some.ids[i])
                fine[i] = finite(vectors[i : i + 1])[0]
        return TrainedChunk(some.positions, choices, looked.means, looked_s, fine, vectors)

    def _make_chunk(
        self, task: LocalTask, stacked: tuple[Tensor, Tensor], chunk: slice, places: Sequence[int]
    ) -> _Chunk:
        pick, ids = _rows(places, task.bank.device), [task.first + place for place in places]
        positions = range(chunk.start, chunk.stop)
        rounds = task.rounds(positions)
        local = LocalRound(stacked[0][pick], stacked[1][pick], self.local.at(rounds[0]), rounds)
        models = task.bank if task.shared else task.bank[:, pick]
        some = _Chunk(positions, places, ids, pick, local, models, local.x, local.y)
        samples = local.y.shape[1]
        if self.model.dense is None or self.local.batch_of(samples) is None:
            return some._replace(reusable=self.model.dense is not None and self.local.written_out)
        if task.known is not None or task.shared or not self._spans(task.data):
            return some._replace(reusable=False)
        batches = self._stacked_draws(local, ids).batches
        assert batches is not None
        order = BatchOrder.of(batches.to(local.y.device), samples, rest=task.needs == "losses")
        return some._replace(x=order.take(local.x), y=order.take(local.y), order=order)

    def _look_stacked(self, task: LocalTask, some: _Chunk) -> _Losses:
        """Compute the losses of the models of a chunk of clients, and keep the passes where training can use them."""
        positions, models, x, y = some.positions, some.models, some.x, some.y
        nothing: list[Tensor | None] = [None] * len(x)
        if task.known is not None:
            return _Losses(task.known[positions.start : positions.stop], nothing, {})
        if task.needs == "nothing":
            only = len(models) == 1 and some.reusable
            passes = {0: forward(self.model, models[0].expand(len(x), -1), x, look=False)} if only else {}
            return _Losses(torch.zeros(len(x), len(models)), nothing, passes)
        if task.needs == "losses" and some.reusable:
            passes = {j: forward(self.model, models[j].expand(len(x), -1), x) for j in task.open}
            losses = _losses_of(self.model.task.loss, [known.outputs for known in passes.values()], y)
            return _Losses(task.spread(losses.mean(dim=2)), nothing, passes)
        with torch.no_grad():
            losses = self._stacked_losses(models[task.open] if task.closed else models, x, y)
        return _Losses(task.spread(losses.mean(dim=2)), list(losses) if task.needs == "samples" else nothing, {})

    def passes(self, sizes: Sequence[int]) -> float:
        """Count what the local steps of a round cost in forward passes of one sample; sizes: samples of each client.

        The same on every rank.
        """
        model, samples = self.model, sizes[0]
        if model.dense is not None and len(set(sizes)) == 1:
            known, steps_in = products_fit(len(sizes), samples, model.dtype), span(model, samples, self.local)
            if steps_in is not None and steps_in.pays(known):
                return len(sizes) * steps_in.cost(known) / model.size
        looked_at = sum(self.local.steps_of(size) * (self.local.batch_of(size) or size) for size in sizes)
        return (2 if model.dense is not None else 3) * looked_at

    def _spans(self, data: ClientData) -> bool:
        """Return whether steps in the span of the samples pay; their inner products are only computed if they do."""
        samples = data.sizes[0]
        if not spans(self.model, samples, self.local, known=True):
            return False
        return spans(self.model, samples, self.local, known=data.products is not None)

    def finetuned(self, vectors: Tensor, data: ClientData, steps: int, clients: Sequence[int]) -> Tensor:
        """Take plain steps on all samples of some clients: (C, P) -> (C, P)."""
        options = plain(self.local, steps)
        return self._after_training(vectors, data, lambda samples: [options], clients)

    def warmed_up(self, vectors: Tensor, data: ClientData, how: ElectionOptions, first: int) -> Tensor:
        """Warm up for an election, every client from the one with the id `first` on: (C, P) -> (C, P)."""
        stages = how.warmup(self.local)
        return self._after_training(vectors, data, lambda samples: stages, range(first, first + len(vectors)))

    def personalised(self, vectors: Tensor, data: ClientData, how: FineTuning, clients: Sequence[int]) -> Tensor:
        """Fine-tune the models that some clients deploy on all their samples: (C, P) -> (C, P)."""
        return self._after_training(vectors, data, lambda samples: how.stages(self.local, samples), clients)

    def personal_steps(self, vectors: Tensor, data: ClientData, steps: int, clients: Sequence[int]) -> Tensor:
        """Take plain steps on all samples of some clients, for the personal last step: (C, P) -> (C, P)."""
        options = plain(self.local, steps)
        return self._after_training(vectors, data, lambda samples: [options], clients, self._personal_products(data))

    def deployed_losses(self, vectors: Tensor, data: ClientData) -> Tensor:
        """Compute the loss that one deployed model per client is judged by on its data: (C, P) -> (C,), in double
        precision."""
        return self.rated(partial(judge, self.model.task), vectors, data)

    def finetuning_passes(self, how: FineTuning, sizes: Sequence[int]) -> int:
        """Count what `personalised` costs in forward passes of one sample; sizes: samples of each client."""
        step = 2 if self.model.dense is not None else 3
        return step * how.epochs * sum(sizes)

    def _after_training(
        self,
        vectors: Tensor,
        data: ClientData,
        stages: Callable[[int], Sequence[LocalOptions]],
        clients: Sequence[int],
        products: Tensor | None = None,
    ) -> Tensor:
        """Train copies (C, P) in the stages for a number of samples; stage s has the random streams of round -1 - s.

        products (C, n, n): the inner products of the clients' samples, where they are known.
        """
        vectors = vectors.clone()
        stacked = data.stacked() if self.stacked else None
        if stacked is None:
            jobs = (
                partial(self._stages_alone_, vectors[i], data.of(i), stages, client) for i, client in enumerate(clients)
            )
            for _ in self._each(jobs):
                pass
            return vectors
        x, y = stacked
        for chunk in self._chunks(len(vectors), x, 1):
            some, names = vectors[chunk], clients[chunk]
            for stage, options in enumerate(stages(y.shape[1])):
                known = None if products is None else products[chunk]
                local = LocalRound(x[chunk], y[chunk], options, [-1 - stage] * len(some), known)
                self._train_stacked_(some, local, [Choice(0)] * len(some), names)
        return vectors

    def _personal_products(self, data: ClientData) -> Tensor | None:
        """Compute the inner products of samples where many plain steps on them pay in their span; they are kept.

        Whatever was computed before, the answer is the same: a run that is continued gives the same bits.
        """
        stacked = self.stacked and data.stacked() is not None
        return data.products if stacked and spans(self.model, data.sizes[0], plain(self.local, GRID[-1])) else None

    def _stages_alone_(
        self,
        vector: Tensor,
        samples: tuple[Inputs, Tensor],
        stages: Callable[[int], Sequence[LocalOptions]],
        client: int,
    ) -> None:
        for stage, options in enumerate(stages(len(samples[1]))):
            self._train_alone_(vector, LocalRound(*samples, options, [-1 - stage]), Choice(0), client)

    def _train_alone_(
        self, vector: Tensor, local: LocalRound, choice: Choice, client: int, begun: Forward | None = None
    ) -> None:
        """Train one client's model in place: vector (P,)."""
        x, y, options, (round,), products, read = local
        if choice.points is not None:
            x, y, products = x[choice.points], y[choice.points], None
        batches, changes = draw_steps(len(y), options, self.seed, client, round)
        state = self.kept.before(client, choice.cluster, round) if options.keeps_state else None
        later = later_epochs(read, x, choice.points, options)
        data = TrainingSet(x, y, batches, products=products, changes=changes, state=state, later=later)
        with seeded(self.seed, "noise", client, round) if self.model.noisy else nullcontext():
            local_steps_(self.model, vector, data, options, begun)
        if state is not None and bool(vector.isfinite().all()):
            self.kept.after(client, choice.cluster, round, state)

    def _train_stacked_(
        self,
        vectors: Tensor,
        local: LocalRound,
        choices: Sequence[Choice],
        clients: Sequence[int],
        begun: Forward | None = None,
    ) -> None:
        """Train C models in place at once: vectors (C, P), on x (C, n, *shape), y (C, n)."""
        shares = _shares([choice.points for choice in choices], local.y, vectors.dtype)
        batches, changes = self._stacked_draws(local, clients)
        data = TrainingSet(local.x, local.y, batches, shares, local.products, changes=changes)
        self.stacked_steps_(vectors, data, local.options, begun)

    def stacked_steps_(
        self, vectors: Tensor, data: TrainingSet, options: LocalOptions, begun: Forward | None = None
    ) -> None:
        """Take local steps of C models in place at once: vectors (C, P)."""
        if self.model.dense is not None and options.written_out:
            local_steps_(self.model, vectors, data, options, begun)
        else:
            self._vmapped_steps_(vectors, data, options)

    def _stacked_draws(self, local: LocalRound, clients: Sequence[int]) -> Drawn:
        """Draw what the steps of C clients use."""
        samples, pairs = local.y.shape[1], zip(clients, local.rounds, strict=True)
        drawn = [draw_steps(samples, local.options, self.seed, client, round) for client, round in pairs]
        return Drawn.stacked(drawn, local.y.device)

    def scores(self, deployed: Callable[[Sequence[int]], Tensor], data: ClientData) -> Tensor:
        """Score one deployed model per client on its data, (N,); `deployed` gathers the vectors (C, P) of some."""
        clients, stacked = len(data.sizes), data.stacked() if self.stacked else None
        if stacked is None:
            jobs = (lambda i=i: score(self.model, deployed([i])[0], *data.of(i)) for i in range(clients))
            return torch.stack(list(self._each(jobs)))
        outputs, metric = self._stacked_outputs, self.model.task.metric
        with torch.no_grad():
            scores = [
                metric.score(outputs(deployed(range(clients)[chunk]), stacked[0][chunk]), stacked[1][chunk])
                for chunk in self._chunks(clients, stacked[0], 1)
            ]
        return torch.cat(scores)

    def rated(self, rate: Callable[[Tensor, Tensor], Tensor], vectors: Tensor, data: ClientData) -> Tensor:
        """Rate one model per client on its data: (C, P) -> (C,); rate: outputs (C, n, ...), targets (C, n, ...)."""
        stacked = data.stacked() if self.stacked else None
        if stacked is None:
            return torch.stack(self._rated_alone(rate, vectors, data))
        x, y = stacked
        with torch.no_grad():
            chunks = self._chunks(len(vectors), x, 1)
            return torch.cat([rate(self._stacked_outputs(vectors[c], x[c]), y[c]) for c in chunks])

    def rated_each(self, rate: Callable[[Tensor, Tensor], Tensor], vectors: Tensor, data: ClientData) -> list[Tensor]:
        """Rate one model per client on every sample of its data: C tensors (n_i,); rate: as that of `rated`, but for
        every sample."""
        if self.stacked and data.stacked() is not None:
            return list(self.rated(rate, vectors, data).cpu())
        return [ratings.cpu() for ratings in self._rated_alone(rate, vectors, data)]

    def _rated_alone(self, rate: Callable[[Tensor, Tensor], Tensor], vectors: Tensor, data: ClientData) -> list[Tensor]:
        @torch.no_grad()
        def rate_one(i: int) -> Tensor:
            x, y = data.of(i)
            return rate(infer(self.model, vectors[i], x, "score")[None], y[None])[0]

        return list(self._each(partial(rate_one, i) for i in range(len(vectors))))

    def score_on(
        self,
        bank: Tensor,
        held_out: tuple[Inputs, Tensor],
        test: tuple[Inputs, Tensor],
        closed: Tensor | None = None,
    ) -> Tensor:
        """Score each client's bank on one distribution: the lowest loss on `held_out` picks, `test` scores: (C,).

        closed (m, C) bool: models that are not picked.
        """
        (models, clients, _), task, (x, y), (test_x, test_y) = bank.shape, self.model.task, held_out, test
        scores = []
        for chunk in self._chunks(clients, tensors_of(x)[0][None], models):
            part = bank[:, chunk]
            targets = y.expand(part.shape[1], *y.shape)
            by_model = (_losses_of(task.loss, [self._outputs_on(vectors, x)], targets)[:, 0] for vectors in part)
            losses = torch.stack([values.cpu().double().mean(dim=1) for values in by_model])
            if closed is not None:
                losses[closed[:, chunk]] = math.inf
            picked = torch.tensor([lowest(column) for column in losses.T], device=bank.device)
            chosen = part[picked, torch.arange(part.shape[1], device=bank.device)]
            scores.append(
                task.metric.score(self._outputs_on(chosen, test_x), test_y.expand(len(chosen), *test_y.shape))
            )
        return torch.cat(scores)

    def _outputs_on(self, vectors: Tensor, x: Inputs) -> Tensor:
        """Run deployed models (C, P) on one set of samples (n, *shape): (C, n, outputs)."""
        with torch.no_grad():
            if self.stacked and isinstance(x, Tensor):
                return self._stacked_outputs(vectors, x.expand(len(vectors), *x.shape))
            jobs = (partial(infer, self.model, vector, x, "score") for vector in vectors)
            return torch.stack(list(self._each(jobs)))

    def _stacked_outputs(self, vectors: Tensor, x: Tensor) -> Tensor:
        """Run C deployed models: vectors (C, P), x (C, n, *shape) -> (C, n, outputs)."""
        if self.model.dense is not None:
            return infer(self.model, vectors, x, "score")
        return vmap(lambda vector, x: infer(self.model, vector, x, "score"))(vectors, x)

    def _vmapped_steps_(self, vectors: Tensor, data: TrainingSet, options: LocalOptions) -> None:
        """Train C models of any stackable kind in place."""
        model, task, (x, y, indices, shares, _, weights, frozen, changes, *_) = self.model, self.model.task, data
        assert isinstance(x, Tensor)
        if weights is not None and indices is None:
            shares = weights / y.shape[1]

        def objective(theta: list[Tensor], rest: list[Tensor], x: Tensor, y: Tensor, share: Tensor | None) -> Tensor:
            with autocast(options, x.device):
                outputs = model.run([*theta, *rest], x, "train").to(vectors.dtype)
            if share is None:
                return task.mean_loss(outputs, y)
            return (task.loss(outputs, y) * share).sum()

        gradients = vmap(grad(objective), in_dims=(0, 0, 0, 0, None if shares is None and weights is None else 0))
        pieces = model.pieces(vectors)
        theta, rest = pieces[: model.count], pieces[model.count :]
        moving = [place for place in range(model.count) if place not in frozen]
        rows = torch.arange(len(vectors), device=vectors.device)[:, None]
        decays = weight_decays(model, options)
        take_step_ = make_stepper([theta[p] for p in moving], options, [decays[p] for p in moving], stacked=True)
        for step in range(options.steps_of(y.shape[1])):
            x_step, y_step = x, y
            if indices is not None:
                batch = batch_at(indices, step, x.device)
                x_step, y_step = x[rows, batch], y[rows, batch]
                shares = shares if weights is None else weights[rows, batch] / batch.shape[1]
            if options.augment is not None and changes is not None:
                x_step = augmented(x_step, changes[:, step], options.augment)
            slopes = gradients(theta, rest, x_step, y_step, shares)
            take_step_([slopes[p] for p in moving])

    def _share_of(self, begin: float) -> float:
        """Return the seconds since then, less where this thread is one of several at work."""
        return (time.perf_counter() - begin) * torch.get_num_threads() / self.workers

    def _each(self, jobs: Iterable[Callable[[], T]], together: bool = False) -> Iterator[T]:
        """Carry out jobs and yield what they return, in their order; together or by `threads`, on one core each."""
        return cores.each(jobs, self.workers if together or self.how == "threads" else 1)

    def _chunks(self, clients: int, x: Tensor, models: int) -> list[slice]:
        """Cut clients into chunks whose parameters and activations stay within CHUNK_BYTES."""
        samples = x.shape[1] if x.dim() > 1 else 1
        width = x[0, 0].numel() + self.model.size // max(1, x[0, 0].numel())
        client_bytes = x.element_size() * models * (2 * self.model.size + samples * width)
        return slices(clients, max(1, min(clients, CHUNK_BYTES // client_bytes)))


def later_epochs(
    read: LaterEpochs | None, x: Tensor, points: Tensor | None, options: LocalOptions
) -> LaterEpochs | None:
    """Return what gives the samples of the epochs after the first, None where they are x in all of them: what does not
    change is trained on as if it were read once, to the same bits."""
    if read is None:
        return None

    def pick(epoch: int) -> Tensor:
        samples = read(epoch)
        return samples if points is None else samples[points]

    for known in range(1, options.epochs or 1):
        if not torch.equal(again := pick(known), x):
            return lambda epoch: again if epoch == known else pick(epoch)
    return None


def slices(count: int, size: int) -> list[slice]:
    """Cut things into runs of that size; the last may be shorter."""
    return [slice(begin, min(count, begin + size)) for begin in range(0, count, size)]


def make_engine(
    name: EngineName, model: FlatModel, local: LocalOptions, seed: int, data: ClientData, device: str
) -> Engine:
    """Pick how local work runs for this model, data and device.

    Raises ConfigError for a forced engine that cannot run the model or the data.
    """
    own = None if isinstance(local.optimizer, str) else "an optimiser of your own may not treat numbers one by one"
    own = "every client keeps the state of its optimiser" if local.keeps_state else own
    if name == "stacked" and (reason := own or why_not_stacked(model, data)):
        raise ConfigError(f'engine "stacked" cannot run this: {reason}; use engine "auto" or "loop"')
    if name == "threads" and (reason := why_not_threads(model, device, data)):
        raise ConfigError(f'engine "threads" cannot run this: {reason}; use engine "auto" or "loop"')
    if name != "auto":
        return Engine(model, local, seed, name)
    samples = min(data.sizes[0], local.batch_size or data.sizes[0])
    pays = model.dense is not None or samples * model.size < STACKED_WORK or device != "cpu"
    if pays and own is None and why_not_stacked(model, data) is None:
        return Engine(model, local, seed, "stacked")
    if torch.get_num_threads() > 1 and why_not_threads(model, device, data) is None:
        return Engine(model, local, seed, "threads")
    return Engine(model, local, seed, "loop")


def why_not_threads(model: FlatModel, device: str, data: ClientData | None = None) -> str | None:
    """Return why clients cannot be trained in several threads, or None if they can."""
    if device != "cpu":
        return f'threads are for device "cpu", not "{device}"'
    if model.noisy:
        return "its training may draw random numbers (dropout, or layers that dfca does not know)"
    if data is not None and isinstance(data.x, Lazy):
        return "samples are read when they are used, and may draw random numbers"
    return None


def why_not_stacked(model: FlatModel, data: ClientData) -> str | None:
    """Return why clients cannot be stacked into one call, or None if they can."""
    for layer in model.layers:
        if not isinstance(layer, _STACKABLE):
            return f"{type(layer).__name__} does not batch over clients"
    stacked = data.stacked()
    if isinstance(data.x, Lazy):
        return "samples are read when they are used"
    if not isinstance(data.x, Tensor):
        return "samples of several tensors do not stack"
    if stacked is None:
        return f"clients hold {min(data.sizes)} to {max(data.sizes)} samples, and only equal numbers stack"
    if model.dense is not None:
        return None
    x, y = (tensor[:1, :2].expand(2, *tensor[0, :2].shape) for tensor in stacked)
    vectors = torch.zeros(2, model.size, dtype=model.dtype, device=x.device)
    probe = Engine(model, LocalOptions(steps=1), 0, "stacked")
    try:
        probe._vmapped_steps_(vectors, TrainingSet(x, y), probe.local)
    except (RuntimeError, ValueError, TypeError, IndexError, DfcaError) as error:
        # A forward or a loss that looks at its numbers, or draws some.
        return f"its forward cannot run for many clients at once ({str(error).splitlines()[0]})"
    return None


def _shares(points: Sequence[Tensor | None], y: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Weigh samples so that their weighted sum is the mean over a client's points: (C, n), or None for all samples."""
    if all(mask is None for mask in points):
        return None
    whole = torch.ones(y.shape[1], dtype=torch.bool, device=y.device)
    masks = torch.stack([whole if m is None else m for m in points])
    return masks.to(dtype) / masks.sum(dim=1, keepdim=True)


def finite(vectors: Tensor) -> list[bool]:
    """Return which vectors (C, P) hold finite numbers only: a finite sum says so, any other is looked at again."""
    sums = torch.isfinite(vectors.sum(dim=1)).tolist()
    return [fine or bool(torch.isfinite(vector).all()) for fine, vector in zip(sums, vectors, strict=True)]


def _losses_of(loss: Loss, outputs: Sequence[Tensor], y: Tensor) -> Tensor:
    """Compute the losses of m models of C clients: outputs m x (C, n, ...), y (C, n, ...) -> (C, m, n)."""
    targets = y.flatten(0, 1)
    return torch.stack([loss(values.flatten(0, 1), targets).view(y.shape[:2]) for values in outputs], dim=1)


def _chosen_pass(passes: Mapping[int, Forward], chosen: Tensor) -> Forward:
    """Put together the forward passes of what C clients chose, from those by cluster; uses them up."""
    if bool((chosen == chosen[0]).all()):
        return passes[int(chosen[0])]
    (_, first), *others = passes.items()
    merged = list(first.tensors)
    for j, passed in others:
        mine = (chosen == j).nonzero()[:, 0]
        if len(mine):
            for layer, tensor in enumerate(passed.tensors):
                merged[layer][mine] = tensor[mine]
    return Forward(merged[0][:0], merged)


def _rows(places: Sequence[int], device: torch.device) -> slice | Tensor:
    """Index some rows: by a slice, which gives a view, where they follow one another."""
    if places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places, device=device)
