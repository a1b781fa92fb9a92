"""The figures of a run by rounds, in the paper's form: drawn once, for the page and as PNG, SVG and PDF files.

Run -> NamedFigure -> report.html (as SVG), or `dfca report RUN --figures DIR` (as files)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dfca.base.errors import DfcaError, RunError
from dfca.data.partitions import make_split
from dfca.experiment.config import Config
from dfca.report.drawing import plots
from dfca.report.drawing.axes import Style, zoom_of
from dfca.report.drawing.curves import AXES, CurveComparison, ScoreCurve, by_round, comparisons, curves_of
from dfca.report.drawing.palette import CLUSTERS
from dfca.report.drawing.plots import NamedFigure
from dfca.report.drawing.svg import FigureSize, save, sized
from dfca.report.paper import connectivity, drawings, theory
from dfca.report.paper.cluster_map import ClusterMap, confusions, map_clusters
from dfca.report.virtual.figures import virtual_drawings
from dfca.report.virtual.plots import draw_courses
from dfca.report.virtual.summary import VirtualResults, is_virtual
from dfca.report.wording import slug
from dfca.runs.store.reading import Run
from dfca.runs.store.rows import PointRow

FEW = 6  # points of a sweep: beyond, figures of single points would fill pages and show nothing
SAMPLES = 10


def save_figures(run: Run, folder: Path, size: FigureSize | None = None, paper_names: bool = False) -> list[Path]:
    """Write every figure of a run as PNG, SVG and PDF, of a size in print where one is given; returns the files.

    Raises RunError if the folder cannot be written; ConfigError if the size leaves no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with sized(size):
            drawings = draw_all(run)
            return [path for one in drawings for path in save(one.figure, folder / one.name, size, paper_names)]
    except OSError as error:
        raise RunError(f"{error.filename or folder} cannot be written: {error.strerror}; use another folder") from error


def draw_all(run: Run) -> Iterator[NamedFigure]:
    if is_virtual(run):
        yield from (drawing for section in virtual_drawings(VirtualResults.of(run)).values() for drawing in section)
    elif not run.swept:
        yield from _of_point(run, "")
    elif theory.mixing(run):
        yield from theory_drawings(run)
    else:
        if (graphs := graph_drawing(run)) is not None:
            yield graphs
        style = plots.styles(run.algorithms)
        for comparison in comparisons(run):
            yield against_drawing(comparison, style)
        for point in few_points(run):
            yield from _of_point(run.at(point), f"-{slug(point.label)}")
    if (samples := sample_drawing(run)) is not None:
        yield samples


def few_points(run: Run) -> list[PointRow]:
    """Return the points of a sweep if they are few enough to be shown one by one, else none."""
    return run.points if len(run.points) <= FEW else []


def by_round_drawings(run: Run, suffix: str = "") -> Iterator[NamedFigure]:
    """Draw accuracy and cluster accuracy by round."""
    style = plots.styles(run.algorithms)
    for measure, label, caption, scale in by_round(run.metric):
        if series := curves_of(run, measure):
            name = f"{measure.replace('_', '-')}-by-round{suffix}"
            yield NamedFigure(name, caption, plots.draw_curves(series, style, label, scale))
            if scale == "percent" and (zoom := zoom_of(series)) is not None:
                closer = f"A closer look, without {', '.join(zoom.outside)}. {caption}"
                yield NamedFigure(f"{name}-closer", closer, plots.draw_curves(series, style, label, zoom=zoom))


def traffic_drawing(run: Run, suffix: str = "") -> NamedFigure | None:
    """Draw the score against what a client has sent and received; None where nobody sends anything."""
    metric, drawn = run.metric, curves_of(run, run.metric.key, "traffic")
    series = {name: curve for name, curve in drawn.items() if curve.x[-1] > 0}
    if not series:
        return None
    silent = [name for name in drawn if name not in series]
    caption = f"{metric.capitalised} against what a client has sent and received; the mean over clients and seeds."
    caption += f" Not drawn, for it sends nothing: {', '.join(silent)}." if silent else ""
    figure = draw_courses(series, plots.styles(run.algorithms), AXES["traffic"], metric=metric)
    return NamedFigure(f"{metric.key.replace('_', '-')}-by-traffic{suffix}", caption, figure)


def against_drawing(comparison: CurveComparison, style: Mapping[str, Style]) -> NamedFigure:
    """Draw a measure of a sweep against a number that varies."""
    key, others, measure, curves = comparison
    at = "".join(f"-{slug(str(value))}" for value in others.values())
    name = f"{slug(measure.label.removesuffix(' (%)'))}-against-{slug(key)}{at}"
    return NamedFigure(name, measure.caption, plots.draw_curves(curves, style, measure.label, measure.scale, key))


def theory_drawings(run: Run) -> Iterator[NamedFigure]:
    """Draw Lemma 3 where the run measures it."""
    if not (measured := theory.mixing(run)):
        return
    yield NamedFigure(
        "contraction",
        "Mixing without training: the worst round's ratio of disagreement against the bound of the spectral gap. "
        "Below the dashed line is within the bound. Hollow: with several models only the clients that train a model "
        "send it, and the lemma does not hold.",
        drawings.draw_contraction(measured),
    )
    yield NamedFigure(
        "drift",
        "How far each round of mixing moves the average of all clients' models. Lemma 3 says: not at all. It holds for "
        "metropolis weights where everybody mixes, up to rounding.",
        drawings.draw_drift(theory.drifts(run)),
    )


def graph_drawing(run: Run) -> NamedFigure | None:
    """Draw what the graphs do to the clusters against the key that makes them."""
    key = connectivity.graph_key(run)
    shares = {fact.name: connectivity.shares(run, fact) for fact in connectivity.FACTS if fact.name != "together"}
    if key is None or len(shares["connected"]) < 2:
        return None
    style = {name: Style(colour, "-") for name, colour in zip(shares, CLUSTERS, strict=False)}
    lines = {name: ScoreCurve(list(values), list(values.values())) for name, values in shares.items()}
    return NamedFigure(
        f"graphs-against-{slug(key)}",
        "What the graphs do to the clusters, means over seeds. whole: graphs in one piece; connected: clusters whose "
        "clients are connected among themselves; alone: clients with nobody of their cluster beside them; no trainer: "
        "pairs (client, cluster) where no neighbour of the client can send it that model.",
        plots.draw_curves(lines, style, "share (%)", against=key),
    )


def confusion_drawing(run: Run, clusters: ClusterMap | None) -> NamedFigure | None:
    """Draw who ended where, for each clustered algorithm on the first seed; only where the true groups are known."""
    counts = confusions(run, clusters) if clusters is not None else {}
    if clusters is None or not counts:
        return None
    return NamedFigure(
        "confusion",
        f"Clients of each found cluster (row) and true group (column), seed {clusters.seed}. A full diagonal is what "
        "one wants; a column with two numbers is a group that was torn apart, a row with two is a model that groups "
        "share, an empty row a group without a model of its own.",
        drawings.draw_confusions(counts),
    )


def sample_drawing(run: Run) -> NamedFigure | None:
    """Draw samples of each true group or, where these are unknown, of each found cluster; None without the data."""
    try:
        groups = _samples(run.at(run.points[0]) if run.swept else run)
    except DfcaError:
        return None  # the data is not on this machine, or its options have changed
    if not groups:
        return None
    return NamedFigure("samples", "What the clients of each group hold.", drawings.draw_samples(groups))


def _samples(run: Run) -> list[tuple[str, np.ndarray]]:
    config = Config.of(run.config)
    if config.data.factory is not None:
        return []  # a report runs no code of the user's own
    seed, k = run.seeds[0], config.distributions
    owned = config.data.partition == "owner"
    few = config.data.model_copy(update={"samples_per_client": SAMPLES, "test_samples_per_client": 2})
    split = make_split(config.data if owned else few, config.clients if owned else k, k, seed)
    if split.clusters is not None and int(split.clusters.max()) > 0:
        first = [split.clusters.tolist().index(cluster) for cluster in range(k)]
        return [(f"group {j + 1}", split.train.of(client)[0][:SAMPLES].numpy()) for j, client in enumerate(first)]
    clusters = map_clusters(run) if owned else None
    if clusters is None:
        return []
    colours = np.asarray(clusters.colourings[0].clusters)
    groups = []
    for cluster in np.unique(colours).tolist():
        members = np.flatnonzero(colours == cluster)
        picked = [split.train.of(int(client))[0][:2].numpy() for client in members[: SAMPLES // 2]]
        if len(picked) == SAMPLES // 2:
            groups.append((f"cluster {cluster + 1}", np.concatenate(picked)))
    return groups


def _of_point(run: Run, suffix: str) -> Iterator[NamedFigure]:
    """Draw curves by round, the graph and the confusion of a run without a sweep, or of one point."""
    yield from by_round_drawings(run, suffix)
    if (traffic := traffic_drawing(run, suffix)) is not None:
        yield traffic
    clusters = map_clusters(run)
    if clusters is not None:
        caption = "The graph with the true groups and what each algorithm found; ringed: in a cluster of another group."
        yield NamedFigure(f"graph{suffix}", caption, drawings.draw_networks(clusters))
    if (matrices := confusion_drawing(run, clusters)) is not None:
        yield matrices._replace(name=f"confusion{suffix}")
