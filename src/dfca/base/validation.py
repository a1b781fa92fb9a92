"""Check tables of settings by their declarations, and say everything that is wrong in one sentence each.

Pydantic does the checking; it is loaded on the first check. Tables are `base.table.Table` or pydantic's own models.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from dfca.base.errors import SYNONYMS, ConfigError, unknown
from dfca.base.table import SIGNS, Table

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.fields import FieldInfo

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
    "dataclass": "a table",
}
BOUNDS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
EXTRA = ("extra_forbidden", "unexpected_keyword_argument")
FORMS = {"device": '"cpu", "cuda", "cuda:N", "mps" or "auto"'}
ADVICE = {
    "clusters": "one cluster is plain federated averaging",
    "participation": "1.0 is every client in every round",
    "local.learning_rate": "for no training at all use local.steps = 0",
    "local.batch_size": '"full" is all samples of the client in every step',
    "evaluation.every": "the last round is always evaluated",
    "device": '"auto" takes a GPU where there is one',
}
LONGEST = 60
MOST = 20
Checked = TypeVar("Checked")


def check(content: Any, table: type[Checked], what: str = "") -> Checked:
    """Make a record of a table, a `Table` or a model of pydantic, from the content of a file.

    what: the name of a file that others may have written. Sentences begin with it and show values as short ASCII;
    without it they are those of an experiment file, with advice. Raises ConfigError with everything that is wrong.
    """
    checked, problems = _validate(content, table)
    if not problems:
        return checked  # type: ignore[no-any-return]
    # What concerns several keys is checked only where each of them is sound: look again without those that are not.
    more, rest = list(problems), content
    while more and not what:
        before, rest = rest, reduce(_without, (problem["loc"] for problem in more), rest)
        if rest is before:
            break
        more = [problem for problem in _validate(rest, table)[1] if problem["type"] == "value_error"]
        problems += more
    raise explain(problems, table, what)


def _validate(content: Any, table: Any) -> tuple[Any, list[Any]]:
    """Return the record, and what is wrong."""
    from pydantic import ValidationError

    try:
        return _adapter(table).validate_python(content), []
    except ValidationError as error:
        return None, list(error.errors())


def _without(content: Any, place: Sequence[int | str]) -> Any:
    """Copy tables but for the key that a problem is about; the same tables where there is none."""
    if not place or not isinstance(content, dict) or place[0] not in content:
        return content
    key, inner = place[0], content[place[0]]
    if len(place) == 1 or not isinstance(inner, dict):
        return {name: value for name, value in content.items() if name != key}
    kept = _without(inner, place[1:])
    return content if kept is inner else {**content, key: kept}


@cache
def _adapter(table: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(table)


def dump(record: Any) -> dict[str, Any]:
    """Return the keys of a record as TOML and JSON know them; those that are None are left out."""
    values: dict[str, Any] = _adapter(record.__class__).dump_python(record, mode="json", exclude_none=True)
    return values


def explain(problems: Sequence[Any], table: Any, what: str = "") -> ConfigError:
    """Translate pydantic's list of problems into one error that lists all of them."""
    grouped: dict[str, list[Any]] = {}
    for problem in problems:
        path = _path(problem, table)
        # One bad item of a list is one problem, though pydantic also complains of the list.
        grouped.setdefault(path.partition("[")[0], []).append((path, problem))
    sentences = []
    for group in grouped.values():
        path = next((path for path, _ in group if "[" in path), group[0][0])
        sentences.append(_sentence(path, [problem for where, problem in group if where == path], table, bool(what)))
    sentences = list(dict.fromkeys(sentences))  # a name may be wrong in `algorithms` and in [algorithm]
    many = f"{len(sentences)} problems: " if len(sentences) > 1 else ""
    if what:
        return ConfigError(f"{what}: {many}" + "; ".join(printable(text, 2000) for text in sentences[:MOST]))
    numbered = [f"({number}) {text}" for number, text in enumerate(sentences, 1)]
    return ConfigError(many + "; ".join(numbered if many else sentences))


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


def printable(text: str, most: int = 60) -> str:
    """Show a text of a file in one line: what cannot be printed becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def demand(problem: Any) -> str:
    """Return what one of pydantic's problems asks for: ">= 1", "an integer", one of some words."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in BOUNDS:
        bound = context[BOUNDS[kind]]
        return f"{SIGNS[BOUNDS[kind]]} {bound:g}" if isinstance(bound, float) else f"{SIGNS[BOUNDS[kind]]} {bound}"
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


@cache
def declared(table: Any) -> dict[str, FieldInfo]:
    """Return the keys of a table with pydantic's view of their declarations."""
    from pydantic.fields import FieldInfo

    if not dataclasses.is_dataclass(table):
        return dict(table.model_fields)
    hints = get_type_hints(table, include_extras=True)
    return {
        field.name: FieldInfo.from_annotated_attribute(hints[field.name], field) for field in dataclasses.fields(table)
    }


def table_in(annotation: Any) -> Any:
    """Return the table that a key holds, alone or in a list; None: it holds values."""
    if isinstance(annotation, type) and (issubclass(annotation, Table) or hasattr(annotation, "model_fields")):
        return annotation
    return next((table for inner in get_args(annotation) if (table := table_in(inner))), None)


def _table_at(path: Sequence[str], table: Any) -> Any:
    """Return the table at a path, None where the path ends at a value; "parts[0]" is a table of a list."""
    for name in path:
        field = declared(table).get(name.partition("[")[0])
        table = table_in(field.annotation) if field else None
        if table is None:
            return None
    return table


def _sentence(path: str, problems: list[Any], table: Any, brief: bool) -> str:
    problem = problems[0]
    kind = problem["type"]
    if kind in EXTRA:
        return _unknown_key(path, table, brief)
    if kind == "missing" and brief:
        return f"{path} is missing"
    if kind == "missing" and path.endswith("]"):
        return f"{path.partition('[')[0]} must have more items: {path} is missing"
    if kind == "missing":
        by_hand = "" if "[" in path else f" or give it by --set {path}=VALUE"
        return f"{path} is missing; add it to the experiment file{by_hand}"
    if kind == "value_error":
        reason = problem["ctx"]["error"]
        # A ConfigError is a whole sentence; a table's own check names its keys without the table.
        if isinstance(reason, ConfigError) or not path:
            return str(reason)
        return f"{path}: {reason}" if brief else f"[{path}] {reason}"
    demands = " or ".join(dict.fromkeys(demand(one) if brief else _demand(path, one, table) for one in problems))
    if brief:
        return f"{path or 'the content'} must be {demands}, got {show(problem['input'], LONGEST)}"
    advice = f"; {ADVICE[path]}" if path in ADVICE else ""
    return f"{path} must be {demands}, got {show(problem['input'])}{advice}"


def _demand(path: str, problem: Any, table: Any) -> str:
    """Return what one problem asks for, with all bounds of the key: "> 0 and <= 1"."""
    kind = problem["type"]
    *sections, key = path.split(".")
    inside = _table_at(sections, table)
    field = declared(inside).get(key) if inside else None
    if kind in BOUNDS and field and (bounds := bounds_of(field.metadata)):
        return bounds
    if kind == "string_pattern_mismatch" and path in FORMS:
        return FORMS[path]
    return f"a list of at least {problem['ctx']['min_length']}" if kind == "too_short" else demand(problem)


def bounds_of(metadata: Sequence[Any]) -> str:
    """Write the bounds among pydantic's metadata: "> 0 and <= 1"."""
    return " and ".join(
        f"{SIGNS[sign]} {getattr(bound, sign):.9g}" for bound in metadata for sign in SIGNS if hasattr(bound, sign)
    )


def _unknown_key(path: str, table: Any, brief: bool) -> str:
    *sections, key = path.split(".")
    inside = _table_at(sections, table)
    where = f" in [{'.'.join(sections)}]" if sections else ""
    text = str(unknown(f"key{where}", key, declared(inside) if inside else {}))
    key = key if inside and SYNONYMS.get(key) in declared(inside) else SYNONYMS.get(key, key)
    homes = [home for home, fields in _tables(table) if key in fields and home != ".".join(sections)]
    if not homes or brief:
        return text
    home = f"in [{homes[0]}]" if homes[0] else "at the top of the file, before the first [section]"
    return f'{text}; "{key}" belongs {home}'


def _tables(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    yield prefix, declared(table)
    for name, field in declared(table).items():
        if inner := table_in(field.annotation):
            yield from _tables(inner, f"{prefix}.{name}" if prefix else name)


def _path(problem: Any, table: Any) -> str:
    """Keep the keys of pydantic's location and drop the names of its inner types ("constrained-int")."""
    keys: list[str] = []
    for position, part in enumerate(problem["loc"]):
        inside = _table_at(keys, table)
        last = position == len(problem["loc"]) - 1
        if isinstance(part, int):
            keys[-1:] = [f"{keys[-1] if keys else ''}[{part}]"]
        elif inside is None:
            keys += [part] if _is_free(keys, table) else []
        elif part in declared(inside) or (last and problem["type"] in EXTRA):
            keys.append(ascii(part)[1:-1][:LONGEST])
    return ".".join(keys)


def _is_free(keys: list[str], table: Any) -> bool:
    """Return whether the last key is a table of free names, as [algorithm] is."""
    inside = _table_at(keys[:-1], table)
    field = declared(inside).get(keys[-1]) if inside else None
    return field is not None and get_origin(field.annotation) is dict


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
