"""Who is a member, from the records of a roster alone: a pure function, whatever the order they came in."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dfca.node.trust.identity import peer_number, short
from dfca.node.trust.records import SUFFIX_SIGN, Contact, Introduction, Record, Removal


@dataclass(frozen=True)
class Member:
    """A device that belongs to the swarm."""

    id: str
    name: str
    """Unique: where two have the same name, both have a part of their ID behind it."""
    certificate: bytes
    addresses: tuple[str, ...]
    may_introduce: bool

    @property
    def number(self) -> int:
        """What the peer protocol calls it."""
        return peer_number(self.id)


@dataclass(frozen=True)
class Membership:
    """What the records of a roster amount to."""

    members: Mapping[str, Member]
    """By ID, in order of the IDs."""
    removed: frozenset[str]
    introducers: Mapping[str, int]
    """Those whose introductions count, with the number of introductions from the root to each; some may be removed."""
    counting: tuple[Introduction, ...]
    """The introductions that count."""


def find_members(root: str, records: Iterable[Record]) -> Membership:
    """Work out the members.

    A removed device is none. An introduction counts if its introducer is reached from the root by introductions that
    count, each with `may_introduce`; one by a removed device only if `find_kept` lists it. Of several the one nearest
    to the root gives name and certificate. Of two with the same number the one nearer to the root is a member.
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
    members = {
        record.id: Member(
            record.id,
            names[record.id],
            record.certificate,
            addresses.get(record.id, record.addresses),
            record.id in depths,
        )
        for record in sorted(chosen.values(), key=lambda record: record.id)
    }
    return Membership(members, removed, depths, counting)


def find_kept(removals: Iterable[Removal]) -> dict[str, set[str]]:
    """Return for every removed device those that it introduced and that stay.

    All others that removed it must list them. Its own word counts only if nobody else has removed it: else it could
    keep friends.
    """
    lists: dict[str, list[set[str]]] = defaultdict(list)
    own: dict[str, set[str]] = {}
    for removal in removals:
        if removal.by == removal.id:
            own[removal.id] = set(removal.kept)
        else:
            lists[removal.id].append(set(removal.kept))
    return own | {id_: set.intersection(*each) for id_, each in lists.items()}


def find_depths(root: str, introductions: Iterable[Introduction]) -> dict[str, int]:
    """Return how many introductions from the root everybody is who may introduce by them."""
    introduced: dict[str, list[str]] = defaultdict(list)
    for record in introductions:
        if record.may_introduce:
            introduced[record.introducer].append(record.id)
    depths = {root: 0} if root in introduced[root] else {}
    frontier = list(depths)
    while frontier:
        found = {id_ for each in frontier for id_ in introduced[each] if id_ not in depths}
        depths.update(dict.fromkeys(found, depths[frontier[0]] + 1))
        frontier = sorted(found)
    return depths


def find_notice(id: str, records: Iterable[Record]) -> set[tuple[str, str, str]]:
    """Return the slots of the records that show to a device that it was removed.

    Removals of it and of those that introduced it, and the introductions of who signed them; nothing else that has
    happened in the swarm is its business.
    """
    records = list(records)
    introducers: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if isinstance(record, Introduction):
            introducers[record.id].add(record.introducer)

    def line_of(ids: set[str]) -> set[str]:
        found, new = set(ids), set(ids)
        while new:
            new = {above for each in new for above in introducers[each]} - found
            found |= new
        return found

    above = line_of({id})
    removals = [record for record in records if isinstance(record, Removal) and record.id in above]
    signers = line_of({removal.by for removal in removals})
    introductions = {each.slot for each in records if isinstance(each, Introduction) and each.id in signers}
    return introductions | {removal.slot for removal in removals}


def unique_names(names: dict[str, str]) -> dict[str, str]:
    """Put a part of the ID behind every name that two have; letters of either case are the same.

    >>> unique_names({"abcdefgh": "Pi", "bcdefghi": "pi", "cdefghij": "nas"})
    {'abcdefgh': 'Pi~abcdefg', 'bcdefghi': 'pi~bcdefgh', 'cdefghij': 'nas'}
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for id_, name in names.items():
        groups[unicodedata.normalize("NFKC", name).casefold()].append(id_)
    unique = {}
    for ids in groups.values():
        length = len(short(ids[0]))
        while len({id_[:length] for id_ in ids}) < len(ids):
            length += 1
        for id_ in ids:
            unique[id_] = names[id_] if len(ids) == 1 else f"{names[id_]}{SUFFIX_SIGN}{id_[:length]}"
    return unique
