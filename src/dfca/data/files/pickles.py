"""Read the pickles of CIFAR-10 without running the code that they name.

A pickle is a program that may call any function. This unpickler provides harmless stand-ins of its own in place of
numpy's names (not even `numpy.ndarray` itself is handed out), enough for the byte arrays and label lists of the
official batches, and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from dfca.base.errors import DataError


class _ArrayName:
    """Stands for the name `numpy.ndarray`: a pickle can hand it to `_empty_array`, and do nothing else with it."""

    __slots__ = ()

    def __new__(cls, *_: object) -> _ArrayName:
        raise DataError("a pickle must not make arrays by itself")


def _empty_array(kind: type, shape: tuple[int, ...], code: object) -> np.ndarray:
    if kind is not _ArrayName:
        raise DataError("a pickled array must be a plain numpy.ndarray")
    return np.ndarray((0,), dtype=np.uint8)


def _number_type(code: str | bytes, *_: object) -> np.dtype:
    name = code.decode("latin1") if isinstance(code, bytes) else code
    if name not in ("u1", "i8", "i4"):
        raise DataError(f"a pickled array must hold bytes or integers, got {name!r}")
    return np.dtype(name, copy=True)


def _encode(text: str, encoding: object = "latin1") -> bytes:
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy", "ndarray"): _ArrayName,
    ("numpy", "dtype"): _number_type,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(f"the pickle asks for {module}.{name}, which plain image data never needs")
        return _ALLOWED[module, name]


def read_pickle(data: bytes, origin: str) -> Any:
    """Read a pickle of dicts, lists, numbers, texts and numeric arrays. Raises DataError for any other."""
    try:
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{origin} is refused: {error}; use the official file") from None
    except Exception as error:
        raise DataError(f"{origin} is not a readable CIFAR-10 batch ({error}); get it again") from error
