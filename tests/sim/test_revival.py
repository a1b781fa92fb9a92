from __future__ import annotations

from dataclasses import replace

import torch
from drifts import OPTIONS, drift_setting

import dfca
from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.revival import PAUSE, ROUNDS
from dfca.sim.rounds.revival import Revival
from dfca.sim.rounds.simulation import Simulation


def finish(simulation: Simulation) -> list[dict]:
    rows = []
    while not simulation.done:
        row = simulation.step()
        if row is not None:
            rows.append(row)
    return rows


def test_a_new_distribution_gets_a_model() -> None:
    simulation = Simulation(drift_setting())
    rows = finish(simulation)
    assert [row["models"] for row in rows] == [2, 2, 3, 3]
    assert rows[-1]["cluster_accuracy"] == 1.0
    plain = finish(Simulation(drift_setting("dfca-fi")))
    assert plain[-1]["models"] == 2
    assert rows[-1]["accuracy"] > plain[-1]["accuracy"]


def test_drift_and_revival_survive_a_restart_bit_by_bit() -> None:
    whole, stored, expected = Simulation(drift_setting()), {}, []
    while not whole.done:
        expected += [row] if (row := whole.step()) else []
        tensors, facts = whole.state()
        stored[whole.round] = {name: tensor.clone() for name, tensor in tensors.items()}, facts
    for stop in (7, 8, 9, 12):  # before the drift, at it, after it, after the election
        second = Simulation(drift_setting())
        second.restore(*stored[stop])
        rows = finish(second)
        assert torch.equal(second.banks, whole.banks)
        for mine, theirs in zip(rows, expected[-len(rows) :], strict=True):
            assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}


def test_a_lost_cluster_is_opened_again_for_clients_that_need_it() -> None:
    split = dfca.make_split(dfca.DataOptions(samples_per_client=60), 12, 2, seed=0)
    # With momentum one model has learned both clusters by heart before the loss of the other is noticed.
    setting = drift_setting(split=split, drift=None, rounds=12, personal_steps=0)
    simulation = Simulation(replace(setting, algorithm=dfca.ALGORITHMS["dfca-auto"](momentum=0.0)))
    # A start that lost a cluster: model 1 is useless, model 0 is cluster 0's.
    simulation.banks[1] = simulation.banks[0] + 10.0
    rows = finish(simulation)
    assert rows[-1]["cluster_accuracy"] == 1.0
    assert rows[-1]["models"] == 2


def test_nothing_is_called_while_all_is_well() -> None:
    split = dfca.make_split(dfca.DataOptions(samples_per_client=60), 12, 2, seed=0)
    simulation = Simulation(drift_setting(split=split, drift=None, rounds=12))
    start = simulation.traffic.start_messages
    rows = finish(simulation)
    assert simulation.traffic.start_messages == start
    assert rows[-1]["models"] == 2


def test_alarms_by_hand() -> None:
    revival, options = Revival(clients=4, clusters=2), ElectionOptions()
    everybody = torch.tensor([0, 0, 1, 1])
    low, high = torch.full((4,), 1.0).double(), torch.tensor([1.0, 1.0, 1.6, 1.7]).double()
    revival.watch(low, range(4))
    for _ in range(ROUNDS - 1):
        revival.watch(high, range(4))
    assert not revival.calls_election(everybody, options, 20, 1000)
    revival.watch(high, range(4))
    assert revival.alarm.tolist() == [0, 0, ROUNDS, ROUNDS]
    assert revival.calls_election(everybody, options, 20, 1000)
    revival.close(20, clusters=3, opened=[2])
    assert len(revival.idle) == 3
    for _ in range(ROUNDS):
        revival.watch(high, range(4))
    assert revival.alarm.tolist() == [0, 0, 0, 0]  # what is low was learned anew


def test_a_cluster_that_nobody_trains_is_given_up_once() -> None:
    revival, options = Revival(clients=3, clusters=2), ElectionOptions()
    nobody_in_1 = torch.tensor([0, 0, 0])
    calls = [revival.calls_election(nobody_in_1, options, now, 1000) for now in range(ROUNDS)]
    assert calls == [False] * (ROUNDS - 1) + [True]
    revival.close(ROUNDS, clusters=2, opened=[])
    assert not any(revival.calls_election(nobody_in_1, options, now, 1000) for now in range(ROUNDS, ROUNDS + 3 * PAUSE))


def test_elections_that_open_nothing_become_rarer() -> None:
    revival = Revival(clients=3, clusters=2)
    revival.close(10, clusters=2, opened=[])
    revival.close(30, clusters=2, opened=[])
    assert int(revival.pause) == 4 * PAUSE
    revival.close(70, clusters=3, opened=[2])
    assert int(revival.pause) == PAUSE


def test_the_drifted_split_moves_some_clients_and_leaves_the_others() -> None:
    before = dfca.make_split(OPTIONS, 12, 2, seed=0)
    after = dfca.make_split(OPTIONS, 12, 2, seed=0, drifted=True)
    moved = (after.clusters == 2).nonzero()[:, 0].tolist()
    assert len(moved) == 4
    for client in range(12):
        same = torch.equal(before.train.of(client)[0], after.train.of(client)[0])
        assert same == (client not in moved)
        if client in moved:
            turns = 1 if int(before.clusters[client]) == 0 else -1  # from 0 or from 180 to 90 degrees
            expected = torch.rot90(before.train.of(client)[0], turns, dims=(-2, -1))
            assert torch.equal(after.train.of(client)[0], expected)


def test_a_client_that_trains_a_cluster_while_it_is_being_closed_chooses_anew() -> None:
    """24 linear models on a ring: a client picks a cluster between the survey that closes it and its result."""
    x = torch.randn(24, 40, 10, generator=torch.Generator().manual_seed(1))
    y = (x.sum(-1) > 0).long()
    y[1::2] = 1 - y[1::2]
    result = dfca.simulate(torch.nn.Linear(10, 2), (x, y), seed=1, rounds=20, topology="ring", learning_rate=0.5)
    assert max(result.assignments.tolist()) < len(result.bank(client=0))
