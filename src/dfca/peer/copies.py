"""Copies of models that too few neighbours trained: asked for, answered, taken (rules: `rules.relay`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from dfca.core.state import ClientState, usable
from dfca.peer.inbox import Limit
from dfca.peer.parts import Outbox, Part, PeerView, copy_of, takes_part
from dfca.peer.records.lineage import compatible
from dfca.peer.records.messages import BankCopy, Copy, CopyRequest, Declined


class Asked(NamedTuple):
    """A copy that was asked for."""

    source: int  # the neighbour that was asked
    since: float  # when
    until: float  # how long it is waited for


class CopyDesk(Part):
    """Asks neighbours for copies, hands copies on, and keeps account of who answers in time."""

    def __init__(self, out: Outbox) -> None:
        super().__init__(out)
        self.wanted: dict[int, Asked] = {}  # by cluster, what was asked for and has not come
        self.answers: dict[int, Copy] = {}  # by cluster, the copies that came and wait to be taken
        self.overdue: dict[int, float] = {}  # by neighbour, when it was asked for what did not come in time

    def ask(self, at: PeerView, limit: Limit, beside: Mapping[int, int], settled: bool) -> None:
        """Ask for copies of the models that too few neighbours have trained, of peers that take part in the round.

        limit: by neighbour, the newest round that counts; beside: by cluster, how many neighbours' models wait.
        """
        awake = [
            known
            for n, known in sorted(at.links.items())
            if takes_part(at.options, n, at.round - 1) and known.offers_round <= limit(n)
        ]
        for j in at.open_clusters:
            if j in self.wanted or not at.rules.looks_for_copies(at.copies, j, beside[j], settled):
                continue
            offered = [
                offer
                for known in awake
                for cluster, offer in known.offers
                if cluster == j and compatible(at.lineage, known.offers_lineage, j)
            ]
            chosen = at.rules.wants(at.copies, j, offered, at.round - 1, beside[j])
            if chosen is not None:
                self.wanted[j] = Asked(chosen.sender, at.now, at.now + at.answer_time.deadline_s)
                self.out.send(chosen.sender, CopyRequest(j, at.lineage))

    def answer(self, at: PeerView, sender: int, request: CopyRequest) -> None:
        """Hand a copy on, or decline."""
        j = request.cluster
        if j in at.open_clusters and compatible(at.lineage, request.lineage, j):
            self.out.send(sender, Copy(copy_of(at, j), at.lineage))
        else:
            self.out.send(sender, Declined(j))

    def take_in(self, at: PeerView, sender: int, copy: Copy) -> bool:
        """Keep a copy that came until it can be folded; return whether it was waited for."""
        j = copy.message.cluster
        asked = self.wanted.get(j)
        if asked is None or asked.source != sender:
            self.refuse_unasked(at, sender, copy)
            return False
        del self.wanted[j]
        at.answer_time.observe(at.now - asked.since)
        if at.bank is not None:
            if copy.message.sender == sender and usable(copy.message, at.bank):
                self.answers[j] = copy
            else:
                self.out.refuse("does not fit", sender, j)
        return True

    def refuse_unasked(self, at: PeerView, sender: int, copy: Copy | BankCopy) -> None:
        """Refuse a model that nobody waits for; one that is late says how long the next may take."""
        message, since = copy.message, self.overdue.pop(sender, None)
        if since is None:
            self.out.refuse("not asked for", sender, message.cluster)
        else:
            at.answer_time.observe_late(at.now - since)
            self.out.note("drop", sender, message.cluster, message.round)

    def is_declined(self, sender: int, cluster: int) -> bool:
        """Stop waiting for a copy that a neighbour declines; return whether it was waited for."""
        asked = self.wanted.get(cluster)
        if asked is None or asked.source != sender:
            return False
        del self.wanted[cluster]
        return True

    def fold(self, at: PeerView) -> ClientState:
        """Return the models after the copies that came were taken, where they are still worth it."""
        copies, answers, self.answers = at.copies, self.answers, {}
        for copy in answers.values():
            message, offer = copy.message, copy.message.offer
            assert offer is not None
            fits = compatible(at.lineage, copy.lineage, message.cluster)
            taken = fits and at.rules.wants(copies, message.cluster, [offer], at.round - 1) is not None
            self.out.note("relay" if taken else "drop", message.sender, message.cluster, message.round)
            copies = at.rules.receive_(copies, message) if taken else copies
        return copies

    def sources(self) -> set[int]:
        """Return the neighbours that were asked and have not answered."""
        return {asked.source for asked in self.wanted.values()}

    def next_timeout(self) -> float:
        """Return when the first copy is no longer waited for."""
        return min((asked.until for asked in self.wanted.values()), default=math.inf)

    def time_out(self, now: float) -> bool:
        """Stop waiting for copies that take too long; return whether there were any."""
        late = [j for j, asked in self.wanted.items() if now >= asked.until]
        for j in late:
            asked = self.wanted.pop(j)
            self.note_overdue(asked.source, asked.since)
        return bool(late)

    def note_overdue(self, neighbour: int, since: float) -> None:
        """Note that a neighbour has not answered in time."""
        self.overdue[neighbour] = since

    def lose(self, neighbour: int) -> None:
        """Expect nothing more from a neighbour that is out of reach."""
        self.wanted = {j: asked for j, asked in self.wanted.items() if asked.source != neighbour}
        self.overdue.pop(neighbour, None)

    def stop_waiting(self) -> None:
        """Wait for no copy any more; those that came count."""
        self.wanted = {}

    def forget(self, clusters: tuple[int, ...]) -> None:
        """Forget the copies of clusters that have changed."""
        for j in clusters:
            self.answers.pop(j, None)
            self.wanted.pop(j, None)

    def forget_answers(self) -> None:
        """Forget the copies that came: the models are others."""
        self.answers = {}
