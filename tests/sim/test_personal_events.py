"""The personal last step among peers: virtual time and nodes in memory pick and score what rounds do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import networkx as nx
import pytest
import torch
from event_runs import TIMED_LINK, assert_identical, through_disk
from memory_nodes import make_nodes, network_of, run_all
from personal_runs import UNEVEN, dense
from personal_runs import run as run_rounds
from toy import make_toy_setting, make_toy_split, quick

from dfca import algorithms
from dfca.algorithms import ALGORITHMS
from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.core.rules.personal import GRID, SWEEPS
from dfca.faults.check import check_world
from dfca.faults.world import read_world
from dfca.node.memory import VirtualTimeLoop
from dfca.node.work.worker import Worker
from dfca.peer.curves import CurvePool
from dfca.peer.peer import Peer
from dfca.peer.records.messages import MOST_LOSS, Curves, Hello, well_formed
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Curve, OwnCurve, Train, Trained
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Churn, Compute, Devices, Faults, LateJoiner, Partition, World
from dfca.sim.setting import Setting

HAVE_IT = [name for name in ALGORITHMS if algorithms.get(name).peers is None and algorithms.get(name).mixture is None]


def run(setting: Setting, world: World | None = None, **options: Any) -> EventSimulation:
    simulation = EventSimulation(setting, world, EventOptions(max_events=200_000, **options))
    simulation.run()
    return simulation


def picking(algorithm: str, **changes: Any) -> Setting:
    return make_toy_setting(quick(algorithm), **{"rounds": 5, **changes}, personal_steps="auto", make_model=dense)


SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {},
    "sequential": {"aggregation": "sequential"},
    "half of the clients": {"participation": 0.5},
    "uneven, disconnected": {
        "split": make_toy_split(samples=UNEVEN),
        "graph": nx.disjoint_union(nx.path_graph(4), nx.path_graph(2)),
    },
}


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *((algorithm, "batch") for algorithm in HAVE_IT),
        *product(["dfca-fi", "ifca"], list(SETTINGS)[1:]),
    ],
)
def test_virtual_time_picks_and_scores_as_rounds_do(algorithm: str, name: str) -> None:
    setting = picking(algorithm, **SETTINGS[name])
    by_rounds, row = run_rounds(setting)
    result = run(setting).result()
    last = result.metrics[-1]
    assert last["personal_steps_by_client"] == row["personal_steps_by_client"]
    assert result.assignments.tolist() == by_rounds.assignments.tolist()
    torch.testing.assert_close(result.banks, by_rounds.banks, rtol=1e-9, atol=1e-11)
    for key in ("accuracy", "accuracy_before_personal"):
        assert last[key] == pytest.approx(row[key], abs=1e-12)
        assert last[f"{key}_by_client"] == pytest.approx(row[f"{key}_by_client"], abs=1e-12)


@pytest.mark.parametrize("algorithm", HAVE_IT)
def test_nodes_in_memory_pick_and_score_as_rounds_do(algorithm: str) -> None:
    setting = picking(algorithm)
    by_rounds, row = run_rounds(setting)
    nodes = make_nodes(setting, network_of(setting))
    run_all(nodes, VirtualTimeLoop())
    assert any(row["personal_steps_by_client"])
    for i, steps in enumerate(row["personal_steps_by_client"]):
        node = nodes[i]
        assert node.machine.last_step.steps == steps
        bank = node.machine.bank
        expected = by_rounds.banks[:, 0 if algorithm in ("ifca", "fedavg", "oracle") else i]
        torch.testing.assert_close(bank, expected[: len(bank)], rtol=1e-9, atol=1e-11)
        worker = node._work
        assert isinstance(worker, Worker)
        assert (worker.personal is None) == (steps == 0)
        if worker.personal is not None:
            score = by_rounds.flat.to_module(worker.personal).eval()
            x, y = setting.split.test.of(i)
            accuracy = float((score(x.double()).argmax(dim=1) == y).double().mean())
            assert accuracy == pytest.approx(row["accuracy_by_client"][i], abs=1e-12)


# Worlds that are not ideal.

UNEASY = World(
    Compute(0.05, "lognormal", devices=(Devices(0.34, 5.0),)),
    TIMED_LINK,
    Faults(0.2, 0.1, 0.1),
    Churn(0.004, 10.0),
    partitions=(Partition(5.0, 12.0, ((0, 1, 2),)),),
    late_joiners=(LateJoiner(2, 4.0),),
)
IN_UNEASY: dict[str, dict[str, Any]] = {"dfca-gi": {"aggregation": "sequential"}, "ifca": {"timeout_s": 20.0}}


def uneasy(algorithm: str, **options: Any) -> EventSimulation:
    changes = dict(IN_UNEASY[algorithm])
    options |= {name: changes.pop(name) for name in ("timeout_s",) if name in changes}
    return EventSimulation(picking(algorithm, **changes), UNEASY, EventOptions(trace=True, **options))


@pytest.mark.parametrize("algorithm", IN_UNEASY)
def test_a_run_that_is_cut_after_every_step_picks_what_it_would_have(algorithm: str) -> None:
    expected = uneasy(algorithm).run()
    assert expected.metrics[-1]["personal_steps_by_client"] != [0] * 6
    assert expected.metrics[-1]["accuracy_before_personal"] is not None
    simulation, trace = uneasy(algorithm), []
    while not simulation.done:
        simulation.step()
        trace += simulation.take_trace()
        state = through_disk(*simulation.state())
        simulation = uneasy(algorithm)
        simulation.restore(*state)
    assert trace == expected.trace
    assert_identical(replace(simulation.result(), trace=trace), expected)
    assert_identical(uneasy(algorithm, replay=trace).run(), expected)


def test_rounds_that_have_no_last_one_have_no_last_step() -> None:
    simulation = run(picking("dfca-gi"), until_s=20.0)
    assert not any("personal" in key for row in simulation.host.metrics for key in row)
    (note,) = [note for note in simulation.notes if "personal" in note]
    assert note == "dfca-gi takes no personal last step: the run ends by time, so its last round is unknown"


def test_a_run_that_ends_before_the_steps_are_picked_says_so() -> None:
    simulation = run(picking("dfca-gi", rounds=100), until_s=20.0, rounds=100)
    (note,) = [note for note in simulation.notes if "personal" in note]
    assert f"ended after {simulation.round} rounds on average, before round 75," in note
    assert "give fewer rounds, or personal.steps = 0" in note
    fixed = run(make_toy_setting("dfca-gi", personal_steps=5, make_model=dense), until_s=20.0)
    assert fixed.host.metrics[-1]["personal_steps_by_client"] == [5] * 6
    assert not any("personal" in note for note in fixed.notes)


def test_the_model_that_a_client_deploys_is_the_one_that_is_scored() -> None:
    setting = picking("dfca-gi")
    simulation = run(setting)
    row = simulation.host.metrics[-1]
    assert row["accuracy"] != row["accuracy_before_personal"]
    for i, expected in enumerate(row["accuracy_by_client"]):
        x, y = setting.split.test.of(i)
        predicted = simulation.personal_model(i)(x.double()).argmax(dim=1)
        assert float((predicted == y).double().mean()) == pytest.approx(expected)


def test_personal_work_takes_its_time() -> None:
    """Each client has the time of its rounds and of its own last steps; its curve is measured beside them."""
    setting = picking("dfca-gi")
    result = run(setting).result()
    steps = result.metrics[-1]["personal_steps_by_client"]
    rounds_s = setting.rounds * setting.local.steps
    assert result.compute_s == pytest.approx([rounds_s + own for own in steps])
    assert result.time_s == rounds_s + max(steps)


# Rounds that do not end.


def test_endless_rounds_measure_whenever_they_have_doubled_and_hold_nothing_out() -> None:
    method = Method(aggregation="sequential", personal="auto")
    options = PeerOptions(Rules(0, 1), (1,), 1, "shared", 2**53, 0, 1, torch.float64, method)
    memory = torch.zeros(1, 1, dtype=torch.float64)
    peer = Peer(options, lambda models: memory)
    peer.begin(0.0)
    (draw,) = peer.ready().work
    peer.finished(draw, memory.clone(), 0.0)
    peer.connected(1, 0.0)
    peer.receive(1, Hello(0, 0, 1), 0.0)
    measured: list[tuple[int, int]] = []
    for best in (5, 50):
        while peer.round < 100 and len(measured) < (1 if best == 5 else 2):
            peer.wake(0.0)
            for job in peer.ready().work:
                if isinstance(job, Train):
                    assert not job.held_out
                    peer.finished(job, Trained(0, True, memory[0].clone(), 1.0), 0.0)
                elif isinstance(job, Curve):
                    losses = torch.tensor([float(steps != best) for steps in GRID]).double()
                    peer.finished(job, OwnCurve(0, 10, losses), 0.0)
                    measured.append((peer.last_step.curves.due, peer.last_step.steps))
    assert measured == [(32, 5), (64, 50)]
    # a neighbour that is a measurement behind does not count; what it says of this one does
    lower = tuple(float(steps != 2) for steps in GRID)
    for due, expected in ((32, 50), (64, 2)):
        peer.receive(1, Curves(due, 0, 1, 0, tuple(3 * value for value in lower)), 0.0)
        assert peer.last_step.steps == expected
    peer.receive(1, Curves(65, 0, 1, 0, lower), 0.0)
    assert peer.refused["a curve of another round"] == 1


def test_lies_about_losses_leave_numbers() -> None:
    pool = CurvePool()
    pool.begin(3, OwnCurve(0, 10, torch.ones(len(GRID)).double()), ())
    for sign, neighbour in ((1, 1), (-1, 2), (1, 3)):
        pool.take(neighbour, Curves(3, 0, 3, 0, (sign * MOST_LOSS,) * len(GRID) * SWEEPS))
    assert len(list(pool.advance([1, 2, 3], [1, 2, 3]))) == SWEEPS
    assert all(abs(value) <= MOST_LOSS for row in pool.rows for value in row)
    assert all(well_formed(pool.everything()) for _ in pool.rows)
    assert pool.pick() in GRID


# Worlds that once failed: peers without a curve that took each other for alike, a newcomer that sat its only round out,
# and rows that were sent while a curve was on its way.
KEPT = """
FaultWorld(1505, peers=10, edges=((0, 1), (0, 3), (0, 8), (1, 4), (1, 5), (1, 6), (1, 7), (1, 9), (2, 6), (2, 7), \
(2, 8), (2, 9), (3, 4), (3, 6), (3, 9), (4, 5), (4, 7), (4, 8), (5, 7), (5, 9), (6, 7), (6, 9), (7, 8), (8, 9)), \
algorithm='dfca-fi', aggregation='batch', clusters=2, groups=1, participation=0.7, delay_s=0.3, spread=0.5, \
loss=0.4, crashes=(Crash(peer=2, at_s=8.966182339866789, away_s=11.1204934462761, keeps='nothing', when='any'), \
Crash(peer=8, at_s=16.631808602065984, away_s=20.561104281515433, keeps='save', when='after save')), rounds=24)
FaultWorld(208, peers=4, edges=((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)), algorithm='dfca-fi', \
aggregation='batch', clusters=2, groups=1, participation=0.7, slow=((0, 10.0),), crashes=(Crash(peer=2, at_s=7.13, \
away_s=53.44, keeps='nothing', when='after save'),), cuts=(Cut(begin_s=4.24, end_s=50.54, side=(0, 2, 3)),), rounds=24)
FaultWorld(367, edges=((0, 4), (1, 4), (2, 3), (2, 4)), algorithm='dfca-gi', clusters=3, groups=1, spread=1.5, \
crashes=(Crash(peer=2, at_s=0.0, away_s=24.02055425152914, keeps='save', when='before save'), Crash(peer=2, \
at_s=26.92367502008978, away_s=1.1777193891059219, keeps='save', when='after save'), Crash(peer=0, at_s=0.0, \
away_s=9.429208919672451, keeps='save', when='any')), late=((1, 8.473),), swap=859, rounds=24)
"""


@pytest.mark.parametrize("line", KEPT.strip().splitlines(), ids=lambda line: line.partition(",")[0])
def test_sweeps_come_to_their_end_in_worlds_that_once_failed(line: str) -> None:
    assert check_world(read_world(line)) is None
