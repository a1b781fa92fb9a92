"""Settings and runs with a personal last step."""

from __future__ import annotations

from typing import Any

from torch import nn

from dfca.sim.rounds.simulation import Simulation

UNEVEN = [3, 12, 7, 5, 12, 9]


def run(setting: Any) -> tuple[Simulation, dict[str, Any]]:
    simulation, row = Simulation(setting), None
    while not simulation.done:
        row = simulation.step()
    assert row is not None
    return simulation, row


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
