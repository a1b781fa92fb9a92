"""A peer's part in a survey (`rules.merging`): one question on the spanning tree of a wave (`wave`).

The counts that come up with the wave say how many follow each cluster. Once `quorum` of the peers are between two
rounds, the root sends the `Question` down, with the counts of all. Every peer draws by its own lot whether it observes
(`rules.merging.observes`); others, and those that are in the middle of a round, say which cluster they train, with how
many samples. `Answer`s come up summed, and the root's `Result` goes down: an entry of the lineage, which every peer
carries out on its own models. Part of a network decides nothing: those that voted on the lineage's clusters must be the
half of it, and clusters that nobody seems to follow are closed only where as many are there.

A survey can be done without: the next is some rounds away, and who misses the result finds it in the lineage of its
neighbours. So nobody begins an attempt again. A child that is lost, or silent, is no longer waited for; who loses its
parent, or waits for it in vain, gives up and continues its rounds, and its children with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add as plus
from typing import Any, NamedTuple

from dfca.core.method import MergeOptions
from dfca.core.rules.merging import Observation, Survey, add, count, decide, nothing, observes, unsettled
from dfca.core.rules.surveys import Schedule, is_settled
from dfca.peer.records.lineage import Entry, has_grown, layout_of, quiet_surveys
from dfca.peer.records.messages import Answer, Count, Question, Refuse, Result, Turn
from dfca.peer.records.work import Observe
from dfca.peer.waves.wave import Wave

PATIENCE = 3.0
"""A peer waits this many times longer for its parent, which waits for others, than for its children."""


class Surveyed(NamedTuple):
    """How a survey ended."""

    entry: Entry | None  # of the lineage, None where there is no result


@dataclass
class SurveyWave(Wave):
    """One peer's part in a survey."""

    merging: MergeOptions = field(default_factory=MergeOptions)  # how clusters are merged
    slots: tuple[int, ...] = ()  # the clusters that are open
    follows: int = -1  # the cluster that this peer trains
    samples: int = 0  # with how many samples
    round: int = 0  # how many rounds it has done
    rounds: int = 0  # of how many
    holds_out: bool = True  # it can observe, and is about as fast as others
    unfit: bool = False  # its loss has risen
    ending: bool = False  # it is between the training of a round and its end: it counts itself after that
    paused: bool = False  # it is between two rounds
    work_s: float = 0.0  # how long an observation may take
    missing: set[int] = field(default_factory=set)  # the children whose answer is to come
    observing: bool = False  # its own observation is to come
    said: Survey | None = None  # the sum so far
    outcome: Surveyed | None = None  # how it ended

    def _take(self, sender: int, message: Any, now: float) -> None:
        if isinstance(message, Count) and len(message.followers) == len(self.slots):
            self.strikes.pop((sender, "wave"), None)
            self._take_count(sender, message)
        elif isinstance(message, Refuse):
            self._without(sender, now)
        elif isinstance(message, Question) and sender == self.parent and self.phase == "counted":
            if len(message.followers) == len(self.slots):
                self._ask(message.followers)
        elif isinstance(message, Answer) and sender in self.missing:
            self.strikes.pop((sender, "vote"), None)
            self.missing.discard(sender)
            if self.said is not None and message.survey.slots == self.slots:
                self.said = add(self.said, message.survey)
            self._answers_are_in()
        elif isinstance(message, Result) and sender == self.parent and self.phase == "vote":
            self._end(message.entry)

    def pause(self, round: int, follows: int, samples: int, unfit: bool) -> None:
        """Take in that this peer is between two rounds: from now on it can observe, unless the question has come."""
        self.round, self.unfit = round, unfit
        self.ending, self.paused, self.follows, self.samples = False, True, follows, samples
        self._counted()

    @property
    def _is_ready(self) -> bool:
        return self.paused

    def _counted(self) -> None:
        if not self.ending:
            super()._counted()

    def _count(self) -> Count:
        followers = [int(slot == self.follows) for slot in self.slots]
        for kid in self.kids.values():
            followers = list(map(plus, followers, kid.followers))
        return super()._count()._replace(followers=tuple(min(many, self.most) for many in followers))

    def _opened(self, voters: int, log: tuple[Turn, ...]) -> None:
        """Ask, where enough take part: too few decide nothing."""
        counted = self._count()
        if 2 * counted.size > self._electorate:
            self._ask(counted.followers)
        else:
            self._give_up()

    @property
    def _electorate(self) -> int:
        """How many had a say in the clusters that there are."""
        return max((entry.voters for entry in self.base), default=0)

    def _ask(self, followers: Sequence[int]) -> None:
        self.phase, self.missing, self.said = "vote", self._to_wait_for(self.kids, "vote"), nothing(self.slots)
        for kid in sorted(self.kids):
            self._send(kid, Question(self.key, tuple(followers)))
        known = self.paused and self.holds_out and self.follows in self.slots
        if known and observes(self.seed, self.round, self.id, followers[self.slots.index(self.follows)]):
            self.observing = True
            self.work.append(Observe(self.slots, self.follows, tuple(followers)))
        else:
            self._say(Observation(self.follows, self.samples))

    def observed(self, said: Observation) -> None:
        """Take in what came of this peer's observation; that of an earlier wave is of no use."""
        if self.observing:
            self._say(said)

    def _say(self, said: Observation) -> None:
        if self.said is not None:
            self.observing, self.said = False, add(self.said, count(self.slots, said._replace(unfit=self.unfit)))
            self._answers_are_in()

    def _answers_are_in(self) -> None:
        if self.phase != "vote" or self.missing or self.observing or self.said is None:
            return
        if self.parent is None:
            self._end(self._decide(self.said))
        else:
            self._send(self.parent, Answer(self.key, self.said))

    def _decide(self, said: Survey) -> Entry:
        """Decide what becomes of the clusters: the root does."""
        before, voters, grown = quiet_surveys(self.base), self._count().size, has_grown(self.base)
        alone = unsettled(said, None if grown else self.clusters, before)
        plan = decide(said, self.merging, self.clusters, alone, grown)
        if sum(said.followers) < self._electorate:  # others may follow what nobody here does
            plan = plan._replace(empty=())
        settled = is_settled(len(self.slots) - len(plan.closed), self.clusters)
        schedule = Schedule(self.merging, self.rounds, self.round, before)
        last = schedule.after(self.round, bool(plan.merges), alone, settled).over
        slots = layout_of(self.base).changed_by(plan, last)
        return Entry(voters, self.key.attempt, self.key.root, self.key.incarnation, 0, slots, *plan, last)

    def _end(self, entry: Entry) -> None:
        """Hand the result down, where it can be one."""
        if not entry.is_survey or layout_of(self.base).after(entry) is None:
            self._give_up()
            return
        for kid in sorted(self.kids):
            self._send(kid, Result(self.key, entry))
        self.phase, self.outcome = "done", Surveyed(entry)

    # Losses of neighbours.

    def _give_up(self) -> None:
        self.leave()
        self.phase, self.outcome = "done", Surveyed(None)

    def _again(self, now: float, silent: bool = False) -> None:
        self._give_up()

    def _forget_turn(self) -> None:
        self.missing, self.observing, self.said = set(), False, None

    def _without(self, neighbour: int, now: float) -> None:
        if neighbour == self.parent:
            self._give_up()
            return
        self.pending.discard(neighbour)
        self.kids.pop(neighbour, None)
        if not self.opened:
            self._counted()
        elif neighbour in self.missing:
            self.missing.discard(neighbour)
            self._answers_are_in()

    def _waited_for(self) -> set[int]:
        return set(self.missing) if self.opened else set(self.pending)

    @property
    def _patience_s(self) -> float:
        """How long a silence lasts before this peer continues: the longer the more peers are below it."""
        wait_s = self.answer_time.deadline_s
        if not self.opened:  # it may be the end of a round that is waited for
            wait_s = max(wait_s, self.answer_time.initial_s)
        if self._waited_for():
            wait_s *= 1 + math.log2(max(1, self._count().size))
        elif self.parent is not None:
            wait_s *= PATIENCE * (1 + math.log2(max(1, self._electorate)))
        return wait_s + (self.work_s if self.opened else 0.0)

    def wake(self, now: float) -> None:
        """Stop waiting for those that are silent; where that is the parent, give up."""
        if now < self.next_wake():
            return
        waits = self._waited_for()
        own = self.observing if self.opened else self.ending
        if not waits and own:  # it is this peer itself that takes so long
            self.last_s = now
            return
        self._blame_the_silent()
        self.last_s = now
        if waits:
            self.pending, self.missing = set(), set()
            if self.opened:
                self._answers_are_in()
            else:
                self._counted()
        elif self.parent is None and not self.opened:
            self._opened(self._count().ready, ())
        else:
            self._give_up()

    def _end_turn_without_the_silent(self, now: float) -> bool:
        return False
