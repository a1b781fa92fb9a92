"""Small settings that tests share: numbers a person can follow."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# Tensors of tests are tiny, and pytest-xdist fills the cores with processes: more threads would only wait for each
# other, and by default OpenMP waits in a busy loop. Before torch is imported, so that this holds here and in children.
# `pytest tests/test_bench.py -k plain_schedule`, which needs two threads, took 6.5 s without and 2.6 s with the second.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import networkx as nx
import pytest
import torch
from torch import nn

from dfca import algorithms
from dfca.core.local import LocalOptions
from dfca.data.clients import Split
from dfca.sim.setting import Setting

torch.set_num_threads(1)


def make_toy_split(clients: int = 6, clusters: int = 2, samples: int | list[int] = 12, seed: int = 0) -> Split:
    """Make clients whose labels are one linear rule per cluster: separable, tiny, and clearly different."""
    generator = torch.Generator().manual_seed(seed)
    rules = torch.randn(clusters, 4, 3, generator=generator)
    truth = torch.arange(clients) % clusters
    sizes = [samples] * clients if isinstance(samples, int) else samples

    def draw(n: int, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, 4, generator=generator)
        return x, (x @ rules[cluster]).argmax(dim=1)

    train = [draw(n, int(c)) for n, c in zip(sizes, truth, strict=True)]
    test = [draw(8, int(c)) for c in truth]
    return Split.of_clients(train, test, clusters=truth, classes=3)


def make_toy_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def make_toy_setting(algorithm: Any = "dfca-gi", **changes: Any) -> Setting:
    split = changes.pop("split", None) or make_toy_split()
    clients = len(split.train.sizes)
    fields: dict[str, Any] = {
        "split": split,
        "graph": nx.cycle_graph(clients),
        "make_model": make_toy_model,
        "algorithm": algorithms.get(algorithm) if isinstance(algorithm, str) else algorithm,
        "clusters": 2,
        "rounds": 4,
        "seed": 3,
        "local": LocalOptions(steps=2, learning_rate=0.3),
        "evaluate_every": 2,
        "dtype": torch.float64,
    }
    return Setting(**{**fields, **changes})


@pytest.fixture
def toy_setting() -> Callable[..., Setting]:
    return make_toy_setting


@pytest.fixture
def toy_split() -> Callable[..., Split]:
    return make_toy_split


COVERING = ("algorithms", "client", "election", "layers", "local", "mixing", "params", "relay", "simulate")
"""The test files whose coverage of `core` and `algorithms` is measured: tracing lines makes tests half as slow again.

`pytest tests/test_drivers.py tests/test_engine.py tests/test_mixing.py` took 48 s of a core without `--cov`, 72 s with.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") not in COVERING:
            item.add_marker(pytest.mark.no_cover)
