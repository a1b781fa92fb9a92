"""What a peer remembers: of neighbours, of updates and copies that wait, of losses, clusters, alarms and answers."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peer_script import LINEAGES, copied, model, update

from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.merging import Merge, Plan
from dfca.core.rules.relay import MAX_AGE, Offer
from dfca.core.rules.revival import PAUSE, ROUNDS, UNSEEN
from dfca.core.state import ClientState, Message
from dfca.peer.copies import Asked, CopyDesk
from dfca.peer.inbox import MOST_PARTS, UNKNOWN, Inbox, Neighbour
from dfca.peer.joiner import Pursuit
from dfca.peer.parts import Outbox, takes_part
from dfca.peer.records.lineage import LONGEST, Entry, aligned, extended
from dfca.peer.records.messages import MOST_ROUND, BankCopy, Copy, CopyRequest, Declined, Hello
from dfca.peer.records.options import PeerOptions
from dfca.peer.revival import FRESH, MOST_ALARMS_OF_ONE, Callers, DriftDetector
from dfca.peer.waves.deadline import FLOOR, MOST_S, AnswerTime

A, A2, B = LINEAGES["A"], LINEAGES["A2"], LINEAGES["B"]


# Losses, clusters, alarms.


def test_an_alarm_is_of_several_rounds_and_ends_with_the_first_good_one() -> None:
    detector = DriftDetector()
    seen = []
    for loss in (1.0, 0.5, *[0.9] * ROUNDS, 0.5, 0.9):
        detector.look(loss)
        seen.append((detector.alarmed, detector.unfit))
    rises = [(False, True)] * (ROUNDS - 1)
    assert seen == [(False, False), (False, False), *rises, (True, True), (False, False), (False, True)]
    assert (detector.lowest, detector.highest) == (0.5, 1.0)
    detector.look(math.inf)  # diverged
    assert detector.highest == 1.0
    detector.misfit, detector.alarm = True, 0
    assert (detector.alarmed, detector.unfit) == (True, True)


def idle_detector() -> DriftDetector:
    """Make a memory of two clusters: updates of round 5 were seen of both."""
    detector = DriftDetector()
    detector.learn((9,))  # there are no clusters yet
    detector.end_round(2)
    assert (detector.newest, detector.idle) == ([-1, -1], [1, 1])
    detector.learn((5, 5, 5))
    detector.end_round(2)
    assert (detector.seen, detector.idle, detector.gaps) == ([5, 5], [0, 0], [1, 1])
    return detector


def test_a_cluster_is_lost_after_longer_than_the_gaps_that_ended_by_themselves() -> None:
    detector = idle_detector()
    lost = []
    for round in range(6, 8 + ROUNDS):
        detector.learn((round, 4))
        detector.end_round(2)
        lost.append(detector.lost())
    assert lost == [()] * (ROUNDS + 1) + [(1,)]  # ROUNDS + twice the gap of 1
    detector.learn((0, MOST_ROUND + 1))  # no such round
    detector.end_round(2)
    assert detector.lost() == (1,)
    detector.learn((0, 99))
    detector.end_round(2)
    assert (detector.lost(), detector.gaps[1], detector.idle[1]) == ((), ROUNDS + 3, 0)


def test_a_cluster_of_which_nothing_was_seen_is_lost_later_and_an_unwatched_one_never() -> None:
    detector = DriftDetector()
    for _ in range(UNSEEN - 1):
        detector.end_round(3, unwatched=(2,))
    assert detector.lost() == ()
    detector.end_round(3, informed=False, unwatched=(2,))
    assert detector.lost() == ()
    detector.end_round(3, unwatched=(2,))
    assert detector.lost() == (0, 1)
    first = DriftDetector(newest=[0], seen=[0], idle=[ROUNDS], gaps=[0], mourned=[False])
    assert first.lost() == (0,)  # an update of round 0 was seen


def test_peers_that_believe_that_a_cluster_is_lost() -> None:
    detector = idle_detector()
    assert [detector.believes((0,), round) for round in (5 + ROUNDS, 6 + ROUNDS)] == [False, True]
    for round in range(ROUNDS):
        assert not detector.believes((0,), 5), round
        detector.end_round(2)
    assert detector.believes((0,), 5)
    assert detector.believes((0, 2), 5)  # a cluster that it does not know
    detector.learn((6,))
    detector.end_round(2)
    assert not detector.believes((0, 1), 6)


def test_an_election_ends_alarms_fills_clusters_and_gives_others_up() -> None:
    detector = idle_detector()
    for _ in range(3 + ROUNDS):
        detector.end_round(2)
    assert detector.lost() == (0, 1)
    for loss in (1.0, 0.5, *[0.9] * ROUNDS):
        detector.look(loss)
    detector.hear_alarm(7, 3, True, 20)
    detector.misfit = True
    detector.close(20, 3, (1, 2))
    assert detector.lost() == ()
    assert detector.mourned == [True, False, False]
    assert (detector.newest[1:], detector.seen[1:], detector.idle[1:], detector.gaps[1:]) == (
        [-1] * 2,
        [-1] * 2,
        [0] * 2,
        [0] * 2,
    )
    assert (detector.lowest, detector.highest, detector.alarmed) == (math.inf, -math.inf, False)
    assert detector.alarms == {7: (3, False, 20)}
    assert (detector.last, detector.pause) == (20, PAUSE)
    detector.learn((21,))
    detector.end_round(3)
    assert not detector.mourned[0]  # somebody trains it again


def test_a_survey_merges_the_records_of_clusters() -> None:
    detector = idle_detector()
    detector.grow(3)
    detector.newest = [5, 8, 3]
    detector.look(1.0)
    detector.look(2.0)
    detector.merge(Plan((Merge(0, 1, 0.5, 0.1),), ()), [0, 2])
    assert detector.newest == [8, 3]
    assert (detector.seen, detector.idle, detector.gaps, detector.mourned) == ([-1] * 2, [0] * 2, [0] * 2, [False] * 2)
    assert (detector.lowest, detector.alarm) == (math.inf, 0)
    assert detector.highest == 2.0  # since the last election


def test_alarms_are_numbered_and_enough_of_them_call_an_election() -> None:
    detector, options = DriftDetector(), ElectionOptions(support=2)
    assert detector.is_news(7, 3)
    detector.hear_alarm(7, 3, True, 30)
    assert [detector.is_news(7, number) for number in (3, 2, 4)] == [False, False, True]
    assert not detector.is_due(30, options)
    detector.hear_alarm(8, 1, True, 30)
    assert detector.is_due(30, options)
    assert detector.is_due(29 + FRESH, options)
    assert not detector.is_due(30 + FRESH, options)
    detector.hear_alarm(8, 2, False, 31)
    assert not detector.is_due(31, options)
    assert detector.copy().alarms == {}
    copy = detector.copy()
    copy.grow(2)
    assert detector.newest == []


# Neighbours and their updates.


def test_the_record_of_a_reachable_neighbour() -> None:
    known = Neighbour()
    assert not known.learn_lineage(9, A, 2)  # without a hello
    known.offers = ((0, Offer(1, 3, 1)),)
    known.greet(Hello(0, MOST_ROUND + 5, 2, A))
    assert (known.since, len(known.offers)) == (MOST_ROUND, 1)
    known.greet(Hello(0, 7, 0))
    assert (known.since, known.offers) == (7, ())
    assert [known.has_ended(round) for round in (6, 7)] == [True, False]
    known.ended(7, 0, 2)
    assert not known.has_ended(7)
    known.ended(7, 0, 2)
    assert not known.has_ended(7)
    known.ended(6, 1, 2)
    assert not known.has_ended(7)
    known.ended(7, 1, 2)
    assert [known.has_ended(round) for round in (7, 8)] == [True, False]
    known.ended(9, 0, 1)
    assert [known.has_ended(round) for round in (8, 9, 10)] == [True, True, False]


def test_a_neighbour_cannot_be_asked_to_be_remembered_without_limit() -> None:
    known = Neighbour()
    for cluster in range(MOST_PARTS + 2):
        known.ended(0, cluster, MOST_PARTS + 2)
    assert len(known.clusters) == MOST_PARTS


def test_lineages_and_rounds_of_a_neighbour_only_grow() -> None:
    known = Neighbour(Hello(0, 5, 2, A))
    assert not known.learn_lineage(5, A, 2)
    assert not known.learn_lineage(4, A2, 3)
    assert known.hello == Hello(0, 5, 2, A)
    assert known.learn_lineage(5, A2, 3)
    assert known.hello == Hello(0, 5, 3, A2)
    assert known.learn_lineage(6, A, 2)
    known.decline()
    assert known.hello == Hello(0, 6, 0, A)
    assert known.learn_lineage(1, A, 2)  # it said that it has no models
    Neighbour().decline()


def test_the_end_of_a_round_stands_for_a_hello() -> None:
    known = Neighbour()
    assert known.learn_from_model(4, A)
    assert known.hello == Hello(UNKNOWN, 5, 2, A)
    assert not known.learn_from_model(4, A)
    assert not known.learn_from_model(3, A2)
    assert known.learn_from_model(9, A2)
    assert known.hello == Hello(UNKNOWN, 10, 3, A2)
    drawn = Neighbour(Hello(0, 3, 0))
    assert drawn.learn_from_model(4, ())
    assert drawn.hello == Hello(0, 5, 1)
    far = Neighbour()
    far.learn_from_model(2 * MOST_ROUND, ())
    assert far.hello == Hello(UNKNOWN, MOST_ROUND + 1, 1)


def taken(inbox: Inbox, most: float | None = None) -> list[tuple[int, int, int, float]]:
    pairs = inbox.take(None if most is None else lambda sender: most)
    return [(one.message.sender, one.message.cluster, one.message.round, came_s) for one, came_s in pairs]


def test_the_newest_update_of_a_sender_and_cluster_waits() -> None:
    inbox = Inbox()
    for round, is_new in ((3, True), (3, False), (2, False), (5, True)):
        assert inbox.add(1, update(1, 0, round, 0.0), float(round)) is is_new
    assert inbox.add(2, update(2, 0, 1, 0.0), 6.0)
    assert inbox.add(1, update(1, 1, 1, 0.0), 7.0)
    assert inbox.senders(lambda sender: math.inf) == {0: 2, 1: 1}
    assert inbox.senders(lambda sender: 4) == {0: 1, 1: 1}
    assert inbox.senders(lambda sender: 5 * (sender == 1)) == {0: 1, 1: 1}
    assert taken(inbox) == [(1, 0, 5, 5.0), (2, 0, 1, 6.0), (1, 1, 1, 7.0)]
    assert taken(inbox) == []
    assert not inbox.add(1, update(1, 0, 5, 0.0), 8.0)  # it was folded


def test_under_batch_two_updates_wait_and_later_ones_stay() -> None:
    inbox = Inbox(depth=2)
    for round in (1, 2, 3):
        inbox.add(1, update(1, 0, round, 0.0), float(round))
    inbox.add(2, update(2, 0, 4, 0.0), 4.0)
    assert inbox.senders(lambda sender: 2) == {0: 1}
    assert inbox.senders(lambda sender: 1) == {}
    assert taken(inbox, 2) == [(1, 0, 2, 2.0)]
    assert taken(inbox, 2) == []
    assert taken(inbox, 3) == [(1, 0, 3, 3.0)]
    assert taken(inbox, 4) == [(2, 0, 4, 4.0)]


def test_messages_that_an_inbox_forgets() -> None:
    inbox = Inbox()
    for sender in (1, 2):
        for cluster in (0, 1):
            inbox.add(sender, update(sender, cluster, 5, 0.0), 0.0)
    inbox.forget_sender(1)
    assert sorted(inbox.kept) == sorted(inbox.newest) == [(2, 0), (2, 1)]
    assert inbox.add(1, update(1, 0, 2, 0.0), 0.0)
    inbox.forget_clusters((1,))
    assert sorted(inbox.kept) == [(1, 0), (2, 0)]
    inbox.forget_strangers((1,))
    assert sorted(inbox.newest) == [(1, 0), (2, 0)]  # what waits is still to be folded
    inbox.take()
    inbox.forget_strangers((1,))
    assert sorted(inbox.newest) == [(1, 0)]


# Copies.


def desk_of(**known: Any) -> tuple[CopyDesk, Any]:
    """Make a desk of a peer with two models, in round 9, and what it may read of the peer."""
    out = Outbox({1: Neighbour(), 2: Neighbour()})
    copies = ClientState.of(torch.ones(2, 1, dtype=torch.float64))
    options = PeerOptions(Rules(0, 2, share="relay"), (1, 2), 1, "elected", 99, 0, None, torch.float64)
    usual = {"options": options, "rules": options.rules, "copies": copies, "bank": copies.bank, "round": 9, "now": 4.0}
    more = {"id": 0, "links": out.links, "lineage": A, "open_clusters": [0, 1], "answer_time": AnswerTime(5.0)}
    return CopyDesk(out), SimpleNamespace(**usual | more | known)


def tell_offers(known: Neighbour, offers: Any, lineage: Any) -> None:
    known.offers, known.offers_round, known.offers_lineage = offers, 8, lineage


def test_a_copy_is_requested_from_a_neighbour_that_offers_one_of_the_same_cluster() -> None:
    desk, at = desk_of()
    offers = ((0, Offer(1, 8, 1)), (1, Offer(1, 8, 1)))
    tell_offers(at.links[1], offers, A)
    desk.ask(at, lambda neighbour: 7, {0: 0, 1: 0}, settled=True)
    assert desk.wanted == {}  # of a later round
    tell_offers(at.links[1], offers, B)
    desk.ask(at, lambda neighbour: 8, {0: 0, 1: 0}, settled=True)
    assert desk.wanted == {}  # of another lineage
    tell_offers(at.links[1], offers[1:], A)
    desk.ask(at, lambda neighbour: 8, {0: 0, 1: 0}, settled=True)
    assert desk.wanted == {1: Asked(1, 4.0, 9.0)}
    assert desk.out.take().messages == [(1, CopyRequest(1, A))]
    desk.ask(at, lambda neighbour: 8, {0: 0, 1: 0}, settled=True)
    assert desk.out.take().messages == []  # it was asked for
    assert (desk.sources(), desk.next_timeout()) == ({1}, 9.0)


def test_no_copy_is_asked_for_where_neighbours_train_the_cluster_or_sit_the_round_out() -> None:
    desk, at = desk_of()
    tell_offers(at.links[1], ((0, Offer(1, 8, 1)),), A)
    desk.ask(at, lambda neighbour: 8, {0: 1, 1: 1}, settled=True)
    assert desk.wanted == {}
    asked, awake = [], []
    for round in range(9, 29):
        desk, at = desk_of(round=round)
        at.options = replace(at.options, method=Method(participation=0.5))
        tell_offers(at.links[1], ((0, Offer(1, round - 1, 1)),), A)
        desk.ask(at, lambda neighbour: 99, {0: 0, 1: 0}, settled=True)
        asked.append(bool(desk.wanted))
        awake.append(takes_part(at.options, 1, round - 1))
    assert asked == awake
    assert {*asked} == {True, False}


def test_a_trainer_asks_for_no_copy_that_is_too_old() -> None:
    for stamp, asks in ((8 - MAX_AGE, True), (7 - MAX_AGE, False)):
        desk, at = desk_of()
        at.copies = replace(at.copies, trained=0)
        tell_offers(at.links[1], ((0, Offer(1, stamp, 1)),), A)
        desk.ask(at, lambda neighbour: 99, {0: 0, 1: 0}, settled=True)
        assert bool(desk.wanted) is asks


def test_requests_are_answered_from_the_open_clusters_of_the_same_lineage() -> None:
    desk, at = desk_of(open_clusters=[1])
    for request, kind in ((CopyRequest(1, A), Copy), (CopyRequest(1, B), Declined), (CopyRequest(0, A), Declined)):
        desk.answer(at, 1, request)
        ((to, answer),) = desk.out.take().messages
        assert (to, type(answer)) == (1, kind)


def test_copies_that_come_and_do_not() -> None:
    desk, at = desk_of()
    assert desk.next_timeout() == math.inf
    assert not desk.take_in(at, 1, Copy(copied(1, 0, 3.0, 8, 1)))
    assert desk.out.refused == {"not asked for": 1}
    desk.wanted = {0: Asked(1, 1.0, 5.0), 1: Asked(2, 1.0, 7.0)}
    assert not desk.take_in(at, 2, Copy(copied(2, 0, 3.0, 8, 1)))  # another was asked
    assert (desk.is_declined(1, 1), desk.is_declined(1, 5)) == (False, False)
    assert desk.take_in(at, 1, Copy(copied(1, 0, 3.0, 8, 1)))
    assert at.answer_time.mean_s == 3.0
    assert list(desk.answers) == [0]
    assert desk.is_declined(2, 1)
    assert desk.wanted == {}
    desk.wanted = {0: Asked(1, 1.0, 5.0), 1: Asked(2, 1.0, 7.0)}
    assert (desk.time_out(4.9), desk.time_out(5.0)) == (False, True)
    assert (desk.overdue, sorted(desk.wanted)) == ({1: 1.0}, [1])
    desk.refuse_unasked(at, 1, Copy(copied(1, 0, 3.0, 8, 1)))  # late, which says how long the next may take
    assert (desk.overdue, at.answer_time.doubled, at.answer_time.mean_s) == ({}, 1, 3.0)
    desk.wanted = {1: Asked(1, 1.0, 5.0)}
    assert desk.take_in(at, 1, Copy(copied(1, 1, math.nan, 8, 1)))
    assert sorted(desk.answers) == [0]
    desk.wanted = {1: Asked(2, 1.0, 7.0)}
    desk.note_overdue(2, 1.0)
    desk.lose(2)
    assert (desk.wanted, desk.overdue) == ({}, {})


def test_copies_that_wait_are_folded_where_they_still_fit_and_are_fresher() -> None:
    for copy, note in (
        (Copy(copied(1, 0, 3.0, 8, 1), A), "relay"),
        (Copy(copied(1, 0, 3.0, 8, 1), B), "drop"),  # of another lineage
        (Copy(copied(1, 0, 3.0, -1, 1), A), "drop"),  # no fresher than its own
    ):
        desk, at = desk_of()
        desk.answers = {0: copy}
        folded = desk.fold(at)
        assert [made.kind for made in desk.out.take().notes] == [note]
        assert (folded is at.copies) == (note == "drop")
        assert desk.answers == {}


def test_a_trainer_folds_no_copy_that_has_become_too_old() -> None:
    for stamp, note in ((8 - MAX_AGE, "relay"), (7 - MAX_AGE, "drop")):
        desk, at = desk_of()
        at.copies = replace(at.copies, trained=0)
        desk.answers = {0: Copy(copied(1, 0, 3.0, stamp, 1), A)}
        desk.fold(at)
        assert [made.kind for made in desk.out.take().notes] == [note]


def test_copies_of_clusters_that_changed_are_forgotten() -> None:
    desk, _ = desk_of()
    for forget, wanted, answers in (
        (lambda: desk.forget((0, 5)), [1], [1]),
        (desk.stop_waiting, [], [0, 1]),
        (desk.forget_answers, [0, 1], []),
    ):
        desk.wanted = {0: Asked(1, 1.0, 5.0), 1: Asked(2, 1.0, 7.0)}
        desk.answers = {j: Copy(copied(1, j, 3.0, 8, 1)) for j in (0, 1)}
        assert desk.next_timeout() == 5.0
        forget()
        assert (sorted(desk.wanted), sorted(desk.answers)) == (wanted, answers)


# Models of others.


def test_a_pursuit_is_complete_with_all_models_that_are_open_or_needed() -> None:
    copy = BankCopy(copied(1, 0, 5.0, 4, 1), 4, 3, A)
    for needed, have, complete in (
        (None, (0, 1), False),
        (None, (0, 2), True),  # cluster 1 is closed there
        ((2,), (0,), False),
        ((2,), (2,), True),
    ):
        pursuit = Pursuit(1, A, 0.0, 9.0, needed, dict.fromkeys(have, copy), 3, 4, (1,))
        assert pursuit.complete is complete
        assert len(pursuit.models()) == 3
    assert not Pursuit(1, A, 0.0, 9.0, ()).complete  # nothing has come
    pursuit.since = 1.0
    pursuit.prolong(3.0)
    assert (pursuit.since, pursuit.until) == (3.0, 11.0)  # as long as before: 8 s


def test_a_model_that_does_not_fit_is_not_taken_over() -> None:
    options = PeerOptions(Rules(0, 1), (1,), 1, "elected", 99, 0, None, torch.float64)
    for value, problem in (
        (model(5), None),
        (model(5).float(), "does not fit"),
        (torch.ones(2, dtype=torch.float64), "does not fit"),
        (model(math.nan), "not finite"),
    ):
        pursuit = Pursuit(1, A, 0.0, 9.0)
        copy = BankCopy(Message(1, 1, 4, 2, value, Offer(1, 4, 1)), 4, 2, A)
        assert pursuit.take(copy, options, None) == problem
        assert (pursuit.clusters, pursuit.round, list(pursuit.taken)) == ((0, 0, []) if problem else (2, 4, [1]))


def test_a_source_that_has_held_another_election_is_taken_over_anew() -> None:
    options = PeerOptions(Rules(0, 1), (1,), 1, "elected", 99, 0, None, torch.float64)
    pursuit = Pursuit(1, A, 0.0, 9.0)
    for cluster in (0, 1):
        assert pursuit.take(BankCopy(copied(1, cluster, 5.0, 4, 1), 4, 2, A), options, None) is None
    assert pursuit.complete
    assert pursuit.take(BankCopy(copied(1, 2, 5.0, 4, 1), 5, 3, A2), options, None) is None
    assert (pursuit.lineage, pursuit.needed, sorted(pursuit.taken), pursuit.round) == (A2, None, [2], 5)
    extends = Pursuit(1, A2, 0.0, 9.0, (2,))
    assert extends.take(BankCopy(copied(1, 2, 5.0, 4, 1), 5, 3, A2), options, A) is None
    assert extends.complete


def test_a_source_that_folds_its_lineage_meanwhile_sends_models_of_the_same() -> None:
    options = PeerOptions(Rules(0, 1), (1,), 1, "elected", 99, 0, None, torch.float64)
    start = Entry(9, 0, 7, 0, 1, (0, 1))
    behind = (start, *(Entry(3, number, 7, 0, number, (0,)) for number in range(LONGEST - 2)))
    folded = aligned(behind, extended(behind, Entry(3, LONGEST, 7, 0, 9, (0,))))
    assert len(folded) < len(behind)
    pursuit = Pursuit(1, behind, 0.0, 9.0)
    for cluster, lineage in ((0, behind), (1, folded)):
        assert pursuit.take(BankCopy(copied(1, cluster, 5.0, 4, 1), 4, 2, lineage), options, None) is None
    assert pursuit.complete
    assert pursuit.lineage == folded
    pursuit = Pursuit(1, behind, 0.0, 9.0)
    pursuit.align(folded)
    assert pursuit.lineage == folded


def test_a_source_takes_back_what_it_promised_where_it_says_a_lower_lineage_of_a_later_round() -> None:
    start = Entry(9, 0, 7, 0, 1, (0, 1))
    behind = (start, *(Entry(3, number, 7, 0, number, (0,)) for number in range(LONGEST - 2)))
    folded = aligned(behind, extended(behind, Entry(3, LONGEST, 7, 0, 9, (0,))))
    for promised, round, said, taken_back in (
        (A2, 5, A, True),
        (A2, 4, A, False),  # it was said before the promise
        (A2, 5, A2, False),
        (A, 5, A2, False),
        (folded, 5, behind, False),  # the same, folded here and not there
    ):
        assert Pursuit(1, promised, 0.0, 9.0, round=4).is_taken_back(Hello(0, round, 2, said)) == taken_back
    assert not Pursuit(1, A2, 0.0, 9.0).is_taken_back(None)


@pytest.mark.parametrize(
    ("start", "clusters", "lineage", "fits"),
    [("shared", 2, (), True), ("shared", 3, (), False), ("shared", 3, A2, True), ("elected", 2, (), False)],
)
def test_a_drawn_start_has_as_many_models_as_options_say(start: Any, clusters: int, lineage: Any, fits: bool) -> None:
    options = PeerOptions(Rules(0, 1), (1,), 1, start, 99, 0, 2, torch.float64)
    problem = Pursuit(1, lineage, 0.0, 9.0).take(BankCopy(copied(1, 1, 5.0, 4, 1), 4, clusters, lineage), options, None)
    assert problem == (None if fits else "another number of models")


# Answers.


def test_how_long_an_answer_is_waited_for() -> None:
    answers = AnswerTime(8.0)
    assert answers.deadline_s == 8.0
    answers.observe(4.0)
    assert (answers.mean_s, answers.deviation_s, answers.deadline_s) == (4.0, 2.0, 12.0)
    answers.observe(12.0)
    assert (answers.mean_s, answers.deviation_s) == (5.0, 3.5)
    answers.observe_late(5.0)
    assert answers.deadline_s == 2 * (5.0 + 4 * 2.625)
    for _ in range(20):
        answers.observe_late(5.0)
    assert (answers.doubled, answers.deadline_s) == (10, MOST_S)
    for _ in range(99):
        answers.observe(0.0)
    assert answers.deadline_s == FLOOR * 8.0
    assert AnswerTime(2 * MOST_S).deadline_s == 2 * MOST_S


def test_calls_that_open_nothing_are_answered_more_and_more_rarely() -> None:
    callers, joined = Callers(), []
    for round in range(400):  # a neighbour calls in every round, and nothing is ever opened
        if callers.heeds(3, round):
            callers.caller = 3
            callers.end_call(False, round)
            joined.append(round)
    assert joined == [0, 2, 7, 17, 37, 77, 157, 317]
    assert callers.heeds(4, 318)
    patient = Callers()
    for round in (0, 20, 60, 140):  # one that waits as long as the rules say is heeded at once
        assert patient.heeds(3, round)
        patient.caller = 3
        patient.end_call(False, round)
        assert patient.futile[3] == (2 * PAUSE, round)
    patient.caller = 3
    patient.end_call(True, 150)
    assert patient.futile == {}
    hasty = Callers(futile={3: (2 * PAUSE, 1000)})
    hasty.caller = 3
    hasty.end_call(False, 1000 + PAUSE)
    assert hasty.futile == {3: (4 * PAUSE, 1000 + PAUSE)}
    alone = Callers()  # who called itself pauses by the rules
    alone.end_call(False, 3)
    assert alone.futile == {}


def test_alarms_of_a_peer_are_counted_by_rounds() -> None:
    callers = Callers()
    for round in (0, 0, 1, 5):
        begun = callers.counted != round
        heard = [callers.is_heard(3, round) for _ in range(MOST_ALARMS_OF_ONE)]
        assert all(heard) if begun else not any(heard)
    assert not callers.is_heard(3, 5)
    assert callers.is_heard(4, 5)
