"""Make `report.html` of a run folder: one page that opens offline and explains itself.

    run folder -> load_run -> Run -> sections (text, tables, figures) -> report.html

A run that is still going on, or was stopped, gets a page of what there is, and the page says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from dfca import __version__, topology
from dfca.data import DataOptions
from dfca.experiment.sweep import write
from dfca.files import atomic_write
from dfca.models import ModelOptions
from dfca.report import formats, tables
from dfca.report.paper.scenes import scene_of
from dfca.report.virtual_tables import is_virtual, words_of, world_in_words
from dfca.runs.reading import Run, load_run, other_version

if TYPE_CHECKING:
    from dfca.report.plots import Curve, Style


BY_ROUND = (
    ("accuracy", "accuracy (%)", "Accuracy of the model that each client would use, on test data like its own."),
    (
        "cluster_accuracy",
        "clients in the right cluster (%)",
        "Share of clients that train with the clients of their true group.",
    ),
)
ABOUT_CURVES = (
    "Solid lines talk to neighbours, dashed ones to a server; the grey ones are bounds: told the truth, or alone."
)


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into a run folder, as a whole or not at all, and return its path.

    Raises:
        RunError: if a file of the folder is missing or damaged, or the page cannot be written.
    """
    run = load_run(run_folder)
    try:
        page = render(run)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise other_version(run.folder, error) from error
    path = run.folder / "report.html"
    atomic_write(path, page)
    return path


def render(run: Run) -> str:
    """Write the page of a run."""
    from dfca.report.paper.evidence_page import confusions, samples

    style = style_of(run)
    kinds = {name: tables.kind_of(name) for name in run.algorithms}
    if is_virtual(run.summary):
        from dfca.report.virtual_page import virtual_sections

        sections = [*virtual_sections(run), _setting(run)]
    elif run.swept:
        from dfca.report.sweep_page import sweep_sections

        sections = [*sweep_sections(run, style), samples(run), _setting(run)]
    else:
        sections = [_findings(run), results(run), _by_round(run, style), samples(run), _graphs(run), confusions(run)]
        sections += [_cost(run, style), _setting(run)]
    heading = run.config.get("title") or run.summary.get("experiment") or "dfca run"
    page = Template((files("dfca.report") / "templates" / "report.template.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(f"{heading} – dfca report"),
        heading=escape(str(heading)),
        lede=_lede(run),
        unfinished=_unfinished(run),
        body="\n".join(section for section in sections if section),
        algorithms=_algorithms(kinds),
        virtual_words=words_of(run.summary),
        config=escape(run.config_text),
        environment=_facts(dict(_flat(run.environment))),
        footer=f"Made by dfca {escape(__version__)} from <code>config.toml</code>, <code>summary.json</code>, "
        "<code>metrics.jsonl</code> and <code>topology.json</code> of the same folder. The page needs no network.",
    )


def style_of(run: Run) -> dict[str, Style]:
    """Give every algorithm of a run its colour and line."""
    from dfca.report import plots

    kinds = {name: tables.kind_of(name) for name in run.algorithms}
    return plots.styles(
        run.algorithms, {n: kind.via for n, kind in kinds.items()}, {n: kind.informed for n, kind in kinds.items()}
    )


# --- the page, from top to bottom


def _lede(run: Run) -> str:
    config = run.config
    true = any(graph.get("clusters") for graph in run.topology.values())
    keys = tables.varying(run.summary)
    what = [
        f"{_count(len(run.summary['points']), 'point')} ({', '.join(keys)})" if run.swept else "",
        _told(run, "clients", "client"),
        _groups(run, true),
        _told(run, "rounds", "round"),
        _count(len(run.algorithms), "algorithm"),
        _count(len(run.seeds), "random seed"),
    ]
    data = escape(str((config.get("data") or {}).get("name", "")))
    on = "" if "data.name" in keys else f", on <b>{data}</b>"
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(str(config.get("description") or "").strip()))
    description = f"<p>{text}</p>" if text else ""
    return f'<p class="lede">{escape(", ".join(each for each in what if each))}{on}.</p>{description}'


def _groups(run: Run, true: bool) -> str:
    """Say how many groups of data and models there are: "4 hidden groups of data, k found by the clients"."""
    auto = run.config.get("clusters") == "auto"
    if not true:
        return "k found by the clients" if auto else _told(run, "clusters", "model")
    groups = _told(run, "clusters", "hidden group")
    said = f"{groups} of data" if groups else ""
    return ", ".join(each for each in (said, "k found by the clients" if auto else "") if each)


def _told(run: Run, key: str, noun: str) -> str:
    """Count something of the config, "12 to 24 clients" where a sweep varies it; nothing where nobody says."""
    values = sorted({point[key] for point in run.summary["points"]}) if run.swept else [distinct(run, key)]
    if len(values) > 1:
        return f"{values[0]:,} to {values[-1]:,} {noun}s"
    return _count(values[0], noun)


def distinct(run: Run, key: str) -> Any:
    """Give a number of the config; of the clusters, the number of true ones."""
    if key == "clusters":
        return (run.config.get("data") or {}).get("distributions") or run.config.get("clusters")
    return run.config.get(key)


def _unfinished(run: Run) -> str:
    finished, asked = run.cells
    if finished >= asked:
        return ""
    going = [
        f"{row['algorithm']} seed {row['seed']} at round {row['rounds']}"
        for row in run.summary["runs"]
        if not row["finished"] and not row.get("error")
    ]
    now = f" Not finished: {', '.join(going[:4])}{', …' if len(going) > 4 else ''}." if going else ""
    return (
        f'<p class="unfinished"><b>This run is not finished:</b> {finished} of {asked} runs are done. The page shows '
        f"what there is so far.{escape(now)} The same <code>dfca run</code> command continues it.</p>"
    )


def _findings(run: Run) -> str:
    rows = tables.summary_rows(run.summary, run.config.get("clients"))
    said = [finding for finding in (_best(rows), _bounds(rows), _lost(rows)) if finding]
    if not said:
        return ""
    return f'<h2>In short</h2><ul class="findings">{"".join(f"<li>{finding}</li>" for finding in said)}</ul>'


def _best(rows: list[dict[str, Any]]) -> str:
    best = [row for row in rows if "accuracy" in row["best"]]
    if not best:
        return ""
    names = " and ".join(f"<b>{escape(row['algorithm'])}</b>" for row in best)
    text = f"Best of those that talk to neighbours: {names} with {_percent(best[0], 'accuracy')} accuracy"
    servers = [
        row for row in rows if row["via"] == "server" and not row["informed"] and row["accuracy_mean"] is not None
    ]
    if servers:
        top = max(servers, key=lambda row: row["accuracy_mean"])
        text += f"; best with a server: {escape(top['algorithm'])} with {_percent(top, 'accuracy')}"
    return text + "."


def _bounds(rows: list[dict[str, Any]]) -> str:
    """Say what the accuracy lies between: each client alone, and everybody told the truth."""
    known = [row for row in rows if row["accuracy_mean"] is not None and not row["partial"]]
    told = [row for row in known if row["informed"]]
    alone = [row for row in known if row["via"] == "nobody"]
    said = [
        f"{_percent(row, 'accuracy')} when clients are told their group ({escape(row['algorithm'])})" for row in told
    ]
    said += [f"{_percent(row, 'accuracy')} when each trains alone ({escape(row['algorithm'])})" for row in alone]
    gossip = [row["accuracy_mean"] for row in known if row["via"] == "neighbours"]
    beaten = gossip and any(row["accuracy_mean"] > max(gossip) for row in alone)
    note = " Here, training alone beats talking to neighbours." if beaten else ""
    return f"For comparison: {'; '.join(said)}.{note}" if said else ""


def _lost(rows: list[dict[str, Any]]) -> str:
    lost = [row for row in rows if row["lost_runs"] and not row["informed"]]
    if not lost:
        kept = [row for row in rows if row["lost_runs"] == 0 and not row["informed"]]
        return "No clustered algorithm lost a cluster in any run." if kept else ""
    listed = ", ".join(f"{escape(row['algorithm'])} in {row['lost']}" for row in lost)
    return f"Runs that lost a cluster (some model had no client left, so groups had to share): {listed}."


def results(run: Run) -> str:
    """Write the tables."""
    clients = run.config.get("clients")
    if not tables.summary_rows(run.summary, clients):
        return "<h2>Results</h2><p>No round has been evaluated yet.</p>"
    notes = "<br>".join(escape(note) for note in formats.all_notes(run.summary, clients))
    return f'<h2>Results</h2>{formats.html(run.summary, clients)}<p class="notes">{notes}</p>'


def _by_round(run: Run, style: Mapping[str, Style]) -> str:
    figures = by_round(run, style)
    if not figures:
        return ""
    return f'<h2>By round</h2><p class="soft">{ABOUT_CURVES}{_about_bands(run)}</p>{figures}'


def _about_bands(run: Run) -> str:
    return " The band is one standard deviation over seeds to each side." if len(run.seeds) > 1 else ""


def by_round(run: Run, style: Mapping[str, Style]) -> str:
    """Draw accuracy and cluster accuracy by round."""
    from dfca.report import plots

    figures = []
    for measure, label, caption in BY_ROUND:
        if series := curves_of(run, measure):
            figures.append(figure(plots.curves(series, style, label), caption))
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def _graphs(run: Run) -> str:
    from dfca.report import plots

    scene = scene_of(run)
    if scene is None:
        return ""
    entry, true, n = scene.entry, scene.entry.get("clusters"), scene.entry["facts"]["nodes"]
    drawn = plots.networks(scene.positions, entry["edges"], scene.colourings)
    panels = [figure(svg, text, title) for svg, (title, text) in zip(drawn, scene.said, strict=True)]
    k = max(max(clusters) for clusters, _ in scene.colourings) + 1
    noun = "group" if true else "cluster"
    swatches = "".join(
        f'<span><i class="swatch" style="background:{plots.colour_of(j)}"></i>{noun} {j + 1}</span> ' for j in range(k)
    )
    ring = '<span><i class="ring"></i>in a cluster of another group</span>' if true else ""
    model = "the true groups" if true else "those of the first one"
    return (
        f"<h2>Who found whom</h2><p>The graph of seed {escape(scene.seed)}: "
        f"{escape(topology.summary(entry['facts']))}. "
        "Every dot is a client, every line a link. The clusters that each algorithm found in the end are "
        f"paired with {model} as well as possible, so that equal colours mean agreement.</p>"
        f'<p class="notes legend">{swatches}{ring}</p>'
        f'<div class="graphs{" large" if n > 100 else ""}">{"".join(panels)}</div>'
    )


def _cost(run: Run, style: Mapping[str, Style]) -> str:
    from dfca.report import plots

    figures = []
    spread = curves_of(run, "disagreement")
    apart = {name: curve for name, curve in spread.items() if any(curve.mean)}
    if apart:
        none = [name for name in spread if name not in apart]
        caption = (
            "Squared distance of the clients' copies of a model to their average; the mean over clusters and seeds."
        )
        caption += f" None with a server: {', '.join(none)}." if none else ""
        figures.append(figure(plots.curves(apart, style, "disagreement (squared distance)", scale="log"), caption))
    rows = tables.summary_rows(run.summary, run.config.get("clients"))
    sent = {row["algorithm"]: value for row in rows if (value := row["megabytes_per_client"]) is not None}
    if any(sent.values()):
        write = {name: tables.megabytes(value) for name, value in sent.items()}
        caption = "What a client sent in the whole run; the mean over clients and seeds."
        if any(row.get("server_bytes_sent") for row in run.summary["runs"]):
            caption += " What a server sends back is not counted."
        figures.append(figure(plots.bars(sent, style, "MB sent per client", write), caption))
    return f'<h2>Agreement and cost</h2><div class="pair">{"".join(figures)}</div>' if figures else ""


def _setting(run: Run) -> str:
    config = run.config
    graph = config.get("topology") or {}
    share = 100 * config.get("participation", 1.0)
    facts = {
        "experiment": f"{run.summary.get('experiment', '')}, {run.summary.get('scale', 'default')} scale",
        "clients": f"{_told(run, 'clients', 'client')}, {share:g} % of them in every round",
        "clusters": f"{distinct(run, 'clusters')}, k found by the clients"
        if config.get("clusters") == "auto"
        else f"{config.get('clusters')}",
        "rounds": f"{config.get('rounds')}",
        "seeds": ", ".join(map(str, run.seeds)),
        "data": _options(
            config.get("data"), shown=("partition",), defaults=DataOptions.model_validate({}).model_dump(mode="json")
        ),
        "model": _options(
            config.get("model"), shown=("hidden",), defaults=ModelOptions.model_validate({}).model_dump(mode="json")
        ),
        "local training": _options(config.get("local"), shown=("steps", "learning_rate", "batch_size")),
        "mixing": _options(config.get("mixing"), shown=("weights",)),
        "graph": _options(graph, shown=topology.USES.get(graph.get("name", ""), ())),
    }
    if is_virtual(run.summary):
        heads = run.summary.get("points") or [run.summary]
        facts["world"] = world_in_words(heads[0]["world"]) + (" (at the first point)" if run.swept else "")
        facts["clock"] = _options(heads[0]["clock"], shown=tuple(heads[0]["clock"]))
    if run.swept:
        for key in tables.varying(run.summary):
            values = dict.fromkeys(write(point["point"].get(key, "the base's")) for point in run.summary["points"])
            facts[f"varied: {key}"] = ", ".join(values)
    else:
        for seed, entry in run.topology.items():
            facts[f"graph of seed {seed}"] = topology.summary(entry["facts"])
    return f"<h2>What was run</h2>{_facts({key: value for key, value in facts.items() if value})}"


def _algorithms(kinds: Mapping[str, tables.Kind]) -> str:
    own = "not one of dfca's own algorithms"
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(kind.about or own)}</dd>" for name, kind in kinds.items())


# --- numbers


def curves_of(run: Run, measure: str) -> dict[str, Curve]:
    """Take the curves of all algorithms by round; none where each has one point, which the tables show."""
    curves = {name: curve for name in run.algorithms if (curve := curve_of(run, name, measure))}
    return curves if any(len(curve.x) > 1 for curve in curves.values()) else {}


def curve_of(run: Run, algorithm: str, measure: str) -> Curve | None:
    """Take the mean and standard deviation of a measure over seeds by round, or return None where it has no values.

    Of a list (one value per cluster) the mean counts. As in the table: over the finished runs where there are any,
    else over the rounds that all runs so far have.
    """
    from dfca.report.plots import Curve

    finished = {row["seed"] for row in run.summary["runs"] if row["algorithm"] == algorithm and row["finished"]}
    by_seed: dict[int, dict[int, float]] = {}
    for line in run.metrics:
        if line["algorithm"] == algorithm and (not finished or line["seed"] in finished):
            value = _scalar(line.get(measure))
            if value is not None:
                by_seed.setdefault(line["seed"], {})[line["round"]] = value
    if not by_seed:
        return None
    rounds = sorted(set.intersection(*(set(values) for values in by_seed.values())))
    if not rounds:
        return None
    table = np.array([[values[round] for round in rounds] for values in by_seed.values()])
    std = table.std(axis=0, ddof=1).tolist() if len(table) > 1 else None
    return Curve(rounds, table.mean(axis=0).tolist(), std)


def _scalar(value: Any) -> float | None:
    if isinstance(value, list):
        known = [float(each) for each in value if each is not None]
        return sum(known) / len(known) if known else None
    return None if value is None else float(value)


# --- pieces of HTML


def figure(svg: str, caption: str, title: str = "") -> str:
    """Put a drawing, its caption and its title into a figure."""
    label = escape(f"{title}: {caption}" if title else caption)
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f"<figure>{heading}{labelled}<figcaption>{escape(caption)}</figcaption></figure>"


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in facts.items())
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _options(values: Mapping[str, Any] | None, shown: Sequence[str], defaults: Mapping[str, Any] | None = None) -> str:
    """Write a table of the config as "name, key value, ...": the keys to show, and what differs from its default."""
    values = values or {}
    told = [str(values["name"])] if "name" in values else []
    for key, value in values.items():
        changed = defaults is not None and key != "name" and value != defaults.get(key)
        if key in shown or changed:
            told.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(told)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        elif value is None:
            continue
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value, start=1):
                yield from _flat(each if isinstance(each, Mapping) else {"": each}, f"{prefix}{key} {number}: ")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _percent(row: Mapping[str, Any], measure: str) -> str:
    return f"{tables.percent(row[f'{measure}_mean'], row[f'{measure}_std'])} %"


def _count(number: Any, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}" if isinstance(number, int) else f"{number} {noun}s"
