"""Peer messages <-> protobuf: the records of `peer.records.messages`, field by field, by name and type.

A record and the protobuf message of the same name have the same fields, except for models; otherwise importing this
module fails. `decode` reads what `encode` writes and raises `Refused` for everything else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from torch import Tensor

from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import Refused
from dfca.peer.records import messages
from dfca.peer.records.lineage import MOST_ENTRIES
from dfca.peer.records.messages import LARGE, well_formed

MOST_BYTES = 2**18 - 2**10  # of one message without its model: it fits into a frame
MOST_COUNT = 2**53  # the largest whole number that counts something
MOST_SUM_BYTES = 16
MOST_ITEMS = 4096
MOST_OF = {"lineage": MOST_ENTRIES, "base": MOST_ENTRIES, "log": 2**14}  # by field; `MOST_ITEMS` for other lists
EXACT = (messages.Candidate, messages.Centre)  # never rounded: an election digests their models
_NO_MODEL, _NO_BANK = torch.empty(0), torch.empty(0, 0)


class Decoded(NamedTuple):
    """A received message, still without its model if it needs one."""

    partial: Any
    needs_model: bool

    @property
    def kind(self) -> type:
        """The type of the message."""
        return type(self.partial)

    def message(self, model: Tensor | None = None) -> Any:
        """Return the message with its model (P,), or (m, P) for `Served`.

        Raises Refused if the model is missing, not needed, or of another shape.
        """
        if (model is not None) != self.needs_model:
            raise Refused("shape", "a model is missing" if self.needs_model else "a model that does not belong here")
        if model is None:
            return self.partial
        if model.dim() != (2 if isinstance(self.partial, messages.Served) else 1):
            raise Refused("shape", f"a model of shape {tuple(model.shape)} for {self.kind.__name__}")
        return _with_model(self.partial, model)


def encode(message: Any) -> tuple[bytes, Tensor | None]:
    """Serialise a message: the content of a frame, and the model to announce with it, if any.

    Raises Refused for anything but a message within the bounds of `decode`.
    """
    return to_proto(message).SerializeToString(), model_of(message)


def to_proto(message: Any) -> pb.PeerMessage:
    """Convert a message without its model to protobuf. Raises Refused as `encode` does."""
    if not well_formed(message):
        raise Refused("field", f"not a message of peers: {type(message).__name__}")
    proto = pb.PeerMessage()
    name = _kind_of(type(message))
    target = getattr(proto, name)
    target.SetInParent()
    _KINDS[name].write(message, target)
    if (size := proto.ByteSize()) > MOST_BYTES:
        raise Refused("too_large", f"{type(message).__name__} of {size} bytes, at most {MOST_BYTES}")
    return proto


def decode(data: bytes) -> Decoded:
    """Read a message; its model, if any, comes later. Raises nothing but Refused, whatever the bytes are."""
    if len(data) > MOST_BYTES:
        raise Refused("too_large", f"a message of {len(data)} bytes, at most {MOST_BYTES}")
    try:
        proto = pb.PeerMessage.FromString(data)
    except DecodeError:
        raise Refused("malformed", "not a message of peers") from None
    name = proto.WhichOneof("kind")
    if name is None:
        raise Refused("kind", "a message without content, or of a later version")
    message = _KINDS[name].read(getattr(proto, name))
    if not well_formed(message):
        raise Refused("field", f"{type(message).__name__} with a value that it cannot have")
    return Decoded(message, model_of(message) is not None)


def check_announced(decoded: Decoded, rows: int, encoding: str) -> None:
    """Check that an announced model fits its message: needed, of that shape, exact if required. Raises Refused."""
    if not decoded.needs_model:
        raise Refused("unasked", f"a model for {decoded.kind.__name__}, which has none")
    if (rows > 0) != (decoded.kind is messages.Served):
        raise Refused("shape", f"{rows} models for {decoded.kind.__name__}")
    if decoded.kind in EXACT and encoding not in ("float32", "float64"):
        raise Refused("encoding", f"{decoded.kind.__name__} with a model rounded to {encoding}")


# Models inside messages.


def model_of(message: Any) -> Tensor | None:
    """Return the model (P,) or models (m, P) of a message, or None."""
    if not isinstance(message, LARGE):
        return None
    inner = getattr(message, "message", message)
    model: Tensor | None = inner.bank if isinstance(inner, messages.Served) else getattr(inner, "model", None)
    return model


def _with_model(message: Any, model: Tensor) -> Any:
    if isinstance(message, messages.Served):
        return message._replace(bank=model)
    if hasattr(message, "model"):
        return message._replace(model=model)
    return message._replace(message=dataclasses.replace(message.message, model=model))


# Values, by their types.


class _Field(NamedTuple):
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


class _Record:
    """A record (or a plain pair) and the protobuf message of the same fields."""

    def __init__(self, make: Callable[..., Any], hints: dict[str, Any], descriptor: Descriptor) -> None:
        self._make = make
        self._models = {name: _NO_BANK if name == "bank" else _NO_MODEL for name in hints if hints[name] is Tensor}
        wanted = {name: hint for name, hint in hints.items() if hint is not Tensor}
        fields = {field.name: field for field in descriptor.fields}
        if set(wanted) != set(fields):
            odd = ", ".join(sorted(set(wanted) ^ set(fields)))
            raise TypeError(f"wire.proto and the records of peers differ in {descriptor.name}: {odd}; run `make proto`")
        self._fields = {name: _field(hint, fields[name]) for name, hint in wanted.items()}

    def write(self, record: Any, target: Any) -> None:
        values = record if type(record) is tuple else [getattr(record, name) for name in self._fields]
        for field, value in zip(self._fields.values(), values, strict=True):
            field.write(value, target)

    def read(self, source: Any) -> Any:
        return self._make(**{name: field.read(source) for name, field in self._fields.items()}, **self._models)


@cache
def _record(hint: Any, descriptor: Descriptor) -> _Record:
    if get_origin(hint) is tuple:  # a plain pair: the fields in their order
        names = [field.name for field in descriptor.fields]
        return _Record(lambda **parts: tuple(parts.values()), dict(zip(names, get_args(hint), strict=True)), descriptor)
    return _Record(hint, get_type_hints(hint), descriptor)


def _field(hint: Any, field: FieldDescriptor) -> _Field:
    """Make the writer and reader of a field: a scalar, a record, a tuple of either, or an optional one."""
    if get_origin(hint) in (UnionType, Union):  # the latter where a part has annotations
        (inner,) = (part for part in get_args(hint) if part is not NoneType)
        return _optional(inner, field)
    if get_origin(hint) is tuple and get_args(hint)[-1:] == (Ellipsis,):
        return _repeated(get_args(hint)[0], field)
    name = field.name
    if field.message_type is None:
        write, read = _scalar(hint, field)
        return _Field(lambda value, to: setattr(to, name, write(value)), lambda source: read(getattr(source, name)))
    record = _record(hint, field.message_type)

    def write_record(value: Any, to: Any) -> None:
        part = getattr(to, name)
        part.SetInParent()
        record.write(value, part)

    def read_record(source: Any) -> Any:
        if not source.HasField(name):
            raise Refused("field", f"{name} is missing")
        return record.read(getattr(source, name))

    return _Field(write_record, read_record)


def _optional(hint: Any, field: FieldDescriptor) -> _Field:
    if not field.has_presence:
        raise TypeError(f"wire.proto: {field.full_name} must be optional")
    name = field.name
    if get_origin(hint) is tuple:  # a list or None: wrapped into a message
        values = _field(hint, field.message_type.fields_by_name["values"])
        inner = _Field(
            lambda value, to: (getattr(to, name).SetInParent(), values.write(value, getattr(to, name)))[0],
            lambda source: values.read(getattr(source, name)),
        )
    else:
        inner = _field(hint, field)
    return _Field(
        lambda value, to: None if value is None else inner.write(value, to),
        lambda source: inner.read(source) if source.HasField(name) else None,
    )


def _repeated(hint: Any, field: FieldDescriptor) -> _Field:
    name, most = field.name, MOST_OF.get(field.name, MOST_ITEMS)

    def check(count: int) -> None:
        if count > most:
            raise Refused("length", f"{count} items in {name}, at most {most}")

    if field.message_type is None:
        write, read = _scalar(hint, field)

        def write_all(values: Any, to: Any) -> None:
            check(len(values))
            getattr(to, name).extend([write(value) for value in values])

    else:
        record = _record(hint, field.message_type)
        read = record.read

        def write_all(values: Any, to: Any) -> None:
            check(len(values))
            for value in values:
                record.write(value, getattr(to, name).add())

    def read_all(source: Any) -> tuple[Any, ...]:
        values = getattr(source, name)
        check(len(values))
        if field.type == FieldDescriptor.TYPE_SINT64:  # long lists: checking the extremes checks all
            _count(min(values, default=0))
            _count(max(values, default=0))
            return tuple(values)
        return tuple([read(value) for value in values])

    return _Field(write_all, read_all)


# Scalars: the protobuf type says which kind of number it is (wire.proto).


_Convert = Callable[[Any], Any]


def _scalar(hint: Any, field: FieldDescriptor) -> tuple[_Convert, _Convert]:
    """Return the converters of a number for writing and for reading."""
    known: dict[tuple[type, int], tuple[_Convert, _Convert]] = {
        (int, FieldDescriptor.TYPE_SFIXED64): (_name, _name),
        (int, FieldDescriptor.TYPE_SINT64): (_count, _count),
        (int, FieldDescriptor.TYPE_BYTES): (_sum_bytes, _sum),
        (float, FieldDescriptor.TYPE_DOUBLE): (_float, _float),
        (bool, FieldDescriptor.TYPE_BOOL): (bool, bool),
        (bytes, FieldDescriptor.TYPE_BYTES): (bytes, bytes),
    }
    if (hint, field.type) not in known:
        raise TypeError(f"wire.proto: {field.full_name} has a type that does not hold {hint}")
    return known[hint, field.type]


def _name(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise Refused("number", f"a name of more than 64 bits: about 2^{value.bit_length()}")
    return value


def _count(value: int) -> int:
    if not -MOST_COUNT <= value <= MOST_COUNT:
        raise Refused("number", f"a count of about 2^{value.bit_length()}, at most 2^53")
    return value


def _sum_bytes(value: int) -> bytes:
    length = (value + (value < 0)).bit_length() // 8 + 1  # -128 fits into one byte
    if length > MOST_SUM_BYTES:
        raise Refused("number", f"a sum of {length} bytes, at most {MOST_SUM_BYTES}")
    return value.to_bytes(length, "big", signed=True) if value else b""


def _sum(data: bytes) -> int:
    if len(data) > MOST_SUM_BYTES:
        raise Refused("number", f"a sum of {len(data)} bytes, at most {MOST_SUM_BYTES}")
    return int.from_bytes(data, "big", signed=True)


def _float(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = float("nan")
    if number != number or number != value:
        raise Refused("number", "not a number that a double holds")
    return number


def _kind_of(record: type) -> str:
    """Name the field of `PeerMessage` that holds a record: CopyRequest -> copy_request."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", record.__name__).lower()


def _records() -> dict[str, _Record]:
    types = {_kind_of(kind): kind for kind in messages.KINDS}
    fields = {field.name: field.message_type for field in pb.PeerMessage.DESCRIPTOR.fields}
    if set(types) != set(fields):
        raise TypeError(f"wire.proto and peer/messages.py differ in {sorted(set(types) ^ set(fields))}; `make proto`")
    return {name: _record(kind, fields[name]) for name, kind in types.items()}


_KINDS = _records()
