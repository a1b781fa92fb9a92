"""DPFL and PSFL by hand: who is chosen, and what is remembered of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import networkx as nx
import pytest
import torch
from driver_checks import assert_same
from driver_checks import run as finish
from torch import nn
from toy import make_toy_model, make_toy_setting, make_toy_split

from dfca import algorithms
from dfca.algorithms.dpfl import double_greedy
from dfca.algorithms.psfl import known, nothing_known
from dfca.base.errors import ConfigError
from dfca.contracts import ContractError, check_algorithm
from dfca.core.algorithm import Algorithm
from dfca.core.learning.local import LocalOptions
from dfca.core.rng import stream
from dfca.core.rules.choosing import PeerAverage, PeerDraw, Received
from dfca.data.options import DataOptions
from dfca.data.partitions import make_split
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.rounds.simulation import Simulation

NOBODY = torch.full((5,), -1.0, dtype=torch.float64)


def seen(
    score: Callable[[torch.Tensor], torch.Tensor] | None = None, client: int = 0, round: int = 2, **changes: Any
) -> Received:
    peers = changes.pop("peers", [1, 2, 3, 4])
    fields: dict[str, Any] = {
        "losses": torch.zeros(len(peers)),
        "sizes": torch.tensor([10] * (1 + len(peers))),
        "memory": NOBODY,
        "memories": torch.zeros(len(peers), 5),
        "neighbours": peers,
        "random": lambda: stream(0, "merge", round),
        "score": score,
    }
    return Received(client, round, peers, **{**fields, **changes})


def distance_to(target: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Score averages of the models 0, 1, 2, 3, 4, each one number, by their distance to a target."""
    return lambda weights: (weights @ torch.arange(5.0, dtype=torch.float64) - target).abs()


def test_dpfl_takes_who_lowers_the_loss_and_keeps_to_the_budget() -> None:
    choice = algorithms.get("dpfl", budget=3).peers
    assert choice is not None
    alone = choice.merge(seen(distance_to(-9.0)))
    assert alone.weights.tolist() == [1, 0, 0, 0, 0], "everybody else is farther from the target"
    assert alone.memory.tolist() == [0, 0, 0, 0, 0]
    helped = choice.merge(seen(distance_to(9.0)))
    assert helped.weights[0] > 0
    assert 1 <= int((helped.weights[1:] > 0).sum()) <= 3
    assert helped.memory.tolist() == [0, *(helped.weights[1:] > 0).double().tolist()]
    assert int(double_greedy(1, seen(distance_to(9.0))).sum()) == 2
    by_size = choice.merge(seen(distance_to(9.0), sizes=torch.tensor([10, 0, 0, 0, 30])))
    assert by_size.weights[4] in (0.0, 0.75)
    broken = choice.merge(seen(distance_to(9.0), losses=torch.tensor([1.0, 1.0, 1.0, math.nan])))
    assert broken.weights[4] == 0, "a model without a loss is left out"


def test_dpfl_asks_all_at_first_and_then_those_that_it_chose() -> None:
    choice = algorithms.get("dpfl", every=3).peers
    assert choice is not None

    def ask(round: int, memory: torch.Tensor) -> list[int]:
        return choice.ask(PeerDraw(0, round, [1, 2, 3, 4], memory, torch.Generator))

    assert [ask(round, NOBODY) for round in (0, 1, 2, 4)] == [[]] * 4
    assert ask(3, NOBODY) == [1, 2, 3, 4]
    chosen = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    assert ask(6, chosen) == [2, 4]
    score = lambda weights: weights[:, 0]  # noqa: E731
    later = choice.merge(seen(score, memory=chosen, peers=[2, 4], sizes=torch.ones(3), round=6))
    assert torch.equal(later.memory, chosen), "the first choice says who is asked"


def test_dpfl_is_not_worse_than_alone_where_nobody_helps() -> None:
    """Six clients, each with a rule of its own, that choose by what they hold out."""
    split = make_toy_split(clusters=6, samples=60)
    changes = {"split": split, "rounds": 40, "evaluate_every": 40, "make_model": partial(make_toy_model, nn.Tanh)}
    ours, alone, one = (
        Simulation(make_toy_setting(name, clusters=1, graph=nx.complete_graph(6), **changes))
        for name in ("dpfl", "local", "dfedavgm")
    )
    scores = [[simulation.step() for _ in range(40)][-1]["accuracy"] for simulation in (ours, alone, one)]  # type: ignore[index]
    assert scores[0] >= scores[1] - 0.05
    assert scores[0] > scores[2] + 0.1


def memory_of(client: int, leader: int, distance: float, losses: dict[int, float]) -> torch.Tensor:
    memory = nothing_known(1, 5)
    part = known(memory)
    part.leaders[client], part.stamps[client], part.distance[0] = leader, 1, distance
    for j, loss in losses.items():
        part.losses[j] = loss
    return memory


def test_psfl_follows_the_lowest_leader_in_reach_and_averages_its_region() -> None:
    choice = algorithms.get("psfl", threshold=3.0, every=3).peers
    assert choice is not None
    told = torch.stack(
        [
            memory_of(0, 0, 0.0, {4: 2.5}),  # too far: 2.5 + 1.0
            memory_of(1, 1, 0.0, {4: 0.5}),  # reached at 1.0
            memory_of(2, 1, 0.25, {4: 0.5}),  # the same leader, reached at 0.85
            memory_of(3, 3, 0.0, {4: 0.1}),  # nearer, and a higher number
        ]
    )
    changes = {"memory": nothing_known(1, 5), "memories": told, "peers": [0, 1, 2, 3]}
    losses = torch.tensor([1.0, 0.5, 0.1, 0.1])
    merged = choice.merge(seen(client=4, losses=losses, neighbours=[0, 1, 2, 3], **changes))
    part = known(merged.memory)
    assert part.leaders.tolist() == [0, 1, 1, 3, 1]
    assert float(part.distance) == pytest.approx(0.85)
    assert part.losses[:4].tolist() == pytest.approx([1.0, 0.5, 0.1, 0.1])
    torch.testing.assert_close(merged.weights, torch.tensor([0.4, 0.0, 0.3, 0.3, 0.0], dtype=torch.float64))
    assert choice.merge(seen(client=4, losses=losses, round=1, **changes)).weights.tolist() == [1, 0, 0, 0, 0]
    asked = PeerDraw(4, 2, [0, 1, 2, 3], merged.memory, torch.Generator, neighbours=[3])
    assert choice.ask(asked) == [1, 2, 3], "its neighbour, and those of its region"
    assert choice.ask(asked._replace(round=1)) == [3]


def test_psfl_finds_regions_without_their_number_and_forgets_a_leader_that_left() -> None:
    split = make_split(
        DataOptions(samples_per_client=60, placement="blocks", transform="label-permutation"),
        clients=8,
        clusters=2,
        seed=0,
    )
    assert split.clusters.tolist() == [0] * 4 + [1] * 4
    setting = make_toy_setting(
        algorithms.get("psfl", threshold=4.0),
        split=split,
        graph=nx.cycle_graph(8),
        make_model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        rounds=20,
        local=LocalOptions(steps=10, learning_rate=0.5),
        dtype=torch.float32,
    )
    simulation = finish(setting)
    leaders = [int(known(memory).leaders[i]) for i, memory in enumerate(simulation.start.memory)]
    assert leaders == [0] * 4 + [4] * 4
    torch.testing.assert_close(nothing_known(1, 3)[:3], torch.full((3,), math.nan, dtype=torch.float64), equal_nan=True)
    alone = nothing_known(1, 5)
    choice = algorithms.get("psfl").peers
    assert choice is not None
    echo = memory_of(1, 0, 3.0, {2: 0.7})  # both follow a leader that is gone, each by the other's word
    left = choice.merge(seen(client=2, peers=[1], losses=torch.tensor([0.7]), memory=alone, memories=echo[None]))
    assert int(known(left.memory).leaders[2]) == 2


@pytest.mark.parametrize("name", ["dpfl", "psfl"])
def test_they_keep_the_contracts_and_hold_samples_out(name: str) -> None:
    check_algorithm(name)
    setting = make_toy_setting(name, split=make_toy_split(samples=[3, 12, 7, 5, 12, 9]), rounds=6)
    assert_same(setting)
    assert Simulation(setting).train.sizes == (3, 10, 6, 4, 10, 8), "who has fewer than five holds out none"
    with pytest.raises(ConfigError, match="which no peer in virtual time can ask for"):
        EventSimulation(setting)


def test_a_merge_that_is_no_average_is_refused_and_an_exception_names_its_line() -> None:
    def with_merge(merge: Callable[[Received], PeerAverage]) -> Algorithm:
        dpfl = algorithms.get("dpfl", every=1)
        assert dpfl.peers is not None
        return replace(dpfl, peers=replace(dpfl.peers, merge=merge))

    for weights, shown in (
        (torch.ones, r"\[1.0, 1.0, 1.0"),
        (lambda n: torch.zeros(n - 1), "got "),
        (torch.zeros, "0.0"),
    ):
        twice = with_merge(lambda seen, of=weights: PeerAverage(of(1 + len(seen.peers)), seen.memory))
        with pytest.raises(ConfigError, match=rf"must return \d+ weights >= 0 with the sum 1, .*{shown}"):
            finish(make_toy_setting(twice))
    short = with_merge(lambda seen: PeerAverage(torch.eye(1 + len(seen.peers))[0], seen.memory[:2]))
    with pytest.raises(ConfigError, match=r"must return a memory of the shape \(6,\), got \(2,\)"):
        finish(make_toy_setting(short))

    def broken(seen: Received) -> PeerAverage:
        raise KeyError("mine")

    with pytest.raises(ContractError, match=r"peers.merge of dpfl raises KeyError: 'mine' \(test_peer_rivals.py, line"):
        check_algorithm(with_merge(broken))


def test_psfl_says_where_the_graph_leaves_clients_alone() -> None:
    apart = finish(make_toy_setting("psfl", graph=nx.disjoint_union(nx.path_graph(3), nx.empty_graph(3))))
    assert any("have no neighbours" in note for note in apart.notes)
    assert not any("the graph does not limit it" in note for note in apart.notes)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dpfl", {"budget": 0}, "algorithm.dpfl.budget must be >= 1, got 0"),
        ("dpfl", {"every": 0}, "algorithm.dpfl.every must be >= 1, got 0"),
        ("psfl", {"threshold": 0.0}, "algorithm.psfl.threshold must be > 0, got 0.0"),
        ("psfl", {"threshold": math.inf}, "algorithm.psfl.threshold must be > 0, got inf"),
        ("psfl", {"every": 0}, "algorithm.psfl.every must be >= 1, got 0"),
        ("dfedpgp", {"body_steps": -1}, "algorithm.dfedpgp.body_steps must be >= 0, got -1"),
    ],
)
def test_bad_options_say_what_to_do(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        algorithms.get(name, **options)
