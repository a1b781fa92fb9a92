"""Runs in virtual time as a table: when the target was reached, against `batch`, at which cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from dfca.report.rows import kind_of
from dfca.report.tables import TableCell, TextTable
from dfca.report.virtual.summary import Row, axis_of, finished, rows_of, variants
from dfca.report.wording import DASH, amount, folded, percent, span
from dfca.runs.store.metric import metric_of_run

DISPENSABLE = ("rounds of a client", "trained s per client", "age of models", "idle %")


class VirtualColumn(NamedTuple):
    """A column of the table: its title and what it says of the runs of one variant at one value of the axis."""

    title: str
    write: Callable[[Sequence[Row]], str]


def virtual_tables(summary: Row, width: int | None = None) -> list[TextTable]:
    """Make the table of what happened in virtual time; none for runs by rounds.

    Where it would be wider than `width` characters, the columns that matter least are left out.
    """
    rows = finished(summary)
    if not rows:
        return []
    axis, columns = axis_of(summary), _columns(rows, _clients(summary))
    body, before = [], None
    for value in axis.values:
        for name in variants(rows, axis):
            if group := rows_of(rows, axis, value, name):
                keys = [TableCell("" if value == before else f"{value:g}")] if axis.key else []
                before = value
                body.append([*keys, TableCell(name), *(TableCell(column.write(group)) for column in columns)])
    key_titles = [folded(axis.key)] if axis.key else []
    titles = [*key_titles, "what", *(column.title for column in columns)]
    words = [True] * (len(key_titles) + 1) + [False] * len(columns)
    return [TextTable("In virtual time", titles, words, body).fitted(width, DISPENSABLE)]


def _columns(rows: Sequence[Row], clients: int) -> list[VirtualColumn]:
    """Return the columns that these rows can fill."""
    targets = sorted({row["target_accuracy"] for row in rows if row.get("target_accuracy") is not None})
    target = " to ".join(dict.fromkeys(_goal(rows, each) for each in (targets[:1] + targets[-1:])))
    of_targets = [
        VirtualColumn(f"{target} after\nvirtual s", lambda group: _reached(group, "time_to_target_s")),
        VirtualColumn("times sooner\nthan batch", lambda group: _against_batch(rows, group)),
        VirtualColumn(f"MB per client\nto {target}", lambda group: _reached(group, "bytes_to_target", 1e-6 / clients)),
    ]
    of_rounds = [VirtualColumn("rounds of\na client", _rounds)]
    of_joiners = [VirtualColumn("joiners at\n95 % after s", caught_up)]
    return [
        *(of_targets if targets else []),
        VirtualColumn(
            "trained s\nper client", lambda group: amount(fmean(row["compute_s"] for row in group) / clients)
        ),
        VirtualColumn("idle %", lambda group: percent(max(0.0, fmean(row["idle_share"] for row in group)))),
        VirtualColumn("age of\nmodels", lambda group: _mean(group, "staleness_mean")),
        *(of_rounds if any("client_rounds" in row for row in rows) else []),
        *(of_joiners if any(row.get("caught_up_s") for row in rows) else []),
    ]


def _goal(rows: Sequence[Row], target: float) -> str:
    metric = metric_of_run({"runs": rows})
    return f"{100 * target:g} %" if metric.percent else f"{metric.name} {target:g}"


def ratio_to_batch(rows: Sequence[Row], group: Sequence[Row]) -> tuple[float, bool] | None:
    """Return how many times sooner than `batch` of the same algorithm a group reached its target.

    The second is True where a run of batch never got there, and counts with its end: then it is at least so many times.
    None: there is nothing to compare, or a run of the group never got there.
    """
    key = "mixing.aggregation"
    at = group[0].get("point", {})
    mine = [row["time_to_target_s"] for row in group if row.get("time_to_target_s") is not None]
    if at.get(key) in (None, "batch") or kind_of(group[0]["algorithm"]).via == "server" or len(mine) < len(group):
        return None
    twin = {**at, key: "batch"}
    batch = [row for row in rows if row.get("point", {}) == twin and row["algorithm"] == group[0]["algorithm"]]
    times = [row.get("time_to_target_s") for row in batch]
    if not batch or not fmean(mine):
        return None
    ends = [row["time_s"] if time is None else time for time, row in zip(times, batch, strict=True)]
    return fmean(ends) / fmean(mine), None in times


def caught_up(group: Sequence[Row]) -> str:
    """Write how long late joiners took to be near the others."""
    times = [time for row in group for time in (row.get("caught_up_s") or {}).values()]
    known = [time for time in times if time is not None]
    if not times:
        return DASH
    if not known:
        return "never"
    return amount(fmean(known)) + ("" if len(known) == len(times) else f" ({len(known)} of {len(times)})")


def _against_batch(rows: Sequence[Row], group: Sequence[Row]) -> str:
    compared = ratio_to_batch(rows, group)
    return DASH if compared is None else f"{'> ' if compared[1] else ''}{compared[0]:.1f}"


def _reached(group: Sequence[Row], key: str, scale: float = 1.0) -> str:
    known = [scale * row[key] for row in group if row.get(key) is not None]
    if not known:
        return "never" if any(row.get("target_accuracy") is not None for row in group) else DASH
    spread = f" ± {amount(stdev(known))}" if len(known) > 1 else ""
    some = "" if len(known) == len(group) else f" ({len(known)} of {len(group)})"
    return f"{amount(fmean(known))}{spread}{some}"


def _mean(group: Sequence[Row], key: str) -> str:
    known = [row[key] for row in group if row.get(key) is not None]
    return f"{fmean(known):.1f}" if known else DASH


def _rounds(group: Sequence[Row]) -> str:
    known = [row["client_rounds"] for row in group if "client_rounds" in row]
    return span([each[end] for each in known for end in ("min", "max")])


def _clients(summary: Row) -> int:
    return int(summary.get("clients") or next((point["clients"] for point in summary.get("points", ())), 1))
