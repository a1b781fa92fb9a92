"""The personal last step among peers: virtual time and nodes in memory pick and score what rounds do."""

from __future__ import annotations

from itertools import product
from typing import Any

import networkx as nx
import pytest
import torch
from conftest import make_toy_setting, make_toy_split, quick
from test_node import make_nodes, network_of, run_all
from test_personal import UNEVEN, dense
from test_personal import run as run_rounds

from dfca import algorithms
from dfca.algorithms import ALGORITHMS
from dfca.node.memory import VirtualTimeLoop
from dfca.node.worker import Worker
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import World
from dfca.sim.setting import Setting

HAVE_IT = [name for name in ALGORITHMS if algorithms.get(name).peers is None and algorithms.get(name).mixture is None]


def run(setting: Setting, world: World | None = None, **options: Any) -> EventSimulation:
    simulation = EventSimulation(setting, world, EventOptions(max_events=200_000, **options))
    simulation.run()
    return simulation


def picking(algorithm: str, **changes: Any) -> Setting:
    return make_toy_setting(quick(algorithm), rounds=5, personal_steps="auto", make_model=dense, **changes)


SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {},
    "sequential": {"aggregation": "sequential"},
    "half of the clients": {"participation": 0.5},
    "uneven, disconnected": {
        "split": make_toy_split(samples=UNEVEN),
        "graph": nx.disjoint_union(nx.path_graph(4), nx.path_graph(2)),
    },
}


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *((each, "batch") for each in HAVE_IT),
        *product(["dfca-fi", "ifca"], list(SETTINGS)[1:]),
    ],
)
def test_virtual_time_picks_and_scores_as_rounds_do(algorithm: str, name: str) -> None:
    setting = picking(algorithm, **SETTINGS[name])
    by_rounds, row = run_rounds(setting)
    result = run(setting).result()
    last = result.metrics[-1]
    assert last["personal_steps_by_client"] == row["personal_steps_by_client"]
    assert result.assignments.tolist() == by_rounds.assignments.tolist()
    torch.testing.assert_close(result.banks, by_rounds.banks, rtol=1e-9, atol=1e-11)
    for key in ("accuracy", "accuracy_before_personal"):
        assert last[key] == pytest.approx(row[key], abs=1e-12)
        assert last[f"{key}_by_client"] == pytest.approx(row[f"{key}_by_client"], abs=1e-12)


@pytest.mark.parametrize("algorithm", HAVE_IT)
def test_nodes_in_memory_pick_and_score_as_rounds_do(algorithm: str) -> None:
    setting = picking(algorithm)
    by_rounds, row = run_rounds(setting)
    nodes = make_nodes(setting, network_of(setting))
    run_all(nodes, VirtualTimeLoop())
    assert any(row["personal_steps_by_client"])
    for i, steps in enumerate(row["personal_steps_by_client"]):
        node = nodes[i]
        assert node.machine.personal_steps == steps
        bank = node.machine.bank
        expected = by_rounds.banks[:, 0 if algorithm in ("ifca", "fedavg", "oracle") else i]
        torch.testing.assert_close(bank, expected[: len(bank)], rtol=1e-9, atol=1e-11)
        worker = node._work
        assert isinstance(worker, Worker)
        assert (worker.personal is None) == (steps == 0)
        if worker.personal is not None:
            score = by_rounds.flat.to_module(worker.personal).eval()
            x, y = setting.split.test.of(i)
            accuracy = float((score(x.double()).argmax(dim=1) == y).double().mean())
            assert accuracy == pytest.approx(row["accuracy_by_client"][i], abs=1e-12)
