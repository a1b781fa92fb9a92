"""Measuring in turn, and what is made of the times: medians, ratios, exponents."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

Tick = Callable[[str], None]
"""Told what is being measured now, once per measurement."""


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


def spread(values: Sequence[float]) -> Spread:
    """Summarise repeats."""
    return Spread(median(values), min(values), max(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Divide repeat by repeat, since neighbours in time saw the same machine, and summarise."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


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
