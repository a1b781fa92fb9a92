"""Small multiples: one measure of a sweep in many small figures of the same axes, one per point or choice of keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dfca.experiment.sweep import label_of
from dfca.report.drawing import plots
from dfca.report.drawing.axes import DASHES, Dash, Style
from dfca.report.drawing.curves import ByRound, CurveComparison, Scale, ScoreCurve, by_round, curves_of
from dfca.report.drawing.palette import cluster_colour
from dfca.report.drawing.plots import NamedFigure
from dfca.runs.store.reading import Run

MOST_LINES = 8  # of one axis
MOST = 24  # panels: beyond, nobody looks at each
DASH_ARRAYS: Mapping[Dash, str] = {"--": "6 3", ":": "1.5 2.5", "-.": "7 2 1.5 2"}


class Multiple(NamedTuple):
    """Small figures of one measure; the title of each says where it holds."""

    label: str
    caption: str
    panels: list[NamedFigure]


def grouped(comparisons: Iterable[CurveComparison]) -> dict[str, dict[str, list[CurveComparison]]]:
    """Group comparisons by the key that they are drawn against, then by the measure."""
    made: dict[str, dict[str, list[CurveComparison]]] = {}
    for comparison in comparisons:
        made.setdefault(comparison.key, {}).setdefault(comparison.measure.label, []).append(comparison)
    return made


def against_multiples(
    key: str, by_measure: Mapping[str, Sequence[CurveComparison]], style: Mapping[str, Style]
) -> list[Multiple]:
    """Draw each measure against a key, one panel per choice of the other keys."""
    return [
        _multiple(
            ByRound("", label, same[0].measure.caption, same[0].measure.scale),
            [(label_of(comparison.others), comparison.curves) for comparison in same],
            style,
            key,
        )
        for label, same in by_measure.items()
    ]


def in_one_axis(
    panels: Sequence[tuple[str, Mapping[str, ScoreCurve]]], style: Mapping[str, Style]
) -> tuple[dict[str, ScoreCurve], dict[str, Style]] | None:
    """Put the lines of several panels into one, each named by what it is compared in; None where they are too many."""
    names = dict.fromkeys(name for _, series in panels for name in series)
    if len(panels) < 2 or sum(len(series) for _, series in panels) > MOST_LINES:
        return None
    keys = {title.partition("=")[0] for title, _ in panels}
    curves: dict[str, ScoreCurve] = {}
    styles: dict[str, Style] = {}
    for number, (title, series) in enumerate(panels):
        at = title.partition("=")[2] if len(keys) == 1 and "," not in title else title
        for name, curve in series.items():
            label = at if len(names) == 1 else f"{name}, {at}"
            own = Style(style[name].colour, DASHES[number % len(DASHES)])
            curves[label], styles[label] = curve, Style(cluster_colour(number), "-") if len(names) == 1 else own
    return curves, styles


def by_round_figures(run: Run, style: Mapping[str, Style]) -> list[NamedFigure]:
    """Draw the measures by round with a line per point and algorithm, where they are few."""
    made = []
    for measure in by_round(run.metric):
        panels = [(point.label, curves_of(run.at(point), measure.key)) for point in run.points]
        if merged := in_one_axis([(title, series) for title, series in panels if series], style):
            drawn = plots.draw_curves(*merged, measure.label, measure.scale)
            made.append(NamedFigure(f"{measure.key.replace('_', '-')}-by-round", measure.caption, drawn))
    return made


def by_round_multiples(run: Run, style: Mapping[str, Style]) -> list[Multiple]:
    """Draw the measures by round, one panel per point; none where there are too many points, or one evaluation each."""
    made = []
    for measure in by_round(run.metric) if len(run.points) <= MOST else ():
        panels = [(point.label, curves_of(run.at(point), measure.key)) for point in run.points]
        if shown := [(title, series) for title, series in panels if series]:
            made.append(_multiple(measure, shown, style, "round"))
    return made


def _multiple(
    measure: ByRound,
    panels: Sequence[tuple[str, Mapping[str, ScoreCurve]]],
    style: Mapping[str, Style],
    against: str,
) -> Multiple:
    bounds = _bounds([series for _, series in panels], measure.scale)
    drawn = [
        NamedFigure(f"panel-{number}", "", plots.draw_panel(series, style, against, bounds, measure.scale), title)
        for number, (title, series) in enumerate(panels[:MOST])
    ]
    left_out = f" The first {MOST} of {len(panels)} are shown." if len(panels) > MOST else ""
    return Multiple(measure.label, measure.caption + left_out, drawn)


def _bounds(panels: Sequence[Mapping[str, ScoreCurve]], scale: Scale) -> tuple[float, float]:
    """Return bounds that cut no line and no band off; of percentages by tens."""
    values = [
        value
        for series in panels
        for curve in series.values()
        for mean, std in zip(curve.mean, curve.std or [0.0] * len(curve.mean), strict=True)
        for value in (mean - std, mean + std)
        if math.isfinite(value)
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if scale == "number":
        edge = 0.06 * (high - low) or 0.5
        return low - edge, high + edge
    return max(0.0, 10 * (100 * low // 10)) - 1.0, min(100.0, 10 * -(-100 * high // 10)) + 1.0
