"""The samples of all clients, back to back in one tensor, and the split into training and test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dfca.core.dense import inner_products
from dfca.errors import ConfigError, DataError

PRODUCTS_BYTES = 2**28
"""The memory that the inner products of all samples may take; kept, they need not be computed in every round."""

SamplesLike = tuple[Any, Any] | Dataset[Any]


@dataclass(frozen=True, eq=False)
class ClientData:
    """The samples of N clients.

    x: `(total, *shape)` float32 (int64 for tokens). y: `(total,)` int64. offsets: N + 1 numbers; client i holds the
    rows `offsets[i]` to `offsets[i + 1]`.
    """

    x: Tensor
    y: Tensor
    offsets: tuple[int, ...]

    @property
    def clients(self) -> int:
        """Count the clients, N."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Count the samples of each client."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    @cached_property
    def largest(self) -> Tensor:
        """Find the largest |x| of each client, (N,) in double precision on the CPU; NaN where there is one."""
        sides = (self.of(client)[0].aminmax() for client in range(self.clients))
        return torch.stack([torch.maximum(-low, high) for low, high in sides]).cpu().double()

    @cached_property
    def products(self) -> Tensor | None:
        """Compute the inner products of every client's samples, (N, n, n), unless they are more than PRODUCTS_BYTES."""
        stacked = self.stacked()
        if stacked is None or not products_fit(self.clients, self.sizes[0], self.x.dtype):
            return None
        return inner_products(stacked[0].flatten(2))

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return views of one client's samples: x `(n, *shape)`, y `(n,)`."""
        rows = slice(self.offsets[client], self.offsets[client + 1])
        return self.x[rows], self.y[rows]

    def stacked(self) -> tuple[Tensor, Tensor] | None:
        """Return views x `(N, n, *shape)` and y `(N, n)`, None where clients hold different numbers of samples."""
        if len(set(self.sizes)) != 1:
            return None
        return self.x.view(self.clients, -1, *self.x.shape[1:]), self.y.view(self.clients, -1)

    def subset(self, clients: Sequence[int]) -> ClientData:
        """Copy the samples of some clients, in that order."""
        if not clients:
            return ClientData(self.x[:0], self.y[:0], (0,))
        return _concatenate([self.of(client) for client in clients])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ClientData:
        """Move the samples to a device; floating-point ones take the type, if one is given."""
        kind = dtype if self.x.is_floating_point() else None
        return ClientData(self.x.to(device, kind), self.y.to(device), self.offsets)


def products_fit(clients: int, samples: int, dtype: torch.dtype) -> bool:
    """Return whether the inner products of that many samples per client are kept in memory."""
    return clients * samples**2 * dtype.itemsize <= PRODUCTS_BYTES


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of each client, for training and for testing.

    clusters: `(N,)` int64, the true cluster of each client, None where it is unknown. notes: printed once for the
    user.
    """

    train: ClientData
    test: ClientData
    clusters: Tensor | None
    classes: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of_clients(
        cls,
        train: Sequence[SamplesLike],
        test: Sequence[SamplesLike],
        clusters: Sequence[int] | Tensor | None = None,
        classes: int | None = None,
    ) -> Split:
        """Make a split of a user's own data: per client a pair `(x, y)` of arrays, or a map-style torch Dataset.

        x is `(n, *shape)`, floats as they are, uint8 (divided by 255) or other integers as they are (tokens);
        y is `(n,)`, integers in 0..classes-1.
        Images are channel-first `(c, h, w)`, sensor windows `(channels, time)`. `classes` is found from the labels
        where it is not given.

        Raises DataError naming the client: no samples, NaN, labels outside the classes, unequal shapes.
        """
        if len(train) != len(test) or not train:
            raise DataError(f"train and test must list the same clients, at least 1, got {len(train)} and {len(test)}")
        held, kept = _join(train, "training"), _join(test, "test")
        if held.x.shape[1:] != kept.x.shape[1:]:
            raise DataError(
                f"samples must have equal shapes, training has {tuple(held.x.shape[1:])}, "
                f"test {tuple(kept.x.shape[1:])}"
            )
        if classes is None:
            classes = int(max(held.y.max(), kept.y.max())) + 1
        true = None if clusters is None else torch.as_tensor(clusters, dtype=torch.int64)
        split = cls(held, kept, true, classes)
        validate(split)
        return split

    def to(self, device: torch.device | str) -> Split:
        """Move everything to a device."""
        clusters = None if self.clusters is None else self.clusters.to(device)
        return Split(self.train.to(device), self.test.to(device), clusters, self.classes, self.notes)


def validate(split: Split) -> None:
    """Check a split once, at the public edge.

    Raises DataError naming the first client without samples, with NaN or infinity, or with a label outside
    0..classes-1; ConfigError for clusters that do not fit the clients.
    """
    for data, part in ((split.train, "training"), (split.test, "test")):
        for client, size in enumerate(data.sizes):
            if not size:
                raise _no_samples(client, part)
        low, high = torch.aminmax(data.x)
        if not (low.isfinite() and high.isfinite()):  # aminmax returns NaN where there is one
            bad = (~data.x.reshape(len(data.x), -1).isfinite().all(1)).nonzero()[0].item()
            raise DataError(
                f"client {_holder(data, int(bad))} has NaN or infinity in its {part} samples; "
                "every number must be finite"
            )
        outside = ((data.y < 0) | (data.y >= split.classes)).nonzero()
        if len(outside):
            row = int(outside[0])
            raise DataError(
                f"client {_holder(data, row)} has the {part} label {int(data.y[row])}; "
                f"labels must be in 0..{split.classes - 1}"
            )
    if split.clusters is not None:
        if split.clusters.shape != (split.train.clients,):
            raise ConfigError(
                f"clusters must name one cluster per client ({split.train.clients}), "
                f"got shape {tuple(split.clusters.shape)}"
            )
        if split.clusters.min() < 0:
            raise ConfigError(f"clusters must be >= 0, got {int(split.clusters.min())}")


def _no_samples(client: int, part: str) -> DataError:
    return DataError(f"client {client} has no {part} samples; give it at least 1 or leave the client out")


def _holder(data: ClientData, row: int) -> int:
    return next(client for client, end in enumerate(data.offsets[1:]) if row < end)


def _join(clients: Sequence[SamplesLike], part: str) -> ClientData:
    pairs = [_to_tensors(samples, f"client {i} ({part})") for i, samples in enumerate(clients)]
    shape = pairs[0][0].shape[1:]
    for i, (x, _) in enumerate(pairs):
        if not len(x):
            raise _no_samples(i, part)
        if x.shape[1:] != shape:
            raise DataError(
                f"samples must have equal shapes, client 0 ({part}) has {tuple(shape)}, "
                f"client {i} has {tuple(x.shape[1:])}"
            )
    return _concatenate(pairs)


def _concatenate(pairs: Sequence[tuple[Tensor, Tensor]]) -> ClientData:
    offsets = accumulate((len(y) for _, y in pairs), initial=0)
    return ClientData(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), tuple(offsets))


def _to_tensors(samples: SamplesLike, who: str) -> tuple[Tensor, Tensor]:
    """Turn one client's samples into x float32 (int64 for tokens) and y int64."""
    x, y = _to_pair(samples, who)
    if x.dtype == torch.uint8:
        x = x.to(torch.float32).div_(255)
    elif x.dtype == torch.bool or x.is_complex():
        raise DataError(f"x of {who} is {x.dtype}; give floats, uint8 in 0..255, or integers (tokens)")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"labels of {who} are {y.dtype}; give integers in 0..classes-1")
    if y.shape != (len(x),):
        raise DataError(f"{who} has {len(x)} samples but labels of shape {tuple(y.shape)}; give one per sample")
    return x.to(torch.float32 if x.is_floating_point() else torch.int64), y.to(torch.int64)


def _to_pair(samples: SamplesLike, who: str) -> tuple[Tensor, Tensor]:
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        samples = samples.tensors
    if isinstance(samples, tuple | list) and len(samples) == 2:
        return _to_tensor(samples[0], who), _to_tensor(samples[1], who)
    if isinstance(samples, IterableDataset) or not hasattr(samples, "__getitem__"):
        raise DataError(f"{who} is a {type(samples).__name__}; give a pair (x, y) or a map-style torch Dataset")
    items = [samples[i] for i in range(len(samples))]  # type: ignore[arg-type]
    if not items:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    x = [_to_tensor(item[0], who) for item in items]
    if len({tensor.shape for tensor in x}) != 1:
        raise DataError(f"samples of {who} must have equal shapes; resize or pad them")
    return torch.stack(x), torch.stack([_to_tensor(item[1], who) for item in items])


def _to_tensor(value: Any, who: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic | int | list | tuple):
        try:
            return torch.tensor(np.asarray(value))
        except (TypeError, ValueError) as error:
            raise DataError(f"{who} holds {type(value).__name__} that is no numeric array ({error})") from error
    raise DataError(f"{who} holds a {type(value).__name__}; give tensors or arrays (torchvision: transform=ToTensor())")
