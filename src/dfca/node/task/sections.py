"""Tables of settings: declared once, as frozen records; pydantic checks them, and only who checks loads it.

    class LogConfig(Section):
        level: Literal["info", "error"] = Field(default="info", description="the least that is logged")

    LogConfig.check({"level": "info"})         # raises pydantic's ValidationError
    LogConfig.of_checked({"level": "info"})    # a table that was checked before: pydantic, 9 MB, is not loaded

What no single value can say is checked by `__post_init__`, which raises ValueError with a sentence.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, dataclass_transform, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import BaseModel


def Field(
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    description: str = "",
    check: Callable[[Any], object] | None = None,
    **bounds: Any,
) -> Any:
    """Describe a key: its default, what it means, its bounds by pydantic's names, and a check of its own, which raises
    ValueError with a sentence."""
    metadata = {"description": description, "bounds": bounds, "check": check}
    given = {"default": default} if default_factory is dataclasses.MISSING else {"default_factory": default_factory}
    return dataclasses.field(**given, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
class Section:
    """A part of some settings: frozen, complete, and nothing else in it."""

    def __init_subclass__(cls) -> None:
        """Make a frozen dataclass of it."""
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def check(cls, content: Any) -> Self:
        """Make it from a table of anything. Raises pydantic's ValidationError with all problems."""
        from pydantic import TypeAdapter

        found: Self = TypeAdapter(_translated(cls)).validate_python(content)
        return found

    @classmethod
    def of_checked(cls, content: dict[str, Any]) -> Self:
        """Make it from a table that was checked before."""
        hints = get_type_hints(cls)
        return cls(**{key: _converted(value, hints[key]) for key, value in content.items()})

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return all keys with their descriptions."""
        return {each.name: each.metadata.get("description", "") for each in dataclasses.fields(cls)}  # type: ignore[arg-type]

    def plain(self) -> dict[str, Any]:
        """Return a table of plain values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    def changed(self, **changes: Any) -> Self:
        """Return it with other values of some keys, which are not checked one by one."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def digest_of(data: bytes) -> str:
    """Return the SHA-256 by which a file that was checked is known again."""
    return hashlib.sha256(data).hexdigest()


_CHECKERS: dict[type[Section], type[BaseModel]] = {}


def checker(section: type[Section]) -> type[BaseModel]:
    """Return the pydantic model that checks a section."""
    if section not in _CHECKERS:
        _CHECKERS[section] = _make_checker(section)
    return _CHECKERS[section]


def _make_checker(section: Any) -> type[BaseModel]:
    from pydantic import AfterValidator, ConfigDict, create_model
    from pydantic import Field as Bounds

    hints, fields = get_type_hints(section, include_extras=True), dict[str, Any]()
    for each in dataclasses.fields(section):
        given = {key: getattr(each, key) for key in ("default", "default_factory")}
        given = {key: value for key, value in given.items() if value is not dataclasses.MISSING}
        kind, bounds, check = _translated(hints[each.name]), each.metadata.get("bounds", {}), each.metadata.get("check")
        if check is not None:
            kind = Annotated[kind, AfterValidator(partial(_accepted, check))]
        fields[each.name] = (kind, Bounds(**given, **bounds))
    config = ConfigDict(frozen=True, extra="forbid", strict=True)
    made: type[BaseModel] = create_model(section.__name__, __config__=config, **fields)
    return made


def _translated(hint: Any) -> Any:
    """Write a type for pydantic: sections are made of what their checkers have accepted, bounds are pydantic's."""
    from pydantic import AfterValidator, BeforeValidator
    from pydantic import Field as Bounds

    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Section):
        return Annotated[checker(hint), BeforeValidator(partial(_table, hint)), AfterValidator(partial(_made, hint))]
    if origin is Annotated:
        kind, *about = inner
        bounds = [Bounds(**each.metadata["bounds"]) if isinstance(each, dataclasses.Field) else each for each in about]
        return Annotated[(_translated(kind), *bounds)]
    if origin in (Union, UnionType):
        return Union[tuple(_translated(each) for each in inner)]  # noqa: UP007
    if origin is tuple:
        return tuple[tuple(_translated(each) if each is not Ellipsis else each for each in inner)]  # type: ignore[misc]
    return hint


def _table(section: type[Section], value: Any) -> Any:
    return value.plain() if isinstance(value, section) else value


def _made(section: type[Section], model: BaseModel) -> Section:
    return section(**{key: getattr(model, key) for key in type(model).model_fields})


def _accepted(check: Callable[[Any], object], value: Any) -> Any:
    check(value)
    return value


def _converted(value: Any, hint: Any) -> Any:
    """Make of a plain value what pydantic would make of it: sections of tables, tuples of lists, floats of integers."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, dict):
        return next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)).of_checked(value)
    if isinstance(value, list):
        item = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple), Any)
        return tuple(_converted(each, item) for each in value)
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    return value
