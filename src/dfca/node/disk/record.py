"""The inputs of one peer as a file, from which the peer of a device can be replayed elsewhere, bit by bit.

A file is a sequence of blocks: a length, JSON, and the bytes of the tensors that the JSON names. The first block holds
the peer's options, incarnation and initial save. Every other block holds an input (time, kind, values), or the digest
of the save after an input, which a replay is compared with. Recording ends at a size limit; an incomplete last block is
ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dfca.base.errors import ConfigError, DfcaError
from dfca.base.files import KINDS, tensor_bytes
from dfca.node.disk.store import TYPES
from dfca.peer.machine import Machine, drive
from dfca.peer.packing import Packer, Unpacker
from dfca.peer.peer import Peer
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Job, Ready
from dfca.peer.state import Saved

MOST_BYTES = 2**30
FORM = 1


@dataclass(frozen=True)
class Recording:
    """A file, read."""

    options: PeerOptions
    incarnation: int
    saved: Saved | None
    inputs: list[tuple[Any, ...]]  # (time, kind, *values); a finished job is its number among all jobs
    checks: dict[int, str]  # digests of saves, by the number of inputs before them
    complete: bool  # whether the recording was closed


class Recorder:
    """Writes a recording, until `most_bytes` or an error of the disk."""

    def __init__(self, path: Path, machine: Machine, saved: Saved | None, most_bytes: int = MOST_BYTES) -> None:
        self.path, self._left = path, most_bytes
        self._jobs: dict[int, tuple[int, Job]] = {}
        self._count = 0
        try:
            self._file: BinaryIO | None = path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"cannot write --record {path}: {error.strerror}; name a file in a writable folder"
            ) from None
        self._write({"form": FORM, "options": machine.options, "incarnation": machine.incarnation, "saved": saved})

    def input(self, now: float, kind: str, *values: Any) -> None:
        """Record an input."""
        if kind == "finished":
            job, result = values
            number, _ = self._jobs.pop(id(job), (-1, job))
            values = (number, result)
        self._write({"input": [now, kind, *values]})

    def output(self, ready: Ready, saved: Saved | None) -> None:
        """Number the jobs of the peer, and record a digest of its save."""
        for job in ready.work:
            self._jobs[id(job)] = (self._count, job)  # the reference keeps the id from being reused
            self._count += 1
        if saved is not None:
            self._write({"check": digest_of_save(saved)})

    def close(self) -> None:
        """End the recording as a complete one."""
        self._write({"end": True})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, value: dict[str, Any]) -> None:
        if self._file is None:
            return
        packer = Packer()
        packed = packer.pack(value)
        tensors = packer.tensors
        shapes = {name: [KINDS[str(tensor.dtype)], list(tensor.shape)] for name, tensor in tensors.items()}
        text = json.dumps({"value": packed, "tensors": shapes}, separators=(",", ":")).encode()
        size = 8 + len(text) + sum(tensor.nbytes for tensor in tensors.values())
        try:
            if size > self._left:
                raise OSError
            self._left -= size
            self._file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                self._file.write(tensor_bytes(tensor))
        except OSError:  # a recording must not stop a node
            self._file.close()
            self._file = None


def first_difference(recording: Recording, peer: Peer) -> int | None:
    """Drive a fresh peer by a recording; return after how many inputs its save first differs, None if never."""
    count = 0
    try:
        for count, _ in enumerate(drive(peer, recording.inputs), 1):
            if count in recording.checks and digest_of_save(peer.save()) != recording.checks[count]:
                return count
    except IndexError:
        return count + 1  # it asked for fewer jobs
    return None


def digest_of_save(saved: Saved) -> str:
    """Digest everything that a peer saved."""
    packer = Packer()
    digest = hashlib.sha256(json.dumps(packer.pack(saved), sort_keys=True).encode())
    for _, tensor in sorted(packer.tensors.items()):
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def read_recording(path: Path) -> Recording:
    """Read a recording. Raises ConfigError if the file is not one."""
    try:
        blocks = list(_blocks(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, DfcaError) as error:
        raise ConfigError(f"{path} is not a recording of a node: {error}") from None
    if not blocks or blocks[0].get("form") != FORM:
        raise ConfigError(f"{path} is not a recording of a node of this version (form {FORM})")
    inputs, checks, complete = list[tuple[Any, ...]](), dict[int, str](), False
    for block in blocks[1:]:
        if "input" in block:
            inputs.append(tuple(block["input"]))
        elif "check" in block:
            checks[len(inputs)] = block["check"]
        complete = "end" in block
    first = blocks[0]
    return Recording(first["options"], first["incarnation"], first["saved"], inputs, checks, complete)


def _blocks(data: bytes) -> Iterator[dict[str, Any]]:
    place = 0
    while place + 8 <= len(data):
        end = place + 8 + int.from_bytes(data[place : place + 8], "little")
        if end > len(data):
            return
        block = json.loads(data[place + 8 : end])
        tensors: dict[str, Tensor] = {}
        for name, (kind, shape) in block["tensors"].items():
            size = prod(shape) * TYPES[kind].itemsize
            if end + size > len(data):
                return
            raw = bytearray(data[end : end + size])
            tensors[name] = torch.frombuffer(raw, dtype=TYPES[kind]).view(*shape) if size else torch.empty(shape)
            end += size
        yield Unpacker(tensors).unpack(block["value"])
        place = end
