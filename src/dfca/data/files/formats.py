"""Parse the official containers into the arrays of the cache format.

Every parser takes a `Container` and returns named arrays: `x_train y_train x_test y_test` for images,
`x y writer writer_names` for FEMNIST, `x y subject` for sensor windows.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath

import numpy as np

from dfca.base.errors import DataError
from dfca.data.files.containers import Container, gunzip
from dfca.data.files.pickles import read_pickle

Arrays = dict[str, np.ndarray]

WINDOW = 128  # samples: 2.56 s at 50 Hz
STEP = WINDOW // 2


def detect(container: Container) -> str | None:
    """Name the data set that a container holds, None where nothing is recognised."""
    names = container.names()
    bases = [_base(name) for name in names]
    if any(base.startswith("emnist-balanced-") for base in bases):
        return "emnist"
    if any(base.startswith("train-images-idx3-ubyte") for base in bases):
        return "mnist"
    if "data_batch_1" in bases:
        return "cifar10"
    if any(_is_raw(name, "labels.txt") for name in names):
        return "har"
    if any(base.endswith(".json") for base in bases):
        return "femnist"
    return None


def parse(name: str, container: Container) -> Arrays:
    """Parse a container as the data set of that name. Raises DataError for missing, damaged or malformed files."""
    try:
        return _PARSERS[name](container)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{container.path} is damaged or cut short ({error}); get it again") from error


def parse_idx(data: bytes, origin: str) -> np.ndarray:
    """Parse one idx file of unsigned bytes: magic 0 0 8 d, then d big-endian sizes, then the bytes."""
    if data[:2] == b"\x1f\x8b":
        data = gunzip(data, origin)
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{origin} is not an idx file of bytes (it starts with {data[:4].hex() or 'nothing'})")
    header = 4 + 4 * data[3]
    shape = struct.unpack(f">{data[3]}I", data[4:header].ljust(header - 4, b"\xff"))
    expected = header + math.prod(shape)
    if len(data) != expected:
        raise DataError(f"{origin} is cut short: {len(data)} bytes instead of {expected}; get it again")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def _parse_idx_set(container: Container, stems: dict[str, str]) -> Arrays:
    """Parse four idx files, each plain or gzipped; `stems` maps field to file name."""
    arrays: Arrays = {}
    fields = {stem: field for field, stem in stems.items()}
    for name, data in container.read(lambda name: _base(name).removesuffix(".gz") in fields):
        arrays[fields[_base(name).removesuffix(".gz")]] = parse_idx(data, name)
    missing = sorted(stem for field, stem in stems.items() if field not in arrays)
    if missing:
        raise DataError(
            f"{container.path} lacks {', '.join(missing)} (plain or .gz); give the folder or zip that holds all four"
        )
    return arrays


def parse_mnist(container: Container) -> Arrays:
    """Parse MNIST's four idx files."""
    return _parse_idx_set(
        container,
        {
            "x_train": "train-images-idx3-ubyte",
            "y_train": "train-labels-idx1-ubyte",
            "x_test": "t10k-images-idx3-ubyte",
            "y_test": "t10k-labels-idx1-ubyte",
        },
    )


def parse_emnist(container: Container) -> Arrays:
    """Parse the balanced split of EMNIST's gzip.zip; its images are stored transposed and come out upright."""
    arrays = _parse_idx_set(
        container,
        {
            f"{field}_{part}": f"emnist-balanced-{part}-{kind}-ubyte"
            for part in ("train", "test")
            for field, kind in (("x", "images-idx3"), ("y", "labels-idx1"))
        },
    )
    for field in ("x_train", "x_test"):
        arrays[field] = np.ascontiguousarray(arrays[field].swapaxes(1, 2))
    return arrays


def parse_cifar10(container: Container) -> Arrays:
    """Parse the python version of CIFAR-10: five training batches and a test batch, each a pickle."""
    order = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    batches = {
        _base(name): _parse_cifar_batch(data, name) for name, data in container.read(lambda name: _base(name) in order)
    }
    missing = [name for name in order if name not in batches]
    if missing:
        raise DataError(f"{container.path} lacks {', '.join(missing)}; give cifar-10-python.tar.gz")
    train = [batches[name] for name in order[:5]]
    x_test, y_test = batches["test_batch"]
    return {
        "x_train": np.concatenate([x for x, _ in train]),
        "y_train": np.concatenate([y for _, y in train]),
        "x_test": x_test,
        "y_test": y_test,
    }


def _parse_cifar_batch(data: bytes, origin: str) -> tuple[np.ndarray, np.ndarray]:
    batch = read_pickle(data, origin)
    try:
        x, y = batch[b"data"], np.asarray(batch[b"labels"], dtype=np.int64)
        planes = np.asarray(x, dtype=np.uint8).reshape(len(y), 3, 32, 32)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{origin} is not a CIFAR-10 batch: it needs data (n, 3072) and n labels") from error
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), y


_LEAF_STAGES = (("train", "test"), ("rem_user_data",), ("sampled_data",), ("all_data",))


def parse_leaf(container: Container) -> Arrays:
    """Parse LEAF's json: users, num_samples, user_data {user: {x: rows of 784 numbers in 0..1, y: labels}}.

    LEAF keeps every stage of its pipeline side by side; only the last one is read, so nothing counts twice. Its
    train and test parts are joined: dfca makes its own split.
    """
    pixels: dict[str, list[np.ndarray]] = {}
    labels: dict[str, list[np.ndarray]] = {}
    for name, data in container.read(_last_leaf_stage(container.names())):
        for user, x, y in _parse_leaf_file(data, name):
            pixels.setdefault(user, []).append(x)
            labels.setdefault(user, []).append(y)
    users = sorted(pixels)
    if not users:
        raise DataError(f"{container.path} holds no LEAF json with users; give LEAF's data folder")
    sizes = [sum(len(part) for part in labels[user]) for user in users]
    return {
        "x": np.concatenate([part for user in users for part in pixels[user]]),
        "y": np.concatenate([part for user in users for part in labels[user]]),
        "writer": np.repeat(np.arange(len(users), dtype=np.int32), sizes),
        "writer_names": np.asarray(users),
    }


def _last_leaf_stage(names: list[str]) -> Callable[[str], bool]:
    files = [name for name in names if name.endswith(".json")]
    for stage in _LEAF_STAGES:
        if any(PurePosixPath(name).parent.name in stage for name in files):
            return lambda name: name.endswith(".json") and PurePosixPath(name).parent.name in stage
    return lambda name: name.endswith(".json")


def _parse_leaf_file(data: bytes, origin: str) -> list[tuple[str, np.ndarray, np.ndarray]]:
    try:
        content = json.loads(data)
        parts = []
        for user in content["users"]:
            held = content["user_data"][user]
            y = np.asarray(held["y"], dtype=np.int64)
            x = np.asarray(held["x"], dtype=np.float64).reshape(len(y), 28, 28)
            if not (np.isfinite(x).all() and x.min(initial=0) >= 0 and x.max(initial=0) <= 1):
                raise ValueError(f"pixels of {user} must be in 0..1")
            parts.append((str(user), np.rint(x * 255).astype(np.uint8), y))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{origin} is not LEAF's FEMNIST json ({type(error).__name__}: {error}); it needs users and "
            "user_data with x (rows of 784 numbers in 0..1) and y"
        ) from error
    return parts


def parse_hapt(container: Container) -> Arrays:
    """Parse HAPT's RawData into windows of 128 samples with 50 % overlap.

    `labels.txt` has lines `experiment user activity start end` (samples from 1, both included); the six activities
    1..6 become 0..5, the postural transitions 7..12 are left out, and every window lies within one interval.
    Channels: acceleration x y z (g), gyroscope x y z (rad/s).
    """
    signals: dict[str, np.ndarray] = {}
    intervals: np.ndarray | None = None
    for name, data in container.read(lambda name: _is_raw(name, r"(labels|(acc|gyro)_exp\d+_user\d+)\.txt")):
        table = _parse_table(data, name)
        if _base(name) == "labels.txt":
            intervals = table.astype(np.int64)
        else:
            signals[_base(name)] = table
    if intervals is None or intervals.shape[1] != 5:
        raise DataError(f"{container.path} lacks RawData/labels.txt with 5 columns; give the HAPT zip")
    windows, labels, subjects = [], [], []
    most = sum(map(len, signals.values())) // STEP + len(intervals)
    for experiment, user, activity, first, last in intervals.tolist():
        if not 1 <= first <= last:
            raise DataError(f"{container.path}: labels.txt has an interval from {first} to {last}; get it again")
        if not 1 <= activity <= 6:
            continue
        signal = _both_sensors(container, signals, f"exp{experiment:02d}_user{user:02d}.txt")
        for start in range(first - 1, min(last, len(signal)) - WINDOW + 1, STEP):
            windows.append(signal[start : start + WINDOW])
            labels.append(activity - 1)
            subjects.append(user)
        if len(windows) > most:  # intervals that overlap: no recording is that long
            raise DataError(f"{container.path}: the intervals of labels.txt overlap; get it again")
    if not windows:
        raise DataError(f"{container.path} has no interval of at least {WINDOW} samples of activities 1..6")
    return {
        "x": np.stack(windows).astype(np.float32),
        "y": np.asarray(labels, dtype=np.int64),
        "subject": np.asarray(subjects, dtype=np.int64),
    }


def _both_sensors(container: Container, signals: Arrays, recording: str) -> np.ndarray:
    """Join acceleration and gyroscope of one recording to `(time, 6)`."""
    parts = []
    for sensor in ("acc", "gyro"):
        if f"{sensor}_{recording}" not in signals:
            raise DataError(f"{container.path} lacks RawData/{sensor}_{recording}; get it again")
        parts.append(signals[f"{sensor}_{recording}"])
    if any(part.shape[1] != 3 for part in parts):
        raise DataError(f"{container.path}: {recording} must have the 3 columns x y z")
    length = min(len(part) for part in parts)
    return np.concatenate([part[:length] for part in parts], axis=1)


def _parse_table(data: bytes, origin: str) -> np.ndarray:
    try:
        if not data.strip():
            raise ValueError("it is empty")
        return np.loadtxt(io.BytesIO(data), ndmin=2)
    except ValueError as error:
        raise DataError(f"{origin} is not a table of numbers ({error}); get it again") from error


def _is_raw(name: str, pattern: str) -> bool:
    return re.search(rf"(^|/)RawData/{pattern}$", name) is not None


def _base(name: str) -> str:
    return PurePosixPath(name).name.replace(".idx", "-idx")


_PARSERS: dict[str, Callable[[Container], Arrays]] = {
    "mnist": parse_mnist,
    "emnist": parse_emnist,
    "cifar10": parse_cifar10,
    "femnist": parse_leaf,
    "har": parse_hapt,
}
