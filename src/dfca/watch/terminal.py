"""The same in a terminal: a live table, for machines without a browser."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dfca.report.wording import amount, count, megabytes, percent
from dfca.runs.store.metric import DASH, ShownMetric
from dfca.watch.run_source import Source

EVERY_S = 1.0
ROWS = 40
STATES = {"finished": "green", "running": "cyan", "failed": "red", "stopped": "yellow", "waiting": "dim"}


def show(source: Source, console: Console, once: bool = False) -> None:
    """Show the table, until Ctrl-C or until the run is finished; `once`: as it is now."""
    source.poll()
    if once:
        console.print(screen(source.whole()))
        return
    with Live(screen(source.whole()), console=console, refresh_per_second=4, transient=False) as live:
        while source.whole()["run"]["state"] != "finished":
            time.sleep(EVERY_S)
            if source.poll():
                live.update(screen(source.whole()))


def screen(page: dict[str, Any]) -> RenderableType:
    """Draw the parts of a page. Nothing of a folder is taken for markup."""
    run = page["run"]
    if run.get("kind") == "nodes":
        facts = f"{run['running']} of {count(run['asked'], 'node')} answer"
    else:
        facts = f"{run['finished']} of {count(run['asked'], 'trial')} finished"
    head = Text.assemble((run["title"], "bold"), f"\n{run['state']}, {facts}, {run['folder']}")
    parts: list[RenderableType] = [head]
    parts += [Text(f"Lost cluster: {alarm['what']}", style="bold red") for alarm in page["alarms"][:5]]
    parts += [Text(problem, style="yellow") for problem in page["problems"]]
    if page.get("nodes"):
        parts.append(_nodes(page["nodes"], _metric(run)))
    if run.get("kind") != "nodes":
        parts.append(_trials(page))
    return Group(*parts)


def _trials(page: dict[str, Any]) -> Table:
    metric = _metric(page["run"])
    labels = {point["digest"]: point["label"] for point in page["points"]}
    trials = [trial for trial in page["trials"].values() if trial["state"] != "waiting"]
    shown = sorted(trials, key=lambda trial: trial["state"] == "finished")[:ROWS] if len(trials) > ROWS else trials
    timed = any(trial["timed"] for trial in trials)
    table = Table(box=None, header_style="dim")
    for name in (*(["point"] if labels else []), "algorithm", "seed", "state", "seconds" if timed else "round",
                 metric.title, "true cluster %", "clusters", "MB per client", "staleness", "away"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("point", "algorithm", "state") else "right")
    for trial in shown:
        traffic = _last(trial, "traffic")
        used = _last(trial, "live_clusters")
        cells = [
            *([labels.get(trial["digest"], "")] if labels else []),
            *(trial["algorithm"], str(trial["seed"]), trial["error"] or trial["state"]),
            f"{trial['x'][-1]:g}" if trial["x"] else DASH,
            *(metric.write(_last(trial, "score")), percent(_last(trial, "cluster_accuracy"))),
            DASH if used is None else f"{used:g} of {trial['models']}",
            DASH if traffic is None else megabytes(traffic / 1e6),
            _amount(_last(trial, "staleness")),
            _amount(_last(trial, "away")),
        ]
        table.add_row(*(Text(cell) for cell in cells), style=STATES.get(trial["state"]))
    waiting = len(page["trials"]) - len(trials)
    left_out = len(trials) - len(shown)
    direction = [] if metric.higher_is_better else [f"less {metric.name} is better"]
    notes = [
        *direction,
        f"{waiting} have not begun" if waiting else "",
        f"{left_out} more are not shown" if left_out else "",
    ]
    table.caption = Text(", ".join(note for note in notes if note))
    return table


def _nodes(nodes: list[dict[str, Any]], metric: ShownMetric) -> Table:
    table = Table(box=None, header_style="dim")
    for name in ("node", "state", "round", "cluster", metric.title, "links", "staleness", "sent MB", "last problem"):
        table.add_column(name, justify="left" if name in ("node", "state", "last problem") else "right")
    for node in nodes[:ROWS]:
        cluster = DASH if node["cluster"] is None else f"{node['cluster']} of {node['clusters']}"
        cells = [
            *(node["name"], node["state"], str(node["round"]), cluster, metric.write(node["score"])),
            f"{node['links']} of {node['neighbours']}",
            *(_amount(node["staleness"]), megabytes(node["bytes_out"] / 1e6), node["problem"] or node["error"]),
        ]
        table.add_row(*(Text(cell) for cell in cells), style=None if node["running"] else "red")
    if len(nodes) > ROWS:
        table.caption = Text(f"{len(nodes) - ROWS} more are not shown")
    return table


def _metric(run: dict[str, Any]) -> ShownMetric:
    return ShownMetric(*(run["metric"][name] for name in ShownMetric._fields))


def _last(trial: dict[str, Any], measure: str) -> float | None:
    return next((value for value in reversed(trial.get(measure) or ()) if value is not None), None)


def _amount(value: float | None) -> str:
    return DASH if value is None else amount(value)
