"""What a reader may conclude from rows: paired differences, what is beyond chance, who diverged, who had momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dfca.algorithms import base_of
from dfca.base.paired import (
    BEYOND_CHANCE,
    FIRST_CHOICE,
    Compared,
    Scores,
    choose_reference,
    compare,
    explanation,
    pair_up,
    paired,
    quoted,
    verdict_line,
)

DIVERGED = "‡"
"""Stands behind an algorithm whose training diverged."""
DIVERGED_SHARE = 0.1  # of the clients, from which on a run has diverged
HIGH_LOSS = 50.0  # cross-entropy of runs before version 0.3, whose rows do not count the clients: 10 ln(150)
MOST_NAMED = 4  # points in a note
Row = Mapping[str, Any]


def diverged(run: Row, clients: int | None) -> bool:
    """Return whether training diverged in a run: at a tenth of its clients an update was not finite, or the training
    loss was above ten times that of guessing."""
    if "diverged_clients" in run:
        return bool(run["diverged_clients"] > 0 and run["diverged_clients"] >= DIVERGED_SHARE * (clients or 1))
    if "accuracy" not in run or "train_loss" not in run or not run.get("finished"):
        return False
    loss = run["train_loss"]  # None: it was not finite
    return loss is None or not math.isfinite(loss) or loss > HIGH_LOSS


def compare_rows_(rows: Sequence[dict[str, Any]]) -> None:
    """Write into each row its reference and how it compares with it at its point; one reference for all points."""
    reference = _reference_of(rows)
    for group in by_point(rows):
        at = {row["algorithm"]: row["scores"] for row in group if row["scores"]}
        metric = group[0]["metric"]
        found = compare(at, reference, metric.higher_is_better) if reference is not None and reference in at else {}
        for row in group:
            row["reference"], row["compared"] = reference, found.get(row["algorithm"])


def _reference_of(rows: Sequence[Row]) -> str | None:
    """Choose dfca-auto, or else the best mean over the points among the algorithms that most points have."""
    if not rows:
        return None
    means: dict[str, dict[int, float | None]] = {}
    for number, row in enumerate(rows):
        if row["scores"]:
            means.setdefault(row["algorithm"], {})[number] = row["accuracy_mean"]
    most = max(map(len, means.values()), default=0)
    everywhere = {name: each for name, each in means.items() if len(each) == most or name == FIRST_CHOICE}
    bounds = {row["algorithm"] for row in rows if row["informed"]}
    return choose_reference(everywhere, rows[0]["metric"].higher_is_better, bounds)


def by_point(rows: Sequence[Any]) -> list[list[Any]]:
    """Group rows by their point, in their order."""
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row["label"], []).append(row)
    return list(groups.values())


def difference_title(rows: Sequence[Row]) -> str:
    """Name the column of differences; an empty text where nothing is compared."""
    compared = [row["compared"] for row in rows if row["compared"] is not None]
    if not compared:
        return ""
    spread = any(each.difference.half is not None for each in compared)
    return f"minus {rows[0]['reference']}" + ("\n± 95 %" if spread else "")


def write_difference(row: Row) -> str:
    """Write the difference of a row to the reference, marked where it is beyond chance."""
    compared: Compared | None = row["compared"]
    if compared is None:
        return "–"
    difference = compared.difference
    text: str = row["metric"].signed(difference.mean, difference.half, row["accuracy_mean"])
    return text + (BEYOND_CHANCE if compared.beyond_chance else "")


def statistics_notes(rows: Sequence[Row]) -> list[str]:
    """Say how differences are to be read, what is beyond chance, who diverged, and what momentum and clustering do."""
    if not rows:
        return []
    metric = rows[0]["metric"]
    compared = [row["compared"] for row in rows if row["compared"] is not None]
    lines = explanation(rows[0]["reference"] or "", compared, metric.name, metric.higher_is_better)
    return [each for each in (*lines, verdicts(rows), _divergence(rows), *_controls(rows)) if each]


def verdicts(rows: Sequence[Row]) -> str | None:
    """Say which algorithms differ from the reference beyond chance; of a sweep, at how many of its points."""
    groups = by_point(rows)
    if len(groups) == 1:
        found = {row["algorithm"]: row["compared"] for row in rows if row["compared"] is not None}
        marks = {row["algorithm"]: f" {DIVERGED}" for row in rows if row["diverged_runs"]}
        return verdict_line(rows[0]["reference"], found, marks)
    judged = [row for row in rows if row["compared"] is not None and row["compared"].verdict is not None]
    if not judged:
        return None
    reference = rows[0]["reference"]
    told = []
    for verdict in ("worse", "better"):
        counts = []
        for name in dict.fromkeys(row["algorithm"] for row in judged):
            mine = [row["compared"].verdict for row in judged if row["algorithm"] == name]
            if number := mine.count(verdict):
                counts.append(f"{quoted(name)} at {number} of {len(mine)} points")
        if counts:
            told.append(f"{verdict} than {reference}: {', '.join(counts)}")
    told.append("all else is not told apart" if told else f"nothing is told apart from {reference}")
    return f"{BEYOND_CHANCE} beyond chance (95 %, Holm over the comparisons of a point): {'; '.join(told)}"


def _divergence(rows: Sequence[Row]) -> str | None:
    """Say whose training diverged, and in how many seeds."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["diverged_runs"]:
            at = f" at {row['label']}" if row["label"] else ""
            number = max(row["runs"] or row["unfinished"], row["diverged_runs"])
            found.setdefault(row["algorithm"], []).append(f"in {row['diverged_runs']} of {number} seeds{at}")
    if not found:
        return None
    told = []
    for name, places in found.items():
        more = f" and at {len(places) - MOST_NAMED} more points" if len(places) > MOST_NAMED else ""
        told.append(f"{quoted(name)} {', '.join(places[:MOST_NAMED])}{more}")
    return (
        f"{DIVERGED} diverged: {'; '.join(told)} (its training loss rose above 10 times that of guessing): such a row "
        "shows a learning rate that is too high for it, not what the method can do"
    )


def _controls(rows: Sequence[Row]) -> list[str]:
    """Say who trained with momentum and took a personal last step, and what each of these and clustering did alone.

    momentum alone: between two rows of one algorithm that differ in nothing else that is known; the last step alone:
    before and after it; clustering alone: between the reference and those that have one model, and the same of both.
    """
    known: dict[str, float] = {row["algorithm"]: row["momentum"] for row in rows if row["momentum"] is not None}
    if len(known) < len({row["algorithm"] for row in rows}):
        return []  # of older runs nobody knows
    values = sorted(set(known.values()), reverse=True)
    groups = [f"{value:g} {', '.join(quoted(name) for name in known if known[name] == value)}" for value in values]
    lines = [f"momentum in training: {'; '.join(groups)}"] if len(values) > 1 else []
    if len(by_point(rows)) > 1:
        return lines
    reference = rows[0]["reference"]
    last_steps = [_alone(row["algorithm"], row, row["scores"], row["scores_before_personal"]) for row in rows]
    parts = {
        "momentum alone": [_between(one, other) for one in rows for other in rows if _differ_in_momentum(one, other)],
        "the personal last step alone": last_steps,
        "clustering alone": [
            _between(one, other) for one in rows for other in rows if _differ_in_clusters(one, other, reference)
        ],
    }
    told = {what: [text for text in texts if text] for what, texts in parts.items()}
    return [*lines, *(f"{what}: {'; '.join(texts)}" for what, texts in told.items() if texts)]


def _differ_in_momentum(one: Row, other: Row) -> bool:
    twins = base_of(one["algorithm"]) == base_of(other["algorithm"]) and _is_personal(one) == _is_personal(other)
    alright = not one["diverged_runs"] and not other["diverged_runs"]
    return bool(twins and alright and one["momentum"] > other["momentum"])


def _differ_in_clusters(one: Row, other: Row, reference: str) -> bool:
    alike = one["momentum"] == other["momentum"] and _is_personal(one) == _is_personal(other)
    gossips = other["one_model"] and other["via"] == "neighbours"
    clustered = one["algorithm"] == reference and not one["one_model"]
    return bool(alike and clustered and gossips and not one["diverged_runs"] and not other["diverged_runs"])


def _is_personal(row: Row) -> bool:
    return bool(row["scores_before_personal"])


def _between(one: Row, other: Row) -> str:
    names = f"{quoted(one['algorithm'])} minus {quoted(other['algorithm'])}"
    return _alone(names, one, one["scores"], other["scores"])


def _alone(what: str, row: Row, scores: Scores, others: Scores) -> str:
    """Write a difference paired by seed, with a name; an empty text where there are no pairs."""
    pairs = pair_up(scores, others)
    if not pairs:
        return ""
    found = paired(pairs)
    return f"{what} {row['metric'].signed(found.mean, found.half, row['accuracy_mean'])}"
