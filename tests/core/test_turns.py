"""The turns of an election, by hand."""

from __future__ import annotations

from dfca.core.method import MergeOptions
from dfca.core.rules.turns import Seats, Standing, call_seats, next_slot, standing, start_seats, unasked


def test_a_start_has_the_seats_asked_for_or_what_verdicts_may_open() -> None:
    assert start_seats(3, most=8) == Seats(3, asked=True)
    assert start_seats(None, most=8) == Seats(8)
    assert start_seats(None, most=8, unasked=9) == Seats(9, unasked=9)


def test_where_clusters_are_merged_later_more_are_opened_than_needed() -> None:
    assert unasked(None, 12) == 0
    assert [unasked(MergeOptions(opens=4), voters) for voters in (2, 9, 12, 15)] == [2, 3, 4, 4]


def test_a_by_election_fills_lost_and_closed_clusters_first() -> None:
    assert call_seats([1], [3], clusters=4, most=6) == Seats(4)
    assert call_seats([1], [], clusters=8, most=6) == Seats(1)
    taken: list[int] = []
    for slot in (1, 3, 4, 5):
        assert next_slot([1], [3], 4, taken) == slot
        taken.append(slot)
    assert next_slot([1], [3], 4, [], followed=[1]) == 3  # a voter follows the lost one


def test_the_first_centres_are_accepted_without_a_vote() -> None:
    seats = Seats(4, unasked=2)
    assert standing([], seats, 2) == (frozenset(), 0, True, False)
    assert standing([(7, True)], seats, 2).forced
    assert not standing([(7, True), (8, True)], seats, 2).forced


def test_an_election_ends_after_patience_or_when_nobody_is_left() -> None:
    seats = Seats(4)
    assert standing([(7, True), (8, False)], seats, 2) == (frozenset({7, 8}), 1, False, False)
    assert standing([(7, True), (8, False), (9, False)], seats, 2).over
    assert standing([(7, True), (None, False)], seats, 2).over
    asked = Seats(4, asked=True)
    assert standing([(7, True), (8, False), (None, False)], asked, 2) == (frozenset({7}), 2, True, False)
    assert standing([(7, True), (None, False), (None, False)], asked, 2).over


def test_what_a_log_of_turns_means_for_the_next() -> None:
    asked, unasked = Seats(3, asked=True), Seats(3)
    for log, seats, expected in (
        ([], asked, Standing(frozenset(), 0, False, False)),
        ([(1, False)], asked, Standing(frozenset({1}), 1, False, False)),
        ([(1, False), (2, True)], asked, Standing(frozenset({1, 2}), 0, False, False)),
        ([(1, False), (2, False)], unasked, Standing(frozenset({1, 2}), 2, False, True)),
        # Where a number was asked for, bids alone decide from now on, also of those that were rejected.
        ([(1, False), (2, False)], asked, Standing(frozenset(), 2, True, False)),
        ([(1, False), (2, False), (1, True)], asked, Standing(frozenset({1}), 2, True, False)),
        ([(None, False)], asked, Standing(frozenset(), 2, True, False)),
        ([(None, False), (None, False)], asked, Standing(frozenset(), 2, False, True)),
        ([(1, True), (2, True), (3, True)], asked, Standing(frozenset({1, 2, 3}), 0, False, True)),
    ):
        assert standing(log, seats, patience=2) == expected
