"""What a store needs of a disk, so that a simulated one can take its place (`faults.disk`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from dfca.base.files import open_regular, replacing


class Disk(Protocol):
    """Files and folders. Every method raises OSError where the disk refuses."""

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file to read it, never through a link."""

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


class SystemDisk:
    """The disk of this machine."""

    def open(self, path: Path) -> BinaryIO:
        return open(open_regular(path, follow_links=False), "rb")

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


SYSTEM_DISK = SystemDisk()
