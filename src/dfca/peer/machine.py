"""What every kind of participant has: inputs, a clock, models, neighbours in reach, what is to leave it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dfca.base.errors import unknown
from dfca.core.state import ClientState
from dfca.peer.inbox import Neighbour
from dfca.peer.parts import Outbox
from dfca.peer.records.messages import well_formed
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Job, Ready

INPUTS = ("begin", "connected", "disconnected", "receive", "rewire", "limit_peers", "finished", "wake")
"""What a driver calls, but for `ready`."""


class Machine(ABC):
    """A participant without I/O: a driver calls the inputs below and then carries out what `ready` returns."""

    state: Enum  # what it does now
    UNSTORED: frozenset[str] = frozenset(("options", "rules", "id", "allocate", "links", "out"))
    """Attributes that `state_of` leaves out, or stores in another way."""

    def __init__(self, options: PeerOptions, allocate: Callable[[int], Tensor], incarnation: int = 0) -> None:
        self.options, self.rules, self.id = options, options.rules, options.id
        self.allocate = allocate  # returns memory (m, P) for models; called again, the first rows hold what they held
        self.incarnation = incarnation  # how often it has begun before
        self.job: Job | None = None  # the long job of its rounds that runs
        self.background: Job | None = None  # the one that runs beside it
        self.now = 0.0  # its time, which never goes back
        self.set_back = 0.0  # by how much the driver's clock did
        self.copies = ClientState.of(torch.empty(0, options.size, dtype=options.dtype))  # its models, and their history
        self.links: dict[int, Neighbour] = {}  # the neighbours in reach, and what they said
        self.out = Outbox(self.links)  # what is to leave it

    @property
    def bank(self) -> Tensor | None:
        """Its models (m, P), None for none."""
        return self.copies.bank if self.copies.counts else None

    @property
    def refused(self) -> Counter[str]:
        """How many messages it could not use, by reason."""
        return self.out.refused

    @property
    def round(self) -> int:
        """The round that the participant trains or will train next."""
        return self.copies.round

    @property
    def assignment(self) -> int | None:
        """The cluster that it trained last."""
        return self.copies.assignment

    def runs(self, job: Job) -> bool:
        """Return whether a long job was not cancelled."""
        return job is self.job or job is self.background

    @abstractmethod
    def begin(self, now: float, late: bool = False) -> None:
        """Begin; late: others have begun before, and have models."""

    @abstractmethod
    def connected(self, neighbour: int, now: float) -> None:
        """Take in that a neighbour is in reach: a new epoch of the link begins."""

    @abstractmethod
    def disconnected(self, neighbour: int, now: float) -> None:
        """Take in that a neighbour is out of reach: what was under way to and from it is lost."""

    @abstractmethod
    def finished(self, job: Job, result: Any, now: float) -> None:
        """Take in finished work."""

    @abstractmethod
    def wake(self, now: float) -> None:
        """Do what is due; nothing else is to be handled at this moment."""

    @abstractmethod
    def next_wake(self) -> float | None:
        """Return when `wake` is to be called: minus infinity for as soon as nothing else is to be handled."""

    def _on_drivers_clock(self, due: float) -> float | None:
        """Return when the driver's clock shows a time of this participant's, and not before; None for inf."""
        if due == math.inf:
            return None
        return due if not self.set_back else math.nextafter(due - self.set_back, math.inf)

    @abstractmethod
    def waits(self) -> str:
        """Describe what it waits for, in a sentence without a subject."""

    def state_of(self) -> dict[str, Any]:
        """Return the whole state, field by field; nothing may be waiting in `ready`.

        The models themselves are the driver's: they are in the memory that `allocate` returned.
        """
        fields = {name: value for name, value in vars(self).items() if name not in self.UNSTORED}
        bare = replace(self.copies, bank=torch.empty(0))
        clusters = len(self.copies.bank)
        return fields | {"links": self.links, "refused": self.refused, "copies": bare, "clusters": clusters}

    def restore(self, fields: dict[str, Any]) -> None:
        """Continue from a whole state; the memory that `allocate` returns holds the models already."""
        for name in (vars(self).keys() & fields.keys()) - self.UNSTORED:
            setattr(self, name, fields[name])
        for kept, name in ((self.links, "links"), (self.refused, "refused")):
            kept.clear()
            kept.update(fields[name])
        empty = torch.empty(0, self.options.size, dtype=self.options.dtype)
        self.copies = replace(self.copies, bank=self.allocate(fields["clusters"]) if fields["clusters"] else empty)

    @abstractmethod
    def _handle(self, sender: int, message: Any) -> bool:
        """Take in a message that is well formed; return False where this kind of participant has no use for it."""

    def receive(self, sender: int, message: Any, now: float) -> bool:
        """Take in a message; anything may come: late, twice, out of order, of another lineage, garbage.

        Returns whether more than notes is to leave the participant.
        """
        if now != self.now:
            self._tick(now)
        if sender not in self.links:
            self.out.refuse("from a stranger", sender)
        elif not well_formed(message):
            self.out.refuse("malformed", sender)
        elif not self._handle(sender, message):
            self.out.refuse("not for this participant", sender)
        ready = self.out.ready
        return bool(ready.messages or ready.work or ready.save)

    def ready(self) -> Ready:
        """Return what is to be saved, sent, done and noted, and forget it."""
        return self.out.take()

    def take_notes(self) -> list[tuple[str, int, int, int, float]]:
        """Return what `ready` would return as `noted`, and forget it."""
        ready = self.out.ready
        noted = ready.noted
        if noted:
            ready.noted = []
        return noted

    def _tick(self, now: float) -> None:
        """Advance to a time of the driver's clock. Where that was set back, deadlines stay as far away as they were."""
        if now + self.set_back < self.now:
            self.set_back = self.now - now
        self.now = now + self.set_back


def names(peers: Any) -> str:
    """Name some participants in a sentence."""
    shown = ", ".join(str(i) for i in list(peers)[:4]) + (f" and {len(peers) - 4} more" if len(peers) > 4 else "")
    return f"client {shown}" if len(peers) == 1 else f"clients {shown}"


# For drivers of one participant alone.


class Memory:
    """The memory of a bank: what the first rows held, they hold after it has grown."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._bank = torch.zeros(0, size, dtype=dtype)

    def __call__(self, models: int) -> Tensor:
        before = self._bank[:models]
        self._bank = before.new_zeros(models, before.shape[1])
        self._bank[: len(before)] = before
        return self._bank


def drive(machine: Machine, inputs: Iterable[tuple[Any, ...]]) -> Iterator[Ready]:
    """Hand a participant that has not begun the inputs of another one; yields what leaves it after each of them.

    inputs: (time, kind, ...) with, after begin: late; connected and disconnected: the neighbour; receive: the sender
    and the message; rewire: the neighbours; limit_peers: how many; finished: the number of the job among all that were
    asked for, and the result; wake: nothing. Raises IndexError for a job that it has not asked for, ConfigError for
    what is no input.
    """
    jobs: list[Job] = []
    for now, kind, *values in inputs:
        if kind not in INPUTS:
            raise unknown("input of a peer", kind, INPUTS)
        if kind == "finished":
            if not 0 <= values[0] < len(jobs):
                raise IndexError(f"job {values[0]} has ended, and {len(jobs)} were asked for")
            values[0] = jobs[values[0]]
        if kind == "begin":
            machine.begin(now, *values)
        else:
            getattr(machine, kind)(*values, now)
        ready = machine.ready()
        jobs += ready.work
        yield ready
