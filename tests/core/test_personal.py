"""The personal last step: held out properly, picked with the neighbours, taken for one's own use only."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from personal_runs import UNEVEN, dense, run
from torch import nn
from toy import make_toy_setting, make_toy_split, quick

import dfca
from dfca.base.errors import ConfigError
from dfca.core.learning.local import held_out, infer
from dfca.core.method import check_personal_steps
from dfca.core.rules.merging import judge
from dfca.core.rules.personal import (
    FIRST_SCALARS,
    GAIN,
    GRID,
    LATER_SCALARS,
    POOL,
    SWEEPS,
    PlainSteps,
    average,
    pick,
    release_round,
)
from dfca.experiment.config import Config
from dfca.experiment.load import read_stored
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.personal import pooled
from dfca.sim.rounds.simulation import Simulation
from dfca.testing import lockstep, make_clients, stack


def norm_and_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3))


# The rule.


def test_a_curve_is_of_the_loss_that_clusters_are_judged_by() -> None:
    client = make_clients(make_toy_setting("dfedavgm", split=make_toy_split(2, samples=20), personal_steps="auto"))[0]
    train, held = client.divided()
    model = client.start().bank[0]
    steps = PlainSteps(client.model, client.method.local, client.seed, client.id)
    curve = list(steps.curve(model, train, held))
    with torch.no_grad():
        outputs = infer(client.model, model, held[0], "score")
    assert curve[0] == judge(client.model.task, outputs[None], held[1][None])[0]  # Brier's, not the cross entropy
    assert len(curve) == len(GRID)


def test_own_samples_and_the_pool_weigh_as_the_rule_says() -> None:
    curve, other = torch.ones(len(GRID)).double(), torch.ones(len(GRID)).double()
    curve[3], other[5] = 0.5, 0.4  # alone: 5 steps; the neighbour: 20
    assert pick(curve, 10, curve) == GRID[3]
    both = average(curve, [(other, 1)])
    torch.testing.assert_close(both, (curve + other) / 2)
    # 10 samples and half of the pool gain 0.5 with 5 steps, the other half gains 0.6 with 20
    assert 10 * 0.5 + POOL * 0.25 > POOL * 0.3
    assert pick(curve, 10, both) == GRID[3]
    other[5] = 0.0
    assert 10 * 0.5 + POOL * 0.25 < POOL * 0.5
    assert pick(curve, 10, average(curve, [(other, 1)])) == GRID[5]


def test_steps_that_promise_little_are_not_taken() -> None:
    curve = torch.ones(len(GRID)).double()
    curve[4] = 1 - 0.9 * GAIN
    assert pick(curve, 10, curve) == 0
    curve[6] = 1 - 1.1 * GAIN
    assert pick(curve, 10, curve) == GRID[6]
    curve[0] = float("nan")
    assert pick(curve, 10, curve) == GRID[6]


def test_what_is_not_finite_picks_nothing() -> None:
    curve = torch.ones(len(GRID)).double()
    curve[2], curve[4] = 0.9, float("nan")
    assert pick(curve, 10, curve) == GRID[2]
    nothing = torch.full((len(GRID),), float("nan")).double()
    assert pick(nothing, 10, nothing) == 0
    assert pick(torch.ones(len(GRID)), 10, torch.ones(len(GRID))) == 0  # ties: the fewest


@pytest.mark.parametrize(
    ("steps", "rounds", "expected"), [("auto", 40, 30), ("auto", 4, 3), ("auto", 3, None), (5, 40, None)]
)
def test_three_quarters_of_the_rounds_hold_samples_out(steps: Any, rounds: int, expected: int | None) -> None:
    assert release_round(steps, rounds) == expected


NUMBERS = st.one_of(st.floats(0, 9), st.just(float("inf")))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(NUMBERS, min_size=9, max_size=9), min_size=2, max_size=6),
    st.integers(0, 2**15 - 1),
    st.integers(0, 2**6 - 1),
    st.booleans(),
)
def test_the_pool_of_all_is_that_of_each(curves: list[list[float]], edges: int, clusters: int, server: bool) -> None:
    count = len(curves)
    places = [(i, j) for i in range(count) for j in range(i)]
    graph = nx.complete_graph(count) if server else nx.empty_graph(count)
    graph.add_edges_from(pair for bit, pair in enumerate(places) if edges >> bit & 1)
    reported, own = torch.tensor(curves).double(), torch.tensor([clusters >> i & 1 for i in range(count)])
    pairs = torch.tensor([(i, j) for i, j in graph.edges], dtype=torch.int64).view(-1, 2)
    both = None if server else torch.cat([pairs, pairs.flip(1)])
    sound = reported.isfinite().all(dim=1)
    pool = pooled(reported, sound, own, both)
    torch.testing.assert_close(pool[~sound], reported[~sound])
    near = {i: [m for m in graph.neighbors(i) if own[m] == own[i] and sound[m]] for i in range(count) if sound[i]}
    averages = dict(enumerate(reported))
    for _ in range(SWEEPS):
        averages |= {i: average(averages[i], [(averages[m], len(near[m])) for m in near[i]]) for i in near}
    for i in near:
        mean = reported[sound & (own == own[i])].mean(dim=0)
        torch.testing.assert_close(pool[i], mean if server else averages[i])
    for j in (0, 1):  # what is averaged stays the same on average, and nothing grows
        members = sound & (own == j)
        if members.any():
            torch.testing.assert_close(pool[members].mean(dim=0), reported[members].mean(dim=0))
            assert (pool[members] <= reported[members].max(dim=0).values + 1e-9).all()


# The simulator does what the clients do one by one.


@pytest.mark.parametrize(
    ("algorithm", "engine", "uneven", "make"),
    [
        ("dfca-auto", "stacked", False, dense),
        ("dfca-auto", "loop", True, dense),
        ("dfca-li", "stacked", False, None),
        ("ifca", "threads", True, dense),
        ("oracle", "stacked", False, dense),
        ("fedspd", "loop", False, dense),
        ("local", "stacked", False, dense),
        ("dfedavgm", "loop", False, norm_and_dropout),
        ("facade", "stacked", False, dense),
        ("deprl", "loop", False, dense),
        ("dac", "stacked", False, dense),
    ],
)
def test_picks_equal_those_of_the_clients(algorithm: str, engine: str, uneven: bool, make: Any) -> None:
    changes: dict[str, Any] = {"split": make_toy_split(samples=UNEVEN)} if uneven else {}
    changes |= {"make_model": make} if make else {}
    setting = make_toy_setting(quick(algorithm), engine=engine, rounds=5, personal_steps="auto", **changes)
    simulation, row = run(setting)
    states = lockstep(setting)
    assert simulation.last_step.steps.tolist() == [state.personal_steps for state in states]
    assert row["personal_steps_by_client"] == simulation.last_step.steps.tolist()
    banks = simulation.banks.expand(-1, setting.clients, -1)
    torch.testing.assert_close(banks, stack(states), rtol=1e-9, atol=1e-11)


def test_what_is_deployed_is_the_model_after_its_steps() -> None:
    setting = make_toy_setting("dfca-gi", rounds=4, personal_steps=7, make_model=dense)
    simulation, row = run(setting)
    clients = make_clients(setting)
    accuracies, before = [], []
    for client, j in zip(clients, row["assignments"], strict=True):
        vector = simulation.bank(client.id)[j]
        steps = PlainSteps(client.model, client.method.local, client.seed, client.id)
        taken = steps.take(vector, (client.x, client.y), 7)
        x, y = setting.split.test.of(client.id)
        for model, into in ((taken, accuracies), (vector, before)):
            predicted = client.model.run(client.model.pieces(model), x.double(), "score").argmax(dim=1)
            into.append(float((predicted == y).double().mean()))
        deployed = simulation.personal_model(client.id).double()
        torch.testing.assert_close(client.model.flatten(deployed), taken)
    assert row["accuracy_by_client"] == pytest.approx(accuracies)
    assert row["accuracy_before_personal_by_client"] == pytest.approx(before)
    assert row["accuracy_before_personal"] == pytest.approx(sum(before) / len(before))
    assert row["accuracy"] == pytest.approx(sum(accuracies) / len(accuracies))


def test_nothing_of_it_is_sent() -> None:
    (without, row), (taken, other) = (run(make_toy_setting("dfca-gi", personal_steps=steps)) for steps in (0, 9))
    assert torch.equal(without.banks, taken.banks)
    assert row["bytes_sent"] == other["bytes_sent"]


def test_held_out_samples_do_not_train_until_the_last_quarter() -> None:
    """Changing the held-out samples changes nothing before the release, and the models after it."""
    split = make_toy_split()
    other = make_toy_split()
    for client in range(6):
        mask = held_out(12, 3, client)
        assert int(mask.sum()) == 2
        other.train.of(client)[0][mask] += 5.0
    runs = []
    for samples in (split, other):
        changes = {"split": samples, "rounds": 8, "personal_steps": "auto", "make_model": dense}
        simulation = Simulation(make_toy_setting(quick("dfca-auto"), **changes))
        banks = []
        while not simulation.done:
            simulation.step()
            banks.append(simulation.banks.clone())
        runs.append(banks)
    assert release_round("auto", 8) == 6
    assert all(
        torch.equal(one, two) for one, two in zip(runs[0][:7], runs[1][:7], strict=True)
    )  # measured beside round 6
    assert not torch.equal(runs[0][7], runs[1][7])


def test_curves_are_counted_as_numbers_sent() -> None:
    held = 6  # every client holds samples out
    _, gossip = run(make_toy_setting("dfca-gi", personal_steps="auto", make_model=dense))
    alike = gossip["scalars_sent"] - FIRST_SCALARS * 2 * held  # a ring
    assert alike % LATER_SCALARS == 0
    assert 0 <= alike // LATER_SCALARS <= 2 * held
    _, server = run(make_toy_setting("ifca", personal_steps="auto", make_model=dense))
    assert server["scalars_sent"] == FIRST_SCALARS * held
    _, alone = run(make_toy_setting("local", personal_steps="auto", make_model=dense))
    assert alone["scalars_sent"] == 0


def test_clients_with_few_samples_take_no_step() -> None:
    simulation, _ = run(make_toy_setting("dfca-gi", split=make_toy_split(samples=4), personal_steps="auto"))
    assert simulation.last_step.steps.tolist() == [0] * 6


@pytest.mark.parametrize("stop", [2, 6, 7])  # before, at and after the pick
def test_resumed_is_uninterrupted(stop: int) -> None:
    setting = make_toy_setting(quick("dfca-auto"), rounds=8, personal_steps="auto", make_model=dense, evaluate_every=3)
    whole, row = run(setting)
    first = Simulation(setting)
    for _ in range(stop):
        first.step()
    tensors, facts = first.state()
    again = Simulation(setting)
    again.restore({name: tensor.clone() for name, tensor in tensors.items()}, facts)
    last = None
    while not again.done:
        last = again.step()
    assert last is not None
    assert torch.equal(again.banks, whole.banks)
    assert last["personal_steps_by_client"] == row["personal_steps_by_client"]
    assert last["accuracy"] == row["accuracy"]


def test_steps_that_diverge_are_undone() -> None:
    split = make_toy_split()
    split.train.of(2)[0].mul_(1e200)
    _, row = run(make_toy_setting("dfca-gi", split=split, personal_steps=50))
    assert row["accuracy_by_client"][2] == row["accuracy_before_personal_by_client"][2]


# Where it is asked for.


def test_dfca_takes_it_by_default_and_others_do_not() -> None:
    assert dfca.algorithms.get("dfca-auto").personal_steps == "auto"
    for name in ("dfca-gi", "ifca", "local", "dfedavgm", "oracle"):
        assert dfca.algorithms.get(name).personal_steps == 0
    for steps, expected in ((None, True), (0, False)):
        row = run(make_toy_setting(quick("dfca-auto"), personal_steps=steps, make_model=dense))[1]
        assert ("accuracy_before_personal" in row) is expected


def test_a_mixture_of_models_has_none() -> None:
    with pytest.raises(ConfigError, match=r"fedem deploys several models at once.*got personal\.steps = .auto."):
        make_toy_setting("fedem", personal_steps="auto")


@pytest.mark.parametrize("value", [-1, 1.5, True, "always", 10_001])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'personal_steps must be "auto" or an integer in 0\.\.10000, got'):
        check_personal_steps(value)


def test_the_key_of_an_experiment() -> None:
    base = {"clients": 4, "clusters": 2, "rounds": 4, "algorithms": ["dfca-auto"]}
    assert Config.of(base).personal is None
    config = Config.of(base | {"personal": {"steps": "auto"}})
    assert config.personal is not None
    assert read_stored(config.to_toml())[0] == config
    assert config.digest() != Config.of(base).digest()
    with pytest.raises(ConfigError, match=r"personal\.steps must be .*got -1"):
        Config.of(base | {"personal": {"steps": -1}})


# Momentum.


def test_momentum_is_an_option_of_algorithms() -> None:
    names = ["dfca-auto", "dfca-fi", "dfca-gi", "dfca-li", "ifca", "fedspd", "dfedavgm", "fedavg", "local", "oracle"]
    for name in names:
        assert dfca.algorithms.get(name, momentum=0.5).momentum == 0.5
    assert dfca.algorithms.get("dfca-auto").momentum == 0.9
    for name in ("dfca-gi", "dfca-li", "dfca-fi", "ifca", "local"):
        assert dfca.algorithms.get(name).momentum is None
    with pytest.raises(ConfigError, match=r"momentum of algorithm local must be in \[0, 1\), got 1"):
        dfca.algorithms.get("local", momentum=1.0)


# Quiet rounds.


@pytest.mark.parametrize(
    ("algorithm", "engine"), [("dfca-auto", "stacked"), ("facade", "loop"), ("dfedavgm", "stacked")]
)
def test_quiet_rounds_equal_those_of_the_clients(algorithm: str, engine: str) -> None:
    setting = make_toy_setting(quick(algorithm), engine=engine, rounds=5, quiet_rounds=2, make_model=dense)
    simulation, _ = run(setting)
    torch.testing.assert_close(simulation.banks, stack(lockstep(setting)), rtol=1e-9, atol=1e-11)
    in_time = EventSimulation(setting).run()
    torch.testing.assert_close(in_time.banks, simulation.banks, rtol=1e-9, atol=1e-11)


def test_quiet_rounds_keep_the_mean_and_bring_copies_nearer() -> None:
    """Metropolis weights keep the mean of all models, and without training nothing else moves them."""
    setting = make_toy_setting("dfedavgm", rounds=6, quiet_rounds=3, make_model=dense)
    simulation, means, spreads = Simulation(setting), [], []
    while not simulation.done:
        simulation.step()
        means.append(simulation.banks.mean(dim=1))
        spreads.append(float(simulation.banks.std(dim=1).sum()))
    torch.testing.assert_close(means[3], means[2])
    torch.testing.assert_close(means[5], means[2])
    assert spreads[5] < spreads[4] < spreads[3] < spreads[2]


def test_quiet_rounds_are_for_those_that_gossip() -> None:
    one, two = (run(make_toy_setting("ifca", quiet_rounds=quiet))[0] for quiet in (0, 2))
    assert torch.equal(one.banks, two.banks)
    for wrong in (4, -1, 1.5, True):
        with pytest.raises(ConfigError, match=rf"mixing\.quiet_rounds must be an integer in 0\.\.3, got {wrong}"):
            make_toy_setting("dfca-gi", quiet_rounds=wrong)
    with pytest.raises(ConfigError, match=r"this run ends by time: got mixing\.quiet_rounds = 1 with until_s"):
        EventSimulation(make_toy_setting("dfca-gi", quiet_rounds=1), options=EventOptions(until_s=5.0))
