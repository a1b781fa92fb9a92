"""Gradient descent for networks of linear layers and ReLU, written out: the paper's MLP.

    h_0 = x,   z_l = h_{l-1} W_l^T + b_l,   h_l = relu(z_l),   F = mean of the cross entropy of z_L
    d_L = (softmax(z_L) - onehot(y)) / n,   d_{l-1} = (d_l W_l) * [h_{l-1} > 0]
    W_l <- W_l - gamma d_l^T h_{l-1},       b_l <- b_l - gamma sum(d_l)

Every gradient goes straight into the weights by the matrix product that computes it, so a step reads and writes each
weight once instead of storing gradients. All tensors may have a leading dimension for clients: x (C, n, d), W (C, out,
in); one call then trains C models.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def dense_forward(layers: Sequence[Layer], pieces: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Compute h_1 .. h_{L-1} and z_L: x (n, *shape) or, stacked, (C, n, *shape)."""
    h = x.flatten(pieces[layers[0][0]].dim() - 1)
    activations = []
    for index, (weight, bias) in enumerate(layers):
        w, b = pieces[weight], pieces[bias]
        h = F.linear(h, w, b) if w.dim() == 2 else torch.baddbmm(b[:, None], h, w.transpose(1, 2))
        if index < len(layers) - 1:
            h = h.relu_()
        activations.append(h)
    return activations


def dense_step_(
    layers: Sequence[Layer],
    pieces: Sequence[Tensor],
    velocity: Sequence[Tensor] | None,
    activations: Sequence[Tensor],
    x: Tensor,
    target: Tensor,
    share: Tensor | float,
    rate: float,
    momentum: float,
    decay: float,
) -> None:
    """Take one gradient step in place, from the activations of a forward pass, which are used up.

    target: onehot(y), of the shape of z_L. share: the weight of each sample in the loss, 1/n or (..., n, 1).
    velocity: like pieces; v <- momentum v + grad + decay theta, theta <- theta - rate v. None stands for momentum 0.
    """
    inputs = [x.flatten(pieces[layers[0][0]].dim() - 1), *activations[:-1]]
    delta = activations[-1].softmax(dim=-1).sub_(target).mul_(share)
    for index in range(len(layers) - 1, -1, -1):
        weight, bias = layers[index]
        h = inputs[index]
        below = delta @ pieces[weight] if index else None
        if velocity is None:
            for place, gradient in ((weight, (delta.mT, h)), (bias, (delta.sum(dim=-2),))):
                _accumulate_(pieces[place], gradient, 1 - rate * decay, -rate)
        else:
            for place, gradient in ((weight, (delta.mT, h)), (bias, (delta.sum(dim=-2),))):
                speed = velocity[place]
                _accumulate_(speed, gradient, momentum, 1.0)
                if decay:
                    speed.add_(pieces[place], alpha=decay)
                pieces[place].sub_(speed, alpha=rate)
        if below is not None:
            delta = below.mul_(h > 0)


def _accumulate_(total: Tensor, gradient: tuple[Tensor, ...], keep: float, factor: float) -> None:
    """Set total <- keep total + factor gradient; a gradient of two matrices is their product."""
    if len(gradient) == 2:
        product = total.addmm_ if total.dim() == 2 else total.baddbmm_
        product(*gradient, beta=keep, alpha=factor)
        return
    if keep != 1:
        total.mul_(keep)
    total.add_(gradient[0], alpha=factor)
