"""The work of peers on tiny models, and rules that look at everything that is folded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dfca.core.exchange import Rules
from dfca.core.rng import stream
from dfca.core.rules.election import divide
from dfca.core.rules.merging import differ
from dfca.core.rules.personal import GRID
from dfca.core.state import ClientState, Message, is_finite
from dfca.peer.peer import Peer
from dfca.peer.records import work as jobs
from dfca.peer.records.lineage import Lineage

SIZE = 3  # floats of a model


class Violation(Exception):
    """What is wrong in a world."""


def is_same(one: Lineage, other: Lineage, cluster: int) -> bool:
    """Return whether a cluster is the same in two lineages: the longer one extends the other without touching it.

    The peer has a function of its own (`lineage.compatible`), which this one checks.
    """
    short, long = sorted((one, other), key=len)
    return long[: len(short)] == short and not any(cluster in entry.slots for entry in long[len(short) :])


@dataclass(frozen=True)
class CheckedRules(Rules):
    """Rules that look at everything that is folded, beside the peer's own checks."""

    peer: Callable[[], Any] = lambda: None  # returns the peer
    # By receiver and the identity of a model: its lineage as sent, None for one that a link has broken, and the model.
    made: dict[tuple[int, int], tuple[Lineage | None, Tensor]] = field(default_factory=dict)

    def receive_(self, state: ClientState, message: Message, weight: float = 1.0) -> ClientState:
        """Check, then fold."""
        self._check(state, message)
        return super().receive_(state, message, weight)

    def fold_all_(self, state: ClientState, messages: Sequence[tuple[Message, float]]) -> ClientState:
        """Check all, then fold."""
        for message, _ in messages:
            self._check(state, message)
        return super().fold_all_(state, messages)

    def _check(self, state: ClientState, message: Message) -> None:
        peer, j = self.peer(), message.cluster
        form = (message.model.dtype, tuple(message.model.shape))
        if form != (state.bank.dtype, (SIZE,)) or not is_finite(message.model) or not 0 <= j < len(state.bank):
            raise Violation(f"peer {peer.id} folds a model that does not fit")
        lineage, _ = self.made.get((self.id, id(message.model)), (None, None))
        if lineage is None:
            raise Violation(f"peer {peer.id} folds a model that nobody sent, or that was broken on the way")
        if isinstance(peer, Peer):
            if j in state.closed:
                raise Violation(f"peer {peer.id} folds cluster {j}, which is closed")
            if not is_same(peer.lineage, lineage, j):
                raise Violation(f"peer {peer.id} folds cluster {j} of another lineage")


class TinyWork:
    """The work of one peer on samples (n, SIZE) around a point: loss |theta - x|^2, steps towards the samples' mean."""

    def __init__(self, seed: int, peer: int, group: int, start: str, models: int) -> None:
        self.seed, self.peer, self.start, self.models = seed, peer, start, models
        self.move_to(group)

    def move_to(self, group: int) -> None:
        """Hold samples of another group."""
        spread = torch.randn(20, SIZE, generator=stream(self.seed, "samples", self.peer, group))
        centre = 4.0 * torch.randn(SIZE, generator=stream(self.seed, "group", group))
        self.x = (centre + 0.3 * spread).double()
        self.mean = self.x.mean(dim=0)
        self.variance = float((self.x - self.mean).square().sum(dim=1).mean())

    def run(self, job: jobs.Job, bank: Tensor | None) -> Any:
        """Do a job."""
        if isinstance(job, jobs.Train):
            assert bank is not None
            cluster = self._nearest(bank, job.closed)
            losses = ((bank - self.mean).square().sum(dim=1) + self.variance).tolist()
            model = torch.lerp(bank[cluster], self.mean, 0.5)
            return jobs.Trained(cluster, True, model, losses[cluster], len(self.x), tuple(losses))
        if isinstance(job, jobs.Rest):
            return None
        if isinstance(job, jobs.Draw):
            who = () if self.start == "shared" else (self.peer,)
            drawn = [torch.randn(SIZE, generator=stream(self.seed, "init", j, *who)) for j in range(self.models)]
            return torch.stack(drawn).double()
        if isinstance(job, jobs.Observe):
            own, partner = ((job.models - self.mean).square().sum(dim=1) / 50).tolist()
            return differ(own, partner), self.variance / 100
        if isinstance(job, jobs.Curve):
            bank = job.models
            cluster = self._nearest(bank, job.closed)
            moved = bank[cluster] + (self.mean - bank[cluster]) * (1 - 0.9 ** torch.tensor(GRID).double())[:, None]
            return jobs.OwnCurve(cluster, len(self.x) // 5, _losses(moved, self.x[::5]).mean(dim=1))
        if isinstance(job, jobs.Personalise):
            return None
        stage = () if job.stage is None else (job.stage,)
        parts = divide(len(self.x), stream(self.seed, "parts", self.peer, *stage))
        own = self.x[parts.warm].mean(dim=0)
        models = job.models if isinstance(job, jobs.Score) else own[None]
        measured = jobs.Losses(_losses(models, self.x[parts.bid]), _losses(models, self.x[parts.vote]))
        return measured if isinstance(job, jobs.Score) else jobs.Warm(own, measured)

    def _nearest(self, bank: Tensor, closed: tuple[int, ...]) -> int:
        losses = (bank - self.mean).square().sum(dim=1).tolist()
        return min((j for j in range(len(bank)) if j not in closed), key=lambda j: losses[j])


def _losses(models: Tensor, x: Tensor) -> Tensor:
    return (models[:, None] - x[None]).square().sum(dim=2)
