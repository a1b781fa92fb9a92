"""One client as a state machine without I/O: drivers supply time, randomness and delivery.

`start_round` does steps 1 and 2 of the paper's Algorithm 1 (assign, update) and returns the message to send;
`receive` does step 3 for one message (the running average). States are values: nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dfca.core.algorithm import Algorithm, View
from dfca.core.local import LocalOptions, draw_batches, local_steps, losses, sample_losses
from dfca.core.mixing import WeightRule, fold, fold_weighted, metropolis_weight
from dfca.core.params import FlatModel, initial
from dfca.core.rng import seeded, stream


@dataclass(frozen=True)
class Message:
    """One model on its way: who trained it, for which cluster, in which round, and the sender's degree."""

    sender: int
    cluster: int
    round: int
    degree: int
    model: Tensor


@dataclass(frozen=True)
class ClientState:
    """What a client remembers between two events.

    bank (m, P); counts: folds per cluster since the last local update; own: the copies before the first fold, where the
    weight rule needs them; assignment: the cluster trained last; rejected: messages that could not be used.
    """

    bank: Tensor
    counts: tuple[int, ...]
    own: dict[int, Tensor] = field(default_factory=dict)
    assignment: int | None = None
    round: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class Client:
    """What does not change about a client: who it is, what it holds, what it runs."""

    id: int
    degree: int
    x: Tensor
    y: Tensor
    model: FlatModel
    make_model: Callable[[], nn.Module]
    algorithm: Algorithm
    clusters: int
    local: LocalOptions
    seed: int
    weights: WeightRule = "uniform"
    true_cluster: int | None = None

    def start(self) -> ClientState:
        """Begin: draw the start of every model, the same for all clients or one's own."""
        models = self.algorithm.bank_size(self.clusters)
        who = () if self.algorithm.start == "shared" else (self.id,)
        drawn = [initial(self.model, self.make_model, self.seed, "init", j, *who) for j in range(models)]
        return ClientState(bank=torch.stack(drawn).to(self.x.device), counts=(0,) * models)

    def start_round(self, state: ClientState) -> tuple[ClientState, list[Message]]:
        """Assign, train the assigned model, and hand out the message for the neighbours.

        A model that training has made non-finite is not sent.
        """
        choice = self.algorithm.choose(self.view(state))
        x, y = (self.x, self.y) if choice.points is None else (self.x[choice.points], self.y[choice.points])
        options = effective(self.local, self.algorithm)
        batches = draw_batches(len(y), options, stream(self.seed, "batches", self.id, state.round))
        with seeded(self.seed, "noise", self.id, state.round):
            trained = local_steps(self.model, state.bank[choice.cluster], x, y, options, batches)
        bank = state.bank.clone()
        bank[choice.cluster] = trained
        idle = -1 if self.algorithm.exchange == "server" else 0
        counts = tuple(0 if j == choice.cluster else idle for j in range(len(bank)))
        message = Message(self.id, choice.cluster, state.round, self.degree, trained)
        after = ClientState(bank, counts, {}, choice.cluster, state.round + 1, state.rejected)
        return after, [message] if usable(message, bank) and self.algorithm.exchange != "none" else []

    def skip_round(self, state: ClientState) -> ClientState:
        """Sit a round out: train nothing, send nothing."""
        idle = -1 if self.algorithm.exchange == "server" else 0
        return replace(state, counts=(idle,) * len(state.bank), own={}, round=state.round + 1)

    def receive(self, state: ClientState, message: Message) -> ClientState:
        """Fold one message into the running average of its cluster; one that does not fit is counted and dropped."""
        if not usable(message, state.bank):
            return replace(state, rejected=state.rejected + 1)
        j, bank = message.cluster, state.bank.clone()
        counts, own = list(state.counts), dict(state.own)
        if weight_rule(self.algorithm, self.weights) == "metropolis":
            own.setdefault(j, state.bank[j])
            weight = metropolis_weight(self.degree, message.degree)
            bank[j] = fold_weighted(state.bank[j], own[j], message.model, weight)
        else:
            bank[j], counts[j] = fold(state.bank[j], counts[j], message.model)
        return replace(state, bank=bank, counts=tuple(counts), own=own)

    def view(self, state: ClientState) -> View:
        """Look at one's own data through all models of the bank, as far as the algorithm asks for it."""
        needs, truth = self.algorithm.needs, self.true_cluster if self.algorithm.informed else None

        def random() -> torch.Generator:
            return stream(self.seed, "choose", self.id, state.round)

        if needs == "samples":
            each = sample_losses(self.model, state.bank, self.x, self.y)
            return View(each.mean(dim=1), random, each, truth)
        means = losses(self.model, state.bank, self.x, self.y) if needs == "losses" else torch.empty(0)
        return View(means, random, None, truth)


def effective(local: LocalOptions, algorithm: Algorithm) -> LocalOptions:
    """Apply the local options that the algorithm itself fixes."""
    return local if algorithm.momentum is None else replace(local, momentum=algorithm.momentum)


def weight_rule(algorithm: Algorithm, configured: WeightRule) -> WeightRule:
    """Settle how received models weigh: the algorithm's rule before the experiment's; a server takes the mean."""
    return "uniform" if algorithm.exchange == "server" else algorithm.weights or configured


def participates(seed: int, client: int, round: int, rate: float) -> bool:
    """Draw whether a client is one of the round's M_t: each by its own lot, so that no one has to be asked."""
    return rate >= 1 or bool(torch.rand((), generator=stream(seed, "participation", client, round)) < rate)


def usable(message: Message, bank: Tensor) -> bool:
    """Tell whether a message can be folded: a cluster of ours, a model of our size and type, finite numbers only."""
    model = message.model
    fits = 0 <= message.cluster < len(bank) and model.shape == bank.shape[1:] and model.dtype == bank.dtype
    return fits and message.degree >= 0 and bool(torch.isfinite(model).all())
