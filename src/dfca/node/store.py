"""What a device keeps of its peer: two generations of one file; after a power cut the newest whole one is loaded.

    state/peer.0.safetensors  peer.1.safetensors   the last two saves, written in turn
    state/life.json                                the incarnation of the last start, written before anything is sent

A file is safetensors: the bank (m, P), and in its metadata the other fields of `Saved` by name (`peer.packing`), a
serial number, the version of the form, and a SHA-256 over all of it. A file that is cut, changed, or of another form is
passed over, with a warning that says why; the other generation is loaded then.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dfca.errors import DfcaError, RunError
from dfca.files import KINDS, NO_ROOM, replacing
from dfca.peer.packing import Packer, Unpacker
from dfca.peer.state import Saved

FORM = 1
"""Of the files; a change that older code cannot read raises it."""
MOST_HEADER_BYTES = 16 * 2**20
_TYPES = {name: getattr(torch, kind.removeprefix("torch.")) for kind, name in KINDS.items()}


class Damaged(Exception):
    """A file that holds no save; the message says why."""


class CannotSave(RunError):
    """The disk did not take a save; what was saved before is kept."""


@dataclass
class DiskStore:
    """The saves of one node. warnings: what was wrong with files that were passed over.

    written_bytes, seconds: what all saves of this life have cost together; saves: how many there were.
    """

    folder: Path
    warnings: list[str] = field(default_factory=list)
    saves: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    _serial: int = 0

    def load(self) -> Saved | None:
        """Return the newest save that is whole, or None where there is none.

        Raises RunError where the folder cannot be read, or holds saves of a newer form only.
        """
        found: list[tuple[int, Saved]] = []
        for path in self._paths():
            try:
                found.append(read_save(path))
            except FileNotFoundError:
                continue
            except (Damaged, DfcaError) as error:
                self.warnings.append(f"{path.name} is passed over: {error}")
            except OSError as error:
                raise RunError(f"cannot read {path}: {error.strerror}; make the file readable for this user") from error
        if not found:
            return None
        self._serial, saved = max(found, key=lambda pair: pair[0])
        return saved

    def save(self, saved: Saved) -> None:
        """Put a save on the disk, in place of the older of the two; it is durable when this returns.

        Raises CannotSave; both files are then as they were.
        """
        begin = time.perf_counter()
        path = self._paths()[(self._serial + 1) % 2]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            size = 0
            with replacing(path) as file:
                for part in _parts(saved, self._serial + 1):
                    file.write(part)
                    size += len(part)
        except OSError as error:
            raise _explain(error, self.folder) from error
        self._serial += 1
        self.saves += 1
        self.written_bytes += size
        self.seconds += time.perf_counter() - begin

    def next_life(self, saved: Saved | None) -> int:
        """Begin the next incarnation: one more than any before, on the disk before this returns.

        Where nobody knows how many there were, because files are damaged, it is the time in seconds: more than any.
        Raises CannotSave.
        """
        path = self.folder / "life.json"
        lives = [saved.incarnation] if saved is not None else []
        try:
            lives.append(int(json.loads(path.read_text())["incarnation"]))
        except FileNotFoundError:
            if saved is None and self.warnings:
                lives.append(int(time.time()))
        except (OSError, ValueError, KeyError, TypeError):
            self.warnings.append(f"{path.name} is passed over: it is not readable")
            lives.append(int(time.time()))
        life = max(lives, default=-1) + 1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(json.dumps({"incarnation": life}).encode())
        except OSError as error:
            raise _explain(error, self.folder) from error
        return life

    def clean(self) -> None:
        """Remove what a process that was killed has left half written."""
        with suppress(OSError):
            for leftover in self.folder.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)

    def _paths(self) -> tuple[Path, Path]:
        return self.folder / "peer.0.safetensors", self.folder / "peer.1.safetensors"


def _parts(saved: Saved, serial: int) -> Iterator[bytes | memoryview]:
    """Yield a file piece by piece, without a copy of the bank."""
    bank = torch.empty(0) if saved.bank is None else saved.bank.detach().cpu().contiguous()
    facts = {
        "form": FORM,
        "serial": serial,
        "bank": None if saved.bank is None else [KINDS[str(bank.dtype)], list(bank.shape)],
        "saved": Packer().pack(replace(saved, bank=None)),
    }
    text = json.dumps(facts, separators=(",", ":"), sort_keys=True)
    data = bank.reshape(-1).view(torch.uint8).numpy().data
    metadata = {"format": "dfca-peer", "facts": text, "sha256": _digest(text, data)}
    header: dict[str, Any] = {"__metadata__": metadata}
    if saved.bank is not None:
        offsets = [0, data.nbytes]
        header["bank"] = {"dtype": KINDS[str(bank.dtype)], "shape": list(bank.shape), "data_offsets": offsets}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    yield data


def _digest(text: str, data: bytes | memoryview) -> str:
    digest = hashlib.sha256(text.encode())
    digest.update(data)
    return digest.hexdigest()


def read_save(path: Path) -> tuple[int, Saved]:
    """Read a file of a store: its serial number, and the save. Raises Damaged, or OSError where it cannot be read."""
    data = _read_regular(path)
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > min(len(data), MOST_HEADER_BYTES):
        raise Damaged("it is cut off")
    try:
        metadata = json.loads(data[8:end].decode())["__metadata__"]
        text, expected = metadata["facts"], metadata["sha256"]
        intact = _digest(text, memoryview(data)[end:]) == expected
        facts = json.loads(text)
        form, serial, shape, packed = facts["form"], facts["serial"], facts["bank"], facts["saved"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged("it is not a file of a node") from None
    if not intact:
        raise Damaged("its checksum does not fit: it is cut off or was changed")
    if form != FORM:
        raise Damaged(f"it was written by another version of dfca (form {form}, this one reads {FORM})")
    saved = Unpacker({}).unpack(packed)
    return serial, replace(saved, bank=None if shape is None else _bank(data, end, *shape))


def _read_regular(path: Path) -> bytearray:
    """Read a file, which may be no link."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Damaged("it is not a regular file")
        data = bytearray(os.fstat(file.fileno()).st_size)
        count = file.readinto(data)
    return data[:count] if count != len(data) else data


def _bank(data: bytearray, begin: int, kind: str, shape: list[int]) -> Tensor:
    dtype = _TYPES[kind]
    if len(data) - begin != prod(shape) * dtype.itemsize:
        raise Damaged("its size is not that of its models")
    return torch.frombuffer(data, dtype=dtype, offset=begin).view(*shape)


def _explain(error: OSError, folder: Path) -> CannotSave:
    if error.errno in NO_ROOM:
        return CannotSave(
            f"no space left for the models in {folder} ({error.strerror}); the last save is kept and nothing newer is "
            "sent: free some space, the node goes on by itself"
        )
    return CannotSave(
        f"cannot write the models in {folder}: {error.strerror or error}; the last save is kept and nothing newer is "
        "sent: make the folder writable, the node goes on by itself"
    )
