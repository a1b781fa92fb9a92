"""The preset `never-worse`: enough worlds, and the same momentum and last step for everybody in each of them."""

from __future__ import annotations

from dfca import algorithms
from dfca.core.client import effective
from dfca.experiment.load import load_experiment


def test_it_has_the_worlds_and_is_fair() -> None:
    points = load_experiment("never-worse").points
    assert len(points) >= 12
    for point in points:
        config = point.config
        assert config.personal is not None
        assert config.personal.steps == "auto"
        assert 24 <= config.clients <= 48
        assert config.rounds <= 40
        momenta = {effective(config.local.options(), algorithms.get(name)).momentum for name in config.algorithms}
        assert momenta == {0.9}, point.label
        assert {"dfca-auto", "dfedavgm", "fedavg", "local"} <= set(config.algorithms)
    others = {"fedem", "dfedpgp", "dpfl", "psfl"}  # without a last step; of the preset rivals-2025
    assert set(points[0].config.algorithms) == set(algorithms.ALGORITHMS) - others
    assert {point.config.data.name for point in points} == {"mnist", "har", "femnist"}
    assert {"noise", "blur", "label-swap"} <= {point.config.data.transform for point in points}
