"""A setting whose distribution changes while it runs."""

from __future__ import annotations

import networkx as nx

import dfca
from dfca.core.learning.local import LocalOptions
from dfca.sim.setting import Setting

OPTIONS = dfca.DataOptions(samples_per_client=60, drift_share=0.34, drift_angle=90.0)


def drift_setting(algorithm: str = "dfca-auto", rounds: int = 16, **changes) -> Setting:
    before = dfca.make_split(OPTIONS, 12, 2, seed=0)
    after = dfca.make_split(OPTIONS, 12, 2, seed=0, drifted=True)
    fields = {
        "split": before,
        "drift": (8, after),
        "graph": nx.connected_watts_strogatz_graph(12, 4, 0.3, seed=0),
        "make_model": lambda: dfca.mlp((1, 8, 8), 10, 16),
        "algorithm": dfca.ALGORITHMS[algorithm](),
        "clusters": 2,
        "rounds": rounds,
        "local": LocalOptions(learning_rate=0.5),
        "evaluate_every": 4,
    }
    return Setting(**{**fields, **changes})
