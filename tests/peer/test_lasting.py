"""A swarm of thousands of by-elections: lineages stay short, and who was away comes back."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
import torch
from peer_script import model
from torch import Tensor

from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.core.rules.election import ElectionOptions
from dfca.core.state import Message
from dfca.node.wire import codec
from dfca.peer.joiner import Extend, Pursuit
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import KEPT, LONGEST, Entry, Lineage, aligned, digest_of, extended
from dfca.peer.records.messages import BankCopy, BankRequest, Call, Hello, Probe
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Losses, Score, Train, Trained, Warm, WarmUp
from dfca.peer.state import VERSION, Saved
from dfca.peer.surveys import Decided

FIRST: Lineage = (Entry(3, 0, 0, 0, 1, (0, 1)),)


class Swarm:
    """Peers that train cluster 0 for ever; the loss of a model is its distance from `target`, at peer 0 from 0."""

    def __init__(self) -> None:
        self.target = 0.0
        self.peers: dict[int, Peer] = {}
        self.mail: deque[tuple[int, int, Any]] = deque()
        self.noted: Counter[str] = Counter()

    def join(self, i: int, saved: Saved) -> None:
        near, method = tuple({0, 1, 2} - {i}), Method(revives=True, election=ElectionOptions(support=1))
        usual: dict[str, Any] = {
            "start": "elected",
            "rounds": 10**9,
            "seed": 0,
            "clusters": None,
            "join_s": 5.0,
            "hang_s": 5.0,
        }
        options = PeerOptions(Rules(i, 2), near, 1, dtype=torch.float64, method=method, **usual)
        self.peers[i] = peer = Peer(options, lambda m: torch.zeros(m, 1, dtype=torch.float64), 1, saved)
        peer.begin(0.0)
        for other in [*self.peers]:
            if other != i:
                self.peers[other].connected(i, 0.0)
                peer.connected(other, 0.0)

    def leave(self, i: int) -> Saved:
        saved = self.peers.pop(i).save()
        for peer in self.peers.values():
            peer.disconnected(i, 0.0)
        return saved

    def run(self, rounds: int) -> None:
        until = {i: peer.round + rounds for i, peer in self.peers.items()}
        while any(peer.round < until[i] for i, peer in self.peers.items()):
            self.step()

    def step(self) -> None:
        for i, peer in self.peers.items():
            ready = peer.ready()
            self.noted.update(kind for kind, *_ in ready.noted)
            self.mail += [(i, to, message) for to, message in ready.messages if to in self.peers]
            for job in ready.work:
                peer.finished(job, self.done(job, peer), 0.0)
        while self.mail:
            sender, to, message = self.mail.popleft()
            self.peers[to].receive(sender, message, 0.0)
        for peer in self.peers.values():
            if peer.next_wake() is not None and peer.next_wake() <= 0.0:  # type: ignore[operator]
                peer.wake(0.0)

    def losses(self, models: Tensor, peer: Peer) -> Losses:
        away = (models - self.wanted(peer)).abs() + torch.tensor([0.0, 0.1, 0.2, 0.3])
        return Losses(away, away)

    def wanted(self, peer: Peer) -> float:
        return self.target if peer.id else 0.0

    def done(self, job: Any, peer: Peer) -> Any:
        if isinstance(job, Train):
            return Trained(0, True, peer.bank[0].clone(), 1.0, 8)  # type: ignore[index]
        if isinstance(job, WarmUp):
            own = model(self.wanted(peer))
            return Warm(own, self.losses(own[None], peer))
        assert isinstance(job, Score)
        return self.losses(job.models, peer)

    def hold_by_election(self, number: int) -> None:
        self.begin_by_election(number)
        while any(peer.wave or peer.elections.decided for peer in self.peers.values()):
            self.run(1)

    def begin_by_election(self, number: int) -> None:
        """Let a peer call a by-election for cluster 1, which no peer trains."""
        self.target = wanted_in(number)
        caller = self.peers[number % 2]
        caller.elections._make(caller, Call((1,), 2))
        assert caller.elections.wave is not None
        caller.elections.wave.begin(0.0)
        caller.elections.prepare(caller)


def wanted_in(number: int) -> float:
    """Return a model from which those before are further away than cluster 0 is."""
    return (10.0 + number) * (-1) ** number


def history(swarm: Swarm) -> Lineage:
    (lineage,) = {peer.lineage for peer in swarm.peers.values()}
    return lineage


@pytest.mark.parametrize("by_elections", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_peers_that_missed_some_or_most_of_many_by_elections(by_elections: int) -> None:
    """Every 32 a lineage is folded: also 400 are many folds."""
    swarm = Swarm()
    start = torch.zeros(2, 1, dtype=torch.float64)
    names = dict.fromkeys(("stamps", "origins", "folded", "updates"), (0, 0))
    for i in range(3):
        swarm.join(i, Saved(VERSION, 0, 0, 1, FIRST, start, 0, **names))  # type: ignore[arg-type]
    swarm.run(2)
    lengths = []
    for number in range(by_elections):
        swarm.hold_by_election(number)
        lengths.append(len(history(swarm)))
        if number == 99:
            old = swarm.leave(2)
        elif number == by_elections - 60:
            swarm.join(2, old)  # it knows less than what is folded: it takes all models
            swarm.run(4)
            assert len(history(swarm)) <= LONGEST
        elif number == by_elections - 40:
            recent = swarm.leave(2)
    swarm.join(2, recent)
    swarm.run(4)
    lineage = history(swarm)
    assert max(lengths) == LONGEST - 1
    assert lineage[0] == FIRST[0]
    assert lineage[1].attempt + len(lineage) - 2 == by_elections
    assert KEPT <= len(lineage) < LONGEST
    assert all(peer.bank is not None and peer.bank[1] == wanted_in(by_elections - 1) for peer in swarm.peers.values())
    assert not any(peer.out.refused for peer in swarm.peers.values())
    hello = swarm.peers[0].hello()
    assert codec.decode(codec.encode(hello)[0]).message() == hello
    assert lineage[-1].digest == digest_of([model(wanted_in(by_elections - 1))])


def test_a_peer_that_hears_of_a_fold_before_its_round_is_closed_takes_the_result_of_its_vote() -> None:
    swarm = Swarm()
    start = torch.zeros(2, 1, dtype=torch.float64)
    names = dict.fromkeys(("stamps", "origins", "folded", "updates"), (0, 0))
    base = FIRST
    while len(base) < LONGEST - 1:
        base = extended(base, Entry(3, len(base), 0, 0, 7, (1,)))
    for i in range(3):
        swarm.join(i, Saved(VERSION, 0, 0, 1, base, start, 0, **names))  # type: ignore[arg-type]
    swarm.run(2)
    swarm.begin_by_election(0)
    wave = swarm.peers[0].elections.wave
    assert wave is not None
    behind = aligned(base, extended(base, base[-1]))
    assert behind != base
    assert wave.is_kind_of(Probe(wave.key, behind, wave.call))
    steps = 0
    while not (decided := [peer for peer in swarm.peers.values() if peer.elections.decided]):
        swarm.step()
        assert (steps := steps + 1) < 99
    late = decided[0]
    outcome = late.elections.decided
    assert outcome is not None
    assert outcome.entry is not None
    folded = extended(base, outcome.entry)
    late.receive((late.id + 1) % 3, Hello(1, late.round + 1, 2, folded), 0.0)
    assert len(late.lineage) < LONGEST - KEPT + 2
    swarm.run(2)
    assert history(swarm) == folded
    assert not {"adopt", "join", "switch"} & {*swarm.noted}
    assert late.elections.voted
    quiet = Entry(3, 0, 0, 0, 0, ())
    late.surveys.decided, late.lineage = Decided(quiet, base, 0), behind
    assert late.surveys.will_take(late, extended(behind, quiet))
    assert late.surveys.take_decided(late, ended=False) == quiet
    pursuit = late.joiner.pursuit = Pursuit(0, (*base, FIRST[0]), 0.0, 9.0, (0, 1))
    copies = [BankCopy(Message(0, j, 1, 2, model(1.0), None, 1), 2, 2, (*base, FIRST[0])) for j in (0, 1)]
    assert pursuit.take(copies[0], late.options, base) is None
    folded = extended(base, FIRST[0])
    assert pursuit.take(copies[1]._replace(lineage=folded), late.options, behind) is None
    assert pursuit.complete
    pursuit.lineage, late.job = (*base, FIRST[0]), None
    effect = late.joiner.adopt(late)  # its own lineage was folded while it waited
    assert isinstance(effect, Extend)
    assert effect.opened == (0, 1)


@pytest.mark.parametrize("more", [True, False])
def test_the_side_with_more_votes_keeps_its_models_after_a_long_partition(more: bool) -> None:
    sides: list[Lineage] = [FIRST, FIRST]
    for number in range(LONGEST - 1):
        sides[0] = extended(sides[0], Entry(3, number, 0, 0, 7, (1,)))
        if number < LONGEST - 2:  # the other side has not folded yet
            sides[1] = extended(sides[1], Entry(4 if more else 2, number, 1, 0, 8, (1,)))
    start, names = torch.zeros(2, 1, dtype=torch.float64), ("stamps", "origins", "folded", "updates")
    asks = []
    for mine, told in (sides, sides[::-1]):
        swarm = Swarm()
        swarm.join(0, Saved(VERSION, 0, 0, 1, mine, start, 0, **dict.fromkeys(names, (0, 0))))  # type: ignore[arg-type]
        peer = swarm.peers[0]
        peer.connected(1, 0.0)
        peer.receive(1, Hello(1, 1, 2, told), 0.0)
        asks.append(any(isinstance(message, BankRequest) for _, message in peer.ready().messages))
    assert asks == [more, not more]
