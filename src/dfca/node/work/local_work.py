"""The work of a device: read its data again when it changes, and score its models on held-out samples.

Data changes between two rounds only, because an election compares losses on the same samples. If new data cannot be
used, the node continues with the old.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dfca.base.errors import DfcaError
from dfca.core.client import Client
from dfca.core.rules.merging import hide_closed
from dfca.core.rules.personal import Pair
from dfca.node.work.guard import ModelGuard
from dfca.node.work.worker import Worker
from dfca.peer.records.work import Curve, Job, Observe, Personalise, Score, Train, Trained, Warm, WarmUp

RECENT = 10  # rounds of which the losses are remembered
SHARE = 0.1  # of a node's time that scoring may take


@dataclass(frozen=True)
class WorkSamples:
    """The samples of a device."""

    client: Client  # trains on them
    held_out: int  # how many are held out
    score: Callable[[Tensor], Any]  # scores a bank (m, P) on held-out samples: a `node.task.learner.HeldOutReport`
    held: Pair | None = None  # to pick personal steps on; None: samples of the client


class LocalWork:
    """Computes the jobs of one peer in its thread.

    refresh: returns new samples if the data has changed, else None; raises DfcaError if it cannot be used. is_stale:
    looks whether files have changed since they were read.
    """

    def __init__(
        self,
        samples: WorkSamples,
        refresh: Callable[[], WorkSamples | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        guard: ModelGuard | None = None,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> None:
        self.samples, self._refresh, self._clock, self.is_stale = samples, refresh, clock, is_stale
        self.guard = guard
        if guard is not None:
            guard.score = self._loss
        self._worker = Worker(samples.client, held=samples.held)
        self._score_after = -float("inf")
        self.loss: float | None = None  # of the chosen model before the last training
        self.recent_losses: deque[float] = deque(maxlen=RECENT)
        self.report: Any = None  # the last scores
        self.personal: Any = None  # scores after the personal last step
        self.rereads = 0
        self.problem: str | None = None  # with the data

    def run(self, job: Job, bank: Tensor | None) -> Any:
        """Do a job; returns its result."""
        device = self.samples.client.x.device
        bank = None if bank is None else bank.to(device)
        if isinstance(job, Train):
            self._read_again()
            if bank is not None and self._clock() >= self._score_after:
                bank = self._settle(bank, job.closed)
        result = moved(self._worker.run(self._on_device(job), bank), "cpu")
        if isinstance(result, Trained):
            self.loss = result.loss
            self.recent_losses.append(result.loss)
        elif isinstance(result, Warm):
            give_back_memory()
        elif isinstance(job, Personalise) and self._worker.personal is not None:
            self.personal = self.samples.score(self._worker.personal[None])
        return result

    def _settle(self, bank: Tensor, closed: tuple[int, ...]) -> Tensor:
        """Score the models; returns them, or the last good ones if these have collapsed."""
        self.score(hide_closed(bank, closed))
        if self.guard is None:
            return bank
        own = self.report.own
        settled = self.guard.settle(bank, self.report.cluster, None if own is None else own.loss)
        if settled is not bank:
            self.score(hide_closed(settled, closed))
        return settled

    def _loss(self, model: Tensor) -> float | None:
        own = self.samples.score(model[None].to(self.samples.client.x.device)).own
        return None if own is None else float(own.loss)

    def slices(self, job: Job) -> Iterator[Any]:
        """Do a job beside the rounds piece by piece; the last one yields its result."""
        for piece in self._worker.slices(self._on_device(job)):
            yield moved(piece, "cpu")
        if isinstance(job, WarmUp):
            give_back_memory()

    def _on_device(self, job: Job) -> Job:
        if isinstance(job, Score | Observe | Curve):
            return replace(job, models=job.models.to(self.samples.client.x.device))
        return job

    def score(self, bank: Tensor) -> None:
        """Score all models on the held-out samples, rarely enough to take at most `SHARE` of the time."""
        begin = self._clock()
        self.report = self.samples.score(bank)
        end = self._clock()
        self._score_after = end + (end - begin) * (1 / SHARE - 1)

    def _read_again(self) -> None:
        try:
            newer = self._refresh()
        except DfcaError as error:
            self.problem = f"the data has changed and cannot be used: {error}; the node continues with its earlier data"
            return
        if newer is not None:
            self.samples, self._worker = newer, Worker(newer.client, held=newer.held)
            self.rereads += 1
            if self.guard is not None:
                self.guard.forget()
            self.problem = None
            give_back_memory()


def moved(value: Any, device: str) -> Any:
    """Move the tensors of a job's result: peers, messages and saves are on the CPU, whichever device trains."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(part, device) for part in value))
    return value


def give_back_memory() -> None:
    """Collect garbage and return free memory that the C library (glibc) keeps: after work that needed much once."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
