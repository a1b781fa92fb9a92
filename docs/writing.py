"""What the pages of docs/ are written with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, stdev


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
