"""Data of the user's own as a `Split`: lists of samples per client, arrays, partitions of flwr-datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from dfca.base.errors import ConfigError, DataError, DfcaError
from dfca.base.imports import call_own, import_function
from dfca.core.learning.task import CLASSIFICATION, Task
from dfca.core.rng import stream
from dfca.data.clients import Split, is_frame
from dfca.data.lazy import Rows

INPUTS = ("image", "img", "x", "features", "input", "inputs", "data", "text")  # usual names of columns
LABELS = ("label", "labels", "y", "target", "fine_label", "character", "class")
Columns = tuple[str, str]


def split_from(
    source: Any,
    *,
    clients: int | None = None,
    columns: Columns | None = None,
    test_share: float = 0.2,
    seed: int = 0,
    task: str | Task | None = None,
    lazy: bool = False,
) -> Split:
    """Make a split of your own data.

    The samples of one client are a pair (x, y) of arrays, a map-style torch Dataset, or a Hugging Face dataset.

    Args:
        source: A `Split`, which is returned as it is; a list with the samples of each client; (train, test) or
            (train, test, clusters) of such lists; a dict with the keys train, test, clusters, classes and task, of
            which only train is needed; arrays (x, y) with the clients first, (N, n, *shape) and (N, n); arrays
            (x, y, owner) of all samples, with the client of each; or a FederatedDataset of flwr-datasets.
        clients: The number of clients that there must be; of a FederatedDataset, the partitions to take (default: all).
        columns: The names of the input and the label in Hugging Face datasets, where they are not the usual ones.
        test_share: The share of each client's samples that is held out where there is no test part.
        seed: Determines which samples are held out.
        task: What is learned, where the source does not say; default: classification.
        lazy: Whether samples stay where they are (a file that is mapped into memory, `map_npz`; a Dataset) and are read
            when they are used, a Dataset anew in every round and, with `epochs`, every epoch, by a random stream of the
            client, the round and the epoch. Labels are read once. Clients are trained one after the other.

    Returns:
        The split, checked.

    Raises:
        DataError: If the source is none of these, its samples are unusable, or the number of clients differs.

    Example:
        >>> import dfca, torch
        >>> x = torch.randn(6, 40, 3)  # 6 clients, 40 samples of 3 numbers
        >>> dfca.split_from((x, (x.sum(-1) > 0).long()))
        Split(6 clients with 32 training and 8 test samples each, shape (3,), 2 classes)
    """
    split = source if isinstance(source, Split) else _make_split(source, clients, columns, test_share, seed, task, lazy)
    if clients is not None and split.train.clients != clients:
        raise DataError(
            f"the data is of {split.train.clients} clients and {clients} are asked for; set clients = "
            f"{split.train.clients}, or give the samples of {clients}"
        )
    return split


def call_factory(name: str, clients: int, seed: int, test_share: float, task: Task | None = None) -> Split:
    """Call the function that `data.factory` names, and make a split of what it returns.

    Raises ConfigError where it cannot be imported, DataError where it fails or returns no data.
    """
    made = call_own(import_function(name, "data.factory"), clients, seed, f'data.factory "{name}"', DataError)
    try:
        return split_from(made, clients=clients, test_share=test_share, seed=seed, task=task)
    except DfcaError as error:
        raise DataError(f'data.factory "{name}": {error}') from error


@dataclass(frozen=True)
class _Parts:
    """The samples of each client, before they are checked and joined."""

    train: Sequence[Any]
    test: Sequence[Any] | None = None
    clusters: Any = None
    classes: int | None = None
    task: str | Task | None = None


def _to_parts(source: Any, clients: int | None, columns: Columns | None) -> _Parts:
    if hasattr(source, "load_partition"):
        return _of_partitions(source, clients, columns)
    if isinstance(source, Mapping):
        if "train" not in source or (strange := set(source) - {"train", "test", "clusters", "classes", "task"}):
            raise DataError(
                f"data by name has the keys train, test, clusters, classes and task, got {', '.join(map(str, source))}"
                + ("; train is missing" if "train" not in source else f"; {sorted(map(str, strange))[0]} is unknown")
            )
        return _Parts(**source)
    if _is_rows(source):
        return _of_arrays(*map(_numpy, source))
    if isinstance(source, tuple) and len(source) in (2, 3) and all(isinstance(part, list) for part in source[:2]):
        return _Parts(*source)
    if isinstance(source, list):
        return _Parts(source)
    raise DataError(
        f"cannot make clients of this ({type(source).__name__}); give a dfca.Split, a list with the samples of each "
        "client, (train, test) of two such lists, arrays (x, y) with the clients first, or (x, y, owner)"
    )


def _make_split(
    source: Any,
    clients: int | None,
    columns: Columns | None,
    test_share: float,
    seed: int,
    task: str | Task | None,
    lazy: bool,
) -> Split:
    if not 0 < test_share < 1:
        raise ConfigError(f"test_share must be > 0 and < 1, got {test_share}")
    parts = _to_parts(source, clients, columns)
    train = [_samples(samples, columns) for samples in parts.train]
    if parts.test is not None:
        test = [_samples(samples, columns) for samples in parts.test]
    else:
        pairs = [_divide(samples, test_share, seed, client, lazy) for client, samples in enumerate(train)]
        train, test = [kept for kept, _ in pairs], [held for _, held in pairs]
    return Split.of_clients(train, test, parts.clusters, parts.classes, parts.task or task or CLASSIFICATION, lazy)


def _of_arrays(x: np.ndarray, y: np.ndarray, owner: np.ndarray | None = None) -> _Parts:
    if owner is None:
        if y.ndim < 2 or x.shape[:2] != y.shape[:2]:
            raise DataError(
                f"arrays (x, y) have the clients first, x (clients, samples, ...) and y (clients, samples), got "
                f"{x.shape} and {y.shape}; for one row per sample give (x, y, owner)"
            )
        return _Parts(list(zip(x, y, strict=True)))
    if owner.shape != (len(x),) or len(y) != len(x):
        raise DataError(
            f"arrays (x, y, owner) have one row per sample, got {x.shape}, {y.shape} and {owner.shape}; owner is the "
            "client of each sample"
        )
    names = np.unique(owner)  # sorted: client 0 is the first of them
    return _Parts([(x[owner == name], y[owner == name]) for name in names])


def _of_partitions(source: Any, clients: int | None, columns: Columns | None) -> _Parts:
    """Take partitions of flwr-datasets: `load_partition(i)` is a Hugging Face dataset."""
    if clients is None:
        partitioners = getattr(source, "partitioners", None) or {}
        numbers = [partitioner.num_partitions for partitioner in partitioners.values()]
        if len(numbers) != 1:
            raise DataError(f"the FederatedDataset has {len(numbers)} partitioners; say how many clients there are")
        clients = int(numbers[0])
    datasets = [source.load_partition(i) for i in range(clients)]
    label = _columns_of(datasets[0], columns)[1]
    feature = (getattr(datasets[0], "features", None) or {}).get(label)
    return _Parts(datasets, classes=getattr(feature, "num_classes", None))


def _samples(client: Any, columns: Columns | None) -> Any:
    """Turn a Hugging Face dataset into a pair of arrays; leave everything else to `Split.of_clients`."""
    if not hasattr(client, "column_names"):
        return client
    inputs, label = _columns_of(client, columns)
    return _stack([_channels_first(sample) for sample in client[inputs]], inputs), np.asarray(list(client[label]))


def _columns_of(dataset: Any, columns: Columns | None) -> Columns:
    names = list(dataset.column_names)
    if columns is not None:
        if missing := [name for name in columns if name not in names]:
            raise DataError(f'the dataset has no column "{missing[0]}"; its columns: {", ".join(names)}')
        return columns
    label = next((name for name in LABELS if name in names), None)
    rest = [name for name in names if name != label]
    inputs = rest[0] if len(rest) == 1 else next((name for name in INPUTS if name in rest), None)
    if label is None or inputs is None:
        raise DataError(
            f"which columns are the input and the label? The dataset has {', '.join(names)}; give "
            'columns=("image", "label")'
        )
    return inputs, label


def _channels_first(value: Any) -> np.ndarray:
    """Turn a sample into an array; images of Pillow, (h, w) or (h, w, c), become (c, h, w)."""
    array = np.asarray(value)
    if not hasattr(value, "getbands"):
        return array
    return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)


def _stack(arrays: list[np.ndarray], column: str) -> np.ndarray:
    if len({array.shape for array in arrays}) > 1:
        raise DataError(f'samples of column "{column}" must have equal shapes; resize or pad them')
    return np.stack(arrays) if arrays else np.empty((0,))


def _divide(samples: Any, share: float, seed: int, client: int, lazy: bool) -> tuple[Any, Any]:
    """Hold out a share of one client's samples, drawn at random: at least one, and one stays."""
    take, count = _taker(samples, client, lazy)
    if count < 2:
        raise DataError(
            f"client {client} has {count} samples, and one of each client is held out for testing; give it at least 2, "
            "or give the test samples too"
        )
    order = torch.randperm(count, generator=stream(seed, "hold-out", client)).tolist()
    held = min(count - 1, max(1, round(share * count)))
    return take(sorted(order[held:])), take(sorted(order[:held]))


def _taker(samples: Any, client: int, lazy: bool) -> tuple[Callable[[list[int]], Any], int]:
    """Return how to take some of the samples, and how many there are."""
    if isinstance(samples, tuple | list) and len(samples) == 2 and not isinstance(samples, Dataset):
        x, y = samples
        y = y if _is_array(y) else np.asarray(y)
        if lazy:
            return lambda rows: Rows(x, y, rows), len(y)
        return lambda rows: (_take(x, rows), _take(y, rows)), len(y)
    if hasattr(samples, "__getitem__") and hasattr(samples, "__len__"):
        return lambda rows: Subset(samples, rows), len(samples)
    raise DataError(
        f"client {client} is a {type(samples).__name__}; give a pair (x, y), a map-style torch Dataset, or a Hugging "
        "Face dataset"
    )


def _take(x: Any, rows: list[int]) -> Any:
    """Take rows of an array, or of each array of a tuple or dict of inputs."""
    if isinstance(x, tuple):
        return tuple(_take(part, rows) for part in x)
    if isinstance(x, Mapping):
        return {name: _take(part, rows) for name, part in x.items()}
    return (x if _is_array(x) else np.asarray(x))[rows]


def _is_rows(source: Any) -> bool:
    """Return whether this is (x, y) or (x, y, owner) of arrays, frames or, beside one of these, lists of single values;
    three lists are so too where they are of equal length and no client's samples are in them."""
    if not isinstance(source, tuple | list) or len(source) not in (2, 3):
        return False
    if all(_is_array(part) or is_frame(part) for part in source):
        return isinstance(source, tuple) or len(source) == 3
    if len(source) != 3 or not all(_is_array(part) or is_frame(part) or isinstance(part, list) for part in source):
        return False
    singles = all(not isinstance(part, list) or all(map(np.isscalar, part)) for part in source[1:])
    return singles and len({len(part) for part in source}) == 1


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _numpy(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
