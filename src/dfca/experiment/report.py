"""Make `report.html` of a run folder: one page that opens offline and explains itself.

    run folder -> load_run -> Run -> sections (text, tables, figures) -> report.html

A run that is still going on, or was stopped, gets a page of what there is, and the page says so.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import torch

from dfca import __version__, topology
from dfca.data import DataOptions
from dfca.errors import RunError
from dfca.experiment import formats, tables
from dfca.experiment.disk import atomic_write
from dfca.experiment.sweep import write
from dfca.experiment.virtual_tables import is_virtual, words_of, world_in_words
from dfca.metrics import confusion
from dfca.models import ModelOptions

if TYPE_CHECKING:
    from dfca.experiment.plots import Curve, Style


ABOUT_CURVES = (
    "Solid lines talk to neighbours, dashed ones to a server; the grey ones are bounds: told the truth, or alone."
)


@dataclass(frozen=True)
class Run:
    """What a run folder holds. `runs` are the rows of the summary, and one for each cell that is not finished."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    topology: dict[str, Any]

    @property
    def swept(self) -> bool:
        """Tell whether the run is a sweep."""
        return "points" in self.summary

    @property
    def algorithms(self) -> list[str]:
        """Name the algorithms that have begun, in the order of the config."""
        begun = {run["algorithm"]: None for run in self.summary["runs"]}
        asked = [name for name in self.config.get("algorithms", []) if name in begun]
        return [*asked, *(name for name in begun if name not in asked)]

    @property
    def seeds(self) -> list[int]:
        """Name the seeds that were asked for."""
        seeds = self.config.get("seeds", 1)
        return list(range(seeds)) if isinstance(seeds, int) else list(seeds)

    def at(self, point: Mapping[str, Any]) -> Run:
        """Give the part of a sweep that belongs to one of its points, as a run without a sweep."""
        digest = point["digest"]
        runs = [row for row in self.summary["runs"] if row.get("digest") == digest]
        return replace(
            self,
            summary={"runs": runs, **{key: point[key] for key in ("clients", "clusters")}},
            metrics=[line for line in self.metrics if line.get("digest") == digest],
            config=self.config | {"seeds": point["seeds"]},
        )

    @property
    def cells(self) -> tuple[int, int]:
        """Count the finished cells and those asked for."""
        if self.swept:
            return tables.counts(self.summary)
        finished = {(run["algorithm"], run["seed"]) for run in self.summary["runs"] if run.get("finished")}
        asked = {(name, seed) for name in self.config.get("algorithms", []) for seed in self.seeds}
        return len(finished), len(asked | finished | {(run["algorithm"], run["seed"]) for run in self.summary["runs"]})


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into a run folder, as a whole or not at all, and return its path.

    Raises:
        RunError: if a file of the folder is missing or damaged, or the page cannot be written.
    """
    run = load_run(run_folder)
    try:
        page = render(run)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RunError(
            f"{run.folder} holds files of another version or edited by hand ({type(error).__name__}: {error}); "
            "restore them or run again"
        ) from error
    path = run.folder / "report.html"
    atomic_write(path, page)
    return path


def load_run(run_folder: str | Path) -> Run:
    """Read a run folder; a cell that is not finished gets a row with its last evaluated round.

    Raises:
        RunError: if a file is missing or damaged.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise RunError(
            f"{folder} is not a run folder: there is no such directory; give the folder that `dfca run` wrote"
        )
    if not any((folder / name).exists() for name in ("config.toml", "summary.json")):
        raise RunError(f"{folder} is not a run folder (it has no summary.json); `dfca run` makes one")
    config_text = _read(folder / "config.toml")
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{folder / 'config.toml'} is not valid TOML ({error}); restore it or run again") from error
    summary = _read_json(folder / "summary.json")
    if not isinstance(summary.get("runs"), list):
        raise RunError(f'{folder / "summary.json"} has no list "runs"; restore it or run again')
    metrics = _read_lines(folder / "metrics.jsonl")
    run = Run(
        folder=folder,
        config=config,
        config_text=config_text,
        environment=_read_json(folder / "environment.json"),
        summary=summary,
        metrics=metrics,
        topology=_read_json(folder / "topology.json"),
    )
    summary["runs"] = _with_unfinished(summary, metrics, config)
    return run


def render(run: Run) -> str:
    """Write the page of a run."""
    from dfca.experiment import plots

    kinds = {name: tables.kind_of(name) for name in run.algorithms}
    style = plots.styles(
        run.algorithms, {n: kind.via for n, kind in kinds.items()}, {n: kind.informed for n, kind in kinds.items()}
    )
    if is_virtual(run.summary):
        from dfca.experiment.virtual_page import virtual_sections

        sections = [*virtual_sections(run), _setting(run)]
    elif run.swept:
        from dfca.experiment.sweep_page import sweep_sections

        sections = [*sweep_sections(run, style), _setting(run)]
    else:
        sections = [_findings(run), results(run), _by_round(run, style), _graphs(run), _cost(run, style), _setting(run)]
    heading = run.config.get("title") or run.summary.get("experiment") or "dfca run"
    page = Template((files("dfca.experiment") / "report.template.html").read_text(encoding="utf-8"))
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


def match_clusters(found: Sequence[int], true: Sequence[int]) -> np.ndarray:
    """Rename found clusters to the true ones they fit best, (N,): the pairing with the most clients in agreement.

    A found cluster that is left over, when there are more of them than true ones, becomes -1.
    """
    from scipy.optimize import linear_sum_assignment

    assignments, truth = torch.tensor(list(found)), torch.tensor(list(true))
    counts = confusion(assignments, truth).numpy()
    renamed: np.ndarray = np.full(len(counts), -1)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    renamed[rows] = columns
    return np.asarray(renamed[assignments.numpy()])


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
    notes = "<br>".join(escape(note) for note in tables.notes(run.summary, clients))
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
    from dfca.experiment import plots

    figures = []
    for measure, label, caption in (
        ("accuracy", "accuracy (%)", "Accuracy of the model that each client would use, on test data like its own."),
        (
            "cluster_accuracy",
            "clients in the right cluster (%)",
            "Share of clients that train with the clients of their true group.",
        ),
    ):
        series = {name: curve for name in run.algorithms if (curve := curve_of(run, name, measure))}
        if series:
            figures.append(figure(plots.curves(series, style, label), caption))
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def _graphs(run: Run) -> str:
    from dfca.experiment import plots

    seed = next((seed for seed in [*map(str, run.seeds), *run.topology] if seed in run.topology), None)
    if seed is None:
        return ""
    entry = run.topology[seed]
    true, n = entry.get("clusters"), entry["facts"]["nodes"]
    graph = nx.empty_graph(n)
    graph.add_edges_from(entry["edges"])
    positions = topology.layout(graph, int(seed), (run.config.get("topology") or {}).get("name", ""))
    said: list[tuple[str, str]] = [("true groups", "what nobody is told")] if true else []
    colourings: list[tuple[list[int], list[bool] | None]] = [(true, None)] if true else []
    for name in run.algorithms:
        found = _last_assignments(run, name, int(seed))
        row = next((row for row in run.summary["runs"] if row["algorithm"] == name and row["seed"] == int(seed)), None)
        if found is None or row is None or tables.models_of(row) < 2 or tables.kind_of(name).informed:
            continue
        # Where nobody knows the truth, the first algorithm gives the colours.
        renamed = match_clusters(found, colourings[0][0]).tolist() if colourings else found
        wrong = [a != b for a, b in zip(renamed, true, strict=True)] if true else None
        colourings.append((renamed, wrong))
        said.append((name, _outcome(row, wrong)))
    panels = [
        figure(svg, text, title)
        for svg, (title, text) in zip(plots.networks(positions, entry["edges"], colourings), said, strict=True)
    ]
    if not panels:
        return ""
    k = max(max(clusters) for clusters, _ in colourings) + 1
    noun = "group" if true else "cluster"
    swatches = "".join(
        f'<span><i class="swatch" style="background:{plots.colour_of(j)}"></i>{noun} {j + 1}</span> ' for j in range(k)
    )
    ring = '<span><i class="ring"></i>in a cluster of another group</span>' if true else ""
    model = "the true groups" if true else "those of the first one"
    return (
        f"<h2>Who found whom</h2><p>The graph of seed {escape(seed)}: {escape(topology.summary(entry['facts']))}. "
        "Every dot is a client, every line a link. The clusters that each algorithm found in the end are "
        f"paired with {model} as well as possible, so that equal colours mean agreement.</p>"
        f'<p class="notes legend">{swatches}{ring}</p>'
        f'<div class="graphs{" large" if n > 100 else ""}">{"".join(panels)}</div>'
    )


def _outcome(row: Mapping[str, Any], wrong: Sequence[bool] | None) -> str:
    """Say below a graph what came out: "23 of 24 right, 1 cluster lost"."""
    said = [f"{len(wrong) - sum(wrong):,} of {len(wrong):,} right"] if wrong is not None else []
    lost = (row["clusters"] or 0) - (row["live_clusters"] or 0)
    if lost > 0:
        said.append(f"{_count(lost, 'cluster')} lost")
    if not row["finished"]:
        said.append(f"at round {row['rounds']}")
    return ", ".join(said)


def _cost(run: Run, style: Mapping[str, Style]) -> str:
    from dfca.experiment import plots

    figures = []
    spread = {name: curve for name in run.algorithms if (curve := curve_of(run, name, "disagreement"))}
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


def curve_of(run: Run, algorithm: str, measure: str) -> Curve | None:
    """Take the mean and standard deviation of a measure over seeds by round, or return None where it has no values.

    Of a list (one value per cluster) the mean counts. As in the table: over the finished runs where there are any,
    else over the rounds that all runs so far have.
    """
    from dfca.experiment.plots import Curve

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


def _with_unfinished(
    summary: Mapping[str, Any], metrics: list[dict[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Add a row for each cell that has metrics and no row yet, from its last evaluated round; in the config's order.

    Of a sweep, cells of points that are no longer asked for are left out.
    """
    points = {point["digest"]: point for point in summary.get("points", ())}

    def key(record: Mapping[str, Any]) -> tuple[str, int, str]:
        return record["algorithm"], record["seed"], record["digest"] if points else ""

    rows = [row for row in summary["runs"] if not points or row.get("digest") in points]
    known = {key(row): {"finished": False, **row} for row in rows}
    last = {key(line): line for line in metrics if not points or line.get("digest") in points}
    for cell, line in last.items():
        if cell in known and not known[cell].get("error"):
            continue
        point = points.get(cell[2], {})
        known[cell] = {
            **{name: line.get(name) for name in ("algorithm", "seed", "models", "live_clusters", "bytes_sent")},
            **{name: line.get(name) for name in tables.MEASURES},
            **({"point": point["point"], "digest": cell[2]} if points else {}),
            "clusters": point.get("clusters") or (config.get("data") or {}).get("distributions") or config["clusters"],
            "rounds": line["round"],
            "seconds": sum((line.get("seconds") or {}).values()) or None,
            **known.get(cell, {}),
            "finished": False,
        }
    order = list(config.get("algorithms", []))
    return sorted(
        known.values(), key=lambda row: order.index(row["algorithm"]) if row["algorithm"] in order else len(order)
    )


def _last_assignments(run: Run, algorithm: str, seed: int) -> list[int] | None:
    lines = (line for line in reversed(run.metrics) if line["algorithm"] == algorithm and line["seed"] == seed)
    return next((line["assignments"] for line in lines if line.get("assignments")), None)


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


# --- files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunError(
            f"{path.parent} is not a complete run folder: {path.name} is missing; run the same `dfca run` command again"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RunError(f"{path} cannot be read: {reason}; restore it or run again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is not valid JSON ({error}); restore it or run again") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} must hold a JSON object, got {type(value).__name__}; restore it or run again")
    return value


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl; a last line that was cut off does not count, and of two lines of one round the last does."""
    text = _read(path)
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            moment = value.get("digest"), value["round"], value.get("time_s")
            lines[value["algorithm"], value["seed"], *moment] = value
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == text.count("\n") + 1:
                break
            raise RunError(f"{path}, line {number}, is not a line of metrics; restore it or run again") from error
    return list(lines.values())
