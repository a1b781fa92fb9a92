"""A peer's part in an election: turns on the spanning tree of a wave (`wave`).

**Turns.** The root sends `Open` down the tree. In the election of a start its own model follows: the first centre,
which nobody votes on. Each turn, the best `Bid` comes up, `Stand` goes down to the peer that made it, its `Candidate`
model crosses each edge of the tree once, `Votes` come up summed, and the root's `Decision` goes down. A peer that has
not warmed up when turns begin forwards everything, and neither bids nor votes.

**Losses.** A child that is lost is no longer waited for. A peer that loses its parent, or the child through which a
candidate should have come, begins the next attempt; where few are below it, the others continue without them. Decided
turns are a log; the longest log wins the root, and a parent sends its children the `Centre`s that they lack, so that a
new attempt costs one turn.

The rules of turns are those of `rules.election`; sums are in fixed point, so any tree decides alike, as the synchronous
simulator does in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.core.method import ElectionOptions, MergeOptions
from dfca.core.rules import turns as rules
from dfca.core.rules.election import Tally, Vote, add, bid, cast, count, decide, follows, is_sayable, lot, no_votes
from dfca.core.rules.turns import Standing, call_seats, next_slot, start_seats, unasked
from dfca.core.state import is_finite
from dfca.peer.records import messages as m
from dfca.peer.records.lineage import Entry, Lineage, digest_of, electorate, shared_length
from dfca.peer.records.work import Losses, Score
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.wave import Wave

PASS = m.Turn(None, False)  # a turn in which nobody was left that could stand
PATIENT_FOR_MODELS = 8  # after this many silences a peer stops waiting for others in a turn: models take their time


class Outcome(NamedTuple):
    """What an election decided."""

    base: Lineage  # the lineage that it extended
    entry: Entry | None  # its entry there, None where nothing was opened
    opened: tuple[tuple[int, Tensor], ...]  # by cluster, the models that it opened
    call: m.Call | None  # what it was called for, None: a start
    voted: bool  # whether this peer had a vote


@dataclass
class Election(Wave):
    """One peer's part in an election."""

    merging: MergeOptions | None = None  # how clusters are merged later, if they are
    held: Tensor | None = None  # in a by-election, the peer's models (k, P) of the clusters that are open
    alarmed: bool = False  # none of them fits it
    stage: int | None = None  # of its jobs
    held_out: bool = False  # whether samples are held out in these
    voters: int = 0  # how many peers vote
    votes: bool = False  # whether this one does
    bid_losses: Tensor | None = None  # of the centres so far, on the samples that bid
    vote_losses: Tensor | None = None  # and on those that vote
    missing: set[int] = field(default_factory=set)  # the children whose bid or votes are to come
    best: tuple[float, int] | None = None  # the best bid so far: its value, minus the candidate
    route: int | None = None  # where it came from
    bid_made: bool = False  # the peer's own bid is in it
    candidate: m.Candidate | None = None  # the model that is voted on
    tally: Tally | None = None  # the votes so far
    on_candidate: Losses | None = None  # the losses of that model
    scoring: Score | None = None  # the job that measures losses
    outcome: Outcome | None = None  # what was decided
    since_s: float = 0.0  # when this part of the turn began
    early: dict[int, Any] = field(default_factory=dict)  # by sender, the message that overtook its cause
    blamed: set[int] = field(default_factory=set)  # neighbours that were silent before
    no_shows: set[int] = field(default_factory=set)  # candidates that were asked to stand, and did not
    cut_off: bool = False  # it has lost its way to the root of a by-election, which the others hold without it

    def resume(self, answer_time: AnswerTime, models: Tensor | None) -> None:
        super().resume(answer_time, models)
        self.held = None if self.held is None else models

    def prepare(self, stage: int, held: Tensor | None, held_out: bool, alarmed: bool) -> None:
        """Take in what the peer holds now: it may have changed since the wave came, in the middle of a round."""
        self.stage, self.held, self.held_out, self.alarmed = stage, held, held_out, alarmed

    def _take(self, sender: int, message: Any, now: float) -> None:
        take = _TAKES.get(type(message))
        if take is not None:
            take(self, sender, message, now)

    def _on_open(self, sender: int, message: m.Open, now: float) -> None:
        fits = is_possible(message.log, self.call) and message.voters <= self.most
        if sender == self.parent and self.phase == "counted" and fits:
            self._opened(message.voters, message.log, message.first)

    def _on_bid(self, sender: int, message: m.Bid, now: float) -> None:
        if self.phase == "bid" and message.turn == len(self.log):
            self._take_bid(sender, message)
        else:
            self._keep_early(sender, message)

    def _on_votes(self, sender: int, message: m.Votes, now: float) -> None:
        if self.phase == "vote" and message.turn == len(self.log):
            self._take_votes(sender, message.tally)
        else:
            self._keep_early(sender, message)

    def _keep_early(self, sender: int, message: m.Bid | m.Votes) -> None:
        """Keep what has overtaken a model that is on its way here."""
        if sender in self.kids and 0 <= message.turn - len(self.log) <= 1:
            self.early[sender] = message

    def _on_stand(self, sender: int, message: m.Stand, now: float) -> None:
        if sender == self.parent and message.turn == len(self.log):
            self._stand(message.candidate, now)

    def _on_candidate(self, sender: int, message: m.Candidate, now: float) -> None:
        if message.turn == len(self.log) and self._is_awaited(sender, message):
            self._take_candidate(message, sender)
        elif sender == self.parent and self.phase == "counted":
            self.early[sender] = message  # it has overtaken the opening

    def _on_decision(self, sender: int, message: m.Decision, now: float) -> None:
        if sender != self.parent or message.turn != len(self.log):
            return
        if self.phase == "opening":  # it has overtaken the centres, or there are none
            self.early[sender] = message
        elif self._is_decidable(message.outcome):
            self._decided(message.outcome, message.done)

    def _is_awaited(self, sender: int, message: m.Candidate) -> bool:
        """Return whether a candidate's model comes from above, or from the child that it was asked of."""
        if self.phase == "stand":
            return sender == self.route and self.best is not None and message.candidate == -self.best[1]
        return self.phase == "bid" and sender == self.parent

    def outvotes(self, entry: Entry) -> bool:
        """Return whether this election has more voters than one that others have ended."""
        return self.opened and self.voters > entry.voters

    def distrusts(self, entry: Entry) -> bool:
        """Return whether an election was held by a root whose word does not count here."""
        return entry.root in self.banned or not self._trusts(entry.root)

    def _is_decidable(self, turn: m.Turn) -> bool:
        if self.phase != "vote":
            return self.phase == "bid" and turn == PASS
        known = self.candidate is not None and turn.candidate == self.candidate.candidate
        return known and is_next(turn, self.log, self.call)

    def _waited_for(self) -> set[int]:
        """Return the neighbours whose part is missing: an answer to the probe, a bid, a model, or votes."""
        if self.phase == "wave":
            return set(self.pending)
        if self.phase == "stand":
            return set() if self.route is None else {self.route}
        return set(self.missing) if self.phase in ("bid", "vote") else set()

    def _blame_the_silent(self, long: bool = True) -> None:
        """Count whom this silence is of; a peer that made the best bid and did not stand is not asked again."""
        super()._blame_the_silent(long)
        waits = self.phase == "stand" or (self.phase == "bid" and not self.missing)
        if long and waits and self.best is not None and self.route != self.id:
            self.no_shows.add(-self.best[1])

    def _end_turn_without_the_silent(self, now: float) -> bool:
        """Continue without children whose bid or votes do not come; a root that is silent again and again is banned."""
        if self._silences_seen < PATIENT_FOR_MODELS:
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

    def _take_early(self) -> None:
        """Take in what overtook the model that this peer had to wait for."""
        early, self.early = self.early, {}
        for sender, message in sorted(early.items(), key=itemgetter(0)):
            self.receive(sender, message, self.last_s)

    def _opened(self, voters: int, log: tuple[m.Turn, ...], first: int | None = None) -> None:
        held = 0 if self.held is None else len(self.held)
        fits = held == self._held_count
        self.voters, self.votes = voters, self.warm is not None and fits
        known = shared_length(self.log, log)
        if known < len(self.log):  # another part of the network decided more
            kept = sum(turn.accepted for turn in self.log[:known])
            self.centres = self.centres[:kept]
            self.bid_losses = self.vote_losses = None
        self.log = list(log)
        self.phase = "opening"
        if self.call is not None or self.log:
            first = None
        elif self.parent is None and self.votes:
            first = self.id
        self._open_kids(first)
        if first is None:
            self._check_centres()
        else:
            self._await_first(first)

    def _await_first(self, first: int) -> None:
        """Take the root's own model as the first centre: it has the best lot, and nobody votes on it."""
        self.phase, self.missing, self.since_s = "bid", set(), self.last_s
        if first == self.id and self.warm is not None:
            self._take_candidate(m.Candidate(self.key, 0, self.id, 0.0, self.warm.model), None)
        self._take_early()

    def _open_kids(self, first: int | None) -> None:
        accepted = [turn for turn in self.log if turn.accepted]
        for kid, counted in sorted(self.kids.items()):
            for place in range(self._known_to(counted), min(len(accepted), len(self.centres))):
                name = accepted[place].candidate
                assert name is not None
                self._send(kid, m.Centre(self.key, place, name, self.centres[place]))
            self._send(kid, m.Open(self.key, self.voters, tuple(self.log), first))

    def _known_to(self, counted: m.Count) -> int:
        """Count the centres whose models a child had when it was counted."""
        return sum(turn.accepted for turn in self.log[: shared_length(counted.log, self.log)])

    def _silent_in(self, neighbour: int) -> str:
        """A bid waits for the models of centres that the child lacked, as a candidate does for its own."""
        counted = self.kids.get(neighbour)
        lacked = counted is not None and self._known_to(counted) < len(self.centres)
        return "stand" if self.phase == "bid" and lacked else self.phase

    def _on_centre(self, sender: int, message: m.Centre, now: float) -> None:
        if sender != self.parent or message.place != len(self.centres) or not self._fits(message.model):
            return
        self.centres.append(message.model)
        if self.phase == "opening":
            for kid, counted in sorted(self.kids.items()):
                if self._known_to(counted) <= message.place:
                    self._send(kid, message)
            self._check_centres()

    def _of_this_attempt(self, sender: int, message: Any) -> Any:
        """Take a model for the centre that is missing: it was on its way for longer than the attempt before lasted, and
        would be again."""
        accepted, place = [turn.candidate for turn in self.log if turn.accepted], len(self.centres)
        late = isinstance(message, m.Candidate | m.Centre) and self.phase == "opening" and sender == self.parent
        if late and accepted[place:] and message.candidate == accepted[place]:
            return m.Centre(self.key, place, message.candidate, message.model)
        return None

    def _fits(self, model: Tensor) -> bool:
        return model.shape == (self.size,) and model.dtype == self.dtype and is_finite(model)

    def _check_centres(self) -> None:
        if len(self.centres) >= sum(turn.accepted for turn in self.log):
            self._begin_turn()
            self._take_early()

    @property
    def _standing(self) -> Standing:
        return self._after(self.log)

    def _after(self, log: list[m.Turn]) -> Standing:
        """Read a log. Where clusters are merged later, more are opened than needed: as many as there are peers for."""
        many = unasked(None if self.call else self.merging, self.voters)
        return standing(log, self.clusters, self.call, replace(self.options.among(self.voters), unasked=many))

    @property
    def _models(self) -> list[Tensor]:
        """The centres as a whole: those that were held before, and those that were accepted."""
        return [*(self.held if self.held is not None else ()), *self.centres]

    @property
    def _centre_count(self) -> int:
        return self._held_count + len(self.centres)

    @property
    def _held_count(self) -> int:
        return 0 if self.call is None else self.call.clusters - len(self.call.closed)

    @property
    def _may_stand(self) -> bool:
        return self.votes and (self.call is None or bool(self.call.lost) or self.alarmed)

    def _begin_turn(self) -> None:
        self.phase, self.best, self.route, self.bid_made = "bid", None, None, False
        self.since_s = self.last_s
        self.candidate, self.on_candidate = None, None
        self.missing = self._to_wait_for(self.kids, "bid") & self._to_wait_for(self.kids, "stand")
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

    def _take_bid(self, sender: int, message: m.Bid) -> None:
        if sender not in self.missing:
            return
        self.missing.discard(sender)
        name = message.candidate if message.candidate not in self.no_shows else None
        if name is not None and (self.best is None or (message.value, -name) > self.best):
            self.best, self.route = (float(message.value), -name), sender
        self._bids_are_in()

    def _bids_are_in(self) -> None:
        if self.phase != "bid" or self.missing or not self.bid_made:
            return
        if self.parent is not None:
            value, name = (0.0, None) if self.best is None else (self.best[0], -self.best[1])
            self._send(self.parent, m.Bid(self.key, len(self.log), value, name))
        elif self.best is None:
            self._decided(PASS, self._after([*self.log, PASS]).over)
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
            self._take_candidate(m.Candidate(self.key, len(self.log), self.id, gain, self.warm.model), None)
        elif self.route in self.kids:
            self.phase = "stand"
            self._send(self.route, m.Stand(self.key, len(self.log), candidate))
        else:
            self._again(now)

    def _take_candidate(self, message: m.Candidate, sender: int | None) -> None:
        """Hand a candidate's model on along the tree, and vote on it."""
        if not self._fits(message.model):
            return
        self.candidate, self.phase = message, "vote"
        if self._centre_count:  # the first came unasked
            self._learn_answer_time()
        tree = {*self.kids, *(() if self.parent is None else (self.parent,))}
        for neighbour in sorted(tree - {sender}):
            self._send(neighbour, message)
        self.missing, self.tally = self._to_wait_for(self.kids, "vote"), no_votes(self._centre_count)
        if not self._centre_count:
            self._accept(m.Turn(message.candidate, True, 0))
        elif self.votes:
            self._score(message.model[None])
        else:
            self.on_candidate = None
            self._votes_are_in()
        self._take_early()

    def _take_votes(self, sender: int, tally: Tally) -> None:
        if sender not in self.missing or self.tally is None or len(tally.totals) != len(self.tally.totals):
            return
        self.missing.discard(sender)
        if not self.options.bounded or is_sayable(tally, self.kids[sender].size):
            self.tally = add(self.tally, tally)
        self._votes_are_in()

    def _votes_are_in(self) -> None:
        if self.phase != "vote" or self.missing or self.scoring is not None:
            return
        assert self.tally is not None
        assert self.candidate is not None
        if self.parent is not None:
            self._send(self.parent, m.Votes(self.key, len(self.log), self.tally))
            return
        verdict = decide(self.tally, self.candidate.gain, self.options, self._held_count)
        turn = m.Turn(self.candidate.candidate, self._standing.forced or verdict.accepted)
        if turn.accepted:
            turn = turn._replace(slot=self._slot(self.tally))
        self._decided(turn, self._after([*self.log, turn]).over)

    def _slot(self, tally: Tally) -> int:
        """Choose the cluster that an accepted candidate opens: a lost one that nobody follows, a closed one, or one
        that is new."""
        if self.call is None:
            return len(self.centres)
        taken = [turn.slot for turn in self.log if turn.accepted]
        opened = [j for j in range(self.call.clusters) if j not in self.call.closed]
        followed = {j for j, many in zip(opened, tally.followers, strict=False) if many}
        return next_slot(self.call.lost, self.call.closed, self.call.clusters, taken, followed)

    def _learn_answer_time(self) -> None:
        """Take in how long bids took to become a candidate, or votes a decision."""
        if self.kids or self.parent is not None:
            self.answer_time.observe(self.last_s - self.since_s)
        self.since_s = self.last_s

    def _decided(self, turn: m.Turn, done: bool) -> None:
        for kid in sorted(self.kids):
            self._send(kid, m.Decision(self.key, len(self.log), turn, done))
        if self.phase == "vote":
            self._learn_answer_time()
        if turn.accepted and self.votes and self.on_candidate is not None:
            self.bid_losses = _join(self.bid_losses, self.on_candidate.bid)
            self.vote_losses = _join(self.vote_losses, self.on_candidate.vote)
        self._accept(turn, done)

    def _accept(self, turn: m.Turn, done: bool = False) -> None:
        """Enter a turn into the log, and begin the next, or end."""
        self.log.append(turn)
        if turn.accepted:
            assert self.candidate is not None
            self.centres.append(self.candidate.model)
        if done or (len(self.log) == 1 and self._standing.over):
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
        self.scoring = Score(models, self.stage, self.held_out)
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
        own, bounded = self.warm.losses.bid[0], self.options.bounded
        vote: Vote = cast(self.bid_losses, own, losses.bid[0], self.vote_losses, losses.vote[0], bounded)
        return count(vote, self.candidate.gain)

    # Losses of neighbours.

    def _forget_turn(self) -> None:
        self.candidate, self.scoring, self.voters, self.early = None, None, 0, {}
        self.best, self.route, self.bid_made, self.missing = None, None, False, set()
        # Models of centres that came before a log that never did are not this peer's centres.
        self.centres = self.centres[: sum(turn.accepted for turn in self.log)]

    def _without(self, neighbour: int, now: float) -> None:
        if neighbour == self.parent:
            self._lose_parent(now)
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

    def _lose_parent(self, now: float) -> None:
        """Begin the next attempt; where the others have a quorum without this subtree, they continue without it.

        At a start it waits for them: a wave of attempt 0 stops nobody, and ends when the others begin again, or have
        models. In a by-election it takes no part any more, and what they decide reaches it as a lineage.
        """
        if self.opened:
            subtree, voters = int(self.votes) + sum(kid.ready for kid in self.kids.values()), self.voters
        else:
            subtree, voters = self._count().size, 0 if self.call is None else electorate(self.base)
        if self.parent == self.key.root or subtree > (1 - self.quorum) * voters:
            self._again(now)
        elif self.call is None:
            self.begin(now)
        else:
            self.cut_off = True


def _join(known: Tensor | None, more: Tensor) -> Tensor:
    return more if known is None else torch.cat([known, more])


def standing(log: Collection[m.Turn], clusters: int | None, call: m.Call | None, options: ElectionOptions) -> Standing:
    """Read a log of turns of the election of a start, or of a by-election."""
    if call is None:
        seats = start_seats(clusters, options.most, options.unasked)
    else:
        seats = call_seats(call.lost, call.closed, call.clusters, options.most)
    return rules.standing(((turn.candidate, turn.accepted) for turn in log), seats, options.patience)


def is_possible(log: Sequence[m.Turn], call: m.Call | None) -> bool:
    """Return whether an election could have decided this."""
    return all(is_next(turn, log[:place], call) for place, turn in enumerate(log))


def is_next(turn: m.Turn, before: Sequence[m.Turn], call: m.Call | None) -> bool:
    """Return whether a turn can follow others: where it opens a cluster, it is one that may be opened."""
    taken = [held.slot for held in before if held.accepted]
    if not turn.accepted or call is None:
        return turn.slot == (len(taken) if turn.accepted else -1)
    free = [j for j in (*call.lost, *call.closed) if j not in taken]
    return turn.slot in free or turn.slot == max([call.clusters - 1, *taken]) + 1


_TAKES: dict[type, Callable[[Election, int, Any, float], None]] = {
    m.Count: lambda wave, sender, message, now: wave._take_count(sender, message),
    m.Refuse: lambda wave, sender, message, now: wave._without(sender, now),
    m.Open: Election._on_open,
    m.Centre: Election._on_centre,
    m.Bid: Election._on_bid,
    m.Stand: Election._on_stand,
    m.Candidate: Election._on_candidate,
    m.Votes: Election._on_votes,
    m.Decision: Election._on_decision,
}
