"""When a peer takes part in a survey (`waves.survey`), when the next is due, and when a result takes effect
(`rules.surveys`)."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from dfca.core.rules.merging import JUDGED, Opinion
from dfca.core.rules.surveys import LAG, is_too_late, wait_after
from dfca.peer.parts import Outbox, Part, PeerView, wave_fields
from dfca.peer.records.lineage import Entry, Lineage, extended, quiet_surveys, same
from dfca.peer.records.messages import MOST_SURVEYED, Call, Probe
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Observe
from dfca.peer.waves.survey import SurveyWave

SLACK = 2.0
"""Who does this many times fewer rounds than its neighbours does not observe: all would have its answer too late."""
BESIDE = 5.0
"""How much longer steps take beside the rounds than in one."""


class Decided(NamedTuple):
    """The result of a survey that is yet to take effect."""

    entry: Entry
    base: Lineage  # the lineage that it extends
    after: int  # the round at whose beginning it takes effect, at the earliest


class Surveys(Part):
    """Surveys which clusters are worth their data, beside the rounds."""

    STORED_AS: ClassVar[dict[str, str]] = {
        "due": "survey_at",
        "held": "surveyed",
        "strikes": "survey_strikes",
        "failed": "survey_failed",
    }
    NOT_STORED = Part.NOT_STORED | {"wave"}

    def __init__(self, out: Outbox, options: PeerOptions) -> None:
        super().__init__(out)
        self.wave: SurveyWave | None = None  # the survey that it takes part in
        self.decided: Decided | None = None  # what the last one decided
        merging = options.method.merging
        self.due = 0 if merging is None else merging.first  # the round from which on the next is due
        self.held = -1  # the round after which the last was held
        self.strikes: dict[tuple[int, str], int] = {}  # who did not answer in earlier surveys (`Wave`)
        self.failed: dict[int, int] = {}  # by root, how many of its surveys ended in silence
        self.samples = 0  # how many it trains with, as far as it knows
        self.losses: tuple[float, ...] = ()  # of all models, by which it last chose
        self.train_s = 0.0  # how long a round took to train

    def restore(self, stored: dict[str, Any]) -> None:
        """See `Part`; the wave is stored with the elections'."""
        super().restore(stored)
        wave = stored["election"]
        self.wave = wave if isinstance(wave, SurveyWave) else None

    # When.

    def resume(self, due: int, samples: int) -> None:
        """Take what is known out of a save."""
        self.due, self.samples = due or self.due, samples

    def note_training(self, samples: int, losses: tuple[float, ...], seconds: float) -> None:
        """Take in with how many samples a round was trained, what it was chosen by, and how long it took."""
        self.samples, self.losses, self.train_s = samples, losses, seconds

    def postpone(self, at: PeerView) -> None:
        """Wait until models that are new have been trained."""
        self.due, self.losses = (
            at.round + (0 if at.options.method.merging is None else at.options.method.merging.first),
            (),
        )

    def wait_after_result(self, at: PeerView) -> None:
        """Wait after a survey that took effect for as long as the lineage says."""
        assert at.options.method.merging is not None
        self.due, self.losses = at.round + wait_after(quiet_surveys(at.lineage), at.options.method.merging), ()

    def catch_up(self, at: PeerView) -> None:
        """Wait after surveys that others have held."""
        self.held, due = at.round, self.due
        if at.options.method.merging is not None:
            self.wait_after_result(at)
            self.due = max(due, self.due)

    def is_to_come(self, at: PeerView) -> bool:
        """Return whether a survey is to come: until the last, or most rounds are over."""
        options, entries = at.options, at.lineage
        if options.method.merging is None:
            return False
        if self.wave is not None or self.decided is not None:
            return True
        # Others may wait for a shorter time after a survey: until one is the last there may be another.
        due = at.round if entries and entries[-1].is_survey else max(at.round, self.due)
        if is_too_late(due, options.rounds):
            return False
        if at.bank is None:
            return True
        ended = bool(entries) and entries[-1].last
        return not ended and len(at.open_clusters) > 1

    def is_due(self, at: PeerView) -> bool:
        """Return whether to begin a survey after this round."""
        return self.is_to_come(at) and at.round >= self.due and _is_possible(at)

    # Taking part.

    def may_join(self, at: PeerView, probe: Probe) -> bool:
        """Return whether to join a survey: of the same clusters, none after the last, no second one within a round."""
        if at.options.method.merging is None or at.bank is None or not _is_possible(at):
            return False
        if at.lineage[-1].last or len(at.open_clusters) < 2:
            return False
        return probe.base == at.lineage and at.round != self.held

    def begin(self, at: PeerView, unfit: bool) -> None:
        """Begin a wave at the end of a round; unfit: the peer's loss has risen."""
        self._make(at, self._opinion(at, unfit)).begin(at.now)

    def join(self, at: PeerView, sender: int, probe: Probe, unfit: bool, ending: bool) -> None:
        """Join a wave; ending: a round has been trained and is not closed."""
        self._make(at, None if ending else self._opinion(at, unfit)).receive(sender, probe, at.now)

    def say(self, at: PeerView, unfit: bool) -> None:
        """Take part from the end of a round on, in a survey that came before."""
        if self.wave is not None:
            self.wave.say(at.round, self._opinion(at, unfit))

    def _opinion(self, at: PeerView, unfit: bool) -> Opinion:
        follows = -1 if at.copies.assignment is None else at.copies.assignment
        losses = tuple(self.losses[j] for j in at.open_clusters) if self.losses else ()
        return Opinion(follows, self.samples, losses, unfit)

    def _make(self, at: PeerView, opinion: Opinion | None) -> SurveyWave:
        merging, bank = at.options.method.merging, at.bank
        assert merging is not None
        assert bank is not None
        self.wave = SurveyWave(
            **wave_fields(at, Call((), len(bank), at.copies.closed, survey=True)),
            merging=merging,
            slots=tuple(at.open_clusters),
            opinion=opinion,
            round=at.round,
            rounds=at.options.rounds,
            holds_out=self.is_to_come(at) and not _is_slow(at),
            work_s=SLACK * BESIDE * self.train_s * at.options.method.observation * JUDGED,
            strikes=self.strikes,
            failed=self.failed,
        )
        return self.wave

    def job(self, at: PeerView) -> Observe | None:
        """Make the job of what is to be observed, on copies of the models as they are now."""
        pair = None if self.wave is None else self.wave.observing
        if pair is None or at.bank is None:
            return None
        return Observe(at.bank[[pair.follows, pair.partner]], pair.share)

    def end(self, at: PeerView) -> None:
        """End the survey, with or without a result, which takes effect later."""
        wave = self.wave
        assert at.options.method.merging is not None
        assert wave is not None
        self.held, self.due = at.round, at.round + at.options.method.merging.every
        if wave.outcome is not None:
            self.decided = Decided(wave.outcome, wave.base, wave.round + LAG)
        self.leave()

    def take_decided(self, at: PeerView, ended: bool) -> Entry | None:
        """Return what takes effect now, and forget it; ended: no round follows.

        What was decided about other models is of no use.
        """
        if self.decided is None or (at.round < self.decided.after and not ended):
            return None
        (entry, base, _), self.decided = self.decided, None
        return entry if same(base, at.lineage) else None

    def will_take(self, at: PeerView, lineage: Lineage) -> bool:
        """Return whether a neighbour's lineage is what this peer's will be once the survey takes effect."""
        decided = self.decided
        if decided is None:
            return False
        return same(decided.base, at.lineage) and lineage == extended(at.lineage, decided.entry)

    def leave(self) -> None:
        """Take no part in the survey any more; who did not answer is remembered."""
        if self.wave is not None:
            self.strikes, self.failed, self.wave = self.wave.strikes, self.wave.failed, None


def _is_possible(at: PeerView) -> bool:
    return bool(at.lineage) and len(at.open_clusters) <= MOST_SURVEYED


def _is_slow(at: PeerView) -> bool:
    """Return whether most neighbours have done far more rounds."""
    done = sorted(known.round + 1 for known in at.links.values())
    return bool(done) and done[len(done) // 2] > SLACK * max(1, at.round)
