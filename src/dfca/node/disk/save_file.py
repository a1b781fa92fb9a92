"""The file of a save without its models, which need torch: header, checksum, facts. See `store`."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dfca.node.disk.disk import SYSTEM_DISK, Disk

FORM = 2  # raised by changes that older code cannot read; form 1, without a warmed-up model, is read too
MOST_HEADER_BYTES = 16 * 2**20
STATE = "state"  # the folder of a node's saves


class Damaged(Exception):
    """A file that is not a valid save; the message says why."""


def save_paths(folder: Path) -> tuple[Path, Path]:
    """Return the files of the last two saves, written in turn. folder: `state/` of a node."""
    return folder / "peer.0.safetensors", folder / "peer.1.safetensors"


def last_save(folder: Path) -> dict[str, Any] | None:
    """Return the round and the time of the newest valid save, or None."""
    saves = []
    for path in save_paths(folder):
        with suppress(Damaged, OSError, KeyError, TypeError):
            _, facts = read_facts(read_whole(path))
            time = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
            saves.append((facts["serial"], {"round": facts["saved"]["is"]["round"], "time": time}))
    return max(saves, key=lambda pair: pair[0])[1] if saves else None


def read_whole(path: Path, disk: Disk = SYSTEM_DISK) -> bytearray:
    """Read a file, which may not be a link. Raises Damaged, or OSError if it cannot be read."""
    try:
        file = disk.open(path)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise Damaged(error.strerror) from None
        raise
    with file:
        header = int.from_bytes(file.read(8), "little")
        size = file.seek(0, os.SEEK_END)
        if not 0 < header <= min(size, MOST_HEADER_BYTES):  # before memory for all of it is allocated
            raise Damaged("it is cut off, or not a file of a node")
        file.seek(0)
        data = bytearray(size)
        count = file.readinto(data)  # type: ignore[attr-defined]
    return data[:count] if count != len(data) else data


def read_facts(data: bytearray) -> tuple[int, dict[str, Any]]:
    """Check a file; returns where its models begin, and the facts in its header. Raises Damaged."""
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > min(len(data), MOST_HEADER_BYTES):
        raise Damaged("it is cut off")
    try:
        metadata = json.loads(data[8:end].decode())["__metadata__"]
        text, expected = metadata["facts"], metadata["sha256"]
        intact = digest(text, memoryview(data)[end:]) == expected
        facts = json.loads(text)
        form, _, _, _ = facts["form"], facts["serial"], facts["saved"], facts["bank"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged("it is not a file of a node") from None
    if not intact:
        raise Damaged("its checksum does not fit: it is cut off or was changed")
    if form not in (1, FORM):
        raise Damaged(f"it was written by another version of dfca (form {form}, this one reads 1 to {FORM})")
    return end, facts


def digest(text: str, *data: bytes | memoryview) -> str:
    """Return the SHA-256 of a header and the models behind it."""
    sha256 = hashlib.sha256(text.encode())
    for part in data:
        sha256.update(part)
    return sha256.hexdigest()
