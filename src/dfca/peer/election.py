"""A peer's part in an election: turns on the spanning tree of a wave (`wave`).

**Turns.** The root sends `Open` down the tree. Each turn, the best `Bid` comes up, `Stand` goes down to the peer that
made it, its `Candidate` model crosses each edge of the tree once, `Votes` come up summed, and the root's `Decision`
goes down. Who has not warmed up when turns begin forwards everything and neither bids nor votes.

**Losses.** A child that is lost is no longer waited for. Who loses its parent, or the child through which a candidate
should have come, begins the next attempt. Decided turns are a log; the longest log wins the root, and a parent sends
its children the `Centre`s that they lack, so that a new attempt costs one turn.

The rules of turns are those of `core.election`; sums are in fixed point, so any tree decides alike, as the synchronous
simulator does in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.core.client import is_finite
from dfca.core.election import Tally, Vote, add, bid, cast, count, decide, follows, lot, no_votes
from dfca.peer.lineage import Entry, Lineage, digest_of
from dfca.peer.messages import (
    Bid,
    Call,
    Candidate,
    Centre,
    Count,
    Decision,
    Open,
    Probe,
    Refuse,
    Stand,
    Turn,
    Votes,
)
from dfca.peer.turns import PASS, Standing, agreed, is_next, is_possible, standing
from dfca.peer.wave import Wave
from dfca.peer.work import Losses, Score

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

    held: the peer's models (k, P) in a by-election; alarmed: whether none of them fits it. voters: the peers that vote;
    votes: whether this one does. missing: the children whose bid or votes are still to come; early: what overtook the
    model that this peer waits for. bid_losses, vote_losses: of the centres so far, on the parts of the samples that bid
    and vote. best, route: the best bid so far, and where it came from. since_s: when the part of the turn began that
    goes on: how long it takes is learned (`answer_time`, the peer's). blamed: those that were silent before.
    """

    held: Tensor | None = None
    alarmed: bool = False
    stage: int | None = None
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
    early: dict[int, Bid | Votes] = field(default_factory=dict)
    blamed: set[int] = field(default_factory=set)
    work: list[Score] = field(default_factory=list)

    def receive(self, sender: int, message: Any, now: float) -> None:
        """Take in a message of the election that is well formed; one that does not fit is ignored."""
        if self.phase == "done":
            return
        if isinstance(message, Probe):
            self._take_probe(sender, message, now)
            return
        if message.key != self.key:
            return
        self.last_s = now
        if isinstance(message, Count):
            self._take_count(sender, message)
        elif isinstance(message, Refuse):
            self._without(sender, now)
        elif sender == self.parent and isinstance(message, Open) and self.phase == "counted":
            if is_possible(message.log, self.call):
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
            if self._is_decidable(message.outcome):
                self._decided(message.outcome, message.done)
        elif isinstance(message, Bid | Votes) and sender in self.kids and message.turn == len(self.log):
            self.early[sender] = message  # it has overtaken a model that is on its way here

    def _is_decidable(self, turn: Turn) -> bool:
        """Return whether this can be what came of the turn that goes on."""
        if self.phase != "vote":
            return self.phase in ("bid", "opening") and turn == PASS
        known = self.candidate is not None and turn.candidate == self.candidate.candidate
        return known and is_next(turn, self.log, self.call)

    def _end_turn_without_the_silent(self, now: float) -> bool:
        """Go on without children whose bid or votes do not come; a root that is silent again and again is banned."""
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

    def _take_early(self) -> None:
        """Take in what overtook the model that this peer had to wait for."""
        early, self.early = self.early, {}
        for sender, message in sorted(early.items(), key=itemgetter(0)):
            self.receive(sender, message, self.last_s)

    def _opened(self, voters: int, log: tuple[Turn, ...]) -> None:
        held = 0 if self.held is None else len(self.held)
        fits = held == (0 if self.call is None else self.call.clusters)
        self.voters, self.votes = voters, self.warm is not None and fits
        known = agreed(self.log, log)
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
            known = sum(turn.accepted for turn in self.log[: agreed(counted.log, self.log)])
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
                if sum(turn.accepted for turn in self.log[: agreed(counted.log, self.log)]) <= message.place:
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

    # Losses of neighbours.

    def _forget_turn(self) -> None:
        """Forget the turn that was under way: a new attempt begins."""
        self.candidate, self.scoring, self.voters, self.early = None, None, 0, {}

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


def _join(known: Tensor | None, more: Tensor) -> Tensor:
    return more if known is None else torch.cat([known, more])
