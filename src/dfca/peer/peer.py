"""One participant, as a machine without I/O: read this file first.

A driver calls it when something happens (a neighbour comes into reach or leaves it, a message, finished work, a timer)
and then carries out what `ready` returns: what must be saved before messages leave, messages, work, notes. A peer knows
what it was sent and nothing else; it has no clock, thread, socket, file or randomness of its own. Time is an argument.

    EMPTY      no models: waits for a neighbour that has some, or for an election
    WARMING    trains a model of its own, to stand and vote with (`WarmUp`)
    ELECTING   takes part in an election with a vote (`election.py`)
    PAUSED     takes part without one: it forwards, and ends with the same centres
    TRAINING   a round: `Train`, or `Rest` where it sits the round out
    WAITING    between two rounds: for neighbours (`batch`), for copies, for the end of this instant
    DONE       all its rounds are done; it goes on serving

A round: train; send the trained model to all neighbours; then, under `batch`, wait until every neighbour in reach has
ended the same round, or for `timeout_s`. The end of a round has three steps, each of which waits until everything else
of the same instant has been handled (`wake`): ask for copies that no neighbour trained (`core.relay`), fold what came,
close the round, which may call a by-election (`revival.py`), and begin the next. While a peer trains its bank does not
change. What cannot be used is counted by its reason in `refused`; nothing that comes raises an exception.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dfca.core.client import ClientState, Message, participates, usable
from dfca.core.election import bid
from dfca.core.relay import Offer
from dfca.peer.election import Election, Outcome
from dfca.peer.inbox import Inbox, Neighbour
from dfca.peer.join import Pursuit
from dfca.peer.lineage import Lineage, clusters_of, compatible, extends, opened_since
from dfca.peer.machine import Machine, names
from dfca.peer.messages import (
    Alarm,
    BankCopy,
    BankRequest,
    Bid,
    Call,
    Candidate,
    Centre,
    Copy,
    CopyRequest,
    Count,
    Decision,
    Declined,
    Hello,
    Nothing,
    Open,
    Probe,
    Refuse,
    Stand,
    Update,
    Votes,
)
from dfca.peer.options import PeerOptions
from dfca.peer.revival import FRESH, PAUSE, DriftDetector
from dfca.peer.work import Draw, Job, Losses, Rest, Score, Train, Trained, Warm, WarmUp

VERSION = 1
"""Of what `save` returns."""
REMEMBERED = 64
"""Of how many local updates a peer remembers the end: older models are all of this age."""
MOST_ALARMS = 4096
"""Of how many peers a peer remembers alarms."""
MOST_AHEAD = 1000
"""A peer joins no round that is further ahead of all that the other neighbours claim."""
MOST_ROUND = 2**40
"""No round beyond this is believed."""
UNKNOWN = -1
"""The incarnation of a neighbour that has sent models and no hello yet."""
LIFE = 10**6
"""Alarms are numbered from here on in every life of a peer."""
_participates = lru_cache(4096)(participates)
"""Asked again and again while a peer waits, and always the same."""


class State(Enum):
    """What a peer does."""

    EMPTY = "empty"
    WARMING = "warming"
    ELECTING = "electing"
    PAUSED = "paused"
    TRAINING = "training"
    WAITING = "waiting"
    DONE = "done"


class Step(Enum):
    """What a peer does next, once everything of this instant has been handled."""

    ASK = "ask"
    FOLD = "fold"
    CLOSE = "close"
    BEGIN = "begin"


@dataclass(frozen=True)
class Saved:
    """What a peer needs on the disk: it goes on from here after a crash."""

    version: int
    seed: int
    incarnation: int
    round: int
    lineage: Lineage
    bank: Tensor | None
    assignment: int | None = None
    stamps: tuple[int, ...] = ()
    origins: tuple[int, ...] = ()
    folded: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    detector: DriftDetector = field(default_factory=DriftDetector)
    voted: bool = True


class Peer(Machine):
    """One participant that exchanges models with its neighbours, or with nobody.

    job: the long job that runs. ending: the round that was trained and is not closed. wanted: by cluster, whom it asked
    for a copy, and until when it waits; answers: the copies that came. newcomer: it has yet to join its neighbours'
    round. warm: its model for an election. voted: it had a vote on its models, or has seen that they fit. checking: the
    job that looks whether they do. awaited: one neighbour whose round is missing, where there was one.
    """

    def __init__(
        self,
        options: PeerOptions,
        allocate: Callable[[int], Tensor],
        incarnation: int = 0,
        saved: Saved | None = None,
    ) -> None:
        super().__init__(options, allocate, incarnation)
        self.state = State.EMPTY
        self.lineage: Lineage = ()
        self.inbox = Inbox(depth=2 if options.aggregation == "batch" else 1)
        self.job: Train | Rest | WarmUp | None = None
        self.step: Step | None = None
        self.ending: int | None = None
        self.asked = False
        self.deadline: float | None = None
        self.wanted: dict[int, tuple[int, float]] = {}
        self.answers: dict[int, Copy] = {}
        self.finishes: list[float] = []
        self.newcomer = True
        self.drawing = False
        self.awaited = -1
        self.join_until = 0.0
        self.pursuit: Pursuit | None = None
        self.suspects: dict[int, tuple[float, int]] = {}
        self.detector = DriftDetector()
        self.election: Election | None = None
        self.warm: Warm | None = None
        self.voted = True
        self.adopted = 0
        self.checking: Score | None = None
        self.alarm_number = incarnation * LIFE
        self.alarm_sent: tuple[bool, int] = (False, 0)
        if saved is not None:
            self._resume(saved)

    # What a driver asks.

    @property
    def relays(self) -> bool:
        """Whether it hands on copies of models that it did not train."""
        return self.rules.share == "relay" and self.rules.exchange == "gossip"

    def next_wake(self) -> float | None:
        """Return when `wake` is to be called: minus infinity for as soon as nothing else is to be handled."""
        if self.step is not None:
            return -math.inf
        times = [until for _, until in self.wanted.values()]
        if self.deadline is not None:
            times.append(self.deadline)
        busy = self.job is not None or self.election is not None or self.drawing
        if not busy and ((self.bank is None and self.pursuit is None) or self._waits_for_hello()):
            times.append(self.join_until)
        if self.pursuit is not None:
            times.append(self.pursuit.until)
        if self.election is not None:
            times.append(self.election.next_wake())
        times += [until for until, _ in self.suspects.values() if until > self.now]
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else soonest

    def save(self) -> Saved:
        """Return what must survive a crash."""
        copies = self.copies
        return Saved(
            VERSION,
            self.options.seed,
            self.incarnation,
            copies.round,
            self.lineage,
            None if self.bank is None else self.bank.clone(),
            copies.assignment,
            copies.stamps,
            copies.origins,
            copies.folded,
            copies.updates,
            self.detector.copy(),
            self.voted,
        )

    def waits(self) -> str:
        """Describe what the peer waits for, in a sentence without a subject."""
        if self.state is State.EMPTY:
            return f"waits for the models of {names(self.options.neighbours)}"
        if self.state in (State.ELECTING, State.PAUSED) and self.election is not None:
            return f"waits for an election ({self.election.phase})"
        if self.ending is not None:
            peers = sorted({n for n in self.links if self._expects(n)} | {n for n, _ in self.wanted.values()})
            return f"waits for round {self.ending} of {names(peers)}"
        return "waits for nothing" if self.state is not State.DONE else "is done"

    # Inputs.

    def begin(self, now: float, late: bool = False) -> None:
        """Begin; late: others have begun before, and have models."""
        self._tick(now)
        self.join_until = now + self.options.join_s
        if self.bank is not None:
            self._wait_for(Step.BEGIN)
            return
        drawn = self.options.start != "elected"
        if not drawn and not late:
            self._warm_up(None)
        elif drawn and (not late or self.rules.exchange == "none" or not self.options.neighbours):
            self._draw()
        self._settle()

    def connected(self, neighbour: int, now: float) -> None:
        """Take in that a neighbour is in reach: a new epoch of the link begins."""
        self._tick(now)
        if neighbour not in self.options.neighbours:
            self._refuse("unknown neighbour", neighbour)
            return
        if neighbour in self.links:
            self.disconnected(neighbour, now)
        self.links[neighbour] = Neighbour()
        self._send(neighbour, self._hello())
        if self.election is not None:
            self.election.gained(neighbour)
        self._after_input()

    def disconnected(self, neighbour: int, now: float) -> None:
        """Take in that a neighbour is out of reach: what was under way to and from it is lost."""
        self._tick(now)
        if self.links.pop(neighbour, None) is None:
            return
        self.wanted = {j: asked for j, asked in self.wanted.items() if asked[0] != neighbour}
        if self.pursuit is not None and self.pursuit.source == neighbour:
            self._give_up()
        if self.election is not None:
            self.election.lost(neighbour, now)
        self._check_wait()
        self._settle()
        self._after_input()

    def _handle(self, sender: int, message: Any) -> bool:
        handle = _HANDLERS.get(type(message))
        if handle is not None:
            handle(self, sender, message)
            self._after_input()
        return handle is not None

    def finished(self, job: Job, result: Any, now: float) -> None:
        """Take in finished work."""
        self._tick(now)
        if isinstance(job, Score):
            if job is self.checking:
                self._judge_fit(result)
            elif self.election is not None:
                self.election.scored(job, result)
        elif isinstance(job, Draw):
            self.drawing = False
            if self.bank is None:
                self._take_bank(result, (), self.round)
                self._broadcast(self._hello())
                self._wait_for(Step.BEGIN)
        elif job is self.job:
            self.job = None
            if isinstance(job, Train):
                self._end_training(result)
            elif isinstance(job, Rest):
                self._end_rest()
            else:
                self._end_warm_up(result)
        self._after_input()

    def wake(self, now: float) -> None:
        """Do what is due: the next step of a round, or what a timer asks for."""
        self._tick(now)
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            self._note("timeout", round=self.ending if self.ending is not None else -1)
            self.wanted.clear()
            self._wait_for(Step.FOLD)
        late = [j for j, (_, until) in self.wanted.items() if now >= until]
        for j in late:
            del self.wanted[j]
        if late:
            self._check_wait()
        if self.pursuit is not None and now >= self.pursuit.until:
            self._suspect(self.pursuit.source)
            self._give_up()
        if self.election is not None:
            self.election.wake(now)
        if self.step is not None:
            self._take_step()
        elif self._waits_for_hello() and now >= self.join_until:
            self._begin_round()
        self._seek()
        self._settle()
        self._after_input()

    # Rounds.

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
        if self.round >= self.options.rounds:
            if self.state is not State.DONE:
                self._note("done", round=self.round)
            self.state = State.DONE
            return
        self.state = State.TRAINING
        self.job = Train(self.round) if self._takes_part(self.id, self.round) else Rest(self.round)
        self._out.work.append(self.job)
        self._note("start", round=self.round)

    def _waits_for_hello(self) -> bool:
        """Return whether the first round waits for the neighbours' first word."""
        return self.newcomer and self.bank is not None and self.ending is None and self._silent()

    def _silent(self) -> bool:
        """Return whether a neighbour in reach has not said hello yet."""
        return any(each.hello is None for each in self.links.values())

    def _catch_up(self) -> None:
        """Join the round that the neighbours are in."""
        self.newcomer = False
        newest = self._believable(self._claimed_rounds())
        if newest > self.round:
            self.copies = replace(self.copies, round=newest)
            self._note("jump", round=newest)
            self._broadcast(self._hello())

    def _claimed_rounds(self, but: int | None = None) -> list[int]:
        """List the rounds that the neighbours with models say they are in, but for one neighbour."""
        hellos = [each.hello for n, each in self.links.items() if n != but]
        return [hello.round for hello in hellos if hello is not None and hello.clusters]

    def _believable(self, rounds: list[int]) -> int:
        """Return the newest of the rounds that neighbours claim: one alone may not be far ahead of all others."""
        *_, second, newest = (-1, -1, *sorted(rounds))
        if len(rounds) > 1:
            newest = min(newest, second + MOST_AHEAD)
        return min(newest, self.options.rounds - 1)

    def _end_training(self, result: Trained) -> None:
        assert self.bank is not None
        now, cluster = self.round, result.cluster
        row = self.bank[cluster]
        if result.fine and result.model is not None:
            row.copy_(result.model)
        trained = (row.clone() if result.model is None else result.model) if result.fine else None
        self.copies, messages = self.rules.end_round(self.copies, cluster, trained)
        self.finishes = [*self.finishes[1 - REMEMBERED :], self.now]
        self.state, self.ending, self.asked = State.WAITING, now, False
        self._note("finish", cluster=cluster if result.fine else -1, round=now)
        self._out.save = True
        if self.options.revives:
            self.detector.grow(len(self.bank))
            self.detector.look(result.loss)
            if result.fine:
                self.detector.newest[cluster] = max(now, self.detector.newest[cluster])
            self._raise_alarm()
        if self.rules.exchange == "none":
            self._wait_for(Step.CLOSE)
            return
        self._adopt()  # what came while it trained
        fresh = tuple(self.detector.newest) if self.options.revives else ()
        offers = tuple(self.rules.offers(self.copies).items())
        updates = [Update(each, len(messages), self.lineage, 0.0, fresh, offers) for each in messages]
        for neighbour in self.links:
            for update in updates:
                self._send(neighbour, update)
            if not updates:
                self._send(neighbour, Nothing(now, self.lineage, fresh, offers))
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

    def _expects(self, neighbour: int) -> bool:
        """Return whether a neighbour has still to end the round that this peer is ending."""
        known, now = self.links[neighbour], self.ending
        if now is None or known.hello is None or not known.hello.clusters or known.has_ended(now):
            return False
        return self._takes_part(neighbour, now)

    def _takes_part(self, peer: int, round: int) -> bool:
        rate = self.options.participation
        return rate >= 1 or _participates(self.options.seed, peer, round, rate)

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

    def _ask_for_copies(self) -> None:
        """Ask for the copies of models that no neighbour has trained."""
        assert self.bank is not None
        self.asked = True
        limit = math.inf if self.options.aggregation == "sequential" or self.ending is None else self.ending
        fresh = self.inbox.clusters(limit)
        for j in range(len(self.bank)):
            if j in fresh or j in self.wanted:
                continue
            offered = [
                offer
                for n, known in sorted(self.links.items())
                for cluster, offer in known.offers
                if cluster == j and known.offers_round <= limit and compatible(self.lineage, known.offers_lineage, j)
            ]
            chosen = self.rules.wants(self.copies, j, offered, self.round - 1)
            if chosen is not None:
                self.wanted[j] = (chosen.sender, self.now + self.options.hang_s)
                self._send(chosen.sender, CopyRequest(j, self.lineage))
        if not self.wanted or self.options.aggregation == "sequential":
            self._wait_for(Step.FOLD)

    def _fold(self) -> None:
        """Fold what came; close the round that is being ended."""
        if self.bank is None or isinstance(self.job, Train):
            return
        batch = self.options.aggregation == "batch"
        limit = math.inf if not batch or self.ending is None else self.ending
        folded = []
        for _, update, came_s in self.inbox.take(limit):
            message = update.message
            if not compatible(self.lineage, update.lineage, message.cluster):  # that it fits was seen when it came
                self._note("drop", message.sender, message.cluster, message.round)
                continue
            age = self._age(update, came_s)
            folded.append((message, self.options.staleness.weight(age)))
            self._note("fold", message.sender, message.cluster, message.round, age)
        if folded:
            self.copies = self.rules.fold_all_(self.copies, folded)
        answers, self.answers = self.answers, {}
        for copy in answers.values():
            self._take_copy(copy)
        if self.ending is not None:
            self.deadline = None
            self.wanted = {} if batch else self.wanted
            self._wait_for(Step.CLOSE)

    def _age(self, update: Update, came_s: float) -> float:
        """Measure how old an update is: `staleness`."""
        unit, message = self.options.staleness.unit, update.message
        if unit == "seconds":
            return update.age_s + max(0.0, self.now - came_s)
        behind = max(0, self.round - 1 - message.round)
        if unit == "rounds" or not behind:
            return behind
        return min(behind, len(self.finishes) - bisect_right(self.finishes, came_s - update.age_s))

    def _take_copy(self, copy: Copy) -> None:
        """Take a relayed copy, if it is still worth it."""
        assert self.bank is not None
        message = copy.message
        assert message.offer is not None
        fits = compatible(self.lineage, copy.lineage, message.cluster) and usable(message, self.bank)
        if fits and self.rules.wants(self.copies, message.cluster, [message.offer], self.round - 1) is not None:
            self.copies = self.rules.receive_(self.copies, message)
            self._note("relay", message.sender, message.cluster, message.round)
        else:
            self._note("drop", message.sender, message.cluster, message.round)

    def _close_round(self) -> None:
        """End a round: see whether an election is due, then go on."""
        assert self.bank is not None
        now, self.ending = self.round - 1, None
        if self.options.revives:
            self.detector.end_round(len(self.bank))
            if self.election is None and self.detector.is_due(now, self.options.election):
                self.election = self._make_election(Call(self.detector.lost(), len(self.bank)))
                self.election.begin(self.now)
            elif self.election is None and not self.voted and now - self.adopted >= PAUSE:
                self.voted = True  # once
                self._warm_up(now)
                return
        self._begin_round()

    # Messages of rounds.

    def _on_hello(self, sender: int, hello: Hello) -> None:
        known = self.links[sender]
        guessed = known.hello is None or known.hello.incarnation == UNKNOWN
        if not guessed and known.hello is not None and known.hello.incarnation != hello.incarnation:
            self.links[sender] = known = Neighbour()
            guessed = True
        if guessed:
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
        if self.newcomer and self.state is State.WAITING and self.ending is None and not self._silent():
            self._wait_for(Step.BEGIN)

    def _on_update(self, sender: int, update: Update) -> None:
        message, known = update.message, self.links[sender]
        if message.sender != sender:
            self._refuse("in another's name", sender)
            return
        if message.round > MOST_ROUND:
            self._refuse("malformed", sender)
            return
        self._learn(sender, message.round, update.lineage, update.freshness, update.offers)
        known.ended(message.round, message.cluster, update.parts)
        j, round = message.cluster, message.round
        if self.bank is None or not compatible(self.lineage, update.lineage, j) or not self._takes_part(self.id, round):
            self._note("drop", sender, j, round)
        elif not usable(message, self.bank):
            self._refuse("does not fit", sender, j, round)
        elif self.inbox.add(sender, update, self.now):
            self._note("hold", sender, j, round)
            idle = self.job is None and self.ending is None and self.step is None
            if self.options.aggregation == "sequential" and idle:
                self._wait_for(Step.FOLD)
        else:
            self._note("drop", sender, j, round)
        self._check_wait()

    def _on_nothing(self, sender: int, message: Nothing) -> None:
        self._note("nothing", sender, round=message.round)
        self._learn(sender, message.round, message.lineage, message.freshness, message.offers)
        self.links[sender].ended(message.round, -1, 1)
        self._check_wait()

    def _learn(
        self,
        sender: int,
        round: int,
        lineage: Lineage,
        freshness: tuple[int, ...],
        offers: tuple[tuple[int, Offer], ...],
    ) -> None:
        """Take in what comes along with the end of a neighbour's round."""
        known = self.links[sender]
        if round >= known.offers_round:
            own = offers and tuple((j, offer) for j, offer in offers if offer.sender == sender)
            known.offers, known.offers_round, known.offers_lineage = own, round, lineage
        if self.options.revives and lineage == self.lineage:
            self.detector.learn(freshness, MOST_ROUND)
        if known.hello is None:  # it is late, or was broken: this says as much
            known.hello = Hello(UNKNOWN, min(round, MOST_ROUND) + 1, max(1, clusters_of(lineage)), lineage)
            self._take_in_hello()
        elif lineage != self.lineage and known.hello.lineage != lineage:
            clusters = clusters_of(lineage) if lineage else known.hello.clusters
            known.hello = known.hello._replace(lineage=lineage, clusters=max(1, clusters))
            self._seek()

    # Relay.

    def _on_copy_request(self, sender: int, request: CopyRequest) -> None:
        j = request.cluster
        if self.bank is None or j >= len(self.bank) or not compatible(self.lineage, request.lineage, j):
            self._send(sender, Declined(j))
            return
        self._send(sender, Copy(self._copy_of(j), self.lineage))

    def _copy_of(self, cluster: int) -> Message:
        """Copy one model as it is now, with how fresh it is."""
        assert self.bank is not None
        copies = self.copies
        offer = Offer(self.id, copies.stamps[cluster], copies.origins[cluster])
        model = self.bank[cluster].clone()
        return Message(self.id, cluster, self.round, self.rules.degree, model, offer, copies.updates[cluster])

    def _on_copy(self, sender: int, copy: Copy) -> None:
        j = copy.message.cluster
        if self.wanted.get(j, (None, 0.0))[0] != sender:
            self._refuse("not asked for", sender, j)
            return
        del self.wanted[j]
        if self.bank is not None:
            if copy.message.sender == sender and usable(copy.message, self.bank):
                self.answers[j] = copy
            else:
                self._refuse("does not fit", sender, j)
            idle = self.job is None and self.ending is None and self.step is None
            if self.options.aggregation == "sequential" and idle:
                self._wait_for(Step.FOLD)
        self._check_wait()

    def _on_declined(self, sender: int, declined: Declined) -> None:
        known = self.links[sender]
        if declined.cluster is not None:
            if self.wanted.get(declined.cluster, (None, 0.0))[0] == sender:
                del self.wanted[declined.cluster]
                self._check_wait()
        elif self.pursuit is not None and self.pursuit.source == sender:
            if known.hello is not None:
                known.hello = known.hello._replace(clusters=0)
            self._give_up()
            self._settle()

    # Join: a peer without models, and one whose lineage lost.

    def _on_bank_request(self, sender: int, request: BankRequest) -> None:
        if self.bank is None:
            self._send(sender, Declined())
            return
        wanted = range(len(self.bank)) if request.clusters is None else sorted(set(request.clusters))
        for j in wanted:
            if 0 <= j < len(self.bank):
                self._send(sender, BankCopy(self._copy_of(j), self.round, len(self.bank), self.lineage))

    def _on_bank_copy(self, sender: int, copy: BankCopy) -> None:
        pursuit = self.pursuit
        if pursuit is None or pursuit.source != sender:
            self._refuse("not asked for", sender, copy.message.cluster)
            return
        problem = pursuit.take(copy, self.options, self.lineage if self.bank is not None else None)
        if problem:
            self._refuse(problem, sender, copy.message.cluster)
            self._suspect(sender)
            known = self.links[sender]
            if known.hello is not None:  # what it sends counts, not what it said
                known.hello = known.hello._replace(lineage=copy.lineage, clusters=copy.clusters)
            self._give_up()
            self._settle()
            return
        self._note("take", sender, copy.message.cluster, copy.message.round)
        self._adopt()

    def _seek(self) -> None:
        """Ask a neighbour for its models: any where there are none, else those of a higher lineage."""
        if self.rules.exchange != "gossip":
            return
        best: tuple[Lineage, int, int] | None = None
        for n, known in self.links.items():
            hello = known.hello
            if hello is None or not hello.clusters or self.suspects.get(n, (0.0, 0))[0] > self.now:
                continue
            if self.election is not None and hello.lineage and self.election.is_held_by(hello.lineage[-1]):
                continue  # the decision is on its way here
            if self.bank is None or hello.lineage > self.lineage:
                best = max(best or (hello.lineage, hello.round, -n), (hello.lineage, hello.round, -n))
        if best is None or (self.pursuit is not None and self.pursuit.lineage >= best[0]):
            return
        source, lineage = -best[2], best[0]
        needed = None
        if self.bank is not None and extends(lineage, self.lineage):
            needed = opened_since(lineage, self.lineage)
        wait = self.options.hang_s * 2 ** min(10, self.suspects.get(source, (0.0, 0))[1])
        self.pursuit = Pursuit(source, lineage, self.now + wait, needed)
        self._send(source, BankRequest(needed))
        if self.bank is None:
            self._leave_election()
            if isinstance(self.job, WarmUp):
                self._stop_warming()
            self.state = State.EMPTY

    def _adopt(self) -> None:
        """Take over the models that were asked for, once all are here and no training runs on the bank."""
        pursuit = self.pursuit
        if pursuit is None or not pursuit.complete:
            return
        if self.bank is not None and extends(pursuit.lineage, self.lineage):
            if not isinstance(self.job, Train):
                self._extend(pursuit)
            return
        if pursuit.needed is not None:  # its own lineage has changed since: it lacks the others
            self._give_up()
            return
        had, claims = self.bank is not None, self._claimed_rounds(but=pursuit.source)
        round = max(self.round, self._believable([*claims, pursuit.round]))
        if self.job is not None:
            if isinstance(self.job, WarmUp):
                self._note("warmed")
            self.job = None
        self._leave_election()
        self._take_bank(torch.stack(pursuit.models()), pursuit.lineage, round)
        for j, copy in pursuit.taken.items():
            self._set_freshness(j, copy.message)
        self._note("switch" if had else "join", pursuit.source, number=len(pursuit.taken))
        self._end_pursuit()
        self.newcomer, self.step, self.ending, self.deadline = True, None, None, None
        self.wanted.clear()
        self._wait_for(Step.BEGIN)

    def _extend(self, pursuit: Pursuit) -> None:
        """Take the clusters that others have opened since."""
        self._leave_election()
        if isinstance(self.job, WarmUp):
            self._stop_warming()
        opened = opened_since(pursuit.lineage, self.lineage)
        for j in opened:
            copy = pursuit.taken[j]
            self._open_cluster(j, copy.message.model)
            self._set_freshness(j, copy.message)
            self._note("adopt", pursuit.source, j, copy.message.round)
        assert self.bank is not None
        self.lineage = pursuit.lineage
        self.detector.close(self.round - 1, len(self.bank), opened)
        self._end_pursuit()
        if self.job is None and self.step is None:
            self._wait_for(Step.CLOSE if self.ending is not None else Step.BEGIN)

    def _end_pursuit(self) -> None:
        assert self.pursuit is not None
        self.suspects.pop(self.pursuit.source, None)
        self.pursuit, self.voted, self.adopted = None, not self.options.revives, self.round
        self._out.save = True
        self._broadcast(self._hello())

    def _set_freshness(self, cluster: int, message: Message) -> None:
        """Note how fresh a copy is that was taken over."""
        offer = message.offer
        assert offer is not None
        stamps, origins = list(self.copies.stamps), list(self.copies.origins)
        stamps[cluster], origins[cluster] = offer.stamp, offer.origin
        self.copies = replace(self.copies, stamps=tuple(stamps), origins=tuple(origins))

    def _give_up(self) -> None:
        """Stop waiting for a source of models."""
        self.pursuit = None
        if self.bank is None:
            self.join_until = self.now + self.options.join_s
        self._seek()

    def _suspect(self, neighbour: int) -> None:
        """Ask a neighbour that does not keep its word not again for a while; twice as long each time."""
        times = min(10, self.suspects.get(neighbour, (0.0, 0))[1])
        self.suspects[neighbour] = (self.now + self.options.hang_s * 2**times, times + 1)

    def _settle(self) -> None:
        """See what a peer without models can do: wait, draw a start of its own, or stand for election."""
        busy = self.pursuit is not None or self.job is not None or self.election is not None or self.drawing
        if self.bank is not None or busy:
            return
        elected = self.options.start == "elected"
        alone = not self.options.neighbours
        if elected and (alone or (self.links and not self._silent()) or self.now >= self.join_until):
            if self.warm is None:
                self._warm_up(None)
            else:
                self._stand_for_start(self.warm)
        elif not elected and self.now >= self.join_until:
            self._note("afresh")
            self._draw()

    def _draw(self) -> None:
        """Begin with a start of one's own."""
        self.drawing = True
        self._out.work.append(Draw())

    def _take_bank(self, models: Tensor, lineage: Lineage, round: int) -> None:
        """Begin with models (m, P) of a lineage."""
        if models.dim() != 2 or models.shape[1] != self.options.size or not len(models):
            self._refuse("models of another size", self.id)
            return
        self.bank = self.allocate(len(models))
        self.bank.copy_(models)
        self.copies = replace(ClientState.of(self.bank), round=round, assignment=None)
        self.lineage, self.state = lineage, State.WAITING
        self.inbox.clear()
        self.answers.clear()
        self.detector = DriftDetector(last=self.detector.last, pause=self.detector.pause, alarms=self.detector.alarms)
        self.detector.grow(len(models))

    def _open_cluster(self, slot: int, model: Tensor) -> None:
        """Put a model into a cluster that an election opened; the bank grows where it is new."""
        assert self.bank is not None
        if slot >= len(self.bank):
            before = len(self.bank)
            self.bank = self.allocate(slot + 1)
            for j in range(before, slot + 1):
                self.bank[j].copy_(model)
                self.copies = self.copies.with_model(j, self.bank)
        self.bank[slot].copy_(model)
        self.copies = self.copies.with_model(slot, self.bank)
        self.inbox.forget_cluster(slot)

    # Elections.

    def _make_election(self, call: Call | None) -> Election:
        options = self.options
        return Election(
            self.id,
            options.seed,
            self.incarnation,
            options.clusters,
            options.election,
            options.quorum,
            options.hang_s,
            options.size,
            options.dtype,
            self.lineage,
            call,
            links=set(self.links),
            alarmed=self.detector.alarmed,
        )

    def _warm_up(self, stage: int | None) -> None:
        self.state, self.job = State.WARMING, WarmUp(stage)
        self._out.work.append(self.job)
        self._note("warm")

    def _stop_warming(self) -> None:
        self.job = None
        self._note("warmed")

    def _end_warm_up(self, warm: Warm) -> None:
        self._note("warmed")
        if self.election is not None:
            self.warm = warm
            self.state = State.ELECTING
            self.election.warmed(warm)
        elif self.bank is None:
            self.warm = warm
            if self.pursuit is None:
                self._stand_for_start(warm)
        else:  # does a model of one's own fit better than those that were taken over?
            self.warm, self.state = warm, State.WAITING
            self.checking = Score(self.bank.clone(), self.round - 1)
            self._out.work.append(self.checking)

    def _judge_fit(self, losses: Losses) -> None:
        self.checking = None
        if self.warm is not None and bid(losses.bid, self.warm.losses.bid[0]) > 0:
            self.detector.misfit = True
            self._raise_alarm()
        self.warm = None
        self._wait_for(Step.BEGIN)

    def _stand_for_start(self, warm: Warm) -> None:
        """Begin a wave for the election of a start."""
        self.state = State.ELECTING
        self.election = self._make_election(None)
        self.election.warm = warm
        self.election.begin(self.now)

    def _pause(self) -> None:
        """Take part in the election that goes on: warm up if it is not too late."""
        assert self.election is not None
        if self.election.opened or self.election.warm is not None:
            self.state = State.PAUSED if self.election.warm is None else State.ELECTING
            return
        self.election.stage, self.election.held = self.round - 1, self.bank
        self.election.alarmed = self.detector.alarmed
        self._warm_up(self.round - 1)

    def _on_probe(self, sender: int, probe: Probe) -> None:
        if self.election is not None:
            if probe.base == self.election.base and (probe.call is None) == (self.election.call is None):
                self.election.receive(sender, probe, self.now)
            else:
                self._refuse_wave(sender, probe)
            return
        start = self.bank is None and self.options.start == "elected" and self.pursuit is None
        fits = start and not probe.base and probe.call is None
        if self.bank is not None and self.options.revives and probe.call is not None:
            fits = probe.base == self.lineage and probe.call.clusters == len(self.bank)
        if not fits:
            self._refuse_wave(sender, probe)
            return
        self.election = self._make_election(probe.call)
        self.election.warm = self.warm if start else None
        self.election.receive(sender, probe, self.now)
        if start:
            if self.job is None and self.warm is None:
                self._warm_up(None)
        elif self.ending is not None:
            self._check_wait()
        elif self.job is None and self.checking is None and self.step is None:
            self._pause()
        elif isinstance(self.job, WarmUp):  # it was looking at its fit: the election will tell
            self._stop_warming()
            self._pause()

    def _refuse_wave(self, sender: int, probe: Probe) -> None:
        self._send(sender, Refuse(probe.key))
        self._send(sender, self._hello())

    def _on_election(self, sender: int, message: Any) -> None:
        if self.election is not None:
            self.election.receive(sender, message, self.now)
        elif not isinstance(message, Refuse):
            self._send(sender, Refuse(message.key))

    def _leave_election(self) -> None:
        if self.election is not None:
            self.election.leave()
            self._drain_election()
            self.election = None

    def _drain_election(self) -> None:
        assert self.election is not None
        for neighbour, message in self.election.out:
            self._send(neighbour, message)
        self._out.work += self.election.work
        self.election.out, self.election.work = [], []

    def _after_input(self) -> None:
        """Carry out what an election wants, and its outcome where no training is under way."""
        election = self.election
        if election is None:
            return
        self._drain_election()
        if election.opened and isinstance(self.job, WarmUp):
            self._stop_warming()
            self.state = State.PAUSED
        if election.outcome is not None and not isinstance(self.job, Train | Rest):
            self._conclude(election.outcome)

    def _conclude(self, outcome: Outcome) -> None:
        """Take the centres of an election, and go on."""
        self.election, self.warm = None, None
        opened = outcome.opened
        if outcome.base != self.lineage or (self.bank is None) != (outcome.call is None):
            self._wait_for(Step.BEGIN)
            return
        if self.bank is None:
            if outcome.entry is None:
                self._settle()
                return
            self._take_bank(torch.stack([model for _, model in opened]), (outcome.entry,), self.round)
            self.newcomer = False
        else:
            for slot, model in opened:
                self._open_cluster(slot, model)
            if outcome.entry is not None:
                self.lineage = (*self.lineage, outcome.entry)
            self.detector.close(self.round - 1, len(self.bank), tuple(slot for slot, _ in opened))
            self.alarm_sent = (False, 0)
            self.state = State.WAITING
        self.voted, self.adopted = outcome.voted or not self.options.revives, self.round
        assert self.bank is not None
        self._note("elect", number=len(self.bank))
        self._out.save = True
        if outcome.entry is not None:
            self._broadcast(self._hello())
        self._wait_for(Step.CLOSE if self.ending is not None else Step.BEGIN)

    # Alarms.

    def _raise_alarm(self) -> None:
        """Send the neighbours word when no model fits any more, or again one does; anew while it lasts."""
        raised, (before, since) = self.detector.alarmed, self.alarm_sent
        if raised == before and not (raised and self.round - since >= FRESH // 2):
            return
        self.alarm_sent = (raised, self.round)
        self.alarm_number += 1
        self.detector.hear_alarm(self.id, self.alarm_number, raised, self.round)
        self._broadcast(Alarm(self.id, self.alarm_number, raised, self.lineage))

    def _on_alarm(self, sender: int, alarm: Alarm) -> None:
        if not self.options.revives or alarm.lineage != self.lineage or alarm.origin == self.id:
            return
        if alarm.origin not in self.detector.alarms and len(self.detector.alarms) >= MOST_ALARMS:
            self._refuse("too many alarms", sender)
        elif self.detector.hear_alarm(alarm.origin, alarm.number, alarm.raised, self.round):
            for neighbour in self.links:
                if neighbour != sender:
                    self._send(neighbour, alarm)

    # Small things.

    def _hello(self) -> Hello:
        clusters = 0 if self.bank is None else len(self.bank)
        return Hello(self.incarnation, self.round, clusters, self.lineage)

    def _wait_for(self, step: Step) -> None:
        """Do a step once everything else of this instant has been handled."""
        self.step = step

    def _tick(self, now: float) -> None:
        """Go on to a time. A clock that was set back takes all deadlines with it."""
        if now < self.now:
            back = now - self.now
            self.join_until += back
            self.deadline = None if self.deadline is None else self.deadline + back
            self.wanted = {j: (n, until + back) for j, (n, until) in self.wanted.items()}
            self.suspects = {n: (until + back, times) for n, (until, times) in self.suspects.items()}
            self.finishes = [time + back for time in self.finishes]
            if self.pursuit is not None:
                self.pursuit.until += back
            if self.election is not None:
                self.election.last_s += back
        self.now = now

    # Saves.

    def _resume(self, saved: Saved) -> None:
        """Go on from a save; one that does not fit is refused, and the peer begins without models."""
        bank = saved.bank
        if saved.version != VERSION:
            self._refuse("a save of another version", self.id)
        elif saved.seed != self.options.seed:
            self._refuse("a save of another swarm", self.id)
        elif bank is not None and (bank.dim() != 2 or bank.shape[1] != self.options.size or not len(bank)):
            self._refuse("a save of another model", self.id)
        elif bank is not None and not bool(torch.isfinite(bank).all()):
            self._refuse("a save that is not finite", self.id)
        elif bank is not None:
            self._take_bank(bank.to(self.options.dtype), saved.lineage, saved.round)
            parts = {name: getattr(saved, name) for name in ("stamps", "origins", "folded", "updates")}
            if all(len(part) == len(bank) for part in parts.values()):
                self.copies = replace(self.copies, assignment=saved.assignment, **parts)
            self.detector, self.voted = saved.detector.copy(), saved.voted
            self.detector.grow(len(bank))
            self.adopted = saved.round

    STATE = (
        "incarnation", "now", "state", "copies", "lineage", "links", "inbox", "job", "step", "ending", "asked",
        "deadline", "wanted", "answers", "finishes", "newcomer", "join_until", "pursuit", "suspects", "detector",
        "election", "warm", "voted", "adopted", "checking", "alarm_number", "alarm_sent", "refused", "drawing",
    )  # fmt: skip
    """The fields of a peer's whole state; its models are the driver's."""

    def state_of(self) -> dict[str, Any]:
        """Return the whole state, field by field, but for the models themselves; nothing may be waiting in `ready`."""
        fields = {name: getattr(self, name) for name in self.STATE}
        bare = replace(self.copies, bank=torch.empty(0))
        return {**fields, "copies": bare, "clusters": 0 if self.bank is None else len(self.bank)}

    def restore(self, fields: dict[str, Any]) -> None:
        """Continue from a whole state; the memory that `allocate` returns holds the models already."""
        for name in self.STATE:
            if name in fields:
                setattr(self, name, fields[name])
        self.bank = self.allocate(fields["clusters"]) if fields["clusters"] else None
        if self.bank is not None:
            self.copies = replace(self.copies, bank=self.bank)
            if self.election is not None and self.election.held is not None:
                self.election.held = self.bank


_HANDLERS: dict[type, Callable[[Peer, int, Any], None]] = {
    Hello: Peer._on_hello,
    Update: Peer._on_update,
    Nothing: Peer._on_nothing,
    CopyRequest: Peer._on_copy_request,
    Copy: Peer._on_copy,
    Declined: Peer._on_declined,
    BankRequest: Peer._on_bank_request,
    BankCopy: Peer._on_bank_copy,
    Probe: Peer._on_probe,
    Alarm: Peer._on_alarm,
    **dict.fromkeys((Count, Refuse, Open, Centre, Bid, Stand, Candidate, Votes, Decision), Peer._on_election),
}
