"""How one client merges what it receives, and what it hands on: step 3 of the paper's Algorithm 1.

Nothing here computes a loss or a gradient. A driver that owns the banks uses `end_round` and `receive_`: the same steps
as `receive` without a copy of the bank, one pass over one model each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm, Share
from dfca.core.codec import BadPayload, Codec, Context, decode, encode
from dfca.core.learning.parts import Layout
from dfca.core.method import WEIGHTS_NEED_ROUNDS, MixingOptions, RobustRule
from dfca.core.rng import stream
from dfca.core.rules.mixing import WeightRule, fold_, fold_mass_, fold_weighted_, metropolis_weight
from dfca.core.rules.relay import MANY, Offer, choose_offer, enough
from dfca.core.rules.robust import fold_robust_
from dfca.core.state import ClientState, Message, PushedMessage, changed, usable

Receivers = tuple[tuple[int, ...], ...]
"""Whom a client sends its models to, by phase: in round t those of phase t mod the number of phases."""
LEAST_MASS = 0.25
"""Push-sum takes no local steps that are longer than by the factor 1 / LEAST_MASS: lost messages lose mass."""


@dataclass(frozen=True)
class Rules:
    """How one client merges what it receives and what it hands on, settled by `rules_of`."""

    id: int
    degree: int  # its neighbours in the graph
    exchange: Literal["gossip", "server", "none"] = "gossip"
    weights: WeightRule | Literal["push"] = "uniform"
    share: Share = "trained"
    layout: Layout | None = None  # which parts of a model are averaged with whom, where that differs
    robust: RobustRule = "none"  # how it guards against members that lie (`rules.robust`)
    receivers: Receivers = ()  # whom it sends to; (): all neighbours, in every round
    codec: Codec | None = None  # what travels in place of a trained model; None: the model itself
    seed: int = 0  # of the codec's random streams

    def receivers_in(self, round: int) -> tuple[int, ...] | None:
        """Return whom it sends its models to in a round; None: all neighbours."""
        return self.receivers[round % len(self.receivers)] if self.receivers else None

    def degree_in(self, round: int) -> int:
        """Count those that it sends its models to in a round."""
        return len(self.receivers[round % len(self.receivers)]) if self.receivers else self.degree

    def begin_round(self, state: ClientState) -> ClientState:
        """Remember the model before the local steps, where push-sum asks for it (`rescaled`)."""
        return changed(state, own={0: state.bank[0].clone()}) if self.weights == "push" else state

    def rescaled(self, state: ClientState, trained: Tensor) -> Tensor:
        """Take the local steps of push-sum at the sum u = mu z instead of the model z: z + (z' - z) / mu, (P,).

        Only the columns that are averaged change. state: as `begin_round` left it.
        """
        if (before := state.own.get(0)) is None or self.weights != "push":
            return trained
        later = trained.clone()
        for columns in self._averaged:
            later[columns] = before[columns] + (trained[columns] - before[columns]) / max(state.mass, LEAST_MASS)
        return later

    @property
    def _averaged(self) -> tuple[slice, ...]:
        """The columns of a model that are averaged with those that trained the same cluster."""
        return (slice(None),) if self.layout is None else self.layout.indexed

    def end_round(
        self, state: ClientState, cluster: int, trained: Tensor | None, listeners: int | None = None
    ) -> tuple[ClientState, list[Message]]:
        """End a round after the local work; returns the new state, and the messages for the neighbours.

        The bank stays as it is: the driver writes `trained` there, by `store_`. The messages hold `trained` itself and
        copies of other rows, so that they are snapshots.

        Args:
            state: What the client remembers.
            cluster: The cluster that it chose.
            trained: (P,), or (m, P) where all models are trained; None where training diverged: then it is not sent.
            listeners: How many receivers take part in the round, among which push-sum divides its mass; None: all.
        """
        fine = trained is not None
        idle = -1 if self.exchange == "server" else 0
        counts, updates = [idle] * len(state.counts), list(state.updates)
        stamps, origins = list(state.stamps), list(state.origins)
        for j in () if trained is None else range(len(trained)) if trained.dim() == 2 else (cluster,):
            counts[j] = 0
            updates[j] += 1
            _stamp(stamps, origins, j, state.round, self.id)
        after = changed(
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
        if fine and self.weights == "push":
            among = self.degree_in(state.round) if listeners is None else listeners
            after = changed(after, mass=state.mass / (1 + among))
        return self._coded(after, self._outgoing(after, trained, state.round))

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
        degree = self.degree_in(now)
        make = partial(PushedMessage, mass=state.mass) if self.weights == "push" else Message
        made = [make(self.id, j, now, degree, sent[j], updates=state.updates[j]) for j in sent]
        return [message for message in made if message.cluster == state.trained or usable(message, state.bank)]

    def _coded(self, state: ClientState, messages: list[Message]) -> tuple[ClientState, list[Message]]:
        """Put payloads in the place of models, and remember what was sent."""
        if self.codec is None or not state.bank.numel():
            return state, messages
        known, coded = dict(state.sent), []
        for message in messages:
            j = message.cluster
            data, sent = encode(self.codec, message.model, self._context(message, sent=known.get(j)))
            if self.codec.remembers:
                known[j] = sent
            coded.append(replace(message, model=data))
        return changed(state, sent=known), coded

    def _context(self, message: Message, **known: Tensor | None) -> Context:
        return coding_context(self.seed, message.sender, message.cluster, message.round, **known)

    def form(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the length and the type of what comes in place of a trained model of P floats."""
        return (size, dtype) if self.codec is None or not size else (self.codec.bytes(size), torch.uint8)

    def is_usable(self, message: Message, bank: Tensor) -> bool:
        """Return whether what a neighbour trained can be folded, or decoded."""
        clusters, size = bank.shape
        fits = 0 <= message.cluster < clusters and message.form == self.form(size, bank.dtype) and message.degree >= 0
        return fits and message.finite

    def _decoded(
        self, codec: Codec, state: ClientState, messages: Sequence[tuple[Message, float]]
    ) -> tuple[ClientState, list[tuple[Message, float]]]:
        """Make models of the payloads that came; one that does not become a model is counted and dropped."""
        received, rejected, decoded = dict(state.received), state.rejected, []
        for message, weight in messages:
            key = (message.sender, message.cluster)
            context = self._context(message, received=received.get(key))
            try:
                model, kept = decode(codec, message.model, state.bank[message.cluster], context)
            except BadPayload:
                rejected += 1
                continue
            if codec.remembers:
                received[key] = kept
            decoded.append((replace(message, model=model), weight))
        return changed(state, received=received, rejected=rejected), decoded

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
        sound = self.is_usable if message.offer is None else usable
        if not sound(message, state.bank):
            return changed(state, rejected=state.rejected + 1)
        return self.receive_(changed(state, bank=state.bank.clone()), message, weight)

    def receive_all(self, state: ClientState, messages: Iterable[Message]) -> ClientState:
        """Fold all messages of a round, none of them a relayed copy; those that do not fit are counted and dropped."""
        given = list(messages)
        usables = [(message, 1.0) for message in given if self.is_usable(message, state.bank)]
        after = replace(state, bank=state.bank.clone(), rejected=state.rejected + len(given) - len(usables))
        return self.fold_all_(after, usables)

    def receive_(self, state: ClientState, message: Message, weight: float = 1.0) -> ClientState:
        """Fold a message that is `usable` in place: of the bank, the row of its cluster changes and nothing else."""
        if message.offer is not None:
            return self._receive_relayed_(state, message, message.offer)
        return self.fold_all_(state, [(message, weight)])

    def fold_all_(self, state: ClientState, messages: Sequence[tuple[Message, float]]) -> ClientState:
        """Fold messages that are `usable` and no relayed copies in place, in order, each with its weight."""
        if self.weights == "push":
            return self._fold_push_(state, messages)
        if self.codec is not None and state.bank.numel():
            state, messages = self._decoded(self.codec, state, messages)
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
                share = metropolis_weight(self.degree_in(message.round), message.degree)
                fold_weighted_(row, own[j], message.model, weight * share)
            else:
                counts[j] = fold_(rows[j], counts[j], message.model, weight)
            _stamp(stamps, origins, j, message.round, message.sender)
        return changed(state, counts=tuple(counts), own=own, stamps=tuple(stamps), origins=tuple(origins))

    def _fold_push_(self, state: ClientState, messages: Sequence[tuple[Message, float]]) -> ClientState:
        """Fold by push-sum: what comes weighs by the mass that comes with it."""
        mass, counts = state.mass, list(state.counts)
        stamps, origins = list(state.stamps), list(state.origins)
        for message, weight in messages:
            share = weight * message.mass if isinstance(message, PushedMessage) else 0.0
            if not 0 < share < math.inf:
                continue
            for columns in self._averaged:
                fold_mass_(state.bank[message.cluster, columns], mass, message.model[columns], share)
            mass += share
            counts[message.cluster] += 1
            _stamp(stamps, origins, message.cluster, message.round, message.sender)
        return changed(state, mass=mass, counts=tuple(counts), stamps=tuple(stamps), origins=tuple(origins))

    def _fold_robust_(self, state: ClientState, messages: Sequence[tuple[Message, float]]) -> ClientState:
        """Fold as `rules.robust` says: the messages of a cluster are one batch, and their order does not matter."""
        counts, stamps, origins = list(state.counts), list(state.stamps), list(state.origins)
        distances = dict(state.distances)
        batches: dict[int, list[tuple[Message, float]]] = {}
        for message, weight in messages:
            batches.setdefault(message.cluster, []).append((message, weight))
            _stamp(stamps, origins, message.cluster, message.round, message.sender)
        for j, batch in batches.items():
            counts[j] += len(batch)
            if self.weights == "metropolis":
                weights = [
                    weight * metropolis_weight(self.degree_in(message.round), message.degree)
                    for message, weight in batch
                ]
            else:
                weights = [weight / (counts[j] + 1) for _, weight in batch]
            models = [message.model for message, _ in batch]
            distances[j] = fold_robust_(state.bank[j], models, weights, self.robust, distances.get(j, ()))
        return changed(state, counts=tuple(counts), stamps=tuple(stamps), origins=tuple(origins), distances=distances)

    def _fold_parts_(
        self, state: ClientState, messages: Sequence[tuple[Message, float]], layout: Layout
    ) -> ClientState:
        """Fold in place where parts of a model are averaged with different clients: `fold_all_` by columns."""
        counts, common, own = list(state.counts), state.common, dict(state.own)
        stamps, origins = list(state.stamps), list(state.origins)
        for message, weight in messages:
            j, model = message.cluster, message.model
            for row, (columns, count) in (
                *((row, (part, common)) for row in range(len(counts)) for part in layout.common),
                *((j, (part, counts[j])) for part in layout.indexed),
            ):
                average = state.bank[row]
                if self.weights == "metropolis":
                    if row not in own:
                        own[row] = average.clone()
                    share = weight * metropolis_weight(self.degree_in(message.round), message.degree)
                    fold_weighted_(average[columns], own[row][columns], model[columns], share)
                else:
                    fold_(average[columns], count, model[columns], weight)
            counts[j], common = counts[j] + 1, common + 1
            _stamp(stamps, origins, j, message.round, message.sender)
        copies = {"stamps": tuple(stamps), "origins": tuple(origins)}
        return changed(state, counts=tuple(counts), common=common, own=own, **copies)

    def offers(self, state: ClientState) -> dict[int, Offer]:
        """Return how fresh the copies are that the client did not train itself this round, by cluster."""
        if self.share != "relay":
            return {}
        copies = enumerate(zip(state.stamps, state.origins, strict=True))
        return {j: Offer(self.id, *freshness) for j, freshness in copies if j != state.trained}

    def looks_for_copies(self, state: ClientState, cluster: int, beside: int, settled: bool = True) -> bool:
        """Return whether to ask for a copy of a cluster that `beside` neighbours trained this round; settled: no survey
        is to come."""
        return beside < (enough(settled, self.robust) if cluster == state.trained else 1)

    def wants(
        self, state: ClientState, cluster: int, offers: Iterable[Offer], now: int, beside: int = 0
    ) -> Offer | None:
        """Choose the copy to ask for of a cluster that `beside` neighbours trained this round."""
        trains = cluster == state.trained
        newest = state.folded[cluster] if trains else state.stamps[cluster]
        return choose_offer(offers, self.id, now, newest, trains, beside)

    def _receive_relayed_(self, state: ClientState, message: Message, offer: Offer) -> ClientState:
        """Take a copy that was asked for: a trainer folds it, a listener replaces its own."""
        j, row = message.cluster, state.bank[message.cluster]
        stamps, origins, folded = list(state.stamps), list(state.origins), list(state.folded)
        trains, distances, counts, own = j == state.trained, state.distances, list(state.counts), state.own
        metropolis = self.weights == "metropolis"
        share = metropolis_weight(self.degree, message.degree) if metropolis else 0.5
        if self.robust != "none" and row.numel():
            recent = distances.get(j, ())
            weights = [share if trains else 1.0]
            distances = {**distances, j: fold_robust_(row, [message.model], weights, self.robust, recent)}
        elif trains and metropolis:
            own = own if j in own else {**own, j: row.clone()}
            fold_weighted_(row, own[j], message.model, share)
        elif trains:
            counts[j] = fold_(row, counts[j], message.model)
        else:
            row.copy_(message.model)
        if trains:
            folded[j], origins[j] = offer.stamp, MANY
        else:
            stamps[j], origins[j] = offer.stamp, offer.origin
        known = {"stamps": tuple(stamps), "origins": tuple(origins), "folded": tuple(folded), "distances": distances}
        return changed(state, counts=tuple(counts), own=own, **known)


def rules_of(
    id: int,
    degree: int,
    algorithm: Algorithm,
    mixing: MixingOptions,
    layout: Layout | None = None,
    receivers: Receivers = (),
    seed: int = 0,
) -> Rules:
    """Settle the rules of a client: the algorithm's own before the experiment's.

    Raises ConfigError for weights by samples: messages do not say how many samples their sender has.
    """
    assert mixing.codec is None or not isinstance(mixing.codec, str), "a codec by name is settled before"
    if mixing.weights == "samples":
        raise ConfigError(WEIGHTS_NEED_ROUNDS)
    settled = weight_rule(algorithm, mixing.weights), share_rule(algorithm, mixing.share)
    robust = robust_rule(algorithm, mixing.robust)
    return Rules(id, degree, algorithm.exchange, *settled, layout, robust, receivers, mixing.codec, seed)


def coding_context(seed: int, sender: int, cluster: int, round: int, **known: Tensor | None) -> Context:
    """Make what a codec sees of one message."""
    return Context(partial(stream, seed, "codec", sender, cluster, round), **known)


def _stamp(stamps: list[int], origins: list[int], cluster: int, now: int, origin: int) -> None:
    """Note that an update of round `now` has entered a copy.

    The stamp is the newest round of all; its origin is one client only while no other update has entered since.
    """
    if now > stamps[cluster]:
        stamps[cluster], origins[cluster] = now, origin
    else:
        origins[cluster] = MANY


def weight_rule(algorithm: Algorithm, configured: WeightRule) -> WeightRule | Literal["push"]:
    """Settle how received models weigh.

    "samples" holds for all but push-sum; else the algorithm's rule comes before the experiment's. A server takes the
    mean.
    """
    if configured == "samples" and algorithm.weights != "push":
        return configured
    return "uniform" if algorithm.exchange == "server" else algorithm.weights or configured


def share_rule(algorithm: Algorithm, configured: Share) -> Share:
    """Settle what a client hands on: the algorithm's rule before the experiment's; a server gets what was trained."""
    return "trained" if algorithm.exchange == "server" else algorithm.share or configured


def robust_rule(algorithm: Algorithm, configured: RobustRule) -> RobustRule:
    """Settle how clients guard against members that lie; a server takes the mean of what it gets."""
    guards = algorithm.exchange == "gossip" and averages_whole_models(algorithm)
    return configured if guards else "none"


def quiet_from(algorithm: Algorithm, rounds: int, quiet_rounds: int) -> int | None:
    """Return the first of the quiet rounds at the end, in which clients exchange and do not train; None where there
    are none: clients that do not gossip train to the end."""
    return rounds - quiet_rounds if quiet_rounds and algorithm.exchange == "gossip" else None


def is_quiet(round: int, begin: int | None) -> bool:
    """Return whether nobody trains in a round; begin: `quiet_from`."""
    return begin is not None and round >= begin


def averages_whole_models(algorithm: Algorithm) -> bool:
    """Return whether clients average models as a whole, with all neighbours that trained the same cluster."""
    return algorithm.head is None and algorithm.peers is None and algorithm.weights != "push"
