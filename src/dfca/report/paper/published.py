"""The numbers of the paper, to stand beside ours: `paper.toml`, by preset, point and algorithm."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from dfca.sim.metrics_table import JsonObject, PointValues


class Published(NamedTuple):
    """An accuracy as the paper gives it, in 0..1: mean and standard deviation over five seeds."""

    mean: float
    std: float


def published(experiment: str, at: PointValues) -> dict[str, Published]:
    """Return the published accuracies at one point of a preset by algorithm; none where the paper has none.

    >>> published("table4-femnist-k", {"clusters": 3})["ifca"]
    Published(mean=0.885, std=0.0052)
    """
    for row in _entry(experiment).get("rows", ()):
        if row["at"] == dict(at):
            percents = {name: value for name, value in row.items() if name != "at"}
            return {name: Published(round(m / 100, 6), round(s / 100, 6)) for name, (m, s) in percents.items()}
    return {}


def where(experiment: str) -> str:
    """Return where in the paper the numbers stand; an empty text where it has none."""
    return str(_entry(experiment).get("table", ""))


def slips(experiment: str) -> list[str]:
    """Return the contradictions of the paper that concern these numbers."""
    return list(_entry(experiment).get("slips", ()))


def _entry(experiment: str) -> JsonObject:
    tables = _tables()
    entry: JsonObject = tables.get(experiment, {})
    return tables[entry["same"]] if "same" in entry else entry


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("dfca.report.paper") / "paper.toml").read_text(encoding="utf-8"))
