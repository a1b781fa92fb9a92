"""The tables of a bench, for the terminal, for Markdown and for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from benchmarks.events import MOST_EXPONENT, SCALARS
from benchmarks.measurements import met
from benchmarks.scaling import AXES, BOUND

DASH = "–"
Json = Mapping[str, Any]


class BenchTable(NamedTuple):
    """A table: a title, the heads of the columns, the cells, and notes below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


TITLES = {
    "floor": "floor: a round against the same passes in bare torch",
    "peers": "peers: the same work in other libraries",
    "scaling": "scaling: how time and memory grow",
    "record": "record: clients that keep their models, on one machine",
    "ranks": "ranks: one process against several",
    "events": "events: the simulator in virtual time",
}


def tables_of(name: str, part: Json) -> list[BenchTable]:
    """Make the tables of one part."""
    special = {"scaling": _scaling, "record": _scaling, "events": _events}
    made = special[name](part) if name in special else [_comparisons(name, part)]
    if name == "floor":
        made.append(_phases(part))
    remarks = [*(["quick look"] if part["quick"] else []), *([] if part["finished"] else ["interrupted"])]
    made[0] = made[0]._replace(title=TITLES[name] + (f" ({', '.join(remarks)})" if remarks else ""))
    made[-1] = made[-1]._replace(notes=[*made[-1].notes, *provenance(part)])
    return [table for table in made if table.rows]


def provenance(part: Json) -> list[str]:
    """Write lines on where and how a part was measured."""
    machine = part["environment"]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    commit = f", commit {machine['commit'][:12]}" if machine.get("commit") else ""
    return [
        f"{part['command']} · {part['date']} · {machine['processor']}, {machine['cpus']} CPUs, {threads}, "
        f"load {machine['load']} before it began · torch {machine['torch']}, dfca {machine['dfca']}{commit}"
        f" · bf16 matrix products: {machine['bf16']}",
    ]


def _seconds(value: float) -> str:
    """Write a time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value / 1e-6:.3g} µs"


def _bytes(value: float) -> str:
    """Write a number of bytes."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"


def _wanted(row: Json) -> str:
    """Write the bound of a ratio."""
    if row["most"] is not None:
        return f"≤ {row['most']:g}"
    return DASH if row["least"] is None else f"≥ {row['least']:g}"


def to_terminal(table: BenchTable) -> Table:
    """Make a table for the terminal."""
    shown = Table(box=None, padding=(0, 1), header_style="dim", title_justify="left", title_style="bold")
    shown.title = table.title or None
    for number, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell, style="bold" if cell in ("yes", "no") else "") for cell in row))
    return shown


def markdown(content: Json, parts: Sequence[str] | None = None) -> str:
    """Write the tables of all parts, or of some."""
    lines: list[str] = []
    for name, part in content["parts"].items():
        if parts is not None and name not in parts:
            continue
        for table in tables_of(name, part):
            lines += [f"**{table.title}**", ""] if table.title else []
            lines += [_pipes(table.columns), _pipes(["---", *["---:"] * (len(table.columns) - 1)])]
            lines += [*map(_pipes, table.rows), ""]
            lines += [*(f"- {note}" for note in table.notes), ""]
    return "\n".join(lines).rstrip() + "\n"


def page_blocks(content: Json) -> dict[str, str]:
    """Write the measured blocks of docs/benchmarks.md, one per part."""
    parts = content["parts"]
    return {name: markdown(content, [name]).rstrip() if name in parts else "Not measured yet." for name in TITLES}


def _comparisons(name: str, part: Json) -> BenchTable:
    rows: list[list[str]] = []
    notes: dict[str, Any] = {}  # in order, each once
    about = {row["about"] for row in part["rows"]}
    for row in part["rows"]:
        notes[f"{row['about']}." if len(about) == 1 else f"{row['name']}: {row['about']}."] = True
        differs = row["details"].get("differs")
        if differs:
            notes[f"{row['name'].rpartition(', ')[2]}: {differs}."] = True
        if row["skipped"] is not None:
            rows.append([row["name"], DASH, DASH, DASH, _wanted(row), "skipped"])
            notes[f"{row['name']}: skipped, {row['skipped']}."] = True
            continue
        show = _bytes if row["unit"] == "bytes" else _seconds
        measured = [f"{subject} {show(median(row['values'][subject]))}" for subject in (row["of"], row["to"])]
        ratios = row["ratio"]
        verdict = {True: "yes", False: "no", None: DASH}[row["met"]]
        ratio = f"{ratios['median']:.2f} ({ratios['low']:.2f} to {ratios['high']:.2f})"
        rows.append([row["name"], *measured, ratio, _wanted(row), verdict])
        for steps, differ in row["details"].get("differences", {}).items():
            after = f"{row['name']}: after {steps} step{'s' * (steps != '1')} our parameters differ"
            notes[
                f"{after} by {differ['ours']:.1e} from the plain layers' (wanted after one: "
                f"{row['details']['difference_bound']:.0e}), and by {differ['ours from double']:.1e} from those in "
                f"double precision; the plain layers' differ from these by {differ['plain from double']:.1e}."
            ] = True
    columns = ["work", "measured", "against", "ratio: median (lowest to highest)", "wanted", "met"]
    return BenchTable(name, columns, rows, list(notes))


def _phases(part: Json) -> BenchTable:
    rows = []
    for row in part["rows"]:
        details = row["details"]
        if row["skipped"] is None and "schedules" in details:
            spent = [_seconds(details["phases"][phase]) for phase in ("assign", "train", "mix")]
            rows.append([row["name"], *spent, details["engine"], details["floor"]])
    return BenchTable("where a round spends its time, per client", _PHASE_COLUMNS, rows)


_PHASE_COLUMNS = ["work", "assign", "train", "mix", "our engine", "the floor's schedule"]


def _scaling(part: Json) -> list[BenchTable]:
    fitted = []
    for axis, fits in part.get("fits", {}).items():
        bound = BOUND if axis in ("N", "P") else None
        cells = []
        for measure in ("time", "memory"):
            fit = fits[measure]
            cells.append(DASH if fit is None else f"{fit['exponent']:.2f} ({fit['last']:.2f})")
        largest = [met(fits[m]["exponent"], bound, None) for m in ("time", "memory") if fits[m] is not None]
        verdict = DASH if bound is None else "yes" if all(largest) else "no"
        fitted.append([f"{axis}, {AXES[axis]}", *cells, DASH if bound is None else f"≤ {bound}", verdict])
    points, notes = [], []
    for row in part["rows"]:
        if row["skipped"] is not None:
            points.append([row["about"], DASH, DASH, DASH])
            notes.append(f"{row['name']}: skipped, {row['skipped']}.")
            continue
        details, spent = row["details"], row["details"]["phases"]
        total = sum(spent.values()) or 1.0
        shares = " / ".join(f"{100 * spent[phase] / total:.0f}" for phase in ("assign", "train", "mix"))
        memory = _bytes(median(details["memory_bytes"]))
        points.append([row["about"], _seconds(median(row["values"]["round"])), memory, shares])
    return [
        BenchTable(
            "", ["grows with", "time: exponent (last step)", "memory: exponent (last step)", "wanted", "met"], fitted
        ),
        BenchTable("points", ["size", "per round", "memory", "assign / train / mix, %"], points, notes),
    ]


def _events(part: Json) -> list[BenchTable]:
    rows, costs, notes = [], [], {}
    for row in part["rows"]:
        details, values = row["details"], row["values"]
        notes[f"{row['name']}: {row['about']}." if "flooding" not in details else f"scalars: {row['about']}."] = True
        if row["skipped"] is not None:
            rows.append([row["name"], DASH, DASH, "skipped"])
            notes[f"{row['name']}: skipped, {row['skipped']}."] = True
            continue
        if "flooding" in details:
            shown = [details[name] for name in ("x", "edges", "candidates", "wave", "turn", "flooding")]
            sent = details["turn"] + details["wave"] / details["candidates"]
            costs.append([*(f"{number:,.0f}" for number in shown), f"{details['flooding'] / sent:,.0f}"])
            continue
        spent = ", ".join(f"{_seconds(median(times))} ({name})" for name, times in values.items())
        wanted, verdict = DASH, None
        if row["ratio"] is not None:
            measured, wanted, verdict = row["ratio"], _wanted(row), row["met"]
            spent = f"{measured['median']:.2f} ({measured['low']:.2f} to {measured['high']:.2f}); {spent}"
        elif "least" in details:
            speed = details["handled"] / median(values["cpu"])
            wanted, verdict = f"≥ {details['least']:,}/s", speed >= details["least"]
            spent = f"{speed:,.0f} events/s; {spent}"
        elif "most" in details:
            wanted, verdict = f"≤ {_seconds(details['most'])}", median(values["wall"]) <= details["most"]
        rows.append([row["name"], spent, wanted, {True: "yes", False: "no", None: DASH}[verdict]])
    fitted = part.get("fits", {})
    if "turn" in fitted:
        wave, turn, flooding = (fitted[name]["exponent"] for name in SCALARS)
        verdict = "yes" if turn <= MOST_EXPONENT else "no"
        rows.append(["scalars per candidate: exponent in N", f"{turn:.2f}", f"≤ {MOST_EXPONENT}", verdict])
        notes[
            f"Exponents in N: a turn {turn:.2f}, the wave {wave:.2f} (everybody begins one at once, and joins about "
            f"log N better ones), flooding {flooding:.2f}."
        ] = True
    return [
        BenchTable("", ["work", "measured", "wanted", "met"], rows),
        BenchTable("scalars of an election", _COST_COLUMNS, costs, list(notes)),
    ]


_COST_COLUMNS = ["N", "edges", "candidates", "wave, once", "turn, each", "flooding, each", "flooding against all of it"]


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
