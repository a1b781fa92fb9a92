"""When a peer takes part in an election (`election.py`), what it does with the outcome, and the alarms before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dfca.core.rules.election import bid
from dfca.peer.merging import Merging
from dfca.peer.records.messages import Alarm, Call, Probe, Refuse
from dfca.peer.records.work import KEPT, Losses, Observe, Rest, Score, Warm, WarmUp
from dfca.peer.revival import FRESH
from dfca.peer.state import State, Step
from dfca.peer.waves.election import Election, Outcome
from dfca.peer.waves.survey import SurveyWave

MOST_ALARMS = 4096
"""Of how many peers a peer remembers alarms."""


class Voting(Merging):
    """Warms up, stands, votes, and takes the centres."""

    def _make_election(self, call: Call | None) -> Election:
        return Election(
            **self._wave_fields(call),
            merging=self.options.merging,
            alarmed=self.detector.alarmed,
            held_out=self.holds_out,
        )

    def _warm_up(self, stage: int | None) -> None:
        """Train a model of its own; of one that was kept over a restart only the losses are missing."""
        self.state = State.WARMING
        if stage is None and self.own is not None:
            self.job = Score(self.own[None], None, self.holds_out)
        else:
            self.job = WarmUp(stage, self.holds_out)
            self._note("warm")
        self._out.work.append(self.job)

    def _stop_warming(self) -> None:
        self.job = None
        self._note("warmed")

    def _end_warm_up(self, warm: Warm) -> None:
        if self.bank is None:
            self.warm = warm
            if self.own is None:
                self.own, self._out.save = warm.model, True
        if isinstance(self.election, Election):
            self._vote_with(warm)
        elif self.bank is not None:
            self._check_fit(warm.model, self.round - 1)
        elif self.pursuit is None:
            self._stand_for_start(warm)

    def _vote_with(self, warm: Warm) -> None:
        assert isinstance(self.election, Election)
        self.election.warmed(warm)
        self.state = State.PAUSED if self.election.warm is None else State.ELECTING

    def _check_fit(self, own: Tensor, stage: int | None) -> None:
        """Look whether a model of one's own fits better than those that were taken over."""
        models = self._open_models()
        assert models is not None
        self.checking = Score(torch.cat([models, own[None]]), stage, self.holds_out)
        self.state = State.WAITING
        self._out.work.append(self.checking)

    def _judge_fit(self, losses: Losses) -> None:
        self.checking = None
        if bid(losses.bid[:-1], losses.bid[-1]) > 0:
            self.detector.misfit = True
            self._raise_alarm()
        self._wait_for(Step.BEGIN)

    def _stand_for_start(self, warm: Warm) -> None:
        """Begin a wave for the election of a start."""
        self.state = State.ELECTING
        self.election = self._make_election(None)
        self.election.warm = warm
        self.election.begin(self.now)

    def _pause(self) -> None:
        """Take part in the election that goes on: warm up if it is not too late.

        Who has come back and has not trained since may be late already: it forwards, and nobody waits for its vote.
        """
        assert self.election is not None
        if isinstance(self.election, SurveyWave):
            self._pause_for_survey(self.election)
            return
        if self.election.opened or self.election.warm is not None or not self.election.warms:
            self.state = State.PAUSED if self.election.warm is None else State.ELECTING
            return
        self.election.held_out = self.holds_out  # it may have been other when the wave came, in the middle of a round
        self.election.stage, self.election.held = self.round - 1, self._open_models()
        self.election.alarmed = self.detector.alarmed
        self._warm_up(self.round - 1)

    def _on_probe(self, sender: int, probe: Probe) -> None:
        start = self.bank is None and self.options.start == "elected" and self.pursuit is None
        surveys, fits = probe.call is not None and probe.call.survey, start and not probe.base and probe.call is None
        if surveys:
            fits = self._may_survey(probe)
        elif self.bank is not None and self.options.revives and probe.call is not None:
            fits = probe.base == self.lineage and probe.call.clusters == len(self.bank)
            fits = fits and probe.call.closed == self.copies.closed
            fits = fits and self.detector.believes(probe.call.lost, self.round)
        if isinstance(self.election, SurveyWave) and fits and not surveys:
            self._leave_survey(self.election)  # it can wait: others are at a loss for models
        if self.election is not None:
            if probe.base == self.election.base and _same_kind(probe.call, self.election.call):
                self.election.receive(sender, probe, self.now)
            else:
                self._refuse_wave(sender, probe)
            return
        if not fits:
            self._refuse_wave(sender, probe)
            return
        if surveys:
            self._join_survey(sender, probe)
            return
        self.election = self._make_election(probe.call)
        self.election.warm = self.warm if start else None
        self.election.warms = start or self.job is not None or bool(self.finishes)
        self.election.receive(sender, probe, self.now)
        if start:
            if self.job is None and self.warm is None:
                self._warm_up(None)
        elif self.ending is not None:
            self._check_wait()
        elif self.job is None and self.checking is None and self.step is None:
            self._pause()
        elif isinstance(self.job, WarmUp):  # it was looking at its fit: the election decides that
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
        """Take no part in an election or a survey any more, and stop the work for it."""
        if self.election is not None:
            self.election.leave()
            self._drain_election()
            self.election = None
        if isinstance(self.job, WarmUp):
            self._stop_warming()
        elif isinstance(self.job, Observe):
            self.job = None

    def _leave_survey(self, survey: SurveyWave) -> None:
        """Take no part in a survey any more; who had paused for it is between two rounds."""
        self._leave_election()
        self.survey_strikes, self.survey_failed = survey.strikes, survey.failed
        self.state = State.WAITING if self.state is State.PAUSED else self.state

    def _drain_election(self) -> None:
        assert self.election is not None
        for neighbour, message in self.election.out:
            self._send(neighbour, message)
        self._out.work += self.election.work
        self.job = next((job for job in self.election.work if isinstance(job, Observe)), self.job)
        self.election.out, self.election.work = [], []

    def _after_input(self) -> None:
        """Carry out what an election wants, and its outcome where no training is under way."""
        election = self.election
        if election is None:
            return
        self._drain_election()
        if isinstance(election, SurveyWave):
            self._end_survey(election)
            return
        if election.opened and isinstance(self.job, WarmUp):
            self._stop_warming()
            self.state = State.PAUSED
        elif self.state is State.PAUSED and election.warms and not election.opened and self.job is None:
            # Begun again, perhaps without anybody that can vote: there is time to warm up.
            if self.bank is not None:
                self._pause()
            elif self.warm is not None:
                self._vote_with(self.warm)
            else:
                self._warm_up(None)
            self._drain_election()
        if election.outcome is not None and not isinstance(self.job, (*KEPT, Rest)):
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
        if opened or self.voted:
            self._set_voted(outcome.voted)
        assert self.bank is not None
        self._note("elect", number=len(self.open_clusters))
        self._out.save = True
        if outcome.entry is not None:
            self._broadcast(self._hello())
        self._wait_for(Step.CLOSE if self.ending is not None else Step.BEGIN)

    def _set_voted(self, voted: bool) -> None:
        """Note whether the peer had a vote on the models that it takes; who had none looks later whether they fit."""
        self.voted, self.adopted, self.looks = voted or not self.options.revives, self.round, 0
        self.own = None if self.voted else self.own

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


def _same_kind(one: Call | None, other: Call | None) -> bool:
    """Return whether two waves are of the same kind, and of as many clusters."""
    if one is None or other is None:
        return one is other
    return (one.clusters, one.closed, one.survey) == (other.clusters, other.closed, other.survey)
