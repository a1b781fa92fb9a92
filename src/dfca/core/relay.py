"""The freshest relay: a model passes through clients that do not train it.

DFCA sends a model only along edges whose sender trains it: a client without a neighbour in cluster j never receives
model j. Under `share = "relay"` every client sends its neighbours how fresh each of its models is (two scalars per
model: the round of the last local update behind it, and who made it, if it was one client alone). Where no neighbour of
client i trained j this round,

  i does not train j    i takes the freshest copy on offer, if it is fresher than its own
  i trains j            i folds the freshest copy on offer as it would a neighbour's model, if the copy is newer than
                        the last one that it folded, at most `MAX_AGE` rounds old, and no echo of i's own updates

Everywhere else nothing changes: a client with a trainer of j beside it follows the paper's rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MANY = -2
"""The origin of a copy that has the updates of several clients behind it."""
NEVER = -1
"""The stamp of a copy that has no local update behind it."""
MAX_AGE = 3
"""A trainer folds no relayed copy older than this many rounds: it would pull it back to where it was."""


class Offer(NamedTuple):
    """A neighbour's copy of one model: the round of the newest update behind it, and who alone made it."""

    sender: int
    stamp: int
    origin: int


def choose_offer(offers: Iterable[Offer], client: int, now: int, newest: int, trains: bool) -> Offer | None:
    """Choose the copy to take: the freshest, the lowest sender on ties; None where none is worth taking.

    newest: for a listener the stamp of its own copy; for a trainer the stamp of the last copy that it folded.
    """
    useful = [offer for offer in offers if offer.stamp > newest]
    if trains:
        useful = [offer for offer in useful if offer.origin != client and now - offer.stamp <= MAX_AGE]
    return min(useful, key=lambda offer: (-offer.stamp, offer.sender), default=None)
