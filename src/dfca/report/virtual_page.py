"""The sections of a report on runs in virtual time: courses, costs, lanes. From a run folder or a file of results.

Story (summary, courses, timelines) -> pictures -> the page, `figures/` of the run folder, docs
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dfca.files import atomic_write
from dfca.report.tables import kind_of, mean_std, percent
from dfca.report.virtual_tables import Axis, Row, axis_of, courses, finished, ratio_to_batch, rows_of, variants

if TYPE_CHECKING:
    from dfca.report.plots import Curve, Style
    from dfca.runs.reading import Run

FEW = 4  # values of the axis whose courses are drawn
OLDEST = 8  # the last bar of the ages
GRID = 200


@dataclass(frozen=True)
class Story:
    """What the figures are made of. timelines: tables by the folder name of their cell, with its head."""

    summary: Row
    courses: list[dict[str, Any]]
    timelines: list[dict[str, Any]]

    @classmethod
    def of_run(cls, run: Run) -> Story:
        """Read it from a run folder."""
        timelines = []
        for row in finished(run.summary):
            tail = f"-{row['digest'][:12]}" if run.swept else ""
            path = run.folder / "timeline" / f"{row['algorithm']}-{row['seed']}{tail}.json"
            if path.exists():
                head = {key: row[key] for key in ("algorithm", "seed", "point") if key in row}
                timelines.append(head | json.loads(path.read_text(encoding="utf-8")))
        done = {
            (row["algorithm"], row["seed"], row.get("digest") if run.swept else None) for row in finished(run.summary)
        }
        lines = [each for each in run.metrics if (each["algorithm"], each["seed"], each.get("digest")) in done]
        return cls(run.summary, courses(run.summary, lines or run.metrics, run.config.get("clients", 1)), timelines)

    @classmethod
    def of_results(cls, results: Mapping[str, Any]) -> Story:
        """Take it from a file that `dfca report --save` wrote."""
        return cls(results, results.get("courses", []), results.get("timelines", []))

    def kept(self) -> dict[str, Any]:
        """Give what a file of results keeps: all courses, and the timelines that are drawn."""
        return {"courses": self.courses, "timelines": rows_of(self.timelines, self.axis, self.middle)}

    @property
    def middle(self) -> float:
        """Give the value of the axis at which timelines are drawn: at the last one, often, nothing moves."""
        return self.axis.values[len(self.axis.values) // 2]

    @property
    def axis(self) -> Axis:
        """Give the number that varies."""
        return axis_of(self.summary)

    @property
    def variants(self) -> list[str]:
        """Name what is compared."""
        return variants(self.courses, self.axis)

    def head(self, value: float) -> Row:
        """Give the world and the clock at a value of the axis."""
        points = self.summary.get("points") or [self.summary]
        return next((point for point in points if self.axis.at(point) == value), points[0])


class Picture(NamedTuple):
    """A figure with the name of its file, its section and what to read from it."""

    name: str
    section: str
    svg: str
    caption: str
    title: str = ""
    wide: bool = False


def virtual_sections(run: Run) -> list[str]:
    """Write the sections from top to bottom, and the figures as files beside the page."""
    from dfca.report.page import figure, results
    from dfca.report.virtual_plots import standalone

    story = Story.of_run(run)
    parts, drawn = [findings(story), results(run)], list(pictures(story))
    for section in dict.fromkeys(picture.section for picture in drawn):
        mine = [picture for picture in drawn if picture.section == section]
        inner = "".join(figure(each.svg, each.caption, each.title) for each in mine)
        kind = "wide" if mine[0].wide else "pair"
        parts.append(
            f'<h2>{escape(section)}</h2><p class="soft">{ABOUT.get(section, "")}</p><div class="{kind}">{inner}</div>'
        )
    for picture in drawn:
        atomic_write(run.folder / "figures" / f"{picture.name}.svg", standalone(picture.svg))
    return parts


ABOUT = {
    "Over virtual time": "The band is one standard deviation over seeds to each side. Dashed lines have a server.",
    "Timelines": "What a few clients do in a window of one run. An arrow is a model on its way; it leaves when the "
    "uplink has sent it and ends where it is taken in.",
}


def findings(story: Story) -> str:
    """Say in a few sentences what came out."""
    rows, axis = finished(story.summary), story.axis
    said = []
    for value in axis.values[-1:]:
        where = f"At {escape(axis.key)} = {value:g}" if axis.key else "Here"
        for name in variants(rows, axis):
            group = rows_of(rows, axis, value, name)
            compared = ratio_to_batch(rows, group) if group else None
            if compared is not None:
                ratio, at_least = compared
                target = group[0]["target_accuracy"]
                said.append(
                    f"{where}, <b>{escape(name)}</b> reached {100 * target:g} % accuracy "
                    f"{'more than ' if at_least else ''}{ratio:.1f} times sooner than batch."
                )
    best = _final(rows, axis, axis.values[0]), _final(rows, axis, axis.values[-1])
    for name in variants(rows, axis):
        if axis.key and name in best[0] and name in best[1]:
            said.append(
                f"{escape(name)}: {percent(best[0][name])} % accuracy in the end at {escape(axis.key)} = "
                f"{axis.values[0]:g}, {percent(best[1][name])} % at {axis.values[-1]:g}."
            )
    if not said:
        return ""
    return f'<h2>In short</h2><ul class="findings">{"".join(f"<li>{each}</li>" for each in said)}</ul>'


def _final(rows: Sequence[Row], axis: Axis, value: float) -> dict[str, float]:
    found = {name: mean_std(rows_of(rows, axis, value, name), "accuracy")[0] for name in variants(rows, axis)}
    return {name: mean for name, mean in found.items() if mean is not None}


def pictures(story: Story) -> Iterator[Picture]:
    """Draw everything there is to draw."""
    from dfca.report.virtual_plots import styles_of

    names = story.variants
    servers = [name for name in names if kind_of(name.split()[0]).via == "server"]
    style = styles_of(names, servers)
    if not names:
        return
    yield from _over(story, style)
    yield from _against(story, style)
    yield from _joiners(story)
    yield from _ages(story, style)
    yield from _lanes(story)


def _over(story: Story, style: Mapping[str, Style]) -> Iterator[Picture]:
    """Accuracy against virtual time, and against traffic."""
    from dfca.report.virtual_plots import courses as draw

    axis = story.axis
    shown = axis.values if len(axis.values) <= FEW else _some(axis.values)
    for value in shown:
        title = f"{axis.key} = {value:g}" if axis.key else ""
        tail = f"-{value:g}" if axis.key else ""
        marks = _marks(story.head(value))
        for x, label, name in (
            ("time_s", "virtual time (s)", "time"),
            ("megabytes", "MB sent per client", "traffic"),
        ):
            series = _curves(story, x, value)
            if series:
                caption = f"Accuracy against {'virtual time' if x == 'time_s' else 'what a client has sent'}."
                svg = draw(series, style, label, "accuracy (%)", [m for m in marks if x == "time_s" or m.begin is None])
                yield Picture(f"{name}{tail}", "Over virtual time", svg, caption, title)


def _curves(story: Story, x: str, value: float) -> dict[str, Curve]:
    found = {
        name: _mean_course(rows_of(story.courses, story.axis, value, name), x, "accuracy") for name in story.variants
    }
    return {name: curve for name, curve in found.items() if curve is not None}


def _mean_course(group: Sequence[Row], x: str, y: str) -> Curve | None:
    """Take mean and deviation over seeds on a common grid; between evaluations the last one counts."""
    from dfca.report.plots import Curve

    pairs = []
    for course in group:
        known = [(a, b) for a, b in zip(course[x], course[y], strict=True) if b is not None]
        if known:
            pairs.append(np.asarray(known, float).T)
    if not pairs:
        return None
    if all(len(pair[0]) == len(pairs[0][0]) and np.allclose(pair[0], pairs[0][0]) for pair in pairs):
        grid = pairs[0][0]
    else:
        grid = np.linspace(max(p[0][0] for p in pairs), min(p[0][-1] for p in pairs), GRID)
    table = np.array([b[np.searchsorted(a, grid + 1e-9, side="right") - 1] for a, b in pairs])
    std = table.std(axis=0, ddof=1).tolist() if len(table) > 1 else None
    return Curve(grid.tolist(), table.mean(axis=0).tolist(), std)


def _marks(head: Row) -> list[Any]:
    from dfca.report.virtual_plots import Mark

    marks = []
    target = head.get("clock", {}).get("target_accuracy")
    if target is not None:
        marks.append(Mark(f"target {100 * target:g} %", height=target))
    world, until_s = head.get("world", {}), head.get("clock", {}).get("until_s")
    for each in world.get("partitions", ()):
        marks.append(Mark("apart", begin=each["begin_s"], end=each["end_s"] or until_s))
    joins = sorted({each["at_s"] for each in world.get("late_joiners", ())})
    marks += [Mark("join", begin=at_s) for at_s in joins[:1]]
    return marks


def _against(story: Story, style: Mapping[str, Style]) -> Iterator[Picture]:
    """The measures of the finished cells against the number that varies."""
    from dfca.report.plots import Curve
    from dfca.report.virtual_plots import against as draw

    axis, rows = story.axis, [_with_megabytes(row) for row in finished(story.summary)]
    if not axis.key:
        return
    for key, label, scale, name, caption in MEASURES:
        series = {}
        for variant in story.variants:
            found = []
            for value in axis.values:
                group = rows_of(rows, axis, value, variant)
                # A mean over the seeds that got there would flatter: all or none.
                complete = bool(group) and all(row.get(key) is not None for row in group)
                mean, std = mean_std(group, key) if complete else (None, None)
                if mean is not None and (scale == "percent" or mean > 0):
                    found.append((value, mean, std or 0.0))
            if found:
                x, means, stds = zip(*found, strict=True)
                series[variant] = Curve(x, means, stds)
        if any(len(curve.x) > 1 for curve in series.values()):
            never = [
                each for each in story.variants if len(series.get(each, Curve((), ())).x) < _tried(rows, axis, each)
            ]
            missing = f" Not drawn where a run never got there: {', '.join(never)}." if never else ""
            svg = draw(series, style, axis.key, label, scale)
            yield Picture(f"{name}-by-{axis.key.rpartition('.')[2]}", f"Against {axis.key}", svg, caption + missing)


def _with_megabytes(row: Row) -> Row:
    sent = row.get("bytes_to_target")
    return {**row, "megabytes_to_target": None if sent is None else sent / 1e6}


def _tried(rows: Sequence[Row], axis: Axis, variant: str) -> int:
    return sum(bool(rows_of(rows, axis, value, variant)) for value in axis.values)


MEASURES: tuple[tuple[str, str, Any, str, str], ...] = (
    (
        "time_to_target_s",
        "virtual s to the target",
        "amount",
        "target",
        "Virtual time until the mean accuracy was first seen at the target.",
    ),
    ("accuracy", "accuracy in the end (%)", "percent", "accuracy", "Accuracy at the end of the run."),
    (
        "idle_share",
        "idle share (%)",
        "percent",
        "idle",
        "The part of a client's time in which it did not train, the mean over clients.",
    ),
    (
        "megabytes_to_target",
        "MB to the target",
        "amount",
        "megabytes",
        "What all clients, and the server, had sent when the target was first seen.",
    ),
)


def _joiners(story: Story) -> Iterator[Picture]:
    """How late joiners catch up."""
    from dfca.report.plots import Curve, Style
    from dfca.report.virtual_plots import Mark
    from dfca.report.virtual_plots import courses as draw

    axis, value = story.axis, story.axis.values[-1]
    for name in story.variants:
        group = [course for course in rows_of(story.courses, axis, value, name) if "joiners" in course]
        late, others = _mean_course(group, "time_s", "joiners"), _mean_course(group, "time_s", "others")
        if late is None or others is None:
            continue
        near = Curve(others.x, [0.95 * mean for mean in others.mean])
        series = {"late joiners": late, "the others": others, "95 % of them": near}
        style = {
            "late joiners": Style("#d55e00", "-"),
            "the others": Style("#0072b2", "-"),
            "95 % of them": Style("#8a8a8a", ":"),
        }
        joins = [each["at_s"] for each in story.head(value)["world"]["late_joiners"]]
        svg = draw(series, style, "virtual time (s)", "accuracy (%)", [Mark("join", begin=min(joins))])
        caption = "Mean accuracy of the clients that join late, each with the models that it took from its neighbours."
        yield Picture(f"joiners-{_slug(name)}", "Late joiners", svg, caption, name)


def _ages(story: Story, style: Mapping[str, Style]) -> Iterator[Picture]:
    """How old the folded models are."""
    from dfca.report.virtual_plots import ages as draw

    axis, rows = story.axis, finished(story.summary)
    value = axis.values[-1]
    series = {}
    for name in story.variants:
        if kind_of(name.split()[0]).via != "neighbours":
            continue
        counts: dict[int, float] = {}
        for row in rows_of(rows, axis, value, name):
            for age, number in (row.get("staleness") or {}).items():
                whole = min(OLDEST, int(float(age)))
                counts[whole] = counts.get(whole, 0) + number
        total = sum(counts.values())
        if total:
            series[name] = {age: number / total for age, number in counts.items()}
    if series:
        where = f" at {axis.key} = {value:g}" if axis.key else ""
        unit = story.head(value).get("clock", {}).get("staleness", {}).get("unit", "updates")
        unit = "local updates of the receiver since" if unit == "updates" else unit
        caption = f"How old models are when they are folded{where}: 0 is as new as the receiver's own."
        yield Picture("ages", "Ages of models", draw(series, style, OLDEST, unit), caption)


def _lanes(story: Story) -> Iterator[Picture]:
    """The timelines at the middle value of the axis."""
    from dfca.report.virtual_plots import lanes as draw

    axis = story.axis
    for table in rows_of(story.timelines, axis, story.middle):
        name = variants([table], axis)[0]
        where = f", {axis.key} = {story.middle:g}" if axis.key else ""
        title = f"{name}{where}, seed {table['seed']}"
        caption = f"{len(table['lanes'])} lanes from {table['begin_s']:g} s to {table['end_s']:g} s."
        yield Picture(f"timeline-{_slug(name)}", "Timelines", draw(table), caption, title, wide=True)


def _slug(name: str) -> str:
    return name.replace(" ", "-").replace("=", "-")


def _some(values: Sequence[float]) -> list[float]:
    """Choose FEW values, the first and the last among them."""
    places = np.linspace(0, len(values) - 1, FEW).round().astype(int)
    return [values[place] for place in dict.fromkeys(places.tolist())]
