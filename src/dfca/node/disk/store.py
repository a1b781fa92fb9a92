"""The saves of a peer on the disk: two generations; after a power cut the newest valid one is loaded.

    state/peer.0.safetensors  peer.1.safetensors   the last two saves, written in turn
    state/life.json                                the incarnation of the last start, written before anything is sent

A file is safetensors: the bank (m, P), the warmed-up model (P,) if there is one, and in its metadata the other fields
of `Saved` by name (`peer.packing`), a serial number, the version of the form, and a SHA-256 of everything. A file that
is cut, changed, or of another form is skipped with a warning, and the other generation is loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dfca.base.errors import DfcaError, RunError
from dfca.base.files import KINDS, NO_ROOM, safetensors_header, tensor_bytes
from dfca.node.disk.disk import SYSTEM_DISK, Disk
from dfca.node.disk.save_file import FORM, Damaged, digest, read_facts, read_whole, save_paths
from dfca.peer.packing import Packer, Unpacker
from dfca.peer.state import Saved

TENSORS = ("bank", "own")  # the fields of `Saved` that are tensors, as they follow one another in a file
TYPES = {name: getattr(torch, kind.removeprefix("torch.")) for kind, name in KINDS.items()}


class CannotSave(RunError):
    """A save could not be written; the last one is kept."""


@dataclass
class DiskStore:
    """The saves of one node."""

    folder: Path
    warnings: list[str] = field(default_factory=list)  # about files that were skipped
    saves: int = 0  # since the start
    written_bytes: int = 0  # by all saves since the start
    seconds: float = 0.0  # spent on all saves since the start
    _serial: int = 0
    disk: Disk = SYSTEM_DISK
    now: Callable[[], float] = lambda: time.time()  # seconds since 1970

    def load(self) -> Saved | None:
        """Return the newest valid save, or None. Raises RunError if the folder cannot be read."""
        saves: list[tuple[int, Saved]] = []
        for path in save_paths(self.folder):
            try:
                saves.append(read_save(path, self.disk))
            except FileNotFoundError:
                continue
            except (Damaged, DfcaError) as error:
                self.warnings.append(f"{path.name} is passed over: {error}")
            except OSError as error:
                raise RunError(f"cannot read {path}: {error.strerror}; make the file readable for this user") from error
        if not saves:
            return None
        self._serial, saved = max(saves, key=lambda pair: pair[0])
        return saved

    def save(self, saved: Saved) -> None:
        """Replace the older of the two saves; the new one is durable when this returns.

        Raises CannotSave; both files are then unchanged.
        """
        begin = time.perf_counter()
        path = save_paths(self.folder)[(self._serial + 1) % 2]
        try:
            self.disk.make_folder(self.folder)
            size = 0
            with self.disk.replacing(path) as file:
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
        """Return the next incarnation, larger than any before; it is durable when this returns. Raises CannotSave.

        If the files are damaged and their number is unknown, it is the time in seconds, which is larger than any.
        """
        path = self.folder / "life.json"
        lives = [saved.incarnation] if saved is not None else []
        try:
            with self.disk.open(path) as file:
                lives.append(int(json.loads(file.read(1024))["incarnation"]))
        except FileNotFoundError:
            if saved is None and self.warnings:
                lives.append(int(self.now()))
        except (OSError, ValueError, KeyError, TypeError):
            self.warnings.append(f"{path.name} is passed over: it is not readable")
            lives.append(int(self.now()))
        life = max(lives, default=-1) + 1
        try:
            self.disk.make_folder(self.folder)
            with self.disk.replacing(path) as file:
                file.write(json.dumps({"incarnation": life}).encode())
        except OSError as error:
            raise _explain(error, self.folder, "then start the node again") from error
        return life

    def clean(self) -> None:
        """Remove temporary files of a killed process; rename a folder that is in a save's place."""
        with suppress(OSError):
            for name in self.disk.names(self.folder):
                if name.startswith(".") and name.endswith(".tmp"):
                    self.disk.remove(self.folder / name)
        for path in save_paths(self.folder):
            if self.disk.is_folder(path):  # a save could never take its place
                aside = path.with_name(f"{path.name}.{time.time_ns()}.aside")
                with suppress(OSError):
                    self.disk.rename(path, aside)
                    self.warnings.append(f"{path.name} was a folder and is {aside.name} now")


def _parts(saved: Saved, serial: int) -> Iterator[bytes | memoryview]:
    """Yield a file in pieces, without a copy of the bank."""
    tensors = {name: tensor for name in TENSORS if (tensor := getattr(saved, name)) is not None}
    data = [tensor_bytes(tensor) for tensor in tensors.values()]
    layout = [(name, KINDS[str(t.dtype)], list(t.shape), t.nbytes) for name, t in tensors.items()]
    forms = {name: [kind, shape] for name, kind, shape, _ in layout}
    bare = Packer().pack(replace(saved, bank=None, own=None))
    facts = {"form": FORM, "serial": serial, **dict.fromkeys(TENSORS), **forms, "saved": bare}
    text = json.dumps(facts, separators=(",", ":"), sort_keys=True)
    yield safetensors_header(layout, {"format": "dfca-peer", "facts": text, "sha256": digest(text, *data)})
    yield from data


def read_save(path: Path, disk: Disk = SYSTEM_DISK) -> tuple[int, Saved]:
    """Read the serial number and the save of a file. Raises Damaged, or OSError if it cannot be read."""
    data = read_whole(path, disk)
    end, facts = read_facts(data)
    shapes = {name: facts.get(name) for name in TENSORS}
    return facts["serial"], replace(Unpacker({}).unpack(facts["saved"]), **_tensors(data, end, shapes))


def _tensors(data: bytearray, begin: int, shapes: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file as views; together they cover it."""
    tensors = {}
    for name, form in shapes.items():
        if form is not None:
            dtype, shape = TYPES[form[0]], form[1]
            if len(data) - begin < prod(shape) * dtype.itemsize:
                raise Damaged("its size is not that of its models")
            tensors[name] = torch.frombuffer(data, dtype=dtype, offset=begin, count=prod(shape)).view(*shape)
            begin += prod(shape) * dtype.itemsize
    if begin != len(data):
        raise Damaged("its size is not that of its models")
    return tensors


def _explain(error: OSError, folder: Path, then: str = "the node continues by itself") -> CannotSave:
    if error.errno in NO_ROOM:
        return CannotSave(
            f"no space left for the models in {folder} ({error.strerror}); the last save is kept and nothing newer is "
            f"sent: free some space, {then}"
        )
    return CannotSave(
        f"cannot write the models in {folder}: {error.strerror or error}; the last save is kept and nothing newer is "
        f"sent: make the folder writable, {then}"
    )
