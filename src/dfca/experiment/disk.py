"""Files that survive a kill -9 and a full disk: written beside, flushed, then moved into place."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dfca.errors import RunError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a file so that at any moment either the old or the new content is there, whole.

    Raises:
        RunError: if the disk is full or cannot be written.
    """
    with _beside(path) as temporary, open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def atomic_save(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors as safetensors, as whole as `atomic_write`, and return the SHA-256 of the file."""
    with _beside(path) as temporary:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        except SafetensorError as error:
            # The library reports the system's errors as text only.
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        return sha256(temporary)


def sha256(path: Path) -> str:
    """Hash a file without holding it in memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_line(path: Path, line: str) -> None:
    """Append one line and flush it to the disk."""
    with told(path), open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of a process that was killed."""
    for leftover in folder.rglob(".*.tmp"):
        leftover.unlink(missing_ok=True)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn the system's errors while writing into one sentence."""
    try:
        yield
    except OSError as error:
        folder = path.parent
        if error.errno in NO_ROOM:
            raise RunError(
                f"no space left for {path.name} in {folder} ({error.strerror}); finished work is kept: free some space "
                "and run the same command again, or use --out for another disk"
            ) from error
        raise RunError(
            f"cannot write {path.name} in {folder}: {error.strerror or error}; finished work is kept: make the folder "
            "writable and run the same command again, or use --out for another one"
        ) from error


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _flush(temporary)
            os.replace(temporary, path)
            _flush(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
