"""A world whose election opens more clusters than there are."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
from toy import make_toy_setting, make_toy_split

from dfca import algorithms
from dfca.core.learning.local import LocalOptions
from dfca.core.rules.merging import (
    MergeOptions,
)
from dfca.sim.setting import Setting


def make_world(**changes: object) -> Setting:
    """Twelve clients, two rules, four centres: two are one too many each."""
    options = MergeOptions(opens=4, first=6, every=2, steps=10)
    algorithm = replace(algorithms.get("dfca-auto", warmup_steps=5, momentum=0.5), merging=options, revives=False)
    fields = {
        "split": make_toy_split(12, samples=60),
        "graph": nx.complete_graph(12),
        "rounds": 14,
        "seed": 8,
        "clusters": None,
        "local": LocalOptions(steps=3, learning_rate=0.5),
        "evaluate_every": 5,
    }
    return make_toy_setting(algorithm, **{**fields, **changes})
