"""The measured tables and pictures of docs/asynchrony.md, from the results of the presets in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean

from writing import spread, table

from dfca.report.drawing.svg import to_svg
from dfca.report.results import stored_run
from dfca.report.virtual.figures import virtual_drawings
from dfca.report.virtual.plots import standalone
from dfca.report.virtual.summary import VirtualResults, axis_of, finished, rows_of, variants
from dfca.report.virtual.tables import ratio_to_batch, virtual_tables
from dfca.report.wording import one_line
from dfca.runs.store.reading import Run
from dfca.runs.store.rows import TrialRow

ROOT = Path(__file__).parent.parent
SHOWN = {
    "stragglers": ("time-20", "target-by-slowdown", "timeline-dfca-gi-sequential", "timeline-dfca-gi-batch"),
    "delays": ("target-by-latency_s",),
    "churn": ("target-by-away",),
    "lossy": ("target-by-loss",),
    "partition": ("time",),
    "late-joiner": ("joiners-dfca-gi-sequential",),
}
LEFT_OUT = ("trained s per client", "age of models", "rounds of a client")
"""Columns of a report that the page does not need."""
TIME, TRAFFIC = "after virtual s", "MB per client"
"""What is shown of a sweep besides the accuracy: the columns whose titles hold these; the traffic once."""
ACCURACY = "accuracy in the end %"


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
    """Write the accuracy in the end and what the report's table says; of a sweep one table for each measure."""
    axis, rows = axis_of(results), finished(results)
    (measures,) = virtual_tables(results)
    titles = [one_line(title) for title in measures.columns]
    if not axis.key:
        kept = [number for number, title in enumerate(titles) if title not in LEFT_OUT]
        lines = [[line[number].text for number in kept] for line in measures.rows]
        for line in lines:
            line.insert(1, _accuracy(rows_of(rows, axis, axis.values[0], line[0])))
        return table([titles[0], ACCURACY, *(titles[number] for number in kept[1:])], lines)
    parts = (TIME, TRAFFIC) if axis.key == "world.compute.slowdown" else (TIME,)
    shown = {title: number for number, title in enumerate(titles) if any(part in title for part in parts)}
    swept: dict[str, dict[str, list[str]]] = {title: {} for title in (ACCURACY, *shown)}
    value = axis.values[0]
    for line in measures.rows:
        value = float(line[0].text) if line[0].text else value
        name = line[1].text
        swept[ACCURACY].setdefault(name, []).append(_accuracy(rows_of(rows, axis, value, name)))
        for title, number in shown.items():
            swept[title].setdefault(name, []).append(line[number].text)
    values = [f"{value:g}" for value in axis.values]
    made = [
        table([f"{title}, by `{axis.key}`", *values], [[name, *cells] for name, cells in lines.items()])
        for title, lines in swept.items()
    ]
    return "\n\n".join(part for part in (*made, _explain_zeros(results)) if part)


def _accuracy(trials: Iterable[TrialRow]) -> str:
    return spread([trial["accuracy"] for trial in trials])


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
        f"0 %: no client held a model when the run ended, after {end_s:g} virtual seconds, because the election before "
        f"the first round had not ended: {where}."
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
        yield f"![{name}: {wanted}](asynchrony/{path.name})\n\n*{text}*"


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
        times = sorted((row[-1].text for row in virtual_tables(joiner)[0].rows), key=float)
        yield "a late joiner at 95 % of the others, with all algorithms", f"after {times[0]} to {times[-1]} s"


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
