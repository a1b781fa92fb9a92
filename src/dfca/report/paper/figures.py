"""The figures of a run in the paper's form: drawn once, for the page and as PNG, SVG and PDF files.

Run -> Drawing -> report.html (as SVG), or `dfca report RUN --figures DIR` (as files)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dfca import data
from dfca.errors import DfcaError, RunError
from dfca.experiment.load import read_stored
from dfca.metrics import confusion
from dfca.report import tables
from dfca.report.page import BY_ROUND, curves_of, style_of
from dfca.report.paper import connectivity, theory
from dfca.report.paper.scenes import last_assignments, scene_of
from dfca.runs.reading import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 6  # points of a sweep: beyond, figures of single points would tell nobody anything
SAMPLES = 10


class Drawing(NamedTuple):
    """A figure with its name as a file and its caption."""

    name: str
    caption: str
    figure: Figure


def save_figures(run: Run, folder: Path) -> list[Path]:
    """Write every figure of a run as PNG, SVG and PDF; returns the files.

    Raises:
        RunError: if the folder cannot be written.
    """
    from dfca.report import plots

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [path for each in draw_all(run) for path in plots.save(each.figure, folder / each.name)]
    except OSError as error:
        raise RunError(f"{error.filename or folder} cannot be written: {error.strerror}; use another folder") from error


def draw_all(run: Run) -> Iterator[Drawing]:
    """Draw everything that this run can show."""
    if not run.swept:
        yield from _of_point(run, "")
    elif theory.mixing(run.summary):
        yield from theory_drawings(run.summary)
    else:
        yield from _against(run)
        points = run.summary["points"]
        for point in points if len(points) <= FEW else ():
            yield from _of_point(run.at(point), f"-{_slug(point['label'])}")
    if (samples := sample_drawing(run)) is not None:
        yield samples


def theory_drawings(summary: Mapping[str, Any]) -> Iterator[Drawing]:
    """Draw Lemma 3 where the run measures it."""
    from dfca.report.paper import drawings as draw

    if not (measured := theory.mixing(summary)):
        return
    yield Drawing(
        "contraction",
        "Mixing without training: the worst round's ratio of disagreement against the bound of the spectral gap. "
        "Below the dashed line is within the bound. Hollow: with several models only the clients that train a model "
        "send it, and the lemma does not hold.",
        draw.draw_contraction(measured),
    )
    yield Drawing(
        "drift",
        "How far each round of mixing moves the average of all clients' models. Lemma 3 says: not at all. It holds for "
        "metropolis weights where everybody mixes, up to rounding.",
        draw.draw_drift(theory.drifts(summary)),
    )


def graph_drawing(summary: Mapping[str, Any]) -> Drawing | None:
    """Draw what the graphs do to the clusters against the key that makes them."""
    from dfca.report import plots

    key = connectivity.graph_key(summary)
    found = {fact.name: connectivity.shares(summary, fact) for fact in connectivity.FACTS if fact.name != "together"}
    if key is None or len(found["connected"]) < 2:
        return None
    names = zip(found, plots.PALETTE, strict=False)
    style = {name: plots.Style(colour, "-") for name, colour in names}
    lines = {name: plots.Curve(list(values), list(values.values())) for name, values in found.items()}
    return Drawing(
        f"graphs-against-{_slug(key)}",
        "What the graphs do to the clusters, means over seeds. whole: graphs in one piece; connected: clusters whose "
        "clients are connected among themselves; alone: clients with nobody of their cluster beside them; no trainer: "
        "pairs (client, cluster) where no neighbour of the client can send it that model.",
        plots.draw_curves(lines, style, "share (%)", against=key),
    )


def confusion_drawing(run: Run) -> Drawing | None:
    """Draw who ended where, for each clustered algorithm on the first seed; only where the true groups are known."""
    from dfca.report.paper import drawings as draw

    scene = scene_of(run)
    if scene is None or not scene.entry.get("clusters"):
        return None
    import torch

    true = torch.tensor(scene.entry["clusters"])
    counts = {}
    for (name, _), (matched, _) in list(zip(scene.said, scene.colourings, strict=True))[1:]:
        found = torch.tensor(last_assignments(run, name, int(scene.seed)))
        matrix = confusion(found, true).numpy()
        twin = np.full(len(matrix), len(matrix) + matrix.shape[1])  # rows without a partner come last
        for cluster, fits in zip(found.tolist(), matched, strict=True):
            twin[cluster] = fits if fits >= 0 else twin[cluster]
        counts[name] = matrix[np.argsort(twin, kind="stable")]
    if not counts:
        return None
    return Drawing(
        "confusion",
        f"Clients of each found cluster (row) and true group (column), seed {scene.seed}. A full diagonal is what one "
        "wants; a column with two numbers is a group that was torn apart, a row with two is a model that groups share.",
        draw.draw_confusions(counts),
    )


def sample_drawing(run: Run) -> Drawing | None:
    """Draw samples of each true group or, where nobody knows these, of each found cluster; None without the data."""
    from dfca.report.paper import drawings as draw

    try:
        groups = _samples(run)
    except DfcaError:
        return None  # the data is not on this machine, or its options have changed
    if not groups:
        return None
    return Drawing("samples", "What the clients of each group hold.", draw.draw_samples(groups))


def _samples(run: Run) -> list[tuple[str, np.ndarray]]:
    base, sweep = read_stored(run.config_text)
    config = sweep.expand(base)[0].config  # of the first point, where there are several
    seed, k = run.seeds[0], config.distributions
    owned = config.data.partition == "owner"
    few = config.data.model_copy(update={"samples_per_client": SAMPLES, "test_samples_per_client": 2})
    split = data.make_split(config.data if owned else few, config.clients if owned else k, k, seed)
    point = run if not run.swept else run.at(run.summary["points"][0])
    if split.clusters is not None and int(split.clusters.max()) > 0:
        first = [split.clusters.tolist().index(cluster) for cluster in range(k)]
        return [(f"group {j + 1}", split.train.of(client)[0][:SAMPLES].numpy()) for j, client in enumerate(first)]
    scene = scene_of(point)
    if scene is None or not owned:
        return []
    found = np.asarray(scene.colourings[0][0])
    groups = []
    for cluster in np.unique(found).tolist():
        members = np.flatnonzero(found == cluster)
        picked = [split.train.of(int(client))[0][:2].numpy() for client in members[: SAMPLES // 2]]
        if len(picked) == SAMPLES // 2:
            groups.append((f"cluster {cluster + 1}", np.concatenate(picked)))
    return groups


def _of_point(run: Run, suffix: str) -> Iterator[Drawing]:
    """Draw curves by round, the graph and the confusion of a run without a sweep, or of one point."""
    from dfca.report import plots
    from dfca.report.paper import drawings as draw

    style = style_of(run)
    for measure, label, caption in BY_ROUND:
        if series := curves_of(run, measure):
            yield Drawing(
                f"{measure.replace('_', '-')}-by-round{suffix}", caption, plots.draw_curves(series, style, label)
            )
    if (scene := scene_of(run)) is not None:
        panels = [(*said, *colours) for said, colours in zip(scene.said, scene.colourings, strict=True)]
        caption = "The graph with the true groups and what each algorithm found; ringed: in a cluster of another group."
        yield Drawing(f"graph{suffix}", caption, draw.draw_networks(scene.positions, scene.entry["edges"], panels))
    if (matrices := confusion_drawing(run)) is not None:
        yield matrices._replace(name=f"confusion{suffix}")


def _against(run: Run) -> Iterator[Drawing]:
    """Draw every measure of a sweep against every number that varies."""
    from dfca.report import plots
    from dfca.report.sweep_page import MEASURES, choices, line_of, numbers_of

    style = style_of(run)
    if (graphs := graph_drawing(run.summary)) is not None:
        yield graphs
    for key in tables.varying(run.summary):
        if len(numbers_of(run, key)) < 2:
            continue
        for others in choices(run, key):
            at = "".join(f"-{_slug(str(value))}" for value in others.values())
            for measure, label, caption in MEASURES:
                lines = {name: line for name in run.algorithms if (line := line_of(run, name, key, others, measure))}
                if any(len(line.x) > 1 for line in lines.values()):
                    name = f"{_slug(label.removesuffix(' (%)'))}-against-{_slug(key)}{at}"
                    yield Drawing(name, caption, plots.draw_curves(lines, style, label, against=key))


def _slug(text: str) -> str:
    """Write a text as part of a file's name.

    >>> _slug("data.skew=consistent, data.alpha=0.7")
    'data.skew-consistent-data.alpha-0.7'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower()
