"""The work of a device: its data is read again when it changes, and its models are scored on what it holds out.

Data changes between two rounds only: an election compares losses on the same samples throughout, and none is under way
when a peer asks for a round. Data that cannot be used any more is not taken; the node goes on with what it had.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from dfca.base.errors import DfcaError
from dfca.core.client import Client
from dfca.core.rules.merging import hide_closed
from dfca.core.rules.personal import Pair
from dfca.node.work.heap import give_back_memory
from dfca.node.work.worker import Worker
from dfca.peer.records.work import Job, Personalise, Score, Train, Trained, Warm

RECENT = 10
"""Rounds of which the losses are remembered."""
SHARE = 0.1
"""Of the time of a node, scoring may take so much."""


class Scored(Protocol):
    """How the models do on held-out samples: `node.task.learner.HeldOutReport`."""

    cluster: int
    scores: tuple[Any, ...]


@dataclass(frozen=True)
class WorkSamples:
    """What a device has: the client that trains on it, and how to score a bank (m, P) on what is held out; held: what
    personal steps are picked on, where they are not picked on samples of the client."""

    client: Client
    held_out: int
    score: Callable[[Tensor], Any]
    held: Pair | None = None


class LocalWork:
    """Computes the jobs of one peer in its thread.

    refresh: returns new samples where the data has changed, else None; raises DfcaError where it cannot be used.
    loss: of the chosen model before the last training; report: the last scores; personal: those of the model after the
    personal last step; problem: with the data, None where there is none.
    """

    def __init__(
        self,
        samples: WorkSamples,
        refresh: Callable[[], WorkSamples | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.samples, self._refresh, self._clock = samples, refresh, clock
        self._worker = Worker(samples.client, held=samples.held)
        self._score_after = -float("inf")
        self.loss: float | None = None
        self.recent_losses: deque[float] = deque(maxlen=RECENT)
        self.report: Any = None
        self.personal: Any = None
        self.rounds = 0
        self.rereads = 0
        self.problem: str | None = None

    def run(self, job: Job, bank: Tensor | None) -> Any:
        """Do a job; returns its result."""
        device = self.samples.client.x.device
        bank = None if bank is None else bank.to(device)
        if isinstance(job, Train):
            self._read_again()
            if bank is not None and self._clock() >= self._score_after:
                self.score(hide_closed(bank, job.closed))
        elif isinstance(job, Score):
            job = replace(job, models=job.models.to(device))
        result = moved(self._worker.run(job, bank), "cpu")
        if isinstance(result, Trained):
            self.loss, self.rounds = result.loss, self.rounds + 1
            self.recent_losses.append(result.loss)
        elif isinstance(result, Warm):
            give_back_memory()
        elif isinstance(job, Personalise) and self._worker.personal is not None:
            self.personal = self.samples.score(self._worker.personal[None])
        return result

    def score(self, bank: Tensor) -> None:
        """Score all models on the held-out samples; seldom enough that it costs `SHARE` of the time at most."""
        begin = self._clock()
        self.report = self.samples.score(bank)
        end = self._clock()
        self._score_after = end + (end - begin) * (1 / SHARE - 1)

    def _read_again(self) -> None:
        try:
            newer = self._refresh()
        except DfcaError as error:
            self.problem = f"the data has changed and cannot be used: {error}; the node goes on with what it had"
            return
        if newer is not None:
            self.samples, self._worker = newer, Worker(newer.client, held=newer.held)
            self.rereads += 1
            self.problem = None
            give_back_memory()


def moved(value: Any, device: str) -> Any:
    """Move the tensors of a job's result: peers, messages and saves are on the CPU, whatever trains."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(each, device) for each in value))
    return value
