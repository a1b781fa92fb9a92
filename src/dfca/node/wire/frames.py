"""Frames, read requests and chunks: what a link carries, checked as far as the link itself can.

gRPC transports bytes (no serialisers), which are parsed here: an error is a `Refused` of one neighbour, not a broken
stream. It is the one error that received data can raise, with the reasons that metrics count.
"""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

from google.protobuf.message import DecodeError

from dfca.node.wire import wire_pb2 as pb

Reason = Literal[
    # frames and messages
    "malformed",  # not the bytes of a frame, a message or a payload
    "too_large",  # more bytes than allowed
    "kind",  # no kind of frame or message, or an unknown one
    "field",  # a field that is missing or has a value that no such message can have
    "number",  # a whole number beyond its bounds
    "length",  # a list with too many items
    # models
    "encoding",
    "compression",
    "dtype",
    "size",
    "shape",
    "digest",
    "not_finite",
    "norm",
    # the link
    "version",
    "swarm",
    "model",
    "member",
    "proof",  # an alarm of another device without its signature
    "epoch",
    "roster",
    "rate",
    "deadline",
    "unasked",
]
REASONS: tuple[str, ...] = get_args(Reason)


class Refused(Exception):
    """Received data is not accepted; reason: one of `REASONS`, text: details for a log."""

    def __init__(self, reason: Reason, text: str = "") -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason: Reason = reason
        self.text = text


PROTOCOL = 1  # the version of wire.proto; nodes of different versions do not talk
SERVICE = "dfca.wire.v1.Peer"
TALK = f"/{SERVICE}/Talk"
READ = f"/{SERVICE}/Read"
PROBE = f"/{SERVICE}/Probe"

ENCODINGS: dict[str, pb.Encoding] = {
    "float32": pb.ENCODING_FLOAT32,
    "float64": pb.ENCODING_FLOAT64,
    "bf16": pb.ENCODING_BF16,
    "int8": pb.ENCODING_INT8,
}  # what an announcement calls the encodings of `payload`
CODED = "coded"  # the payload of a codec (`core.codec`): bytes of the length that the swarm's facts declare
ANNOUNCED: dict[str, pb.Encoding] = {**ENCODINGS, CODED: pb.ENCODING_CODED}
ENCODING_NAMES: dict[int, str] = {number: name for name, number in ANNOUNCED.items()}

MOST_FRAME_BYTES = 2**18
MOST_RECORDS = 256
MOST_RECORD_BYTES = 2**14
MOST_TEXT = 256
MOST_CHUNK_BYTES = 2**20
MOST_ROWS = 4096
NAME_BYTES = 32

_Parsed = TypeVar("_Parsed", pb.Frame, pb.ReadRequest, pb.Chunk, pb.ProbeRequest, pb.ProbeReply)


def parse(data: bytes) -> pb.Frame:
    """Parse a frame and check the fields that the link itself reads. Raises Refused."""
    frame = _parse(pb.Frame(), data, MOST_FRAME_BYTES)
    kind = frame.WhichOneof("kind")
    if kind is None:
        raise Refused("kind", "a frame without content, or of a later version")
    check = _CHECKS.get(kind)
    if check is not None:
        check(getattr(frame, kind))
    return frame


def parse_read(data: bytes) -> pb.ReadRequest:
    """Parse a request to read. Raises Refused."""
    request = _parse(pb.ReadRequest(), data, 64)
    _check_name(request.name)
    return request


def parse_probe(data: bytes) -> pb.ProbeRequest:
    """Parse a probe. Raises Refused."""
    return _parse(pb.ProbeRequest(), data, 64)


def parse_probe_reply(data: bytes) -> pb.ProbeReply:
    """Parse the answer to a probe. Raises Refused."""
    return _parse(pb.ProbeReply(), data, 2**14)


def parse_chunk(data: bytes) -> pb.Chunk:
    """Parse a chunk; it holds at least one byte. Raises Refused."""
    chunk = _parse(pb.Chunk(), data, MOST_CHUNK_BYTES + 64)
    if not chunk.data:
        raise Refused("field", "an empty chunk")
    return chunk


def _parse(message: _Parsed, data: bytes, most: int) -> _Parsed:
    if len(data) > most:
        raise Refused("too_large", f"{len(data)} bytes, at most {most}")
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise Refused("malformed", "not a protobuf message of its type") from None
    return message


def _check_name(name: bytes) -> None:
    if len(name) != NAME_BYTES:
        raise Refused("field", f"a name has {NAME_BYTES} bytes, got {len(name)}")


def _check_text(*texts: str) -> None:
    if any(len(text) > MOST_TEXT for text in texts):
        raise Refused("length", f"a text with more than {MOST_TEXT} characters")


def _check_hello(hello: pb.LinkHello) -> None:
    _check_text(hello.swarm, hello.software)
    if not hello.swarm or not hello.model_size or hello.dtype not in (pb.FLOAT32, pb.FLOAT64):
        raise Refused("field", "a link hello needs a swarm, a model size and a dtype")


def _check_records(frame: pb.RosterRecords) -> None:
    if len(frame.records) > MOST_RECORDS:
        raise Refused("length", f"{len(frame.records)} roster records in a frame, at most {MOST_RECORDS}")
    if any(len(record) > MOST_RECORD_BYTES for record in frame.records):
        raise Refused("too_large", f"a roster record of more than {MOST_RECORD_BYTES} bytes")


def _check_announce(announce: pb.Announce) -> None:
    _check_name(announce.name)
    if not announce.size or not announce.number:
        raise Refused("field", "an announcement needs a number and a size")
    if announce.encoding not in ENCODING_NAMES:
        raise Refused("encoding", f"unknown encoding {announce.encoding}")
    if announce.rows > MOST_ROWS:
        raise Refused("number", f"{announce.rows} models in one payload, at most {MOST_ROWS}")


def _check_want(want: pb.Want) -> None:
    if not want.number or not want.offset < want.until:
        raise Refused("field", "a request needs a number and at least one byte")


def _check_chunk(_: pb.Chunk) -> None:
    raise Refused("malformed", "a frame with a chunk and something else")


def _check_close(close: pb.Close) -> None:
    _check_text(close.reason, close.text)
    if close.reason and close.reason not in REASONS:
        raise Refused("field", "a link was closed for an unknown reason")


_CHECKS = {
    "hello": _check_hello,
    "roster_digest": lambda frame: _check_text(frame.digest),
    "roster_records": _check_records,
    "announce": _check_announce,
    "unavailable": lambda frame: _check_text(frame.reason),
    "close": _check_close,
    "want": _check_want,
    "chunk": _check_chunk,  # `read_part` reads those
}
