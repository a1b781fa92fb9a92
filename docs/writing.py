"""What the pages of docs/ are written with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from dfca.paired import pair_up, paired
from dfca.runs.store.metric import ACCURACY

PAIRED = "Differences are paired by seed, ± half of the 95 % confidence interval."


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


def difference(runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], key: str = "accuracy") -> str:
    """Write the difference of trials to others in points, paired by seed, ± half of its 95 % interval."""
    mine, theirs = ({run["seed"]: run[key] for run in each} for each in (runs, others))
    pairs = pair_up(mine, theirs)
    if not pairs:
        return "–"
    found = paired(pairs)
    return ACCURACY.signed(found.mean, found.half, mean(mine.values()))
