"""Describe everything that is wrong with a table of settings, one sentence per problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from dfca.base.errors import ConfigError, unknown
from dfca.base.validation import demand, section_of, show
from dfca.node.task.sections import Section, checker

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

LONGEST = 60
MOST = 20
Checked = TypeVar("Checked", bound=Section)


def check(content: Any, section: type[Checked], what: str) -> Checked:
    """Make a section from a table. Raises ConfigError with everything that is wrong."""
    from pydantic import ValidationError

    try:
        return section.check(content)
    except ValidationError as error:
        raise explain(what, sentences(error, checker(section))) from None


def sentences(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return one sentence for every key that is wrong: the key, what it must be, and what it is."""
    found: dict[str, list[Any]] = {}
    for problem in error.errors():
        found.setdefault(_path(problem, model), []).append(problem)
    # Of a list with a bad item pydantic also says that it is too short: it does not count that item.
    with_bad_item = {path.rpartition("[")[0] for path in found if path.endswith("]")}
    return [
        _sentence(path, problems, model)
        for path, problems in found.items()
        if path not in with_bad_item or problems[0]["type"] != "too_short"
    ]


def explain(what: str, problems: list[str]) -> ConfigError:
    """Make one error of all problems."""
    count = "" if len(problems) == 1 else f"{len(problems)} problems: "
    return ConfigError(f"{what}: {count}" + "; ".join(printable(problem, 2000) for problem in problems[:MOST]))


def printable(text: str, most: int = 60) -> str:
    """Show a text of a file in one line: what cannot be printed becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


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
    demands = dict.fromkeys(demand(each) for each in problems)
    return f"{path or 'the content'} must be {' or '.join(demands)}, got {show(problem['input'], LONGEST)}"


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
    section = section_of(path, model)
    return dict(section.model_fields) if section else {}
