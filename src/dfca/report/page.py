"""Make `report.html` of a run folder: one page that opens offline and explains itself.

    run folder -> load_run -> Run -> the values of a template (numbers, tables, pictures) -> templates/*.html

Texts live in the templates, which escape what they are given. The page of a run that is not finished shows the results
so far and says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dfca import __version__, topology
from dfca.base.files import atomic_write
from dfca.base.paired import BEYOND_CHANCE
from dfca.experiment.sweep import label_of
from dfca.report import formats
from dfca.report.drawing import plots
from dfca.report.drawing.axes import Style
from dfca.report.drawing.curves import CurveComparison, comparisons, curves_of
from dfca.report.drawing.multiples import (
    DASH_ARRAYS,
    Multiple,
    against_multiples,
    by_round_figures,
    by_round_multiples,
    grouped,
    in_one_axis,
)
from dfca.report.drawing.palette import cluster_colour, css_variables
from dfca.report.drawing.plots import NamedFigure
from dfca.report.drawing.svg import to_svg
from dfca.report.findings import findings_of, sweep_findings
from dfca.report.paper import figures
from dfca.report.paper.citation import bibtex
from dfca.report.paper.cluster_map import ClusterMap, map_clusters
from dfca.report.rows import MeanStd, RunReport
from dfca.report.setting import about_algorithm, changes_of, flat, setting_of, size_of
from dfca.report.virtual.figures import virtual_drawings
from dfca.report.virtual.plots import standalone
from dfca.report.virtual.summary import VirtualResults, finished, is_virtual, rows_of, variants
from dfca.report.virtual.tables import ratio_to_batch
from dfca.report.wording import megabytes, percent
from dfca.runs.store.reading import Run, load_run, understood
from dfca.runs.store.rows import PointRow

LARGE = 100  # clients: beyond, the pictures of a graph are larger
Values = dict[str, Any]


class Picture(NamedTuple):
    """A drawing as a page shows it."""

    svg: Markup
    caption: str
    title: str = ""
    width_rem: int | None = None  # where it would be too large over the whole width of the page


def write_report(report: RunReport | str | Path) -> Path:
    """Write `report.html` into a run folder, as a whole or not at all, and return its path.

    report: of a run folder, or the folder, which is read then. Of a run in virtual time the figures are also written as
    files. Raises RunError if a file of the folder is missing or damaged, or the page cannot be written.
    """
    report = report if isinstance(report, RunReport) else RunReport.of(load_run(report))
    run = report.run
    with understood(run.folder):
        values = _values_of(report)
        page = _templates().get_template(values["template"]).render(values)
    for name, svg in values.get("files", {}).items():
        atomic_write(run.folder / "figures" / f"{name}.svg", standalone(svg))
    path = run.folder / "report.html"
    atomic_write(path, page)
    return path


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("dfca.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "code_quotes": _code_quotes}
    return environment


def _code_quotes(text: str) -> Markup:
    """Escape a text, and set what stands in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _picture(drawing: NamedFigure, limited: bool = False) -> Picture:
    width = round(5.2 * drawing.figure.get_figwidth()) if limited else None
    return Picture(Markup(to_svg(drawing.figure)), drawing.caption, drawing.title, width)


def _pictures(drawings: Iterable[NamedFigure]) -> list[Picture]:
    return [_picture(drawing) for drawing in drawings]


def _limited(drawing: NamedFigure | None) -> Picture | None:
    return None if drawing is None else _picture(drawing, limited=True)


# --- what every page has


def _values_of(report: RunReport) -> Values:
    run, virtual = report.run, is_virtual(report.run)
    if virtual:
        own = _virtual(run)
    else:
        own = _sweep(report) if run.swept else _single(report)
    done, asked = run.trial_counts
    return own | {
        "heading": str(run.config.get("title") or run.experiment or "dfca run"),
        "size": size_of(run),
        "data_name": None if "data.name" in run.varying else (run.config.get("data") or {}).get("name", ""),
        "changes": changes_of(run),
        "description": str(run.config.get("description") or "").strip(),
        "finished": done,
        "asked": asked,
        "under_way": _under_way(run),
        "tables": formats.all_tables(report) if run.trials else [],
        "notes": _notes(report, bool(own.get("verdict"))) if run.trials else [],
        "swept": run.swept,
        "virtual": virtual,
        "about": {name: about_algorithm(run, name) for name in run.algorithms},
        "setting": setting_of(run),
        "config_text": run.config_text,
        "bibtex": bibtex(),
        "environment": list(flat(run.environment)),
        "version": __version__,
        "schemes": Markup(css_variables()),
    }


def _notes(report: RunReport, told: bool) -> list[str]:
    """Return the notes below the tables; without what is beyond chance where the page has told it above."""
    return [note for note in formats.all_notes(report) if not (told and note.startswith(f"{BEYOND_CHANCE} beyond"))]


def _under_way(run: Run) -> list[str]:
    return [
        f"{trial.algorithm} seed {trial.seed} at round {trial.rounds}"
        for trial in run.trials
        if not trial.finished and not trial.error
    ]


# --- a run by rounds


def _single(report: RunReport) -> Values:
    run, clusters = report.run, map_clusters(report.run)
    return {
        "template": "run.html",
        **findings_of(report.rows),
        "by_round": _pictures(figures.by_round_drawings(run)),
        "banded": len(run.seeds) > 1,
        "sample_picture": _limited(figures.sample_drawing(run)),
        "graph": None if clusters is None else _graph(clusters),
        "confusion": _limited(figures.confusion_drawing(run, clusters)),
        "costs": _pictures(_costs(report)),
    }


def _graph(clusters: ClusterMap) -> Values:
    drawn = plots.networks(clusters.positions, clusters.edges, [(c.clusters, c.wrong) for c in clusters.colourings])
    number = max(max(colouring.clusters) for colouring in clusters.colourings) + 1
    return {
        "seed": clusters.seed,
        "about": topology.summary(clusters.facts),
        "true": bool(clusters.true),
        "large": len(clusters.positions) > LARGE,
        "colours": [cluster_colour(j) for j in range(number)],
        "pictures": [
            Picture(Markup(svg), colouring.outcome, colouring.title)
            for svg, colouring in zip(drawn, clusters.colourings, strict=True)
        ],
    }


def _costs(report: RunReport) -> Iterator[NamedFigure]:
    """Draw how far the copies of a model are apart, what a score cost, and what a client sent in the whole run."""
    run, style = report.run, plots.styles(report.run.algorithms)
    spread = curves_of(run, "disagreement")
    if apart := {name: curve for name, curve in spread.items() if any(curve.mean)}:
        none = [name for name in spread if name not in apart]
        caption = (
            "Squared distance of the clients' copies of a model to their average; the mean over clusters and seeds."
        )
        caption += f" None with a server: {', '.join(none)}." if none else ""
        figure = plots.draw_curves(apart, style, "disagreement (squared distance)", scale="log")
        yield NamedFigure("disagreement", caption, figure)
    if (spent := figures.traffic_drawing(run)) is not None:
        yield spent
    traffic = {row.algorithm: value for row in report.rows if (value := row.megabytes_per_client) is not None}
    if any(traffic.values()):
        texts = {name: megabytes(value) for name, value in traffic.items()}
        caption = "What a client sent and received in the whole run; the mean over clients and seeds."
        yield NamedFigure("traffic", caption, plots.draw_bars(traffic, style, "MB per client", texts))


# --- a sweep by rounds


def _sweep(report: RunReport) -> Values:
    run = report.run
    theory = _pictures(figures.theory_drawings(run))
    points = [] if theory else [_point(run, point) for point in figures.few_points(run)]
    graphs = None if theory else figures.graph_drawing(run)
    style = plots.styles(run.algorithms)
    together = [] if theory else _pictures(by_round_figures(run, style))
    return {
        "template": "sweep.html",
        **sweep_findings(report.rows, run.varying),
        "theory": theory,
        "legend": [(name, line.colour, DASH_ARRAYS.get(line.dash, "")) for name, line in style.items()],
        "against": {} if theory else _against(run, style),
        "graphs": None if graphs is None else _picture(graphs),
        "by_round_together": together,
        "by_round": [] if theory or together else list(map(_multiple, by_round_multiples(run, style))),
        "points": [point for point in points if point["confusion"]],
        "sample_picture": _limited(figures.sample_drawing(run)),
    }


def _against(run: Run, style: Mapping[str, Style]) -> dict[str, Values]:
    """Draw every measure against every number that varies: one figure, or a small one per choice of the other keys."""
    made: dict[str, Values] = {}
    for key, group in grouped(comparisons(run)).items():
        drawn = [
            figures.against_drawing(merged, own) for same in group.values() for merged, own in _merged(same, style)
        ]
        single = _pictures(drawn if len(drawn) == len(group) else [])
        small = [] if single else list(map(_multiple, against_multiples(key, group, style)))
        made[key] = {"pictures": single, "multiples": small}
    return made


def _merged(
    same: Sequence[CurveComparison], style: Mapping[str, Style]
) -> Iterator[tuple[CurveComparison, Mapping[str, Style]]]:
    """Yield the comparison of all choices of the other keys in one axis; nothing where there are too many lines."""
    if len(same) == 1:
        yield same[0], style
    elif merged := in_one_axis([(label_of(one.others), one.curves) for one in same], style):
        yield same[0]._replace(others={}, curves=merged[0]), merged[1]


def _multiple(multiple: Multiple) -> Values:
    return {"label": multiple.label, "caption": multiple.caption, "panels": _pictures(multiple.panels)}


def _point(run: Run, point: PointRow) -> Values:
    part = run.at(point)
    return {"label": point.label, "confusion": _limited(figures.confusion_drawing(part, map_clusters(part)))}


# --- virtual time


def _virtual(run: Run) -> Values:
    results = VirtualResults.of(run)
    axis, rows, metric = results.axis, finished(run), run.metric
    drawings = virtual_drawings(results)
    drawn = {section: _pictures(made) for section, made in drawings.items()}
    names = [drawing.name for made in drawings.values() for drawing in made]
    svgs = [str(picture.svg) for made in drawn.values() for picture in made]
    finals: list[tuple[float, float, str]] = []  # the score of a variant at the last value of the axis, at the first
    for name in variants(rows, axis) if axis.key else ():
        last, first = (
            MeanStd.of(trial.score for trial in rows_of(rows, axis, value, name)).mean
            for value in (axis.values[-1], axis.values[0])
        )
        if last is not None and first is not None:
            finals.append((last, first, name))
    return {
        "template": "virtual.html",
        "metric": metric,
        "axis": axis.key,
        "first": axis.values[0],
        "last": axis.values[-1],
        "sooner": _sooner(results),
        "finals": sorted(finals, key=lambda final: final[0], reverse=metric.higher_is_better),
        "drawn": drawn,
        "files": dict(zip(names, svgs, strict=True)),
    }


def _sooner(results: VirtualResults) -> dict[str, list[str]]:
    """Compare each variant with `batch` at the last value of the axis: what was reached how soon, and by which."""
    axis, rows, metric = results.axis, finished(results.run), results.run.metric
    made: dict[str, list[str]] = {}
    for name in variants(rows, axis):
        group = rows_of(rows, axis, axis.values[-1], name)
        compared = ratio_to_batch(rows, group) if group else None
        if compared is not None:
            ratio, at_least = compared
            goal = f"{(group[0].target or 0.0) * (100 if metric.percent else 1):g} {metric.sign} {metric.name}"
            made.setdefault(f"{goal} {'more than ' if at_least else ''}{ratio:.1f}", []).append(name)
    return made
