"""Graphs whose links carry models one way, or change from round to round, in both simulators; push-sum on them."""

from __future__ import annotations

import json
from typing import Any

import networkx as nx
import pytest
import torch
from driver_checks import assert_same as assert_lockstep
from driver_checks import run as run_rounds
from event_runs import STRAGGLERS, TIMED_LINK, assert_same, run, through_disk
from toy import make_toy_setting, make_toy_split

import dfca
from dfca import algorithms
from dfca.algorithms import ALGORITHMS
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm
from dfca.core.learning.local import LocalOptions
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Faults, World
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.topology import describe, join_graphs, make_graph, receivers_of, summary

WHEEL = nx.DiGraph([(i, (i + 1) % 6) for i in range(6)] + [(0, 2), (0, 3), (0, 4), (5, 1)])
TURNS = [nx.cycle_graph(6), nx.path_graph(6), nx.complete_graph(6)]
GRAPHS = {"one way": [WHEEL], "in turn": TURNS, "one way, in turn": [WHEEL, WHEEL.reverse(), nx.path_graph(6)]}
BOTH_WAYS = "links that carry models both ways"


def on(algorithm: Any, graphs: str, **changes: Any) -> Setting:
    return make_toy_setting(algorithm, graph=join_graphs(GRAPHS[graphs], 6), **changes)


def refusal(name: str, graphs: str) -> str | None:
    """Say why an algorithm cannot run on these graphs; None where it can."""
    try:
        on(name, graphs)
    except ConfigError as error:
        return str(error)
    return None


TABLE = [(name, graphs) for name in ALGORITHMS for graphs in GRAPHS if refusal(name, graphs) is None]


@pytest.mark.no_cover
@pytest.mark.parametrize(("name", "graphs"), TABLE)
def test_rounds_clients_and_the_ideal_world_agree(name: str, graphs: str) -> None:
    setting = on(name, graphs, rounds=5)
    assert_lockstep(setting)
    if setting.algorithm.peers is None:
        assert_same(setting, run(setting))


@pytest.mark.no_cover
@pytest.mark.parametrize("changes", [{"participation": 0.5}, {"aggregation": "sequential"}, {"quiet_rounds": 2}])
@pytest.mark.parametrize("name", ["dfedpgp", "dfca-gi", "facade"])
def test_they_agree_with_other_options_too(name: str, changes: dict[str, Any]) -> None:
    setting = on(name, "one way, in turn", rounds=5, **changes)
    assert_lockstep(setting)
    assert_same(setting, run(setting))


def test_algorithms_that_cannot_use_a_directed_graph_say_so() -> None:
    sentences = {name: refusal(name, "one way") for name in ALGORITHMS}
    refused = {name for name, said in sentences.items() if said is not None}
    assert refused == {"dfca-auto", "dfca-fi", "dfedavgm", "deprl", "fedem"}
    assert all(BOTH_WAYS in (sentences[name] or "") for name in refused)
    assert refusal("dfedavgm", "in turn") is None
    assert (refusal("dfca-auto", "in turn") or "").startswith(
        "dfca-auto elects its start or asks neighbours for copies"
    )
    with pytest.raises(ConfigError, match=r'mixing\.weights = "uniform"'):
        on("dfca-gi", "one way", weights="metropolis")


def test_models_travel_along_the_edges_of_their_round_only() -> None:
    chain = make_toy_setting("dfca-gi", graph=nx.DiGraph([(0, 1)] + [(i, i + 1) for i in range(2, 5)]), clusters=1)
    alone = make_toy_setting("local")
    banks, own = run_rounds(chain).banks, run_rounds(alone).banks
    assert torch.equal(banks[0, 0], own[0, 0])  # nobody sends to it
    assert not torch.equal(banks[0, 1], own[0, 1])
    row = Simulation(on("dfca-gi", "in turn", rounds=3, evaluate_every=3))
    metrics = [row.step() for _ in range(3)][-1]
    assert metrics is not None
    assert metrics["messages_sent"] == 2 * sum(len(graph.edges) for graph in TURNS)


@pytest.mark.parametrize("graphs", ["one way", "one way, in turn"])
def test_push_sum_preserves_the_average_and_a_plain_mean_does_not(graphs: str) -> None:
    """Without local steps z_i -> the mean of all starts, whatever the directions; sum_i mu_i z_i never changes."""
    pushed = Algorithm(
        "pushed",
        start="own",
        exchange="gossip",
        choose=lambda view: dfca.Choice(0),
        models="one",
        needs="nothing",
        share="trained",
        weights="push",
    )
    setting = on(pushed, graphs, rounds=80, quiet_rounds=79, local=LocalOptions(steps=1, learning_rate=1e-30))
    simulation = Simulation(setting)
    mean = simulation.banks[0].mean(dim=0)
    for _ in range(setting.rounds):
        simulation.step()
        held = (simulation.exchange.mass[:, None] * simulation.banks[0]).sum(dim=0) / 6
        torch.testing.assert_close(held, mean)
    torch.testing.assert_close(simulation.banks[0], mean.expand(6, -1), rtol=1e-6, atol=1e-6)
    assert simulation.exchange.mass.sum() == pytest.approx(6)
    plain = Algorithm(**{**vars(pushed), "name": "plain", "weights": "uniform"})
    off = run_rounds(on(plain, graphs, rounds=80, quiet_rounds=79, local=setting.local)).banks[0]
    assert (off - mean).abs().max() > 0.01


def test_local_steps_of_push_sum_are_taken_at_the_sum() -> None:
    """Two clients: 0 sends to 1 only, so mu = (1/2, 3/2) after a round; the next body step of 0 counts twice."""
    split, graph = make_toy_split(clients=2), nx.DiGraph([(0, 1)])
    setting = make_toy_setting("dfedpgp", split=split, graph=graph, rounds=2)
    simulation = Simulation(setting)
    simulation.step()
    assert simulation.exchange.mass.tolist() == [0.5, 1.5]
    before = simulation.bank(0)[0]
    alone = make_toy_setting("dfedpgp", split=split, graph=nx.empty_graph(2), rounds=1, seed=setting.seed)
    twin = Simulation(alone)
    twin.banks[:] = simulation.banks
    twin.step()
    simulation.step()
    body = slice(0, 25)
    step = twin.bank(0)[0] - before
    torch.testing.assert_close(simulation.bank(0)[0, body], before[body] + 2 * step[body])
    torch.testing.assert_close(simulation.bank(0)[0, 25:], twin.bank(0)[0, 25:])


def test_push_sum_resumes_bit_by_bit_in_both_simulators() -> None:
    setting = on("dfedpgp", "one way", rounds=6)
    whole = Simulation(setting)
    for _ in range(3):
        whole.step()
    tensors, facts = through_disk(*whole.state())
    second = Simulation(setting)
    second.restore(tensors, json.loads(json.dumps(facts)))
    while not whole.done:
        whole.step()
        second.step()
    assert torch.equal(whole.banks, second.banks)
    world, options = World(STRAGGLERS, TIMED_LINK), EventOptions(max_events=100_000)
    events = EventSimulation(setting, world, options)
    for _ in range(2):
        events.step()
    stored = through_disk(*events.state())
    again = EventSimulation(setting, world, options)
    again.restore(*stored)
    assert torch.equal(events.run().banks, again.run().banks)


def test_lost_messages_lose_mass_and_nothing_else() -> None:
    result = run(on("dfedpgp", "one way", rounds=30), World(STRAGGLERS, TIMED_LINK, Faults(loss=0.3)), timeout_s=20.0)
    assert torch.isfinite(result.banks).all()


def test_topologies_by_name_and_in_turn() -> None:
    options = dfca.TopologyOptions(name="directed", degree=2, graphs=3)
    graph = make_graph(options, 8, seed=1)
    phases = receivers_of(graph, 4)
    assert [len(phase) for phase in phases] == [2, 2, 2]
    assert len(set(phases)) > 1
    assert 4 not in {j for phase in phases for j in phase}
    assert "3 graphs in turn, models travel one way" in summary(describe(graph))
    first = make_graph(dfca.TopologyOptions(name="regular", degree=3), 8, seed=1)
    several = make_graph(dfca.TopologyOptions(name="regular", degree=3, graphs=2), 8, seed=1)
    assert receivers_of(several, 0)[0] == tuple(sorted(first.neighbors(0)))
    assert not receivers_of(first, 0)
    assert "receivers" not in first.graph


def test_graphs_of_ones_own(tmp_path: Any) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 0\n")
    file = {"name": "file", "file": str(tmp_path / "edges.txt")}
    assert receivers_of(make_graph(dfca.TopologyOptions(**file, directed=True), 3, 0), 0) == ((1,),)
    assert receivers_of(make_graph(dfca.TopologyOptions(**file), 3, 0), 0) == ()
    result = dfca.simulate(
        lambda: dfca.mlp((4,), 3, 8), make_toy_split(), "dfedpgp", rounds=3, topology=[WHEEL, nx.cycle_graph(6)]
    )
    assert result is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "ring", "graphs": 2}, 'topology.graphs must be 1, or more for erdos-renyi, .* got 2 for "ring"'),
        ({"name": "regular", "graphs": 0}, 'got 0 for "regular"'),
        ({"name": "ring", "directed": True}, 'topology.directed is for topology "file", got it for "ring"'),
        ({"name": "directed", "degree": 8}, "topology.degree must be in 1..7 for 8 clients, got 8"),
    ],
)
def test_bad_options_say_what_to_do(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_graph(dfca.TopologyOptions(**options), 8, seed=0)


def test_push_sum_is_for_one_model() -> None:
    with pytest.raises(ConfigError, match="weighs by push-sum, which needs"):
        Algorithm("wrong", start="own", exchange="gossip", choose=lambda view: dfca.Choice(0), weights="push")
    assert algorithms.get("dfedpgp").weights == "push"
