"""When a neighbour counts as dead, and how long a node waits: on clocks that are numbers."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dfca.base.errors import ConfigError
from dfca.core.state import Message
from dfca.node.addresses import join_address, split_address
from dfca.node.net.links.link import NetLink
from dfca.node.net.links.timing import (
    BACK_S,
    FORGET_S,
    MOST_DOUBLED,
    Backoff,
    Deadline,
    Detector,
    FalseAlarms,
    SteadyClock,
)
from dfca.node.net.options import NetOptions
from dfca.node.net.transfer.offers import ModelOffer
from dfca.node.net.transfer.sender import KEEP_UPDATE_S, Sender
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.codec import to_proto
from dfca.peer.records.messages import Update


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
def test_a_death_is_noticed_within_five_seconds_whatever_came_before(gaps: list[float]) -> None:
    now, detector = 0.0, Detector(0.0, 2.5, 4.5)
    for gap in gaps:
        now += gap
        detector.beat(now)
    assert not detector.is_dead(now + 2.4)
    assert detector.is_dead(now + 4.75)


def test_a_neighbour_declared_dead_too_early_is_given_more_time() -> None:
    alarms, detector = FalseAlarms(), Detector(0.0, 2.5, 4.5)
    assert alarms.begin("a", 0.0) == 0
    counts = []
    for now in (10.0, 30.0, 50.0):  # as long as there are more, at most four times the silence
        alarms.end("a", now)
        counts.append(alarms.begin("a", now + BACK_S))
    assert counts == [1, 2, MOST_DOUBLED] == [1, 2, 2]
    detector.doubled = 2
    assert detector.allowed_s == 18.0
    assert not detector.is_dead(18.0)
    assert detector.is_dead(18.1)
    assert alarms.begin("a", 60.0 + FORGET_S) == 2  # a link that ended for another reason
    assert alarms.begin("a", 60.1 + FORGET_S) == 0
    alarms.end("b", 10.0)
    assert alarms.begin("b", 10.1 + BACK_S) == 0  # it was away
    assert alarms.begin("b", 10.2 + BACK_S) == 0


def test_a_removed_neighbour_begins_anew() -> None:
    alarms = FalseAlarms()
    alarms.end("a", 0.0)
    alarms.begin("a", 1.0)
    alarms.end("a", 5.0)
    alarms.forget("a")
    assert alarms.begin("a", 6.0) == 0


def test_time_in_which_the_event_loop_starved_does_not_count_as_silence() -> None:
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
def test_a_malformed_address_is_refused_with_a_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match=r"address"):
        split_address(address)


def test_plain_text_is_for_loopback_only() -> None:
    assert NetOptions(host="127.0.0.1", insecure=True).insecure
    assert NetOptions(host="::1", insecure=True).insecure
    with pytest.raises(ConfigError, match=r"loopback only, got host \"0.0.0.0\""):
        NetOptions(insecure=True)
    with pytest.raises(ConfigError, match=r"degree must be at least 2"):
        NetOptions(degree=1)


class Silent:
    """A stream on which nothing comes."""

    async def read(self) -> Any:
        await asyncio.Event().wait()

    async def write(self, message: bytes) -> None:
        return


def test_an_update_that_is_not_read_in_time_makes_room_for_the_newest() -> None:
    """One that reads nothing holds two updates at most, and none of them for ever."""

    async def scenario() -> None:
        now, model = 0.0, torch.zeros(2)
        link = NetLink("a", 1, Silent(), NetOptions(), lambda: now, True)
        local: Any = SimpleNamespace(options=SimpleNamespace(cache_bytes=1000), now=lambda: now)
        swarm: Any = SimpleNamespace(dtype=torch.float32, encoding="float32")
        links = {"a": link}
        sender = Sender(local, swarm, links, ThreadPoolExecutor(1))

        def send() -> None:
            message = to_proto(Update(Message(1, 0, round(now), 2, model), 1))
            packed = asyncio.get_running_loop().create_future()
            packed.set_result((round(now).to_bytes(32), b"x" * 160))
            offer = sender._newest["a", 0] = ModelOffer("a", b"", message, 0, 0, now)
            sender._announce_packed(link, offer, packed)

        def said() -> list[str]:
            frames = []
            while (make := link._outbox.get()) is not None:
                frames.append(pb.Frame.FromString(make()).WhichOneof("kind"))
            return frames

        send()
        assert said() == ["heartbeat", "announce"]
        for _ in range(60):
            now += 1.0
            send()
            sender.prune()
            assert said() == []
            assert len(sender.offers) == 2
        assert link.outgoing.want(pb.Want(number=1, offset=0, until=2), lambda: sender.offers.announced("a", 1))
        now = 60.2  # 60 s, and 160 bytes at 1600 per second
        sender.prune()
        assert said() == ["withdraw", "announce"]
        assert len(sender.offers) == 1
        assert link.outgoing.next() is None
        sender.received(link, 2)
        assert len(sender.offers) == 0
        send()
        links.clear()
        sender.lose(link)
        now += KEEP_UPDATE_S
        sender.prune()
        assert len(sender.offers) == 1
        now += 0.1
        sender.prune()
        assert len(sender.offers) == 0

    asyncio.run(scenario())
