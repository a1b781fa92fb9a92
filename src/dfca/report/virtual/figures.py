"""The figures of runs in virtual time: courses, measures against the number that varies, joiners, ages, timelines.

VirtualResults (a run folder or a file of results) -> sections of figures -> the page, `figures/` of the folder, docs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dfca.report.drawing.axes import Style, zoom_of
from dfca.report.drawing.curves import ScoreCurve, mean_curve, scale_of
from dfca.report.drawing.palette import CLUSTERS, GREY
from dfca.report.drawing.plots import NamedFigure, Scale, draw_curves
from dfca.report.rows import MeanStd, kind_of
from dfca.report.virtual.plots import Mark, draw_ages, draw_courses, draw_lanes, styles_of
from dfca.report.virtual.summary import Axis, VirtualResults, finished, rows_of, traffic_to_target, variants
from dfca.report.wording import slug
from dfca.runs.store.metric import ShownMetric
from dfca.runs.store.rows import PointRow, TrialRow

MOST_LANES = 3  # timelines
OLDEST = 8  # the last bar of the ages
JOINER_STYLES = {
    "late joiners": Style(CLUSTERS[4], "-"),
    "the others": Style(CLUSTERS[0], "-"),
    "95 % of them": Style(GREY, ":"),
}


class VirtualMeasure(NamedTuple):
    """What is drawn against the number that varies: of a trial, how it is written, and the name of the file."""

    value: Callable[[TrialRow], float | None]
    label: str
    scale: Scale
    name: str
    caption: str


def _measures(metric: ShownMetric) -> tuple[VirtualMeasure, ...]:
    return (
        VirtualMeasure(
            lambda row: row.time_to_target_s,
            "virtual s to the target",
            "amount",
            "target",
            "Virtual time until the mean score was first seen at the target.",
        ),
        VirtualMeasure(
            lambda row: row.score,
            f"{metric.name} in the end" + (f" ({metric.sign})" if metric.sign else ""),
            scale_of(metric),
            metric.key.replace("_", "-"),
            f"{metric.capitalised} at the end of the run.",
        ),
        VirtualMeasure(
            lambda row: row.idle_share,
            "idle share (%)",
            "percent",
            "idle",
            "The part of a client's time in which it did not train, the mean over clients.",
        ),
        VirtualMeasure(
            lambda row: None if (traffic := traffic_to_target(row)) is None else traffic / 1e6,
            "MB to the target",
            "amount",
            "megabytes",
            "What all clients had sent and received when the target was first seen.",
        ),
    )


def virtual_drawings(results: VirtualResults) -> dict[str, list[NamedFigure]]:
    """Draw everything there is to draw, by section: over_time, against, joiners, ages, timelines."""
    style = styles_of(results.variants)
    return {
        "over_time": list(_over_time(results, style)),
        "against": list(_against(results, style)),
        "joiners": list(_joiners(results)),
        "ages": list(_ages(results, style)),
        "timelines": list(_timelines(results)),
    }


def _over_time(results: VirtualResults, style: Mapping[str, Style]) -> Iterator[NamedFigure]:
    """Draw the score against virtual time, and against traffic."""
    axis, metric = results.axis, results.run.metric
    for value in dict.fromkeys((axis.values[0], axis.values[-1])):
        title, tail = (f"{axis.key} = {value:g}", f"-{value:g}") if axis.key else ("", "")
        marks = _marks(results.head(value), metric)
        for x, label, stem, what in (
            ("time_s", "virtual time (s)", "time", "virtual time"),
            ("megabytes", "MB per client", "traffic", "what a client has sent and received"),
        ):
            courses = {name: rows_of(results.courses, axis, value, name) for name in results.variants}
            curves = {
                name: mean_curve(
                    (course.time_s if x == "time_s" else course.megabytes, course.score) for course in group
                )
                for name, group in courses.items()
            }
            series = {name: curve for name, curve in curves.items() if curve is not None}
            if series:
                shown = [mark for mark in marks if x == "time_s" or mark.begin is None]
                figure = draw_courses(series, style, label, shown, metric)
                yield NamedFigure(f"{stem}{tail}", f"{metric.capitalised} against {what}.", figure, title)
                if metric.percent and (zoom := zoom_of(series)) is not None:
                    figure = draw_courses(series, style, label, shown, metric, zoom)
                    caption = f"A closer look, without {', '.join(zoom.outside)}: {metric.name} against {what}."
                    yield NamedFigure(f"{stem}{tail}-closer", caption, figure, title)


def _marks(point: PointRow, metric: ShownMetric) -> list[Mark]:
    marks = []
    target = point.clock.get("target_accuracy", point.clock.get("target"))
    if target is not None:
        text = f"{100 * target:g} %" if metric.percent else f"{target:g}"
        marks.append(Mark(f"target {text}", height=target))
    world = point.world or {}
    for partition in world.get("partitions", ()):
        end_s = partition["end_s"] or point.clock.get("until_s")
        marks.append(Mark("apart", begin=partition["begin_s"], end=end_s))
    joins = sorted({joiner["at_s"] for joiner in world.get("late_joiners", ())})
    return marks + [Mark("join", begin=at_s) for at_s in joins[:1]]


def _against(results: VirtualResults, style: Mapping[str, Style]) -> Iterator[NamedFigure]:
    """Draw the measures of the finished trials against the number that varies."""
    axis, rows = results.axis, finished(results.run)
    for measure in _measures(results.run.metric) if axis.key else ():
        groups = {name: rows_of(rows, axis, variant=name) for name in results.variants}
        curves = {name: _curve(group, axis, measure) for name, group in groups.items()}
        series = {name: curve for name, curve in curves.items() if curve.x}
        if any(len(curve.x) > 1 for curve in series.values()):
            tried = {name: {axis.at(row.point) for row in group} for name, group in groups.items()}
            never = [name for name in results.variants if len(curves[name].x) < len(tried[name])]
            missing = f" Not drawn where a run never got there: {', '.join(never)}." if never else ""
            figure = draw_curves(series, style, measure.label, measure.scale, axis.key)
            yield NamedFigure(f"{measure.name}-by-{axis.key.rpartition('.')[2]}", measure.caption + missing, figure)


def _curve(rows: Sequence[TrialRow], axis: Axis, measure: VirtualMeasure) -> ScoreCurve:
    """Return the means at the values of the axis that all runs have: a mean over those that got there would flatter."""
    points = []
    for value in axis.values:
        numbers = [measure.value(row) for row in rows_of(rows, axis, value)]
        mean, std = MeanStd() if None in numbers else MeanStd.of(numbers)
        if mean is not None and (measure.scale != "amount" or mean > 0):
            points.append((value, mean, std or 0.0))
    return ScoreCurve(*zip(*points, strict=True)) if points else ScoreCurve((), ())


def _joiners(results: VirtualResults) -> Iterator[NamedFigure]:
    axis, value, metric = results.axis, results.axis.values[-1], results.run.metric
    factor = 0.95 if metric.higher_is_better else 1 / 0.95
    for name in results.variants:
        group = [course for course in rows_of(results.courses, axis, value, name) if course.joiners]
        late = mean_curve((course.time_s, course.joiners) for course in group)
        others = mean_curve((course.time_s, course.others) for course in group)
        if late is None or others is None:
            continue
        near = ScoreCurve(others.x, [factor * mean for mean in others.mean])
        series = dict(zip(JOINER_STYLES, (late, others, near), strict=True))
        joins = [joiner["at_s"] for joiner in (results.head(value).world or {})["late_joiners"]]
        figure = draw_courses(series, JOINER_STYLES, "virtual time (s)", [Mark("join", begin=min(joins))], metric)
        caption = (
            f"Mean {metric.name} of the clients that join late, each with the models that it took from its neighbours."
        )
        yield NamedFigure(f"joiners-{slug(name)}", caption, figure, name)


def _ages(results: VirtualResults, style: Mapping[str, Style]) -> Iterator[NamedFigure]:
    axis, rows = results.axis, finished(results.run)
    value = axis.values[-1]
    series = {}
    for name in results.variants:
        counts: dict[int, float] = {}
        for row in rows_of(rows, axis, value, name) if kind_of(name.split()[0]).via == "neighbours" else ():
            for age, number in row.staleness.items():
                whole = min(OLDEST, int(float(age)))
                counts[whole] = counts.get(whole, 0) + number
        if total := sum(counts.values()):
            series[name] = {age: number / total for age, number in counts.items()}
    if series:
        where = f" at {axis.key} = {value:g}" if axis.key else ""
        unit = results.head(value).clock.get("staleness", {}).get("unit", "updates")
        unit = "local updates of the receiver since" if unit == "updates" else unit
        caption = f"How old models are when they are folded{where}: 0 is as new as the receiver's own."
        yield NamedFigure("ages", caption, draw_ages(series, style, OLDEST, unit))


def _timelines(results: VirtualResults) -> Iterator[NamedFigure]:
    """Draw the timelines at the middle value of the axis."""
    axis = results.axis
    for table in rows_of(results.timelines, axis, results.middle)[:MOST_LANES] if results.variants else ():
        name = variants([table], axis)[0]
        where = f", {axis.key} = {results.middle:g}" if axis.key else ""
        title = f"{name}{where}, seed {table.seed}"
        caption = f"{len(table.lanes)} lanes from {table.begin_s:g} s to {table.end_s:g} s."
        yield NamedFigure(f"timeline-{slug(name)}", caption, draw_lanes(table), title)
