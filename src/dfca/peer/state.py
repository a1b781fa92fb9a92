"""What a peer remembers, what of it survives a crash, and what every part of a peer does with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.core.client import participates
from dfca.core.rules.surveys import is_settled, is_too_late
from dfca.core.state import ClientState, is_finite
from dfca.peer.curves import CurvePool
from dfca.peer.inbox import Inbox
from dfca.peer.personal import Personal
from dfca.peer.pursuit import Pursuit
from dfca.peer.records.lineage import Lineage, layout_of
from dfca.peer.records.messages import MOST_PEERS, Copy, Hello
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Curve, Draw, Observe, Personalise, Rest, Score, Train, Warm, WarmUp
from dfca.peer.revival import DriftDetector
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.election import Election
from dfca.peer.waves.survey import SurveyWave

VERSION = 1
"""Of what `save` returns."""
LIFE = 10**6
"""Alarms are numbered from here on in every life of a peer."""
FRESHNESS = ("stamps", "origins", "folded", "updates")
"""What a save keeps of a bank's copies, by cluster."""
_participates = lru_cache(4096)(participates)
"""Asked again and again while a peer waits, and always the same."""


class Asked(NamedTuple):
    """A copy that was asked for: whom, when, and until when it is waited for."""

    source: int
    since: float
    until: float


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
    """What a peer needs on the disk: it goes on from here after a crash.

    own: its warmed-up model (P,), while it has had no vote with it.
    """

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
    own: Tensor | None = None
    survey_at: int = 0
    samples: int = 0
    curves: CurvePool = field(default_factory=CurvePool)


class PeerState(Personal):
    """What all parts of a peer share.

    neighbours: those of the graph now, whether they are there or not; the options hold those that it began with.
    job: the long job that runs. ending: the round that was trained and is not closed. wanted: by cluster, the
    copy that it has asked for; answers: the copies that came; overdue: by neighbour, when it was asked for what did not
    come in time. newcomer: it has yet to join its neighbours' round. warm: its model for an election, own: the model
    alone, which is kept over a restart. voted: it had a vote on its models; who had none looks whether they fit, again
    and again; looks: how often it has; checking: the job that looks. awaited: one neighbour whose round is missing,
    where there was one. highest: its lineage when it last looked, where no neighbour claimed a higher one: it looks
    again when one of these changes.
    survey_at: the round from which on a survey is due; surveyed: the one after which the last was held; survey_strikes,
    survey_failed: what it remembers of who did not answer in surveys (`wave`). samples: how many it trains with, as far
    as it knows; train_s: how long that took; began_s: since when it trains.
    """

    def __init__(
        self,
        options: PeerOptions,
        allocate: Callable[[int], Tensor],
        incarnation: int = 0,
        saved: Saved | None = None,
    ) -> None:
        super().__init__(options, allocate, incarnation)
        self.neighbours = options.neighbours
        self.state = State.EMPTY
        self.lineage: Lineage = ()
        self.inbox = Inbox(depth=2 if options.aggregation == "batch" else 1)
        self.job: Train | Rest | WarmUp | Observe | Draw | Score | Curve | Personalise | None = None
        self.step: Step | None = None
        self.ending: int | None = None
        self.asked = False
        self.deadline: float | None = None
        self.wanted: dict[int, Asked] = {}
        self.overdue: dict[int, float] = {}
        self.answer_time = AnswerTime(options.hang_s)
        self.answers: dict[int, Copy] = {}
        self.finishes: list[float] = []
        self.newcomer = True
        self.awaited = -1
        self.highest: Lineage | None = None
        self.join_until = 0.0
        self.pursuit: Pursuit | None = None
        self.suspects: dict[int, tuple[float, int]] = {}
        self.detector = DriftDetector()
        self.election: Election | SurveyWave | None = None
        self.warm: Warm | None = None
        self.own: Tensor | None = None
        self.voted = True
        self.adopted = self.looks = 0
        self.checking: Score | None = None
        self.survey_at = 0 if options.merging is None else options.merging.first
        self.surveyed, self.samples, self.began_s, self.train_s = -1, 0, 0.0, 0.0
        self.survey_strikes: dict[tuple[int, str], int] = {}
        self.survey_failed: dict[int, int] = {}
        self.most_peers = MOST_PEERS
        self.alarm_number = incarnation * LIFE
        self.alarm_sent: tuple[bool, int] = (False, 0)
        self._form = (options.size, options.dtype)
        if saved is not None:
            self._resume(saved)

    @property
    def relays(self) -> bool:
        """Whether it hands on copies of models that it did not train."""
        return self.rules.share == "relay" and self.rules.exchange == "gossip"

    def save(self) -> Saved:
        """Return what must survive a crash."""
        return Saved(
            version=VERSION,
            seed=self.options.seed,
            incarnation=self.incarnation,
            lineage=self.lineage,
            bank=None if self.bank is None else self.bank.clone(),
            detector=self.detector.copy(),
            voted=self.voted,
            own=self.own,
            survey_at=self.survey_at,
            samples=self.samples,
            curves=self.curves.copy(),
            **{name: getattr(self.copies, name) for name in ("round", "assignment", *FRESHNESS)},
        )

    @property
    def holds_out(self) -> bool:
        """Whether samples are held out of training now: somebody will ask how models do on them."""
        return self.surveying or self.unmeasured

    @property
    def surveying(self) -> bool:
        """Whether a survey is to come (`rules.merging`): until the last, or most rounds are over."""
        options, surveyed = self.options, bool(self.lineage) and self.lineage[-1].is_survey
        # Whether others wait for as long after a survey is not known: until one is the last there may be another.
        due = self.round if surveyed else max(self.round, self.survey_at)
        if options.merging is None or is_too_late(due, options.rounds):
            return False
        if self.bank is None:
            return True
        ended = bool(self.lineage) and self.lineage[-1].last
        return not ended and not is_settled(len(self.bank) - len(self.copies.closed), options.clusters)

    @property
    def open_clusters(self) -> list[int]:
        """The clusters that are not closed."""
        return [j for j in range(0 if self.bank is None else len(self.bank)) if j not in self.copies.closed]

    def _silent(self) -> bool:
        """Return whether a neighbour in reach has not said hello yet."""
        return any(each.hello is None for each in self.links.values())

    def _takes_part(self, peer: int, round: int) -> bool:
        rate = self.options.participation
        return rate >= 1 or _participates(self.options.seed, peer, round, rate)

    def _hello(self) -> Hello:
        clusters = 0 if self.bank is None else len(self.bank)
        return Hello(self.incarnation, self.round, clusters, self.lineage)

    def _wait_for(self, step: Step) -> None:
        """Do a step once everything else of this instant has been handled."""
        self.step = step

    def _fold_if_idle(self) -> None:
        """Fold what came between two rounds, under `sequential`."""
        idle = self.job is None and self.ending is None and self.step is None
        if self.options.aggregation == "sequential" and idle:
            self._wait_for(Step.FOLD)

    def _take_bank(self, models: Tensor, lineage: Lineage, round: int) -> None:
        """Begin with models (m, P) of a lineage; that they fit was seen when they came, or were loaded."""
        self.bank = self.allocate(len(models))
        self.bank.copy_(models)
        self.copies = replace(ClientState.of(self.bank), round=round, assignment=None, closed=layout_of(lineage).closed)
        self.survey_at = round + (0 if self.options.merging is None else self.options.merging.first)
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
        self.survey_at = self.round + (0 if self.options.merging is None else self.options.merging.first)
        self.inbox.forget_cluster(slot)

    def _open_models(self) -> Tensor | None:
        """Return the models of the clusters that are open, (k, P): the bank itself where all are."""
        return self.bank if self.bank is None or not self.copies.closed else self.bank[self.open_clusters]

    def _set_neighbours(self, neighbours: tuple[int, ...]) -> None:
        """Take others as the neighbours of the graph: their number weighs what is folded, and travels with models."""
        same, rules = neighbours == self.options.neighbours, self.options.rules
        self.neighbours, self.rules = neighbours, rules if same else replace(rules, degree=len(neighbours))

    @abstractmethod
    def _check_wait(self) -> None:
        """Go on with the end of a round where nobody is waited for (`rounds`)."""

    @abstractmethod
    def _settle(self) -> None:
        """See what a peer without models can do (`join`)."""

    def _resume(self, saved: Saved) -> None:
        """Go on from a save; one that does not fit is refused, and the peer begins without models."""
        bank, own = saved.bank, saved.own
        if saved.version != VERSION:
            self._refuse("a save of another version", self.id)
        elif saved.seed != self.options.seed:
            self._refuse("a save of another swarm", self.id)
        elif bank is not None and (bank.dim() != 2 or bank.shape[1] != self.options.size or not len(bank)):
            self._refuse("a save of another model", self.id)
        elif bank is not None and not bool(torch.isfinite(bank).all()):
            self._refuse("a save that is not finite", self.id)
        elif own is not None and not (own.shape == (self.options.size,) and is_finite(own)):
            self._refuse("a save of another model", self.id)
        else:
            self.own = None if own is None else own.to(self.options.dtype)
            if bank is not None:
                self._resume_bank(bank, saved)

    def _resume_bank(self, bank: Tensor, saved: Saved) -> None:
        self._take_bank(bank.to(self.options.dtype), saved.lineage, saved.round)
        parts = {name: getattr(saved, name) for name in FRESHNESS}
        if all(len(part) == len(bank) for part in parts.values()):
            self.copies = replace(self.copies, assignment=saved.assignment, **parts)
        self.survey_at, self.samples = saved.survey_at or self.survey_at, saved.samples
        self.detector, self.voted, self.curves = saved.detector.copy(), saved.voted, saved.curves.copy()
        self.detector.grow(len(bank))
        self.adopted = saved.round

    NO_STATE = Personal.NO_STATE | {"_form", "awaited", "highest"}

    def restore(self, fields: dict[str, Any]) -> None:
        """Continue from a whole state; what parts of it share is shared again."""
        super().restore(fields)
        self._set_neighbours(self.neighbours)
        if self.election is not None:
            self.election.answer_time = self.answer_time
        if isinstance(self.election, Election) and self.election.held is not None:
            self.election.held = self._open_models()
