"""A disk in memory with the faults of real ones: full, broken, without power in the middle of a write, or lying."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import BinaryIO, cast

from dfca.node.disk.disk import FileStatus


class PowerCut(Exception):
    """The machine lost its power; `FaultyDisk.restart` gives it back."""


@dataclass
class FaultyDisk:
    """Files of one machine, as `node.disk.disk.Disk` describes them. Probabilities are per write."""

    random: Random
    full: float = 0.0  # no space is left
    broken: float = 0.0  # input/output error
    cut: float = 0.0  # power cut: the old file or the new one is there, and perhaps a temporary one
    torn: float = 0.0  # after a power cut, the last file has lost its end although the disk had promised it
    files: dict[Path, bytes] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    now: Callable[[], float] = lambda: 0.0  # seconds since 1970
    changed: dict[Path, float] = field(default_factory=dict)  # when files were written, of those that grow
    _last: Path | None = None  # the file that was written last

    def open(self, path: Path) -> BinaryIO:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return io.BytesIO(self.files[path])

    def read_small(self, path: Path, most_bytes: int) -> bytes:
        data = self.open(path).read()
        if len(data) > most_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return data

    @contextmanager
    def replacing(self, path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
        written = io.BytesIO()
        yield written
        data = written.getvalue()
        self.refuse(path)
        cut = self.random.random() < self.cut
        if cut and self.random.random() < 0.5:
            self.files[path.with_name(f".{path.name}.1.tmp")] = data[: self.random.randrange(len(data) + 1)]
            raise PowerCut
        self.files[path], self._last = data, path
        if cut:
            raise PowerCut

    def refuse(self, path: Path) -> None:
        """Raise what a full or broken disk raises, by chance."""
        for number, chance in ((errno.ENOSPC, self.full), (errno.EIO, self.broken)):
            if self.random.random() < chance:
                raise OSError(number, os.strerror(number), str(path))

    def append(self, path: Path) -> BinaryIO:
        self.refuse(path)
        self.files.setdefault(path, b"")
        self.changed[path] = self.now()
        return cast(BinaryIO, GrowingFile(self, path))

    def status(self, path: Path) -> FileStatus | None:
        if path in self.folders:
            return None
        return FileStatus(len(self.open(path).read()), self.changed.get(path, 0.0))

    def remove_leftovers(self, folder: Path) -> None:
        for path in [*self.files]:
            if path.is_relative_to(folder) and path.name.startswith(".") and path.name.endswith(".tmp"):
                self.remove(path)

    def lock(self, path: Path) -> AbstractContextManager[object]:
        self.refuse(path)
        return nullcontext()

    def make_folder(self, path: Path) -> None:
        self.folders |= {path, *path.parents}

    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in (*self.files, *self.folders) if path.parent == folder)

    def is_folder(self, path: Path) -> bool:
        return path in self.folders

    def rename(self, path: Path, to: Path) -> None:
        if path in self.folders:
            self.folders.remove(path)
            self.folders.add(to)
        else:
            self.files[to] = self.files.pop(path)

    def remove(self, path: Path) -> None:
        self.files.pop(path, None)
        self.changed.pop(path, None)

    def restart(self, folder: str = "") -> Path | None:
        """Give the power back; returns the file that has lost its end, if one has. folder: the name of its folder."""
        for path in self.changed:  # nobody has flushed them
            data = self.files[path]
            kept = self.random.randrange(len(data) + 1)
            self.files[path] = data[:kept] + bytes(self.random.choice((0, len(data) - kept)))
        self.changed.clear()
        if self._last is None or not self._last.parent.name.endswith(folder) or self.random.random() >= self.torn:
            return None
        torn, self._last = self._last, None
        data = self.files[torn]
        kept = self.random.randrange(len(data))
        self.files[torn] = data[:kept] + bytes(len(data) - kept if self.random.random() < 0.5 else 0)
        return torn


class GrowingFile:
    """A file that is read, and written at its end."""

    def __init__(self, disk: FaultyDisk, path: Path) -> None:
        self._disk, self._path, self._at = disk, path, 0

    def seek(self, place: int) -> None:
        self._at = place

    def read(self, most: int) -> bytes:
        data = self._disk.files.get(self._path, b"")[self._at : self._at + most]
        self._at += len(data)
        return data

    def write(self, data: bytes | memoryview) -> int:
        """Write a part, as a call of the system may."""
        self._disk.refuse(self._path)
        count = self._disk.random.randint(1, len(data))
        if self._path in self._disk.files:  # else it has been deleted
            self._disk.files[self._path] += bytes(data[:count])
        return count

    def close(self) -> None:
        """Nothing is flushed."""
