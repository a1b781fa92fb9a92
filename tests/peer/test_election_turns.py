"""A peer's part in the turns of an election, message by message: what is taken, kept until it fits, or ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer_script import model

from dfca.core.rules.election import ElectionOptions, no_votes
from dfca.peer.records.lineage import Entry
from dfca.peer.records.messages import Bid, Call, Candidate, Count, Decision, Key, Stand, Turn, Votes
from dfca.peer.records.work import Losses, Score, Warm
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.election import PASS, PATIENT_FOR_MODELS, Election
from dfca.peer.waves.wave import ROOT_STRIKES

CENTRE = Turn(9, True, 0)
KEY = Key(1, 0, 0, 9, 0)
WARM = Warm(model(7), Losses(torch.ones(1, 2), torch.ones(1, 2)))


def make(phase: Any = "bid", parent: int | None = 2, kids: tuple[int, ...] = (3, 4), **given: Any) -> Election:
    """Make the part of peer 1 in the second turn of the wave of 9, which it joined through 2, without a vote."""
    usual: dict[str, Any] = {"id": 1, "seed": 0, "incarnation": 0, "quorum": 0.8, "answer_time": AnswerTime(4.0)}
    more = {
        "clusters": 3,
        "options": ElectionOptions(),
        "size": 1,
        "dtype": torch.float64,
        "base": (),
        "bid_made": True,
    }
    wave = Election(**usual | more | {"links": {2, 3, 4}, "centres": [model(9)], "log": [CENTRE]} | given)
    wave.key, wave.parent, wave.phase, wave.voters = KEY, parent, phase, given.get("voters", 10)
    wave.kids = {kid: Count(KEY, 1, 1, (CENTRE,)) for kid in kids}
    if "missing" not in given:
        wave.missing = set(kids)
    wave.tally = no_votes(1)
    wave.candidate = Candidate(KEY, 1, 5, 0.0, model(5)) if phase == "vote" else None
    return wave


def sent(wave: Election) -> list[tuple[int, Any]]:
    return wave.drain()[0]


BID, VOTES = Bid(KEY, 1, 2.0, 3), Votes(KEY, 1, no_votes(1)._replace(voters=1))


@pytest.mark.parametrize(("message", "phase", "other"), [(BID, "bid", "vote"), (VOTES, "vote", "bid")])
def test_bids_and_votes_are_taken_in_their_turn_and_kept_where_they_overtook_a_model(
    message: Any, phase: str, other: str
) -> None:
    wave = make(phase)
    wave.receive(3, message, 1.0)
    assert (wave.missing, wave.early) == ({4}, {})
    for where, turn, sender, is_kept in (
        (other, 1, 3, True),
        (phase, 2, 3, True),
        (phase, 3, 3, False),  # no turn can be as far ahead
        (phase, 0, 3, False),
        (other, 1, 2, False),  # it is no child
    ):
        wave = make(where)
        late = message._replace(turn=turn)
        wave.receive(sender, late, 1.0)
        assert wave.missing == {3, 4}
        assert wave.early == ({sender: late} if is_kept else {})


def test_the_best_bid_counts_and_of_equal_ones_that_of_the_lowest_peer() -> None:
    for value, name, best in ((3.0, 6, (3.0, -6)), (1.0, 6, (2.0, -5)), (2.0, 6, (2.0, -5)), (2.0, 4, (2.0, -4))):
        wave = make(best=(2.0, -5), route=4)
        wave.receive(3, Bid(KEY, 1, value, name), 1.0)
        assert wave.best == best
        assert wave.route == (4 if best == (2.0, -5) else 3)
    wave = make(missing={4}, best=(2.0, -5), route=4)
    wave.receive(3, Bid(KEY, 1, 9.0, 6), 1.0)
    assert wave.best == (2.0, -5)  # it has bid before
    twice = make(best=(2.0, -5), route=4)
    twice.receive(3, Bid(KEY, 1, 2.0, 5), 1.0)  # the same candidate, by another way
    assert twice.route == 4
    nobody = make()
    nobody.receive(3, Bid(KEY, 1, 9.0, None), 1.0)
    assert (nobody.best, nobody.missing) == (None, {4})


def test_bids_go_up_once_all_are_in() -> None:
    for changes, up in (
        ({"missing": {4}}, []),
        ({"missing": set(), "bid_made": False}, []),
        ({"missing": set(), "phase": "stand"}, []),
        ({"missing": set()}, [(2, Bid(KEY, 1, 0.0, None))]),
        ({"missing": set(), "best": (2.0, -5)}, [(2, Bid(KEY, 1, 2.0, 5))]),
    ):
        wave = make(**changes)
        wave._bids_are_in()
        assert sent(wave) == up
    root = make(parent=None, missing=set(), best=(2.0, -3), route=3)
    root._bids_are_in()
    assert (root.phase, sent(root)) == ("stand", [(3, Stand(KEY, 1, 3))])
    empty = make(parent=None, missing=set())
    empty._bids_are_in()
    assert [message for _, message in sent(empty)] == [Decision(KEY, 1, PASS, False)] * 2
    assert empty.log == [CENTRE, PASS]


def test_votes_go_up_once_all_are_in() -> None:
    job = Score(model(5)[None], None)
    for changes, goes in (
        ({"missing": {4}}, False),
        ({"missing": set(), "scoring": job}, False),
        ({"missing": set(), "phase": "bid"}, False),
        ({"missing": set()}, True),
    ):
        wave = make(**{"phase": "vote", **changes})
        wave._votes_are_in()
        assert sent(wave) == ([(2, Votes(KEY, 1, no_votes(1)))] if goes else [])
    wrong = make("vote")
    wrong.receive(3, Votes(KEY, 1, no_votes(2)), 1.0)  # of another number of centres
    assert wrong.missing == {3, 4}


def test_a_candidate_is_asked_to_stand_by_its_parent_in_the_current_turn() -> None:
    for sender, turn, candidate, stands in ((2, 1, 3, True), (3, 1, 3, False), (2, 0, 3, False), (2, 1, 4, False)):
        wave = make(best=(1.0, -3), route=3)
        wave.receive(sender, Stand(KEY, turn, candidate), 1.0)
        assert (wave.phase == "stand") is stands
        assert sent(wave) == ([(3, Stand(KEY, 1, 3))] if stands else [])


def test_a_candidate_comes_from_above_or_from_the_child_that_it_was_asked_of() -> None:
    for phase, sender, turn, name, taken, early in (
        ("bid", 2, 1, 5, True, False),
        ("bid", 3, 1, 5, False, False),
        ("bid", 2, 2, 5, False, False),
        ("vote", 2, 1, 6, False, False),
        ("stand", 3, 1, 5, True, False),
        ("stand", 4, 1, 5, False, False),
        ("stand", 3, 1, 6, False, False),
        ("counted", 2, 1, 5, False, True),  # it has overtaken the opening
        ("counted", 3, 1, 5, False, False),
    ):
        wave = make(phase, best=(1.0, -5), route=3)
        before = wave.candidate
        message = Candidate(KEY, turn, name, 0.0, model(5))
        wave.receive(sender, message, 1.0)
        assert wave.candidate is (message if taken else before)
        assert wave.early == ({sender: message} if early else {})
    nobody = make("stand", route=3)
    nobody.receive(3, Candidate(KEY, 1, 5, 0.0, model(5)), 1.0)
    assert nobody.candidate is None


def test_a_decision_comes_from_the_parent_and_is_possible() -> None:
    accepted, rejected = Turn(5, True, 1), Turn(5, False)
    for phase, sender, turn, outcome, taken in (
        ("vote", 2, 1, accepted, True),
        ("vote", 2, 1, rejected, True),
        ("vote", 3, 1, accepted, False),
        ("vote", 2, 0, accepted, False),
        ("vote", 2, 1, Turn(6, True, 1), False),  # another candidate
        ("vote", 2, 1, Turn(5, True, 2), False),  # another cluster than the next
        ("vote", 2, 1, PASS, False),
        ("bid", 2, 1, PASS, True),
        ("bid", 2, 1, accepted, False),
        ("stand", 2, 1, PASS, False),
    ):
        wave = make(phase)
        wave.receive(sender, Decision(KEY, turn, outcome, False), 1.0)
        assert wave.log == ([CENTRE, outcome] if taken else [CENTRE])
        assert wave.early == {}
    opening = make("opening", centres=[])
    decision = Decision(KEY, 1, PASS, False)
    opening.receive(2, decision, 1.0)
    assert (opening.early, opening.log) == ({2: decision}, [CENTRE])
    lost = make("vote")
    lost.candidate = None
    lost.receive(2, Decision(KEY, 1, accepted, False), 1.0)
    assert lost.log == [CENTRE]


def test_peers_whose_part_is_missing() -> None:
    for phase, waited in (
        ("wave", {4}),
        ("counted", set()),
        ("bid", {3}),
        ("vote", {3}),
        ("stand", {2}),
        ("done", set()),
    ):
        assert make(phase, missing={3}, pending={4}, route=2)._waited_for() == waited
    assert make("stand", missing={3})._waited_for() == set()


def test_lineages_of_fewer_voters_are_outvoted_and_bad_roots_are_not_trusted() -> None:
    entry = Entry(10, 0, 8, 0, 0, (0,))
    assert not make().outvotes(entry)
    assert make(voters=11).outvotes(entry)
    assert not make("counted", voters=11).outvotes(entry)
    assert not make().distrusts(entry)
    assert make(banned={8}).distrusts(entry)
    assert make(failed={8: ROOT_STRIKES}).distrusts(entry)


def test_a_peer_that_made_the_best_bid_and_did_not_stand_is_remembered() -> None:
    for phase, missing, best, route, long, names in (
        ("stand", set(), (1.0, -5), 3, True, {5}),
        ("stand", set(), (1.0, -5), 3, False, set()),
        ("stand", set(), None, 3, True, set()),
        ("bid", set(), (1.0, -5), 3, True, {5}),
        ("bid", {4}, (1.0, -5), 3, True, set()),  # other bids are missing
        ("bid", set(), (1.0, -1), 1, True, set()),  # it is oneself
        ("vote", set(), (1.0, -5), 3, True, set()),
    ):
        wave = make(phase, missing=missing, best=best, route=route)
        wave._blame_the_silent(long)
        assert (wave.no_shows, wave.silences) == (names, 1)


def test_after_a_long_silence_a_turn_continues_without_children_and_bans_roots() -> None:
    patient = PATIENT_FOR_MODELS
    for silences, helps in ((patient - 1, False), (patient, True)):
        wave = make("vote", silences=silences)
        assert wave._end_turn_without_the_silent(7.0) is helps
        assert (wave.last_s, sorted(wave.kids)) == ((7.0, []) if helps else (0.0, [3, 4]))
        assert sent(wave) == ([(2, Votes(KEY, 1, no_votes(1)))] if helps else [])
    wave = make("stand", silences=patient, route=3)
    assert not wave._end_turn_without_the_silent(7.0)
    assert (wave.blamed, wave.banned) == ({3}, set())
    wave._end_turn_without_the_silent(8.0)
    assert wave.banned == {3}
    below = make("bid", silences=patient, missing=set())
    assert not below._end_turn_without_the_silent(7.0)
    assert (below.blamed, below.banned) == ({2}, set())
    under_root = make("bid", parent=9, silences=patient, missing=set())
    under_root._end_turn_without_the_silent(7.0)
    assert under_root.banned == {9}
    root = make("bid", parent=None, silences=patient, missing=set())
    root._end_turn_without_the_silent(7.0)
    oneself = make("stand", silences=patient, route=1)
    oneself._end_turn_without_the_silent(7.0)
    assert root.blamed == oneself.blamed == set()


def test_a_peer_that_lost_the_root_stops_the_others_only_where_they_need_it() -> None:
    for phase, parent, ready, votes, call, again in (
        ("bid", 2, 0, False, None, False),
        ("bid", 2, 1, False, None, False),
        ("bid", 2, 1, True, None, True),  # of ten voters, two are missing
        ("bid", 2, 2, False, None, True),
        ("bid", 9, 0, False, None, True),  # the root itself
        ("bid", 9, 0, False, Call((0,), 1), True),
        ("bid", 2, 1, True, Call((0,), 1), True),
        ("counted", 2, 0, False, Call((0,), 1), True),  # nobody is known to have elected the clusters
        ("counted", 2, 0, False, None, True),
    ):
        wave = make(phase, parent=parent, kids=(3,), votes=votes, call=call)
        wave.kids[3] = Count(KEY, 2, ready, (CENTRE,))
        wave._lose_parent(3.0)
        assert (wave.parent, wave.last_s) == (None, 3.0)
        assert wave.key.attempt == (KEY.attempt + 1 if again else 0)
    for phase, base in (("bid", ()), ("counted", (Entry(30, 0, 9, 0, 0, (0,)),))):
        beside = make(phase, kids=(3,), call=Call((0,), 1), base=base)
        beside._lose_parent(3.0)
        assert beside.cut_off  # of a by-election
        assert (beside.key, beside.out) == (KEY, [])
    half = make(kids=(3,), quorum=0.5, voters=4)
    half.kids[3] = Count(KEY, 2, 2, (CENTRE,))
    half._lose_parent(3.0)
    assert half.key.attempt == 0  # the other half is a quorum
