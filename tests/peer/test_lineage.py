"""Lineages: which clusters they have, which of them two lineages share, and which entries cannot be."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from peer_script import elected

from dfca.core.rules.merging import Merge, Plan
from dfca.peer.records.lineage import (
    FOLDED,
    KEPT,
    LEFT,
    LONGEST,
    MOST_ENTRIES,
    MOST_SLOTS,
    Clusters,
    Entry,
    Lineage,
    aligned,
    clusters_of,
    compatible,
    digest_of,
    electorate,
    extended,
    is_entry,
    is_lineage,
    layout_of,
    opened_since,
    quiet_surveys,
    same,
    shared_length,
)

START = Entry(5, 0, 9, 0, 7, (0, 1, 2))
MERGE = Merge(0, 1, 0.5, 0.1)


def survey(*merges: Merge, slots: tuple[int, ...] = (), empty: tuple[int, ...] = (), last: bool = False) -> Entry:
    return Entry(5, 0, 9, 0, 0, slots, merges, empty, last)


QUIET, LAST = survey(), survey(last=True)
MERGED, EMPTIED = survey(MERGE, slots=(0, 1)), survey(slots=(2,), empty=(2,))
RENUMBERED = survey(MERGE, slots=(0, 1, 2), last=True)


def test_an_entry_is_a_survey_where_it_merges_closes_ends_or_opens_nothing() -> None:
    for entry, is_survey, changes in (
        (START, False, True),
        (QUIET, True, False),
        (LAST, True, True),
        (MERGED, True, True),
        (EMPTIED, True, True),
        (survey(slots=(0,), last=True), True, True),
    ):
        assert (entry.is_survey, entry.changes) == (is_survey, changes)
    assert MERGED.plan == Plan((MERGE,), ())
    assert EMPTIED.plan == Plan((), (2,))


@pytest.mark.parametrize(
    ("entries", "models", "closed"),
    [
        ((), 0, ()),
        ((START,), 3, ()),
        ((START, QUIET, LAST), 3, ()),
        ((START, MERGED), 3, (1,)),
        ((START, EMPTIED), 3, (2,)),
        ((START, MERGED, EMPTIED), 3, (1, 2)),
        ((START, RENUMBERED), 2, ()),
        ((START, MERGED, survey(slots=(0, 1, 2), last=True)), 2, ()),
        ((START, MERGED, Entry(5, 1, 9, 0, 8, (1,))), 3, ()),  # a by-election opens a closed cluster
        ((START, MERGED, Entry(5, 1, 9, 0, 8, (3,))), 4, (1,)),  # and a new one
        ((Entry(5, 0, 9, 0, 7, (2,)),), 3, ()),
    ],
)
def test_the_clusters_of_a_lineage(entries: Lineage, models: int, closed: tuple[int, ...]) -> None:
    assert layout_of(entries) == Clusters(models, closed)
    assert clusters_of(entries) == models


@pytest.mark.parametrize(
    "entry",
    [
        survey(Merge(0, 3, 0.5, 0.1), slots=(0, 3)),  # there is no cluster 3
        survey(Merge(3, 0, 0.5, 0.1), slots=(0, 3)),
        survey(slots=(3,), empty=(3,)),
        survey(slots=(0, 1, 2), empty=(0, 1, 2)),  # nothing would be left
        survey(MERGE, Merge(0, 2, 0.5, 0.1), slots=(0, 1, 2)),  # a cluster in two pairs
        survey(MERGE, Merge(1, 2, 0.5, 0.1), slots=(0, 1, 2)),
        survey(Merge(0, 0, 0.5, 0.1), slots=(0,)),
        survey(MERGE, slots=(0, 1), empty=(0,)),
        survey(MERGE, slots=(0,)),  # more changes than it says
        survey(MERGE, slots=(0, 1, 2)),
        survey(MERGE, slots=(0, 1), last=True),  # all clusters get other numbers
        survey(slots=(0, 1, 2), last=True),  # nothing is closed, so none does
    ],
)
def test_a_survey_that_cannot_have_been_held(entry: Entry) -> None:
    assert Clusters(3).after(entry) is None
    assert layout_of((START, entry)) == Clusters(0)
    assert layout_of((START, entry, QUIET)) == Clusters(0)
    assert Clusters(3, (1,)).after(MERGED) is None  # the cluster is closed already


def test_which_clusters_a_longer_lineage_has_opened() -> None:
    mine, second = elected(5, 0, 1), Entry(4, 0, 9, 0, 8, (2,))
    third = Entry(4, 1, 9, 0, 8, (0, 2))
    assert opened_since((*mine, second), mine) == (2,)
    assert opened_since((*mine, second, third), mine) == (0, 2)
    assert opened_since((*mine, QUIET, second), mine) == (2,)  # a survey that changed nothing does not count
    assert opened_since((*mine, MERGED), mine) == ()
    assert opened_since((*mine, QUIET), mine) == ()
    assert opened_since((*mine, MERGED, second), mine) is None
    assert opened_since(mine, mine) is None
    assert opened_since(mine, None) is None
    assert opened_since(elected(6, 0, 1), mine) is None
    assert opened_since(mine, (*mine, second)) is None


def test_surveys_of_a_lineage() -> None:
    first, later = START, Entry(4, 0, 9, 0, 8, (2,))
    for entries, quiet in (((), 0), ((QUIET,), 1), ((QUIET, EMPTIED), 2), ((QUIET, MERGED), 0), ((MERGED, QUIET), 1)):
        assert quiet_surveys((first, *entries)) == quiet
    assert quiet_surveys((first, QUIET, later, QUIET)) == 1
    assert [shared_length("abc", other) for other in ("", "abc", "abd", "abcd", "xbc")] == [0, 3, 2, 3, 0]


def test_the_electorate_of_a_lineage_is_that_of_its_largest_election_but_for_what_is_folded() -> None:
    assert electorate(()) == 0
    assert electorate((START._replace(voters=3), START._replace(voters=5), START._replace(voters=4))) == 5
    assert electorate(history(LONGEST)) == 9


def test_a_digest_names_the_bits_of_models_in_their_order() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    digests = [digest_of(models) for models in ([], [one], [other], [one, other], [other, one])]
    assert len({*digests}) == 5
    assert all(0 <= digest < 2**48 for digest in digests)
    assert digest_of([torch.tensor([[1.0, 0.0], [2.0, 0.0]])[:, 0]]) == digests[1]


@pytest.mark.parametrize(
    "change",
    [
        {"voters": 5.0},
        {"attempt": True},
        {"root": None},
        {"incarnation": "0"},
        {"digest": 0.5},
        {"slots": [0, 1, 2]},
        {"slots": (0, -1)},
        {"slots": (0, MOST_SLOTS)},
        {"slots": (0, 1.0)},
        {"slots": (0,) * (MOST_SLOTS + 1)},
        {"slots": (), "voters": 0},
        {"merges": [MERGE]},
        {"merges": (MERGE,) * (MOST_SLOTS + 1)},
        {"merges": ((0, 1, 0.5, 0.1),)},
        {"merges": (MERGE._replace(into=-1),)},
        {"merges": (MERGE._replace(closed=MOST_SLOTS),)},
        {"merges": (MERGE._replace(share=1),)},
        {"merges": (MERGE._replace(share=1.5),)},
        {"merges": (MERGE._replace(share=-0.5),)},
        {"merges": (MERGE._replace(worth=float("inf")),)},
        {"merges": (MERGE._replace(worth=0),)},
        {"empty": [1]},
        {"empty": (-1,)},
        {"last": 1},
    ],
)
def test_impossible_entries_of_a_lineage(change: dict[str, Any]) -> None:
    assert is_entry(START)
    assert not is_entry(START._replace(**change))
    assert not is_lineage((START, START._replace(**change)))


def test_possible_entries_and_lineages() -> None:
    for entry in (QUIET, LAST, MERGED, EMPTIED, RENUMBERED, START._replace(slots=(0, MOST_SLOTS - 1), voters=0)):
        assert is_entry(entry)
    for share in (0.0, 1.0):
        assert is_entry(survey(MERGE._replace(share=share), slots=(0, 1)))
    assert is_entry(START._replace(slots=tuple(range(MOST_SLOTS)), merges=(MERGE,) * MOST_SLOTS))
    assert is_lineage((START,) * MOST_ENTRIES)
    assert not is_lineage((START,) * (MOST_ENTRIES + 1))
    assert not is_lineage([START])
    assert not is_entry(tuple(START))


def by_election(number: int) -> Entry:
    return Entry(3, number, 7, 0, number, (number % 3,))


def history(count: int) -> Lineage:
    """Make a lineage of many elections, entry by entry."""
    lineage: Lineage = (Entry(9, 0, 7, 0, 1, (0, 1)),)
    for number in range(count):
        lineage = extended(lineage, by_election(number))
    return lineage


def test_a_long_lineage_is_folded_and_says_the_same_of_its_clusters() -> None:
    assert len(history(LONGEST - 2)) == LONGEST - 1
    folded = history(LONGEST - 1)
    assert len(folded) == 2 + KEPT
    count = LONGEST - 1 - KEPT
    assert folded[1][:4] == (FOLDED, count, 7, 3 * count)
    assert folded[2:] == tuple(by_election(number) for number in range(LONGEST - 1 - KEPT, LONGEST - 1))
    assert layout_of(folded) == Clusters(3)
    assert is_lineage(folded)
    again = history(2 * LONGEST - 3 - KEPT)
    count = 2 * LONGEST - 3 - 2 * KEPT
    assert again[1][:4] == (FOLDED, count, 7, 3 * count)
    assert len(again) == 2 + KEPT
    closing = Entry(3, 0, 7, 0, 0, (0, 1), (Merge(0, 1, 0.5, 0.0),))
    lineage = extended(history(3), closing)
    for number in range(2 * LONGEST):
        lineage = extended(lineage, Entry(3, number, 7, 0, 0, ()))
    assert lineage[1].empty == (1,)
    assert layout_of(lineage) == Clusters(3, (1,))
    assert not lineage[1].is_survey


def test_lineages_are_compared_as_far_as_one_of_them_is_folded() -> None:
    behind, folded = history(LONGEST - 2), history(LONGEST - 1)
    mine = aligned(behind, folded)
    assert mine != behind
    assert same(mine, behind)
    assert same(behind, mine)
    assert not same(folded, behind)
    assert [compatible(folded, behind, (LONGEST - 2 - j) % 3) for j in (0, 1)] == [False, True]  # what came before
    assert folded[: len(mine)] == mine
    assert opened_since(folded, mine) == ((LONGEST - 2) % 3,)
    assert compatible(folded, mine, (LONGEST - 1) % 3)
    assert aligned(folded, behind) == folded
    twice, once = history(3 * LONGEST), history(3 * LONGEST - KEPT + LEFT)
    assert aligned(twice, once) == twice
    assert twice[: len(aligned(once, twice))] == aligned(once, twice)


def test_a_peer_away_for_too_long_has_the_lower_lineage() -> None:
    folded = history(LONGEST - 1)
    for short in (history(0), history(5), history(LONGEST - KEPT + LEFT - 3)):
        assert aligned(short, folded) == short
        assert short < folded
    assert aligned(folded, folded) is folded


def test_an_impossible_entry_of_a_liar_can_be_folded() -> None:
    told = list(history(LONGEST - 2))
    told[5] = Entry(3, 5, 7, 0, 0, (0, 9), (Merge(0, 9, 0.5, 0.0),))  # of a cluster that there is not
    assert aligned(tuple(told), history(LONGEST - 1))[1].slots == (0, 1, 2)


@pytest.mark.parametrize("folds", [1, 2])
def test_a_lineage_is_folded_further_only_if_enough_is_left_of_it(folds: int) -> None:
    first = LONGEST - 1  # elections after which a lineage is folded; `again` more, and it is folded again
    again = LONGEST - 2 - KEPT
    longer = history(first + (folds - 1) * again)
    enough = longer[1].attempt + LEFT
    assert aligned(history(enough - 1), longer) == history(enough - 1)
    assert aligned(history(enough), longer)[1] == longer[1]
    assert len(aligned(history(enough), longer)) == 2 + LEFT


@pytest.mark.parametrize(("voters", "higher"), [(2, False), (4, True)])
def test_of_histories_that_part_inside_a_fold_the_one_with_more_votes_is_higher(voters: int, higher: bool) -> None:
    folded, behind = history(LONGEST - 1), history(LONGEST - 2)
    other = (*behind[:3], *(entry._replace(voters=voters) for entry in behind[3:]))
    assert not same(other, folded)
    assert not compatible(other, folded, 2)
    theirs, mine = aligned(folded, other), aligned(other, folded)
    assert (mine > theirs) is higher
    later = extended(mine, by_election(0))
    assert (later > theirs) is higher
    assert later > mine


def circle() -> tuple[Lineage, Lineage, Lineage]:
    """Return three histories, each higher than the one before, the first higher than the last; only the second is
    folded. Where two that are not folded part, more voters win; of one that is folded, all its votes count."""
    began = history(0)
    low, high = (
        (*began, *(by_election(n)._replace(voters=first if n == 0 else later) for n in range(LONGEST - 2)))
        for first, later in ((3, 1), (2, 5))
    )
    middle = began
    for number in range(LONGEST - 1):
        middle = extended(middle, by_election(number)._replace(voters=2))
    return low, middle, high


def is_higher(one: Lineage, other: Lineage) -> bool:
    return aligned(one, other) > aligned(other, one)


def test_histories_that_are_ordered_in_a_circle_agree_once_they_have_met_the_folded_one() -> None:
    low, middle, high = circle()
    assert is_higher(middle, low)
    assert is_higher(high, middle)
    assert is_higher(low, high)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    for meetings in permutations(pairs):
        held = [low, middle, high]
        for i, j in [*meetings, *pairs]:  # i hears what j holds
            mine = aligned(held[i], held[j])
            held[i] = max(mine, aligned(held[j], mine))
        assert held[0] == held[1] == held[2]
        assert held[0] in (middle, aligned(high, middle))  # high where it was not given up for low before


def test_a_lineage_with_another_first_election_is_not_folded() -> None:
    folded, behind = history(LONGEST - 1), history(LONGEST - 2)
    other = (behind[0]._replace(voters=8), *behind[1:])
    assert aligned(other, folded) == other
    assert other < folded


def test_a_fold_stands_behind_the_first_entry_and_before_many() -> None:
    folded = history(LONGEST - 1)
    assert not is_lineage(folded[1:])
    assert not is_lineage((*folded, folded[1]))
    assert not is_lineage(folded[: 1 + LEFT])
    assert is_lineage(folded[: 2 + LEFT])
    wrong: list[dict[str, Any]] = [{"attempt": 0}, {"attempt": FOLDED + 1}, {"slots": (0, 2)}, {"slots": ()}]
    wrong += [{"empty": (0, 1, 2)}, {"empty": (3,)}, {"empty": (1, 0)}, {"last": True}]  # nothing open; no cluster
    for changes in (*wrong, {"merges": (Merge(0, 1, 0.5, 0.0),)}):
        assert not is_lineage((folded[0], folded[1]._replace(**changes), *folded[2:]))
    assert is_lineage((folded[0], folded[1]._replace(empty=(0, 2)), *folded[2:]))
    assert opened_since(folded, folded[:1]) is None


def test_a_fold_of_a_liar_does_not_grow_beyond_what_messages_hold() -> None:
    folded = history(LONGEST - 1)
    lineage: Lineage = (folded[0], folded[1]._replace(attempt=FOLDED), *folded[2:])
    for number in range(LONGEST):
        lineage = extended(lineage, by_election(number))
    assert len(lineage) < LONGEST
    assert is_lineage(lineage)
