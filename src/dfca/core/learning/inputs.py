"""What a model is called with: one tensor, or several (token ids and a mask), positional or by name.

`Inputs` holds several tensors with one row per sample and is indexed like a tensor, so that code that picks
samples works for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dfca.base.errors import ModelError


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors (n, *shape) that belong to the same n samples; names: of the arguments, None for positional ones."""

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, value: Sequence[Tensor] | Mapping[str, Tensor]) -> Inputs:
        """Hold a tuple, called as model(*tensors), or a dict, called as model(**tensors)."""
        if isinstance(value, Mapping):
            return cls(tuple(value.values()), tuple(map(str, value)))
        return cls(tuple(value))

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Change every tensor."""
        return Inputs(tuple(change(tensor) for tensor in self.tensors), self.names)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: slice | Tensor | list[int]) -> Inputs:
        return self.map(lambda tensor: tensor[rows])

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors[0].device

    def clone(self) -> Inputs:
        """Copy the tensors."""
        return self.map(Tensor.clone)


@dataclass(frozen=True, eq=False)
class Lazy:
    """Samples, one tensor each, that are read when they are used, and read anew in every round and epoch.

    read: returns those of some rows (n,) in a round and an epoch; rows: which; sample: the shape of one; dtype: as it
    is kept; fixed: whether they are the same in every epoch; kind: what floating-point samples become, None for no
    change.
    """

    read: Callable[[Tensor, int, int], list[Tensor]]
    rows: Tensor
    sample: tuple[int, ...]
    dtype: torch.dtype
    fixed: bool = False
    device: torch.device | str = "cpu"
    kind: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice | Tensor) -> Lazy:
        return replace(self, rows=self.rows[rows if isinstance(rows, slice) else rows.cpu()])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all samples."""
        return (len(self.rows), *self.sample)

    def now(self, round: int, epoch: int = 0) -> Tensor:
        """Read all samples, in a round of their client and an epoch of it; round -1: outside of rounds."""
        read = self.read(self.rows, round, epoch)
        if not read:
            return torch.empty(0, *self.sample, dtype=self.dtype)
        x = torch.stack(read)
        return sent(x, self.device, self.kind if x.is_floating_point() else None)


Samples = Tensor | Inputs
"""The inputs of n samples."""
AnySamples = TypeVar("AnySamples", Tensor, Inputs, Samples)


def change(x: AnySamples, function: Callable[[Tensor], Tensor]) -> AnySamples:
    """Change the tensor, or every one of several."""
    return x.map(function) if isinstance(x, Inputs) else function(x)


def tensors_of(x: Samples) -> tuple[Tensor, ...]:
    """List the tensors."""
    return x.tensors if isinstance(x, Inputs) else (x,)


def join(parts: Sequence[Samples]) -> Samples:
    """Put the samples of several parts one after the other; all are of one kind."""
    first = parts[0]
    if isinstance(first, Lazy):
        return replace(first, rows=torch.cat([part.rows for part in parts if isinstance(part, Lazy)]))
    if isinstance(first, Inputs):
        columns = zip(*(tensors_of(part) for part in parts), strict=True)
        return Inputs(tuple(torch.cat(column) for column in columns), first.names)
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def moved(x: AnySamples, device: torch.device | str, dtype: torch.dtype | None = None) -> AnySamples:
    """Move samples to a device; floating-point ones take the type, if one is given."""
    if isinstance(x, Lazy):
        return replace(x, device=device, kind=dtype or x.kind)
    return change(x, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None))


def sent(batch: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a batch of the host to a device: to CUDA out of pinned memory, so that the host does not wait for it."""
    if torch.device(device).type == "cuda" and batch.device.type == "cpu":
        batch = batch.pin_memory()
    return batch.to(device, dtype, non_blocking=True)


def shape_of(x: Samples) -> Any:
    """Return the shape of one sample: a tuple of numbers; of several tensors, a tuple or dict of such tuples."""
    if isinstance(x, Tensor | Lazy):
        return tuple(x.shape[1:])
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in x.tensors)
    return shapes if x.names is None else dict(zip(x.names, shapes, strict=True))


def arguments(x: Samples) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional and the named arguments of a model."""
    if isinstance(x, Tensor):
        return (x,), {}
    return (x.tensors, {}) if x.names is None else ((), dict(zip(x.names, x.tensors, strict=True)))


def outputs_of(returned: Any) -> Tensor:
    """Find the outputs in what a model returns: a tensor, an object with `.logits`, a dict (its "logits", or its only
    tensor) or a tuple (its first).

    Raises ModelError for anything else.
    """
    if isinstance(returned, Tensor):
        return returned
    if isinstance(logits := getattr(returned, "logits", None), Tensor):
        return logits
    if isinstance(returned, Mapping):
        tensors = [value for value in returned.values() if isinstance(value, Tensor)]
        if isinstance(logits := returned.get("logits"), Tensor):
            return logits
        if len(tensors) == 1:
            return tensors[0]
        raise ModelError(
            f"the model returns a dict with {', '.join(map(repr, returned)) or 'nothing'}; "
            'name the outputs "logits", or return no other tensor'
        )
    if isinstance(returned, tuple | list) and returned and isinstance(returned[0], Tensor):
        return returned[0]
    raise ModelError(
        f"the model returns {type(returned).__name__}; it must return a tensor, an object with .logits, a dict with "
        '"logits", or a tuple that begins with the outputs'
    )
