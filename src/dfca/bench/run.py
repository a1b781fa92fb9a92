"""Run parts of the bench, keep every finished row, and write the tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dfca.bench import floor, ranks, scaling
from dfca.bench.baselines import measure as peers
from dfca.bench.figures import draw
from dfca.bench.record import PARTS, Record, machine
from dfca.bench.rows import Row
from dfca.bench.tables import markdown
from dfca.bench.timing import Tick
from dfca.errors import ConfigError, unknown
from dfca.files import atomic_write

Measure = Callable[[Any, Tick], Iterator[Row]]
MEASURES: dict[str, Measure] = {
    "floor": floor.rows,
    "peers": peers.rows,
    "scaling": scaling.rows,
    "ranks": ranks.rows,
}


class Listener(Protocol):
    """Who is told how far the bench is."""

    def start(self, part: str, count: int) -> None:
        """A part with so many rows begins."""

    def tick(self, what: str) -> None:
        """This is measured now."""

    def finish_row(self, row: dict[str, Any]) -> None:
        """A row is finished."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the bench; the message says what is kept."""


def chosen_parts(names: Sequence[str]) -> list[str]:
    """Resolve what the user asked for; nothing or "all" are all parts.

    Raises ConfigError for an unknown name.
    """
    for name in names:
        if name not in (*PARTS, "all"):
            raise unknown("part", name, (*PARTS, "all"))
    return [name for name in PARTS if name in names or "all" in names or not names]


def make_plans(parts: Sequence[str], quick: bool, repeats: int | None, cache: Path) -> dict[str, Any]:
    """Choose the sizes of the parts.

    Raises ConfigError for repeats below 1.
    """
    if repeats is not None and repeats < 1:
        raise ConfigError(f"repeats must be >= 1, got {repeats}")
    makers: dict[str, Callable[[], Any]] = {
        "floor": lambda: floor.plan(quick),
        "peers": lambda: peers.plan(quick, cache),
        "scaling": lambda: scaling.plan(quick),
        "ranks": lambda: ranks.plan(quick),
    }
    plans = {name: makers[name]() for name in parts}
    if repeats is None:
        return plans
    return {
        name: replace(plan, **{"cycles" if name == "scaling" else "repeats": repeats}) for name, plan in plans.items()
    }


def run(plans: dict[str, Any], out: Path, command: str, quick: bool, listener: Listener) -> dict[str, Any]:
    """Measure the parts of `plans` one after the other; returns the content of bench.json.

    Raises Interrupted on Ctrl-C; finished rows are kept.
    """
    record = Record(out)
    kept = 0
    try:
        where = machine()
        for name, plan in plans.items():
            listener.start(name, plan.count)
            record.start(name, command, quick, where)
            for row in MEASURES[name](plan, listener.tick):
                found = record.add(row)
                kept += 1
                listener.finish_row(found)
            record.finish()
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; {kept} finished row{'s are' if kept != 1 else ' is'} kept in {record.path}; "
            "the same command measures anew"
        ) from None
    finally:
        if record.content["parts"]:
            atomic_write(out / "bench.md", markdown(record.content))
            draw(record.content, out)
    return record.content
