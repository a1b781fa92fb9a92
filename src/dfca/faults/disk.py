"""A disk in memory with the faults of real ones: full, broken, without power in the middle of a write, or lying."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import BinaryIO


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
    _last: Path | None = None  # the file that was written last

    def open(self, path: Path) -> BinaryIO:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return io.BytesIO(self.files[path])

    @contextmanager
    def replacing(self, path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
        written = io.BytesIO()
        yield written
        data = written.getvalue()
        for number, chance in ((errno.ENOSPC, self.full), (errno.EIO, self.broken)):
            if self.random.random() < chance:
                raise OSError(number, os.strerror(number), str(path))
        cut = self.random.random() < self.cut
        if cut and self.random.random() < 0.5:
            self.files[path.with_name(f".{path.name}.1.tmp")] = data[: self.random.randrange(len(data) + 1)]
            raise PowerCut
        self.files[path], self._last = data, path
        if cut:
            raise PowerCut

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

    def restart(self) -> Path | None:
        """Give the power back; returns the file that has lost its end, if one has."""
        if self._last is None or self.random.random() >= self.torn:
            return None
        torn, self._last = self._last, None
        data = self.files[torn]
        kept = self.random.randrange(len(data))
        self.files[torn] = data[:kept] + bytes(len(data) - kept if self.random.random() < 0.5 else 0)
        return torn
