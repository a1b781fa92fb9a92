"""The paper's numbers beside ours."""

from __future__ import annotations

from typing import Any

import pytest
from reports import report_of

from dfca.experiment.load import load_experiment, presets
from dfca.report import formats, tables
from dfca.report.paper import published

PAPER = [name for name in presets() if name.startswith(("table", "figure")) or name in ("theory", "har")]
RULES = {"dfca-auto", "dfca-fi"}


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("scale", ["paper", "desk"])
def test_every_experiment_of_the_paper_has_both_scales(name: str, scale: str) -> None:
    experiment = load_experiment(name, scale)
    assert experiment.scale == scale
    assert len(experiment.config.seeds) == (5 if scale == "paper" or name == "har" else 3)  # har takes minutes
    if name.startswith("table"):
        names = set(experiment.config.algorithms)
        known = experiment.config.data.name != "femnist"  # the true clusters of writers are unknown
        assert names >= RULES | {"local"} | ({"oracle"} if known else set())


@pytest.mark.parametrize(
    ("name", "clients", "clusters", "p", "rate", "model"),
    [
        ("table1-mnist", 240, 4, 0.1, 0.1, "mlp"),
        ("table1-emnist", 100, 2, 0.15, 0.1, "cnn"),
        ("table1-cifar10", 50, 2, 0.2, 0.25, "cnn"),
        ("table2-emnist", 200, 4, 0.15, 0.1, "cnn"),
        ("table2-femnist", 400, 4, 0.2, 0.1, "mlp"),
        ("table3-skew", 200, 4, 0.15, 0.1, "cnn"),
    ],
)
def test_the_paper_scale_is_the_published_setting(
    name: str, clients: int, clusters: int, p: float, rate: float, model: str
) -> None:
    recipe = "text" if name in ("table1-cifar10", "table2-femnist") else None  # the others have only that one
    config = load_experiment(name, "paper", recipe=recipe).config
    assert (config.clients, config.clusters, config.topology.p, config.local.learning_rate) == (
        clients,
        clusters,
        p,
        rate,
    )
    assert (config.rounds, config.local.steps, config.local.batch_size, config.model.name) == (150, 5, "full", model)
    assert config.model.hidden == (2048 if model == "mlp" else 200)


@pytest.mark.parametrize("name", [name for name in PAPER if published.where(name)])
def test_every_published_number_belongs_to_a_cell_of_its_preset(name: str) -> None:
    for scale in ("paper", "desk"):
        points = load_experiment(name, scale).points
        for point in points:
            cells = published.published(name, point.at or {})
            assert set(cells) <= set(point.config.algorithms)
            assert {"dfca-gi", "dfca-li", "ifca"} <= set(cells)


@pytest.mark.parametrize(
    ("figure", "table"),
    [
        ("figure-convergence", "table2-emnist"),
        ("figure-skew", "table3-skew"),
        ("figure-femnist-k", "table4-femnist-k"),
        ("table2-femnist", "table4-femnist-k"),
    ],
)
def test_a_figure_of_a_table_has_its_cells(figure: str, table: str) -> None:
    for scale in ("paper", "desk"):
        wanted, there = load_experiment(figure, scale), load_experiment(table, scale)
        assert {point.digest for point in wanted.points} <= {point.digest for point in there.points}
        assert set(wanted.config.algorithms) <= set(there.config.algorithms)


def test_ours_minus_the_published_in_points() -> None:
    run = {"algorithm": "ifca", "seed": 0, "accuracy": 0.93, "finished": True, "clusters": 4}
    own = {**run, "algorithm": "dfca-auto"}
    summary: dict[str, Any] = {"experiment": "table1-mnist", "scale": "desk", "runs": [run, own]}
    theirs, ours = report_of(summary).rows
    assert theirs.published is not None
    assert theirs.published.mean == pytest.approx(0.939)
    assert theirs.difference_points == pytest.approx(-0.9)
    assert ours.published is ours.difference_points is None
    assert "| 93.9 ± 0.06 | −0.9 |" in formats.markdown(report_of(summary))
    assert r"93.9 $\pm$ 0.06 & $-$0.9" in formats.latex(report_of(summary))
    assert "published_mean" in formats.comma_separated(report_of(summary)).splitlines()[0]
    assert any("Table 1, row MNIST" in note and "smaller" in note for note in tables.notes(report_of(summary)))


def test_slips_of_the_paper_stand_below_the_table() -> None:
    run = {"algorithm": "ifca", "seed": 0, "accuracy": 0.93, "finished": True, "clusters": 4}
    summary: dict[str, Any] = {"experiment": "table2-mnist", "scale": "paper", "runs": [run]}
    assert any("caption says N = 200" in note for note in tables.notes(report_of(summary)))


def test_other_experiments_have_no_published_column() -> None:
    run = {"algorithm": "ifca", "seed": 0, "accuracy": 0.93, "finished": True, "clusters": 4}
    assert "published" not in formats.markdown(report_of({"experiment": "quickstart", "runs": [run]}))
