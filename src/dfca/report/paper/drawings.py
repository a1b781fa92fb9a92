"""Figures of single things: who ended in which cluster, what the groups' samples look like, how mixing contracts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from dfca.report.drawing.axes import plain
from dfca.report.drawing.palette import CLUSTERS, cluster_colour
from dfca.report.drawing.plots import EDGE, draw_clients
from dfca.report.drawing.svg import INK, Look, layout_width
from dfca.report.paper.cluster_map import ClusterMap
from dfca.report.paper.theory import Mixing

COLUMNS = 4
LABEL = 0.9  # inches before a row of samples
BEFORE: Look = {"ha": "right", "va": "center"}


def draw_confusions(counts: Mapping[str, np.ndarray]) -> Figure:
    """Draw one matrix per algorithm: clients of each found (row) and true (column) cluster.

    Row j is the found cluster that fits true cluster j best, so that a full diagonal is agreement.
    """
    wide = max(1, min(len(counts), int(layout_width(2.3 * COLUMNS) / 2.3)))
    high = -(-len(counts) // wide)
    figure = Figure(figsize=(2.3 * wide, 2.55 * high), layout="constrained")
    for place, (name, matrix) in enumerate(counts.items()):
        axes = figure.add_subplot(high, wide, place + 1)
        rows, columns = matrix.shape
        for i in range(rows):
            for j in range(columns):
                share = float(matrix[i, j]) / max(1, int(matrix[:, j].sum()))
                axes.add_patch(
                    Rectangle((j, i), 1, 1, facecolor=CLUSTERS[0], alpha=0.85 * share, edgecolor=EDGE, linewidth=0.4)
                )
                if matrix[i, j]:
                    axes.text(j + 0.5, i + 0.5, f"{matrix[i, j]}", ha="center", va="center", color=INK, fontsize=9)
        axes.add_patch(Rectangle((0, 0), columns, rows, fill=False, edgecolor=EDGE, linewidth=0.8))
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        axes.set_xticks(np.arange(columns) + 0.5, [str(j + 1) for j in range(columns)])
        axes.set_yticks(np.arange(rows) + 0.5, [str(i + 1) for i in range(rows)])
        axes.set_title(name, fontsize=11, color=INK)
        axes.set_xlabel("true group" if place >= len(counts) - wide else "")
        axes.set_ylabel("found cluster" if place % wide == 0 else "")
        plain(axes)
        axes.grid(False)
        axes.set_aspect("equal")
    return figure


def draw_networks(clusters: ClusterMap) -> Figure:
    """Draw one graph several times: the true groups, and what each algorithm found, wrong clients in a ring."""
    positions, panels = clusters.positions, clusters.colourings
    wide = max(1, min(len(panels), int(layout_width(2.9 * COLUMNS) / 2.9)))
    high = -(-len(panels) // wide)
    figure = Figure(figsize=(2.9 * wide, 3.15 * high), layout="constrained")
    pairs = np.asarray(clusters.edges, dtype=np.int64).reshape(-1, 2)
    size = float(np.clip(2400 / len(positions), 6, 45))
    for place, (title, below, clusters_of, ringed) in enumerate(panels):
        axes = figure.add_subplot(high, wide, place + 1)
        alpha = float(np.clip(150 / max(1, len(pairs)), 0.06, 0.6))
        axes.add_collection(LineCollection(list(positions[pairs]), colors=EDGE, linewidths=0.5, alpha=alpha))
        draw_clients(axes, positions, clusters_of, ringed, size)
        axes.set_title(f"{title}\n{below}", fontsize=10, color=INK)
        axes.set_aspect("equal")
        axes.margins(0.06)
        axes.axis("off")
    return figure


def draw_samples(groups: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Draw samples of each group, one row per group: images (n, channels, h, w), or windows (n, channels, time)."""
    images = groups[0][1].ndim == 4
    columns = min(len(samples) for _, samples in groups)
    width, height = (0.62, 0.66) if images else (1.05, 0.7)
    figure = Figure(figsize=(LABEL + width * columns, height * len(groups)))
    left, tall = LABEL / figure.get_figwidth(), 1 / len(groups)
    for row, (name, samples) in enumerate(groups):
        axes = figure.add_axes((left, 1 - (row + 0.97) * tall, 1 - left, 0.94 * tall))
        if images:
            axes.imshow(_side_by_side(samples[:columns]), interpolation="nearest")
        else:
            _draw_windows(axes, samples[:columns])
        axes.axis("off")
        figure.text(left - 0.1 / figure.get_figwidth(), 1 - (row + 0.5) * tall, name, color=INK, size=10, **BEFORE)
    return figure


def _side_by_side(samples: np.ndarray) -> np.ndarray:
    """Lay images (n, channels, h, w) into one row with gaps that are transparent, (h, W, 4)."""
    low, high = float(samples.min()), float(samples.max())
    n, channels, h, w = samples.shape
    shown = (samples if channels == 3 else samples[:, :1].repeat(3, axis=1)) - low
    gap = max(1, round(0.04 * w))
    row = np.zeros((h, n, w + gap, 4))
    row[:, :, :w, :3] = np.moveaxis(shown / max(high - low, 1e-9), (0, 1), (1, 3))
    row[:, :, :w, 3] = 1
    return row.reshape(h, -1, 4)[:, :-gap]


def _draw_windows(axes: Axes, samples: np.ndarray) -> None:
    """Draw three channels of windows (n, channels, time) in a row, each window from its lowest to its highest value."""
    time = np.arange(samples.shape[2])
    for number, sample in enumerate(samples[:, :3]):
        low, high = float(sample.min()), float(sample.max())
        for channel, values in enumerate((sample - low) / max(high - low, 1e-9)):
            axes.plot(time + 1.06 * len(time) * number, values, lw=0.8, color=cluster_colour(channel))
    axes.margins(x=0)


def draw_contraction(measured: Sequence[Mixing]) -> Figure:
    """Draw the worst ratio of disagreement in a round against the bound λ² of the graph, one dot per graph and seed."""
    figure = Figure(figsize=(layout_width(), 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color=EDGE, lw=1.2, ls="--", zorder=1, label="the bound")
    kinds = list(dict.fromkeys((str(at.point.get("mixing.weights", "")), at.models) for at in measured))
    for weights, models in kinds:
        mine = [at for at in measured if (str(at.point.get("mixing.weights", "")), at.models) == (weights, models)]
        colour = CLUSTERS[0] if weights == "metropolis" else CLUSTERS[1]
        x = [bound for at in mine for bound in at.bounds]
        y = [ratio for at in mine for ratio in at.worst]
        face = colour if models == 1 else "none"
        label = f"{weights}, everybody mixes" if models == 1 else f"{weights}, {models} models: only trainers send"
        axes.scatter(x, y, s=38, facecolors=face, edgecolors=colour, linewidths=1.4, label=label, zorder=3)
    axes.set_xlim(-0.02, 1.03)
    axes.set_ylim(0, max(1.03, *(1.04 * ratio for at in measured for ratio in at.worst)))
    axes.set_xlabel("bound: (1 − spectral gap)²")
    axes.set_ylabel("worst ratio of disagreement, Disp′ / Disp")
    figure.legend(frameon=False, fontsize=9, labelcolor=INK, loc="outside upper left", ncols=2)
    plain(axes)
    return figure


def draw_drift(series: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Draw how far a round of mixing moves the network's average, relative to it: a line per run, a colour per rule."""
    figure = Figure(figsize=(layout_width(), 4.0), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, lines) in enumerate(series.items()):
        for index, values in enumerate(lines):
            shown = [100 * max(value, 1e-9) for value in values]
            label = name if index == 0 else None
            axes.plot(range(1, len(shown) + 1), shown, color=CLUSTERS[number % len(CLUSTERS)], lw=1.0, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.minorticks_off()
    axes.set_xlabel("round")
    axes.set_ylabel("the average moved by (% of its length)")
    axes.legend(frameon=False, fontsize=10, labelcolor=INK)
    plain(axes)
    return figure
