"""Elections, relay, revival and drift in virtual time: with loss, delays and partitions everybody ends alike."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from drifts import drift_setting
from event_runs import QUICK, STRAGGLERS, TIMED_LINK, assert_identical, assert_same, drifting, lineages, quick, run
from toy import make_toy_setting, make_toy_split

from dfca import DataOptions, algorithms, make_split
from dfca.core.rules.election import ElectionOptions
from dfca.peer.peer import Peer
from dfca.peer.records.messages import LARGE, Call, Hello, Open, scalars
from dfca.peer.waves.deadline import MOST_S, AnswerTime
from dfca.peer.waves.election import Election
from dfca.peer.waves.wave import NO_WAVE
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Absence, Churn, Compute, Faults, LateJoiner, Link, Partition, World, preset
from dfca.sim.rounds.election import ElectionCost
from dfca.sim.rounds.simulation import Simulation

LINK = Link(0.03, spread=0.8, bandwidth_bytes_s=20_000.0)


def test_a_warm_up_with_momentum_equals_the_synchronous_simulator() -> None:
    setting = make_toy_setting("dfca-fi", rounds=2)
    options = ElectionOptions(warmup_steps=8, warmup_momentum=0.9)  # rounds have 2 steps: four stages
    momentum, plain = (
        replace(setting, algorithm=replace(setting.algorithm, election=election))
        for election in (options, replace(options, warmup_momentum=0.0))
    )
    result = run(momentum)
    assert_same(momentum, result)
    assert not torch.equal(result.banks, run(plain).banks)


def test_with_a_given_number_of_clusters_dfca_auto_starts_as_dfca_fi_does() -> None:
    made = [Simulation(make_toy_setting(name, clusters=2)) for name in ("dfca-fi", "dfca-auto")]
    (first,), (second,) = (simulation.elections for simulation in made)
    assert (first.turns, first.models_sent, first.scalars_sent) == (
        second.turns,
        second.models_sent,
        second.scalars_sent,
    )
    assert torch.equal(made[0].banks, made[1].banks)


def test_where_k_is_not_given_a_start_of_dfca_auto_costs_at_most_twice_that_of_dfca_fi() -> None:
    passed = [0]

    class Counting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            passed[0] += len(x)
            return super().forward(x)

    costs = []
    for name in ("dfca-fi", "dfca-auto"):
        passed[0] = 0
        Simulation(make_toy_setting(name, clusters=None, make_model=lambda: Counting(4, 3), engine="loop"))
        costs.append(passed[0])
    assert 0 < costs[1] <= 2 * costs[0]


@pytest.mark.parametrize("aggregation", [pytest.param("batch", marks=pytest.mark.slow), "sequential"])
def test_revival_and_drift_equal_the_synchronous_simulator(aggregation: str) -> None:
    # A by-election takes its time here and none there; the models that it opens are the same.
    setting = drifting(rounds=14, dtype=torch.float64, aggregation=aggregation)
    result = run(setting, trace=True)
    assert_same(setting, result)
    assert result.banks.shape[0] == 3
    assert {record.number for record in result.trace or [] if record.kind == "elect"} == {2, 3}
    assert_identical(run(setting, trace=True, replay=result.trace), result)


@pytest.mark.parametrize(("clusters", "clients"), [(None, 30), (3, 12)])
def test_the_cost_of_an_election_is_that_of_the_synchronous_simulator(clusters: int | None, clients: int) -> None:
    graph = nx.connected_watts_strogatz_graph(clients, 4, 0.3, seed=1)
    setting = quick(rounds=1, clusters=clusters, split=make_toy_split(clients=clients), graph=graph)
    simulation = EventSimulation(setting)
    sent, forward = [], simulation.host.send

    def count(sender: int, receivers: tuple[int, ...], message: Any, number: int) -> None:
        if not isinstance(message, (Hello, *LARGE)):
            sent.append(len(receivers) * scalars(message))
        forward(sender, receivers, message, number)

    simulation.host.send = count
    row = simulation.run().metrics[-1]
    (expected,) = Simulation(setting).elections
    assert row["start_bytes"] == expected.models_sent * row["model_bytes"]
    assert sum(sent) == pytest.approx(expected.scalars_sent, rel=0.02)
    assert len(expected.turns) > 1


WAVES = {
    "random": nx.erdos_renyi_graph(60, 0.1, seed=3),
    "dense": nx.complete_graph(20),
    "path": nx.path_graph(25),
    "star": nx.star_graph(12),
    "tree": nx.balanced_tree(2, 4),
    "two": nx.path_graph(2),
    "one": nx.empty_graph(1),
}


def play_wave(graph: nx.Graph, seed: int, call: Call | None) -> tuple[dict[int, int | None], int]:
    """Let the peers' own machines begin a wave; returns the parents in its tree, and the scalars that were sent."""
    nobody: dict[str, Any] = {"quorum": 1.0, "answer_time": AnswerTime(1.0), "size": 0, "dtype": torch.float32}
    options, links = ElectionOptions(), {i: set(graph.neighbors(i)) for i in sorted(graph)}
    peers = {i: Election(i, seed, 0, None, options, call=call, links=links[i], base=(), **nobody) for i in links}
    under_way: deque[tuple[int, int, Any]] = deque()
    total = 0

    def take_from(i: int) -> int:
        sent, _ = peers[i].drain()
        under_way.extend((i, to, message) for to, message in sent)
        return sum(scalars(message) for _, message in sent)

    for i, peer in peers.items():
        peer.begin(0.0)
        total += take_from(i)
    while under_way:
        sender, receiver, message = under_way.popleft()
        peers[receiver].receive(sender, message, 0.0)
        total += take_from(receiver)
    return {i: peer.parent for i, peer in peers.items()}, total


@pytest.mark.parametrize("call", [None, Call((0, 1), 0)])
@pytest.mark.parametrize("graph", WAVES)
def test_the_wave_that_is_counted_is_that_of_the_peers(graph: str, call: Call | None) -> None:
    for seed, part in enumerate(nx.connected_components(WAVES[graph])):
        clients = WAVES[graph].subgraph(part)
        parents, sent = play_wave(clients, seed, call)
        opening = (len(clients) - 1) * scalars(Open(NO_WAVE, 0, (), 0 if call is None else None))
        cost = ElectionCost(clients, seed, call)
        assert (cost._parents, cost.wave) == (parents, sent + opening)


@pytest.mark.parametrize("loss", [0.2, 0.5])
def test_with_loss_everybody_ends_with_the_same_centres(loss: float) -> None:
    setting = quick(rounds=1, split=make_toy_split(clients=12), graph=nx.cycle_graph(12))
    expected = Simulation(setting)
    world = World(link=TIMED_LINK, faults=Faults(loss, corruption=0.1))
    simulation = EventSimulation(setting, world, EventOptions(timeout_s=99.0, trace=True))
    simulation._begin()
    begun: dict[int, torch.Tensor] = {}
    while len(begun) < 12:
        simulation.clock.now = simulation.host.now = simulation._next_time()
        simulation._handle_instant()
        for i, (size, _) in enumerate(simulation.host.held()):
            if size and i not in begun:
                begun[i] = simulation.banks[:, i].clone()
    voted = sorted({line.client for line in simulation.take_trace() if line.kind == "elect"})
    assert len(voted) > 6  # the others took over the models of a neighbour that was sooner
    banks = torch.stack([begun[i] for i in voted], dim=1)
    torch.testing.assert_close(banks, expected.banks[:, voted], rtol=1e-9, atol=1e-11)
    assert simulation.books.kinds["lost"] > 20
    assert len(lineages(simulation)) == 1


def test_stragglers_do_not_vote_but_hear_and_forward() -> None:
    # On a cycle of ten, three stragglers part the others; the words go through them.
    setting = quick(rounds=2, split=make_toy_split(clients=10), aggregation="sequential")
    simulation = EventSimulation(
        setting, World(Compute(1.0, devices=STRAGGLERS.devices)), EventOptions(quorum=0.6, trace=True)
    )
    result = simulation.run()
    elected = [record for record in result.trace or [] if record.kind == "elect"]
    assert {record.client for record in elected} == set(range(10))
    assert {record.time for record in elected} == {QUICK.warmup_steps}
    assert len(lineages(simulation)) == 1
    ((entry,),) = lineages(simulation)
    assert entry.voters == 7


@pytest.mark.parametrize("model_s", [80, 100, 300])
def test_an_election_ends_on_uplinks_that_are_slower_than_the_first_deadline(model_s: int) -> None:
    # A model takes longer per neighbour than the 60 s that a peer waits at first: it must learn from silence, and take
    # the models that were on their way for longer than an attempt lasted.
    setting = quick(rounds=1, aggregation="sequential")
    link = Link(0.05, bandwidth_bytes_s=EventSimulation(setting).model_bytes / model_s)
    simulation = EventSimulation(setting, World(link=link))
    result = simulation.run()
    ((entry,),) = lineages(simulation)
    assert entry.voters == 6
    assert entry.attempt > 0
    assert result.banks.shape[0] == len(entry.slots) == setting.clusters == 2
    deadlines = [peer.answer_time.deadline_s for peer in simulation.host.peers if isinstance(peer, Peer)]
    assert model_s < max(deadlines) <= MOST_S  # a leaf of the tree waits for nobody, and learns nothing
    assert simulation.now < 25 * model_s


def test_a_late_joiner_takes_what_was_elected_without_it() -> None:
    setting = quick(rounds=6)
    world = World(late_joiners=(LateJoiner(4, 2.0), LateJoiner(2, 9.0)))
    simulation = EventSimulation(setting, world, EventOptions(trace=True))
    result = simulation.run()
    voted = {record.client for record in result.trace or [] if record.kind == "elect"}
    assert voted >= {0, 1, 3, 5}
    assert 2 not in voted
    assert len(lineages(simulation)) == 1
    assert result.rounds == [6] * 6


def watch_lineages(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, bool]]:
    """Note after inputs of peers with models: whether a neighbour claims a higher lineage, and whether a wake looks."""
    seen, next_wake = set(), Peer.next_wake

    def watched(peer: Peer) -> float | None:
        if peer.bank is not None:
            hellos = [link.hello for link in peer.links.values() if link.hello is not None]
            seen.add((any(hello.lineage > peer.lineage for hello in hellos), peer.joiner.highest != peer.lineage))
        return next_wake(peer)

    monkeypatch.setattr(Peer, "next_wake", watched)
    return seen


def test_two_halves_that_elected_alone_agree_when_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = watch_lineages(monkeypatch)
    split = make_toy_split(clients=9, samples=30)
    setting = quick(rounds=12, split=split, graph=nx.cycle_graph(9), aggregation="sequential")
    world = World(link=Link(0.01), partitions=(Partition(0.0, 12.0, ((0, 1, 2),)),))
    simulation = EventSimulation(setting, world, EventOptions(trace=True))
    before: set[Any] = set()
    while simulation.now < 11.0:
        simulation.step()
        before = lineages(simulation)
    result = simulation.run()
    assert len(before) == 2
    assert len(lineages(simulation)) == 1
    assert {record.client for record in result.trace or [] if record.kind == "switch"} == {0, 1, 2}
    assert looks >= {(True, True), (False, False)}
    assert (True, False) not in looks  # nobody overlooks a higher lineage
    assert_identical(run(setting, world, trace=True, replay=result.trace), result)


def test_a_client_that_missed_a_by_election_asks_for_the_new_cluster() -> None:
    setting = drifting(rounds=16, aggregation="sequential")
    away = World(absences=(Absence(3, 63.0, 110.0), Absence(7, 63.0, 110.0)))
    simulation = EventSimulation(setting, away, EventOptions(trace=True))
    result = simulation.run()
    opened = [record for record in result.trace or [] if record.kind == "elect" and record.number == 3]
    adopted = {record.client for record in result.trace or [] if record.kind == "adopt"}
    assert 63 < opened[0].time < 110
    assert adopted == {3, 7}
    assert result.banks.shape[0] == 3
    assert len(lineages(simulation)) == 1
    assert_identical(run(setting, away, trace=True, replay=result.trace), result)


def test_the_notes_count_the_clusters_of_the_end() -> None:
    setting = drifting(rounds=14, clusters=None, aggregation="sequential")
    simulation = EventSimulation(replace(setting, algorithm=replace(setting.algorithm, merging=None)))
    notes = [simulation.notes]
    while not simulation.done:
        simulation.step()
        notes += [simulation.notes] if simulation.notes != notes[-1] else []
    assert notes[-2:] == [("dfca-auto opened 2 clusters",), ("dfca-auto opened 3 clusters",)]


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_churn_and_an_early_partition_lose_no_cluster(seed: int) -> None:
    # Images in four rotations; two halves elect by themselves, with a fifth of the clients away.
    setting = replace(
        drift_setting(personal_steps=0, drift=None, clusters=None, rounds=10**6, evaluate_every=10**6, seed=seed),
        split=make_split(DataOptions(samples_per_client=60), 32, 4, seed=seed),
        graph=nx.connected_watts_strogatz_graph(32, 4, 0.3, seed=0),
        aggregation="sequential",
        algorithm=replace(algorithms.get("dfca-auto"), merging=None),
    )
    world = replace(preset("wifi"), churn=Churn.of_share(0.2), partitions=(Partition(0.0, 25.0, (tuple(range(16)),)),))
    simulation = EventSimulation(setting, world, EventOptions(until_s=45.0))
    result = simulation.run()
    assert "dfca-auto opened 4 clusters" in simulation.notes
    assert result.banks.shape[0] == 4


ROUGH_WORLDS = {
    "loss": World(STRAGGLERS, LINK, Faults(0.2, 0.2, 0.1)),
    "churn": World(STRAGGLERS, LINK, churn=Churn.of_share(0.3, away_s=6.0)),
    "churn, empty": World(STRAGGLERS, LINK, Faults(0.1), churn=Churn.of_share(0.3, away_s=6.0, keeps=False)),
    "partition": World(STRAGGLERS, LINK, partitions=(Partition(2.0, 18.0, ((0, 1, 2),)),)),
    "late joiner": World(STRAGGLERS, LINK, late_joiners=(LateJoiner(2, 5.0), LateJoiner(3, 17.0))),
}


@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
@pytest.mark.parametrize("world", ROUGH_WORLDS)
def test_rough_worlds_with_elections_and_relay(world: str, aggregation: str) -> None:
    setting = quick("dfca-auto", aggregation=aggregation)
    options: dict[str, Any] = {"until_s": 45.0, "timeout_s": 5.0, "quorum": 0.6, "trace": True}
    simulation = EventSimulation(setting, ROUGH_WORLDS[world], EventOptions(**options))
    result = simulation.run()
    assert torch.isfinite(result.banks).all()
    assert sum(result.rounds) >= 6
    assert_identical(run(setting, ROUGH_WORLDS[world], replay=result.trace, **options), result)


def test_relayed_copies_reach_clients_without_a_trainer_beside_them() -> None:
    # A path of six: the clusters alternate in pairs, so that each model must pass through others to spread.
    split = make_toy_split(clients=6)
    setting = quick("dfca-auto", split=split, graph=nx.path_graph(6), rounds=8)
    for aggregation in ("batch", "sequential"):
        world = World(link=Link(0.05, spread=0.3), faults=Faults(loss=0.1))
        result = run(replace(setting, aggregation=aggregation), world, timeout_s=5.0, trace=True)
        assert result.records["relay"] > 0
