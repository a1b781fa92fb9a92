"""The signed records of a roster: their fields, the signed bytes, and JSON.

Signatures cover length-prefixed fields, not JSON: programs that write JSON differently sign the same bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dfca.node.trust.identity import MAX_CERTIFICATE_BYTES, Identity, is_device_id

MAX_MEMBERS = 16_384
MAX_KEPT = 1024  # devices that stay when the one that introduced them is removed
MAX_RECORD_BYTES = 1 << 16
MAX_NAME = 64
MAX_ADDRESSES = 8
MAX_SIGNATURE_BYTES = 80
MAX_SERIAL = 2**63 - 1
SUFFIX_SIGN = "~"  # between a name and a part of the ID where two members have the same name; no name may contain it
NOT_IN_NAMES = frozenset(SUFFIX_SIGN + "/\\")  # a name may end up in the name of a file
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]{2,64}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


class MalformedRecord(ValueError):
    """A malformed record; the text is the reason."""


def canonical(*fields: bytes) -> bytes:
    """Join fields so that no two lists of fields give the same bytes: each behind its length (4 bytes, big-endian).

    >>> canonical(b"ab", b"").hex()
    '00000002616200000000'
    """
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


class _Signed:
    """What all kinds of records share. All fields but the signature are signed, in order."""

    kind: ClassVar[str]
    signer_field: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]]  # the names of the fields, in their order
    id: str
    signature: bytes

    @property
    def signer(self) -> str:
        """The ID of the device that signs it."""
        return str(getattr(self, self.signer_field))

    @property
    def slot(self) -> tuple[str, str, str]:
        """A roster holds one record per slot."""
        return (self.kind, self.id, self.signer)

    def signed_bytes(self, swarm: str) -> bytes:
        """Return the bytes that the signature covers."""
        values = [getattr(self, name) for name in self.__match_args__ if name != "signature"]
        return canonical(f"dfca roster 1 {self.kind}".encode(), swarm.encode(), *map(_field_bytes, values))


@dataclass(frozen=True)
class Introduction(_Signed):
    """`introducer` says that the device of `certificate` belongs to the swarm."""

    kind: ClassVar[str] = "introduction"
    signer_field: ClassVar[str] = "introducer"

    id: str
    name: str
    certificate: bytes
    addresses: tuple[str, ...]
    may_introduce: bool
    is_device: bool  # False: the authority of a fleet, which introduces devices and takes no part itself
    introducer: str
    serial: int = 0  # of this introducer's introductions of this device: a later one has a new name or certificate
    signature: bytes = b""

    def rank(self) -> tuple[Any, ...]:
        """Order records of one slot: the highest is held. What was allowed once stays allowed (see `Roster`)."""
        content = (self.is_device, self.name.encode(), self.certificate, self.addresses, self.signature)
        return (self.may_introduce, self.serial, *content)


@dataclass(frozen=True)
class Removal(_Signed):
    """`by` removes a device; of those that it introduced only `kept` stay members."""

    kind: ClassVar[str] = "removal"
    signer_field: ClassVar[str] = "by"

    id: str
    by: str
    kept: tuple[str, ...]
    signature: bytes = b""

    def rank(self) -> tuple[Any, ...]:
        """Order records of one slot: the highest is held."""
        return (-len(self.kept), self.kept, self.signature)


@dataclass(frozen=True)
class Contact(_Signed):
    """A device says where it listens; its contact with the highest serial number is held."""

    kind: ClassVar[str] = "contact"
    signer_field: ClassVar[str] = "id"

    id: str
    addresses: tuple[str, ...]
    serial: int
    signature: bytes = b""

    def rank(self) -> tuple[Any, ...]:
        """Order records of one slot: the highest is held."""
        return (self.serial, self.addresses, self.signature)


def _field_bytes(value: Any) -> bytes:
    if isinstance(value, tuple):
        return canonical(*(text.encode() for text in value))
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        return value.to_bytes(8, "big")
    return value.encode() if isinstance(value, str) else bytes(value)


Record = Introduction | Removal | Contact


def sign_record(record: Record, identity: Identity, swarm: str) -> Record:
    """Return the record with its signature."""
    return replace(record, signature=identity.sign(record.signed_bytes(swarm)))


def to_bytes(record: Record) -> bytes:
    """Write a record as JSON, as it travels and as `roster.json` holds it."""
    return json.dumps(to_json(record), sort_keys=True, separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Record:
    """Read a record and check its form, not its signature. Raises MalformedRecord."""
    if len(data) > MAX_RECORD_BYTES:
        raise MalformedRecord(f"a record has {len(data)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedRecord("a record is not JSON") from error
    return from_json(values)


def to_json(record: Record) -> dict[str, Any]:
    """Return a record as JSON values."""
    values: dict[str, Any] = {name: getattr(record, name) for name in record.__match_args__}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    if isinstance(record, Introduction):
        values["certificate"] = record.certificate.decode("ascii")
    return {"kind": record.kind, **values, "signature": base64.b64encode(record.signature).decode()}


def from_json(values: object) -> Record:
    """Make a record from JSON values. Raises MalformedRecord."""
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise MalformedRecord("a record is not an object with a kind")
    kind = KINDS.get(values["kind"])
    if kind is None:
        raise MalformedRecord("a record is of an unknown kind")
    names = kind.__match_args__
    record = kind(**{name: FIELDS[name](values.get(name), name) for name in names})
    if {"kind", *names} != set(values):
        raise MalformedRecord("a record has fields that it should not have")
    return record


def check_name(name: object, field: str = "name") -> str:
    """Return a name that people can read: printable, at most 64 characters. Raises MalformedRecord."""
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


def check_addresses(addresses: object, field: str = "addresses") -> tuple[str, ...]:
    """Return addresses `host:port` (IPv6 in brackets). Raises MalformedRecord."""
    if not isinstance(addresses, list | tuple) or len(addresses) > MAX_ADDRESSES:
        raise MalformedRecord(f"addresses must be a list of at most {MAX_ADDRESSES}")
    for address in addresses:
        match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 0 < int(match[2]) < 1 << 16 or not address.isascii():
            raise MalformedRecord("an address must be HOST:PORT, an IPv6 address in brackets")
    return tuple(addresses)


def _certificate(value: Any, field: str) -> bytes:
    if not isinstance(value, str) or not value.isascii() or len(value) > MAX_CERTIFICATE_BYTES:
        raise MalformedRecord(f"a certificate must be a text of at most {MAX_CERTIFICATE_BYTES} characters")
    return value.encode()


def _kept(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_KEPT or not all(map(is_device_id, value)):
        raise MalformedRecord(f"kept must be a list of at most {MAX_KEPT} IDs")
    if sorted(set(value)) != value:
        raise MalformedRecord("kept must be in order and without doubles")
    return tuple(value)


def _serial(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SERIAL:
        raise MalformedRecord("a serial number must be a whole number of at most 63 bits")
    return value


def _id(value: Any, field: str) -> str:
    if not is_device_id(value):
        raise MalformedRecord(f"{field} must be a device ID")
    return str(value)


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise MalformedRecord(f"{field} must be true or false")
    return value


def _signature(value: Any, field: str) -> bytes:
    if not isinstance(value, str):
        raise MalformedRecord("a signature must be a text")
    try:
        signature = base64.b64decode(value)
    except (binascii.Error, ValueError) as error:
        raise MalformedRecord("a signature must be in base64") from error
    if not 0 < len(signature) <= MAX_SIGNATURE_BYTES or base64.b64encode(signature).decode() != value:
        raise MalformedRecord("a signature must be in base64")
    return signature


KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in (Introduction, Removal, Contact)}
FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "id": _id,
    "name": check_name,
    "certificate": _certificate,
    "addresses": check_addresses,
    "may_introduce": _flag,
    "is_device": _flag,
    "introducer": _id,
    "by": _id,
    "kept": _kept,
    "serial": _serial,
    "signature": _signature,
}  # what checks a field of a record: takes the value and the field's name, raises MalformedRecord
