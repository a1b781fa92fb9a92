"""Measure subjects in turn, and summarise the times: medians, ratios, exponents, and rows of a table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

Tick = Callable[[str], None]
"""Called before each measurement with what is measured."""


class Skip(Exception):
    """Something cannot be measured here; the message says why."""


class Spread(NamedTuple):
    """A median with the lowest and the highest value."""

    median: float
    low: float
    high: float


class Fit(NamedTuple):
    """y = factor x^exponent by least squares in log-log; `last` is the slope between the two largest x."""

    exponent: float
    factor: float
    last: float


@dataclass(frozen=True)
class Row:
    """One comparison, as a part of the bench yields it.

    values: per subject what each repeat measured, in `unit`; the repeats of all subjects were taken in turn.
    of, to: the subjects that are divided, repeat by repeat. most, least: what the ratio should be, where that was set
    beforehand. details: what else was found. skipped: why there are no values.
    """

    name: str
    about: str
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unit: Literal["s", "bytes"] = "s"
    of: str | None = None
    to: str | None = None
    most: float | None = None
    least: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    skipped: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON holds it, with its ratio."""
        row = asdict(self)
        row["ratio"] = None
        if self.of is not None and self.to is not None and self.skipped is None:
            measured = ratio(self.values[self.of], self.values[self.to])
            row["ratio"] = measured._asdict()
            row["met"] = met(measured.median, self.most, self.least)
        return row


def in_turn(
    subjects: Mapping[str, Callable[[], Any]], repeats: int, tick: Tick, warmups: int = 1
) -> dict[str, list[float]]:
    """Time every subject `repeats` times, one after the other in each repeat; warm-ups are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for repeat in range(-warmups, repeats):
        for name, work in subjects.items():
            tick(f"{name}, {'warm-up' if repeat < 0 else f'{repeat + 1} of {repeats}'}")
            begin = time.perf_counter()
            work()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def prefixed(tick: Tick, name: str) -> Tick:
    """Return a tick that puts a name before everything."""
    return lambda what: tick(f"{name}: {what}")


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Divide repeat by repeat, since repeats of one moment saw the same machine, and summarise."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Spread(median(ratios), min(ratios), max(ratios))


def divided(seconds: Mapping[str, Sequence[float]], by: int) -> dict[str, list[float]]:
    """Divide the times of every subject, such as by the number of clients."""
    return {subject: [value / by for value in values] for subject, values in seconds.items()}


def met(value: float, most: float | None, least: float | None) -> bool | None:
    """Return whether a ratio is within its bounds; None where there are none."""
    if most is None and least is None:
        return None
    return (most is None or value <= most) and (least is None or value >= least)


def fit(x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Fit an exponent; None with fewer than two points, or a value that has no logarithm."""
    if len(x) < 2 or min(*x, *y) <= 0:
        return None
    points = sorted((math.log(a), math.log(b)) for a, b in zip(x, y, strict=True))
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    variance = sum((a - mean_x) ** 2 for a, _ in points)
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in points) / variance
    (before_x, before_y), (last_x, last_y) = points[-2:]
    return Fit(exponent, math.exp(mean_y - exponent * mean_x), (last_y - before_y) / (last_x - before_x))
