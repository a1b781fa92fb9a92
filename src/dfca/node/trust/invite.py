"""The invite that a person carries from one device to another: an address, a device ID, and a one-time secret."""

from __future__ import annotations

import base64
import io
import re
import secrets
from dataclasses import dataclass, field

from dfca.base.errors import ConfigError
from dfca.node.addresses import join_address
from dfca.node.trust.identity import is_device_id, short

PREFIX = "dfca1"
SECRET_BYTES = 16
LIFETIME_S = 600.0
PATTERN = re.compile(r"dfca1:(\[[^\]/]{2,64}\]|[^:/\[\]]{1,253}):([0-9]{1,5})/([a-z2-7]{52})/([a-z2-7]{26})")
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,16})?")


@dataclass(frozen=True)
class Invite:
    """An invitation by the device `id`, which listens at `host` and `port` while it is open."""

    host: str
    port: int
    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def make(cls, host: str, port: int, id: str) -> Invite:
        """Make an invitation with a new secret."""
        return cls(host, port, id, secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Read the line of an invitation. Raises ConfigError."""
        line = text.strip()
        match = PATTERN.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"an invite is one line of the form {PREFIX}:HOST:PORT/ID/SECRET, got {len(line)} characters"
                f"{_hint(line)}; copy the whole line that `dfca node invite` printed, in quotes"
            )
        host, port, id_, secret = match[1].strip("[]"), int(match[2]), match[3], _decode(match[4])
        if not HOST.fullmatch(host) or not 0 < port < 1 << 16 or not is_device_id(id_) or secret is None:
            raise ConfigError(
                f"the invite of device {short(id_)} is damaged (host, port, ID or secret cannot be right); copy the "
                "whole line that `dfca node invite` printed, in quotes"
            )
        return cls(host, port, id_, secret)

    def __str__(self) -> str:
        secret = base64.b32encode(self.secret).decode().lower().rstrip("=")
        return f"{PREFIX}:{join_address(self.host, self.port)}/{self.id}/{secret}"


def qr(invite: Invite | str) -> str:
    """Draw the line as a QR code for a terminal, two rows of squares per line."""
    import segno

    text = io.StringIO()
    segno.make(str(invite), micro=False, error="l", boost_error=False).terminal(text, border=2, compact=True)
    return text.getvalue()


def _decode(text: str) -> bytes | None:
    """Return the bytes of a secret in canonical form, else None."""
    data = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    return data if base64.b32encode(data).decode().lower().rstrip("=") == text else None


def _hint(line: str) -> str:
    if not line.startswith(f"{PREFIX}:"):
        return f" that do not begin with {PREFIX}:"
    if line.count("/") != 2:
        return f" with {line.count('/')} slashes instead of 2"
    return ""
