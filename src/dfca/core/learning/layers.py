"""Sequences of well-known layers as direct calls on their tensors.

`torch.func.functional_call` serves any module, but costs about 70 us a call, is not safe from several threads, and runs
the layers as written. A `nn.Sequential` of the layers below is a short list of functions instead:

- ReLU and max-pool commute, max(relu(a), relu(b)) = relu(max(a, b)), values and gradients: pooling first leaves a
  quarter of the work to the ReLU;
- images of a convolution lie in memory with their channels last, where the CPU's convolution and pooling are fastest;
- batch norm on such images sums by `batch_norm_columns`: torch's own CPU kernel for this layout adds up in one float
  per channel, and is off by 1e-4 at 500 images;
- local response norm on such images is a product with a band matrix, where torch pads, pools and takes powers.

Everything else stays what the modules compute, up to float rounding; tests compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dfca.core.learning.images import CentreCrop, Standardise

Mode = Literal["train", "objective", "score"]
"""How a module runs: `train` as in a gradient step; `objective` is the same function without its noise (dropout off,
batch norm on the batch's statistics), so that the loss that picks a model is the loss that training descends;
`score` is the deployed model (batch norm on its running statistics)."""

LayerCall = Callable[[Sequence[Tensor], Tensor], Tensor]
"""One layer: (all tensors of the model, inputs) -> outputs."""

_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Identity, nn.Flatten)
_OF_IMAGES = (CentreCrop, Standardise)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def draws_noise(module: nn.Module) -> bool:
    """Return whether a training step of a sequence of known layers draws random numbers."""
    return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in module.modules())


def sequence(module: nn.Module, names: Sequence[str], mode: Mode) -> list[LayerCall] | None:
    """Write a module as direct calls on the tensors of those names, or None where a layer is not known.

    Layers whose call was changed by hooks or subclassing are not known.
    """
    layers = flattened(module)
    if layers is None:
        return None
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    place = {id(tensors[name]): index for index, name in enumerate(names)}
    steps: list[LayerCall] = []
    for layer in _pools_first(layers):
        step = _step(layer, place, mode)
        if step is None:
            return None
        steps.append(step)
    return steps


def flattened(module: nn.Module) -> list[nn.Module] | None:
    """List the layers of nested sequences; None where something else contains layers, or a hook is set."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return None
    if type(module) is not nn.Sequential:
        return None if any(module.children()) else [module]
    layers: list[nn.Module] = []
    for child in module:
        inner = flattened(child)
        if inner is None:
            return None
        layers += inner
    return layers


def _pools_first(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Swap every ReLU with the max-pool that follows it."""
    order = list(layers)
    for index in range(len(order) - 1):
        if type(order[index]) is nn.ReLU and type(order[index + 1]) in _POOLS:
            order[index], order[index + 1] = order[index + 1], order[index]
    return order


def _step(layer: nn.Module, place: dict[int, int], mode: Mode) -> LayerCall | None:
    kind = type(layer)
    if kind is nn.ReLU:
        return lambda tensors, x: F.relu(x)
    if kind in _ACTIVATIONS or kind in _OF_IMAGES or (kind in _POOLS and not layer.return_indices):
        return lambda tensors, x: layer(x)  # no tensors of its own: safe to call from anywhere
    if kind is nn.Dropout:
        return lambda tensors, x: F.dropout(x, layer.p, training=mode == "train")  # type: ignore[arg-type]
    if isinstance(layer, nn.Linear) and kind is nn.Linear:
        weight, bias = _places(layer, place, "weight", "bias")
        return lambda tensors, x: F.linear(x, tensors[weight], _at(tensors, bias))
    if isinstance(layer, nn.LayerNorm) and kind is nn.LayerNorm:
        weight, bias = _places(layer, place, "weight", "bias")
        shape, eps = layer.normalized_shape, layer.eps
        return lambda tensors, x: F.layer_norm(x, shape, _at(tensors, weight), _at(tensors, bias), eps)
    if kind in _CONVOLUTIONS and layer.padding_mode == "zeros":
        return _convolution(layer, place)
    if isinstance(layer, _NORMS) and kind in _NORMS:
        return _batch_norm(layer, place, mode)
    if isinstance(layer, nn.LocalResponseNorm) and kind is nn.LocalResponseNorm:
        return _response_norm(layer)
    return None


def _places(layer: nn.Module, place: dict[int, int], *names: str) -> list[int]:
    """Find where the named tensors of a layer stand among the model's; -1 for None."""
    tensors = (getattr(layer, name) for name in names)
    return [-1 if tensor is None else place[id(tensor)] for tensor in tensors]


def _at(tensors: Sequence[Tensor], index: int) -> Tensor | None:
    return None if index < 0 else tensors[index]


def _convolution(layer: Any, place: dict[int, int]) -> LayerCall:
    weight, bias = _places(layer, place, "weight", "bias")
    options = (layer.stride, layer.padding, layer.dilation, layer.groups)
    if type(layer) is nn.Conv1d:
        return lambda tensors, x: F.conv1d(x, tensors[weight], _at(tensors, bias), *options)
    return lambda tensors, x: F.conv2d(_channels_last(x), tensors[weight], _at(tensors, bias), *options)


def _channels_last(x: Tensor) -> Tensor:
    """Lay images out with their channels last; free for one channel, and for images that lie so already."""
    if x.dim() != 4:
        return x
    if x.shape[1] == 1 and x.is_contiguous():
        count, _, height, width = x.shape
        return x.as_strided((count, 1, height, width), (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)


def _batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, place: dict[int, int], mode: Mode) -> LayerCall:
    weight, bias, mean, variance = _places(layer, place, "weight", "bias", "running_mean", "running_var")
    eps, momentum = layer.eps, layer.momentum or 0.0  # None, a cumulative average, only without running statistics
    keeps = mode == "train" and mean >= 0
    on_batch = mode != "score" or mean < 0

    def step(tensors: Sequence[Tensor], x: Tensor) -> Tensor:
        scale, shift = _at(tensors, weight), _at(tensors, bias)
        if not on_batch:
            return F.batch_norm(x, tensors[mean], tensors[variance], scale, shift, False, 0.0, eps)
        if not _lies_in_columns(x) or scale is None or shift is None:
            kept = (_at(tensors, mean), _at(tensors, variance)) if keeps else (None, None)
            return F.batch_norm(x, kept[0], kept[1], scale, shift, True, momentum, eps)
        outputs: Tensor
        outputs, batch_mean, batch_variance = _NormOfColumns.apply(x, scale, shift, eps)  # type: ignore[no-untyped-call]
        if keeps:
            count = x.numel() // x.shape[1]
            tensors[mean].lerp_(batch_mean, momentum)
            tensors[variance].lerp_(batch_variance * (count / max(1, count - 1)), momentum)
        return outputs

    return step


class _NormOfColumns(torch.autograd.Function):
    """Batch norm of images with channels last, as a matrix X (M, channels), M = images x pixels.

    c = X - mean,  s = 1 / sqrt(mean(c^2) + eps),  Y = c s w + b
    dX = s w (dY - mean(dY) - c s^2 mean(dY c)),  dw = s sum(dY c),  db = sum(dY)
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        rows = _columns(x)
        mean = rows.mean(dim=0)
        centred = rows - mean
        variance = centred.square().mean(dim=0)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(centred, scale, weight)
        ctx.mark_non_differentiable(mean, variance)
        return _images(torch.addcmul(bias, centred, scale * weight), x), mean, variance

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        centred, scale, weight = ctx.saved_tensors
        images = gradients[0].contiguous(memory_format=torch.channels_last)
        rows = _columns(images)
        count = len(rows)
        total, product = rows.sum(dim=0), (rows * centred).sum(dim=0)
        factor = scale * weight
        inner = torch.addcmul(-factor * total / count, rows, factor)
        inner.addcmul_(centred, -factor * scale.square() * product / count)
        return _images(inner, images), product * scale, total, None


def _response_norm(layer: nn.LocalResponseNorm) -> LayerCall:
    size, alpha, beta, k = layer.size, layer.alpha, layer.beta, layer.k

    def step(tensors: Sequence[Tensor], x: Tensor) -> Tensor:
        if not _lies_in_columns(x):
            return layer(x)  # type: ignore[no-any-return]
        near = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).triu_(-((size - 1) // 2)).tril_(size // 2)
        outputs: Tensor = _ResponseNormOfColumns.apply(x, near.mul_(alpha / size), beta, k)  # type: ignore[no-untyped-call]
        return outputs

    return step


class _ResponseNormOfColumns(torch.autograd.Function):
    """Local response norm of images with channels last, as a matrix X (M, channels); B (channels, channels) is alpha /
    size where channels are near.

    D = k + X^2 B,  Y = X D^-beta,  dX = dY D^-beta - 2 beta X ((dY X D^-(beta + 1)) B^T)
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, near: Tensor, beta: float, k: float) -> Tensor:
        rows = _columns(x)
        sums = torch.addmm(near.new_full((1,), k), rows.square(), near)
        if beta == 0.75:
            root = sums.rsqrt()
            power = root.sqrt().mul_(root)
        else:
            power = sums.pow(-beta)
        ctx.save_for_backward(rows, near, sums, power)
        ctx.beta = beta
        return _images(rows * power, x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows, near, sums, power = ctx.saved_tensors
        images = gradients[0].contiguous(memory_format=torch.channels_last)
        inner = _columns(images) * power
        spread = torch.mm((inner * rows).div_(sums), near.T)
        return _images(inner.addcmul_(rows, spread, value=-2 * ctx.beta), images), None, None, None


def _lies_in_columns(x: Tensor) -> bool:
    """Return whether x is images on the CPU whose channels lie last in memory."""
    return x.dim() == 4 and x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last)


def _columns(images: Tensor) -> Tensor:
    """View images (n, channels, height, width) with channels last as (n height width, channels)."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])


def _images(rows: Tensor, like: Tensor) -> Tensor:
    count, channels, height, width = like.shape
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)
