"""Runs in virtual time as numbers: courses over time, and the variants that are compared.

A variant is what one line of a figure stands for: an algorithm with everything that varies but the one number that the
figure is drawn against, such as "dfca-fi batch". A course is one trial over virtual time, small enough to be kept in a
file of results. Everything here works on a run folder and on such a file alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from dfca.experiment.variants import write
from dfca.report.drawing.curves import known_value
from dfca.report.rows import kind_of
from dfca.runs.store.folder import read_json
from dfca.runs.store.reading import Run
from dfca.runs.store.rows import PointRow, TrialRow
from dfca.sim.metrics_table import EvaluationRow, JsonObject, PointValues, traffic_bytes

IGNORED_BY_SERVERS = ("mixing.aggregation", "mixing.share", "clock.staleness.kind", "topology.p", "topology.name")


class AtPoint(Protocol):
    """What belongs to an algorithm at a point of a sweep: a trial, a course, a timeline."""

    @property
    def algorithm(self) -> str: ...
    @property
    def point(self) -> PointValues: ...


Placed = TypeVar("Placed", bound=AtPoint)


class Axis(NamedTuple):
    """The number that varies and is drawn against, and its values; without one, key "" and one value."""

    key: str
    values: list[float]

    def at(self, point: PointValues) -> float:
        return float(point.get(self.key, math.nan)) if self.key else 0.0


@dataclass(frozen=True)
class Course:
    """One trial over virtual time. joiners, others: the mean score of late joiners since they joined, and of the rest;
    empty where nobody joins late."""

    algorithm: str
    seed: int
    point: PointValues
    time_s: Sequence[float]
    score: Sequence[float | None]
    megabytes: Sequence[float]  # sent by a client, the mean
    joiners: Sequence[float | None] = ()
    others: Sequence[float] = ()

    @classmethod
    def of(cls, values: JsonObject, metric: str) -> Self:
        """Parse a course of a file of results; version 0.2 called every score accuracy."""
        key = metric if metric in values else "accuracy"
        return cls(score=values[key], **{name: value for name, value in values.items() if name != key})

    def stored(self, metric: str) -> JsonObject:
        joiners = {"joiners": self.joiners, "others": self.others} if self.joiners else {}
        head = {"algorithm": self.algorithm, "seed": self.seed, "point": self.point, "time_s": self.time_s}
        return head | {metric: self.score, "megabytes": self.megabytes} | joiners


@dataclass(frozen=True)
class LaneTable:
    """The timeline of a few clients of one trial, as `runs.timeline` explains it."""

    algorithm: str
    seed: int
    point: PointValues
    lanes: Sequence[JsonObject]
    spans: Sequence[tuple[int, str, float, float]]
    arrows: Sequence[tuple[int, int, float, float, str]]
    begin_s: float
    end_s: float
    stored: JsonObject

    @classmethod
    def of(cls, values: JsonObject) -> Self:
        fields: JsonObject = {"point": {}} | values
        return cls(**fields, stored=values)


@dataclass(frozen=True)
class VirtualResults:
    """What tables and figures in virtual time are made of."""

    run: Run
    courses: Sequence[Course]
    timelines: Sequence[LaneTable]

    @classmethod
    def of(cls, run: Run) -> Self:
        """Take them from a run folder, or from a file of results, which holds the courses.

        Of a folder, courses are those of the finished trials, where there are any.
        """
        if "courses" in run.head:
            timelines = run.head.get("timelines", [])
            courses_of = [Course.of(values, run.metric.key) for values in run.head["courses"]]
            return cls(run, courses_of, list(map(LaneTable.of, timelines)))
        done = {trial.key(run.swept) for trial in finished(run)}
        lines = [row for row in run.metrics if row.key(run.swept) in done]
        return cls(run, courses(run, lines or run.metrics), timelines_of(run))

    def kept(self) -> JsonObject:
        """Return what a file of results keeps: all courses, and the timelines that are drawn."""
        drawn = rows_of(self.timelines, self.axis, self.middle)
        return {
            "courses": [course.stored(self.run.metric.key) for course in self.courses],
            "timelines": [timeline.stored for timeline in drawn],
        }

    @cached_property
    def axis(self) -> Axis:
        return axis_of(self.run)

    @property
    def middle(self) -> float:
        """The value of the axis at which timelines are drawn: at the last one, often, nothing moves."""
        return self.axis.values[len(self.axis.values) // 2]

    @cached_property
    def variants(self) -> list[str]:
        return variants(self.courses, self.axis)

    def head(self, value: float) -> PointRow:
        """Return the point, with its world and clock, at a value of the axis."""
        points = virtual_points(self.run)
        return next((point for point in points if self.axis.at(point.at) == value), points[0])


def is_virtual(run: Run) -> bool:
    """Return whether there are trials in virtual time; other points of a sweep may have run in rounds."""
    return bool(virtual_points(run))


def virtual_points(run: Run) -> list[PointRow]:
    """Return the points that have a world and a clock."""
    return [point for point in run.points if point.world is not None]


def timelines_of(run: Run) -> list[LaneTable]:
    """Read the timelines of the finished trials in virtual time, each with the head of its row."""
    made = []
    for trial in run.trials:
        path = run.file_of(trial, "timeline", ".json")
        if trial.finished and path.exists():
            head = {key: trial[key] for key in ("algorithm", "seed", "point") if key in trial}
            made.append(LaneTable.of(head | read_json(path)))
    return made


def axis_of(run: Run) -> Axis:
    """Choose the number with the most values at the points in virtual time."""
    best = Axis("", [0.0])
    for key in run.varying:
        values = [point.at.get(key) for point in virtual_points(run)]
        numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        different = sorted(set(numbers)) if len(numbers) == len(values) else []
        if len(different) > len(best.values):
            best = Axis(key, different)
    return best


def variant_of(row: AtPoint, axis: Axis) -> str:
    """Name what a trial or course stands for beside its value on the axis: "dfca-fi batch"."""
    hidden = {axis.key, *(IGNORED_BY_SERVERS if kind_of(row.algorithm).via != "neighbours" else ())}
    changed = [_worded(key, value) for key, value in row.point.items() if key not in hidden]
    return " ".join([row.algorithm, *changed])


def _worded(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    name = key.rpartition(".")[2].replace("_", " ")
    if value == []:
        return f"no {name}"
    return name if value is True else f"not {name}" if value is False else f"{name} {write(value)}"


def variants(rows: Iterable[AtPoint], axis: Axis) -> list[str]:
    """Return the names of all variants, in the order of the rows."""
    return list(dict.fromkeys(variant_of(row, axis) for row in rows))


def rows_of(rows: Iterable[Placed], axis: Axis, value: float | None = None, variant: str | None = None) -> list[Placed]:
    """Choose trials or courses by their value on the axis and by their variant."""
    return [
        row
        for row in rows
        if (value is None or axis.at(row.point) == value) and (variant is None or variant_of(row, axis) == variant)
    ]


def finished(run: Run) -> list[TrialRow]:
    """Return the finished trials in virtual time."""
    return [trial for trial in run.trials if trial.finished and trial.time_s is not None]


def courses(run: Run, metrics: Sequence[EvaluationRow]) -> list[Course]:
    """Shorten the metrics of each trial to its course over virtual time."""
    points = {point.digest if run.swept else "": point for point in run.points}
    trials: dict[tuple[str, int, str], list[EvaluationRow]] = {}
    for row in metrics:
        key = row.key(run.swept)
        if row.time_s is not None and key[2] in points:
            trials.setdefault(key, []).append(row)
    made = []
    for (algorithm, seed, digest), rows in trials.items():
        point = points[digest]
        late, others = _joiners(rows, (point.world or {}).get("late_joiners", ()))
        made.append(
            Course(
                algorithm,
                seed,
                point.at,
                time_s=[round(row.time_s or 0.0, 6) for row in rows],
                score=[None if (score := known_value(row, row.metric)) is None else _short(score) for row in rows],
                megabytes=[_short((traffic_bytes(row) or 0.0) / (point.clients or 1) / 1e6) for row in rows],
                joiners=late,
                others=others,
            )
        )
    return made


def _joiners(
    rows: Sequence[EvaluationRow], joiners: Sequence[JsonObject]
) -> tuple[Sequence[float | None], Sequence[float]]:
    """Return the mean scores of late joiners, once all have joined, and of the others."""
    if not joiners:
        return (), ()
    late = [joiner["client"] for joiner in joiners]
    last = max(joiner["at_s"] for joiner in joiners)
    return (
        [_short(fmean(row.scores[i] for i in late)) if (row.time_s or 0.0) > last else None for row in rows],
        [_short(fmean(score for i, score in enumerate(row.scores) if i not in late)) for row in rows],
    )


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def traffic_to_target(row: TrialRow) -> float | None:
    """Return what all clients had sent and received when the target was first seen.

    A row holds what clients and the server had sent; without a server, what one client sends another receives.
    """
    if row.bytes_to_target is None:
        return None
    return row.bytes_to_target * (1 if kind_of(row.algorithm).via == "server" else 2)
