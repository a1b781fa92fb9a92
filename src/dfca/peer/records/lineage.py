"""Where a peer's clusters come from, election by election, and what surveys made of them: cluster 2 of one lineage is
not cluster 2 of another.

Lineages are ordered: of two that differ, the first entry that differs decides, more voters first; one that
extends the other is the later of the two. A peer folds a model only if its cluster comes from the same elections and
surveys at both ends, and takes the models of a higher lineage that it meets. What surveys decided it does to its own
models: that needs no others.

A lineage that grows to `LONGEST` entries is folded: one entry, behind the first, stands for all but the last `KEPT`,
with a digest of them, their votes and the clusters that they led to. Peers with the same history fold alike. Before two
lineages are compared, one is folded as far as the other is (`aligned`); one that is too short for that is the lower of
the two. Of histories that part inside what is folded, the one in which more votes were cast is the higher.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dfca.core.rules.merging import Merge, Plan


class Entry(NamedTuple):
    """One election: its voters, the wave that held it, a digest of the models, and the clusters that these opened.

    Or one survey (`rules.merging`): those that took part, the wave, what it merged and which clusters without followers
    it closed; last: those that are left were numbered anew. slots: the clusters that are not what they were; where
    there are none it is a survey that changed nothing, and counts among those in a row that did not.
    """

    voters: int
    attempt: int
    root: int
    incarnation: int
    digest: int
    slots: tuple[int, ...]
    merges: tuple[Merge, ...] = ()
    empty: tuple[int, ...] = ()
    last: bool = False

    @property
    def is_fold(self) -> bool:
        """Whether it stands for `attempt` entries with `incarnation` votes; slots: all clusters, empty: closed ones."""
        return self.voters == FOLDED

    @property
    def is_survey(self) -> bool:
        """Whether it is a survey."""
        return not self.is_fold and bool(self.merges or self.empty or self.last or not self.slots)

    @property
    def changes(self) -> bool:
        """Whether anything is other than before: of surveys, some merge nothing and are not the last."""
        return bool(self.slots or self.last)

    @property
    def plan(self) -> Plan:
        """What a survey decided."""
        return Plan(self.merges, self.empty)


def digest_of(models: Iterable[Tensor]) -> int:
    """Digest models: 48 bits, the same for the same bits."""
    digest = hashlib.sha256()
    for model in models:
        digest.update(model.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "big")


Lineage = tuple[Entry, ...]
MOST_ENTRIES = 1000  # longer lineages are refused
MOST_SLOTS = 4096
FOLDED = 2**52  # the voters of an entry that stands for many: more than any other has, so that it is the higher one
LONGEST, KEPT, LEFT = 64, 32, 16
"""A lineage of `LONGEST` entries is folded to about `KEPT`; with fewer than `LEFT` behind the fold it is refused."""


def extended(lineage: Lineage, entry: Entry) -> Lineage:
    """Return a lineage with one more entry, folded where it gets too long."""
    longer = (*lineage, entry)
    if len(longer) < LONGEST:
        return longer
    behind = len(longer) - 1 - _has_fold(longer)
    return _folded(longer, _folds(longer) + behind - KEPT)


def aligned(lineage: Lineage, other: Lineage) -> Lineage:
    """Return a lineage folded as far as another one that began alike, where enough is left of it."""
    more = _folds(other) - _folds(lineage)
    if more <= 0 or lineage[:1] != other[:1] or len(lineage) - 1 - _has_fold(lineage) - more < LEFT:
        return lineage
    return _folded(lineage, _folds(other))


def same(one: Lineage, other: Lineage) -> bool:
    """Return whether two lineages are of the same history, however far each is folded."""
    return aligned(one, other) == aligned(other, one)


def _has_fold(lineage: Lineage) -> bool:
    return len(lineage) > 1 and lineage[1].voters == FOLDED


def _folds(lineage: Lineage) -> int:
    """Count the entries that one stands for."""
    return lineage[1].attempt if _has_fold(lineage) else 0


def _folded(lineage: Lineage, count: int) -> Lineage:
    """Let one entry stand for the first `count` behind the very first."""
    known = int(_has_fold(lineage))
    digest, votes = (lineage[1].digest, lineage[1].incarnation) if known else (0, 0)
    clusters, end = layout_of(lineage[: 1 + known]), 1 + known + count - _folds(lineage)
    for entry in lineage[1 + known : end]:
        said = hashlib.sha256(f"{digest} {tuple(entry)}".encode())
        digest, clusters = int.from_bytes(said.digest()[:6], "big"), clusters.after(entry) or clusters
        votes += max(0, entry.voters)
    slots, first = tuple(range(clusters.models)), lineage[0]
    count, votes = min(count, FOLDED), min(votes, FOLDED)  # a liar may say more, which no message could hold
    return (first, Entry(FOLDED, count, first.root, votes, digest, slots, (), clusters.closed), *lineage[end:])


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the entries, or turns, that two lineages, or logs, have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def compatible(one: Lineage, other: Lineage, cluster: int) -> bool:
    """Return whether a cluster is the same in both: no election that only one of them knows has opened it."""
    if one == other:
        return True
    one, other = aligned(one, other), aligned(other, one)
    common = shared_length(one, other)
    if common < min(len(one), len(other)):
        return False  # two elections of the same place: nothing is the same
    return not any(cluster in entry.slots for entry in (*one[common:], *other[common:]))


class Clusters(NamedTuple):
    """How many models a peer keeps, and which of the clusters are closed."""

    models: int
    closed: tuple[int, ...] = ()

    def after(self, entry: Entry) -> Clusters | None:
        """Return what an election or a survey makes of them; None where it cannot have been held."""
        if entry.is_fold:
            return Clusters(len(entry.slots), entry.empty)
        if not entry.is_survey:
            return Clusters(max(self.models, max(entry.slots) + 1), tuple(sorted({*self.closed} - {*entry.slots})))
        plan, opened = entry.plan, {*range(self.models)} - {*self.closed}
        into, gone = [merge.into for merge in plan.merges], plan.closed
        if not ({*gone} < opened and {*into} <= opened - {*gone} and len({*into, *gone}) == len(into) + len(gone)):
            return None
        closed = tuple(sorted((*self.closed, *gone)))
        if entry.slots != self.changed_by(plan, entry.last):
            return None
        return Clusters(self.models - len(closed)) if entry.last else Clusters(self.models, closed)

    def changed_by(self, plan: Plan, last: bool) -> tuple[int, ...]:
        """List the clusters that are not what they were after a survey: all, where they get other numbers."""
        if last and (self.closed or plan.closed):
            return tuple(range(self.models))
        return tuple(sorted({*plan.closed, *(merge.into for merge in plan.merges)}))


NO_CLUSTERS = Clusters(0)


def layout_of(lineage: Lineage) -> Clusters:
    """Find the clusters of a lineage that began with an election; none where it is impossible.

    No survey follows the last one: after it only an election changes anything.
    """
    clusters: Clusters | None = NO_CLUSTERS
    for i, entry in enumerate(lineage):
        over = lineage[i - 1].last and entry.is_survey  # no lineage begins with a survey: `Clusters.after`
        clusters = None if clusters is None or over else clusters.after(entry)
    return clusters or NO_CLUSTERS


def clusters_of(lineage: Lineage) -> int:
    """Count the clusters of a lineage that began with an election, those that are closed included."""
    return layout_of(lineage).models


def opened_since(later: Lineage, mine: Lineage | None) -> tuple[int, ...] | None:
    """List the clusters that a lineage has opened since a peer's own, which it extends: those that it lacks.

    None where all models are others: it does not extend it, or a survey was held as well. mine: None without models.
    """
    if mine is None or later == mine or later[: len(mine)] != mine:
        return None
    since = [entry for entry in later[len(mine) :] if entry.changes]
    if all(entry.is_survey for entry in since):
        return ()
    if any(entry.is_survey or entry.is_fold for entry in since):
        return None
    return tuple(sorted({slot for entry in since for slot in entry.slots}))


def electorate(lineage: Lineage) -> int:
    """Count how many had a say in the clusters that there are."""
    return max((entry.voters for entry in lineage if not entry.is_fold), default=0)


def quiet_surveys(lineage: Lineage) -> int:
    """Count the surveys at the end of a lineage that merged nothing, in a row."""
    merged = (not entry.is_survey or bool(entry.merges) for entry in reversed(lineage))
    return next((place for place, has_merged in enumerate(merged) if has_merged), len(lineage))


def is_lineage(value: Any) -> bool:
    """Return whether something that came is a lineage."""
    known = type(value) is tuple and len(value) <= MOST_ENTRIES and all(map(is_entry, value))
    if not known or any(entry.is_fold for entry in (*value[:1], *value[2:])):
        return False
    return not _has_fold(value) or (len(value) >= 2 + LEFT and _is_sound(value[1]))


def _is_sound(fold: Entry) -> bool:
    """Return whether an entry that stands for many says which clusters there are, and leaves one open."""
    opened, closed = fold.slots == tuple(range(len(fold.slots))), {*fold.empty} < {*fold.slots}
    plain = fold.empty == tuple(sorted({*fold.empty})) and not fold.merges and not fold.last
    return 0 < fold.attempt <= FOLDED and opened and closed and plain


def is_entry(value: Any) -> bool:
    """Return whether something that came is an entry of a lineage."""
    return (
        type(value) is Entry
        and all(type(part) is int for part in value[:5])
        and _are_slots(value.slots)
        and type(value.merges) is tuple
        and len(value.merges) <= MOST_SLOTS
        and all(_is_merge(merge) for merge in value.merges)
        and _are_slots(value.empty)
        and type(value.last) is bool
        and (bool(value.slots) or value.voters > 0)  # a survey that changed nothing, of somebody
    )


def _are_slots(value: Any) -> bool:
    known = type(value) is tuple and len(value) <= MOST_SLOTS
    return known and all(type(slot) is int and 0 <= slot < MOST_SLOTS for slot in value)


def _is_merge(value: Any) -> bool:
    if type(value) is not Merge or not _are_slots((value.into, value.closed)):
        return False
    numbers = type(value.share) is float and type(value.worth) is float
    return numbers and 0 <= value.share <= 1 and math.isfinite(value.worth)
