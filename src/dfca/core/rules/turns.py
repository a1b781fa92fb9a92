"""The turns of an election: who may stand next, whether the candidate needs a vote, and when the election is over.

An election opens up to `most` centres, one candidate per turn. Nobody stands twice. The first `unasked` candidates are
accepted without a vote. After `patience` rejections in a row, or once everybody has stood, the election is over; where
a number of centres was asked for it continues by bids alone, with those that were rejected, until it has that many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from dfca.core.method import MergeOptions


class Seats(NamedTuple):
    """How many centres an election opens."""

    most: int  # no more than this
    asked: bool = False  # exactly this number was asked for
    unasked: int = 0  # number of centres accepted without a vote


class Standing(NamedTuple):
    """What the turns so far mean for the next one."""

    barred: frozenset[int]  # clients that may not stand
    misses: int  # rejections in a row
    forced: bool  # the next candidate is accepted without a vote
    over: bool  # there is no next turn


def start_seats(clusters: int | None, most: int, unasked: int = 0) -> Seats:
    """Return the seats of the election of a start: `clusters`, or where that is None as many as verdicts open."""
    if clusters is None:
        return Seats(max(most, unasked), unasked=unasked)
    return Seats(clusters, asked=True)


def unasked(merging: MergeOptions | None, voters: int) -> int:
    """Return the centres that `voters` clients accept without a vote: more than needed where they are merged later."""
    return 0 if merging is None else merging.opened(voters)


def call_seats(lost: Collection[int], closed: Collection[int], clusters: int, most: int) -> Seats:
    """Return the seats of a by-election: one per lost or closed cluster of `clusters`, and new ones up to `most`."""
    return Seats(len(lost) + len(closed) + max(0, most - clusters))


def next_slot(
    lost: Iterable[int], closed: Iterable[int], clusters: int, taken: Collection[int], followed: Collection[int] = ()
) -> int:
    """Choose the cluster that a candidate of a by-election opens: a lost one, a closed one, or one more.

    clusters: how many there were before; taken: those that it has opened; followed: by voters, they are not replaced.
    """
    free = (j for j in (*lost, *closed) if j not in taken and j not in followed)
    return next(free, max([clusters - 1, *taken]) + 1)


def standing(log: Iterable[tuple[int | None, bool]], seats: Seats, patience: int) -> Standing:
    """Read a log of turns, (candidate, accepted); the candidate is None where nobody was left that could stand.

    patience: rejections in a row that are tolerated.
    """
    chosen, refused, misses = set[int](), set[int](), 0
    for candidate, accepted in log:
        if candidate is None:
            if misses >= patience:
                return Standing(frozenset(), misses, False, True)  # nobody is left at all
            misses = patience
        elif accepted:
            chosen.add(candidate)
            misses = misses if misses >= patience else 0
        else:
            refused.add(candidate)
            misses += 1
    tired = misses >= patience
    over = len(chosen) >= seats.most or (tired and not seats.asked)
    by_bids = tired and seats.asked
    barred = chosen if by_bids else chosen | refused
    return Standing(frozenset(barred), misses, by_bids or len(chosen) < seats.unasked, over)
