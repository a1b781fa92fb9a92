from __future__ import annotations

import networkx as nx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dfca.core.mixing import (
    WEIGHT_RULES,
    fold,
    fold_in_order_,
    fold_weighted,
    metropolis_weight,
    mix,
    mix_,
    mixing_weights,
)


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
    own, others = mixing_weights(adjacency, senders, receivers, rule, torch.float64)
    mixed = mix(models, senders, own, others)
    in_place = models.clone()
    mix_(in_place, senders, own, others, block_bytes=8 * len(models) * 3)
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
                average = fold_weighted(average, models[i], models[m], metropolis_weight(degrees[i], degrees[m]))
        torch.testing.assert_close(average, mixed[i])


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_sequential_folding_equals_the_batch_rule(world: tuple) -> None:
    adjacency, senders, receivers, models, generator = world
    own, others = mixing_weights(adjacency, senders, receivers, "uniform", torch.float64)
    arrivals = []
    for i in range(len(models)):
        heard = [m for m in range(len(models)) if adjacency[i, m] and senders[m] and receivers[i]]
        arrivals.append([heard[p] for p in torch.randperm(len(heard), generator=generator).tolist()])
    folded = models.clone()
    fold_in_order_(folded, senders, arrivals)
    torch.testing.assert_close(folded, mix(models, senders, own, others))


@settings(max_examples=40, deadline=None)
@given(rounds(), st.sampled_from(WEIGHT_RULES))
def test_weights_are_row_stochastic_and_equal_models_are_a_fixed_point(world: tuple, rule: str) -> None:
    adjacency, senders, receivers, models, _ = world
    own, others = mixing_weights(adjacency, senders, receivers, rule, torch.float64)
    torch.testing.assert_close(own + others.sum(dim=1), torch.ones(len(models), dtype=torch.float64))
    assert (own > 0).all()
    assert (others >= 0).all()
    equal = models[:1].expand_as(models).contiguous()
    torch.testing.assert_close(mix(equal, senders, own, others), equal)


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_metropolis_preserves_the_average_of_those_that_train(world: tuple) -> None:
    adjacency, senders, _, models, _ = world
    own, others = mixing_weights(adjacency, senders, torch.ones_like(senders), "metropolis", torch.float64)
    if senders.any():
        after = mix(models, senders, own, others)
        torch.testing.assert_close(after[senders].mean(dim=0), models[senders].mean(dim=0))


def test_the_papers_rule_by_hand() -> None:
    # A path 0 - 1 - 2; 0 and 2 trained the cluster. 1 takes the mean of three, 0 and 2 hear nobody.
    adjacency = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    senders, everybody = torch.tensor([True, False, True]), torch.ones(3, dtype=torch.bool)
    models = torch.tensor([[3.0], [0.0], [6.0]])
    own, others = mixing_weights(adjacency, senders, everybody, "uniform", torch.float32)
    assert mix(models, senders, own, others).flatten().tolist() == [3.0, 3.0, 6.0]
    own, others = mixing_weights(adjacency, senders, everybody, "metropolis", torch.float32)
    torch.testing.assert_close(mix(models, senders, own, others), torch.tensor([[3.0], [3.0], [6.0]]))


def test_the_uniform_rule_moves_the_average_and_metropolis_does_not() -> None:
    adjacency = torch.from_numpy(nx.to_numpy_array(nx.star_graph(3), dtype=bool))
    everybody = torch.ones(4, dtype=torch.bool)
    models = torch.tensor([[4.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    uniform = mix(models, everybody, *mixing_weights(adjacency, everybody, everybody, "uniform", torch.float64))
    # The hub falls to 4/4, each leaf rises to 4/2: the mean moves from 1 to 7/4.
    assert uniform.flatten().tolist() == [1.0, 2.0, 2.0, 2.0]
    doubly = mix(models, everybody, *mixing_weights(adjacency, everybody, everybody, "metropolis", torch.float64))
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
