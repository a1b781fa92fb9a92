"""Where the banks of all clients lie: in memory, or in a file that the system pages in and out.

A bank on disk is a memory-mapped file of a folder, deleted as soon as it is mapped: its space is free again when the
run ends, also by kill -9. The simulator walks through a bank cluster by cluster and client by client, so that the
system's cache works; the numbers are the same bits.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dfca.base.errors import ShortOfMemory
from dfca.base.memory import GIB, available_bytes, format_bytes
from dfca.sim.local.choices import PLACES as PLACES
from dfca.sim.local.choices import Place as Place

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python knows from 3.13 on: room for clusters that may never be opened is not counted."""


@dataclass(frozen=True)
class BankSpec:
    """What a bank must hold, and where: shape (models, rows, P) at first, up to `most` models later.

    place: "auto" is the disk where 1.25 x bank + data + 1 GiB is more than the memory available. folder: of a bank on
    disk, a temporary one if not given. data_bytes: what the samples take. sharers: how many processes of this machine
    make such a bank.
    """

    shape: tuple[int, int, int]
    most: int
    dtype: torch.dtype
    device: str = "cpu"
    place: Place = "auto"
    folder: Path | None = None
    data_bytes: int = 0
    sharers: int = 1


class Bank:
    """Room for up to `most` clusters of (rows, P); `open` returns the first of them as one tensor.

    Only what is written takes memory, so clusters that are never opened cost nothing.
    """

    def __init__(self, spec: BankSpec) -> None:
        """Choose the place and reserve the room.

        Raises ShortOfMemory for "memory" where the bank does not fit, or a disk that has no room for it.
        """
        (models, *rest), dtype, device, place = spec.shape, spec.dtype, spec.device, spec.place
        self._rest, self._dtype, self._device = tuple(rest), dtype, device
        self.bytes = prod(spec.shape) * dtype.itemsize
        self.on_disk, self.available = False, available_bytes(device)
        share = None if self.available is None else self.available // spec.sharers
        needed = self.bytes if place == "memory" else 5 * self.bytes // 4 + spec.data_bytes + GIB
        short = share is not None and needed > share
        if share is not None and short and (place == "memory" or device != "cpu"):
            remedy = 'bank = "disk"' if device == "cpu" else "device cpu"
            raise ShortOfMemory(
                f"the models of all clients need {format_bytes(self.bytes)} of memory, and {format_bytes(share)} are "
                f"available; use {remedy}, fewer clients or clusters, a smaller model, or more ranks (torchrun)"
            )
        self.on_disk = place == "disk" or (place == "auto" and short)
        self._file = -1
        if self.on_disk:
            self._file = _make_file(spec.folder or Path(tempfile.gettempdir()))
        self._storage = self._reserve(max(models, spec.most))
        self.open(models)

    def open(self, models: int) -> Tensor:
        """Return the first clusters: (models, rows, P)."""
        if models > len(self._storage):
            raise ValueError(f"there is room for {len(self._storage)} clusters, got {models}")
        if self.on_disk:
            size = models * prod(self._rest) * self._dtype.itemsize
            try:
                os.posix_fallocate(self._file, 0, size)  # a full disk is an error here, and a crash later
            except OSError as error:
                raise ShortOfMemory(
                    f"the models of all clients need {format_bytes(size)} on the disk, and it has no room "
                    f"({error.strerror}); use --out on a larger disk, fewer clients or clusters, a smaller model, or "
                    "more ranks (torchrun)"
                ) from None
        return self._storage[:models]

    def _reserve(self, most: int) -> Tensor:
        shape = (most, *self._rest)
        size = prod(shape) * self._dtype.itemsize
        if self._device != "cpu":
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        if self.on_disk:
            os.ftruncate(self._file, size)
            room = mmap.mmap(self._file, size)
        else:
            room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # rounds walk through all of it: fewer, larger pages are faster
                with suppress(OSError):
                    room.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(room, dtype=self._dtype).view(shape)

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


def _make_file(folder: Path) -> int:
    """Open a file without a name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".bank-", suffix=".tmp", dir=folder)
    except OSError as error:
        raise ShortOfMemory(
            f"a bank on disk cannot be made in {folder}: {error.strerror}; use --out for another folder"
        ) from None
    os.unlink(path)
    return descriptor
