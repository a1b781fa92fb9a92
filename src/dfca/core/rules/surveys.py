"""When surveys of clusters are held, and when they take effect (`rules.merging` says what they decide).

The first survey begins after `first` rounds of training. It is answered while training continues, and takes effect LAG
rounds after it began; where clients do not move in step, when its result arrives, and no earlier. The next begins
`every` rounds later, after one that merged nothing twice as many. A survey is the last where QUIET in a row have merged
nothing and it left no cluster alone, where there is nothing left to merge, or where the next would take effect after
LATEST of the rounds. A by-election begins anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from dfca.core.method import MergeOptions

LATEST = 0.75  # after this share of the rounds no survey takes effect: the rest trains on all samples
LAG = 1  # rounds from the beginning of a survey, or a by-election, until it takes effect: it is held beside them
QUIET = 2  # surveys in a row that merge nothing before no more are held: the second asks about other pairs


def merging_of(options: MergeOptions | None, rounds: int | None, clusters: int | None) -> MergeOptions | None:
    """Return how clusters are merged in a run: None where they are not, and the election decides alone.

    Clusters are merged where the algorithm does, where half of the rounds (None: they do not end) come after the first
    survey, and where no number of clusters is asked for.
    """
    short = rounds is not None and options is not None and rounds < 2 * options.first
    return None if short or clusters is not None else options


def is_too_late(now: int, rounds: int) -> bool:
    """Return whether a survey that begins after `now` of `rounds` rounds takes effect too late."""
    return now + LAG > LATEST * rounds


def wait_after(quiet: int, options: MergeOptions) -> int:
    """Return the rounds between a survey, the last of `quiet` in a row that merged nothing, and the next."""
    return 2 * options.every if quiet else options.every


def is_last(now: int, quiet: int, alone: Collection[int], options: MergeOptions, rounds: int) -> bool:
    """Return whether no survey follows one that takes effect after `now` rounds.

    quiet: how many in a row have merged nothing, it included; alone: the unsettled clusters that it left alone.
    """
    return (quiet >= QUIET and not alone) or is_too_late(now + wait_after(quiet, options), rounds)


@dataclass(frozen=True)
class Schedule:
    """When the next survey is held, if one is."""

    options: MergeOptions
    rounds: int
    due: int  # rounds after which it is held
    quiet: int = 0  # surveys in a row that merged nothing
    over: bool = False  # none is held until a cluster is opened

    def is_due(self, now: int) -> bool:
        """Return whether a survey is held after `now` rounds."""
        return not self.over and self.due <= now and not is_too_late(now, self.rounds)

    def after(self, now: int, merged: bool, alone: Collection[int], left: int) -> Schedule:
        """Return the schedule after a survey that took effect after `now` rounds; left: the clusters that are open."""
        quiet = 0 if merged else self.quiet + 1
        over = left == 1 or is_last(now, quiet, alone, self.options, self.rounds)
        return replace(self, due=now + wait_after(quiet, self.options), quiet=quiet, over=over)

    def reopened(self, now: int) -> Schedule:
        """Return the schedule after a by-election that opened a cluster after `now` rounds."""
        due = now + self.options.first
        return replace(self, due=due, quiet=0, over=is_too_late(due, self.rounds))
