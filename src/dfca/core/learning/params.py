"""A module as one flat vector, and back.

The vector holds P floats: first the trained parameters, then the floating-point buffers, such as the running
statistics of batch norm, which training changes without a gradient. All else is constant: frozen parameters
(requires_grad False), integer buffers, and buffers that are not persistent. Constants are part of the architecture: a
process holds them once, and they are neither trained, exchanged nor saved with a model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dfca.base.errors import ModelError
from dfca.core.learning.dense import dense_layers
from dfca.core.learning.inputs import Samples, arguments, outputs_of
from dfca.core.learning.layers import Mode, draws_noise, sequence
from dfca.core.learning.task import CLASSIFICATION, Task
from dfca.core.rng import seeded, stream

START_NOISE = 0.1
"""How far clusters that start from the same given weights are moved apart, in standard deviations of each tensor."""

MODES: tuple[Mode, ...] = ("train", "objective", "score")


class FlatModel:
    """A module's architecture as a pure function of a flat vector, and the task that it learns.

    names, shapes: of the tensors in the vector, in their order.
    count: number of tensors that gradient steps change, the first of `names`.
    trained: number of floats that gradient steps change, the first of the vector.
    sizes: number of floats of each tensor; size: P, the length of the vector.
    constants: the tensors that are not in the vector, by name.
    known: whether the module is a sequence of well-known layers (`learning.layers`), run by direct calls.
    dense: where the layers of a network of linear layers and ReLU stand (`dense`); None for any other module, and
        for a task whose loss is not written out there.
    noisy: whether a training step may draw random numbers from torch's global generator.
    """

    def __init__(self, module: nn.Module, task: Task = CLASSIFICATION, carried: Collection[str] = ()) -> None:
        """Describe a module; carried: constants that are in the vector nevertheless, as they were before 0.3."""
        _check(module)
        self.task = task
        module = copy.deepcopy(module)
        # One twin per mode, so that nothing is switched back and forth between calls; they share their tensors.
        self._modules = {mode: _in_mode(module, mode) for mode in MODES}
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        persistent = module.state_dict()
        rest: dict[str, Tensor] = {n: p for n, p in parameters.items() if n in carried and not p.requires_grad}
        rest |= {n: b for n, b in buffers.items() if b.is_floating_point() and (n in persistent or n in carried)}
        self.names = [*trained, *rest]
        self.shapes = [tensor.shape for tensor in (*trained.values(), *rest.values())]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.count = len(trained)
        self.trained = sum(self.sizes[: self.count])
        self.size = sum(self.sizes)
        self.dtype = next(iter(trained.values())).dtype
        self.constants = {n: t.detach() for n, t in {**parameters, **buffers}.items() if n not in {*trained, *rest}}
        self._written = {n: t for n, t in self.constants.items() if n in buffers}  # by some modules, while they run
        names = [*self.names, *self.constants]
        self._steps = {mode: sequence(twin, names, mode) for mode, twin in self._modules.items()}
        self.known = all(steps is not None for steps in self._steps.values())
        self.dense = None if task.residual is None else dense_layers(module, self.names)
        self.noisy = not self.known or draws_noise(module)

    def for_task(self, task: Task) -> FlatModel:
        """Return the same architecture, to learn another task."""
        twin = copy.copy(self)
        twin.task = task
        module = self._modules["train"]
        twin.dense = None if task.residual is None else dense_layers(module, self.names)
        return twin

    @property
    def layers(self) -> list[nn.Module]:
        """List the modules that have no children."""
        return [module for module in self._modules["train"].modules() if not any(module.children())]

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The constants that are parameters, by name."""
        return {name: tensor for name, tensor in self.constants.items() if name not in self._written}

    def flatten(self, module: nn.Module) -> Tensor:
        """Copy a module of this architecture into a vector (P,).

        Raises ModelError where the module's names or shapes are others.
        """
        return self.flatten_tensors({**dict(module.named_parameters()), **dict(module.named_buffers())})

    def flatten_tensors(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy named tensors of this architecture into a vector (P,).

        Raises ModelError where names or shapes are others.
        """
        if missing := [name for name in self.names if name not in tensors]:
            raise ModelError(f"the module has no {missing[0]!r}; every model of a run must have one architecture")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tensors[name].shape != shape:
                raise ModelError(
                    f"{name!r} must have shape {tuple(shape)}, got {tuple(tensors[name].shape)}; "
                    "every model of a run must have one architecture"
                )
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.names])

    def pieces(self, vectors: Tensor) -> list[Tensor]:
        """View a vector (P,) as the module's tensors, in the order of `names`; the first `count` are trained.

        Stacked vectors (C, P) give stacked tensors (C, *shape).
        """
        named = zip(vectors.split_with_sizes(self.sizes, dim=-1), self.shapes, strict=True)
        return [piece.view(*vectors.shape[:-1], *shape) for piece, shape in named]

    def rest_pieces(self, rest: Tensor) -> list[Tensor]:
        """View the part of a vector that is not trained (P - trained,) as the module's tensors."""
        named = zip(torch.split(rest, self.sizes[self.count :]), self.shapes[self.count :], strict=True)
        return [piece.view(shape) for piece, shape in named]

    def run(self, pieces: Sequence[Tensor], x: Samples, mode: Mode) -> Tensor:
        """Run the module on its tensors: (n, *shape) -> (n, outputs).

        In `train` mode batch norm writes its running statistics into the pieces.
        """
        steps = self._steps[mode]
        if steps is not None and isinstance(x, Tensor):
            if self.constants:
                pieces = [*pieces, *self.constants.values()]
            for step in steps:
                x = step(pieces, x)
            return x
        tensors = dict(zip(self.names, pieces, strict=True))
        if mode == "objective":  # batch norm would write here too
            for name in self.names[self.count :]:
                tensors[name] = tensors[name].clone()
        constants = {name: buffer.clone() for name, buffer in self._written.items()}
        positional, named = arguments(x)
        return outputs_of(functional_call(self._modules[mode], {**tensors, **constants}, positional, named))

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """View a vector (P,) as the module's tensors by name, with its frozen parameters."""
        return {**dict(zip(self.names, self.pieces(vector), strict=True)), **self.frozen}

    def to_module(self, vector: Tensor) -> nn.Module:
        """Make a module of its own, in scoring mode, from a vector (P,)."""
        module = copy.deepcopy(self._modules["score"]).to(vector.device)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, piece in zip(self.names, self.pieces(vector), strict=True):
                named[name].copy_(piece)
        return module

    def to(self, device: str | torch.device) -> FlatModel:
        """Move the constants and templates to a device; returns self."""
        for module in self._modules.values():
            module.to(device)
        self.constants = {name: tensor.to(device) for name, tensor in self.constants.items()}
        self._written = {name: self.constants[name] for name in self._written}
        return self


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A factory of modules whose models start from given weights instead of fresh draws.

    starts: tensors by name, one for all clusters or one for each. Cluster 0 starts from exactly these. Where one has to
    serve several clusters, the others get theta + START_NOISE std(theta) noise, tensor by tensor: equal models would
    stay equal. Constants are those of the first. Trained tensors that are not given, such as adapters of a pretrained
    network, are drawn, for every cluster its own; nothing gets noise then.
    """

    make: Callable[[], nn.Module]
    starts: tuple[Mapping[str, Tensor], ...]

    def __call__(self) -> nn.Module:
        """Build the module: its constants are the given ones, its trained weights are its own."""
        module = self.make()
        load_constants_(module, self.starts[0])
        return module

    def start(self, flat: FlatModel, seed: int, cluster: int, *who: str | int) -> Tensor:
        """Return the start (P,) of a cluster; where it is not the given one itself, that of a client.

        Raises ModelError where the weights are not those of the model.
        """
        alone = len(self.starts) == 1
        given = self.starts[0 if alone else cluster]
        if missing := [name for name in flat.names if name not in given]:
            with seeded(seed, "init", cluster, *who):
                drawn = dict(self.make().named_parameters())
            return flat.flatten_tensors({**{name: drawn[name] for name in missing if name in drawn}, **given})
        vector = flat.flatten_tensors(given)
        if not alone or cluster == 0:
            return vector
        noise = torch.randn(flat.trained, generator=stream(seed, "start", cluster, *who), dtype=torch.float64)
        sizes = flat.sizes[: flat.count]
        pieces = zip(torch.split(vector, flat.sizes), torch.split(noise, sizes), strict=False)
        for piece, draw in pieces:
            piece += START_NOISE * piece.std(correction=0) * draw.to(piece.dtype)
        return vector


def initial(flat: FlatModel, make_model: Callable[[], nn.Module], seed: int, *names: str | int) -> Tensor:
    """Draw a fresh start (P,): the module's own initialisation on the named random stream; or take a given one.

    names: "init", the cluster, and the client where clients start apart.
    """
    if isinstance(make_model, Pretrained):
        _, cluster, *who = names
        return make_model.start(flat, seed, int(cluster), *who)
    with seeded(seed, *names):
        return flat.flatten(make_model())


def load_constants_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the frozen parameters of a module."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad and name in tensors:
                parameter.copy_(tensors[name])


def _in_mode(module: nn.Module, mode: str) -> nn.Module:
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, dict(shared)).train(mode == "train")
    if mode == "objective":
        for layer in twin.modules():
            if isinstance(layer, _NormBase):
                layer.train()
    return twin


def _check(module: nn.Module) -> None:
    """Raise ModelError unless the module can be a flat vector."""
    kind = type(module).__name__
    for name, layer in module.named_modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats and layer.momentum is None:
            raise ModelError(
                f"{kind}: {name or kind!r} has momentum=None, a cumulative average by a counter that is not exchanged; "
                "give it a momentum, e.g. 0.1, or track_running_stats=False"
            )
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
