"""The cache folder: one `<name>.npz` per data set, and a `<name>.npz.sha256` beside each file that dfca wrote.

Files appear whole or not at all: they are written under another name, synced, and renamed.
"""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dfca.base.errors import ChecksumError, DataError
from dfca.base.files import replacing, sha256
from dfca.data.files.containers import check_unpacked

if TYPE_CHECKING:
    import numpy as np

ALIASES = {"har": ("har", "hapt_har")}


def cache_folder() -> Path:
    """Name the cache folder: `DFCA_DATA`, otherwise the platform's cache folder."""
    chosen = os.environ.get("DFCA_DATA")
    if chosen:
        return Path(chosen).expanduser()
    import pooch  # late: most runs have DFCA_DATA or no need to download

    return Path(pooch.os_cache("dfca"))


def cached_path(name: str) -> Path | None:
    """Find the cache file of a data set, None where there is none."""
    folder = cache_folder()
    paths = (folder / f"{stem}.npz" for stem in ALIASES.get(name, (name,)))
    return next((path for path in paths if path.is_file()), None)


def name_of(path: Path) -> str:
    """Name the data set of an .npz by its file name."""
    return next((name for name, stems in ALIASES.items() if path.stem in stems), path.stem)


def read_arrays(path: Path, remedy: str) -> dict[str, np.ndarray]:
    """Read a cache file, checked against its SHA-256 if known. Raises ChecksumError that ends in `remedy`."""
    import numpy as np  # late, as below: `dfca list` starts without it

    sidecar = _sidecar(path)
    expected = recorded(sidecar)
    if expected is not None and (digest := sha256(path)) != expected:
        raise ChecksumError(
            f"{path} is damaged: its SHA-256 is {digest[:12]}..., {sidecar.name} says {expected[:12]}...; {remedy}"
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for entry in archive.zip.infolist():
                check_unpacked(entry.filename, entry.file_size, entry.compress_size)
            return {field: archive[field] for field in archive.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, TypeError) as error:
        raise ChecksumError(f"{path} is damaged or no .npz of plain arrays ({error}); {remedy}") from error


def write_arrays(name: str, arrays: dict[str, np.ndarray]) -> Path:
    """Write a cache file and its SHA-256."""
    import numpy as np

    path = cache_folder() / f"{name}.npz"
    return _put(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def adopt(name: str, origin: Path) -> Path:
    """Copy an .npz of the cache format into the cache."""

    def copy(file: IO[bytes]) -> None:
        with origin.open("rb") as source:
            shutil.copyfileobj(source, file)

    return _put(cache_folder() / f"{name}.npz", copy)


def record(path: Path, digest: str) -> None:
    """Write a checksum file in the form of `sha256sum`."""
    line = f"{digest}  {path.name.removesuffix('.sha256')}\n"
    with writing_to(path.parent), replacing(path) as file:
        file.write(line.encode())


def recorded(path: Path) -> str | None:
    """Read a checksum file, None where there is none."""
    return path.read_text(errors="replace").partition(" ")[0].strip() if path.is_file() else None


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Make the cache folder, and turn a full disk or a missing permission into one sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"cannot write to {folder}: {reason}; make room or set DFCA_DATA to a folder that takes it"
        ) from error


def _put(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    sidecar = _sidecar(path)
    with writing_to(path.parent):
        with replacing(path) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # once it is whole, the checksum of the old one may go
            sidecar.unlink(missing_ok=True)
        record(sidecar, sha256(path))
    return path


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
