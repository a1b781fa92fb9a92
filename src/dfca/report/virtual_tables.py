"""Runs in virtual time as numbers: courses over time, variants that are compared, and the table of targets.

A variant is what one line of a figure stands for: an algorithm with everything that varies but the one number that the
figure is drawn against, such as "dfca-fi batch". A course is one cell over virtual time, small enough to be kept in a
file of results. Everything here works on a run folder and on such a file alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from dfca.experiment.sweep import write
from dfca.report.tables import DASH, Entry, Sheet, kind_of, megabytes, percent, varying

IGNORED_BY_SERVERS = ("mixing.aggregation", "mixing.share", "clock.staleness.kind", "topology.p", "topology.name")
DISPENSABLE = ("rounds of\na client", "trained s\nper client", "age of\nmodels", "idle %")
Row = Mapping[str, Any]
T = TypeVar("T")


class Axis(NamedTuple):
    """The number that varies and is drawn against, and its values; without one, key "" and one value."""

    key: str
    values: list[float]

    def at(self, row: Row) -> float:
        """Give the value of a row."""
        return float(row.get("point", {}).get(self.key, math.nan)) if self.key else 0.0


def is_virtual(summary: Row) -> bool:
    """Tell whether the cells ran in virtual time."""
    return any("world" in head for head in (summary, *summary.get("points", ())))


WORDS = {
    "virtual time": "The clock of the simulated world, in seconds; not how long the program ran.",
    "sequential, batch": "What a client does between two rounds: fold the models that have arrived and go on at once, "
    "or wait for all neighbours of the round.",
    "idle": "The part of a client's time, while it is there, in which it does not train.",
    "age of models": "How many local updates a receiver made since the model that it folds was trained; 0: none.",
    "joiners at 95 %": "How long after a late joiner came its accuracy was first seen at 95 % of the others' mean.",
    "trained s": "How long a client trained, in virtual seconds: what a run costs in energy, up to a factor.",
}


def words_of(summary: Row) -> str:
    """Explain the words of virtual time, for the page of a run that has it."""
    if not is_virtual(summary):
        return ""
    return "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in WORDS.items())


def axis_of(summary: Row) -> Axis:
    """Choose the number with the most values."""
    best = Axis("", [0.0])
    for key in varying(summary):
        values = [point["point"].get(key) for point in summary["points"]]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        different = sorted({float(value) for value in values}) if numeric else []
        if len(different) > len(best.values):
            best = Axis(key, different)
    return best


def variant_of(row: Row, axis: Axis) -> str:
    """Name what a row or course stands for beside its value on the axis: "dfca-fi batch"."""
    hidden = {axis.key, *(IGNORED_BY_SERVERS if kind_of(row["algorithm"]).via != "neighbours" else ())}
    told = [_worded(key, value) for key, value in row.get("point", {}).items() if key not in hidden]
    return " ".join([row["algorithm"], *told])


def _worded(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    name = key.rpartition(".")[2].replace("_", " ")
    if value == []:
        return f"no {name}"
    return name if value is True else f"not {name}" if value is False else f"{name} {write(value)}"


def variants(rows: Iterable[Row], axis: Axis) -> list[str]:
    """Name all variants, in the order of the rows."""
    return list(dict.fromkeys(variant_of(row, axis) for row in rows))


def rows_of(rows: Iterable[Row], axis: Axis, value: float | None = None, variant: str | None = None) -> list[Row]:
    """Choose rows or courses by their value on the axis and by their variant."""
    return [
        row
        for row in rows
        if (value is None or axis.at(row) == value) and (variant is None or variant_of(row, axis) == variant)
    ]


def finished(summary: Row) -> list[Row]:
    """Give the rows of the finished cells."""
    return [row for row in summary["runs"] if row.get("finished")]


def world_in_words(world: Row) -> str:
    """Say what a world is like, from its facts (`WorldConfig.facts`)."""
    compute, link, faults, churn = (world[key] for key in ("compute", "link", "faults", "churn"))
    said = [f"{compute['step_s']:g} s per local step ({compute['kind']})"]
    said += [
        f"{100 * each['share']:g} % of the clients {each['slowdown']:g} times slower"
        for each in compute["devices"]
        if each["slowdown"] != 1
    ]
    said.append(f"latency {link['latency_s']:g} s" if link["latency_s"] else "no latency")
    if link["bandwidth_bytes_s"] is not None:
        said.append(f"{link['bandwidth_bytes_s'] / 1e6:g} MB/s up")
    said += [f"{100 * faults[kind]:g} % {kind}" for kind in ("loss", "duplication", "corruption") if faults[kind]]
    if churn["leaves_per_s"]:
        away = churn["leaves_per_s"] * churn["away_s"]
        empty = "" if churn["keeps"] else ", back without models"
        said.append(f"{100 * away / (1 + away):.0f} % away ({churn['away_s']:g} s at a time{empty})")
    for each in world["partitions"]:
        end = "the end" if each["end_s"] is None else f"{each['end_s']:g} s"
        said.append(f"apart from {each['begin_s']:g} s to {end}")
    if world["late_joiners"]:
        number = len(world["late_joiners"])
        said.append(f"{number} late joiner{'s' if number > 1 else ''}")
    if "absences_sha256" in world:
        said.append("availability from a file")
    return ", ".join(said)


# --- courses


def courses(summary: Row, metrics: Sequence[Row], clients: int) -> list[dict[str, Any]]:
    """Shorten the metrics of each cell to its course over virtual time.

    time_s, accuracy, megabytes (sent by a client, the mean), and joiners, others: the mean accuracy of the late joiners
    since they have joined, and of everybody else.
    """
    points = {point["digest"]: point for point in summary.get("points", ())}
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for line in metrics:
        if "time_s" in line and (not points or line.get("digest") in points):
            cells.setdefault((line["algorithm"], line["seed"], line.get("digest")), []).append(line)
    made = []
    for (algorithm, seed, digest), lines in cells.items():
        head = points.get(digest, summary)
        course: dict[str, Any] = {"algorithm": algorithm, "seed": seed, "point": head.get("point", {})}
        course["time_s"] = [round(line["time_s"], 6) for line in lines]
        course["accuracy"] = [_short(line["accuracy"]) for line in lines]
        count = head.get("clients") or clients
        course["megabytes"] = [_short(line["bytes_sent"] / count / 1e6) for line in lines]
        joiners = head.get("world", {}).get("late_joiners", ())
        if joiners:
            late = [each["client"] for each in joiners]
            last = max(each["at_s"] for each in joiners)
            course["joiners"] = [
                _short(fmean(line["accuracy_by_client"][i] for i in late)) if line["time_s"] > last else None
                for line in lines
            ]
            course["others"] = [
                _short(fmean(each for i, each in enumerate(line["accuracy_by_client"]) if i not in late))
                for line in lines
            ]
        made.append(course)
    return made


def _short(value: float) -> float:
    return float(f"{value:.5g}")


# --- the table


def virtual_sheets(summary: Row, width: int | None = None) -> list[Sheet]:
    """Make the table of what happened in virtual time: when the target was reached, against `batch`, at which cost.

    Where it would be wider than `width` characters, the columns that matter least are left out.
    """
    rows = [row for row in finished(summary) if "time_s" in row]
    if not rows:
        return []
    axis, clients = axis_of(summary), _clients(summary)
    groups = [
        (value, name, group)
        for value in axis.values
        for name in variants(rows, axis)
        if (group := rows_of(rows, axis, value, name))
    ]
    targets = sorted({row["target_accuracy"] for row in rows if row.get("target_accuracy") is not None})
    told = " to ".join(dict.fromkeys(f"{100 * each:g}" for each in (targets[:1] + targets[-1:])))
    columns: list[tuple[str, bool, Callable[[list[Row]], str]]] = [
        (f"{told} % after\nvirtual s", bool(targets), lambda group: _reached(group, "time_to_target_s")),
        ("times sooner\nthan batch", bool(targets), lambda group: _against_batch(rows, group)),
        (
            f"MB per client\nto {told} %",
            bool(targets),
            lambda group: _reached(group, "bytes_to_target", 1e-6 / clients),
        ),
        ("trained s\nper client", True, lambda group: _number(fmean(row["compute_s"] for row in group) / clients)),
        ("idle %", True, lambda group: percent(max(0.0, fmean(row["idle_share"] for row in group)))),
        ("age of\nmodels", True, lambda group: _mean(group, "staleness_mean")),
        ("rounds of\na client", any("client_rounds" in row for row in rows), lambda group: _rounds(group)),
        ("joiners at\n95 % after s", any(row.get("caught_up_s") for row in rows), lambda group: caught_up(group)),
    ]
    shown = [(title, cell) for title, wanted, cell in columns if wanted]
    body, before = [], None
    for value, name, group in groups:
        keys = [Entry("" if value == before else f"{value:g}")] if axis.key else []
        before = value
        body.append([*keys, Entry(name), *(Entry(cell(group)) for _, cell in shown)])
    titles = [*([_folded(axis.key)] if axis.key else []), "what", *(title for title, _ in shown)]
    words = [True] * (len(titles) - len(shown)) + [False] * len(shown)
    sheet = Sheet("In virtual time", titles, words, body, [False] * len(body))
    for title in DISPENSABLE:
        if width is not None and sheet.width > width and title in sheet.columns:
            at = sheet.columns.index(title)
            sheet = sheet._replace(
                columns=_without(sheet.columns, at),
                words=_without(sheet.words, at),
                rows=[_without(row, at) for row in sheet.rows],
            )
    return [sheet]


def _without(values: list[T], at: int) -> list[T]:
    return values[:at] + values[at + 1 :]


def ratio_to_batch(rows: Sequence[Row], group: Sequence[Row]) -> tuple[float, bool] | None:
    """Tell how many times sooner than `batch` of the same algorithm a group reached its target.

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
    return _number(fmean(known)) + ("" if len(known) == len(times) else f" ({len(known)} of {len(times)})")


def _against_batch(rows: Sequence[Row], group: Sequence[Row]) -> str:
    compared = ratio_to_batch(rows, group)
    return DASH if compared is None else f"{'> ' if compared[1] else ''}{compared[0]:.1f}"


def _reached(group: Sequence[Row], key: str, scale: float = 1.0) -> str:
    known = [scale * row[key] for row in group if row.get(key) is not None]
    if not known:
        return "never" if any(row.get("target_accuracy") is not None for row in group) else DASH
    spread = f" ± {_number(stdev(known))}" if len(known) > 1 else ""
    some = "" if len(known) == len(group) else f" ({len(known)} of {len(group)})"
    return f"{_number(fmean(known))}{spread}{some}"


def _mean(group: Sequence[Row], key: str) -> str:
    known = [row[key] for row in group if row.get(key) is not None]
    return f"{fmean(known):.1f}" if known else DASH


def _rounds(group: Sequence[Row]) -> str:
    known = [row["client_rounds"] for row in group if "client_rounds" in row]
    low, high = min(each["min"] for each in known), max(each["max"] for each in known)
    return f"{low}" if low == high else f"{low}–{high}"


def _number(value: float) -> str:
    """Write seconds or megabytes with the digits that matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else megabytes(value)


def _folded(key: str) -> str:
    return key.replace(".", ".\n") if len(key) > 12 else key


def _clients(summary: Row) -> int:
    return int(summary.get("clients") or next((point["clients"] for point in summary.get("points", ())), 1))
