"""Runs in virtual time as a table: when the target was reached, against `batch`, at which cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from dfca.report.rows import kind_of
from dfca.report.tables import TableCell, TextTable
from dfca.report.virtual.summary import axis_of, finished, rows_of, traffic_to_target, variants
from dfca.report.wording import amount, folded, percent, span
from dfca.runs.store.metric import DASH
from dfca.runs.store.reading import Run, metric_of_trials
from dfca.runs.store.rows import TrialRow

DISPENSABLE = ("rounds of a client", "trained s per client", "age of models", "idle %")


class VirtualColumn(NamedTuple):
    """A column of the table: its title and what it says of the runs of one variant at one value of the axis."""

    title: str
    write: Callable[[Sequence[TrialRow]], str]


def virtual_tables(run: Run, width: int | None = None) -> list[TextTable]:
    """Make the table of what happened in virtual time; none for runs by rounds.

    Where it would be wider than `width` characters, the columns that matter least are left out.
    """
    rows = finished(run)
    if not rows:
        return []
    axis, columns = axis_of(run), _columns(rows, run.points[0].clients or 1)
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


def _columns(rows: Sequence[TrialRow], clients: int) -> list[VirtualColumn]:
    """Return the columns that these rows can fill."""
    targets = sorted({row.target for row in rows if row.target is not None})
    target = " to ".join(dict.fromkeys(_goal(rows, value) for value in (targets[:1] + targets[-1:])))
    of_targets = [
        VirtualColumn(
            f"{target} after\nvirtual s", lambda group: _reached(group, [row.time_to_target_s for row in group])
        ),
        VirtualColumn("times sooner\nthan batch", lambda group: _against_batch(rows, group)),
        VirtualColumn(
            f"MB per client\nto {target}",
            lambda group: _reached(group, list(map(traffic_to_target, group)), 1e-6 / clients),
        ),
    ]
    of_rounds = [VirtualColumn("rounds of\na client", _rounds)]
    of_joiners = [VirtualColumn("joiners at\n95 % after s", caught_up)]
    return [
        *(of_targets if targets else []),
        VirtualColumn(
            "trained s\nper client", lambda group: amount(fmean(row.compute_s or 0.0 for row in group) / clients)
        ),
        VirtualColumn("idle %", lambda group: percent(max(0.0, fmean(row.idle_share or 0.0 for row in group)))),
        VirtualColumn("age of\nmodels", _age),
        *(of_rounds if any(row.client_rounds for row in rows) else []),
        *(of_joiners if any(row.caught_up_s for row in rows) else []),
    ]


def _goal(rows: Sequence[TrialRow], target: float) -> str:
    metric = metric_of_trials(rows)
    return f"{100 * target:g} %" if metric.percent else f"{metric.name} {target:g}"


def ratio_to_batch(rows: Sequence[TrialRow], group: Sequence[TrialRow]) -> tuple[float, bool] | None:
    """Return how many times sooner than `batch` of the same algorithm a group reached its target.

    The second is True where a run of batch never got there, and counts with its end: the ratio is a lower bound. None:
    there is nothing to compare, or a run of the group never got there.
    """
    key, first = "mixing.aggregation", group[0]
    mine = [row.time_to_target_s for row in group if row.time_to_target_s is not None]
    if first.point.get(key) in (None, "batch") or kind_of(first.algorithm).via == "server" or len(mine) < len(group):
        return None
    twin = {**first.point, key: "batch"}
    batch = [row for row in rows if row.point == twin and row.algorithm == first.algorithm]
    if not batch or not fmean(mine):
        return None
    ends = [(row.time_s or 0.0) if row.time_to_target_s is None else row.time_to_target_s for row in batch]
    return fmean(ends) / fmean(mine), any(row.time_to_target_s is None for row in batch)


def caught_up(group: Sequence[TrialRow]) -> str:
    """Write how long late joiners took to be near the others."""
    times = [time for row in group for time in row.caught_up_s.values()]
    known = [time for time in times if time is not None]
    if not times:
        return DASH
    if not known:
        return "never"
    return amount(fmean(known)) + ("" if len(known) == len(times) else f" ({len(known)} of {len(times)})")


def _against_batch(rows: Sequence[TrialRow], group: Sequence[TrialRow]) -> str:
    compared = ratio_to_batch(rows, group)
    return DASH if compared is None else f"{'> ' if compared[1] else ''}{compared[0]:.1f}"


def _reached(group: Sequence[TrialRow], values: Sequence[float | None], scale: float = 1.0) -> str:
    known = [scale * value for value in values if value is not None]
    if not known:
        return "never" if any(row.target is not None for row in group) else DASH
    spread = f" ± {amount(stdev(known))}" if len(known) > 1 else ""
    some = "" if len(known) == len(group) else f" ({len(known)} of {len(group)})"
    return f"{amount(fmean(known))}{spread}{some}"


def _age(group: Sequence[TrialRow]) -> str:
    known = [row.staleness_mean for row in group if row.staleness_mean is not None]
    return f"{fmean(known):.1f}" if known else DASH


def _rounds(group: Sequence[TrialRow]) -> str:
    return span([row.client_rounds[end] for row in group if row.client_rounds for end in ("min", "max")])
