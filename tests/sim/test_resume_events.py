"""A simulation in virtual time that is cut anywhere and continued is the simulation that was not."""

from __future__ import annotations

import json
from collections import Counter, deque
from typing import Any

import pytest
import torch
from event_runs import ROUGH, STRAGGLERS, TIMED_LINK, assert_identical, through_disk
from toy import make_toy_setting

from dfca.base.errors import ConfigError, RunError
from dfca.core.rules.staleness import Staleness
from dfca.peer.inbox import Inbox
from dfca.peer.packing import MODULES, Packer, Unpacker, records_of
from dfca.peer.records.messages import Hello
from dfca.peer.state import State
from dfca.sim.events import books, links
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Churn, Faults, LateJoiner, Partition, World
from dfca.sim.setting import Setting

EMPTY = World(
    STRAGGLERS,
    TIMED_LINK,
    Faults(0.2, 0.1, 0.1),
    Churn.of_share(0.2, away_s=6.0, keeps=False),
    partitions=(Partition(3.0, 8.0, ((0, 1, 2),)),),
    late_joiners=(LateJoiner(2, 5.0),),
)

CASES: dict[str, tuple[dict[str, Any], World, dict[str, Any]]] = {
    "sequential": ({"aggregation": "sequential"}, ROUGH, {"until_s": 14.0, "staleness": Staleness("polynomial")}),
    "batch": ({"algorithm": "dfca-li"}, EMPTY, {"until_s": 14.0, "timeout_s": 5.0}),
    "server": ({"algorithm": "ifca"}, ROUGH, {"until_s": 25.0, "timeout_s": 5.0}),
    "metropolis": ({"algorithm": "dfedavgm"}, World(STRAGGLERS, TIMED_LINK), {"until_s": 10.0, "timeout_s": 5.0}),
    "election": (
        {"algorithm": "dfca-auto", "aggregation": "sequential"},
        World(STRAGGLERS, TIMED_LINK, Faults(loss=0.2)),
        {"until_s": 70.0, "evaluate_every_s": 7.0},
    ),
}


def make(case: str) -> tuple[Setting, EventSimulation]:
    changes, world, options = CASES[case]
    setting = make_toy_setting(**{"evaluate_every": 1, **changes})
    return setting, EventSimulation(setting, world, EventOptions(trace=True, **options))


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_cut_after_every_step_is_the_run_that_is_not(case: str) -> None:
    _, whole = make(case)
    expected, rows, trace = whole.run(), [], []
    _, simulation = make(case)
    while not simulation.done:
        rows.append(simulation.step())
        trace += simulation.take_trace()
        state = through_disk(*simulation.state())
        _, simulation = make(case)
        simulation.restore(*state)
    resumed = simulation.result()
    assert sum(row is not None for row in rows) == len(expected.metrics)
    assert trace == expected.trace
    expected.trace[:] = []  # type: ignore[index]
    assert_identical(resumed, expected)


def test_a_checkpoint_of_another_run_is_refused() -> None:
    _, simulation = make("sequential")
    simulation.step()
    tensors, facts = simulation.state()
    tensors["bank"] = tensors["bank"][:, :3]
    with pytest.raises(ConfigError, match=r"the checkpoint's bank is \(2, 3, 43\), this run's \(2, 6, 43\)"):
        make("sequential")[1].restore(tensors, facts)


def test_shared_tensors_are_stored_once_and_shared_again() -> None:
    packer, model = Packer(), torch.ones(3)
    packed = json.loads(json.dumps(packer.pack({"a": [model, (model, float("inf"))], (1, 2): {3, 4}})))
    assert len(packer.tensors) == 1
    unpacked = Unpacker(packer.tensors).unpack(packed)
    assert unpacked["a"][0] is unpacked["a"][1][0]
    assert unpacked["a"][1][1] == float("inf")
    assert unpacked[1, 2] == {3, 4}


def test_a_checkpoint_names_only_what_it_may() -> None:
    with pytest.raises(RunError, match="a checkpoint cannot hold a Packer"):
        Packer().pack(Packer())
    with pytest.raises(RunError, match="the checkpoint holds a Popen, which this version does not know"):
        Unpacker({}).unpack({"~": "Popen", "is": []})


def test_records_are_stored_by_the_names_of_their_fields() -> None:
    values = [Hello(1, 2, 3), State.DONE, Counter(a=2), deque([1, 2], 4), Inbox(2), torch.float64]
    packed = json.loads(json.dumps(Packer().pack(values)))
    assert Unpacker({}).unpack(packed) == values
    del packed[0]["is"]["lineage"]
    assert Unpacker({}).unpack(packed)[0] == values[0]  # a field that a file does not have takes its default
    with pytest.raises(RunError, match="the checkpoint's Hello has no field round, which this version needs"):
        Unpacker({}).unpack({"~": "Hello", "is": {"incarnation": 1}})
    with pytest.raises(RunError, match="the checkpoint's Inbox has a field size, which this version does not know"):
        Unpacker({}).unpack({"~": "Inbox", "is": {"size": 1}})
    with pytest.raises(RunError, match=r"the checkpoint holds State\.ASLEEP, which this version does not know"):
        Unpacker({}).unpack({"~": "State", "is": "ASLEEP"})
    names = [name for module in (*MODULES, books, links) for name in records_of([module])]
    assert len(names) == len(set(names))  # a name means one class


def test_a_view_of_the_banks_is_one_again() -> None:
    banks, later = torch.arange(12.0).view(2, 3, 2), torch.zeros(2, 3, 2)
    packer = Packer(banks)
    unpacked = Unpacker({}, later).unpack(json.loads(json.dumps(packer.pack(banks[:, 1]))))
    later.copy_(banks)
    assert packer.tensors == {}
    assert torch.equal(unpacked, banks[:, 1])
