"""When surveys of clusters are held (`rules.merging` says what they decide).

The first survey follows `first` rounds of training, the others `every` rounds each; after a survey that merged nothing
and is not the last, twice as many. A survey is the last where it merged nothing and left no cluster alone, where there
is nothing left to merge, or where the next would come after LATEST of the rounds. A by-election begins anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from dfca.core.method import MergeOptions

LATEST = 0.75  # after this share of the rounds no survey is held: the rest trains on all samples


def merging_of(
    options: MergeOptions | None, rounds: int | None, clusters: int | None, clients: int | None = None
) -> MergeOptions | None:
    """Return how clusters are merged in a run: None where they are not, and the verdicts of the election decide.

    Clusters are merged where the algorithm does, where half of the rounds come after the first survey, and where the
    election can open more clusters than are asked for.

    Args:
        options: How the algorithm merges clusters, if it does.
        rounds: How many rounds there are; None: there is no last one.
        clusters: The number of clusters asked for; None: as many as are worth their data.
        clients: How many clients there are; None: it may grow, as in a swarm.
    """
    if options is None or (rounds is not None and rounds < 2 * options.first):
        return None
    opened = options.opens if clients is None else options.opened(clients)
    return None if is_settled(opened, clusters) else options


def is_settled(left: int, clusters: int | None) -> bool:
    """Return whether nothing is left to merge among `left` clusters, of which `clusters` are asked for."""
    return left <= (clusters or 1)


def is_too_late(now: int, rounds: int) -> bool:
    """Return whether no survey is held after `now` of `rounds` rounds."""
    return now > LATEST * rounds


def wait_after(quiet: int, options: MergeOptions) -> int:
    """Return the rounds between a survey, the last of `quiet` in a row that merged nothing, and the next."""
    return 2 * options.every if quiet else options.every


def is_last(now: int, quiet: int, alone: Collection[int], options: MergeOptions, rounds: int) -> bool:
    """Return whether no survey follows one after `now` rounds, the last of `quiet` in a row that merged nothing.

    alone: the unsettled clusters that it left alone.
    """
    return bool(quiet and not alone) or is_too_late(now + wait_after(quiet, options), rounds)


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

    def after(self, now: int, merged: bool, alone: Collection[int], settled: bool) -> Schedule:
        """Return the schedule after a survey that was held after `now` rounds; settled: nothing is left to merge."""
        quiet = 0 if merged else self.quiet + 1
        over = settled or is_last(now, quiet, alone, self.options, self.rounds)
        return replace(self, due=now + wait_after(quiet, self.options), quiet=quiet, over=over)

    def reopened(self, now: int) -> Schedule:
        """Return the schedule after a by-election that opened a cluster after `now` rounds."""
        due = now + self.options.first
        return replace(self, due=due, quiet=0, over=is_too_late(due, self.rounds))
