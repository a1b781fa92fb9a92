"""The wire: every message of peers survives it bit by bit; whatever else comes is refused with a reason."""

from __future__ import annotations

import dataclasses
import re
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dfca.core.rules.election import Tally
from dfca.core.rules.merging import EXCESSES, Merge, Poll, Survey
from dfca.core.rules.relay import Offer
from dfca.core.state import Message
from dfca.node.net.transfer.chunks import write_chunk
from dfca.node.wire import codec, frames
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import REASONS, Refused
from dfca.peer.records import messages
from dfca.peer.records.lineage import Entry
from dfca.peer.records.messages import (
    Alarm,
    BankRequest,
    Bid,
    Count,
    Curves,
    Declined,
    Hello,
    Key,
    Report,
    Served,
    Turn,
    Update,
    Votes,
)

KEY = Key(1, 2, -3, 4, 5)
TYPES = {kind.__name__: kind for kind in messages.KINDS}

# Any message, from the annotations of the records: a field that the codec forgets is a difference.


def any_value(hint: Any, descriptor: Descriptor, name: str) -> st.SearchStrategy[Any]:
    """Draw a value of a field, of any size that the wire has room for."""
    if hint is Tensor:
        shape = (2, 3) if name == "bank" else (6,)
        return st.integers(0, 99).map(lambda start: torch.arange(start, start + 6.0).view(shape))
    field = descriptor.fields_by_name[name]
    if get_origin(hint) in (UnionType, Union):
        (inner,) = (part for part in get_args(hint) if part is not NoneType)
        if get_origin(inner) is tuple:
            return st.none() | any_value(inner, field.message_type, "values")
        return st.none() | any_value(inner, descriptor, name)
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is not Ellipsis:
            names = [part.name for part in field.message_type.fields]
            parts = zip(items, names, strict=True)
            return st.tuples(*(any_value(part, field.message_type, key) for part, key in parts))
        return st.lists(any_value(items[0], descriptor, name), min_size=name == "slots", max_size=3).map(tuple)
    if field.message_type is not None:
        return any_record(hint, field.message_type)
    if hint is int:
        return any_number(field)
    if hint is bytes:
        return st.binary(max_size=messages.MOST_PROOF)
    return st.booleans() if hint is bool else st.floats(0, allow_nan=False)


def any_number(field: FieldDescriptor) -> st.SearchStrategy[int]:
    if field.name in ("slots", "slot", "cluster", "empty"):
        return st.integers(0, 4095)
    if field.name == "followers":
        return st.integers(0, 2**20)
    if field.type == FieldDescriptor.TYPE_SFIXED64:
        return st.integers(-(2**63), 2**63 - 1)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.integers(-(2**127), 2**127 - 1)
    return st.integers(1, 2**53)


def any_record(kind: Any, descriptor: Descriptor) -> st.SearchStrategy[Any]:
    if get_origin(kind) is tuple:
        names = [field.name for field in descriptor.fields]
        return st.tuples(*(any_value(h, descriptor, n) for h, n in zip(get_args(kind), names, strict=True)))
    fields = {name: any_value(hint, descriptor, name) for name, hint in get_type_hints(kind).items()}
    if kind is Tally:  # all lists are as long as the first
        return st.integers(0, 3).flatmap(lambda c: st.builds(Tally, **{n: _cut(s, c, n) for n, s in fields.items()}))
    if kind is Key:
        fields |= {"attempt": st.integers(0, 2**32), "decided": st.integers(0, 2**14)}
    if kind is Turn:
        accepted = st.builds(
            Turn, fields["candidate"].filter(lambda candidate: candidate is not None), st.just(True), fields["slot"]
        )
        return accepted | st.builds(Turn, fields["candidate"], st.just(False), st.just(-1))
    if kind is messages.Call:
        lost = st.lists(st.integers(0, 9), max_size=3, unique=True).map(lambda clients: tuple(sorted(clients)))
        return st.builds(messages.Call, lost, st.integers(10, 4096), lost, st.booleans())
    if kind is Merge:
        slots = st.integers(0, 4095)
        return st.builds(Merge, slots, slots, st.floats(0, 1), st.floats(allow_nan=False, allow_infinity=False))
    if kind in (Poll, Survey):
        return st.integers(1, 3).flatmap(partial(any_sums, kind))
    if kind is messages.Question:
        pairs = st.lists(st.tuples(st.integers(0, 2**20), st.integers(-1, 99)), max_size=3)
        columns = pairs.map(lambda rows: (tuple(a for a, _ in rows), tuple(b for _, b in rows)))
        return st.builds(lambda key, asked: messages.Question(key, *asked), fields["key"], columns)
    if kind is Count:
        fields |= {"size": st.integers(2**19, 2**20), "ready": st.integers(0, 2**19)}
    if kind is messages.Open:
        fields["voters"] = st.integers(0, 2**20)
    if kind is messages.Curves:
        loss = st.floats(-messages.MOST_LOSS, messages.MOST_LOSS)
        rows = st.integers(0, 3).flatmap(lambda n: st.lists(loss, min_size=9 * n, max_size=9 * n).map(tuple))
        fields |= {"degree": st.integers(-1, 2**20), "first": st.integers(0, 8), "values": rows}
    if kind is Message:
        fields["offer"] = any_record(Offer, pb.Offer.DESCRIPTOR)
    return st.builds(kind, **fields)


def any_sums(kind: type, k: int) -> st.SearchStrategy[Any]:
    def of(low: int, high: int, items: int = k) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(st.integers(low, high), min_size=items, max_size=items).map(tuple)

    slots = st.lists(st.integers(0, 4095), min_size=k, max_size=k, unique=True).map(lambda drawn: tuple(sorted(drawn)))
    large = partial(of, -(2**127), 2**127 - 1)
    if kind is Poll:
        return st.builds(Poll, slots, of(9, 2**20), of(0, 2**53), of(0, 9), of(0, 9), large(k * k))
    return st.builds(Survey, slots, of(0, 2**20), large(EXCESSES * k), large())


def _cut(values: st.SearchStrategy[Any], count: int, name: str) -> st.SearchStrategy[Any]:
    if get_origin(get_type_hints(Tally)[name]) is not tuple:
        return values
    item = any_number(pb.Tally.DESCRIPTOR.fields_by_name[name])
    return st.lists(item, min_size=count, max_size=count).map(tuple)


def bits(value: Any) -> Any:
    """Turn a message into something that is equal only bit by bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if dataclasses.is_dataclass(value):
        return type(value), [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return type(value), [bits(item) for item in value]
    return type(value), struct.pack("d", value) if type(value) is float else value


def there_and_back(message: Any) -> Any:
    data, model = codec.encode(message)
    decoded = codec.decode(data)
    assert decoded.needs_model == (model is not None)
    assert decoded.kind is type(message)
    return decoded.message(model)


@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_message_survives_bit_by_bit(kind: type, data: st.DataObject) -> None:
    descriptor = next(
        field.message_type for field in pb.PeerMessage.DESCRIPTOR.fields if field.message_type.name == kind.__name__
    )
    message = data.draw(any_record(kind, descriptor))
    assert messages.well_formed(message), message
    assert bits(there_and_back(message)) == bits(message)


@pytest.mark.parametrize(
    "message",
    [
        BankRequest(None),
        BankRequest(()),
        Declined(0),
        Declined(None),
        Report(3, None),
        Bid(KEY, 0, -0.0, None),
        Bid(KEY, 0, float("-inf"), 0),
        Count(KEY, 1, 0, (Turn(None, False), Turn(0, True, 0))),
        Update(Message(-1, 0, -1, 0, torch.zeros(2, dtype=torch.float64), Offer(-1, -1, -2)), 1),
        Votes(KEY, 0, Tally(0, 0, 0, *[()] * 10)),
        Curves(3, -1, 0, 0, ()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_none_zero_and_minus_one_are_kept_apart(message: Any) -> None:
    assert bits(there_and_back(message)) == bits(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"values": (1.0,) * 8},
        {"values": (1e31,) * 9},
        {"values": (float("-inf"),) * 9},
        {"first": 11},
        {"first": 3, "values": (1.0,) * 81},
        {"cluster": -2},
        {"cluster": 4096},
        {"degree": -2},
        {"degree": 2**20 + 1},
    ],
)
def test_curves_have_bounds(changes: dict[str, Any]) -> None:
    fields = {"due": 3, "cluster": 0, "degree": 1, "first": 10, "values": (1.0,) * 9}
    assert messages.well_formed(Curves(**fields))  # type: ignore[arg-type]
    wrong = fields | changes
    with pytest.raises(Refused):
        codec.encode(Curves(**wrong))  # type: ignore[arg-type]
    sent = pb.PeerMessage(curves=pb.Curves(**wrong))
    assert refusal(codec.decode, sent.SerializeToString()) == "field"


def test_a_field_that_wire_proto_lacks_is_an_error() -> None:
    class Longer(NamedTuple):
        incarnation: int
        round: int
        clusters: int
        lineage: tuple[Entry, ...] = ()
        added: int = 0

    with pytest.raises(TypeError, match=r"differ in Hello: added; run `make proto`"):
        codec._Record(Longer, {**get_type_hints(Hello), "added": int}, pb.Hello.DESCRIPTOR)


# Refusals.


def refusal(call: Any, *given: Any) -> str:
    with pytest.raises(Refused) as refused:
        call(*given)
    assert refused.value.reason in REASONS
    return refused.value.reason


def entry(slots: tuple[int, ...] = (0,)) -> pb.Entry:
    return pb.Entry(slots=slots)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.PeerMessage(), "kind"),
        (pb.PeerMessage(hello=pb.Hello(round=-1)), "field"),
        (pb.PeerMessage(hello=pb.Hello(round=2**53 + 1)), "number"),
        (pb.PeerMessage(hello=pb.Hello(lineage=[entry()] * 1001)), "length"),
        (pb.PeerMessage(hello=pb.Hello(lineage=[entry(())])), "field"),
        (pb.PeerMessage(hello=pb.Hello(lineage=[entry((4096,))])), "field"),
        (pb.PeerMessage(hello=pb.Hello(lineage=[entry((0,) * 4097)])), "length"),
        (pb.PeerMessage(update=pb.Update(parts=1)), "field"),
        (pb.PeerMessage(update=pb.Update(parts=1, message=pb.Message(), age_s=float("nan"))), "number"),
        (pb.PeerMessage(update=pb.Update(parts=1, message=pb.Message(), age_s=-1.0)), "field"),
        (pb.PeerMessage(copy=pb.Copy(message=pb.Message())), "field"),
        (pb.PeerMessage(votes=pb.Votes(key=pb.Key(), tally=pb.Tally(totals=[b"\1"]))), "field"),
        (pb.PeerMessage(votes=pb.Votes(key=pb.Key(), tally=pb.Tally(totals=[b"\1" * 17]))), "number"),
        (pb.PeerMessage(bid=pb.Bid(key=pb.Key(), value=float("nan"))), "number"),
        (pb.PeerMessage(stand=pb.Stand()), "field"),
        (pb.PeerMessage(open=pb.Open(key=pb.Key(), log=[pb.Turn()] * (2**14 + 1))), "length"),
    ],
    ids=str,
)
def test_impossible_messages_are_refused(message: Any, reason: str) -> None:
    assert refusal(codec.decode, message.SerializeToString()) == reason


def test_bytes_that_are_no_message() -> None:
    assert refusal(codec.decode, b"\xff\xff") == "malformed"
    assert refusal(codec.decode, bytes(codec.MOST_BYTES + 1)) == "too_large"
    assert refusal(codec.decode, b"\x0b" * 1000) == "malformed"  # groups within groups
    assert refusal(codec.decode, b"") == "kind"


def test_the_largest_message_of_empty_entries_is_refused_at_once() -> None:
    """Two bytes on the wire would be a record in memory: the count is checked before any is made."""
    many = pb.PeerMessage(hello=pb.Hello(lineage=[pb.Entry()] * 100_000)).SerializeToString()
    begin = time.process_time()
    assert refusal(codec.decode, many) == "length"
    assert time.process_time() - begin < 0.5


def test_encode_keeps_the_bounds_of_decode() -> None:
    assert refusal(codec.encode, Alarm(2**63, 0, True)) == "number"
    assert refusal(codec.encode, Hello(0, 2**53 + 1, 0)) == "number"
    assert refusal(codec.encode, Votes(KEY, 0, Tally(0, 0, 0, *[(2**127,)] * 10))) == "number"
    assert refusal(codec.encode, BankRequest((0,) * 4097)) == "field"
    assert refusal(codec.encode, Bid(KEY, 0, 10**400, None)) == "number"
    wide = tuple(Entry(1, 2, 3, 4, 5, tuple(range(4096))) for _ in range(40))
    assert refusal(codec.encode, Hello(0, 0, 0, wide)) == "too_large"
    assert refusal(codec.encode, "no message") == "field"


def test_a_model_of_another_shape_is_refused() -> None:
    served = codec.decode(codec.encode(Served(1, torch.zeros(2, 3)))[0])
    assert refusal(served.message, torch.zeros(3)) == "shape"
    assert refusal(served.message, None) == "shape"
    hello = codec.decode(codec.encode(Hello(0, 0, 0))[0])
    assert refusal(hello.message, torch.zeros(3)) == "shape"


def test_announcements_must_fit_their_messages() -> None:
    model = torch.zeros(3)
    update = codec.decode(codec.encode(Update(Message(0, 0, 0, 0, model), 1))[0])
    served = codec.decode(codec.encode(Served(1, torch.zeros(2, 3)))[0])
    candidate = codec.decode(codec.encode(messages.Candidate(KEY, 0, 0, 0.0, model))[0])
    codec.check_announced(update, 0, "int8")
    codec.check_announced(served, 2, "bf16")
    codec.check_announced(candidate, 0, "float32")
    assert refusal(codec.check_announced, update, 4096, "float32") == "shape"
    assert refusal(codec.check_announced, served, 0, "float32") == "shape"
    assert refusal(codec.check_announced, candidate, 0, "bf16") == "encoding"
    assert refusal(codec.check_announced, codec.decode(codec.encode(Declined(1))[0]), 0, "float32") == "unasked"


def test_unknown_fields_are_ignored() -> None:
    data, _ = codec.encode(Declined(3))
    assert codec.decode(data + b"\xf8\x7f\x01").message() == Declined(3)


# Frames.

HELLO = pb.LinkHello(protocol=1, swarm="s", model_size=10, dtype=pb.FLOAT32, epoch=7, software="dfca")
ANNOUNCE = {"number": 1, "message": b"m", "name": bytes(32), "size": 5, "encoding": pb.ENCODING_FLOAT32}


@pytest.mark.parametrize(
    "frame",
    [
        pb.Frame(hello=HELLO),
        pb.Frame(heartbeat=pb.Heartbeat(number=1)),
        pb.Frame(roster_digest=pb.RosterDigest(digest="d")),
        pb.Frame(roster_records=pb.RosterRecords(records=[b"r"])),
        pb.Frame(message=b"m"),
        pb.Frame(announce=pb.Announce(**ANNOUNCE)),
        pb.Frame(withdraw=pb.Withdraw(number=1)),
        pb.Frame(unavailable=pb.Unavailable(number=1, reason="size")),
        pb.Frame(received=pb.Received(number=1)),
        pb.Frame(close=pb.Close(reason="version", text="1 is not 2")),
    ],
    ids=lambda frame: frame.WhichOneof("kind"),
)
def test_frames_are_parsed(frame: Any) -> None:
    assert frames.parse(frame.SerializeToString()) == frame


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (pb.Frame(), "kind"),
        (pb.Frame(hello=pb.LinkHello(protocol=1)), "field"),
        (pb.Frame(hello=pb.LinkHello(swarm="s" * 300, model_size=1, dtype=1)), "length"),
        (pb.Frame(announce=pb.Announce(**{**ANNOUNCE, "name": bytes(31)})), "field"),
        (pb.Frame(announce=pb.Announce(**{**ANNOUNCE, "size": 0})), "field"),
        (pb.Frame(announce=pb.Announce(**{**ANNOUNCE, "encoding": 9})), "encoding"),
        (pb.Frame(announce=pb.Announce(**{**ANNOUNCE, "rows": 4097})), "number"),
        (pb.Frame(roster_records=pb.RosterRecords(records=[b""] * 257)), "length"),
        (pb.Frame(roster_records=pb.RosterRecords(records=[bytes(2**14 + 1)])), "too_large"),
        (pb.Frame(message=bytes(2**18)), "too_large"),
        (pb.Frame(close=pb.Close(reason="because")), "field"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.WhichOneof("kind"),
)
def test_frames_are_refused(frame: Any, reason: str) -> None:
    assert refusal(frames.parse, frame.SerializeToString()) == reason


def test_every_encoding_can_be_announced() -> None:
    assert set(frames.ANNOUNCED.values()) == set(pb.Encoding.values()) - {pb.ENCODING_UNSPECIFIED}


def test_chunks_make_up_the_payload() -> None:
    whole = bytes(range(256)) * 10
    got, at = b"", 0
    while at < len(whole):
        chunk = frames.parse_chunk(write_chunk(memoryview(whole), at, 1000))
        assert chunk.offset == at
        got, at = got + chunk.data, at + len(chunk.data)
    assert got == whole
    assert refusal(frames.parse_chunk, write_chunk(memoryview(whole), len(whole), 1000)) == "field"
    assert refusal(frames.parse_chunk, pb.Chunk(data=bytes(2**21)).SerializeToString()) == "too_large"
    assert refusal(frames.parse_read, pb.ReadRequest(name=b"n").SerializeToString()) == "field"
    assert frames.parse_read(pb.ReadRequest(name=bytes(32), offset=9).SerializeToString()).offset == 9


def test_what_is_generated_is_what_make_proto_makes(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    source = Path(codec.__file__).parent
    root = source.parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I", root, f"--python_out={tmp_path}"]
    command += [f"--pyi_out={tmp_path}", source / "wire.proto"]
    subprocess.run(command, check=True)
    for name in ("wire_pb2.py", "wire_pb2.pyi"):
        assert (tmp_path / "dfca/node/wire" / name).read_text() == (source / name).read_text(), name


def test_the_page_names_every_frame_message_and_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    quoted = set(re.findall(r"`(\w+)`", page))
    assert set(REASONS) <= quoted
    assert set(TYPES) <= quoted
    assert {field.name for field in pb.Frame.DESCRIPTOR.fields} <= quoted
    assert {field.name for field in pb.Announce.DESCRIPTOR.fields} <= quoted
    assert f"version: **{frames.PROTOCOL}**" in page
