"""One table of contracts: every registered algorithm goes through every one of them."""

from __future__ import annotations

import inspect
import re

import networkx as nx
import pytest
import torch
from toy import make_toy_setting, make_toy_split, quick

from dfca import algorithms
from dfca.algorithms import ALGORITHMS
from dfca.algorithms.fedspd import draw_cluster, mixture, owners
from dfca.base.errors import ConfigError, DataError
from dfca.core.algorithm import View
from dfca.core.method import FineTuning
from dfca.core.rng import stream
from dfca.core.state import ClientState, Message
from dfca.sim.rounds.simulation import Simulation
from dfca.testing import make_clients

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@every_algorithm
def test_the_description_in_lists_is_a_whole_phrase(algorithm: str) -> None:
    first, *rest = inspect.getdoc(ALGORITHMS[algorithm]).splitlines()
    assert algorithms.about(ALGORITHMS[algorithm]) == first
    assert re.fullmatch(r"[A-Z].*[\w)]\.", first), "ends with a full stop"
    assert not rest or not rest[0], "a sentence that goes on in the next line is cut"


def finish(simulation: Simulation) -> Simulation:
    while not simulation.done:
        simulation.step()
    return simulation


@pytest.mark.no_cover
@every_algorithm
def test_same_seed_same_bits_other_seed_other_bits(algorithm: str) -> None:
    one = finish(Simulation(make_toy_setting(quick(algorithm))))
    assert torch.equal(one.banks, finish(Simulation(make_toy_setting(quick(algorithm)))).banks)
    assert not torch.equal(one.banks, finish(Simulation(make_toy_setting(quick(algorithm), seed=4))).banks)


@every_algorithm
def test_inputs_stay_as_they_are(algorithm: str) -> None:
    setting = make_toy_setting(quick(algorithm))
    x, edges = setting.split.train.x.clone(), list(setting.graph.edges)
    finish(Simulation(setting))
    assert torch.equal(setting.split.train.x, x)
    assert list(setting.graph.edges) == edges


def training_loss(simulation: Simulation) -> float:
    """Average the loss that training lowers: of every point's own model where points choose, else of the client's."""
    if simulation.setting.algorithm.needs != "samples":
        return float(simulation._evaluate()["train_loss"])
    losses_by_client = simulation.engine.sample_losses(simulation.banks, simulation.train)
    return float(torch.cat([losses.min(dim=0).values for losses in losses_by_client]).mean())


@pytest.mark.no_cover
@every_algorithm
def test_training_helps(algorithm: str) -> None:
    setting = make_toy_setting(quick(algorithm), rounds=24, evaluate_every=24, graph=nx.complete_graph(6))
    simulation = Simulation(setting)
    simulation.step()
    before, after = training_loss(simulation), training_loss(finish(simulation))
    assert after < 0.8 * before


@every_algorithm
def test_relabelled_clusters_relabel_the_result(algorithm: str) -> None:
    if algorithm in ("fedspd", "oracle"):
        pytest.skip("fedspd draws by index, the oracle is told the index")
    one, two = (Simulation(make_toy_setting(quick(algorithm))) for _ in range(2))
    two.banks.copy_(two.banks.flip(0).clone())
    finish(one), finish(two)
    torch.testing.assert_close(two.banks.flip(0), one.banks)
    if one.models == 2:
        assert (two.assignments == 1 - one.assignments).all()


@every_algorithm
def test_a_client_without_neighbours_learns_alone(algorithm: str) -> None:
    record = ALGORITHMS[algorithm]()
    if record.exchange == "server" or record.peers is not None:
        pytest.skip("a server reaches everybody, and so does a client that chooses freely")
    graph = nx.cycle_graph(5)
    graph.add_node(5)
    simulation = finish(Simulation(make_toy_setting(quick(algorithm), graph=graph)))
    clients = make_clients(make_toy_setting(quick(algorithm), graph=graph))
    begun = Simulation(make_toy_setting(quick(algorithm), graph=graph))
    alone, state = clients[5], ClientState.of(begun.bank(5), clients[5].first_memory(begun.models))
    for _ in range(4):
        state, _ = alone.start_round(state)
    torch.testing.assert_close(simulation.bank(5), state.bank)
    if record.exchange == "gossip":
        assert simulation.traffic.messages_by_client[5] == 0
        assert "1 of 6 clients have no neighbours (first: 5) and learn alone" in simulation.notes


@every_algorithm
def test_only_what_the_record_says_is_trained_and_sent(algorithm: str) -> None:
    client = make_clients(make_toy_setting(quick(algorithm)))[0]
    before, record = client.start(), client.algorithm
    after, sent = client.start_round(before)
    for j in range(len(before.bank)):
        trained = record.trains == "all" or record.body == "common" or j == after.assignment
        assert torch.equal(before.bank[j], after.bank[j]) == (not trained)
    chosen = list(range(len(before.bank))) if record.trains == "all" else [after.assignment]
    assert [message.cluster for message in sent] == ([] if algorithm == "local" else chosen)


@every_algorithm
def test_what_is_received_cannot_harm(algorithm: str) -> None:
    client = make_clients(make_toy_setting(quick(algorithm)))[0]
    state = client.start()
    good = state.bank[0]
    poison = good.clone()
    poison[3] = float("nan")
    harmful = [
        Message(1, 0, 0, 2, poison),
        Message(1, 0, 0, 2, poison.nan_to_num(nan=float("inf"))),
        Message(1, 0, 0, 2, good[:-1]),
        Message(1, 0, 0, 2, good.float()),
        Message(1, len(state.bank), 0, 2, good),
        Message(1, -1, 0, 2, good),
        Message(1, 0, 0, -5, good),
    ]
    for message in harmful:
        after = client.rules.receive(state, message)
        assert torch.equal(after.bank, state.bank)
        assert after.rejected == 1


@every_algorithm
def test_messages_are_counted(algorithm: str) -> None:
    simulation = Simulation(make_toy_setting(quick(algorithm), graph=nx.path_graph(6)))
    row = finish(simulation)._evaluate()
    exchange = simulation.setting.algorithm.exchange
    models, choice = simulation.models if simulation.exchange.share == "all" else 1, simulation.setting.algorithm.peers
    expected = {"gossip": [models * n for n in (4, 8, 8, 8, 8, 4)], "server": [4] * 6, "none": [0] * 6}[exchange]
    if choice is not None:  # in each of 4 rounds each of 6 clients is sent 5 models, by the peers that it draws
        drawn = {"dpfl": 6 * 5, "psfl": 4 * 10}  # all models in one round; those of neighbours in each
        assert row["messages_sent"] == drawn.get(algorithm, 4 * 6 * 5)
    elif simulation.exchange.share == "relay":  # what neighbours without a trainer ask for comes on top
        assert all(sent >= least for sent, least in zip(row["messages_by_client"], expected, strict=True))
    else:
        assert row["messages_by_client"] == expected
    assert sum(row["messages_by_cluster"]) == row["messages_sent"] == sum(row["messages_by_client"])
    model_bytes = simulation.start.sent_size * 8
    assert (model_bytes < simulation.flat.size * 8) == simulation.setting.algorithm.private_head
    assert row["bytes_sent"] == row["messages_sent"] * model_bytes + row["start_bytes"] + 4 * row["scalars_sent"]
    assert (row["start_bytes"] > 0) == (simulation.setting.algorithm.start == "elected")
    assert row["server_bytes_sent"] == (
        4 * 6 * simulation.models * simulation.flat.size * 8 if exchange == "server" else 0
    )


@every_algorithm
def test_a_client_that_diverges_is_not_heard(algorithm: str) -> None:
    split = make_toy_split()
    split.train.of(2)[0].mul_(1e200)  # overflows in the first gradient
    simulation = finish(Simulation(make_toy_setting(quick(algorithm), split=split)))
    assert torch.isfinite(simulation.banks).all()
    assert any("training diverged at 1 of 6 clients (first: 2)" in note for note in simulation.notes)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match='unknown algorithm "dfca-gl"; did you mean "dfca-gi" or "dfca-li"'):
        algorithms.get("dfca-gl")
    with pytest.raises(ConfigError, match='unknown option of dfedavgm "momentun"; did you mean "momentum"'):
        algorithms.get("dfedavgm", momentun=0.5)


def test_the_oracle_needs_the_truth() -> None:
    split = make_toy_split()
    blind = type(split)(split.train, split.test, None, split.classes)
    with pytest.raises(DataError, match="oracle needs true clusters, and this split has none"):
        make_toy_setting("oracle", split=blind)
    with pytest.raises(DataError, match="the oracle needs true clusters"):
        algorithms.get("oracle").choose(View(torch.zeros(2), lambda: stream(0)))


def test_the_oracle_puts_everybody_where_he_belongs() -> None:
    simulation = finish(Simulation(make_toy_setting("oracle")))
    assert simulation.assignments.tolist() == [0, 1, 0, 1, 0, 1]


def test_fedspd_by_hand() -> None:
    nan = float("nan")
    sample_losses = torch.tensor([[1.0, 5.0, 2.0, nan], [2.0, 3.0, 2.0, 7.0]])
    assert owners(sample_losses).tolist() == [0, 1, 0, 1]
    bank = torch.tensor([[4.0, 0.0], [0.0, 8.0]])
    assert mixture(bank, sample_losses).tolist() == [2.0, 4.0]
    drawn = [
        draw_cluster(View(torch.zeros(2), lambda i=i: stream(0, "draw", i), sample_losses)) for i in range(60)
    ]  # fmt: skip
    assert 15 < sum(choice.cluster for choice in drawn) < 45
    for choice in drawn:
        assert choice.points is not None
        assert choice.points.tolist() == (
            [True, False, True, False] if choice.cluster == 0 else [False, True, False, True]
        )


def test_options_out_of_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.dfedavgm.momentum must be in \[0, 1\), got 1.5"):
        algorithms.get("dfedavgm", momentum=1.5)
    with pytest.raises(ConfigError, match=r"algorithm\.fedspd\.finetune_epochs must be >= 0, got -1"):
        algorithms.get("fedspd", finetune_epochs=-1)
    with pytest.raises(ConfigError, match=r"algorithm\.fedspd\.finetune_batch must be >= 1, got 0"):
        algorithms.get("fedspd", finetune_batch=0)


def test_dfedavgm_momentum_is_an_option() -> None:
    assert algorithms.get("dfedavgm").momentum == 0.9
    assert algorithms.get("dfedavgm", momentum=0.5).momentum == 0.5
    assert algorithms.get("fedspd", finetune_epochs=2, finetune_batch=7).finetuning == FineTuning(2, 7)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_says_what_it_is(name: str) -> None:
    assert ALGORITHMS[name].__doc__
    assert algorithms.get(name).name == name
