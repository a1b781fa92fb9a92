"""The samples of all clients, back to back in one tensor (or several), and the split into training and test data."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dfca.base.errors import ConfigError, DataError, DfcaWarning
from dfca.base.notebook import table
from dfca.core.learning.dense import inner_products
from dfca.core.learning.inputs import Inputs, Lazy, Samples, change, join, moved, shape_of, tensors_of
from dfca.core.learning.task import CLASSIFICATION, NO_TOKEN, Task, build_task
from dfca.data.lazy import Rows, join_lazily, pair_of

PRODUCTS_BYTES = 2**28
"""The memory that the inner products of all samples may take; kept, they need not be computed in every round."""

SCALES = (0.01, 100.0)
"""Standard deviations of the targets of a regression that are not remarked on."""

SamplesLike = tuple[Any, Any] | Dataset[Any]
REREAD = 8  # samples of a Dataset that are read twice, to notice a random augmentation


@dataclass(frozen=True, eq=False)
class ClientData:
    """The samples of N clients, back to back.

    Attributes:
        x: `(total, *shape)` as it is kept: floats, tokens (int64) or bytes (uint8); or several such tensors; or samples
            that are read when they are used. `of` and `stacked` turn bytes into numbers in 0..1.
        y: `(total,)` int64, or the other targets of a task, `(total, ...)`.
        offsets: N + 1 numbers; client i holds the rows `offsets[i]` to `offsets[i + 1]`.
        floats: The type that bytes become.

    Example:
        >>> import dfca, torch
        >>> data = dfca.ClientData(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64), (0, 2, 5))
        >>> data.clients, data.sizes
        (2, (2, 3))
    """

    x: Any  # `Samples`; nearly all users know that it is one tensor
    y: Tensor
    offsets: tuple[int, ...]
    floats: torch.dtype = torch.float32

    @property
    def clients(self) -> int:
        """The number of clients, N."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of samples of each client."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    @cached_property
    def largest(self) -> Tensor:
        """The largest |x| of each client, (N,) in double precision on the CPU; NaN where there is one."""
        sides = (tensors_of(self.of(client)[0])[0].aminmax() for client in range(self.clients))
        return torch.stack([torch.maximum(-low, high) for low, high in sides]).cpu().double()

    @cached_property
    def products(self) -> Tensor | None:
        """The inner products of every client's samples, (N, n, n); None if they take more than PRODUCTS_BYTES."""
        stacked = self.stacked()
        if stacked is None or not products_fit(self.clients, self.sizes[0], stacked[0][:0].dtype):
            return None
        return inner_products(stacked[0][:].flatten(2))

    @property
    def shape(self) -> Any:
        """The shape of one sample; of several tensors, a tuple or dict of shapes."""
        return shape_of(self.x)

    @property
    def nbytes(self) -> int:
        """The bytes of the inputs, 0 where they are read when they are used."""
        if isinstance(self.x, Lazy):
            return 0
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(self.x))

    def of(self, client: int, round: int = -1, epoch: int = 0) -> tuple[Any, Tensor]:
        """View one client's samples.

        Args:
            client: Its number.
            round: For which samples that are read when they are used are read; -1: for none.
            epoch: Of that round.

        Returns:
            x `(n, *shape)` and y `(n, ...)`.
        """
        x, y = self.stored(client)
        return change(x.now(round, epoch) if isinstance(x, Lazy) else x, self._numbers), y

    def stored(self, client: int) -> tuple[Any, Tensor]:
        """View one client's samples as they are kept.

        Args:
            client: Its number.

        Returns:
            x `(n, *shape)`, bytes where these were given, and y `(n, ...)`.
        """
        rows = slice(self.offsets[client], self.offsets[client + 1])
        return self.x[rows], self.y[rows]

    def _numbers(self, x: Tensor) -> Tensor:
        return _from_bytes(x).to(self.floats) if x.dtype == torch.uint8 else x

    def stacked(self) -> tuple[Any, Tensor] | None:
        """View the samples of all clients.

        Returns:
            x `(N, n, *shape)`, bytes as what becomes numbers where it is indexed, and y `(N, n, ...)`; None where
            clients hold different numbers of samples, or a sample is several tensors.
        """
        return self._stacked

    @cached_property
    def _stacked(self) -> tuple[Any, Tensor] | None:
        if len(set(self.sizes)) != 1 or not isinstance(self.x, Tensor):
            return None
        shape = (self.clients, self.sizes[0])
        x, y = self.x.view(*shape, *self.x.shape[1:]), self.y.view(*shape, *self.y.shape[1:])
        return (_Bytes(x, self._numbers) if x.dtype == torch.uint8 else x), y

    def subset(self, clients: Sequence[int]) -> ClientData:
        """Copy the samples of some clients.

        Args:
            clients: Their numbers.

        Returns:
            Their samples, in that order.
        """
        if not clients:
            return replace(self, x=self.x[:0], y=self.y[:0], offsets=(0,))
        return replace(_concatenate([self.stored(client) for client in clients]), floats=self.floats)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ClientData:
        """Move the samples to a device.

        Args:
            device: Where to.
            dtype: The new type of floating-point samples and targets; None: no change.

        Returns:
            The moved samples.
        """
        kind = dtype if self.y.is_floating_point() else None
        return ClientData(moved(self.x, device, dtype), self.y.to(device, kind), self.offsets, dtype or self.floats)


class _Bytes:
    """Stacked bytes (N, n, *shape) that become numbers where they are indexed: only what is used takes their memory."""

    def __init__(self, x: Tensor, numbers: Callable[[Tensor], Tensor]) -> None:
        self._x, self._numbers = x, numbers
        self.shape = x.shape

    def __getitem__(self, rows: Any) -> Tensor:
        return self._numbers(self._x[rows])

    def dim(self) -> int:
        return self._x.dim()

    def element_size(self) -> int:
        return self[:0].element_size()


def products_fit(clients: int, samples: int, dtype: torch.dtype) -> bool:
    """Return whether the inner products of that many samples per client are kept in memory."""
    return clients * samples**2 * dtype.itemsize <= PRODUCTS_BYTES


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """The samples of each client, for training and for testing.

    Attributes:
        train: Training samples.
        test: Test samples.
        clusters: The true cluster of each client, `(N,)` int64; None where it is unknown.
        classes: The numbers that a model gives for a sample: of a regression, the values to predict; of tokens, the
            size of the vocabulary.
        notes: Printed once for the user.
        task: What is predicted, with the loss and metric that a simulation uses by default.

    Example:
        >>> import dfca, torch
        >>> pairs = [(torch.randn(10, 3), [0, 1] * 5) for client in range(4)]
        >>> dfca.Split.of_clients(pairs, pairs, clusters=[0, 0, 1, 1])
        Split(4 clients with 10 training and 10 test samples each, shape (3,), 2 classes, 2 true clusters)
    """

    train: ClientData
    test: ClientData
    clusters: Tensor | None
    classes: int
    notes: tuple[str, ...] = ()
    task: Task = CLASSIFICATION

    @classmethod
    def of_clients(
        cls,
        train: Sequence[SamplesLike],
        test: Sequence[SamplesLike],
        clusters: Sequence[int] | Tensor | None = None,
        classes: int | None = None,
        task: str | Task = CLASSIFICATION,
        lazy: bool = False,
    ) -> Split:
        """Make a split of your own data: per client a pair `(x, y)` of arrays, or a map-style torch Dataset.

        x is `(n, *shape)`: floats, uint8 (kept so, divided by 255 where it is used) or other integers (tokens); or a
        tuple or dict of such arrays, with which the model is called as `model(*x)` or `model(**x)`. Images are
        channel-first `(c, h, w)`, sensor windows `(channels, time)`. y is `(n,)` integers in 0..classes-1 for
        "classification", `(n, ...)` numbers for "regression", `(n, labels)` of 0 and 1 for "multilabel", `(n, T)`
        integers for "tokens".

        Args:
            train: The training samples of each client.
            test: The test samples of each client, in the same order.
            clusters: The true cluster of each client, where it is known.
            classes: The number of classes; default: counted from the labels.
            task: What is predicted.
            lazy: Whether samples are read when they are used, and anew in every round and epoch, instead of once.

        Returns:
            The split, checked.

        Raises:
            DataError: If a client has no samples, NaN, labels outside the classes, or samples of another shape.
            ConfigError: If clusters are not one integer >= 0 per client.
        """
        if len(train) != len(test) or not train:
            raise DataError(f"train and test must list the same clients, at least 1, got {len(train)} and {len(test)}")
        task = build_task(task) if isinstance(task, str) else task
        joined = _join_lazily if lazy else _join
        held, kept = joined(train, "training", task), joined(test, "test", task)
        for what, ours, theirs in (
            ("samples", held.shape, kept.shape),
            ("targets", tuple(held.y.shape[1:]), tuple(kept.y.shape[1:])),
        ):
            if ours != theirs:
                raise DataError(f"{what} must have equal shapes, training has {ours}, test {theirs}")
        if classes is None:
            counted = task.targets in ("classes", "tokens")
            classes = task.outputs(held.y, int(max(held.y.max(), kept.y.max())) + 1 if counted else 0)
        true = None if clusters is None else _true_clusters(clusters)
        split = cls(held, kept, true, classes, _scale_notes(held.y, task), task)
        validate(split)
        return split

    def __repr__(self) -> str:
        return describe(self)

    def _repr_html_(self) -> str:
        return to_html(self)

    def to(self, device: torch.device | str) -> Split:
        """Move everything to a device.

        Args:
            device: Where to.

        Returns:
            The moved split.
        """
        clusters = None if self.clusters is None else self.clusters.to(device)
        return replace(self, train=self.train.to(device), test=self.test.to(device), clusters=clusters)


def validate(split: Split) -> None:
    """Check a split once, at the public edge. Raises DataError with the first bad client, or ConfigError (clusters)."""
    for data, part in ((split.train, "training"), (split.test, "test")):
        for client, size in enumerate(data.sizes):
            if not size:
                raise _no_samples(client, part)
        for tensor in () if isinstance(data.x, Lazy) else tensors_of(data.x):  # these were checked one by one
            _check_finite(data, tensor, f"{part} samples")
        _check_targets(data, part, split)
    if split.clusters is not None:
        if split.clusters.shape != (split.train.clients,):
            raise ConfigError(
                f"clusters must name one cluster per client ({split.train.clients}), "
                f"got shape {tuple(split.clusters.shape)}"
            )
        if split.clusters.min() < 0:
            raise ConfigError(f"clusters must be >= 0, got {int(split.clusters.min())}")


def _true_clusters(clusters: Sequence[int] | Tensor) -> Tensor:
    """Make a tensor of the true clusters; raises ConfigError for names, fractions and lists of lists."""
    array = clusters.cpu().numpy() if isinstance(clusters, Tensor) else np.array(clusters, dtype=object)
    for cluster in array.ravel().tolist():
        if isinstance(cluster, bool) or not isinstance(cluster, int | np.integer):
            raise ConfigError(f"clusters must be integers >= 0, one per client, got {cluster!r}; number them 0, 1, ...")
    return torch.from_numpy(array.astype(np.int64))


def _check_finite(data: ClientData, tensor: Tensor, what: str) -> None:
    low, high = torch.aminmax(tensor)
    if not (low.isfinite() and high.isfinite()):  # aminmax returns NaN where there is one
        bad = (~tensor.reshape(len(tensor), -1).isfinite().all(1)).nonzero()[0].item()
        raise DataError(
            f"client {_holder(data, int(bad))} has NaN or infinity in its {what}; every number must be finite"
        )


def _check_targets(data: ClientData, part: str, split: Split) -> None:
    y, kind = data.y, split.task.targets
    if kind in ("classes", "tokens"):
        wrong, allowed = (y < 0) | (y >= split.classes), f"0..{split.classes - 1}"
        if kind == "tokens":
            wrong, allowed = wrong & (y != NO_TOKEN), f"{allowed}, or {NO_TOKEN} where there is no token"
    elif kind == "labels":
        wrong, allowed = (y != 0) & (y != 1), "{0, 1}"
    else:
        if y.is_floating_point():
            _check_finite(data, y, f"{part} targets")
        return
    outside = wrong.nonzero()
    if len(outside):
        place = tuple(outside[0].tolist())
        label = y[place].item()
        raise DataError(f"client {_holder(data, place[0])} has the {part} label {label:g}; labels must be in {allowed}")


def _scale_notes(y: Tensor, task: Task) -> tuple[str, ...]:
    """Note targets whose losses are far from 1: steps would be too long or too short, and elections count in fixed
    point."""
    if task.targets != "numbers" or not y.isfinite().all():
        return ()
    deviation = float(y.double().std(correction=0))
    if deviation == 0 or SCALES[0] <= deviation <= SCALES[1]:
        return ()
    return (
        f"the targets have a standard deviation of {deviation:.3g}; scale them to about 1, "
        "for learning rates and elections are made for losses of that size",
    )


def _no_samples(client: int, part: str) -> DataError:
    return DataError(f"client {client} has no {part} samples; give it at least 1 or leave the client out")


def _holder(data: ClientData, row: int) -> int:
    return next(client for client, end in enumerate(data.offsets[1:]) if row < end)


def _join(clients: Sequence[SamplesLike], part: str, task: Task) -> ClientData:
    pairs = [_to_tensors(samples, f"client {i} ({part})", task) for i, samples in enumerate(clients)]
    first_x, first_y = shape_of(pairs[0][0]), tuple(pairs[0][1].shape[1:])
    for i, (x, y) in enumerate(pairs):
        if not len(x):
            raise _no_samples(i, part)
        for what, first, mine in (("samples", first_x, shape_of(x)), ("targets", first_y, tuple(y.shape[1:]))):
            if mine != first:
                raise DataError(f"{what} must have equal shapes, client 0 ({part}) has {first}, client {i} has {mine}")
    if len({tuple(tensor.dtype for tensor in tensors_of(x)) for x, _ in pairs}) > 1:  # bytes here, floats there
        pairs = [(change(x, _from_bytes), y) for x, y in pairs]
    return _concatenate(pairs)


def _join_lazily(clients: Sequence[SamplesLike], part: str, task: Task) -> ClientData:
    """Join samples without keeping them: each is looked at once, and all targets are kept."""
    names = [f"client {i} ({part})" for i in range(len(clients))]
    datasets = [_lazy_rows(samples, who) for samples, who in zip(clients, names, strict=True)]
    for i, dataset in enumerate(datasets):
        if not len(dataset):
            raise _no_samples(i, part)

    def convert(client: int, value: Any) -> Tensor:
        x = change(_to_inputs(value, who := names[client]), lambda tensor: _to_numbers(tensor, who, several=False))
        if not isinstance(x, Tensor):
            raise DataError(f"samples of {who} are several tensors, and lazy ones must be one; leave lazy out")
        if not bool(x.isfinite().all()):
            raise DataError(f"{who} has NaN or infinity in its samples; every number must be finite")
        return x

    x, labels = join_lazily(datasets, convert)
    targets = []
    for mine, who in zip(labels, names, strict=True):
        y = _to_targets(torch.stack([_to_tensor(label, who) for label in mine]), who, task)
        if task.targets == "classes" and y.dim() != 1:
            raise DataError(f"{who} has labels of shape {tuple(y.shape)}; give one per sample")
        targets.append(y)
    return ClientData(x, torch.cat(targets), tuple(accumulate(map(len, targets), initial=0)))


def _lazy_rows(samples: SamplesLike, who: str) -> Any:
    """Return one client's samples as something with a length whose items are pairs."""
    if isinstance(samples, tuple | list) and len(samples) == 2 and not isinstance(samples, Dataset):
        x, y = samples
        if len(x) != len(y):
            raise DataError(f"{who} has {len(x)} samples but {len(y)} labels; give one per sample")
        return Rows(x, y)
    if isinstance(samples, IterableDataset) or not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise DataError(f"{who} is a {type(samples).__name__}; give a pair (x, y) or a map-style torch Dataset")
    return samples


def _from_bytes(x: Tensor) -> Tensor:
    """Turn bytes into float32 in 0..1; anything else stays."""
    return x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x


def _concatenate(pairs: Sequence[tuple[Samples, Tensor]]) -> ClientData:
    offsets = accumulate((len(y) for _, y in pairs), initial=0)
    return ClientData(join([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), tuple(offsets))


def _to_tensors(samples: SamplesLike, who: str, task: Task) -> tuple[Samples, Tensor]:
    """Turn one client's samples into x float32 (int64 for tokens, bytes stay) and y as the task wants it."""
    x, y = _to_pair(samples, who)
    y = _to_targets(y, who, task)
    if len({len(tensor) for tensor in tensors_of(x)}) != 1:
        raise DataError(f"the inputs of {who} have {[len(t) for t in tensors_of(x)]} rows; give one per sample in each")
    if task.targets == "classes" and y.shape != (len(x),):
        several = y.dim() > 1 and len(y) == len(x)
        binary = several and bool(((y == 0) | (y == 1)).all())
        kind = 'task="multilabel"' if binary else 'task="tokens" for the next tokens of a sequence'
        way = f"or say what they are: {kind}" if several else "in the order of the samples"
        raise DataError(f"{who} has {len(x)} samples but labels of shape {tuple(y.shape)}; give one per sample, {way}")
    if y.dim() == 0 or len(y) != len(x) or (task.targets in ("labels", "tokens") and y.dim() != 2 and len(y)):
        rest = {"labels": ", labels", "tokens": ", tokens"}.get(task.targets, ", ...")
        raise DataError(
            f"{who} has {len(x)} samples but targets of shape {tuple(y.shape)}; "
            f'give ({len(x)}{rest}) for the task "{task.name}"'
        )
    several = isinstance(x, Inputs)
    return change(x, lambda tensor: _to_numbers(tensor, who, several)), y


def _to_numbers(x: Tensor, who: str, several: bool) -> Tensor:
    if x.dtype == torch.uint8 or (x.dtype == torch.bool and several):
        return x  # bytes, or a mask
    if x.dtype == torch.bool or x.is_complex():
        raise DataError(f"x of {who} is {x.dtype}; give floats, uint8 in 0..255, or integers (tokens)")
    return x.to(torch.float32 if x.is_floating_point() else torch.int64)


def _to_targets(y: Tensor, who: str, task: Task) -> Tensor:
    """Turn targets into int64 for classes and tokens, float32 for numbers and labels."""
    kind = task.targets
    if y.is_complex():
        raise DataError(f"labels of {who} are {y.dtype}; give real numbers")
    if kind in ("numbers", "labels"):
        return y.to(torch.float32)
    if kind == "any":
        return y.to(torch.float32) if y.is_floating_point() else y
    if y.is_floating_point() or y.dtype == torch.bool:
        labels = y.dtype == torch.bool or (y.dim() > 1 and bool(((y == 0) | (y == 1)).all()))
        raise DataError(
            f"labels of {who} are {y.dtype}; give integers in 0..classes-1, "
            f'or say what they are: task="{"multilabel" if labels else "regression"}"'
        )
    return y.to(torch.int64)


def _to_pair(samples: SamplesLike, who: str) -> tuple[Samples, Tensor]:
    if isinstance(samples, TensorDataset) and len(samples.tensors) >= 2:
        *first, last = samples.tensors
        samples = (first[0] if len(first) == 1 else tuple(first), last)
    if isinstance(samples, tuple | list) and len(samples) == 2:
        return _to_inputs(samples[0], who), _to_tensor(samples[1], who)
    if isinstance(samples, IterableDataset) or not hasattr(samples, "__getitem__"):
        raise DataError(f"{who} is a {type(samples).__name__}; give a pair (x, y) or a map-style torch Dataset")
    items = [pair_of(samples[i], who) for i in range(len(samples))]  # type: ignore[arg-type]
    if not items:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    x = [_to_inputs(item[0], who) for item in items]
    if len({tuple(tensor.shape for tensor in tensors_of(sample)) for sample in x}) != 1:
        raise DataError(f"samples of {who} must have equal shapes; resize or pad them")
    _warn_of_augmentation(samples, x[:REREAD], who)
    return join([change(sample, lambda tensor: tensor[None]) for sample in x]), torch.stack(
        [_to_tensor(item[1], who) for item in items]
    )


def _warn_of_augmentation(dataset: Any, first: list[Samples], who: str) -> None:
    """Warn where a dataset gives another sample when it is read again: it is read once."""
    with torch.random.fork_rng(devices=[]):
        again = [_to_inputs(dataset[i][0], who) for i in range(len(first))]
    pairs = zip(first, again, strict=True)
    tensors = [pair for one, two in pairs for pair in zip(tensors_of(one), tensors_of(two), strict=True)]
    if not all(a.shape == b.shape and bool(((a == b) | (a != a)).all()) for a, b in tensors):
        warnings.warn(
            f"{who} gives other samples when it is read again, as a random augmentation does; it is read once, so that "
            "every round trains on the same ones; take the augmentation out of the dataset and give augment= "
            "(data.augment), or have it read anew in every round: split_from(..., lazy=True)",
            DfcaWarning,
            stacklevel=2,
        )


def _to_inputs(value: Any, who: str) -> Samples:
    """Turn a tuple or dict of arrays into the tensors of a model with several arguments, anything else into one."""
    if isinstance(value, Mapping) and value:
        return Inputs.of({str(name): _to_tensor(part, who) for name, part in value.items()})
    if isinstance(value, tuple) and value and all(isinstance(part, Tensor | np.ndarray) for part in value):
        return Inputs.of([_to_tensor(part, who) for part in value])
    return _to_tensor(value, who)


def is_frame(value: Any) -> bool:
    """Return whether something is a DataFrame or a Series, of pandas or like it."""
    return hasattr(value, "to_numpy")


def _to_tensor(value: Any, who: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if is_frame(value):
        value = value.to_numpy()
    if isinstance(value, np.ndarray | np.generic | int | float | list | tuple):
        try:
            array = np.asarray(value)
            _refuse_text(array, who)
            return torch.tensor(array)
        except (TypeError, ValueError) as error:
            raise DataError(f"{who} holds {type(value).__name__} that is no numeric array ({error})") from error
    raise DataError(f"{who} holds a {type(value).__name__}; give tensors or arrays (torchvision: transform=ToTensor())")


def _refuse_text(array: np.ndarray, who: str) -> None:
    if array.dtype.kind not in "OU":
        return
    for entry in array.flat:
        if isinstance(entry, str):
            raise DataError(
                f"{who} holds the text {str(entry)!r}, and numbers are wanted; labels of all clients become "
                "0..classes-1 by numpy.unique(labels, return_inverse=True)[1]"
            )


def describe(split: Split) -> str:
    """Write a split in one line."""
    clients = split.train.clients
    known = "" if split.clusters is None else f", {len(set(split.clusters.tolist()))} true clusters"
    return (
        f"Split({clients} client{'' if clients == 1 else 's'} with {_sizes(split.train)} training and "
        f"{_sizes(split.test)} test samples each, {_shape(split)}, {split.classes} classes{known})"
    )


def to_html(split: Split) -> str:
    """Make a table: the samples, and how many clients each true cluster has."""
    rows: list[tuple[str, Any]] = [
        ("clients", split.train.clients),
        ("training samples of a client", _sizes(split.train)),
        ("test samples of a client", _sizes(split.test)),
        ("sample", _shape(split)),
        ("classes", split.classes),
    ]
    if split.clusters is not None:
        counts = sorted(Counter(split.clusters.tolist()).items())
        rows.append(("clients of each true cluster", ", ".join(f"{number} of {cluster}" for cluster, number in counts)))
    return table("Split", (), rows, split.notes)


def _sizes(data: ClientData) -> str:
    low, high = min(data.sizes), max(data.sizes)
    return f"{low}" if low == high else f"{low} to {high}"


def _shape(split: Split) -> str:
    shape = getattr(split.train.x, "shape", None)
    return "several tensors" if shape is None else f"shape {tuple(shape[1:])}"
