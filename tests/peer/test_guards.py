"""What a peer does not do: count a vote twice, take models of another's name or lineage, believe anything, forget.

Every test here fails without one line of the source (`tests/mutants`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peer_script import LINEAGES, copied, elected, model, update
from torch import Tensor

from dfca.base.table import fields_of
from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.core.rules.election import ElectionOptions, no_votes
from dfca.core.rules.merging import Merge, MergeOptions, Opinion, poll, total
from dfca.core.rules.revival import PAUSE
from dfca.peer.copies import Asked, CopyDesk
from dfca.peer.inbox import Neighbour
from dfca.peer.joiner import LOWER, Joiner, Pursuit, _outvotes
from dfca.peer.parts import Outbox
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import Entry, Lineage, compatible, digest_of
from dfca.peer.records.messages import (
    Alarm,
    BankCopy,
    Bid,
    Call,
    Candidate,
    Copy,
    Count,
    Hello,
    Key,
    Probe,
    Stand,
    Votes,
)
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Losses, Warm
from dfca.peer.revival import FRESH, MOST_ALARMS_OF_ONE, DriftDetector
from dfca.peer.state import VERSION, Saved
from dfca.peer.surveys import Decided
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.election import Election

A, B, LOW = LINEAGES["A"], LINEAGES["B"], LINEAGES["LOW"]
CLOSING = Entry(3, 0, 1, 0, 0, (0, 1), (Merge(0, 1, 0.25, 0.1),))
"""A survey that merged cluster 1 into cluster 0, and is not the last."""


def losses(*values: float) -> Losses:
    table = torch.tensor([[value, value] for value in values], dtype=torch.float64)
    return Losses(table, table)


def make_options(**given: Any) -> PeerOptions:
    neighbours = given.pop("neighbours", (1, 2))
    usual = {"start": "elected", "rounds": 100, "seed": 0, "clusters": None, "join_s": 5.0, "hang_s": 5.0}
    fields = usual | given
    method = Method(**{field.name: fields.pop(field.name) for field in fields_of(Method) if field.name in fields})
    return PeerOptions(Rules(0, len(neighbours)), neighbours, 1, dtype=torch.float64, method=method, **fields)


def allocate(models: int) -> Tensor:
    return torch.zeros(models, 1, dtype=torch.float64)


def make_peer(
    lineage: Lineage, *values: float, round: int = 40, detector: DriftDetector | None = None, **given: Any
) -> Peer:
    """Make a peer that continues from a save with these models, and has begun; neighbours 1 and 2 are in reach."""
    bank = torch.stack([model(value) for value in values])
    history = {name: (0,) * len(values) for name in ("stamps", "origins", "folded", "updates")}
    saved = Saved(VERSION, 0, 0, round, lineage, bank, 0, **history, detector=detector or DriftDetector())
    peer = Peer(make_options(**given), allocate, 1, saved)
    peer.begin(0.0)
    for neighbour in peer.neighbours:
        peer.connected(neighbour, 0.0)
        peer.receive(neighbour, Hello(0, round, len(values), lineage), 0.0)
    peer.wake(0.0)
    peer.ready()
    return peer


def make_election(**given: Any) -> Election:
    values = {
        "links": {2, 3},
        "clusters": 2,
        "warm": Warm(model(7), losses(1.0)),
        "options": ElectionOptions(),
        **given,
    }
    usual = {"id": 1, "seed": 0, "incarnation": 0, "quorum": 0.8, "answer_time": AnswerTime(1.0)}
    return Election(**usual, size=1, dtype=torch.float64, base=(), **values)


def open_turn(root: Election, now: float = 0.0) -> None:
    """Bring a root with the children 2 and 3 to the bids for its second centre: the first is its own."""
    if root.key.attempt < 0:
        root.begin(now)
    for child in (2, 3):
        root.receive(child, Count(root.key, 1, 1, tuple(root.log)), now)
    score(root, 3.0)


def score(election: Election, *values: float) -> None:
    """Answer what an election has asked its peer to compute."""
    job = election.scoring
    assert job is not None
    election.scored(job, losses(*values))


def bids(root: Election, now: float = 0.0) -> None:
    """Bid for the children: 2 the most."""
    root.receive(2, Bid(root.key, 1, 5.0, 2), now)
    root.receive(3, Bid(root.key, 1, 4.0, 3), now)


def vote_on_candidate(**given: Any) -> Election:
    """Return a root that has voted on the candidate of child 2."""
    root = make_election(**given)
    open_turn(root)
    bids(root)
    root.receive(2, Candidate(root.key, 1, 2, 0.0, model(4)), 0.0)
    score(root, 1.0)
    return root


# Votes.


def test_the_votes_of_a_child_count_once() -> None:
    root = vote_on_candidate()
    votes = Votes(root.key, 1, no_votes(1)._replace(voters=1))
    for _ in range(3):
        root.receive(2, votes, 1.0)
    assert root.tally is not None
    assert (root.tally.voters, root.missing) == (2, {3})


@pytest.mark.parametrize(("bounded", "voters", "counted"), [(True, 5, 1), (True, 1, 2), (False, 5, 6)])
def test_votes_that_a_subtree_cannot_cast_count_only_where_nobody_looks(
    bounded: bool, voters: int, counted: int
) -> None:
    root = vote_on_candidate(options=ElectionOptions(bounded=bounded))
    votes = no_votes(1)._replace(voters=voters, followers=(voters,))
    root.receive(2, Votes(root.key, 1, votes), 1.0)  # the subtree has one peer
    assert root.tally is not None
    assert (root.tally.voters, root.missing) == (counted, {3})


def test_an_election_yields_to_as_many_voters_as_it_has() -> None:
    root = make_election()
    assert not root.outvotes(Entry(1, 0, 9, 0, 0, (0,)))  # it has not opened
    open_turn(root)
    assert [root.outvotes(Entry(voters, 0, 9, 0, 0, (0,))) for voters in (2, 3, 4)] == [True, False, False]


@pytest.mark.parametrize(("voters", "holders", "wait"), [(1, 1, True), (2, 1, False), (1, 2, False), (3, 1, False)])
def test_peers_without_models_yield_to_as_many_voters_or_holders(voters: int, holders: int, wait: bool) -> None:
    lineage = elected(voters, 0)
    hellos = [Hello(0, 0, 0), *[Hello(0, 5, 1, lineage)] * holders]  # with the peer itself, two have no models
    at: Any = SimpleNamespace(links={n: Neighbour(hello) for n, hello in enumerate(hellos)})
    assert _outvotes(at, make_election(), lineage) is wait


@pytest.mark.parametrize(("holders", "wait"), [(1, True), (2, False)])
def test_models_of_a_root_that_is_not_trusted_are_taken_where_enough_neighbours_hold_them(
    holders: int, wait: bool
) -> None:
    lineage, election = elected(100, 0), make_election()
    election.banned = {lineage[0].root}
    hellos = [Hello(0, 0, 0), *[Hello(0, 5, 1, lineage)] * holders]  # with the peer itself, two have no models
    at: Any = SimpleNamespace(links={n: Neighbour(hello) for n, hello in enumerate(hellos)})
    assert _outvotes(at, election, lineage) is wait


def test_a_candidate_that_was_asked_and_did_not_stand_is_not_asked_again() -> None:
    root = make_election()
    open_turn(root)
    bids(root)
    assert root.drain()[0][-1] == (2, Stand(root.key, 1, 2))
    root.wake(100.0)
    assert root.key.attempt > 0
    open_turn_again = [root.receive(child, Count(root.key, 1, 1, tuple(root.log)), 100.0) for child in (2, 3)]
    assert len(open_turn_again) == 2
    bids(root, 100.0)
    assert root.drain()[0][-1] == (3, Stand(root.key, 1, 3))


def test_repeated_messages_put_off_no_deadline() -> None:
    child, key = make_election(), Key(5, 0, 2**60, 2, 0)
    child._enter(key, 2, None, 0.0)
    heard = []
    for now in (1.0, 2.0, 3.0, 4.0):
        child.receive(3, Count(key, 1, 0), now)
        heard.append(child.last_s)
    assert heard == [1.0, 2.0, 2.0, 2.0]  # the first ends the wave here, and the next is one of another phase


# Lineages.


def test_an_entry_of_a_lineage_names_its_models() -> None:
    entries = []
    for value in (7.0, 8.0):
        alone = make_election(links=set(), clusters=1, warm=Warm(model(value), losses(1.0)))
        alone.begin(0.0)
        assert alone.outcome is not None
        assert alone.outcome.entry is not None
        entries.append(alone.outcome.entry)
        assert entries[-1].digest == digest_of([model(value)])
    assert entries[0] != entries[1]


def test_two_elections_of_the_same_place_have_no_cluster_in_common() -> None:
    one, other, both = elected(3, 2, before=A), elected(4, 3, before=A), elected(3, 3, before=elected(3, 2, before=A))
    assert not any(compatible(one, other, cluster) for cluster in range(4))
    assert [compatible(one, both, cluster) for cluster in range(4)] == [True, True, True, False]
    assert [compatible(A, both, cluster) for cluster in range(4)] == [True, True, False, False]


def bank_copy(sender: int, lineage: Lineage, cluster: int = 0, clusters: int = 2) -> BankCopy:
    return BankCopy(copied(sender, cluster, 5.0, 4, 1), 4, clusters, lineage)


def test_models_of_another_name_or_of_a_lower_lineage_are_not_taken_over() -> None:
    options = make_options()
    for asked, mine, copy, problem in (
        (B, None, bank_copy(1, B), None),
        (B, None, bank_copy(2, B), "in another's name"),
        (B, None, bank_copy(1, A), LOWER),  # lower than asked for
        (A, None, bank_copy(1, B), None),  # higher
        (A, B, bank_copy(1, A), LOWER),  # no higher than its own
        (B, B, bank_copy(1, B), LOWER),
        (A, LOW, bank_copy(1, A), None),
        (A, None, bank_copy(1, A, cluster=2), "another number of models"),
        (A, None, bank_copy(1, A, clusters=3), "another number of models"),
    ):
        pursuit = Pursuit(1, asked, 0.0, 9.0)
        assert pursuit.take(copy, options, mine) == problem
        assert list(pursuit.taken) == ([] if problem else [0])


def test_a_copy_of_another_name_is_not_folded() -> None:
    desk = CopyDesk(Outbox({1: Neighbour()}))
    at: Any = SimpleNamespace(bank=allocate(1), now=1.0, answer_time=AnswerTime(5.0))
    for sender, kept in ((2, []), (1, [0])):
        desk.wanted = {0: Asked(1, 0.0, 9.0)}
        assert desk.take_in(at, 1, Copy(copied(sender, 0, 3.0, 4, 1)))
        assert list(desk.answers) == kept
    assert desk.out.refused == {"does not fit": 1}


def held(peer: Peer) -> list[tuple[int, int]]:
    return sorted(peer.cycle.inbox.kept)


def test_updates_of_closed_merged_and_reopened_clusters_are_dropped() -> None:
    peer = make_peer((*A, CLOSING), 5.0, 6.0)
    peer.receive(1, update(1, 1, 40, 9.0, (*A, CLOSING)), 0.0)
    assert held(peer) == []
    assert peer.refused == {"does not fit": 1}
    peer = make_peer(A, 5.0, 6.0, 7.0)
    for cluster in range(3):
        peer.receive(1, update(1, cluster, 40, 9.0, A), 0.0)
    peer._open_cluster(2, model(1))
    assert held(peer) == [(1, 0), (1, 1)]
    peer = make_peer(A, 5.0, 6.0)
    for cluster in range(2):
        peer.receive(1, update(1, cluster, 40, 9.0, A), 0.0)
    peer._take_entry(CLOSING)
    assert peer.lineage == (*A, CLOSING)
    assert held(peer) == []


def test_an_update_that_fitted_when_it_came_is_not_folded_into_another_lineage() -> None:
    ahead, mine = elected(3, 2, before=A), elected(4, 2, before=A)
    peer = make_peer(A, 5.0, 6.0, aggregation="sequential")
    peer.receive(1, update(1, 0, 40, 9.0, ahead), 0.0)  # cluster 0 is the same, with one more election there
    assert held(peer) == [(1, 0)]
    peer.lineage = mine
    assert peer.cycle.fold(peer).bank.tolist() == [[5.0], [6.0]]
    assert peer.ready().notes[-1].kind == "drop"


# Time.


def test_models_that_their_source_takes_back_are_no_longer_waited_for() -> None:
    peer = make_peer(LOW, 5.0, 6.0)
    peer.receive(1, Hello(0, 40, 2, elected(50, 0)), 0.0)
    peer.receive(2, Hello(0, 40, 2, A), 0.0)
    assert peer.joiner.expects(1)
    peer.receive(1, update(1, 0, 40, 9.0, A), 1.0)
    assert peer.joiner.expects(2)  # 1 is not believed for a while
    assert peer.joiner.suspects == {1: (6.0, 1)}


def test_a_neighbour_that_is_unreliable_again_is_avoided_for_twice_as_long() -> None:
    joiner, at = Joiner(Outbox({})), SimpleNamespace(now=100.0, options=make_options())
    for times in range(4):
        joiner._suspect(at, 1)  # type: ignore[arg-type]
        assert joiner.suspects == {1: (100.0 + 5.0 * 2**times, times + 1)}


def test_a_clock_that_is_set_back_takes_no_time_back() -> None:
    peer = Peer(make_options(start="shared"), allocate)
    peer.begin(10.0, late=True)
    assert peer.next_wake() == 15.0  # it waits for a neighbour with models
    peer.wake(4.0)
    assert peer.now == 10.0
    due = peer.next_wake()
    assert due == pytest.approx(9.0)
    assert due is not None
    peer.wake(5.0)
    assert (peer.now, peer.bank, peer.job) == (11.0, None, None)
    peer.wake(due)
    assert peer.job is not None


# By-elections.


def test_an_alarm_counts_for_a_while_only() -> None:
    detector, options = DriftDetector(), ElectionOptions(support=1)
    detector.hear_alarm(7, 1, True, 10)
    assert [detector.is_due(round, options) for round in (10, 9 + FRESH, 10 + FRESH)] == [True, True, False]


def test_of_one_peer_few_alarms_are_taken_in_within_a_round() -> None:
    peer = make_peer(A, 5.0, 6.0, revives=True)
    for number in range(1, 2 + MOST_ALARMS_OF_ONE):
        for origin in (7, 8):
            for bearer in (1, 2):  # one that is no news is not counted
                peer.receive(bearer, Alarm(origin, number, True, A), 0.0)
    assert {origin: number for origin, (number, _, _) in peer.elections.detector.alarms.items()} == {
        7: MOST_ALARMS_OF_ONE,
        8: MOST_ALARMS_OF_ONE,
    }
    assert peer.out.refused == {"too many alarms of a peer": 4}
    assert len(peer.ready().messages) == 2 * MOST_ALARMS_OF_ONE


def test_after_a_by_election_there_is_a_pause_and_after_a_fruitless_one_a_longer_one() -> None:
    options = ElectionOptions(support=1)
    for opened, pause in (((1,), PAUSE), ((), 2 * PAUSE)):
        detector = DriftDetector()
        detector.grow(2)
        detector.close(50, 2, opened)
        detector.hear_alarm(7, 1, True, 50 + pause)
        assert [detector.is_due(50 + pause + more, options) for more in (-1, 0)] == [False, True]


def test_a_peer_with_a_recent_update_takes_no_part_in_the_by_election_for_its_cluster() -> None:
    detector = DriftDetector(newest=[39, 3], seen=[39, 3], idle=[0, 30], gaps=[0, 0], mourned=[False, False])
    peer = make_peer(A, 5.0, 6.0, revives=True, detector=detector)
    for lost, joins in (((0,), False), ((1,), True), ((0, 1), False), ((), True)):
        assert peer.elections.may_join(peer, 1, Probe(Key(0, 0, 0, 1, 0), A, Call(lost, 2)), pursuing=False) is joins


def test_a_peer_that_had_no_vote_knows_so_after_a_restart() -> None:
    peer = make_peer(A, 5.0, 6.0, revives=True)
    for voted in (True, False):
        peer.elections.set_voted(peer, voted)
        again = Peer(peer.options, allocate, 2, peer.save())
        assert again.elections.voted is voted


# Surveys.


@pytest.mark.parametrize(
    ("entries", "joins"),
    [((), True), ((CLOSING._replace(slots=(), merges=(), last=True),), False), ((CLOSING,), False)],
)
def test_a_peer_joins_no_survey_after_the_last_nor_of_a_single_cluster(entries: Lineage, joins: bool) -> None:
    lineage = (*A, *entries)
    peer = make_peer(lineage, 5.0, 6.0, merging=MergeOptions())
    assert peer.surveys.may_join(peer, Probe(Key(0, 0, 0, 1, 0), lineage, Call((), 2, survey=True))) is joins


LAST = CLOSING._replace(slots=(), merges=(), last=True)


@pytest.mark.parametrize(
    ("merging", "held", "told", "follows"),
    [
        (MergeOptions(), (), (CLOSING,), True),
        (MergeOptions(), (), (LAST,), True),
        (MergeOptions(), (LAST,), (CLOSING,), False),
        (MergeOptions(), (LAST, A[0]), (CLOSING,), True),  # an election begins anew
        (None, (), (CLOSING,), False),
        (None, (CLOSING,), (CLOSING._replace(merges=(), last=True),), False),  # an earlier version held some
    ],
)
def test_a_peer_follows_no_survey_that_cannot_have_been_held(
    merging: MergeOptions | None, held: Lineage, told: Lineage, follows: bool
) -> None:
    mine = (*A, *held)
    peer = make_peer(mine, 5.0, 6.0, merging=merging)
    peer.job = None
    peer.receive(1, Hello(0, 41, 2, (*mine, *told)), 0.0)
    assert peer.lineage == ((*mine, *told) if follows else mine)


def test_a_survey_of_part_of_the_electorate_closes_nothing() -> None:
    for voters, closed in ((2, (1,)), (3, ())):
        peer = make_peer(elected(voters, 0, 1), 5.0, 6.0, merging=MergeOptions(first=1))
        peer.surveys.begin(peer, unfit=False)
        wave = peer.surveys.wave
        assert wave is not None
        heard = poll((0, 1), [Opinion(0, 20), Opinion(0, 20)])
        assert wave._decide(heard, total((0, 1), ())).empty == closed


def test_half_of_the_electorate_decides_nothing() -> None:
    for voters, decides in ((1, True), (2, False)):
        peer = make_peer(elected(voters, 0, 1), 5.0, 6.0, merging=MergeOptions(first=1), neighbours=())
        peer.surveys.begin(peer, unfit=False)
        wave = peer.surveys.wave
        assert wave is not None
        assert wave.phase == "done"
        assert (wave.outcome is not None) is decides


def test_what_a_survey_decided_about_other_models_is_of_no_use() -> None:
    for base, taken in ((A, CLOSING), (B, None)):
        peer = make_peer(A, 5.0, 6.0, merging=MergeOptions())
        peer.surveys.decided = Decided(CLOSING, base, 0)
        assert peer.surveys.take_decided(peer, ended=False) == taken
        assert peer.surveys.decided is None


def test_a_peer_far_behind_its_neighbours_does_not_observe() -> None:
    for ahead, observes in ((79, True), (80, False)):
        peer = make_peer(A, 5.0, 6.0, merging=MergeOptions(first=1))
        for known in peer.links.values():
            known.ended(ahead, 0, 1)
        peer.surveys.begin(peer, unfit=False)
        assert peer.surveys.wave is not None
        assert peer.surveys.wave.holds_out is observes
