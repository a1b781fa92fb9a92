"""Copies of models that no neighbour trained, or too few: asked for, answered, taken (rules: `rules.relay`)."""

from __future__ import annotations

import math

from dfca.core.rules.relay import Offer
from dfca.core.state import Message, usable
from dfca.peer.records.lineage import compatible
from dfca.peer.records.messages import BankCopy, Copy, CopyRequest, Declined
from dfca.peer.state import Asked, PeerState, Step


class Relay(PeerState):
    """Asks neighbours for copies, and hands copies on."""

    def _ask_for_copies(self) -> None:
        """Ask for the copies of models that too few neighbours have trained; who sits the round out is not asked."""
        assert self.bank is not None
        self.asked = True
        limit = math.inf if self.options.aggregation == "sequential" or self.ending is None else self.ending
        beside, settled = self.inbox.senders(limit), not self.surveying
        asked = [known for n, known in sorted(self.links.items()) if self._takes_part(n, self.round - 1)]
        for j in self.open_clusters:
            if j in self.wanted or not self.rules.looks_for_copies(self.copies, j, beside[j], settled):
                continue
            offered = [
                offer
                for known in asked
                for cluster, offer in known.offers
                if cluster == j and known.offers_round <= limit and compatible(self.lineage, known.offers_lineage, j)
            ]
            chosen = self.rules.wants(self.copies, j, offered, self.round - 1, beside[j])
            if chosen is not None:
                self.wanted[j] = Asked(chosen.sender, self.now, self.now + self.answer_time.deadline_s)
                self._send(chosen.sender, CopyRequest(j, self.lineage))
        if not self.wanted or self.options.aggregation == "sequential":
            self._wait_for(Step.FOLD)

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

    def _on_copy_request(self, sender: int, request: CopyRequest) -> None:
        j = request.cluster
        if j not in self.open_clusters or not compatible(self.lineage, request.lineage, j):
            self._send(sender, Declined(j))
            return
        self._send(sender, Copy(self._copy_of(j), self.lineage))

    def _copy_of(self, cluster: int) -> Message:
        """Copy one model as it is now, with how fresh it is."""
        assert self.bank is not None
        copies = self.copies
        offer = Offer(self.id, copies.stamps[cluster], copies.origins[cluster])
        model, layout = self.bank[cluster].clone(), self.rules.layout
        model = model if layout is None else layout.hide(model)
        return Message(self.id, cluster, self.round, self.rules.degree, model, offer, copies.updates[cluster])

    def _refuse_unasked(self, sender: int, copy: Copy | BankCopy) -> None:
        """Refuse a model that nobody waits for; one that is late says how long the next may take."""
        message, since = copy.message, self.overdue.pop(sender, None)
        if since is None:
            self._refuse("not asked for", sender, message.cluster)
        else:
            self.answer_time.observe_late(self.now - since)
            self._note("drop", sender, message.cluster, message.round)

    def _on_copy(self, sender: int, copy: Copy) -> None:
        j = copy.message.cluster
        asked = self.wanted.get(j)
        if asked is None or asked.source != sender:
            self._refuse_unasked(sender, copy)
            return
        del self.wanted[j]
        self.answer_time.observe(self.now - asked.since)
        if self.bank is not None:
            if copy.message.sender == sender and usable(copy.message, self.bank):
                self.answers[j] = copy
            else:
                self._refuse("does not fit", sender, j)
            self._fold_if_idle()
        self._check_wait()
