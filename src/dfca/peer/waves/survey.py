"""A peer's part in a survey (`rules.merging`): a poll and one question on the spanning tree of a wave (`wave`).

Rounds continue meanwhile. The counts that come up with the wave sum up the poll: whom everybody follows, and the losses
that it last chose by. The root pairs the clusters and sends the `Question` down. Every follower of a cluster with a
partner draws by its own lot whether it observes (`rules.merging.observes`). `Answer`s come up summed, and the root's
`Result` goes down: an entry of the lineage, which every peer carries out on its own models. Part of a network decides
nothing: those that voted on the lineage's clusters must be the half of it, and clusters that nobody seems to follow are
closed only where as many are there.

A survey can be done without: the next is some rounds away, and who misses the result finds it in the lineage of its
neighbours. So nobody begins an attempt again. A child that is lost, or silent, is no longer waited for; who loses its
parent, or waits for it in vain, gives up, and its children with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dfca.core.method import MergeOptions
from dfca.core.rules.merging import (
    NOBODY,
    Observation,
    Opinion,
    Poll,
    Survey,
    add,
    count,
    decide,
    observes,
    pair_up,
    poll,
    share_of,
    total,
    unsettled,
)
from dfca.core.rules.surveys import LAG, Schedule
from dfca.peer.records.lineage import Entry, electorate, layout_of, quiet_surveys
from dfca.peer.records.messages import Answer, Count, Question, Refuse, Result, Turn
from dfca.peer.waves.wave import Wave

PATIENCE = 3.0
"""A peer waits this many times longer for its parent, which waits for others, than for its children."""


class Pair(NamedTuple):
    """What a peer is asked to observe: the cluster that it follows, its partner, and the partner's weight."""

    follows: int
    partner: int
    share: float


@dataclass
class SurveyWave(Wave):
    """One peer's part in a survey."""

    merging: MergeOptions = field(default_factory=MergeOptions)  # how clusters are merged
    slots: tuple[int, ...] = ()  # the clusters that are open
    opinion: Opinion | None = None  # what this peer says in the poll; None: later, after the round that it is ending
    round: int = 0  # how many rounds it has done
    rounds: int = 0  # of how many
    holds_out: bool = True  # it can observe
    work_s: float = 0.0  # how long an observation may take
    polled: Poll | None = None  # at the root, what all said
    partners: tuple[int, ...] = ()  # of the clusters
    missing: set[int] = field(default_factory=set)  # the children whose answer is to come
    observing: Pair | None = None  # its own observation, which is to come
    said: Survey | None = None  # the sum so far
    outcome: Entry | None = None  # of the lineage, once it has ended with a result

    def _take(self, sender: int, message: Any, now: float) -> None:
        if isinstance(message, Count):
            self.strikes.pop((sender, "wave"), None)
            self._take_count(sender, message)
        elif isinstance(message, Refuse):
            self._without(sender, now)
        elif isinstance(message, Question) and sender == self.parent and self.phase == "counted":
            if len(message.followers) == len(self.slots):
                self._ask(message.followers, message.partners)
        elif isinstance(message, Answer) and sender in self.missing:
            self.strikes.pop((sender, "vote"), None)
            self.missing.discard(sender)
            if self.said is not None and message.survey.slots == self.slots:
                self.said = add(self.said, message.survey)
            self._answers_are_in()
        elif isinstance(message, Result) and sender == self.parent and self.phase == "vote":
            self._end(message.entry)

    def say(self, round: int, opinion: Opinion) -> None:
        """Take in what this peer says, after the round that it was ending."""
        if self.opinion is None:
            self.round, self.opinion = round, opinion
            self._counted()

    @property
    def _is_ready(self) -> bool:
        return self.opinion is not None

    def _counted(self) -> None:
        if self.opinion is not None:
            super()._counted()

    def _count(self) -> Count:
        polled = poll(self.slots, () if self.opinion is None else (self.opinion,))
        for kid in self.kids.values():
            if kid.poll is not None and kid.poll.slots == self.slots and max(kid.poll.followers) <= self.most:
                polled = add(polled, kid.poll)
        return super()._count()._replace(poll=polled)

    def _opened(self, voters: int, log: tuple[Turn, ...]) -> None:
        """Ask, where enough take part: too few decide nothing."""
        counted = self._count()
        if 2 * counted.size <= electorate(self.base) or counted.poll is None:
            self._give_up()
            return
        self.polled = counted.poll
        quiet = quiet_surveys(self.base)
        self._ask(self.polled.followers, pair_up(self.polled, unsettled(self.polled, quiet), quiet))

    def _ask(self, followers: Sequence[int], partners: Sequence[int]) -> None:
        self.phase, self.missing = "vote", self._to_wait_for(self.kids, "vote")
        self.partners, self.said = tuple(partners), total(self.slots, ())
        for kid in sorted(self.kids):
            self._send(kid, Question(self.key, tuple(followers), self.partners))
        self.observing = self._pair(followers)
        self._answers_are_in()

    def _pair(self, followers: Sequence[int]) -> Pair | None:
        """Return what this peer is to observe, if its lot says so."""
        follows = NOBODY if self.opinion is None else self.opinion.follows
        if follows not in self.slots or not self.holds_out:
            return None
        place = self.slots.index(follows)
        partner, many = self.partners[place], followers[place]
        if partner not in self.slots or partner == follows or not observes(self.seed, self.round, self.id, many):
            return None
        return Pair(follows, partner, share_of(many, followers[self.slots.index(partner)]))

    def observed(self, judged: tuple[tuple[float, ...], float] | None) -> None:
        """Take in what came of this peer's observation."""
        if self.observing is not None and self.said is not None:
            if judged is not None:
                self.said = add(self.said, count(self.slots, Observation(self.observing.follows, *judged)))
            self.observing = None
            self._answers_are_in()

    def _answers_are_in(self) -> None:
        if self.phase != "vote" or self.missing or self.observing is not None or self.said is None:
            return
        if self.parent is not None:
            self._send(self.parent, Answer(self.key, self.said))
        elif self.polled is not None:
            self._end(self._decide(self.polled, self.said))

    def _decide(self, polled: Poll, said: Survey) -> Entry:
        """Decide what becomes of the clusters: the root does."""
        plan = decide(polled, said, self.partners, self.merging)
        if sum(polled.followers) < electorate(self.base):  # others may follow what nobody here does
            plan = plan._replace(empty=())
        effect, quiet = self.round + LAG, quiet_surveys(self.base)
        schedule = Schedule(self.merging, self.rounds, effect, quiet)
        left = len(self.slots) - len(plan.closed)
        last = schedule.after(effect, bool(plan.merges), unsettled(polled, quiet), left).over
        slots = layout_of(self.base).changed_by(plan, last)
        voters = super()._count().size
        return Entry(voters, self.key.attempt, self.key.root, self.key.incarnation, 0, slots, *plan, last)

    def _end(self, entry: Entry) -> None:
        """Hand the result down, where it can be one."""
        if not entry.is_survey or layout_of(self.base).after(entry) is None:
            self._give_up()
            return
        for kid in sorted(self.kids):
            self._send(kid, Result(self.key, entry))
        self.phase, self.outcome = "done", entry

    # Losses of neighbours.

    def _give_up(self) -> None:
        self.leave()
        self.phase = "done"

    def _again(self, now: float, silent: bool = False) -> None:
        self._give_up()

    def _forget_turn(self) -> None:
        self.missing, self.observing, self.said = set(), None, None

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
            wait_s *= 1 + math.log2(max(1, super()._count().size))
        elif self.parent is not None:
            wait_s *= PATIENCE * (1 + math.log2(max(1, electorate(self.base))))
        return wait_s + (self.work_s if self.opened else 0.0)

    def wake(self, now: float) -> None:
        """Stop waiting for those that are silent; where that is the parent, give up."""
        if now < self.next_wake():
            return
        waits = self._waited_for()
        own = self.observing is not None if self.opened else self.opinion is None
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
