"""Bridge scale: the paper's own work per client, with fewer clients."""

from __future__ import annotations

import pytest

from dfca.base.errors import ConfigError
from dfca.data.registry import source_of
from dfca.experiment.config import Config, flatten
from dfca.experiment.load import load_experiment
from dfca.report.paper import published

BRIDGED = ("table1-cifar10", "table1-emnist", "table4-femnist-k")
ALGORITHMS = {"dfca-gi", "dfca-li", "ifca", "dfca-auto", "dfedavgm", "local"}
# What bridge scale may change; everything else is the paper's.
MAY_DIFFER = {
    "clients",
    "clusters",  # table4-femnist-k: one of the three of the paper
    "algorithms",
    "seeds",
    "topology.p",
    "data.samples_per_client",
    "data.test_samples_per_client",
}


def configs(name: str) -> tuple[Config, Config]:
    """Resolve the one point of a preset at bridge scale, and the paper's with as many clusters."""
    (bridge,) = load_experiment(name, "bridge").points
    recipe = None if name == "table1-emnist" else "text"
    points = [point.config for point in load_experiment(name, "paper", recipe=recipe).points]
    (paper,) = [config for config in points if config.clusters == bridge.config.clusters]
    return bridge.config, paper


def test_other_presets_name_the_scales_that_they_have() -> None:
    with pytest.raises(ConfigError, match=r'^unknown scale "bridge".*desk, paper'):
        load_experiment("table1-mnist", "bridge")


@pytest.mark.parametrize("name", BRIDGED)
def test_only_the_number_of_clients_and_their_graph_differ_from_the_paper(name: str) -> None:
    bridge, paper = configs(name)
    ours, theirs = flatten(bridge.values()), flatten(paper.values())
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    left_out = tuple(f"algorithm.{name}." for name in paper.algorithms if name not in bridge.algorithms)
    differing = {key for key in differing if not key.startswith(left_out)}  # options of rows that bridge has not
    assert differing <= MAY_DIFFER
    assert (bridge.model, bridge.local, bridge.rounds) == (paper.model, paper.local, paper.rounds)
    assert bridge.clients < paper.clients
    assert bridge.distributions == paper.distributions
    assert set(bridge.algorithms) == ALGORITHMS
    assert bridge.seeds == (0,)


@pytest.mark.parametrize("name", ["table1-cifar10", "table1-emnist"])
def test_a_client_has_as_many_samples_as_in_the_paper(name: str) -> None:
    bridge, paper = configs(name)
    official = source_of(bridge.data.name).samples  # "50,000 / 10,000"
    train, test = (int(part.replace(",", "")) for part in official.split(" / "))
    members = paper.clients // paper.distributions
    assert paper.data.samples_per_client is None  # the whole set is dealt to the clients of a cluster
    assert bridge.data.samples_per_client == train // members
    assert bridge.data.test_samples_per_client is not None
    assert bridge.data.test_samples_per_client >= test // members


def test_a_writer_keeps_all_of_its_samples() -> None:
    bridge, paper = configs("table4-femnist-k")
    assert bridge.data == paper.data
    assert bridge.data.samples_per_client is None


@pytest.mark.parametrize("name", ["table1-cifar10", "table1-emnist"])
def test_a_client_keeps_its_neighbours_within_its_cluster(name: str) -> None:
    bridge, paper = configs(name)
    others = bridge.clients / bridge.distributions - 1
    wanted = paper.topology.p * (paper.clients / paper.distributions - 1)
    assert others >= 1
    # Where a cluster is smaller than that, every other member is a neighbour.
    assert bridge.topology.p * others == pytest.approx(min(wanted, others), rel=0.01)


def test_a_writer_keeps_its_neighbours_per_cluster() -> None:
    """Nobody knows which writers are alike: of all neighbours, each of the k clusters has a k-th."""
    bridge, paper = configs("table4-femnist-k")
    neighbours = [config.topology.p * (config.clients - 1) / config.clusters for config in (bridge, paper)]
    assert neighbours == [pytest.approx(26.5, abs=0.05), pytest.approx(26.6, abs=0.05)]
    assert neighbours[0] == pytest.approx(neighbours[1], rel=0.01)


@pytest.mark.parametrize("name", BRIDGED)
def test_the_published_numbers_are_shown_beside_it(name: str) -> None:
    (point,) = load_experiment(name, "bridge").points
    assert {"dfca-gi", "dfca-li", "ifca"} <= set(published.published(name, point.at or {}))
