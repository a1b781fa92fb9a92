"""`scaling`: seconds per round and memory against N, k, P and degree, with fitted exponents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks.child import measure_rounds
from benchmarks.measurements import Row, Skip, Tick, fit
from benchmarks.sizes import Size

AXES = {"N": "clients", "k": "models per client", "P": "floats per model", "degree": "neighbours per client"}
BOUND = 1.05
"""The largest exponent that counts as linear, for N and P."""
HIDDEN_50K = 63
"""MLP 784-63-10: P = 50,095."""


@dataclass(frozen=True)
class ScalingPlan:
    """Per axis the points (x, size); every point is measured `cycles` times with `rounds` rounds, in turn."""

    points: Mapping[str, Sequence[tuple[int, Size]]]
    cycles: int
    rounds: int

    @property
    def count(self) -> int:
        """Count the rows."""
        return sum(len(points) for points in self.points.values())


def make_plan(quick: bool) -> ScalingPlan:
    """Choose the points: N up to 5,000 at P = 50 k and degree 10; the others around 200 clients."""
    base = Size(hidden=HIDDEN_50K, samples=20, clusters=2, clients=200, degree=10)
    clients = (50, 200, 1000) if quick else (50, 100, 200, 500, 1000, 2000, 5000)
    clusters = (1, 4, 10) if quick else (1, 2, 3, 5, 7, 10)
    hidden = (16, 63, 252) if quick else (16, 32, 63, 126, 252, 504, 1008)
    degrees = (2, 10, 50) if quick else (2, 4, 10, 20, 50, 100)
    return ScalingPlan(
        {
            "N": [(n, replace(base, clients=n)) for n in clients],
            "k": [(k, replace(base, clusters=k)) for k in clusters],
            "P": [(size.parameters, size) for size in (replace(base, hidden=h) for h in hidden)],
            "degree": [(d, replace(base, degree=d)) for d in degrees],
        },
        cycles=1 if quick else 3,
        rounds=2 if quick else 3,
    )


def make_record(quick: bool) -> ScalingPlan:
    """Choose the points of `record`: as many clients that keep models as one machine holds."""
    base = Size(inputs=36, hidden=21, samples=20, clusters=2, degree=10)  # P = 997
    clients = (1000, 3000, 10_000) if quick else (10_000, 30_000, 100_000)
    points = {"N": [(n, replace(base, clients=n)) for n in clients]}
    return ScalingPlan(points, cycles=1 if quick else 3, rounds=2 if quick else 3)


def rows(plan: ScalingPlan, tick: Tick) -> Iterator[Row]:
    """Measure an axis in cycles over its points, each in a process of its own; then yield its rows."""
    threads = torch.get_num_threads()
    for axis, points in plan.points.items():
        measured: dict[int, list[dict[str, Any]]] = {x: [] for x, _ in points}
        reasons: dict[int, str] = {}
        for cycle in range(plan.cycles):
            for x, size in points:
                tick(f"{axis} = {x:,}, {cycle + 1} of {plan.cycles}")
                try:
                    measured[x].append(measure_rounds(size, plan.rounds, threads))
                except Skip as reason:
                    reasons[x] = str(reason)
        for x, size in points:
            about = f"N = {size.clients:,}, k = {size.clusters}, P = {size.parameters:,}, degree {size.degree}"
            details = {"axis": axis, "x": x, "world": asdict(size)}
            if not measured[x]:
                yield Row(f"{axis} = {x:,}", about, details=details, skipped=reasons[x])
                continue
            seconds = [value for one in measured[x] for value in one["seconds"]]
            phases = [phase for one in measured[x] for phase in one["phases"]]
            details["memory_bytes"] = [one["memory"] for one in measured[x]]
            details["phases"] = {name: median(phase[name] for phase in phases) for name in phases[0]}
            yield Row(f"{axis} = {x:,}", about, {"round": seconds}, details=details)


def fits(measured: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fit the exponents of time and memory per axis, from rows as JSON holds them."""
    fits: dict[str, dict[str, Any]] = {}
    for axis in AXES:
        mine = [row for row in measured if row["details"].get("axis") == axis and row["skipped"] is None]
        x = [row["details"]["x"] for row in mine]
        time = fit(x, [median(row["values"]["round"]) for row in mine])
        memory = fit(x, [median(row["details"]["memory_bytes"]) for row in mine])
        if time is not None:
            fits[axis] = {"time": time._asdict(), "memory": None if memory is None else memory._asdict()}
    return fits
