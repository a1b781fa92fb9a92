"""Where a peer's clusters come from, election by election: cluster 2 of one lineage is not cluster 2 of another.

Lineages are ordered: of two that differ, the first entry that differs decides, more voters first; one that goes on
where the other ends is the later of the two. A peer folds a model only if its cluster comes from the same elections at
both ends, and takes the models of a higher lineage that it meets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor


class Entry(NamedTuple):
    """One election: its voters, the wave that held it, a digest of the models, and the clusters that these opened."""

    voters: int
    attempt: int
    root: int
    incarnation: int
    digest: int
    slots: tuple[int, ...]


def digest_of(models: Iterable[Tensor]) -> int:
    """Digest models: 48 bits, the same for the same bits."""
    found = hashlib.sha256()
    for model in models:
        found.update(model.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(found.digest()[:6], "big")


Lineage = tuple[Entry, ...]
MOST_ENTRIES = 1000
"""A longer lineage is nobody's."""
MOST_SLOTS = 4096


def shared_length(one: Lineage, other: Lineage) -> int:
    """Count the elections that two lineages have in common."""
    if one == other:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def extends(later: Lineage, earlier: Lineage) -> bool:
    """Return whether a lineage goes on where another one ends."""
    return len(later) > len(earlier) and later[: len(earlier)] == earlier


def compatible(one: Lineage, other: Lineage, cluster: int) -> bool:
    """Return whether a cluster is the same in both: no election that only one of them knows has opened it."""
    if one == other:
        return True
    common = shared_length(one, other)
    if common < min(len(one), len(other)):
        return False  # two elections of the same place: nothing is the same
    return not any(cluster in entry.slots for entry in (*one[common:], *other[common:]))


def clusters_of(lineage: Lineage) -> int:
    """Count the clusters of a lineage that began with an election."""
    return max((slot + 1 for entry in lineage for slot in entry.slots), default=0)


def opened_since(later: Lineage, earlier: Lineage) -> tuple[int, ...]:
    """List the clusters that a lineage has opened since an earlier part of itself."""
    return tuple(sorted({slot for entry in later[len(earlier) :] for slot in entry.slots}))


def is_lineage(value: Any) -> bool:
    """Return whether something that came is a lineage."""
    if value == () and type(value) is tuple:
        return True
    return type(value) is tuple and len(value) <= MOST_ENTRIES and all(_is_entry(entry) for entry in value)


def _is_entry(value: Any) -> bool:
    return (
        type(value) is Entry
        and all(type(part) is int for part in value[:5])
        and type(value.slots) is tuple
        and 0 < len(value.slots) <= MOST_SLOTS
        and all(type(slot) is int and 0 <= slot < MOST_SLOTS for slot in value.slots)
    )
