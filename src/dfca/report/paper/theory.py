"""Lemmas 1 and 3 of the paper against measurements: does mixing contract, keep the average, does assignment descend?

Lemma 3: with a symmetric, doubly stochastic W on the graph, Disp' <= λ² Disp per round, λ = 1 - spectral gap, and the
network's average stays. Measured where nothing else moves the models: local.steps = 0, metrics of every round. Ratios
count while the disagreement is above what rounding leaves of it.

Lemma 1: sum_i min_j F(θ_ij, D_i) <= sum_i F(θ_i,c(i), D_i), c(i) what client i trained: measured in every round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from dfca.report.tables import TableCell, TextTable
from dfca.report.wording import span
from dfca.runs.store.metric import DASH
from dfca.runs.store.reading import Run
from dfca.runs.store.rows import History, PointRow
from dfca.sim.metrics_table import PointValues

ROUNDING = 1e-9  # the share of the first disagreement below which float32 rounding, not mixing, makes the ratios
SLACK = 1e-4  # A ratio counts as within the bound up to this share: single precision, five-digit logs


class Mixing(NamedTuple):
    """Mixing alone at one point, over all seeds: bound λ² and ratios Disp'/Disp; drift: relative, of the average."""

    point: PointValues
    label: str
    models: int
    gaps: list[float]
    bounds: list[float]
    worst: list[float]  # per seed
    typical: list[float]  # per seed: geometric mean over rounds
    within: int  # seeds in which no round broke the bound
    drift: float  # in the first measured round, mean over seeds


class AssignmentDescent(NamedTuple):
    """Assignment at one point and algorithm: rounds, those in which F_global rose by it, and the mean descent in %."""

    label: str
    algorithm: str
    rounds: int
    raised: int
    descent: float


def mixing(run: Run) -> list[Mixing]:
    """Measure the points of a sweep where clients mix and do not train; none without such points."""
    measured = []
    for point, curves in _points(run):
        if point.at.get("local.steps") != 0:
            continue
        gap_of = {graph.seed: graph.facts["spectral_gap"] for graph in run.graphs if graph.digest == point.digest}
        known = [(gap_of[c.seed], ratios(c.curve("disagreement")), c) for c in curves if c.seed in gap_of]
        seeds = [(gap, values, curve) for gap, values, curve in known if values]
        if not seeds:
            continue
        bounds = [(1 - gap) ** 2 for gap, _, _ in seeds]
        worst = [max(values) for _, values, _ in seeds]
        measured.append(
            Mixing(
                {key: value for key, value in point.at.items() if key != "local.steps"},
                point.label,
                int(point.at.get("clusters", 1)),
                [gap for gap, _, _ in seeds],
                bounds,
                worst,
                [prod(values) ** (1 / len(values)) for _, values, _ in seeds],
                sum(ratio <= bound * (1 + SLACK) for ratio, bound in zip(worst, bounds, strict=True)),
                sum(curve.curve("mixing_drift")[0] for *_, curve in seeds) / len(seeds),
            )
        )
    return measured


def descents(run: Run) -> list[AssignmentDescent]:
    """Measure what assignment did to F_global where clients train and choose among models; only in such sweeps."""
    if not mixing(run):
        return []
    measured = []
    for point, curves in _points(run):
        for name in dict.fromkeys(curve.algorithm for curve in curves):
            pairs = [
                pair
                for curve in curves
                if curve.algorithm == name and "F_before_assignment" in curve.measures
                for pair in zip(curve.curve("F_before_assignment"), curve.curve("F_global"), strict=True)
            ]
            if pairs and point.at.get("local.steps") != 0:
                raised = sum(after > before * (1 + 1e-6) for before, after in pairs)
                mean = 100 * sum(1 - after / before for before, after in pairs) / len(pairs)
                measured.append(AssignmentDescent(_name(point.at), name, len(pairs), raised, mean))
    return measured


def ratios(disagreement: Sequence[float]) -> list[float]:
    """Return Disp(t+1) / Disp(t) for the rounds in which it is more than rounding.

    >>> ratios([1.0, 0.5, 0.1])
    [0.5, 0.2]
    """
    floor = ROUNDING * disagreement[0] if disagreement else 0.0
    return [after / before for before, after in pairwise(disagreement) if after > floor]


def theory_tables(run: Run) -> list[TextTable]:
    """Make the tables of both lemmas; none for other experiments."""
    made = []
    if measured := mixing(run):
        columns = ["graph", "models", "weights", "spectral gap", "bound λ²", "worst\nratio", "mean\nratio"]
        columns += ["within\nthe bound", "drift of the\naverage %"]
        texts = [
            [
                _graph(at.point),
                f"{at.models}",
                str(at.point.get("mixing.weights", DASH)),
                *(span(values, ".3f") for values in (at.gaps, at.bounds, at.worst, at.typical)),
                f"{at.within} of {len(at.worst)}",
                f"{100 * at.drift:.2g}",
            ]
            for at in measured
        ]
        words = [True, False, True, *[False] * 6]
        title = "mixing alone: disagreement per round (Lemma 3)"
        made.append(TextTable(title, columns, words, [list(map(TableCell, line)) for line in texts]))
    if assigned := descents(run):
        columns = ["graph, weights", "algorithm", "rounds", "rounds in which\nF_global rose"]
        columns += ["mean descent\nby assignment %"]
        texts = [[d.label, d.algorithm, f"{d.rounds}", f"{d.raised}", f"{d.descent:.2g}"] for d in assigned]
        words = [True, True, False, False, False]
        title = "assignment and F_global (Lemma 1)"
        made.append(TextTable(title, columns, words, [list(map(TableCell, line)) for line in texts]))
    return made


def theory_notes(run: Run) -> list[str]:
    """Return what the reader of these tables must know, line by line."""
    if not theory_tables(run):
        return []
    return [
        "ratio: the disagreement after a round of mixing over that before it; a span is over seeds and graphs",
        "bound: λ² = (1 − spectral gap)²; within: seeds in which no round broke it; a gap of 0 is a graph in pieces",
        "drift: how far the first round of mixing moved the average of all clients' models, relative to its length",
        "several models: only the clients that train a model send it, so the matrix is not the lemma's",
    ]


def drifts(run: Run) -> dict[str, list[list[float]]]:
    """Return by rule and number of models how far each round of mixing alone moved the average: a list per run."""
    by_rule: dict[str, list[list[float]]] = {}
    for point, curves in _points(run):
        at = point.at
        if at.get("local.steps") == 0 and at.get("topology.name", "erdos-renyi") == "erdos-renyi":
            models = "everybody mixes" if at.get("clusters") == 1 else f"{at.get('clusters')} models"
            name = f"{at.get('mixing.weights', '')}, {models}"
            by_rule.setdefault(name, []).extend(curve.curve("mixing_drift") for curve in curves)
    return {name: lines for name, lines in by_rule.items() if lines}


def _points(run: Run) -> Iterator[tuple[PointRow, list[History]]]:
    """Yield every point of a sweep with the curves of its finished trials."""
    for point in run.points if run.swept else ():
        done = {(trial.algorithm, trial.seed) for trial in run.trials_at(point) if trial.finished}
        curves = (curve for curve in run.histories if curve.digest == point.digest)
        yield point, [curve for curve in curves if (curve.algorithm, curve.seed) in done]


def _graph(at: PointValues) -> str:
    return str(at["topology.name"]) if "topology.name" in at else f"p = {at.get('topology.p', DASH)}"


def _name(at: PointValues) -> str:
    weights = f", {at['mixing.weights']}" if "mixing.weights" in at else ""
    return _graph(at) + weights
