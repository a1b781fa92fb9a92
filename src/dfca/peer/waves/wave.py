"""The wave of an election or a survey, echo with extinction: it finds out who takes part, and builds a spanning tree.

A peer that begins a wave sends `Probe` to all neighbours. A peer that receives one with a better key joins: the sender
is its parent, and it probes all its other neighbours. A probe with the same key is the answer of a peer that has
another parent. When all neighbours of a peer have answered, it sends its parent the `Count` of its subtree: peers, and
those among them that have warmed up. So the root knows that the wave is complete. Counts are sent again when they
change: a straggler warms up, a child is lost or comes late. Once `quorum` of its peers have warmed up, the root opens
the turns (`election`).

Silence ends by a timeout, which every attempt that ended so doubles for all peers of the wave.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dfca.core.rules.election import ElectionOptions, lot
from dfca.peer.records.lineage import Entry, Lineage, same
from dfca.peer.records.messages import MOST_PEERS, Call, Count, Key, Probe, Refuse, Turn
from dfca.peer.records.work import Warm
from dfca.peer.waves.deadline import AnswerTime

Phase = Literal["wave", "counted", "opening", "bid", "stand", "vote", "done"]
NO_WAVE = Key(-1, 0, 0, 0, 0)  # less than the key of any wave
SILENT = 3
"""After this many attempts, or one that ended in silence, all peers of a wave wait twice as long for a message."""
MOST_DOUBLINGS, LEARNED_DOUBLINGS = 6, 4
"""How often that may be: with a first deadline of a minute, an hour; less where it is known how long answers take. Who
waits for longer than that after minutes of faults holds up all others."""
MOST_AHEAD = 1000  # no peer joins a wave of an attempt that is further ahead
PATIENT = 5  # from this many silences on a peer stops waiting for others
STRIKES = {"wave": 2, "bid": 2, "stand": 3, "vote": 3}
"""A peer that was waited for in vain this often in a phase is waited for no more: models take their time. A root waits
once more, so that its children, which wait for theirs, continue first."""
ROOT_STRIKES = 5
"""No peer joins the waves of a root of which this many ended in silence: more than a root needs to give up a member
that is silent."""
MOST_WAVES = 32  # nor of one that began this many in all
MOST_ROOTS = 4096  # of how many roots a peer remembers that


@dataclass
class Wave(ABC):
    """One peer's part in a wave, and what it keeps from one attempt to the next."""

    id: int  # the peer
    seed: int  # of the swarm
    incarnation: int  # how often the peer has begun before
    clusters: int | None  # how many are wanted, None: as many as there are kinds of data
    options: ElectionOptions  # how elections are held
    quorum: float  # the share of the peers that have to be ready
    answer_time: AnswerTime  # how long answers take: the peer's own record
    size: int  # numbers of a model
    dtype: torch.dtype  # and their type
    base: Lineage  # the lineage that the wave extends
    call: Call | None = None  # the clusters that it is about, None: there are none yet
    links: set[int] = field(default_factory=set)  # the neighbours in reach
    key: Key = NO_WAVE  # the wave that this peer is in
    parent: int | None = None  # the neighbour through which it joined, None at the root
    kids: dict[int, Count] = field(default_factory=dict)  # by child, what its subtree counts
    pending: set[int] = field(default_factory=set)  # the neighbours that have not answered the probe
    sent: Count | None = None  # the last count that was sent
    phase: Phase = "wave"  # how far this attempt is
    warm: Warm | None = None  # the peer's warmed-up model
    warms: bool = True  # it has warmed up, or will; else it is not counted
    log: list[Turn] = field(default_factory=list)  # the turns that were decided
    centres: list[Tensor] = field(default_factory=list)  # the models that they accepted
    last_s: float = 0.0  # when the last message came that was new
    silences: int = 0  # how many waves ended in silence
    banned: set[int] = field(default_factory=set)  # peers that have no say any more
    most: int = MOST_PEERS  # how many peers there can be, whatever others count
    strikes: dict[tuple[int, str], int] = field(default_factory=dict)  # by neighbour and phase, waits in vain
    heard: set[tuple[int, str, str, int, int]] = field(default_factory=set)  # what came, to know what is new
    joined: dict[int, int] = field(default_factory=dict)  # by root, how many of its waves this peer joined
    failed: dict[int, int] = field(default_factory=dict)  # by root, how many of these ended in silence
    out: list[tuple[int, Any]] = field(default_factory=list)  # what is to be sent, until the peer takes it
    work: list[Any] = field(default_factory=list)  # what is to be done, until the peer takes it

    def drain(self) -> tuple[list[tuple[int, Any]], list[Any]]:
        """Return what is to be sent and what is to be done, and forget it."""
        drained, self.out, self.work = (self.out, self.work), [], []
        return drained

    def resume(self, answer_time: AnswerTime, models: Tensor | None) -> None:
        """Share again what the peer shares with its wave; models: of the clusters that are open."""
        self.answer_time = answer_time

    def limit(self, most: int) -> None:
        """Take in how many peers there can be."""
        self.most = most

    def is_kind_of(self, probe: Probe) -> bool:
        """Return whether a probe is of a wave of the same kind, about as many clusters of the same lineage."""
        one, other = self.call, probe.call
        if not same(probe.base, self.base):
            return False
        if one is None or other is None:
            return one is other
        return (one.clusters, one.closed, one.survey) == (other.clusters, other.closed, other.survey)

    @abstractmethod
    def _forget_turn(self) -> None:
        """Forget the turn that was under way: a new attempt begins."""

    def receive(self, sender: int, message: Any, now: float) -> None:
        """Take in a message of the wave that is well formed; one that does not fit is ignored."""
        if self.phase == "done":
            return
        if isinstance(message, Probe):
            self._take_probe(sender, message, now)
            return
        if message.key != self.key:
            message = self._of_this_attempt(sender, message)
        if message is not None:
            self._hear(sender, message, now)
            self._take(sender, message, now)

    @abstractmethod
    def _take(self, sender: int, message: Any, now: float) -> None:
        """Take in a message of this wave that is no probe."""

    def _of_this_attempt(self, sender: int, message: Any) -> Any:
        """Return what a message of another attempt is in this one, None for nothing."""
        return None

    @abstractmethod
    def _opened(self, voters: int, log: tuple[Turn, ...]) -> None:
        """Begin the turns, after those that were decided before."""

    @abstractmethod
    def _without(self, neighbour: int, now: float) -> None:
        """Continue without a neighbour that takes no part, or no longer; the next attempt asks it again."""

    def begin(self, now: float, attempt: int = 0) -> None:
        """Begin a wave of one's own."""
        self._forget_what_never_came()
        own = Key(attempt, len(self.log), -lot(self.seed, self.id), self.id, self.incarnation)
        self._enter(own, None, self.call, now)

    def _enter(self, key: Key, parent: int | None, call: Call | None, now: float) -> None:
        """Join a wave: forget the tree before, keep what was decided."""
        self._forget_what_never_came()
        self.key, self.parent, self.call = key, parent, call
        self.kids, self.sent, self.heard = {}, None, set()
        self._forget_turn()
        self.phase, self.last_s = "wave", now
        if parent is not None:
            _add_one(self.joined, key.root)
        self.pending = self.links - {parent} - self.banned
        probe = Probe(key, self.base, call)
        for neighbour in sorted(self.pending):
            self._send(neighbour, probe)
        self.pending = self._to_wait_for(self.pending, self.phase)
        self._counted()

    def _forget_what_never_came(self) -> None:
        """Keep the turns whose centres are here: the others are somebody else's to know."""
        accepted = 0
        for place, turn in enumerate(self.log):
            accepted += turn.accepted
            if accepted > len(self.centres):
                del self.log[place:]
                return

    def _take_probe(self, sender: int, probe: Probe, now: float) -> None:
        """Join a better wave; a probe of the same one is the answer of a peer that has another parent."""
        if probe.key > self.key:
            far = probe.key.attempt > max(0, self.key.attempt) + MOST_AHEAD
            if far or sender in self.banned or not self._trusts(probe.key.root):
                self._send(sender, Refuse(probe.key))
                if probe.key.root == self.key.root and self.parent is not None and not self._trusts(self.key.root):
                    self._again(now)  # it has given up the wave that this peer is in
                else:
                    self._without(sender, now)  # so has the sender: nothing of it is to come
            elif probe.key.decided < len(self.log):
                self.begin(now, probe.key.attempt + 1)  # its root knows fewer turns
            else:
                if probe.key.attempt // SILENT > self.key.attempt // SILENT:  # somebody else's patience ended first
                    long = now >= self.last_s + self._patience_s / 2
                    self._blame_the_silent(long or (self.phase == "stand" and sender in self._waited_for()))
                self._enter(probe.key, sender, probe.call, now)
        elif probe.key == self.key:
            self._hear(sender, probe, now)
            self.pending.discard(sender)
            self._counted()
        elif sender == self.parent or sender in self.kids:
            self._without(sender, now)  # it has lost its way to the root, and waits
        elif sender not in self.pending:  # it takes no part here, or has another parent: it would wait for an answer
            self._send(sender, Refuse(probe.key) if self.opened else Probe(self.key, self.base, self.call))

    def _hear(self, sender: int, message: Any, now: float) -> None:
        """Note when a message came, unless it is one more of its kind: repetitions put off no deadline."""
        mark = (sender, type(message).__name__, self.phase, len(self.log), len(self.centres))
        if mark not in self.heard:
            self.heard.add(mark)
            self.last_s = now

    def _trusts(self, root: int) -> bool:
        """Return whether the waves of a root have led anywhere; one that is not trusted still takes part in others'."""
        return self.failed.get(root, 0) < ROOT_STRIKES and self.joined.get(root, 0) < MOST_WAVES

    def _take_count(self, sender: int, message: Count) -> None:
        if self.phase not in ("wave", "counted") or sender == self.parent or sender in self.banned:
            return
        self.pending.discard(sender)
        self.kids[sender] = message
        self._counted()

    def _counted(self) -> None:
        """Send the count of the subtree to the parent where it is complete and new; the root sees whether to open."""
        if self.phase not in ("wave", "counted") or self.pending:
            return
        self.phase = "counted"
        count = self._count()
        if self.parent is None:
            # Where turns were decided there was a quorum: peers that warm up after a restart are not waited for again.
            if count.ready >= max(1, 0 if self.log else math.ceil(self.quorum * count.size - 1e-9)):
                self._opened(count.ready, count.log)
        elif count != self.sent:
            self.sent = count
            self._send(self.parent, count)

    def _count(self) -> Count:
        """Count the peers of the subtree that warm up, and those that have; a child may claim more than there are."""
        size = int(self.warms) + sum(kid.size for kid in self.kids.values())
        ready = int(self._is_ready) + sum(kid.ready for kid in self.kids.values())
        return Count(self.key, min(size, self.most), min(ready, self.most), tuple(self.log))

    @property
    def _is_ready(self) -> bool:
        """Whether this peer can take part in turns: it has warmed up."""
        return self.warm is not None

    def will_tell(self, neighbour: int, entry: Entry) -> bool:
        """Return whether an entry of a neighbour's lineage is what comes of this wave, and the decision is on its way.

        It never comes from a parent that has decided and did not open before: it went on without this peer.
        """
        held = (entry.attempt, entry.root, entry.incarnation) == (self.key.attempt, self.key.root, self.key.incarnation)
        return held and (self.opened or neighbour != self.parent)

    def warmed(self, warm: Warm) -> None:
        """Take in one's own warmed-up model: from now on one can stand and vote, unless turns have begun."""
        if self.phase in ("wave", "counted"):
            self.warm = warm
            self._counted()

    @property
    def opened(self) -> bool:
        """Whether turns have begun: too late to warm up."""
        return self.phase not in ("wave", "counted")

    def gained(self, neighbour: int) -> None:
        """Ask a neighbour that came into reach to join."""
        self.links.add(neighbour)
        if self.phase in ("wave", "counted"):
            self._send(neighbour, Probe(self.key, self.base, self.call))

    def lost(self, neighbour: int, now: float) -> None:
        """Continue without a neighbour that is out of reach."""
        self.links.discard(neighbour)
        if self.phase != "done":
            self._without(neighbour, now)

    def _again(self, now: float, silent: bool = False) -> None:
        """Begin the next attempt with what was decided; after a silence, one in which everybody waits twice as long."""
        attempt = self.key.attempt
        self.begin(now, (attempt // SILENT + 1) * SILENT if silent else attempt + 1)

    def next_wake(self) -> float:
        """Return when silence has lasted too long; also of a root that waits for warm-ups: a count may be wrong."""
        return math.inf if self.phase == "done" else self.last_s + self._patience_s

    @property
    def _patience_s(self) -> float:
        """How long a silence lasts before this peer begins again."""
        wait_s, most = self.answer_time.deadline_s, MOST_DOUBLINGS
        if self.answer_time.mean_s is not None and self.phase != "counted":  # no warm-up is waited for
            most = LEARNED_DOUBLINGS
        if not self.opened:  # it may be a warm-up that is waited for
            wait_s = max(wait_s, self.answer_time.initial_s)
            if self.parent is None and self._silences_seen >= PATIENT:
                wait_s *= 1.5  # its children, which wait for theirs, continue first
        return wait_s * 2.0 ** min(most, self.key.attempt // SILENT, self._silences_seen)

    @property
    def _silences_seen(self) -> int:
        """How many waves ended in silence, but for those of roots that are not trusted: attempts can be claimed."""
        return max(0, self.silences - sum(n for root, n in self.failed.items() if not self._trusts(root)))

    def wake(self, now: float) -> None:
        """Begin again after too long a silence; after several, continue without the silent."""
        if now < self.next_wake():
            return
        self._blame_the_silent()
        if self._silences_seen < PATIENT or not self._go_on_without_the_silent(now):
            self._again(now, silent=True)

    def _blame_the_silent(self, long: bool = True) -> None:
        """Count whom this silence is of: neighbours that this peer waits for, if it was long, else the root."""
        self.silences += 1
        silent = self._waited_for() & self.links
        for neighbour in silent if long else ():
            place = (neighbour, self._silent_in(neighbour))
            self.strikes[place] = self.strikes.get(place, 0) + 1
        if (self.opened or long) and not silent and self.parent is not None:
            _add_one(self.failed, self.key.root)

    def _silent_in(self, neighbour: int) -> str:
        """Return the phase for which a neighbour that is silent gets a strike."""
        return self.phase

    def _to_wait_for(self, neighbours: Iterable[int], phase: Phase) -> set[int]:
        """Return those among neighbours that answer in a phase: others take part too, but nobody waits for them."""
        most = STRIKES[phase] + (self.parent is None)
        return {neighbour for neighbour in neighbours if self.strikes.get((neighbour, phase), 0) < most}

    @abstractmethod
    def _waited_for(self) -> set[int]:
        """Return the neighbours whose part is missing: not their parent, who may be waiting too."""

    def _go_on_without_the_silent(self, now: float) -> bool:
        """Stop waiting for neighbours that are silent again and again, as for lost ones; return whether that helps.

        One peer that says nothing, or counts what is not there, would stop all others for ever.
        """
        if self.phase == "wave" and self.pending:
            self.pending, self.last_s = set(), now
            self._counted()
            return True
        if self.phase == "counted" and self.parent is None:
            count = self._count()
            if count.ready:
                self.last_s = now
                self._opened(count.ready, count.log)
            return bool(count.ready)
        return self._end_turn_without_the_silent(now)

    @abstractmethod
    def _end_turn_without_the_silent(self, now: float) -> bool:
        """Do the same in a turn."""

    def leave(self) -> None:
        """Notify the neighbours of the tree that this peer takes no part any more."""
        tree = {*self.kids, *self.pending, *(() if self.parent is None else (self.parent,))}
        for neighbour in sorted(tree & self.links):
            self._send(neighbour, Refuse(self.key))

    def _send(self, neighbour: int, message: Any) -> None:
        self.out.append((neighbour, message))


def _add_one(counts: dict[int, int], root: int) -> None:
    """Count one more of a root, and forget the one that was counted first where there are too many."""
    counts[root] = counts.get(root, 0) + 1
    if len(counts) > MOST_ROOTS:
        del counts[next(iter(counts))]
