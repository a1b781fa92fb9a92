"""Chunks of a model on the wire with few copies: a `Chunk` is a tag, a length, the bytes, an offset and a number."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import MOST_CHUNK_BYTES, Refused, parse_chunk

_DATA = bytes((pb.Chunk.DESCRIPTOR.fields_by_name["data"].number << 3 | 2,))
_FRAME = bytes((pb.Frame.DESCRIPTOR.fields_by_name["chunk"].number << 3 | 2,))


def write_chunk(payload: memoryview, offset: int, size: int) -> bytes:
    """Serialise `Chunk(data=payload[offset : offset + size], offset=offset)` with a single copy of the data."""
    return b"".join(_pieces(payload, offset, size, 0))


def write_part(payload: memoryview, offset: int, size: int, number: int) -> bytes:
    """Serialise a `Frame` with such a chunk of an announcement."""
    pieces = _pieces(payload, offset, size, number)
    return b"".join((_FRAME, _varint(sum(map(len, pieces))), *pieces))


def is_part(message: bytes) -> bool:
    """Return whether a frame holds a chunk."""
    return message[:1] == _FRAME


def read_part(message: bytes) -> tuple[memoryview, int, int]:
    """Return data, offset and number of a frame with a chunk. Raises Refused."""
    length, start = _read_varint(message, 1)
    if length != len(message) - start:
        raise Refused("malformed", "a frame with a chunk and something else")
    return _read(memoryview(message)[start:])


def read_chunk(message: bytes) -> tuple[memoryview, int]:
    """Return the data of a chunk, without a copy if it comes first, and its offset. Raises Refused."""
    data, offset, _ = _read(memoryview(message))
    return data, offset


def _pieces(payload: memoryview, offset: int, size: int, number: int) -> tuple[bytes | memoryview, ...]:
    data = payload[offset : offset + size]
    return _DATA, _varint(len(data)), data, pb.Chunk(offset=offset, number=number).SerializeToString()


def _read(message: memoryview) -> tuple[memoryview, int, int]:
    if len(message) > MOST_CHUNK_BYTES + 64:
        raise Refused("too_large", f"a chunk of {len(message)} bytes, at most {MOST_CHUNK_BYTES}")
    if message[:1] == _DATA:
        length, start = _read_varint(message, 1)
        if 0 < length <= len(message) - start:
            try:
                rest = pb.Chunk.FromString(bytes(message[start + length :]))
            except DecodeError:
                raise Refused("malformed", "not a chunk") from None
            if not rest.data:
                return message[start : start + length], rest.offset, rest.number
    chunk = parse_chunk(bytes(message))
    return memoryview(chunk.data), chunk.offset, chunk.number


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _read_varint(data: bytes | memoryview, start: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(start, min(start + 10, len(data))):
        value |= (data[place] & 127) << shift
        if data[place] < 128:
            return value, place + 1
        shift += 7
    return -1, start
