"""The vectorised simulator and the sans-I/O clients are the same algorithm: same assignments, same models."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import combinations

import networkx as nx
import pytest
import torch
from driver_checks import assert_same, run
from torch import nn
from toy import make_toy_model, make_toy_setting, make_toy_split, pairwise, quick

import dfca
from dfca.algorithms import ALGORITHMS
from dfca.core.learning.local import LocalOptions
from dfca.sim.rounds.simulation import Simulation
from dfca.testing import lockstep, make_clients

BATCHES = LocalOptions(steps=3, learning_rate=0.2, batch_size=5, momentum=0.4, weight_decay=0.01)
UNEVEN = [3, 12, 7, 5, 12, 9]
GRAPHS = {"ring": nx.cycle_graph(6), "disconnected": nx.disjoint_union(nx.path_graph(3), nx.empty_graph(3))}
AXES = {
    "algorithm": list(ALGORITHMS),
    "engine": ["loop", "stacked", "threads"],
    "clusters": [2, 1, 3],
    "graph": list(GRAPHS),
    "weights": ["uniform", "metropolis"],
    "aggregation": ["batch", "sequential"],
    "participation": [1.0, 0.5],
    "batches": [False, True],
    "uneven": [False, True],
    "activation": ["ReLU", "Tanh"],  # written out, and by torch's own gradients
}


@pytest.mark.parametrize("row", pairwise(AXES), ids=lambda row: "-".join(str(value) for value in row.values()))
def test_rounds_equal_lockstep(row: dict) -> None:
    changes = {name: row[name] for name in ("clusters", "weights", "aggregation", "participation")}
    if row["batches"]:
        changes["local"] = BATCHES
    if row["uneven"]:  # only equal numbers of samples stack
        changes["split"] = make_toy_split(samples=UNEVEN)
    changes["make_model"] = partial(make_toy_model, getattr(nn, row["activation"]))
    changes["engine"] = "auto" if row["uneven"] and row["engine"] == "stacked" else row["engine"]
    assert_same(make_toy_setting(quick(row["algorithm"]), graph=GRAPHS[row["graph"]], **changes))


@pytest.mark.parametrize("algorithm", ["dfca-auto", "ifca", "fedspd", "dfedavgm"])
def test_one_client_alone(algorithm: str) -> None:
    alone = {"split": make_toy_split(clients=1, clusters=1), "graph": nx.empty_graph(1), "clusters": 1}
    assert_same(make_toy_setting(quick(algorithm), **alone))


def test_pairwise_rows_hold_every_pair_and_are_few() -> None:
    rows = pairwise(AXES)
    for a, b in combinations(AXES, 2):
        assert {(row[a], row[b]) for row in rows} == {(x, y) for x in AXES[a] for y in AXES[b]}
    assert len(rows) < 4 * len(ALGORITHMS)


def norm_and_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3))


@pytest.mark.parametrize("algorithm", ["dfca-li", "ifca", "dfedavgm"])
def test_batch_norm_and_dropout_too(algorithm: str) -> None:
    assert_same(make_toy_setting(algorithm, make_model=norm_and_dropout))


@pytest.mark.parametrize(
    ("algorithm", "share"),
    [
        ("dfca-gi", "trained"),
        ("dfca-li", "all"),
        ("dfca-li", "relay"),
        ("ifca", "trained"),
        ("dfca-auto", "relay"),
        ("dfedavgm", "trained"),
        ("fedspd", "trained"),
        ("fedspd", "all"),
    ],
)
def test_a_client_that_diverges_is_the_same_in_both(algorithm: str, share: str) -> None:
    split = make_toy_split()
    split.train.of(2)[0].mul_(1e200)
    setting = make_toy_setting(quick(algorithm), split=split, share=share)
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
        trained = [c.start_round(c.start())[0].bank[j] for c in make_clients(alone) if c.id in members]
        torch.testing.assert_close(simulation.banks[j, 0], torch.stack(trained).mean(dim=0))
        torch.testing.assert_close(states[0].bank[j], torch.stack(trained).mean(dim=0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stop_and_resume_is_bit_identical(algorithm: str) -> None:
    changes = {"participation": 0.7, "aggregation": "sequential", "dtype": torch.float32, "rounds": 5}
    setting = make_toy_setting(quick(algorithm), **changes)
    whole, stored = Simulation(setting), {}
    rows = []
    for stop in range(1, 6):
        rows.append(whole.step())
        tensors, facts = whole.state()
        stored[stop] = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts))
    for stop in (2, 3):  # an evaluated round or not
        second = Simulation(setting)
        second.restore(*stored[stop])
        later = [second.step() for _ in range(stop, 5)]
        assert torch.equal(second.banks, whole.banks)
        assert [without_seconds(row) for row in later] == [without_seconds(row) for row in rows[stop:]]


def without_seconds(row: dict | None) -> dict | None:
    return None if row is None else {key: value for key, value in row.items() if key != "seconds"}


def test_threads_do_not_change_the_numbers() -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            results.append(run(make_toy_setting("dfca-li", dtype=torch.float32, rounds=2)).banks.clone())
        finally:
            torch.set_num_threads(1)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_without_a_newer_field_is_continued() -> None:
    first = Simulation(make_toy_setting())
    first.step()
    tensors, facts = first.state()
    old = {name: value for name, value in facts.items() if name not in ("high_losses", "highest_loss")}
    second = Simulation(make_toy_setting())
    second.restore(tensors, old)
    assert (second.round, second.evaluator.high_losses, second.evaluator.highest_loss) == (1, set(), 0.0)


@pytest.mark.parametrize(("rate", "steps"), [(1e30, 1), (1e30, 5), (1e150, 1)])
@pytest.mark.parametrize("algorithm", ["fedspd", "dfca-gi"])
def test_every_engine_finds_the_same_clients_diverged(algorithm: str, rate: float, steps: int) -> None:
    diverged = []
    for engine in ("loop", "stacked", "threads"):
        setting = make_toy_setting(
            algorithm,
            engine=engine,
            make_model=lambda: dfca.mlp((4,), 3, 8),
            local=LocalOptions(steps, rate),
            rounds=10,
            evaluate_every=10,
        )
        simulation = run(setting)
        assert torch.isfinite(simulation.banks).all()
        diverged.append(sorted(simulation.diverged))
    assert diverged[0] == diverged[1] == diverged[2]


def test_divergence_that_stays_finite_is_noted_and_survives_a_restart() -> None:
    options = {"local": LocalOptions(steps=2, learning_rate=1e11), "rounds": 2, "evaluate_every": 1}
    # A unit of ReLU that is dead answers zero, and the loss stays low.
    setting = make_toy_setting("dfca-gi", make_model=partial(make_toy_model, nn.Tanh), **options)
    simulation = Simulation(setting)
    assert not any("rose to" in note for note in simulation.notes)
    row = simulation.step()
    (note,) = [note for note in simulation.notes if "rose to" in note]
    assert row["train_loss"] > 10 * math.log(3)
    assert note.startswith(f"the training loss of {len(simulation.evaluator.high_losses)} of 6 clients (first: ")
    assert note.endswith("above 11.0, 10 times that of guessing; try a smaller local.learning_rate")
    assert f" rose to {simulation.evaluator.highest_loss:.2g}, " in note
    resumed = Simulation(setting)
    tensors, facts = simulation.state()
    resumed.restore(tensors, json.loads(json.dumps(facts)))
    assert resumed.notes == simulation.notes
    calm = run(make_toy_setting("dfca-gi"))
    assert calm.notes == ()


def test_a_loss_that_is_not_finite_is_noted_too() -> None:
    simulation = Simulation(make_toy_setting("dfca-gi", rounds=1, evaluate_every=1))
    simulation.banks[:, 4] = float("nan")
    simulation.evaluator.score(simulation.banks, simulation.assignments)
    assert any("the training loss of 1 of 6 clients (first: 4) rose to inf" in note for note in simulation.notes)
