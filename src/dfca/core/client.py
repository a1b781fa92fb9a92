"""One client as a state machine without I/O: drivers supply time, randomness and delivery.

`start_round` does steps 1 and 2 of the paper's Algorithm 1 (assign, update) and returns the message to send;
`receive` does step 3 for one message (the running average). States are values: nothing is changed in place. A driver
that owns the banks uses `end_round` and `receive_` instead: the same steps without a copy of the bank, one pass over
one model each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dfca.core.algorithm import Algorithm, Share, View
from dfca.core.local import LocalOptions, draw_batches, local_steps, losses, sample_losses
from dfca.core.mixing import WeightRule, fold_, fold_weighted_, metropolis_weight
from dfca.core.params import FlatModel, initial
from dfca.core.relay import MANY, NEVER, Offer, choose_offer
from dfca.core.rng import seeded, stream


@dataclass(frozen=True)
class Message:
    """One model on its way: who sends it, for which cluster, in which round (its version), and the sender's degree.

    offer: for a relayed copy, what the sender had offered; None for a model that is sent unasked. updates: how many
    local updates of the sender itself stand behind the model.
    """

    sender: int
    cluster: int
    round: int
    degree: int
    model: Tensor
    offer: Offer | None = None
    updates: int = 0

    @cached_property
    def form(self) -> tuple[int, torch.dtype]:
        """How many numbers the model has (-1: it is no vector), and of which type; looked at once, like `finite`."""
        return len(self.model) if self.model.dim() == 1 else -1, self.model.dtype

    @cached_property
    def finite(self) -> bool:
        """Whether the model holds finite numbers only; computed once for all receivers of the same message."""
        return is_finite(self.model)


@dataclass(frozen=True)
class ClientState:
    """What a client remembers between two events.

    bank (m, P); counts: folds per cluster since the last local update; own: the copies before the first fold, where the
    weight rule needs them; assignment: the cluster chosen last; trained: the same, None where this round's update
    diverged or there was none; rejected: messages that could not be used; stamps, origins, folded: what `core.relay`
    remembers of each copy; updates: own local updates per cluster.
    """

    bank: Tensor
    counts: tuple[int, ...]
    own: dict[int, Tensor] = field(default_factory=dict)
    assignment: int | None = None
    trained: int | None = None
    round: int = 0
    rejected: int = 0
    stamps: tuple[int, ...] = ()
    origins: tuple[int, ...] = ()
    folded: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()

    @staticmethod
    def of(bank: Tensor) -> ClientState:
        """Begin with a bank (m, P)."""
        m = len(bank)
        return ClientState(
            bank, (0,) * m, stamps=(NEVER,) * m, origins=(MANY,) * m, folded=(NEVER,) * m, updates=(0,) * m
        )

    def with_model(self, cluster: int, bank: Tensor) -> ClientState:
        """Note that a cluster of the bank was opened anew; a bank that has grown by one has it at the end."""

        def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            return (*values[:cluster], value, *values[cluster + 1 :])

        own = {j: model for j, model in self.own.items() if j != cluster}
        return replace(
            self,
            bank=bank,
            counts=put(self.counts, 0),
            own=own,
            stamps=put(self.stamps, NEVER),
            origins=put(self.origins, MANY),
            folded=put(self.folded, NEVER),
            updates=put(self.updates, 0),
        )


@dataclass(frozen=True)
class Rules:
    """How one client merges what it receives and what it hands on; nothing here computes a loss or a gradient.

    degree: its neighbours in the graph; exchange, weights, share: as in `Algorithm`, settled by `rules_of`.
    """

    id: int
    degree: int
    exchange: Literal["gossip", "server", "none"] = "gossip"
    weights: WeightRule = "uniform"
    share: Share = "trained"

    def end_round(self, state: ClientState, cluster: int, trained: Tensor | None) -> tuple[ClientState, list[Message]]:
        """Do everything of a round but compute: the new state, and the messages for the neighbours.

        trained (P,): None where training made the model non-finite; then nothing of it is sent. The bank stays as it
        is: the driver writes `trained` to its row. The messages hold `trained` itself and copies of other rows, so that
        they are snapshots.
        """
        fine = trained is not None
        idle = -1 if self.exchange == "server" else 0
        counts, updates = [idle] * len(state.counts), list(state.updates)
        stamps, origins = list(state.stamps), list(state.origins)
        if fine:
            counts[cluster] = 0
            updates[cluster] += 1
            _stamp(stamps, origins, cluster, state.round, self.id)
        after = _changed(
            state,
            counts=tuple(counts),
            own={},
            assignment=cluster,
            trained=cluster if fine else None,
            round=state.round + 1,
            stamps=tuple(stamps),
            origins=tuple(origins),
            updates=tuple(updates),
        )
        return after, self._outgoing(after, trained, state.round)

    def _outgoing(self, state: ClientState, trained: Tensor | None, now: int) -> list[Message]:
        """Make the messages of a round: the trained model, or all of them; never one that is not finite."""
        if self.exchange == "none":
            return []
        sent: dict[int, Tensor] = {} if trained is None or state.trained is None else {state.trained: trained}
        if self.share == "all":
            sent = {j: sent[j] if j in sent else model.clone() for j, model in enumerate(state.bank)}
        made = [Message(self.id, j, now, self.degree, sent[j], updates=state.updates[j]) for j in sent]
        return [message for message in made if message.cluster == state.trained or usable(message, state.bank)]

    def skip_round(self, state: ClientState) -> ClientState:
        """Sit a round out: train nothing, send nothing."""
        idle = -1 if self.exchange == "server" else 0
        return replace(state, counts=(idle,) * len(state.bank), own={}, trained=None, round=state.round + 1)

    def receive(self, state: ClientState, message: Message, weight: float = 1.0) -> ClientState:
        """Fold one message into the running average of its cluster; one that does not fit is counted and dropped.

        weight in [0, 1] discounts a message that is stale; 1 is the paper's rule.
        """
        if not usable(message, state.bank):
            return replace(state, rejected=state.rejected + 1)
        return self.receive_(replace(state, bank=state.bank.clone()), message, weight)

    def receive_(self, state: ClientState, message: Message, weight: float = 1.0) -> ClientState:
        """Fold a message that is `usable` in place: of the bank, the row of its cluster changes and nothing else."""
        if message.offer is not None:
            return self._receive_relayed_(state, message, message.offer)
        return self.fold_all_(state, [(message, weight)])

    def fold_all_(self, state: ClientState, messages: Sequence[tuple[Message, float]]) -> ClientState:
        """Fold messages that are `usable` and no relayed copies in place, in order, each with its weight."""
        counts, stamps, origins, own = list(state.counts), list(state.stamps), list(state.origins), dict(state.own)
        metropolis, rows, empty = self.weights == "metropolis", state.bank.unbind(), not state.bank.numel()
        for message, weight in messages:
            j = message.cluster
            if metropolis:
                row = rows[j]
                if j not in own:
                    own[j] = row.clone()
                fold_weighted_(row, own[j], message.model, weight * metropolis_weight(self.degree, message.degree))
            elif empty:  # models without numbers: a run without training counts folds and nothing else
                counts[j] += 1
            else:
                counts[j] = fold_(rows[j], counts[j], message.model, weight)
            _stamp(stamps, origins, j, message.round, message.sender)
        return _changed(state, counts=tuple(counts), own=own, stamps=tuple(stamps), origins=tuple(origins))

    def offers(self, state: ClientState) -> dict[int, Offer]:
        """Return how fresh the copies are that the client did not train itself this round, by cluster."""
        if self.share != "relay":
            return {}
        copies = enumerate(zip(state.stamps, state.origins, strict=True))
        return {j: Offer(self.id, *freshness) for j, freshness in copies if j != state.trained}

    def wants(self, state: ClientState, cluster: int, offers: Iterable[Offer], now: int) -> Offer | None:
        """Choose the copy of a cluster to ask for, where no neighbour trained it this round."""
        trains = cluster == state.trained
        newest = state.folded[cluster] if trains else state.stamps[cluster]
        return choose_offer(offers, self.id, now, newest, trains)

    def _receive_relayed_(self, state: ClientState, message: Message, offer: Offer) -> ClientState:
        """Take a copy that was asked for: a trainer folds it, a listener replaces its own."""
        j, row = message.cluster, state.bank[message.cluster]
        stamps, origins, folded = list(state.stamps), list(state.origins), list(state.folded)
        if j == state.trained:
            fold_(row, 0, message.model)
            folded[j], origins[j] = offer.stamp, MANY
        else:
            row.copy_(message.model)
            stamps[j], origins[j] = offer.stamp, offer.origin
        return replace(state, stamps=tuple(stamps), origins=tuple(origins), folded=tuple(folded))


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
    share: Share = "trained"
    true_cluster: int | None = None

    @property
    def rules(self) -> Rules:
        """Settle how this client merges and what it hands on."""
        return rules_of(self.id, self.degree, self.algorithm, self.weights, self.share)

    def start(self) -> ClientState:
        """Begin: draw the start of every model, the same for all clients or one's own.

        An elected start is the outcome of an election (`peer.election`): `ClientState.of(centres)`.
        """
        models = self.algorithm.bank_size(self.clusters)
        who = () if self.algorithm.start == "shared" else (self.id,)
        drawn = [initial(self.model, self.make_model, self.seed, "init", j, *who) for j in range(models)]
        return ClientState.of(torch.stack(drawn).to(self.x.device))

    def start_round(self, state: ClientState) -> tuple[ClientState, list[Message]]:
        """Assign, train the assigned model, and hand out the message for the neighbours.

        An update that makes the model non-finite is undone, and nothing is sent.
        """
        choice = self.algorithm.choose(self.view(state))
        x, y = (self.x, self.y) if choice.points is None else (self.x[choice.points], self.y[choice.points])
        options = effective(self.local, self.algorithm)
        batches = draw_batches(len(y), options, stream(self.seed, "batches", self.id, state.round))
        with seeded(self.seed, "noise", self.id, state.round):
            trained = local_steps(self.model, state.bank[choice.cluster], x, y, options, batches)
        fine = bool(torch.isfinite(trained).all())
        after, messages = self.rules.end_round(state, choice.cluster, trained if fine else None)
        bank = state.bank.clone()
        if after.trained is not None:
            bank[choice.cluster] = trained
        return replace(after, bank=bank), messages

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


def rules_of(id: int, degree: int, algorithm: Algorithm, weights: WeightRule, share: Share) -> Rules:
    """Settle the rules of a client: the algorithm's own before the experiment's."""
    return Rules(id, degree, algorithm.exchange, weight_rule(algorithm, weights), share_rule(algorithm, share))


def _stamp(stamps: list[int], origins: list[int], cluster: int, now: int, origin: int) -> None:
    """Note that an update of round `now` has entered a copy.

    The stamp is the newest round of all; its origin is one client only while no other update has entered since.
    """
    if now > stamps[cluster]:
        stamps[cluster], origins[cluster] = now, origin
    else:
        origins[cluster] = MANY


def _changed(state: ClientState, **changes: Any) -> ClientState:
    """Do what `replace` does in a tenth of the time: a fold is one of many."""
    later = object.__new__(ClientState)
    later.__dict__.update(state.__dict__, **changes)
    return later


def effective(local: LocalOptions, algorithm: Algorithm) -> LocalOptions:
    """Apply the local options that the algorithm itself fixes."""
    return local if algorithm.momentum is None else replace(local, momentum=algorithm.momentum)


def weight_rule(algorithm: Algorithm, configured: WeightRule) -> WeightRule:
    """Settle how received models weigh: the algorithm's rule before the experiment's; a server takes the mean."""
    return "uniform" if algorithm.exchange == "server" else algorithm.weights or configured


def share_rule(algorithm: Algorithm, configured: Share) -> Share:
    """Settle what a client hands on: the algorithm's rule before the experiment's; a server gets what was trained."""
    return "trained" if algorithm.exchange == "server" else algorithm.share or configured


def participates(seed: int, client: int, round: int, rate: float) -> bool:
    """Draw whether a client is one of the round's M_t: each by its own lot, so that no one has to be asked."""
    return rate >= 1 or bool(torch.rand((), generator=stream(seed, "participation", client, round)) < rate)


def fits(message: Message, bank: Tensor) -> bool:
    """Return whether a message is for a cluster of ours, with a model of our size and type."""
    clusters, size = bank.shape
    return 0 <= message.cluster < clusters and message.form == (size, bank.dtype) and message.degree >= 0


def usable(message: Message, bank: Tensor) -> bool:
    """Return whether a message can be folded: it `fits`, and its model holds finite numbers only."""
    return fits(message, bank) and message.finite


def is_finite(model: Tensor) -> bool:
    """Return whether a model holds finite numbers only: a finite sum says so, any other is looked at again."""
    return not model.numel() or math.isfinite(float(model.sum())) or bool(torch.isfinite(model).all())
