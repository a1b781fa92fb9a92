"""How a peer learns how long answers take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfca.peer.waves.deadline import FLOOR, MOST_S, AnswerTime


def test_the_first_deadline_is_the_option_and_the_next_is_learned() -> None:
    answer_time = AnswerTime(60.0)
    assert answer_time.deadline_s == 60.0
    answer_time.observe(20.0)
    assert answer_time.deadline_s == 20 + 4 * 10
    answer_time.observe(20.0)
    assert answer_time.deadline_s == pytest.approx(20 + 4 * 7.5)
    for _ in range(99):
        answer_time.observe(0.1)
    assert answer_time.deadline_s == FLOOR * 60


def test_a_false_time_out_doubles_until_an_answer_comes_in_time() -> None:
    answer_time = AnswerTime(10.0)
    answer_time.observe_late(12.0)
    assert answer_time.deadline_s == 2 * (12 + 4 * 6)
    answer_time.observe(12.0)
    assert answer_time.deadline_s == pytest.approx(12 + 4 * 4.5)
    for _ in range(99):
        answer_time.observe_late(1e6)
    assert answer_time.deadline_s == MOST_S


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6))), st.floats(0.01, 1e4))
def test_a_deadline_stays_between_its_bounds(answers: list[tuple[bool, float]], initial_s: float) -> None:
    answer_time = AnswerTime(initial_s)
    for late, seconds in answers:
        (answer_time.observe_late if late else answer_time.observe)(seconds)
        assert FLOOR * initial_s <= answer_time.deadline_s <= max(MOST_S, initial_s)
