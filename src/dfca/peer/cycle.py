"""The cycle of rounds: what has come and waits, whom the end of a round waits for, and its next step."""

from __future__ import annotations

import math
from bisect import bisect_right
from enum import Enum
from functools import partial

from dfca.core.state import ClientState
from dfca.peer.inbox import Inbox
from dfca.peer.parts import Outbox, Part, PeerView, takes_part
from dfca.peer.records.lineage import compatible
from dfca.peer.records.messages import Update
from dfca.peer.records.options import PeerOptions

REMEMBERED = 64  # how many ends of local updates a peer remembers: older models are all of this age


class Step(Enum):
    """What a peer does once everything else of this instant has been handled."""

    ASK = "ask"
    FOLD = "fold"
    CLOSE = "close"
    BEGIN = "begin"


class RoundCycle(Part):
    """Where a peer is between the training of one round and that of the next."""

    NOT_STORED = Part.NOT_STORED | {"awaited", "_form"}

    def __init__(self, out: Outbox, options: PeerOptions) -> None:
        super().__init__(out)
        self.inbox = Inbox(depth=2 if options.method.aggregation == "batch" else 1)  # updates that wait to be folded
        self.step: Step | None = None  # what is to be done at the end of this instant
        self.ending: int | None = None  # the round that was trained and is not closed
        self.asked = False  # whether copies were asked for in the round that is ending
        self.deadline: float | None = None  # when neighbours are no longer waited for
        self.finishes: list[float] = []  # when the last local updates ended
        self.began_s = 0.0  # when the training began that runs, or ran last
        self.awaited = -1  # a neighbour whose round is missing: asked first the next time
        self._form = options.rules.form(options.size, options.dtype)  # what comes in place of a model

    def wait_for(self, step: Step) -> None:
        """Do a step once everything else of this instant has been handled."""
        self.step = step

    def take_step(self) -> Step | None:
        """Return the step that is due, and forget it."""
        step, self.step = self.step, None
        return step

    def begin_training(self, now: float) -> None:
        """Note when the training of a round begins."""
        self.began_s = now

    def end_training(self, now: float, round: int) -> float:
        """Begin the end of a round that was trained; return how long the training took."""
        self.finishes.append(now)
        del self.finishes[:-REMEMBERED]
        self.ending, self.asked = round, False
        return now - self.began_s

    def await_neighbours(self, at: PeerView) -> None:
        """Wait for the neighbours that have yet to end the round; under `sequential` for nobody."""
        if at.options.method.aggregation == "sequential":
            self.step = Step.ASK if self._relays(at) else Step.FOLD
        else:
            self.deadline = None if at.options.method.timeout_s is None else at.now + at.options.method.timeout_s

    def is_late(self, now: float) -> bool:
        """Return whether the wait for neighbours has lasted too long; it has ended then."""
        if self.deadline is None or now < self.deadline:
            return False
        self.deadline = None
        self.out.note("timeout", round=self.ending if self.ending is not None else -1)
        return True

    def expects(self, at: PeerView, neighbour: int) -> bool:
        """Return whether a neighbour has still to end the round that this peer is ending."""
        known, ending = at.links[neighbour], self.ending
        if ending is None or known.hello is None or not known.hello.clusters or known.has_ended(ending):
            return False
        return takes_part(at.options, neighbour, ending)

    def check_wait(self, at: PeerView, copies_missing: bool) -> None:
        """Take the next step of a round's end where nobody is waited for."""
        if self.ending is None or self.step is not None:
            return
        batch = at.options.method.aggregation == "batch"
        if batch and self._is_anybody_missing(at):
            return
        if self._relays(at) and not self.asked:
            self.step = Step.ASK
        elif not copies_missing or not batch:
            self.step = Step.FOLD

    def _is_anybody_missing(self, at: PeerView) -> bool:
        if self.awaited not in at.links or not self.expects(at, self.awaited):
            self.awaited = next((n for n in reversed(at.links) if self.expects(at, n)), -1)
        return self.awaited in at.links

    @staticmethod
    def _relays(at: PeerView) -> bool:
        """Return whether copies of models are handed on that a peer did not train."""
        return at.rules.share == "relay" and at.rules.exchange == "gossip"

    def limit(self, at: PeerView, sender: int) -> float:
        """Return the newest round of a sender whose models are folded now.

        Under `batch` that is the round that ends here: models of the next one wait. A sender that has ended a round
        after one that both take part in and this peer has yet to train has not waited for this peer: it is ahead for
        good, and its newest models are folded.
        """
        ending, options = self.ending, at.options
        if options.method.aggregation == "sequential" or ending is None:
            return math.inf
        newest = at.links[sender].round if sender in at.links else -1
        passed = range(ending + 1, min(newest, ending + REMEMBERED))
        is_ahead = any(takes_part(options, sender, round) and takes_part(options, at.id, round) for round in passed)
        return math.inf if is_ahead else ending

    def note_asked(self) -> None:
        """Note that copies were asked for."""
        self.asked = True

    def hold(self, at: PeerView, sender: int, update: Update) -> None:
        """Keep a model until it can be folded, if it fits."""
        message = update.message
        j, round, options, copies = message.cluster, message.round, at.options, at.copies
        same = update.lineage == at.lineage or compatible(at.lineage, update.lineage, j)
        rests = options.method.participation < 1 and not takes_part(options, at.id, round)
        if not copies.counts or not same or rests:
            self.out.note("drop", sender, j, round)
        elif (  # as `usable` says, without a look at the bank
            j >= len(copies.counts) or j in copies.closed or message.form != self._form or not message.finite
        ):
            self.out.refuse("does not fit", sender, j, round)
        elif self.inbox.add(sender, update, at.now):
            self.out.ready.noted.append(("hold", sender, j, round, 0.0))  # not by `note`: there are many
            if self.step is None and at.job is None:
                self.fold_if_idle(at)
        else:
            self.out.note("drop", sender, j, round)

    def fold_if_idle(self, at: PeerView) -> None:
        """Fold what came between two rounds, under `sequential`."""
        idle = at.job is None and self.ending is None and self.step is None
        if idle and at.options.method.aggregation == "sequential":
            self.step = Step.FOLD

    def fold(self, at: PeerView) -> ClientState:
        """Return the models after what came was folded into them."""
        folded, staleness, lineage, noted = [], at.options.method.staleness, at.lineage, self.out.ready.noted
        newest = at.round - 1 if staleness.unit != "seconds" else math.inf
        waits = at.options.method.aggregation == "batch"
        for update, came_s in self.inbox.take(partial(self.limit, at) if waits else None):
            message = update.message
            sender, j, round = message.sender, message.cluster, message.round
            if update.lineage != lineage and not compatible(lineage, update.lineage, j):
                self.out.note("drop", sender, j, round)  # it fitted when it came
                continue
            age = 0 if round >= newest else self._age(at, update, came_s)
            folded.append((message, staleness.weight(age) if age else 1.0))
            noted.append(("fold", sender, j, round, age))
        return at.rules.fold_all_(at.copies, folded) if folded else at.copies

    def _age(self, at: PeerView, update: Update, came_s: float) -> float:
        unit, message = at.options.method.staleness.unit, update.message
        if unit == "seconds":
            return update.age_s + (at.now - came_s)
        behind = max(0, at.round - 1 - message.round)
        if unit == "rounds" or not behind:
            return behind
        return min(behind, len(self.finishes) - bisect_right(self.finishes, came_s - update.age_s))

    def end_wait(self) -> None:
        """Close the round next: everything that was waited for is folded."""
        self.deadline, self.step = None, Step.CLOSE

    def close(self) -> None:
        """Close the round that was being ended."""
        self.ending = None

    def begin_anew(self) -> None:
        """Begin a round with other models: the end of the last one is moot."""
        self.ending, self.deadline, self.step = None, None, Step.BEGIN
