"""Run parts of the bench, store every finished row, and write the tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import events, floor, ranks, scaling
from benchmarks.baselines import measure as baselines
from benchmarks.bench_file import PARTS, BenchFile, machine
from benchmarks.figures import draw
from benchmarks.measurements import Row, Tick
from benchmarks.progress import PartProgress
from benchmarks.tables import markdown
from dfca.base.errors import ConfigError, unknown
from dfca.base.files import atomic_write
from dfca.runs.signals import Interrupted

Measure = Callable[[Any, Tick], Iterator[Row]]
MEASURES: dict[str, Measure] = {
    "floor": floor.rows,
    "peers": baselines.rows,
    "scaling": scaling.rows,
    "record": scaling.rows,
    "ranks": ranks.rows,
    "events": events.rows,
}


def choose_parts(names: Sequence[str]) -> list[str]:
    """Resolve what the user asked for; nothing or "all" are all parts.

    Raises ConfigError for an unknown name.
    """
    for name in names:
        if name not in (*PARTS, "all"):
            raise unknown("part", name, (*PARTS, "all"))
    return [name for name in PARTS if name in names or "all" in names or not names]


def make_plans(
    parts: Sequence[str], quick: bool, repeats: int | None, cache: Path | None, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Choose the sizes of the parts. `cache` is where other libraries are installed, by default the user's cache.

    only: the works of `peers` whose names contain one of these.

    Raises ConfigError for repeats below 1.
    """
    if repeats is not None and repeats < 1:
        raise ConfigError(f"repeats must be >= 1, got {repeats}")
    makers: dict[str, Callable[[], Any]] = {
        "floor": lambda: floor.make_plan(quick),
        "peers": lambda: baselines.make_plan(quick, cache, only),
        "scaling": lambda: scaling.make_plan(quick),
        "record": lambda: scaling.make_record(quick),
        "ranks": lambda: ranks.make_plan(quick),
        "events": lambda: events.make_plan(quick),
    }
    plans = {name: makers[name]() for name in parts}
    if repeats is None:
        return plans
    field = {"scaling": "cycles", "record": "cycles"}
    return {name: replace(plan, **{field.get(name, "repeats"): repeats}) for name, plan in plans.items()}


def run(plans: dict[str, Any], out: Path, command: str, quick: bool, progress: PartProgress) -> dict[str, Any]:
    """Measure the parts of `plans` one after the other; returns the content of bench.json.

    Raises Interrupted on Ctrl-C; finished rows are kept.
    """
    file = BenchFile(out)
    kept = 0
    try:
        where = machine()
        for name, plan in plans.items():
            progress.start(name, plan.count)
            file.start(name, command, quick, where)
            for row in MEASURES[name](plan, progress.tick):
                added = file.add(row)
                kept += 1
                progress.finish_row(added)
            file.finish()
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; {kept} finished row{'s are' if kept != 1 else ' is'} kept in {file.path}; "
            "the same command measures anew"
        ) from None
    finally:
        if file.content["parts"]:
            atomic_write(out / "bench.md", markdown(file.content))
            draw(file.content, out)
    return file.content
