"""What a page says in short: which algorithm was best, what the numbers that vary do, who missed a cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from dfca.base.paired import BEYOND_CHANCE
from dfca.experiment.sweep import label_of
from dfca.experiment.variants import write
from dfca.report.rows import AlgorithmRow, metric_of_rows
from dfca.report.statistics import verdicts
from dfca.runs.store.metric import ShownMetric


class Effect(NamedTuple):
    """What a key that varies does to the mean score: its best and its worst value, as written."""

    key: str
    best: str
    best_mean: float
    worst: str
    worst_mean: float
    algorithms: int  # over which the means are


def findings_of(rows: Sequence[AlgorithmRow]) -> dict[str, object]:
    """Choose the rows that the page names in short: the best, the bounds, and those that missed a cluster."""
    servers = [row for row in rows if row.via == "server" and not row.informed and row.score.mean is not None]
    known = [row for row in rows if row.score.mean is not None and not row.partial]
    alone = [row for row in known if row.via == "nobody"]
    gossip = [_score(row) for row in known if row.via == "neighbours"]
    metric = metric_of_rows(rows)
    return {
        "metric": metric,
        "best": [row for row in rows if "score" in row.best],
        "best_server": _best(servers, metric),
        "informed": [row for row in known if row.informed],
        "alone": alone,
        "alone_wins": bool(gossip) and any(metric.beats(_score(row), metric.best(gossip)) for row in alone),
        "missed": [(row.algorithm, row.missed, row.missed_of) for row in rows if row.missed and not row.informed],
        "verdict": _without_mark(verdicts(rows)) if rows else None,
        "diverged": [row for row in rows if row.diverged_runs],
        "none_missed": any(row.missed == 0 and not row.informed for row in rows),
    }


def sweep_findings(rows: Sequence[AlgorithmRow], keys: Sequence[str]) -> dict[str, object]:
    """Choose what the page of a sweep says in short.

    winner: the row with the best score among those that talk to neighbours and are finished; wins: at how many of
    the points each of these was best; effects: of each key on the mean over algorithms and the other keys, the largest
    first; missed: in how many of its runs an algorithm did not find all clusters.
    """
    known = [row for row in rows if row.score.mean is not None and not row.partial]
    rivals = [row for row in known if row.via == "neighbours" and not row.informed]
    several = len({row.algorithm for row in rivals}) > 1
    points = list(dict.fromkeys(row.label for row in rivals))
    metric = metric_of_rows(rows)
    winners = [_best([row for row in rivals if row.label == at], metric) for at in points]
    best = Counter(row.algorithm for row in winners if row is not None)
    missed: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for row in known:
        if row.missed is not None and not row.informed:
            missed[row.algorithm] += row.missed
            runs[row.algorithm] += row.missed_of
    idle = idle_keys(rows, keys)
    effects = [effect for key in keys if key not in idle and (effect := _effect(known, key, metric)) is not None]
    return {
        "metric": metric,
        "idle": idle,
        "winner": _best(rivals, metric),
        "wins": best.most_common() if several else [],
        "points_compared": len(points),
        "effects": sorted(effects, key=lambda effect: -abs(effect.best_mean - effect.worst_mean)),
        "verdict": _without_mark(verdicts(rows)) if rows else None,
        "missed": [(name, number, runs[name]) for name, number in missed.items() if number],
    }


def idle_keys(rows: Sequence[AlgorithmRow], keys: Sequence[str]) -> list[str]:
    """Return the keys that change nothing: at all values, every seed of an algorithm has the same score and traffic."""
    idle = []
    for key in keys:
        alike: dict[tuple[str, str], list[object]] = {}
        for row in rows:
            if key in row.point and row.scores:
                others = label_of({name: value for name, value in row.point.items() if name != key})
                alike.setdefault((row.algorithm, others), []).append((row.scores, row.megabytes_per_client))
        if alike and all(len(same) > 1 and all(one == same[0] for one in same) for same in alike.values()):
            idle.append(key)
    return idle


def _without_mark(line: str | None) -> str | None:
    """Return a note as a sentence of its own."""
    return None if line is None else "B" + line.removeprefix(BEYOND_CHANCE + " b") + "."


def _effect(rows: Sequence[AlgorithmRow], key: str, metric: ShownMetric) -> Effect | None:
    """Compare the values of a key by the mean score of all algorithms that every one of the values has."""
    by_value: dict[str, list[AlgorithmRow]] = {}
    for row in rows:
        if key in row.point:
            by_value.setdefault(write(row.point[key]), []).append(row)
    if len(by_value) < 2:
        return None
    everywhere = set.intersection(*({row.algorithm for row in group} for group in by_value.values()))
    means = {
        value: fmean(_score(row) for row in group if row.algorithm in everywhere)
        for value, group in by_value.items()
        if everywhere
    }
    if not means:
        return None
    high, low = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    best, worst = (high, low) if metric.higher_is_better else (low, high)
    return Effect(key, best, means[best], worst, means[worst], len(everywhere))


def _best(rows: Sequence[AlgorithmRow], metric: ShownMetric) -> AlgorithmRow | None:
    return min(rows, key=lambda row: _score(row) * (-1) ** metric.higher_is_better, default=None)


def _score(row: AlgorithmRow) -> float:
    return math.nan if row.score.mean is None else row.score.mean
