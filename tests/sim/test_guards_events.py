"""What the simulator in virtual time does not forget in a checkpoint, nor let pass in a replay, nor tell too late.

Every test here fails without one line of the source (`tests/mutants`).
"""

from __future__ import annotations

from typing import Any

import pytest
from event_runs import ROUGH, STRAGGLERS, TIMED_LINK, run, through_disk
from toy import make_toy_setting

from dfca.base.errors import ConfigError
from dfca.sim.events.books import RunLog, TraceRecord
from dfca.sim.events.clock import NOTICE, Clock
from dfca.sim.events.links import Links
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Faults, Link, World


def cut(simulation: EventSimulation, fresh: EventSimulation) -> EventSimulation:
    """Continue a simulation in another one, from its checkpoint."""
    fresh.restore(*through_disk(*simulation.state()))
    return fresh


def test_when_the_last_small_messages_arrive_is_part_of_a_checkpoint() -> None:
    world = World(STRAGGLERS, TIMED_LINK, Faults(loss=0.2))

    def make() -> EventSimulation:
        return EventSimulation(make_toy_setting(evaluate_every=1), world, EventOptions(until_s=9.0, timeout_s=5.0))

    simulation = make()
    while not simulation.links.arrivals:
        assert not simulation.done
        simulation.step()
    assert cut(simulation, make()).links.arrivals == simulation.links.arrivals


def test_what_clients_will_remember_of_work_under_way_is_part_of_a_checkpoint() -> None:
    def make() -> EventSimulation:
        setting = make_toy_setting(algorithm="fedem", evaluate_every=1)
        return EventSimulation(
            setting, World(STRAGGLERS, TIMED_LINK), EventOptions(until_s=20.0, evaluate_every_s=0.5, timeout_s=5.0)
        )

    simulation = make()
    while not simulation.pool.memories:
        assert not simulation.done
        simulation.step()
    again = cut(simulation, make()).pool.memories
    assert again.keys() == simulation.pool.memories.keys()
    assert all(value.equal(again[client]) for client, value in simulation.pool.memories.items())


def test_a_replay_says_where_a_client_does_something_else() -> None:
    setting = make_toy_setting(aggregation="sequential")
    trace: list[Any] = list(run(setting, ROUGH, until_s=6.0, trace=True).trace or ())
    place = next(i for i, line in enumerate(trace) if isinstance(line, TraceRecord) and line.kind == "fold")
    changed = [*trace[:place], trace[place]._replace(round=trace[place].round + 1), *trace[place + 1 :]]
    with pytest.raises(ConfigError, match=r"the trace has a fold of client \d at .* but the replay has a fold"):
        run(setting, ROUGH, until_s=6.0, trace=True, replay=changed)


class Ends:
    """Notes what the ends of a link are told."""

    def __init__(self, **link: Any) -> None:
        self.clock, self.told = Clock(), list[tuple[str, int]]()
        self.links = Links(World(link=Link(**link)), ((1,), (0,)), 100, 7, self.clock, RunLog(2, keep=True))
        self.links.ends = self  # type: ignore[assignment]
        for i in range(2):
            self.links.arrive(i)

    def feed(self, i: int, kind: str, *other: int) -> None:
        self.told.append((kind, i))


@pytest.mark.parametrize("what", ["down", "broken"])
def test_a_notice_of_an_old_epoch_of_a_link_is_no_news(what: str) -> None:
    ends = Ends(latency_s=0.1)
    old = ends.links.live[0, 1]
    ends.links._close(0, 1, at_once=True)
    ends.links._open(0, 1)
    before = list(ends.told)
    ends.links.on_notice((2.0, NOTICE, 9, what, 0, 1, old))  # type: ignore[arg-type]
    assert ends.told == before
    assert (0, 1) in ends.links.live
