"""When a neighbour counts as dead, and how long a node waits: on clocks that are numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfca.errors import ConfigError
from dfca.node.net.deadlines import Backoff, Deadline
from dfca.node.net.detector import Detector, SteadyClock
from dfca.node.net.options import NetOptions, join_address, split_address


def beats(detector: Detector, times: list[float]) -> Detector:
    for time in times:
        detector.beat(time)
    return detector


def test_regular_heartbeats_allow_little_silence_irregular_ones_more() -> None:
    regular = beats(Detector(0.0, 2.5, 4.5), [float(i) for i in range(40)])
    irregular = beats(Detector(0.0, 2.5, 4.5), [i + (0.9 if i % 2 else 0.0) for i in range(40)])
    assert regular.allowed_s == 2.5
    assert 2.5 < irregular.allowed_s <= 4.5
    assert not regular.is_dead(39 + 2.5)
    assert regular.is_dead(39 + 2.6)


@given(st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=30))
def test_whatever_came_before_the_dead_are_noticed_within_five_seconds(gaps: list[float]) -> None:
    now, detector = 0.0, Detector(0.0, 2.5, 4.5)
    for gap in gaps:
        now += gap
        detector.beat(now)
    assert not detector.is_dead(now + 2.4)
    assert detector.is_dead(now + 4.75)


def test_time_in_which_the_event_loop_starved_is_nobodys_silence() -> None:
    clock = SteadyClock(0.25, now=0.0)
    detector = Detector(0.0, 2.5, 4.5)
    clock.tick(0.25)
    detector.beat(clock.read(0.25))
    assert clock.read(30.0) == pytest.approx(0.6)  # the tick due at 0.5 did not come
    assert not detector.is_dead(clock.read(30.0))
    clock.tick(30.0)
    assert clock.lost_s == pytest.approx(29.4)
    assert not detector.is_dead(clock.read(30.2))
    for i in range(20):
        clock.tick(30.0 + 0.25 * (i + 1))
    assert detector.is_dead(clock.read(35.0))  # from then on its silence counts


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=40))
def test_the_steady_clock_never_runs_backwards_nor_faster_than_time(steps: list[tuple[float, bool]]) -> None:
    now, clock = 0.0, SteadyClock(0.25, now=0.0)
    last = clock.read(now)
    for step, ticks in steps:
        now += step
        if ticks:
            clock.tick(now)
        assert last - 1e-9 <= clock.read(now) <= last + step + 1e-9
        last = clock.read(now)


def test_a_deadline_follows_what_was_observed_and_doubles_when_missed() -> None:
    deadline = Deadline(1.5, 10.0)
    assert deadline.seconds == 5.0
    for _ in range(20):
        deadline.observe(0.1)
    assert deadline.seconds == 1.5
    deadline.miss()
    assert deadline.seconds == 3.0
    for _ in range(50):
        deadline.miss()
    assert deadline.seconds == 10.0
    deadline.observe(0.1)
    assert deadline.seconds == 1.5
    for _ in range(60):
        deadline.observe(4.0)
    assert 4.0 < deadline.seconds < 5.0


def test_pauses_double_up_to_a_bound_with_jitter() -> None:
    backoff = Backoff(0.5, 8.0, random.Random(1))
    pauses = [backoff.next() for _ in range(8)]
    for pause, span in zip(pauses, (0.5, 1, 2, 4, 8, 8, 8, 8), strict=True):
        assert span / 2 <= pause <= span
    assert len(set(pauses)) == 8
    backoff.reset()
    assert backoff.next() <= 0.5


@pytest.mark.parametrize(
    ("address", "parts"),
    [("192.0.2.1:7447", ("192.0.2.1", 7447)), ("[fe80::1]:80", ("fe80::1", 80)), ("a.b:1", ("a.b", 1))],
)
def test_addresses_are_split_and_joined(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "fe80::1:80", "host:٣"])
def test_what_is_no_address_is_refused_with_a_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match=r"address"):
        split_address(address)


def test_plain_text_is_for_loopback_only() -> None:
    assert NetOptions(host="127.0.0.1", insecure=True).insecure
    assert NetOptions(host="::1", insecure=True).insecure
    with pytest.raises(ConfigError, match=r"loopback only, got host \"0.0.0.0\""):
        NetOptions(insecure=True)
    with pytest.raises(ConfigError, match=r"degree must be at least 2"):
        NetOptions(degree=1)
