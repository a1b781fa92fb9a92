"""ProFed's split: a stand-in for the package deals regions by label; without it there is a sentence."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dfca.base.errors import ConfigError, DataError
from dfca.data import profed
from dfca.experiment.load import load_experiment


class FakeRegions:
    """Deals the samples of label 2 r and 2 r + 1 to region r, as ProFed's "Hard" does."""

    def __init__(self, subset: Any, regions: int) -> None:
        labels = subset.dataset.targets.numpy()
        per_region = len(subset.dataset.classes) // regions
        self.regions = [np.flatnonzero(labels // per_region == region) for region in range(regions)]

    def from_subregion_to_devices(self, region: int, devices: int) -> dict[int, Any]:
        parts = np.array_split(self.regions[region], devices)
        return {i: (SimpleNamespace(indices=part.tolist()), None) for i, part in enumerate(parts)}


@pytest.fixture
def fake_profed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ProFed.partitioner")
    asked = ("MNIST", "Hard", profed.REGIONS, 3)

    def partition(train: Any, validation: Any, *options: Any) -> FakeRegions:
        assert options == asked
        return FakeRegions(train, profed.REGIONS)

    module.partition_to_subregions = partition  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ProFed", ModuleType("ProFed"))
    monkeypatch.setitem(sys.modules, "ProFed.partitioner", module)
    images = np.arange(50 * 4, dtype=np.uint8).reshape(50, 1, 2, 2)
    data = SimpleNamespace(x=images, y=np.arange(50) % 10, classes=10)
    monkeypatch.setattr(profed, "load", lambda name: data)
    monkeypatch.setattr(profed, "SAMPLES", 50)


def test_devices_of_a_region_follow_one_another_and_share_its_labels(fake_profed: None) -> None:
    split = profed.hard(10, seed=3)
    assert split.clusters is not None
    assert split.clusters.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert split.train.sizes == (4,) * 10
    assert split.test.sizes == (1,) * 10
    for client in range(10):
        x, y = split.train.of(client)
        assert set(y.tolist()) <= {2 * (client // 2), 2 * (client // 2) + 1}
        first = (x.reshape(len(x), -1)[:, 0] * 255).round().long() // 4 % 10
        assert first.tolist() == y.tolist(), "an image keeps its label"
    with pytest.raises(ConfigError, match="clients must be >= 5, one per region, got 4"):
        profed.hard(4, seed=3)


def test_without_the_package_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ProFed", None)
    with pytest.raises(DataError, match=r"needs the package ProFed \(Python 3.12 or later\): pip install"):
        profed.dirichlet(10, seed=0)


def test_the_preset_names_the_three_deals() -> None:
    experiment = load_experiment("profed")
    factories = [point.config.data.factory for point in experiment.points]
    assert factories == [f"dfca.data.profed:{name}" for name in ("hard", "dirichlet", "iid")]
    assert all(callable(getattr(profed, name)) for name in ("hard", "dirichlet", "iid"))
