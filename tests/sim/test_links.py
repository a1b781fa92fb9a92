"""What the world does to messages, one link at a time: order, epochs, uplinks, repeats; and one peer driven alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dfca.base.errors import ConfigError
from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.core.rules.relay import Offer
from dfca.core.state import Message
from dfca.peer.machine import Memory, drive
from dfca.peer.peer import Peer
from dfca.peer.records.messages import Copy, Hello, Update
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Draw, Train, Trained
from dfca.sim.events.books import RunLog
from dfca.sim.events.clock import CHANGE, DELIVER, DEPART, Clock
from dfca.sim.events.links import TRIES, Links, Parcel
from dfca.sim.events.replay import from_line, to_line
from dfca.sim.events.world import Faults, Link, Partition, World

MODEL_BYTES = 100


class Pair:
    """Two participants and the link between them, or another graph; `seen` is what they were told, in order."""

    def __init__(self, near: Sequence[Sequence[int]] = ((1,), (0,)), **world: Any) -> None:
        self.clock, self.books = Clock(), RunLog(len(near), keep=True)
        self.links = Links(World(**world), near, MODEL_BYTES, 7, self.clock, self.books)
        self.links.ends = self
        self.seen: list[tuple[Any, ...]] = []
        for i in range(len(near)):
            self.links.arrive(i)

    def feed(self, i: int, kind: str, *other: int) -> None:
        self.seen.append((self.clock.now, kind, i))

    def receive(self, parcel: Parcel, places: Sequence[int], broken: bool) -> None:
        for place in places:
            self.seen.append((self.clock.now, "receive", parcel.number + place, round(parcel.waited_s, 6), broken))

    def run(self, until_s: float = math.inf) -> None:
        while self.clock.queue and self.clock.queue[0][0] <= until_s:
            event = self.clock.pop()
            self.clock.now = event[0]
            handlers = {DELIVER: self.links.on_deliver, DEPART: self.links.on_depart}
            assert event[1] != CHANGE
            handlers.get(event[1], self.links.on_notice)(event)

    def received(self) -> list[int]:
        return [event[2] for event in self.seen if event[1] == "receive"]


def update(round: int = 0, cluster: int = 0) -> Update:
    return Update(Message(0, cluster, round, 1, torch.ones(4)), 1)


def copy() -> Copy:
    return Copy(Message(0, 0, 0, 1, torch.ones(4), Offer(0, 0, 0)))


def test_both_ends_are_told_that_a_link_came_up() -> None:
    assert Pair().seen == [(0.0, "connected", 0), (0.0, "connected", 1)]


@pytest.mark.parametrize("faults", [Faults(), Faults(loss=0.4, corruption=0.2)])
def test_small_messages_arrive_in_order(faults: Faults) -> None:
    pair = Pair(link=Link(0.1, spread=1.0), faults=faults)
    for number in range(60):
        pair.links.send(0, (1,), Hello(0, 0, 1), number)
    pair.run()
    assert pair.received() == list(range(60))
    assert (pair.books.kinds["lost"] > 0) == (faults.loss > 0)


def test_updates_overtake_each_other_get_lost_break_and_arrive_twice() -> None:
    pair = Pair(link=Link(0.1, spread=1.0), faults=Faults(0.2, 0.3, 0.2))
    for number in range(1, 101):
        pair.links.send(0, (1,), update(number), number)
    pair.run()
    rounds = pair.received()
    assert rounds != sorted(rounds)
    assert 60 < len(set(rounds)) < 95
    assert len(rounds) > len(set(rounds))
    assert any(event[-1] for event in pair.seen if event[1] == "receive")


def test_an_update_that_has_not_left_is_replaced_and_says_how_long_it_waited() -> None:
    pair = Pair(link=Link(bandwidth_bytes_s=100.0))  # one second each
    for number in (1, 2, 3):
        pair.links.send(0, (1,), update(number), number)
    pair.links.send(0, (1,), update(3, cluster=1), 4)
    pair.run()
    assert [event for event in pair.seen if event[1] == "receive"] == [
        (1.0, "receive", 1, 1.0, False),
        (2.0, "receive", 3, 2.0, False),
        (3.0, "receive", 4, 3.0, False),
    ]
    assert pair.books.kinds["overtaken"] == 1


def test_a_requested_model_is_never_replaced_and_is_repeated_until_it_arrives() -> None:
    pair = Pair(link=Link(0.1, bandwidth_bytes_s=1000.0), faults=Faults(0.4, 0.5, 0.2))
    for number in range(20):
        pair.links.send(0, (1,), copy(), number)
    pair.run()
    assert sorted(pair.received()) == list(range(20))
    assert pair.books.kinds["repeat"] > 0


def test_a_partition_loses_messages_on_their_way_and_is_noticed_later() -> None:
    pair = Pair(link=Link(1.0), partitions=(Partition(0.5, 9.0, ((0,),)),))
    pair.links.send(0, (1,), Hello(0, 0, 1), 1)
    pair.clock.now = 0.5
    pair.links.cut(0, closed=True)
    pair.run()
    assert pair.seen[2:] == [(2.5, "disconnected", 0), (2.5, "disconnected", 1)]  # two latencies later
    pair.clock.now = 9.0
    pair.links.cut(0, closed=False)
    pair.links.send(1, (0,), Hello(0, 0, 1), 2)
    pair.run()
    assert pair.seen[4:] == [(9.0, "connected", 0), (9.0, "connected", 1), (10.0, "receive", 2, 0.0, False)]


@pytest.mark.parametrize("world", [{"link": Link(1.0)}, {"link": Link(1.0), "faults": Faults(duplication=1e-12)}])
def test_of_several_receivers_only_those_behind_a_cut_lose_a_message(world: dict[str, Any]) -> None:
    pair = Pair(((1, 2, 3), (0,), (0,), (0,)), partitions=(Partition(0.5, 9.0, ((2,),)),), **world)
    pair.links.send(0, (1, 2, 3), update(), 5)
    assert len(pair.clock.queue) == (3 if "faults" in world else 1)  # one entry where nothing can set them apart
    pair.clock.now = 0.5
    pair.links.cut(0, closed=True)
    pair.run(1.0)
    assert pair.received() == [5, 7]
    kinds = [(line.kind, line.client, line.peer) for line in pair.books.trace or []]
    assert kinds == [("send", 0, 1), ("send", 0, 2), ("send", 0, 3), ("lost", 2, 0)]
    assert pair.books.sent_by_client == [3, 0, 0, 0]


def test_a_short_break_is_seen_as_a_break() -> None:
    pair = Pair(link=Link(1.0), partitions=(Partition(0.5, 1.0, ((0,),)),))
    pair.clock.now = 0.5
    pair.links.cut(0, closed=True)
    pair.clock.now = 1.0
    pair.links.cut(0, closed=False)
    pair.run()
    kinds = [event[1:] for event in pair.seen[2:]]
    assert kinds == [("disconnected", 0), ("disconnected", 1), ("connected", 0), ("connected", 1)]


def test_a_client_that_leaves_is_told_nothing() -> None:
    pair = Pair()
    pair.links.leave(1)
    assert pair.seen[2:] == [(0.0, "disconnected", 0)]


def test_a_message_that_cannot_be_delivered_breaks_the_link_and_it_comes_up_again() -> None:
    pair = Pair(link=Link(0.1), faults=Faults(loss=0.98))
    for number in range(20):
        pair.links.send(0, (1,), Hello(0, 0, 1), number)
    pair.run(60.0)
    kinds = [event[1] for event in pair.seen[2:]]
    first = kinds.index("disconnected")
    assert kinds[first : first + 4] == ["disconnected", "disconnected", "connected", "connected"]
    assert pair.received() == list(range(len(pair.received())))  # in order up to the break, nothing after it
    assert pair.books.kinds["lost"] >= TRIES


def test_a_link_that_loses_everything_is_never_up() -> None:
    assert Pair(faults=Faults(loss=1.0)).seen == []


# --- one peer alone


def options(**changes: Any) -> PeerOptions:
    rules = Rules(0, 1)
    return PeerOptions(rules, (1,), 2, "shared", 2, 0, 1, torch.float64, Method(aggregation="sequential", **changes))


def test_one_peer_is_driven_by_its_inputs() -> None:
    model = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    peer = Peer(options(), Memory(2, torch.float64))
    inputs = [
        (0.0, "begin"),
        (0.0, "finished", 0, model),
        (0.0, "wake"),
        (2.0, "connected", 1),
        (3.0, "finished", 1, Trained(0, True, model[0] * 2, 0.5)),
    ]
    outputs = list(drive(peer, inputs))
    assert [type(job) for out in outputs for job in out.work] == [Draw, Train]
    assert [to for to, message in outputs[-1].messages if isinstance(message, Update)] == [1]
    assert peer.bank is not None
    assert peer.bank.tolist() == [[2.0, 4.0]]
    with pytest.raises(ConfigError, match='unknown input of a peer "dance"'):
        list(drive(peer, [(0.0, "dance")]))
    with pytest.raises(IndexError, match="job 2 has ended, and 0 were asked for"):
        list(drive(peer, [(4.0, "finished", 2, None)]))


def test_lines_of_a_trace_survive() -> None:
    pair = Pair(link=Link(0.1), faults=Faults(corruption=0.5))
    pair.links.send(0, (1,), update(), 1)
    for line in pair.books.trace or []:
        assert from_line(to_line(line)) == line
