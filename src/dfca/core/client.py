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
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from dfca.core.algorithm import Algorithm, Choice, Share, View
from dfca.core.holdout import held_out
from dfca.core.inputs import Samples
from dfca.core.local import LocalOptions, TrainingSet, draw_batches, local_steps_, losses, sample_losses
from dfca.core.merging import Plan, merge_
from dfca.core.mixing import WeightRule, fold_, fold_weighted_, metropolis_weight
from dfca.core.options import RobustRule
from dfca.core.params import FlatModel, initial
from dfca.core.parts import Layout, layout_of, stages_of
from dfca.core.relay import MANY, NEVER, Offer, choose_offer
from dfca.core.rng import seeded, stream
from dfca.core.robust import fold_robust_

T = TypeVar("T")


class once(Generic[T]):
    """Compute an attribute when it is first asked for: `cached_property` without its lock, which takes longer."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.name = compute, compute.__name__

    def __get__(self, owner: Any, kind: type) -> T:
        value = owner.__dict__[self.name] = self.compute(owner)
        return value


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

    @once
    def form(self) -> tuple[int, torch.dtype]:
        """How many numbers the model has (-1: it is no vector), and of which type; looked at once, like `finite`."""
        return len(self.model) if self.model.dim() == 1 else -1, self.model.dtype

    @once
    def finite(self) -> bool:
        """Whether the model holds finite numbers only; computed once for all receivers of the same message."""
        return is_finite(self.model)


@dataclass(frozen=True)
class ClientState:
    """What a client remembers between two events.

    bank (m, P); counts: folds per cluster since the last local update; own: the copies before the first fold, where the
    weight rule needs them; assignment: the cluster chosen last; trained: the same, None where this round's update
    diverged or there was none; rejected: messages that could not be used; stamps, origins, folded: what `core.relay`
    remembers of each copy; updates: own local updates per cluster; common: like counts, of the columns that all
    clusters share; memory: what the algorithm lets a client remember; personal_steps: of the personal last step;
    closed: clusters that are not chosen and not sent (`core.merging`); distances: by cluster, what `core.robust`
    remembers of recent folds.
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
    common: int = 0
    memory: Tensor | None = None
    personal_steps: int = 0
    closed: tuple[int, ...] = ()
    distances: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @staticmethod
    def of(bank: Tensor, memory: Tensor | None = None) -> ClientState:
        """Begin with a bank (m, P), and a memory where the algorithm has one."""
        m = len(bank)
        never, many, none = (NEVER,) * m, (MANY,) * m, (0,) * m
        return ClientState(bank, none, stamps=never, origins=many, folded=never, updates=none, memory=memory)

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
            distances={j: recent for j, recent in self.distances.items() if j != cluster},
            stamps=put(self.stamps, NEVER),
            origins=put(self.origins, MANY),
            folded=put(self.folded, NEVER),
            updates=put(self.updates, 0),
            closed=tuple(j for j in self.closed if j != cluster),
        )

    def renumbered(self, order: Sequence[int], clusters: int) -> ClientState:
        """Put clusters into an order, and keep the first of them; which of these are closed stays known."""
        kept, place = order[:clusters], {j: number for number, j in enumerate(order)}

        def take(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[j] for j in kept)

        return replace(
            self,
            bank=self.bank[kept],
            counts=take(self.counts),
            own={place[j]: model for j, model in self.own.items() if j in kept},
            assignment=None if self.assignment is None else place[self.assignment],
            trained=None if self.trained is None else place[self.trained],
            stamps=take(self.stamps),
            origins=take(self.origins),
            folded=take(self.folded),
            updates=take(self.updates),
            closed=tuple(sorted(place[j] for j in self.closed if place[j] < clusters)),
            distances={place[j]: recent for j, recent in self.distances.items() if j in kept},
        )

    def merged(self, plan: Plan) -> ClientState:
        """Merge and close clusters as a survey has decided (`core.merging`)."""
        bank = self.bank.clone()
        merge_(bank, plan.merges)
        stamps, origins, folded, updates = (
            list(each) for each in (self.stamps, self.origins, self.folded, self.updates)
        )
        became = {merge.closed: merge.into for merge in plan.merges}
        for closed, into in became.items():
            stamps[into], folded[into] = max(stamps[into], stamps[closed]), max(folded[into], folded[closed])
            origins[into], updates[into] = MANY, updates[into] + updates[closed]
        for j in plan.closed:
            stamps[j], origins[j], folded[j], updates[j] = NEVER, MANY, NEVER, 0
        touched = {*plan.closed, *became.values()}
        return replace(
            self,
            bank=bank,
            own={j: model for j, model in self.own.items() if j not in touched},
            assignment=None if self.assignment is None else became.get(self.assignment, self.assignment),
            trained=None if self.trained is None else became.get(self.trained, self.trained),
            stamps=tuple(stamps),
            origins=tuple(origins),
            folded=tuple(folded),
            updates=tuple(updates),
            closed=tuple(sorted({*self.closed, *plan.closed})),
            distances={j: recent for j, recent in self.distances.items() if j not in touched},
        )


@dataclass(frozen=True)
class Rules:
    """How one client merges what it receives and what it hands on; nothing here computes a loss or a gradient.

    degree: its neighbours in the graph; exchange, weights, share: as in `Algorithm`, settled by `rules_of`; layout:
    which parts of a model are averaged with whom, where they are told apart; robust: how it guards against members that
    lie (`core.robust`).
    """

    id: int
    degree: int
    exchange: Literal["gossip", "server", "none"] = "gossip"
    weights: WeightRule = "uniform"
    share: Share = "trained"
    layout: Layout | None = None
    robust: RobustRule = "none"

    def end_round(self, state: ClientState, cluster: int, trained: Tensor | None) -> tuple[ClientState, list[Message]]:
        """Do everything of a round but compute: the new state, and the messages for the neighbours.

        trained (P,), or (m, P) where all models are trained: None where training made a model non-finite; then nothing
        of it is sent. The bank stays as it is: the driver writes `trained` there, by `store_`. The messages hold
        `trained` itself and copies of other rows, so that they are snapshots.
        """
        fine = trained is not None
        idle = -1 if self.exchange == "server" else 0
        counts, updates = [idle] * len(state.counts), list(state.updates)
        stamps, origins = list(state.stamps), list(state.origins)
        for j in () if trained is None else range(len(trained)) if trained.dim() == 2 else (cluster,):
            counts[j] = 0
            updates[j] += 1
            _stamp(stamps, origins, j, state.round, self.id)
        after = _changed(
            state,
            counts=tuple(counts),
            own={},
            common=0,
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
        sent: dict[int, Tensor] = {}
        if trained is not None and state.trained is not None:
            every = trained.dim() == 2
            sent = {j: model.clone() for j, model in enumerate(trained)} if every else {state.trained: trained}
        if self.share == "all":
            held = {j: model for j, model in enumerate(state.bank) if j not in state.closed}
            sent = {j: sent[j] if j in sent else model.clone() for j, model in held.items()}
        if self.layout is not None:
            sent = {j: self.layout.hide(model) for j, model in sent.items()}
        made = [Message(self.id, j, now, self.degree, sent[j], updates=state.updates[j]) for j in sent]
        return [message for message in made if message.cluster == state.trained or usable(message, state.bank)]

    def store_(self, bank: Tensor, cluster: int, trained: Tensor) -> None:
        """Write what was trained, (P,) or all models (m, P), to the bank of a client: (m, P)."""
        if trained.dim() == 2:
            bank.copy_(trained)
            return
        bank[cluster] = trained
        if self.layout is not None:
            self.layout.spread_(bank, cluster)

    def skip_round(self, state: ClientState) -> ClientState:
        """Sit a round out: train nothing, send nothing."""
        idle = -1 if self.exchange == "server" else 0
        return replace(state, counts=(idle,) * len(state.bank), own={}, common=0, trained=None, round=state.round + 1)

    def receive(self, state: ClientState, message: Message, weight: float = 1.0) -> ClientState:
        """Fold one message into the running average of its cluster; one that does not fit is counted and dropped.

        weight in [0, 1] discounts a message that is stale; 1 is the paper's rule.
        """
        if not usable(message, state.bank):
            return replace(state, rejected=state.rejected + 1)
        return self.receive_(replace(state, bank=state.bank.clone()), message, weight)

    def receive_all(self, state: ClientState, messages: Iterable[Message]) -> ClientState:
        """Fold all messages of a round, none of them a relayed copy; those that do not fit are counted and dropped."""
        given = list(messages)
        usables = [(message, 1.0) for message in given if usable(message, state.bank)]
        after = replace(state, bank=state.bank.clone(), rejected=state.rejected + len(given) - len(usables))
        return self.fold_all_(after, usables)

    def receive_(self, state: ClientState, message: Message, weight: float = 1.0) -> ClientState:
        """Fold a message that is `usable` in place: of the bank, the row of its cluster changes and nothing else."""
        if message.offer is not None:
            return self._receive_relayed_(state, message, message.offer)
        return self.fold_all_(state, [(message, weight)])

    def fold_all_(self, state: ClientState, messages: Sequence[tuple[Message, float]]) -> ClientState:
        """Fold messages that are `usable` and no relayed copies in place, in order, each with its weight."""
        if self.layout is not None and state.bank.numel():
            return self._fold_parts_(state, messages, self.layout)
        if self.robust != "none" and state.bank.numel():
            return self._fold_robust_(state, messages)
        counts, stamps, origins, own = list(state.counts), list(state.stamps), list(state.origins), dict(state.own)
        metropolis, empty = self.weights == "metropolis", not state.bank.numel()
        rows = () if empty else state.bank.unbind()
        for message, weight in messages:
            j = message.cluster
            if empty:  # models without numbers: a run without training counts folds and nothing else
                counts[j] += 1
            elif metropolis:
                row = rows[j]
                if j not in own:
                    own[j] = row.clone()
                fold_weighted_(row, own[j], message.model, weight * metropolis_weight(self.degree, message.degree))
            else:
                counts[j] = fold_(rows[j], counts[j], message.model, weight)
            _stamp(stamps, origins, j, message.round, message.sender)
        return _changed(state, counts=tuple(counts), own=own, stamps=tuple(stamps), origins=tuple(origins))

    def _fold_robust_(self, state: ClientState, messages: Sequence[tuple[Message, float]]) -> ClientState:
        """Fold as `core.robust` says: the messages of a cluster are one batch, and their order does not matter."""
        counts, stamps, origins = list(state.counts), list(state.stamps), list(state.origins)
        distances = dict(state.distances)
        batches: dict[int, list[tuple[Message, float]]] = {}
        for message, weight in messages:
            batches.setdefault(message.cluster, []).append((message, weight))
            _stamp(stamps, origins, message.cluster, message.round, message.sender)
        for j, batch in batches.items():
            counts[j] += len(batch)
            if self.weights == "metropolis":
                weights = [weight * metropolis_weight(self.degree, each.degree) for each, weight in batch]
            else:
                weights = [weight / (counts[j] + 1) for _, weight in batch]
            models = [each.model for each, _ in batch]
            distances[j] = fold_robust_(state.bank[j], models, weights, self.robust, distances.get(j, ()))
        return _changed(state, counts=tuple(counts), stamps=tuple(stamps), origins=tuple(origins), distances=distances)

    def _fold_parts_(
        self, state: ClientState, messages: Sequence[tuple[Message, float]], layout: Layout
    ) -> ClientState:
        """Fold in place where parts of a model are averaged with others: `fold_all_` for some columns each."""
        counts, common, own = list(state.counts), state.common, dict(state.own)
        stamps, origins = list(state.stamps), list(state.origins)
        for message, weight in messages:
            j, model = message.cluster, message.model
            for row, (columns, count) in (
                *((row, (each, common)) for row in range(len(counts)) for each in layout.common),
                *((j, (each, counts[j])) for each in layout.indexed),
            ):
                average = state.bank[row]
                if self.weights == "metropolis":
                    if row not in own:
                        own[row] = average.clone()
                    share = weight * metropolis_weight(self.degree, message.degree)
                    fold_weighted_(average[columns], own[row][columns], model[columns], share)
                else:
                    fold_(average[columns], count, model[columns], weight)
            counts[j], common = counts[j] + 1, common + 1
            _stamp(stamps, origins, j, message.round, message.sender)
        known = {"stamps": tuple(stamps), "origins": tuple(origins)}
        return _changed(state, counts=tuple(counts), common=common, own=own, **known)

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
        trains, distances = j == state.trained, state.distances
        if self.robust != "none" and row.numel():
            weight, recent = 0.5 if trains else 1.0, distances.get(j, ())
            distances = {**distances, j: fold_robust_(row, [message.model], [weight], self.robust, recent)}
        elif trains:
            fold_(row, 0, message.model)
        else:
            row.copy_(message.model)
        if trains:
            folded[j], origins[j] = offer.stamp, MANY
        else:
            stamps[j], origins[j] = offer.stamp, offer.origin
        after = {"stamps": tuple(stamps), "origins": tuple(origins), "folded": tuple(folded), "distances": distances}
        return _changed(state, **after)


@dataclass(frozen=True)
class Client:
    """What does not change about a client: who it is, what it holds, what it runs.

    hold_out_until: the round before which it holds a part of its samples out of training; None: it never does.
    chooses_unseen: whether it chooses a cluster by the samples that it holds out, where it has some (`core.merging`).
    quiet_from: the round from which on it exchanges models and does not train them; None: it always trains.
    """

    id: int
    degree: int
    x: Samples
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
    clients: int = 1
    hold_out_until: int | None = None
    chooses_unseen: bool = False
    robust: RobustRule = "none"
    quiet_from: int | None = None

    @property
    def rules(self) -> Rules:
        """Settle how this client merges and what it hands on."""
        layout = layout_of(self.model, self.algorithm)
        return rules_of(self.id, self.degree, self.algorithm, self.weights, self.share, layout, self.robust)

    def start(self) -> ClientState:
        """Begin: draw the start of every model, the same for all clients or one's own.

        An elected start is the outcome of an election (`peer.election`): `ClientState.of(centres)`.
        """
        models = self.algorithm.bank_size(self.clusters)
        who = () if self.algorithm.start == "shared" else (self.id,)
        drawn = [initial(self.model, self.make_model, self.seed, "init", j, *who) for j in range(models)]
        bank = torch.stack(drawn).to(self.x.device)
        if (layout := layout_of(self.model, self.algorithm)) is not None:
            layout.spread_(bank, 0)
        return ClientState.of(bank, self.first_memory(models))

    def first_memory(self, models: int) -> Tensor | None:
        """Return what a client with so many models remembers at first; None where the algorithm has no memory."""
        return None if self.algorithm.memory is None else self.algorithm.memory(models, self.clients)

    def start_round(self, state: ClientState) -> tuple[ClientState, list[Message]]:
        """Assign, train the assigned model, and hand out the message for the neighbours.

        An update that makes the model non-finite is undone, and nothing is sent.
        """
        choice = self.algorithm.decide(self.view(state))
        trained = self.train(state.bank, choice, state.round)
        fine, rules = bool(torch.isfinite(trained).all()), self.rules
        after, messages = rules.end_round(state, choice.cluster, trained if fine else None)
        bank = state.bank.clone()
        if after.trained is not None:
            rules.store_(bank, choice.cluster, trained)
        memory = state.memory if choice.memory is None else choice.memory
        return replace(after, bank=bank, memory=memory), messages

    def train(self, bank: Tensor, choice: Choice, round: int) -> Tensor:
        """Train copies of what was chosen from a bank (m, P), stage by stage: (P,), or (m, P) where all are trained."""
        x, y = self.samples(round)
        if choice.points is not None:
            x, y = x[choice.points], y[choice.points]
        every, weights = self.algorithm.trains == "all", choice.weights
        rows = range(len(bank)) if every else range(choice.cluster, choice.cluster + 1)
        trained = bank[rows.start : rows.stop].clone()
        if self.quiet_from is not None and round >= self.quiet_from:
            return trained if every else trained[0]
        for number, (options, frozen) in enumerate(
            stages_of(self.model, self.algorithm, effective(self.local, self.algorithm))
        ):
            names = stage_names(self.id, round, number)
            batches = draw_batches(len(y), options, stream(self.seed, "batches", *names))
            for j, vector in zip(rows, trained, strict=True):
                weighed = None if weights is None else weights[j].to(vector.dtype)
                data = TrainingSet(x, y, batches, weights=weighed, frozen=frozen)
                with seeded(self.seed, "noise", *names):
                    local_steps_(self.model, vector, data, options)
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
            each = sample_losses(self.model, state.bank, x, y)
            return View(each.mean(dim=1), random, each, truth, state.memory)
        means = losses(self.model, state.bank, x, y) if needs == "losses" else torch.empty(0)
        if state.closed:
            means[list(state.closed)] = math.inf
        return View(means, random, None, truth, state.memory)


def rules_of(
    id: int,
    degree: int,
    algorithm: Algorithm,
    weights: WeightRule,
    share: Share,
    layout: Layout | None = None,
    robust: RobustRule = "none",
) -> Rules:
    """Settle the rules of a client: the algorithm's own before the experiment's."""
    settled = weight_rule(algorithm, weights), share_rule(algorithm, share)
    return Rules(id, degree, algorithm.exchange, *settled, layout, robust_rule(algorithm, robust))


def stage_names(client: int, round: int, stage: int) -> tuple[int, ...]:
    """Name the random streams of a stage of a client's local steps."""
    return (client, round, stage) if stage else (client, round)


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


def robust_rule(algorithm: Algorithm, configured: RobustRule) -> RobustRule:
    """Settle how clients guard against members that lie; a server takes the mean of what it gets."""
    guards = algorithm.exchange == "gossip" and averages_whole_models(algorithm)
    return configured if guards else "none"


def averages_whole_models(algorithm: Algorithm) -> bool:
    """Return whether clients average models as a whole, with all neighbours that trained the same cluster."""
    return algorithm.head is None and algorithm.peers is None


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
