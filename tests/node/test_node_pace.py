"""The pace of a node: what it writes in a day is bounded, a new swarm is not slowed down, a converged one rests."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from node_swarm import make_swarm, memory_service

from dfca.core.state import Message
from dfca.faults.node.run import NodeRun
from dfca.faults.node.world import NodeWorld
from dfca.node.memory import MemoryNetwork, VirtualTimeLoop
from dfca.node.operate.metrics import metrics_of
from dfca.node.operate.status import _facts as shown
from dfca.node.work.pace import BURST_SHARE, DAY_S, SAVE_OVERHEAD_BYTES, Idling, Pace, WriteBudget
from dfca.peer.records.messages import Nothing, Update

GB = 10**9


def run_day(pace: Pace, count: list[int], size: int, round_s: float, most: int = 3000) -> float:
    """Do rounds, each with one save, until a day or this many rounds are over; returns the seconds that have passed."""
    now, began = 1000.0, -1e9
    while now < 1000 + DAY_S and count[1] < most:
        now += pace.wait_s(began, now)
        began = now
        now += round_s
        count[0] += size
        count[1] += 1
    return now - 1000


@given(st.integers(10**6, 10**9), st.floats(0.01, 30))
def test_a_day_of_saves_stays_within_the_limit(size: int, round_s: float) -> None:
    count = [0, 0]
    pace = Pace(0, 0.05, budget=WriteBudget(10 * GB, lambda: (count[0], count[1])))
    seconds = run_day(pace, count, size, round_s)
    written = count[0] + count[1] * SAVE_OVERHEAD_BYTES
    assert written <= 10 * GB * (seconds / DAY_S + BURST_SHARE) + 2 * (size + SAVE_OVERHEAD_BYTES)
    if count[0] / seconds < 0.5 * 10 * GB / DAY_S:  # much below the limit: never slowed down
        assert seconds == pytest.approx(count[1] * max(0.05, round_s), rel=0.02, abs=30)


def test_a_new_swarm_begins_at_full_speed_and_a_restarted_one_with_a_tenth_of_that() -> None:
    def rounds_at_once(fresh: bool) -> int:
        count = [0, 0]
        budget = WriteBudget(10 * GB, lambda: (count[0], count[1]), fresh)
        while not budget.wait_s(5.0):
            count[0] += 1_000_000 - SAVE_OVERHEAD_BYTES
            count[1] += 1
        return count[1]

    assert rounds_at_once(True) == 101  # 1 % of 10 GB, and the one that empties the bucket
    assert rounds_at_once(False) == 11


def test_no_limit_and_the_longest_of_all_reasons_counts() -> None:
    assert WriteBudget(0, lambda: (10**15, 1)).wait_s(1.0) == 0
    empty = WriteBudget(DAY_S, lambda: (3000 - SAVE_OVERHEAD_BYTES, 1), fresh=False)  # a byte per second, 86 at once
    assert Pace(2.0, 0.5, budget=empty).wait_s(round_began=9.9, now=10.0) == pytest.approx(
        3000 - BURST_SHARE * DAY_S / 10
    )
    assert Pace(2.0, 0.5).wait_s(9.9, 10.0) == 2.0
    assert Pace(0.0, 0.5).wait_s(9.9, 10.0) == pytest.approx(0.4)


# Rest while nothing is learned.


def rests(idling: Idling, losses: Iterable[float | None]) -> list[float]:
    """Return the rest after every round."""
    shown = []
    for loss in losses:
        idling.learned(loss)
        shown.append(idling.rest_s)
    return shown


def test_rests_double_up_to_the_longest_and_end_when_something_is_learned() -> None:
    idling = Idling(10.0, guess=1.0)
    idling.quiet_rounds = 5
    assert rests(idling, [1.0, 0.5, 0.5, 0.4, 0.4]) == [0.0] * 5  # the median improves
    assert rests(idling, [0.4] * 11)[-5:] == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert rests(idling, [0.398] * 9)[-1] == 10.0  # less than a hundredth better
    assert rests(idling, [0.2] * 6)[-1] == 0.0
    assert rests(idling, [0.2] * 12)[-1] > 0.0
    assert rests(idling, [0.31]) == [0.0]  # a rise of a tenth of guessing counts at once
    assert rests(idling, [0.31] * 20)[-1] > 0.0  # and is then how it is


def test_a_loss_that_only_fluctuates_does_not_keep_a_node_awake() -> None:
    draw = random.Random(0)
    idling = Idling(600.0, guess=math.log(4), least=0.001)
    shown = rests(idling, (0.2 + draw.gauss(0, 0.03) for _ in range(1000)))
    assert 0.0 in shown[:500]
    assert shown[-1] == 600.0


def test_a_node_that_learns_slowly_does_not_rest() -> None:
    idling = Idling(600.0)
    assert set(rests(idling, (0.9999**i for i in range(5000)))) == {0.0}
    assert Idling(0.0).rest_s == 0.0
    assert set(rests(Idling(0.0), [1.0] * 2000)) == {0.0}  # it is switched off
    assert rests(Idling(600.0), [None] * 600)[-1] == 600.0  # it has no loss at all


def update(model: torch.Tensor, cluster: int = 0) -> Update:
    return Update(Message(7, cluster, 3, 2, model), 1, (), 0.0, (), ())


def test_a_model_that_is_clearly_another_ends_the_rest() -> None:
    bank = torch.zeros(2, 4)
    bank[0, 0] = 1.0

    def resting() -> Idling:
        idling = Idling(10.0)
        idling.quiet_rounds = 1
        rests(idling, [1.0, 1.0])
        assert idling.rest_s == 2.0
        idling.compare(7, update(bank[0] + 0.1), bank)  # at a distance of 0.2 when the rest begins
        return idling

    for message, awake in (
        (update(bank[0] - 0.2), False),  # 0.4 = 2 * 0.2
        (update(bank[0] + 0.3), True),  # 0.6
        (update(bank[0] * float("nan")), True),  # the peer refuses it
        (update(torch.zeros(9, dtype=torch.uint8)), False),  # the payload of a codec
        (update(bank[0] + 0.3, cluster=2), False),
        (Nothing(3, (), (), ()), False),
    ):
        idling = resting()
        idling.compare(7, message, bank)
        assert (idling.rest_s == 0.0) is awake
    idling = resting()
    idling.compare(8, update(bank[0] + 5), bank)  # another neighbour, whose models were always far
    assert idling.rest_s == 2.0


def test_a_converged_swarm_rests_and_is_back_when_one_of_it_has_new_data() -> None:
    run, loop = (
        NodeRun(NodeWorld(3, nodes=4, algorithm="dfca-gi", clusters=1, groups=1, rest_s=60.0)),
        VirtualTimeLoop(),
    )

    async def scenario() -> None:
        run._plan()
        await asyncio.sleep(110)
        services = [service for i in range(3) if (service := run._service(i)) is not None]
        rounds = [service.node.machine.round for service in services]
        assert [service.idling.rest_s for service in services] == [60.0] * 3
        assert max(rounds) < 60  # of 360
        work: Any = services[0].work
        work.move_to(1)
        work.is_stale = lambda: True
        await asyncio.sleep(15)  # it looks at its data every ten seconds
        work.is_stale = lambda: False
        assert services[0].node.machine.round > rounds[0] + 5
        assert all(s.node.machine.round > r + 3 for s, r in zip(services[1:], rounds[1:], strict=True))
        assert services[1].work.loss > 0.5  # from 0.25: the models of the first have reached it
        status = services[0].status()
        assert "rest_s" in status
        await run._end()

    run.found()
    loop.run_until_complete(scenario())
    loop.close()
    assert run.problem is None


def test_a_resting_swarm_takes_in_a_newcomer_and_its_by_election_at_once() -> None:
    """The newcomer is of another kind: it calls the others to an election, and they are up for it."""
    world = NodeWorld(3, nodes=4, algorithm="dfca-auto", groups=1, late=((3, 100.0),), rest_s=60.0)
    run, loop = NodeRun(world), VirtualTimeLoop()

    async def scenario() -> None:
        run._plan()
        await asyncio.sleep(99)
        services = [service for i in range(3) if (service := run._service(i)) is not None]
        assert [service.idling.rest_s for service in services] == [60.0] * 3
        rounds = [service.node.machine.round for service in services]
        await asyncio.sleep(12)
        newcomer = run._service(3)
        assert newcomer is not None
        assert newcomer.node.machine.bank is not None
        assert any(s.node.machine.round > r + 5 for s, r in zip(services, rounds, strict=True))
        await run._end()

    run.found()
    loop.run_until_complete(scenario())
    loop.close()
    assert run.problem is None


def test_status_and_metrics_show_the_rest() -> None:
    status = {"rest_s": 64.0, "round": 5000, "state": "training", "members": 3}
    assert dict(shown(status))["rest"] == "64 s between rounds: nothing is learned; new data or models end it"
    values = {family.name: family.samples[0].value for family in metrics_of(status) if family.samples}
    assert values["dfca_rest_seconds"] == 64.0
    assert "rest" not in dict(shown({**status, "rest_s": 0.0}))


def test_swarms_with_a_last_round_and_those_that_wait_for_each_other_do_not_rest(tmp_path: Path) -> None:
    for name, agreed, longest in (
        ("for-ever", {}, 600.0),
        ("rounds", {"rounds": 9}, 0.0),
        ("batch", {"aggregation": "batch"}, 0.0),
    ):
        (tmp_path / name).mkdir()
        (folder,) = make_swarm(tmp_path / name, (0,), agreed=agreed)
        idling = memory_service(MemoryNetwork(()), folder).idling
        assert max(rests(idling, [1.0] * 520)) == longest
