"""Describe what is wrong with a config in one sentence: the key, the value, the bound and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from dfca.base.errors import ConfigError, unknown
from dfca.base.validation import BOUNDS, SIGNS, demand, section_of, show

FORMS = {"device": '"cpu", "cuda", "cuda:N", "mps" or "auto"'}
ADVICE = {
    "clusters": "one cluster is plain federated averaging",
    "participation": "1.0 is every client in every round",
    "local.learning_rate": "for no training at all use local.steps = 0",
    "local.batch_size": '"full" is all samples of the client in every step',
    "evaluation.every": "the last round is always evaluated",
    "device": '"auto" takes a GPU where there is one',
}


def explain(error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """Translate pydantic's list of problems into one error that lists all of them."""
    problems: dict[str, list[Any]] = {}
    for problem in error.errors():
        path = _path(problem["loc"], model, extra=problem["type"] == "extra_forbidden")
        # One bad item of a list is one problem, though pydantic also complains of the list.
        problems.setdefault(path.partition("[")[0], []).append((path, problem))
    sentences = []
    for found in problems.values():
        path = found[0][0]
        sentences.append(_sentence(path, [problem for where, problem in found if where == path], model))
    sentences = list(dict.fromkeys(sentences))  # a name may be wrong in `algorithms` and in [algorithm]
    if len(sentences) == 1:
        return ConfigError(sentences[0])
    listed = "; ".join(f"({number}) {each}" for number, each in enumerate(sentences, 1))
    return ConfigError(f"{len(sentences)} problems: {listed}")


def _sentence(path: str, problems: list[Any], model: type[BaseModel]) -> str:
    problem = problems[0]
    match problem["type"]:
        case "extra_forbidden":
            return _unknown_key(path, model)
        case "missing" if path.endswith("]"):
            return f"{path.partition('[')[0]} must have more items: {path} is missing"
        case "missing":
            by_hand = "" if "[" in path else f" or give it by --set {path}=VALUE"
            return f"{path} is missing; add it to the experiment file{by_hand}"
        case "value_error":
            reason = problem["ctx"]["error"]
            # A ConfigError is a whole sentence; a section's own check names its keys without the section.
            return str(reason) if isinstance(reason, ConfigError) or not path else f"[{path}] {reason}"
    demands = dict.fromkeys(_demand(path, each, model) for each in problems)
    advice = f"; {ADVICE[path]}" if path in ADVICE else ""
    return f"{path} must be {' or '.join(demands)}, got {show(problem['input'])}{advice}"


def _demand(path: str, problem: Any, model: type[BaseModel]) -> str:
    """Return what one problem asks for: "> 0 and <= 1", "an integer", one of some words."""
    kind = problem["type"]
    bounds = _bounds(path, model) if kind in BOUNDS else []
    if bounds:
        return " and ".join(bounds)
    if kind == "string_pattern_mismatch" and path in FORMS:
        return FORMS[path]
    if kind == "too_short":
        return f"a list of at least {problem['ctx']['min_length']}"
    return demand(problem)


def _bounds(path: str, model: type[BaseModel]) -> list[str]:
    *sections, key = path.split(".")
    section = section_of(sections, model)
    field = section.model_fields.get(key) if section else None
    return [
        f"{SIGNS[sign]} {getattr(bound, sign)}"
        for bound in (field.metadata if field else ())
        for sign in SIGNS
        if hasattr(bound, sign)
    ]


def _unknown_key(path: str, model: type[BaseModel]) -> str:
    *sections, key = path.split(".")
    section = section_of(sections, model)
    known = section.model_fields if section else {}
    where = f" in [{'.'.join(sections)}]" if sections else ""
    text = str(unknown(f"key{where}", key, known))
    homes = [home for home, fields in _tables(model) if key in fields and home != ".".join(sections)]
    if not homes:
        return text
    home = f"in [{homes[0]}]" if homes[0] else "at the top of the file, before the first [section]"
    return f'{text}; "{key}" belongs {home}'


def _tables(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    yield prefix, model.model_fields
    for name in model.model_fields:
        section = section_of([name], model)
        if section:
            yield from _tables(section, f"{prefix}.{name}" if prefix else name)


def _path(location: tuple[int | str, ...], model: type[BaseModel], extra: bool) -> str:
    """Keep the keys of pydantic's location and drop the names of its inner types ("constrained-int")."""
    keys: list[str] = []
    for position, part in enumerate(location):
        section = section_of(keys, model)
        if isinstance(part, int):
            keys[-1] += f"[{part}]"
        elif section is None:
            keys += [part] if _is_table(keys, model) else []
        elif part in section.model_fields or (extra and position == len(location) - 1):
            keys.append(part)
    return ".".join(keys)


def _is_table(keys: list[str], model: type[BaseModel]) -> bool:
    """Return whether the last key is a table of free names, as [algorithm] is."""
    section = section_of(keys[:-1], model)
    field = section.model_fields.get(keys[-1]) if section else None
    return field is not None and get_origin(field.annotation) is dict
