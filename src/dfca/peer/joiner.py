"""The models of others: a peer without models, and one whose lineage lost, take over a neighbour's and join its round.

A peer keeps and trains its own models until all that it asked for are here: a neighbour that promises more than it
sends costs nothing but the wait, which ends when the neighbour takes its promise back. Every method that may change
what the peer holds returns what is to be done (`JoinEffect`), None for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from dfca.core.state import is_finite
from dfca.peer.parts import Outbox, Part, PeerView, copy_of, is_silent
from dfca.peer.records.lineage import Clusters, Lineage, aligned, clusters_of, layout_of, opened_since, shared_length
from dfca.peer.records.messages import BankCopy, BankRequest, Declined, Hello
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import KEPT
from dfca.peer.waves.election import Election

LOWER = "of a lower lineage"
"""The problem of a model that is of no use, or was sent before the source took the lineage that is asked for."""


@dataclass
class Pursuit:
    """Models that a peer has asked for."""

    source: int  # the neighbour that was asked
    lineage: Lineage  # of the models
    since: float  # when it was asked, or last answered
    until: float  # how long the next answer is waited for
    needed: tuple[int, ...] | None = None  # the clusters asked for, None: all
    taken: dict[int, BankCopy] = field(default_factory=dict)  # by cluster, what has come
    clusters: int = 0  # how many models the source holds
    round: int = 0  # the round that it is in
    closed: tuple[int, ...] = ()  # the clusters that are closed there

    @property
    def complete(self) -> bool:
        """Whether all models are here."""
        wanted = [j for j in range(self.clusters) if j not in self.closed] if self.needed is None else self.needed
        return self.clusters > 0 and all(j in self.taken for j in wanted)

    def is_taken_back(self, hello: Hello | None) -> bool:
        """Return whether the source says of a later round that its lineage is a lower one: it does not hold these."""
        return hello is not None and hello.round > self.round and aligned(hello.lineage, self.lineage) < self.lineage

    def prolong(self, now: float) -> None:
        """Wait for the next model as long as for this one."""
        self.since, self.until = now, self.until + now - self.since

    def align(self, other: Lineage) -> None:
        """Fold the lineage of the models as far as another one of the same history."""
        self.lineage = aligned(self.lineage, other)

    def models(self) -> list[Tensor]:
        """Return the models, in order; in the places of closed clusters, any."""
        some = next(iter(self.taken.values()))
        return [self.taken.get(j, some).message.model for j in range(self.clusters)]

    def take(self, copy: BankCopy, options: PeerOptions, mine: Lineage | None) -> str | None:
        """Take in a model; return what is wrong with it, if anything. mine: the peer's own lineage, None without
        models.

        Where the source has held another election since, only models of the newer lineage count.
        """
        message, model = copy.message, copy.message.model
        drawn = options.start != "elected" and not copy.lineage
        known = Clusters(options.clusters or 0) if drawn else layout_of(copy.lineage)
        if copy.clusters != known.models or message.cluster >= copy.clusters:
            return "another number of models"
        if model.shape != (options.size,) or model.dtype != options.dtype:
            return "does not fit"
        if not is_finite(model):
            return "not finite"
        if message.sender != self.source:
            return "in another's name"
        if mine is not None and not copy.lineage > mine:
            return LOWER
        self.align(copy.lineage)
        if copy.lineage != self.lineage:
            if copy.lineage < self.lineage:
                return LOWER
            self.lineage, self.taken, self.needed = copy.lineage, {}, opened_since(copy.lineage, mine)
        self.clusters, self.closed, self.round = copy.clusters, known.closed, copy.round
        self.taken[message.cluster] = copy
        return None


MOST_AHEAD = 1000  # a peer joins no round that is further ahead of all that its other neighbours claim
MOST_JOINED = 2**32  # a peer joins no later round, whatever its only neighbour claims
MOST_DOUBLINGS = 10  # the wait for an unreliable neighbour is doubled at most this often


class Pursue(NamedTuple):
    """A neighbour was asked for its models: a peer without any waits for them, and leaves its election."""


class Follow(NamedTuple):
    """Do to one's own models what surveys have decided since."""

    lineage: Lineage


class Extend(NamedTuple):
    """Take the clusters that others have opened since."""

    pursuit: Pursuit
    opened: tuple[int, ...]


class Switch(NamedTuple):
    """Take over all models of a neighbour, and its round."""

    pursuit: Pursuit
    round: int


JoinEffect = Pursue | Follow | Extend | Switch


class Joiner(Part):
    """Asks for the models of neighbours, and hands its own on."""

    NOT_STORED = Part.NOT_STORED | {"highest"}

    def __init__(self, out: Outbox) -> None:
        super().__init__(out)
        self.pursuit: Pursuit | None = None  # models that were asked for
        self.suspects: dict[int, tuple[float, int]] = {}  # by unreliable neighbour: not asked until then; how often
        self.newcomer = True  # it has yet to join its neighbours' round
        self.join_until = 0.0  # how long it waits for a neighbour with models, and for first hellos
        self.highest: Lineage | None = None  # its lineage when it last looked, if no neighbour claimed a higher one

    def begin_waiting(self, at: PeerView) -> None:
        """Begin to wait for a neighbour that has models, and for the neighbours' first hello."""
        self.join_until = at.now + at.options.join_s

    def answer(self, at: PeerView, sender: int, request: BankRequest) -> None:
        """Hand models on; decline without any."""
        if at.bank is None:
            self.out.send(sender, Declined())
            return
        for j in at.open_clusters:
            if request.clusters is None or j in request.clusters:
                self.out.send(sender, BankCopy(copy_of(at, j), at.round, len(at.bank), at.lineage))

    def expects(self, sender: int) -> bool:
        """Return whether a neighbour was asked for its models."""
        return self.pursuit is not None and self.pursuit.source == sender

    def take_in(self, at: PeerView, sender: int, copy: BankCopy) -> JoinEffect | None:
        """Take in one of the models that were asked for."""
        pursuit, message = self.pursuit, copy.message
        assert pursuit is not None
        problem = pursuit.take(copy, at.options, _lineage_of(at))
        if problem is None:
            at.answer_time.observe(at.now - pursuit.since)
            pursuit.prolong(at.now)
            self.out.note("take", sender, message.cluster, message.round)
            return self.adopt(at)
        self.out.refuse(problem, sender, message.cluster)
        news = at.links[sender].learn_lineage(copy.round, copy.lineage, copy.clusters)
        if problem == LOWER and not news:
            return None  # it left before the source took the lineage that was asked for
        self._suspect(at, sender)
        return self.give_up(at)

    def give_up(self, at: PeerView) -> JoinEffect | None:
        """Stop waiting for a source of models, and look for another."""
        self.pursuit = None
        if at.bank is None:
            self.begin_waiting(at)
        return self.seek(at)

    def time_out(self, at: PeerView) -> Pursuit | None:
        """Return what has been waited for too long, and suspect its source."""
        if self.pursuit is None or at.now < self.pursuit.until:
            return None
        self._suspect(at, self.pursuit.source)
        return self.pursuit

    def _suspect(self, at: PeerView, neighbour: int) -> None:
        """Back off exponentially from an unreliable neighbour."""
        times = self._suspected(neighbour)
        self.suspects[neighbour] = (at.now + at.options.hang_s * 2**times, times + 1)

    def _suspected(self, neighbour: int) -> int:
        return min(MOST_DOUBLINGS, self.suspects.get(neighbour, (0.0, 0))[1])

    def forget_strangers(self, neighbours: tuple[int, ...]) -> None:
        """Forget the suspects that are no neighbours any more."""
        self.suspects = {n: suspicion for n, suspicion in self.suspects.items() if n in neighbours}

    # Whom to ask.

    def may_seek(self, at: PeerView) -> bool:
        """Return whether a neighbour may have models to ask for: something has changed since it last looked."""
        return at.bank is None or self.highest != at.lineage

    def seek(self, at: PeerView) -> JoinEffect | None:
        """Ask a neighbour for its models: any where there are none, else those of a higher lineage."""
        if at.rules.exchange != "gossip":
            return None
        pursuit = self.pursuit
        if pursuit is not None and pursuit.is_taken_back(at.links[pursuit.source].hello):
            self._suspect(at, pursuit.source)
            return self.give_up(at)
        best = self._best_source(at)
        if best is None or (pursuit is not None and pursuit.lineage >= best[0]):
            return None
        source, lineage = -best[2], best[0]
        needed = opened_since(lineage, _lineage_of(at))
        if needed == ():
            return self._follow(at, lineage)
        wait = at.answer_time.deadline_s * 2 ** self._suspected(source)
        self.pursuit = Pursuit(source, lineage, at.now, at.now + wait, needed, round=best[1])
        self.out.send(source, BankRequest(needed))
        return Pursue()

    def _best_source(self, at: PeerView) -> tuple[Lineage, int, int] | None:
        """Find the neighbour of the highest lineage: (lineage, round, minus its number)."""
        best: tuple[Lineage, int, int] | None = None
        self.highest = mine = _lineage_of(at)
        for n, known in at.links.items():
            hello = known.hello
            if hello is None:
                continue
            lineage = aligned(hello.lineage, mine or ())  # it may have been folded since
            if mine is not None and lineage <= mine:
                continue
            self.highest = None
            if self._can_serve(at, n, hello):
                offer = (lineage, hello.round, -n)
                best = offer if best is None else max(best, offer)
        return best

    def _can_serve(self, at: PeerView, neighbour: int, hello: Hello) -> bool:
        lineage = hello.lineage
        if not hello.clusters or self.suspects.get(neighbour, (-math.inf, 0))[0] > at.now:
            return False
        if not lineage:
            return True
        if not clusters_of(lineage) or self._has_strange_surveys(at, lineage):
            return False  # it is impossible
        if at.will_take(lineage) or ((wave := at.wave) is not None and wave.will_tell(neighbour, lineage[-1])):
            return False
        return not (at.bank is None and isinstance(wave, Election) and _outvotes(at, wave, lineage))

    def _has_strange_surveys(self, at: PeerView, lineage: Lineage) -> bool:
        """Return whether a lineage differs from the peer's own by surveys, where none are held."""
        if at.bank is None or at.options.method.merging is not None:
            return False
        return any(entry.is_survey for entry in lineage[shared_length(lineage, at.lineage) :])

    # What becomes of it.

    def adopt(self, at: PeerView) -> JoinEffect | None:
        """Take over the models that were asked for, once all are here and no training runs on the bank."""
        pursuit = self.pursuit
        if pursuit is None or not pursuit.complete:
            return None
        pursuit.align(at.lineage)
        opened = opened_since(pursuit.lineage, _lineage_of(at))
        if opened == ():
            return self._follow(at, pursuit.lineage)
        if opened is not None:
            if isinstance(at.job, KEPT):
                return None
            self._end_pursuit(pursuit)
            return Extend(pursuit, opened)
        if pursuit.needed is not None or (at.bank is not None and pursuit.lineage <= at.lineage):
            return self.give_up(at)  # its own lineage has changed since: it lacks the others, or has no use for them
        claims = _claimed_rounds(at, but=pursuit.source)
        self._end_pursuit(pursuit)
        self.newcomer = True
        return Switch(pursuit, max(at.round, _believable(at, [*claims, pursuit.round])))

    def _follow(self, at: PeerView, lineage: Lineage) -> Follow | None:
        """Follow surveys at once, unless a training is under way: then after it."""
        if isinstance(at.job, KEPT):
            return None
        self.pursuit = None
        return Follow(lineage)

    def _end_pursuit(self, pursuit: Pursuit) -> None:
        self.suspects.pop(pursuit.source, None)
        self.pursuit = None

    # The first round.

    def may_begin_alone(self, at: PeerView, has_own: bool) -> bool:
        """Return whether a peer without models has met whom it waits for, or has waited long enough.

        has_own: it has a warmed-up model; while it warms up, it meets its other neighbours.
        """
        if at.now >= self.join_until:
            return True
        if at.options.start != "elected":
            return False
        known = len(at.links) >= (len(at.neighbours) if has_own else 1) and not is_silent(at.links)
        return known or not at.neighbours

    def waits_for_hello(self, at: PeerView) -> bool:
        """Return whether the first round waits for a neighbour's first hello, however long."""
        return self.newcomer and at.bank is not None and is_silent(at.links)

    def is_joining(self, at: PeerView) -> bool:
        """Return whether the first round is to wait for hellos now."""
        return is_silent(at.links) and at.now < self.join_until

    def catch_up(self, at: PeerView) -> int:
        """Return the round that the neighbours are in, or one's own: nothing is left to be joined."""
        self.newcomer = False
        return max(at.round, _believable(at, _claimed_rounds(at)))

    def settle_in(self) -> None:
        """Note that its neighbours' round is its own: they begin together."""
        self.newcomer = False

    def next_timeout(self, at: PeerView, free: bool, ending: bool) -> float:
        """Return when something is no longer waited for; free: no job runs, and no wave; ending: a round ends."""
        due = math.inf if self.pursuit is None else self.pursuit.until
        if self.suspects:
            due = min([due, *(until for until, _ in self.suspects.values() if until > at.now)])
        if free and (self.newcomer or at.bank is None):
            is_alone = at.bank is None and self.pursuit is None
            if is_alone or (not ending and self.waits_for_hello(at)):
                due = min(due, self.join_until)
        return due


def _lineage_of(at: PeerView) -> Lineage | None:
    return None if at.bank is None else at.lineage


def _outvotes(at: PeerView, election: Election, lineage: Lineage) -> bool:
    """Return whether to continue with one's own election rather than take the models of a lineage.

    Also where more peers around here have no models yet than voted for those, or hold them: one that a member held
    alone, while it did not do its part in theirs, is not what they want, and what they elect is the higher lineage.
    Of a root that is not trusted only the neighbours that hold its models count: it may say any number of voters.
    """
    if election.outvotes(lineage[-1]):
        return True
    hellos = [known.hello for known in at.links.values() if known.hello is not None]
    without = 1 + sum(not hello.clusters for hello in hellos)
    holders = sum(hello.lineage[:1] == lineage[:1] for hello in hellos)
    voters = 0 if election.distrusts(lineage[-1]) else lineage[0].voters
    return without > max(voters, holders)


def _claimed_rounds(at: PeerView, but: int | None = None) -> list[int]:
    """List the rounds that the neighbours with models say they are in, but for one neighbour."""
    hellos = [known.hello for n, known in at.links.items() if n != but]
    return [hello.round for hello in hellos if hello is not None and hello.clusters]


def _believable(at: PeerView, rounds: list[int]) -> int:
    """Return the newest of the rounds that neighbours claim: one alone may not be far ahead of all others."""
    *_, second, newest = (-1, -1, *sorted(rounds))
    newest = min(newest, second + MOST_AHEAD if len(rounds) > 1 else MOST_JOINED)
    return min(newest, at.options.rounds - 1)
