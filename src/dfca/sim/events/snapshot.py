"""Python values as JSON facts and named tensors, and back: how an event simulation is written to a checkpoint.

No pickle: only the classes that are named here come back, and nothing in a file can name another. A tensor that several
values share (a model on its way to ten neighbours) is stored once and is shared again afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from dfca.core.client import ClientState, Message
from dfca.core.election import Vote
from dfca.core.elector import Announcement, Ballot, Bid, Candidacy, ElectorState, Request
from dfca.core.relay import Offer
from dfca.errors import RunError

_KNOWN: dict[str, type] = {
    each.__name__: each
    for each in (ClientState, Message, Vote, Announcement, Ballot, Bid, Candidacy, ElectorState, Request, Offer)
}
_MARK = "~"


def storable(each: type) -> type:
    """Let values of a dataclass or named tuple be stored."""
    _KNOWN[each.__name__] = each
    return each


class Packer:
    """Turns values into JSON; tensors go to `tensors` under names of their own."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []

    def pack(self, value: Any) -> Any:
        """Pack one value. Raises RunError for one that no checkpoint can hold."""
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {_MARK: "float", "is": str(value)}
        if isinstance(value, Tensor):
            return {_MARK: "tensor", "is": self._name(value)}
        if type(value) is list:
            return [self.pack(each) for each in value]
        if isinstance(value, dict):
            pairs = [[self.pack(key), self.pack(each)] for key, each in value.items()]
            if all(isinstance(key, str) and key != _MARK for key in value):
                return dict(pairs)
            return {_MARK: "dict", "is": pairs}
        if isinstance(value, set | frozenset):
            return {_MARK: "set", "is": [self.pack(each) for each in sorted(value)]}
        if type(value) is tuple:
            return {_MARK: "tuple", "is": [self.pack(each) for each in value]}
        kind = type(value).__name__
        if _KNOWN.get(kind) is not type(value):
            raise RunError(f"a checkpoint cannot hold a {kind}")
        parts: Any = [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else value
        return {_MARK: kind, "is": [self.pack(each) for each in parts]}

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"held.{len(self._names)}"
            self._kept.append(tensor)  # so that no other tensor takes its id
            self.tensors[self._names[id(tensor)]] = tensor
        return self._names[id(tensor)]


class Unpacker:
    """Turns what a `Packer` made back into values."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._copies: dict[str, Tensor] = {}

    def unpack(self, packed: Any) -> Any:
        """Unpack one value."""
        if isinstance(packed, list):
            return [self.unpack(each) for each in packed]
        if not isinstance(packed, dict):
            return packed
        if _MARK not in packed:
            return {key: self.unpack(each) for key, each in packed.items()}
        kind, inner = packed[_MARK], packed["is"]
        if kind == "float":
            return float(inner)
        if kind == "tensor":
            if inner not in self._copies:
                self._copies[inner] = self.tensors[inner].clone()
            return self._copies[inner]
        if kind == "dict":
            return {self.unpack(key): self.unpack(each) for key, each in inner}
        values = [self.unpack(each) for each in inner]
        if kind in ("set", "tuple"):
            return set(values) if kind == "set" else tuple(values)
        if kind not in _KNOWN:
            raise RunError(f"the checkpoint holds a {kind}, which this version does not know")
        return _KNOWN[kind](*values)
