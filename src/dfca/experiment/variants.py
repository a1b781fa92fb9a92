"""Algorithms with options of their own, so that the same one can stand in a table twice.

    algorithms = [
        "dfca-auto",
        "fedavg",
        {name = "fedavg", momentum = 0.9},                                         # "fedavg momentum=0.9"
        {name = "dfedavgm", label = "dfedavgm, slow", local.learning_rate = 0.1},
    ]

A table is short for its label in the list and a table [algorithm."LABEL"]. What stands there is an option of the
algorithm, or a section of the experiment (`SECTIONS`) laid over that of all the others; data and graph are the same for
everybody, or rows could not be paired. A label begins with the name of its algorithm (`algorithms.base_of`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dfca.algorithms import base_of
from dfca.base.errors import ConfigError
from dfca.base.validation import show

SECTIONS = ("local", "mixing", "personal")
"""What a row of a table may have of its own beside the options of its algorithm."""
LONGEST = 60  # characters of a label, which names files
LABEL = re.compile(r"[\w.:-]+([ ,+(=][\w .,:+=()%-]*[\w)%])?")


def unfold(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the tables in the list `algorithms` by their labels, and put their options into `algorithm`.

    >>> unfold({"algorithms": ["dfca-auto", {"name": "fedavg", "momentum": 0.9}]})
    {'algorithms': ['dfca-auto', 'fedavg momentum=0.9'], 'algorithm': {'fedavg momentum=0.9': {'momentum': 0.9}}}

    Raises ConfigError for a table without a name, or with the label of another.
    """
    listed, tables = values.get("algorithms"), values.get("algorithm", {})
    several = isinstance(listed, list | tuple) and any(isinstance(row, Mapping) for row in listed)
    if not several or not isinstance(tables, Mapping):
        return dict(values)
    names, tables = [], dict(tables)
    for row in listed or ():
        if not isinstance(row, Mapping):
            names.append(row)
            continue
        label, options = label_of(row)
        if options or label != row["name"]:
            if tables.get(label, options) != options:
                raise ConfigError(
                    f'algorithms has {show(label)} and [algorithm."{label}"] is another; give one of them'
                )
            tables[label] = options
        names.append(label)
    return {**values, "algorithms": names, **({"algorithm": tables} if tables else {})}


def label_of(table: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the label of an algorithm with options of its own, made of them where it is not given, and the options.

    Raises ConfigError.
    """
    name = table.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            f'a table in algorithms needs a name ({{name = "fedavg", momentum = 0.9}}), got {show(table)}'
        )
    options = {key: value for key, value in table.items() if key not in ("name", "label")}
    label = table.get("label", " ".join([name, *(f"{key}={write(value)}" for key, value in flatten(options).items())]))
    if not isinstance(label, str):
        raise ConfigError(f"label of {name} must be a string, got {show(label)}")
    if base_of(label) != name:
        raise ConfigError(f'label {show(label)} must begin with the name of its algorithm: "{name}, ..."')
    return label, options


def check_label(label: str) -> None:
    """Refuse a label that cannot name files. Raises ConfigError."""
    if not LABEL.fullmatch(label) or len(label) > LONGEST:
        raise ConfigError(
            f"a label of an algorithm must have at most {LONGEST} letters, digits, blanks and .,:+=()%- (it names "
            f"files), got {show(label)}; give another"
        )


def sections_of(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key in SECTIONS and isinstance(value, Mapping)}


def options_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a table of options is for the algorithm itself."""
    return {key: value for key, value in table.items() if key not in sections_of(table)}


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one table over another; tables merge, everything else is replaced, and `epochs` replace `steps`.

    >>> merge({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}})
    {'a': 1, 'b': {'c': 4, 'd': 3}}
    >>> merge({"local": {"steps": 5, "momentum": 0.9}}, {"local": {"epochs": 1}})
    {'local': {'momentum': 0.9, 'epochs': 1}}
    """
    merged = dict(below)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in above and other not in above:
            merged.pop(other, None)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn tables into dotted keys.

    >>> flatten({"clients": 3, "data": {"name": "digits"}})
    {'clients': 3, 'data.name': 'digits'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into tables.

    >>> nest({"clients": 3, "data.name": "digits"})
    {'clients': 3, 'data': {'name': 'digits'}}
    """
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        nested = merge(nested, value)
    return nested


def write(value: Any) -> str:
    """Write a value as a name or a label has it: strings without quotes."""
    return value if isinstance(value, str) else show(value)


def rejoin(names: Sequence[str], labels: Collection[str]) -> list[str]:
    """Put labels with commas together again, which the command line has split.

    >>> rejoin(["dfca-auto", "fedavg", "momentum 0.9"], ["fedavg, momentum 0.9"])
    ['dfca-auto', 'fedavg, momentum 0.9']
    """
    joined: list[str] = []
    rest = list(names)
    while rest:
        many = next((n for n in range(len(rest), 1, -1) if ", ".join(rest[:n]) in labels), 1)
        joined.append(", ".join(rest[:many]))
        rest = rest[many:]
    return joined
