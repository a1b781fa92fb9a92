"""Samples that are read when they are used: arrays in files, and Datasets that are read anew in every epoch."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfca.base.errors import DataError
from dfca.core.learning.inputs import Lazy
from dfca.core.rng import seeded

Convert = Callable[[int, Any], Tensor]


class Rows:
    """Some rows of arrays x and y, as a map-style Dataset that copies none of them."""

    def __init__(self, x: Any, y: Any, rows: Sequence[int] | None = None) -> None:
        # A DataFrame or a Series finds rows by their labels, not by their places.
        self.x, self.y = (part.to_numpy() if hasattr(part, "to_numpy") else part for part in (x, y))
        self.rows = range(len(y)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        row = self.rows[place]
        return self.x[row], self.y[row]


def pair_of(item: Any, who: str) -> tuple[Any, Any]:
    """Return the sample and the label of an item of a Dataset. Raises DataError where it has none."""
    try:
        return item[0], item[1]
    except (TypeError, IndexError, KeyError):
        raise DataError(f"{who} gives a {type(item).__name__} per sample; give a pair (sample, label)") from None


def join_lazily(clients: Sequence[Any], convert: Convert) -> tuple[Lazy, list[list[Any]]]:
    """Join the samples of clients, map-style Datasets, without keeping them; returns the labels of each as well.

    convert: checks and converts one sample of a client; every one is looked at once. Raises DataError where two have
    other shapes.
    """
    begins = [0, *accumulate(map(len, clients))]
    first = convert(0, pair_of(clients[0][0], "client 0")[0])

    def look(client: int, value: Any) -> Tensor:
        x = convert(client, value)
        if x.shape != first.shape:
            raise DataError(
                f"samples must have equal shapes, client 0 has {tuple(first.shape)}, client {client} has "
                f"{tuple(x.shape)}; resize or pad them"
            )
        if x.dtype != first.dtype:
            raise DataError(
                f"lazy samples must be of one type, client 0 has {first.dtype}, client {client} has {x.dtype}; convert "
                "them, or leave lazy out"
            )
        return x

    def read(rows: Tensor, round: int, epoch: int) -> list[Tensor]:
        samples: list[Tensor] = []
        owners, counts = torch.unique_consecutive(torch.bucketize(rows, bounds, right=True), return_counts=True)
        left = iter(rows.tolist())
        for client, count in zip(owners.tolist(), counts.tolist(), strict=True):
            with seeded(0, "read", client, round, *([epoch] if epoch else [])):
                samples += [look(client, clients[client][row - begins[client]][0]) for row in islice(left, count)]
        return samples

    bounds = torch.tensor(begins[1:])
    labels: list[list[Any]] = []
    for client, dataset in enumerate(clients):
        labels.append([])
        for place in range(len(dataset)):
            value, label = pair_of(dataset[place], f"client {client}")
            look(client, value)
            labels[-1].append(label)
    fixed = all(isinstance(dataset, Rows) for dataset in clients)
    return Lazy(read, torch.arange(begins[-1]), tuple(first.shape), first.dtype, fixed), labels


def map_npz(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """Map the arrays of an .npz file into memory: what is used of them is read then.

    Args:
        path: A file that `numpy.savez` wrote (`savez_compressed` writes others, which cannot be mapped). It must stay
            as it is: the system ends a process that reads where a mapped file was cut off.

    Returns:
        The arrays by name, read-only.

    Raises:
        DataError: If the file cannot be read, is compressed, or holds objects.

    Example:
        >>> import dfca, numpy as np, os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "clients.npz")
        >>> np.savez(path, x=np.zeros((6, 40, 3), np.float32), y=np.arange(240).reshape(6, 40) % 2)
        >>> arrays = dfca.map_npz(path)
        >>> dfca.split_from((arrays["x"], arrays["y"]), lazy=True)
        Split(6 clients with 32 training and 8 test samples each, shape (3,), 2 classes)
    """
    try:
        with zipfile.ZipFile(Path(path)) as archive, Path(path).open("rb") as file:
            return {info.filename.removesuffix(".npy"): _map(path, file, info) for info in archive.infolist()}
    except (OSError, ValueError, TypeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be mapped: {error}; write it by numpy.savez") from None


def _map(path: str | Path, file: Any, info: zipfile.ZipInfo) -> np.ndarray[Any, Any]:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    file.seek(info.header_offset + 26)
    name, extra = np.frombuffer(file.read(4), "<u2").tolist()
    file.seek(info.header_offset + 30 + name + extra)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = header(file)
    except (TokenError, MemoryError, RecursionError):  # of Python's parser, which reads it
        raise ValueError(f"the header of {info.filename} is damaged") from None
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds objects")
    if prod(shape) * dtype.itemsize > info.file_size:
        raise ValueError(f"{info.filename} is cut off")
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
