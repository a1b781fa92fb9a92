"""When a peer takes part in an election (`waves.election`), with which model, and the alarms that lead to one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.core.rules.election import bid
from dfca.core.rules.revival import PAUSE
from dfca.core.rules.surveys import LAG
from dfca.peer.parts import Outbox, Part, PeerView, wave_fields
from dfca.peer.records.lineage import Lineage, extended, same
from dfca.peer.records.messages import Alarm, Call, Probe
from dfca.peer.records.work import Losses, Score, Trained, Warm, WarmUp
from dfca.peer.revival import FRESH, NOBODY, Callers, DriftDetector
from dfca.peer.waves.election import Election, Outcome

MOST_ALARMS = 4096  # a peer remembers the alarms of this many others
LIFE = 10**6  # incarnation i numbers its alarms from i * LIFE


class Announced(NamedTuple):
    """What a peer has told its neighbours about its fit."""

    number: int  # of its last alarm
    raised: bool = False  # whether it says that no model fits
    round: int = 0  # when it said so


class Adopted(NamedTuple):
    """Whether a peer had a vote on its models."""

    voted: bool = True  # it had, or need not look whether they fit
    round: int = 0  # when it took them
    looks: int = 0  # how often it has looked since whether they fit


class Elections(Part):
    """Warms up, stands, votes, and watches whether the models still fit."""

    NOT_STORED = Part.NOT_STORED | {"wave", "announced"}

    def __init__(self, out: Outbox, incarnation: int) -> None:
        super().__init__(out)
        self.wave: Election | None = None  # the election that it takes part in
        self.decided: Outcome | None = None  # what a by-election decided, until a round is closed
        self.warm: Warm | None = None  # its warmed-up model and losses, while it has no models
        self.own: Tensor | None = None  # that model alone (P,), kept over a restart until it had a vote
        self.adopted = Adopted()  # whether it had a vote on its models
        self.checking: Score | None = None  # the job that looks whether they fit
        self.detector = DriftDetector()  # what it knows of its own fit, of lost clusters and alarms
        self.announced = Announced(incarnation * LIFE)  # its last alarm
        self.callers = Callers()  # who calls for elections that open nothing

    def save(self) -> dict[str, Any]:
        """See `Part`; the wave is stored with the surveys'."""
        (number, *sent), (voted, adopted, looks) = self.announced, self.adopted
        alarm = {"alarm_number": number, "alarm_sent": tuple(sent)}
        return super().save() | alarm | {"voted": voted, "adopted": adopted, "looks": looks}

    def restore(self, stored: dict[str, Any]) -> None:
        """See `Part`; the wave's memory is shared with the peer's again (`Peer.restore`)."""
        super().restore(stored)
        if "alarm_number" in stored:
            self.announced = Announced(stored["alarm_number"], *stored["alarm_sent"])
            self.adopted = Adopted(stored["voted"], stored["adopted"], stored["looks"])
        wave = stored["election"]
        self.wave = wave if isinstance(wave, Election) else None

    @property
    def voted(self) -> bool:
        """Whether it had a vote on its models, or need not look whether they fit."""
        return self.adopted.voted

    # Models of one's own.

    def warm_up(self, at: PeerView) -> Score | WarmUp:
        """Begin to train a model for the start; of one that was kept over a restart only the losses are missing."""
        if self.own is not None:
            return Score(self.own[None], None, at.holds_out)
        self.out.note("warm")
        return WarmUp(None, at.holds_out)

    def keep_warm(self, warm: Warm) -> None:
        """Keep a warmed-up model for the election of a start."""
        self.warm = warm
        if self.own is None:
            self.own = warm.model
            self.out.save()

    def look_at_fit(self, at: PeerView) -> WarmUp | None:
        """Look whether models fit that were taken without a vote; return the warm-up that it needs, if any."""
        own, self.own = self.own, None
        if own is None:
            return WarmUp(at.round - 1, at.holds_out)
        self.check_fit(at, own, None)
        return None

    def check_fit(self, at: PeerView, own: Tensor, stage: int | None) -> None:
        """Look whether a model of one's own fits better than those that were taken over."""
        models = at.open_models
        assert models is not None
        self.checking = Score(torch.cat([models, own[None]]), stage, at.holds_out)
        self.out.ask(self.checking)

    def judge_fit(self, at: PeerView, losses: Losses) -> None:
        """Take in what came of that; raise the alarm where one's own fits better."""
        self.checking = None
        if bid(losses.bid[:-1], losses.bid[-1]) > 0:
            self.detector.misfit = True
            self.raise_alarm(at)

    def set_voted(self, at: PeerView, voted: bool) -> None:
        """Note whether the peer had a vote on the models that it takes; without one it looks later whether they fit."""
        self.adopted = Adopted(voted or not at.options.method.revives, at.round)
        self.own = None if self.voted else self.own

    def resume(self, own: Tensor | None) -> None:
        """Take the model of one's own out of a save."""
        self.own = own

    def resume_fit(self, detector: DriftDetector, voted: bool, round: int, clusters: int) -> None:
        """Take what is known of the models out of a save."""
        self.detector, self.adopted = detector.copy(), Adopted(voted, round)
        self.detector.grow(clusters)

    # Taking part.

    def may_join(self, at: PeerView, sender: int, probe: Probe, pursuing: bool) -> bool:
        """Return whether to join an election: of a start without models, of clusters with the same models."""
        call = probe.call
        if at.bank is None:
            return at.options.start == "elected" and not pursuing and not probe.base and call is None
        if not at.options.method.revives or call is None:
            return False
        same = probe.base == at.lineage and call.clusters == len(at.bank) and call.closed == at.copies.closed
        return same and self.detector.believes(call.lost, at.round) and self.callers.heeds(sender, at.round)

    def join(self, at: PeerView, sender: int, probe: Probe, warms: bool) -> None:
        """Join an election; warms: it is in time to warm up, or has."""
        self.callers.caller = sender
        self._make(at, probe.call, self.warm if at.bank is None else None, warms).receive(sender, probe, at.now)

    def stand(self, at: PeerView, warm: Warm) -> None:
        """Begin a wave for the election of a start."""
        self._make(at, None, warm).begin(at.now)

    def call(self, at: PeerView) -> None:
        """Begin a wave for a by-election."""
        assert at.bank is not None
        self.callers.caller = NOBODY
        self._make(at, Call(self.detector.lost(), len(at.bank), at.copies.closed)).begin(at.now)
        self.prepare(at)

    def _make(self, at: PeerView, call: Call | None, warm: Warm | None = None, warms: bool = True) -> Election:
        self.wave = Election(
            **wave_fields(at, call),
            merging=at.options.method.merging,
            alarmed=self.detector.alarmed,
            held_out=at.holds_out,
            warm=warm,
            warms=warms,
        )
        return self.wave

    def prepare(self, at: PeerView) -> None:
        """Take part in a by-election with the models as they are now, between two rounds or while one is trained."""
        if self.wave is not None and self.wave.stage is None:
            self.wave.prepare(at.round - 1, at.open_models, at.holds_out, self.detector.alarmed)

    def warm_up_beside(self, at: PeerView) -> WarmUp | None:
        """Return the warm-up that a by-election needs now; None for none.

        Who has come back and has not trained since may be late already: it forwards, and nobody waits for its vote.
        """
        wave = self.wave
        if wave is None:
            return None
        wanted = wave.stage is not None and wave.warms and wave.warm is None and not wave.opened
        return WarmUp(wave.stage, wave.held_out) if wanted else None

    def use_warm(self, at: PeerView, job: WarmUp, warm: Warm) -> None:
        """Vote, or look at the fit, with a model that was warmed up beside the rounds."""
        if self.wave is not None:
            self.wave.warmed(warm)
        else:
            self.check_fit(at, warm.model, job.stage)

    def leave(self) -> None:
        """Take no part in the election any more."""
        self.wave = None

    def end(self) -> None:
        """End the election of a start: its models are to be taken."""
        self.wave, self.warm = None, None

    def end_beside(self, at: PeerView) -> None:
        """End a by-election: what it opened is taken between two rounds."""
        assert self.wave is not None
        self.decided, self.wave = self.wave.outcome, None
        self.callers.end_call(self.opens, at.round)

    def take_decided(self, at: PeerView) -> Outcome | None:
        """Return what takes effect now, and forget it; what was decided about other models is of no use."""
        outcome, self.decided = self.decided, None
        return outcome if outcome is not None and same(outcome.base, at.lineage) else None

    def will_take(self, at: PeerView, lineage: Lineage) -> bool:
        """Return whether a neighbour's lineage is what this peer's will be once the by-election takes effect."""
        if self.decided is None or self.decided.entry is None:
            return False
        return same(self.decided.base, at.lineage) and lineage == extended(at.lineage, self.decided.entry)

    @property
    def opens(self) -> bool:
        """Whether a by-election is to open a cluster."""
        return self.decided is not None and self.decided.entry is not None

    def reset_alarm(self) -> None:
        """Forget what was announced: alarms are of a lineage."""
        self.announced = Announced(self.announced.number)

    def set_result(self, at: PeerView, outcome: Outcome) -> None:
        """Note whether the peer had a vote on what an election opened."""
        if outcome.opened or self.voted:
            self.set_voted(at, outcome.voted)

    # Whether models fit.

    def begin_with(self, clusters: int) -> None:
        """Begin with other models."""
        old = self.detector
        self.detector = DriftDetector(last=old.last, pause=old.pause, alarms=old.alarms)
        self.detector.grow(clusters)

    def look(self, at: PeerView, result: Trained, round: int, mixed: bool) -> None:
        """Take in the loss of a round; mixed: the model was averaged with others since, or nobody is away."""
        assert at.bank is not None
        self.detector.grow(len(at.bank))
        self.detector.look(result.loss, mixed)
        if result.fine:
            newest = self.detector.newest
            newest[result.cluster] = max(round, newest[result.cluster])
        self.raise_alarm(at)

    def freshness(self, at: PeerView) -> tuple[int, ...]:
        """Return, by cluster, the newest round of a local update that it knows of."""
        return tuple(self.detector.newest) if at.options.method.revives else ()

    def learn(self, at: PeerView, freshness: tuple[int, ...], lineage: Lineage) -> None:
        """Take in what a neighbour knows of that."""
        if at.options.method.revives and lineage == at.lineage:
            self.detector.learn(freshness)

    def end_round(self, at: PeerView, surveying: bool) -> None:
        """Count for how long every cluster has been idle; surveying: surveys close what has no followers."""
        if at.options.method.revives:
            assert at.bank is not None
            unwatched = range(len(at.bank)) if surveying else at.copies.closed
            informed = 2 * len(at.links) >= len(at.neighbours)
            self.detector.end_round(len(at.bank), informed, unwatched)

    def is_due(self, at: PeerView) -> bool:
        """Return whether to call a by-election: what it opens is still to be trained."""
        if not at.options.method.revives or self.decided is not None or at.round + LAG >= at.options.rounds:
            return False
        return self.detector.is_due(at.round - 1, at.options.method.election)

    def must_look(self, at: PeerView) -> bool:
        """Return whether to look now if the models fit that it took without a vote.

        Again after twice the time: models that change hands between two kinds of data fit now and then.
        """
        voted, round, looks = self.adopted
        if not at.options.method.revives or voted or self.checking or self.decided:
            return False
        due = at.round - 1 - round >= PAUSE << looks
        self.adopted = Adopted(voted, round, looks + due)
        return due

    # Alarms.

    def raise_alarm(self, at: PeerView) -> None:
        """Tell the neighbours when no model fits any more, or one does again; anew while it lasts."""
        raised, (number, before, since) = self.detector.alarmed, self.announced
        if raised == before and not (raised and at.round - since >= FRESH // 2):
            return
        self.announced = Announced(number + 1, raised, at.round)
        self.detector.hear_alarm(at.id, number + 1, raised, at.round)
        self.out.broadcast(Alarm(at.id, number + 1, raised, at.lineage))

    def hear_alarm(self, at: PeerView, sender: int, alarm: Alarm) -> None:
        """Take in the alarm of another peer, and hand it on if it is news."""
        if not at.options.method.revives or alarm.lineage != at.lineage or alarm.origin == at.id:
            return
        if not self.detector.is_news(alarm.origin, alarm.number):
            return
        if alarm.origin not in self.detector.alarms and len(self.detector.alarms) >= MOST_ALARMS:
            self.out.refuse("too many alarms", sender)
        elif not self.callers.is_heard(alarm.origin, at.round):
            self.out.refuse("too many alarms of a peer", sender)
        else:
            self.detector.hear_alarm(alarm.origin, alarm.number, alarm.raised, at.round)
            self.out.broadcast(alarm, but=sender)
