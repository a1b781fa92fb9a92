"""Every key of an experiment file with its type, default and meaning, read off the config itself."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dfca import algorithms
from dfca.base.errors import unknown
from dfca.base.validation import bounds_of, declared, show, table_in
from dfca.experiment.config import Config

NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}


class KeyReference(NamedTuple):
    """One key: its dotted name, what it may be, its default ("" where it must be given), its meaning."""

    name: str
    kind: str
    default: str
    meaning: str


def reference(prefix: str = "") -> list[KeyReference]:
    """List the keys whose names begin with a prefix: "local", "world.link", "clients"; all of them without one.

    Raises ConfigError if there is none.
    """
    keys = [*_keys(Config, ""), *_algorithm_keys()]
    listed = [key for key in keys if key.name == prefix or key.name.startswith(f"{prefix}." if prefix else "")]
    if not listed:
        section, dot, name = prefix.rpartition(".")
        inner = dict.fromkeys(
            key.name.removeprefix(section + dot).partition(".")[0] for key in keys if key.name.startswith(section + dot)
        )
        if not inner:  # not even the section is known
            return reference(section)
        raise unknown(f"key in [{section}]" if section else "key", name, inner)
    return listed


def _keys(table: Any, path: str) -> Iterator[KeyReference]:
    for name, field in declared(table).items():
        inner = table_in(field.annotation)
        listed = inner is not None and _is_list(field.annotation)
        full = f"{path}{name}{'[]' if listed else ''}"
        if inner is not None:
            yield from _keys(inner, f"{full}.")
        elif name != "algorithm":
            yield KeyReference(full, _kind(field.annotation, field), _default(field), field.description or "")


def _algorithm_keys() -> Iterator[KeyReference]:
    """List the options of single algorithms: the parameters of the functions that make them."""
    for name, make in algorithms.ALGORITHMS.items():
        types_of = get_type_hints(make)
        for option, parameter in inspect.signature(make).parameters.items():
            kind, meaning = _kind(types_of[option]), algorithms.OPTIONS[option]
            yield KeyReference(f"algorithm.{name}.{option}", kind, _shown(parameter.default), meaning)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(_is_list(inner) for inner in get_args(annotation))


def _kind(annotation: Any, field: FieldInfo | None = None) -> str:
    """Describe a type in words: "integer >= 1", '"full" or integer >= 1'."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        text = " or ".join(show(value) for value in inner)
    elif origin in (Union, types.UnionType):
        text = " or ".join(_kind(kind) for kind in inner if kind is not type(None))
    elif origin is tuple:
        text = f"list of {_kind(inner[0])}"
    elif origin is Mapping:
        text = f"table of {_kind(inner[1])}"
    elif hasattr(annotation, "__metadata__"):  # Annotated[int, Field(ge=1)]
        bounds = [bound for kind in annotation.__metadata__ for bound in getattr(kind, "metadata", ())]
        text = _bounded(_kind(inner[0]), bounds)
    else:
        text = NAMES.get(annotation, str(annotation))
    return _bounded(text, field.metadata if field else [])


def _bounded(kind: str, metadata: list[Any]) -> str:
    bounds = bounds_of(metadata)
    return f"{kind} {bounds}" if bounds else kind


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.default
    return _shown(None if value is PydanticUndefined else value)


def _shown(default: Any) -> str:
    return "not set" if default is None else show(default)
