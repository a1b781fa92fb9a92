"""Who links to whom: a ring by device ID plus random chords, computed by every node alone from the roster.

IDs are digests, so a ring sorted by ID is random. Each member owns (degree - 2) / 2 chords; a chord ends at the first
live member at or after a digest of the owner's ID. As in consistent hashing, a member that joins or leaves changes only
the links around itself. Dead members are skipped on the ring and by chords: the live ones form a ring of their own, so
the graph stays connected whichever members die.
"""

from __future__ import annotations

import hashlib
from base64 import b32encode
from bisect import bisect_left
from collections.abc import Collection
from functools import lru_cache


def wanted_links(own: str, members: Collection[str], dead: Collection[str], degree: int) -> set[str]:
    """Return the members that `own` should link to: its ring neighbours, its chords, and the chords that end at it.

    With at most `degree` others, all of them. Two nodes that agree on who is dead agree on the link between them.
    """
    live = sorted({member for member in members if member not in dead} | {own})
    if len(live) < 2:
        return set()
    if degree >= len(live) - 1:
        return set(live) - {own}
    place = live.index(own)
    links = {live[place - 1], live[(place + 1) % len(live)]}
    for member in live:
        ends = chords(member, live, degree)
        if member == own:
            links |= ends
        elif own in ends:
            links.add(member)
    return links - {own}


def chords(owner: str, live: list[str], degree: int) -> set[str]:
    """Return where the owner's chords end. live: sorted, with the owner."""
    ends = set()
    for number in range((degree - 1) // 2):
        place = bisect_left(live, _point(owner, number))
        end = live[place % len(live)]
        ends.add(live[(place + 1) % len(live)] if end == owner else end)
    return ends - {owner}


@lru_cache(maxsize=1 << 14)
def _point(owner: str, number: int) -> str:
    digest = hashlib.sha256(f"dfca chord {number} of {owner}".encode()).digest()
    return b32encode(digest).decode().rstrip("=").lower()
