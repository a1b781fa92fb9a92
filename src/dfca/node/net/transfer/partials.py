"""Models that are being read from neighbours, on the disk: a break or a crash loses only what was not written yet.

A file is named by the digest of the payload and by its sender, so that no neighbour can spoil another's payload. It
holds a prefix of the payload and is not trusted before the digest of the whole is right. A payload that is small or
arrives fast stays in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dfca.base.errors import RunError
from dfca.node.surroundings import SYSTEM, Surroundings

PATTERN = re.compile(r"([0-9a-f]{64})-([a-z2-7]{16})\.part")
KEEP_S = 86_400.0  # older partial payloads are deleted at the start
SPILL_S = 0.5  # a read that takes longer is continued on the disk


class Partial:
    """One payload that is being read. Its methods block: call them in a thread.

    buffered: collect bytes in memory; write them to the disk only if the read takes longer than SPILL_S or ends early.
    The reader may be cancelled while a thread still writes: writes after `close` are dropped.
    """

    def __init__(self, path: Path, size: int, in_memory: int, buffered: bool, around: Surroundings = SYSTEM) -> None:
        self.size, self.offset = size, 0  # of the whole, and of what has come
        self._path, self._in_memory = path, in_memory
        self._steady, self._disk = around.steady, around.disk
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._lock, self._closed = threading.RLock(), False
        self._since = self._steady()
        self.resumed = self._resume()
        is_buffered = not self.resumed and (buffered or size <= in_memory)
        self._buffer = np.empty(size, np.uint8) if is_buffered else None

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        with self._lock:
            if self._closed:
                return
            self._digest.update(data)
            if self._buffer is not None:
                self._buffer[self.offset : self.offset + len(data)] = np.frombuffer(data, np.uint8)
            self.offset += len(data)
            if self._file is not None:
                _write(self._file, data)
            elif self._buffer is None:
                self._file = self._disk.append(self._path)
                _write(self._file, data)
            elif self.size > self._in_memory and self._steady() - self._since > SPILL_S:
                self._spill()

    def digest(self) -> bytes:
        """Return the digest of the bytes so far."""
        return self._digest.digest()

    def content(self) -> np.ndarray:
        """Return the bytes so far."""
        if self._buffer is not None:
            return self._buffer[: self.offset]
        buffer, at = np.empty(self.offset, np.uint8), 0
        with self._disk.open(self._path) as file:
            while at < self.offset and (count := file.readinto(buffer.data[at:])):  # type: ignore[attr-defined]
                at += count
        return buffer[:at]

    def _spill(self) -> None:
        assert self._buffer is not None
        self._file = self._disk.append(self._path)
        _write(self._file, self._buffer[: self.offset].data)

    def close(self) -> None:
        """Keep the bytes read so far for later."""
        with self._lock:
            if not self._closed and self._file is None and self._buffer is not None and self.offset > self._in_memory:
                with suppress(OSError):
                    self._spill()
            self._closed, self._buffer = True, None
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
                self._file = None

    def discard(self) -> None:
        """Delete everything and start again at offset 0."""
        with self._lock:
            self.offset = 0
            self.close()
            self._disk.remove(self._path)
            self.resumed, self._closed = False, False
            self._digest = hashlib.sha256()

    def _resume(self) -> bool:
        """Digest the file of an earlier attempt; delete one that cannot be a prefix."""
        try:
            status = self._disk.status(self._path)
        except OSError:
            return False
        if status is None or not 0 < status.size <= self.size:
            self._disk.remove(self._path)
            return False
        self._file = self._disk.append(self._path)
        self._file.seek(0)
        while block := self._file.read(1 << 20):
            self._digest.update(block)
            self.offset += len(block)
        return True


class Partials:
    """The folder of partial payloads, at most `most_bytes`; the oldest are deleted first.

    Payloads of at most `in_memory` bytes never go to the disk. Larger ones share a buffer of `buffer_bytes`.
    """

    def __init__(
        self, folder: Path, most_bytes: int, in_memory: int, buffer_bytes: int = 0, around: Surroundings = SYSTEM
    ) -> None:
        self.folder, self.most_bytes, self.in_memory, self.buffer_bytes = folder, most_bytes, in_memory, buffer_bytes
        self._around, self._disk = around, around.disk
        self._buffered: dict[Path, int] = {}
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make the folder, and delete old and foreign files."""
        try:
            self._disk.make_folder(self.folder)
            names = self._disk.names(self.folder)
        except OSError as error:
            raise RunError(
                f"cannot make {self.folder}: {error.strerror or error}; make the node's folder writable"
            ) from error
        for name in names:
            path = self.folder / name
            with suppress(OSError):
                status = self._disk.status(path) if PATTERN.fullmatch(name) else None
                if status is None or self._around.wall() - status.changed > KEEP_S:
                    self._disk.remove(path)

    def open(self, name: bytes, member: str, size: int) -> Partial | None:
        """Open a payload where an earlier attempt ended; None if there is no room for it."""
        path = self.path(name, member)
        with self._lock:
            if path in self._open or (size > self.in_memory and not self._make_room(size, path)):
                return None
            self._open[path] = size
            buffered = sum(self._buffered.values()) + size <= self.buffer_bytes
            if buffered:
                self._buffered[path] = size
        try:
            return Partial(path, size, self.in_memory, buffered, self._around)
        except OSError:
            with self._lock:
                del self._open[path]
                self._buffered.pop(path, None)
            return None

    async def open_in(self, executor: Executor, name: bytes, member: str, size: int) -> Partial | None:
        """Open a payload in a thread; if this is cancelled, the thread closes what it opened."""

        def abandon(opened: Future[Partial | None]) -> None:
            if not opened.cancelled() and (partial := opened.result()) is not None:
                self.close(name, member, partial, done=False)

        opening = executor.submit(self.open, name, member, size)
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(abandon)
            raise

    def close(self, name: bytes, member: str, partial: Partial, done: bool) -> None:
        """End a read: the file is deleted if it is done, else kept for later."""
        with self._lock:
            self._open.pop(self.path(name, member), None)
            self._buffered.pop(self.path(name, member), None)
        if done:
            partial.discard()
        partial.close()

    def path(self, name: bytes, member: str) -> Path:
        """Return where a payload of a member is kept."""
        return self.folder / f"{name.hex()}-{member[:16]}.part"

    def _make_room(self, size: int, path: Path) -> bool:
        kept = []
        for name in self._disk.names(self.folder):
            other = self.folder / name
            if other not in self._open and other != path:
                with suppress(OSError):
                    status = self._disk.status(other)
                    kept.append((status.changed, status.size, other) if status is not None else (0.0, 0, other))
        reserved = sum(bytes_ for bytes_ in self._open.values() if bytes_ > self.in_memory)
        over = reserved + size + sum(bytes_ for _, bytes_, _ in kept) - self.most_bytes
        for _, freed, other in sorted(kept):
            if over <= 0:
                break
            self._disk.remove(other)
            over -= freed
        return over <= 0


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write everything: one write to an unbuffered file may take only a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
