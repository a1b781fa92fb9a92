"""Surveys among peers: in the ideal world what the synchronous simulator computes, elsewhere everybody ends alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from event_runs import assert_identical, assert_same, lineages, run, through_disk
from merge_worlds import make_world
from toy import make_toy_split

from dfca.base.errors import ConfigError
from dfca.core.method import MergeOptions
from dfca.core.rules.merging import Merge, Plan
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import Clusters, Entry, compatible, layout_of, opened_since, quiet_surveys
from dfca.peer.revival import DriftDetector
from dfca.peer.state import State
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Churn, Compute, Devices, Faults, Link, Partition, World
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting


def small(**changes: Any) -> Setting:
    """Make the world of the surveys by rounds, without the personal last step, which peers do not have."""
    return make_world(**{"personal_steps": 0, "dtype": torch.float64, **changes})


WORLDS: dict[str, dict[str, Any]] = {
    "k unknown": {},
    "sequential": {"aggregation": "sequential"},
    "ring, uneven": {
        "graph": nx.cycle_graph(12),
        "split": make_toy_split(12, samples=[60, 60, 50, 40, 60, 24, 60, 18, 60, 60, 44, 24]),
    },
    "half of the clients": {"participation": 0.6},
}


@pytest.mark.parametrize("world", WORLDS)
def test_the_ideal_world_equals_the_synchronous_simulator(world: str) -> None:
    setting = small(**WORLDS[world])
    simulation = EventSimulation(setting)
    result = simulation.run()
    assert_same(setting, result)
    assert result.records["survey"] % 12 == 0 < result.records["survey"]
    assert result.banks.shape[0] == 2
    left = "dfca-auto opened 4 clusters and merged those that are not worth their data: 2 are left"
    assert left in simulation.notes


def test_where_a_number_of_clusters_is_given_as_many_are_elected_and_none_is_surveyed() -> None:
    setting = small(clusters=3)
    result = EventSimulation(setting).run()
    assert_same(setting, result)
    assert result.banks.shape[0] == 3
    assert "survey" not in result.records


@pytest.mark.parametrize(
    ("drift", "rounds", "clusters"),
    [(8, 40, None), (16, 48, None), (16, 48, 2)],
    ids=["a round before a survey", "after the last", "where two clusters were asked for"],
)
def test_the_default_dfca_equals_the_synchronous_simulator_across_a_drift_and_its_by_election(
    drift: int, rounds: int, clusters: int | None
) -> None:
    before, after = make_toy_split(12, samples=60), make_toy_split(12, samples=60)
    for client in (0, 2, 4):
        after.train.of(client)[1].copy_((after.train.of(client)[1] + 1) % 3)
        after.test.of(client)[1].copy_((after.test.of(client)[1] + 1) % 3)
    changes = {"split": before, "drift": (drift, after), "rounds": rounds, "clusters": clusters}
    setting = small(evaluate_every=rounds // 2, **changes)
    algorithm = replace(setting.algorithm, revives=True, merging=replace(setting.algorithm.merging, opens=4))
    setting = replace(setting, algorithm=algorithm)
    simulation = EventSimulation(setting)
    result = simulation.run()
    assert_same(setting, result)
    assert len(result.banks) == 3  # the by-election's stays, whatever was asked for
    ((*entries,),) = lineages(simulation)
    by_election = next(place for place, entry in enumerate(entries) if place and not entry.is_survey)
    if clusters is not None:
        assert len(entries) == 2  # no survey
        return
    before = entries[by_election - 1]  # it left alone the clusters that were about to change
    assert before.last if drift == 16 else not before.changes
    assert entries[-1].last
    assert entries[by_election + 1 :]


def test_a_run_without_end_surveys_until_nothing_is_merged() -> None:
    setting = small(evaluate_every=100)
    simulation = EventSimulation(setting, None, EventOptions(until_s=190.0))
    result = simulation.run()
    ((_, *surveys),) = lineages(simulation)
    assert [survey.last for survey in surveys] == [False] * (len(surveys) - 1) + [True]
    assert not surveys[-1].merges
    assert min(result.rounds) > 10


ROUGH = {
    "stragglers": World(Compute(1.0, devices=(Devices(0.25, 6.0),)), Link(0.05, spread=0.5)),
    "churn": World(link=Link(0.02), churn=Churn.of_share(0.1, away_s=20.0)),
    "loss": World(link=Link(0.1, spread=0.5), faults=Faults(loss=0.2, corruption=0.1)),
    "partition": World(link=Link(0.02), partitions=(Partition(20.0, 60.0, ((0, 1, 2),)),)),
}


@pytest.mark.parametrize(
    "world", [pytest.param(name, marks=pytest.mark.slow) if name in ("loss", "partition") else name for name in ROUGH]
)
def test_in_rough_worlds_everybody_ends_with_the_same_clusters(world: str) -> None:
    setting = small(rounds=20, aggregation="sequential", evaluate_every=100, seed=14)
    simulation = EventSimulation(setting, ROUGH[world], EventOptions(trace=True, rounds=20))
    result = simulation.run()
    assert result.records["survey"] > 6
    assert torch.isfinite(result.banks).all()
    assert len(lineages(simulation)) == 1
    peers = [peer for peer in simulation.host.peers if isinstance(peer, Peer)]
    assert {len(peer.open_clusters) for peer in peers} == {2}
    for peer in peers:
        assert peer.bank is not None
        assert layout_of(peer.lineage) == Clusters(len(peer.bank), peer.copies.closed)
    if world == "stragglers":
        assert_identical(run(setting, ROUGH[world], trace=True, rounds=20, replay=result.trace), result)


def test_no_round_waits_for_a_survey() -> None:
    # An observation takes 30 local steps, as many as 10 rounds: meanwhile rounds take a quarter longer.
    setting = small(rounds=1000, aggregation="sequential", evaluate_every=10_000)
    world = World(Compute(1.0, devices=(Devices(0.25, 6.0),), background=0.2), Link(0.05))
    simulation = EventSimulation(setting, world, EventOptions(until_s=600.0))
    alone = run(replace(setting, algorithm=replace(setting.algorithm, merging=None)), world, until_s=600.0)
    result = simulation.run()
    assert result.records["survey"] > 12
    assert all(mine > 0.8 * others for mine, others in zip(result.rounds, alone.rounds, strict=True))


def test_a_survey_is_followed_by_no_false_alarm() -> None:
    # With other models and other samples the losses are others, and what was learned before is not forgotten.
    detector = DriftDetector()
    detector.grow(3)
    for loss in (2.0, 0.5, 0.1):
        detector.look(loss)
    detector.merge(Plan(MERGE), [0, 1])
    for loss in (0.05, 0.2, 0.2, 0.2):
        detector.look(loss)
    assert not detector.alarmed
    for loss in (1.0, 1.0, 1.0):
        detector.look(loss)
    assert detector.alarmed


def test_a_minority_decides_nothing_and_catches_up() -> None:
    # Three of twelve are cut off while the others merge: alone they merge nothing, and later they do as the others did.
    setting = small(rounds=40, aggregation="sequential", evaluate_every=100)
    world = World(link=Link(0.01), partitions=(Partition(8.0, 70.0, ((0, 1, 2),)),))
    simulation = EventSimulation(setting, world, EventOptions(rounds=40))
    while simulation.now < 60.0 and not simulation.done:
        simulation.step()
    apart = {len(peer.lineage) for i, peer in enumerate(simulation.host.peers) if isinstance(peer, Peer) and i < 3}
    assert apart == {1}
    assert max(len(lineage) for lineage in lineages(simulation)) > 1
    result = simulation.run()
    assert len(lineages(simulation)) == 1
    assert not {"switch", "take"} & set(result.records)  # no model had to be sent for it


@pytest.mark.parametrize("until", ["it is observed", "its result waits"])
def test_stop_in_the_middle_of_a_survey_and_resume_is_bit_identical(until: str) -> None:
    observed = until == "it is observed"
    setting, world = small(evaluate_every=2, rounds=12), SLOW_LINKS if observed else World(link=Link(0.05))
    expected = run(setting, world)
    first = EventSimulation(setting, world)
    first._begin()
    peers = [peer for peer in first.host.peers if isinstance(peer, Peer)]
    while not (some := [p for p in peers if (p.background if observed else p.surveys.decided) is not None]):
        assert first.now < 100
        first.clock.now = first.host.now = first._next_time()
        first._handle_instant()
    assert State.TRAINING in {peer.state for peer in some}  # their rounds continue
    tensors, facts = first.state()
    stored = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts))
    second = EventSimulation(setting, world)
    second.restore(*stored)
    result = second.run()
    assert torch.equal(result.banks, expected.banks)
    assert result.time_s == expected.time_s
    assert result.records["survey"] == expected.records["survey"]


SLOW_LINKS = World(Compute(background=0.2), Link(0.5))


def test_a_checkpoint_with_more_clusters_than_asked_for_is_refused() -> None:
    setting = small()
    setting = replace(setting, algorithm=replace(setting.algorithm, revives=True))
    for driver in (Simulation, EventSimulation):
        stopped, asked = driver(setting), driver(replace(setting, clusters=2))
        stopped.step()
        with pytest.raises(ConfigError, match="election opened 4 clusters where 2 are asked for, to merge some later"):
            asked.restore(*through_disk(*stopped.state()))


# What a lineage says of clusters.

START = Entry(9, 0, 1, 0, 7, (0, 1, 2, 3))
MERGE = (Merge(0, 2, 0.5, 0.1),)


def test_the_clusters_of_a_lineage_with_surveys() -> None:
    first = Entry(9, 0, 1, 0, 0, (0, 2), MERGE)
    last = Entry(9, 0, 1, 0, 0, (0, 1, 2, 3), (), (3,), True)
    assert layout_of((START, first)) == Clusters(4, (2,))
    assert layout_of((START, first, last)) == Clusters(2)
    reopened = Entry(8, 0, 1, 0, 5, (2,))
    assert layout_of((START, first, reopened)) == Clusters(4)
    assert compatible((START,), (START, first), 1)
    assert not compatible((START,), (START, first), 0)
    assert not compatible((START, first), (START, first, last), 1)  # it has another number now
    assert opened_since((START, first, last), (START,)) == ()
    assert opened_since((START, first, reopened), (START, first)) == (2,)
    assert opened_since((START, first, reopened), (START,)) is None


def test_a_survey_that_changes_nothing_is_an_entry_without_clusters() -> None:
    quiet, reopened = Entry(9, 0, 1, 0, 0, ()), Entry(8, 0, 1, 0, 5, (2,))
    first, last = Entry(9, 0, 1, 0, 0, (0, 2), MERGE), Entry(9, 0, 1, 0, 0, (), last=True)
    assert layout_of((START, quiet)) == layout_of((START, quiet, last)) == Clusters(4)
    assert all(compatible((START,), (START, quiet), j) for j in range(4))
    assert opened_since((START, quiet), (START,)) == ()
    assert opened_since((START, quiet, reopened), (START,)) == (2,)  # and no other model
    rows = (), (START,), (START, quiet), (START, first, quiet, quiet)
    assert [quiet_surveys(row) for row in rows] == [0, 0, 1, 2]
    assert quiet_surveys((START, quiet, first)) == quiet_surveys((START, quiet, reopened)) == 0


@pytest.mark.parametrize(
    "entry",
    [
        Entry(9, 0, 1, 0, 0, (0, 2), (Merge(0, 7, 0.5, 0.1),)),
        Entry(9, 0, 1, 0, 0, (2,), (Merge(2, 2, 0.5, 0.1),)),
        Entry(9, 0, 1, 0, 0, (0, 1, 2, 3), (), (0, 1, 2, 3), True),
        Entry(9, 0, 1, 0, 0, (0, 1, 2), (*MERGE, Merge(1, 2, 0.5, 0.1))),
        Entry(9, 0, 1, 0, 0, (0,), MERGE),
    ],
    ids=["no such cluster", "into itself", "nothing is left", "twice", "other clusters change"],
)
def test_an_impossible_survey_belongs_to_no_election(entry: Entry) -> None:
    assert layout_of((START, entry)) == Clusters(0)


def test_a_survey_changes_all_numbers_only_where_something_was_closed() -> None:
    assert Clusters(3).changed_by(Plan(), last=True) == ()
    assert Clusters(3, (1,)).changed_by(Plan(), last=True) == (0, 1, 2)
    assert MergeOptions().opened(12) == 4
