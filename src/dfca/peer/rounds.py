"""The round cycle: train, send, wait, ask for copies, fold, close; and what neighbours say of their rounds."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from dfca.core.rules.revival import PAUSE
from dfca.peer.inbox import Neighbour
from dfca.peer.join import Joining
from dfca.peer.records.lineage import Lineage, clusters_of, compatible
from dfca.peer.records.messages import Call, Hello, Nothing, Offers, Update
from dfca.peer.records.work import READS_BANK, Curve, Personalise, Rest, Train, Trained
from dfca.peer.state import State, Step

REMEMBERED = 64
"""Of how many local updates a peer remembers the end: older models are all of this age."""
MOST_ROUND = 2**40
"""No round beyond this is believed."""
UNKNOWN = -1
"""The incarnation of a neighbour that has sent models and no hello yet."""


class Rounds(Joining):
    """Goes from round to round."""

    def _take_step(self) -> None:
        step, self.step = self.step, None
        if step is Step.ASK:
            self._ask_for_copies()
        elif step is Step.FOLD:
            self._fold()
        elif step is Step.CLOSE:
            self._close_round()
        else:
            self._begin_round()

    def _begin_round(self) -> None:
        if self.bank is None or self.job is not None:
            return
        if self.election is not None:
            self._pause()
            return
        if self.newcomer:
            if self._silent() and self.now < self.join_until:
                self.state = State.WAITING
                return
            self._catch_up()
        if (job := self._personal_job()) is not None:
            self.state, self.job = State.TRAINING, job
            self._out.work.append(job)
            return
        if self.round >= self.options.rounds:
            if self.state is not State.DONE:
                self._note("done", round=self.round)
            self.state = State.DONE
            return
        self.state = State.TRAINING
        if self._takes_part(self.id, self.round):
            self.job = Train(self.round, self.holds_out, self.surveying, self.copies.closed)
        else:
            self.job = Rest(self.round)
        self.began_s = self.now
        self._out.work.append(self.job)
        self._note("start", round=self.round)

    def _waits_for_hello(self) -> bool:
        """Return whether the first round waits for the neighbours' first word."""
        return self.newcomer and self.bank is not None and self.ending is None and self._silent()

    def _end_training(self, result: Trained) -> None:
        assert self.bank is not None
        now, cluster = self.round, result.cluster
        trained, complete = None, len(self.links) >= len(self.neighbours)
        mixed = complete or (cluster < len(self.bank) and self.copies.counts[cluster] > 0)
        if result.fine:
            trained = self.bank[cluster].clone() if result.model is None else result.model
            if self.options.size and (result.model is not None or self.rules.layout is not None):
                self.rules.store_(self.bank, cluster, trained)  # a run without training has models without numbers
        self.copies, messages = self.rules.end_round(self.copies, cluster, trained)
        self.samples, self.train_s = result.samples, self.now - self.began_s
        self.finishes.append(self.now)
        del self.finishes[:-REMEMBERED]
        self.state, self.ending, self.asked = State.WAITING, now, False
        self._note("finish", cluster=cluster if result.fine else -1, round=now)
        self._out.save = True
        if self.options.revives:
            self.detector.grow(len(self.bank))
            self.detector.look(result.loss, mixed)
            if result.fine:
                self.detector.newest[cluster] = max(now, self.detector.newest[cluster])
            self._raise_alarm()
        if self.rules.exchange == "none":
            self._wait_for(Step.CLOSE)
            return
        fresh = tuple(self.detector.newest) if self.options.revives else ()
        offers = tuple(self.rules.offers(self.copies).items())
        updates = [Update(each, len(messages), self.lineage, 0.0, fresh, offers) for each in messages]
        if len(updates) > 1:
            self._out.messages += [(neighbour, update) for neighbour in self.links for update in updates]
        else:
            self._broadcast(updates[0] if updates else Nothing(now, self.lineage, fresh, offers))
        self._adopt()  # what came while it trained; the trained model has left with the lineage that it is of
        if self.highest != self.lineage:
            self._seek()
        if self.ending is None:
            return  # it has begun anew with the models of others
        if self.options.aggregation == "sequential":
            self._wait_for(Step.ASK if self.relays else Step.FOLD)
        else:
            self.deadline = None if self.options.timeout_s is None else self.now + self.options.timeout_s
            self._check_wait()

    def _end_rest(self) -> None:
        self._note("sit", round=self.round)
        self.copies = self.rules.skip_round(self.copies)
        self.state = State.WAITING
        self._wait_for(Step.CLOSE)

    def _end_personal(self, job: Curve | Personalise, result: Any) -> None:
        """Go on after a job of the personal last step, with what came meanwhile."""
        if isinstance(job, Curve):
            self._end_measuring(result, self.lineage)
        else:
            self._note("tuned")
        self.state = State.WAITING
        self._adopt()
        self._wait_for(Step.BEGIN)

    def _expects(self, neighbour: int) -> bool:
        """Return whether a neighbour has still to end the round that this peer is ending."""
        known, now = self.links[neighbour], self.ending
        if now is None or known.hello is None or not known.hello.clusters or known.has_ended(now):
            return False
        return self._takes_part(neighbour, now)

    def _check_wait(self) -> None:
        """Go on with the end of a round where nobody is waited for; who is in an election waits for nobody."""
        if self.ending is None or self.step is not None or self.state is not State.WAITING:
            return
        if self.options.aggregation == "batch" and self.election is None:
            if self.awaited not in self.links or not self._expects(self.awaited):
                self.awaited = next(filter(self._expects, reversed(self.links)), -1)
            if self.awaited in self.links:
                return
        if self.relays and not self.asked:
            self._wait_for(Step.ASK)
        elif not self.wanted or self.options.aggregation == "sequential":
            self._wait_for(Step.FOLD)

    def _fold(self) -> None:
        """Fold what came; close the round that is being ended."""
        if self.bank is None or isinstance(self.job, READS_BANK):
            return
        batch, lineage, weight = self.options.aggregation == "batch", self.lineage, self.options.staleness.weight
        limit = math.inf if not batch or self.ending is None else self.ending
        folded, newest = [], self.round - 1 if self.options.staleness.unit != "seconds" else math.inf
        noted = self._out.noted
        for update, came_s in self.inbox.take(limit):
            message = update.message
            sender, j, round = message.sender, message.cluster, message.round
            if update.lineage != lineage and not compatible(lineage, update.lineage, j):
                self._note("drop", sender, j, round)  # that it fits was seen when it came
                continue
            age = 0 if round >= newest else self._age(update, came_s)
            folded.append((message, weight(age) if age else 1.0))
            noted.append(("fold", sender, j, round, age))
        if folded:
            self.copies = self.rules.fold_all_(self.copies, folded)
        answers, self.answers = self.answers, {}
        for copy in answers.values():
            self._take_copy(copy)
        if self.ending is not None:
            self.deadline = None
            self.wanted = {} if batch else self.wanted
            self._wait_for(Step.CLOSE)
        elif self.election is not None and self.job is None and self.checking is None:
            self._pause()  # the call came between the update and its fold

    def _age(self, update: Update, came_s: float) -> float:
        """Measure how old an update is: `staleness`."""
        unit, message = self.options.staleness.unit, update.message
        if unit == "seconds":
            return update.age_s + (self.now - came_s)
        behind = max(0, self.round - 1 - message.round)
        if unit == "rounds" or not behind:
            return behind
        return min(behind, len(self.finishes) - bisect_right(self.finishes, came_s - update.age_s))

    def _close_round(self) -> None:
        """End a round: see whether a survey or an election is due, then go on."""
        assert self.bank is not None
        now, self.ending = self.round - 1, None
        if self.options.revives:
            # While surveys go on, clusters that have lost their followers are theirs to close.
            unwatched = range(len(self.bank)) if self.surveying else self.copies.closed
            informed = 2 * len(self.links) >= len(self.neighbours)
            self.detector.end_round(len(self.bank), informed, unwatched)
        if self.election is None and self._survey_is_due:
            self._begin_survey()
        elif self.options.revives:
            if self.election is None and self.detector.is_due(now, self.options.election):
                self.election = self._make_election(Call(self.detector.lost(), len(self.bank), self.copies.closed))
                self.election.begin(self.now)
            elif self.election is None and not self.voted and now - self.adopted >= PAUSE << self.looks:
                # Again after twice the time: models that change hands between two kinds of data fit now and then.
                self.looks += 1
                if self.own is None:
                    self._warm_up(now)
                else:
                    self._check_fit(self.own, None)
                    self.own = None
                return
        self._begin_round()

    def _on_hello(self, sender: int, hello: Hello) -> None:
        known = self.links[sender]
        if known.hello is not None and known.hello.incarnation not in (UNKNOWN, hello.incarnation):
            self.links[sender] = known = Neighbour()
        if known.hello is None or known.hello.incarnation == UNKNOWN:
            self.inbox.forget_sender(sender)  # it may have begun a new life, with an older round
        known.hello, known.since = hello, min(hello.round, MOST_ROUND)
        if not hello.clusters:
            known.offers = ()
        self._take_in_hello()

    def _take_in_hello(self) -> None:
        """Go on where it was the neighbours' hello that was waited for."""
        self._seek()
        self._settle()
        self._check_wait()
        self._begin_if_all_have_spoken()

    def _begin_if_all_have_spoken(self) -> None:
        """Begin the first round where no neighbour's first word is waited for any more: it came, or its sender left."""
        if self.newcomer and self.state is State.WAITING and self.ending is None and not self._silent():
            self._wait_for(Step.BEGIN)

    def _on_update(self, sender: int, update: Update) -> None:
        message, parts, lineage, _, freshness, offers = update
        j, round = message.cluster, message.round
        if message.sender != sender:
            self._refuse("in another's name", sender)
            return
        if round > MOST_ROUND:
            self._refuse("malformed", sender)
            return
        self._learn(sender, round, lineage, freshness, offers).ended(round, j, parts)
        same = lineage == self.lineage or compatible(self.lineage, lineage, j)
        rests = self.options.participation < 1 and not self._takes_part(self.id, round)
        if self.bank is None or not same or rests:
            self._note("drop", sender, j, round)
        elif (
            j >= len(self.copies.counts) or j in self.copies.closed or message.form != self._form or not message.finite
        ):
            self._refuse("does not fit", sender, j, round)  # not `usable`, asked without a look at the bank
        elif self.inbox.add(sender, update, self.now):
            self._out.noted.append(("hold", sender, j, round, 0.0))
            if self.job is None and self.step is None:
                self._fold_if_idle()
        else:
            self._note("drop", sender, j, round)
        if self.step is None and self.ending is not None:
            self._check_wait()

    def _on_nothing(self, sender: int, message: Nothing) -> None:
        self._note("nothing", sender, round=message.round)
        self._learn(sender, *message).ended(message.round, -1, 1)
        self._check_wait()

    def _learn(
        self, sender: int, round: int, lineage: Lineage, freshness: tuple[int, ...], offers: Offers
    ) -> Neighbour:
        """Take in what comes along with the end of a neighbour's round; returns what is known of it."""
        known = self.links[sender]
        if round >= known.offers_round:
            if offers:
                held = 0 if self.bank is None else len(self.bank)
                own = {j: (j, offer) for j, offer in offers if offer.sender == sender and j < held}
                offers = tuple(own.values())
            known.offers, known.offers_round, known.offers_lineage = offers, round, lineage
        if freshness and self.options.revives and lineage == self.lineage:
            self.detector.learn(freshness, MOST_ROUND)
        hello = known.hello
        if hello is None:  # it is late, or was broken: this says as much
            known.hello = Hello(UNKNOWN, min(round, MOST_ROUND) + 1, max(1, clusters_of(lineage)), lineage)
            self._take_in_hello()
        elif not hello.clusters or hello.lineage != lineage:
            clusters = clusters_of(lineage) if lineage else hello.clusters
            if known.learn_lineage(min(round, MOST_ROUND) + 1, lineage, max(1, clusters)):
                self._seek()
        return known
