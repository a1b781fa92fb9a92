"""Models that are being read from neighbours, on the disk: a break or a crash costs what had not been written.

A file is named by the digest of the whole and by the neighbour that it comes from, so that nobody can spoil what
another one sends. It holds a beginning of the payload and nothing else. Nothing in it is trusted: only the digest of
the whole makes it a model. What is small stays in memory.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from dfca.errors import RunError

PATTERN = re.compile(r"([0-9a-f]{64})-([a-z2-7]{16})\.part")
KEEP_S = 86_400.0


class Partial:
    """One payload that is being read. Blocking: its methods are called in a thread.

    path: None while everything is in memory; offset: bytes that are here.
    """

    def __init__(self, path: Path, size: int, in_memory: int) -> None:
        self.size, self.offset = size, 0
        self._path, self._in_memory = path, in_memory
        self._digest = hashlib.sha256()
        self._buffer = bytearray()
        self._file: BinaryIO | None = None
        self.resumed = self._resume()

    def write(self, data: bytes | memoryview) -> None:
        """Append what was read."""
        self._digest.update(data)
        self.offset += len(data)
        if self._file is None and self.size <= self._in_memory:
            self._buffer += data
            return
        if self._file is None:
            self._file = _open(self._path)
        self._file.write(data)

    def finish(self) -> tuple[bytes, bytes | Path]:
        """Return the digest of the whole, and the whole: its bytes or its file."""
        if self._file is None:
            return self._digest.digest(), bytes(self._buffer)
        self._file.flush()
        return self._digest.digest(), self._path

    def close(self) -> None:
        """Keep what is here for later."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def discard(self) -> None:
        """Forget everything, and begin anew."""
        self.close()
        self._path.unlink(missing_ok=True)
        self.offset, self.resumed = 0, False
        self._digest, self._buffer = hashlib.sha256(), bytearray()

    def _resume(self) -> bool:
        """Read what an earlier attempt left; what cannot be its beginning is deleted."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode) or not 0 < found.st_size <= self.size:
            self._path.unlink(missing_ok=True)
            return False
        self._file = _open(self._path)
        self._file.seek(0)
        while block := self._file.read(1 << 20):
            self._digest.update(block)
            self.offset += len(block)
        return True


class Partials:
    """The folder of partial payloads: at most so many bytes, the oldest leave first."""

    def __init__(self, folder: Path, most_bytes: int, in_memory: int) -> None:
        self.folder, self.most_bytes, self.in_memory = folder, most_bytes, in_memory
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make the folder, and delete what is old or not ours."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"cannot make {self.folder}: {error.strerror or error}; make the node's folder writable"
            ) from error
        for path in self.folder.iterdir():
            with suppress(OSError):
                if not PATTERN.fullmatch(path.name) or time.time() - path.lstat().st_mtime > KEEP_S:
                    path.unlink()

    def open(self, name: bytes, member: str, size: int) -> Partial | None:
        """Open a payload to be read, where an earlier attempt ended; None if there is no room for it."""
        path = self.path(name, member)
        with self._lock:
            if path in self._open or (size > self.in_memory and not self._make_room(size, path)):
                return None
            self._open[path] = size
        try:
            return Partial(path, size, self.in_memory)
        except OSError:
            with self._lock:
                del self._open[path]
            return None

    def close(self, name: bytes, member: str, partial: Partial, done: bool) -> None:
        """End a read: what is done is deleted, the rest kept for later."""
        with self._lock:
            self._open.pop(self.path(name, member), None)
        if done:
            partial.discard()
        else:
            partial.close()

    def path(self, name: bytes, member: str) -> Path:
        """Return where a payload of a member is kept."""
        return self.folder / f"{name.hex()}-{member[:16]}.part"

    def _make_room(self, size: int, path: Path) -> bool:
        kept = []
        for other in self.folder.iterdir():
            if other not in self._open and other != path:
                with suppress(OSError):
                    found = other.lstat()
                    kept.append((found.st_mtime, found.st_size, other))
        reserved = sum(each for each in self._open.values() if each > self.in_memory)
        over = reserved + size + sum(each for _, each, _ in kept) - self.most_bytes
        for _, freed, other in sorted(kept):
            if over <= 0:
                break
            other.unlink(missing_ok=True)
            over -= freed
        return over <= 0


def _open(path: Path) -> BinaryIO:
    """Open for appending, never through a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
