"""Tables of settings as frozen records: a field carries its default, its bounds and what it means.

    class LogConfig(Table):
        level: Literal["info", "error"] = option(default="info", description="the least that is logged")
        keep: int = option(default=7, ge=1, description="days")

    LogConfig(keep=0)                                   # raises ConfigError: keep must be >= 1, got 0
    class ShortLog(LogConfig, keep={"default": 1, "le": 7}): ...    # the same but for these

`base.validation` checks tables of a file by the same declarations; it needs pydantic, this module does not. What no
single value can say is checked by `__post_init__`, which raises ValueError with a sentence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from dfca.base.errors import ConfigError, unknown

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
Kind = TypeVar("Kind")


def option(*, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING, **about: Any) -> Any:
    """Declare a field of a table.

    Args:
        default: Its default; without one, and without a default_factory, it must be given.
        default_factory: A function that makes the default.
        **about: `description`; bounds by pydantic's names (`ge`, `gt`, `le`, `lt`, `pattern`, `max_length`, ...);
            `demand`: what an error says it must be, where the bounds do not say it well; `called`: its name in errors;
            `advice`: what an error adds; `since`: 3 for an option that release 0.3 brought (`Table.as_of`).
    """
    given = {"default": default} if default_factory is dataclasses.MISSING else {"default_factory": default_factory}
    return dataclasses.field(**given, metadata=about)


@dataclass_transform(frozen_default=True, field_specifiers=(option, dataclasses.field))
class Table:
    """A frozen record. Subclasses become dataclasses; class keywords change inherited declarations."""

    called: ClassVar[str] = "{}"
    """How an error names a field: "local.{}"."""
    # Strict: `clients = "24"` and `rounds = true` are slips, not numbers.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    def __init_subclass__(cls, kw_only: bool = False, **changes: Mapping[str, Any]) -> None:
        """Make a frozen dataclass, with changed declarations of some inherited fields."""
        inherited = getattr(cls, "__dataclass_fields__", {})
        for name, change in changes.items():
            field = inherited[name]
            default = change.get("default", field.default)
            about = field.metadata | {key: value for key, value in change.items() if key != "default"}
            cls.__annotations__[name] = field.type
            setattr(cls, name, dataclasses.field(default=default, metadata=about, kw_only=field.kw_only))
        dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Accept a dictionary for a record, which strict mode would refuse."""
        schema = handler(source)
        handler.resolve_ref_schema(schema)["strict"] = False
        return schema

    def __post_init__(self) -> None:
        """Check the numbers and names. Raises ConfigError with the first problem."""
        kind: Any = type(self)
        for field, kinds in _checks(kind):
            _check(getattr(self, field.name), field.metadata, kinds, self.called.format(field.name))

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return all keys with their descriptions."""
        return {field.name: field.metadata.get("description", "") for field in fields_of(cls)}

    def plain(self) -> dict[str, Any]:
        """Return a dictionary of plain values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    def changed(self, **changes: Any) -> Self:
        """Return it with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def narrowed(self, kind: type[Kind], **changes: Any) -> Kind:
        """Make another table of the fields and properties that both have, and of changes."""
        values = {field.name: getattr(self, field.name) for field in fields_of(kind) if hasattr(self, field.name)}
        return kind(**values | changes)

    def as_of(self, release: int) -> dict[str, Any]:
        """Return plain values without fields that are newer than release 0.`release` and have their default.

        So a new option changes no name, digest or file of what does not use it.
        """
        values = self.plain()
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            if field.metadata.get("since", 0) > release and value == field.default:
                del values[field.name]
            elif isinstance(value, Table):
                values[field.name] = value.as_of(release)
        return values


def fields_of(table: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Return the declarations of a table."""
    return dataclasses.fields(table)


@cache
def _checks(table: Any) -> list[tuple[dataclasses.Field[Any], tuple[Any, ...]]]:
    """List the fields that hold a number or one of some names, with their types."""
    hints = get_type_hints(table)
    listed = []
    for field in fields_of(table):
        hint = hints[field.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(kind in (int, float, bool, str, NoneType) or get_origin(kind) is Literal for kind in kinds):
            listed.append((field, kinds))
    return listed


def _check(value: Any, about: Mapping[str, Any], kinds: tuple[Any, ...], name: str) -> None:
    if (value is None and NoneType in kinds) or (isinstance(value, bool) and bool in kinds):
        return
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if words and isinstance(value, str):
        if value in words:
            return
        if not {int, float} & set(kinds):
            raise unknown(about.get("called", name), value, words)
    number = isinstance(value, Real) and not isinstance(value, bool)
    if str in kinds and isinstance(value, str):
        return
    if number and (float in kinds or (int in kinds and isinstance(value, Integral))) and _within(value, about):
        return
    whole = int in kinds and float not in kinds
    demand = (
        about.get("demand") or _demand(about) or ("an integer" if whole else "a number" if float in kinds else "text")
    )
    if whole and not isinstance(value, Integral) and not demand.startswith(("an integer", '"')):
        demand = f"an integer {demand}"
    shown = repr(value) if isinstance(value, str) else value
    advice = f"; {about['advice']}" if "advice" in about else ""
    raise ConfigError(f"{about.get('called', name)} must be {demand}, got {shown}{advice}")


def _within(value: Any, about: Mapping[str, Any]) -> bool:
    if about.get("allow_inf_nan") is False and not math.isfinite(value):
        return False
    tests = {"gt": value > about.get("gt", -math.inf), "lt": value < about.get("lt", math.inf)}
    tests |= {"ge": value >= about.get("ge", -math.inf), "le": value <= about.get("le", math.inf)}
    return all(passed for sign, passed in tests.items() if sign in about)


def _demand(about: Mapping[str, Any]) -> str:
    """Write bounds: ">= 1", "> 0 and finite", "in [0, 1)", "in 0..1"."""
    low = next((key for key in ("ge", "gt") if key in about), "")
    high = next((key for key in ("le", "lt") if key in about), "")
    if low and high:
        if (low, high) == ("ge", "le"):
            return f"in {about[low]}..{about[high]}"
        return f"in {'[' if low == 'ge' else '('}{about[low]}, {about[high]}{']' if high == 'le' else ')'}"
    finite = "finite" if about.get("allow_inf_nan") is False else ""
    bounds = [f"{SIGNS[key]} {about[key]}" for key in (low, high) if key]
    return " and ".join([*bounds, finite] if finite else bounds)
