"""One participant, as a machine without I/O: read this file first.

A driver calls it when something happens (a neighbour comes into reach or leaves it, a message, finished work, a timer)
and then carries out what `ready` returns: what must be saved before messages leave, messages, work, notes. A peer knows
what it was sent and nothing else; it has no clock, thread, socket, file or randomness of its own. Time is an argument.

    EMPTY      no models: waits for a neighbour that has some, or for an election
    WARMING    trains a model of its own, to stand and vote with (`WarmUp`)
    ELECTING   takes part in an election with a vote (`election.py`)
    PAUSED     takes part without one: it forwards, and ends with the same centres; or in a survey (`survey.py`)
    TRAINING   a round: `Train`, or `Rest` where it sits the round out; `Curve` before one, `Personalise` after the last
    WAITING    between two rounds: for neighbours (`batch`), for copies, for the end of this instant
    DONE       all its rounds are done; it goes on serving

A round: train; send the trained model to all neighbours; then, under `batch`, wait until every neighbour in reach has
ended the same round, or for `timeout_s`. The end of a round has three steps, each of which waits until everything else
of the same instant has been handled (`wake`): ask for copies that too few neighbours trained (`rules.relay`), fold what
came, close the round, which may begin a survey (`merging.py`) or call a by-election (`revival.py`), and begin the next.
While a peer trains its bank does not change. What cannot be used is counted by its reason in `refused`; nothing that
comes raises an exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dfca.peer.inbox import Neighbour
from dfca.peer.machine import names
from dfca.peer.records import messages as m
from dfca.peer.records.work import Curve, Draw, Job, Observe, Personalise, Rest, Score, Train, Warm
from dfca.peer.rounds import Rounds
from dfca.peer.state import State, Step
from dfca.peer.waves.election import Election
from dfca.peer.waves.survey import SurveyWave


class Peer(Rounds):
    """One participant that exchanges models with its neighbours, or with nobody.

    The inputs are here; what they do is in the parts, each of which knows those before it: `state` (what a peer
    remembers), `relay`, `merging`, `voting`, `join`, `rounds`.
    """

    def next_wake(self) -> float | None:
        """See `Machine`."""
        if self.step is not None:
            return -math.inf
        times = [asked.until for asked in self.wanted.values()] if self.wanted else []
        if self.deadline is not None:
            times.append(self.deadline)
        free = self.job is None and self.election is None
        if free and ((self.bank is None and self.pursuit is None) or self._waits_for_hello()):
            times.append(self.join_until)
        if self.pursuit is not None:
            times.append(self.pursuit.until)
        if self.election is not None:
            times.append(self.election.next_wake())
        if self.suspects:
            times += [until for until, _ in self.suspects.values() if until > self.now]
        return self._on_drivers_clock(min(times)) if times else None

    def waits(self) -> str:
        """Describe what the peer waits for, in a sentence without a subject."""
        if self.state is State.EMPTY:
            return f"waits for the models of {names(self.neighbours)}"
        if self.state in (State.ELECTING, State.PAUSED) and self.election is not None:
            what = "a survey" if isinstance(self.election, SurveyWave) else "an election"
            return f"waits for {what} ({self.election.phase})"
        if self.ending is not None:
            peers = sorted(
                {n for n in self.links if self._expects(n)} | {asked.source for asked in self.wanted.values()}
            )
            return f"waits for round {self.ending} of {names(peers)}"
        return "waits for nothing" if self.state is not State.DONE else "is done"

    # Inputs.

    def begin(self, now: float, late: bool = False) -> None:
        """Begin; late: others have begun before, and have models."""
        self._tick(now)
        self.join_until = self.now + self.options.join_s
        if self.bank is not None:
            self._wait_for(Step.BEGIN)
            return
        drawn = self.options.start != "elected"
        if not drawn and not late and self.own is None:
            self._warm_up(None)
        elif drawn and (not late or self.rules.exchange == "none" or not self.neighbours):
            self._draw()
        self._settle()

    def connected(self, neighbour: int, now: float) -> None:
        """Take in that a neighbour is in reach: a new epoch of the link begins."""
        self._tick(now)
        if neighbour not in self.neighbours:
            self._refuse("unknown neighbour", neighbour)
            return
        if neighbour in self.links:
            self.disconnected(neighbour, now)
        self.links[neighbour] = Neighbour()
        self._send(neighbour, self._hello())
        self._send_curves(neighbour)
        if self.election is not None:
            self.election.gained(neighbour)
        self._after_input()

    def disconnected(self, neighbour: int, now: float) -> None:
        """Take in that a neighbour is out of reach: what was under way to and from it is lost."""
        self._tick(now)
        if self.links.pop(neighbour, None) is None:
            return
        self.wanted = {j: asked for j, asked in self.wanted.items() if asked.source != neighbour}
        self.overdue.pop(neighbour, None)
        if self.pursuit is not None and self.pursuit.source == neighbour:
            self._give_up()
        if self.election is not None:
            self.election.lost(neighbour, self.now)
        self._pool_curves()
        self._check_wait()
        self._settle()
        self._begin_if_all_have_spoken()
        self._after_input()

    def rewire(self, neighbours: tuple[int, ...], now: float) -> None:
        """Take in that the graph around the peer has changed: these are its neighbours from now on.

        Who is no neighbour any more is disconnected; what it has sent already is folded. A new one may connect from
        now on.
        """
        self._tick(now)
        self._set_neighbours(tuple(sorted({*neighbours} - {self.id})))
        for gone in [n for n in self.links if n not in self.neighbours]:
            self.disconnected(gone, now)
        self.suspects = {n: each for n, each in self.suspects.items() if n in self.neighbours}
        self.inbox.forget_strangers(self.neighbours)
        self.curves.forget_strangers(self.neighbours)
        self._settle()
        self._after_input()

    def limit_peers(self, most: int, now: float) -> None:
        """Take in how many peers there can be, where the driver knows: no election counts more."""
        self._tick(now)
        self.most_peers = max(1, min(most, m.MOST_PEERS))
        if self.election is not None:
            self.election.most = self.most_peers

    def _handle(self, sender: int, message: Any) -> bool:
        handle = _HANDLERS.get(type(message))
        if handle is not None:
            handle(self, sender, message)
            if self.election is not None:
                self._after_input()
        return handle is not None

    def finished(self, job: Job, result: Any, now: float) -> None:
        """Take in finished work."""
        self._tick(now)
        if isinstance(job, Score):
            if job is self.checking:
                self._judge_fit(result)
            elif job is self.job:
                self.job = None
                self._end_warm_up(Warm(job.models[0], result))
            elif isinstance(self.election, Election):
                self.election.scored(job, result)
        elif job is self.job:
            self.job = None
            if isinstance(job, Draw):
                self._take_bank(result, (), self.round)
                self._broadcast(self._hello())
                self._wait_for(Step.BEGIN)
            elif isinstance(job, Train):
                self._end_training(result)
            elif isinstance(job, Rest):
                self._end_rest()
            elif isinstance(job, Observe):
                if isinstance(self.election, SurveyWave):
                    self.election.observed(result)
            elif isinstance(job, Curve | Personalise):
                self._end_personal(job, result)
            else:
                self._note("warmed")
                self._end_warm_up(result)
        self._after_input()

    def wake(self, now: float) -> None:
        """Do what is due: the next step of a round, or what a timer asks for."""
        self._tick(now)
        if self.deadline is not None and self.now >= self.deadline:
            self.deadline = None
            self._note("timeout", round=self.ending if self.ending is not None else -1)
            self.wanted.clear()
            self._wait_for(Step.FOLD)
        if self.wanted and (late := [j for j, asked in self.wanted.items() if self.now >= asked.until]):
            for j in late:
                asked = self.wanted.pop(j)
                self.overdue[asked.source] = asked.since
            self._check_wait()
        if self.pursuit is not None and self.now >= self.pursuit.until:
            self.overdue[self.pursuit.source] = self.pursuit.since
            self._suspect(self.pursuit.source)
            self._give_up()
        if self.election is not None:
            self.election.wake(self.now)
        if self.step is not None:
            self._take_step()
        elif self._waits_for_hello() and self.now >= self.join_until:
            self._begin_round()
        if self.bank is None or self.highest != self.lineage:
            self._seek()
        self._settle()
        self._after_input()


_HANDLERS: dict[type, Callable[[Peer, int, Any], None]] = {
    **dict.fromkeys(m.ELECTION, Peer._on_election),
    m.Probe: Peer._on_probe,
    m.Hello: Peer._on_hello,
    m.Update: Peer._on_update,
    m.Nothing: Peer._on_nothing,
    m.CopyRequest: Peer._on_copy_request,
    m.Copy: Peer._on_copy,
    m.Declined: Peer._on_declined,
    m.BankRequest: Peer._on_bank_request,
    m.BankCopy: Peer._on_bank_copy,
    m.Alarm: Peer._on_alarm,
    m.Curves: Peer._on_curves,
}
