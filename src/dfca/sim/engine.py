"""How local work is executed: many clients in one call (`stacked`), one after the other (`loop`), or several of them at
the same time on one core each (`threads`).

All compute what `core.local` defines; a test says so. Stacked calls pay off where a client's own tensors are too small
to keep the machine busy. A loop keeps them in cache, serves models whose layers do not batch well (grouped convolution)
or that draw random numbers while training (dropout), and clients with unequal numbers of samples. Threads do the same
where there are several cores, for operations scale worse over cores than clients do.

The choice depends on the model, the data, the device and the number of threads alone, never on a clock: the same run
gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from dfca.core.algorithm import Choice
from dfca.core.dense import BatchOrder
from dfca.core.local import (
    Forward,
    LocalOptions,
    Samples,
    TrainingSet,
    descend_,
    draw_batches,
    forward,
    hits,
    infer,
    local_steps_,
    local_steps_in_place_,
    lowest,
    sample_losses,
    span,
    spans,
)
from dfca.core.params import FlatModel
from dfca.core.rng import seeded, stream
from dfca.data.clients import ClientData, products_fit
from dfca.errors import ConfigError
from dfca.sim import cores

EngineName = Literal["auto", "stacked", "loop", "threads"]
ENGINES: tuple[EngineName, ...] = ("auto", "stacked", "loop", "threads")

STACKED_WORK = 2e7
"""Below this many multiplications per step and client (samples x P) stacking by `vmap` beats a loop. Networks of linear
layers, which need no `vmap`, are faster stacked at any size (784-200-10 and 784-2048-10, 20 to 1,000 samples)."""
CHUNK_BYTES = 64 * 2**20
"""Parameters and activations of one stacked call: small enough to stay near the cache, large enough to batch."""
ALONE_FROM = 16
"""A stacked call of so many clients keeps all cores busy. Smaller calls, of larger models, go on at the same time on
one core each, which takes 0.83 to 0.92 of the time (784-400-10 to 784-2048-10, 300 to 1,000 samples, 2 cores)."""
CORE_CHUNKS = 4
"""By how much such calls are smaller than others, for a core has less cache: up to 1.15 times faster with 300 samples,
no slower with 1,000. Not with mini-batches, which are small: there as large calls take 0.8 of the time (2048 units)."""

_STACKABLE = (nn.Linear, nn.Flatten, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.LayerNorm, nn.Identity)

Needs = Literal["losses", "samples", "nothing"]
T = TypeVar("T")
Chooser = Callable[[int, Tensor, Tensor | None], Choice]
"""Chooses what a client trains: (position, mean losses (m,), losses per sample (m, n) or None) -> Choice."""


class Task(NamedTuple):
    """What the clients of a round are to do: each chooses a model and trains it.

    bank (m, C, P), or (m, 1, P) where all clients share one; data: the samples of the C clients, the first of which has
    the id `first`; needs: what `choose` wants to see; known: mean losses, a row (m,) for every client that takes part,
    where they were computed before; in_place: what is trained may be written to the bank at once.
    """

    bank: Tensor
    data: ClientData
    choose: Chooser
    round: int
    needs: Needs = "losses"
    known: Tensor | None = None
    first: int = 0
    in_place: bool = False

    @property
    def shared(self) -> bool:
        """Return whether all clients have one bank."""
        return self.bank.shape[1] == 1


class TrainedChunk(NamedTuple):
    """What some clients of a round have done: their positions, what they chose by which losses (C, m), and in how many
    seconds; whose model is finite, and the trained models (C, P), or None where the finite ones are in the bank
    already."""

    positions: Sequence[int]
    choices: Sequence[Choice]
    losses: Tensor
    looked_s: float
    fine: Sequence[bool]
    vectors: Tensor | None


class LocalRound(NamedTuple):
    """What local steps are taken on: samples x, y of one client or stacked of several, how, and in which round (-1:
    after the last)."""

    x: Tensor
    y: Tensor
    options: LocalOptions
    round: int = -1


class _Chunk(NamedTuple):
    """The clients of one stacked call: positions among those that take part, places in the bank, ids; their samples and
    models (m, C, P) or (m, 1, P).

    order: of the samples x, y that a forward pass sees, where it is not their own. reusable: whether the first step can
    go on from that pass.
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
    forward passes that training can go on from, by cluster."""

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

    @property
    def stacked(self) -> bool:
        """Return whether clients are batched into one call."""
        return self.how == "stacked"

    def losses(self, bank: Tensor, data: ClientData, rows: Sequence[int] | None = None) -> Tensor:
        """Compute F_client of each model of each client on its data: (C, m)."""
        return torch.stack([each.mean(dim=1) for each in self.sample_losses(bank, data, rows)])

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
            found = [
                self._stacked_losses(self._part(bank, rows, chunk), stacked[0][chunk], stacked[1][chunk])
                for chunk in self._chunks(clients, stacked[0], bank.shape[0])
            ]
        return list(torch.cat(found))

    @staticmethod
    def _part(bank: Tensor, rows: Sequence[int] | None, chunk: slice) -> Tensor:
        """Take the models of a chunk of clients: (m, C, P), or (m, 1, P) where they share one bank."""
        if bank.shape[1] == 1:
            return bank
        return bank[:, chunk] if rows is None else bank[:, list(rows[chunk])]

    def _stacked_losses(self, bank: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Compute the losses of each model of C clients: bank (m, C, P) or (m, 1, P), x (C, n, *shape) -> (C, m, n)."""
        if self.model.dense is not None:
            return _losses_of([infer(self.model, models.expand(len(x), -1), x, "objective") for models in bank], y)

        def one_model(vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(infer(self.model, vector, x, "objective"), y, reduction="none")

        each_model, shared = vmap(one_model, in_dims=(0, None, None)), bank.shape[1] == 1
        each_client = vmap(each_model, in_dims=(None if shared else 1, 0, 0))
        return each_client(bank[:, 0] if shared else bank, x, y)

    def work(self, task: Task, places: Sequence[int]) -> Iterator[TrainedChunk]:
        """Choose and train for some clients at a time; the forward pass that picks a model is the first step's too.

        places: the clients of the task that take part.
        """
        batched, stacked = self.local.batch_size is not None, task.data.stacked() if self.stacked else None
        if stacked is None or (batched and task.needs == "samples"):
            yield from self._each(partial(self._work_alone, task, *each) for each in enumerate(places))
            return
        chunks = self._chunks(len(places), stacked[0], 1)
        several = len(chunks) >= max(2, self.workers) and chunks[0].stop < ALONE_FROM
        together = several and why_not_threads(self.model, task.bank.device.type) is None
        if together:
            smaller = CORE_CHUNKS if self.local.batch_of(task.data.sizes[0]) is None else 1
            chunks = cores.even(len(places), self.workers * -(-smaller * len(chunks) // self.workers))
            self._spans(task.data)  # what is computed once is there before threads need it
        jobs = (partial(self._work_stacked, task, stacked, chunk, places[chunk]) for chunk in chunks)
        yield from self._each(jobs, together)

    def _work_alone(self, task: Task, position: int, place: int) -> TrainedChunk:
        begin = time.perf_counter()
        x, y = task.data.of(place)
        models = task.bank[:, 0 if task.shared else place]
        looked = self._look_alone(task, position, models, x, y)
        choice = task.choose(position, looked.means, looked.samples[0])
        looked_s = self._share_of(begin)
        begun = looked.passes.get(choice.cluster) if choice.points is None else None
        vector = models[choice.cluster].clone()
        self._train_alone_(vector, LocalRound(x, y, self.local, task.round), choice, task.first + place, begun)
        return TrainedChunk([position], [choice], looked.means[None], looked_s, finite(vector[None]), vector[None])

    def _look_alone(self, task: Task, position: int, models: Tensor, x: Tensor, y: Tensor) -> _Losses:
        """Compute the losses of models (m, P) -> (m,), and keep the pass of the lowest where training can use it."""
        model = self.model
        if task.known is not None:
            return _Losses(task.known[position], [None], {})
        if task.needs == "nothing":
            return _Losses(torch.zeros(len(models)), [None], {})
        if task.needs == "samples" or model.noisy or self.local.batch_size is not None or self.local.steps == 0:
            samples = sample_losses(model, models, x, y)
            return _Losses(samples.mean(dim=1), [samples if task.needs == "samples" else None], {})
        found: list[Tensor] = []
        best = float("inf")
        kept: dict[int, Forward] = {}
        for j, vector in enumerate(models):
            passed = forward(model, vector, x)
            found.append(cross_entropy(passed.outputs.detach(), y, reduction="none"))
            loss = float(found[-1].mean())
            if loss < best:
                best, kept = loss, {j: passed}
        return _Losses(torch.stack(found).mean(dim=1), [None], kept)

    def _work_stacked(
        self, task: Task, stacked: tuple[Tensor, Tensor], chunk: slice, places: Sequence[int]
    ) -> TrainedChunk:
        begin = time.perf_counter()
        bank, some = task.bank, self._make_chunk(task, stacked, chunk, places)
        looked = self._look_stacked(task, some)
        choices = [task.choose(*each) for each in zip(some.positions, looked.means, looked.samples, strict=True)]
        chosen = torch.tensor([choice.cluster for choice in choices], device=bank.device)
        begun = None
        if looked.passes and all(choice.points is None for choice in choices):
            begun = _chosen_pass(list(looked.passes.values()), chosen)
        looked_s = self._share_of(begin)
        rows = chosen * bank.shape[1] + (0 if task.shared else torch.tensor(places, device=bank.device))
        models = bank.view(-1, bank.shape[2])
        if task.in_place and begun is not None and self._spans(task.data):
            products = None if task.data.products is None else task.data.products[some.pick]
            samples = Samples(some.x, some.y, task.data.largest[list(places)], products)
            fine = local_steps_in_place_(self.model, models, rows, samples, self.local, begun, some.order)
            return TrainedChunk(some.positions, choices, looked.means, looked_s, fine, None)
        vectors = models.index_select(0, rows)
        self._train_stacked_(vectors, some.local, choices, some.ids, begun)
        fine = finite(vectors)
        for i, choice in enumerate(choices):
            if not fine[i] and choice.points is not None:
                # A point that weighs 0 makes NaN where the model is infinite on it: steps without it decide.
                vectors[i] = models[rows[i]]
                local = some.local._replace(x=some.local.x[i], y=some.local.y[i])
                self._train_alone_(vectors[i], local, choice, some.ids[i])
                fine[i] = finite(vectors[i : i + 1])[0]
        return TrainedChunk(some.positions, choices, looked.means, looked_s, fine, vectors)

    def _make_chunk(self, task: Task, stacked: tuple[Tensor, Tensor], chunk: slice, places: Sequence[int]) -> _Chunk:
        pick, ids = _rows(places, task.bank.device), [task.first + place for place in places]
        local = LocalRound(stacked[0][pick], stacked[1][pick], self.local, task.round)
        models = task.bank if task.shared else task.bank[:, pick]
        some = _Chunk(range(chunk.start, chunk.stop), places, ids, pick, local, models, local.x, local.y)
        samples = local.y.shape[1]
        if self.model.dense is None or self.local.batch_of(samples) is None:
            return some._replace(reusable=self.model.dense is not None)
        if task.known is not None or not task.in_place or not self._spans(task.data):
            return some._replace(reusable=False)
        batches = self._stacked_batches(local, ids)
        assert batches is not None
        order = BatchOrder.of(batches, samples, rest=task.needs == "losses")
        return some._replace(x=order.take(local.x), y=order.take(local.y), order=order)

    def _look_stacked(self, task: Task, some: _Chunk) -> _Losses:
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
            passes = {j: forward(self.model, each.expand(len(x), -1), x) for j, each in enumerate(models)}
            return _Losses(_losses_of([each.outputs for each in passes.values()], y).mean(dim=2), nothing, passes)
        with torch.no_grad():
            losses = self._stacked_losses(models, x, y)
        return _Losses(losses.mean(dim=2), list(losses) if task.needs == "samples" else nothing, {})

    def passes(self, sizes: Sequence[int]) -> float:
        """Count what the local steps of a round cost in forward passes of one sample, for clients with so many samples.

        The same on every rank.
        """
        model, steps, samples = self.model, self.local.steps, sizes[0]
        if model.dense is not None and len(set(sizes)) == 1:
            known, found = products_fit(len(sizes), samples, model.dtype), span(model, samples, self.local)
            if found is not None and found.pays(known):
                return len(sizes) * found.cost(known) / model.size
        looked_at = sum(self.local.batch_of(size) or size for size in sizes)
        return (2 if model.dense is not None else 3) * steps * looked_at

    def _spans(self, data: ClientData) -> bool:
        """Return whether steps in the span of the samples pay; their inner products are only computed if they do."""
        samples = data.sizes[0]
        if not spans(self.model, samples, self.local, known=True):
            return False
        return spans(self.model, samples, self.local, known=data.products is not None)

    def finetuned(self, vectors: Tensor, data: ClientData, steps: int, first: int = 0) -> Tensor:
        """Take plain steps on all samples of every client, from the one with the id `first` on: (C, P) -> (C, P)."""
        options, vectors = replace(self.local, steps=steps, batch_size=None, momentum=0.0), vectors.clone()
        stacked = data.stacked() if self.stacked else None
        if stacked is None:
            jobs = (
                partial(self._train_alone_, vector, LocalRound(*data.of(i), options), Choice(0), first + i)
                for i, vector in enumerate(vectors)
            )
            for _ in self._each(jobs):
                pass
            return vectors
        for chunk in self._chunks(len(vectors), stacked[0], 1):
            some, names = vectors[chunk], range(first + chunk.start, first + chunk.stop)
            local = LocalRound(stacked[0][chunk], stacked[1][chunk], options)
            self._train_stacked_(some, local, [Choice(0)] * len(some), names)
        return vectors

    def _train_alone_(
        self, vector: Tensor, local: LocalRound, choice: Choice, client: int, begun: Forward | None = None
    ) -> None:
        """Train one client's model in place: vector (P,)."""
        x, y, options, round = local
        if choice.points is not None:
            x, y = x[choice.points], y[choice.points]
        data = TrainingSet(x, y, self._batches(len(y), options, client, round))
        with seeded(self.seed, "noise", client, round) if self.model.noisy else nullcontext():
            local_steps_(self.model, vector, data, options, begun)

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
        data = TrainingSet(local.x, local.y, self._stacked_batches(local, clients), shares)
        if self.model.dense is not None:
            local_steps_(self.model, vectors, data, local.options, begun)
        else:
            self._vmapped_steps_(vectors, data, local.options)

    def _batches(self, samples: int, options: LocalOptions, client: int, round: int) -> Tensor | None:
        if options.batch_size is None:
            return None
        return draw_batches(samples, options, stream(self.seed, "batches", client, round))

    def _stacked_batches(self, local: LocalRound, clients: Sequence[int]) -> Tensor | None:
        """Draw the batches of C clients: (C, steps, b), or None for full batches."""
        samples = local.y.shape[1]
        drawn = [self._batches(samples, local.options, client, local.round) for client in clients]
        batches = [batch for batch in drawn if batch is not None]
        return torch.stack(batches).to(local.y.device) if batches else None

    def accuracy(self, deployed: Callable[[Sequence[int]], Tensor], data: ClientData) -> Tensor:
        """Score one deployed model per client on its data, (N,); `deployed` gathers the vectors (C, P) of some."""
        clients, stacked = len(data.sizes), data.stacked() if self.stacked else None
        if stacked is None:
            jobs = (
                lambda i=i: hits(self.model, deployed([i])[0], *data.of(i)).cpu().double().mean()
                for i in range(clients)
            )
            return torch.stack(list(self._each(jobs)))
        each = self._stacked_outputs
        with torch.no_grad():
            right = [
                each(deployed(range(clients)[chunk]), stacked[0][chunk]).argmax(dim=2) == stacked[1][chunk]
                for chunk in self._chunks(clients, stacked[0], 1)
            ]
        return torch.cat(right).cpu().double().mean(dim=1)

    def score_on(self, bank: Tensor, held_out: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Tensor:
        """Score each client's bank on one distribution: the lowest loss on `held_out` picks, `test` scores: (C,)."""
        models, clients, _ = bank.shape
        scores = []
        for chunk in self._chunks(clients, held_out[0][None], models):
            part = bank[:, chunk]
            losses = torch.stack([self._outcome(vectors, *held_out)[0] for vectors in part])
            picked = torch.tensor([lowest(column) for column in losses.T], device=bank.device)
            chosen = part[picked, torch.arange(part.shape[1], device=bank.device)]
            scores.append(self._outcome(chosen, *test)[1])
        return torch.cat(scores)

    def _outcome(self, vectors: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Run deployed models (C, P) on one set of samples (n, *shape): their mean losses and accuracies, (C,) each."""
        with torch.no_grad():
            if self.stacked:
                outputs = self._stacked_outputs(vectors, x.expand(len(vectors), *x.shape))
            else:
                jobs = (partial(infer, self.model, vector, x, "score") for vector in vectors)
                outputs = torch.stack(list(self._each(jobs)))
            losses = cross_entropy(outputs.transpose(1, 2), y.expand(len(vectors), -1), reduction="none")
            return losses.cpu().double().mean(dim=1), (outputs.argmax(dim=2) == y).cpu().double().mean(dim=1)

    def _stacked_outputs(self, vectors: Tensor, x: Tensor) -> Tensor:
        """Run C deployed models: vectors (C, P), x (C, n, *shape) -> (C, n, classes)."""
        if self.model.dense is not None:
            return infer(self.model, vectors, x, "score")
        return vmap(lambda vector, x: infer(self.model, vector, x, "score"))(vectors, x)

    def _vmapped_steps_(self, vectors: Tensor, data: TrainingSet, options: LocalOptions) -> None:
        """Train C models of any stackable kind in place."""
        model, (x, y, indices, shares) = self.model, data

        def objective(theta: list[Tensor], rest: list[Tensor], x: Tensor, y: Tensor, share: Tensor | None) -> Tensor:
            outputs = model.run([*theta, *rest], x, "train")
            if share is None:
                return cross_entropy(outputs, y)
            return (cross_entropy(outputs, y, reduction="none") * share).sum()

        gradients = vmap(grad(objective), in_dims=(0, 0, 0, 0, None if shares is None else 0))
        pieces, velocity = model.pieces(vectors), None
        theta, rest = pieces[: model.count], pieces[model.count :]
        rows = torch.arange(len(vectors), device=vectors.device)[:, None]
        for step in range(options.steps):
            x_step, y_step = (x, y) if indices is None else (x[rows, indices[:, step]], y[rows, indices[:, step]])
            velocity = descend_(theta, gradients(theta, rest, x_step, y_step, shares), velocity, options)

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
        each = x.element_size() * models * (2 * self.model.size + samples * width)
        size = max(1, min(clients, CHUNK_BYTES // each))
        return [slice(begin, min(clients, begin + size)) for begin in range(0, clients, size)]


def make_engine(
    name: EngineName, model: FlatModel, local: LocalOptions, seed: int, data: ClientData, device: str
) -> Engine:
    """Pick how local work runs for this model, data and device.

    Raises ConfigError for a forced engine that cannot run the model or the data.
    """
    if name == "stacked" and (reason := why_not_stacked(model, data)):
        raise ConfigError(f'engine "stacked" cannot run this: {reason}; use engine "auto" or "loop"')
    if name == "threads" and (reason := why_not_threads(model, device)):
        raise ConfigError(f'engine "threads" cannot run this: {reason}; use engine "auto" or "loop"')
    if name != "auto":
        return Engine(model, local, seed, name)
    samples = min(data.sizes[0], local.batch_size or data.sizes[0])
    pays = model.dense is not None or samples * model.size < STACKED_WORK or device != "cpu"
    if pays and why_not_stacked(model, data) is None:
        return Engine(model, local, seed, "stacked")
    if torch.get_num_threads() > 1 and why_not_threads(model, device) is None:
        return Engine(model, local, seed, "threads")
    return Engine(model, local, seed, "loop")


def why_not_threads(model: FlatModel, device: str) -> str | None:
    """Return why clients cannot be trained in several threads, or None if they can."""
    if device != "cpu":
        return f'threads are for device "cpu", not "{device}"'
    if model.noisy:
        return "its training may draw random numbers (dropout, or layers that dfca does not know)"
    return None


def why_not_stacked(model: FlatModel, data: ClientData) -> str | None:
    """Return why clients cannot be stacked into one call, or None if they can."""
    for layer in model.layers:
        if not isinstance(layer, _STACKABLE):
            return f"{type(layer).__name__} does not batch over clients"
    stacked = data.stacked()
    if stacked is None:
        return f"clients hold {min(data.sizes)} to {max(data.sizes)} samples, and only equal numbers stack"
    if model.dense is not None:
        return None
    x, y = (tensor[:1, :2].expand(2, *tensor[0, :2].shape) for tensor in stacked)
    vectors = torch.zeros(2, model.size, dtype=model.dtype, device=x.device)
    probe = Engine(model, LocalOptions(steps=1), 0, "stacked")
    try:
        probe._vmapped_steps_(vectors, TrainingSet(x, y), probe.local)
    except RuntimeError as error:  # a forward that looks at its numbers, or draws some
        return f"its forward cannot run for many clients at once ({str(error).splitlines()[0]})"
    return None


def _shares(points: Sequence[Tensor | None], y: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Weigh samples so that their weighted sum is the mean over a client's points: (C, n), or None for all samples."""
    if all(mask is None for mask in points):
        return None
    masks = torch.stack([torch.ones_like(y[0], dtype=torch.bool) if m is None else m for m in points])
    return masks.to(dtype) / masks.sum(dim=1, keepdim=True)


def finite(vectors: Tensor) -> list[bool]:
    """Return which vectors (C, P) hold finite numbers only: a finite sum says so, any other is looked at again."""
    sums = torch.isfinite(vectors.sum(dim=1)).tolist()
    return [fine or bool(torch.isfinite(vector).all()) for fine, vector in zip(sums, vectors, strict=True)]


def _losses_of(outputs: Sequence[Tensor], y: Tensor) -> Tensor:
    """Compute the losses of m models of C clients: outputs m x (C, n, classes), y (C, n) -> (C, m, n)."""
    found = [cross_entropy(each.flatten(0, 1), y.flatten(), reduction="none").view(y.shape) for each in outputs]
    return torch.stack(found, dim=1)


def _chosen_pass(passes: Sequence[Forward], chosen: Tensor) -> Forward:
    """Put together the forward passes of what C clients chose, from those of all models; uses them up."""
    if bool((chosen == chosen[0]).all()):
        return passes[int(chosen[0])]
    merged = list(passes[0].tensors)
    for j in range(1, len(passes)):
        mine = (chosen == j).nonzero()[:, 0]
        if len(mine):
            for layer, tensor in enumerate(passes[j].tensors):
                merged[layer][mine] = tensor[mine]
    return Forward(merged[0][:0], merged)


def _rows(places: Sequence[int], device: torch.device) -> slice | Tensor:
    """Index some rows: by a slice, which gives a view, where they follow one another."""
    if places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places, device=device)
