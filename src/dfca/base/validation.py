"""What pydantic finds wrong with settings, in words: shared by experiment files and the files of a node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel

KINDS = {
    "int": "an integer",
    "float": "a number",
    "finite_number": "a finite number",
    "string": "a string",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
}
BOUNDS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def show(value: Any, most: int | None = None) -> str:
    """Write a value as a settings file would; most: no more characters than that, all of them ASCII.

    >>> show("full"), show(True), show([1, 2]), show("naïve", most=4)
    ('"full"', 'true', '[1, 2]', '"na\\\\...')
    """
    try:
        text = json.dumps(value, ensure_ascii=most is not None)
    except (TypeError, ValueError):
        text = str(value) if most is None else ascii(value)
    return text if most is None or len(text) <= most else f"{text[:most]}..."


def demand(problem: Any) -> str:
    """Return what one of pydantic's problems asks for: ">= 1", "an integer", one of some words."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in BOUNDS:
        sign = BOUNDS[kind]
        return (
            f"{SIGNS[sign]} {context[sign]:g}" if isinstance(context[sign], float) else f"{SIGNS[sign]} {context[sign]}"
        )
    if kind == "literal_error":
        return str(context["expected"]).replace("'", '"')
    if kind == "string_pattern_mismatch":
        return f"of the form {context['pattern']}"
    if kind in ("too_short", "string_too_short"):
        return f"at least {context['min_length']} long"
    if kind in ("too_long", "string_too_long"):
        return f"at most {context['max_length']} long"
    message: str = problem["msg"]
    name = re.sub(r"_(type|parsing|from_float|attributes_type|parsing_size)$", "", kind)
    return KINDS.get(name, message[:1].lower() + message[1:])


def section_of(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model of a section of a file, None where the path ends at a value; "parts[0]" is a table of a list."""
    from pydantic import BaseModel

    for name in path:
        field = model.model_fields.get(name.partition("[")[0])
        kinds = _kinds(field.annotation) if field else ()
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is None:
            return None
        model = inner
    return model


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)
