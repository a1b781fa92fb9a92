"""A peer without models, and one whose lineage lost: both take over a neighbour's models, and join its round."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from dfca.core.state import Message
from dfca.peer.pursuit import LOWER, Pursuit
from dfca.peer.records.lineage import Lineage, clusters_of, opened_since
from dfca.peer.records.messages import BankCopy, BankRequest, Declined
from dfca.peer.records.work import KEPT, Draw
from dfca.peer.state import State, Step
from dfca.peer.voting import Voting
from dfca.peer.waves.election import Election

MOST_AHEAD = 1000
"""A peer joins no round that is further ahead of all that the other neighbours claim."""

MOST_JOINED = 2**32
"""Nobody joins a later round, whatever the only neighbour claims: it would soon be beyond all that is believed."""


class Joining(Voting):
    """Asks for the models of neighbours, and hands its own on."""

    def _on_bank_request(self, sender: int, request: BankRequest) -> None:
        if self.bank is None:
            self._send(sender, Declined())
            return
        for j in self.open_clusters:
            if request.clusters is None or j in request.clusters:
                self._send(sender, BankCopy(self._copy_of(j), self.round, len(self.bank), self.lineage))

    def _on_bank_copy(self, sender: int, copy: BankCopy) -> None:
        pursuit = self.pursuit
        if pursuit is None or pursuit.source != sender:
            self._refuse_unasked(sender, copy)
            return
        problem = pursuit.take(copy, self.options, self._own_lineage)
        if problem:
            self._refuse(problem, sender, copy.message.cluster)
            news = self.links[sender].learn_lineage(copy.round, copy.lineage, copy.clusters)
            if problem == LOWER and not news:
                return  # it left before the source took the lineage that was asked for
            self._suspect(sender)
            self._give_up()
            self._settle()
            return
        self.answer_time.observe(self.now - pursuit.since)
        pursuit.since, pursuit.until = self.now, pursuit.until + self.now - pursuit.since
        self._note("take", sender, copy.message.cluster, copy.message.round)
        self._adopt()

    def _on_declined(self, sender: int, declined: Declined) -> None:
        known = self.links[sender]
        if declined.cluster is not None:
            asked = self.wanted.get(declined.cluster)
            if asked is not None and asked.source == sender:
                del self.wanted[declined.cluster]
                self._check_wait()
        elif self.pursuit is not None and self.pursuit.source == sender:
            if known.hello is not None:
                known.hello = known.hello._replace(clusters=0)
            self._give_up()
            self._settle()

    @property
    def _own_lineage(self) -> Lineage | None:
        """Of the models that it holds; None without any."""
        return None if self.bank is None else self.lineage

    def _seek(self) -> None:
        """Ask a neighbour for its models: any where there are none, else those of a higher lineage."""
        if self.rules.exchange != "gossip":
            return
        best: tuple[Lineage, int, int] | None = None
        self.highest = least = self._own_lineage
        for n, known in self.links.items():
            hello = known.hello
            if hello is None or (least is not None and hello.lineage <= least):
                continue
            self.highest = None
            if not hello.clusters or self.suspects.get(n, (-math.inf, 0))[0] > self.now:
                continue
            if hello.lineage and not clusters_of(hello.lineage):
                continue  # it is impossible
            if self.election is not None and hello.lineage and self.election.will_tell(n, hello.lineage[-1]):
                continue
            starting = self.election if self.bank is None else None
            if isinstance(starting, Election) and hello.lineage and self._outvotes(starting, hello.lineage):
                continue
            best = max(best or (hello.lineage, hello.round, -n), (hello.lineage, hello.round, -n))
        if best is None or (self.pursuit is not None and self.pursuit.lineage >= best[0]):
            return
        source, lineage = -best[2], best[0]
        needed = opened_since(lineage, self._own_lineage)
        if needed == ():
            self._follow_surveys(lineage)
            return
        wait = self.answer_time.deadline_s * 2 ** min(10, self.suspects.get(source, (0.0, 0))[1])
        self.pursuit = Pursuit(source, lineage, self.now, self.now + wait, needed)
        self._send(source, BankRequest(needed))
        if self.bank is None:
            self._leave_election()
            self.state = State.EMPTY

    def _outvotes(self, election: Election, lineage: Lineage) -> bool:
        """Return whether to go on with one's own election rather than take the models of a lineage.

        Also where more peers around here have no models yet than voted for those, or hold them: one that a member held
        alone, while it did not do its part in theirs, is not what they want, and what they elect is the higher lineage.
        """
        if election.outvotes(lineage[-1]):
            return True
        hellos = [each.hello for each in self.links.values() if each.hello is not None]
        without = 1 + sum(not hello.clusters for hello in hellos)
        holders = sum(hello.lineage[:1] == lineage[:1] for hello in hellos)
        return without > max(lineage[0].voters, holders)

    def _adopt(self) -> None:
        """Take over the models that were asked for, once all are here and no training runs on the bank."""
        pursuit = self.pursuit
        if pursuit is None or not pursuit.complete:
            return
        opened = opened_since(pursuit.lineage, self._own_lineage)
        if opened == ():
            self._follow_surveys(pursuit.lineage)
            return
        if opened is not None:
            if not isinstance(self.job, KEPT):
                self._extend(pursuit, opened)
            return
        if pursuit.needed is not None or (self.bank is not None and pursuit.lineage <= self.lineage):
            self._give_up()  # its own lineage has changed since: it lacks the others, or has no use for them
            return
        had, claims = self.bank is not None, self._claimed_rounds(but=pursuit.source)
        round = max(self.round, self._believable([*claims, pursuit.round]))
        self._leave_election()
        self.job = None
        self._take_bank(torch.stack(pursuit.models()), pursuit.lineage, round)
        for j, copy in pursuit.taken.items():
            self._set_freshness(j, copy.message)
        self._note("switch" if had else "join", pursuit.source, number=len(pursuit.taken))
        self._end_pursuit()
        self.newcomer, self.step, self.ending, self.deadline = True, None, None, None
        self.wanted.clear()
        self._wait_for(Step.BEGIN)

    def _follow_surveys(self, lineage: Lineage) -> None:
        """Do what others have decided in surveys, unless a training is under way; then it is done after that."""
        if isinstance(self.job, KEPT):
            return
        self._leave_election()
        self.pursuit = None
        self._take_surveys(lineage)
        self._out.save = True
        self._broadcast(self._hello())
        self._go_on()

    def _extend(self, pursuit: Pursuit, opened: tuple[int, ...]) -> None:
        """Take the clusters that others have opened since."""
        self._leave_election()
        for j in opened:
            copy = pursuit.taken[j]
            self._open_cluster(j, copy.message.model)
            self._set_freshness(j, copy.message)
            self._note("adopt", pursuit.source, j, copy.message.round)
        assert self.bank is not None
        self.lineage = pursuit.lineage
        self.detector.close(self.round - 1, len(self.bank), opened)
        self._end_pursuit()
        self._go_on()

    def _go_on(self) -> None:
        """Go on with the round, where clusters changed and none is under way."""
        if self.state is State.PAUSED and self.election is None:  # it had paused for what it has left
            self.state = State.WAITING
        if self.ending is not None:
            self._check_wait()
        elif self.job is None and self.step in (None, Step.FOLD):  # between two rounds, folding leads to no other step
            self._wait_for(Step.BEGIN)

    def _end_pursuit(self) -> None:
        assert self.pursuit is not None
        self.suspects.pop(self.pursuit.source, None)
        self.pursuit = None
        self._set_voted(False)
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
        if self.bank is not None or self.pursuit is not None or self.job is not None or self.election is not None:
            return
        elected = self.options.start == "elected"
        # Who has to warm up first meets its other neighbours meanwhile.
        known = len(self.links) >= (1 if self.own is None else len(self.neighbours)) and not self._silent()
        if elected and (known or not self.neighbours or self.now >= self.join_until):
            if self.warm is None:
                self._warm_up(None)
            else:
                self._stand_for_start(self.warm)
        elif not elected and self.now >= self.join_until:
            self._note("afresh")
            self._draw()

    def _draw(self) -> None:
        """Begin with a start of one's own."""
        self.job = Draw()
        self._out.work.append(self.job)

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
        newest = min(newest, second + MOST_AHEAD if len(rounds) > 1 else MOST_JOINED)
        return min(newest, self.options.rounds - 1)
