"""Gradient descent for networks of linear layers and ReLU, written out: the paper's MLP.

    h_0 = x,   z_l = h_{l-1} W_l^T + b_l,   h_l = relu(z_l),   F = mean of the loss of z_L
    d_L = dL/dz_L / n,   d_{l-1} = (d_l W_l) * [h_{l-1} > 0]
    W_l <- W_l - gamma d_l^T h_{l-1},       b_l <- b_l - gamma sum(d_l)

dL/dz_L is softmax(z_L) - onehot(y) for the cross entropy, 2 (z_L - y) / outputs for the squared error (`task`).

Every gradient goes straight into the weights by the matrix product that computes it, so a step reads and writes each
weight once instead of storing gradients.

**In the span of the samples.** With full batches x is the same in every step, so the first layer, which has most of the
weights, need not be touched before the last one: its outputs move by the samples' inner products alone,

    z_1 <- z_1 - gamma (x x^T + 1) d_1,     and in the end   W_1 <- W_1 - gamma (sum of d_1 over the steps)^T x

The same numbers up to rounding, at 2 n^2 h operations per step instead of 4 n d h (n samples, d inputs, h units). With
mini-batches z_1 of a batch is what it was at the start, less what the samples of the batches before have moved it by:

    z_1[b] <- z_1[b] - gamma (x_b x^T + 1) D,   D[b] <- D[b] + d_1,   in the end   W_1 <- W_1 - gamma D^T x

so that the weights pass through the processor once instead of once per step.

All tensors may have a leading dimension for clients: x (C, n, d), W (C, out, in); one call then trains C models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dfca.core.learning.layers import flattened
from dfca.core.learning.task import softmax_residual

WEIGHT_TRAFFIC = 16
"""What it costs to read a weight, and to read and write it again, in multiplications. On the low side: 30 and more were
measured with 784-2048-10 in batches of 10 to 100, less where the weights fit into the cache next to the core."""

_through_relu = torch.ops.aten.threshold_backward.grad_input  # looked up once: the lookup takes as long as the call
Layer = tuple[int, int]
"""Where the weight and the bias of a linear layer stand among the model's tensors."""


def dense_layers(module: nn.Module, names: Sequence[str]) -> list[Layer] | None:
    """Find the linear layers of a network flatten - linear (- relu - linear)*, or None for any other module."""
    layers = flattened(module)
    if layers is None:
        return None
    if layers and type(layers[0]) is nn.Flatten and layers[0].start_dim == 1 and layers[0].end_dim == -1:
        layers = layers[1:]
    kinds = [type(layer) for layer in layers]
    alternating = [nn.ReLU if index % 2 else nn.Linear for index in range(len(kinds))]
    if len(kinds) % 2 == 0 or kinds != alternating:
        return None
    tensors = dict(module.named_parameters())
    place = {id(tensors[name]): index for index, name in enumerate(names) if name in tensors}
    places = []
    for layer in layers[::2]:
        if layer.bias is None or not layer.weight.requires_grad or not layer.bias.requires_grad:
            return None
        places.append((place[id(layer.weight)], place[id(layer.bias)]))
    tied = len({weight for weight, _ in places}) < len(places)
    return None if tied else places


def dense_outputs(layers: Sequence[Layer], pieces: Sequence[Tensor], x: Tensor) -> Tensor:
    """Compute z_L: x (n, *shape) or, stacked, (C, n, *shape)."""
    h = _flat(x, pieces[layers[0][0]])
    for index, (weight, bias) in enumerate(layers):
        h = _affine(h, pieces[weight], pieces[bias])
        if index < len(layers) - 1:
            h = h.relu_()
    return h


def dense_begin(layers: Sequence[Layer], pieces: Sequence[Tensor], x: Tensor) -> Tensor:
    """Compute z_1, from which the first step can continue."""
    weight, bias = layers[0]
    return _affine(_flat(x, pieces[weight]), pieces[weight], pieces[bias])


def dense_end(layers: Sequence[Layer], pieces: Sequence[Tensor], z: Tensor) -> Tensor:
    """Compute z_L from z_1, which stays as it is."""
    return z if len(layers) == 1 else dense_outputs(layers[1:], pieces, z.relu())


def inner_products(x: Tensor) -> Tensor:
    """Compute x x^T + 1 of flat samples (..., n, d), the 1 for the bias: (..., n, n)."""
    return torch.matmul(x, x.mT).add_(1)


class Span(NamedTuple):
    """What steps in the span of the samples cost: the samples, those of a batch (None: all), the inputs and units
    of the first layer, the steps."""

    samples: int
    batch: int | None
    inputs: int
    units: int
    steps: int

    def cost(self, known: bool) -> int:
        """Count the multiplications beyond the first forward pass; known: the inner products of the samples are."""
        samples, batch, inputs, units, steps = self
        used = samples if batch is None else min(samples, steps * batch)
        moved = (steps - 1) * samples**2 if batch is None else sum(batch * min(used, s * batch) for s in range(steps))
        return (0 if known else used**2 * inputs) + moved * units + used * inputs * units

    def pays(self, known: bool) -> bool:
        """Return whether these steps take less time than steps on the weights."""
        samples, batch, inputs, units, steps = self
        if steps == 0:
            return False
        if batch is None:
            return self.cost(known) < 2 * steps * samples * inputs * units
        first = min(samples, steps * batch) * inputs * units
        return first + self.cost(known) < steps * (2 * batch + WEIGHT_TRAFFIC) * inputs * units


class Batch(NamedTuple):
    """The samples of a step: x (..., n, d); target (..., n, outputs), onehot(y) or y; share, the weight of each
    sample in the loss, 1/n or (..., n, 1); products, their `inner_products` where they are known."""

    x: Tensor
    target: Tensor
    share: Tensor | float
    products: Tensor | None = None


class BatchOrder(NamedTuple):
    """The order in which mini-batches use samples: order (..., m), by their first use; rows (..., steps, b), where the
    samples of each batch stand in it. Those that are not used stand at the end, or are left out."""

    order: Tensor
    rows: Tensor

    @classmethod
    def of(cls, batches: Tensor, samples: int, rest: bool = False) -> BatchOrder:
        """Find it for batches (..., steps, b) that come back to a sample only when all `samples` had their turn; with
        the rest of the samples, or without."""
        flat = batches.flatten(-2)
        order = flat[..., :samples]
        place = torch.full((*flat.shape[:-1], samples), samples, dtype=flat.dtype, device=flat.device)
        place.scatter_(-1, order, torch.arange(order.shape[-1], device=flat.device).expand_as(order))
        rows = place.gather(-1, flat).view_as(batches)
        return cls(place.argsort(dim=-1, stable=True) if rest else order, rows)

    def take(self, tensor: Tensor) -> Tensor:
        """Put samples into the order: (..., n, *shape) -> (..., m, *shape)."""
        return take(tensor, self.order)

    def used(self, tensor: Tensor) -> Tensor:
        """Drop those that are not used: (..., m, c) -> (..., u, c)."""
        return tensor[..., : self.rows.shape[-2] * self.rows.shape[-1], :]

    def products(self, products: Tensor) -> Tensor:
        """Put inner products into the order, of what is used: (..., n, n) -> (..., u, u)."""
        order = self.order[..., : self.rows.shape[-2] * self.rows.shape[-1]]
        return take(take(products, order).mT, order)  # they are symmetric


class Descent(NamedTuple):
    """A network that takes gradient steps, by the rule v <- momentum v + grad + decay theta, theta <- theta - rate v.

    pieces are changed in place, and so is velocity, which is like pieces; None stands for momentum 0. decays: of each
    piece, () for none. residual: dL/dz of the task's loss. frozen: the pieces that steps on the weights do not change.
    """

    layers: Sequence[Layer]
    pieces: Sequence[Tensor]
    velocity: Sequence[Tensor] | None
    rate: float
    momentum: float = 0.0
    decays: Sequence[float] = ()
    residual: Callable[[Tensor, Tensor], Tensor] = softmax_residual
    frozen: frozenset[int] = frozenset()

    def step_(self, batch: Batch, z: Tensor) -> None:
        """Take one step, from z_1."""
        delta = self._upper_step_(batch, z)
        self._descend_(self.layers[0], delta, batch.x)

    def above_(self, batch: Batch, z: Tensor, steps: int) -> Tensor:
        """Take full-batch steps in the span of the samples, from z_1, which is used up; without decay. Leaves W_1 as it
        is: returns the sum of d_1, with which `lower_` takes its steps at once."""
        bias, products = self.layers[0][1], batch.products
        if products is None:
            products = inner_products(batch.x)
        speed = total = torch.empty(0)
        for step in range(steps):
            delta = self._upper_step_(batch, z)
            if step == 0:
                speed = delta
                total = delta.clone() if self.momentum else delta
            elif self.momentum:
                speed = speed.mul_(self.momentum).add_(delta)
                total += speed
            else:
                speed = delta
                total += delta
            if step < steps - 1:
                _accumulate_(z, (products, speed), 1.0, -self.rate)
        _accumulate_(self.pieces[bias], (total.sum(dim=-2),), 1.0, -self.rate)
        return total

    def above_in_batches_(self, batch: Batch, z: Tensor, rows: Tensor) -> Tensor:
        """Take mini-batch steps as `above_` does: batch and z_1 are of the samples used, in the order of `BatchOrder`;
        returns D, which may lie where z_1 was."""
        bias, products = self.layers[0][1], batch.products
        if products is None:
            products = inner_products(batch.x)
        steps, size = rows.shape[-2:]
        once = steps * size <= z.shape[-2] and not self.momentum  # then d_1 of a sample may lie where its z_1 was
        total = z if once else torch.zeros_like(z)
        speed = torch.zeros_like(z) if self.momentum else total
        for step in range(steps):
            first, end = step * size, (step + 1) * size
            mine: slice | Tensor = slice(first, end) if end <= z.shape[-2] else rows.select(-2, step)
            now = take(z, mine)
            if step:
                moved = (take(products, mine)[..., :first], total[..., :first, :])
                now = now if once or not isinstance(mine, slice) else now.clone()  # z_1 of the start is needed again
                _accumulate_(now, moved, 1.0, -self.rate)
            delta = self._upper_step_(Batch(batch.x, take(batch.target, mine), 1 / size), now, once)
            if once:
                continue
            if self.momentum:
                speed.mul_(self.momentum)
            _add_rows_(speed, mine, delta)
            if self.momentum:
                total += speed
        _accumulate_(self.pieces[bias], (total.sum(dim=-2),), 1.0, -self.rate)
        return total

    def _upper_step_(self, batch: Batch, z: Tensor, replace: bool = False) -> Tensor:
        """Take one step of all layers but the first, from z_1; returns d_1, which takes its place if `replace`."""
        first, inputs = z, []
        for index in range(1, len(self.layers)):
            inputs.append(z.relu() if index == 1 else z.relu_())
            z = _affine(inputs[-1], *(self.pieces[place] for place in self.layers[index]))
        delta = self.residual(z, batch.target).mul_(batch.share)
        for index in range(len(inputs), 0, -1):
            layer, h = self.layers[index], inputs[index - 1]
            below = torch.matmul(delta, self.pieces[layer[0]])
            self._descend_(layer, delta, h)
            place = first if replace and index == 1 else h
            delta = _through_relu(below, h, 0, grad_input=place)
        return first.copy_(delta) if replace and not inputs else delta

    def _descend_(self, layer: Layer, delta: Tensor, h: Tensor) -> None:
        """Take one layer's step: W <- W - rate (delta^T h), b <- b - rate sum(delta), with momentum and decay."""
        for place, gradient in zip(layer, ((delta.mT, h), (delta.sum(dim=-2),)), strict=True):
            if place in self.frozen:
                continue
            decay = self.decays[place] if self.decays else 0.0
            if self.velocity is None:
                _accumulate_(self.pieces[place], gradient, 1 - self.rate * decay, -self.rate)
                continue
            speed = self.velocity[place]
            _accumulate_(speed, gradient, self.momentum, 1.0)
            if decay:
                speed.add_(self.pieces[place], alpha=decay)
            self.pieces[place].sub_(speed, alpha=self.rate)


def lower_(weight: Tensor, total: Tensor, x: Tensor, rate: float) -> None:
    """Take the steps of the first layer at once: W_1 <- W_1 - rate total^T x."""
    _accumulate_(weight, (total.mT, x), 1.0, -rate)


def take(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Select rows: tensor (n, ...) and rows (b,), or stacked (C, n, ...) and (C, b).

    A slice of (n, m) or (C, n, m) gives a view.
    """
    if isinstance(rows, slice):
        return tensor[..., rows, :]
    if rows.dim() == 1:
        return tensor.index_select(0, rows)
    return tensor.flatten(0, 1).index_select(0, _flat_rows(rows, tensor.shape[1])).view(*rows.shape, *tensor.shape[2:])


def _flat_rows(rows: Tensor, samples: int) -> Tensor:
    """Number rows (C, b) of C clients with `samples` samples each as rows of all C n samples: (C b,)."""
    return (rows + samples * torch.arange(len(rows), device=rows.device)[:, None]).flatten()


def _add_rows_(total: Tensor, rows: slice | Tensor, terms: Tensor) -> None:
    """Add to some rows; one that comes twice gets both terms."""
    if isinstance(rows, slice):
        total[..., rows, :] += terms
    elif rows.dim() == 1:
        total.index_add_(0, rows, terms)
    else:
        total.view(-1, total.shape[2]).index_add_(0, _flat_rows(rows, total.shape[1]), terms.flatten(0, 1))


def _affine(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.dim() == 2:
        return F.linear(h, weight, bias)
    return torch.baddbmm(bias[:, None], h, weight.transpose(1, 2))


def _flat(x: Tensor, weight: Tensor) -> Tensor:
    """Flatten samples: (n, *shape) -> (n, d), or (C, n, *shape) -> (C, n, d) for stacked weights."""
    return x.flatten(weight.dim() - 1)


def _accumulate_(total: Tensor, gradient: tuple[Tensor, ...], keep: float, factor: float) -> None:
    """Set total <- keep total + factor gradient; a gradient of two matrices is their product."""
    if len(gradient) == 2:
        product = total.addmm_ if total.dim() == 2 else total.baddbmm_
        product(*gradient, beta=keep, alpha=factor)
        return
    if keep != 1:
        total.mul_(keep)
    total.add_(gradient[0], alpha=factor)
