"""The samples of a device as they lie on its disk, whatever the format: `read` returns `Raw`.

  csv           a header and one row per sample (`csv_table.py`)
  parquet       the same in columns; needs pyarrow
  npz           arrays x (n, *shape) and y (n,): numbers or names; optional `features` (names) and `classes` (names of
                the numbers in y); or `tokens` (n, T) instead of x, integers that are not scaled; y (n, labels) of 0 and
                1 for several labels
  safetensors   tensors x or tokens, and y
  images        a folder with one subfolder per class; needs pillow
  factory       "module:function" of the user: runs code, and returns (x, y)

Nothing here is unpickled, and sizes are checked before memory is taken.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dfca.base.errors import DataError
from dfca.base.validation import printable
from dfca.node.task.config import DataConfig
from dfca.node.task.csv_table import Columns, class_name, listed, number, read_csv, unreadable

if TYPE_CHECKING:
    from dfca.node.task.facts import InputFacts

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
LARGEST = 1e30  # a number beyond it is no measurement, and its square no float
MOST_CLASSES = 65_536
MOST_COLUMNS = 2**16
ARRAYS = ("x", "tokens", "y", "features", "classes")


@dataclass(frozen=True)
class Raw:
    """Samples before they are matched with the facts of a swarm.

    x (n, *shape) of numbers, finite; labels: classes (n,) or None where there are none; names: of the columns, None for
    arrays; dropped: rows that were left out; targets: numbers to predict (n, targets), named by target_names.
    """

    kind: Literal["table", "array", "images", "tokens"]
    x: np.ndarray
    labels: list[str] | None
    names: tuple[str, ...] | None = None
    dropped: int = 0
    targets: np.ndarray | None = None
    target_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataRequest:
    """What to read: the settings, the folder that paths are relative to, and what is known already.

    labelled: whether what is predicted must be there; inputs: of the swarm, where there is one; most_bytes: in memory;
    task: of the swarm.
    """

    data: DataConfig
    folder: Path
    labelled: bool = True
    inputs: InputFacts | None = None
    most_bytes: int = 2 * 2**30
    task: str = "classification"

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns of numbers that are predicted; none where that is a class, or need not be there."""
        if self.task == "classification" or not (self.labelled or self.task == "forecasting"):
            return ()
        label = self.data.label
        return tuple(name.strip() for name in label.split(",")) if self.task == "multilabel" else (label,)

    @property
    def path(self) -> Path:
        """Where the data lies."""
        return (self.folder / Path(self.data.path).expanduser()).absolute()

    def columns(
        self, names: Sequence[str], what: Path | str, targets: Sequence[str] | None = None
    ) -> tuple[int | None, list[int]]:
        """Find the places of the label and of the features, and behind these the targets, among the names of a file.

        To predict, the features of the swarm are enough. targets: () where what is predicted lies elsewhere.

        Raises DataError.
        """
        if len(names) > MOST_COLUMNS:
            raise DataError(f"{what} must have at most {MOST_COLUMNS} columns, got {len(names)}; leave some out")
        places_of = dict(zip(reversed(names), reversed(range(len(names))), strict=True))
        twice = next((name for place, name in enumerate(names) if places_of[name] != place), None)
        if twice is not None:
            raise DataError(f'{what}: the column "{printable(twice)}" stands there twice; rename one of the two')
        data, series, apart = self.data, self.task == "forecasting", targets is not None
        if series and data.missing == "drop":
            raise DataError('a forecast needs every row: fill empty values, and set data.missing = "refuse"')
        targets = self.targets if targets is None else targets
        lacking = [name for name in targets or (data.label,) if name not in places_of]
        if lacking and not apart and (self.labelled or series):
            role = "with the numbers to predict" if targets else "for the class"
            raise DataError(
                f"{what} has no column {listed(lacking)} {role}; it has {listed(names)}: name one of them by --label "
                "or data.label"
            )
        features, ignored = None if data.features == "auto" else data.features, {data.label, *targets, *data.ignore}
        if self.inputs is not None:
            ignored |= {*self.inputs.ignored}
            if not self.labelled and (self.inputs.features or series):
                features = self.inputs.features
        if missing := [name for name in features or () if name not in places_of]:
            raise DataError(f"{what} has no column {listed(missing)}; it has {listed(names)}")
        label, last = None if targets else places_of.get(data.label), [places_of[name] for name in targets]
        if features is not None:
            return label, [places_of[name] for name in features] + last
        places = [i for i, name in enumerate(names) if name not in ignored]
        if not places and not series:  # of a series the past of the target is a feature
            beside = "what is predicted" if targets else "the class"
            raise DataError(f"{what} has no column with a feature beside {beside}; it has {listed(names)}")
        return label, places + last


def read(request: DataRequest) -> Raw:
    """Read samples. Raises DataError with a sentence, whatever the file holds."""
    raw = _read(request)
    for values in (raw.x, raw.targets):
        if values is not None and values.dtype.kind == "f" and float(np.abs(values).max(initial=0.0)) > LARGEST:
            row = int((np.abs(values).reshape(len(values), -1) > LARGEST).any(axis=1).argmax())
            raise DataError(
                f"{request.data.path}: sample {row + 1} holds a number beyond {LARGEST:g}; is it a missing value? "
                "Correct it"
            )
    if request.task == "multilabel" and raw.targets is not None:
        wrong = np.argwhere((raw.targets != 0) & (raw.targets != 1))
        if len(wrong):
            row, place = wrong[0].tolist()
            raise DataError(
                f"{request.data.path}: sample {row + 1} has {raw.targets[row, place]:g} for the label "
                f"{listed(raw.target_names[place : place + 1])}; a label is 0 or 1: correct it"
            )
    return raw


def _read(request: DataRequest) -> Raw:
    kind = request.data.kind
    if kind == "factory":
        return _from_factory(request)
    path = request.path
    try:
        is_folder = path.is_dir()
        if not path.exists():
            raise unreadable(path, FileNotFoundError())
    except OSError as error:
        raise unreadable(path, error) from None
    if is_folder != (kind == "images"):
        form = "a folder of images with one subfolder per class" if kind == "images" else f"a file of format {kind}"
        raise DataError(f"{path} is {'a folder' if is_folder else 'a file'} and must be {form}; see data.format")
    if kind == "images":
        return _from_images(request)
    if not path.is_file():
        raise DataError(f"{path} is a pipe or a device and must be a regular file; write the samples to a file first")
    if kind == "csv":
        return _of_table(read_csv(path, request), request)
    try:
        if kind == "parquet":
            return _of_table(_read_parquet(path, request), request)
        arrays = _read_npz(path, request) if kind == "npz" else _read_safetensors(path, request)
    except DataError:
        raise
    except PermissionError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # parsers of others raise what they like on broken files
        raise DataError(f"{path} cannot be read as {kind}: {type(error).__name__}: {_short(error)}") from None
    return _of_arrays(str(path), arrays, request)


def _short(error: Exception) -> str:
    return printable(" ".join(str(error).split()), 200) or "no reason given"


def _of_table(table: Columns, request: DataRequest) -> Raw:
    targets, features = request.targets, len(table.names) - len(request.targets)
    raw = Raw("table", table.values[:, :features], table.labels, table.names[:features], table.dropped)
    return replace(raw, targets=table.values[:, features:], target_names=targets) if targets else raw


def _read_parquet(path: Path, request: DataRequest) -> Columns:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path}: Parquet needs one more library: pip install 'dfca[parquet]'") from None
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        label, places = request.columns(names, path)
        _check_bytes(str(path), file.metadata.num_rows * len(places) * 8, request)
        used = [names[place] for place in places]
        content = file.read(columns=used + ([] if label is None else [names[label]]))
    for name in used:
        kind = content.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise DataError(f"{path}: column {listed([name])} holds {kind}, not numbers; leave it out by data.ignore")
    columns = [np.asarray(content[name].cast(pa.float64()).to_numpy(), np.float64) for name in used]
    values = np.stack(columns, axis=1)
    classes = None if label is None else [_plain(value) for value in content[names[label]].to_pylist()]
    return _without_gaps(Columns(tuple(used), values, classes), path, request)


def _without_gaps(table: Columns, path: Path, request: DataRequest) -> Columns:
    bad = ~np.isfinite(table.values).all(axis=1)
    if table.labels is not None:
        bad |= np.array([label == "" for label in table.labels], dtype=bool)
    if not bad.any():
        if not len(table.values):
            raise DataError(f"{path} has no rows")
        return table
    if request.data.missing == "refuse":
        row = int(bad.argmax())
        columns = [name for name, value in zip(table.names, table.values[row], strict=True) if not np.isfinite(value)]
        raise DataError(
            f"{path}: row {row + 1}, column {listed([*columns, request.data.label][:1])} is empty or not finite "
            f'({int(bad.sum())} rows are so); correct the file, or set data.missing = "drop"'
        )
    if bad.all():
        raise DataError(f"{path} has no rows, all {len(bad)} have empty values")
    labels = None if table.labels is None else [x for x, gone in zip(table.labels, bad, strict=True) if not gone]
    return Columns(table.names, table.values[~bad], labels, int(bad.sum()))


def _read_npz(path: Path, request: DataRequest) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as container:
        sizes = {info.filename.removesuffix(".npy"): info.file_size for info in container.infolist()}
    _check_bytes(str(path), sum(sizes.get(name, 0) for name in ARRAYS), request)
    with np.load(path, allow_pickle=False) as content:
        return {name: content[name] for name in ARRAYS if name in content.files}


def _read_safetensors(path: Path, request: DataRequest) -> dict[str, np.ndarray]:
    import torch
    from safetensors import safe_open

    _check_bytes(str(path), path.stat().st_size, request)
    with safe_open(path, framework="pt") as content:
        tensors = {name: content.get_tensor(name) for name in ARRAYS[:3] if name in content.keys()}  # noqa: SIM118
    wide = {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in tensors.items()}
    return {name: tensor.numpy() for name, tensor in wide.items()}


def _from_factory(request: DataRequest) -> Raw:
    """Call the user's own function; it returns (x, y), or x alone to predict."""
    path = request.data.path
    module, _, function = path.partition(":")
    folder = str(request.folder.absolute())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        returned = getattr(importlib.import_module(module), function)()
    except Exception as error:  # it is the user's code
        raise DataError(f'data.path "{path}" failed with {type(error).__name__}: {_short(error)}') from error
    parts = returned if isinstance(returned, tuple | list) else (returned,)
    if not 1 <= len(parts) <= 2:
        raise DataError(f'data.path "{path}" must return (x, y), got {len(parts)} values')
    try:
        arrays = {name: np.asarray(part) for name, part in zip(("x", "y"), parts, strict=False)}
    except Exception as error:
        raise DataError(f'data.path "{path}" must return arrays (x, y): {_short(error)}') from None
    return _of_arrays(f'data.path "{path}"', arrays, request)


def _of_arrays(what: str, arrays: dict[str, np.ndarray], request: DataRequest) -> Raw:
    """Check arrays x and y, and make them samples."""
    tokens, y, series = arrays.get("tokens"), arrays.get("y"), request.task == "forecasting"
    x = arrays.get("x") if tokens is None else tokens
    if series:
        x = _columns_of_series(what, x, y)
    elif not request.labelled:
        y = None
    if x is None or (y is None and request.labelled):
        raise DataError(f'{what} has no array "{"x" if x is None else "y"}"; it must have x (n, ...) and y (n,)')
    if x.dtype.kind not in "fiub":
        raise DataError(f"{what}: x must hold numbers, got {x.dtype}")
    if tokens is not None and (tokens.dtype.kind not in "iu" or tokens.ndim != 2 or tokens.min(initial=0) < 0):
        raise DataError(f"{what}: tokens must be integers >= 0 of shape (n, T), got {tokens.dtype} of shape {x.shape}")
    if x.ndim < 2 or x.ndim > 5 or 0 in x.shape[: 1 if series else None]:
        raise DataError(f"{what}: x must have a shape (n, ...) with 2 to 5 dimensions, none empty, got {x.shape}")
    several = request.task == "multilabel"
    if y is not None and (y.ndim != (2 if several else 1) or len(y) != len(x)):
        form = f"one row per sample, ({len(x)}, labels)" if several else f"one entry per sample, ({len(x)},)"
        raise DataError(f"{what}: y must have {form}, got {y.shape}")
    _check_bytes(what, x.size * 8, request)
    finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
    if not finite.all():
        raise DataError(f"{what}: sample {int((~finite).argmax())} of x is not finite; remove it, or correct it")
    labels, targets, classes = None, None, arrays.get("classes")
    target_names: tuple[str, ...] = ()
    if y is not None and request.task == "classification":
        labels = _labels(what, y, classes)
    elif y is not None:
        targets, target_names = _targets(what, y, classes, request)
    named, images = _names(what, x, arrays.get("features"), request), _as_images(x)
    if named is None and series:
        named = tuple(f"x{place}" for place in range(x.shape[1])), list(range(x.shape[1]))
    if tokens is not None:
        raw = Raw("tokens", x.astype(np.int64), labels)
    elif named is not None:
        raw = Raw("table", x[:, named[1]].astype(np.float64), labels, named[0])
    else:
        raw = Raw("array", x, labels) if images is None else Raw("images", images, labels)
    return replace(raw, targets=targets, target_names=target_names)


def _columns_of_series(what: str, x: np.ndarray | None, y: np.ndarray | None) -> np.ndarray:
    """Return the columns (n, features) beside a series y (n,), which needs none."""
    if y is None or y.ndim != 1:
        raise DataError(
            f"{what}: a forecast needs an array y (n,), a number for every time, and may have x (n, features)"
        )
    if x is None:
        return np.zeros((len(y), 0))
    if x.ndim != 2:
        raise DataError(f"{what}: x must have shape (n, features), a row for every time, got {x.shape}")
    return x


def _targets(
    what: str, y: np.ndarray, names: np.ndarray | None, request: DataRequest
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the numbers to predict, (n, targets), and what they are called."""
    if y.dtype.kind not in "fiub" or not np.isfinite(y).all():
        raise DataError(f"{what}: y must hold finite numbers, got {y.dtype}; correct them")
    targets = y.reshape(len(y), -1).astype(np.float64)
    given = () if names is None else tuple(map(str, names.reshape(-1).tolist()))
    numbered = tuple(map(str, range(targets.shape[1])))
    return targets, next((names for names in (given, request.targets) if len(names) == len(numbered)), numbered)


def _names(
    what: str, x: np.ndarray, features: np.ndarray | None, request: DataRequest
) -> tuple[tuple[str, ...], list[int]] | None:
    """Return the names of the columns that are used, of the file or of the settings, and their places."""
    chosen = request.data.features
    names = None if features is None else tuple(map(str, features.reshape(-1).tolist()))
    if names is None and chosen != "auto":
        names = chosen
    if names is None:
        return None
    if x.ndim != 2 or len(names) != x.shape[1]:
        raise DataError(f"{what}: {len(names)} names of features do not fit x of shape {x.shape}")
    _, places = request.columns(names, what, targets=())
    return tuple(names[place] for place in places), places


def _labels(what: str, y: np.ndarray, classes: np.ndarray | None) -> list[str]:
    """Write the classes as names: those of `classes`, or the numbers themselves."""
    if y.dtype.kind == "U":
        return [class_name(value) for value in y.tolist()]
    if y.dtype.kind not in "fiub" or not (np.isfinite(y).all() and (y == np.round(y)).all() and abs(y).max() < 2**53):
        raise DataError(f"{what}: y must hold whole numbers or names, got {y.dtype} with others")
    places = [int(value) for value in y]
    if classes is None:
        return [str(value) for value in places]
    names = [class_name(str(name)) for name in classes.reshape(-1).tolist()]
    if min(places) < 0 or max(places) >= len(names):
        raise DataError(f"{what}: y must hold places 0..{len(names) - 1} in `classes`, got {max(places)}")
    return [names[place] for place in places]


def _as_images(x: np.ndarray) -> np.ndarray | None:
    """Return bytes with the channels first; None where these are no images."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        return None
    if x.ndim == 3:
        return x[:, None]
    if x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x if x.shape[1] in (1, 3) else None


def _from_images(request: DataRequest) -> Raw:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need one more library: pip install 'dfca[node]'") from None
    files = _image_files(request)
    shape = _image_shape(request, files[0][0])
    _check_bytes(str(request.path), len(files) * math.prod(shape), request)
    x = np.empty((len(files), *shape), np.uint8)
    for place, (file, _) in enumerate(files):
        x[place] = _image(Image, file, shape)
    labels = [name for _, name in files if name is not None]
    if request.task == "classification" or not labels:
        return Raw("images", x, labels or None)
    numbers = [number(name, decimal_comma=True) for name in labels]
    wrong = sorted({name for name, value in zip(labels, numbers, strict=True) if value is None})
    if request.task != "regression" or wrong:
        which = f"{listed(wrong)} is none" if request.task == "regression" else f'the task is "{request.task}"'
        raise DataError(
            f"{request.path}: subfolders of images name a class, or the number of a regression, and {which}; give the "
            "samples as a table or as arrays"
        )
    return Raw("images", x, None, None, 0, np.array(numbers, np.float64)[:, None], request.targets)


def _image_files(request: DataRequest) -> list[tuple[Path, str | None]]:
    """List the images with their classes; images to predict may lie in the folder itself."""
    path = request.path
    files: list[tuple[Path, str | None]] = []
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        files += [(file, folder.name) for file in _images_in(folder)]
    if not request.labelled and not files:
        files = [(file, None) for file in _images_in(path)]
    if not files:
        raise DataError(f"{path} has no images ({', '.join(IMAGES)}) in subfolders, one subfolder per class")
    return files


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGES and file.is_file())


def _image_shape(request: DataRequest, first: Path) -> tuple[int, int, int]:
    """Settle the shape of all images: the swarm's, or the first one's."""
    from PIL import Image

    if request.inputs is not None and request.inputs.kind == "images" and len(request.inputs.shape) == 3:
        colours, height, width = request.inputs.shape
        return colours, height, width
    with _explained(first), Image.open(first) as image:
        side = request.data.image_size
        width, height = (side, side) if side else image.size
        return (1 if image.mode in ("1", "L", "I;16") else 3), height, width


def _image(library: Any, file: Path, shape: tuple[int, int, int]) -> np.ndarray:
    colours, height, width = shape
    with _explained(file), library.open(file) as image:
        converted = image.convert("L" if colours == 1 else "RGB")
        if converted.size != (width, height):
            converted = converted.resize((width, height), library.Resampling.BILINEAR)
        pixels = np.asarray(converted, np.uint8)
    return pixels[None] if colours == 1 else pixels.transpose(2, 0, 1)


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Turn whatever a damaged image raises into a sentence; warnings (huge images) count as damage."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{file} is no image that can be read: {_short(error)}; remove it") from None


def _check_bytes(what: str, size: int, request: DataRequest) -> None:
    if size > request.most_bytes:
        raise DataError(f"{what} must take at most {request.most_bytes} bytes (limits.data_bytes), got {size}")


def _plain(value: Any) -> str:
    return "" if value is None else class_name(str(value))


def found_classes(labels: Sequence[str], what: str) -> tuple[str, ...]:
    """List the classes of labels, in the order of numbers where all are numbers. Raises DataError."""
    names = sorted(set(labels))
    if all(name.lstrip("-").isdigit() and name.isascii() for name in names):
        names.sort(key=int)
    if len(names) < 2:
        raise DataError(f"{what} has one class only, {listed(names)}; a model needs samples of two or more")
    if len(names) > MOST_CLASSES:
        raise DataError(f"{what} has {len(names)} classes, at most {MOST_CLASSES}; is the label column a number?")
    return tuple(names)
