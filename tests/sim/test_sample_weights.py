"""Averages by samples: weights checked by hand, and a server's mean against the formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import pytest
import torch

import dfca
from dfca.base.errors import ConfigError
from dfca.experiment.load import load_experiment
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting

UNEVEN = dfca.DataOptions(partition="uneven", spread=1.0, samples_per_client=20)


def uneven(setting: Setting, **changes: object) -> Setting:
    split = dfca.make_split(UNEVEN, clients=setting.clients, clusters=2, seed=0)
    return replace(setting, split=split, make_model=lambda: dfca.mlp((1, 8, 8), 10, 4), **changes)  # type: ignore[arg-type]


def test_neighbours_weigh_by_their_samples(toy_setting: Callable[..., Setting]) -> None:
    setting = uneven(toy_setting("dfca-gi"), weights="samples", graph=nx.complete_graph(toy_setting().clients))
    exchange = Simulation(setting).exchange
    n, everybody = setting.split.train.sizes, torch.ones(setting.clients, dtype=torch.bool)
    links = exchange._links(everybody, everybody, {})
    for receiver, sender, weight in zip(*(part.tolist() for part in links), strict=True):
        assert weight == pytest.approx(n[sender] / sum(n)), (receiver, sender)
    trainers = everybody.clone()
    trainers[0] = False
    links = exchange._links(trainers, everybody, {0: 1})
    assert links.weight[-1] == 1.0, "who did not train takes what is relayed to it"


def test_a_server_weighs_by_samples(toy_setting: Callable[..., Setting]) -> None:
    ends = {}
    for weights in ("uniform", "samples"):
        simulation = Simulation(uneven(toy_setting("fedavg"), weights=weights, rounds=1))
        simulation.step()
        ends[weights] = simulation.banks[0, 0]
    alone = Simulation(uneven(toy_setting("fedavg"), rounds=1))
    n = alone.setting.split.train.sizes
    assert len(set(n)) > 1
    assert not torch.equal(ends["uniform"], ends["samples"])
    # a client's own model after the round is what "local" has after it, from the same start
    local = Simulation(uneven(toy_setting("local"), rounds=1))
    local.banks[:] = alone.banks[:, :1].expand_as(local.banks)
    local.step()
    own = local.banks[0].double()
    expected = (torch.tensor(n).double()[:, None] * own).sum(0) / sum(n)
    assert torch.allclose(ends["samples"].double(), expected, atol=1e-6)
    assert torch.allclose(ends["uniform"].double(), own.mean(0), atol=1e-6)


def test_it_needs_rounds() -> None:
    with pytest.raises(ConfigError, match="needs synchronous rounds"):
        load_experiment("stragglers", overrides=["mixing.weights=samples"])
