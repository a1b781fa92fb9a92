"""The measured tables and pictures of docs/asynchrony.md, from the results of the presets in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from writing import differences, spread, table

from dfca.report.drawing.svg import to_svg
from dfca.report.results import stored_run
from dfca.report.virtual.figures import virtual_drawings
from dfca.report.virtual.plots import standalone
from dfca.report.virtual.summary import VirtualResults, axis_of, finished, rows_of, variants
from dfca.report.virtual.tables import ratio_to_batch, virtual_tables
from dfca.report.wording import one_line
from dfca.runs.store.reading import Run

ROOT = Path(__file__).parent.parent
SHOWN = {
    "stragglers": (
        "time-20",
        "target-by-slowdown",
        "idle-by-slowdown",
        "ages",
        "timeline-dfca-gi-sequential",
        "timeline-dfca-gi-batch",
    ),
    "delays": ("target-by-latency_s", "accuracy-by-latency_s"),
    "churn": ("accuracy-by-away", "target-by-away"),
    "lossy": ("accuracy-by-loss", "target-by-loss"),
    "partition": ("time",),
    "late-joiner": ("joiners-dfca-gi-sequential", "timeline-dfca-gi-sequential"),
}


def load(name: str) -> Run | None:
    """Read a file of results, where there is one."""
    path = ROOT / "results" / f"{name}.json"
    return stored_run(path) if path.exists() else None


def measured(name: str) -> str:
    """Write the table and the pictures of a preset."""
    results = load(name)
    if results is None:
        return f"Not measured yet: `dfca run {name}`, then `dfca report runs/{name} --save results/{name}.json`."
    seeds = len({trial.seed for trial in finished(results)})
    parts = [f"`dfca run {name}`, {seeds} seed{'s' if seeds > 1 else ''}:", _table(results), *_draw(name, results)]
    return "\n\n".join(parts)


def verdicts() -> str:
    """Hold the numbers that the simulator was asked for against what came out."""
    return table(["asked for", "measured"], _verdicts())


def _table(results: Run) -> str:
    """Write the table in virtual time with the accuracy in the end beside it."""
    axis, rows = axis_of(results), finished(results)
    (measures,) = virtual_tables(results)
    at = 1 if axis.key else 0
    lines = []
    titles = [one_line(title) for title in measures.columns]
    names = variants(rows, axis)
    first = next((name for name in names if name.split()[0] == "dfca-auto"), names[0])
    titles[at + 1 : at + 1] = ["accuracy in the end %", f"minus {first} ± 95 %"]
    value, asked = axis.values[0], {}
    for line in measures.rows:
        cells = [cell.text for cell in line]
        value = float(cells[0]) if axis.key and cells[0] else value
        group = rows_of(rows, axis, value, cells[at])
        place = f"{cells[at]} at {value:g}" if axis.key else cells[at], titles[at + 2]
        if cells[at] != first:
            asked[place] = group, rows_of(rows, axis, value, first), "accuracy"
        cells[at + 1 : at + 1] = [spread([trial["accuracy"] for trial in group])]
        lines.append((cells, place))
    told, reading = differences(asked)
    full = [[*cells[: at + 2], told.get(place, "–"), *cells[at + 2 :]] for cells, place in lines]
    head = [f"`{title}`" if number < at else title for number, title in enumerate(titles)]
    return "\n\n".join(part for part in (table(head, full), reading, _explain_zeros(results)) if part)


def _explain_zeros(results: Run) -> str:
    """Say which rows have runs that ended before anybody held a model: their 0 % is not what models are worth."""
    axis, rows = axis_of(results), finished(results)
    places: dict[str, list[str]] = {}
    for name in variants(rows, axis):
        for value in axis.values:
            group = rows_of(rows, axis, value, name)
            empty = sum(not trial.client_rounds["max"] for trial in group)
            if empty:
                runs = f"{empty} of {len(group)} runs of {name}"
                places.setdefault(runs, []).append(f"{value:g}" if axis.key else "")
    if not places:
        return ""
    where = ", ".join(f"{runs} at {' and '.join(values)}" if values[0] else runs for runs, values in places.items())
    end_s = max(trial.time_s or 0.0 for trial in rows)
    return (
        f"0 % stands for a run that ended, after {end_s:g} virtual seconds, before any client that was there held a "
        "model: the election before the first round had not ended among them. "
        f"That is so in {where}. "
        "A difference to such a row says that it had not begun, not how good its models are."
    )


def _draw(name: str, results: Run) -> Iterator[str]:
    sections = virtual_drawings(VirtualResults.of(results))
    drawn = {drawing.name: drawing for section in sections.values() for drawing in section}
    for wanted in SHOWN[name]:
        drawing = drawn[wanted]
        path = ROOT / "docs" / "asynchrony" / f"{name}-{wanted}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(standalone(to_svg(drawing.figure)))
        text = f"{drawing.title}: {drawing.caption}" if drawing.title else drawing.caption
        yield f"![{text}](asynchrony/{path.name})\n\n*{text}*"


def _verdicts() -> Iterator[tuple[str, str]]:
    stragglers, lossy, joiner = load("stragglers"), load("lossy"), load("late-joiner")
    for name in ("dfca-gi", "dfca-auto"):
        if stragglers:
            yield from _straggler_verdicts(name, stragglers)
        if lossy:
            rows, axis = finished(lossy), axis_of(lossy)
            free = fmean(trial["accuracy"] for trial in rows_of(rows, axis, 0.0, f"{name} sequential"))
            hard = fmean(trial["accuracy"] for trial in rows_of(rows, axis, 0.1, f"{name} sequential away 0.3"))
            asked = f"`{name}`: 30 % churn and 10 % loss, within 2 points of the fault-free run"
            yield asked, f"{100 * (hard - free):+.2f} points"
    if joiner:
        for row in virtual_tables(joiner)[0].rows:
            yield f"a late joiner at 95 % of the others: {row[0].text}", f"after {row[-1].text} s"


def _straggler_verdicts(name: str, results: Run) -> Iterator[tuple[str, str]]:
    rows, axis = finished(results), axis_of(results)
    mine = rows_of(rows, axis, 10.0, f"{name} sequential")
    compared = ratio_to_batch(rows, mine)
    sooner = "a run never reached it" if compared is None else f"{compared[0]:.1f} times sooner"
    more = " or more" if compared and compared[1] else ""
    asked = f"`{name}`: 10 % of the clients 10 times slower, `sequential` at the target 3 times sooner than `batch`"
    yield asked, sooner + more
    even = fmean(trial["accuracy"] for trial in rows_of(rows, axis, 1.0, f"{name} batch"))
    gap = 100 * (fmean(trial["accuracy"] for trial in mine) - even)
    yield "... and in the end within 1 point of the synchronous accuracy", f"{gap:+.2f} points"
