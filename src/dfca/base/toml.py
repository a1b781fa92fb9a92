"""Reads TOML that may come from anybody."""

from __future__ import annotations

import tomllib
from typing import Any

DEEPEST = 32


def parse_toml(text: str) -> dict[str, Any]:
    """Read TOML whose tables and lists are nested at most `DEEPEST` deep, so that what walks them may recurse.

    Raises ValueError if it is not TOML, or nested deeper; the text says what is wrong.
    """
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from None
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        inner = (part for value in level for part in (value.values() if isinstance(value, dict) else value))
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return values
    raise ValueError(f"it is nested more than {DEEPEST} deep")
