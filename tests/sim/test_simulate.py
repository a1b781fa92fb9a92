from __future__ import annotations

from functools import partial

import networkx as nx
import pytest
import torch
from torch import nn
from toy import make_toy_model, make_toy_setting, make_toy_split

import dfca
from dfca.api.arguments import fresh_copies
from dfca.base.errors import ConfigError, ModelError
from dfca.sim.local.engine import why_not_stacked
from dfca.sim.rounds.simulation import Simulation


def test_simulate_returns_metrics_banks_and_models() -> None:
    seen: list[dict] = []
    result = dfca.simulate(
        make_toy_model,
        make_toy_split(),
        "dfca-gi",
        clusters=2,
        rounds=5,
        topology=nx.complete_graph(6),
        evaluate_every=2,
        callback=seen.append,
    )
    assert result.evaluations["round"] == [2, 4, 5]
    assert seen == [{"algorithm": "dfca-gi", "seed": 0, **row} for row in result.evaluations]
    assert result.accuracy == result.evaluations[-1]["accuracy"]
    assert result.assignments.shape == (6,)
    assert result.bank(0).shape == (2, result.flat.size)
    x = make_toy_split().test.of(1)[0]
    expected = result.flat.to_module(result.bank(1)[1])(x)
    assert torch.equal(result.model(1, cluster=1)(x), expected)
    own = int(result.assignments[1])
    assert torch.equal(result.model(1)(x), result.model(1, cluster=own)(x))
    with pytest.raises(ConfigError, match=r"cluster must be in 0\.\.1, got 7"):
        result.model(0, 7)


def test_metrics_are_a_table() -> None:
    result = dfca.simulate(make_toy_model, make_toy_split(), clusters=2, rounds=2, topology="ring", evaluate_every=1)
    table = str(result.evaluations).splitlines()
    assert table[0].split()[:2] == ["round", "accuracy"]
    assert len(table) == 3
    rows = result.evaluations.to_csv().splitlines()
    assert rows[0].startswith("round,accuracy,")
    assert float(rows[2].split(",")[1]) == result.accuracy


def test_a_module_is_started_afresh_for_every_model() -> None:
    module = make_toy_model()
    result = dfca.simulate(module, make_toy_split(), "dfca-li", clusters=2, rounds=1, topology="ring", steps=0)
    assert not torch.equal(result.bank(0)[0], result.bank(0)[1])
    assert not torch.equal(result.bank(0)[0], result.bank(2)[0])


class Naked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_module_that_cannot_be_started_afresh_is_refused() -> None:
    with pytest.raises(ModelError, match=r"has no reset_parameters\(\).* pass a function that builds it"):
        fresh_copies(Naked())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"clusters": 7}, "clusters must be in 1..6 (the number of clients), got 7"),
        ({"clusters": 0}, "clusters must be in 1..6 (the number of clients), got 0"),
        ({"rounds": 0}, "rounds must be >= 1, got 0"),
        ({"participation": 0.0}, "participation must be in (0, 1], got 0.0"),
        ({"evaluate_every": 0}, "evaluation.every must be >= 1, got 0"),
        ({"evaluation_samples": 1}, "evaluation.samples must be >= 2, got 1"),
        ({"weights": "metropolys"}, 'unknown weights "metropolys"; did you mean "metropolis"?'),
        ({"aggregation": "all"}, 'unknown aggregation "all". Known: batch, sequential'),
        ({"engine": "warp"}, 'unknown engine "warp". Known: auto, loop, stacked, threads'),
        ({"graph": nx.path_graph(5)}, "the graph must have the nodes 0..5, one per client; it has 5"),
    ],
)
def test_bad_settings_are_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_toy_setting(**changes)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("graph", "options", "sentence"),
    [
        (nx.DiGraph([(i, i) for i in range(6)]), {}, "the graph must be without loops"),
        (
            nx.path_graph(["a", "b"]),
            {},
            "the graph must have the nodes 0..5, one per client, as integers, got the node",
        ),
        (nx.path_graph(7), {}, "it has 7 nodes, and has the node 6"),
        (nx.Graph([(i, i) for i in range(6)]), {}, "the graph must be without loops"),
        ({"name": "ring", "q": 1}, {}, 'topology: unknown key "q". Known: attach, degree'),
        ("ring", {"weigths": "uniform"}, 'unknown option of simulate "weigths"; did you mean "weights"?'),
    ],
)
def test_bad_arguments_of_simulate_are_refused(graph: object, options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        dfca.simulate(make_toy_model, make_toy_split(), clusters=2, rounds=1, topology=graph, **options)
    assert sentence in str(error.value)


def test_simulate_finds_the_number_of_clusters() -> None:
    split = dfca.make_split(dfca.DataOptions(samples_per_client=60), clients=12, clusters=2, seed=0)
    make = partial(dfca.mlp, (1, 8, 8), 10, 16)
    result = dfca.simulate(make, split, "dfca-auto", rounds=2, learning_rate=0.5, topology="complete")
    assert len(result.bank(0)) == 2


def test_a_model_that_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the model cannot take samples of shape \(4,\)"):
        Simulation(make_toy_setting(make_model=lambda: nn.Linear(9, 3)))
    with pytest.raises(
        ModelError, match=r"must give \(n, 3\) outputs for 3 classes \(labels in 0\.\.2\), got \(2, 2\)"
    ):
        Simulation(make_toy_setting(make_model=lambda: nn.Linear(4, 2)))


def test_a_forced_engine_that_cannot_run_is_refused() -> None:
    def dropout() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))

    with pytest.raises(ConfigError, match='engine "stacked" cannot run this: Dropout does not batch over clients; use'):
        Simulation(make_toy_setting(make_model=dropout, engine="stacked"))
    uneven = make_toy_split(samples=[3, 4, 5, 6, 7, 8])
    with pytest.raises(ConfigError, match="clients hold 3 to 8 samples, and only equal numbers stack"):
        Simulation(make_toy_setting(split=uneven, engine="stacked"))
    simulation = Simulation(make_toy_setting(split=uneven))
    assert not simulation.engine.stacked
    assert why_not_stacked(simulation.flat, make_toy_split().train.to("cpu", torch.float64)) is None


class Fickle(nn.Module):
    """Looks at its numbers: no two clients can share a call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(2 * x)


def test_a_forward_that_looks_at_its_numbers_runs_in_a_loop() -> None:
    simulation = Simulation(make_toy_setting(make_model=Fickle))
    assert not simulation.engine.stacked
    with pytest.raises(ConfigError, match="its forward cannot run for many clients at once"):
        Simulation(make_toy_setting(make_model=Fickle, engine="stacked"))


def test_a_disconnected_graph_is_told_once() -> None:
    graph = nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(3))
    notes = Simulation(make_toy_setting(graph=graph)).notes
    assert notes == ("the graph has 2 components; models cannot pass between them",)


def test_a_checkpoint_of_another_size_is_refused() -> None:
    tensors, facts = Simulation(make_toy_setting()).state()
    with pytest.raises(ConfigError, match="the checkpoint's bank is"):
        Simulation(make_toy_setting(clusters=3)).restore(tensors, facts)


def test_the_public_names_are_pinned() -> None:
    names = "ALGORITHMS Algorithm Choice ClientData Codec Comparison DataOptions DfcaError DfcaWarning LocalOptions"
    names += " Metrics Result Setting Simulation Split StoredRun Task TopologyOptions View __version__ cnn cnn1d"
    names += " load_run lowest make_graph make_split make_task map_npz mlp simulate split_from"
    assert sorted(dfca.__all__) == names.split()
    for name in dfca.__all__:
        assert getattr(dfca, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dfca.nothing


def test_the_oracle_keeps_a_model_for_every_true_cluster_whatever_is_asked_for() -> None:
    split = make_toy_split(clients=6, clusters=3)
    moved = type(split)(split.train, split.test, torch.tensor([0, 1, 2, 3, 3, 3]), split.classes)
    simulation = Simulation(make_toy_setting("oracle", split=split, clusters=1, drift=(2, moved)))
    assert simulation.models == 4
    while not simulation.done:
        simulation.step()
    assert simulation.assignments.tolist() == [0, 1, 2, 3, 3, 3]


def test_algorithms_without_clusters_need_no_number_of_them() -> None:
    split = make_toy_split()
    blind = type(split)(split.train, split.test, None, split.classes)
    assert Simulation(make_toy_setting("dfedavgm", split=blind, clusters=None)).models == 1


def test_a_device_may_be_an_object() -> None:
    result = dfca.simulate(make_toy_model, make_toy_split(), "local", rounds=1, device=torch.device("cpu"))
    assert result.banks.device == torch.device("cpu")
