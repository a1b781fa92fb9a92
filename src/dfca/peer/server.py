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
from dfca.core.state import ClientState, usable
from dfca.peer.inbox import Neighbour
from dfca.peer.machine import Machine, names
from dfca.peer.personal import Personal
from dfca.peer.records.messages import Curves, Report, Served
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Curve, Draw, Job, Personalise, Train, Trained
from dfca.peer.state import State


class Server(Machine):
    """The server. served: its bank as of the last round's end; arrived: who has reported; curves: by client, its
    cluster and curve; pooled: whether all of these are in the means that it sent."""

    job = None

    def __init__(self, options: PeerOptions, allocate: Callable[[int], Tensor], incarnation: int = 0) -> None:
        super().__init__(options, allocate, incarnation)
        self.state = State.EMPTY
        self.served: Tensor | None = None
        self.arrived: set[int] = set()
        self.curves: dict[int, tuple[int, tuple[float, ...]]] = {}
        self.pooled = True
        self.due = False
        self.deadline: float | None = None

    def begin(self, now: float, late: bool = False) -> None:
        """Begin with drawn models."""
        self._tick(now)
        self._out.work.append(Draw())

    def connected(self, neighbour: int, now: float) -> None:
        """Hand a client the models of the round that runs."""
        self._tick(now)
        self.links[neighbour] = Neighbour()
        if self.served is not None:
            self._send(neighbour, Served(self.round, self.served))
            if self.deadline is None and self.options.timeout_s is not None and self.state is not State.DONE:
                self.deadline = self.now + self.options.timeout_s
        self.due = True

    def disconnected(self, neighbour: int, now: float) -> None:
        """Wait for a client no longer."""
        self._tick(now)
        self.links.pop(neighbour, None)
        self.due = True

    def finished(self, job: Job, result: Any, now: float) -> None:
        """Take in the drawn models."""
        self._tick(now)
        self.bank = self.allocate(len(result))
        self.bank.copy_(result)
        self.copies = self._own_copy_does_not_count(ClientState.of(self.bank))
        self.state = State.WAITING
        self._hand_down()

    def next_wake(self) -> float | None:
        """See `Machine`."""
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
            self._note("timeout", round=self.round)
        if late or not self.awaited():
            self._end_round()

    def awaited(self) -> list[int]:
        """List the clients in reach whose report is still to come."""
        options = self.options
        return [
            i
            for i in sorted(self.links)
            if i not in self.arrived and participates(options.seed, i, self.round, options.participation)
        ]

    def waits(self) -> str:
        """See `Machine`."""
        return f"waits for round {self.round} of {names(self.awaited())}" if self.links else "waits for its clients"

    def _handle(self, sender: int, message: Any) -> bool:
        if isinstance(message, Curves):
            self._take_curve(sender, message)
            return True
        if not isinstance(message, Report):
            return False
        if message.round != self.round or sender in self.arrived or self.bank is None:
            self._note("drop", sender, round=message.round)
            return True
        model = message.message
        if model is not None and (model.sender != sender or not usable(model, self.bank)):
            self._refuse("does not fit", sender, model.cluster, message.round)
            model = None
        self.arrived.add(sender)
        if model is None:
            self._note("nothing", sender, round=message.round)
        else:
            self.copies = self.rules.receive_(self.copies, model)
            self._note("fold", sender, model.cluster, message.round)
        self.due = True
        return True

    def _take_curve(self, sender: int, message: Curves) -> None:
        if message.due != self.options.release:
            self._refuse("a curve of another round", sender)
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
                self._send(i, message)

    def _end_round(self) -> None:
        if not self.pooled:
            self._send_means()
        self._note("broadcast", round=self.round)
        self.copies = self._own_copy_does_not_count(replace(self.copies, round=self.round + 1))
        self.arrived.clear()
        self._hand_down()
        if self.round >= self.options.rounds:
            self.state, self.deadline = State.DONE, None
            self._note("done", round=self.round)

    def _hand_down(self) -> None:
        assert self.bank is not None
        self.served = self.bank.clone()
        self.deadline = None if self.options.timeout_s is None else self.now + self.options.timeout_s
        self._broadcast(Served(self.round, self.served))

    @staticmethod
    def _own_copy_does_not_count(copies: ClientState) -> ClientState:
        return replace(copies, counts=(-1,) * len(copies.bank), own={})


class ServerClient(Personal):
    """A client of a server. pending: models that came while it trained; reported: its last report on this link."""

    def __init__(self, options: PeerOptions, allocate: Callable[[int], Tensor], incarnation: int = 0) -> None:
        super().__init__(options, allocate, incarnation)
        self.state: Enum = State.EMPTY
        self.job: Train | Curve | Personalise | None = None
        self.pending: Served | None = None
        self.reported = -1
        self.due = False

    def begin(self, now: float, late: bool = False) -> None:
        """Wait for the server."""
        self._tick(now)

    def connected(self, neighbour: int, now: float) -> None:
        """See `Machine`."""
        self._tick(now)
        self.links[neighbour] = Neighbour()
        self.reported = -1
        self._send_curves(neighbour)

    def disconnected(self, neighbour: int, now: float) -> None:
        """Train the round again if the server says so: the report may be lost."""
        self._tick(now)
        self.links.pop(neighbour, None)
        self.reported = -1

    def next_wake(self) -> float | None:
        """See `Machine`."""
        return -math.inf if self.due else None

    def wake(self, now: float) -> None:
        """Begin the round whose models have come."""
        self._tick(now)
        self.due = False
        if self.state is not State.WAITING or self.job is not None:
            return
        if (job := self._personal_job()) is not None:
            self._begin(job)
        elif self.round >= self.options.rounds:
            self.state = State.DONE
            self._note("done", round=self.round)
        elif participates(self.options.seed, self.id, self.round, self.options.participation):
            self._begin(Train(self.round, self.unmeasured))
            self._note("start", round=self.round)
        else:
            self._note("sit", round=self.round)
            self.copies = self.rules.skip_round(self.copies)

    def _begin(self, job: Train | Curve | Personalise) -> None:
        self.state, self.job = State.TRAINING, job
        self._out.work.append(job)

    def finished(self, job: Job, result: Any, now: float) -> None:
        """Report what was trained; send the curve that was measured."""
        self._tick(now)
        if job is not self.job:
            return
        self.job, self.state = None, State.WAITING
        if isinstance(job, Train):
            self._report(result)
        elif isinstance(job, Curve):
            self._end_measuring(result, ())
            self.due = True
        else:
            self._note("tuned")
            self.due = True
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._download(pending)

    def _report(self, result: Trained) -> None:
        trained = self.round
        self._note("finish", cluster=result.cluster if result.fine else -1, round=trained)
        self.copies, messages = self.rules.end_round(self.copies, result.cluster, result.model if result.fine else None)
        if self.links:
            self._broadcast(Report(trained, messages[0] if messages else None))
            self.reported = trained
        self._out.save = True

    def waits(self) -> str:
        """See `Machine`."""
        return "waits for the server"

    def _handle(self, sender: int, message: Any) -> bool:
        if isinstance(message, Curves):
            self._take_mean(sender, message)
            return True
        if not isinstance(message, Served):
            return False
        bank, options = message.bank, self.options
        if bank.shape[1] != options.size or len(bank) != options.clusters or bank.dtype != options.dtype:
            self._refuse("does not fit", sender)
        elif self.job is not None:
            self.pending = message
        else:
            self._download(message)
        return True

    def _take_mean(self, sender: int, message: Curves) -> None:
        """Take the mean curve of the cluster in place of what sweeps would bring."""
        own = self.curves
        if not own.measured or not own.sound or (message.due, message.cluster) != (own.due, own.cluster):
            self._refuse("a curve of another round", sender)
        elif len(message.values) == len(GRID):
            own.rows = [own.rows[0], message.values]

    def _download(self, message: Served) -> None:
        if self.state is State.DONE or message.round <= self.reported:
            self._note("drop", self.options.neighbours[0], round=message.round)
            return
        self._note("download", self.options.neighbours[0], round=message.round)
        self.bank = message.bank
        self.copies = (
            replace(self.copies, round=message.round, bank=message.bank)
            if len(self.copies.counts) == len(message.bank)
            else replace(ClientState.of(message.bank), round=message.round)
        )
        self.state, self.due = State.WAITING, True

    NO_STATE = Machine.NO_STATE - {"bank"}  # the models are the server's

    def state_of(self) -> dict[str, Any]:
        """See `Machine`; with the models."""
        return super().state_of() | {"copies": self.copies, "clusters": 0}

    def restore(self, fields: dict[str, Any]) -> None:
        """See `Machine`."""
        super().restore(fields | {"clusters": 0})
        self.bank = fields["bank"]
