"""The identity of a device: a key that never leaves it, and a certificate named by the digest of that key.

Device ID = SHA-256 of the public key (SubjectPublicKeyInfo, DER) in lower-case base32 without padding: 52 characters.
It survives a renewal of the certificate, and only the holder of the key can have a certificate of this ID.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dfca.base.errors import ConfigError, DataError, RunError
from dfca.base.files import atomic_write, explain_write_errors, read_small, replacing

KEY_FILE = "key.pem"
CERTIFICATE_FILE = "certificate.pem"
ID_PATTERN = re.compile(r"[a-z2-7]{51}[aq]")  # 256 bits leave one bit for the last character
VALID = timedelta(days=3653)
EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)  # begin of every certificate: a device without a battery has an old clock
NEWEST_KNOWN = datetime(2026, 1, 1, tzinfo=UTC)  # a clock that shows less is wrong
MAX_CERTIFICATE_BYTES = 2048
SIGNING = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class Identity:
    """The key and certificate of this device, in `folder`."""

    id: str
    certificate: bytes
    key: bytes = field(repr=False)
    folder: Path

    @property
    def number(self) -> int:
        """The number of this device in the peer protocol."""
        return peer_number(self.id)

    @classmethod
    def create(cls, folder: Path) -> Identity:
        """Make a key and its certificate in a folder.

        Raises ConfigError if the folder has a key; RunError if the folder cannot be written.
        """
        folder = Path(folder)
        identity = cls.of_key(ec.generate_private_key(ec.SECP256R1()), folder)
        if os.path.lexists(folder / KEY_FILE):
            raise ConfigError(
                f"{folder} has a key already; with another one it would be another device: use an empty folder"
            )
        # The key last: after a power cut, a folder with a key is a complete identity.
        atomic_write(folder / CERTIFICATE_FILE, identity.certificate)
        with explain_write_errors(folder / KEY_FILE), replacing(folder / KEY_FILE, mode=0o600) as file:
            file.write(identity.key)
        return identity

    @classmethod
    def of_key(cls, private: ec.EllipticCurvePrivateKey, folder: Path) -> Identity:
        """Make the identity of a key; nothing is written."""
        key = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        certificate = _self_sign(private)
        return cls(device_id(certificate), certificate, key, folder)

    @classmethod
    def load(cls, folder: Path) -> Identity:
        """Read the key and certificate of a folder.

        Raises ConfigError if a file is missing or can be read by others; DataError if a file is damaged or expired, or
        they do not fit each other.
        """
        folder = Path(folder)
        key = _read(folder / KEY_FILE)
        certificate = _read(folder / CERTIFICATE_FILE)
        if os.name == "posix" and (folder / KEY_FILE).stat().st_mode & 0o077:
            raise ConfigError(
                f"{folder / KEY_FILE} can be read by other users of this machine; make it private: "
                f"chmod 600 {folder / KEY_FILE}"
            )
        private = _load_key(key, folder / KEY_FILE)
        try:
            id_ = check_certificate(certificate)
        except ValueError as error:
            raise DataError(
                f"{folder / CERTIFICATE_FILE} is not the certificate of a device: {error}; restore it from a copy"
            ) from error
        if _id_of(private.public_key()) != id_:
            raise DataError(
                f"{KEY_FILE} and {CERTIFICATE_FILE} in {folder} do not belong together: the certificate is that of "
                f"device {short(id_)}; restore both from the same copy"
            )
        _check_dates(certificate, folder)
        return cls(id_, certificate, key, folder)

    def sign(self, data: bytes) -> bytes:
        """Sign with the device's key (ECDSA, SHA-256; DER)."""
        return _load_key(self.key, self.folder / KEY_FILE).sign(data, SIGNING)


def device_id(certificate_pem: bytes) -> str:
    """Return the device ID of a certificate. Raises DataError if it is not a certificate."""
    try:
        return _id_of(x509.load_pem_x509_certificate(certificate_pem).public_key())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"not a certificate in PEM form ({len(certificate_pem)} bytes)") from error


def check_certificate(certificate_pem: bytes) -> str:
    """Return the device ID of a certificate as `Identity.create` makes it. Raises ValueError with the reason.

    Trusted certificates become roots of TLS: the text must hold exactly one, and it must not be able to sign others.
    Dates are not compared with a clock, because all members must come to the same result.
    """
    if len(certificate_pem) > MAX_CERTIFICATE_BYTES:
        raise ValueError(f"it has {len(certificate_pem)} bytes, more than {MAX_CERTIFICATE_BYTES}")
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        public = certificate.public_key()
        extensions = certificate.extensions
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError("it cannot be read") from error
    if certificate.public_bytes(serialization.Encoding.PEM) != certificate_pem:
        raise ValueError("it has more in it than one certificate")
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise ValueError("its key is not of the curve P-256")
    id_ = _id_of(public)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, id_)])
    if certificate.subject != name or certificate.issuer != name:
        raise ValueError("its name is not the ID of its key")
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound as error:
        raise ValueError("it lacks the name or the constraints of a device") from error
    if list(names) != [x509.DNSName(id_)]:
        raise ValueError("its alternative name is not the ID of its key")
    if constraints.ca:
        raise ValueError("it could vouch for other certificates")
    if not _is_signed_by(public, certificate):
        raise ValueError("its signature is wrong")
    return id_


@lru_cache(maxsize=1 << 15)
def peer_number(id: str) -> int:
    """Return the number of a device in the peer protocol: the first 63 bits of its digest.

    >>> peer_number("a" * 52), peer_number("7" * 51 + "q") == 2**63 - 1
    (0, True)
    """
    return int.from_bytes(base64.b32decode(id.upper() + "====")[:8], "big") >> 1


def verify(certificate_pem: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether the device of a certificate has signed the data."""
    try:
        public = _public_key(certificate_pem)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(signature, data, SIGNING)
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return True


@lru_cache(maxsize=256)
def _public_key(certificate_pem: bytes) -> object:
    return x509.load_pem_x509_certificate(certificate_pem).public_key()


def is_device_id(text: object) -> bool:
    """Return whether a text has the form of a device ID."""
    return isinstance(text, str) and ID_PATTERN.fullmatch(text) is not None


def short(id: str) -> str:
    """Shorten an ID for screens."""
    return id[:7]


def fingerprint(id: str) -> str:
    """Write an ID in groups of four, for people to compare.

    >>> fingerprint("abcdefghijkl")
    'abcd efgh ijkl'
    """
    return " ".join(id[start : start + 4] for start in range(0, len(id), 4))


def encode_id(digest: bytes) -> str:
    """Write a SHA-256 digest as an ID."""
    return base64.b32encode(digest).decode().lower().rstrip("=")


def _id_of(public: object) -> str:
    der = public.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encode_id(hashlib.sha256(der).digest())


def _self_sign(private: ec.EllipticCurvePrivateKey) -> bytes:
    id_ = _id_of(private.public_key())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, id_)])
    signing_only = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign"),
        False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(EARLIEST)
        .not_valid_after(max(datetime.now(UTC), NEWEST_KNOWN) + VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(id_)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, encipher_only=False, decipher_only=False, **signing_only),
            critical=True,
        )
        .sign(private, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _is_signed_by(public: ec.EllipticCurvePublicKey, certificate: x509.Certificate) -> bool:
    if not isinstance(certificate.signature_hash_algorithm, hashes.SHA256):
        return False
    try:
        public.verify(certificate.signature, certificate.tbs_certificate_bytes, SIGNING)
    except InvalidSignature:
        return False
    return True


def _read(path: Path) -> bytes:
    try:
        return read_small(path, 1 << 16)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist; restore it from a copy, or make a new device or authority in an empty folder with "
            "`dfca node init`, `dfca node join` or `dfca keys init`"
        ) from error
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}; check the folder's permissions") from error


def _load_key(key: bytes, path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is not a private key that can be read; restore it from a copy") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not isinstance(private.curve, ec.SECP256R1):
        raise DataError(f"{path} is not a key of the curve P-256, as devices have; restore it from a copy")
    return private


def expired_on(certificate_pem: bytes) -> str:
    """Return the day on which a certificate expired; empty if it has not."""
    end = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
    return f"{end:%Y-%m-%d}" if datetime.now(UTC) > end else ""


def _check_dates(certificate_pem: bytes, folder: Path) -> None:
    certificate, now = x509.load_pem_x509_certificate(certificate_pem), datetime.now(UTC)
    if now < certificate.not_valid_before_utc:
        raise DataError(
            f"this machine's clock shows {now:%Y-%m-%d}, before the certificate in {folder} begins "
            f"({certificate.not_valid_before_utc:%Y-%m-%d}); set the clock"
        )
    if now > certificate.not_valid_after_utc:
        raise DataError(
            f"the certificate in {folder} expired on {certificate.not_valid_after_utc:%Y-%m-%d} (the clock shows "
            f"{now:%Y-%m-%d}); set the clock if it is wrong, else make a new device in an empty folder and pair it"
        )
