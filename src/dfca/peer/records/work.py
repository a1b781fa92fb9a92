"""What a peer asks its driver for: work to do, and everything else that leaves the machine (`Ready`).

A peer never computes a loss or a gradient. It asks for a job and keeps serving messages; the driver answers with
`Peer.finished(job, result, now)`. A peer has at most one long job of its rounds at a time, `peer.job`, and one that
runs beside them, `peer.background`, on copies of its models: no round waits for it. A job that is neither when it ends
was cancelled, and its result is ignored. `Score` and `Draw` are short.

The driver owns the samples; a job says which of them it is for. held_out: it does without those that the client holds
out (`learning.local.held_out`); else it takes all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Train:
    """Choose a model of the bank and train it: a round. The bank does not change until the job has ended.

    unseen: the model is chosen by the samples that are held out, where the client has some; closed: the clusters that
    are not chosen. The result is `Trained`.
    """

    round: int
    held_out: bool = False
    unseen: bool = False
    closed: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Rest:
    """Do nothing for as long as a round takes: the peer sits it out. The result is None."""

    round: int


@dataclass(frozen=True, eq=False)
class WarmUp:
    """Train a model (P,) from the common start, for an election; stage: names the random parts of the samples.

    It runs beside the rounds of a peer that has models. The result is `Warm`.
    """

    stage: int | None
    held_out: bool = False


@dataclass(frozen=True, eq=False)
class Draw:
    """Draw the models that the algorithm begins with. The result is a tensor (m, P)."""


@dataclass(frozen=True, eq=False)
class Score:
    """Compute the losses of models (c, P) on each sample of the parts that bid and vote. The result is `Losses`."""

    models: Tensor
    stage: int | None
    held_out: bool = False


@dataclass(frozen=True, eq=False)
class Observe:
    """Judge the model that the peer follows, its partner and their average on held-out samples, beside the rounds.

    models (2, P): copies of the two; share: how much the partner weighs in the average (`rules.merging.observe`). The
    result is the excess and the optimism of an `Observation`; None where the client holds nothing out.
    """

    models: Tensor
    share: float


@dataclass(frozen=True, eq=False)
class Curve:
    """Measure the losses on held-out samples by the number of personal steps (`rules.personal`) from the model that the
    peer would deploy, beside the rounds.

    models (m, P): copies of its models; closed: the clusters that it would not deploy. The result is `OwnCurve`.
    """

    models: Tensor
    closed: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Personalise:
    """Take personal steps from the model that the peer deploys: from a copy, on all samples, for its own use.

    What comes of it is the driver's, and is never sent; the result is None.
    """

    steps: int
    closed: tuple[int, ...] = ()


class OwnCurve(NamedTuple):
    """A curve: the cluster that the peer would deploy, how many samples are held out, and the losses (G,) on them."""

    cluster: int
    samples: int
    losses: Tensor


class Trained(NamedTuple):
    """What came of a round: the cluster, whether the model is finite, the model (P,), and the lowest loss (the one of
    the model that was chosen, before training; inf where nobody looked). model None: the driver wrote it to the bank.
    samples: how many it was trained on; losses: of all models, by which it was chosen, where somebody looked.
    """

    cluster: int
    fine: bool
    model: Tensor | None
    loss: float
    samples: int = 0
    losses: tuple[float, ...] = ()


class Losses(NamedTuple):
    """Losses per sample, of c models: bid (c, n) on the bidding part, vote (c, n') on the voting part."""

    bid: Tensor
    vote: Tensor


class Warm(NamedTuple):
    """A warmed-up model (P,) (the start itself where it diverged), and its own losses."""

    model: Tensor
    losses: Losses


Job = Train | Rest | WarmUp | Observe | Draw | Score | Curve | Personalise


LONG = (Train, Rest, WarmUp, Observe, Curve, Personalise)  # jobs that take time
KEPT = (Train, Personalise)
"""Those of them that read the bank, which does not change meanwhile, and are never broken off."""


class Note(NamedTuple):
    """Something that happened at a peer, for books, metrics and logs: see `NOTES` for the kinds."""

    kind: str
    other: int = -2
    cluster: int = -1
    round: int = -1
    number: float = 0.0


NOTES = {
    "start": "a round began",
    "finish": "a round ended; cluster: what was trained, -1 where it diverged",
    "sit": "a round was sat out",
    "warm": "a warm-up began",
    "warmed": "a warm-up ended, or was broken off",
    "hold": "an update was kept until it can be folded",
    "fold": "an update was folded; number: its age",
    "drop": "an update came too late, or was of no use",
    "nothing": "a neighbour ended its round without a model",
    "refused": "a message was refused",
    "timeout": "a wait for neighbours ended by its time",
    "jump": "the peer joins the round of its neighbours",
    "relay": "a relayed copy was taken",
    "take": "a model of a neighbour's bank was taken",
    "join": "a peer without models took over those of a neighbour",
    "afresh": "the peer begins with a start of its own",
    "elect": "an election ended; number: the clusters",
    "survey": "the result of a survey was taken; number: the clusters that are open",
    "adopt": "a cluster that others opened was taken",
    "switch": "the peer took over the models of another lineage",
    "broadcast": "the server ended a round",
    "download": "a client took the server's models",
    "measure": "a measurement of the curve of personal steps began",
    "measured": "it ended",
    "tune": "the personal last step began; number: its steps",
    "tuned": "it ended",
    "done": "the last round was done",
}
"""The kinds of notes."""


@dataclass(slots=True)
class Ready:
    """What leaves a peer. save: what `Peer.save` returns must be on the disk before a message leaves.

    noted: the notes as plain tuples, which are made in a third of the time: there are several for every message.
    """

    save: bool = False
    messages: list[tuple[int, Any]] = field(default_factory=list)
    work: list[Job] = field(default_factory=list)
    noted: list[tuple[str, int, int, int, float]] = field(default_factory=list)

    @property
    def notes(self) -> list[Note]:
        """What happened, for books, metrics and logs."""
        return [Note(*fields) for fields in self.noted]
