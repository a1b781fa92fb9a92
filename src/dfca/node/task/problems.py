"""Describe everything that is wrong with a table of settings, one sentence per problem."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dfca.errors import ConfigError, unknown

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
SIGNS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
LONGEST = 60
MOST = 20


def sentences(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return one sentence for every key that is wrong: the key, what it must be, and what it is."""
    found: dict[str, list[Any]] = {}
    for problem in error.errors():
        found.setdefault(_path(problem, model), []).append(problem)
    return [_sentence(path, problems, model) for path, problems in found.items()]


def explain(what: str, problems: list[str]) -> ConfigError:
    """Make one error of all problems."""
    count = "" if len(problems) == 1 else f"{len(problems)} problems: "
    return ConfigError(f"{what}: {count}" + "; ".join(printable(problem, 2000) for problem in problems[:MOST]))


def printable(text: str, most: int = 60) -> str:
    """Show a text of a file in one line: what cannot be printed becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def show(value: Any) -> str:
    """Write a value as a settings file would, and no more than a line of it.

    >>> show("auto"), show(True), show([1, 2])
    ('"auto"', 'true', '[1, 2]')
    """
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _sentence(path: str, problems: list[Any], model: type[BaseModel]) -> str:
    problem = problems[0]
    kind = problem["type"]
    if kind == "extra_forbidden":
        *sections, key = path.split(".")
        where = f" in [{'.'.join(sections)}]" if sections else ""
        return str(unknown(f"key{where}", key, _fields(sections, model)))
    if kind == "missing":
        return f"{path} is missing"
    if kind == "value_error":
        return f"{path}: {problem['ctx']['error']}" if path else str(problem["ctx"]["error"])
    demands = dict.fromkeys(_demand(each) for each in problems)
    return f"{path or 'the content'} must be {' or '.join(demands)}, got {show(problem['input'])}"


def _demand(problem: Any) -> str:
    """Return what one problem asks for: ">= 1", "an integer", one of some words."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in SIGNS:
        return f"{SIGNS[kind]} {next(iter(context.values()))}"
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


def _path(problem: Any, model: type[BaseModel]) -> str:
    """Keep the keys of pydantic's location and drop the names of its inner types ("constrained-int")."""
    keys: list[str] = []
    for position, part in enumerate(problem["loc"]):
        last = position == len(problem["loc"]) - 1
        if isinstance(part, int):
            keys[-1:] = [f"{keys[-1] if keys else ''}[{part}]"]
        elif part in _fields(keys, model) or (last and problem["type"] == "extra_forbidden"):
            keys.append(ascii(part)[1:-1][:LONGEST])
    return ".".join(keys)


def _fields(path: list[str], model: type[BaseModel]) -> dict[str, Any]:
    """List the keys of a section; none where the path ends at a value."""
    for name in path:
        field = model.model_fields.get(name.partition("[")[0])
        kinds = _kinds(field.annotation) if field else ()
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is None:
            return {}
        model = inner
    return dict(model.model_fields)


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)
