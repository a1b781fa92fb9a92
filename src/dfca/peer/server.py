"""A server and its clients: participants of their own kind, for the algorithms that have a server.

The server hands its models down with the number of the round that they begin. A client trains the one that it chooses
and reports it. The round ends when all clients in reach that take part have reported, or after `timeout_s` with what
has come: every cluster becomes the mean of what was reported for it.

For the personal last step clients send their curves (`rules.personal`), and the server answers, at the end of a round,
with the mean curve of their cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dfca.core.client import participates
from dfca.core.rules.personal import GRID, SWEEPS
from dfca.core.state import ClientState
from dfca.peer.inbox import Neighbour
from dfca.peer.last_step import LastStep
from dfca.peer.machine import Machine, names
from dfca.peer.records.messages import Curves, Report, Served
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Curve, Draw, Job, Personalise, Train, Trained
from dfca.peer.state import State


class Server(Machine):
    """The server."""

    def __init__(self, options: PeerOptions, allocate: Callable[[int], Tensor], incarnation: int = 0) -> None:
        super().__init__(options, allocate, incarnation)
        self.state = State.EMPTY  # what it does
        self.served: Tensor | None = None  # its bank as of the last round's end
        self.arrived: set[int] = set()  # the clients that have reported
        self.curves: dict[int, tuple[int, tuple[float, ...]]] = {}  # by client, its cluster and curve
        self.pooled = True  # all of these are in the means that it sent
        self.due = False  # something came that may end the round
        self.deadline: float | None = None  # when clients are no longer waited for

    def begin(self, now: float, late: bool = False) -> None:
        """Begin with drawn models."""
        self._tick(now)
        self.out.ask(Draw())

    def connected(self, neighbour: int, now: float) -> None:
        """Hand a client the models of the round that runs."""
        self._tick(now)
        self.links[neighbour] = Neighbour()
        if self.served is not None:
            self.out.send(neighbour, Served(self.round, self.served))
            if self.deadline is None and self.options.method.timeout_s is not None and self.state is not State.DONE:
                self.deadline = self.now + self.options.method.timeout_s
        self.due = True

    def disconnected(self, neighbour: int, now: float) -> None:
        """Wait for a client no longer."""
        self._tick(now)
        self.links.pop(neighbour, None)
        self.due = True

    def finished(self, job: Job, result: Any, now: float) -> None:
        """Take in the drawn models."""
        self._tick(now)
        bank = self.allocate(len(result))
        bank.copy_(result)
        self.copies = self._own_copy_does_not_count(ClientState.of(bank))
        self.state = State.WAITING
        self._hand_down()

    def next_wake(self) -> float | None:
        if self.due:
            return -math.inf
        return None if self.deadline is None else self._on_drivers_clock(self.deadline)

    def wake(self, now: float) -> None:
        """End the round where nobody is waited for, or its time is over."""
        self._tick(now)
        self.due = False
        if self.bank is None or self.state is State.DONE:
            return
        if not self.links:
            self.deadline = None  # the time of a round runs while somebody is in reach
            return
        late = self.deadline is not None and self.now >= self.deadline
        if late:
            self.out.note("timeout", round=self.round)
        if late or not self.awaited():
            self._end_round()

    def awaited(self) -> list[int]:
        """List the clients in reach whose report is still to come."""
        options = self.options
        return [
            i
            for i in sorted(self.links)
            if i not in self.arrived and participates(options.seed, i, self.round, options.method.participation)
        ]

    def waits(self) -> str:
        return f"waits for round {self.round} of {names(self.awaited())}" if self.links else "waits for its clients"

    def _handle(self, sender: int, message: Any) -> bool:
        if isinstance(message, Curves):
            self._take_curve(sender, message)
            return True
        if not isinstance(message, Report):
            return False
        if message.round != self.round or sender in self.arrived or self.bank is None:
            self.out.note("drop", sender, round=message.round)
            return True
        model = message.message
        if model is not None and (model.sender != sender or not self.rules.is_usable(model, self.bank)):
            self.out.refuse("does not fit", sender, model.cluster, message.round)
            model = None
        self.arrived.add(sender)
        if model is None:
            self.out.note("nothing", sender, round=message.round)
        else:
            self.copies = self.rules.receive_(self.copies, model)
            self.out.note("fold", sender, model.cluster, message.round)
        self.due = True
        return True

    def _take_curve(self, sender: int, message: Curves) -> None:
        if message.due != self.options.release:
            self.out.refuse("a curve of another round", sender)
        elif message.cluster >= 0 and len(message.values) == len(GRID):
            self.curves[sender], self.pooled = (message.cluster, message.values), False

    def _send_means(self) -> None:
        """Send the clients of each cluster the mean of their curves, where there are new ones."""
        self.pooled, release = True, self.options.release
        assert release is not None
        for j in sorted({cluster for cluster, _ in self.curves.values()}):
            curves = {i: curve for i, (cluster, curve) in sorted(self.curves.items()) if cluster == j}
            mean = torch.tensor(list(curves.values()), dtype=torch.float64).mean(dim=0).tolist()
            message = Curves(release, j, len(curves), SWEEPS, tuple(mean))
            for i in curves:
                self.out.send(i, message)

    def _end_round(self) -> None:
        if not self.pooled:
            self._send_means()
        self.out.note("broadcast", round=self.round)
        self.copies = self._own_copy_does_not_count(replace(self.copies, round=self.round + 1))
        self.arrived.clear()
        self._hand_down()
        if self.round >= self.options.rounds:
            self.state, self.deadline = State.DONE, None
            self.out.note("done", round=self.round)

    def _hand_down(self) -> None:
        assert self.bank is not None
        self.served = self.bank.clone()
        self.deadline = None if self.options.method.timeout_s is None else self.now + self.options.method.timeout_s
        self.out.broadcast(Served(self.round, self.served))

    @staticmethod
    def _own_copy_does_not_count(copies: ClientState) -> ClientState:
        return replace(copies, counts=(-1,) * len(copies.bank), own={})


class ServerClient(Machine):
    """A client of a server."""

    UNSTORED = Machine.UNSTORED | {"last_step"}

    def __init__(self, options: PeerOptions, allocate: Callable[[int], Tensor], incarnation: int = 0) -> None:
        super().__init__(options, allocate, incarnation)
        self.state: Enum = State.EMPTY  # what it does
        self.pending: Served | None = None  # models that came while it trained
        self.reported = -1  # the round of its last report on this link
        self.newest = -1  # the newest round whose models came over this link: large messages overtake each other
        self.due = False  # a round may begin
        self.last_step = LastStep(self.out, options)  # the personal last step

    def begin(self, now: float, late: bool = False) -> None:
        """Wait for the server."""
        self._tick(now)

    def connected(self, neighbour: int, now: float) -> None:
        self._tick(now)
        self.links[neighbour] = Neighbour()
        self.reported = self.newest = -1
        self.last_step.greet(neighbour)

    def disconnected(self, neighbour: int, now: float) -> None:
        """Train the round again if the server says so: the report may be lost."""
        self._tick(now)
        self.links.pop(neighbour, None)
        self.reported = -1

    def next_wake(self) -> float | None:
        return -math.inf if self.due else None

    def wake(self, now: float) -> None:
        """Begin the round whose models have come."""
        self._tick(now)
        self.due = False
        if self.state is not State.WAITING or self.job is not None:
            return
        self._measure()
        if self.round >= self.options.rounds:
            self._end()
        elif participates(self.options.seed, self.id, self.round, self.options.method.participation):
            self._begin(Train(self.round, self.last_step.unmeasured))
            self.out.note("start", round=self.round)
        else:
            self.out.note("sit", round=self.round)
            self.copies = self.rules.skip_round(self.copies)

    def _measure(self) -> None:
        if self.background is None and (job := self.last_step.measurement(self, ())) is not None:
            self.background = job
            self.out.ask(job)

    def _end(self) -> None:
        if self.background is not None:
            self.state = State.WAITING  # the last step is picked by the curve
        elif (job := self.last_step.take(self)) is not None:
            self._begin(job)
        else:
            self.state = State.DONE
            self.out.note("done", round=self.round)

    def _begin(self, job: Train | Personalise) -> None:
        self.state, self.job = State.TRAINING, job
        self.out.ask(job)

    def finished(self, job: Job, result: Any, now: float) -> None:
        """Report what was trained; send the curve that was measured."""
        self._tick(now)
        if job is self.background:
            self.background = None
            self.last_step.measured(self, result)
            self.due = self.due or self.round >= self.options.rounds
            return
        if job is not self.job:
            return
        self.job, self.state = None, State.WAITING
        if isinstance(job, Train):
            self._report(result)
        elif isinstance(job, Personalise):
            self.out.note("tuned")
            self.due = True
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._download(pending)

    def _report(self, result: Trained) -> None:
        trained = self.round
        self.out.note("finish", cluster=result.cluster if result.fine else -1, round=trained)
        self.copies, messages = self.rules.end_round(self.copies, result.cluster, result.model if result.fine else None)
        if self.links:
            self.out.broadcast(Report(trained, messages[0] if messages else None))
            self.reported = trained
        self.out.save()

    def waits(self) -> str:
        return "waits for the server"

    def _handle(self, sender: int, message: Any) -> bool:
        if isinstance(message, Curves):
            self.last_step.hear_mean(sender, message)
            return True
        if not isinstance(message, Served):
            return False
        bank, options = message.bank, self.options
        if bank.shape[1] != options.size or len(bank) != options.clusters or bank.dtype != options.dtype:
            self.out.refuse("does not fit", sender)
        elif message.round <= self.newest:
            self.out.note("drop", sender, round=message.round)
        else:
            self.newest = message.round
            if self.job is not None:
                self.pending = message
            else:
                self._download(message)
        return True

    def _download(self, message: Served) -> None:
        if self.state is State.DONE or message.round <= self.reported:
            self.out.note("drop", self.options.neighbours[0], round=message.round)
            return
        self.out.note("download", self.options.neighbours[0], round=message.round)
        self.copies = (
            replace(self.copies, round=message.round, bank=message.bank)
            if len(self.copies.counts) == len(message.bank)
            else replace(ClientState.of(message.bank), round=message.round)
        )
        self.state, self.due = State.WAITING, True

    def state_of(self) -> dict[str, Any]:
        """See `Machine`; with the models, which are the server's."""
        stored = super().state_of() | self.last_step.save()
        return stored | {"copies": self.copies, "bank": self.bank, "clusters": 0}

    def restore(self, fields: dict[str, Any]) -> None:
        super().restore(fields | {"clusters": 0})
        self.last_step.restore(fields)
        self.copies = fields["copies"]
        if isinstance(self.job, Curve):  # of version 0.2
            self.job, self.state, self.due = None, State.WAITING, True
