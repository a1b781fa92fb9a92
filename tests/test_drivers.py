"""The vectorised simulator and the sans-I/O clients are the same algorithm: same assignments, same models."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from conftest import make_toy_setting, make_toy_split
from torch import nn

from dfca.algorithms import ALGORITHMS
from dfca.core.local import LocalOptions
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


WORLDS = {
    "plain": {},
    "metropolis": {"weights": "metropolis"},
    "sequential": {"aggregation": "sequential"},
    "sequential metropolis": {"aggregation": "sequential", "weights": "metropolis"},
    "half of the clients": {"participation": 0.5},
    "loop": {"engine": "loop"},
    "stacked": {"engine": "stacked"},
    "threads": {"engine": "threads"},
    "mini-batches": {"local": LocalOptions(steps=3, learning_rate=0.2, batch_size=5, momentum=0.4, weight_decay=0.01)},
    "uneven": {"split": make_toy_split(samples=[3, 12, 7, 5, 12, 9])},
    "one cluster": {"clusters": 1},
    "three clusters": {"clusters": 3},
    "disconnected": {"graph": nx.disjoint_union(nx.path_graph(3), nx.empty_graph(3))},
    "one client": {
        "split": make_toy_split(clients=1, clusters=1),
        "graph": nx.empty_graph(1),
        "clusters": 1,
    },
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounds_equal_lockstep(algorithm: str, world: str) -> None:
    assert_same(make_toy_setting(algorithm, **WORLDS[world]))


def norm_and_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3))


@pytest.mark.parametrize("algorithm", ["dfca-li", "ifca", "dfedavgm"])
def test_batch_norm_and_dropout_too(algorithm: str) -> None:
    assert_same(make_toy_setting(algorithm, make_model=norm_and_dropout))


@pytest.mark.parametrize("share", ["trained", "all", "relay"])
@pytest.mark.parametrize("algorithm", ["dfca-gi", "dfca-li", "ifca", "dfca", "dfedavgm", "fedspd"])
def test_a_client_that_diverges_is_the_same_in_both(algorithm: str, share: str) -> None:
    split = make_toy_split()
    split.train.of(2)[0].mul_(1e200)
    setting = make_toy_setting(algorithm, split=split, share=share, rounds=6)
    assert_same(setting)
    assert torch.isfinite(run(setting).banks).all()


def test_ifca_is_dfca_on_a_complete_graph_where_an_own_copy_counts_only_if_trained() -> None:
    # lockstep plays the server that way; this pins the closed form: the mean of those that picked the cluster.
    setting = make_toy_setting("ifca", rounds=1)
    simulation = Simulation(setting)
    start = simulation.banks.clone()
    simulation.step()
    states = lockstep(setting)
    for j in range(2):
        members = [i for i in range(setting.clients) if int(simulation.assignments[i]) == j]
        if not members:
            assert torch.equal(simulation.banks[j, 0], start[j, 0])
            continue
        alone = make_toy_setting("ifca", rounds=1, graph=nx.empty_graph(6))
        from dfca.testing import make_clients

        trained = [c.start_round(c.start())[0].bank[j] for c in make_clients(alone) if c.id in members]
        torch.testing.assert_close(simulation.banks[j, 0], torch.stack(trained).mean(dim=0))
        torch.testing.assert_close(states[0].bank[j], torch.stack(trained).mean(dim=0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stop_and_resume_is_bit_identical(algorithm: str) -> None:
    changes = {"participation": 0.7, "aggregation": "sequential", "dtype": torch.float32, "rounds": 6}
    whole = Simulation(make_toy_setting(algorithm, **changes))
    rows = [whole.step() for _ in range(6)]
    for stop in range(1, 6):
        first = Simulation(make_toy_setting(algorithm, **changes))
        for _ in range(stop):
            first.step()
        tensors, facts = first.state()
        second = Simulation(make_toy_setting(algorithm, **changes))
        second.restore({name: tensor.clone() for name, tensor in tensors.items()}, facts)
        later = [second.step() for _ in range(stop, 6)]
        assert torch.equal(second.banks, whole.banks)
        assert [without_seconds(row) for row in later] == [without_seconds(row) for row in rows[stop:]]


def without_seconds(row: dict | None) -> dict | None:
    return None if row is None else {key: value for key, value in row.items() if key != "seconds"}


def test_threads_do_not_change_the_numbers() -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            results.append(run(make_toy_setting("dfca-li", dtype=torch.float32, rounds=3)).banks.clone())
        finally:
            torch.set_num_threads(1)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
