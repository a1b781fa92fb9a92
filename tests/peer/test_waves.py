"""A peer's part in a wave, message by message: who is joined, counted, waited for, blamed and trusted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peer_script import LINEAGES, model

from dfca.core.rules.election import ElectionOptions, lot
from dfca.peer.records.lineage import Entry
from dfca.peer.records.messages import Call, Count, Key, Open, Probe, Refuse, Turn
from dfca.peer.records.work import Losses, Warm
from dfca.peer.waves import wave as waves
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.election import Election
from dfca.peer.waves.wave import (
    LEARNED_DOUBLINGS,
    MOST_AHEAD,
    MOST_DOUBLINGS,
    MOST_ROOTS,
    MOST_WAVES,
    NO_WAVE,
    PATIENT,
    ROOT_STRIKES,
    SILENT,
    STRIKES,
)

A = LINEAGES["A"]
LOSSES = Losses(torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64))
WARM = Warm(model(7), LOSSES)
CENTRE = Turn(9, True, 0)


def key_of(root: int, attempt: int = 1, decided: int = 0, incarnation: int = 0) -> Key:
    """Make the key of a wave whose root has the best lot of all."""
    return Key(attempt, decided, 0, root, incarnation)


def make(**given: Any) -> Election:
    """Make the part of peer 1, with the neighbours 2 and 3 in reach."""
    usual: dict[str, Any] = {"id": 1, "seed": 0, "incarnation": 0, "quorum": 0.8, "answer_time": AnswerTime(4.0)}
    more = {"clusters": 2, "options": ElectionOptions(), "links": {2, 3}, "size": 1, "dtype": torch.float64, "base": ()}
    return Election(**usual | more | given)


def sent(wave: Election) -> list[tuple[int, Any]]:
    return wave.drain()[0]


def joined(**given: Any) -> Election:
    """Return a peer that has joined the wave of 2."""
    wave = make(**given)
    wave.begin(0.0)
    wave.receive(2, Probe(key_of(2), ()), 1.0)
    wave.drain()
    return wave


# Who joins what.


def test_a_wave_begins_with_a_probe_to_all_and_is_joined_by_peers_with_a_worse_one() -> None:
    wave = make()
    assert (wave.key, wave.phase) == (NO_WAVE, "wave")
    wave.begin(3.0)
    own = Key(0, 0, -lot(0, 1), 1, 0)
    assert (wave.key, wave.parent, wave.last_s, wave.pending) == (own, None, 3.0, {2, 3})
    assert sent(wave) == [(2, Probe(own, ())), (3, Probe(own, ()))]
    wave.receive(2, Probe(key_of(2), ()), 4.0)
    assert (wave.key, wave.parent, wave.last_s, wave.pending) == (key_of(2), 2, 4.0, {3})
    assert sent(wave) == [(3, Probe(key_of(2), ()))]
    assert wave.joined == {2: 1}
    wave.receive(3, Probe(key_of(2), ()), 5.0)  # it has another parent
    assert (wave.last_s, wave.pending, wave.phase) == (5.0, set(), "counted")
    assert sent(wave) == [(2, Count(key_of(2), 1, 0))]


def test_a_wave_of_another_call_or_lineage_is_of_another_kind() -> None:
    call = Call((1,), 2, (0,))
    for mine, theirs, base, same in (
        (None, None, (), True),
        (None, None, A, False),
        (None, call, (), False),
        (call, None, (), False),
        (call, call, (), True),
        (call, Call((), 2, (0,)), (), True),  # which clusters are lost the root says
        (call, Call((1,), 3, (0,)), (), False),
        (call, Call((1,), 2), (), False),
        (call, Call((1,), 2, (0,), True), (), False),
    ):
        assert make(call=mine).is_kind_of(Probe(key_of(2), base, theirs)) is same


@pytest.mark.parametrize("attempt", [0, 7])
@pytest.mark.parametrize(("ahead", "joins"), [(MOST_AHEAD, True), (MOST_AHEAD + 1, False)])
def test_an_attempt_that_is_too_far_ahead_is_refused(attempt: int, ahead: int, joins: bool) -> None:
    wave = make()
    wave.begin(0.0, attempt)
    wave.drain()
    far = key_of(2, attempt + ahead)
    wave.receive(2, Probe(far, ()), 1.0)
    assert (wave.key == far) is joins
    assert ((2, Refuse(far)) in sent(wave)) is not joins


def test_a_banned_or_untrusted_peer_is_refused_and_not_waited_for() -> None:
    for changes in ({"banned": {2}}, {"failed": {2: ROOT_STRIKES}}, {"joined": {2: MOST_WAVES}}):
        wave = make(**changes)
        wave.begin(0.0)
        wave.drain()
        wave.receive(2, Probe(key_of(2), ()), 1.0)
        assert sent(wave) == [(2, Refuse(key_of(2)))]
        assert wave.pending == {3}
    for changes in ({"failed": {2: ROOT_STRIKES - 1}}, {"joined": {2: MOST_WAVES - 1}}, {"failed": {3: 99}}):
        wave = make(**changes)
        wave.begin(0.0)
        wave.receive(2, Probe(key_of(2), ()), 1.0)
        assert wave.parent == 2


def test_a_root_that_is_given_up_ends_its_wave_here_when_it_begins_again() -> None:
    wave = joined(warm=WARM)
    wave.failed = {2: ROOT_STRIKES}
    wave.receive(2, Probe(key_of(2, 5), ()), 2.0)
    assert (wave.key.root, wave.key.attempt) == (1, 2)
    assert (2, Refuse(key_of(2, 5))) in sent(wave)


def test_a_probe_that_is_refused_ends_no_other_wave_and_its_sender_is_not_waited_for() -> None:
    for root in (2, 9):  # a banned peer forwards the next wave of this root, which is trusted, or of another one
        wave = joined(banned=set())
        wave.banned = {3}
        wave.receive(3, Probe(key_of(root, 5), ()), 2.0)
        assert wave.key == key_of(2)
        assert sent(wave) == [(3, Refuse(key_of(root, 5))), (2, Count(key_of(2), 1, 0))]
    distrusted = joined(failed={9: ROOT_STRIKES})
    distrusted.failed[2] = ROOT_STRIKES
    distrusted.receive(3, Probe(key_of(9, 5), ()), 2.0)
    assert distrusted.key == key_of(2)
    claimed = make(joined={1: MOST_WAVES})
    claimed.begin(0.0)
    claimed.receive(2, Probe(key_of(1, 5), ()), 1.0)  # somebody claims a wave of this peer
    assert claimed.key.attempt == 0


@pytest.mark.parametrize("changes", [{"banned": {2}}, {"failed": {9: ROOT_STRIKES}}, {"joined": {9: MOST_WAVES}}])
def test_a_parent_that_goes_over_to_a_wave_that_is_refused_is_waited_for_no_more(changes: dict[str, Any]) -> None:
    wave = joined()
    for name, value in changes.items():
        setattr(wave, name, value)
    wave.receive(2, Probe(key_of(9, 5), ()), 2.0)
    assert (wave.parent, wave.key.root, wave.key.attempt) == (None, 1, 2)
    assert sent(wave)[0] == (2, Refuse(key_of(9, 5)))


def test_a_child_that_goes_over_to_a_wave_that_is_refused_is_counted_no_more() -> None:
    wave = joined(failed={9: ROOT_STRIKES})
    wave.receive(3, Count(key_of(2), 4, 4), 2.0)
    wave.drain()
    wave.receive(3, Probe(key_of(9, 5), ()), 3.0)
    assert wave.kids == {}
    assert sent(wave) == [(3, Refuse(key_of(9, 5))), (2, Count(key_of(2), 1, 0))]


@pytest.mark.parametrize(("phase", "sender", "blamed"), [("stand", 3, True), ("stand", 2, False), ("bid", 3, False)])
def test_a_candidate_that_begins_again_instead_of_standing_is_blamed(phase: Any, sender: int, blamed: bool) -> None:
    wave = joined()
    wave.phase, wave.route, wave.missing = phase, 3, {3}
    wave.receive(sender, Probe(key_of(2, SILENT), ()), 1.5)
    assert wave.strikes == ({(3, "stand"): 1} if blamed else {})


def test_a_root_that_knows_fewer_turns_is_overruled() -> None:
    wave = make(log=[CENTRE], centres=[model(9)])
    wave.begin(0.0)
    wave.receive(2, Probe(key_of(2, 4), ()), 1.0)
    assert wave.key == Key(5, 1, -lot(0, 1), 1, 0)
    wave.receive(2, Probe(key_of(2, 6, decided=1), ()), 2.0)
    assert wave.parent == 2


def test_a_worse_probe_is_answered_unless_an_answer_is_under_way() -> None:
    worse = Key(0, 0, -(2**60), 3, 0)
    wave = joined()
    wave.receive(3, Probe(worse, ()), 2.0)
    assert sent(wave) == []  # it was asked already
    wave.receive(3, Count(key_of(2), 1, 1), 3.0)
    wave.drain()
    wave.receive(3, Probe(worse, ()), 4.0)  # a child that has lost its way to the root
    assert wave.kids == {}
    assert sent(wave) == [(2, Count(key_of(2), 1, 0))]
    wave.receive(3, Probe(worse, ()), 5.0)
    assert sent(wave) == [(3, Probe(key_of(2), ()))]


def test_a_peer_that_joins_another_wave_forgets_the_turn_that_was_under_way() -> None:
    wave = make(best=(1.0, -3), route=3, missing={3}, bid_made=True, voters=4, centres=[model(1)])
    wave._enter(key_of(2), 2, None, 0.0)
    assert (wave.best, wave.route, wave.missing, wave.bid_made, wave.voters) == (None, None, set(), False, 0)
    assert wave.centres == []  # of a log that never came


def test_a_wave_that_is_restored_shares_what_the_peer_learns() -> None:
    wave, answers, models = make(held=model(1)[None]), AnswerTime(9.0), model(2)[None]
    wave.resume(answers, models)
    assert wave.answer_time is answers
    assert wave.held is models
    start = make()
    start.resume(answers, models)
    assert start.held is None


def test_a_parent_that_has_lost_its_way_to_the_root_is_left() -> None:
    wave = joined()
    wave.receive(2, Probe(Key(0, 0, -(2**60), 2, 0), ()), 2.0)
    assert (wave.parent, wave.key.root, wave.key.attempt) == (None, 1, 2)


def test_nothing_is_counted_after_the_opening() -> None:
    root = make(warm=WARM, clusters=3)
    root.begin(0.0)
    for child in (2, 3):
        root.receive(child, Count(root.key, 1, 1), 1.0)
    assert root.phase == "bid"
    root.receive(3, Count(root.key, 7, 7), 2.0)
    assert root.kids[3].size == 1
    root.drain()
    root.receive(3, Probe(root.key, ()), 3.0)
    assert (root.phase, sent(root)) == ("bid", [])


# Counts.


def test_a_subtree_is_counted_when_all_have_answered_and_again_when_it_changes() -> None:
    wave = joined()
    wave.receive(3, Count(key_of(2), 4, 3), 2.0)
    assert sent(wave) == [(2, Count(key_of(2), 5, 3))]
    wave.receive(3, Count(key_of(2), 4, 3), 2.5)
    assert sent(wave) == []
    wave.warmed(WARM)
    assert sent(wave) == [(2, Count(key_of(2), 5, 4))]
    wave.receive(2, Count(key_of(2), 9, 9), 3.0)  # its parent is no child
    wave.lost(3, 3.0)
    assert sent(wave) == [(2, Count(key_of(2), 1, 1))]
    wave.limit(1)
    wave.gained(3)
    assert sent(wave) == [(3, Probe(key_of(2), ()))]
    wave.receive(3, Count(key_of(2), 4, 3), 4.0)
    assert wave.kids == {3: Count(key_of(2), 4, 3)}
    assert sent(wave) == []  # there are no more than the driver says


def test_messages_of_another_attempt_and_counts_of_banned_peers_do_nothing() -> None:
    wave = joined()
    wave.receive(3, Count(key_of(2, 7), 4, 3), 2.0)
    assert (wave.kids, wave.last_s) == ({}, 1.0)
    wave.banned = {3}
    wave.receive(3, Count(key_of(2), 4, 3), 2.0)
    assert wave.kids == {}


@pytest.mark.parametrize(("ready", "opens"), [(3, False), (4, True)])
def test_a_root_opens_with_a_quorum(ready: int, opens: bool) -> None:
    root = make(links={2}, warm=WARM, quorum=0.8)
    root.begin(0.0)
    root.receive(2, Count(root.key, 5, ready), 1.0)  # of 6, 4.8
    assert root.opened is opens


def test_a_root_that_decided_turns_needs_no_quorum_but_one_ready_peer() -> None:
    for warm, opens in ((None, False), (WARM, True)):
        root = make(links={2}, warm=warm, log=[CENTRE], centres=[model(9)])
        root.begin(0.0)
        root.receive(2, Count(root.key, 9, 0, (CENTRE,)), 1.0)
        assert root.opened is opens


def test_after_the_opening_nobody_warms_up_and_nobody_is_asked_to_join() -> None:
    root = make(links={2}, warm=WARM, clusters=3)
    root.begin(0.0)
    root.receive(2, Count(root.key, 1, 1), 1.0)
    root.drain()
    other = Warm(model(1), LOSSES)
    root.warmed(other)
    root.gained(3)
    assert root.warm is WARM
    assert 3 in root.links
    assert sent(root) == []
    root.receive(3, Probe(Key(0, 0, -(2**60), 3, 0), ()), 2.0)
    assert sent(root) == [(3, Refuse(Key(0, 0, -(2**60), 3, 0)))]


def test_turns_whose_centres_never_came_are_forgotten() -> None:
    rejected, second = Turn(8, False), Turn(7, True, 1)
    wave = make(log=[CENTRE, rejected, second, rejected], centres=[model(9)])
    wave.begin(0.0)
    assert wave.log == [CENTRE, rejected]
    assert wave.key.decided == 2
    child = make(log=[CENTRE, second], centres=[model(9)])
    child._enter(key_of(2, decided=2), 2, None, 0.0)
    child.receive(3, Refuse(child.key), 1.0)
    assert sent(child)[-1] == (2, Count(child.key, 1, 0, (CENTRE,)))
    whole = make(log=[CENTRE, rejected, second], centres=[model(9), model(8)])
    whole.begin(0.0)
    assert len(whole.log) == 3


def test_which_entry_of_a_neighbour_comes_of_this_wave() -> None:
    wave = joined()
    entry = Entry(3, 1, 2, 0, 0, (0,))
    assert wave.will_tell(3, entry)
    assert not wave.will_tell(2, entry)  # the parent has decided without this peer
    for other in (entry._replace(attempt=2), entry._replace(root=3), entry._replace(incarnation=1)):
        assert not wave.will_tell(3, other)
    wave.receive(3, Probe(key_of(2), ()), 2.0)
    wave.receive(2, Open(key_of(2), 3, ()), 2.0)
    assert wave.will_tell(2, entry)


def test_a_peer_that_leaves_tells_its_tree() -> None:
    wave = joined(links={2, 3, 4})
    wave.receive(3, Count(key_of(2), 1, 1), 2.0)
    wave.leave()
    assert sent(wave) == [(n, Refuse(key_of(2))) for n in (2, 3, 4)]
    wave.links = {3}
    wave.leave()
    assert sent(wave) == [(3, Refuse(key_of(2)))]
    root = make(links={2})
    root.begin(0.0)
    root.receive(2, Refuse(root.key), 1.0)
    root.drain()
    root.leave()
    assert sent(root) == []


# Silence.


def test_the_time_out_doubles_with_every_attempt_that_ended_in_silence() -> None:
    wave = make(answer_time=AnswerTime(4.0, 0.5))
    for silences in range(3):
        wave.begin(100.0, attempt=SILENT * silences)
        wave.silences = silences
        assert wave.next_wake() == 100.0 + 4.0 * 2**silences  # it may be a warm-up that is waited for
    wave.silences = 1
    assert wave.next_wake() == 108.0  # attempts can be claimed: it has seen one silence
    wave.begin(0.0, attempt=SILENT * 20)
    wave.silences = 20
    assert wave.next_wake() == 1.5 * 4.0 * 2**LEARNED_DOUBLINGS  # it is known how long answers take
    wave.phase = "counted"
    assert wave.next_wake() == 1.5 * 4.0 * 2**MOST_DOUBLINGS  # a root that saw many waits longer than its children
    wave.silences = PATIENT
    assert wave.next_wake() == 1.5 * 4.0 * 2**PATIENT
    wave.silences = PATIENT - 1
    assert wave.next_wake() == 4.0 * 2 ** (PATIENT - 1)
    wave.failed = {9: ROOT_STRIKES, 8: 1}  # silences of a root that is given up do not count
    wave.silences = ROOT_STRIKES + 1
    assert wave.next_wake() == 8.0
    wave.silences = 0
    assert wave.next_wake() == 4.0
    wave.phase = "bid"
    assert wave.next_wake() == 1.0  # as answers take, and no less than a quarter of the first deadline
    wave.phase = "done"
    assert wave.next_wake() == math.inf


def test_only_a_root_waits_longer_than_its_children() -> None:
    child = make(silences=PATIENT)
    child._enter(key_of(2, SILENT * 20), 2, None, 0.0)
    assert child.next_wake() == 4.0 * 2**PATIENT


def test_the_peer_that_is_blamed_for_a_silence() -> None:
    for phase, waited, long, strikes, failed in (
        ("wave", {3}, True, {(3, "wave"): 1}, {}),
        ("wave", {3}, False, {}, {}),
        ("counted", set(), True, {}, {2: 1}),
        ("counted", set(), False, {}, {}),
        ("bid", set(), False, {}, {2: 1}),  # the root has opened, and sends nothing more
        ("bid", {3}, False, {}, {}),
        ("vote", {3}, True, {(3, "vote"): 1}, {}),
        ("vote", {9}, True, {}, {2: 1}),  # it is out of reach
    ):
        wave = joined()
        wave.phase, wave.pending, wave.missing = phase, set(waited), set(waited)  # type: ignore[assignment]
        wave._blame_the_silent(long)
        assert (wave.strikes, wave.failed, wave.silences) == (strikes, failed, 1)
    root = make()
    root.begin(0.0)
    root.pending, root.phase = set(), "counted"
    root._blame_the_silent()
    assert root.failed == {}


def test_where_it_helps_to_continue_without_the_silent() -> None:
    for phase, pending, parent, helps in (
        ("wave", {3}, 2, True),
        ("wave", set(), 2, False),
        ("bid", {3}, 2, False),
        ("counted", set(), 2, False),
        ("counted", set(), None, True),
        ("vote", set(), None, False),
    ):
        wave = joined(warm=WARM, clusters=3)
        wave.phase, wave.pending, wave.parent = phase, set(pending), parent  # type: ignore[assignment]
        assert wave._go_on_without_the_silent(7.0) is helps
        assert wave.pending == (set() if helps else pending)
        assert wave.last_s == (7.0 if helps else 1.0)
        assert wave.opened is (phase in ("bid", "vote") or (helps and parent is None))


def test_a_silent_peer_is_blamed_and_in_the_end_not_waited_for() -> None:
    wave = make()
    wave.begin(0.0)
    wave.wake(3.9)
    assert wave.key.attempt == 0
    for strike in (1, 2, 3):
        wave.wake(wave.next_wake())
        assert wave.key.attempt == SILENT * strike
        assert wave.strikes == {(2, "wave"): strike, (3, "wave"): strike}
        waited = strike < STRIKES["wave"] + 1  # a root waits once more
        assert wave.pending == ({2, 3} if waited else set())
    child = make(strikes={(3, "wave"): STRIKES["wave"] - 1})
    child._enter(key_of(2), 2, None, 0.0)
    assert child.pending == {3}
    child.strikes = {(3, "wave"): STRIKES["wave"]}
    child._enter(key_of(2, 2), 2, None, 0.0)
    assert child.pending == set()
    assert (3, Probe(key_of(2, 2), ())) in sent(child)  # it may still take part


def test_a_root_is_blamed_for_a_silence_in_which_nobody_else_is_waited_for() -> None:
    wave = joined()
    wave.receive(3, Count(key_of(2), 1, 1), 2.0)
    wave.wake(wave.next_wake())
    assert (wave.failed, wave.strikes, wave.silences) == ({2: 1}, {}, 1)
    assert (wave.key.root, wave.key.attempt) == (1, SILENT)


def test_another_peer_whose_patience_ended_first_blames_nobody_too_early() -> None:
    for now, blamed in ((2.9, {}), (3.0, {(3, "wave"): 1})):
        wave = joined()  # at 1 s, and it waits for 3; its patience is 4 s
        wave.receive(2, Probe(key_of(2, SILENT), ()), now)
        assert (wave.strikes, wave.silences) == (blamed, 1)
        wave.receive(2, Probe(key_of(2, SILENT + 1), ()), now)
        assert wave.silences == 1


def test_after_many_silences_a_peer_continues_without_the_silent() -> None:
    wave = joined(silences=PATIENT - 1)
    wave.wake(wave.next_wake())
    assert (wave.parent, wave.pending, wave.phase) == (2, set(), "counted")
    assert sent(wave) == [(2, Count(key_of(2), 1, 0))]
    root = make(links={2}, silences=PATIENT - 1)
    root.begin(0.0)
    root.receive(2, Count(root.key, 9, 1), 1.0)  # 9 were counted, and one is ready
    root.drain()
    root.wake(root.next_wake())
    assert (root.opened, root.voters) == (True, 1)
    none = make(links={2}, silences=PATIENT - 1)
    none.begin(0.0)
    none.receive(2, Count(none.key, 9, 0), 1.0)
    none.wake(none.next_wake())
    assert (none.opened, none.key.attempt) == (False, SILENT)


def test_an_attempt_that_failed_is_the_next_and_after_a_silence_the_next_of_the_patient_ones() -> None:
    for attempt, after, silent in ((0, 1, SILENT), (SILENT - 1, SILENT, SILENT), (SILENT, SILENT + 1, 2 * SILENT)):
        for is_silent, expected in ((False, after), (True, silent)):
            wave = make()
            wave.begin(0.0, attempt)
            wave._again(1.0, silent=is_silent)
            assert (wave.key.attempt, wave.last_s) == (expected, 1.0)


def test_roots_are_remembered_within_limits() -> None:
    counts: dict[int, int] = {}
    for root in [0, 0, *range(MOST_ROOTS + 1)]:
        waves._add_one(counts, root)
    assert len(counts) == MOST_ROOTS
    assert (counts.get(0), counts[1]) == (None, 1)
