"""What a reader may conclude from rows: paired differences, what is beyond chance, who diverged, who had momentum."""

from __future__ import annotations

from collections.abc import Sequence

from dfca.algorithms import base_of
from dfca.base.paired import BEYOND_CHANCE, Scores, Verdict, explanation, pair_up, paired, quoted, verdict_line
from dfca.report.rows import AlgorithmRow, by_point
from dfca.report.wording import DASH

DIVERGED = "‡"  # stands behind an algorithm whose training diverged
MOST_NAMED = 4  # points in a note


def difference_title(rows: Sequence[AlgorithmRow]) -> str:
    """Name the column of differences; an empty text where nothing is compared."""
    compared = [row.compared for row in rows if row.compared is not None]
    if not compared:
        return ""
    spread = any(result.difference.half is not None for result in compared)
    return f"minus {rows[0].reference}" + ("\n± 95 %" if spread else "")


def write_difference(row: AlgorithmRow) -> str:
    """Write the difference of a row to the reference, marked where it is beyond chance."""
    if row.compared is None:
        return DASH
    difference = row.compared.difference
    text = row.metric.signed(difference.mean, difference.half, row.score.mean)
    return text + (BEYOND_CHANCE if row.compared.beyond_chance else "")


def statistics_notes(rows: Sequence[AlgorithmRow]) -> list[str]:
    """Say how differences are to be read, what is beyond chance, who diverged, and what momentum and clustering do."""
    if not rows:
        return []
    metric = rows[0].metric
    compared = [row.compared for row in rows if row.compared is not None]
    lines = explanation(rows[0].reference or "", compared, metric.name, metric.higher_is_better)
    return [line for line in (*lines, verdicts(rows), _divergence(rows), *_controls(rows)) if line]


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
    told.append("all else is not told apart" if told else f"nothing is told apart from {reference}")
    return f"{BEYOND_CHANCE} beyond chance (95 %, Holm over the comparisons of a point): {'; '.join(told)}"


def _divergence(rows: Sequence[AlgorithmRow]) -> str | None:
    """Say whose training diverged, and in how many seeds."""
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


def _controls(rows: Sequence[AlgorithmRow]) -> list[str]:
    """Say who trained with momentum and took a personal last step, and what each of these and clustering did alone.

    momentum alone: between two rows of one algorithm that differ in nothing else that is known; the last step alone:
    before and after it; clustering alone: between the reference and those that have one model, and the same of both.
    """
    known = {row.algorithm: row.momentum for row in rows if row.momentum is not None}
    if len(known) < len({row.algorithm for row in rows}):
        return []  # older runs do not say
    values = sorted(set(known.values()), reverse=True)
    groups = [f"{value:g} {', '.join(quoted(name) for name in known if known[name] == value)}" for value in values]
    lines = [f"momentum in training: {'; '.join(groups)}"] if len(values) > 1 else []
    if len(by_point(rows)) > 1:
        return lines
    reference = rows[0].reference
    last_steps = [_alone(row.algorithm, row, row.scores, row.scores_before_personal) for row in rows]
    parts = {
        "momentum alone": [_between(one, other) for one in rows for other in rows if _differ_in_momentum(one, other)],
        "the personal last step alone": last_steps,
        "clustering alone": [
            _between(one, other) for one in rows for other in rows if _differ_in_clusters(one, other, reference)
        ],
    }
    told = {what: [text for text in texts if text] for what, texts in parts.items()}
    return [*lines, *(f"{what}: {'; '.join(texts)}" for what, texts in told.items() if texts)]


def _differ_in_momentum(one: AlgorithmRow, other: AlgorithmRow) -> bool:
    twins = base_of(one.algorithm) == base_of(other.algorithm) and _is_personal(one) == _is_personal(other)
    alright = not one.diverged_runs and not other.diverged_runs
    return twins and alright and (one.momentum or 0.0) > (other.momentum or 0.0)


def _differ_in_clusters(one: AlgorithmRow, other: AlgorithmRow, reference: str | None) -> bool:
    alike = one.momentum == other.momentum and _is_personal(one) == _is_personal(other)
    gossips = other.kind.models == "one" and other.via == "neighbours"
    clustered = one.algorithm == reference and one.kind.models != "one"
    return alike and clustered and gossips and not one.diverged_runs and not other.diverged_runs


def _is_personal(row: AlgorithmRow) -> bool:
    return bool(row.scores_before_personal)


def _between(one: AlgorithmRow, other: AlgorithmRow) -> str:
    names = f"{quoted(one.algorithm)} minus {quoted(other.algorithm)}"
    return _alone(names, one, one.scores, other.scores)


def _alone(what: str, row: AlgorithmRow, scores: Scores, others: Scores) -> str:
    """Write a difference paired by seed, with a name; an empty text where there are no pairs."""
    pairs = pair_up(scores, others)
    if not pairs:
        return ""
    difference = paired(pairs)
    return f"{what} {row.metric.signed(difference.mean, difference.half, row.score.mean)}"
