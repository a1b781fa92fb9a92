"""When a peer takes part in a survey (`survey.py`), and what it does with the result (rules: `rules.merging`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dfca.core.rules.merging import models_judged, order_of
from dfca.core.rules.surveys import wait_after
from dfca.peer.records.lineage import Entry, Lineage, layout_of, quiet_surveys
from dfca.peer.records.messages import MOST_SURVEYED, Call, Probe
from dfca.peer.relay import Relay
from dfca.peer.state import State, Step
from dfca.peer.waves.survey import SurveyWave

SLACK = 2.0
"""An observation may take so many times longer at others than here; who is slower than that does not observe."""


class Merging(Relay):
    """Surveys which clusters are worth their data, and merges those that are not, in its own bank."""

    def _wave_fields(self, call: Call | None) -> dict[str, Any]:
        """Make what every wave has that this peer takes part in."""
        options = self.options
        return {
            "id": self.id,
            "seed": options.seed,
            "incarnation": self.incarnation,
            "clusters": options.clusters,
            "options": options.election,
            "quorum": options.quorum,
            "answer_time": self.answer_time,
            "size": options.size,
            "dtype": options.dtype,
            "base": self.lineage,
            "call": call,
            "links": set(self.links),
            "most": self.most_peers,
        }

    @property
    def _survey_is_due(self) -> bool:
        return self.surveying and self.round >= self.survey_at and self._can_survey

    @property
    def _can_survey(self) -> bool:
        return bool(self.lineage) and len(self.open_clusters) <= MOST_SURVEYED

    def _make_survey(self) -> SurveyWave:
        merging, bank = self.options.merging, self.bank
        assert merging is not None
        assert bank is not None
        slots = tuple(self.open_clusters)
        return SurveyWave(
            **self._wave_fields(Call((), len(bank), self.copies.closed, survey=True)),
            merging=merging,
            slots=slots,
            follows=self._followed,
            samples=self.samples,
            round=self.round,
            rounds=self.options.rounds,
            holds_out=self.surveying and not self._is_slow,
            unfit=self.detector.unfit,
            work_s=SLACK * self.train_s * self.options.observation * models_judged(len(slots)),
            strikes=self.survey_strikes,
            failed=self.survey_failed,
        )

    @property
    def _is_slow(self) -> bool:
        """Whether most neighbours have done far more rounds: all would wait for what this peer observes."""
        done = sorted(known.round + 1 for known in self.links.values())
        return bool(done) and done[len(done) // 2] > SLACK * max(1, self.round)

    @property
    def _followed(self) -> int:
        return -1 if self.assignment is None else self.assignment

    def _begin_survey(self) -> None:
        """Begin a wave, between two rounds."""
        self.election = self._make_survey()
        self.election.paused = True
        self.election.begin(self.now)

    def _may_survey(self, probe: Probe) -> bool:
        """Return whether to join a survey: of the same clusters, and not a second one within a round."""
        if self.options.merging is None or self.bank is None or self.state is State.DONE or not self._can_survey:
            return False
        return probe.base == self.lineage and self.round != self.surveyed

    def _join_survey(self, sender: int, probe: Probe) -> None:
        """Join a wave: at once between two rounds, else at the end of the round that goes on."""
        self.election = survey = self._make_survey()
        idle = self.job is None and self.checking is None
        survey.ending = idle and (self.ending is not None or self.step is not None)
        survey.receive(sender, probe, self.now)
        if self.ending is not None:
            self._check_wait()
        elif idle and self.step is None:
            self._pause_for_survey(survey)

    def _pause_for_survey(self, survey: SurveyWave) -> None:
        """Wait between two rounds until the survey has ended; if it has meanwhile, go on."""
        self.state, survey.round, survey.unfit = State.PAUSED, self.round, self.detector.unfit
        survey.pause(self._followed, self.samples)
        self._end_survey(survey)

    def _end_survey(self, survey: SurveyWave) -> None:
        """Take the result of a survey that has ended, between two rounds; without a result it ends at once."""
        if survey.outcome is None:
            return
        paused, entry = self.state is State.PAUSED, survey.outcome.entry
        if entry is not None and not paused:
            return
        merging = self.options.merging
        assert merging is not None
        self.election, self.surveyed, self.survey_at = None, self.round, self.round + merging.every
        self.survey_strikes, self.survey_failed = survey.strikes, survey.failed
        if entry is not None and survey.base == self.lineage:
            self._take_entry(entry)
            self.survey_at = self.round + wait_after(quiet_surveys(self.lineage), merging)
            self._broadcast(self._hello())
            self._out.save = True
        if paused:
            self.job, self.state = None, State.WAITING
            self._wait_for(Step.BEGIN)

    def _take_surveys(self, lineage: Lineage) -> None:
        """Do to one's own models what surveys have decided since, of a lineage that goes on where one's own ends."""
        for entry in lineage[len(self.lineage) :]:
            self._take_entry(entry)
        self.surveyed, merging = self.round, self.options.merging
        if merging is not None:
            wait = wait_after(quiet_surveys(self.lineage), merging)
            self.survey_at = max(self.survey_at, self.round + wait)

    def _take_entry(self, entry: Entry) -> None:
        """Merge and close clusters in one's own bank; after the last survey, number those that are left anew."""
        assert self.bank is not None
        if layout_of(self.lineage).after(entry) is None:
            return
        self.alarm_sent = (False, 0)  # alarms are of a lineage
        if not entry.changes:
            self.lineage = (*self.lineage, entry)
            self._note("survey", number=len(self.open_clusters))
            return
        after = self.copies.merged(entry.plan)
        if after.assignment in after.closed:
            after = replace(after, assignment=None)
        order = list(range(len(after.bank)))
        if entry.last:
            order = order_of(len(after.bank), after.closed)
            after = after.renumbered(order, len(after.bank) - len(after.closed))
        self.bank = self.allocate(len(after.bank))
        self.bank.copy_(after.bank)
        self.copies, self.lineage = replace(after, bank=self.bank), (*self.lineage, entry)
        for j in entry.slots:
            self.inbox.forget_cluster(j)
            self.answers.pop(j, None)
            self.wanted.pop(j, None)
        self.detector.merge(entry.plan, order[: len(after.bank)])
        self._note("survey", number=len(after.bank) - len(after.closed))
