"""Runs in virtual time as numbers: courses over time, and the variants that are compared.

A variant is what one line of a figure stands for: an algorithm with everything that varies but the one number that the
figure is drawn against, such as "dfca-fi batch". A course is one trial over virtual time, small enough to be kept in a
file of results. Everything here works on a run folder and on such a file alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from dfca.experiment.sweep import write
from dfca.report.rows import kind_of, varying
from dfca.runs.store.metric import metric_key
from dfca.runs.store.reading import Run

IGNORED_BY_SERVERS = ("mixing.aggregation", "mixing.share", "clock.staleness.kind", "topology.p", "topology.name")
Row = Mapping[str, Any]


class Axis(NamedTuple):
    """The number that varies and is drawn against, and its values; without one, key "" and one value."""

    key: str
    values: list[float]

    def at(self, row: Row) -> float:
        """Return the value of a row."""
        return float(row.get("point", {}).get(self.key, math.nan)) if self.key else 0.0


def is_virtual(summary: Row) -> bool:
    """Return whether there are trials in virtual time; other points of a sweep may have run in rounds."""
    return bool(virtual_heads(summary))


def virtual_heads(summary: Row) -> list[Row]:
    """Return what has a world and a clock: the points of a sweep in virtual time, or the summary itself."""
    return [head for head in summary.get("points", (summary,)) if "world" in head]


@dataclass(frozen=True)
class VirtualResults:
    """What tables and figures in virtual time are made of. timelines: one table per trial, with the head of its row."""

    summary: Row
    courses: Sequence[Row]
    timelines: Sequence[Row]

    @classmethod
    def of_run(cls, run: Run) -> VirtualResults:
        """Take them from a run; courses of finished trials only, where there are any."""
        done = {
            (row["algorithm"], row["seed"], row.get("digest") if run.swept else None) for row in finished(run.summary)
        }
        lines = [each for each in run.metrics if (each["algorithm"], each["seed"], each.get("digest")) in done]
        return cls(run.summary, courses(run.summary, lines or run.metrics), run.timelines)

    @classmethod
    def of_results(cls, results: Row) -> VirtualResults:
        """Take them from a file that `dfca report --save` wrote."""
        return cls(results, results.get("courses", []), results.get("timelines", []))

    def kept(self) -> dict[str, Any]:
        """Return what a file of results keeps: all courses, and the timelines that are drawn."""
        return {"courses": self.courses, "timelines": rows_of(self.timelines, self.axis, self.middle)}

    @cached_property
    def axis(self) -> Axis:
        """Return the number that varies."""
        return axis_of(self.summary)

    @property
    def middle(self) -> float:
        """Return the value of the axis at which timelines are drawn: at the last one, often, nothing moves."""
        return self.axis.values[len(self.axis.values) // 2]

    @cached_property
    def variants(self) -> list[str]:
        """Return the names of what is compared."""
        return variants(self.courses, self.axis)

    def head(self, value: float) -> Row:
        """Return the world and the clock at a value of the axis."""
        heads = virtual_heads(self.summary)
        return next((head for head in heads if self.axis.at(head) == value), heads[0])


def axis_of(summary: Row) -> Axis:
    """Choose the number with the most values at the points in virtual time."""
    best = Axis("", [0.0])
    for key in varying(summary):
        values = [head["point"].get(key) for head in virtual_heads(summary)]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        different = sorted({float(value) for value in values}) if numeric else []
        if len(different) > len(best.values):
            best = Axis(key, different)
    return best


def variant_of(row: Row, axis: Axis) -> str:
    """Name what a row or course stands for beside its value on the axis: "dfca-fi batch"."""
    hidden = {axis.key, *(IGNORED_BY_SERVERS if kind_of(row["algorithm"]).via != "neighbours" else ())}
    changed = [_worded(key, value) for key, value in row.get("point", {}).items() if key not in hidden]
    return " ".join([row["algorithm"], *changed])


def _worded(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    name = key.rpartition(".")[2].replace("_", " ")
    if value == []:
        return f"no {name}"
    return name if value is True else f"not {name}" if value is False else f"{name} {write(value)}"


def variants(rows: Iterable[Row], axis: Axis) -> list[str]:
    """Return the names of all variants, in the order of the rows."""
    return list(dict.fromkeys(variant_of(row, axis) for row in rows))


def rows_of(rows: Iterable[Row], axis: Axis, value: float | None = None, variant: str | None = None) -> list[Row]:
    """Choose rows or courses by their value on the axis and by their variant."""
    return [
        row
        for row in rows
        if (value is None or axis.at(row) == value) and (variant is None or variant_of(row, axis) == variant)
    ]


def finished(summary: Row) -> list[Row]:
    """Return the rows of the finished trials in virtual time."""
    return [row for row in summary["runs"] if row.get("finished") and "time_s" in row]


def courses(summary: Row, metrics: Sequence[Row]) -> list[dict[str, Any]]:
    """Shorten the metrics of each trial to its course over virtual time.

    time_s, accuracy (or what else the task is scored by), megabytes (sent by a client, the mean), and joiners, others:
    the mean score of the late joiners since they have joined, and of everybody else.
    """
    points = {point["digest"]: point for point in summary.get("points", ())}
    trials: dict[tuple[Any, ...], list[Row]] = {}
    for line in metrics:
        if "time_s" in line and (not points or line.get("digest") in points):
            trials.setdefault((line["algorithm"], line["seed"], line.get("digest")), []).append(line)
    made = []
    for (algorithm, seed, digest), lines in trials.items():
        head = points.get(digest, summary)
        course: dict[str, Any] = {"algorithm": algorithm, "seed": seed, "point": head.get("point", {})}
        course["time_s"] = [round(line["time_s"], 6) for line in lines]
        key = metric_key(lines[0])
        course["accuracy"] = [None if line.get(key) is None else _short(line[key]) for line in lines]
        count = head.get("clients") or 1
        course["megabytes"] = [_short(line["bytes_sent"] / count / 1e6) for line in lines]
        if joiners := head.get("world", {}).get("late_joiners", ()):
            course |= _joiners(lines, joiners)
        made.append(course)
    return made


def _joiners(lines: Sequence[Row], joiners: Sequence[Row]) -> dict[str, list[float | None]]:
    late = [each["client"] for each in joiners]
    last = max(each["at_s"] for each in joiners)
    scores = [line[f"{metric_key(line)}_by_client"] for line in lines]
    return {
        "joiners": [
            _short(fmean(each[i] for i in late)) if line["time_s"] > last else None
            for line, each in zip(lines, scores, strict=True)
        ],
        "others": [_short(fmean(score for i, score in enumerate(each) if i not in late)) for each in scores],
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")
