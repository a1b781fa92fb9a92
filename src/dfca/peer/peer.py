"""One participant, as a machine without I/O: read this file first.

A driver calls it when something happens (a neighbour comes into reach or leaves it, a message, finished work, a timer)
and then carries out what `ready` returns: what must be saved before messages leave, messages, work, notes. A peer knows
what it was sent and nothing else; it has no clock, thread, socket, file or randomness of its own. Time is an argument.

    EMPTY      no models: waits for a neighbour that has some, or for an election
    WARMING    no models: trains one of its own, to stand and vote with (`WarmUp`)
    ELECTING   no models: takes part in the election of a start with a vote (`waves.election`)
    PAUSED     no models: takes part without one: it forwards, and ends with the same centres
    TRAINING   a round: `Train`, or `Rest` where it sits the round out; `Personalise` after the last
    WAITING    between two rounds: for neighbours (`batch`), for copies, for the end of this instant
    DONE       all its rounds are done; it still serves others

A round: train; send the trained model to all neighbours; then, under `batch`, wait until every neighbour in reach has
ended the same round, or for `timeout_s`. The end of a round has three steps, each of which waits until everything else
of the same instant has been handled (`wake`): ask for copies that too few neighbours trained (`rules.relay`), fold what
came, close the round, and begin the next. While a peer trains its bank does not change.

Nothing else stops the rounds. Surveys (`waves.survey`), by-elections (`revival`, `waves.election`) and the curve of the
personal last step run beside them: what they compute is `background`, on copies of the models, and what they decide
takes effect when a later round is closed. One of them changes the clusters at a time.

What cannot be used is counted by its reason in `refused`; nothing that comes raises an exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dfca.peer import bank
from dfca.peer.copies import CopyDesk
from dfca.peer.cycle import RoundCycle, Step
from dfca.peer.elections import Elections
from dfca.peer.heard import HANDLERS
from dfca.peer.inbox import Neighbour
from dfca.peer.joiner import Extend, Follow, JoinEffect, Joiner, Pursue, Switch
from dfca.peer.last_step import LastStep
from dfca.peer.machine import Machine, names
from dfca.peer.parts import Part, is_silent, takes_part
from dfca.peer.records import messages as m
from dfca.peer.records.lineage import Entry, Lineage, aligned, extended, layout_of
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import (
    KEPT,
    Curve,
    Draw,
    Job,
    Losses,
    Observe,
    OwnCurve,
    Personalise,
    Rest,
    Score,
    Train,
    Trained,
    Warm,
    WarmUp,
)
from dfca.peer.state import FRESHNESS, VERSION, Saved, State
from dfca.peer.surveys import Surveys
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.election import Election, Outcome
from dfca.peer.waves.survey import SurveyWave


class Peer(Machine):
    """One participant that exchanges models with its neighbours, or with nobody.

    Each of its six parts owns its fields and knows no other part. The peer calls them one after another, and is the
    only one that writes what it does (`state`, `job`) and what it holds (`copies`, `lineage`). `heard` says what each
    message does to it.
    """

    PARTS = ("cycle", "desk", "joiner", "elections", "surveys", "last_step")
    UNSTORED = Machine.UNSTORED | set(PARTS)

    def __init__(
        self,
        options: PeerOptions,
        allocate: Callable[[int], Tensor],
        incarnation: int = 0,
        saved: Saved | None = None,
    ) -> None:
        super().__init__(options, allocate, incarnation)
        self.state: Enum = State.EMPTY  # what it does
        self.neighbours = options.neighbours  # those of the graph now, in reach or not
        self.lineage: Lineage = ()  # the elections and surveys that its models come from
        self.answer_time = AnswerTime(options.hang_s)  # how long answers take, which all parts learn together
        self.most_peers = m.MOST_PEERS  # how many peers there can be
        self.cycle = RoundCycle(self.out, options)  # train, send, wait, fold, close
        self.desk: CopyDesk = CopyDesk(self.out)  # copies of models that too few neighbours train
        self.joiner: Joiner = Joiner(self.out)  # models that are taken over from others
        self.elections: Elections = Elections(self.out, incarnation)  # elections, and the alarms that lead to them
        self.surveys = Surveys(self.out, options)  # which clusters are worth their data
        self.last_step: LastStep = LastStep(self.out, options)  # the personal last step
        if saved is not None:
            self._resume(saved)

    # What parts read: `PeerView`.

    @property
    def wave(self) -> Election | SurveyWave | None:
        """The election or survey that it takes part in."""
        return self.elections.wave or self.surveys.wave

    @property
    def holds_out(self) -> bool:
        """Whether samples are held out of training now: somebody will ask how models do on them."""
        return self.surveys.is_to_come(self) or self.last_step.unmeasured

    @property
    def open_clusters(self) -> list[int]:
        """The clusters that are not closed."""
        return [j for j in range(len(self.copies.counts)) if j not in self.copies.closed]

    @property
    def open_models(self) -> Tensor | None:
        """The models of the clusters that are open, (k, P): the bank itself where all are."""
        return self.bank if self.bank is None or not self.copies.closed else self.bank[self.open_clusters]

    @property
    def is_stirred(self) -> bool:
        """Whether rounds are waited for: by a wave, models that are taken over, or a change that has been decided."""
        return self.wave is not None or self.joiner.pursuit is not None or self.changes or self.background is not None

    def will_take(self, lineage: Lineage) -> bool:
        """Return whether a neighbour's lineage is what this peer's will be once what was decided takes effect."""
        return self.surveys.will_take(self, lineage) or self.elections.will_take(self, lineage)

    def hello(self) -> m.Hello:
        """Make what it says of itself."""
        return m.Hello(self.incarnation, self.round, len(self.copies.counts), self.lineage)

    # What survives.

    def _parts(self) -> Iterable[Part]:
        return (getattr(self, name) for name in self.PARTS)

    def state_of(self) -> dict[str, Any]:
        """See `Machine`; with the fields of all parts."""
        stored = super().state_of() | {"election": self.wave}
        for part in self._parts():
            stored |= part.save()
        return stored

    def restore(self, fields: dict[str, Any]) -> None:
        """See `Machine`; what parts share is shared again."""
        super().restore(fields)
        for part in self._parts():
            part.restore(fields)
        self._set_neighbours(self.neighbours)
        if self.wave is not None:
            self.wave.resume(self.answer_time, self.open_models)
        paused = self.state in (State.PAUSED, State.WARMING, State.ELECTING) or isinstance(self.job, Curve)
        if self.bank is not None and paused:  # by a survey, an election or a curve of version 0.2
            self.state, self.job = State.WAITING, None
            self.cycle.wait_for(Step.BEGIN if self.cycle.ending is None else Step.CLOSE)

    def save(self) -> Saved:
        """Return what must survive a crash."""
        return Saved(
            version=VERSION,
            seed=self.options.seed,
            incarnation=self.incarnation,
            lineage=self.lineage,
            bank=None if self.bank is None else self.bank.clone(),
            detector=self.elections.detector.copy(),
            voted=self.elections.voted,
            own=self.elections.own,
            survey_at=self.surveys.due,
            samples=self.surveys.samples,
            curves=self.last_step.curves.copy(),
            **{name: getattr(self.copies, name) for name in ("round", "assignment", *FRESHNESS)},
        )

    def _resume(self, saved: Saved) -> None:
        """Continue from a save; one that does not fit is refused, and the peer begins without models."""
        if (problem := saved.problem(self.options)) is not None:
            self.out.refuse(problem, self.id)
            return
        models, own, dtype = saved.bank, saved.own, self.options.dtype
        self.elections.resume(None if own is None else own.to(dtype))
        if models is None:
            return
        self._take_bank(models.to(dtype), saved.lineage, saved.round)
        history = {name: getattr(saved, name) for name in FRESHNESS}
        if all(len(values) == len(models) for values in history.values()):
            self.copies = replace(self.copies, assignment=saved.assignment, **history)
        self.surveys.resume(saved.survey_at, saved.samples)
        self.elections.resume_fit(saved.detector, saved.voted, saved.round, len(models))
        self.last_step.resume(saved.curves)

    # Inputs.

    def begin(self, now: float, late: bool = False) -> None:
        self._tick(now)
        self.joiner.begin_waiting(self)
        if self.bank is not None:
            self.cycle.wait_for(Step.BEGIN)
            return
        drawn = self.options.start != "elected"
        if not drawn and not late and self.elections.own is None:
            self.warm_up()
        elif drawn and (not late or self.rules.exchange == "none" or not self.neighbours):
            self._draw()
        self.settle()

    def connected(self, neighbour: int, now: float) -> None:
        self._tick(now)
        if neighbour not in self.neighbours:
            self.out.refuse("unknown neighbour", neighbour)
            return
        if neighbour in self.links:
            self.disconnected(neighbour, now)
        self.links[neighbour] = Neighbour()
        self.out.send(neighbour, self.hello())
        self.last_step.greet(neighbour)
        if self.wave is not None:
            self.wave.gained(neighbour)
        self._after_input()

    def disconnected(self, neighbour: int, now: float) -> None:
        self._tick(now)
        if self.links.pop(neighbour, None) is None:
            return
        self.desk.lose(neighbour)
        if self.joiner.expects(neighbour):
            self.carry_out(self.joiner.give_up(self))
        if self.wave is not None:
            self.wave.lost(neighbour, self.now)
        self.last_step.pool(self)
        self.check_wait()
        self.settle()
        self.begin_if_all_have_spoken()
        self._after_input()

    def rewire(self, neighbours: tuple[int, ...], now: float) -> None:
        """Take in that the graph around the peer has changed: these are its neighbours from now on.

        Former neighbours are disconnected; what they have sent already is folded. A new one may connect from now on.
        """
        self._tick(now)
        self._set_neighbours(tuple(sorted({*neighbours} - {self.id})))
        for gone in [n for n in self.links if n not in self.neighbours]:
            self.disconnected(gone, now)
        self.joiner.forget_strangers(self.neighbours)
        self.cycle.inbox.forget_strangers(self.neighbours)
        self.last_step.curves.forget_strangers(self.neighbours)
        self.settle()
        self._after_input()

    def _set_neighbours(self, neighbours: tuple[int, ...]) -> None:
        """Take others as the neighbours of the graph: their number weighs what is folded, and travels with models."""
        same, rules = neighbours == self.options.neighbours, self.options.rules
        self.neighbours, self.rules = neighbours, rules if same else replace(rules, degree=len(neighbours))

    def limit_peers(self, most: int, now: float) -> None:
        """Take in how many peers there can be, where the driver knows: no election counts more."""
        self._tick(now)
        self.most_peers = max(1, min(most, m.MOST_PEERS))
        if self.wave is not None:
            self.wave.limit(self.most_peers)

    def _handle(self, sender: int, message: Any) -> bool:
        handle = HANDLERS.get(type(message))
        if handle is None:
            return False
        if getattr(message, "lineage", None) is not self.lineage:  # mostly it is
            message = self._compared(message)
        handle(self, sender, message)
        if self.elections.wave is not None or self.surveys.wave is not None:
            self._after_input()
        return True

    def _compared(self, message: Any) -> Any:
        """Fold the lineage of a message as far as this peer's own, or its own as far as the message's."""
        name = "base" if isinstance(message, m.Probe) else "lineage"
        told, mine = getattr(message, name, ()), self.lineage
        if told == mine:
            return message
        self.lineage = aligned(mine, told)
        again = aligned(told, self.lineage)
        return message if again is told else message._replace(**{name: again})

    def finished(self, job: Job, result: Any, now: float) -> None:
        self._tick(now)
        if job is self.job:
            self.job = None
            _ENDS[type(job)](self, job, result)
        elif job is self.background:
            self.background = None
            _ENDS_BESIDE[type(job)](self, job, result)
        elif isinstance(job, Score):
            self._end_score(job, result)
        self._after_input()

    def next_wake(self) -> float | None:
        cycle = self.cycle
        if cycle.step is not None:
            return -math.inf
        due, wave = math.inf if cycle.deadline is None else cycle.deadline, self.wave
        if self.desk.wanted:
            due = min(due, self.desk.next_timeout())
        if wave is not None:
            due = min(due, wave.next_wake())
        free = self.job is None and self.elections.wave is None
        return self._on_drivers_clock(min(due, self.joiner.next_timeout(self, free, cycle.ending is not None)))

    def wake(self, now: float) -> None:
        """Do what is due: the next step of a round, or what a timer asks for."""
        self._tick(now)
        if self.cycle.deadline is not None and self.cycle.is_late(self.now):
            self.desk.stop_waiting()
            self.cycle.wait_for(Step.FOLD)
        if self.desk.wanted and self.desk.time_out(self.now):
            self.check_wait()
        if self.joiner.pursuit is not None and (late := self.joiner.time_out(self)) is not None:
            self.desk.note_overdue(late.source, late.since)
            self.carry_out(self.joiner.give_up(self))
        if self.wave is not None:
            self.wave.wake(self.now)
        if (step := self.cycle.take_step()) is not None:
            _STEPS[step](self)
        elif self._waits_for_hello() and self.now >= self.joiner.join_until:
            self._begin_round()
        if self.joiner.may_seek(self):
            self.seek()
        if not self.copies.counts:
            self.settle()
        self._after_input()

    def waits(self) -> str:
        if self.state is State.EMPTY:
            return f"waits for the models of {names(self.neighbours)}"
        if self.state in (State.ELECTING, State.PAUSED) and self.elections.wave is not None:
            return f"waits for an election ({self.elections.wave.phase})"
        if self.cycle.ending is not None:
            peers = {n for n in self.links if self.cycle.expects(self, n)} | self.desk.sources()
            return f"waits for round {self.cycle.ending} of {names(sorted(peers))}"
        return "waits for nothing" if self.state is not State.DONE else "is done"

    # Models.

    def _take_bank(self, models: Tensor, lineage: Lineage, round: int) -> None:
        """Begin with models (m, P) of a lineage; that they fit was seen when they came, or were loaded."""
        self.copies = bank.taken(models, lineage, round, self.allocate)
        self.lineage, self.state = lineage, State.WAITING
        self.surveys.postpone(self)
        self.cycle.inbox.kept.clear()
        self.desk.forget_answers()
        self.elections.begin_with(len(models))

    def _open_cluster(self, slot: int, model: Tensor) -> None:
        self.copies = bank.opened(self.copies, slot, model, self.allocate)
        self.surveys.postpone(self)
        self.cycle.inbox.forget_clusters((slot,))

    def _take_entry(self, entry: Entry) -> None:
        if layout_of(self.lineage).after(entry) is None:
            return
        self.elections.reset_alarm()
        self.lineage = extended(self.lineage, entry)
        if entry.changes:
            self.copies, order = bank.surveyed(self.copies, entry, self.allocate)
            self.cycle.inbox.forget_clusters(entry.slots)
            self.desk.forget(entry.slots)
            self.elections.detector.merge(entry.plan, order)
        self.out.note("survey", number=len(self.open_clusters))

    def _draw(self) -> None:
        self.job = Draw()
        self.out.ask(self.job)

    def _end_draw(self, job: Draw, models: Tensor) -> None:
        self._take_bank(models, (), self.round)
        self.out.broadcast(self.hello())
        self.cycle.wait_for(Step.BEGIN)

    # The round cycle.

    def _begin_round(self) -> None:
        if self.bank is None or self.job is not None:
            return
        if self.joiner.newcomer:
            if self.joiner.is_joining(self):
                self.state = State.WAITING
                return
            self._catch_up()
        if self.round >= self.options.rounds:
            self._end_rounds()
            return
        self.out.note("start", round=self.round)
        self.cycle.begin_training(self.now)
        self.copies = self.rules.begin_round(self.copies)
        self.state, self.job = State.TRAINING, self._round_job()
        self.out.ask(self.job)

    def _end_rounds(self) -> None:
        """Take the personal last step, once it can be picked; then all is done."""
        self._work_beside()
        if isinstance(self.background, Curve):
            self.state = State.WAITING
        elif (job := self.last_step.take(self)) is not None:
            self.state, self.job = State.TRAINING, job
            self.out.ask(job)
        else:
            if self.state is not State.DONE:
                self.out.note("done", round=self.round)
            self.state = State.DONE

    def _round_job(self) -> Train | Rest:
        if not takes_part(self.options, self.id, self.round):
            return Rest(self.round)
        return Train(self.round, self.holds_out, self.surveys.is_to_come(self), self.copies.closed)

    def _catch_up(self) -> None:
        newest = self.joiner.catch_up(self)
        if newest > self.round:
            self.copies = replace(self.copies, round=newest)
            self.out.note("jump", round=newest)
            self.out.broadcast(self.hello())

    def _end_training(self, job: Train, result: Trained) -> None:
        """Begin the end of a round: send what was trained, take over what came meanwhile, wait for neighbours."""
        round, cluster = self.round, result.cluster
        complete, counts = len(self.links) >= len(self.neighbours), self.copies.counts
        mixed = complete or (cluster < len(counts) and counts[cluster] > 0)
        near = self.rules.receivers_in(round)
        to = None if near is None else [n for n in self.links if n in near and takes_part(self.options, n, round)]
        listeners = None if to is None else len(to)
        self.copies, trained = self.rules.end_round(self.copies, cluster, self._store(result), listeners)
        self.state = State.WAITING
        self.surveys.note_training(result.samples, result.losses, self.cycle.end_training(self.now, round))
        self.out.note("finish", cluster=cluster if result.fine else -1, round=round)
        self.out.save()
        if self.options.method.revives:
            self.elections.look(self, result, round, mixed)
        if self.rules.exchange == "none":
            self.cycle.wait_for(Step.CLOSE)
            return
        fresh, offers = self.elections.freshness(self), tuple(self.rules.offers(self.copies).items())
        if trained:
            updates = (m.Update(one, len(trained), self.lineage, 0.0, fresh, offers) for one in trained)
            self.out.broadcast(*updates, to=None if near is None else [n for n in self.links if n in near])
        if not trained or near is not None:
            silent = [n for n in self.links if not trained or n not in (near or ())]
            self.out.broadcast(m.Nothing(round, self.lineage, fresh, offers), to=silent)
        self.carry_out(self.joiner.adopt(self))  # the trained model has left with the lineage that it is of
        if self.joiner.may_seek(self):
            self.seek()
        if self.cycle.ending is not None:  # else it has begun anew with the models of others
            self.cycle.await_neighbours(self)
            self.check_wait()

    def _store(self, result: Trained) -> Tensor | None:
        """Store what was trained in the bank, and return it; None where it cannot be used."""
        models, j = self.copies.bank, result.cluster
        if not result.fine:
            return None
        trained = models[j].clone() if result.model is None else result.model
        later = self.rules.rescaled(self.copies, trained)
        if self.options.size and (result.model is not None or later is not trained or self.rules.layout is not None):
            self.rules.store_(models, j, later)  # a run without training has models without numbers
        return later

    def _end_rest(self, job: Rest, result: None) -> None:
        self.out.note("sit", round=self.round)
        self.copies = self.rules.skip_round(self.copies)
        self.state = State.WAITING
        self.cycle.wait_for(Step.CLOSE)

    def _end_personal(self, job: Personalise, result: None) -> None:
        self.out.note("tuned")
        self.state = State.WAITING
        self.carry_out(self.joiner.adopt(self))
        self.cycle.wait_for(Step.BEGIN)

    def check_wait(self) -> None:
        if self.state is State.WAITING:
            self.cycle.check_wait(self, bool(self.desk.wanted))

    def _ask_for_copies(self) -> None:
        limit = partial(self.cycle.limit, self)
        self.cycle.note_asked()
        self.desk.ask(self, limit, self.cycle.inbox.senders(limit), settled=not self.surveys.is_to_come(self))
        if not self.desk.wanted or self.options.method.aggregation == "sequential":
            self.cycle.wait_for(Step.FOLD)

    def _fold(self) -> None:
        """Fold what came; then the round that is being ended can be closed."""
        if self.bank is None or isinstance(self.job, KEPT):
            return
        self.copies = self.cycle.fold(self)
        self.copies = self.desk.fold(self)
        if self.cycle.ending is not None:
            if self.options.method.aggregation == "batch":
                self.desk.stop_waiting()
            self.cycle.end_wait()

    def _close_round(self) -> None:
        """End a round: carry out what was decided, see whether a survey or an election is due, begin the next."""
        self.cycle.close()
        self._take_decided()
        self.elections.end_round(self, self.surveys.is_to_come(self))
        self.surveys.say(self, self.elections.detector.unfit)
        self.elections.prepare(self)
        if self.wave is None and not self.changes:
            if self.surveys.is_due(self):
                self.surveys.begin(self, self.elections.detector.unfit)
            elif self.elections.is_due(self):
                self.elections.call(self)
            elif self.background is None and self.elections.must_look(self):
                self._begin_beside(self.elections.look_at_fit(self))
        self._begin_round()

    @property
    def changes(self) -> bool:
        """Whether its clusters will be others once what was decided takes effect."""
        return self.surveys.decided is not None or self.elections.opens

    def _waits_for_hello(self) -> bool:
        return self.cycle.ending is None and self.joiner.waits_for_hello(self)

    def begin_if_all_have_spoken(self) -> None:
        """Begin the first round where no neighbour's first hello is waited for: it came, or its sender left."""
        waiting = self.joiner.newcomer and self.state is State.WAITING and self.cycle.ending is None
        if waiting and not is_silent(self.links):
            self.cycle.wait_for(Step.BEGIN)

    # Models of others.

    def seek(self) -> None:
        self.carry_out(self.joiner.seek(self))

    def carry_out(self, effect: JoinEffect | None) -> None:
        if effect is not None:
            _JOINS[type(effect)](self, effect)

    def _await_models(self, effect: Pursue) -> None:
        """Wait for models that were asked for: without any there is nothing else to do."""
        if self.bank is None:
            self.leave_wave()
            self.state = State.EMPTY

    def _follow(self, effect: Follow) -> None:
        self.leave_wave()
        for entry in effect.lineage[len(self.lineage) :]:
            self._take_entry(entry)
        self.surveys.catch_up(self)
        self._announce()
        self._continue_round()

    def _extend(self, effect: Extend) -> None:
        pursuit, opened = effect
        self.leave_wave()
        for j in opened:
            copy = pursuit.taken[j]
            self._open_cluster(j, copy.message.model)
            self.copies = bank.stamped(self.copies, j, copy.message.offer)
            self.out.note("adopt", pursuit.source, j, copy.message.round)
        self.lineage = pursuit.lineage
        self.elections.detector.close(self.round - 1, len(self.copies.bank), opened)
        self.elections.set_voted(self, False)
        self._announce()
        self._continue_round()

    def _switch(self, effect: Switch) -> None:
        pursuit, round = effect
        kind = "join" if self.bank is None else "switch"
        self.leave_wave()
        self.job = None
        self._take_bank(torch.stack(pursuit.models()), pursuit.lineage, round)
        for j, copy in pursuit.taken.items():
            self.copies = bank.stamped(self.copies, j, copy.message.offer)
        self.out.note(kind, pursuit.source, number=len(pursuit.taken))
        self.elections.set_voted(self, False)
        self._announce()
        self.desk.stop_waiting()
        self.cycle.begin_anew()

    def _announce(self) -> None:
        self.out.save()
        self.out.broadcast(self.hello())

    def _continue_round(self) -> None:
        """Continue the round, where clusters changed and none is under way."""
        if self.cycle.ending is not None:
            self.check_wait()
        elif self.job is None and self.cycle.step in (None, Step.FOLD):  # folding between rounds leads to no other step
            self.cycle.wait_for(Step.BEGIN)

    def settle(self) -> None:
        """See what a peer without models can do: wait, draw a start of its own, or stand for election."""
        if self.bank is not None or self.joiner.pursuit is not None or self.job is not None or self.wave is not None:
            return
        if not self.joiner.may_begin_alone(self, has_own=self.elections.own is not None):
            return
        if self.options.start != "elected":
            self.out.note("afresh")
            self._draw()
        elif self.elections.warm is None:
            self.warm_up()
        else:
            self._stand(self.elections.warm)

    # Elections and surveys.

    def warm_up(self) -> None:
        self.state = State.WARMING
        self.job = self.elections.warm_up(self)
        self.out.ask(self.job)

    def _stop_warming(self) -> None:
        self.job = None
        self.out.note("warmed")

    def _end_warm_up(self, job: WarmUp, warm: Warm) -> None:
        self.out.note("warmed")
        self._use_warm(warm)

    def _use_warm(self, warm: Warm) -> None:
        """Vote, or stand, with a warmed-up model."""
        self.elections.keep_warm(warm)
        if self.elections.wave is not None:
            self._vote_with(self.elections.wave, warm)
        elif self.joiner.pursuit is None:
            self._stand(warm)

    def _vote_with(self, election: Election, warm: Warm) -> None:
        election.warmed(warm)
        self.state = State.PAUSED if election.warm is None else State.ELECTING

    def _stand(self, warm: Warm) -> None:
        self.state = State.ELECTING
        self.elections.stand(self, warm)

    def _end_score(self, job: Score, losses: Losses) -> None:
        """Take in losses that an election, or the look at the fit, asked for."""
        if job is self.elections.checking:
            self.elections.judge_fit(self, losses)
        elif self.elections.wave is not None:
            self.elections.wave.scored(job, losses)

    def _end_observation(self, job: Observe, result: Any) -> None:
        if self.surveys.wave is not None:
            self.surveys.wave.observed(result)

    def _end_curve(self, job: Curve, curve: OwnCurve) -> None:
        self.last_step.measured(self, curve)
        if self.round >= self.options.rounds:
            self._continue_round()  # the last step can be picked

    def leave_wave(self) -> None:
        """Take no part in an election or a survey any more, and stop the work for it."""
        if self.wave is not None:
            self.wave.leave()
            self._drain_wave()
            self.elections.leave()
            self.surveys.leave()
        if not isinstance(self.background, Curve):
            self.background = None
        if isinstance(self.job, WarmUp):
            self._stop_warming()

    def _drain_wave(self) -> None:
        assert self.wave is not None
        messages, work = self.wave.drain()
        for neighbour, message in messages:
            self.out.send(neighbour, message)
        for job in work:
            self.out.ask(job)

    def _after_input(self) -> None:
        """Carry out what a wave wants, and what came of it where no training is under way."""
        if self.surveys.wave is not None:
            self._drain_wave()
            if self.surveys.wave.phase == "done":
                self.surveys.end(self)
                self.stop_beside(Observe)
        elif self.elections.wave is not None:
            self._drain_wave()
            self._advance_election(self.elections.wave)
        if self.state is State.DONE and self.job is None:
            self._take_decided()
        if self.background is None and self.bank is not None:
            self._work_beside()

    def _advance_election(self, election: Election) -> None:
        """Warm up while there is time, and take the outcome."""
        if self.bank is not None:
            if election.cut_off:
                self.elections.detector.last = self.round - 1  # a by-election of its own would stop the others'
                self.leave_wave()
                return
            if election.opened:
                self.stop_beside(WarmUp)
            if election.outcome is not None:
                self.elections.end_beside(self)
            return
        if election.opened and isinstance(self.job, WarmUp):
            self._stop_warming()
            self.state = State.PAUSED
        elif self.state is State.PAUSED and election.warms and not election.opened and self.job is None:
            # It has begun again, perhaps without a peer that can vote: there is time to warm up.
            if self.elections.warm is not None:
                self._vote_with(election, self.elections.warm)
            else:
                self.warm_up()
            self._drain_wave()
        if election.outcome is not None:
            self._conclude(election.outcome)

    def _conclude(self, outcome: Outcome) -> None:
        self.elections.end()
        if outcome.entry is None:
            self.settle()
            return
        self._take_bank(torch.stack([model for _, model in outcome.opened]), (outcome.entry,), self.round)
        self.joiner.settle_in()
        self._announce_elected(outcome)
        self.cycle.wait_for(Step.BEGIN)

    def _announce_elected(self, outcome: Outcome) -> None:
        self.elections.set_result(self, outcome)
        self.out.note("elect", number=len(self.open_clusters))
        self.out.save()
        if outcome.entry is not None:
            self.out.broadcast(self.hello())

    def _take_opened(self, outcome: Outcome) -> None:
        for slot, model in outcome.opened:
            self._open_cluster(slot, model)
        if outcome.entry is not None:
            self.lineage = extended(self.lineage, outcome.entry)
        opened = tuple(slot for slot, _ in outcome.opened)
        self.elections.detector.close(self.round - 1, len(self.copies.bank), opened)
        self.elections.reset_alarm()
        self._announce_elected(outcome)

    def _work_beside(self) -> None:
        """Begin what is to be computed beside the rounds, one thing at a time."""
        if self.background is None:
            self._begin_beside(self.elections.warm_up_beside(self) or self.surveys.job(self) or self._measurement())

    def _begin_beside(self, job: Job | None) -> None:
        if job is not None:
            self.background = job
            self.out.ask(job)

    def _measurement(self) -> Curve | None:
        if self.cycle.ending is not None:
            return None
        job = self.last_step.measurement(self, self.lineage)
        return None if job is None else replace(job, models=job.models.clone())

    def stop_beside(self, kind: type) -> None:
        if isinstance(self.background, kind):
            self.background = None

    def _take_decided(self) -> None:
        """Merge, close and open the clusters that were decided about, where it takes effect now."""
        if (entry := self.surveys.take_decided(self, ended=self.state is State.DONE)) is not None:
            self._take_entry(entry)
            self.surveys.wait_after_result(self)
            self._announce()
        if (outcome := self.elections.take_decided(self)) is not None:
            self._take_opened(outcome)


_STEPS: dict[Step, Callable[[Peer], None]] = {
    Step.ASK: Peer._ask_for_copies,
    Step.FOLD: Peer._fold,
    Step.CLOSE: Peer._close_round,
    Step.BEGIN: Peer._begin_round,
}
_ENDS: dict[type, Callable[[Peer, Any, Any], None]] = {
    Draw: Peer._end_draw,
    Train: Peer._end_training,
    Rest: Peer._end_rest,
    Personalise: Peer._end_personal,
    WarmUp: Peer._end_warm_up,
    Score: lambda peer, job, losses: peer._use_warm(Warm(job.models[0], losses)),
}
_ENDS_BESIDE: dict[type, Callable[[Peer, Any, Any], None]] = {
    WarmUp: lambda peer, job, warm: peer.elections.use_warm(peer, job, warm),
    Observe: Peer._end_observation,
    Curve: Peer._end_curve,
}
_JOINS: dict[type, Callable[[Peer, Any], None]] = {
    Pursue: Peer._await_models,
    Follow: Peer._follow,
    Extend: Peer._extend,
    Switch: Peer._switch,
}
