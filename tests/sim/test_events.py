"""The event simulator drives the same clients: in the ideal world it is the synchronous one, elsewhere it continues."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from event_runs import ROUGH, STRAGGLERS, TIMED_LINK, assert_identical, assert_same, run, without_seconds
from torch import nn
from toy import make_toy_model, make_toy_setting, make_toy_split, quick

from dfca import algorithms
from dfca.algorithms import ALGORITHMS
from dfca.base.errors import ConfigError, RunError
from dfca.core.learning.local import LocalOptions
from dfca.core.rules.staleness import Staleness
from dfca.core.state import Message
from dfca.peer.records.messages import Update
from dfca.sim.events.books import Input, TraceRecord
from dfca.sim.events.clock import DELIVER
from dfca.sim.events.links import corrupted
from dfca.sim.events.options import EventOptions
from dfca.sim.events.replay import read_trace, to_line
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Churn, Compute, Devices, Faults, LateJoiner, Link, Partition, World, preset, presets
from dfca.testing import lockstep, stack

IN_TIME = [name for name in ALGORITHMS if algorithms.get(name).peers is None]


def thinned(first: Iterable[str], second: Iterable[str], kept: Callable[[str, str], bool]) -> list[Any]:
    """Pair everything with everything; the pairs that are not kept in the default suite are slow."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(a, b, id=f"{a}, {b}", marks=marks[kept(a, b)]) for a, b in product(first, second)]


SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {},
    "sequential": {"aggregation": "sequential"},
    "metropolis": {"aggregation": "sequential", "weights": "metropolis"},
    "all models": {"share": "all"},
    "half of the clients": {"participation": 0.5},
    "half of the clients, sequential": {"participation": 0.5, "aggregation": "sequential"},
    "mini-batches": {"local": LocalOptions(steps=3, learning_rate=0.2, batch_size=5, momentum=0.4)},
    "disconnected": {"graph": nx.disjoint_union(nx.path_graph(3), nx.empty_graph(3))},
}


@pytest.mark.parametrize(
    ("algorithm", "name"),
    thinned(IN_TIME, SETTINGS, lambda algorithm, name: name == "batch" or algorithm == "dfca-gi"),
)
def test_the_ideal_world_equals_the_synchronous_simulator(algorithm: str, name: str) -> None:
    setting = make_toy_setting(quick(algorithm), rounds=3, **SETTINGS[name])
    result = run(setting)
    assert_same(setting, result)
    elected = setting.algorithm.start == "elected"
    warmup_s = setting.algorithm.election.warmup_steps if elected else 0
    models = setting.algorithm.bank_size(setting.clusters or 1)
    assert result.time_s == setting.rounds * setting.algorithm.steps(setting.local.steps, models) + warmup_s
    assert set(result.staleness) <= {0}


@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
@pytest.mark.parametrize(("algorithm", "seed"), [("dfca-auto", 0), ("dfca-fi", 2), ("dfca-li", 1)])
def test_who_sits_a_round_out_hands_no_copies_on_in_it(algorithm: str, seed: int, aggregation: str) -> None:
    changes = {"participation": 0.7, "share": "relay", "aggregation": aggregation, "seed": seed}
    setting = make_toy_setting(quick(algorithm), rounds=8, **changes)
    result = run(setting)
    assert_same(setting, result)
    assert result.records["relay"] > 0


@pytest.mark.parametrize("algorithm", IN_TIME)
def test_the_ideal_world_equals_lockstep(algorithm: str) -> None:
    setting = make_toy_setting(quick(algorithm), rounds=3, aggregation="sequential")
    result, states = run(setting), lockstep(setting)
    assert result.assignments.tolist() == [state.assignment for state in states]
    banks = result.banks.expand(-1, setting.clients, -1)
    torch.testing.assert_close(banks, stack(states), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    thinned(
        [name for name in IN_TIME if algorithms.get(name).share != "relay"],  # a copy is as of when it was asked for
        ("batch", "all models", "half of the clients"),
        lambda algorithm, name: algorithm in ("dfca-gi", "ifca"),
    ),
)
def test_batch_without_timeout_is_synchronous_in_any_lossless_world(algorithm: str, name: str) -> None:
    setting = make_toy_setting(quick(algorithm), rounds=3, **SETTINGS[name])
    result = run(setting, World(replace(STRAGGLERS, kind="lognormal"), TIMED_LINK, Faults(duplication=0.3)))
    assert_same(setting, result)
    assert set(result.staleness) <= {0}


ROUGH_WORLDS = {
    "loss": World(STRAGGLERS, TIMED_LINK, Faults(loss=0.3)),
    "duplication": World(STRAGGLERS, TIMED_LINK, Faults(duplication=0.5)),
    "corruption": World(STRAGGLERS, TIMED_LINK, Faults(corruption=0.3)),
    "churn": World(STRAGGLERS, TIMED_LINK, churn=Churn.of_share(0.3, away_s=6.0)),
    "churn, empty": World(STRAGGLERS, TIMED_LINK, churn=Churn.of_share(0.3, away_s=6.0, keeps=False)),
    "partition": World(STRAGGLERS, TIMED_LINK, partitions=(Partition(3.0, 8.0, ((0, 1, 2),)),)),
    "late joiner": World(STRAGGLERS, TIMED_LINK, late_joiners=(LateJoiner(2, 5.0), LateJoiner(3, 7.0))),
    "all of it": ROUGH,
}


ROUGH_ALGORITHMS = {
    "dfca-gi": "sequential",
    "dfca-li": "batch",
    "fedspd": "sequential",
    "dfedavgm": "batch",
    "ifca": "batch",
    "facade": "sequential",
    "fedem": "batch",
    "deprl": "sequential",
    "dfedpgp": "batch",
}


@pytest.mark.parametrize(
    ("algorithm", "world"),
    thinned(
        ROUGH_ALGORITHMS,
        ROUGH_WORLDS,
        lambda algorithm, world: algorithm in ("dfca-gi", "ifca") or world in ("churn, empty", "all of it"),
    ),
)
def test_rough_worlds_keep_banks_finite_and_replay_bit_by_bit(algorithm: str, world: str) -> None:
    setting = make_toy_setting(quick(algorithm), aggregation=ROUGH_ALGORITHMS[algorithm])
    until_s = 25.0 if algorithm == "ifca" else 13.0  # a round with a straggler takes 20 s
    until_s *= setting.algorithm.steps(setting.local.steps, 2) / setting.local.steps
    options: dict[str, Any] = {"until_s": until_s, "timeout_s": 5.0, "staleness": Staleness("polynomial")}
    result = run(setting, ROUGH_WORLDS[world], trace=True, **options)
    assert torch.isfinite(result.banks).all()
    assert result.records["finish"] >= 3
    assert all(0 <= share <= 1 for share in result.idle_shares)
    if world == "corruption":
        assert result.records["corrupt"] > 0
        assert result.rejected == sum(isinstance(line, Input) and line.broken for line in result.trace or [])
    assert_identical(run(setting, ROUGH_WORLDS[world], replay=result.trace, trace=True, **options), result)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    runs = [run(make_toy_setting("dfca-li", seed=s), ROUGH, until_s=15.0, timeout_s=5.0, trace=True) for s in (1, 1, 2)]
    assert_identical(runs[0], runs[1])
    assert runs[0].trace != runs[2].trace


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    setting = make_toy_setting("dfca-gi", aggregation="sequential")
    result = run(setting, ROUGH, until_s=12.0, trace=True)
    (tmp_path / "trace.jsonl").write_text("".join(map(to_line, result.trace or [])))
    assert_identical(run(setting, ROUGH, until_s=12.0, trace=True, replay=read_trace(tmp_path / "trace.jsonl")), result)


def test_time_in_a_trace_never_runs_backwards() -> None:
    trace = run(make_toy_setting("dfca-gi"), ROUGH, until_s=20.0, timeout_s=5.0, trace=True).trace or []
    assert all(before.time <= after.time for before, after in pairwise(trace))


def test_with_stragglers_sequential_reaches_a_target_sooner_than_batch_and_the_server() -> None:
    split = make_toy_split(clients=12, samples=30)
    world = World(Compute(1.0, devices=(Devices(share=0.17, slowdown=10.0),)))
    reached = {}
    for name, algorithm, aggregation in (
        ("sequential", "dfca-gi", "sequential"),
        ("batch", "dfca-gi", "batch"),
        ("ifca", "ifca", "batch"),
    ):
        changes = {"split": split, "graph": nx.complete_graph(12), "aggregation": aggregation, "seed": 5}
        setting = make_toy_setting(algorithm, make_model=partial(make_toy_model, nn.Tanh), **changes)
        result = run(setting, world, until_s=40.0 if name == "sequential" else 220.0, evaluate_every_s=10.0)
        reached[name] = next(row["time_s"] for row in result.metrics if row["accuracy"] >= 0.7)
        idle = result.idle_shares
        assert max(idle) < 0.01 if name == "sequential" else max(idle) == pytest.approx(0.9, abs=0.01)
    assert reached["sequential"] * 3 <= min(reached["batch"], reached["ifca"])


def test_bytes_and_time_by_hand() -> None:
    # Two clients, one edge, P = 43 floats = 172 bytes; a round takes 2 s, the uplink 1 s, the way 0.5 s.
    setting = make_toy_setting("dfca-gi", split=make_toy_split(clients=2), graph=nx.path_graph(2), rounds=3)
    result = run(setting, World(link=Link(0.5, bandwidth_bytes_s=172.0)), trace=True)
    assert result.time_s == 0.5 + 3 * (2 + 1 + 0.5)  # the first word of a neighbour is on its way for 0.5 s
    assert result.metrics[-1]["messages_sent"] == 2 * 3
    assert result.idle_shares == pytest.approx([5 / 11] * 2)


def test_the_messages_of_a_sender_queue_on_its_uplink() -> None:
    # A star: the middle sends to three leaves, one second each; the leaves send at once.
    setting = make_toy_setting(split=make_toy_split(clients=4), graph=nx.star_graph(3), rounds=1)
    trace = run(setting, World(link=Link(bandwidth_bytes_s=172.0)), trace=True).trace or []
    assert [record.time for record in trace if record.kind == "send" and record.client == 0] == [3.0, 4.0, 5.0]
    assert {record.time for record in trace if record.kind == "send" and record.client != 0} == {3.0}


def test_a_slow_uplink_drops_models_that_were_overtaken_before_they_left() -> None:
    setting = make_toy_setting(aggregation="sequential")
    result = run(setting, World(link=Link(bandwidth_bytes_s=20.0)), until_s=30.0, trace=True)
    assert result.records["overtaken"] > 0
    assert result.records["send"] <= 6 * 30 / (172 / 20)


def test_the_mailbox_keeps_the_newest_of_each_sender_while_a_client_trains() -> None:
    # Client 1 takes ten times as long: of the ten models that client 0 sends meanwhile, one is folded.
    setting = make_toy_setting(split=make_toy_split(clients=2), graph=nx.path_graph(2), aggregation="sequential")
    slow = World(Compute(1.0, devices=(Devices(share=0.5, slowdown=10.0),)))
    result = run(setting, slow, until_s=60.5, trace=True)
    slowest = min(range(2), key=lambda i: result.rounds[i])
    folds = [record for record in result.trace or [] if record.kind == "fold" and record.client == slowest]
    assert result.rounds[slowest] == 3
    assert [record.time for record in folds] == [20.0, 40.0, 60.0]


def test_a_partition_separates_and_heals() -> None:
    one = replace(algorithms.get("dfedavgm"), momentum=0.0)
    setting = make_toy_setting(one, split=make_toy_split(clusters=1), clusters=1, graph=nx.complete_graph(6))
    for aggregation in ("batch", "sequential"):
        changed = replace(setting, aggregation=aggregation, rounds=14, evaluate_every=1)
        world = World(partitions=(Partition(1.0, 15.0, ((0, 1, 2),)),))
        result = run(changed, world, trace=True)
        apart = {row["time_s"]: row["disagreement"][0] for row in result.metrics}
        assert apart[14.0] > 1e-6
        assert apart[24.0] < 1e-9
        crossing = [r for r in result.trace or [] if r.kind == "fold" and (r.client < 3) != (r.peer < 3)]
        assert min(record.time for record in crossing) >= 15.0


@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
def test_a_late_joiner_takes_its_neighbours_models(aggregation: str) -> None:
    setting = make_toy_setting("dfca-li", aggregation=aggregation, rounds=9)
    result = run(setting, World(late_joiners=(LateJoiner(4, 11.0),)), trace=True)
    trace = result.trace or []
    before = [record for record in trace if record.client == 4 and record.time < 11.0]
    assert [record.kind for record in before] == ["absent"]
    taken = [record for record in trace if record.kind == "take"]
    assert {(record.client, record.peer, record.cluster) for record in taken} >= {(4, 3, 0), (4, 3, 1)}
    assert (result.metrics[0]["clients"], result.metrics[-1]["clients"]) == (5, 6)
    assert result.rounds == [9] * 6
    first = next(record for record in trace if record.kind == "start" and record.client == 4)
    assert first.round >= 5  # it joins the round that the others are in


def test_a_joiner_begins_with_the_bank_of_the_first_that_answers() -> None:
    setting = make_toy_setting("dfca-li", split=make_toy_split(clients=3), graph=nx.star_graph(2), rounds=1)
    simulation = EventSimulation(setting, World(late_joiners=(LateJoiner(0, 1.0),)), EventOptions(evaluate_every_s=1.0))
    assert simulation.step() is not None
    assert simulation.now == 1.0
    assert torch.equal(simulation.banks[:, 0], simulation.banks[:, 1])
    assert not torch.equal(simulation.banks[:, 1], simulation.banks[:, 2])


def test_a_joiner_whose_neighbours_have_nothing_starts_afresh() -> None:
    graph = nx.disjoint_union(nx.path_graph(2), nx.empty_graph(1))
    setting = make_toy_setting(split=make_toy_split(clients=3), graph=graph)
    result = run(setting, World(late_joiners=(LateJoiner(0, 1.0), LateJoiner(1, 3.0))), trace=True)
    assert [record.client for record in result.trace or [] if record.kind == "afresh"] == [0]
    assert result.rounds == [4, 4, 4]


def test_a_wait_that_cannot_end_is_diagnosed() -> None:
    setting = make_toy_setting("ifca", split=make_toy_split(clients=3), graph=nx.path_graph(3))
    nothing_arrives = World(faults=Faults(loss=1.0))
    with pytest.raises(RunError) as caught:
        run(setting, nothing_arrives)
    assert str(caught.value) == (
        "no client can continue at 0 s: the server waits for its clients; client 0 waits for the server; client 1 "
        "waits for the server; client 2 waits for the server (0 messages were lost or broken on the way); "
        "give timeout_s"
    )
    alone = run(replace(setting, algorithm=algorithms.get("dfca-gi")), nothing_arrives)
    assert alone.rounds == [4, 4, 4]
    assert "fold" not in alone.records


def test_events_are_capped() -> None:
    with pytest.raises(RunError, match=r"stopped after max_events = 50 events, at 2 s .* raise max_events"):
        EventSimulation(make_toy_setting(rounds=1000), options=EventOptions(max_events=50)).run()


@pytest.mark.parametrize("name", presets())
def test_every_preset_runs(name: str) -> None:
    setting = make_toy_setting(aggregation="sequential", rounds=3)
    result = run(setting, preset(name))
    assert torch.isfinite(result.banks).all()
    assert result.rounds == [3] * 6


@pytest.mark.parametrize("algorithm", ["dfca-gi", "ifca"])
def test_a_dry_run_keeps_the_same_time_without_computing(algorithm: str) -> None:
    world = World(Compute(1.0, "pareto"), TIMED_LINK)
    wet, dry = (run(make_toy_setting(quick(algorithm)), world, dry=dry, trace=True) for dry in (False, True))
    assert dry.time_s == wet.time_s
    assert [record[:2] for record in dry.trace or []] == [record[:2] for record in wet.trace or []]
    assert "accuracy" not in dry.metrics[-1]


def test_staleness_weights() -> None:
    ages = range(7)
    assert [Staleness().weight(d) for d in ages] == [1.0] * 7
    assert [Staleness("polynomial", power=1.0).weight(d) for d in ages] == [1 / (1 + d) for d in ages]
    assert [Staleness("hinge", power=1.0, after=4).weight(d) for d in ages] == [1.0] * 5 + [1 / 2, 1 / 3]


def test_corrupted_payloads_are_of_both_kinds() -> None:
    made = [corrupted(Message(1, 0, t, 1, torch.ones(4)), seed=0, receiver=2).model for t in range(20)]
    assert {len(model) for model in made} == {3, 4}
    assert all(len(model) == 3 or torch.isnan(model).any() for model in made)


BAD = [
    ({"until_s": 0.0}, "until_s must be > 0 and finite, got 0.0"),
    ({"evaluate_every_s": float("nan")}, "evaluate_every_s must be > 0 and finite, got nan"),
    ({"rounds": 0}, "rounds must be >= 1, got 0"),
    (
        {"timeout_s": 0.1, "world": World(link=Link(0.5))},
        "timeout_s must be finite and >= 0.5 s, what one model takes on the fastest link; got 0.1, and every wait "
        "would end before anything arrives",
    ),
    (
        {"replay": [TraceRecord(0.0, "start", 9)]},
        "the trace names client 9; the clients are 0..5",
    ),
    ({"replay": [Input(0.0, "begin", -5)]}, "the trace names client -5; the clients are 0..5"),
    ({"replay": [TraceRecord(0.0, "start", -2)]}, "the trace names client -2; the clients are 0..5"),
    ({"replay": [Input(0.0, "begin", -1)]}, "the trace names client -1; the clients are 0..5"),
    (
        {"replay": [Input(0.0, "begin", 0, number=0), Input(2.0, "receive", 0, 1, 7)]},
        "the trace has a receive of client 0 at 2 s, but client 1 has sent no message of number 7 before; it is cut "
        "or of another run",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_bad_input(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(make_toy_setting(), **options)
    assert str(caught.value) == sentence


def test_bad_staleness_traces_and_second_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='unknown staleness "linear"'):
        Staleness("linear")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"staleness\.power must be >= 0 and finite, got -1"):
        Staleness("polynomial", power=-1)
    with pytest.raises(ConfigError, match=r"staleness\.after must be >= 0 updates and finite, got -1"):
        Staleness("hinge", after=-1)
    with pytest.raises(ConfigError, match='unknown kind of a trace "dance"'):
        run(make_toy_setting(), replay=[TraceRecord(0.0, "dance", 0)])
    (tmp_path / "trace.jsonl").write_text('{"time": 0.0, "kind": "start", "client": 0}\n{"time": 1')
    with pytest.raises(ConfigError, match=r"trace.jsonl, line 2 is not a record of a trace"):
        read_trace(tmp_path / "trace.jsonl")
    simulation = EventSimulation(make_toy_setting(rounds=1))
    simulation.run()
    with pytest.raises(RunError, match="this simulation has been run; make a new one"):
        simulation.run()


def test_a_straggler_is_silenced_by_its_rounds_but_not_by_its_updates() -> None:
    # Client 0 does ten rounds while client 1 does one: what client 1 sends is many rounds behind and brand-new.
    setting = make_toy_setting(split=make_toy_split(clients=2), graph=nx.path_graph(2), aggregation="sequential")
    slow = World(Compute(1.0, devices=(Devices(share=0.5, slowdown=10.0),)))
    ages = {}
    for unit in ("updates", "rounds", "seconds"):
        result = run(setting, slow, until_s=101.0, trace=True, staleness=Staleness(unit=unit))
        ages[unit] = result.staleness
    assert max(ages["updates"]) <= 1
    assert max(ages["rounds"]) >= 40
    assert max(ages["seconds"]) <= 2
    assert sum(ages["updates"].values()) == sum(ages["rounds"].values())


@pytest.mark.parametrize("world", [World(), World(Compute(1.0, "lognormal"), Link(0.2, spread=0.5))])
def test_an_event_is_what_one_peer_handles(world: World) -> None:
    thresholds = gc.get_threshold()
    simulation = EventSimulation(make_toy_setting(graph=nx.complete_graph(6)), world, EventOptions(trace=True))
    trace = simulation.run().trace or []
    inputs = [line for line in trace if isinstance(line, Input) and line.kind in ("receive", "finished", "wake")]
    assert simulation.handled == 1 + len(inputs)  # and the begin
    assert gc.get_threshold() == thresholds


def test_a_message_is_one_snapshot_for_all_its_receivers() -> None:
    setting = make_toy_setting(graph=nx.complete_graph(6))
    simulation = EventSimulation(setting, World(link=Link(0.5)))
    simulation._begin()
    models: list[torch.Tensor] = []
    while len(models) < 6:
        simulation.clock.now = simulation.host.now = simulation._next_time()
        simulation._handle_instant()
        parcels = [event[3] for event in simulation.clock.queue if event[1] == DELIVER]
        models = [parcel.message.message.model for parcel in parcels if isinstance(parcel.message, Update)]
    assert len({model.data_ptr() for model in models}) == 6
    bank = simulation.banks
    assert all(model.untyped_storage().data_ptr() != bank.untyped_storage().data_ptr() for model in models)


def test_a_servers_time_runs_from_the_begin_of_its_round() -> None:
    # A round of training takes 200 s: without the timeout the server would wait for it, with it each round takes 5 s.
    setting = make_toy_setting("ifca", rounds=3)
    result = run(setting, World(Compute(100.0)), timeout_s=5.0, trace=True)
    assert [record.time for record in result.trace or [] if record.kind == "broadcast"] == [5.0, 10.0, 15.0]


def test_a_partition_cuts_the_smaller_side_off_the_server() -> None:
    setting = make_toy_setting("ifca", rounds=8)
    world = World(partitions=(Partition(3.0, 9.0, ((0, 1),)),))
    result = run(setting, world, trace=True)
    folds = [record for record in result.trace or [] if record.kind == "fold"]
    assert {record.peer for record in folds if 3.0 < record.time < 9.0} == {2, 3, 4, 5}
    assert {record.peer for record in folds if record.time > 11.0} == set(range(6))
    assert result.time_s == 17.0  # who was cut off begins its first round again one second late
    assert_identical(run(setting, world, replay=result.trace, trace=True), result)
    assert Partition(0.0, 1.0, ((0, 1, 2),)).server_side(6) == 1  # of equals, the side of client 0


def test_what_was_asked_for_is_repeated_until_it_arrives() -> None:
    setting = make_toy_setting("dfca-li", aggregation="sequential", rounds=9)
    world = World(link=Link(0.1), faults=Faults(loss=0.6, corruption=0.2), late_joiners=(LateJoiner(4, 5.0),))
    result = run(setting, world, trace=True)
    assert result.records["repeat"] > 0
    assert {record.cluster for record in result.trace or [] if record.kind == "take"} == {0, 1}
    assert result.rounds == [9] * 6


def test_rows_against_time_traffic_and_compute() -> None:
    result = run(make_toy_setting(rounds=2, evaluate_every=1), World(STRAGGLERS), timeout_s=1000.0)
    for row in result.metrics:
        assert 0 <= row["idle_share"] < 1
        assert row["without_models"] == []
    assert result.metrics[-1]["compute_s"] == sum(result.compute_s) == 2 * (4 * 2 + 2 * 20)
    # (losses: 2 models x 12 samples, and 3 x 2 steps x 12 samples) x 43 weights, by 6 clients in 2 rounds
    assert result.metrics[-1]["multiplications"] == (2 * 12 + 3 * 2 * 12) * 43 * 6 * 2


def test_steps_give_the_rows_of_a_run() -> None:
    setting = make_toy_setting(aggregation="sequential")
    simulation, rounds = EventSimulation(setting, ROUGH, EventOptions(until_s=12.0, trace=True)), []
    rows, trace = [], []
    while not simulation.done:
        row = simulation.step()
        rounds.append(simulation.round)
        trace += simulation.take_trace()
        rows += [row] if row is not None else []
    expected = run(setting, ROUGH, until_s=12.0, trace=True)
    assert [without_seconds(row) for row in rows] == [without_seconds(row) for row in expected.metrics]
    assert trace == expected.trace
    assert rounds == sorted(rounds)
    assert simulation.now == 12.0
    assert simulation.take_trace() == []
    assert simulation.notes == ()
