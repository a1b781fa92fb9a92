"""One client as a state machine without I/O: drivers supply time, randomness and delivery.

`start_round` does steps 1 and 2 of the paper's Algorithm 1 (assign, update) and returns the message to send; `Rules` of
`core.exchange` do step 3 for one message (the running average).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dfca.core.algorithm import Algorithm, Choice, View
from dfca.core.exchange import Receivers, Rules, is_quiet, rules_of
from dfca.core.learning.inputs import Samples
from dfca.core.learning.local import (
    LocalOptions,
    TrainingSet,
    draw_steps,
    held_out,
    local_steps_,
    losses,
    sample_losses,
)
from dfca.core.learning.optimisers import Kept
from dfca.core.learning.params import FlatModel, initial
from dfca.core.learning.parts import layout_of, stages_of
from dfca.core.method import Method
from dfca.core.privacy import protect, simulated_noise
from dfca.core.rng import seeded, stream
from dfca.core.state import ClientState, Message


@dataclass(frozen=True)
class Client:
    """What does not change about a client: who it is, what it holds, what it runs."""

    id: int
    degree: int
    x: Samples
    y: Tensor
    model: FlatModel
    make_model: Callable[[], nn.Module]
    algorithm: Algorithm
    clusters: int
    seed: int
    method: Method
    true_cluster: int | None = None
    clients: int = 1
    hold_out_until: int | None = None  # the round before which it holds some samples out of training; None: never
    chooses_unseen: bool = False  # it chooses a cluster by the samples that it holds out (`rules.merging`)
    quiet_from: int | None = None  # the round from which on it does not train; None: it always trains
    receivers: Receivers = ()  # whom it sends to; (): all neighbours, in every round
    kept: Kept = field(default_factory=Kept, compare=False)  # of its optimiser, where that is kept
    secret_noise: Callable[[int], Tensor] | None = None  # (P,), of [privacy] on a device; None: of the seed

    @property
    def rules(self) -> Rules:
        """Settle how this client merges and what it hands on."""
        layout = layout_of(self.model, self.algorithm)
        return rules_of(self.id, self.degree, self.algorithm, self.method, layout, self.receivers, self.seed)

    def start(self) -> ClientState:
        """Begin: draw the start of every model, the same for all clients or one's own.

        An elected start is the outcome of an election (`peer.elections`): `ClientState.of(centres)`.
        """
        models = self.algorithm.bank_size(self.clusters)
        who = () if self.algorithm.start == "shared" else (self.id,)
        drawn = [initial(self.model, self.make_model, self.seed, "init", j, *who) for j in range(models)]
        bank = torch.stack(drawn).to(self.x.device)
        if (layout := layout_of(self.model, self.algorithm)) is not None:
            layout.spread_(bank, 0)
        return ClientState.of(bank, self.first_memory(models))

    def first_memory(self, models: int) -> Tensor | None:
        """Return what a client with `models` models remembers at first; None where the algorithm has no memory."""
        return None if self.algorithm.memory is None else self.algorithm.memory(models, self.clients)

    def start_round(self, state: ClientState) -> tuple[ClientState, list[Message]]:
        """Assign, train the assigned model, and hand out the message for the neighbours.

        An update that makes the model non-finite is undone, and nothing is sent.
        """
        choice, rules, now = self.algorithm.decide(self.view(state)), self.rules, state.round
        trained = rules.rescaled(rules.begin_round(state), self.train(state.bank, choice, now))
        fine, near = bool(torch.isfinite(trained).all()), rules.receivers_in(now)
        rate = self.method.participation
        listeners = None if near is None else sum(participates(self.seed, n, now, rate) for n in near)
        after, messages = rules.end_round(state, choice.cluster, trained if fine else None, listeners)
        bank = state.bank.clone()
        if after.trained is not None:
            rules.store_(bank, choice.cluster, trained)
        memory = state.memory if choice.memory is None else choice.memory
        return replace(after, bank=bank, memory=memory), messages

    def train(self, bank: Tensor, choice: Choice, round: int) -> Tensor:
        """Train copies of what was chosen from a bank (m, P): (P,), or (m, P) where all are trained; with [privacy] the
        model that may be sent."""
        trained = self._train(bank, choice, round)
        if (privacy := self.method.privacy) is None:
            return trained
        size = trained.numel()
        noise = simulated_noise(size, self.seed, self.id, round) if not self.secret_noise else self.secret_noise(size)
        return protect(bank[choice.cluster], trained, privacy, noise)

    def _train(self, bank: Tensor, choice: Choice, round: int) -> Tensor:
        x, y = self.samples(round)
        if choice.points is not None:
            x, y = x[choice.points], y[choice.points]
        every, weights = self.algorithm.trains == "all", choice.weights
        rows = range(len(bank)) if every else range(choice.cluster, choice.cluster + 1)
        trained = bank[rows.start : rows.stop].clone()
        if is_quiet(round, self.quiet_from):
            return trained if every else trained[0]
        for number, (options, frozen) in enumerate(
            stages_of(self.model, self.algorithm, effective(self.method.local, self.algorithm))
        ):
            names = stage_names(self.id, round, number)
            batches, changes = draw_steps(len(y), options, self.seed, *names)
            for j, vector in zip(rows, trained, strict=True):
                weighed = None if weights is None else weights[j].to(vector.dtype)
                state = self.kept.before(self.id, j, round) if options.keeps_state else None
                data = TrainingSet(x, y, batches, weights=weighed, frozen=frozen, changes=changes, state=state)
                with seeded(self.seed, "noise", *names):
                    local_steps_(self.model, vector, data, options.at(round))
                if state is not None and bool(vector.isfinite().all()):
                    self.kept.after(self.id, j, round, state)
        return trained if every else trained[0]

    def samples(self, round: int) -> tuple[Samples, Tensor]:
        """Return the samples that it trains on in a round: all, or those that it does not hold out."""
        return self.divided()[0] if round < (self.hold_out_until or 0) else (self.x, self.y)

    def divided(self) -> tuple[tuple[Samples, Tensor], tuple[Samples, Tensor]]:
        """Divide the samples into those to train on and those that are held out."""
        mask = held_out(len(self.y), self.seed, self.id).to(self.y.device)
        return (self.x[~mask], self.y[~mask]), (self.x[mask], self.y[mask])

    def view(self, state: ClientState) -> View:
        """Look at one's own data through all models of the bank, as far as the algorithm asks for it."""
        needs, truth = self.algorithm.needs, self.true_cluster if self.algorithm.informed else None
        x, y = self.samples(state.round)
        if self.chooses_unseen and len((held := self.divided()[1])[1]):
            x, y = held

        def random() -> torch.Generator:
            return stream(self.seed, "choose", self.id, state.round)

        if needs == "samples":
            by_sample = sample_losses(self.model, state.bank, x, y)
            return View(by_sample.mean(dim=1), random, by_sample, truth, state.memory)
        means = losses(self.model, state.bank, x, y) if needs == "losses" else torch.empty(0)
        if state.closed:
            means[list(state.closed)] = math.inf
        return View(means, random, None, truth, state.memory)


def stage_names(client: int, round: int, stage: int) -> tuple[int, ...]:
    """Name the random streams of a stage of a client's local steps."""
    return (client, round, stage) if stage else (client, round)


def effective(local: LocalOptions, algorithm: Algorithm) -> LocalOptions:
    """Apply the local options that the algorithm itself fixes; optimisers other than SGD have no momentum."""
    return (
        local if algorithm.momentum is None or local.optimizer != "sgd" else replace(local, momentum=algorithm.momentum)
    )


def participates(seed: int, client: int, round: int, rate: float) -> bool:
    """Draw whether a client is one of the round's M_t: each by its own lot, so that no one has to be asked."""
    return rate >= 1 or bool(torch.rand((), generator=stream(seed, "participation", client, round)) < rate)
