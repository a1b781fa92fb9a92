"""Figures with matplotlib: curves with a band, bars, graphs of clients.

No pyplot, no global figure. Tables and formats import none of this: matplotlib costs a second of start-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dfca.report.drawing import palette
from dfca.report.drawing.axes import (
    LineEnd,
    Style,
    Zoom,
    amount_axis,
    label_ends,
    log_axis,
    look_closer,
    percent_axis,
    plain,
    values_axis,
    with_room,
)
from dfca.report.drawing.curves import ScoreCurve
from dfca.report.drawing.palette import CLUSTERS, cluster_colour
from dfca.report.drawing.svg import INK, Look, to_svg
from dfca.report.rows import kind_of

EDGE = palette.GREY  # edges of graphs: readable on light and dark, also where they are pixels

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

VECTOR_EDGES = 500  # beyond, edges are pixels: a page of eight graphs stays small
VECTOR_NODES = 300


Scale = Literal["percent", "number", "log", "amount"]
"""How a measure is drawn; amount: seconds or the like, from 0 on."""


class NamedFigure(NamedTuple):
    """A figure with its name as a file, what to read from it, and a title where several stand side by side."""

    name: str
    caption: str
    figure: Figure
    title: str = ""


def styles(algorithms: Iterable[str]) -> dict[str, Style]:
    """Return for every algorithm its colour, and a line that shows who it talks to.

    Solid: neighbours; dashed: a server; dotted: the bounds (nobody, or the true clusters are known).
    """
    given: dict[str, Style] = {}
    for name, colour in palette.algorithm_colours(algorithms).items():
        kind = kind_of(name)
        given[name] = Style(colour, "-." if kind.informed else {"nobody": ":", "server": "--"}.get(kind.via, "-"))
    return given


def draw_curves(
    series: Mapping[str, ScoreCurve],
    style: Mapping[str, Style],
    label: str,
    scale: Scale = "percent",
    against: str = "round",
    zoom: Zoom | None = None,
) -> Figure:
    """Draw a measure by round, one labelled line per algorithm with a band of one standard deviation.

    Against a key of the config the values are marked, and beyond a factor of ten between them the axis is logarithmic;
    so is that of amounts, which have no band. With a zoom only its part of the axis is drawn, and only the lines that
    end there.
    """
    figure, axes = with_room(style)  # of all lines of a run: its figures are of one height
    series = series if zoom is None else zoom.inside(series)
    ends = _fill(axes, series, style, scale, against)
    axes.set_xlabel(against)
    axes.set_ylabel(label)
    if zoom is not None:
        look_closer(axes, zoom)
    label_ends(axes, ends, style)
    return figure


def draw_panel(
    series: Mapping[str, ScoreCurve],
    style: Mapping[str, Style],
    against: str,
    bounds: tuple[float, float],
    scale: Literal["percent", "number"] = "percent",
) -> Figure:
    """Draw one of several small figures of one measure; all of them have the same bounds, none has names."""
    figure = Figure(figsize=(3.3, 2.5))
    axes = figure.add_axes((0.14, 0.19, 0.82, 0.78))
    _fill(axes, series, style, scale, against)
    axes.set_ylim(*bounds)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.set_xlabel(against)
    return figure


def _fill(
    axes: Axes,
    series: Mapping[str, ScoreCurve],
    style: Mapping[str, Style],
    scale: Scale,
    against: str,
) -> list[LineEnd]:
    """Draw the lines and set up both axes; returns where the lines end."""
    by_round = against == "round"
    ends = draw_lines(axes, series, style, "amount" if scale == "log" else scale, marked=not by_round)
    if scale == "log":
        axes.set_yscale("log")
        log_axis(axes, 9)
    elif scale == "percent":
        percent_axis(axes)
    elif scale == "amount":
        values = [float(mean) for curve in series.values() for mean in curve.mean]
        amount_axis(axes, min(values), max(values))
    if by_round:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
        axes.set_xlim(0, max((end.x for end in ends), default=1) or 1)
    else:
        values_axis(axes, sorted({float(x) for curve in series.values() for x in curve.x}))
    plain(axes)
    return ends


def draw_lines(
    axes: Axes,
    series: Mapping[str, ScoreCurve],
    style: Mapping[str, Style],
    scale: Literal["percent", "number", "amount"],
    marked: bool,
) -> list[LineEnd]:
    """Draw the lines, with their bands but for amounts, which are positive; return the name and the end of each."""
    factor = 100 if scale == "percent" else 1
    ends = []
    for name, curve in series.items():
        x, mean = np.asarray(curve.x, float), factor * np.asarray(curve.mean, float)
        shown = np.isfinite(mean) & (mean > 0) if scale == "amount" else np.isfinite(mean)
        if not shown.any():
            continue
        x, mean, (colour, dash, _) = x[shown], mean[shown], style[name]
        dots: Look = {"marker": "o", "ms": 4, "clip_on": False} if marked or len(x) <= 2 else {}
        axes.plot(x, mean, color=colour, linestyle=dash, lw=1.7, zorder=3, **dots)
        if curve.std is not None and scale != "amount":
            std = factor * np.asarray(curve.std, float)[shown]
            low, high = mean - std, mean + std
            if scale == "percent":
                low, high = np.clip(low, 0, 100), np.clip(high, 0, 100)
            axes.fill_between(x, low, high, color=colour, alpha=0.11, lw=0, zorder=2)
        ends.append(LineEnd(name, float(x[-1]), float(mean[-1])))
    return ends


def draw_bars(values: Mapping[str, float], style: Mapping[str, Style], label: str, write: Mapping[str, str]) -> Figure:
    """Draw one horizontal bar per algorithm, the value written at its end."""
    names, rows = list(values), 0.75 + 0.34 * len(values)
    height = max(4.0, rows)  # as that of curves, beside which it stands
    figure = Figure(figsize=(with_room(names)[0].get_figwidth(), height))
    left = max(1.15, 0.2 + 0.085 * max(map(len, names), default=0)) / figure.get_figwidth()
    axes = figure.add_axes((left, 0.52 / height, 0.86 - left, 1 - 0.6 / height))
    axes.barh(
        names,
        [values[name] for name in names],
        color=[style[name].colour for name in names],
        height=0.62 * rows / height,
    )
    for position, name in enumerate(names):
        axes.annotate(
            write[name], (values[name], position), (4, 0), textcoords="offset points", va="center", color=INK, size=11
        )
    axes.invert_yaxis()
    axes.set_xlim(0, max([*values.values(), 1e-9]) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(label)
    plain(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    return figure


def networks(
    positions: np.ndarray,
    edges: Sequence[Sequence[int]],
    colourings: Sequence[tuple[Sequence[int], Sequence[bool] | None]],
) -> list[str]:
    """Draw the same graph once for each colouring: clients coloured by cluster (-1: grey), some ringed.

    positions (N, 2); edges: pairs of clients; a colouring: clusters (N,) and which clients have a ring (N,).
    The links are drawn once, in the first picture, and the others show them too: all go into one page.
    """
    low, high = positions.min(0), positions.max(0)
    width, height = high - low
    spread = max(float(width), float(height)) or 1.0
    xy = (positions - (low + high) / 2) / spread
    half = max(0.28, min(0.56, 0.5 * float(height) / spread + 0.06))  # no empty space above and below a wide graph
    links = _links(xy, np.asarray(edges, dtype=np.int64).reshape(-1, 2), half)
    name = f"links-{hashlib.sha256(links.encode()).hexdigest()[:8]}"
    pictures: list[str] = []
    for clusters, ringed in colourings:
        figure = _clients(xy, clusters, ringed, half)
        opening, end, rest = to_svg(figure, salt=f"{name} {len(pictures)}").partition(">")
        shared = f'<use href="#{name}"/>' if pictures else f'<g id="{name}">{links}</g>'
        pictures.append(opening + end + shared + rest)
    return pictures


def _links(xy: np.ndarray, pairs: np.ndarray, half: float) -> str:
    """Draw the links, without the `<svg>` around them."""
    figure, axes = _canvas(half)
    many = len(pairs) > VECTOR_EDGES
    alpha = 0.6 if not many else max(0.04, 0.6 * (VECTOR_EDGES / len(pairs)) ** 0.75)
    lines = LineCollection(list(xy[pairs]), colors=EDGE, linewidths=0.4 if many else 0.7, alpha=alpha, rasterized=many)
    axes.add_collection(lines)
    svg = to_svg(figure)
    return svg[svg.index(">") + 1 : svg.rindex("</svg>")]


def _clients(xy: np.ndarray, clusters: Sequence[int], ringed: Sequence[bool] | None, half: float) -> Figure:
    figure, axes = _canvas(half)
    draw_clients(axes, xy, clusters, ringed, float(np.clip(3600 / len(xy), 9, 70)))
    return figure


def draw_clients(
    axes: Axes, xy: np.ndarray, clusters: Sequence[int], ringed: Sequence[bool] | None, size: float
) -> None:
    """Draw clients in the colours and shapes of their clusters, some with a ring."""
    of = np.asarray(clusters, dtype=np.int64)
    look: Look = {"linewidths": 0, "rasterized": len(xy) > VECTOR_NODES, "zorder": 2}
    for cluster in np.unique(of).tolist():
        marker = MARKERS[max(cluster, 0) // len(CLUSTERS) % len(MARKERS)]  # others where the colours come round again
        x, y = xy[of == cluster].T
        axes.scatter(x, y, s=size, color=cluster_colour(cluster), marker=marker, **look)
    if ringed is not None and any(ringed):
        ring: Look = {"facecolors": "none", "edgecolors": INK, "linewidths": 1.1, "zorder": 3}
        x, y = xy[np.asarray(ringed, dtype=bool)].T
        axes.scatter(x, y, s=size * 2.4 + 12, **ring)


def _canvas(half: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(3.2, 3.2 * half / 0.56))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.56, 0.56)
    axes.set_ylim(-half, half)
    axes.axis("off")
    return figure, axes
