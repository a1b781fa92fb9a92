from __future__ import annotations

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import make_toy_setting, make_toy_split

from dfca.core.rules import mixing
from dfca.core.rules.mixing import (
    WEIGHT_RULES,
    Folder,
    Mixer,
    WeightedLinks,
    blocks,
    fold,
    make_links,
    metropolis_weight,
    mix,
)
from dfca.sim import shards
from dfca.sim.rounds.exchange import Exchange, Sent


def links_of(adjacency: torch.Tensor, senders: torch.Tensor, receivers: torch.Tensor, rule: str) -> WeightedLinks:
    return make_links(adjacency.nonzero().T, adjacency.sum(dim=1), senders, receivers, rule)


def matrix(links: WeightedLinks, clients: int) -> torch.Tensor:
    return mix(torch.eye(clients, dtype=torch.float64), links)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator]:
    """Draw a graph, who sends, who receives, and everybody's model of one cluster."""
    clients = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    upper = torch.rand(clients, clients, generator=generator).triu(1) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    adjacency = upper | upper.T
    senders = torch.rand(clients, generator=generator) < 0.6
    receivers = torch.rand(clients, generator=generator) < 0.9
    models = torch.randn(clients, 7, dtype=torch.float64, generator=generator)
    return adjacency, senders, receivers, models, generator


@settings(max_examples=60, deadline=None)
@given(rounds(), st.sampled_from(WEIGHT_RULES))
def test_mix_is_the_fold_of_the_same_messages_in_any_order(world: tuple, rule: str) -> None:
    adjacency, senders, receivers, models, generator = world
    links = links_of(adjacency, senders, receivers, rule)
    mixed = mix(models, links)
    sources = torch.unique(links.sender)
    for ratio in (0, 1000):  # dense where there is no link, and sparse; dense
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mixing, "SPARSE_FROM", ratio)
            mixer = Mixer(links, sources, 0, len(models), torch.float64, torch.device("cpu"))
        in_place = models.clone()
        for columns in (slice(0, 3), slice(3, 7)):
            mixer.apply_(in_place[:, columns], models[sources, columns])
        torch.testing.assert_close(in_place, mixed)
    degrees = adjacency.sum(dim=1).tolist()
    for i in range(len(models)):
        heard = [m for m in range(len(models)) if adjacency[i, m] and senders[m] and receivers[i]]
        order = torch.randperm(len(heard), generator=generator).tolist()
        average, count = models[i], 0
        for m in (heard[position] for position in order):
            if rule == "uniform":
                average, count = fold(average, count, models[m])
            else:
                average = average + metropolis_weight(degrees[i], degrees[m]) * (models[m] - models[i])
        torch.testing.assert_close(average, mixed[i])


@pytest.mark.parametrize("sparse_from", [0, 1000])
def test_any_number_of_cores_mixes_the_same_bits(sparse_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "SPARSE_FROM", sparse_from)
    monkeypatch.setattr(shards, "CORE_BYTES", 1)
    monkeypatch.setattr(shards, "CORES_FROM", 1)
    graph = nx.random_regular_graph(4, 12, seed=0)
    everybody, clusters = torch.ones(12, dtype=torch.bool), torch.arange(12) % 2
    bank = torch.randn(2, 12, 9 * mixing.BLOCK_COLUMNS + 5, generator=torch.Generator().manual_seed(0))
    exchange = Exchange(make_toy_setting(graph=graph, split=make_toy_split(clients=12)), 2, shards.Alone(12))
    mixed = []
    for cores in (1, 2, 3):
        torch.set_num_threads(cores)
        try:
            mixed.append(bank.clone())
            exchange.gossip_(mixed[-1], Sent(everybody, everybody, clusters, 0, everybody.expand(2, 12), True))
        finally:
            torch.set_num_threads(1)
    adjacency = torch.from_numpy(nx.to_numpy_array(graph)).bool()
    for j in range(2):
        expected = mix(bank[j], links_of(adjacency, clusters == j, everybody, "uniform"))
        torch.testing.assert_close(mixed[0][j], expected)
    assert torch.equal(mixed[0], mixed[1])
    assert torch.equal(mixed[0], mixed[2])


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_sequential_folding_equals_the_batch_rule(world: tuple) -> None:
    adjacency, senders, receivers, models, generator = world
    links = links_of(adjacency, senders, receivers, "uniform")
    sources = torch.unique(links.sender).tolist()
    arrivals = []
    for i in range(len(models)):
        heard = [m for m in range(len(models)) if adjacency[i, m] and senders[m] and receivers[i]]
        arrivals.append([sources.index(heard[p]) for p in torch.randperm(len(heard), generator=generator).tolist()])
    folded = models.clone()
    Folder(arrivals).apply_(folded, models[sources])
    torch.testing.assert_close(folded, mix(models, links))


@settings(max_examples=40, deadline=None)
@given(rounds(), st.sampled_from(WEIGHT_RULES))
def test_weights_are_row_stochastic_and_equal_models_are_a_fixed_point(world: tuple, rule: str) -> None:
    adjacency, senders, receivers, models, _ = world
    weights = matrix(links_of(adjacency, senders, receivers, rule), len(models))
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(len(models), dtype=torch.float64))
    assert (weights.diagonal() > 0).all()
    assert (weights >= 0).all()
    equal = models[:1].expand_as(models).contiguous()
    torch.testing.assert_close(weights @ equal, equal)


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_metropolis_preserves_the_average_of_those_that_train(world: tuple) -> None:
    adjacency, senders, _, models, _ = world
    if senders.any():
        after = mix(models, links_of(adjacency, senders, torch.ones_like(senders), "metropolis"))
        torch.testing.assert_close(after[senders].mean(dim=0), models[senders].mean(dim=0))


def test_the_papers_rule_by_hand() -> None:
    # A path 0 - 1 - 2; 0 and 2 trained the cluster. 1 takes the mean of three, 0 and 2 hear nobody.
    adjacency = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    senders, everybody = torch.tensor([True, False, True]), torch.ones(3, dtype=torch.bool)
    models = torch.tensor([[3.0], [0.0], [6.0]])
    for rule in WEIGHT_RULES:
        mixed = mix(models, links_of(adjacency, senders, everybody, rule))
        torch.testing.assert_close(mixed, torch.tensor([[3.0], [3.0], [6.0]]))


def test_the_uniform_rule_moves_the_average_and_metropolis_does_not() -> None:
    adjacency = torch.from_numpy(nx.to_numpy_array(nx.star_graph(3), dtype=bool))
    everybody = torch.ones(4, dtype=torch.bool)
    models = torch.tensor([[4.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    uniform = mix(models, links_of(adjacency, everybody, everybody, "uniform"))
    # The hub falls to 4/4, each leaf rises to 4/2: the mean moves from 1 to 7/4.
    assert uniform.flatten().tolist() == [1.0, 2.0, 2.0, 2.0]
    doubly = mix(models, links_of(adjacency, everybody, everybody, "metropolis"))
    assert doubly.mean().item() == 1.0


def test_fold_is_the_running_average() -> None:
    average, count = torch.tensor(6.0), 0
    average, count = fold(average, count, torch.tensor(0.0))
    assert (average.item(), count) == (3.0, 1)
    average, count = fold(average, count, torch.tensor(9.0))
    assert (average.item(), count) == (5.0, 2)


def test_a_copy_that_does_not_count_is_replaced_by_the_first_model() -> None:
    average, count = fold(torch.tensor(float("nan")), -1, torch.tensor(2.0))
    assert (average.item(), count) == (2.0, 0)
    average, count = fold(average, count, torch.tensor(4.0))
    assert (average.item(), count) == (3.0, 1)


def test_blocks_cover_the_columns_once_and_are_not_too_narrow() -> None:
    cut = list(blocks(10_000, column_bytes=1000, block_bytes=10**6))
    assert [(part.start, part.stop) for part in cut] == [(begin, begin + 1000) for begin in range(0, 10_000, 1000)]
    assert next(blocks(10_000, column_bytes=10**9, block_bytes=10**6)) == slice(0, mixing.BLOCK_COLUMNS)
