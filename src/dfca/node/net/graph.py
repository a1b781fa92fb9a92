"""Who links to whom: a ring by device ID plus random chords, computed by every node alone from the roster.

IDs are digests, so a ring sorted by ID is random. Each member owns (degree - 2) / 2 chords; a chord ends at the first
live member at or after a digest of the owner's ID. As in consistent hashing, a member that joins or leaves changes only
the links around itself. Dead members are skipped on the ring and by chords: the live ones form a ring of their own, so
the graph stays connected whichever members die.
"""

from __future__ import annotations

import hashlib
from base64 import b32encode
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Mapping
from functools import lru_cache

MANY = 64  # new members after which the order is made anew
LAST = "~"  # behind every ID


class SwarmGraph:
    """The links of one device, in a swarm that changes little: what can be kept is computed once.

    They lead to its neighbours on the ring, to where its chords end, and to the owners of chords that end at it; with
    at most `degree` others, to all of them. Two nodes that agree on who is dead agree on the link between them. Members
    are kept in order, and so are the points of chords: a member with a chord to `own` has a point between `own` and the
    live member before it, or is that member itself.
    """

    def __init__(self, own: str, degree: int) -> None:
        self._own, self._degree = own, degree
        self._of: object = None  # the mapping that the order was made of
        self._known: set[str] = set()
        self._order: list[str] = []
        self._points: list[tuple[str, str]] = []  # (point, owner), sorted
        self._last: tuple[object, frozenset[str]] | None = None
        self._links: set[str] = set()

    def links(self, members: Mapping[str, object], dead: Collection[str]) -> set[str]:
        """Return the members to link to. members: by ID; another object whenever they change."""
        asked = (members, frozenset(dead))
        if self._last is not None and self._last[0] is members and self._last[1] == asked[1]:
            return set(self._links)
        self._follow(members)
        self._last, self._links = asked, self._compute(asked[1] - {self._own})
        return set(self._links)

    def _follow(self, members: Mapping[str, object]) -> None:
        if members is self._of:
            return
        new = members.keys() - self._known
        if len(members) != len(self._known) + len(new) or len(new) > MANY:
            self._order = sorted(members)
            self._points = sorted((point, id) for id in members for point in self._points_of(id))
            self._known = {*members}
        else:
            for id in new:
                insort(self._order, id)
                for point in self._points_of(id):
                    insort(self._points, (point, id))
            self._known |= new
        self._of = members

    def _points_of(self, owner: str) -> list[str]:
        return [_point(owner, number) for number in range((self._degree - 1) // 2)]

    def _compute(self, dead: frozenset[str]) -> set[str]:
        live = [id for id in self._order if id not in dead] if dead else self._order
        own = self._own
        if len(live) < 2:
            return set()
        if self._degree >= len(live) - 1:
            return set(live) - {own}
        place = bisect_left(live, own)
        before, after = live[place - 1], live[(place + 1) % len(live)]
        begin, end = (bisect_right(self._points, (id, LAST)) for id in (before, own))
        some = self._points[begin:end] if before < own else [*self._points[begin:], *self._points[:end]]
        owners = {owner for _, owner in some if owner not in dead} | {before}
        ends = {owner for owner in owners if owner != own and own in chords(owner, live, self._degree)}
        return ({before, after} | chords(own, live, self._degree) | ends) - {own}


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
