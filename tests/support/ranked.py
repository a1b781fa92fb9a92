"""What every rank of `test_distributed` runs; the first one saves the banks, rows and errors."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from recipes import RECIPES, cropping_cnn, make_image_split
from safetensors.torch import save_file
from toy import make_toy_setting, make_toy_split, quick

from dfca.algorithms import ALGORITHMS
from dfca.base.errors import ConfigError
from dfca.core.learning.local import LocalOptions
from dfca.core.method import MergeOptions
from dfca.sim.rounds.ranks import Ranks, joined, my_rank
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.sim.shards import Shards, keep

ROUNDS = 3
STOP = 2
ELSEWHERE = ("dfca-gi", "dfca-li", "dfca-fi", "fedavg", "pens", "dac", "dpfl", "psfl")
"""Algorithms that other worlds have, that differ from one of them by the number of models alone, or are refused."""
RESUMED = ("dfca-auto", "ifca", "relay", "drift", "fedem", "merging")
"""Worlds that also continue, after round STOP, from the state of one process."""


def worlds() -> dict[str, Setting]:
    """List the settings: every kind of algorithm, and every way in which models travel."""
    three = {"split": make_toy_split(clients=9, clusters=3, samples=10), "graph": nx.path_graph(9), "clusters": 3}
    torn = nx.disjoint_union(nx.path_graph(3), nx.empty_graph(3))
    drift = (1, make_toy_split(clusters=3, seed=0))
    batches = LocalOptions(steps=3, learning_rate=0.2, batch_size=5, momentum=0.4)
    changes: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ALGORITHMS if name not in ELSEWHERE}
    changes |= {
        "relay": ("dfca-li", {"share": "relay", **three}),
        "relay, half of the clients": ("dfca-li", {"share": "relay", "participation": 0.6, **three}),
        "all models": ("dfca-gi", {"share": "all", **three}),
        "sequential": ("dfca-li", {"aggregation": "sequential", **three}),
        "metropolis": ("dfca-li", {"weights": "metropolis", **three}),
        "half of the clients": ("dfca-fi", {"participation": 0.5}),
        "uneven": ("dfca-gi", {"split": make_toy_split(samples=[3, 12, 7, 5, 12, 9]), "local": batches}),
        "components": ("dfca-auto", {"graph": torn}),
        "k unknown": ("dfca-auto", {"clusters": None, "split": make_toy_split(clients=12, samples=40), "rounds": 3}),
        "drift": ("dfca-auto", {"drift": drift, "split": make_toy_split(clusters=3)}),
        "merging": ("dfca-auto", {"clusters": None, "split": make_toy_split(clients=12, samples=30)}),
        "merging in parts": (
            "dfca-auto",
            {"clusters": None, "split": make_toy_split(samples=[3, 12, 7, 5, 12, 9]), "graph": torn},
        ),
        "server, uneven": ("ifca", {"split": make_toy_split(samples=[3, 12, 7, 5, 12, 9]), "participation": 0.7}),
        "disk": ("dfca-li", {"bank": "disk", **three}),
        "crops": (
            "dfca-gi",
            {"split": make_image_split(6, [12, 7, 5, 12, 9, 5]), "local": RECIPES["crops"], "make_model": cropping_cnn},
        ),
    }
    settings = {name: make_toy_setting(quick(of), **{"rounds": ROUNDS, **some}) for name, (of, some) in changes.items()}
    merging = MergeOptions(opens=4, first=1, every=1, steps=3)
    for name in ("merging", "merging in parts"):
        settings[name] = replace(settings[name], algorithm=replace(settings[name].algorithm, merging=merging))
    return settings


def play(
    setting: Setting, shards: Shards | None = None, resume: bool = False
) -> tuple[torch.Tensor | None, list[dict[str, Any]]]:
    """Run a setting, or the rounds after STOP; returns the whole bank on the first rank, and the metrics."""
    state: tuple[Any, Any] = (None, None)
    if resume and my_rank() == 0:
        alone = Simulation(setting)
        for _ in range(STOP):
            alone.step()
        state = alone.state()
    if shards is not None:
        kept = keep(setting.split, shards.members)
        setting = type(setting)(**{**vars(setting), "split": kept})
    simulation, rows = Simulation(setting, shards), []
    if resume:
        simulation.restore(*state)
    while not simulation.done:
        if row := simulation.step():
            rows.append({key: value for key, value in row.items() if key != "seconds"})
    pieces = list(simulation.rows())
    return torch.cat(pieces).view(simulation.bank_shape()) if pieces else None, rows


def main(out: Path) -> None:
    kinds: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {"banks": ({}, {}), "resumed": ({}, {})}
    refused = ""
    with joined("cpu"):
        for kind, (banks, rows) in kinds.items():
            for name in worlds() if kind == "banks" else RESUMED:
                setting = worlds()[name]
                bank, rows[name] = play(setting, Ranks(setting.clients), resume=kind == "resumed")
                if bank is not None:
                    banks[name] = bank
        try:
            Ranks(2)
        except ConfigError as error:
            refused = str(error)
    if my_rank() == 0:
        for kind, (banks, rows) in kinds.items():
            save_file(banks, out / f"{kind}.safetensors")
            (out / f"{'rows' if kind == 'banks' else kind}.json").write_text(json.dumps(rows))
        (out / "refused.json").write_text(json.dumps(refused))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
