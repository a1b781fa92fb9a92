"""Make `report.html` of a run folder: one page that opens offline and explains itself.

    run folder -> load_run -> Run -> the values of a template (numbers, tables, pictures) -> templates/*.html

Texts live in the templates, which escape whatever they are given. A run that is still going on, or was stopped, gets a
page of what there is, and the page says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dfca import __version__, topology
from dfca.data import DataOptions
from dfca.experiment.sweep import label_of, write
from dfca.files import atomic_write
from dfca.models import ModelOptions
from dfca.report import formats, plots
from dfca.report.curves import comparisons, curves_of
from dfca.report.paper import figures
from dfca.report.paper.cluster_map import ClusterMap, map_clusters
from dfca.report.plots import Drawing
from dfca.report.rows import kind_of, mean_std, summary_rows, varying
from dfca.report.virtual import VirtualResults, finished, is_virtual, rows_of, variants, virtual_heads
from dfca.report.virtual_figures import virtual_drawings
from dfca.report.virtual_plots import standalone
from dfca.report.virtual_tables import ratio_to_batch, world_in_words
from dfca.report.wording import count, megabytes, percent
from dfca.runs.store.reading import Run, load_run, other_version

LARGE = 100  # clients: beyond, the pictures of a graph are larger
Values = dict[str, Any]


class Picture(NamedTuple):
    """A drawing as a page shows it."""

    svg: Markup
    caption: str
    title: str = ""
    width_rem: int | None = None  # where it would be too large over the whole width of the page


def write_report(run: Run | str | Path) -> Path:
    """Write `report.html` into a run folder, as a whole or not at all, and return its path.

    A run that was read already is not read again. Of a run in virtual time the figures are also written as files.

    Raises:
        RunError: if a file of the folder is missing or damaged, or the page cannot be written.
    """
    run = run if isinstance(run, Run) else load_run(run)
    try:
        values = _values_of(run)
        page = _templates().get_template(values["template"]).render(values)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise other_version(run.folder, error) from error
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


def _picture(drawing: Drawing, limited: bool = False) -> Picture:
    width = round(5.2 * drawing.figure.get_figwidth()) if limited else None
    return Picture(Markup(plots.to_svg(drawing.figure)), drawing.caption, drawing.title, width)


def _pictures(drawings: Iterable[Drawing]) -> list[Picture]:
    return [_picture(drawing) for drawing in drawings]


def _limited(drawing: Drawing | None) -> Picture | None:
    return None if drawing is None else _picture(drawing, limited=True)


# --- what every page has


def _values_of(run: Run) -> Values:
    """Prepare everything that the template of this run shows."""
    if is_virtual(run.summary):
        own = _virtual(run)
    else:
        own = _sweep(run) if run.swept else _single(run)
    begun = bool(run.summary["runs"])
    done, asked = run.trial_counts
    return own | {
        "heading": str(run.config.get("title") or run.summary.get("experiment") or "dfca run"),
        "size": _size(run),
        "data_name": None if "data.name" in varying(run.summary) else (run.config.get("data") or {}).get("name", ""),
        "description": str(run.config.get("description") or "").strip(),
        "finished": done,
        "asked": asked,
        "under_way": _under_way(run),
        "tables": formats.all_tables(run.summary) if begun else [],
        "notes": formats.all_notes(run.summary) if begun else [],
        "swept": run.swept,
        "virtual": is_virtual(run.summary),
        "kinds": {name: kind_of(name) for name in run.algorithms},
        "setting": _setting(run),
        "config_text": run.config_text,
        "environment": list(_flat(run.environment)),
        "version": __version__,
    }


def _size(run: Run) -> list[str]:
    """Describe how large the run is: "4 points (clients)", "12 to 24 clients", ..."""
    points = f"{count(len(run.summary['points']), 'point')} ({', '.join(varying(run.summary))})" if run.swept else ""
    true = any(graph.get("clusters") for graph in run.topology.values())
    auto = run.config.get("clusters") == "auto"
    groups = _amount(run, "clusters", "hidden group" if true else "model") if true or not auto else ""
    parts = [
        points,
        _amount(run, "clients", "client"),
        f"{groups} of data" if true else groups,
        "k found by the clients" if auto else "",
        _amount(run, "rounds", "round"),
        count(len(run.algorithms), "algorithm"),
        count(len(run.seeds), "random seed"),
    ]
    return [part for part in parts if part]


def _amount(run: Run, key: str, noun: str) -> str:
    """Count something of the config, "12 to 24 clients" where a sweep varies it."""
    values = sorted({point[key] for point in run.summary["points"]}) if run.swept else [_number(run, key)]
    if len(values) > 1:
        return f"{values[0]:,} to {values[-1]:,} {noun}s"
    return count(values[0], noun)


def _number(run: Run, key: str) -> Any:
    """Return a number of the config; of the clusters, the number of true ones."""
    true = (run.config.get("data") or {}).get("distributions") if key == "clusters" else None
    return true or run.config.get(key)


def _under_way(run: Run) -> list[str]:
    return [
        f"{row['algorithm']} seed {row['seed']} at round {row['rounds']}"
        for row in run.summary["runs"]
        if not row["finished"] and not row.get("error")
    ]


def _setting(run: Run) -> list[tuple[str, str]]:
    """List what was run: names and values of a table."""
    config = run.config
    graph = config.get("topology") or {}
    auto = config.get("clusters") == "auto"
    facts = {
        "experiment": f"{run.summary.get('experiment', '')}, {run.summary.get('scale', 'default')} scale",
        "clients": f"{_amount(run, 'clients', 'client')}, {100 * config.get('participation', 1.0):g} % of them in "
        "every round",
        "clusters": f"{_number(run, 'clusters')}, k found by the clients" if auto else f"{config.get('clusters')}",
        "rounds": f"{config.get('rounds')}",
        "seeds": ", ".join(map(str, run.seeds)),
        "data": _options(config.get("data"), ("partition",), DataOptions.model_validate({}).model_dump(mode="json")),
        "model": _options(config.get("model"), ("hidden",), ModelOptions.model_validate({}).model_dump(mode="json")),
        "local training": _options(config.get("local"), ("steps", "learning_rate", "batch_size")),
        "mixing": _options(config.get("mixing"), ("weights",)),
        "graph": _options(graph, topology.USES.get(graph.get("name", ""), ())),
    }
    if heads := virtual_heads(run.summary):
        mixed = run.swept and len(heads) < len(run.summary["points"])
        where = " (at the first point with one; the points without a world ran in rounds)" if mixed else ""
        where = where or (" (at the first point)" if run.swept else "")
        facts["world"] = world_in_words(heads[0]["world"]) + where
        facts["clock"] = _options(heads[0]["clock"], tuple(heads[0]["clock"]))
    if run.swept:
        for key in varying(run.summary):
            values = dict.fromkeys(write(point["point"].get(key, "the base's")) for point in run.summary["points"])
            facts[f"varied: {key}"] = ", ".join(values)
    else:
        for seed, entry in run.topology.items():
            facts[f"graph of seed {seed}"] = topology.summary(entry["facts"])
    return [(name, value) for name, value in facts.items() if value]


def _options(values: Mapping[str, Any] | None, shown: Sequence[str], defaults: Mapping[str, Any] | None = None) -> str:
    """Write a table of the config as "name, key value, ...": the keys to show, and what differs from its default."""
    values = values or {}
    parts = [str(values["name"])] if "name" in values else []
    for key, value in values.items():
        changed = defaults is not None and key != "name" and value != defaults.get(key)
        if key in shown or changed:
            parts.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value, start=1):
                yield from _flat(each if isinstance(each, Mapping) else {"": each}, f"{prefix}{key} {number}: ")
        elif value is not None:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- a run by rounds


def _single(run: Run) -> Values:
    rows, clusters = summary_rows(run.summary), map_clusters(run)
    return {
        "template": "run.html",
        **_findings(rows),
        "by_round": _pictures(figures.by_round_drawings(run)),
        "banded": len(run.seeds) > 1,
        "sample_picture": _limited(figures.sample_drawing(run)),
        "graph": None if clusters is None else _graph(clusters),
        "confusion": _limited(figures.confusion_drawing(run, clusters)),
        "costs": _pictures(_costs(run, rows)),
    }


def _findings(rows: Sequence[Mapping[str, Any]]) -> Values:
    """Choose the rows that the page names in short: the best, the bounds, and those that lost a cluster."""
    servers = [r for r in rows if r["via"] == "server" and not r["informed"] and r["accuracy_mean"] is not None]
    known = [row for row in rows if row["accuracy_mean"] is not None and not row["partial"]]
    alone = [row for row in known if row["via"] == "nobody"]
    gossip = [row["accuracy_mean"] for row in known if row["via"] == "neighbours"]
    return {
        "best": [row for row in rows if "accuracy" in row["best"]],
        "best_server": max(servers, key=lambda row: row["accuracy_mean"], default=None),
        "informed": [row for row in known if row["informed"]],
        "alone": alone,
        "alone_wins": bool(gossip) and any(row["accuracy_mean"] > max(gossip) for row in alone),
        "lost": [row for row in rows if row["lost_runs"] and not row["informed"]],
        "none_lost": any(row["lost_runs"] == 0 and not row["informed"] for row in rows),
    }


def _graph(clusters: ClusterMap) -> Values:
    drawn = plots.networks(clusters.positions, clusters.edges, [(c.clusters, c.wrong) for c in clusters.colourings])
    number = max(max(each.clusters) for each in clusters.colourings) + 1
    return {
        "seed": clusters.seed,
        "about": topology.summary(clusters.facts),
        "true": bool(clusters.true),
        "large": clusters.facts["nodes"] > LARGE,
        "colours": [plots.colour_of(j) for j in range(number)],
        "pictures": [
            Picture(Markup(svg), each.outcome, each.title) for svg, each in zip(drawn, clusters.colourings, strict=True)
        ],
    }


def _costs(run: Run, rows: Sequence[Mapping[str, Any]]) -> Iterator[Drawing]:
    """Draw how far the copies of a model are apart, and what a client sent."""
    style = figures.style_of(run)
    spread = curves_of(run, "disagreement")
    if apart := {name: curve for name, curve in spread.items() if any(curve.mean)}:
        none = [name for name in spread if name not in apart]
        caption = (
            "Squared distance of the clients' copies of a model to their average; the mean over clusters and seeds."
        )
        caption += f" None with a server: {', '.join(none)}." if none else ""
        figure = plots.draw_curves(apart, style, "disagreement (squared distance)", scale="log")
        yield Drawing("disagreement", caption, figure)
    sent = {row["algorithm"]: value for row in rows if (value := row["megabytes_per_client"]) is not None}
    if any(sent.values()):
        texts = {name: megabytes(value) for name, value in sent.items()}
        caption = "What a client sent in the whole run; the mean over clients and seeds."
        if any(row.get("server_bytes_sent") for row in run.summary["runs"]):
            caption += " What a server sends back is not counted."
        yield Drawing("sent", caption, plots.draw_bars(sent, style, "MB sent per client", texts))


# --- a sweep by rounds


def _sweep(run: Run) -> Values:
    theory = _pictures(figures.theory_drawings(run.summary))
    points = [] if theory else [_point(run, point) for point in figures.few_points(run)]
    graphs = None if theory else figures.graph_drawing(run.summary)
    return {
        "template": "sweep.html",
        "theory": theory,
        "against": {} if theory else _against(run),
        "graphs": None if graphs is None else _picture(graphs),
        "points": [point for point in points if point["by_round"] or point["confusion"]],
        "has_curves": any(point["by_round"] for point in points),
        "sample_picture": _limited(figures.sample_drawing(run)),
    }


def _against(run: Run) -> dict[str, dict[str, list[Picture]]]:
    """Draw every measure against every number that varies: pictures by key and by choice of the other keys."""
    style = figures.style_of(run)
    made: dict[str, dict[str, list[Picture]]] = {}
    for comparison in comparisons(run):
        label = label_of(comparison.others) if comparison.others else ""
        pictures = made.setdefault(comparison.key, {}).setdefault(label, [])
        pictures.append(_picture(figures.against_drawing(comparison, style)))
    return made


def _point(run: Run, point: Mapping[str, Any]) -> Values:
    part = run.at(point)
    return {
        "label": point["label"],
        "by_round": _pictures(figures.by_round_drawings(part)),
        "confusion": _limited(figures.confusion_drawing(part, map_clusters(part))),
    }


# --- virtual time


def _virtual(run: Run) -> Values:
    results = VirtualResults.of_run(run)
    axis, rows = results.axis, finished(run.summary)
    drawings = virtual_drawings(results)
    drawn = {section: _pictures(made) for section, made in drawings.items()}
    names = [each.name for made in drawings.values() for each in made]
    svgs = [str(picture.svg) for made in drawn.values() for picture in made]
    first, last = (
        {name: mean_std(rows_of(rows, axis, value, name), "accuracy")[0] for name in variants(rows, axis)}
        for value in (axis.values[0], axis.values[-1])
    )
    ends = [{"name": name, "first": first[name], "last": last[name]} for name in first]
    return {
        "template": "virtual.html",
        "axis": axis.key,
        "first": axis.values[0],
        "last": axis.values[-1],
        "sooner": list(_sooner(results)),
        "finals": [end for end in ends if axis.key and end["first"] is not None and end["last"] is not None],
        "drawn": drawn,
        "files": dict(zip(names, svgs, strict=True)),
    }


def _sooner(results: VirtualResults) -> Iterator[Values]:
    """Compare each variant with `batch` at the last value of the axis."""
    axis, rows = results.axis, finished(results.summary)
    for name in variants(rows, axis):
        group = rows_of(rows, axis, axis.values[-1], name)
        compared = ratio_to_batch(rows, group) if group else None
        if compared is not None:
            ratio, at_least = compared
            yield {"name": name, "target": group[0]["target_accuracy"], "ratio": ratio, "at_least": at_least}
