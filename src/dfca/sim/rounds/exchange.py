"""What travels in a synchronous round, what it does to the banks, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dfca.base.errors import ConfigError
from dfca.core.codec import Codec, decode, encode
from dfca.core.exchange import LEAST_MASS, coding_context, robust_rule, share_rule, weight_rule
from dfca.core.learning.parts import Layout, cut
from dfca.core.rng import stream
from dfca.core.rules.clusters import COPIES, DISTANCES, merge_values_
from dfca.core.rules.merging import Plan
from dfca.core.rules.mixing import Folder, Mixer, WeightedLinks, fold_, fold_weighted_, make_links, push_links
from dfca.core.rules.relay import MANY, MAX_AGE, NEVER, enough, lot
from dfca.core.rules.robust import RECENT, RobustMixer, shift
from dfca.metrics import Drift
from dfca.sim.liars import Liars
from dfca.sim.setting import Setting
from dfca.sim.shards import ExchangePlan, Mix, Shards, is_in, within
from dfca.sim.traffic import Traffic
from dfca.topology import directed_edges


class CodedLinks(NamedTuple):
    """What travels of one cluster where there is a codec."""

    links: WeightedLinks
    relayed: int  # the last ones of them, which carry models


KNOWN = {name: COPIES[name] for name in ("stamps", "origins", "folded")} | {"distances": DISTANCES}
"""What `Exchange` remembers of every client's copy of a cluster, by field; `ClientState` does for one client what
it does for all, and `test_clusters_change_alike_for_one_client_and_for_all` holds the two equal."""
PlannedMixing = list[tuple[ExchangePlan, Mixer | Folder | RobustMixer | CodedLinks, tuple[slice, ...] | None]]
"""What travels in a round, what it does to this rank's clients, and to which columns of their models; None: to all."""


class Sent(NamedTuple):
    """Who takes part in a round."""

    receivers: Tensor  # (N,) bool
    senders: Tensor  # (N,) bool: clients with a model to send
    assignments: Tensor  # (N,): the clusters that they trained
    now: int
    open: Tensor  # (m, N) bool: clusters of a client that are not closed
    settled: bool  # no survey is to come


class Exchange:
    """What travels in rounds, and what clients remember of it; every rank knows the same."""

    def __init__(
        self, setting: Setting, models: int, shards: Shards, layout: Layout | None = None, liars: Liars | None = None
    ) -> None:
        self.graph, self.seed, self.shards, self.layout = setting.graph, setting.seed, shards, layout
        self.weights = weight_rule(setting.algorithm, setting.weights)
        self.share = share_rule(setting.algorithm, setting.share)
        self.robust, self.liars = robust_rule(setting.algorithm, setting.robust), liars
        self.sequential = setting.aggregation == "sequential" and self.robust == "none"
        self.samples = torch.tensor(setting.split.train.sizes, dtype=torch.float64)
        clients = len(self.graph)
        self._phases = [
            (edges.int(), torch.bincount(edges[1], minlength=clients)) for edges in directed_edges(self.graph)
        ]
        # (2, E): the links that carry models in this round as (receiver, sender) in order; (N,): whom each sends to
        self.edges, self.degrees = self._phases[0]
        self.mass = torch.ones(clients, dtype=torch.float64)  # mu of push-sum
        self.traffic = Traffic.none(clients, models)
        self.stamps = torch.full((models, clients), NEVER)  # what `rules.relay` remembers of every copy
        self.origins = torch.full((models, clients), MANY)
        self.folded = torch.full((models, clients), NEVER)
        # what `rules.robust` remembers; NaN where there is nothing yet
        self.distances = torch.full((models, clients, RECENT), float("nan"), dtype=torch.float64)
        self.codec: Codec | None = setting.codec
        if self.codec is not None and self.codec.remembers and shards.ranks > 1:
            raise ConfigError(
                f"codec {self.codec.name} remembers what was sent, which only one process can; run it without torchrun"
            )
        # what codecs remember, by client and cluster: of receivers also by sender
        self.known_sent: dict[tuple[int, int], Tensor] = {}
        self.known_received: dict[tuple[int, int, int], Tensor] = {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return what a checkpoint needs: tensors, and numbers."""
        traffic = vars(self.traffic)
        tensors = {name: value for name, value in traffic.items() if isinstance(value, Tensor)}
        tensors |= {name: getattr(self, name) for name in self._stored()}
        if self.liars is not None:
            tensors |= {f"stale.{client}": model for client, model in self.liars.stale.items()}
        for name in ("sent", "received"):
            known = getattr(self, f"known_{name}")
            tensors |= {".".join([f"codec.{name}", *map(str, key)]): model for key, model in known.items()}
        return tensors, {name: value for name, value in traffic.items() if name not in tensors}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, int]) -> None:
        """Continue from a state."""
        for name in vars(self.traffic):
            setattr(self.traffic, name, tensors[name].clone() if name in tensors else facts.get(name, 0))
        for known, name in ((self.known_sent, "sent"), (self.known_received, "received")):
            known.clear()
            for key in [key for key in tensors if key.startswith(f"codec.{name}.")]:
                known[tuple(map(int, key.split(".")[2:]))] = tensors[key].clone()  # type: ignore[index]
        for name in self._stored():
            setattr(self, name, tensors[name].clone())
        if self.liars is not None:
            stale = {client: tensors.get(f"stale.{client}") for client in self.liars.ids}
            self.liars.stale = {client: model.clone() for client, model in stale.items() if model is not None}

    def _stored(self) -> list[str]:
        pushed = ["mass"] if self.weights == "push" else []
        return [name for name in KNOWN if name != "distances" or self.robust != "none"] + pushed

    def open_cluster_(self, slot: int) -> None:
        """Make room for a cluster that is new, or forget what was known of the one it replaces."""
        self.traffic.open_cluster(slot)
        for name, rule in KNOWN.items():
            known = getattr(self, name)
            if slot == len(known):
                known = torch.cat([known, torch.empty_like(known[:1])])
                setattr(self, name, known)
            known[slot] = rule.fresh
        self._forget(range(len(self.degrees)), {slot})

    def _forget(self, clients: Sequence[int], clusters: set[int]) -> None:
        """Forget what codecs remember of clusters whose models are others now."""
        mine = set(clients)
        self.known_sent = {
            (i, j): model for (i, j), model in self.known_sent.items() if i not in mine or j not in clusters
        }
        self.known_received = {
            (i, m, j): model for (i, m, j), model in self.known_received.items() if i not in mine or j not in clusters
        }

    def merge_(self, plan: Plan, clients: Sequence[int]) -> None:
        """Note what becomes of the copies of some clients where clusters are merged and closed (`rules.merging`)."""
        for name, rule in KNOWN.items():
            known = getattr(self, name)
            theirs = known[:, clients]
            merge_values_(theirs, plan, rule)
            known[:, clients] = theirs
        self._forget(clients, {*plan.closed, *(merge.into for merge in plan.merges)})
        for into, closed, *_ in plan.merges if 0 in clients else ():  # of unconnected parts, the first one counts
            self.traffic.messages_by_cluster[into] += self.traffic.messages_by_cluster[closed]

    def renumber_(self, orders: Sequence[tuple[Sequence[int], Sequence[int]]], clusters: int) -> None:
        """Put the clusters of each part of the graph, (clients, order), into an order, and keep the first of them."""
        for name in KNOWN:
            known = getattr(self, name)
            for clients, order in orders:
                known[:, clients] = known[order][:, clients]
            setattr(self, name, known[:clusters].clone())
        place = {(i, j): n for clients, order in orders for i in clients for n, j in enumerate(order[:clusters])}
        self.known_sent = {(i, place[i, j]): model for (i, j), model in self.known_sent.items() if (i, j) in place}
        self.known_received = {
            (i, m, place[i, j]): model for (i, m, j), model in self.known_received.items() if (i, j) in place
        }
        traffic = self.traffic.messages_by_cluster[orders[0][1]]
        self.traffic.messages_by_cluster = traffic[:clusters].clone()

    def upload(self, present: Sequence[int], senders: Tensor, assignments: Tensor) -> None:
        """Count a round with a server: one model from each client, all models back."""
        self.traffic.count(senders.long(), assignments)
        self.traffic.server_messages += len(self.traffic.messages_by_cluster) * len(present)
        if self.codec is not None:
            self.traffic.coded += int(senders.sum())

    def decoded(self, client: int, cluster: int, now: int, model: Tensor) -> Tensor:
        """Return what a receiver without a memory makes of a client's model."""
        if self.codec is None:
            return model
        data, _ = encode(self.codec, model, context := coding_context(self.seed, client, cluster, now))
        return decode(self.codec, data, model, context)[0]

    def gossip_(self, banks: Tensor, sent: Sent, drift: Drift | None = None) -> None:
        """Send, and mix in place what each client of the round receives: banks (m, L, P).

        `drift` sees every block of a bank before and after it is mixed.
        """
        self.edges, self.degrees = self._phases[sent.now % len(self._phases)]
        rounds = self._plan_all(banks, sent) if self.share == "all" else self._plan(banks, sent)
        if self.codec is not None:
            for (cluster, _), coded, _ in rounds:
                assert isinstance(coded, CodedLinks)
                self._mix_coded_(self.codec, banks[cluster], coded, cluster, sent.now, drift)
            return
        plans = [plan for plan, _, _ in rounds]
        lie_ = self._lies(banks, plans, sent)
        if self.robust != "none":
            self._measure(banks, rounds, lie_)

        def mix_(number: int, columns: slice, incoming: Tensor) -> None:
            (cluster, _), mixer, chosen = rounds[number]
            lie_(number, columns, incoming)
            assert not isinstance(mixer, CodedLinks)
            for some in (columns,) if chosen is None else cut(chosen, columns):
                block = banks[cluster, :, some]
                if drift is not None:
                    drift.before(cluster, some, block)
                mixer.apply_(block, incoming[:, some.start - columns.start : some.stop - columns.start])
                if drift is not None:
                    drift.after(cluster, some, block)

        self.shards.exchange(banks, plans, mix_)

    def rescale_(self, banks: Tensor, before: Tensor) -> None:
        """Take the local steps of push-sum at mu z, as `Rules.rescaled` does; before (L, P): the models before them."""
        here = slice(self.shards.members.start, self.shards.members.stop)
        mass = self.mass[here].clamp_min(LEAST_MASS).to(banks)[:, None]
        for columns in (slice(None),) if self.layout is None else self.layout.indexed:
            old = before[:, columns]
            banks[0, :, columns] = old + (banks[0, :, columns] - old) / mass

    def _mix_coded_(
        self, codec: Codec, models: Tensor, coded: CodedLinks, j: int, now: int, drift: Drift | None
    ) -> None:
        """Send the payloads of a cluster, and fold in place what each member makes of them: models (L, P)."""
        (receiver, sender, weight), whole = coded.links, slice(0, models.shape[1])
        direct, first = len(sender) - coded.relayed, self.shards.members.start
        mine = torch.zeros(len(models), codec.bytes(models.shape[1]), dtype=torch.uint8)
        for i in within(self.shards.members, torch.unique(sender[:direct]).tolist()):
            key = (first + i, j)
            context = coding_context(self.seed, *key, now, sent=self.known_sent.get(key))
            mine[i], sent = encode(codec, models[i], context)
            if codec.remembers:
                self.known_sent[key] = sent
        payloads = self.shards.gather(mine)
        copies = self.shards.gather(models.clone()) if coded.relayed else None
        self.traffic.coded += int(self.degrees[torch.unique(sender[:direct])].sum())
        if drift is not None:
            drift.before(j, whole, models)
        own = {i: models[i].clone() for i in within(self.shards.members, torch.unique(receiver).tolist())}
        counts: Counter[int] = Counter()
        links = zip(receiver.tolist(), sender.tolist(), weight.tolist(), strict=True)
        for place, (i, m, share) in enumerate(links):
            if i - first not in own:
                continue
            before = own[i - first]
            if place < direct:
                key3 = (i, m, j)
                context = coding_context(self.seed, m, j, now, received=self.known_received.get(key3))
                model, kept = decode(codec, payloads[m], before, context)
                if codec.remembers:
                    self.known_received[key3] = kept
            else:
                assert copies is not None
                model = copies[m].to(before)
            row = models[i - first]
            if self.weights == "uniform" and share < 1:  # as clients fold, in the same order: bit by bit
                counts[i] = fold_(row, counts[i], model)
            else:
                fold_weighted_(row, before, model, share)
        if drift is not None:
            drift.after(j, whole, models)

    def _lies(self, banks: Tensor, plans: Sequence[ExchangePlan], sent: Sent) -> Mix:
        """Make what replaces the models that liars hold by those that they send."""
        liars = self.liars
        if liars is None or not liars.lie_about_models:
            return lambda number, columns, incoming: None
        for client in liars.ids:
            if sent.senders[client]:
                liars.note_first(client, banks[sent.assignments[client], client])
        sources = [self.shards.order(plan.needs[self.shards.rank]).tolist() for plan in plans]

        def lie_(number: int, columns: slice, incoming: Tensor) -> None:
            liars.tell_(incoming, sources[number], plans[number].cluster, sent.now, (columns, banks.shape[2]))

        return lie_

    def _measure(self, banks: Tensor, rounds: PlannedMixing, lie_: Mix) -> None:
        """Measure how far all that travels is from its receivers' copies, and fix the weights of robust folds."""
        robust = [(plan, mixer) for plan, mixer, _ in rounds if isinstance(mixer, RobustMixer)]
        plans = [plan for plan, _ in robust]

        def measure(number: int, columns: slice, incoming: Tensor) -> None:
            lie_(number, columns, incoming)
            robust[number][1].measure(columns, banks[plans[number].cluster, :, columns], incoming)

        self.shards.exchange(banks, plans, measure)
        here = slice(self.shards.members.start, self.shards.members.stop)
        for plan, mixer in robust:
            recent = self.distances[plan.cluster]
            quartiles = self.shards.gather(mixer.settle(recent[here], banks[plan.cluster]))
            self.distances[plan.cluster] = shift(recent, quartiles)

    def _plan(self, banks: Tensor, sent: Sent) -> PlannedMixing:
        """Find what everybody receives of every cluster that travels this round, and count it."""
        receivers, senders, assignments, now, open, _ = sent
        self.traffic.count(torch.where(senders, self.degrees, 0), assignments)
        orders = self._arrivals(senders, receivers, now) if self.sequential and self.weights == "uniform" else None
        rounds: PlannedMixing = []
        if self.layout is not None and self.layout.common:
            links = self._links(senders, receivers, {})
            everywhere = range(len(banks)) if len(links.sender) else ()
            rounds += [(*self._prepare(j, banks, links, orders), self.layout.common) for j in everywhere]
        indexed = None if self.layout is None else self.layout.indexed
        for j in range(len(banks)):
            trainers = senders & (assignments == j)
            sources = self._relay_sources(j, banks[j], trainers, sent) if self.share == "relay" else {}
            if not trainers.any() and not sources:
                continue
            links = self._links(trainers, receivers, sources)
            if len(links.sender):
                if self.codec is not None:
                    rounds.append((ExchangePlan(j, ()), CodedLinks(links, len(sources)), None))
                else:
                    rounds.append((*self._prepare(j, banks, links, None if sources else orders), indexed))
            if self.share == "relay":
                self._stamp(j, trainers, receivers, sources, now)
        if self.share == "relay":
            self.traffic.scalars += 2 * int((self.degrees * open.sum(dim=0))[receivers].sum())
        return rounds

    def _plan_all(self, banks: Tensor, sent: Sent) -> PlannedMixing:
        """Send all models of every client of the round to all neighbours."""
        rounds: PlannedMixing = []
        for j in range(len(banks)):
            finite = self.shards.gather(torch.stack([torch.isfinite(model).all() for model in banks[j]]))
            finite &= sent.receivers & sent.open[j]
            links = self._links(finite, sent.receivers, {})
            if len(links.sender):
                if self.codec is not None:
                    rounds.append((ExchangePlan(j, ()), CodedLinks(links, 0), None))
                else:
                    rounds.append((*self._prepare(j, banks, links, None), None))
            self.traffic.count(torch.where(finite, self.degrees, 0), torch.full_like(self.degrees, j))
        return rounds

    def _links(self, trainers: Tensor, receivers: Tensor, sources: dict[int, int]) -> WeightedLinks:
        """Weigh what travels of one cluster: trainers by the weight rule, relayed copies as `rules.relay` says."""
        if self.weights == "push":
            links, self.mass = push_links(self.edges, self.mass, trainers, receivers)
            self.traffic.scalars += int(self.degrees[trainers].sum())
            return links
        links = make_links(self.edges, self.degrees, trainers, receivers, self.weights)
        if self.weights == "samples":
            return self._by_samples(links, trainers, sources)
        if not sources:
            return links
        takers, givers = (torch.tensor(list(ids), dtype=torch.int64) for ids in (sources.keys(), sources.values()))
        if self.weights == "uniform":
            received = torch.bincount(torch.cat([links.receiver, takers]), minlength=len(trainers)).double()
            links = links._replace(weight=1 / (received[links.receiver] + 1))
            share = 1 / (received[takers] + 1)
        else:
            share = 1 / (1 + torch.maximum(self.degrees[takers], self.degrees[givers]).double())
        relayed = WeightedLinks(takers, givers, torch.where(trainers[takers], share, 1.0))
        return WeightedLinks(*(torch.cat(pair) for pair in zip(links, relayed, strict=True)))

    def _by_samples(self, links: WeightedLinks, trainers: Tensor, sources: dict[int, int]) -> WeightedLinks:
        """Weigh every copy by the samples of its client, n_m / (n_i + sum_m n_m); who did not train takes a relay."""
        takers, givers = (torch.tensor(list(ids), dtype=torch.int64) for ids in (sources.keys(), sources.values()))
        receiver, sender = torch.cat([links.receiver, takers]), torch.cat([links.sender, givers])
        total = self.samples.clone().index_add_(0, receiver, self.samples[sender])
        weight = self.samples[sender] / total[receiver]
        weight[len(links.sender) :] = torch.where(trainers[takers], weight[len(links.sender) :], 1.0)
        return WeightedLinks(receiver, sender, weight)

    def _prepare(
        self, j: int, banks: Tensor, links: WeightedLinks, orders: Sequence[Sequence[int]] | None
    ) -> tuple[ExchangePlan, Mixer | Folder | RobustMixer]:
        """Find whose models every rank needs, and prepare the mixing of this rank's clients."""
        shards = self.shards
        inside = [is_in(shards.of_rank(rank), links.receiver) for rank in range(shards.ranks)]
        needs = [torch.unique(links.sender[mask]) for mask in inside]
        sources = shards.order(needs[shards.rank])
        plan = ExchangePlan(j, needs)
        if orders is None:
            mine = WeightedLinks(*(part[inside[shards.rank]] for part in links))
            first, held = shards.members.start, self.liars is None or not self.liars.lie_about_models
            if self.robust != "none":
                return plan, RobustMixer(mine, sources, first, self.robust, held)
            return plan, Mixer(mine, sources, first, banks.shape[1], banks.dtype, banks.device, held)
        row = {client: position for position, client in enumerate(sources.tolist())}
        return plan, Folder([[row[m] for m in orders[i] if m in row] for i in shards.members])

    def _relay_sources(self, j: int, models: Tensor, trainers: Tensor, sent: Sent) -> dict[int, int]:
        """Find for every client with too few trainers beside it whose copy it takes: `choose_offer` for all at once
        (held equal by tests/sim/test_drivers.py)."""
        clients, receivers, now, (receiver, sender) = len(trainers), sent.receivers, sent.now, self.edges
        beside = torch.bincount(receiver[trainers[sender]], minlength=clients)
        lacking = receivers & (beside < torch.where(trainers, enough(sent.settled, self.robust), 1))
        stamps = self.stamps[j]
        newest = torch.where(trainers, self.folded[j], stamps)
        offered = lacking[receiver] & receivers[sender] & ~trainers[sender]
        i, m = self.edges[:, offered].long()
        echo_or_old = (self.origins[j][m] == i) | (now - stamps[m] > MAX_AGE)
        useful = (stamps[m] > newest[i]) & ~(trainers[i] & echo_or_old)
        i, m = i[useful], m[useful]
        # The freshest, and the lowest id or a lot on ties: stamps are at least 0 here.
        drawn = lot(now, torch.arange(clients)).argsort()
        lots = torch.empty_like(drawn).index_copy_(0, drawn, torch.arange(clients))
        place = torch.where(beside[i] > 0, lots[m], clients - 1 - m)
        ranked = torch.full((clients,), -1).scatter_reduce_(0, i, stamps[m] * clients + place, "amax")
        takers = (ranked >= 0).nonzero()[:, 0]
        place = ranked[takers] % clients
        givers = torch.where(beside[takers] > 0, drawn[place], clients - 1 - place)
        self.traffic.messages_by_client.index_add_(0, givers, torch.ones_like(givers))
        self.traffic.messages_by_cluster[j] += len(takers)
        finite, first = torch.ones(len(models), dtype=torch.bool), self.shards.members.start
        for giver in set(givers.tolist()):
            if giver in self.shards.members:
                finite[giver - first] = torch.isfinite(models[giver - first]).all()
        fine = self.shards.gather(finite)
        return {taker: giver for taker, giver in zip(takers.tolist(), givers.tolist(), strict=True) if fine[giver]}

    def _stamp(self, j: int, trainers: Tensor, receivers: Tensor, sources: dict[int, int], now: int) -> None:
        """Note how fresh every copy of cluster j is after the round."""
        stamps, origins, clients = self.stamps[j].clone(), self.origins[j].clone(), len(trainers)
        receiver, sender = self.edges[:, receivers[self.edges[0]] & trainers[self.edges[1]]].long()
        counts = torch.bincount(receiver, minlength=clients) + trainers
        only = torch.zeros(clients, dtype=torch.int64).index_copy_(0, receiver, sender)  # looked at where it is one
        only = torch.where(trainers, torch.arange(clients), only)
        refreshed = counts > 0
        self.stamps[j][refreshed] = now
        self.origins[j][refreshed] = torch.where(counts == 1, only, MANY)[refreshed]
        for client, source in sources.items():
            if trainers[client]:
                self.folded[j, client] = stamps[source]
                self.origins[j, client] = MANY
            else:
                self.stamps[j, client], self.origins[j, client] = stamps[source], origins[source]

    def _arrivals(self, senders: Tensor, receivers: Tensor, now: int) -> list[list[int]]:
        """Draw for every member that receives the order in which its neighbours' models arrive."""
        orders: list[list[int]] = []
        for i in range(len(senders)):
            mine = bool(receivers[i]) and i in self.shards.members
            near = self.edges[1, self.edges[0] == i].tolist() if mine else ()
            sources = [m for m in near if senders[m]]
            shuffled = torch.randperm(len(sources), generator=stream(self.seed, "arrival", i, now)).tolist()
            orders.append([sources[position] for position in shuffled])
        return orders
