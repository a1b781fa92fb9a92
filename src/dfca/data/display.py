"""A split in one line, and as a small table for notebooks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from dfca.base.notebook import table

if TYPE_CHECKING:
    from dfca.data.clients import ClientData, Split


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
