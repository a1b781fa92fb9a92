"""The figures of runs in virtual time: courses, measures against a number, ages of models, and lanes of clients.

As in `plots`, every function returns a figure; `standalone` makes a file of an `<svg>` element of a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from dfca.report.drawing.axes import (
    DASHES,
    Style,
    Zoom,
    label_ends,
    look_closer,
    percent_axis,
    plain,
    with_room,
)
from dfca.report.drawing.curves import ScoreCurve
from dfca.report.drawing.palette import CLUSTERS, GREY, algorithm_colours
from dfca.report.drawing.plots import draw_lines
from dfca.report.drawing.svg import FAINT, INK, Look, layout_width
from dfca.report.rows import kind_of
from dfca.report.virtual.summary import LaneTable
from dfca.runs.store.metric import ACCURACY, ShownMetric

TRAIN, SEND, OFFLINE, WAIT = CLUSTERS[0], CLUSTERS[1], GREY, FAINT
FATES = {"used": CLUSTERS[2], "unused": GREY, "lost": CLUSTERS[4]}
HATCHES = ("", "////", "....", "xxxx")


class Mark(NamedTuple):
    """Something to point out: at a height (a target), or from a moment to another (a partition)."""

    text: str
    height: float | None = None
    begin: float | None = None
    end: float | None = None


def styles_of(variants: Sequence[str]) -> dict[str, Style]:
    """Return for every variant the colour of its algorithm; those of one algorithm differ in dashes and hatches.

    Dashed evenly: there is a server.
    """
    colours = algorithm_colours(dict.fromkeys(name.split()[0] for name in variants))
    seen: Counter[str] = Counter()
    given: dict[str, Style] = {}
    for name in variants:
        algorithm = name.split()[0]
        number = seen[algorithm]
        dash = DASHES[number % len(DASHES)] if number or kind_of(algorithm).via != "server" else "--"
        given[name] = Style(colours[algorithm], dash, HATCHES[number % len(HATCHES)])
        seen[algorithm] += 1
    return given


def draw_courses(
    series: Mapping[str, ScoreCurve],
    style: Mapping[str, Style],
    label: str,
    marks: Sequence[Mark] = (),
    metric: ShownMetric = ACCURACY,
    zoom: Zoom | None = None,
) -> Figure:
    """Draw scores over time or traffic (the label), with a band of one deviation over seeds."""
    figure, axes = with_room(style)
    series = series if zoom is None else zoom.inside(series)
    ends = draw_lines(axes, series, style, "percent" if metric.percent else "number", marked=False)
    if metric.percent:
        percent_axis(axes)
    if zoom is not None:
        look_closer(axes, zoom)
    _length_axis(axes, series, [end.x for end in ends])
    axes.set_xlabel(label)
    axes.set_ylabel(metric.label)
    plain(axes)
    if any(mark.begin is not None for mark in marks):  # their texts need 0.14 inches above the axes
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, box.width, box.height - 0.14 / figure.get_figheight()))
    targets = _draw_marks(axes, marks, 100 if metric.percent else 1)
    label_ends(axes, ends, style, targets)
    return figure


def _length_axis(axes: Axes, series: Mapping[str, ScoreCurve], ends: Sequence[float]) -> None:
    """Begin at 0; where a line ends beyond ten times the end of another, the axis is logarithmic."""
    last = max(ends, default=1) or 1
    if len(ends) > 1 and last > 10 * min(ends) > 0:
        axes.set_xscale("log")
        axes.set_xlim(min(x for curve in series.values() for x in curve.x if x > 0), last)
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, last)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def draw_ages(series: Mapping[str, Mapping[int, float]], style: Mapping[str, Style], oldest: int, unit: str) -> Figure:
    """Draw which share of the folded models had which age, bars side by side; the last is "and older"."""
    figure = Figure(figsize=(layout_width(), 3.2))
    axes = figure.add_axes((0.115, 0.17, 0.86, 0.80))
    width = 0.8 / max(1, len(series))
    for number, (name, shares) in enumerate(series.items()):
        x = np.arange(oldest + 1) + (number - (len(series) - 1) / 2) * width
        heights = [100 * shares.get(age, 0.0) for age in range(oldest + 1)]
        look: Look = {"facecolor": style[name].colour, "hatch": style[name].hatch, "hatchcolor": "white"}
        axes.bar(x, heights, width=0.92 * width, label=name, **look)
    axes.set_xticks(range(oldest + 1), [*map(str, range(oldest)), f"≥ {oldest}"])
    axes.set_xlabel(f"age of a folded model ({unit})")
    axes.set_ylabel("share of folds (%)")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    plain(axes)
    axes.legend(frameon=False, fontsize=11, labelcolor=INK, loc="upper right")
    return figure


def draw_lanes(table: LaneTable) -> Figure:
    """Draw a timeline (`runs.timeline`): a lane per client, messages as arrows from lane to lane."""
    clients = [lane["client"] for lane in table.lanes]
    place = {client: len(clients) - 1 - number for number, client in enumerate(clients)}
    begin, end = float(table.begin_s), float(table.end_s)
    figure = Figure(figsize=(11.0, 0.95 + 0.52 * len(clients)))
    height = figure.get_figheight()
    axes = figure.add_axes((0.105, 0.62 / height, 0.885, 1 - 0.95 / height))
    for client, y in place.items():
        if client >= 0:
            axes.add_patch(Rectangle((begin, y - 0.2), end - begin, 0.4, color=WAIT, lw=0, alpha=0.55, zorder=1))
        else:
            axes.plot([begin, end], [y, y], color=WAIT, lw=2, zorder=1)
    _draw_spans(axes, table, place)
    _draw_arrows(axes, table, place, (end - begin) / 400)
    labels = ["server" if lane["client"] < 0 else f"client {lane['client']}" for lane in table.lanes]
    notes = [f"\n{lane['note']}" if lane["note"] else "" for lane in table.lanes]
    axes.set_yticks([place[c] for c in clients], [a + b for a, b in zip(labels, notes, strict=True)])
    axes.set_xlim(begin, end)
    axes.set_ylim(-0.6, len(clients) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    axes.set_xlabel("virtual time (s)")
    plain(axes, grid="x")
    axes.tick_params(axis="y", labelsize=9.5)
    _legend_of_lanes(axes, {span[1] for span in table.spans}, {arrow[4] for arrow in table.arrows})
    return figure


def standalone(svg: str) -> str:
    """Make a file of a figure: on white, in dark ink."""
    text = svg.replace("currentColor", "#1f2933").replace("var(--line, #ccc)", "#d5d9de")
    opening, _, rest = text.partition(">")
    head = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>\n<rect width="100%" height="100%" fill="#fff"/>{rest}\n'


def _draw_spans(axes: Axes, table: LaneTable, place: Mapping[int, int]) -> None:
    looks = {"train": (TRAIN, -0.2, 0.4, 2), "offline": (OFFLINE, -0.2, 0.4, 3), "send": (SEND, -0.32, 0.1, 3)}
    for client, what, left, right in table.spans:
        if client in place:
            colour, low, tall, order = looks[what]
            look: Look = {"facecolor": colour, "edgecolor": "white", "lw": 0.5, "zorder": order}
            hatch = "////" if what == "offline" else None
            axes.add_patch(Rectangle((left, place[client] + low), right - left, tall, hatch=hatch, **look))


def _draw_arrows(axes: Axes, table: LaneTable, place: Mapping[int, int], least: float) -> None:
    """Draw messages; one that vanished at once is a short stub towards its receiver, with a cross."""
    for fate, colour in FATES.items():
        lines, heads, crosses = [], [], []
        for sender, receiver, left, came, how in table.arrows:
            if how != fate or sender not in place or receiver not in place:
                continue
            up = 1 if place[receiver] > place[sender] else -1
            first, last = (left, place[sender] + 0.2 * up), (came, place[receiver] - 0.2 * up)
            if fate == "lost":
                share = 0.3 if came - left < least else 0.6
                last = (first[0] + share * (last[0] - first[0]), first[1] + share * (last[1] - first[1]))
                crosses.append(last)
            else:
                heads.append((last, up))
            lines.append([first, last])
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.7, alpha=0.75, zorder=4))
        for up, marker in ((1, "^"), (-1, "v")):
            ends = [point for point, way in heads if way == up]
            if ends:
                x, y = zip(*ends, strict=True)
                axes.scatter(x, y, marker=marker, s=13, color=colour, linewidths=0, zorder=5)
        if crosses:
            x, y = zip(*crosses, strict=True)
            axes.scatter(x, y, marker="x", s=18, color=colour, linewidths=1.1, zorder=5)


def _legend_of_lanes(axes: Axes, spans: set[str], fates: set[str]) -> None:
    looks = [("training", TRAIN, "train"), ("sending", SEND, "send"), ("offline", OFFLINE, "offline")]
    handles: list[Any] = [
        Rectangle((0, 0), 1, 1, color=colour, label=text) for text, colour, what in looks if what in spans
    ]
    handles.append(Rectangle((0, 0), 1, 1, color=WAIT, label="waiting"))
    fate_texts = {"used": "model that is folded", "unused": "too old: dropped", "lost": "lost or broken"}
    for fate, text in fate_texts.items():
        if fate in fates:
            marker = "x" if fate == "lost" else "^"
            handles += axes.plot([], [], color=FATES[fate], lw=1, marker=marker, ms=4, label=text)
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize=10,
        labelcolor=INK,
        ncols=len(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        borderaxespad=0.2,
        handlelength=1.4,
        columnspacing=1.4,
    )


def _draw_marks(axes: Axes, marks: Sequence[Mark], factor: float) -> list[tuple[str, float]]:
    """Draw lines and spans, their texts above the axes; returns the targets, which are named beside the lines."""
    low, high = axes.get_ylim()
    line: Look = {"color": INK, "lw": 0.8, "ls": (0, (2, 3)), "zorder": 1}
    targets = []
    for mark in marks:
        if mark.height is not None and low < factor * mark.height < high:
            axes.axhline(factor * mark.height, **line)
            targets.append((mark.text, factor * mark.height))
        if mark.begin is not None:
            if mark.end is None:
                axes.axvline(mark.begin, **line)
            else:
                axes.axvspan(mark.begin, mark.end, color=FAINT, alpha=0.35, lw=0, zorder=0)
            middle = mark.begin if mark.end is None else (mark.begin + mark.end) / 2
            place: Look = {"ha": "center", "va": "bottom", "color": INK, "fontsize": 9.5}
            axes.text(middle, 1.005, mark.text, transform=axes.get_xaxis_transform(), clip_on=False, **place)
    return targets
