"""Worlds, runs and comparisons of the event simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from drifts import drift_setting
from toy import make_toy_setting

from dfca import algorithms
from dfca.core.rules.election import ElectionOptions
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import Lineage
from dfca.sim.events.books import EventResult
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import (
    Churn,
    Compute,
    Devices,
    Faults,
    Link,
    World,
)
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting

TIMED_LINK = Link(latency_s=0.3, spread=0.8, bandwidth_bytes_s=2000.0)


STRAGGLERS = Compute(1.0, devices=(Devices(share=0.34, slowdown=10.0),))


ROUGH = World(
    Compute(1.0, "lognormal", devices=(Devices(0.34, 3.0),)), TIMED_LINK, Faults(0.1, 0.1, 0.1), Churn(0.02, 10.0)
)


def run(setting: Setting, world: World | None = None, **options: Any) -> EventResult:
    return EventSimulation(setting, world, EventOptions(max_events=200_000, **options)).run()


def assert_same(setting: Setting, result: EventResult) -> None:
    simulation = Simulation(setting)
    rows = [row for row in (simulation.step() for _ in range(setting.rounds)) if row is not None]
    assert result.assignments.tolist() == simulation.assignments.tolist()
    expected = simulation.banks.clone()
    if setting.algorithm.start == "elected":  # here a client may hold fewer models; its first fills the other places
        filled = (result.banks == result.banks[:1]).all(dim=2)
        expected[filled] = expected[:1].expand_as(expected)[filled]
    torch.testing.assert_close(result.banks, expected, rtol=1e-9, atol=1e-11)
    assert result.metrics[-1]["accuracy"] == pytest.approx(rows[-1]["accuracy"], abs=1e-12)


def assert_identical(one: EventResult, other: EventResult) -> None:
    assert torch.equal(one.banks, other.banks)
    assert torch.equal(one.assignments, other.assignments)
    assert [without_seconds(row) for row in one.metrics] == [without_seconds(row) for row in other.metrics]
    names = ("rounds", "time_s", "idle_shares", "staleness", "records", "rejected", "trace")
    assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def through_disk(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Do to a state what a checkpoint does to it."""
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts, allow_nan=False))


QUICK = ElectionOptions(warmup_steps=5, patience=1)


def quick(name: str = "dfca-fi", **changes: Any) -> Setting:
    """Make a toy setting whose election is short."""
    return make_toy_setting(replace(algorithms.get(name), election=QUICK), **changes)


def drifting(**changes: Any) -> Setting:
    """Make a setting with a drift, and elections that are shorter than usual."""
    setting = drift_setting(evaluate_every=16, personal_steps=0, **changes)  # virtual time has no last step yet
    return replace(setting, algorithm=replace(setting.algorithm, election=ElectionOptions(warmup_steps=20)))


def lineages(simulation: EventSimulation) -> set[Lineage]:
    """List the elections that the clients' models come from."""
    return {peer.lineage for peer in simulation.host.peers if isinstance(peer, Peer)}
