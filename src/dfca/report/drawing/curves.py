"""Curves of a run: measures by round, and of a sweep against each number that varies; no drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dfca.report.rows import MeanStd, all_found
from dfca.runs.store.metric import ShownMetric
from dfca.runs.store.reading import Run
from dfca.runs.store.rows import PointRow, TrialRow, mean_of
from dfca.sim.metrics_table import EvaluationRow, PointValues, traffic_bytes

Scale = Literal["percent", "number"]
Against = Literal["round", "traffic", "time"]
AXES: Mapping[Against, str] = {"round": "round", "traffic": "MB per client", "time": "virtual time (s)"}
GRID = 200  # places of a mean over seeds that were evaluated at different ones


class ByRound(NamedTuple):
    """A measure that is drawn by round: its key, and how it is shown."""

    key: str
    label: str
    caption: str
    scale: Scale = "percent"


def by_round(metric: ShownMetric) -> tuple[ByRound, ...]:
    return (
        ByRound(metric.key, metric.label, own_caption(metric), scale_of(metric)),
        ByRound(
            "cluster_accuracy",
            "clients in the right cluster (%)",
            "Share of clients that train with the clients of their true group.",
        ),
    )


def own_caption(metric: ShownMetric) -> str:
    """Say what the score of a client is."""
    less = "" if metric.higher_is_better else " Less is better."
    return f"{metric.capitalised} of the model that each client would use, on test data like its own.{less}"


def scale_of(metric: ShownMetric) -> Scale:
    return "percent" if metric.percent else "number"


class ScoreCurve(NamedTuple):
    """A measure by round, or against a key of the config: the mean over seeds and, with several, the deviation."""

    x: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float] | None = None


class Measure(NamedTuple):
    """What a finished run gives for a figure against a key of the config."""

    value: Callable[[TrialRow, PointRow], float | None]
    label: str
    caption: str
    banded: bool = True  # a band over yes and no would say nothing
    scale: Scale = "percent"


class CurveComparison(NamedTuple):
    """Curves of all algorithms for one measure against one key, at one choice of the other keys that vary."""

    key: str
    others: PointValues
    measure: Measure
    curves: dict[str, ScoreCurve]


def measures(metric: ShownMetric) -> tuple[Measure, ...]:
    return (
        Measure(lambda trial, _: trial.score, metric.label, own_caption(metric), scale=scale_of(metric)),
        Measure(
            lambda trial, _: trial.all_models_score,
            f"all-models {metric.label}",
            f"{metric.capitalised} of each client's models on test data of every group.",
            scale=scale_of(metric),
        ),
        Measure(
            lambda trial, _: None if trial.cluster_accuracy is None else float(all_found(trial)),
            "runs that found all clusters (%)",
            "Share of runs that put every client into its cluster.",
            banded=False,
        ),
        Measure(
            lambda trial, point: traffic / (point.clients or 1) / 1e6 if (traffic := traffic_bytes(trial)) else None,
            AXES["traffic"],
            "What a client sent and received in the whole run; the mean over clients.",
            scale="number",
        ),
    )


def curves_of(run: Run, measure: str, against: Against = "round") -> dict[str, ScoreCurve]:
    """Return the curves of all algorithms; none where each has one point, which the tables show."""
    curves = {name: curve for name in run.algorithms if (curve := curve_of(run, name, measure, against))}
    return curves if any(len(set(curve.x)) > 1 for curve in curves.values()) else {}


def curve_of(run: Run, algorithm: str, measure: str, against: Against = "round") -> ScoreCurve | None:
    """Return the mean and standard deviation of a measure over seeds, or None where it has no values.

    Of a list (one value per cluster) the mean counts. As in the table: over the finished runs where there are any,
    else over the rounds that all runs so far have.
    """
    finished = {trial.seed for trial in run.trials if trial.algorithm == algorithm and trial.finished}
    by_seed: dict[int, dict[int, tuple[float, float]]] = {}
    for line in run.metrics:
        if line.algorithm == algorithm and (not finished or line.seed in finished):
            x, value = _abscissa(line, against, run.points[0].clients), known_value(line, measure)
            if x is not None and value is not None:
                by_seed.setdefault(line.seed, {})[line.round] = x, value
    rounds = sorted(set.intersection(*map(set, by_seed.values()))) if by_seed else []
    if not rounds:
        return None
    table = np.array([[values[round] for round in rounds] for values in by_seed.values()])  # (seeds, rounds, 2)
    std = table[..., 1].std(axis=0, ddof=1).tolist() if len(table) > 1 else None
    x, mean = table.mean(axis=0).T.tolist()
    return ScoreCurve(rounds if against == "round" else x, mean, std)


def known_value(line: EvaluationRow, measure: str) -> float | None:
    """Return a measure of an evaluation, None where no client had a model yet: its score would be 0."""
    nobody = line.assignments and len(line.get("without_models") or ()) == len(line.assignments)
    return None if nobody else mean_of(line.get(measure))


def _abscissa(line: EvaluationRow, against: Against, clients: int | None) -> float | None:
    if against == "round":
        return line.round
    if against == "time":
        return line.time_s
    total, number = traffic_bytes(line), clients or len(line.assignments)
    return total / number / 1e6 if total is not None and number else None


def mean_curve(courses: Iterable[tuple[Sequence[float], Sequence[float | None]]]) -> ScoreCurve | None:
    """Return mean and deviation over seeds on a common grid; between evaluations the last one counts."""
    pairs = []
    for x, y in courses:
        known = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
        if known:
            pairs.append(np.asarray(known, float).T)
    if not pairs:
        return None
    if all(len(pair[0]) == len(pairs[0][0]) and np.allclose(pair[0], pairs[0][0]) for pair in pairs):
        grid = pairs[0][0]
    else:
        first, last = max(pair[0][0] for pair in pairs), min(pair[0][-1] for pair in pairs)
        grid = np.linspace(first, last, GRID) if first < last else np.array([last])
    table = np.array([b[np.searchsorted(a, grid + 1e-9, side="right") - 1] for a, b in pairs])
    std = table.std(axis=0, ddof=1).tolist() if len(table) > 1 else None
    return ScoreCurve(grid.tolist(), table.mean(axis=0).tolist(), std)


def comparisons(run: Run) -> Iterator[CurveComparison]:
    """Compare the algorithms of a sweep in every measure against every number that varies."""
    for key in run.varying:
        if len(_numbers(run, key)) < 2:
            continue
        for others in _choices(run, key):
            for measure in measures(run.metric):
                drawn = {name: _curve_against(run, name, key, others, measure) for name in run.algorithms}
                curves = {name: curve for name, curve in drawn.items() if curve is not None}
                if any(len(curve.x) > 1 for curve in curves.values()):
                    yield CurveComparison(key, others, measure, curves)


def _numbers(run: Run, key: str) -> list[float]:
    """Return the numbers that a key has in the sweep, ascending; none if it has other values too."""
    values = [point.at[key] for point in run.points if key in point.at]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return []  # a list among them cannot be in a set
    return sorted(set(values))


def _choices(run: Run, key: str) -> list[PointValues]:
    """Return the different settings of the other keys at the points that set this one."""
    choices: list[PointValues] = []
    for point in run.points:
        others = _others(point, key)
        if others is not None and others not in choices:
            choices.append(others)
    return choices


def _others(point: PointRow, key: str) -> PointValues | None:
    return {name: value for name, value in point.at.items() if name != key} if key in point.at else None


def _curve_against(run: Run, algorithm: str, key: str, others: PointValues, measure: Measure) -> ScoreCurve | None:
    """Return the mean and deviation over seeds of a measure against a key, at the points that agree in the others."""
    means: dict[float, tuple[float, float | None]] = {}
    for point in run.points:
        if _others(point, key) == others:
            trials = [trial for trial in run.trials_at(point) if trial.finished and trial.algorithm == algorithm]
            mean, std = MeanStd.of(measure.value(trial, point) for trial in trials)
            if mean is not None:
                means[point.at[key]] = mean, std
    if not means:
        return None
    x = sorted(means)
    stds = [means[value][1] for value in x]
    banded = measure.banded and any(std is not None for std in stds)
    return ScoreCurve(x, [means[value][0] for value in x], [std or 0.0 for std in stds] if banded else None)
