"""What is particular about Facade, D-FedEM, DePRL, PENS and DAC; the contracts of all algorithms are elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toy import make_toy_setting, make_toy_split

from dfca import algorithms
from dfca.algorithms.dac import temperature
from dfca.algorithms.fedem import explain, responsibilities
from dfca.base.errors import ConfigError, ModelError
from dfca.contracts import check_algorithm
from dfca.core.algorithm import Algorithm, View
from dfca.core.learning.local import LocalOptions, TrainingSet, local_steps_
from dfca.core.learning.params import FlatModel
from dfca.core.learning.parts import Phase, cut, head_tensors, layout_of
from dfca.core.learning.task import CLASSIFICATION, TASKS
from dfca.core.rng import stream
from dfca.core.rules.choosing import PeerChoice, PeerDraw, Received
from dfca.data.options import DataOptions
from dfca.data.partitions import make_split
from dfca.experiment.load import load_experiment
from dfca.runs.runner import run
from dfca.sim.evaluation import mix_outputs
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.testing import lockstep, make_clients, stack
from dfca.topology import make_graph
from dfca.topology_options import TopologyOptions

RIVALS = ("facade", "fedem", "deprl", "pens", "dac")
BATCHES = LocalOptions(steps=3, learning_rate=0.2, batch_size=5, momentum=0.4, weight_decay=0.01)
BODY, HEAD = slice(0, 25), slice(25, 43)
"""Of the toy model, 4-5-3."""


def finish(setting: Setting) -> Simulation:
    simulation = Simulation(setting)
    while not simulation.done:
        simulation.step()
    return simulation


def norm_and_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3))


def two_relu_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


WORLDS: dict[str, dict[str, Any]] = {
    "batch norm and dropout": {"make_model": norm_and_dropout},
    "in the span of the samples": {"make_model": two_relu_layers, "local": LocalOptions(5, 0.2), "engine": "stacked"},
    "relu, mini-batches": {"make_model": two_relu_layers, "local": BATCHES, "engine": "stacked"},
    "relu, uneven": {"make_model": two_relu_layers, "split": make_toy_split(samples=[3, 12, 7, 5, 12, 9])},
    "mini-batches, half of the clients": {"local": BATCHES, "participation": 0.5},
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", RIVALS)
def test_rounds_equal_lockstep(algorithm: str, world: str) -> None:
    setting = make_toy_setting(algorithm, rounds=3, **WORLDS[world])
    simulation, states = finish(setting), lockstep(setting)
    torch.testing.assert_close(simulation.banks, stack(states), rtol=1e-9, atol=1e-11)
    memories = [state.memory for state in states]
    assert (simulation.start.memory is None) == (memories[0] is None)
    if simulation.start.memory is not None:
        torch.testing.assert_close(simulation.start.memory, torch.stack(memories), equal_nan=True)  # type: ignore[arg-type]


# Parts of a model.


def flat(module: nn.Module) -> FlatModel:
    return FlatModel(module)


def head_mask(model: FlatModel, head: int | str) -> Tensor:
    """Return which numbers of a model are its head's: (P,) bool."""
    return torch.tensor(head_tensors(model, head)).repeat_interleave(torch.tensor(model.sizes))


def test_the_head_is_the_last_layers_or_has_a_name() -> None:
    model = flat(norm_and_dropout())
    assert head_mask(model, 1).sum() == 18
    assert head_mask(model, 2).sum() == 18 + 10, "batch norm has a weight and a bias; its statistics stay below"
    assert torch.equal(head_mask(model, "4"), head_mask(model, 1))
    assert head_mask(model, "1").sum() == 20, "by its name a layer is taken as a whole"
    assert head_mask(model, "").all()
    with pytest.raises(ModelError, match="head must be <= 3, the number of the model's layers, got 4"):
        head_mask(model, 4)
    with pytest.raises(ModelError, match='no layer "40" that could be its head; it has 0, 1, 4'):
        head_mask(model, "40")


def test_columns_that_two_cuts_have_in_common() -> None:
    assert cut([slice(0, 3), slice(5, 9)], slice(2, 6)) == [slice(2, 3), slice(5, 6)]
    assert cut([slice(0, 3)], slice(3, 6)) == []


def test_frozen_tensors_stay_and_the_others_move_as_if_alone() -> None:
    model, generator = flat(two_relu_layers()), torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 4, generator=generator), torch.randint(3, (9,), generator=generator)
    start = model.flatten(two_relu_layers())
    for options in (LocalOptions(3, 0.2), LocalOptions(3, 0.2, momentum=0.5, weight_decay=0.1)):
        dense, plain = start.clone(), start.clone()
        local_steps_(model, dense, TrainingSet(x, y, frozen=frozenset({2, 3})), options)
        assert torch.equal(dense[HEAD], start[HEAD])
        assert not torch.equal(dense[BODY], start[BODY])
        body = [piece.clone().requires_grad_() for piece in model.pieces(start)[:2]]
        speed = [torch.zeros_like(piece) for piece in body]
        for _ in range(3):
            outputs = model.run([*body, *model.pieces(start)[2:]], x, "train")
            slopes = torch.autograd.grad(CLASSIFICATION.mean_loss(outputs, y), body)
            for piece, velocity, slope in zip(body, speed, slopes, strict=True):
                velocity.mul_(options.momentum).add_(slope + options.weight_decay * piece.detach())
                piece.data -= options.learning_rate * velocity
        plain[BODY] = torch.cat([piece.detach().flatten() for piece in body])
        torch.testing.assert_close(dense, plain)


def test_weights_of_samples_weigh_their_losses() -> None:
    model, generator = flat(two_relu_layers()), torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 4, generator=generator), torch.randint(3, (9,), generator=generator)
    start, keep = model.flatten(two_relu_layers()), torch.tensor([1.0] * 6 + [0.0] * 3)
    some, weighed = start.clone(), start.clone()
    local_steps_(model, some, TrainingSet(x[:6], y[:6]), LocalOptions(4, 0.2))
    local_steps_(model, weighed, TrainingSet(x, y, weights=keep * 9 / 6), LocalOptions(4, 0.2))
    torch.testing.assert_close(weighed, some)


# Facade.


@pytest.mark.parametrize("weights", ["uniform", "metropolis"])
def test_facade_without_a_core_is_dfca_li(weights: str) -> None:
    one, other = (
        finish(make_toy_setting(algorithm, weights=weights))
        for algorithm in (algorithms.get("facade", head=""), "dfca-li")
    )
    torch.testing.assert_close(one.banks, other.banks)
    assert torch.equal(one.assignments, other.assignments)


def test_facade_averages_cores_with_everybody_and_heads_with_the_same_index() -> None:
    setting = make_toy_setting("facade", rounds=1, graph=nx.complete_graph(6))
    simulation = Simulation(setting)
    assert torch.equal(simulation.banks[0, :, BODY], simulation.banks[1, :, BODY]), "one core from the first round on"
    trained = [client.start_round(client.start())[0] for client in make_clients(setting)]
    simulation.step()
    cores = torch.stack([state.bank[state.assignment, BODY] for state in trained])  # type: ignore[index]
    torch.testing.assert_close(simulation.banks[..., BODY], cores.mean(dim=0).expand(2, 6, -1))
    for j in range(2):
        theirs = [state.bank[j, HEAD] for state in trained if state.assignment == j]
        for i, state in enumerate(trained):
            own = [] if state.assignment == j else [state.bank[j, HEAD]]
            torch.testing.assert_close(simulation.banks[j, i, HEAD], torch.stack([*theirs, *own]).mean(dim=0))


# DePRL.


def test_deprl_keeps_heads_and_preserves_the_average_body() -> None:
    setting = make_toy_setting("deprl", rounds=1)
    trained = torch.stack([client.start_round(client.start())[0].bank[0] for client in make_clients(setting)])
    banks = finish(setting).banks[0]
    torch.testing.assert_close(banks[:, HEAD], trained[:, HEAD])
    torch.testing.assert_close(banks[:, BODY].mean(dim=0), trained[:, BODY].mean(dim=0))
    assert not torch.allclose(banks[:, BODY], trained[:, BODY])


def test_deprl_trains_the_head_first_and_then_the_body() -> None:
    client = make_clients(make_toy_setting(algorithms.get("deprl", head_steps=4, body_steps=0)))[0]
    begun = client.start()
    head_only = client.start_round(begun)[0].bank[0]
    assert torch.equal(head_only[BODY], begun.bank[0, BODY])
    both = replace(client, algorithm=algorithms.get("deprl", head_steps=4, body_steps=1)).start_round(begun)[0].bank[0]
    assert torch.equal(both[HEAD], head_only[HEAD])
    assert not torch.equal(both[BODY], head_only[BODY])


def test_deprl_needs_a_body() -> None:
    with pytest.raises(
        ModelError, match="deprl keeps the head of a model and sends its body, and this model is all head"
    ):
        Simulation(make_toy_setting("deprl", make_model=lambda: nn.Linear(4, 3)))


# D-FedEM.


def test_responsibilities_by_hand() -> None:
    losses = torch.tensor([[0.0, math.log(3), math.nan], [0.0, 0.0, 1.0]])
    q = responsibilities(losses, torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(q, torch.tensor([[0.75, 0.5, 0.0], [0.25, 0.5, 1.0]], dtype=torch.float64))
    choice = explain(View(losses.mean(dim=1), lambda: stream(0), losses, memory=torch.tensor([0.75, 0.25])))
    assert choice.cluster == 1
    assert choice.memory is not None
    torch.testing.assert_close(choice.memory, torch.tensor([1.25 / 3, 1.75 / 3], dtype=torch.float64))
    lost = responsibilities(torch.full((2, 1), math.inf), torch.tensor([0.9, 0.1]))
    assert lost.tolist() == [[0.5], [0.5]]


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=4))
def test_responsibilities_share_every_sample(rows: list[list[float]]) -> None:
    q = responsibilities(torch.tensor(rows), torch.full((len(rows),), 1 / len(rows)))
    torch.testing.assert_close(q.sum(dim=0), torch.ones(3, dtype=torch.float64))


def test_the_em_of_one_model_is_dfedavgm_without_momentum() -> None:
    one = finish(make_toy_setting("fedem", clusters=1))
    other = finish(make_toy_setting(algorithms.get("dfedavgm", momentum=0.0), clusters=1))
    torch.testing.assert_close(one.banks, other.banks)
    assert one._evaluate()["accuracy"] == other._evaluate()["accuracy"]


def test_mixed_predictions_by_hand() -> None:
    outputs = torch.tensor([[[0.0, 0.0]], [[math.log(9), 0.0]]])
    mixed = mix_outputs(CLASSIFICATION, outputs, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(mixed.softmax(dim=-1), torch.tensor([[0.7, 0.3]]))
    assert mix_outputs(TASKS["regression"], torch.tensor([[[1.0]], [[5.0]]]), torch.tensor([0.25, 0.75])).tolist() == [
        [4.0]
    ]


# PENS and DAC.


def received(losses: list[float], round: int, memory: torch.Tensor, memories: torch.Tensor) -> Received:
    sizes = torch.tensor([10, 10, 20, 30])
    beside = ([], lambda: stream(0, "merge", round), lambda weights: torch.zeros(len(weights)))
    return Received(0, round, [2, 3, 4], torch.tensor(losses), sizes, memory, memories, *beside)


def drawing(round: int, memory: torch.Tensor) -> PeerDraw:
    return PeerDraw(0, round, [1, 2, 3, 4], memory, lambda: stream(0, "peers", round))


def test_pens_picks_the_lowest_losses_then_those_picked_more_often_than_by_chance() -> None:
    choice = algorithms.get("pens", selection_rounds=2, sampled=3, best=2).peers
    assert choice is not None
    nobody = torch.zeros(5, dtype=torch.float64)
    merged = choice.merge(received([1.0, math.nan, 0.5], 1, nobody, torch.zeros(3, 5)))
    torch.testing.assert_close(merged.weights, torch.tensor([10, 10, 0, 30], dtype=torch.float64) / 50)
    assert merged.memory.tolist() == [0, 0, 1, 0, 1]
    picks = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0], dtype=torch.float64)  # chance: 2 * 2 / 5 = 0.8
    assert choice.ask(drawing(2, picks)) == [2, 3]
    later = choice.merge(received([9.0, 9.0, 9.0], 2, picks, torch.zeros(3, 5)))
    torch.testing.assert_close(later.weights, torch.tensor([10, 10, 20, 30], dtype=torch.float64) / 70)
    assert later.memory is not picks
    assert torch.equal(later.memory, picks)
    assert len(choice.ask(drawing(0, nobody))) == 3
    assert choice.ask(drawing(2, nobody)) == []


def test_dac_remembers_what_it_saw_and_believes_the_most_alike() -> None:
    choice = algorithms.get("dac", sampled=2).peers
    assert choice is not None
    nan = math.nan
    told = torch.tensor([[7.0, 8.0, nan, nan, nan], [nan, 9.0, nan, nan, nan], [nan] * 5], dtype=torch.float64)
    start = torch.full((5,), nan, dtype=torch.float64)
    merged = choice.merge(received([1.0, 0.5, 4.0], 3, start, told))
    assert math.isnan(merged.memory[0]), "nothing of itself"
    assert merged.memory[1:].tolist() == [9.0, 1.0, 2.0, 0.25]
    torch.testing.assert_close(merged.weights, torch.tensor([10, 10, 20, 30], dtype=torch.float64) / 70)
    assert temperature(30, 0) == 1
    assert temperature(30, 100) == pytest.approx(31)
    sure = torch.tensor([nan, 0.1, 9.0, 0.1, 9.0], dtype=torch.float64)
    assert all(choice.ask(drawing(round, sure)) == [2, 4] for round in range(20, 40))
    first = {tuple(choice.ask(drawing(round, start))) for round in range(60)}
    assert len(first) == 6, "every pair of four"


@pytest.mark.parametrize("algorithm", ["pens", "dac"])
def test_peers_may_be_limited_to_neighbours(algorithm: str) -> None:
    free, near = (
        finish(make_toy_setting(algorithms.get(algorithm, peers=peers), rounds=3)) for peers in ("any", "neighbours")
    )
    assert near.traffic.messages_by_client.tolist() == [6] * 6, "two neighbours, three rounds"
    assert int(free.traffic.messages_by_client.sum()) == 3 * 6 * 5
    assert f"{algorithm} chooses its peers among all clients; the graph does not limit it" in free.notes
    assert any("among its neighbours in the graph; in its paper, among all" in note for note in near.notes)
    with pytest.raises(ConfigError, match="peers"):
        algorithms.get(algorithm, peers="friends")
    if algorithm == "dac":
        check_algorithm(algorithms.get(algorithm, peers="neighbours"))


@pytest.mark.parametrize("algorithm", ["pens", "dac"])
def test_who_chooses_its_peers_is_refused_in_virtual_time(algorithm: str) -> None:
    sentence = f"{algorithm} chooses its peers by the losses of their models, which no peer in virtual time can ask for"
    with pytest.raises(ConfigError, match=sentence):
        EventSimulation(make_toy_setting(algorithm))
    with pytest.raises(ConfigError, match=sentence):
        load_experiment("quickstart", None, ['world.preset="wifi"'], [algorithm])


def test_results_say_how_many_chosen_peers_are_of_the_own_cluster(tmp_path: Path) -> None:
    changes = ["clients=6", "rounds=2", "clusters=2", "seeds=1", "model.hidden=4", "data.samples_per_client=10"]
    (row,) = run(load_experiment("quickstart", None, changes, ["pens"]), tmp_path / "run")["runs"]
    assert 0 < row["peers_of_own_cluster"] < 1


def test_a_draw_of_somebody_else_is_refused() -> None:
    choice = PeerChoice(lambda view: [7], lambda received: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match=r"must return some of the candidates \[1, 2, 3, 4\], each once, got \[7\]"):
        choice.ask(drawing(0, torch.zeros(5)))


# Records that make no sense.


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head": 0}, "head of algorithm facade must be a number of layers >= 1 or the prefix"),
        ({"head": None}, "does not say where its head begins"),
        ({"share": "all"}, 'averages parts of a model, which needs exchange="gossip", share="trained"'),
        ({"trains": "all"}, 'trains all models, which needs exchange="gossip" with share="all"'),
        ({"schedule": (Phase("foot"),)}, "must have phases of all|head|body with steps >= 0"),  # type: ignore[arg-type]
        ({"mixture": lambda memory: memory}, "has a mixture of its memory, and no memory"),
        ({"trains": "some"}, 'unknown trains of algorithm facade "some"'),
    ],
)
def test_records_that_contradict_themselves_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(algorithms.get("facade"), **changes)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("deprl", {"head_steps": -1}, "algorithm.deprl.head_steps must be >= 0, got -1"),
        ("pens", {"best": 11}, r"algorithm.pens.best must be <= sampled \(10\), got 11"),
        ("pens", {"sampled": 0}, "algorithm.pens.sampled must be >= 1, got 0"),
        ("dac", {"tau": 0.5}, "algorithm.dac.tau must be >= 1, got 0.5"),
        ("dac", {"sampled": 0}, "algorithm.dac.sampled must be >= 1, got 0"),
    ],
)
def test_options_out_of_bounds_are_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        algorithms.get(name, **options)


def test_parts_are_nothing_to_algorithms_that_do_not_ask() -> None:
    for record in (algorithms.get("dfca-gi"), replace(algorithms.get("local"), head=1)):
        assert isinstance(record, Algorithm)
        assert layout_of(flat(two_relu_layers()), record) is None


# One claim of each paper, on digits: what the preset `rivals` shows with more seeds.


def on_digits(name: str, clients: int, distributions: int, clusters: int = 2, seed: int = 0, **data: Any) -> Setting:
    """Make a setting of the preset `rivals`."""
    split = make_split(DataOptions(name="digits", **data), clients, distributions, seed)
    return Setting(
        split=split,
        graph=make_graph(TopologyOptions(name="erdos-renyi", p=0.3), clients, seed),
        make_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        algorithm=algorithms.get(name, selection_rounds=20) if name == "pens" else algorithms.get(name),
        clusters=clusters,
        rounds=40,
        seed=seed,
        local=LocalOptions(5, 0.2, momentum=0.9),
        evaluate_every=20,
    )


def scores(setting: Setting) -> torch.Tensor:
    simulation = Simulation(setting)
    rows = [row for row in (simulation.step() for _ in range(simulation.setting.rounds)) if row is not None]
    return torch.tensor(rows[-1]["accuracy_by_client"])


@pytest.mark.slow
def test_facade_helps_the_minority_more_than_one_model_for_all() -> None:
    uneven = {"samples_per_client": 60, "angles": (0.0, 0.0, 0.0, 180.0)}
    gains = []
    for seed in range(3):
        ours, theirs = (on_digits(name, 48, 4, seed=seed, **uneven) for name in ("facade", "dfedavgm"))
        truth = ours.split.clusters
        assert truth is not None
        gains.append(float((scores(ours) - scores(theirs))[truth == 3].mean()))
    assert min(gains) > 0.02


@pytest.mark.slow
def test_fedem_is_ahead_of_one_model_and_of_none_where_clients_mix_labels() -> None:
    mixed = {"samples_per_client": 120, "skew": "mixed", "alpha": 0.5, "transform": "label-permutation"}
    steps: dict[str, Any] = {"local": LocalOptions(25, 0.5), "rounds": 16}
    plain = {name: replace(algorithms.get(name), momentum=0.0) for name in ("fedem", "dfedavgm", "local")}
    means = dict.fromkeys(plain, 0.0)
    for name, seed in product(plain, range(3)):
        setting = replace(on_digits(name, 20, 2, seed=seed, **mixed), algorithm=plain[name], **steps)
        means[name] += float(scores(setting).mean()) / 3
    assert means["fedem"] > means["dfedavgm"] + 0.02
    assert means["fedem"] > means["local"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pens", "dac"])
def test_chosen_peers_are_of_the_own_cluster(name: str) -> None:
    for seed in range(3):
        simulation = Simulation(on_digits(name, 40, 2, seed=seed))
        rows = [row for row in (simulation.step() for _ in range(40)) if row is not None]
        assert rows[-1]["peers_of_own_cluster"] >= 0.9


@pytest.mark.slow
def test_deprl_is_ahead_of_one_model_under_strong_label_skew() -> None:
    skewed = {"partition": "dirichlet", "concentration": 0.1, "transform": "none"}
    gains = []
    for seed in range(3):
        ours, theirs = (on_digits(name, 24, 1, 1, seed, **skewed) for name in ("deprl", "dfedavgm"))
        gains.append(float((scores(ours) - scores(theirs)).mean()))
    assert sum(gains) / 3 > 0.005
