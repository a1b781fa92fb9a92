"""What a log of turns means: who may still stand, and whether the election is over."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dfca.core.rules.election import ElectionOptions
from dfca.peer.records.messages import Call, Turn

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

    With `clusters` given, an election of a start that had `patience` rejections in a row goes on by bids alone; the
    first `options.unasked` centres are accepted in any case.
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
        most = max(options.most, options.unasked) if clusters is None else clusters
    else:
        most = len(call.lost) + len(call.closed) + max(0, options.most - call.clusters)
    tired = misses >= options.patience
    over = len(chosen) >= most or (tired and finds)
    barred = chosen if tired and not finds else chosen | refused
    forced = (tired and not finds) or len(chosen) < options.unasked
    return Standing(frozenset(barred), misses, forced, over)


def is_possible(log: Sequence[Turn], call: Call | None) -> bool:
    """Return whether an election could have decided this."""
    return all(is_next(turn, log[:place], call) for place, turn in enumerate(log))


def is_next(turn: Turn, before: Sequence[Turn], call: Call | None) -> bool:
    """Return whether a turn can follow others: where it opens a cluster, it is one that may be opened."""
    taken = [each.slot for each in before if each.accepted]
    if not turn.accepted or call is None:
        return turn.slot == (len(taken) if turn.accepted else -1)
    free = [j for j in (*call.lost, *call.closed) if j not in taken]
    return turn.slot in free or turn.slot == max([call.clusters - 1, *taken]) + 1
