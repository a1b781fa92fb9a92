"""Worlds full of faults: safe in all of them, alive once faults stop. Worlds that once failed are kept."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from event_runs import assert_identical, drifting, quick
from event_runs import run as run_events
from toy import make_toy_setting, make_toy_split
from typer.testing import CliRunner

from dfca import algorithms
from dfca.base.errors import ConfigError
from dfca.cli import app
from dfca.core.exchange import Rules
from dfca.core.state import ClientState, Message, is_finite, usable
from dfca.faults.bad_input import lie
from dfca.faults.check import check_world, shrink
from dfca.faults.run import STEPS, FaultRun, allowed_s
from dfca.faults.tiny import Violation
from dfca.faults.world import CRASHES, Crash, Cut, FaultWorld, describe, draw_world, read_world
from dfca.peer import copies, cycle
from dfca.peer.cycle import RoundCycle
from dfca.peer.heard import HANDLERS
from dfca.peer.peer import Peer
from dfca.peer.records.messages import Alarm, Candidate, Key, Report, Served
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Train, Trained
from dfca.peer.server import ServerClient
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Absence, Churn, Compute, Faults, LateJoiner, Link, Partition, World

# `.ci/run` also draws 100 and 30 that nobody has seen before.
FRESH_WORLDS = 60
HARSH_WORLDS = 10
CHUNK = 20
PATH = ((0, 1), (1, 2), (2, 3))
RING = (*PATH, (3, 4), (4, 5), (0, 5))


def finish(world: FaultWorld) -> FaultRun:
    """Carry a world out to its end, in which everything must be well."""
    run = FaultRun(world)
    run.run()
    return run


def elections(run: FaultRun) -> int:
    """Count the elections that all peers know of."""
    return min(len(peer.lineage) for peer in run.peers.values() if isinstance(peer, Peer))


@pytest.mark.parametrize("first", range(0, FRESH_WORLDS, CHUNK))
def test_random_worlds(first: int) -> None:
    failed = {number: check_world(draw_world(number)) for number in range(first, first + CHUNK)}
    assert {number: problem for number, problem in failed.items() if problem} == {}


@pytest.mark.parametrize("first", range(0, HARSH_WORLDS, CHUNK // 2))
def test_random_harsh_worlds(first: int) -> None:
    failed = {number: check_world(draw_world(number, 3, harsh=True)) for number in range(first, first + CHUNK // 2)}
    assert {number: problem for number, problem in failed.items() if problem} == {}


ONCE_FAILED = [
    line
    for line in (Path(__file__).parents[1] / "fixtures" / "fault_worlds.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("line", ONCE_FAILED, ids=lambda line: line.split(",")[0][11:])
def test_worlds_that_once_failed(line: str) -> None:
    assert check_world(read_world(line)) is None


NAMED = {
    "a straggler is cut off from every voter": FaultWorld(
        1, 4, PATH, "dfca-fi", slow=((3, 20.0),), cuts=(Cut(0.0, 50.0, (3,)),)
    ),
    "the voters left during the election": FaultWorld(
        2, 4, PATH, "dfca-fi", crashes=tuple(Crash(i, 2.05, 5.0, "nothing") for i in (1, 2, 3))
    ),
    "the request of a newcomer is lost": FaultWorld(
        3, 2, ((0, 1),), "dfca-gi", clusters=2, late=((1, 10.0),), cuts=(Cut(10.01, 14.0, (1,)),)
    ),
    "local, with a late joiner and banks that are lost": FaultWorld(
        4, 3, PATH[:2], "local", late=((1, 10.0),), crashes=(Crash(0, 20.0, 5.0, "nothing"), Crash(2, 0.0, 9.0, "old"))
    ),
    "a survey ends while a peer that has paused for it folds": FaultWorld(
        7101, peers=3, edges=((0, 1), (0, 2)), slow=((0, 20.0),), late=((2, 18.532),), merges=True
    ),
    "a neighbour leaves the graph before its first word": FaultWorld(
        5765,
        peers=7,
        edges=tuple((i, i + 1) for i in range(6)),
        algorithm="dfedavgm",
        aggregation="batch",
        clusters=1,
        groups=1,
        crashes=(
            Crash(peer=0, at_s=0.0, away_s=19.592853504241774, keeps="save", when="after save"),
            Crash(peer=3, at_s=0.0, away_s=10.871357189435141, keeps="save", when="any"),
        ),
        rewires=1,
    ),
    "two elections meet while a newcomer joins": FaultWorld(
        5, 6, RING, "dfca-fi", cuts=(Cut(0.0, 20.0, (0, 1)),), late=((2, 19.9),), delay_s=0.3, spread=0.5
    ),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
def test_named_worlds(name: str, aggregation: str) -> None:
    assert check_world(replace(NAMED[name], aggregation=aggregation)) is None


@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
@pytest.mark.parametrize("algorithm", ["dfca-auto", "dfca-gi"])
def test_rounds_continue_while_the_graph_changes(algorithm: str, aggregation: str) -> None:
    world = FaultWorld(9, 6, RING, algorithm, aggregation, weights="metropolis", clusters=2, swap=3, rewires=40)
    run = FaultRun(world)
    before = {frozenset(edge) for edge in run.graph.edges}
    run.run()
    assert {frozenset(edge) for edge in run.graph.edges} != before
    for i, peer in run.peers.items():
        assert isinstance(peer, Peer)
        assert set(peer.neighbours) == set(peer.links) == set(run.graph.neighbors(i))
        assert peer.rules.degree == run.graph.degree(i)
        assert run.rounds_at_stop[i] > 20  # 60 s of rounds of 1 s: no peer was held up by an edge that went


@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
@pytest.mark.parametrize("cuts", [(), (Cut(14.0, 50.0, (0, 1)),)], ids=["whole", "partition"])
def test_a_by_election_ends_and_rounds_continue(cuts: tuple[Cut, ...], aggregation: str) -> None:
    # 15 s: half of the peers of a cluster get samples of another group, with the network whole or parted.
    run = finish(FaultWorld(6, 6, RING, "dfca-auto", aggregation, groups=1, drift_s=15.0, cuts=cuts))
    assert elections(run) >= 2


@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
@pytest.mark.parametrize("cuts", [(), (Cut(6.0, 30.0, (0, 1)),)], ids=["whole", "partition"])
def test_surveys_end_and_everybody_takes_their_results(cuts: tuple[Cut, ...], aggregation: str) -> None:
    run = finish(FaultWorld(3, 6, RING, aggregation=aggregation, cuts=cuts, merges=True, crashes=(SURVEY_CRASH,)))
    lineages = {peer.lineage for peer in run.peers.values() if isinstance(peer, Peer)}
    ((start, *later),) = lineages
    assert not start.is_survey
    assert any(entry.is_survey for entry in later)


SURVEY_CRASH = Crash(4, 8.0, 6.0, "save")


def test_a_cluster_is_opened_for_peers_that_met_models_without_theirs() -> None:
    # Peers of a third group come when two clusters have been elected; a model of their own fits them better.
    edges = tuple((i, j) for i in range(9) for j in range(i))
    late = ((2, 8.0), (5, 8.0), (8, 8.0))
    run = finish(FaultWorld(7, 9, edges, "dfca-auto", groups=3, late=late))
    assert elections(run) == 2
    assert {len(peer.bank) for peer in run.peers.values() if peer.bank is not None} == {3}


@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
def test_two_halves_that_elected_one_cluster_each_open_the_second_when_they_meet(aggregation: str) -> None:
    # Both train the only model of the winner, which then fits neither: nobody stays at it in the by-election.
    edges = tuple((i, j) for i in range(6) for j in range(i))
    run = finish(FaultWorld(8, 6, edges, "dfca-auto", aggregation, cuts=(Cut(0.0, 20.0, (0, 2, 4)),)))
    assert {len(peer.bank) for peer in run.peers.values() if peer.bank is not None} == {2}
    assert len({run.peers[i].assignment for i in (0, 2, 4)}) == 1
    assert {run.peers[i].assignment for i in range(6)} == {0, 1}


def test_a_lost_copy_request_does_not_stop_the_relay() -> None:
    setting = quick("dfca-auto", split=make_toy_split(clients=6), graph=nx.path_graph(6), rounds=16)
    world = World(link=Link(0.05), partitions=(Partition(7.0, 10.0, ((0, 1, 2),)),))
    result = run_events(replace(setting, aggregation="sequential"), world, trace=True)
    relayed = [record.time for record in result.trace or [] if record.kind == "relay"]
    assert sum(time > 11.0 for time in relayed) > 2


@pytest.mark.parametrize("keeps", [True, False])
def test_local_continues_with_late_joiners_and_churn(keeps: bool) -> None:
    setting = make_toy_setting(algorithms.get("local"), rounds=5)
    world = World(churn=Churn.of_share(0.3, away_s=3.0, keeps=keeps), late_joiners=(LateJoiner(2, 4.0),))
    result = run_events(setting, world, until_s=40.0)
    assert result.records["finish"] > 30
    assert result.rounds[2] > 3


def test_an_absence_without_end_does_not_return() -> None:
    setting = make_toy_setting(algorithms.get("dfca-gi"), rounds=6)
    result = run_events(setting, World(absences=(Absence(3, 2.5, math.inf),)))
    assert result.rounds[3] <= 3
    assert [n for i, n in enumerate(result.rounds) if i != 3] == [6] * (len(result.rounds) - 1)
    assert math.isfinite(result.metrics[-1]["time_s"])


def test_a_replay_across_a_drift_between_warm_up_and_election() -> None:
    setting = drifting(rounds=4, aggregation="sequential")
    assert setting.drift is not None
    setting = replace(setting, drift=(1, setting.drift[1]))
    world = World(Compute(1.0, "lognormal"), Link(0.05), partitions=(Partition(0.0, 60.0, (tuple(range(6)),)),))
    result = run_events(setting, world, trace=True, until_s=90.0)
    times = {kind: [r.time for r in result.trace or [] if r.kind == kind] for kind in ("warmed", "drift", "elect")}
    assert min(times["warmed"]) < times["drift"][0] < max(times["elect"])
    assert_identical(run_events(setting, world, trace=True, until_s=90.0, replay=result.trace), result)


def test_no_requested_model_comes_twice() -> None:
    world = World(link=Link(0.1, spread=0.5), faults=Faults(0.4, 0.5), late_joiners=(LateJoiner(2, 5.0),))
    simulation = EventSimulation(quick("dfca-auto", rounds=10), world, EventOptions(timeout_s=5.0, until_s=40.0))
    simulation.run()
    for peer in simulation.host.peers:
        assert peer is not None
        assert peer.refused["not asked for"] == 0


def test_a_servers_bank_that_came_during_training_is_used() -> None:
    options = PeerOptions(Rules(0, 1, "server"), (-1,), 1, "shared", 9, 0, 1)
    client = ServerClient(options, lambda models: torch.zeros(models, 1))
    client.begin(0.0)
    client.connected(-1, 0.0)
    client.receive(-1, Served(0, torch.tensor([[1.0]])), 0.0)
    client.wake(0.0)
    (job,) = client.ready().work
    client.receive(-1, Served(1, torch.tensor([[5.0]])), 1.0)
    assert client.bank is not None
    assert client.bank.item() == 1.0  # not while it trains
    client.finished(job, Trained(0, True, torch.tensor([2.0]), 0.0), 2.0)
    client.wake(2.0)
    ready = client.ready()
    (report,) = [message for _, message in ready.messages]
    assert isinstance(report, Report)
    assert isinstance(report.message, Message)
    assert client.bank.item() == 5.0
    assert [job.round for job in ready.work if isinstance(job, Train)] == [1]


# The tool itself.


def test_a_peer_may_lie_about_what_it_has_garbled() -> None:
    garbled = Candidate(Key(0, 0, 0, 1, 0), 0, 1, 0.5, b"z")  # type: ignore[arg-type]
    assert {lie(garbled, random.Random(number)) for number in range(20)} == {garbled}


def test_a_world_survives_its_line() -> None:
    for number in range(50):
        for harsh in (False, True):
            world = draw_world(number, harsh=harsh)
            assert read_world(describe(world)) == world


def test_no_cut_contains_everybody_and_harsh_worlds_have_every_kind_of_fault() -> None:
    worlds = [draw_world(number, harsh=harsh) for number in range(300) for harsh in (False, True)]
    cuts = [(world, cut) for world in worlds for cut in world.cuts if world.algorithm != "ifca"]
    assert all(len(cut.side) < world.peers for world, cut in cuts)
    harsh = worlds[1::2]
    assert max(world.peers for world in harsh) == 16
    assert {world.clusters for world in harsh} == {None, 1, 2, 3, 4, 5, 6}
    assert {crash.when for world in harsh for crash in world.crashes} == {*CRASHES}
    assert max(len(world.liars) for world in harsh) > 1
    for fault in STEPS:
        assert any(getattr(world, fault) for world in harsh), fault
    assert len({(world.robust, world.staleness, world.save_s, world.longest, world.faults_s) for world in harsh}) > 50


def test_a_world_with_more_faults_may_take_longer() -> None:
    calm = FaultWorld(1, algorithm="dfca-gi")
    assert allowed_s(calm) == 120.0 + 1.1 * 10
    assert allowed_s(replace(calm, liars=(1,))) == pytest.approx(120.0 + 1.1 * 70)
    assert allowed_s(replace(calm, slow=((1, 20.0),), rates=((2, 0.5),))) == pytest.approx(120.0 + 40.2 * 12)


def test_a_world_that_is_well_for_a_moment_or_deaf_to_a_neighbour_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    world = FaultWorld(1, 3, PATH[:2], "dfca-gi", clusters=2)
    assert check_world(world) is None
    monkeypatch.setattr(RoundCycle, "fold", lambda self, at: at.copies)
    assert "peer 0 folds no model of peer 1" in str(check_world(world))


@pytest.mark.parametrize("number", [4, 5, 38, 44])
def test_models_of_another_lineage_are_noticed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cycle, copies):
        monkeypatch.setattr(module, "compatible", lambda one, other, cluster: True)
    assert "of another lineage" in str(check_world(draw_world(number)))


def test_huge_models_make_no_nan() -> None:
    state = ClientState.of(torch.zeros(1, 3))
    huge = [Message(i, 0, 0, 2, torch.full((3,), value)) for i, value in enumerate((3e38, -3e38, 3e38))]
    assert not any(usable(message, state.bank) for message in huge)
    large = [replace(message, model=message.model / 8) for message in huge]
    assert all(usable(message, state.bank) for message in large)
    folded = Rules(9, 3).fold_all_(state, [(message, 1.0) for message in large])
    assert is_finite(folded.bank)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("x", "a world must be a line such as FaultWorld"),
        ("FaultWorld(1, peers=open('x'))", "open is no part of a world"),
        ("FaultWorld(1, colour=2)", "unexpected keyword argument 'colour'"),
        ("FaultWorld(1, peers=3, garbage=(3,))", "has the peers 0 to 2, got 3"),
        ("FaultWorld(1, algorithm='dfka')", 'unknown algorithm "dfka"'),
        ("FaultWorld(1, peers=3, one_way=((0, 3, 0.9),))", "has the peers 0 to 2, got 3"),
        ("FaultWorld()", "missing a required argument: 'number'"),
        ("FaultWorld('a')", 'number must be an integer, got "a"'),
        ("FaultWorld(1, peers=1000000000)", "peers must be >= 1 and <= 1000, got 1000000000"),
        ("FaultWorld(1, peers=3.5)", "peers must be an integer, got 3.5"),
        ("FaultWorld(1, edges=((1, 1),))", "an edge joins two peers"),
        ("FaultWorld(1, delay_s=1e999)", "delay_s must be a finite number"),
        ("FaultWorld(1, robust='x')", "robust must be"),
        ("FaultWorld(1, cuts=5)", "cuts must be a list, got 5"),
        ("FaultWorld(1, crashes=(1,))", "crashes.0. must be a table, got 1"),
        ("FaultWorld(1, rates=((0, 0.0),))", "must be > 0, got 0.0"),
        ("FaultWorld(1, crashes=(Crash(0, 1.0, 1.0, 'save', 'at noon'),))", 'unknown moment of a crash "at noon"'),
    ],
)
def test_other_lines_are_refused(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        read_world(line)


def test_a_violation_is_found_shrunk_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Peer, sender: int, message: Any) -> None:
        raise KeyError("broken on purpose")

    monkeypatch.setitem(HANDLERS, Alarm, broken)
    world = FaultWorld(6, 6, RING, "dfca-auto", drift_s=15.0, loss=0.1, slow=((0, 3.0),))
    assert "KeyError out of peer" in str(check_world(world))
    smaller = shrink(world, limit_s=20.0)
    assert smaller.loss == 0.0
    assert smaller.slow == ()
    assert smaller.peers <= 4  # with three nobody raises the alarm
    result = CliRunner().invoke(app, ["faults", "--world", describe(smaller)])
    assert result.exit_code == 1
    assert describe(smaller)[:40] in result.output
    with pytest.raises(Violation, match="KeyError"):
        finish(smaller)


def test_the_command_says_how_many_worlds_there_were() -> None:
    result = CliRunner().invoke(app, ["faults", "--first", "3", "--worlds", "2"])
    assert result.exit_code == 0
    assert "2 worlds, none failed" in result.output
    both = CliRunner().invoke(app, ["faults", "--world", "FaultWorld(1)", "--first", "3"])
    assert both.exit_code == 2
    seeded = CliRunner().invoke(app, ["faults", "--fresh", "--seed", "3"])
    assert seeded.exit_code == 2


def test_fresh_worlds_have_another_seed_each_time_which_is_printed() -> None:
    outputs = [CliRunner().invoke(app, ["faults", "--fresh", "--harsh", "--worlds", "1"]).output for _ in range(2)]
    first, second = (output.splitlines()[0] for output in outputs)
    assert first.startswith("seed ")
    assert first != second
