"""Fleets: an offline authority introduces devices by files, without pairing and without a network.

A device makes a request, the authority signs it into a bundle, the device accepts the bundle; people compare the
fingerprints (device IDs) at both ends. The authority is the root of the roster but not a member: it has no data and is
never online. The first request with facts gives the fleet its facts, with the authority as founder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from filelock import FileLock, Timeout

from dfca.base.errors import ConfigError, DataError, RunError
from dfca.base.files import atomic_write
from dfca.node.trust import records
from dfca.node.trust.handshake import MAX_FACTS_BYTES
from dfca.node.trust.identity import KEY_FILE, Identity, check_certificate, device_id, encode_id, is_device_id, short
from dfca.node.trust.membership import Member
from dfca.node.trust.records import MalformedRecord
from dfca.node.trust.roster import Roster

FACTS_FILE = "facts.json"
ROSTER_FILE = "roster.json"
REQUEST_VERSION = "dfca request 1"
BUNDLE_VERSION = "dfca bundle 1"
AUTHORITY_NAME = "authority"
MAX_FILE_BYTES = 8 * MAX_FACTS_BYTES


@dataclass(frozen=True)
class DeviceRequest:
    """A device asks to be introduced."""

    id: str
    certificate: bytes
    name: str | None
    addresses: tuple[str, ...]
    facts: bytes | None  # of the swarm that the device has prepared, if any


@dataclass(frozen=True)
class Bundle:
    """What the authority gives a device: the swarm's facts and its roster, checked."""

    facts: bytes
    roster: Roster

    @property
    def authority(self) -> str:
        """The ID of the authority."""
        return self.roster.root


def make_request(folder: Path, name: str | None = None, addresses: Iterable[str] = ()) -> bytes:
    """Write the request of the device in a folder, which gets a key if it has none.

    Raises ConfigError if name or addresses are wrong; DataError if the folder cannot be read.
    """
    folder = Path(folder)
    given = _check_given(name, list(addresses))
    identity = Identity.load(folder) if (folder / KEY_FILE).exists() else Identity.create(folder)
    values: dict[str, Any] = {
        "version": REQUEST_VERSION,
        "request": _signing_request(identity).decode(),
        "certificate": identity.certificate.decode(),
        "name": given[0],
        "addresses": list(given[1]),
        "facts": None,
    }
    if (folder / FACTS_FILE).exists():
        values["facts"] = _read_facts((folder / FACTS_FILE).read_bytes(), folder / FACTS_FILE)
    return _to_bytes(values)


def read_request(data: bytes) -> DeviceRequest:
    """Read a request and check that its maker holds the key. Raises DataError for anything else."""
    values = _read_file(data, REQUEST_VERSION, "a request of `dfca keys request`")
    try:
        certificate = str(values.get("certificate")).encode("ascii")
        id_ = check_certificate(certificate)
        asked = x509.load_pem_x509_csr(str(values.get("request")).encode("ascii"))
        der = asked.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        if not asked.is_signature_valid or encode_id(hashlib.sha256(der).digest()) != id_:
            raise ValueError("its signature is not by the key of its certificate")
        name = None if values.get("name") is None else records.check_name(values["name"])
        addresses = records.check_addresses(values.get("addresses"))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"this request cannot be used: {error}; make it again with `dfca keys request`") from error
    facts = values.get("facts")
    return DeviceRequest(id_, certificate, name, addresses, None if facts is None else _to_bytes(facts))


def sign_request(
    folder: Path,
    request: DeviceRequest,
    name: str | None = None,
    addresses: Sequence[str] = (),
    may_introduce: bool = False,
) -> tuple[Member, bytes]:
    """Introduce the device of a request; return the member and the bundle for it. name, addresses: else the request's.

    Raises ConfigError if it has no name, was removed, or the fleet has no facts yet; DataError if a file of the
    authority cannot be used.
    """
    folder = Path(folder)
    identity = Identity.load(folder)
    named, reached = _check_given(name or request.name, list(addresses or request.addresses))
    if named is None:
        raise ConfigError(f"device {short(request.id)} has no name yet; give it one: --name NAME")
    facts, roster = _open_fleet(folder, identity, request)
    member = roster.introduce(identity, request.certificate, named, reached, may_introduce)
    _save_fleet(folder, facts, roster)
    return member, make_bundle(Bundle(facts, roster))


def remove_member(folder: Path, name: str) -> tuple[Member, bytes]:
    """Remove a member of the fleet for ever; return it and a bundle for one member, which tells the others.

    Raises ConfigError if there is no such member.
    """
    folder = Path(folder)
    identity, (facts, roster) = Identity.load(folder), load_fleet(folder)
    member = roster.by_name(name)
    if member is None:
        known = ", ".join(other.name for other in roster.members().values()) or "none"
        raise ConfigError(f"{name!r} is not a member of this fleet; members: {known}")
    roster.remove(identity, member.id)
    _save_fleet(folder, facts, roster)
    return member, make_bundle(Bundle(facts, roster))


def make_bundle(bundle: Bundle) -> bytes:
    """Write a bundle."""
    lines = [records.to_json(record) for record in bundle.roster.records()]
    return _to_bytes({"version": BUNDLE_VERSION, "facts": json.loads(bundle.facts), "records": lines})


def read_bundle(data: bytes) -> Bundle:
    """Read a bundle and check every record in it. Raises DataError for anything else."""
    values = _read_file(data, BUNDLE_VERSION, "a bundle of `dfca keys sign`")
    facts = _to_bytes(values.get("facts"))
    received = values.get("records")
    if not isinstance(received, list):
        raise DataError("this bundle has no records; make it again with `dfca keys sign`")
    roster = Roster(swarm_of(facts), founder_of(facts))
    reasons = roster.merge(map(_to_bytes, received))
    if reasons:
        raise DataError(
            f"{len(reasons)} of {len(received)} records of this bundle do not hold ({reasons[0]}); make it again with "
            "`dfca keys sign`"
        )
    return Bundle(facts, roster)


def accept_bundle(folder: Path, bundle: Bundle) -> Roster:
    """Merge a bundle into the folder of a device: it becomes a member of the fleet, or learns of new members.

    It replaces a swarm of which the device is the only member, but no other swarm. Raises ConfigError if the bundle is
    not for this device, or it belongs to another swarm; RunError if the node is running.
    """
    folder = Path(folder)
    identity = Identity.load(folder)
    if bundle.roster.member(identity.id) is None:
        raise ConfigError(
            f"this bundle does not have the device in {folder} ({short(identity.id)}) as a member; have its request "
            "signed: dfca keys request, dfca keys sign"
        )
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunError(f"the node in {folder} is running; stop it, take the bundle in, and start it again") from error
    with lock:
        roster = bundle.roster.copy()
        if (folder / ROSTER_FILE).exists():
            old = Roster.load(folder / ROSTER_FILE)
            if old.swarm == roster.swarm and old.root == roster.root:
                roster.merge(old.records())
            elif old.root != identity.id or set(old.members()) - {identity.id}:
                raise ConfigError(
                    f"the device in {folder} belongs to another swarm ({short(old.swarm)}) with "
                    f"{len(old.members())} members; use a new folder for this fleet"
                )
        atomic_write(folder / FACTS_FILE, bundle.facts)
        roster.save(folder / ROSTER_FILE)
    return roster


def load_fleet(folder: Path) -> tuple[bytes, Roster]:
    """Read the facts and the roster in an authority's folder. Raises DataError if they are missing or damaged."""
    roster = Roster.load(folder / ROSTER_FILE)
    path = folder / FACTS_FILE
    try:
        facts = _to_bytes(_read_facts(path.read_bytes(), path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; restore it from a copy") from error
    if swarm_of(facts) != roster.swarm:
        raise DataError(f"{path} and {folder / ROSTER_FILE} are of two swarms; restore both from the same copy")
    return facts, roster


def swarm_of(facts: bytes) -> str:
    """Return the ID of the swarm with these facts: SHA-256 of their canonical bytes."""
    return encode_id(hashlib.sha256(facts).digest())


def founder_of(facts: bytes) -> str:
    """Return the ID of the founder. Raises DataError if the facts have none."""
    values = json.loads(facts)
    founder = values.get("founder") if isinstance(values, dict) else None
    if not is_device_id(founder):
        raise DataError("the facts of the swarm name no founder; make them again with `dfca node init`")
    return str(founder)


def _open_fleet(folder: Path, identity: Identity, request: DeviceRequest) -> tuple[bytes, Roster]:
    """Return the fleet of an authority; the first request with facts makes it."""
    if (folder / ROSTER_FILE).exists():
        return load_fleet(folder)
    if request.facts is None:
        raise ConfigError(
            "this authority has no fleet yet, and the request brings no facts; let the first device be one with data: "
            "dfca node init, then dfca keys request"
        )
    founder_of(request.facts)  # raises if they are no facts
    facts = _to_bytes(json.loads(request.facts) | {"founder": identity.id})
    return facts, Roster.found(identity, swarm_of(facts), AUTHORITY_NAME, is_device=False)


def _save_fleet(folder: Path, facts: bytes, roster: Roster) -> None:
    atomic_write(folder / FACTS_FILE, facts)  # the roster last: a folder with a roster is a fleet
    roster.save(folder / ROSTER_FILE)


def _signing_request(identity: Identity) -> bytes:
    private: Any = serialization.load_pem_private_key(identity.key, password=None)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, device_id(identity.certificate))])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(private, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def _check_given(name: str | None, addresses: list[str]) -> tuple[str | None, tuple[str, ...]]:
    try:
        return (None if name is None else records.check_name(name)), records.check_addresses(addresses)
    except MalformedRecord as error:
        raise ConfigError(f"{error}; got name {name!r} and addresses {addresses}") from error


def _read_facts(data: bytes, path: Path) -> dict[str, Any]:
    values = _read_object(data, MAX_FACTS_BYTES)
    if values is None:
        raise DataError(f"{path} does not hold the facts of a swarm; restore it from a copy")
    return values


def _read_file(data: bytes, version: str, what: str) -> dict[str, Any]:
    values = _read_object(data, MAX_FILE_BYTES)
    if values is None or values.get("version") != version:
        raise DataError(f"this file is not {what}; use the file that it wrote, whole")
    return values


def _read_object(data: bytes, most: int) -> dict[str, Any] | None:
    try:
        values = json.loads(data) if len(data) <= most else None
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _to_bytes(values: object) -> bytes:
    """Write canonical JSON, as the facts of a swarm are digested."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
