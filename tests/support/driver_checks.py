"""Compare the synchronous simulator with the clients in lockstep."""

from __future__ import annotations

import torch

from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.testing import lockstep, stack


def run(setting: Setting) -> Simulation:
    simulation = Simulation(setting)
    while not simulation.done:
        simulation.step()
    return simulation


def assert_same(setting: Setting) -> None:
    simulation, states = run(setting), lockstep(setting)
    assert simulation.assignments.tolist() == [-1 if s.assignment is None else s.assignment for s in states]
    torch.testing.assert_close(
        simulation.banks.expand(-1, setting.clients, -1), stack(states), rtol=1e-9, atol=1e-11
    )  # fmt: skip
