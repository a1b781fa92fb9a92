"""The freshest relay: a model passes through clients that do not train it (docs/auto.md, section 3).

Under `share = "relay"` every client sends its neighbours how fresh each of its models is (two scalars per model: the
round of the last local update behind it, and who made it, if it was one client alone). With b the neighbours of client
i that trained j this round,

  b = 0, i does not train j    i takes the freshest copy on offer, if it is fresher than its own
  b < B, i trains j            i folds the freshest copy on offer as it would one more neighbour's model, if the copy is
                               newer than the last one that it folded, at most `MAX_AGE` rounds old, and no echo of i's
                               own updates. B = `ENOUGH`; 1 until the last survey (`merging`), so that clusters
                               stay as different as they are, and where neighbours may lie (`robust`)

Everywhere else the paper's rule holds. Of equally fresh copies the lowest sender's is taken where b = 0, else a lot of
the round decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from torch import Tensor

from dfca.core.method import RobustRule

Many = TypeVar("Many", int, Tensor)

MANY = -2  # the origin of a copy that has the updates of several clients behind it
NEVER = -1  # the stamp of a copy that has no local update behind it
MAX_AGE = 3  # a trainer folds no relayed copy older than this many rounds: it would pull it back to where it was
ENOUGH = 4  # neighbours that train a cluster from which on its trainer gains nothing from relayed copies

GOLDEN = 2654435761  # 2^32 divided by the golden ratio: multiples of it are spread evenly


class Offer(NamedTuple):
    """A neighbour's copy of one model."""

    sender: int
    stamp: int  # round of the newest update behind it
    origin: int  # the client that alone made it, or MANY


def enough(settled: bool, robust: RobustRule) -> int:
    """Return B; settled: no survey is to come."""
    return ENOUGH if settled and robust == "none" else 1


def lot(now: int, sender: Many) -> Many:
    """Draw a number in [0, 2^32) for a sender in a round: the same for all, in another order every round."""
    return (sender + 1) * (2 * now + 1) * GOLDEN % 2**32


def choose_offer(
    offers: Iterable[Offer], client: int, now: int, newest: int, trains: bool, beside: int = 0
) -> Offer | None:
    """Choose the copy to take: the freshest, on ties the lowest sender's or by lot; None where none is worth taking.

    newest: for a listener the stamp of its own copy, for a trainer that of the last copy that it folded; beside: how
    many neighbours trained the cluster this round.
    """
    useful = [offer for offer in offers if offer.stamp > newest]
    if trains:
        useful = [offer for offer in useful if offer.origin != client and now - offer.stamp <= MAX_AGE]
    if beside:
        return max(useful, key=lambda offer: (offer.stamp, lot(now, offer.sender), offer.sender), default=None)
    return min(useful, key=lambda offer: (-offer.stamp, offer.sender), default=None)
