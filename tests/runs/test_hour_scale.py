"""The scale `hour`: the paper's own work per client, with as many clients as an hour of one core allows."""

from __future__ import annotations

import pytest

from dfca.base.errors import ConfigError
from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment
from dfca.experiment.variants import flatten
from dfca.report.paper import published

PRESETS = (
    *("table1-mnist", "table1-emnist", "table1-cifar10", "table2-mnist", "table2-emnist"),
    *("table2-femnist", "table4-femnist-k"),
)
ALGORITHMS = {"dfca-gi", "dfca-li", "ifca", "dfca-auto", "dfedavgm", "local"}
MAY_DIFFER = {
    *("clients", "algorithms", "seeds", "topology.p"),
    *("data.samples_per_client", "data.test_samples_per_client", "data.minimum_samples"),
}
"""Everything else is the paper's, or that of the same recipe."""


def configs(name: str) -> tuple[Config, Config]:
    """Resolve the first point of a preset at this scale, and the paper's of the same recipe with as many clusters."""
    hour = load_experiment(name, "hour").points[0].config
    recipe = "crops" if name == "table1-cifar10" else None
    points = [point.config for point in load_experiment(name, "paper", recipe=recipe).points]
    return hour, next(config for config in points if config.clusters == hour.clusters)


def test_other_presets_name_the_scales_that_they_have() -> None:
    with pytest.raises(ConfigError, match=r'^unknown scale "hour".*desk, paper'):
        load_experiment("table3-skew", "hour")


@pytest.mark.parametrize("name", PRESETS)
def test_only_the_number_of_clients_and_their_graph_differ_from_the_paper(name: str) -> None:
    hour, paper = configs(name)
    ours, theirs = flatten(hour.values()), flatten(paper.values())
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} <= MAY_DIFFER
    assert (hour.model, hour.local, hour.rounds) == (paper.model, paper.local, paper.rounds)
    assert hour.clients < paper.clients
    assert set(hour.algorithms) == ALGORITHMS
    assert hour.seeds == (0,)


@pytest.mark.parametrize(
    ("name", "samples"), [("table1-mnist", 1000), ("table1-emnist", 93_693 // 50), ("table1-cifar10", 2000)]
)
def test_a_client_has_its_share_of_the_data(name: str, samples: int) -> None:
    hour, paper = configs(name)
    assert paper.data.samples_per_client is None, "the whole set is dealt to the clients of a cluster"
    assert hour.data.samples_per_client == pytest.approx(samples, abs=1)


@pytest.mark.parametrize("name", ["table1-mnist", "table1-emnist", "table1-cifar10"])
def test_a_client_keeps_its_neighbours_within_its_cluster(name: str) -> None:
    hour, paper = configs(name)
    others = hour.clients / hour.distributions - 1
    wanted = paper.topology.p * (paper.clients / paper.distributions - 1)
    assert others >= 1
    # Where a cluster is smaller than that, every other member is a neighbour.
    assert hour.topology.p * others == pytest.approx(min(wanted, others), rel=0.01)


@pytest.mark.parametrize("name", ["table2-femnist", "table4-femnist-k"])
def test_a_writer_keeps_its_samples_and_neighbours(name: str) -> None:
    hour, paper = configs(name)
    assert hour.data.samples_per_client is None
    neighbours = [config.topology.p * (config.clients - 1) for config in (hour, paper)]
    assert neighbours[0] == pytest.approx(neighbours[1], rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_the_published_numbers_are_shown_beside_it(name: str) -> None:
    point = load_experiment(name, "hour").points[0]
    assert {"dfca-gi", "dfca-li", "ifca"} <= set(published.published(name, point.at or {}))
