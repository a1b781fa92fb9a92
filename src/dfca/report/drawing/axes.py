"""Axes of figures: bounds that cut nothing off, ticks, names beside the lines, and where a closer look is due.

What is INK or FAINT here takes the page's colours in an `<svg>` element (`svg.to_svg`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from dfca.report.drawing.curves import ScoreCurve
from dfca.report.drawing.svg import FAINT, INK, WIDTH, Look, NotebookFigure, layout_width

FAR = 0.1  # of the whole: a line that ends so far below the next one stretches the axis
CROWDED = 0.5  # a closer look is due where most lines end within this part of the range of all
WHOLE = 0.7  # of the range of all lines: beyond, a closer look shows the same again
CLEAR = 0.05  # of the closer range: ends that lie nearer together are not seen apart there either
FLAT = 0.02  # of the whole: lines that lie within it look the same from close by
NARROWEST_AXES = 1.2  # inches
Dash = str | tuple[int, tuple[float, ...]]
DASHES: tuple[Dash, ...] = ("-", (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))


class Style(NamedTuple):
    """How an algorithm is drawn, the same in every figure."""

    colour: str
    dash: Dash
    hatch: str = ""  # of bars, where several have one colour


class LineEnd(NamedTuple):
    """Where a line ends, in the units of the axes."""

    name: str
    x: float
    y: float


class Zoom(NamedTuple):
    """A part of an axis, in its units, and the lines that end outside of it."""

    low: float
    high: float
    outside: tuple[str, ...]

    def inside(self, series: Mapping[str, ScoreCurve]) -> dict[str, ScoreCurve]:
        return {name: curve for name, curve in series.items() if name not in self.outside}


def with_room(names: Collection[str]) -> tuple[Figure, Axes]:
    """Make axes with room for the longest name at their right: of one size on the page, as wide as print has room."""
    right = max(1.75, 0.7 + 0.085 * max(map(len, names), default=0))
    page = layout_width(0.0)
    width = page or 0.8 + 3.85 + right
    right = min(right, width - 0.8 - NARROWEST_AXES)
    height = max(4.0 * min(1.0, page / WIDTH), 0.7 + 0.21 * len(names)) if page else 4.0
    figure = NotebookFigure(figsize=(width, height))
    return figure, figure.add_axes((0.8 / width, 0.52 / height, 1 - (0.8 + right) / width, 1 - 0.64 / height))


def zoom_of(series: Mapping[str, ScoreCurve]) -> Zoom | None:
    """Return the range, in percent, of the later half of most lines, where a few low ones stretch the axis; or None.

    The few are less than half of the lines; without them the ends span at most CROWDED of what they span with them.
    """
    ends = sorted((float(curve.mean[-1]), name) for name, curve in series.items() if np.isfinite(curve.mean[-1]))
    if len(ends) < 3:
        return None
    span = ends[-1][0] - ends[0][0]
    for few in range(1, (len(ends) - 1) // 2 + 1):
        inside, outside = ends[few:], tuple(name for _, name in ends[:few])
        spread = inside[-1][0] - inside[0][0]
        if spread > CROWDED * span or inside[0][0] - ends[few - 1][0] <= max(0.25 * span, FAR):
            continue
        later = [
            float(mean)
            for name, curve in series.items()
            if name not in outside
            for x, mean in zip(curve.x, curve.mean, strict=True)
            if np.isfinite(mean) and x >= 0.5 * curve.x[-1]
        ]
        everything = [mean for curve in series.values() for mean in curve.mean if np.isfinite(mean)]
        height = max(later) - min(later)
        if height < FLAT or spread < CLEAR * height or height > WHOLE * (max(everything) - min(everything)):
            return None
        low, high = 100 * min(later), 100 * max(later)
        edge = max(0.5, 0.08 * (high - low))
        return Zoom(max(0.0, low - edge), min(100.5, high + edge), outside)
    return None


def look_closer(axes: Axes, zoom: Zoom) -> None:
    """Show a part of the axis; nothing is drawn outside of it."""
    axes.set_ylim(zoom.low, zoom.high)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    for line in axes.lines:
        line.set_clip_on(True)


def plain(axes: Axes, grid: Literal["x", "y"] = "y") -> None:
    """Leave what is needed to read values: ticks, thin grid lines, labels."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(axis=grid, color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=11)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(INK)
        axis.label.set_fontsize(11)


def amount_axis(axes: Axes, low: float, high: float) -> None:
    """Begin at 0; beyond a factor of ten between the values the axis is logarithmic."""
    if high > 10 * low:
        axes.set_yscale("log")
        log_axis(axes, 12)
    else:
        axes.set_ylim(0, 1.08 * high)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def log_axis(axes: Axes, ticks: int) -> None:
    """Mark powers of ten, and where there are few of them also 2 and 5, with plain numbers."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,), numticks=ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def percent_axis(axes: Axes) -> None:
    """Bound an axis in percent by tens; never beyond 0..100."""
    low, high = axes.get_ylim()
    low, high = max(0.0, 10 * np.floor(low / 10)), min(100.0, 10 * np.ceil(high / 10))
    axes.set_ylim(low - 0.5, high + 0.5) if high > low else axes.set_ylim(low - 5, low + 5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))


def values_axis(axes: Axes, values: Sequence[float]) -> None:
    """Mark the values themselves on the x axis, as far as their numbers do not touch."""
    low, high = values[0], values[-1]
    if low > 0 and high > 10 * low:
        axes.set_xscale("log")
        places = np.log(values)
        axes.set_xlim(low / (high / low) ** 0.03, high)
    else:
        places = np.asarray(values)
        axes.set_xlim(low - 0.03 * (high - low), high)
    ticks: list[float] = []
    for value, place in zip(values, places, strict=True):
        last = places[values.index(ticks[-1])] if ticks else -np.inf
        if place - last >= 0.09 * (places[-1] - places[0]):
            ticks.append(value)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def label_ends(
    axes: Axes, ends: Sequence[LineEnd], style: Mapping[str, Style], notes: Sequence[tuple[str, float]] = ()
) -> None:
    """Write the names beside the axes in the order of the ends, each after a sample of its line, none over another.

    A thin line leads from the end of a line at the right edge to its name; a line that stops earlier has a dot where it
    stops. notes: texts at heights of their own, such as a target.
    """
    last = axes.get_xlim()[1]
    transform = axes.transScale + axes.transLimits
    entries: list[tuple[float, str, LineEnd | None]] = []
    entries += [(float(transform.transform((end.x, end.y))[1]), end.name, end) for end in ends]
    entries += [(float(transform.transform((last, y))[1]), text, None) for text, y in notes]
    entries.sort(key=lambda entry: entry[:2])
    inch = 1 / (axes.get_position().width * axes.figure.get_figwidth())  # type: ignore[union-attr]
    free: Look = {"transform": axes.transAxes, "clip_on": False}
    gap = 0.21 / (axes.get_position().height * axes.figure.get_figheight())  # type: ignore[union-attr]
    for height, (at, text, end) in zip(move_apart([entry[0] for entry in entries], gap), entries, strict=True):
        begin, stop = 1 + 0.17 * inch, 1 + 0.43 * inch
        if end is None:
            axes.plot([1.0, begin], [at, height], color=INK, lw=0.5, alpha=0.6, **free)
            axes.text(begin + 0.04 * inch, height, text, va="center", color=INK, fontsize=9.5, **free)
            continue
        colour, dash, _ = style[text]
        if end.x >= last * (1 - 1e-9):
            axes.plot([1.0, begin], [at, height], color=colour, lw=0.6, alpha=0.8, **free)
        elif 0 <= at <= 1:
            axes.plot([end.x], [end.y], marker="o", ms=4, color=colour, zorder=4)
        axes.plot([begin, stop], [height, height], color=colour, linestyle=dash, lw=1.7, **free)
        axes.text(stop + 0.06 * inch, height, text, va="center", color=INK, fontsize=11, **free)


def move_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights apart to at least `gap`, as little as possible: those in conflict keep their middle."""
    groups: list[list[float]] = []  # [middle, members]
    for height in heights:
        groups.append([height, 1])
        while len(groups) > 1:
            (below, m), (above, n) = groups[-2], groups[-1]
            if above - below >= gap * (m + n) / 2:
                break
            groups[-2:] = [[(below * m + above * n) / (m + n), m + n]]
    apart = [middle + gap * (i - (n - 1) / 2) for middle, n in groups for i in range(int(n))]
    shift = max(0.0, -apart[0]) - max(0.0, apart[-1] - 1)
    return [height + shift for height in apart]
