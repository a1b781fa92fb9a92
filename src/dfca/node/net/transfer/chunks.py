"""Chunks of a model on the wire with few copies: a `Chunk` is a tag, a length, the bytes, and an offset."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import MOST_CHUNK_BYTES, parse_chunk
from dfca.node.wire.refused import Refused

_DATA = pb.Chunk.DESCRIPTOR.fields_by_name["data"].number << 3 | 2


def write_chunk(payload: memoryview, offset: int, size: int) -> bytes:
    """Serialise `Chunk(data=payload[offset : offset + size], offset=offset)` with a single copy of the data."""
    data = payload[offset : offset + size]
    return b"".join((bytes((_DATA,)), _varint(len(data)), data, pb.Chunk(offset=offset).SerializeToString()))


def read_chunk(message: bytes) -> tuple[memoryview, int]:
    """Return the data of a chunk, without a copy if it comes first, and its offset. Raises Refused."""
    if len(message) > MOST_CHUNK_BYTES + 64:
        raise Refused("too_large", f"a chunk of {len(message)} bytes, at most {MOST_CHUNK_BYTES}")
    if message[:1] == bytes((_DATA,)):
        length, start = _read_varint(message, 1)
        if 0 < length <= len(message) - start:
            try:
                rest = pb.Chunk.FromString(message[start + length :])
            except DecodeError:
                raise Refused("malformed", "not a chunk") from None
            if not rest.data:
                return memoryview(message)[start : start + length], rest.offset
    chunk = parse_chunk(message)
    return memoryview(chunk.data), chunk.offset


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(start, min(start + 10, len(data))):
        value |= (data[place] & 127) << shift
        if data[place] < 128:
            return value, place + 1
        shift += 7
    return -1, start
