"""Python values as JSON facts and named tensors, and back: how the state of peers is written to files.

No pickle: only classes of the modules that are named here come back, and nothing in a file can name another. Records
are stored by the names of their fields: one that a file does not have takes its default, one that this version does not
know is refused. A tensor that several values share (a model on its way to ten neighbours) is stored once and is shared
again afterwards; a view of the banks becomes a view of the banks.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dfca.base.errors import RunError
from dfca.core import client, exchange, method
from dfca.core import state as core_state
from dfca.core.rules import election, merging, relay, staleness
from dfca.peer import copies, curves, cycle, inbox, joiner, revival, state, surveys
from dfca.peer.records import lineage, messages, options, work
from dfca.peer.waves import deadline, survey
from dfca.peer.waves import election as peer_election

_MARK = "~"
MODULES: tuple[ModuleType, ...] = (
    *(client, core_state, exchange, election, merging, relay, staleness, method),
    *(copies, curves, cycle, inbox, joiner, revival, state, surveys),
    *(lineage, messages, options, work),
    *(deadline, peer_election, survey),
)


def records_of(modules: Iterable[ModuleType]) -> dict[str, type]:
    """List the dataclasses, named tuples and enums that modules define, by name."""
    return {
        name: item
        for module in modules
        for name, item in vars(module).items()
        if isinstance(item, type)
        and item.__module__ == module.__name__
        and (is_dataclass(item) or hasattr(item, "_fields") or issubclass(item, Enum))
    }


KNOWN: Mapping[str, type] = records_of(MODULES)  # the classes that come back, by name


RETIRED = frozenset(("SurveyWave", "Observe", "Survey"))
"""Until 0.2 rounds stopped for a survey: one that was under way in a checkpoint of then is given up."""
RETIRED_FIELDS = {"Count": ("followers",)}  # fields that are no longer read


class Packer:
    """Turns values into JSON; tensors go to `tensors` under names of their own, but views of `banks` do not."""

    def __init__(self, banks: Tensor | None = None, known: Mapping[str, type] = KNOWN) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known = known
        self._banks = banks
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []

    def pack(self, value: Any) -> Any:
        """Pack one value. Raises RunError for one that no checkpoint can hold."""
        if value is None or type(value) in (str, bool, int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {_MARK: "float", "is": str(value)}
        if isinstance(value, Tensor):
            return self._pack_tensor(value)
        if isinstance(value, torch.dtype):
            return {_MARK: "dtype", "is": str(value).removeprefix("torch.")}
        if type(value) is list:
            return [self.pack(item) for item in value]
        if isinstance(value, dict):
            kind = "Counter" if isinstance(value, Counter) else "dict"
            if kind == "dict" and all(type(key) is str and key != _MARK for key in value):
                return {key: self.pack(item) for key, item in value.items()}
            return {_MARK: kind, "is": [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        if isinstance(value, set | frozenset):
            return {_MARK: "set", "is": [self.pack(item) for item in sorted(value)]}
        if isinstance(value, deque):
            return {_MARK: "deque", "is": [self.pack(value.maxlen), *(self.pack(item) for item in value)]}
        if type(value) is tuple:
            return {_MARK: "tuple", "is": [self.pack(item) for item in value]}
        return self._pack_record(value)

    def _pack_record(self, value: Any) -> Any:
        kind = type(value).__name__
        if self._known.get(kind) is not type(value):
            raise RunError(f"a checkpoint cannot hold a {kind}")
        if isinstance(value, Enum):
            return {_MARK: kind, "is": value.name}
        names = [item.name for item in fields(value)] if is_dataclass(value) else value._fields  # type: ignore[attr-defined]
        return {_MARK: kind, "is": {name: self.pack(getattr(value, name)) for name in names}}

    def _pack_tensor(self, tensor: Tensor) -> Any:
        banks = self._banks
        if banks is not None and tensor.numel() and _address(tensor) == _address(banks):
            where = [tensor.storage_offset(), list(tensor.shape), list(tensor.stride())]
            return {_MARK: "view", "is": where}
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"held.{len(self._names)}"
            self._kept.append(tensor)  # so that no other tensor takes its id
            self.tensors[self._names[id(tensor)]] = tensor
        return {_MARK: "tensor", "is": self._names[id(tensor)]}


class Unpacker:
    """Turns what a `Packer` made back into values."""

    def __init__(
        self, tensors: Mapping[str, Tensor], banks: Tensor | None = None, known: Mapping[str, type] = KNOWN
    ) -> None:
        self.tensors, self._banks, self._known = tensors, banks, known
        self._copies: dict[str, Tensor] = {}

    def unpack(self, packed: Any) -> Any:
        """Unpack one value. Raises RunError for a class or a field that this version does not know."""
        if isinstance(packed, list):
            return [self.unpack(item) for item in packed]
        if not isinstance(packed, dict):
            return packed
        if _MARK not in packed:
            return {key: self.unpack(item) for key, item in packed.items()}
        kind, inner = packed[_MARK], packed["is"]
        if kind == "float":
            return float(inner)
        if kind == "dtype":
            return getattr(torch, inner)
        if kind == "view":
            assert self._banks is not None
            return self._banks.as_strided(inner[1], inner[2], inner[0])
        if kind == "tensor":
            if inner not in self._copies:
                self._copies[inner] = self.tensors[inner].clone()
            return self._copies[inner]
        if kind in ("dict", "Counter"):
            pairs = {self.unpack(key): self.unpack(item) for key, item in inner}
            return Counter(pairs) if kind == "Counter" else pairs
        if kind in ("set", "tuple", "deque"):
            values = [self.unpack(item) for item in inner]
            if kind == "deque":
                return deque(values[1:], values[0])
            return set(values) if kind == "set" else tuple(values)
        return self._unpack_record(kind, inner)

    def _unpack_record(self, kind: str, inner: Any) -> Any:
        if kind not in self._known:
            raise RunError(f"the checkpoint holds a {kind}, which this version does not know")
        known = self._known[kind]
        if issubclass(known, Enum):
            if inner not in known.__members__:
                raise RunError(f"the checkpoint holds {kind}.{inner}, which this version does not know")
            return known[inner]
        if is_dataclass(known):
            needs = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(known)}
        else:
            needs = {name: name not in known._field_defaults for name in known._fields}  # type: ignore[attr-defined]
        inner = {name: value for name, value in inner.items() if name not in RETIRED_FIELDS.get(kind, ())}
        if unknown := [name for name in inner if name not in needs]:
            if kind in RETIRED:
                return None
            raise RunError(f"the checkpoint's {kind} has a field {unknown[0]}, which this version does not know")
        if missing := [name for name, needed in needs.items() if needed and name not in inner]:
            raise RunError(f"the checkpoint's {kind} has no field {missing[0]}, which this version needs")
        return known(**{name: self.unpack(item) for name, item in inner.items()})


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
