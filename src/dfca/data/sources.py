"""Get data sets: from the cache, from their official files, or from a file the user has."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dfca.base.errors import DataError
from dfca.data.files.cache import (
    adopt,
    cache_folder,
    cached_path,
    name_of,
    read_arrays,
    record,
    write_arrays,
    writing_to,
)
from dfca.data.files.containers import ACCEPTED, open_container
from dfca.data.files.downloads import download
from dfca.data.files.formats import Arrays, detect, parse
from dfca.data.registry import SOURCES, DataSource, SampleKind, source_of


@dataclass(frozen=True, eq=False)
class DataSet:
    """What a cache file holds, in the layout that models take.

    x: `(n, *shape)`, images uint8 `(n, channels, height, width)`, windows float32 `(n, channels, time)`.
    y: `(n,)` int64 in 0..classes-1. x_test, y_test: the official test part, None where there is none.
    owner: `(n,)` int64, the writer or subject of each sample of `x`, None where it is unknown.
    """

    name: str
    kind: SampleKind
    classes: int
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray | None
    y_test: np.ndarray | None
    owner: np.ndarray | None


def load(name: str) -> DataSet:
    """Load a data set from the cache (`DFCA_DATA`, otherwise the platform's cache folder).

    Raises ConfigError for an unknown name, DataError where the cache has no file, ChecksumError for a damaged one.
    """
    source = _source_with_files(name)
    if name == "digits":
        return _to_dataset(source, _read_digits(), "scikit-learn's digits")
    path = cached_path(name)
    if path is None:
        raise DataError(f"{name} is not in the cache {cache_folder()}; {_how_to_get(source)}")
    remedy = f"delete it (and its .sha256) and {_how_to_get(source)}"
    return _to_dataset(source, read_arrays(path, remedy), str(path))


def _source_with_files(name: str) -> DataSource:
    source = source_of(name)
    if source.generated:
        raise DataError(f"{name} has no files: `make_split` and `dfca run` make it when they need it")
    return source


def fetch(name: str, progress: bool = True, notify: Callable[[str], object] | None = None) -> Path:
    """Download a data set's official files, check them, and put them into the cache; return the cache file.

    A whole file in the cache stays. `notify` receives what the user should know (default: stderr).

    Raises DataError where there is no download or it fails, ChecksumError for the wrong bytes.
    """
    source = _source_with_files(name)
    if name == "digits":
        from sklearn import datasets  # late: it takes as long to import as torch does

        return Path(datasets.__file__).parent / "data" / "digits.csv.gz"
    path = cached_path(name)
    if path is not None and _is_whole(name):
        return path
    if source.by_hand:
        raise DataError(f"{name} has no single official download: {source.by_hand}")
    folder = cache_folder()
    with writing_to(folder):
        workspace = tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-")
    with workspace as downloads:
        target = Path(downloads)
        hashes = {
            file.name: download(file, target, _trusted(source), progress and sys.stderr.isatty())
            for file in source.files
        }
        with open_container(target / source.files[0].name if len(hashes) == 1 else target) as container:
            arrays = parse(name, container)
        _to_dataset(source, arrays, source.homepage)
        written = write_arrays(name, arrays)
    for file in source.files:
        if file.sha256 is None and not _trusted(source).exists():
            record(_trusted(source), hashes[file.name])
            (notify or partial(print, file=sys.stderr))(
                f"no checksum of {name} is published: this first download is trusted, and its SHA-256 "
                f"{hashes[file.name][:12]}... recorded in {_trusted(source)}"
            )
    return written


def import_file(path: str | Path, name: str | None = None) -> Path:
    """Put the user's file, a .npz of dfca or an official container, into the cache; return the cache file.

    Raises DataError, and leaves the cache as it was, if the file is unknown, damaged or malformed.
    """
    path = Path(path).expanduser()
    if name is not None:
        source_of(name)
    if path.suffix == ".npz" and path.is_file():
        return _import_npz(path, name)
    with open_container(path) as container:
        name = name or detect(container)
        if name is None or name == "digits":
            raise DataError(f"{path} is not recognised; give {ACCEPTED}")
        arrays = parse(name, container)
    _to_dataset(SOURCES[name], arrays, str(path))
    return write_arrays(name, arrays)


def _import_npz(path: Path, name: str | None) -> Path:
    name = name or name_of(path)
    if name not in SOURCES or name == "digits":
        known = ", ".join(sorted(set(SOURCES) - {"digits"}))
        raise DataError(f"cannot recognise which data set {path} is; rename it or give its name, one of {known}")
    arrays = read_arrays(path, "get it again")
    _to_dataset(SOURCES[name], arrays, str(path))
    return adopt(name, path)


def _how_to_get(source: DataSource) -> str:
    if source.by_hand:
        return f"{source.by_hand} (or `dfca data import FILE` on an .npz you have)"
    return f"run `dfca data fetch {source.name}`, or `dfca data import FILE` on a machine without internet"


def _is_whole(name: str) -> bool:
    try:
        load(name)
    except DataError:
        return False
    return True


def _trusted(source: DataSource) -> Path:
    return cache_folder() / f"{source.name}.source.sha256"


def _read_digits() -> Arrays:
    """Read scikit-learn's digits: 0..16 becomes 0..255, and one fixed fifth is for testing."""
    from sklearn.datasets import load_digits  # late, as above

    digits = load_digits()
    x = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(x))
    test, train = order[: len(x) // 5 + 1], order[len(x) // 5 + 1 :]
    return {
        "x_train": x[train],
        "y_train": digits.target[train],
        "x_test": x[test],
        "y_test": digits.target[test],
    }


def _to_dataset(source: DataSource, arrays: Arrays, origin: str) -> DataSet:
    """Check the arrays of a cache file and lay them out for models. Raises DataError."""
    whole = "x" in arrays
    x, y = _to_samples(source, arrays, "x" if whole else "x_train", "y" if whole else "y_train", origin)
    x_test, y_test = (None, None) if whole else _to_samples(source, arrays, "x_test", "y_test", origin)
    owner = next((arrays[f] for f in ("writer", "subject", "writer_train") if f in arrays), None)
    if owner is not None:
        if owner.shape != y.shape or owner.dtype.kind not in "iu":
            raise DataError(
                f"{origin}: the owners must be {len(y)} integers, one per sample, got {owner.dtype} {owner.shape}"
            )
        owner = owner.astype(np.int64)
    return DataSet(source.name, source.kind, source.classes, x, y, x_test, y_test, owner)


def _to_samples(
    source: DataSource, arrays: Arrays, x_field: str, y_field: str, origin: str
) -> tuple[np.ndarray, np.ndarray]:
    for field in (x_field, y_field):
        if field not in arrays:
            raise DataError(f"{origin} lacks the field {field}; it has {', '.join(sorted(arrays)) or 'none'}")
    x, y = arrays[x_field], arrays[y_field]
    if source.kind == "image" and x.dtype != np.uint8:
        raise DataError(f"{origin}: images must be uint8 in 0..255, {x_field} is {x.dtype}")
    if source.kind == "window" and x.dtype.kind != "f":
        raise DataError(f"{origin}: windows must be floats, {x_field} is {x.dtype}")
    x = _channels_first(source, x)
    if x.shape[1:] != source.shape:
        raise DataError(f"{origin}: a sample of {source.name} has shape {source.shape}, {x_field} has {x.shape[1:]}")
    if source.kind == "window" and not np.isfinite(x).all():
        bad = int(np.flatnonzero(~np.isfinite(x).all(axis=(1, 2)))[0])
        raise DataError(f"{origin}: {x_field}[{bad}] holds NaN or infinity; every number must be finite")
    if y.shape != (len(x),) or y.dtype.kind not in "iu" or not len(y):
        raise DataError(f"{origin}: {y_field} must be {len(x)} integers (at least 1), got {y.dtype} {y.shape}")
    outside = y[(y < 0) | (y >= source.classes)]
    if len(outside):
        raise DataError(f"{origin}: labels must be in 0..{source.classes - 1}, {y_field} has {int(outside[0])}")
    return 255 - x if source.on_white else x, y.astype(np.int64)


def _channels_first(source: DataSource, x: np.ndarray) -> np.ndarray:
    if source.kind == "window":
        return np.ascontiguousarray(x.swapaxes(1, 2), dtype=np.float32) if x.ndim == 3 else x
    if x.ndim == 3:
        return x[:, None]
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if x.ndim == 4 else x
