from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import make_toy_setting, make_toy_split
from sklearn.metrics import adjusted_rand_score

from dfca import metrics
from dfca.core.local import hits, losses
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
    generator = torch.Generator().manual_seed(0)
    for kinds in (1, 2, 5, 12):
        found, truth = (torch.randint(0, kinds, (12,), generator=generator) for _ in range(2))
        assert metrics.adjusted_rand_index(found, truth) == pytest.approx(adjusted_rand_score(truth, found), abs=1e-12)
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


def test_distributions_are_disjoint_and_of_one_cluster() -> None:
    split = make_toy_split(clients=4, clusters=2)
    found = metrics.distributions(split, samples=6, seed=0)
    assert len(found) == 2
    for cluster, (held_out, test) in enumerate(found):
        assert len(held_out[1]) == len(test[1]) == 3
        own = torch.cat([split.test.of(i)[0] for i in range(4) if int(split.clusters[i]) == cluster])
        rows = torch.cat([held_out[0], test[0]])
        assert len(rows.unique(dim=0)) == 6
        assert all((own == row).all(dim=1).any() for row in rows)
    unknown = type(split)(split.train, split.test, None, split.classes)
    assert metrics.distributions(unknown, 6, 0) == []


def test_the_evaluator_picks_by_training_loss_and_scores_on_test_data() -> None:
    setting = make_toy_setting("dfca-li", rounds=2, evaluation_samples=2)  # so few that everybody is scored everywhere
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
        scores.append(float(hits(simulation.flat, bank[picked[-1]], x_test, y_test).double().mean()))
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
            everywhere.append(float(hits(simulation.flat, best, *test).double().mean()))
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
    import networkx as nx

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
