"""What the pages of docs/ are written with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from dfca.base.paired import BEYOND_CHANCE, beyond_chance, family_of, intervals_line, pair_up, paired
from dfca.runs.store.metric import ACCURACY

Trials = Sequence[Mapping[str, Any]]
Place = tuple[str, str]
"""A row and a column of a table."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def spread(values: Sequence[float], scale: float = 100, digits: int = 1) -> str:
    """Write mean ± standard deviation."""
    if not values:
        return "–"
    deviation = f" ± {scale * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean(values):.{digits}f}{deviation}"


def differences(asked: Mapping[Place, tuple[Trials, Trials, str]]) -> tuple[dict[Place, str], str]:
    """Write the differences of a table: the cell of each place, and a line that says how to read them.

    asked: for each place trials, those that are taken from them, and what is compared.
    """
    pairs, cells = {}, dict.fromkeys(asked, "–")
    for place, (runs, others, key) in asked.items():
        mine, theirs = ({run["seed"]: run[key] for run in both} for both in (runs, others))
        if values := pair_up(mine, theirs):
            pairs[place] = values
    family = family_of(pairs.values())
    for place, values in pairs.items():
        runs, _, key = asked[place]
        difference = paired(values, family)
        text = ACCURACY.signed(difference.mean, difference.half, mean(run[key] for run in runs))
        cells[place] = text + (BEYOND_CHANCE if beyond_chance(difference, family) else "")
    return cells, f"Differences are paired by seed, {intervals_line(family)}" if pairs else ""
