"""What a reader may conclude from rows: paired differences, what is beyond chance, who diverged, who had momentum."""

from __future__ import annotations

from collections.abc import Sequence

from dfca.base.paired import BEYOND_CHANCE, Verdict, explanation, quoted, verdict_line
from dfca.report.rows import AlgorithmRow, by_point
from dfca.runs.store.metric import DASH

DIVERGED = "‡"  # stands behind an algorithm whose training diverged
MOST_NAMED = 4  # points in a note


def difference_title(rows: Sequence[AlgorithmRow]) -> str:
    """Name the column of differences; an empty text where nothing is compared."""
    compared = [row.compared for row in rows if row.compared is not None]
    if not compared:
        return ""
    spread = any(result.difference.p is not None for result in compared)
    return f"minus {rows[0].reference}" + ("\n± 95 %" if spread else "")


def write_difference(row: AlgorithmRow) -> str:
    """Write the difference of a row to the reference, marked where it is beyond chance."""
    if row.compared is None:
        return DASH
    difference = row.compared.difference
    text = row.metric.signed(difference.mean, difference.half, row.score.mean)
    return text + (BEYOND_CHANCE if row.compared.beyond_chance else "")


def statistics_notes(rows: Sequence[AlgorithmRow]) -> list[str]:
    """Say how differences are to be read, what is beyond chance, who diverged, and who had momentum."""
    if not rows:
        return []
    metric = rows[0].metric
    compared = [row.compared for row in rows if row.compared is not None]
    lines = explanation(rows[0].reference or "", compared, metric.name, metric.higher_is_better)
    return [line for line in (*lines, verdicts(rows), _divergence(rows), _momentum(rows)) if line]


def verdicts(rows: Sequence[AlgorithmRow]) -> str | None:
    """Say which algorithms differ from the reference beyond chance; of a sweep, at how many of its points."""
    reference = rows[0].reference or ""
    compared = [(row.algorithm, row.compared) for row in rows if row.compared is not None]
    if len(by_point(rows)) == 1:
        marks = {row.algorithm: f" {DIVERGED}" for row in rows if row.diverged_runs}
        return verdict_line(reference, dict(compared), marks)
    judged: dict[str, list[Verdict]] = {}
    for name, result in compared:
        if result.verdict is not None:
            judged.setdefault(name, []).append(result.verdict)
    if not judged:
        return None
    told = []
    for verdict in ("worse", "better"):
        counts = [
            f"{quoted(name)} at {results.count(verdict)} of {len(results)} points"
            for name, results in judged.items()
            if verdict in results
        ]
        if counts:
            told.append(f"{verdict} than {reference}: {', '.join(counts)}")
    told.append("all else is within chance" if told else "nothing")
    return f"{BEYOND_CHANCE} beyond chance: {'; '.join(told)}"


def _divergence(rows: Sequence[AlgorithmRow]) -> str | None:
    seeds: dict[str, list[str]] = {}
    for row in rows:
        if row.diverged_runs:
            at = f" at {row.label}" if row.label else ""
            number = max(row.runs or row.unfinished, row.diverged_runs)
            seeds.setdefault(row.algorithm, []).append(f"in {row.diverged_runs} of {number} seeds{at}")
    if not seeds:
        return None
    told = []
    for name, places in seeds.items():
        more = f" and at {len(places) - MOST_NAMED} more points" if len(places) > MOST_NAMED else ""
        told.append(f"{quoted(name)} {', '.join(places[:MOST_NAMED])}{more}")
    return (
        f"{DIVERGED} diverged: {'; '.join(told)} (its training loss rose above 10 times that of guessing): such a row "
        "shows a learning rate that is too high for it, not what the method can do"
    )


def _momentum(rows: Sequence[AlgorithmRow]) -> str | None:
    """Say who trained with momentum, where rows differ in it."""
    known = {row.algorithm: row.momentum for row in rows if row.momentum is not None}
    if len(known) < len({row.algorithm for row in rows}):
        return None  # older runs do not say
    values = sorted(set(known.values()), reverse=True)
    groups = [f"{value:g} {', '.join(quoted(name) for name in known if known[name] == value)}" for value in values]
    return f"momentum in training: {'; '.join(groups)}" if len(values) > 1 else None
