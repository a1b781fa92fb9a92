"""What a log of turns means: who may still stand, and whether the election is over."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from dfca.core.election import ElectionOptions
from dfca.peer.messages import Call, Turn

PASS = Turn(None, False)
"""A turn in which nobody was left that could stand."""


class Standing(NamedTuple):
    """What a log of turns means: who may not stand, rejections in a row, whether the next candidate is accepted anyhow,
    and whether the election is over."""

    barred: frozenset[int]
    misses: int
    forced: bool
    over: bool


def standing(log: Collection[Turn], clusters: int | None, call: Call | None, options: ElectionOptions) -> Standing:
    """Read a log of turns.

    With `clusters` given, an election of a start that had `patience` rejections in a row goes on by bids alone.
    """
    chosen, refused, misses = set[int](), set[int](), 0
    for turn in log:
        if turn.candidate is None:
            if misses >= options.patience:
                return Standing(frozenset(), misses, False, True)  # nobody is left at all
            misses = options.patience
        elif turn.accepted:
            chosen.add(turn.candidate)
            misses = misses if misses >= options.patience else 0
        else:
            refused.add(turn.candidate)
            misses += 1
    finds = clusters is None or call is not None
    if call is None:
        most = options.most if clusters is None else clusters
    else:
        most = len(call.lost) + max(0, options.most - call.clusters)
    tired = misses >= options.patience
    over = len(chosen) >= most or (tired and finds)
    barred = chosen if tired and not finds else chosen | refused
    return Standing(frozenset(barred), misses, tired and not finds, over)


def agreed(mine: Collection[Turn], theirs: Collection[Turn]) -> int:
    """Count the turns that two logs have in common."""
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return place
    return min(len(mine), len(theirs))
