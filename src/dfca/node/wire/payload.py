"""Models as bytes: safetensors with one model (P,) or several (m, P), exact or quantised, plain or compressed.

docs/protocol.md has the format, the encodings and the measurements. `unpack` checks everything before a number is used
and raises nothing but `Refused`, whatever the bytes are.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfca.base.files import safetensors_header, tensor_bytes
from dfca.node.wire.frames import CODED, ENCODINGS, Reason, Refused

COMPRESSED_BY_DEFAULT = ("bf16",)  # zstd saves a third; of float32 8 to 15 %, of int8 nothing (docs/protocol.md)
BLOCK = 64
FORM = "dfca-model-1"
NORM_FACTOR = 1e3  # a model is refused where its norm is beyond this many times the reference
MOST_HEADER_BYTES = 4096
LEVEL = 1
WORTH = 0.95  # a compressed file that is not at least this much smaller is sent plain

_MAGIC = b"\x28\xb5\x2f\xfd"
_FLOATS = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}
_NAMES = {"float32": "F32", "float64": "F64", "bf16": "BF16"}
_WIDTHS = {"F32": 4, "F64": 8, "BF16": 2, "I8": 1, "U8": 1}
_Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Expect:
    """What a payload must be."""

    size: int  # P
    dtype: torch.dtype = torch.float32  # of the result
    rows: int | None = None  # None: one model (P,); m: several (m, P)
    encoding: str | None = None  # as announced; None: any that dtype can hold
    digest: str | None = None  # as announced; None: not compared
    reference_norm: float | None = None  # of a sound model; None: any norm is accepted

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (self.size,) if self.rows is None else (self.rows, self.size)


class _Tensor(NamedTuple):
    """One tensor of a file: type, shape, where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


# Sending.


def name(data: _Buffer | list[_Buffer]) -> str:
    """Name a payload, whole or in pieces: SHA-256 in hex."""
    digest = hashlib.sha256()
    for piece in data if isinstance(data, list) else [data]:
        digest.update(piece)
    return digest.hexdigest()


def most_bytes(expect: Expect) -> int:
    """Compute the size of the largest valid payload; larger announcements are refused unread."""
    width = 8 if expect.dtype == torch.float64 and expect.encoding in (None, "float64") else 4
    if expect.encoding == CODED:
        width = 1
    if expect.encoding == "bf16":
        width = 2
    return 8 + MOST_HEADER_BYTES + width * math.prod(expect.shape)  # int8 is smaller, unless everything is tail


def pack(model: Tensor, encoding: str = "float32", compress: bool | None = None, tail: int = 0) -> bytes:
    """Write a model (P,), or several (m, P), into bytes: the same bytes for the same numbers.

    compress: whether to try zstd; None: if it pays with this encoding; int8 is never compressed. tail: with int8, how
    many of the last numbers of a model stay exact (P - `FlatModel.trained`). Raises Refused if numbers are not finite,
    also after rounding.
    """
    return b"".join(pieces(model, encoding, compress, tail))


def pieces(model: Tensor, encoding: str = "float32", compress: bool | None = None, tail: int = 0) -> list[_Buffer]:
    """Return what `pack` joins. Pieces may be views of the model: they can be digested while they are copied."""
    if encoding == CODED and model.dtype == torch.uint8 and model.dim() == 1:
        return _file({"model": ("U8", tuple(model.shape), _bytes_of(model))}, encoding)
    if model.dim() not in (1, 2) or not model.is_floating_point() or not model.numel():
        raise Refused("shape", f"a model is (P,) or (m, P) of floats, got {tuple(model.shape)} of {model.dtype}")
    if encoding not in ENCODINGS:
        raise Refused("encoding", f"unknown encoding {encoding!r:.40}")
    if not 0 <= tail <= model.shape[-1]:
        raise Refused("size", f"tail must be within the {model.shape[-1]} numbers of a model, got {tail}")
    model = model.detach().cpu().contiguous()
    if encoding == "int8":
        return _file(_quantise(model, tail), encoding)
    floats = model.to(_FLOATS[encoding])
    _check_norms(floats, None)
    compress = encoding in COMPRESSED_BY_DEFAULT if compress is None else compress
    plain = {"model": (_NAMES[encoding], tuple(floats.shape), _bytes_of(floats))}
    smaller = _smaller(floats, encoding) if compress else None
    return _file(plain, encoding) if smaller is None else [smaller]


def _smaller(floats: Tensor, encoding: str) -> bytes | None:
    """Compress floats in byte planes; None if it does not pay."""
    import zstandard

    width = floats.element_size()
    values = _bytes_of(floats).reshape(-1, width)
    planes = np.empty((width, len(values)), np.uint8)
    for place in range(width):
        planes[place] = values[:, place]
    start, _ = _file({"planes": ("U8", (width, *floats.shape), planes.reshape(-1))}, encoding)
    size = len(start) + planes.size
    stream = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=size)
    blocks = [stream.compress(start), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    for plane in planes:  # blocks of its own: exponents and digits have nothing in common
        blocks += [stream.compress(plane.data), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    whole = b"".join([*blocks, stream.flush()])
    return whole if len(whole) <= WORTH * size else None


def _quantise(model: Tensor, tail: int) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    rows = model.reshape(-1, model.shape[-1]).to(torch.float32)
    body, exact = rows[:, : rows.shape[1] - tail], rows[:, rows.shape[1] - tail :].contiguous()
    blocks = -(-body.shape[1] // BLOCK)
    padded = torch.nn.functional.pad(body, (0, -body.shape[1] % BLOCK)).reshape(len(rows), blocks, BLOCK)
    scales = padded.abs().amax(dim=2) / 127
    _check_norms(torch.cat([scales, exact], dim=1), None)
    units = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(2)
    q = (padded / units).round_().clamp_(-127, 127).to(torch.int8)
    q = q.reshape(len(rows), blocks * BLOCK)[:, : body.shape[1]]
    lead = tuple(model.shape[:-1])
    tensors = {"model": ("I8", q.contiguous()), "scales": ("F32", scales), "tail": ("F32", exact)}
    return {key: (dtype, (*lead, tensor.shape[1]), _bytes_of(tensor)) for key, (dtype, tensor) in tensors.items()}


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor_bytes(tensor), np.uint8)


def _file(tensors: dict[str, tuple[str, tuple[int, ...], np.ndarray]], encoding: str) -> list[_Buffer]:
    """Return a safetensors file as header and data, the data aligned to 64 bytes."""
    layout = [(key, dtype, shape, len(data)) for key, (dtype, shape, data) in tensors.items()]
    header = safetensors_header(layout, {"form": FORM, "encoding": encoding}, align=64)
    return [header, *(data.data for _, _, data in tensors.values())]


# Receiving.


def unpack(data: _Buffer | np.ndarray, expect: Expect) -> Tensor:
    """Read a received model (P,), or several (m, P); the result may share the memory of `data` if that is an array.

    Size, digest, type, shape, finiteness and norm are checked. Raises Refused, or OSError if a file cannot be read.
    """
    most = most_bytes(expect)
    owned = isinstance(data, np.ndarray)
    buffer = np.frombuffer(data, np.uint8)
    if len(buffer) > most:
        raise Refused("too_large", f"a payload of {len(buffer)} bytes, at most {most}")
    if expect.digest is not None and name(buffer.data) != expect.digest:
        raise Refused("digest", "the bytes are not those that were announced")
    if bytes(buffer[:4]) == _MAGIC:
        buffer, owned = _decompressed(buffer, most), False
    tensors, encoding, start = _header(buffer)
    _check_encoding(encoding, expect)
    parts = {key: (tensor, buffer[start + tensor.begin : start + tensor.end]) for key, tensor in tensors.items()}
    if encoding == CODED:
        _check_parts(parts, {"model": ("U8", expect.shape)})
        return torch.from_numpy(parts["model"][1].copy())
    if encoding == "int8":
        model = _dequantised(parts, expect)
    elif "planes" in parts:
        model = _unplaned(parts, encoding, expect)
    else:
        _check_parts(parts, {"model": (_NAMES[encoding], expect.shape)})
        model = _floats(parts["model"][1], encoding, copy=not owned).view(expect.shape)
    model = model.to(expect.dtype)
    _check_norms(model, expect.reference_norm)
    return model


def _decompressed(buffer: np.ndarray, most: int) -> np.ndarray:
    import zstandard

    try:
        size = zstandard.get_frame_parameters(buffer.data).content_size
        if size > most:  # an unknown size is a very large number
            raise Refused("too_large", f"a payload of more than {most} bytes once decompressed")
        plain = zstandard.ZstdDecompressor().decompress(buffer.data, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError:
        raise Refused("compression", "not one whole zstd frame") from None
    return np.frombuffer(plain, np.uint8)


def _header(buffer: np.ndarray) -> tuple[dict[str, _Tensor], str, int]:
    """Read a header: the tensors, the encoding, where the data begins; the tensors cover the data without gaps."""
    length = int.from_bytes(bytes(buffer[:8]), "little")
    start = 8 + length
    if len(buffer) < 8 or length > MOST_HEADER_BYTES or start > len(buffer):
        raise Refused("malformed", "not a safetensors file")
    try:
        header = json.loads(bytes(buffer[8:start]))
    except (ValueError, RecursionError):
        raise Refused("malformed", "a header that is not JSON") from None
    facts = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(facts, dict) or facts.get("form") != FORM:
        raise Refused("malformed", f"not a model of the form {FORM}")
    tensors = {key: _tensor(value) for key, value in header.items()}
    at = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != at or tensor.end != at + math.prod(tensor.shape) * _WIDTHS[tensor.dtype]:
            raise Refused("malformed", "tensors that overlap, leave gaps or have another size than their shape")
        at = tensor.end
    if at != len(buffer) - start:
        raise Refused("malformed", "more or fewer bytes than the header says")
    return tensors, str(facts.get("encoding")), start


def _tensor(value: Any) -> _Tensor:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise Refused("malformed", "a tensor without type, shape or place")
    dtype, shape, place = value["dtype"], value["shape"], value["data_offsets"]
    if not _are_sizes(shape, 3) or not _are_sizes(place, 2) or len(place) != 2:
        raise Refused("malformed", "a tensor whose shape or place is no list of sizes")
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise Refused("dtype", f"a tensor of an unknown type: {dtype!r:.20}")
    return _Tensor(dtype, tuple(shape), *place)


def _are_sizes(values: Any, most: int) -> bool:
    if not isinstance(values, list) or len(values) > most:
        return False
    return all(type(value) is int and 0 <= value < 2**48 for value in values)


def _check_encoding(encoding: str, expect: Expect) -> None:
    known = (CODED,) if expect.dtype == torch.uint8 else ENCODINGS
    if encoding not in known or expect.encoding not in (None, encoding):
        raise Refused("encoding", f"{encoding!r:.20} instead of {expect.encoding or 'a known encoding'}")
    if encoding == "float64" and expect.dtype != torch.float64:
        raise Refused("dtype", f"float64 numbers for a bank of {expect.dtype}")


_Parts = dict[str, tuple[_Tensor, np.ndarray]]


def _check_parts(parts: _Parts, wanted: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Check that a file holds exactly these tensors, by name, type and shape."""
    if set(parts) != set(wanted):
        raise Refused("field", f"tensors {sorted(wanted)} are needed, got {len(parts)} others")
    for key, (dtype, shape) in wanted.items():
        tensor = parts[key][0]
        if tensor.dtype != dtype:
            raise Refused("dtype", f"{key} of {tensor.dtype}, expected {dtype}")
        if tensor.shape != shape:
            reason: Reason = "size" if tensor.shape[-1:] != shape[-1:] else "shape"
            raise Refused(reason, f"{key} with shape {tensor.shape}, expected {shape}")


def _floats(data: np.ndarray, encoding: str, copy: bool = True) -> Tensor:
    """View bytes as floats; copy them if they are not ours or not aligned."""
    dtype = _FLOATS[encoding]
    if not len(data):
        return torch.empty(0, dtype=dtype)
    if copy or data.ctypes.data % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype)


def _unplaned(parts: _Parts, encoding: str, expect: Expect) -> Tensor:
    width = _FLOATS[encoding].itemsize
    _check_parts(parts, {"planes": ("U8", (width, *expect.shape))})
    planes = parts["planes"][1].reshape(width, -1)
    values = np.empty((planes.shape[1], width), np.uint8)
    for place in range(width):
        values[:, place] = planes[place]
    return _floats(values.reshape(-1), encoding, copy=False).view(expect.shape)


def _dequantised(parts: _Parts, expect: Expect) -> Tensor:
    """Compute x = s q and append the exact tail."""
    tail = parts["tail"][0].shape[-1] if "tail" in parts and parts["tail"][0].shape else 0
    body, lead = expect.size - tail, expect.shape[:-1]
    blocks = -(-body // BLOCK)
    _check_parts(
        parts, {"model": ("I8", (*lead, body)), "scales": ("F32", (*lead, blocks)), "tail": ("F32", (*lead, tail))}
    )
    rows = expect.rows if expect.rows is not None else 1
    q = torch.from_numpy(parts["model"][1].copy()).view(torch.int8).view(rows, body)
    scales = _floats(parts["scales"][1], "float32").view(rows, blocks)
    floats = torch.zeros(rows, blocks * BLOCK)
    floats[:, :body] = q
    floats.view(rows, blocks, BLOCK).mul_(scales.unsqueeze(2))
    exact = _floats(parts["tail"][1], "float32").view(rows, tail)
    return torch.cat([floats[:, :body], exact], dim=1).view(expect.shape)


def _check_norms(models: Tensor, reference: float | None) -> None:
    """Check that all numbers are finite and every model's norm is within bounds, in one pass for a sound model."""
    if not models.numel():
        return
    rows = models.reshape(-1, models.shape[-1])
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32 if rows.dtype == torch.bfloat16 else None)
    if not bool(torch.isfinite(norms).all()):  # not finite, or the square overflows
        if not bool(torch.isfinite(rows).all()):
            raise Refused("not_finite", "a model with numbers that are not finite")
        norms = torch.linalg.vector_norm(rows.double(), dim=1)
    if reference is not None and float(norms.max()) > NORM_FACTOR * max(reference, 1.0):
        raise Refused(
            "norm", f"a model of norm {float(norms.max()):.3g}, {NORM_FACTOR:g} times the own {reference:.3g}"
        )
