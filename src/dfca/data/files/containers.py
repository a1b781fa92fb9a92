"""Read the files of a folder, a zip, a tar or a single file in one way, without extracting anything to disk.

What is unpacked is bounded: a small archive that unpacks to more than `LARGEST_BYTES`, or to more than `MOST_RATIO`
times its size, is refused before it fills the memory.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from dfca.base.errors import DataError

ACCEPTED = (
    "an .npz in dfca's cache format, a folder or zip of MNIST's four idx files, EMNIST's gzip.zip, CIFAR-10's "
    "cifar-10-python.tar.gz, LEAF's FEMNIST json (file, folder or archive), the HAPT zip"
)

LARGEST_BYTES = 4 * 2**30  # of one file; LEAF's largest are some hundred MB
MOST_RATIO = 200  # of a file above SMALL_BYTES to its packed size; text of digits packs about 50 times
SMALL_BYTES = 64 * 2**20


class Container(Protocol):
    """A set of named files. `path` is for messages."""

    path: Path

    def names(self) -> list[str]: ...

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        """Yield name and bytes of the wanted files, in the container's order, one in memory at a time."""
        ...


class _Files:
    """A folder, or one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = path if path.is_dir() else path.parent
        self._files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def names(self) -> list[str]:
        return [file.relative_to(self._root).as_posix() for file in self._files]

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        for name in filter(wanted, self.names()):
            yield name, (self._root / name).read_bytes()


class _Zip:
    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._zip = zipfile.ZipFile(file)
        inner = [name for name in self.names() if name.lower().endswith(".zip")]
        if len(inner) == 1 and len(self.names()) <= 3:  # UCI wraps some archives in a second one
            entry = self._zip.getinfo(inner[0])
            check_unpacked(entry.filename, entry.file_size, entry.compress_size)
            self._zip = zipfile.ZipFile(io.BytesIO(self._zip.read(inner[0])))

    def names(self) -> list[str]:
        return [entry.filename for entry in self._zip.infolist() if not entry.is_dir()]

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        for name in filter(wanted, self.names()):
            entry = self._zip.getinfo(name)
            check_unpacked(name, entry.file_size, entry.compress_size)
            yield name, self._zip.read(name)


class _Tar:
    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._packed = path.stat().st_size
        self._tar = tarfile.open(fileobj=file)  # noqa: SIM115 - `open_container` closes the file below it

    def names(self) -> list[str]:
        return [member.name for member in self._tar.getmembers() if member.isfile()]

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        for member in self._tar.getmembers():
            if member.isfile() and wanted(member.name):
                check_unpacked(member.name, member.size, self._packed)
                file = self._tar.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def check_unpacked(name: str, size: int, packed: int) -> None:
    """Refuse a file of an archive that unpacks to too much. Raises DataError."""
    if size > LARGEST_BYTES or (size > SMALL_BYTES and size > MOST_RATIO * packed):
        raise DataError(
            f"{name} unpacks from {packed} to {size} bytes, which no data set here does (at most {LARGEST_BYTES}, and "
            f"{MOST_RATIO} times the packed size); use the official file"
        )


def gunzip(data: bytes, name: str) -> bytes:
    """Unpack a gzip file, as far as `check_unpacked` allows. Raises DataError beyond that."""
    most = max(SMALL_BYTES, min(LARGEST_BYTES, MOST_RATIO * len(data)))
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        unpacked = file.read(most + 1)
    check_unpacked(name, len(unpacked) if len(unpacked) <= most else LARGEST_BYTES + 1, len(data))
    return unpacked


@contextmanager
def open_container(path: Path) -> Iterator[Container]:
    """Open a folder, zip, tar or plain file. Raises DataError where it is missing or damaged, also while it is read."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give {ACCEPTED}")
    try:
        if path.is_dir():
            yield _Files(path)
            return
        with path.open("rb") as file:
            start = file.read(4)
            is_zip = zipfile.is_zipfile(file)
            file.seek(0)
            is_tar = not is_zip and tarfile.is_tarfile(file)
            file.seek(0)
            if start == b"PK\x03\x04" and not is_zip:
                raise zipfile.BadZipFile("the end of the zip is missing")
            yield _Zip(path, file) if is_zip else _Tar(path, file) if is_tar else _Files(path)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, OSError, RuntimeError) as error:
        raise DataError(f"{path} is damaged, cut short or locked ({error}); get it again") from error
