"""A peer's part in an election: turns on the spanning tree of a wave (`wave`).

**Turns.** The root sends `Open` down the tree. In the election of a start its own model follows: the first centre,
which nobody votes on. Each turn, the best `Bid` comes up, `Stand` goes down to the peer that
made it, its `Candidate` model crosses each edge of the tree once, `Votes` come up summed, and the root's `Decision`
goes down. Who has not warmed up when turns begin forwards everything and neither bids nor votes.

**Losses.** A child that is lost is no longer waited for. Who loses its parent, or the child through which a candidate
should have come, begins the next attempt. Decided turns are a log; the longest log wins the root, and a parent sends
its children the `Centre`s that they lack, so that a new attempt costs one turn.

The rules of turns are those of `rules.election`; sums are in fixed point, so any tree decides alike, as the synchronous
simulator does in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.core.options import MergeOptions
from dfca.core.rules.election import Tally, Vote, add, bid, cast, count, decide, follows, is_sayable, lot, no_votes
from dfca.core.rules.turns import next_slot, opening
from dfca.core.state import is_finite
from dfca.peer.records.lineage import Entry, Lineage, digest_of, shared_length
from dfca.peer.records.messages import (
    Bid,
    Call,
    Candidate,
    Centre,
    Count,
    Decision,
    Open,
    Refuse,
    Stand,
    Turn,
    Votes,
)
from dfca.peer.records.work import Losses, Score
from dfca.peer.waves.turns import PASS, Standing, is_next, is_possible, standing
from dfca.peer.waves.wave import Wave

PATIENT_FOR_MODELS = 8
"""After so many silences a peer goes on without those that it waits for in a turn: models take their time."""


class Outcome(NamedTuple):
    """What an election decided: the lineage that it extended, its entry, and the models that it opened, by cluster."""

    base: Lineage
    entry: Entry | None
    opened: tuple[tuple[int, Tensor], ...]
    call: Call | None
    voted: bool


@dataclass
class Election(Wave):
    """One peer's part in an election. `work`: what it wants done; the peer drains it, and `out`.

    merging: how clusters are merged later, if they are. held: the peer's models (k, P) in a by-election, of the
    clusters that are open; alarmed: whether none of them fits it. stage, held_out: of its jobs. voters: the peers that
    vote; votes: whether this one does. missing: the children whose bid or votes are still to come; early: what overtook
    what this peer waits for. bid_losses, vote_losses: of the centres so far, on the parts of the samples that bid and
    vote. best, route: the best bid so far, and where it came from. since_s: when the part of the turn began that goes
    on: how long it takes is learned (`answer_time`, the peer's). blamed: those that were silent before; no_shows: those
    that were asked to stand, and did not.
    """

    merging: MergeOptions | None = None
    held: Tensor | None = None
    alarmed: bool = False
    stage: int | None = None
    held_out: bool = False
    voters: int = 0
    votes: bool = False
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
    since_s: float = 0.0
    early: dict[int, Bid | Votes | Candidate | Decision] = field(default_factory=dict)
    blamed: set[int] = field(default_factory=set)
    no_shows: set[int] = field(default_factory=set)
    work: list[Score] = field(default_factory=list)

    def _take(self, sender: int, message: Any, now: float) -> None:
        if isinstance(message, Count):
            self._take_count(sender, message)
        elif isinstance(message, Refuse):
            self._without(sender, now)
        elif sender == self.parent and isinstance(message, Open) and self.phase == "counted":
            if is_possible(message.log, self.call) and message.voters <= self.most:
                self._opened(message.voters, message.log, message.first)
        elif sender == self.parent and isinstance(message, Centre):
            self._take_centre(message)
        elif isinstance(message, Bid) and self.phase == "bid" and message.turn == len(self.log):
            self._take_bid(sender, message)
        elif sender == self.parent and isinstance(message, Stand) and message.turn == len(self.log):
            self._stand(message.candidate, now)
        elif isinstance(message, Candidate) and message.turn == len(self.log) and self._is_awaited(sender, message):
            self._take_candidate(message, sender)
        elif isinstance(message, Votes) and self.phase == "vote" and message.turn == len(self.log):
            self._take_votes(sender, message.tally)
        elif sender == self.parent and isinstance(message, Decision) and message.turn == len(self.log):
            if self.phase == "opening":  # it has overtaken the centres, or there are none
                self.early[sender] = message
            elif self._is_decidable(message.outcome):
                self._decided(message.outcome, message.done)
        elif isinstance(message, Bid | Votes) and sender in self.kids and 0 <= message.turn - len(self.log) <= 1:
            self.early[sender] = message  # it has overtaken a model that is on its way here
        elif sender == self.parent and isinstance(message, Candidate) and self.phase == "counted":
            self.early[sender] = message  # it has overtaken the opening

    def _is_awaited(self, sender: int, message: Candidate) -> bool:
        """Return whether a candidate's model comes from above, or from the child that it was asked of."""
        if self.phase == "stand":
            return sender == self.route and self.best is not None and message.candidate == -self.best[1]
        return self.phase == "bid" and sender == self.parent

    def outvotes(self, entry: Entry) -> bool:
        """Return whether to go on rather than take what others decided: with fewer votes, or under a bad root."""
        bad = entry.root in self.banned or not self._trusts(entry.root)
        return bad or (self.opened and self.voters > entry.voters)

    def _is_decidable(self, turn: Turn) -> bool:
        """Return whether this can be what came of the turn that goes on."""
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
        """Count whom this silence is of; who made the best bid and did not stand is not asked again."""
        super()._blame_the_silent(long)
        waits = self.phase == "stand" or (self.phase == "bid" and not self.missing)
        if long and waits and self.best is not None and self.route != self.id:
            self.no_shows.add(-self.best[1])

    def _end_turn_without_the_silent(self, now: float) -> bool:
        """Go on without children whose bid or votes do not come; a root that is silent again and again is banned."""
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

    def _opened(self, voters: int, log: tuple[Turn, ...], first: int | None = None) -> None:
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
            self._take_candidate(Candidate(self.key, 0, self.id, 0.0, self.warm.model), None)
        self._take_early()

    def _open_kids(self, first: int | None) -> None:
        """Send the children what they lack of the log, and open."""
        accepted = [turn for turn in self.log if turn.accepted]
        for kid, counted in sorted(self.kids.items()):
            for place in range(self._known_to(counted), min(len(accepted), len(self.centres))):
                name = accepted[place].candidate
                assert name is not None
                self._send(kid, Centre(self.key, place, name, self.centres[place]))
            self._send(kid, Open(self.key, self.voters, tuple(self.log), first))

    def _known_to(self, counted: Count) -> int:
        """Count the centres whose models a child had when it was counted."""
        return sum(turn.accepted for turn in self.log[: shared_length(counted.log, self.log)])

    def _silent_in(self, neighbour: int) -> str:
        """A bid waits for the models of centres that the child lacked, as a candidate does for its own."""
        counted = self.kids.get(neighbour)
        lacked = counted is not None and self._known_to(counted) < len(self.centres)
        return "stand" if self.phase == "bid" and lacked else self.phase

    def _take_centre(self, message: Centre) -> None:
        """Keep the model of a centre that was accepted earlier, and hand it on."""
        if message.place != len(self.centres) or not self._fits(message.model):
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
        late = isinstance(message, Candidate | Centre) and self.phase == "opening" and sender == self.parent
        if late and accepted[place:] and message.candidate == accepted[place]:
            return Centre(self.key, place, message.candidate, message.model)
        return None

    def _fits(self, model: Tensor) -> bool:
        return model.shape == (self.size,) and model.dtype == self.dtype and is_finite(model)

    def _check_centres(self) -> None:
        """Begin the turn once the models of all centres are there."""
        if len(self.centres) >= sum(turn.accepted for turn in self.log):
            self._begin_turn()
            self._take_early()

    @property
    def _standing(self) -> Standing:
        return self._after(self.log)

    def _after(self, log: list[Turn]) -> Standing:
        """Read a log. Where clusters are merged later, more are opened than needed: as many as there are peers for."""
        clusters, unasked = opening(self.clusters, None if self.call else self.merging, self.voters)
        return standing(log, clusters, self.call, replace(self.options.among(self.voters), unasked=unasked))

    @property
    def _models(self) -> list[Tensor]:
        """The centres as a whole: those that were held before, and those that were accepted."""
        return [*(self.held if self.held is not None else ()), *self.centres]

    @property
    def _centre_count(self) -> int:
        return self._held_count + len(self.centres)

    @property
    def _held_count(self) -> int:
        """How many of the centres were held before."""
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

    def _take_bid(self, sender: int, message: Bid) -> None:
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
            self._send(self.parent, Bid(self.key, len(self.log), value, name))
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
        if self._centre_count:  # the first came unasked
            self._learn_answer_time()
        tree = {*self.kids, *(() if self.parent is None else (self.parent,))}
        for neighbour in sorted(tree - {sender}):
            self._send(neighbour, message)
        self.missing, self.tally = self._to_wait_for(self.kids, "vote"), no_votes(self._centre_count)
        if not self._centre_count:
            self._accept(Turn(message.candidate, True, 0))
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
            self._send(self.parent, Votes(self.key, len(self.log), self.tally))
            return
        found = decide(self.tally, self.candidate.gain, self.options, self._held_count)
        turn = Turn(self.candidate.candidate, self._standing.forced or found.accepted)
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

    def _decided(self, turn: Turn, done: bool) -> None:
        """Hand the decision of a turn down, and go on to the next, or end."""
        for kid in sorted(self.kids):
            self._send(kid, Decision(self.key, len(self.log), turn, done))
        if self.phase == "vote":
            self._learn_answer_time()
        if turn.accepted and self.votes and self.on_candidate is not None:
            self.bid_losses = _join(self.bid_losses, self.on_candidate.bid)
            self.vote_losses = _join(self.vote_losses, self.on_candidate.vote)
        self._accept(turn, done)

    def _accept(self, turn: Turn, done: bool = False) -> None:
        """Enter a turn into the log, and go on to the next, or end."""
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
        """Forget the turn that was under way: a new attempt begins."""
        self.candidate, self.scoring, self.voters, self.early = None, None, 0, {}
        self.best, self.route, self.bid_made, self.missing = None, None, False, set()
        # Models of centres that came before a log that never did are not this peer's centres.
        self.centres = self.centres[: sum(turn.accepted for turn in self.log)]

    def _without(self, neighbour: int, now: float) -> None:
        """Go on without a neighbour that takes no part, or no longer; the next attempt asks it again."""
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
        """Begin the next attempt; where the others have a quorum without this subtree, wait for them.

        A wave of attempt 0 stops nobody: it ends when the others begin again, or have models.
        """
        subtree = int(self.votes) + sum(kid.ready for kid in self.kids.values())
        missed = self.parent == self.key.root or subtree > (1 - self.quorum) * self.voters
        if not self.opened or self.call is not None or missed:
            self._again(now)
        else:
            self.begin(now)


def _join(known: Tensor | None, more: Tensor) -> Tensor:
    return more if known is None else torch.cat([known, more])
