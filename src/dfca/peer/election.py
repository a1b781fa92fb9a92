"""A peer's part in an election: a wave that finds out who takes part, then turns on its spanning tree.

**Wave** (echo with extinction). A peer that begins a wave sends `Probe` to all neighbours. Who receives one with a
better key than its own joins: the sender is its parent, and it probes all its other neighbours. A probe with the same
key is the answer of a peer that has another parent. When all neighbours of a peer have answered, it sends its parent
the `Count` of its subtree: peers, and those among them that have warmed up. So the root knows that the wave is
complete. Counts are sent again when they change: a straggler warms up, a child is lost or comes late.

**Turns.** Once `quorum` of its peers have warmed up, the root sends `Open` down the tree. Each turn, the best `Bid`
comes up, `Stand` goes down to the peer that made it, its `Candidate` model crosses each edge of the tree once, `Votes`
come up summed, and the root's `Decision` goes down. Who has not warmed up when turns begin forwards everything and
neither bids nor votes.

**Losses.** A child that is lost is no longer waited for. Who loses its parent, or the child through which a candidate
should have come, begins the next attempt. Decided turns are a log; the longest log wins the root, and a parent sends
its children the `Centre`s that they lack, so that a new attempt costs one turn. Silence ends by a timeout, which every
attempt that ended so doubles for all peers of the wave.

The rules of turns are those of `core.election`; sums are in fixed point, so any tree decides alike, as the synchronous
simulator does in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dfca.core.client import is_finite
from dfca.core.election import ElectionOptions, Tally, Vote, add, bid, cast, count, decide, follows, lot, no_votes
from dfca.peer.deadline import AnswerTime
from dfca.peer.lineage import Entry, Lineage, digest_of
from dfca.peer.messages import (
    Bid,
    Call,
    Candidate,
    Centre,
    Count,
    Decision,
    Key,
    Open,
    Probe,
    Refuse,
    Stand,
    Turn,
    Votes,
)
from dfca.peer.work import Losses, Score, Warm

Phase = Literal["wave", "counted", "opening", "bid", "stand", "vote", "decided", "done"]
NO_WAVE = Key(-1, 0, 0, 0, 0)
"""Less than the key of any wave."""
SILENT = 3
"""After so many attempts, or one that ended in silence, all peers of a wave wait twice as long for the next message."""
MOST_DOUBLINGS = 8
MOST_AHEAD = 1000
"""Nobody joins a wave of an attempt that is further ahead."""
PATIENT = 5
"""From so many silences on a peer goes on without those that it waits for."""
PATIENT_FOR_MODELS = 8
"""The same where models are on their way, which take their time on slow links."""
PASS = Turn(None, False)
"""A turn in which nobody was left that could stand."""


class Standing(NamedTuple):
    """What a log of turns means: who may not stand, rejections in a row, whether the next candidate is accepted anyhow,
    and whether the election is over."""

    barred: frozenset[int]
    misses: int
    forced: bool
    over: bool


def standing(log: Collection[Turn], clusters: int | None, call: Call | None, options: ElectionOptions) -> Standing:
    """Read a log of turns.

    With `clusters` given, an election of a start that had `patience` rejections in a row goes on by bids alone.
    """
    chosen, refused, misses = set[int](), set[int](), 0
    for turn in log:
        if turn.candidate is None:
            if misses >= options.patience:
                return Standing(frozenset(), misses, False, True)  # nobody is left at all
            misses = options.patience
        elif turn.accepted:
            chosen.add(turn.candidate)
            misses = misses if misses >= options.patience else 0
        else:
            refused.add(turn.candidate)
            misses += 1
    finds = clusters is None or call is not None
    if call is None:
        most = options.most if clusters is None else clusters
    else:
        most = len(call.lost) + max(0, options.most - call.clusters)
    tired = misses >= options.patience
    over = len(chosen) >= most or (tired and finds)
    barred = chosen if tired and not finds else chosen | refused
    return Standing(frozenset(barred), misses, tired and not finds, over)


class Outcome(NamedTuple):
    """What an election decided: the lineage that it extended, its entry, and the models that it opened, by cluster."""

    base: Lineage
    entry: Entry | None
    opened: tuple[tuple[int, Tensor], ...]
    call: Call | None
    voted: bool


@dataclass
class Election:
    """One peer's part in an election. `out` and `work` are what it wants sent and done; the peer drains them.

    base: the lineage that it extends; held: the peer's models (k, P) in a by-election; alarmed: whether none of them
    fits it. links: the neighbours in reach. kids: by child, what its subtree counts; pending: the neighbours that have
    not answered the probe; missing: the children whose bid or votes are still to come. bid_losses, vote_losses: of the
    centres so far, on the parts of the samples that bid and vote. last_s: when the last message of the wave came;
    since_s: when the part of the turn began that goes on: how long it takes is learned (`answer_time`, the peer's).
    """

    id: int
    seed: int
    incarnation: int
    clusters: int | None
    options: ElectionOptions
    quorum: float
    answer_time: AnswerTime
    size: int
    dtype: torch.dtype
    base: Lineage
    call: Call | None = None
    held: Tensor | None = None
    alarmed: bool = False
    stage: int | None = None
    links: set[int] = field(default_factory=set)
    key: Key = NO_WAVE
    parent: int | None = None
    kids: dict[int, Count] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    sent: tuple[int, int] | None = None
    phase: Phase = "wave"
    voters: int = 0
    votes: bool = False
    warm: Warm | None = None
    log: list[Turn] = field(default_factory=list)
    centres: list[Tensor] = field(default_factory=list)
    bid_losses: Tensor | None = None
    vote_losses: Tensor | None = None
    missing: set[int] = field(default_factory=set)
    best: tuple[float, int] | None = None
    route: int | None = None
    bid_made: bool = False
    candidate: Candidate | None = None
    tally: Tally | None = None
    on_candidate: Losses | None = None
    scoring: Score | None = None
    outcome: Outcome | None = None
    last_s: float = 0.0
    since_s: float = 0.0
    early: dict[int, Bid | Votes] = field(default_factory=dict)
    entered: int = 0
    silences: int = 0
    blamed: set[int] = field(default_factory=set)
    banned: set[int] = field(default_factory=set)
    out: list[tuple[int, Any]] = field(default_factory=list)
    work: list[Score] = field(default_factory=list)

    # The wave.

    def begin(self, now: float, attempt: int = 0) -> None:
        """Begin a wave of one's own."""
        self._forget_what_never_came()
        own = Key(attempt, len(self.log), -lot(self.seed, self.id), self.id, self.incarnation)
        self._enter(own, None, self.call, now)

    def receive(self, sender: int, message: Any, now: float) -> None:
        """Take in a message of the election that is well formed; one that does not fit is ignored."""
        if self.phase == "done":
            return
        if isinstance(message, Probe):
            if message.key > self.key and (
                sender in self.banned or message.key.attempt > max(0, self.key.attempt) + MOST_AHEAD
            ):
                self._send(sender, Refuse(message.key))
                self.pending.discard(sender)
                self._counted()
            elif message.key > self.key:
                self._enter(message.key, sender, message.call, now)
            elif message.key == self.key:
                self.last_s = now
                self.pending.discard(sender)
                self._counted()
            return
        if message.key != self.key:
            return
        self.last_s = now
        if isinstance(message, Count):
            self._take_count(sender, message)
        elif isinstance(message, Refuse):
            self._without(sender, now)
        elif sender == self.parent and isinstance(message, Open) and self.phase == "counted":
            if self._is_possible(message.log):
                self._opened(message.voters, message.log)
        elif sender == self.parent and isinstance(message, Centre):
            self._take_centre(message)
        elif isinstance(message, Bid) and self.phase == "bid" and message.turn == len(self.log):
            self._take_bid(sender, message)
        elif sender == self.parent and isinstance(message, Stand) and message.turn == len(self.log):
            self._stand(message.candidate, now)
        elif isinstance(message, Candidate) and message.turn == len(self.log) and self.phase in ("bid", "stand"):
            if sender == self.parent or sender in self.kids:
                self._take_candidate(message, sender)
        elif isinstance(message, Votes) and self.phase == "vote" and message.turn == len(self.log):
            self._take_votes(sender, message.tally)
        elif sender == self.parent and isinstance(message, Decision) and message.turn == len(self.log):
            turn = message.outcome
            voted = self.candidate is not None and turn.candidate == self.candidate.candidate and self._is_next(turn)
            if turn == PASS if self.phase in ("bid", "opening") else self.phase == "vote" and voted:
                self._decided(message.outcome, message.done)
        elif isinstance(message, Bid | Votes) and sender in self.kids and message.turn == len(self.log):
            self.early[sender] = message  # it has overtaken a model that is on its way here

    def _take_early(self) -> None:
        """Take in what overtook the model that this peer had to wait for."""
        early, self.early = self.early, {}
        for sender, message in sorted(early.items(), key=itemgetter(0)):
            self.receive(sender, message, self.last_s)

    def _enter(self, key: Key, parent: int | None, call: Call | None, now: float) -> None:
        """Join a wave: forget the tree before, keep what was decided."""
        self._forget_what_never_came()
        self.key, self.parent, self.call = key, parent, call
        self.kids, self.sent, self.candidate, self.voters = {}, None, None, 0
        self.early = {}
        self.phase, self.last_s = "wave", now
        self.entered += 1
        self.pending = self.links - {parent} - self.banned
        for neighbour in sorted(self.pending):
            self._send(neighbour, Probe(key, self.base, call))
        self._counted()

    def _forget_what_never_came(self) -> None:
        """Keep the turns whose centres are here: the others are somebody else's to know."""
        accepted = 0
        for place, turn in enumerate(self.log):
            accepted += turn.accepted
            if accepted > len(self.centres):
                del self.log[place:]
                return

    def _take_count(self, sender: int, message: Count) -> None:
        if self.phase not in ("wave", "counted") or sender not in self.links or sender == self.parent:
            return
        if sender in self.banned:
            return
        self.pending.discard(sender)
        self.kids[sender] = message
        self._counted()

    def _counted(self) -> None:
        """Send the count of the subtree to the parent where it is complete and new; the root sees whether to open."""
        if self.phase not in ("wave", "counted") or self.pending:
            return
        self.phase = "counted"
        size = 1 + sum(kid.size for kid in self.kids.values())
        ready = int(self.warm is not None) + sum(kid.ready for kid in self.kids.values())
        if self.parent is None:
            if ready >= max(1, math.ceil(self.quorum * size - 1e-9)):
                self._opened(ready, tuple(self.log))
        elif (size, ready) != self.sent:
            self.sent = (size, ready)
            self._send(self.parent, Count(self.key, size, ready, tuple(self.log)))

    def is_held_by(self, entry: Entry) -> bool:
        """Return whether an entry of a lineage is what comes of this wave."""
        return (entry.attempt, entry.root, entry.incarnation) == (self.key.attempt, self.key.root, self.key.incarnation)

    def warmed(self, warm: Warm) -> None:
        """Take in one's own warmed-up model: from now on one can stand and vote, unless turns have begun."""
        if self.phase in ("wave", "counted"):
            self.warm = warm
            self._counted()

    @property
    def opened(self) -> bool:
        """Whether turns have begun: too late to warm up."""
        return self.phase not in ("wave", "counted")

    # Turns.

    def _opened(self, voters: int, log: tuple[Turn, ...]) -> None:
        held = 0 if self.held is None else len(self.held)
        fits = held == (0 if self.call is None else self.call.clusters)
        self.voters, self.votes = voters, self.warm is not None and fits
        known = _agreed(self.log, log)
        if known < len(self.log):  # another part of the network decided more
            kept = sum(turn.accepted for turn in self.log[:known])
            self.centres = self.centres[:kept]
            self.bid_losses = self.vote_losses = None
        self.log = list(log)
        self.phase = "opening"
        self._open_kids()
        self._check_centres()

    def _open_kids(self) -> None:
        """Send the children what they lack of the log, and open."""
        accepted = [turn for turn in self.log if turn.accepted]
        for kid, counted in sorted(self.kids.items()):
            known = sum(turn.accepted for turn in self.log[: _agreed(counted.log, self.log)])
            for place in range(known, min(len(accepted), len(self.centres))):
                name = accepted[place].candidate
                assert name is not None
                self._send(kid, Centre(self.key, place, name, self.centres[place]))
            self._send(kid, Open(self.key, self.voters, tuple(self.log)))

    def _take_centre(self, message: Centre) -> None:
        """Keep the model of a centre that was accepted earlier, and hand it on."""
        if message.place != len(self.centres) or not self._fits(message.model):
            return
        self.centres.append(message.model)
        if self.phase == "opening":
            for kid, counted in sorted(self.kids.items()):
                if sum(turn.accepted for turn in self.log[: _agreed(counted.log, self.log)]) <= message.place:
                    self._send(kid, message)
            self._check_centres()

    def _fits(self, model: Tensor) -> bool:
        return model.shape == (self.size,) and model.dtype == self.dtype and is_finite(model)

    def _check_centres(self) -> None:
        """Begin the turn once the models of all centres are there."""
        if len(self.centres) >= sum(turn.accepted for turn in self.log):
            self._begin_turn()
            self._take_early()

    @property
    def _standing(self) -> Standing:
        return standing(self.log, self.clusters, self.call, self.options)

    @property
    def _models(self) -> list[Tensor]:
        """The centres as a whole: those that were held before, and those that were accepted."""
        return [*(self.held if self.held is not None else ()), *self.centres]

    @property
    def _centre_count(self) -> int:
        return (0 if self.call is None else self.call.clusters) + len(self.centres)

    @property
    def _may_stand(self) -> bool:
        return self.votes and (self.call is None or bool(self.call.lost) or self.alarmed)

    def _begin_turn(self) -> None:
        self.phase, self.best, self.route, self.bid_made = "bid", None, None, False
        self.since_s = self.last_s
        self.candidate, self.on_candidate = None, None
        self.missing = set(self.kids)
        if self.parent is None and self._standing.over:
            self._decided(PASS, done=True)
            return
        self._bid()

    def _bid(self) -> None:
        """Make one's own bid: by lot for the first centre, else by regret, as soon as the centres' losses are known."""
        barred = self.id in self._standing.barred or not self._may_stand
        models = self._models
        if self.votes and models:
            known = 0 if self.bid_losses is None else len(self.bid_losses)
            if known < len(models):
                self._score(torch.stack(models[known:]))
                return
        if not barred:
            assert self.warm is not None
            if not models:
                value = -float(lot(self.seed, self.id))
            else:
                assert self.bid_losses is not None
                value = bid(self.bid_losses, self.warm.losses.bid[0])
            if self.best is None or (value, -self.id) > self.best:
                self.best, self.route = (value, -self.id), self.id
        self.bid_made = True
        self._bids_are_in()

    def _take_bid(self, sender: int, message: Bid) -> None:
        if sender not in self.missing:
            return
        self.missing.discard(sender)
        if message.candidate is not None and (self.best is None or (message.value, -message.candidate) > self.best):
            self.best, self.route = (float(message.value), -message.candidate), sender
        self._bids_are_in()

    def _bids_are_in(self) -> None:
        if self.phase != "bid" or self.missing or not self.bid_made:
            return
        if self.parent is not None:
            value, name = (0.0, None) if self.best is None else (self.best[0], -self.best[1])
            self._send(self.parent, Bid(self.key, len(self.log), value, name))
        elif self.best is None:
            done = standing([*self.log, PASS], self.clusters, self.call, self.options).over
            self._decided(PASS, done)
        else:
            self._stand(-self.best[1], self.last_s)

    def _stand(self, candidate: int, now: float) -> None:
        """Hand the call to stand down to who made the best bid; stand, if it is oneself."""
        if self.phase != "bid" or self.best is None or -self.best[1] != candidate:
            return
        if candidate == self.id:
            assert self.warm is not None
            gain = 0.0
            if self.bid_losses is not None:
                best = self.bid_losses[follows(self.bid_losses)]
                gain = float(best.mean()) - float(self.warm.losses.bid[0].mean())
            gain = gain if math.isfinite(gain) else 0.0
            self._take_candidate(Candidate(self.key, len(self.log), self.id, gain, self.warm.model), None)
        elif self.route in self.kids:
            self.phase = "stand"
            self._send(self.route, Stand(self.key, len(self.log), candidate))
        else:
            self._again(now)

    def _take_candidate(self, message: Candidate, sender: int | None) -> None:
        """Hand a candidate's model on along the tree, and vote on it."""
        if not self._fits(message.model):
            return
        self.candidate, self.phase = message, "vote"
        self._learn_answer_time()
        tree = {*self.kids, *(() if self.parent is None else (self.parent,))}
        for neighbour in sorted(tree - {sender}):
            self._send(neighbour, message)
        self.missing, self.tally = set(self.kids), no_votes(self._centre_count)
        if self.votes:
            self._score(message.model[None])
        else:
            self.on_candidate = None
            self._votes_are_in()
        self._take_early()

    def _take_votes(self, sender: int, tally: Tally) -> None:
        if sender not in self.missing or self.tally is None or len(tally.totals) != len(self.tally.totals):
            return
        self.missing.discard(sender)
        self.tally = add(self.tally, tally)
        self._votes_are_in()

    def _votes_are_in(self) -> None:
        if self.phase != "vote" or self.missing or self.scoring is not None:
            return
        assert self.tally is not None
        assert self.candidate is not None
        if self.parent is not None:
            self._send(self.parent, Votes(self.key, len(self.log), self.tally))
            return
        now = self._standing
        first = not self._centre_count
        found = decide(self.tally, self.candidate.gain, self.options, 0 if self.call is None else self.call.clusters)
        turn = Turn(self.candidate.candidate, first or now.forced or found.accepted)
        if turn.accepted:
            turn = turn._replace(slot=self._slot(self.tally))
        done = standing([*self.log, turn], self.clusters, self.call, self.options).over
        self._decided(turn, done)

    def _is_possible(self, log: tuple[Turn, ...]) -> bool:
        """Return whether an election could have decided this."""
        return all(self._is_next(turn, log[:place]) for place, turn in enumerate(log))

    def _is_next(self, turn: Turn, before: Collection[Turn] | None = None) -> bool:
        """Return whether a turn can follow others: where it opens a cluster, it is one that may be opened."""
        taken = [each.slot for each in (self.log if before is None else before) if each.accepted]
        if not turn.accepted or self.call is None:
            return turn.slot == (len(taken) if turn.accepted else -1)
        free = [j for j in self.call.lost if j not in taken]
        return turn.slot in free or turn.slot == max([self.call.clusters - 1, *taken]) + 1

    def _slot(self, tally: Tally) -> int:
        """Choose the cluster that an accepted candidate opens: a lost one that nobody follows, else a new one."""
        if self.call is None:
            return len(self.centres)
        taken = [turn.slot for turn in self.log if turn.accepted]
        free = [j for j in self.call.lost if j not in taken and j < len(tally.followers) and not tally.followers[j]]
        if free:
            return free[0]
        return max([self.call.clusters - 1, *taken]) + 1

    def _learn_answer_time(self) -> None:
        """Take in how long bids took to become a candidate, or votes a decision."""
        if self.kids or self.parent is not None:
            self.answer_time.observe(self.last_s - self.since_s)
        self.since_s = self.last_s

    def _decided(self, turn: Turn, done: bool) -> None:
        """Hand the decision of a turn down, and go on to the next, or end."""
        for kid in sorted(self.kids):
            self._send(kid, Decision(self.key, len(self.log), turn, done))
        if self.phase == "vote":
            self._learn_answer_time()
        self.log.append(turn)
        if turn.accepted:
            assert self.candidate is not None
            self.centres.append(self.candidate.model)
            if self.votes and self.on_candidate is not None:
                self.bid_losses = _join(self.bid_losses, self.on_candidate.bid)
                self.vote_losses = _join(self.vote_losses, self.on_candidate.vote)
        if done:
            self._end()
        else:
            self._begin_turn()

    def _end(self) -> None:
        self.phase = "done"
        slots = [turn.slot for turn in self.log if turn.accepted]
        opened = tuple(zip(slots, self.centres, strict=False))
        entry = Entry(
            self.voters, self.key.attempt, self.key.root, self.key.incarnation, digest_of(self.centres), tuple(slots)
        )
        self.outcome = Outcome(self.base, entry if slots else None, opened, self.call, self.votes)

    # Scores.

    def _score(self, models: Tensor) -> None:
        self.scoring = Score(models, self.stage)
        self.work.append(self.scoring)

    def scored(self, job: Score, losses: Losses) -> None:
        """Take in the losses that were asked for; those of an earlier wave are of no use."""
        if job is not self.scoring:
            return
        self.scoring = None
        if self.phase == "bid":
            self.bid_losses, self.vote_losses = _join(self.bid_losses, losses.bid), _join(self.vote_losses, losses.vote)
            self._bid()
        elif self.phase == "vote":
            assert self.candidate is not None
            assert self.tally is not None
            self.on_candidate = losses
            self.tally = add(self.tally, self._vote(losses))
            self._votes_are_in()

    def _vote(self, losses: Losses) -> Tally:
        assert self.warm is not None
        assert self.candidate is not None
        if self.bid_losses is None or self.vote_losses is None:
            return no_votes(self._centre_count)._replace(voters=1)
        vote: Vote = cast(self.bid_losses, self.warm.losses.bid[0], losses.bid[0], self.vote_losses, losses.vote[0])
        return count(vote, self.candidate.gain)

    # Losses of neighbours, and silence.

    def gained(self, neighbour: int) -> None:
        """Ask a neighbour that came into reach to join."""
        self.links.add(neighbour)
        if self.phase in ("wave", "counted"):
            self._send(neighbour, Probe(self.key, self.base, self.call))

    def lost(self, neighbour: int, now: float) -> None:
        """Go on without a neighbour that is out of reach."""
        self.links.discard(neighbour)
        if self.phase != "done":
            self._without(neighbour, now)

    def _without(self, neighbour: int, now: float) -> None:
        """Go on without a neighbour that takes no part, or no longer; the next attempt asks it again."""
        if neighbour == self.parent:
            self._again(now)
            return
        self.pending.discard(neighbour)
        was_child = self.kids.pop(neighbour, None) is not None
        if self.phase in ("wave", "counted"):
            self._counted()
        elif was_child and self.phase == "stand" and self.route == neighbour:
            self._again(now)
        elif was_child and neighbour in self.missing:
            self.missing.discard(neighbour)
            if self.route == neighbour:
                self._again(now)  # its bid may be the best one
            elif self.phase == "bid":
                self._bids_are_in()
            else:
                self._votes_are_in()
        elif was_child and self.phase == "bid" and self.route == neighbour:
            self._again(now)

    def _again(self, now: float, silent: bool = False) -> None:
        """Begin the next attempt with what was decided; after a silence, one in which everybody waits twice as long."""
        self.scoring = None
        attempt = self.key.attempt
        self.begin(now, (attempt // SILENT + 1) * SILENT if silent else attempt + 1)

    def next_wake(self) -> float:
        """Return when silence has lasted too long; also of a root that waits for warm-ups: a count may be wrong."""
        if self.phase == "done":
            return math.inf
        wait_s = self.answer_time.deadline_s
        if not self.opened:  # it may be a warm-up that is waited for
            wait_s = max(wait_s, self.answer_time.initial_s)
        # What one has seen oneself counts too: anybody can claim an attempt.
        return self.last_s + wait_s * 2.0 ** min(MOST_DOUBLINGS, self.key.attempt // SILENT, self.entered)

    def wake(self, now: float) -> None:
        """Begin again after too long a silence; after several, go on without the silent."""
        if now < self.next_wake():
            return
        self.silences += 1
        if self.silences < PATIENT or not self._go_on_without_the_silent(now):
            self._again(now, silent=True)

    def _go_on_without_the_silent(self, now: float) -> bool:
        """Stop waiting for neighbours that are silent again and again, as for lost ones; return whether that
        was enough. One peer that says nothing, or counts what is not there, would stop all others for ever."""
        if self.phase == "wave" and self.pending:
            self.pending, self.last_s = set(), now
            self._counted()
            return True
        if self.phase == "counted" and self.parent is None:
            ready = int(self.warm is not None) + sum(kid.ready for kid in self.kids.values())
            if ready:
                self.last_s = now
                self._opened(ready, tuple(self.log))
            return bool(ready)
        if self.silences < PATIENT_FOR_MODELS:
            return False
        if self.phase in ("bid", "vote") and self.missing:
            attempt, self.last_s = self.key.attempt, now
            for kid in sorted(self.missing):
                if self.key.attempt == attempt:
                    self._without(kid, now)
            return True
        silent = self.route if self.phase == "stand" else self.parent
        if silent is not None and silent != self.id:
            if silent in self.blamed or silent == self.key.root:
                self.banned.add(silent)
            self.blamed.add(silent)
        return False

    def leave(self) -> None:
        """Notify the neighbours of the tree that this peer takes no part any more."""
        tree = {*self.kids, *self.pending, *(() if self.parent is None else (self.parent,))}
        for neighbour in sorted(tree & self.links):
            self._send(neighbour, Refuse(self.key))

    def _send(self, neighbour: int, message: Any) -> None:
        self.out.append((neighbour, message))


def _agreed(mine: Collection[Turn], theirs: Collection[Turn]) -> int:
    """Count the turns that two logs have in common."""
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return place
    return min(len(mine), len(theirs))


def _join(known: Tensor | None, more: Tensor) -> Tensor:
    return more if known is None else torch.cat([known, more])
