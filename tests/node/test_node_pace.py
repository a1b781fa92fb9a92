"""The pace of a node: what it writes in a day is bounded, and a new swarm is not slowed down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfca.node.work.pace import BURST_SHARE, DAY_S, SAVE_OVERHEAD_BYTES, Pace, WriteBudget

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
