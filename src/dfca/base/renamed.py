"""Names of algorithms that earlier versions wrote: files that hold them are read with today's names.

`dfca` of 0.1 and 0.2 is `dfca-auto`: it is not the paper's DFCA, which is `dfca-gi` or `dfca-li`. What is hashed (a
config's digest, a swarm's facts) keeps the earlier name, so neither digests nor swarm IDs change.
"""

from __future__ import annotations

import re
from typing import Any

from dfca.base.errors import ConfigError

RENAMED = {"dfca": "dfca-auto"}
EARLIER = {name: old for old, name in RENAMED.items()}
AMBIGUOUS = (
    '"dfca" is ambiguous: the paper\'s algorithm is "dfca-gi" (shared start) or "dfca-li" (own starts); the '
    'recommended one, with elections, merging and a last step, is "dfca-auto"'
)
LABEL = re.compile(r"[^ ,+(=]+")  # a label begins with the name of its algorithm
KEY = re.compile(r"(?<![\w.])algorithm\.([^ ,+(=.]+)")  # "algorithm.dfca.level=0.1", the label of a sweep's point


def current(label: str) -> str:
    """Return today's label of an algorithm.

    >>> current("dfca"), current("dfca, plain"), current("dfca-gi")
    ('dfca-auto', 'dfca-auto, plain', 'dfca-gi')
    """
    return LABEL.sub(lambda name: RENAMED.get(name[0], name[0]), label, count=1)


def earlier(label: str) -> str:
    """Return the label of an algorithm in versions 0.1 and 0.2.

    >>> earlier("dfca-auto, plain"), earlier("dfca-gi")
    ('dfca, plain', 'dfca-gi')
    """
    return LABEL.sub(lambda name: EARLIER.get(name[0], name[0]), label, count=1)


def refuse_earlier(name: object) -> None:
    """Raise ConfigError where somebody asks for an algorithm by a name that is no longer one."""
    if isinstance(name, str) and name in RENAMED:
        raise ConfigError(AMBIGUOUS)


def renamed(record: Any) -> Any:
    """Return a config, a summary, a row or a line of metrics with today's names of algorithms.

    >>> renamed({"algorithm": "dfca", "point": {"algorithm.dfca.level": 0.1}, "algorithms": ["dfca", "ifca"]})
    {'algorithm': 'dfca-auto', 'point': {'algorithm.dfca-auto.level': 0.1}, 'algorithms': ['dfca-auto', 'ifca']}
    """
    if isinstance(record, list):
        return [renamed(item) for item in record] if record and isinstance(record[0], dict) else record
    if not isinstance(record, dict):
        return record
    return {_key(key): _value(key, value) for key, value in record.items()}


def _value(key: str, value: Any) -> Any:
    if key in ("algorithm", "reference") and isinstance(value, str):
        return current(value)
    if key == "algorithm" and isinstance(value, dict):  # options by label
        return {current(label): options for label, options in value.items()}
    if key == "algorithms" and isinstance(value, list):
        return [current(name) if isinstance(name, str) else name for name in value]
    return _key(value) if key == "label" and isinstance(value, str) else renamed(value)


def _key(text: str) -> str:
    return KEY.sub(lambda key: f"algorithm.{RENAMED.get(key[1], key[1])}", text) if "algorithm." in text else text
