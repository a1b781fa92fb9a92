from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import networkx as nx
import pytest
import torch
from torch import nn
from toy import make_toy_model, make_toy_setting, make_toy_split

from dfca import metrics
from dfca.core.learning.local import losses, score
from dfca.data.clients import Split
from dfca.sim.evaluation import FEWEST_SCORED, Scope
from dfca.sim.rounds.simulation import Simulation


def test_cluster_accuracy_matches_found_and_true_clusters_in_the_best_way() -> None:
    truth = torch.tensor([0, 0, 1, 1, 2, 2])
    assert metrics.cluster_accuracy(torch.tensor([2, 2, 0, 0, 1, 1]), truth) == 1.0
    assert metrics.cluster_accuracy(torch.tensor([0, 0, 0, 0, 1, 1]), truth) == pytest.approx(4 / 6)
    assert metrics.cluster_accuracy(torch.tensor([0, 3, 1, 1, 2, 2]), truth) == pytest.approx(5 / 6)
    assert metrics.cluster_accuracy(torch.zeros(6, dtype=torch.int64), truth) == pytest.approx(2 / 6)


def test_adjusted_rand_index() -> None:
    truth = torch.tensor([0, 0, 1, 1])
    assert metrics.adjusted_rand_index(torch.tensor([1, 1, 0, 0]), truth) == 1.0
    assert metrics.adjusted_rand_index(torch.tensor([0, 1, 0, 1]), truth) < 0.1
    # By hand: 1 pair together in both, 3 found, 2 true, of 6; chance gives 3 x 2 / 6 = 1.
    assert metrics.adjusted_rand_index(torch.tensor([0, 0, 0, 1]), truth) == pytest.approx((1 - 1) / ((3 + 2) / 2 - 1))
    assert metrics.adjusted_rand_index(torch.tensor([0, 0, 1, 2]), truth) == pytest.approx((1 - 1 / 3) / (1.5 - 1 / 3))
    assert metrics.adjusted_rand_index(torch.arange(6), torch.arange(6)) == 1.0


def test_confusion() -> None:
    assert metrics.confusion(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])).tolist() == [[0, 2], [1, 0]]


def test_disagreement_by_hand() -> None:
    bank = torch.tensor([[[0.0, 0.0], [2.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]])
    # Cluster 0: mean (1, 2); each client is (1, 2) away: 1 + 4 = 5.
    assert metrics.disagreement(bank).tolist() == pytest.approx([5.0, 0.0])
    assert metrics.disagreement(bank, rows=1).tolist() == pytest.approx([5.0, 0.0])
    assert [metrics.average(models, 2).tolist() for models in bank] == [[1.0, 2.0], [1.0, 1.0]]


def test_drift_is_relative() -> None:
    before, after = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[3.0, 9.0], [1.0, 0.0]])
    assert metrics.drift(before, after).tolist() == [1.0, 0.0]


def test_drift_of_an_average_that_is_zero_is_a_number() -> None:
    zero = torch.zeros(2, 3)
    assert metrics.drift(zero, zero).tolist() == [0.0, 0.0]
    moved = metrics.drift(zero, torch.tensor([[1e-3, 0.0, 0.0], [0.0, 0.0, 0.0]])).tolist()
    assert 1e6 < moved[0] < float("inf")
    assert moved[1] == 0.0


def test_clusters_with_fewer_than_two_test_samples_have_no_distributions() -> None:
    split = make_toy_split(clients=3, clusters=2)  # cluster 1 is client 1 alone

    def with_tests(count: int) -> Split:
        rows = [split.test.of(i) for i in range(3)]
        few = [(x[:count], y[:count]) if i == 1 else (x, y) for i, (x, y) in enumerate(rows)]
        return Split.of_clients([split.train.of(i) for i in range(3)], few, split.clusters, split.classes)

    assert metrics.distributions(with_tests(1), samples=6, seed=0) == []
    assert [len(drawn.test[1]) for drawn in metrics.distributions(with_tests(2), samples=6, seed=0)] == [3, 1]
    row = Simulation(make_toy_setting(split=with_tests(1), graph=nx.path_graph(3), rounds=1)).step()
    assert row["all_models_accuracy"] is None
    assert 0 <= row["accuracy"] <= 1


def test_clients_that_never_trained_count_with_the_model_that_they_would_pick() -> None:
    simulation = Simulation(make_toy_setting("dfca-li"))
    losses_of_all = simulation.engine.losses(simulation.banks, simulation.train)
    lowest, highest = losses_of_all.min(dim=1), losses_of_all.max(dim=1)
    nobody = torch.full((6,), -1)
    row = simulation.evaluator.score(simulation.banks, nobody).row
    assert row["F_before_assignment"] == pytest.approx(row["F_global"]) == pytest.approx(float(lowest.values.sum()))
    some = torch.where(torch.arange(6) < 2, highest.indices, -1)  # two trained the model that fits them worse
    row = simulation.evaluator.score(simulation.banks, some).row
    expected = highest.values[:2].sum() + lowest.values[2:].sum()
    assert row["F_before_assignment"] == pytest.approx(float(expected))
    assert row["F_before_assignment"] > row["F_global"]


def test_distributions_are_disjoint_and_of_one_cluster() -> None:
    split = make_toy_split(clients=4, clusters=2)
    drawn = metrics.distributions(split, samples=6, seed=0)
    assert len(drawn) == 2
    for cluster, (held_out, test) in enumerate(drawn):
        assert len(held_out[1]) == len(test[1]) == 3
        own = torch.cat([split.test.of(i)[0] for i in range(4) if int(split.clusters[i]) == cluster])
        rows = torch.cat([held_out[0], test[0]])
        assert len(rows.unique(dim=0)) == 6
        assert all((own == row).all(dim=1).any() for row in rows)
    unknown = type(split)(split.train, split.test, None, split.classes)
    assert metrics.distributions(unknown, 6, 0) == []


def test_the_evaluator_picks_by_training_loss_and_scores_on_test_data() -> None:
    # So few samples that the steps, which cost more with Tanh, pay for scoring everybody everywhere.
    setting = make_toy_setting("dfca-li", rounds=2, evaluation_samples=2, make_model=partial(make_toy_model, nn.Tanh))
    simulation = Simulation(setting)
    simulation.step()
    row = simulation.step()
    assert row is not None
    scores, picked, own = [], [], []
    for i in range(setting.clients):
        bank = simulation.bank(i)
        (x, y), (x_test, y_test) = simulation.train.of(i), simulation.test.of(i)
        values = losses(simulation.flat, bank, x, y)
        picked.append(int(values.argmin()))
        own.append(float(values.min()))
        scores.append(float(score(simulation.flat, bank[picked[-1]], x_test, y_test)))
    assert row["assignments"] == picked
    assert row["accuracy"] == pytest.approx(sum(scores) / 6)
    assert row["F_global"] == pytest.approx(sum(own))
    assert row["train_loss"] == pytest.approx(sum(own) / 6)
    assert row["live_clusters"] == len(set(picked))
    everywhere = []
    for held_out, test in simulation.evaluator.distributions:
        for i in range(setting.clients):
            bank = simulation.bank(i)
            best = bank[int(losses(simulation.flat, bank, *held_out).argmin())]
            everywhere.append(float(score(simulation.flat, best, *test)))
    assert row["all_models_accuracy"] == pytest.approx(sum(everywhere) / len(everywhere))


@pytest.mark.parametrize("algorithm", ["dfca-li", "ifca", "fedspd"])
def test_both_engines_score_the_same(algorithm: str) -> None:
    rows = []
    for engine in ("loop", "stacked"):
        simulation = Simulation(make_toy_setting(algorithm, engine=engine, rounds=2))
        simulation.step()
        rows.append(simulation.step())
    for name in ("accuracy", "all_models_accuracy", "assignments", "cluster_accuracy"):
        assert rows[0][name] == rows[1][name]
    assert rows[0]["F_global"] == pytest.approx(rows[1]["F_global"])


def test_metropolis_weights_keep_the_average_and_the_papers_do_not() -> None:
    def drift(weights: str) -> float:
        simulation = Simulation(
            make_toy_setting("dfca-li", weights=weights, clusters=1, rounds=1, graph=nx.star_graph(5), evaluate_every=1)
        )
        row = simulation.step()
        assert row is not None
        return row["mixing_drift"][0]

    assert drift("metropolis") < 1e-12
    assert drift("uniform") > 1e-3


def test_assignment_never_raises_the_global_loss() -> None:
    simulation = Simulation(make_toy_setting("dfca-li", rounds=4, evaluate_every=1))
    for _ in range(4):
        before = simulation.assignments.clone()
        values = simulation.engine.losses(simulation.banks, simulation.train)
        simulation.step()
        if (before >= 0).all():
            after = simulation.assignments
            assert values.gather(1, after[:, None]).sum() <= values.gather(1, before[:, None]).sum()


def test_evaluations_before_the_last_score_few_clients_everywhere() -> None:
    split = make_toy_split(clients=24)
    simulation = Simulation(make_toy_setting("dfca-gi", split=split, rounds=2, evaluate_every=1))
    evaluator, banks = simulation.evaluator, simulation.banks
    few = evaluator.scope(simulation.models, final=False).everywhere
    assert FEWEST_SCORED <= len(few) < 24
    assert few == evaluator.scope(simulation.models, final=False).everywhere
    assert len(few) <= len(evaluator.scope(simulation.models, final=True).everywhere)
    scores = torch.stack(evaluator.on_distributions(banks, range(24)))

    def everywhere(clients: Sequence[int] | None) -> float:
        scope = None if clients is None else Scope(range(24), clients)
        return float(evaluator.score(banks, simulation.assignments, scope).row["all_models_accuracy"])

    assert everywhere(few) == pytest.approx(float(scores[:, list(few)].mean()))
    assert everywhere(None) == everywhere(range(24)) == pytest.approx(float(scores.mean()))
    before = everywhere(few)
    banks[:, [i for i in range(24) if i not in few]] = 0.0  # only the last evaluation sees them
    assert everywhere(few) == before != everywhere(None)
