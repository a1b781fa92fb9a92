"""Files that survive a kill -9 and a full disk: written beside, flushed, then moved into place."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dfca.base.errors import RunError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_TEXT_BYTES = 2**30  # of a text file in a run folder
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LINKS, BINARY = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_BINARY", 0)  # of os.open, where the system has them
KINDS = {  # what safetensors calls the types of torch
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.bool": "BOOL",
}


@dataclass(frozen=True)
class Stream:
    """A tensor that is never whole in memory: its shape, and its rows in order, in pieces.

    parts: names and shapes of the tensors that lie in it one after the other, where it is stored as those.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Iterable[Tensor]
    parts: Sequence[tuple[str, tuple[int, ...]]] = ()


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end of the block; before and after an error the old one stays.

    It is written beside, flushed to the disk and moved into place. It is a new file: a link that lies there under its
    name is removed, never followed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a file so that at any moment either the old or the new content is there, whole.

    Raises RunError if the disk is full or cannot be written.
    """
    with _replacing_in_run(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def atomic_save(path: Path, tensors: Mapping[str, Tensor | Stream], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors as safetensors, as whole as `atomic_write`, and return the SHA-256 of the file.

    The format is a length, a JSON header and the bytes of each tensor, so it is written here, piece by piece: the
    library makes a second copy of everything in memory first.
    """
    digest = hashlib.sha256()
    with _replacing_in_run(path) as file:
        for part in _safetensors(tensors, metadata):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def _safetensors(
    tensors: Mapping[str, Tensor | Stream], metadata: Mapping[str, str] | None
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file, without a copy of a tensor that lies whole on the CPU."""
    layout = []
    for name, tensor in tensors.items():
        named = tensor.parts if isinstance(tensor, Stream) and tensor.parts else [(name, tuple(tensor.shape))]
        kind, width = KINDS[str(tensor.dtype)], tensor.dtype.itemsize
        layout += [(part, kind, shape, prod(shape) * width) for part, shape in named]
    yield safetensors_header(layout, metadata)
    for tensor in tensors.values():
        for piece in tensor.pieces if isinstance(tensor, Stream) else (tensor,):
            yield tensor_bytes(piece)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """View a tensor as bytes; without a copy where it lies whole on the CPU."""
    import torch  # late: `dfca data list` also writes files, and starts without it

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def safetensors_header(
    layout: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None, align: int = 8
) -> bytes:
    """Write what stands before the data of a safetensors file: a length and a JSON header, padded.

    layout: name, type (a value of `KINDS`), shape and bytes of each tensor, in the order of the data.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, kind, shape, size in layout:
        begin, end = end, end + size
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align)
    return len(text).to_bytes(8, "little") + text


def read_small(path: Path, most_bytes: int, follow_links: bool = True) -> bytes:
    """Read a regular file of at most `most_bytes`; a pipe, a device or a folder is refused without reading.

    Raises OSError if it is missing, too large, or something else; its `strerror` says what.
    """
    descriptor = open_regular(path, follow_links)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it must have at most {most_bytes} bytes, got {size}", str(path))
        return file.read(size)


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a text file of a run folder: a regular file of at most 1 GiB, never through a link.

    Raises OSError if it is missing, too large, a link, a pipe or a device; its `strerror` says what; UnicodeDecodeError
    if it is not UTF-8.
    """
    return read_small(path, MOST_TEXT_BYTES, follow_links=False).decode("utf-8", errors)


def open_regular(path: Path, follow_links: bool = True) -> int:
    """Open a regular file for reading and return its descriptor. Raises OSError, also for everything else."""
    _check_regular(os.stat(path, follow_symlinks=follow_links), path)  # to open a device may already do something
    flags = os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0) | (0 if follow_links else NO_LINKS)
    descriptor = os.open(path, flags)
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFLNK: "a link", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def text_sha256(text: str) -> str:
    """Hash a text as it stands in a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hash a regular file without holding it in memory."""
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_line(path: Path, line: str) -> None:
    """Append one line and flush it to the disk; a link is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINKS | BINARY
    with explain_write_errors(path), open(os.open(path, flags, 0o666), "ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of a process that was killed."""
    for leftover in folder.rglob(".*.tmp"):
        leftover.unlink(missing_ok=True)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn the system's errors while writing into a RunError with one sentence."""
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
def _replacing_in_run(path: Path) -> Iterator[BinaryIO]:
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            yield file


def _flush_folder(folder: Path) -> None:
    """Put the new name of a file on the disk; Windows cannot open a folder and does it by itself."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
