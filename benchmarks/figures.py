"""The figures of a bench: ratios with their targets, and how time and memory grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.scaling import AXES

INK, GREY, BLUE, ORANGE, GREEN = "#1f2933", "#9aa5b1", "#0072b2", "#d55e00", "#dcefe2"
Json = Mapping[str, Any]


def draw(content: Json, folder: Path) -> list[Path]:
    """Draw what was measured as PNG and SVG; return the files."""
    figures = {}
    compared = [row for name in ("floor", "peers", "ranks", "events") for row in _rows(content, name) if row["ratio"]]
    if compared:
        figures["bench-ratios"] = ratios(compared)
    if any(row["skipped"] is None for row in _rows(content, "scaling")):
        figures["bench-scaling"] = growth(content["parts"]["scaling"])
    made = []
    for name, figure in figures.items():
        for ending in ("png", "svg"):
            path = folder / f"{name}.{ending}"
            figure.savefig(path, dpi=130, metadata={"Date": None} if ending == "svg" else None)
            made.append(path)
    return made


def ratios(rows: Sequence[Json]) -> Figure:
    """Draw every ratio as a dot with its range; green is where it should be."""
    figure = Figure(figsize=(9.5, 1.1 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    values = [row["ratio"][key] for row in rows for key in ("low", "high")]
    bounds = [row[key] for row in rows for key in ("most", "least") if row[key] is not None]
    low, high = min(*values, *bounds, 1.0) / 1.6, max(*values, *bounds, 1.0) * 2.2
    for place, row in enumerate(rows):
        measured, most, least = row["ratio"], row["most"], row["least"]
        if most is not None or least is not None:
            begin, end = (low, most) if most is not None else (least, high)
            axes.fill_betweenx([place - 0.4, place + 0.4], begin, end, color=GREEN, lw=0)
        colour = GREY if row["met"] is None else BLUE if row["met"] else ORANGE
        axes.plot([measured["low"], measured["high"]], [place, place], color=colour, lw=2, solid_capstyle="round")
        axes.plot(measured["median"], place, "o", color=colour, ms=7)
        axes.annotate(
            f"{measured['median']:.2f}",
            (measured["high"], place),
            (7, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=9)
    _numbers(axes)
    axes.axvline(1, color=GREY, lw=0.8, zorder=0)
    axes.set_xlabel("ratio; the line is the range of the repeats; green: wanted", color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def growth(part: Json) -> Figure:
    """Draw time and memory against each axis in log-log, with the fitted lines."""
    figure = Figure(figsize=(12, 5.6), layout="constrained")
    grid = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    for column, (axis, meaning) in enumerate(AXES.items()):
        mine = [row for row in part["rows"] if row["details"].get("axis") == axis and row["skipped"] is None]
        x = [row["details"]["x"] for row in mine]
        series = {
            "time": [row["values"]["round"] for row in mine],
            "memory": [[value / 2**20 for value in row["details"]["memory_bytes"]] for row in mine],
        }
        for row_axes, (measure, values), colour in zip(grid, series.items(), (BLUE, ORANGE), strict=True):
            axes = row_axes[column]
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color=GREY, alpha=0.25, lw=0.6)
            fit = (part.get("fits", {}).get(axis) or {}).get(measure)
            if not x:
                continue
            axes.vlines(x, list(map(min, values)), list(map(max, values)), color=colour, lw=1.5)
            axes.plot(x, list(map(median, values)), "o", color=colour, ms=5)
            if fit is not None:
                scale = 2**20 if measure == "memory" else 1
                ends = [min(x), max(x)]
                line = [fit["factor"] * end ** fit["exponent"] / scale for end in ends]
                axes.plot(ends, line, color=colour, lw=1, alpha=0.6)
                axes.set_title(f"exponent {fit['exponent']:.2f}", fontsize=10, color=INK)
            _numbers(axes)
        grid[1][column].set_xlabel(f"{axis}: {meaning}", color=INK)
    grid[0][0].set_ylabel("seconds per round", color=INK)
    grid[1][0].set_ylabel("memory, MiB", color=INK)
    return figure


def _label(row: Json) -> str:
    """Name a ratio; the name of another library is part of the row's name already."""
    return f"{row['name'].removesuffix(', ' + row['of'])}:  {row['of']} / {row['to']}"


def _numbers(axes: Axes) -> None:
    """Write plain numbers on logarithmic axes, also between the powers of ten where there are few of them."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            decades = math.log10(high / low)
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.3 else (1, 3) if decades < 3.2 else (1,)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
            axis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    """Write 20000 as 20k."""
    for letter, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _rows(content: Json, name: str) -> Sequence[Json]:
    rows: Sequence[Json] = content["parts"].get(name, {}).get("rows", [])
    return rows
