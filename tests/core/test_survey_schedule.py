"""When surveys are held, by hand."""

from __future__ import annotations

import pytest

from dfca.core.method import MergeOptions
from dfca.core.rules.surveys import Schedule, is_settled, merging_of

OPTIONS = MergeOptions(opens=4, first=10, every=2)


@pytest.mark.parametrize(
    ("rounds", "clusters", "clients", "merges"),
    [
        (20, None, 12, True),
        (19, None, 12, False),  # less than half of the rounds would follow the first survey
        (None, None, None, True),  # a swarm without a last round, of nobody knows how many
        (20, 3, 12, True),
        (20, 3, 9, False),  # nine clients open three clusters, as many as asked for
        (20, 3, None, True),
        (20, 4, None, False),  # no number of clients opens more than four
    ],
)
def test_clusters_are_merged_where_more_can_be_opened_than_asked_for(
    rounds: int | None, clusters: int | None, clients: int | None, merges: bool
) -> None:
    assert merging_of(OPTIONS, rounds, clusters, clients) == (OPTIONS if merges else None)
    assert merging_of(None, rounds, clusters, clients) is None


def test_surveys_follow_each_other_until_two_merge_nothing() -> None:
    schedule = Schedule(OPTIONS, rounds=40, due=OPTIONS.first)
    assert [now for now in range(40) if schedule.is_due(now)] == [*range(10, 30)]  # in effect by 30
    merged = schedule.after(10, merged=True, alone=(), settled=False)
    assert (merged.due, merged.quiet, merged.over) == (12, 0, False)
    quiet = merged.after(12, merged=False, alone=(), settled=False)
    assert (quiet.due, quiet.quiet, quiet.over) == (16, 1, False)  # after twice the rounds
    assert quiet.after(16, merged=False, alone=(), settled=False).over
    assert not quiet.after(16, merged=False, alone=[1], settled=False).over
    assert merged.after(12, merged=True, alone=(), settled=True).over  # nothing is left to merge
    assert schedule.after(29, merged=True, alone=(), settled=False).over  # the next would come too late
    assert not schedule.after(29, merged=True, alone=(), settled=True).is_due(30)


def test_a_by_election_begins_anew_where_there_is_time() -> None:
    over = Schedule(OPTIONS, rounds=40, due=16, quiet=2, over=True)
    assert over.reopened(19) == Schedule(OPTIONS, rounds=40, due=29)
    assert over.reopened(20).over


def test_nothing_is_left_to_merge_at_the_number_asked_for() -> None:
    assert [is_settled(left, 2) for left in (1, 2, 3)] == [True, True, False]
    assert [is_settled(left, None) for left in (1, 2)] == [True, False]
