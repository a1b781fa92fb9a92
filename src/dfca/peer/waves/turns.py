"""A log of turns as peers keep it: what it means (`rules.turns`), and whether an election could have decided it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dfca.core.rules import turns as rules
from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.turns import Standing as Standing
from dfca.core.rules.turns import call_seats, start_seats
from dfca.peer.records.messages import Call, Turn

PASS = Turn(None, False)
"""A turn in which nobody was left that could stand."""


def standing(log: Collection[Turn], clusters: int | None, call: Call | None, options: ElectionOptions) -> Standing:
    """Read a log of turns of the election of a start, or of a by-election."""
    if call is None:
        seats = start_seats(clusters, options.most, options.unasked)
    else:
        seats = call_seats(call.lost, call.closed, call.clusters, options.most)
    return rules.standing(((turn.candidate, turn.accepted) for turn in log), seats, options.patience)


def is_possible(log: Sequence[Turn], call: Call | None) -> bool:
    """Return whether an election could have decided this."""
    return all(is_next(turn, log[:place], call) for place, turn in enumerate(log))


def is_next(turn: Turn, before: Sequence[Turn], call: Call | None) -> bool:
    """Return whether a turn can follow others: where it opens a cluster, it is one that may be opened."""
    taken = [held.slot for held in before if held.accepted]
    if not turn.accepted or call is None:
        return turn.slot == (len(taken) if turn.accepted else -1)
    free = [j for j in (*call.lost, *call.closed) if j not in taken]
    return turn.slot in free or turn.slot == max([call.clusters - 1, *taken]) + 1
