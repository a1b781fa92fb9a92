"""How local work is executed: many clients in one call (`stacked`) or one after the other (`loop`).

Both compute what `core.local` defines; a test says so. Stacked calls pay off where a client's own tensors are too small
to keep the machine busy; a loop keeps them in cache, and is the only way for models whose layers do not batch well
(grouped convolution), that draw random numbers while training (dropout), or whose clients hold unequal numbers of
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from dfca.core.algorithm import Choice
from dfca.core.local import LocalOptions, descend_, draw_batches, hits, infer, local_steps, lowest, sample_losses
from dfca.core.params import FlatModel
from dfca.core.rng import seeded, stream
from dfca.data.clients import ClientData
from dfca.errors import ConfigError

EngineName = Literal["auto", "stacked", "loop"]
ENGINES: tuple[EngineName, ...] = ("auto", "stacked", "loop")

STACKED_WORK = 2e7
"""Below this many multiplications per step and client (samples x P) stacking beats a loop; see `choose_engine`."""
CHUNK_BYTES = 64 * 2**20
"""Parameters and activations of one stacked call: small enough to stay near the cache, large enough to batch."""

_STACKABLE = (nn.Linear, nn.Flatten, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.LayerNorm, nn.Identity)


class Engine:
    """Runs losses and local steps for many clients.

    models are given as `bank` (m, C, P) for C clients, or (m, 1, P) where all clients share one bank.
    """

    def __init__(self, model: FlatModel, local: LocalOptions, seed: int, stacked: bool) -> None:
        self.model, self.local, self.seed, self.stacked = model, local, seed, stacked

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
            return [sample_losses(self.model, bank[:, places[i]], *data.of(i)) for i in range(clients)]

        def one_model(vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(infer(self.model, vector, x, "objective"), y, reduction="none")

        def part(chunk: slice) -> Tensor:
            if shared:
                return bank[:, 0]
            return bank[:, chunk] if rows is None else bank[:, list(rows[chunk])]

        each_model = vmap(one_model, in_dims=(0, None, None))
        each_client = vmap(each_model, in_dims=(None if shared else 1, 0, 0))
        with torch.no_grad():
            found = [
                each_client(part(chunk), stacked[0][chunk], stacked[1][chunk])
                for chunk in self._chunks(clients, stacked[0], bank.shape[0])
            ]
        return list(torch.cat(found))

    def train(
        self,
        clients: Sequence[int],
        start: Callable[[Sequence[int]], Tensor],
        choices: Sequence[Choice],
        data: ClientData,
        round: int,
        local: LocalOptions | None = None,
        first: int = 0,
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Take every client's local steps, a chunk of clients at a time.

        `start` gathers the vectors (C, P) of a chunk, given as positions in `clients`; `choices` are aligned with
        `clients`, which counts from the client with the id `first`. Yields (positions, trained vectors (C, P)).
        """
        options = local or self.local
        batches = [
            draw_batches(
                self._samples(client, choice, data), options, stream(self.seed, "batches", first + client, round)
            )
            for client, choice in zip(clients, choices, strict=True)
        ]
        if not self._can_stack(data, choices, batches):
            for position, (client, choice) in enumerate(zip(clients, choices, strict=True)):
                x, y = data.of(client)
                if choice.points is not None:
                    x, y = x[choice.points], y[choice.points]
                with seeded(self.seed, "noise", first + client, round):
                    trained = local_steps(self.model, start([position])[0], x, y, options, batches[position])
                yield [position], trained[None]
            return
        stacked = data.stacked()
        assert stacked is not None
        for chunk in self._chunks(len(clients), stacked[0], 1):
            positions = range(chunk.start, chunk.stop)
            rows = torch.tensor([clients[position] for position in positions], device=stacked[0].device)
            whole = len(rows) == int(rows[-1]) - int(rows[0]) + 1  # consecutive: a view instead of a copy
            pick = slice(int(rows[0]), int(rows[-1]) + 1) if whole else rows
            shares = _shares([choices[position].points for position in positions], stacked[1][pick], self.model.dtype)
            drawn = [batches[position] for position in positions]
            indices = None if drawn[0] is None else torch.stack([b for b in drawn if b is not None]).to(rows.device)
            vectors = start(positions)
            yield positions, self._train_stacked(vectors, stacked[0][pick], stacked[1][pick], shares, indices, options)

    def accuracy(self, deployed: Callable[[Sequence[int]], Tensor], data: ClientData) -> Tensor:
        """Score one deployed model per client on its data, (N,); `deployed` gathers the vectors (C, P) of some."""
        clients, stacked = len(data.sizes), data.stacked() if self.stacked else None
        if stacked is None:
            return torch.stack(
                [hits(self.model, deployed([i])[0], *data.of(i)).cpu().double().mean() for i in range(clients)]
            )
        each = vmap(lambda vector, x: infer(self.model, vector, x, "score"))
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
            outputs = self._apply(part.reshape(-1, part.shape[2]), held_out[0])
            losses = torch.stack([cross_entropy(each, held_out[1]) for each in outputs]).view(models, -1)
            picked = torch.tensor([lowest(column) for column in losses.T], device=bank.device)
            chosen = part[picked, torch.arange(part.shape[1], device=bank.device)]
            scores += [(each.argmax(dim=1) == test[1]).cpu().double().mean() for each in self._apply(chosen, test[0])]
        return torch.stack(scores)

    def _apply(self, vectors: Tensor, x: Tensor) -> Iterator[Tensor]:
        """Run many deployed models (V, P) on one set of samples (n, *shape): V tensors (n, classes)."""
        with torch.no_grad():
            if not self.stacked:
                for vector in vectors:
                    yield infer(self.model, vector, x, "score")
                return
            each = vmap(lambda vector: infer(self.model, vector, x, "score"))
            for chunk in self._chunks(len(vectors), x[None], 1):
                yield from each(vectors[chunk])

    def _train_stacked(
        self,
        vectors: Tensor,
        x: Tensor,
        y: Tensor,
        shares: Tensor | None,
        indices: Tensor | None,
        options: LocalOptions,
    ) -> Tensor:
        """Train C models at once: vectors (C, P), x (C, n, *shape), shares (C, n) weights of the samples or None."""
        model, rest = self.model, vectors[:, self.model.trained :]

        def objective(theta: Tensor, rest: Tensor, x: Tensor, y: Tensor, share: Tensor | None) -> Tensor:
            outputs = model.forward(theta, rest, x, "train")
            if share is None:
                return cross_entropy(outputs, y)
            return (cross_entropy(outputs, y, reduction="none") * share).sum()

        gradients = vmap(grad(objective), in_dims=(0, 0, 0, 0, None if shares is None else 0))
        vectors = vectors.clone()
        theta, velocity = vectors[:, : model.trained], None
        rows = torch.arange(len(vectors), device=vectors.device)[:, None]
        for step in range(options.steps):
            x_step, y_step = (x, y) if indices is None else (x[rows, indices[:, step]], y[rows, indices[:, step]])
            velocity = descend_(theta, gradients(theta, rest, x_step, y_step, shares), velocity, options)
        return vectors

    def _can_stack(self, data: ClientData, choices: Sequence[Choice], batches: Sequence[Tensor | None]) -> bool:
        if not self.stacked or data.stacked() is None or not choices:
            return False
        whole = all(choice.points is None for choice in choices)
        full = all(batch is None for batch in batches)
        return (whole and len({None if b is None else b.shape for b in batches}) == 1) or full

    def _samples(self, client: int, choice: Choice, data: ClientData) -> int:
        return data.sizes[client] if choice.points is None else int(choice.points.sum())

    def _chunks(self, clients: int, x: Tensor, models: int) -> Iterator[slice]:
        """Cut clients into chunks whose parameters and activations stay within CHUNK_BYTES."""
        samples = x.shape[1] if x.dim() > 1 else 1
        width = x[0, 0].numel() + self.model.size // max(1, x[0, 0].numel())
        each = x.element_size() * models * (2 * self.model.size + samples * width)
        size = max(1, min(clients, CHUNK_BYTES // each))
        return (slice(begin, min(clients, begin + size)) for begin in range(0, clients, size))


def make_engine(
    name: EngineName, model: FlatModel, local: LocalOptions, seed: int, data: ClientData, device: str
) -> Engine:
    """Pick how local work runs for this model, data and device.

    Raises ConfigError for `stacked` where the model or the data cannot be stacked.
    """
    reason = why_not_stacked(model, data)
    if name == "stacked" and reason:
        raise ConfigError(f'engine "stacked" cannot run this: {reason}; use engine "auto" or "loop"')
    samples = min(data.sizes[0], local.batch_size or data.sizes[0])
    small = samples * model.size < STACKED_WORK or device != "cpu"
    return Engine(model, local, seed, stacked=name == "stacked" or (name == "auto" and not reason and small))


def why_not_stacked(model: FlatModel, data: ClientData) -> str | None:
    """Tell why clients cannot be stacked into one call, or None if they can."""
    for layer in model.layers:
        if not isinstance(layer, _STACKABLE):
            return f"{type(layer).__name__} does not batch over clients"
    stacked = data.stacked()
    if stacked is None:
        return f"clients hold {min(data.sizes)} to {max(data.sizes)} samples, and only equal numbers stack"
    x, y = (tensor[:1, :2].expand(2, *tensor[0, :2].shape) for tensor in stacked)
    vectors = torch.zeros(2, model.size, dtype=model.dtype, device=x.device)
    probe = Engine(model, LocalOptions(steps=1), 0, stacked=True)
    try:
        probe._train_stacked(vectors, x, y, None, None, probe.local)
    except RuntimeError as error:  # a forward that looks at its numbers, or draws some
        return f"its forward cannot run for many clients at once ({str(error).splitlines()[0]})"
    return None


def finetuned(engine: Engine, vectors: Tensor, data: ClientData, steps: int, first: int = 0) -> Tensor:
    """Take local steps on all samples of every client, from the one with the id `first` on: (C, P) -> (C, P)."""
    clients = range(len(vectors))
    options = replace(engine.local, steps=steps, batch_size=None, momentum=0.0)
    out = torch.empty_like(vectors)
    choices = [Choice(0)] * len(vectors)
    for positions, trained in engine.train(clients, lambda p: vectors[list(p)], choices, data, -1, options, first):
        out[list(positions)] = trained
    return out


def _shares(points: Sequence[Tensor | None], y: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Weigh samples so that their weighted sum is the mean over a client's points: (C, n), or None for all samples."""
    if all(mask is None for mask in points):
        return None
    masks = torch.stack([torch.ones_like(y[0], dtype=torch.bool) if m is None else m for m in points])
    return masks.to(dtype) / masks.sum(dim=1, keepdim=True)
