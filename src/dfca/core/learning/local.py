"""What a client computes alone: the losses of its models and its local steps.

F_client(theta, D_i) = 1/|D_i| sum_d L(theta, d), L the loss of the model's task: the cross entropy, or another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.base.errors import ModelError
from dfca.core.learning.dense import (
    Batch,
    BatchOrder,
    Descent,
    Span,
    dense_begin,
    dense_end,
    dense_outputs,
    lower_,
    take,
)
from dfca.core.learning.images import augmented, draw_changes
from dfca.core.learning.inputs import Samples as Inputs
from dfca.core.learning.inputs import sent
from dfca.core.learning.layers import Mode
from dfca.core.learning.optimisers import State, make_stepper
from dfca.core.learning.params import FlatModel
from dfca.core.learning.task import softmax_residual
from dfca.core.method import LocalOptions as LocalOptions
from dfca.core.rng import stream


def infer(model: FlatModel, vector: Tensor, x: Inputs, mode: Mode) -> Tensor:
    """Run one model (P,) on x (n, *shape) -> (n, outputs); the running statistics in the vector stay as they are."""
    if model.dense is not None and isinstance(x, Tensor):
        return dense_outputs(model.dense, model.pieces(vector), x)
    return model.run(model.pieces(vector.clone() if mode == "train" else vector), x, mode)


@dataclass(frozen=True)
class Forward:
    """A forward pass that the first local step can reuse.

    outputs (n, ...), or empty where they are not needed; tensors: of a network of linear layers, z_1
    (`learning.dense`), which may be used up; of any other model, the leaves that its gradients belong to; rest: what is
    averaged but not trained, after the pass (running statistics).
    """

    outputs: Tensor
    tensors: Sequence[Tensor]
    rest: Tensor | None = None


def forward(model: FlatModel, vectors: Tensor, x: Inputs, look: bool = True) -> Forward:
    """Run models on x as in a training step, and keep what its gradient needs; the vectors stay as they are.

    vectors (P,), or for a network of linear layers (C, P) with x (C, n, *shape); look: whether the outputs are looked
    at, or only the first step uses the pass.
    """
    if model.dense is not None and isinstance(x, Tensor):
        with torch.no_grad():
            pieces = model.pieces(vectors)
            z = dense_begin(model.dense, pieces, x)
            return Forward(dense_end(model.dense, pieces, z) if look else z[:0], [z])
    own = vectors.clone()  # what a gradient needs must not change, and banks do
    leaves = [piece.detach().requires_grad_() for piece in model.pieces(own)[: model.count]]
    rest = vectors[model.trained :].clone()
    return Forward(model.run([*leaves, *model.rest_pieces(rest)], x, "train"), leaves, rest)


def sample_losses(model: FlatModel, vectors: Tensor, x: Inputs, y: Tensor, mode: Mode = "objective") -> Tensor:
    """Compute L(theta_j, d) of each model on each sample: vectors (m, P), x (n, *shape), y (n, ...) -> (m, n)."""
    with torch.no_grad():
        outputs = (infer(model, vector, x, mode) for vector in vectors)
        return torch.stack([model.task.loss(output, y) for output in outputs])


def losses(model: FlatModel, vectors: Tensor, x: Inputs, y: Tensor) -> Tensor:
    """Compute F_client of each model: vectors (m, P) -> (m,)."""
    return sample_losses(model, vectors, x, y).mean(dim=1)


def score(model: FlatModel, vector: Tensor, x: Inputs, y: Tensor) -> Tensor:
    """Score the deployed model by the metric of its task: vector (P,) -> ()."""
    with torch.no_grad():
        return model.task.metric.score(infer(model, vector, x, "score")[None], y[None])[0]


def lowest(values: Tensor) -> int:
    """Pick the index of the lowest value.

    Args:
        values: Losses, (m,).

    Returns:
        The lowest index among ties. NaN never wins against a number.

    Example:
        >>> import dfca, torch
        >>> dfca.lowest(torch.tensor([2.0, float("nan"), 1.0, 1.0]))
        2
    """
    numbers = [float("inf") if value != value else value for value in values.tolist()]
    return numbers.index(min(numbers))


LaterEpochs = Callable[[int], Tensor]
"""Gives the samples x (n, *shape) of an epoch."""
NO_SAMPLE = -1
"""Fills the last batch of an epoch up to the size of the others."""


def draw_batches(samples: int, options: LocalOptions, generator: torch.Generator) -> Tensor | None:
    """Draw the sample indices of each local step, (steps, batch), or None for full batches.

    A sample comes again only when all others had their turn. The last batch of an epoch may end with NO_SAMPLE.
    """
    size = options.batch_of(samples)
    if size is None:
        return None
    if options.epochs is not None:
        order = torch.full((options.epochs, options.steps_of(samples) // max(1, options.epochs) * size), NO_SAMPLE)
        for epoch in order:
            epoch[:samples] = torch.randperm(samples, generator=generator)
        return order.view(-1, size)
    needed = options.steps * size
    epochs = -(-needed // samples)
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)] or [torch.empty(0).long()])
    return order[:needed].view(options.steps, size)


def batch_at(batches: Tensor, step: int, device: torch.device) -> Tensor:
    """Return the samples of a step on a device: batches (steps, b) or (C, steps, b) -> (b,) or (C, b), without
    NO_SAMPLE."""
    batch = batches.select(-2, step)
    first = batch if batch.dim() == 1 else batch[0]
    if int(first[-1]) == NO_SAMPLE:
        batch = batch[..., : int((first != NO_SAMPLE).sum())]  # all clients of a stack have equally many samples
    return sent(batch, device)


class Drawn(NamedTuple):
    """What is drawn for local steps: batches (steps, b), None for full ones; changes (steps, NUMBERS, b) of their
    images (`images`), None without augmentation. Stacked for C clients, both have a leading dimension C."""

    batches: Tensor | None = None
    changes: Tensor | None = None

    @classmethod
    def stacked(cls, drawn: Sequence[Drawn], device: torch.device) -> Drawn:
        """Stack what is drawn for clients with equally many samples; batches stay on the CPU, which looks at them."""
        batches = [one.batches for one in drawn if one.batches is not None]
        changes = [one.changes for one in drawn if one.changes is not None]
        return cls(torch.stack(batches) if batches else None, sent(torch.stack(changes), device) if changes else None)


def draw_steps(samples: int, options: LocalOptions, seed: int, *names: int) -> Drawn:
    """Draw what local steps of a client use, from the streams of these names: client, round and stage."""
    if options.batch_size is None and options.augment is None:
        return Drawn()
    batches = draw_batches(samples, options, stream(seed, "batches", *names))
    if options.augment is None:
        return Drawn(batches)
    steps, size = options.steps_of(samples), options.batch_of(samples)
    return Drawn(batches, draw_changes(steps, size or samples, stream(seed, "augment", *names)))


class TrainingSet(NamedTuple):
    """What local steps are taken on: samples x (n, *shape), y (n, ...); batches (steps, b), None for full batches.

    Stacked for C clients: x (C, n, *shape), y (C, n, ...), batches (C, steps, b), and shares (C, n), the weights of the
    samples in the loss instead of 1/n. products (n, n): `inner_products` of x, where they are known. weights (n,), or
    (C, n): how much each sample counts, the loss being the mean of w_d L(d). frozen: the tensors of the model that stay
    as they are, by their places. changes: of images, in every step (`Drawn`). state: of the optimiser, which continues
    with it and leaves its own there. later: gives x of the epochs after the first, where it is another.
    """

    x: Inputs
    y: Tensor
    batches: Tensor | None = None
    shares: Tensor | None = None
    products: Tensor | None = None
    weights: Tensor | None = None
    frozen: frozenset[int] = frozenset()
    changes: Tensor | None = None
    state: State | None = None
    later: LaterEpochs | None = None

    def begins(self, step: int, options: LocalOptions) -> Tensor | None:
        """Return the samples of the epoch that begins with a step, where they are others than those before."""
        if self.later is None or options.epochs is None or step == 0:
            return None
        epoch, within = divmod(step, options.steps_of(len(self.y)) // options.epochs)
        return None if within else self.later(epoch)


def local_steps(
    model: FlatModel, vector: Tensor, x: Inputs, y: Tensor, options: LocalOptions, batches: Tensor | None = None
) -> Tensor:
    """Train a copy of one model: theta <- theta - gamma v, v <- momentum v + grad F_client(theta) + decay theta; or by
    another optimiser (`optimisers`).

    vector (P,), x (n, *shape), y (n, ...), batches (steps, b) or None for the full batch; returns (P,).
    """
    vector = vector.clone()
    local_steps_(model, vector, TrainingSet(x, y, batches), options)
    return vector


def local_steps_(
    model: FlatModel, vectors: Tensor, data: TrainingSet, options: LocalOptions, begun: Forward | None = None
) -> None:
    """Train one model in place: `local_steps` without the copy.

    A network of linear layers and ReLU may be stacked: vectors (C, P), and stacked data. begun: a forward pass of these
    models on all these samples, which spares the first full-batch step its own.
    """
    if model.dense is not None and isinstance(data.x, Tensor) and options.written_out:
        _dense_steps_(model, vectors, data, options, begun)
        return
    (x, y, batches), mean_loss = data[:3], model.task.mean_loss
    pieces, frozen = model.pieces(vectors)[: model.count], data.frozen
    theta = [piece.detach().requires_grad_(place not in frozen) for place, piece in enumerate(pieces)]
    moving = [piece for piece in theta if piece.requires_grad]
    rest = vectors[model.trained :].clone()  # batch norm writes here, and must not touch what a gradient needs
    rest_pieces = model.rest_pieces(rest)
    if not moving:
        return
    decays = [decay for decay, piece in zip(weight_decays(model, options), theta, strict=True) if piece.requires_grad]
    take_step_ = make_stepper(moving, options, decays, state=data.state)
    for step in range(options.steps_of(len(y))):
        x = x if (other := data.begins(step, options)) is None else other
        if step == 0 and begun is not None and batches is None:
            loss, leaves = mean_loss(begun.outputs, y), begun.tensors
            if begun.rest is not None:
                rest.copy_(begun.rest)
        else:
            x_step, y_step, weights = x, y, data.weights
            if batches is not None:
                batch = batch_at(batches, step, y.device)
                x_step, y_step, weights = x[batch], y[batch], None if weights is None else weights[batch]
            if options.augment is not None and data.changes is not None and isinstance(x_step, Tensor):
                x_step = augmented(x_step, data.changes[step], options.augment)
            with autocast(options, vectors.device):
                outputs, leaves = model.run([*theta, *rest_pieces], x_step, "train").to(vectors.dtype), moving
            if weights is None:
                loss = mean_loss(outputs, y_step)
            else:
                loss = (model.task.loss(outputs, y_step) * weights).mean()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        take_step_(gradients)
    if not frozen.intersection(range(model.count, len(model.names))):
        vectors[model.trained :] = rest


def autocast(options: LocalOptions, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which the passes of local steps run: bfloat16 where `precision` says so."""
    if options.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def span(model: FlatModel, samples: int, options: LocalOptions) -> Span | None:
    """Describe steps in the span of the samples (`dense`), for this many of them; None where there are none."""
    if model.dense is None or not options.written_out or any(weight_decays(model, options)):
        return None
    batch = options.batch_of(samples)
    if options.epochs is not None and batch is not None and samples % batch:
        return None
    units, inputs = model.shapes[model.dense[0][0]]
    return Span(samples, batch, inputs, units, options.steps_of(samples))


def spans(model: FlatModel, samples: int, options: LocalOptions, known: bool = False) -> bool:
    """Return whether the local steps of a model write its first layer only once, in the end (`dense`); known: the
    inner products of the samples are."""
    steps = span(model, samples, options)
    return steps is not None and steps.pays(known)


class Samples(NamedTuple):
    """The samples of C clients, and what stays known of them from round to round.

    x (C, n, *shape), y (C, n); largest (C,), on the CPU: the largest |x| of each; products (C, n, n): `inner_products`,
    or None.
    """

    x: Tensor
    y: Tensor
    largest: Tensor
    products: Tensor | None


@torch.no_grad()
def local_steps_in_place_(
    model: FlatModel,
    bank: Tensor,
    rows: Tensor,
    samples: Samples,
    options: LocalOptions,
    begun: Forward,
    order: BatchOrder | None = None,
) -> list[bool]:
    """Train some rows (C,) of a bank (R, P) where they lie, for models that `spans`: nearly all of a model is its
    first layer, so next to nothing is copied. begun: their forward passes; order: of mini-batches, in which x, y and
    begun then are.

    Returns whose steps are finite; the other models stay as they were.
    """
    assert model.dense is not None
    first, lying = model.dense[0][0], model.pieces(bank)
    own = [piece[:0] if place == first else piece[rows] for place, piece in enumerate(lying)]
    down, batch = _descent(model, own, TrainingSet(samples.x, samples.y), options)
    products, z = samples.products, begun.tensors[0]
    if order is None:
        total = down.above_(batch._replace(products=products), z, options.passes)
    else:
        if products is not None:
            products = order.products(products)
        batch, z = Batch(order.used(batch.x), order.used(batch.target), batch.share, products), order.used(z)
        total = down.above_in_batches_(batch, z, order.rows)
    safe = _surely_finite(total, samples.largest, options.learning_rate).tolist()
    good = torch.ones(len(rows), dtype=torch.bool)
    for place, tensor in enumerate(own):
        if place != first:
            good &= tensor.flatten(1).isfinite().all(dim=1).cpu()
    fine: list[bool] = good.tolist()
    for position, (row, delta, flat) in enumerate(zip(rows.tolist(), total, batch.x, strict=True)):
        weight = lying[first][row]
        if fine[position] and safe[position]:
            lower_(weight, delta, flat, options.learning_rate)
        elif fine[position]:
            lower_(moved := weight.clone(), delta, flat, options.learning_rate)
            fine[position] = bool(moved.isfinite().all())
            if fine[position]:
                weight.copy_(moved)
    some = slice(None) if all(fine) else torch.tensor(fine, device=rows.device)
    for place, tensor in enumerate(own):
        if place != first:
            lying[place][rows[some]] = tensor[some]
    return fine


def _surely_finite(total: Tensor, largest: Tensor, rate: float) -> Tensor:
    """Return whose first layer `lower_` cannot make infinite, (C,) bool, without computing it.

    total (C, n, h), largest |x| (C,). By Cauchy and Schwarz a weight moves by rate |total^T x| <= rate sqrt(n) largest
    |total| at most; False for NaN.
    """
    length = torch.linalg.vector_norm(total, dim=(1, 2)).cpu().double()
    limits = torch.finfo(total.dtype)
    safe: Tensor = rate * total.shape[1] ** 0.5 * largest * length <= limits.max * limits.eps / 8
    return safe


@torch.no_grad()
def _dense_steps_(
    model: FlatModel, vectors: Tensor, data: TrainingSet, options: LocalOptions, begun: Forward | None
) -> None:
    assert model.dense is not None
    layers, pieces = model.dense, model.pieces(vectors)
    down, whole = _descent(model, pieces, data, options)
    samples, batches, weights = data.y.shape[vectors.dim() - 1], data.batches, data.weights
    plain = not data.frozen and (weights is None or batches is None) and data.later is None
    if plain and spans(model, samples, options, known=data.products is not None):
        if batches is None:
            z = dense_begin(layers, pieces, whole.x) if begun is None else begun.tensors[0]
            total = down.above_(whole, z, options.passes)
        else:
            order = BatchOrder.of(batches.to(data.y.device), samples)
            whole = Batch(order.take(whole.x), order.take(whole.target), whole.share)
            total = down.above_in_batches_(whole, dense_begin(layers, pieces, whole.x), order.rows)
        lower_(pieces[layers[0][0]], total, whole.x, options.learning_rate)
        return
    for step in range(options.steps_of(samples)):
        if (other := data.begins(step, options)) is not None:
            whole = whole._replace(x=other.flatten(1), products=None)
        batch = whole
        if batches is not None:
            chosen = batch_at(batches, step, data.y.device)
            share: Tensor | float = 1 / chosen.shape[-1]
            if weights is not None:
                share = take(weights, chosen)[..., None] * share
            batch = Batch(take(whole.x, chosen), take(whole.target, chosen), share)
        known = step == 0 and begun is not None and batches is None
        z = begun.tensors[0] if known and begun is not None else dense_begin(layers, pieces, batch.x)
        down.step_(batch, z)


def _descent(
    model: FlatModel, pieces: Sequence[Tensor], data: TrainingSet, options: LocalOptions
) -> tuple[Descent, Batch]:
    """Prepare the steps of networks of linear layers, on all samples."""
    assert model.dense is not None
    assert isinstance(data.x, Tensor)
    last = pieces[model.dense[-1][0]]
    y, lead = data.y, last.dim() - 1
    velocity = [torch.zeros_like(piece) for piece in pieces] if options.momentum else None
    target = model.task.encode(y, lead, last.shape[-2], last.dtype)
    share: Tensor | float = 1 / y.shape[lead - 1] if data.shares is None else data.shares[..., None]
    if data.weights is not None:
        share = data.weights[..., None] * share
    rule = options.learning_rate, options.momentum, weight_decays(model, options)
    residual = model.task.residual or softmax_residual
    down = Descent(model.dense, pieces, velocity, *rule, residual=residual, frozen=data.frozen)
    return down, Batch(data.x.flatten(lead), target, share, data.products)


def weight_decays(model: FlatModel, options: LocalOptions) -> list[float]:
    """Return the weight decay of each trained tensor.

    Raises ModelError where `layer_decay` names a layer that the model does not have.
    """
    decays = [options.weight_decay] * model.count
    for key, decay in (options.layer_decay or {}).items():
        places = [i for i, name in enumerate(model.names[: model.count]) if name == key or name.startswith(f"{key}.")]
        if not places:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in model.names[: model.count]))
            raise ModelError(f'local.layer_decay has "{key}", and the model has no such layer; it has {known}')
        for place in places:
            decays[place] = decay
    return decays


FEWEST = 5
"""With fewer samples a client holds out none."""


def held_out(samples: int, seed: int, client: int) -> Tensor:
    """Draw the fifth of a client's samples that it holds out: (n,) bool; none where it has fewer than `FEWEST`.

    Clients with equally many samples hold out equally many.
    """
    mask = torch.zeros(samples, dtype=torch.bool)
    mask[torch.randperm(samples, generator=stream(seed, "held-out", client))[: samples // FEWEST]] = True
    return mask
