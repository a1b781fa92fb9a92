"""The results of a run as tables: rows of numbers, a table for the terminal, a table in Markdown.

All of them read `summary.json` as a dict. Means are over the finished runs of an algorithm; where none is finished,
over what there is so far, and the row says so. `±` is the sample standard deviation over seeds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

DASH = "–"
MEASURES = ("accuracy", "all_models_accuracy", "cluster_accuracy")


class Kind(NamedTuple):
    """What the reader of a table has to know of an algorithm."""

    via: Literal["neighbours", "server", "nobody"]
    informed: bool  # told the true clusters: a ceiling, no method
    about: str
    models: Literal["clusters", "one"] | None = None


class Column(NamedTuple):
    """A column of the tables for people."""

    title: str
    cell: Callable[[dict[str, Any]], str]
    measure: str = ""  # the best of the decentralised is set in bold


def kind_of(algorithm: str) -> Kind:
    """Look an algorithm up; one that is not registered (a user's own) counts as decentralised."""
    from dfca.algorithms import ALGORITHMS

    if algorithm not in ALGORITHMS:
        return Kind("neighbours", False, "")
    make = ALGORITHMS[algorithm]
    record = make()
    via: dict[str, Literal["neighbours", "server", "nobody"]] = {"gossip": "neighbours", "server": "server"}
    about = (inspect.getdoc(make) or "").split("\n")[0]
    return Kind(via.get(record.exchange, "nobody"), record.informed, about, record.models)


def summary_rows(summary: Mapping[str, Any], clients: int | None = None) -> list[dict[str, Any]]:
    """Make one row per algorithm, in the order of the runs.

    Keys: algorithm, via, informed, runs (finished), unfinished, partial (no run is finished), accuracy_mean,
    accuracy_std and so on for all_models_accuracy and cluster_accuracy, lost ("3 of 6", or a dash where one model
    cannot lose a cluster), lost_runs, seconds, megabytes_per_client, best (the measures in which no other
    algorithm that talks to neighbours is better). What is not known is None. `clients` is needed for the megabytes,
    unless the summary holds it.
    """
    clients = clients or summary.get("clients")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in summary["runs"]:
        groups.setdefault(run["algorithm"], []).append(run)
    rows = [_row(algorithm, runs, clients) for algorithm, runs in groups.items()]
    _mark_best(rows)
    return rows


def terminal_table(summary: Mapping[str, Any], clients: int | None = None, width: int = 100) -> Table:
    """Make the table that ends a run: percent with one decimal, the best of the decentralised in bold.

    On a narrow terminal the columns that matter least are left out, not cut.
    """
    rows = summary_rows(summary, clients)
    columns = _columns(rows)
    for dispensable in ("talks to", "MB per client", "time per run", "runs"):
        if _width(columns, rows) > width:
            columns = [column for column in columns if " ".join(column.title.split()) != dispensable]
    table = Table(box=None, padding=(0, 1), header_style="dim", caption_justify="left", caption_style="dim")
    for column in columns:
        left = column.title in ("algorithm", "talks to")
        table.add_column(column.title, justify="left" if left else "right", vertical="bottom", no_wrap=True)
    for row in rows:
        cells = [Text(column.cell(row), style="bold" if column.measure in row["best"] else "") for column in columns]
        table.add_row(*cells, style="dim" if row["partial"] else "")
    table.caption = "\n".join(notes(rows))
    return table


def markdown(summary: Mapping[str, Any], clients: int | None = None) -> str:
    """Write the same table in Markdown, with its notes below."""
    rows = summary_rows(summary, clients)
    columns = _columns(rows)
    lines = [_pipes([" ".join(column.title.split()) for column in columns])]
    lines.append(_pipes(["---" if position < 2 else "---:" for position in range(len(columns))]))
    for row in rows:
        cells = [(column.cell(row), column.measure in row["best"]) for column in columns]
        lines.append(_pipes([f"**{text}**" if bold else text for text, bold in cells]))
    return "\n".join([*lines, "", *(note.replace("*", r"\*") + "  " for note in notes(rows))]).rstrip() + "\n"


def html(summary: Mapping[str, Any], clients: int | None = None) -> str:
    """Write the same table in HTML, without its notes."""
    from html import escape

    rows = summary_rows(summary, clients)
    columns = _columns(rows)
    head = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    body = []
    for row in rows:
        cells = [(escape(column.cell(row)), column.measure in row["best"]) for column in columns]
        tds = "".join(f"<td>{f'<b>{text}</b>' if bold else text}</td>" for text, bold in cells)
        body.append(f'<tr class="partial">{tds}</tr>' if row["partial"] else f"<tr>{tds}</tr>")
    return f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what the reader of the table must know."""
    said = []
    if any(row["runs"] > 1 for row in rows):
        said.append("mean ± standard deviation over seeds")
    if any(row["best"] for row in rows):
        said.append("bold: the best of those that talk to neighbours")
    lines = ["; ".join(said)] if said else []
    for row in rows:
        if row["informed"]:
            lines.append(f"{row['algorithm']} is told the true clusters: the ceiling, not a method")
    if any(row["partial"] for row in rows):
        lines.append("* not finished: the numbers so far")
    if any(row["unfinished"] and not row["partial"] for row in rows):
        lines.append("runs: finished + unfinished; the unfinished ones are not in the means")
    return lines


def percent(mean: float | None, std: float | None = None) -> str:
    """Write an accuracy in 0..1 as percent with one decimal.

    >>> percent(0.9371, 0.0012), percent(0.9371), percent(None)
    ('93.7 ± 0.1', '93.7', '–')
    """
    if mean is None or not math.isfinite(mean):
        return DASH
    return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")


def duration(seconds: float | None) -> str:
    """Write a duration with the two digits that matter.

    >>> duration(0.42), duration(61.2), duration(4000), duration(None)
    ('0.4 s', '61 s', '67 min', '–')
    """
    if seconds is None:
        return DASH
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def megabytes(value: float | None) -> str:
    """Write megabytes with three digits that matter.

    >>> megabytes(0.0123), megabytes(3.21), megabytes(1234.5), megabytes(0)
    ('0.012', '3.2', '1,234', '0')
    """
    if value is None:
        return DASH
    if value == 0:
        return "0"
    return f"{value:.2g}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _row(algorithm: str, runs: Sequence[Mapping[str, Any]], clients: int | None) -> dict[str, Any]:
    kind = kind_of(algorithm)
    finished = [run for run in runs if run.get("finished")]
    counted = finished or list(runs)
    row: dict[str, Any] = {
        "algorithm": algorithm,
        "via": kind.via,
        "informed": kind.informed,
        "runs": len(finished),
        "unfinished": len(runs) - len(finished),
        "partial": not finished,
    }
    for measure in MEASURES:
        row[f"{measure}_mean"], row[f"{measure}_std"] = _mean_std(counted, measure)
    keepers = [run for run in counted if models_of(run) > 1 and run.get("live_clusters") is not None]
    lost = sum(run["live_clusters"] < run["clusters"] for run in keepers)
    row["lost_runs"] = lost if keepers else None
    row["lost"] = f"{lost} of {len(keepers)}" if keepers else DASH
    row["seconds"] = _mean_std(counted, "seconds")[0]
    sent = _mean_std(counted, "bytes_sent")[0]
    row["megabytes_per_client"] = sent / clients / 1e6 if sent is not None and clients else None
    row["best"] = ()
    return row


def models_of(run: Mapping[str, Any]) -> int:
    """Count the models that a client keeps in a run; where the run does not say, the algorithm does."""
    if run.get("models") is not None:
        return int(run["models"])
    models = kind_of(run["algorithm"]).models or ("one" if run.get("cluster_accuracy") is None else "clusters")
    return int(run.get("clusters") or 1) if models == "clusters" else 1


def _mean_std(runs: Sequence[Mapping[str, Any]], key: str) -> tuple[float | None, float | None]:
    values = [float(run[key]) for run in runs if run.get(key) is not None]
    if not values:
        return None, None
    return fmean(values), stdev(values) if len(values) > 1 else None


def _mark_best(rows: list[dict[str, Any]]) -> None:
    """Mark the best mean of each measure, to the digit shown, among the finished algorithms that gossip.

    Who is told the truth or talks to nobody is a bound, not a rival.
    """
    rivals = [row for row in rows if row["via"] == "neighbours" and not row["informed"] and not row["partial"]]
    for measure in MEASURES:
        shown = {
            id(row): round(100 * row[f"{measure}_mean"], 1) for row in rivals if row[f"{measure}_mean"] is not None
        }
        if len(shown) < 2:
            continue
        for row in rivals:
            if shown.get(id(row)) == max(shown.values()):
                row["best"] = (*row["best"], measure)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    columns = [
        Column("algorithm", lambda row: row["algorithm"] + ("*" if row["partial"] else "")),
        Column("talks to", lambda row: row["via"]),
        Column("accuracy\n%", _measure("accuracy"), "accuracy"),
        Column("all models\n%", _measure("all_models_accuracy"), "all_models_accuracy"),
        Column("right\ncluster %", _measure("cluster_accuracy"), "cluster_accuracy"),
        Column("lost a\ncluster", lambda row: row["lost"]),
        Column("runs", _runs),
        Column("time\nper run", lambda row: duration(row["seconds"])),
        Column("MB per\nclient", lambda row: megabytes(row["megabytes_per_client"])),
    ]
    empty = {
        "all models\n%": all(row["all_models_accuracy_mean"] is None for row in rows),
        "right\ncluster %": all(row["cluster_accuracy_mean"] is None for row in rows),
        "MB per\nclient": all(row["megabytes_per_client"] is None for row in rows),
    }
    return [column for column in columns if not empty.get(column.title, False)]


def _width(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> int:
    """Count the characters of a line of the terminal's table, a blank on both sides of each column."""
    cells = ([*column.title.split("\n"), *(column.cell(row) for row in rows)] for column in columns)
    return sum(2 + max(map(len, column)) for column in cells)


def _measure(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: percent(row[f"{name}_mean"], row[f"{name}_std"])


def _runs(row: Mapping[str, Any]) -> str:
    if row["partial"]:
        return f"0 + {row['unfinished']}"
    return f"{row['runs']}" + (f" + {row['unfinished']}" if row["unfinished"] else "")


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
