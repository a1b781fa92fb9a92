"""The sections of a sweep's report: tables, every measure against every number that varies, curves of few points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dfca.experiment.sweep import label_of
from dfca.report import tables
from dfca.report.page import ABOUT_CURVES, by_round, figure, results
from dfca.report.paper.evidence_page import confusions, graph_section, theory_section
from dfca.runs.reading import Run

if TYPE_CHECKING:
    from dfca.report.plots import Curve, Style

FEW = 6  # points: beyond, curves by round would fill the page and tell nobody anything


def sweep_sections(run: Run, style: Mapping[str, Style]) -> list[str]:
    """Write the sections from top to bottom."""
    if theory := theory_section(run):
        return [results(run), theory]
    keys = [key for key in tables.varying(run.summary) if len(numbers_of(run, key)) > 1]
    return [
        results(run),
        *(_against(run, key, style) for key in keys),
        graph_section(run),
        _curves(run, style),
    ]


def numbers_of(run: Run, key: str) -> list[float]:
    """Give the numbers that a key has in the sweep, ascending; none if it has other values too."""
    values = {point["point"][key] for point in run.summary["points"] if key in point["point"]}
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return []
    return sorted(values)


def line_of(
    run: Run, algorithm: str, key: str, others: Mapping[str, Any], measure: Callable[[Mapping[str, Any]], Any]
) -> Curve | None:
    """Take the mean and deviation over seeds of a measure against a key, at the points that agree in the others."""
    from dfca.report.plots import Curve

    found: dict[float, tuple[float, float | None]] = {}
    for point in run.summary["points"]:
        at = point["point"]
        if key not in at or {name: value for name, value in at.items() if name != key} != others:
            continue
        runs = [{"value": measure(row)} for row in _finished(run, point["digest"], algorithm)]
        mean, std = tables.mean_std(runs, "value")
        if mean is not None:
            found[at[key]] = (mean, std)
    if not found:
        return None
    x = sorted(found)
    stds = [found[value][1] for value in x]
    # A band over yes and no would say nothing.
    banded = measure is not _share_found and any(std is not None for std in stds)
    return Curve(x, [found[value][0] for value in x], [std or 0.0 for std in stds] if banded else None)


def _finished(run: Run, digest: str, algorithm: str) -> list[dict[str, Any]]:
    rows = run.summary["runs"]
    return [row for row in rows if row.get("digest") == digest and row["algorithm"] == algorithm and row["finished"]]


def _against(run: Run, key: str, style: Mapping[str, Style]) -> str:
    """Draw every measure against one key, one set of figures for each choice of the other keys."""
    from dfca.report import plots

    parts = []
    for others in choices(run, key):
        figures = []
        for measure, label, caption in MEASURES:
            lines = {name: line for name in run.algorithms if (line := line_of(run, name, key, others, measure))}
            if any(len(line.x) > 1 for line in lines.values()):
                figures.append(figure(plots.curves(lines, style, label, against=key), caption))
        if figures:
            heading = f"<h3>{escape(label_of(others))}</h3>" if others else ""
            parts.append(f'{heading}<div class="pair">{"".join(figures)}</div>')
    if not parts:
        return ""
    return (
        f'<h2>Against {escape(key)}</h2><p class="soft">Means over the finished runs; the band is one standard '
        f"deviation over seeds to each side. {ABOUT_CURVES}</p>{''.join(parts)}"
    )


def choices(run: Run, key: str) -> Sequence[dict[str, Any]]:
    """Give the different settings of the other keys at the points that set this one."""
    choices: list[dict[str, Any]] = []
    for point in run.summary["points"]:
        if key in point["point"]:
            others = {name: value for name, value in point["point"].items() if name != key}
            choices += [others] if others not in choices else []
    return choices


def _share_found(row: Mapping[str, Any]) -> float | None:
    return None if row.get("cluster_accuracy") is None else float(tables.all_found(row))


MEASURES: tuple[tuple[Callable[[Mapping[str, Any]], Any], str, str], ...] = (
    (
        lambda row: row.get("accuracy"),
        "accuracy (%)",
        "Accuracy of the model that each client would use, on test data like its own.",
    ),
    (
        lambda row: row.get("all_models_accuracy"),
        "all-models accuracy (%)",
        "Accuracy of each client's models on test data of every group.",
    ),
    (_share_found, "runs that found all clusters (%)", "Share of runs that put every client into its cluster."),
)


def _curves(run: Run, style: Mapping[str, Style]) -> str:
    points = run.summary["points"]
    if len(points) > FEW:
        return ""
    parts = [run.at(point) for point in points]
    curves, matrices = [by_round(part, style) for part in parts], [confusions(part, "") for part in parts]
    shown = "".join(
        f"<h3>{escape(point['label'])}</h3>{curve}{matrix}"
        for point, curve, matrix in zip(points, curves, matrices, strict=True)
        if curve or matrix
    )
    if not any(curves):
        return f"<h2>Found clusters and true groups</h2>{shown}" if shown else ""
    return f'<h2>By round</h2><p class="soft">{ABOUT_CURVES}</p>{shown}'
