"""What a node needs of a disk, so that a simulated one can take its place (`faults.disk`)."""

from __future__ import annotations

import os
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from filelock import FileLock

from dfca.base.files import open_regular, read_small, remove_leftovers, replacing


class FileStatus(NamedTuple):
    """A regular file."""

    size: int
    changed: float  # seconds since 1970


class Disk(Protocol):
    """Files and folders. Every method raises OSError where the disk refuses."""

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file to read it, never through a link."""

    def read_small(self, path: Path, most_bytes: int) -> bytes:
        """Read a regular file of at most this size."""

    def replacing(self, path: Path, mode: int = 0o666) -> AbstractContextManager[BinaryIO]:
        """Write a file that takes the place of `path`, durably, when the block ends without an error."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it, if they do not exist."""

    def names(self, folder: Path) -> list[str]:
        """List the names in a folder."""

    def is_folder(self, path: Path) -> bool:
        """Return whether this is a folder, and not a link to one."""

    def rename(self, path: Path, to: Path) -> None:
        """Give a file or folder another name."""

    def remove(self, path: Path) -> None:
        """Delete a file, if it exists."""

    def append(self, path: Path) -> BinaryIO:
        """Open a file to read it and to write at its end, unbuffered, never through a link. Nothing is flushed."""

    def status(self, path: Path) -> FileStatus | None:
        """Describe a regular file; None for anything else. Raises FileNotFoundError."""

    def remove_leftovers(self, folder: Path) -> None:
        """Delete the temporary files of a process that was killed, in a folder and below."""

    def lock(self, path: Path) -> AbstractContextManager[object]:
        """Take a lock that no other process has, until the end of a block. Raises filelock.Timeout if one has it."""


class SystemDisk:
    """The disk of this machine."""

    def open(self, path: Path) -> BinaryIO:
        return open(open_regular(path, follow_links=False), "rb")

    def read_small(self, path: Path, most_bytes: int) -> bytes:
        return read_small(path, most_bytes)

    def replacing(self, path: Path, mode: int = 0o666) -> AbstractContextManager[BinaryIO]:
        return replacing(path, mode)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        return sorted(entry.name for entry in folder.iterdir())

    def is_folder(self, path: Path) -> bool:
        return path.is_dir() and not path.is_symlink()

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def append(self, path: Path) -> BinaryIO:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        return os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)

    def status(self, path: Path) -> FileStatus | None:
        status = os.lstat(path)
        return FileStatus(status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def remove_leftovers(self, folder: Path) -> None:
        remove_leftovers(folder)

    def lock(self, path: Path) -> AbstractContextManager[object]:
        return FileLock(path).acquire(timeout=0)


SYSTEM_DISK = SystemDisk()
