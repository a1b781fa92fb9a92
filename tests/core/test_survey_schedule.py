"""When surveys are held, by hand."""

from __future__ import annotations

import pytest

from dfca.core.method import MergeOptions
from dfca.core.rules.surveys import Schedule, merging_of

OPTIONS = MergeOptions(opens=4, first=10, every=2)


@pytest.mark.parametrize(
    ("rounds", "clusters", "merges"),
    [
        (20, None, True),
        (19, None, False),  # less than half of the rounds would follow the first survey
        (None, None, True),  # a swarm without a last round
        (20, 3, False),
        (None, 1, False),
    ],
)
def test_clusters_are_merged_where_no_number_of_them_is_asked_for(
    rounds: int | None, clusters: int | None, merges: bool
) -> None:
    assert merging_of(OPTIONS, rounds, clusters) == (OPTIONS if merges else None)
    assert merging_of(None, rounds, clusters) is None


def test_surveys_follow_each_other_until_two_merge_nothing() -> None:
    schedule = Schedule(OPTIONS, rounds=40, due=OPTIONS.first)
    assert [now for now in range(40) if schedule.is_due(now)] == [*range(10, 30)]  # in effect by 30
    merged = schedule.after(10, merged=True, alone=(), left=3)
    assert (merged.due, merged.quiet, merged.over) == (12, 0, False)
    quiet = merged.after(12, merged=False, alone=(), left=3)
    assert (quiet.due, quiet.quiet, quiet.over) == (16, 1, False)  # after twice the rounds
    assert quiet.after(16, merged=False, alone=(), left=2).over
    assert not quiet.after(16, merged=False, alone=[1], left=2).over
    assert merged.after(12, merged=True, alone=(), left=1).over  # nothing is left to merge
    assert not merged.after(12, merged=True, alone=(), left=2).over
    assert schedule.after(29, merged=True, alone=(), left=3).over  # the next would come too late
    assert not schedule.after(29, merged=True, alone=(), left=1).is_due(30)


def test_a_by_election_begins_anew_where_there_is_time() -> None:
    over = Schedule(OPTIONS, rounds=40, due=16, quiet=2, over=True)
    assert over.reopened(19) == Schedule(OPTIONS, rounds=40, due=29)
    assert over.reopened(20).over
