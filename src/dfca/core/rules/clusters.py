"""What becomes of values that are kept per cluster where clusters are opened, merged, closed and numbered anew.

v_j belongs to cluster j: a number, or a row of numbers, one per client. Each kind of value has a rule: `fresh`, the
value of a cluster of which nothing is known, and `join`, how two values become one.

  j is opened       v_j = fresh
  b joins a         v_a = join(v_a, v_b),  v_b = fresh
  numbered anew     v'_n = v_order(n)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableSequence
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.core.rules.merging import Plan
from dfca.core.rules.relay import MANY, NEVER


class ValueRule(NamedTuple):
    """How one kind of value changes with the clusters."""

    fresh: float  # of a cluster that was just opened, or closed
    join: Callable[[Any, Any], Any]  # of the cluster that two become


def newer(one: Any, other: Any) -> Any:
    """Return the larger of two numbers, or rows of numbers."""
    return torch.maximum(one, other) if isinstance(one, Tensor) else max(one, other)


NEWEST = ValueRule(NEVER, newer)  # of rounds: the newest of an update that is known
COPIES: Mapping[str, ValueRule] = {
    "stamps": NEWEST,
    "origins": ValueRule(MANY, lambda one, other: MANY),
    "folded": NEWEST,
    "updates": ValueRule(0, add),
}
"""What a client remembers of its copy of a cluster, by field of `ClientState`."""
DISTANCES = ValueRule(math.nan, lambda one, other: math.nan)
"""Of what `rules.robust` remembers of recent folds: it is forgotten."""


def merge_values_(values: MutableSequence[Any] | Tensor, plan: Plan, rule: ValueRule) -> None:
    """Merge and close clusters as a survey has decided, in place: values (m,), or (m, N) of many clients."""
    for into, closed, *_ in plan.merges:
        values[into] = rule.join(values[into], values[closed])
    for j in plan.closed:
        values[j] = rule.fresh
