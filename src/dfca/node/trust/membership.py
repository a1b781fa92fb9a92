"""Who is a member: a pure function of the records of a roster, independent of their order."""

from __future__ import annotations

import unicodedata
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dfca.node.trust.identity import peer_number, short
from dfca.node.trust.records import SUFFIX_SIGN, Contact, Introduction, Record, Removal


@dataclass(frozen=True)
class Member:
    """A device that belongs to the swarm."""

    id: str
    name: str  # unique: where two have the same name, both have a part of their ID behind it
    certificate: bytes
    addresses: tuple[str, ...]
    may_introduce: bool

    @property
    def number(self) -> int:
        """Its number in the peer protocol."""
        return peer_number(self.id)


@dataclass(frozen=True)
class Membership:
    """What follows from the records of a roster."""

    members: Mapping[str, Member]  # by ID, in order of the IDs
    removed: frozenset[str]
    introducers: Mapping[str, int]  # whose introductions count, with their distance from the root; also removed ones
    counting: tuple[Introduction, ...]  # the introductions that count
    names: set[str]  # of the members, folded; `grow` adds to it
    numbers: set[int]  # of the members; so it does here


def find_members(root: str, records: Iterable[Record]) -> Membership:
    """Derive the members.

    A removed device is not a member. An introduction counts if a chain of counting introductions with `may_introduce`
    leads from the root to its introducer; one by a removed device only if `find_kept` lists it. The introduction
    nearest to the root gives name and certificate. Of two devices with the same number the one nearer to the root is a
    member.
    """
    records = list(records)
    removals = [record for record in records if isinstance(record, Removal)]
    removed, kept = frozenset(removal.id for removal in removals), find_kept(removals)
    possible = [
        record
        for record in records
        if isinstance(record, Introduction)
        and (record.introducer not in kept or record.id == record.introducer or record.id in kept[record.introducer])
    ]
    depths = find_depths(root, possible)
    counting = tuple(record for record in possible if record.introducer in depths)
    nearest: dict[str, Introduction] = {}
    for record in sorted(counting, key=lambda record: (depths[record.introducer], record.introducer)):
        if record.id not in removed and record.is_device:
            nearest.setdefault(record.id, record)
    chosen: dict[int, Introduction] = {}
    for record in sorted(nearest.values(), key=lambda record: (depths[record.introducer], record.id)):
        chosen.setdefault(peer_number(record.id), record)
    names = unique_names({record.id: record.name for record in chosen.values()})
    addresses = {record.id: record.addresses for record in records if isinstance(record, Contact)}
    members = {}
    for record in sorted(chosen.values(), key=lambda record: record.id):
        reached = addresses.get(record.id, record.addresses)
        members[record.id] = Member(record.id, names[record.id], record.certificate, reached, record.id in depths)
    taken = {_folded(record.name) for record in chosen.values()}
    return Membership(members, removed, depths, counting, taken, set(chosen))


def grow(before: Membership, fresh: Sequence[tuple[Record, Record | None]]) -> Membership | None:
    """Apply new records (with what they replaced) to a membership, as `find_members` would; None: derive it anew.

    Two kinds are simple: the address of a member, and the first introduction of a device that may not introduce, with
    a name of its own, by one that was not removed. In a swarm that lives nearly all are.
    """
    members, added = dict(before.members), []
    for record, replaced in fresh:
        if isinstance(record, Contact):
            if record.id in members:
                members[record.id] = replace(members[record.id], addresses=record.addresses)
            continue
        if not isinstance(record, Introduction) or replaced is not None or not record.is_device:
            return None
        if record.may_introduce or record.id in members or record.id in before.removed:
            return None
        if record.introducer not in before.introducers or record.introducer in before.removed:
            return None
        members[record.id] = Member(record.id, record.name, record.certificate, record.addresses, False)
        added.append(record)
    for record in added:
        if _folded(record.name) in before.names or peer_number(record.id) in before.numbers:
            return None
        before.names.add(_folded(record.name))
        before.numbers.add(peer_number(record.id))
    if added:  # they stand behind the others, which are in order
        ids = [*members]
        ordered = ids[: -len(added)]
        for id in ids[-len(added) :]:
            insort(ordered, id)
        members = {id: members[id] for id in ordered}
    return replace(before, members=members, counting=(*before.counting, *added))


def find_kept(removals: Iterable[Removal]) -> dict[str, set[str]]:
    """Return for every removed device those that it introduced and that stay members.

    Everyone else who removed it must list them. Its own removal counts only if nobody else removed it, so that it
    cannot keep friends.
    """
    lists: dict[str, list[set[str]]] = defaultdict(list)
    own: dict[str, set[str]] = {}
    for removal in removals:
        if removal.by == removal.id:
            own[removal.id] = set(removal.kept)
        else:
            lists[removal.id].append(set(removal.kept))
    return own | {id_: set.intersection(*kept) for id_, kept in lists.items()}


def find_depths(root: str, introductions: Iterable[Introduction]) -> dict[str, int]:
    """Return the distance from the root, in introductions, of every device that may introduce."""
    introduced: dict[str, list[str]] = defaultdict(list)
    for record in introductions:
        if record.may_introduce:
            introduced[record.introducer].append(record.id)
    depths = {root: 0} if root in introduced[root] else {}
    frontier = list(depths)
    while frontier:
        reached = {id_ for introducer in frontier for id_ in introduced[introducer] if id_ not in depths}
        depths.update(dict.fromkeys(reached, depths[frontier[0]] + 1))
        frontier = sorted(reached)
    return depths


def find_notice(id: str, records: Iterable[Record]) -> set[tuple[str, str, str]]:
    """Return the slots of the records that prove to a device that it was removed, and of no others.

    These are removals of it and of its introducers, and the introductions of those who signed them.
    """
    records = list(records)
    introducers: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if isinstance(record, Introduction):
            introducers[record.id].add(record.introducer)

    def with_introducers(ids: set[str]) -> set[str]:
        line, new = set(ids), set(ids)
        while new:
            new = {above for id_ in new for above in introducers[id_]} - line
            line |= new
        return line

    line = with_introducers({id})
    removals = [record for record in records if isinstance(record, Removal) and record.id in line]
    signers = with_introducers({removal.by for removal in removals})
    introductions = {record.slot for record in records if isinstance(record, Introduction) and record.id in signers}
    return introductions | {removal.slot for removal in removals}


def unique_names(names: dict[str, str]) -> dict[str, str]:
    """Append a part of the ID to every name that is not unique, ignoring case.

    >>> unique_names({"abcdefgh": "Pi", "bcdefghi": "pi", "cdefghij": "nas"})
    {'abcdefgh': 'Pi~abcdefg', 'bcdefghi': 'pi~bcdefgh', 'cdefghij': 'nas'}
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for id_, name in names.items():
        groups[_folded(name)].append(id_)
    unique = {}
    for ids in groups.values():
        length = len(short(ids[0]))
        while len({id_[:length] for id_ in ids}) < len(ids):
            length += 1
        for id_ in ids:
            unique[id_] = names[id_] if len(ids) == 1 else f"{names[id_]}{SUFFIX_SIGN}{id_[:length]}"
    return unique


@lru_cache(maxsize=1 << 15)
def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()
