"""What the pages of docs/ are written with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from dfca.base.paired import BEYOND_CHANCE, holm, pair_up, paired, quoted
from dfca.runs.store.metric import ACCURACY

PAIRED = "Differences are paired by seed, ± half of the 95 % confidence interval."
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
    """Write the differences of a table: the cell of each place, and a line that says which are beyond chance.

    asked: for each place trials, those that are taken from them, and what is compared.
    """
    pairs, cells = {}, dict.fromkeys(asked, "–")
    for place, (runs, others, key) in asked.items():
        mine, theirs = ({run["seed"]: run[key] for run in each} for each in (runs, others))
        if found := pair_up(mine, theirs):
            pairs[place] = found
    beyond, line = judge(pairs)
    for place, values in pairs.items():
        runs, _, key = asked[place]
        found = paired(values)
        text = ACCURACY.signed(found.mean, found.half, mean(run[key] for run in runs))
        cells[place] = text + (BEYOND_CHANCE if place in beyond else "")
    return cells, line


def judge(pairs: Mapping[Place, Sequence[float]]) -> tuple[set[Place], str]:
    """Return the places whose paired differences are beyond chance, and a line that names them.

    Chance is judged for all comparisons of a column together, by Holm's correction.
    """
    beyond: set[Place] = set()
    told, number = [], 0
    for column in dict.fromkeys(column for _, column in pairs):
        found = {row: paired(values).p for (row, other), values in pairs.items() if other == column}
        known = {row: p for row, p in found.items() if p is not None}
        rejected, number = holm(known), number + len(known)
        beyond |= {(row, column) for row in rejected}
        if rejected:
            told.append(f"{column}: {', '.join(quoted(row) for row in known if row in rejected)}")
    if not number:
        return set(), ""
    return (
        beyond,
        f"{BEYOND_CHANCE} beyond chance (95 %, Holm over the comparisons of a column): {'; '.join(told) or 'none'}",
    )
