"""How a peer learns how long answers take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.peer.machine import Memory
from dfca.peer.peer import Peer
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Draw
from dfca.peer.server import Server
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


def test_a_clock_that_jumps_ahead_says_little_about_answers() -> None:
    jumped, late = AnswerTime(5.0), AnswerTime(5.0)
    jumped.observe_late(500.0)
    late.observe_late(40.0)
    assert jumped == late
    for _ in range(3):
        late.observe_late(500.0)  # where answers take that long, they are learned
    assert late.deadline_s > 500


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6))), st.floats(0.01, 1e4))
def test_a_deadline_stays_between_its_bounds(answers: list[tuple[bool, float]], initial_s: float) -> None:
    answer_time = AnswerTime(initial_s)
    for late, seconds in answers:
        (answer_time.observe_late if late else answer_time.observe)(seconds)
        assert FLOOR * initial_s <= answer_time.deadline_s <= max(MOST_S, initial_s)


def test_a_clock_that_is_set_back_takes_all_deadlines_with_it() -> None:
    """What was 10 s away is 10 s away, at a peer that waits for models and at a server that waits for reports."""
    alone = PeerOptions(Rules(0, 1), (1,), 1, "shared", 3, 0, 1, join_s=10.0)
    peer = Peer(alone, Memory(1, torch.float32))
    peer.begin(100.0, late=True)
    assert peer.next_wake() == 110.0
    options = PeerOptions(Rules(-1, 0, "server"), (0,), 1, "shared", 3, 0, 1, method=Method(timeout_s=10.0))
    server = Server(options, Memory(1, torch.float32))
    server.begin(100.0)
    (draw,) = server.ready().work
    server.finished(draw, torch.zeros(1, 1), 100.0)
    server.connected(0, 100.0)
    for machine in (peer, server):
        machine.wake(40.0)
        due = machine.next_wake()
        assert due is not None
        assert due == pytest.approx(50.0)
        machine.wake(49.0)
        out = machine.ready()
        assert not out.work
        assert "timeout" not in [note.kind for note in out.notes]
        machine.wake(due)
    assert [type(job) for job in peer.ready().work] == [Draw]
    assert "timeout" in [note.kind for note in server.ready().notes]
