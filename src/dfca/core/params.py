"""A module as one flat vector, and back.

The vector holds P floats: first the trained parameters, then what is averaged but not trained (frozen parameters,
floating-point buffers such as the running statistics of batch norm). Integer buffers (batch norm's step counter) are
constants of the architecture: they are neither trained nor exchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dfca.core.rng import seeded
from dfca.errors import ModelError

Mode = Literal["train", "objective", "score"]
"""How a module runs: `train` as in a gradient step; `objective` is the same function without its noise (dropout off,
batch norm on the batch's statistics), so that the loss that picks a model is the loss that training descends;
`score` is the deployed model (batch norm on its running statistics)."""


class FlatModel:
    """A module's architecture as a pure function of a flat vector.

    trained: number of floats that gradient steps change, the first of the vector.
    size: P, the length of the vector.
    """

    def __init__(self, module: nn.Module) -> None:
        _check(module)
        # One frozen copy per mode, so that nothing is switched back and forth between calls.
        self._modules = {mode: _in_mode(module, mode) for mode in ("train", "objective", "score")}
        parameters: list[tuple[str, Tensor]] = list(module.named_parameters())
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        rest = [(name, p) for name, p in parameters if not p.requires_grad]
        rest += [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
        self.names = [name for name, _ in trained + rest]
        self._shapes = [tensor.shape for _, tensor in trained + rest]
        self._sizes = [tensor.numel() for _, tensor in trained + rest]
        self._count = len(trained)
        self.trained = sum(self._sizes[: self._count])
        self.size = sum(self._sizes)
        self.dtype = trained[0][1].dtype
        self._constants = {n: b.detach().clone() for n, b in module.named_buffers() if not b.is_floating_point()}

    @property
    def layers(self) -> list[nn.Module]:
        """List the modules that have no children."""
        return [module for module in self._modules["train"].modules() if not any(module.children())]

    def flatten(self, module: nn.Module) -> Tensor:
        """Copy a module of this architecture into a vector (P,).

        Raises ModelError where the module's names or shapes are others.
        """
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if missing := [name for name in self.names if name not in tensors]:
            raise ModelError(f"the module has no {missing[0]!r}; every model of a run must have one architecture")
        for name, shape in zip(self.names, self._shapes, strict=True):
            if tensors[name].shape != shape:
                raise ModelError(
                    f"{name!r} must have shape {tuple(shape)}, got {tuple(tensors[name].shape)}; "
                    "every model of a run must have one architecture"
                )
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.names])

    def views(self, trained: Tensor, rest: Tensor) -> dict[str, Tensor]:
        """Name the pieces of a vector, given as its two parts (trained,), (P - trained,); no copy."""
        pieces = torch.split(trained, self._sizes[: self._count])
        if len(self._sizes) > self._count:
            pieces += torch.split(rest, self._sizes[self._count :])
        named = zip(self.names, pieces, self._shapes, strict=True)
        return {name: piece.view(shape) for name, piece, shape in named}

    def forward(self, trained: Tensor, rest: Tensor, x: Tensor, mode: Mode) -> Tensor:
        """Run the module: (n, *shape) -> (n, classes). Batch norm in training writes its statistics to `rest`."""
        constants = {name: buffer.clone() for name, buffer in self._constants.items()}
        outputs: Tensor = functional_call(self._modules[mode], {**self.views(trained, rest), **constants}, (x,))
        return outputs

    def to_module(self, vector: Tensor) -> nn.Module:
        """Make a module of its own, in scoring mode, from a vector (P,)."""
        module = copy.deepcopy(self._modules["score"]).to(vector.device)
        pieces = self.views(vector[: self.trained], vector[self.trained :])
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, piece in pieces.items():
                named[name].copy_(piece)
        return module

    def to(self, device: str | torch.device) -> FlatModel:
        """Move the constants and templates to a device; returns self."""
        for module in self._modules.values():
            module.to(device)
        self._constants = {name: buffer.to(device) for name, buffer in self._constants.items()}
        return self


def initial(flat: FlatModel, make_model: Callable[[], nn.Module], seed: int, *names: str | int) -> Tensor:
    """Draw a fresh start (P,): the module's own initialisation on the named random stream."""
    with seeded(seed, *names):
        return flat.flatten(make_model())


def _in_mode(module: nn.Module, mode: str) -> nn.Module:
    twin = copy.deepcopy(module).train(mode == "train")
    if mode == "objective":
        for layer in twin.modules():
            if isinstance(layer, _NormBase):
                layer.train()
    return twin


def _check(module: nn.Module) -> None:
    """Raise ModelError unless the module can be a flat vector."""
    kind = type(module).__name__
    trained = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"{kind}: {name!r} has no shape yet (a lazy layer); run one batch through the module first"
            )
        if tensor.is_meta:
            raise ModelError(f"{kind}: {name!r} is on the meta device and holds no numbers; build it on a real one")
        if tensor.is_sparse or tensor.is_quantized or tensor.is_complex():
            raise ModelError(f"{kind}: {name!r} is sparse, quantised or complex; only dense real tensors average")
        if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
            raise ModelError(f"{kind}: parameter {name!r} is {tensor.dtype}; only floating point can be averaged")
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            trained.append(tensor)
    if not trained:
        raise ModelError(f"{kind} has no trainable parameter; there is nothing to learn")
    if len(kinds := sorted({str(tensor.dtype) for tensor in trained})) > 1:
        raise ModelError(f"{kind} mixes {' and '.join(kinds)}; convert it to one, e.g. module.float()")
