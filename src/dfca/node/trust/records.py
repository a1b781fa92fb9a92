"""The signed records of a roster: what they hold, the bytes that are signed, and how they are written.

Signed are length-prefixed fields, never JSON: two programs that write JSON differently still sign the same bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dfca.node.trust.identity import MAX_CERTIFICATE_BYTES, Identity, is_device_id

MAX_MEMBERS = 1024
MAX_RECORD_BYTES = 1 << 16
MAX_NAME = 64
MAX_ADDRESSES = 8
MAX_SIGNATURE_BYTES = 80
MAX_SERIAL = 2**63 - 1
SUFFIX_SIGN = "~"
"""Stands between a name and a part of the ID where two members have the same name; so no name may have it."""
NOT_IN_NAMES = frozenset(SUFFIX_SIGN + "/\\")  # a name may end up in the name of a file
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]{2,64}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


class MalformedRecord(ValueError):
    """A record that is none: the text is the reason."""


def canonical(*fields: bytes) -> bytes:
    """Join fields so that no two lists of fields give the same bytes: each behind its length (4 bytes, big-endian).

    >>> canonical(b"ab", b"").hex()
    '00000002616200000000'
    """
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


@dataclass(frozen=True)
class Introduction:
    """`introducer` says that the device of `certificate` belongs to the swarm."""

    id: str
    name: str
    certificate: bytes
    addresses: tuple[str, ...]
    may_introduce: bool
    is_device: bool
    """False: the authority of a fleet, which introduces devices and takes no part itself."""
    introducer: str
    serial: int = 0
    """Counts the introductions of this device by this introducer: a later one has a new name or certificate."""
    signature: bytes = b""

    kind: ClassVar[str] = "introduction"

    @property
    def signer(self) -> str:
        """Who must have signed it."""
        return self.introducer

    @property
    def slot(self) -> tuple[str, str, str]:
        """What there is one record of."""
        return (self.kind, self.id, self.introducer)

    def rank(self) -> tuple[Any, ...]:
        """Order records of one slot: the higher counts. What was allowed once stays allowed (see `Roster`)."""
        content = (self.is_device, self.name.encode(), self.certificate, self.addresses, self.signature)
        return (self.may_introduce, self.serial, *content)

    def signed_bytes(self, swarm: str) -> bytes:
        """Return what the signature covers."""
        return canonical(
            b"dfca roster 1 introduction",
            swarm.encode(),
            self.id.encode(),
            self.name.encode(),
            self.certificate,
            canonical(*(address.encode() for address in self.addresses)),
            bytes([self.may_introduce]),
            bytes([self.is_device]),
            self.introducer.encode(),
            self.serial.to_bytes(8, "big"),
        )


@dataclass(frozen=True)
class Removal:
    """`by` says that a device belongs no longer; of those that it introduced only `kept` stay through it."""

    id: str
    by: str
    kept: tuple[str, ...]
    signature: bytes = b""

    kind: ClassVar[str] = "removal"

    @property
    def signer(self) -> str:
        """Who must have signed it."""
        return self.by

    @property
    def slot(self) -> tuple[str, str, str]:
        """What there is one record of."""
        return (self.kind, self.id, self.by)

    def rank(self) -> tuple[Any, ...]:
        """Order records of one slot: the higher counts."""
        return (-len(self.kept), self.kept, self.signature)

    def signed_bytes(self, swarm: str) -> bytes:
        """Return what the signature covers."""
        return canonical(
            b"dfca roster 1 removal",
            swarm.encode(),
            self.id.encode(),
            self.by.encode(),
            canonical(*(id_.encode() for id_ in self.kept)),
        )


@dataclass(frozen=True)
class Contact:
    """A device says where it listens; of its contacts the one with the highest serial number counts."""

    id: str
    addresses: tuple[str, ...]
    serial: int
    signature: bytes = b""

    kind: ClassVar[str] = "contact"

    @property
    def signer(self) -> str:
        """Who must have signed it."""
        return self.id

    @property
    def slot(self) -> tuple[str, str, str]:
        """What there is one record of."""
        return (self.kind, self.id, self.id)

    def rank(self) -> tuple[Any, ...]:
        """Order records of one slot: the higher counts."""
        return (self.serial, self.addresses, self.signature)

    def signed_bytes(self, swarm: str) -> bytes:
        """Return what the signature covers."""
        return canonical(
            b"dfca roster 1 contact",
            swarm.encode(),
            self.id.encode(),
            canonical(*(address.encode() for address in self.addresses)),
            self.serial.to_bytes(8, "big"),
        )


Record = Introduction | Removal | Contact


def sign_record(record: Record, identity: Identity, swarm: str) -> Record:
    """Return the record with its signature."""
    return replace(record, signature=identity.sign(record.signed_bytes(swarm)))


def to_bytes(record: Record) -> bytes:
    """Write a record as JSON, as it travels and as `roster.json` holds it."""
    return json.dumps(to_json(record), sort_keys=True, separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Record:
    """Read a record; only its form is checked, not who signed it.

    Raises:
        MalformedRecord: with the reason.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise MalformedRecord(f"a record has {len(data)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedRecord("a record is not JSON") from error
    return from_json(values)


def to_json(record: Record) -> dict[str, Any]:
    """Return a record as values of JSON."""
    values: dict[str, Any] = {"kind": record.kind, "id": record.id}
    if isinstance(record, Introduction):
        values |= {
            "name": record.name,
            "certificate": record.certificate.decode("ascii"),
            "addresses": list(record.addresses),
            "may_introduce": record.may_introduce,
            "is_device": record.is_device,
            "introducer": record.introducer,
            "serial": record.serial,
        }
    elif isinstance(record, Removal):
        values |= {"by": record.by, "kept": list(record.kept)}
    else:
        values |= {"addresses": list(record.addresses), "serial": record.serial}
    return values | {"signature": base64.b64encode(record.signature).decode()}


def from_json(values: object) -> Record:
    """Make a record of values of JSON.

    Raises:
        MalformedRecord: with the reason.
    """
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise MalformedRecord("a record is not an object with a kind")
    if values["kind"] not in READERS:
        raise MalformedRecord("a record is of an unknown kind")
    record = READERS[values["kind"]](values)
    if set(to_json(record)) != set(values):
        raise MalformedRecord("a record has fields that it should not have")
    return record


def check_name(name: object) -> str:
    """Return a name that people can read: printable, at most 64 characters.

    Raises:
        MalformedRecord: with the reason.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise MalformedRecord(f"a name must have 1 to {MAX_NAME} characters")
    if not name.isprintable() or name != name.strip() or set(name) & NOT_IN_NAMES or is_device_id(name):
        raise MalformedRecord(
            f"a name must be printable, without {' '.join(sorted(NOT_IN_NAMES))} and without spaces at its ends, and "
            "must not be an ID"
        )
    if unicodedata.normalize("NFC", name) != name:
        raise MalformedRecord("a name must be in the normal form NFC of Unicode")
    return name


def check_addresses(addresses: object) -> tuple[str, ...]:
    """Return addresses `host:port` (IPv6 in brackets).

    Raises:
        MalformedRecord: with the reason.
    """
    if not isinstance(addresses, list | tuple) or len(addresses) > MAX_ADDRESSES:
        raise MalformedRecord(f"addresses must be a list of at most {MAX_ADDRESSES}")
    for address in addresses:
        match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 0 < int(match[2]) < 1 << 16 or not address.isascii():
            raise MalformedRecord("an address must be HOST:PORT, an IPv6 address in brackets")
    return tuple(addresses)


def _introduction(values: Mapping[str, Any]) -> Introduction:
    certificate = values.get("certificate")
    if not isinstance(certificate, str) or not certificate.isascii() or len(certificate) > MAX_CERTIFICATE_BYTES:
        raise MalformedRecord(f"a certificate must be a text of at most {MAX_CERTIFICATE_BYTES} characters")
    return Introduction(
        id=_id(values, "id"),
        name=check_name(values.get("name")),
        certificate=certificate.encode(),
        addresses=check_addresses(values.get("addresses")),
        may_introduce=_flag(values, "may_introduce"),
        is_device=_flag(values, "is_device"),
        introducer=_id(values, "introducer"),
        serial=_serial(values),
        signature=_signature(values),
    )


def _removal(values: Mapping[str, Any]) -> Removal:
    kept = values.get("kept")
    if not isinstance(kept, list) or len(kept) > MAX_MEMBERS or not all(is_device_id(id_) for id_ in kept):
        raise MalformedRecord(f"kept must be a list of at most {MAX_MEMBERS} IDs")
    if sorted(set(kept)) != kept:
        raise MalformedRecord("kept must be in order and without doubles")
    return Removal(_id(values, "id"), _id(values, "by"), tuple(kept), _signature(values))


def _contact(values: Mapping[str, Any]) -> Contact:
    return Contact(_id(values, "id"), check_addresses(values.get("addresses")), _serial(values), _signature(values))


def _serial(values: Mapping[str, Any]) -> int:
    serial = values.get("serial")
    if not isinstance(serial, int) or isinstance(serial, bool) or not 0 <= serial <= MAX_SERIAL:
        raise MalformedRecord("a serial number must be a whole number of at most 63 bits")
    return serial


def _id(values: Mapping[str, Any], key: str) -> str:
    if not is_device_id(values.get(key)):
        raise MalformedRecord(f"{key} must be a device ID")
    return str(values[key])


def _flag(values: Mapping[str, Any], key: str) -> bool:
    if not isinstance(values.get(key), bool):
        raise MalformedRecord(f"{key} must be true or false")
    return bool(values[key])


def _signature(values: Mapping[str, Any]) -> bytes:
    text = values.get("signature")
    if not isinstance(text, str) or len(text) > 2 * MAX_SIGNATURE_BYTES:
        raise MalformedRecord("a signature must be a short text")
    try:
        signature = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedRecord("a signature must be in base64") from error
    if not 0 < len(signature) <= MAX_SIGNATURE_BYTES or base64.b64encode(signature).decode() != text:
        raise MalformedRecord("a signature must be in base64")
    return signature


READERS: dict[str, Callable[[Mapping[str, Any]], Record]] = {
    "introduction": _introduction,
    "removal": _removal,
    "contact": _contact,
}
