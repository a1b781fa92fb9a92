"""Who belongs to a swarm: a set of signed records that all members merge, in any order, to the same result.

Two questions are separate, so that the order of arrival never matters: which records are *held* (`Roster.merge`), of
which none is ever deleted, and who is a *member* by them (`membership.find_members`). docs/protocol-trust.md has the
rules of both. A removal counts for ever, also if its signer is removed later. Only the root can remove itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from dfca.base.errors import ConfigError, DataError
from dfca.base.files import explain_write_errors
from dfca.node.disk.disk import SYSTEM_DISK, Disk
from dfca.node.trust import records
from dfca.node.trust.identity import Identity, check_certificate, is_device_id, peer_number, short, verify
from dfca.node.trust.membership import Member, find_depths, find_members, find_notice, grow
from dfca.node.trust.records import MAX_MEMBERS, Contact, Introduction, MalformedRecord, Record, Removal

MAX_RECORDS = 8 * MAX_MEMBERS
MAX_FORGED = 64  # wrong signatures or certificates after which the rest of a call is not read: each takes 0.2 ms
MOST_SHOWN = 2  # times a removed device is shown its removal before it may not connect: it may be gone before it reads
VERSION = 1
MOST_FILE_BYTES = 256 * 2**20


class RosterReason(StrEnum):
    """Why `Roster.merge` refuses a record."""

    MALFORMED = "malformed"
    SIGNATURE = "signature"  # forged, damaged, or made for another swarm
    CERTIFICATE = "certificate"
    SELF_INTRODUCED = "self-introduced"
    UNKNOWN_SIGNER = "unknown signer"
    NOT_ALLOWED = "signer may not introduce"
    ROOT_STAYS = "removal of the root by another"
    NOT_A_DEVICE = "only the root may be an authority"
    OLD_CONTACT = "old contact"
    FULL = "roster is full"
    NOT_READ = "after many forged ones"


class Roster:
    """The records of one swarm and who is a member by them."""

    def __init__(self, swarm: str, root: str) -> None:
        self.swarm, self.root = swarm, root
        self.changed = False  # whether there is something that `save` has not written
        self.refused: Counter[str] = Counter()  # how many records were refused, by reason
        self._held: dict[tuple[str, str, str], Record] = {}
        self._keys: dict[str, bytes] = {}  # a certificate of every introduced device; all of an ID have the same key
        self._may_sign: set[str] = set()
        self._membership = find_members(root, ())
        self._by_number: dict[int, Member] = {}
        self._introduced: frozenset[int] = frozenset()
        self._digest: str | None = None
        self._parts: list[bytes] = []  # digests of the records, sorted
        self._part_of: dict[tuple[str, str, str], bytes] = {}
        self._feed: dict[tuple[str, str, str], int] = {}  # by slot, when it changed last; the newest at the end
        self._fresh: list[tuple[Record, Record | None]] = []  # records since the last update, and what they replaced
        self.serial = 0  # counts changes
        self._shown: Counter[str] = Counter()
        self._callbacks: list[Callable[[], None]] = []

    @classmethod
    def found(
        cls, identity: Identity, swarm: str, name: str, addresses: Iterable[str] = (), is_device: bool = True
    ) -> Roster:
        """Make the roster of a new swarm, whose root is this identity."""
        roster = cls(swarm, identity.id)
        first = Introduction(
            identity.id, name, identity.certificate, tuple(addresses), True, is_device, introducer=identity.id
        )
        roster._add_own(identity, first)
        return roster

    def members(self) -> Mapping[str, Member]:
        """Return the members by ID, in order of their IDs: another object whenever they change."""
        return self._membership.members

    def member(self, id: str) -> Member | None:
        """Return the member with this ID."""
        return self._membership.members.get(id)

    def by_number(self, number: int) -> Member | None:
        """Return the member with this number."""
        return self._by_number.get(number)

    def by_name(self, name: str) -> Member | None:
        """Return the member with this name, ID or beginning of an ID (7 characters or more)."""
        for member in self._membership.members.values():
            if name in (member.name, member.id):
                return member
        begun = [id_ for id_ in self._membership.members if len(name) >= len(short(id_)) and id_.startswith(name)]
        return self._membership.members[begun[0]] if len(begun) == 1 else None

    def announced(self) -> dict[str, int]:
        """Return the members that have announced their addresses, and when, in seconds of their clocks."""
        said = {record.id: record.serial for record in self._held.values() if isinstance(record, Contact)}
        return {id: serial for id, serial in said.items() if id in self._membership.members}

    def is_removed(self, id: str) -> bool:
        """Return whether a device was removed: it never comes back."""
        return id in self._membership.removed

    def introduced(self) -> frozenset[int]:
        """Return the numbers of all devices that were ever introduced, also removed ones."""
        return self._introduced

    def certificates(self) -> list[bytes]:
        """List the certificates that may connect: members, and removed devices that were not shown their removal."""
        membership = self._membership  # gRPC calls this in its own threads
        waiting = (id_ for id_ in sorted(membership.removed) if id_ in self._keys and self._shown[id_] < MOST_SHOWN)
        return [*(member.certificate for member in membership.members.values()), *(self._keys[id_] for id_ in waiting)]

    def note_shown(self, id: str, times: int = 1) -> None:
        """Note that this node showed a removed device its removal."""
        self._shown[id] += times

    def notice(self, id: str) -> list[Record]:
        """Return the records that prove to a device that it was removed; none if it is a member, or never was one."""
        if id in self._membership.members or id not in self._keys:
            return []
        slots = find_notice(id, self._held.values())
        return [record for record in self.records() if record.slot in slots]

    def may_introduce(self, id: str) -> bool:
        """Return whether this member, or the authority, may introduce others now."""
        return id in self._membership.introducers and not self.is_removed(id)

    def records(self) -> list[Record]:
        """Return all records, each after those that it depends on: they can be sent in parts, in this order."""
        introductions = (record for record in self._held.values() if isinstance(record, Introduction))
        depths = find_depths(self.root, introductions)
        kinds = {"introduction": 0, "removal": 1, "contact": 2}

        def order(record: Record) -> tuple[int, int, tuple[str, str, str]]:
            depth = 0
            if isinstance(record, Introduction) and record.introducer != record.id:
                depth = 1 + depths[record.introducer]
            return (kinds[record.kind], depth, record.slot)

        return sorted(self._held.values(), key=order)

    def digest(self) -> str:
        """Return a digest that is equal if and only if swarm, root and records are."""
        if self._digest is not None:
            return self._digest
        head = records.canonical(b"dfca roster 1", self.swarm.encode(), self.root.encode())
        self._digest = hashlib.sha256(head + b"".join(self._parts)).hexdigest()
        return self._digest

    def since(self, serial: int) -> list[Record]:
        """Return the records that came after a change (`serial`), oldest first."""
        slots = takewhile(lambda slot: self._feed[slot] > serial, reversed(self._feed))
        return [self._held[slot] for slot in slots][::-1]

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever there are new records; returns a function that ends this."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def merge(self, received: Iterable[Record | bytes]) -> list[str]:
        """Merge records of others; return the reason for each that is refused.

        Records may come in any order, if those that they depend on come in the same call or came before.
        """
        reasons: list[str] = []
        new = [record for record in self._parsed(received, reasons) if self._held.get(record.slot) != record]
        while new:
            waiting = []
            for record in new:
                forged = reasons.count(RosterReason.SIGNATURE) + reasons.count(RosterReason.CERTIFICATE)
                reason = self._hold(record) if forged < MAX_FORGED else RosterReason.NOT_READ
                if reason in (RosterReason.UNKNOWN_SIGNER, RosterReason.NOT_ALLOWED):
                    waiting.append((record, reason))  # another record of this call may make it valid
                elif reason is not None:
                    reasons.append(reason)
            if len(waiting) == len(new):
                reasons += [reason for _, reason in waiting]
                break
            new = [record for record, _ in waiting]
        self.refused.update(reasons)
        self._update()
        return reasons

    def introduce(
        self,
        identity: Identity,
        certificate: bytes,
        name: str,
        addresses: Iterable[str] = (),
        may_introduce: bool = False,
    ) -> Member:
        """Make a device a member, signed by this identity. Raises ConfigError with the reason if it cannot be."""
        try:
            id_ = check_certificate(certificate)
        except ValueError as error:
            raise ConfigError(f"the certificate of {name!r} cannot be used: {error}") from error
        if not self.may_introduce(identity.id) and not id_ == identity.id == self.root:
            raise ConfigError(
                f"device {short(identity.id)} may not introduce others to this swarm; invite from one that may: "
                + ", ".join(member.name for member in self._membership.members.values() if member.may_introduce)
            )
        if self.is_removed(id_):
            raise ConfigError(
                f"device {short(id_)} was removed from this swarm, which is final; give it a new identity: make its "
                "folder again with another name"
            )
        other = self._by_number.get(peer_number(id_))
        if other is not None and other.id != id_:
            raise ConfigError(f"device {short(id_)} has the number of another member; make it again")
        held = self._held.get(("introduction", id_, identity.id))
        serial = 0
        if isinstance(held, Introduction):  # what was allowed once stays allowed, so that the order never matters
            may_introduce, serial = may_introduce or held.may_introduce, held.serial + 1
        may_introduce = may_introduce or id_ == self.root
        new = Introduction(id_, name, certificate, tuple(addresses), may_introduce, True, identity.id, serial)
        self._add_own(identity, new)
        return self._membership.members[id_]

    def remove(self, identity: Identity, id: str, keep: Iterable[str] | None = None) -> None:
        """Remove a member for ever; the devices that it introduced stay by default (`keep=()`: they go too).

        Raises ConfigError if it is not a member, or this identity may not remove it.
        """
        if id not in self._membership.members and id not in self._membership.introducers:
            raise ConfigError(
                f"{id[:52]!r} is not a member of this swarm; members: "
                + ", ".join(member.name for member in self._membership.members.values())
            )
        if id != identity.id and not self.may_introduce(identity.id):
            raise ConfigError(f"device {short(identity.id)} may not remove others; only members that may introduce can")
        if id == self.root and identity.id != id:
            raise ConfigError(f"device {short(id)} founded this swarm and can only be removed by itself")
        counting = {record.id for record in self._membership.counting if record.introducer == id and record.id != id}
        kept = counting if keep is None else counting & set(keep)
        self._add_own(identity, Removal(id, identity.id, tuple(sorted(kept))))

    def announce(self, identity: Identity, addresses: Iterable[str], now: float | None = None) -> None:
        """Publish where this device listens, if it changed. Raises ConfigError if an address is not HOST:PORT.

        now: seconds since 1970; None: by the clock of this machine.
        """
        held = self._held.get(("contact", identity.id, identity.id))
        known = held if isinstance(held, Contact) else None
        if known is not None and known.addresses == tuple(addresses):
            return
        # Seconds, so that a device that lost its roster does not start below what others hold.
        serial = max(int(time.time() if now is None else now), known.serial + 1 if known else 0)
        self._add_own(identity, Contact(identity.id, tuple(addresses), serial))

    def save(self, path: Path, disk: Disk = SYSTEM_DISK) -> None:
        """Write the roster atomically."""
        listed = [records.to_json(record) for record in self.records()]
        values = {"version": VERSION, "swarm": self.swarm, "root": self.root, "records": listed}
        with explain_write_errors(path), disk.replacing(path) as file:
            file.write((json.dumps(values, indent=1) + "\n").encode())
        self.changed = False

    @classmethod
    def load(cls, path: Path, disk: Disk = SYSTEM_DISK) -> Roster:
        """Read a roster and check every record again. Raises DataError if the file is missing or damaged."""
        try:
            values = json.loads(disk.read_small(path, MOST_FILE_BYTES))
            version, received = values["version"], values["records"]
            roster = cls(values["swarm"], values["root"])
            if not isinstance(roster.swarm, str) or not is_device_id(roster.root) or not isinstance(received, list):
                raise TypeError("swarm or root")
        except FileNotFoundError as error:
            raise DataError(
                f"{path} does not exist; restore it from a copy, or pair this device again in an empty folder"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}; restore it from a copy") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path} is not a roster that can be read; restore it, or pair this device again"
            ) from error
        if version != VERSION:
            raise DataError(f"{path} has version {version!r} and this program reads {VERSION}; update dfca")
        reasons = roster.merge(json.dumps(record).encode() for record in received)
        if reasons:
            raise DataError(
                f"{path} is damaged: {len(reasons)} of {len(received)} records do not hold ({reasons[0]}); restore it, "
                "or pair this device again"
            )
        roster.changed = False
        return roster

    def _parsed(self, received: Iterable[Record | bytes], reasons: list[str]) -> list[Record]:
        parsed = []
        for count, record in enumerate(received):
            if count >= MAX_RECORDS:
                reasons.append(RosterReason.FULL)
                break
            try:
                # A record made elsewhere is checked like one from the network.
                parsed.append(records.from_bytes(record if isinstance(record, bytes) else records.to_bytes(record)))
            except (MalformedRecord, UnicodeError):
                reasons.append(RosterReason.MALFORMED)
        return parsed

    def _hold(self, record: Record) -> str | None:
        reason = self._forbidden(record)
        if reason is not None:
            return reason
        held = self._held.get(record.slot)
        is_new_member = isinstance(record, Introduction) and record.id not in self._keys
        if held is None and (len(self._held) >= MAX_RECORDS or (is_new_member and len(self._keys) >= MAX_MEMBERS)):
            return RosterReason.FULL
        if held is not None and held.rank() >= record.rank():
            is_old = isinstance(held, Contact) and held.serial > getattr(record, "serial", 0)
            return RosterReason.OLD_CONTACT if is_old else None
        is_founding = isinstance(record, Introduction) and record.id == record.introducer
        certificate = record.certificate if is_founding else self._keys[record.signer]  # type: ignore[union-attr]
        if not verify(certificate, record.signed_bytes(self.swarm), record.signature):
            return RosterReason.SIGNATURE
        self._held[record.slot] = record
        self._note(record, held)
        if isinstance(record, Introduction):
            self._keys.setdefault(record.id, record.certificate)
            if record.may_introduce:
                self._may_sign.add(record.id)
        return None

    def _note(self, record: Record, replaced: Record | None) -> None:
        """Note a change, for `digest`, `since` and `_update`."""
        slot = record.slot
        if replaced is not None:
            del self._parts[bisect_left(self._parts, self._part_of[slot])]
        signed = records.canonical(record.signed_bytes(self.swarm), record.signature)
        self._part_of[slot] = hashlib.sha256(signed).digest()
        insort(self._parts, self._part_of[slot])
        self.serial += 1
        self._feed.pop(slot, None)
        self._feed[slot] = self.serial
        self._fresh.append((record, replaced))
        self.changed, self._digest = True, None

    def _forbidden(self, record: Record) -> str | None:
        """Return why its signer may not make this record, whatever the signature."""
        founding = isinstance(record, Introduction) and record.id == record.introducer == self.root
        if isinstance(record, Introduction):
            if record.id == record.introducer and not founding:
                return RosterReason.SELF_INTRODUCED
            if (founding and not record.may_introduce) or (not founding and not record.is_device):
                return RosterReason.NOT_A_DEVICE
            if _certified_id(record.certificate) != record.id:
                return RosterReason.CERTIFICATE
        if founding:
            return None
        if record.signer not in self._keys or (record.id not in self._keys and not isinstance(record, Introduction)):
            return RosterReason.UNKNOWN_SIGNER
        if isinstance(record, Removal) and record.id == self.root and record.by != self.root:
            return RosterReason.ROOT_STAYS
        if record.signer not in self._may_sign and record.signer != record.id:
            return RosterReason.NOT_ALLOWED
        return None

    def _add_own(self, identity: Identity, record: Record) -> None:
        try:
            signed = records.from_bytes(records.to_bytes(records.sign_record(record, identity, self.swarm)))
        except MalformedRecord as error:
            raise ConfigError(f"this cannot be put into the roster: {error}") from error
        reason = self._hold(signed)
        if reason is not None:
            raise ConfigError(f"device {short(identity.id)} cannot add this to the roster: {reason}")
        self._update()

    def _update(self) -> None:
        """Derive the members, and call back, if there are new records."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        grown = grow(self._membership, fresh)
        self._membership = find_members(self.root, self._held.values()) if grown is None else grown
        if grown is None:
            self._by_number = {member.number: member for member in self._membership.members.values()}
            self._introduced = frozenset(map(peer_number, self._keys))
        else:
            changed = {record.id for record, _ in fresh} & self._membership.members.keys()
            self._by_number |= {peer_number(id): self._membership.members[id] for id in changed}
            self._introduced |= {peer_number(id) for id in changed}
        self.digest()
        for callback in tuple(self._callbacks):
            callback()

    def copy(self) -> Roster:
        """Return a copy with the same records and no subscribers."""
        other = Roster(self.swarm, self.root)
        other._held, other._keys, other._may_sign = dict(self._held), dict(self._keys), set(self._may_sign)
        other._parts, other._part_of, other._feed = [*self._parts], dict(self._part_of), dict(self._feed)
        other.serial, other._fresh = self.serial, [(record, None) for record in self._held.values()]
        other._membership, other._digest = find_members(self.root, ()), None
        other._update()
        return other


@lru_cache(maxsize=MAX_MEMBERS)
def _certified_id(certificate: bytes) -> str | None:
    try:
        return check_certificate(certificate)
    except ValueError:
        return None
