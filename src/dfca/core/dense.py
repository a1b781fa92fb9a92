"""Gradient descent for networks of linear layers and ReLU, written out: the paper's MLP.

    h_0 = x,   z_l = h_{l-1} W_l^T + b_l,   h_l = relu(z_l),   F = mean of the cross entropy of z_L
    d_L = (softmax(z_L) - onehot(y)) / n,   d_{l-1} = (d_l W_l) * [h_{l-1} > 0]
    W_l <- W_l - gamma d_l^T h_{l-1},       b_l <- b_l - gamma sum(d_l)

Every gradient goes straight into the weights by the matrix product that computes it, so a step reads and writes each
weight once instead of storing gradients.

**In the span of the samples.** With full batches x is the same in every step, so the first layer, which has most of the
weights, need not be touched before the last one: its outputs move by the samples' inner products alone,

    z_1 <- z_1 - gamma (x x^T + 1) d_1,     and in the end   W_1 <- W_1 - gamma (sum of d_1 over the steps)^T x

The same numbers up to rounding, at 2 n^2 h operations per step instead of 4 n d h (n samples, d inputs, h units).

All tensors may have a leading dimension for clients: x (C, n, d), W (C, out, in); one call then trains C models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dfca.core.layers import flattened

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
    found = []
    for layer in layers[::2]:
        if layer.bias is None or not layer.weight.requires_grad or not layer.bias.requires_grad:
            return None
        found.append((place[id(layer.weight)], place[id(layer.bias)]))
    tied = len({weight for weight, _ in found}) < len(found)
    return None if tied else found


def dense_outputs(layers: Sequence[Layer], pieces: Sequence[Tensor], x: Tensor) -> Tensor:
    """Compute z_L: x (n, *shape) or, stacked, (C, n, *shape)."""
    h = _flat(x, pieces[layers[0][0]])
    for index, (weight, bias) in enumerate(layers):
        h = _affine(h, pieces[weight], pieces[bias])
        if index < len(layers) - 1:
            h = h.relu_()
    return h


def dense_begin(layers: Sequence[Layer], pieces: Sequence[Tensor], x: Tensor) -> Tensor:
    """Compute z_1, from which the first step can go on."""
    weight, bias = layers[0]
    return _affine(_flat(x, pieces[weight]), pieces[weight], pieces[bias])


def dense_end(layers: Sequence[Layer], pieces: Sequence[Tensor], z: Tensor) -> Tensor:
    """Compute z_L from z_1, which stays as it is."""
    return z if len(layers) == 1 else dense_outputs(layers[1:], pieces, z.relu())


def inner_products(x: Tensor) -> Tensor:
    """Compute x x^T + 1 of flat samples (..., n, d), the 1 for the bias: (..., n, n)."""
    return torch.matmul(x, x.mT).add_(1)


def span_cost(samples: int, inputs: int, units: int, steps: int, known: bool) -> int:
    """Count the multiplications per sample of steps in the span of the samples; known: their inner products are."""
    return (0 if known else samples * inputs) + (steps - 1) * samples * units + inputs * units


def span_pays(samples: int, inputs: int, units: int, steps: int, known: bool) -> bool:
    """Tell whether steps in the span of the samples take fewer operations than steps on the weights."""
    return steps > 0 and span_cost(samples, inputs, units, steps, known) < 2 * steps * inputs * units


class Batch(NamedTuple):
    """The samples of a step: x (..., n, d); target (..., n, classes), onehot(y); share, the weight of each sample in
    the loss, 1/n or (..., n, 1); products, their `inner_products` where they are known."""

    x: Tensor
    target: Tensor
    share: Tensor | float
    products: Tensor | None = None


class Descent(NamedTuple):
    """A network on its way down, and the rule: v <- momentum v + grad + decay theta, theta <- theta - rate v.

    pieces are changed in place, and so is velocity, which is like pieces; None stands for momentum 0.
    """

    layers: Sequence[Layer]
    pieces: Sequence[Tensor]
    velocity: Sequence[Tensor] | None
    rate: float
    momentum: float = 0.0
    decay: float = 0.0

    def step_(self, batch: Batch, z: Tensor) -> None:
        """Take one step, from z_1."""
        delta = self._upper_step_(batch, z)
        self._descend_(self.layers[0], delta, _flat(batch.x, self.pieces[self.layers[0][0]]))

    def span_(self, batch: Batch, z: Tensor, steps: int) -> None:
        """Take full-batch steps in the span of the samples, from z_1, which is used up; without decay."""
        weight = self.pieces[self.layers[0][0]]
        lower_(weight, self.above_(batch, z, steps), _flat(batch.x, weight), self.rate)

    def above_(self, batch: Batch, z: Tensor, steps: int) -> Tensor:
        """Do the same, but leave W_1 as it is; returns the sum of d_1, with which `lower_` takes its steps at once."""
        weight, bias = self.layers[0]
        products = batch.products
        if products is None:
            products = inner_products(_flat(batch.x, self.pieces[weight]))
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

    def _upper_step_(self, batch: Batch, z: Tensor) -> Tensor:
        """Take one step of all layers but the first, from z_1; returns d_1."""
        inputs: list[Tensor] = []
        for index in range(1, len(self.layers)):
            inputs.append(z.relu() if index == 1 else z.relu_())
            z = _affine(inputs[-1], *(self.pieces[place] for place in self.layers[index]))
        delta = z.softmax(dim=-1).sub_(batch.target).mul_(batch.share)
        for layer, h in zip(reversed(self.layers[1:]), reversed(inputs), strict=True):
            below = torch.ops.aten.threshold_backward(torch.matmul(delta, self.pieces[layer[0]]), h, 0)
            self._descend_(layer, delta, h)
            delta = below
        return delta

    def _descend_(self, layer: Layer, delta: Tensor, h: Tensor) -> None:
        """Take one layer's step: W <- W - rate (delta^T h), b <- b - rate sum(delta), with momentum and decay."""
        for place, gradient in zip(layer, ((delta.mT, h), (delta.sum(dim=-2),)), strict=True):
            if self.velocity is None:
                _accumulate_(self.pieces[place], gradient, 1 - self.rate * self.decay, -self.rate)
                continue
            speed = self.velocity[place]
            _accumulate_(speed, gradient, self.momentum, 1.0)
            if self.decay:
                speed.add_(self.pieces[place], alpha=self.decay)
            self.pieces[place].sub_(speed, alpha=self.rate)


def lower_(weight: Tensor, total: Tensor, x: Tensor, rate: float) -> None:
    """Take the steps of the first layer at once: W_1 <- W_1 - rate total^T x."""
    _accumulate_(weight, (total.mT, x), 1.0, -rate)


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
