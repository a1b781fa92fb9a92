"""Simulators: many clients in one process."""

from dfca.sim.result import Metrics, Result, simulate
from dfca.sim.rounds import Simulation
from dfca.sim.setting import Setting

__all__ = ["Metrics", "Result", "Setting", "Simulation", "simulate"]
