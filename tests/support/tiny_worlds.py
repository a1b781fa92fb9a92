"""A run in virtual time of a second, and a sweep of it."""

from __future__ import annotations

from typing import Any

from dfca.experiment.sweep import Sweep

TINY: dict[str, Any] = {
    "clients": 6,
    "clusters": 2,
    "rounds": 6,
    "algorithms": ["dfca-gi"],
    "seeds": [0],
    "data": {"name": "digits", "samples_per_client": 20, "test_samples_per_client": 10},
    "model": {"name": "mlp", "hidden": 4},
    "local": {"steps": 2, "learning_rate": 0.5},
    "topology": {"name": "erdos-renyi", "p": 0.8},
    "evaluation": {"samples": 20},
    "world": {
        "trace": True,
        "compute": {"step_s": 0.5, "kind": "lognormal", "slowdown": 5},
        "link": {"latency_s": 0.1, "spread": 0.5, "bandwidth_bytes_s": 2e4},
        "faults": {"loss": 0.05},
        "late_joiners": [{"client": 2, "at_s": 3.0}],
    },
    "clock": {"until_s": 8.0, "evaluate_every_s": 1.0, "timeout_s": 2.0, "target_accuracy": 0.12},
}


SWEEP = Sweep.of(
    {
        "grid": {"world.compute.slowdown": [1, 5]},
        "points": [
            {"mixing.aggregation": "sequential"},
            {"mixing.aggregation": "batch", "algorithms": ["dfca-gi", "ifca"]},
        ],
    }
)
