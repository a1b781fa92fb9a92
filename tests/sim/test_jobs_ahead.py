"""Jobs that are computed before they end: the same numbers in fewer calls, and no result is visible early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from event_runs import ROUGH, STRAGGLERS, TIMED_LINK, assert_identical, drifting, through_disk
from toy import make_toy_setting, quick

from dfca.core.learning.local import LocalOptions
from dfca.sim.events import pool
from dfca.sim.events.books import EventResult
from dfca.sim.events.host import Done
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Churn, Compute, Devices, World
from dfca.sim.setting import Setting

SPREAD = World(Compute(1.0, "lognormal", devices=(Devices(0.34, 3.0),)), TIMED_LINK)
LEAVING = replace(SPREAD, churn=Churn(0.05, 3.0))


def simulation_of(setting: Setting, world: World, **options: Any) -> EventSimulation:
    return EventSimulation(setting, world, EventOptions(trace=True, max_events=200_000, **options))


def one_by_one(setting: Setting, world: World, monkeypatch: pytest.MonkeyPatch, **options: Any) -> EventSimulation:
    """Run with no room for what is computed ahead."""
    with monkeypatch.context() as patch:
        patch.setattr(pool, "AHEAD_BYTES", 0)
        simulation = simulation_of(setting, world, **options)
        simulation.run()
    return simulation


def told(result: EventResult) -> list[Any]:
    """List what happened, without which call of the engine did what."""
    assert result.trace is not None
    return [line._replace(number=-1) for line in result.trace if line.kind != "unused"]


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ({"algorithm": "dfca-gi"}, SPREAD),
        ({"algorithm": "dfca-gi", "aggregation": "sequential"}, LEAVING),
        ({"algorithm": "dfca-gi", "local": LocalOptions(steps=2, learning_rate=0.1, batch_size=4)}, SPREAD),
        ({"algorithm": "dfca-li", "participation": 0.7}, SPREAD),
        ({"algorithm": "fedspd"}, SPREAD),
        ({"algorithm": "fedem"}, SPREAD),
        ({"algorithm": "facade"}, SPREAD),
        ({"algorithm": "dfca-auto"}, ROUGH),
        ({"algorithm": "dfca-auto", "personal_steps": "auto"}, SPREAD),
        ({"algorithm": "ifca"}, SPREAD),
    ],
    ids=lambda case: "" if isinstance(case, World) else ", ".join(map(str, case.values()))[:40],
)
def test_the_numbers_are_those_of_jobs_one_by_one(
    changes: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes |= {"algorithm": quick(changes["algorithm"])}
    setting = make_toy_setting(dtype=torch.float64, evaluate_every=2, rounds=8, **changes)
    options = {"timeout_s": 20.0}
    simulation = simulation_of(setting, world, **options)
    result, alone = simulation.run(), one_by_one(setting, world, monkeypatch, **options)
    assert told(result) == told(alone.result())
    assert result.assignments.tolist() == alone.result().assignments.tolist()
    torch.testing.assert_close(result.banks, alone.banks, rtol=0, atol=1e-12)
    for mine, other in zip(result.metrics, alone.result().metrics, strict=True):
        assert mine["accuracy_by_client"] == pytest.approx(other["accuracy_by_client"], abs=1e-9)
        assert mine["changed"] == other["changed"]
    assert simulation.host.calls < alone.host.calls


def test_a_drift_meets_those_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who trains at that moment ends its round on the new samples: what was computed ahead is not used."""
    setting = drifting(rounds=14, dtype=torch.float64, aggregation="sequential")
    simulation = simulation_of(setting, SPREAD)
    result, alone = simulation.run(), one_by_one(setting, SPREAD, monkeypatch)
    assert result.trace is not None
    (when,) = [line.time for line in result.trace if line.kind == "drift"]
    assert any(line.kind == "unused" and line.time == when for line in result.trace)
    assert told(result) == told(alone.result())
    torch.testing.assert_close(result.banks, alone.banks, rtol=0, atol=1e-12)
    assert_identical(simulation_of(setting, SPREAD, replay=result.trace).run(), result)


def test_what_waits_is_in_a_checkpoint_and_not_in_the_bank() -> None:
    setting = make_toy_setting(aggregation="sequential", evaluate_every=1)
    whole, cut = simulation_of(setting, SPREAD, until_s=20.0), simulation_of(setting, SPREAD, until_s=20.0)
    whole.run()
    while not cut.host.ahead:
        cut.step()
    waiting = set(cut.host.ahead)
    before = {i: cut.banks[:, i].clone() for i in waiting}
    state = through_disk(*cut.state())
    again = simulation_of(setting, SPREAD, until_s=20.0)
    again.restore(*state)
    assert set(again.host.ahead) == waiting
    for i in waiting:
        assert torch.equal(again.banks[:, i], before[i])
        trained = again.host.ahead[i].result
        assert not torch.equal(trained.model, before[i][trained.cluster])
    again.run()
    assert torch.equal(again.banks, whole.banks)
    assert again.result().metrics[-1] == whole.result().metrics[-1]


def test_who_leaves_takes_its_round_along() -> None:
    setting = make_toy_setting(aggregation="sequential", rounds=12)
    result = simulation_of(setting, LEAVING).run()
    assert result.trace is not None
    left = {(line.time, line.client) for line in result.trace if line.kind == "leave"}
    unused = [line for line in result.trace if line.kind == "unused"]
    assert any((line.time, line.client) in left for line in unused)
    finished = {(line.client, line.number) for line in result.trace if line.kind == "finished"}
    assert not any((line.client, line.number) in finished for line in unused)
    assert_identical(simulation_of(setting, LEAVING, replay=result.trace).run(), result)


def test_no_job_is_done_that_ends_after_the_run() -> None:
    setting = make_toy_setting(aggregation="sequential", rounds=1000)
    result = simulation_of(setting, World(STRAGGLERS, TIMED_LINK), until_s=9.0).run()  # a slow round takes 20 s
    assert result.trace is not None
    assert {line.client for line in result.trace if line.kind == "finished"} < set(range(setting.clients))
    assert not any(line.kind == "unused" for line in result.trace)


def test_the_room_for_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = make_toy_setting(aggregation="sequential", rounds=6)
    simulation = simulation_of(setting, SPREAD)
    monkeypatch.setattr(pool, "AHEAD_BYTES", 2 * simulation.pool.size * simulation.banks.element_size())
    sizes, do_jobs = set(), simulation.host.do_jobs

    def counted(*arguments: Any) -> list[Done]:
        done = do_jobs(*arguments)
        sizes.add(len(simulation.host.ahead))
        return done

    monkeypatch.setattr(simulation.host, "do_jobs", counted)
    simulation.run()
    assert sizes == {0, 1, 2}
