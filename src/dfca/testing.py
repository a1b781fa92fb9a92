"""The reference driver, for tests of yours and ours: the sans-I/O clients themselves, one by one, in lockstep.

Slow and plain on purpose: every other driver must give the same assignments and the same models, up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import networkx as nx
import torch

from dfca.core.client import Client, participates
from dfca.core.learning.deployment import measure_in_slices
from dfca.core.learning.local import losses
from dfca.core.learning.params import FlatModel
from dfca.core.rng import seeded, stream
from dfca.core.rules.choosing import PeerDraw, Received
from dfca.core.rules.merging import (
    NOBODY,
    MergeOptions,
    Observation,
    Opinion,
    Plan,
    decide,
    observe,
    observes,
    order_of,
    pair_up,
    poll,
    share_of,
    total,
)
from dfca.core.rules.personal import SWEEPS, average, pick, plain, release_round
from dfca.core.rules.surveys import LAG, Schedule
from dfca.core.state import ClientState, Message
from dfca.sim.liars import Liars
from dfca.sim.rounds.selection import candidates_of
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting, hold_out_until, initial_module, receivers_in

__all__ = ["lockstep", "make_clients", "stack"]


def make_clients(setting: Setting) -> list[Client]:
    """Make the clients of a setting.

    Args:
        setting: What the simulation runs.

    Returns:
        The clients, by number.

    Example:
        >>> import dfca
        >>> from dfca.contracts import make_setting
        >>> [client.id for client in make_clients(make_setting(dfca.ALGORITHMS["ifca"]()))]
        [0, 1, 2, 3, 4, 5]
    """
    flat = FlatModel(initial_module(setting).to(setting.dtype), setting.learns)
    train, liars = setting.split.train.to("cpu", setting.dtype), _liars_of(setting)
    train = train if liars is None else liars.poison(train, setting.split.classes)
    truth = setting.split.clusters
    known = setting.clusters is not None and not setting.algorithm.informed
    return [
        Client(
            id=i,
            degree=setting.graph.degree(i),
            x=train.of(i)[0],
            y=train.of(i)[1],
            model=flat,
            make_model=setting.make_model,
            algorithm=setting.algorithm,
            clusters=setting.clusters or 1 if known else setting.true_clusters,
            seed=setting.seed,
            method=setting.method,
            true_cluster=None if truth is None else int(truth[i]),
            clients=setting.clients,
            hold_out_until=hold_out_until(setting),
            quiet_from=setting.quiet_from,
            receivers=receivers_in(setting, i),
        )
        for i in range(setting.clients)
    ]


def lockstep(
    setting: Setting, order: Callable[[int, Iterable[Message]], Iterable[Message]] = lambda receiver, messages: messages
) -> list[ClientState]:
    """Run all rounds: all clients start the round, then all messages are delivered.

    A server is a complete graph on which a client's own copy counts only if the client trained it, and which also
    reaches the clients that do not take part in the round.

    Args:
        setting: What the simulation runs.
        order: Arranges the messages that a receiver gets, given its number.

    Returns:
        The last state of every client.

    Example:
        >>> import dfca
        >>> from dfca.contracts import make_setting
        >>> [state.assignment for state in lockstep(make_setting(dfca.ALGORITHMS["oracle"](), rounds=1))]
        [0, 1, 0, 1, 0, 1]
    """
    surveys = None if setting.merging is None else SurveyedClients(setting, setting.merging)
    clients = surveys.clients if surveys else make_clients(setting)
    states = _begin(setting, clients)
    server, release = setting.algorithm.exchange == "server", release_round(setting.last_steps, setting.rounds)
    liars = _liars_of(setting)
    for now in range(setting.rounds):
        if now == release:
            states = _pick_personal_steps(setting, clients, states)
        present = {i for i in range(len(clients)) if participates(setting.seed, i, now, setting.participation)}
        sent: list[Message] = []
        if surveys:
            surveys.note_losses(states, present)
        for client in clients:
            if client.id in present:
                states[client.id], messages = client.start_round(states[client.id])
                sent += messages
            else:
                states[client.id] = client.rules.skip_round(states[client.id])
        if setting.algorithm.peers is not None:
            states = _average_with_chosen(setting, clients, states, sent, present, now)
            continue
        relayed = _relay(setting, clients, states, sent, present, now, surveys is None or surveys.schedule.over)
        if liars is not None:
            for message in sent:
                if message.sender in liars and message.cluster == states[message.sender].assignment:
                    liars.note_first(message.sender, message.model)
            sent = [_told(liars, message, now) for message in sent]
            for message in sent if server else ():  # the server's own copy is of what was sent
                states[message.sender].bank[message.cluster] = message.model
            relayed = [[_told(liars, message, now) for message in copies] for copies in relayed]
        for client in clients:
            if not server and client.id not in present:
                continue
            received = [
                message
                for message in sent
                if message.sender != client.id and (server or _reaches(setting, message, client.id))
            ]
            states[client.id] = client.rules.receive_all(states[client.id], order(client.id, received))
            for message in relayed[client.id]:
                states[client.id] = client.rules.receive(states[client.id], message)
        if surveys:
            states = surveys.hold(states, now + 1)
            clients = surveys.clients
    return states


def _reaches(setting: Setting, message: Message, client: int) -> bool:
    phases = receivers_in(setting, message.sender)
    near = phases[message.round % len(phases)] if phases else setting.graph.adj[message.sender]
    return client in near


def _liars_of(setting: Setting) -> Liars | None:
    return None if setting.liars is None else Liars(setting.liars, setting.clients, setting.seed)


def _told(liars: Liars, message: Message, now: int) -> Message:
    return replace(message, model=liars.tell(message.sender, message.cluster, now, message.model))


def stack(states: list[ClientState]) -> torch.Tensor:
    """Stack the banks of all clients.

    Args:
        states: The states of the clients.

    Returns:
        The models, (k, N, P).

    Example:
        >>> import dfca
        >>> from dfca.contracts import make_setting
        >>> stack(lockstep(make_setting(dfca.ALGORITHMS["ifca"](), rounds=1))).shape
        torch.Size([2, 6, 43])
    """
    return torch.stack([state.bank for state in states], dim=1)


def _begin(setting: Setting, clients: Sequence[Client]) -> list[ClientState]:
    """Start every client; an elected start is that of the synchronous simulator (tests compare it with the peers)."""
    if setting.algorithm.start != "elected":
        return [client.start() for client in clients]
    simulation = Simulation(setting)
    states = [ClientState.of(simulation.banks[:, client.id].clone()) for client in clients]
    if simulation.merging is None:
        return states
    shut = (closed.nonzero()[:, 0].tolist() for closed in simulation.merging.closed.T)
    return [replace(state, closed=tuple(slots)) for state, slots in zip(states, shut, strict=True)]


class SurveyedClients:
    """The surveys of `rules.merging` among clients, one by one; each connected part is asked on its own."""

    def __init__(self, setting: Setting, options: MergeOptions) -> None:
        self.setting, self.schedule = setting, Schedule(options, setting.rounds, options.first)
        self._later = make_clients(setting)  # as they train after the last survey
        self.clients = [replace(client, hold_out_until=setting.rounds, chooses_unseen=True) for client in self._later]

        self.pending: tuple[int, list[tuple[set[int], Plan]]] | None = None  # what a survey decided, and from when on
        self.losses: dict[int, list[float]] = {}  # by client, what it last chose by

    def note_losses(self, states: Sequence[ClientState], present: set[int]) -> None:
        """Note what the clients of a round choose by, until the last survey."""
        if not self.schedule.over:
            self.losses |= {i: self.clients[i].view(states[i]).losses.tolist() for i in present}

    def hold(self, states: list[ClientState], now: int) -> list[ClientState]:
        """Carry out the survey that takes effect after `now` rounds; hold the one that is due."""
        if self.pending is not None and self.pending[0] <= now:
            states = self._carry_out(states, self.pending[1], now)
        if self.pending is None and self.schedule.is_due(now):
            parts = nx.connected_components(self.setting.graph)
            self.pending = now + LAG, [(part, self._survey(states, part, now)) for part in parts]
        return states

    def _survey(self, states: Sequence[ClientState], part: set[int], now: int) -> Plan:
        setting, first = self.setting, states[min(part)]
        slots = [j for j in range(len(first.bank)) if j not in first.closed]
        opinions = {i: self._opinion(states[i], i, slots) for i in sorted(part)}
        heard = poll(slots, opinions.values())
        partners = pair_up(heard, asked=self.schedule.quiet)
        observations = []
        for i, said in opinions.items():
            place = slots.index(said.follows) if said.follows in slots else None
            if (
                place is not None
                and partners[place] != NOBODY
                and observes(setting.seed, now, i, heard.followers[place])
            ):
                share = share_of(heard.followers[place], heard.followers[slots.index(partners[place])])
                observations.append(self._observe(states[i], i, said.follows, partners[place], share))
        return decide(heard, total(slots, observations), partners, self.schedule.options)

    def _opinion(self, state: ClientState, i: int, slots: Sequence[int]) -> Opinion:
        follows, known = -1 if state.assignment is None else state.assignment, self.losses.get(i)
        losses = () if known is None else tuple(known[j] for j in slots)
        return Opinion(follows, len(self.clients[i].divided()[0][1]), losses)

    def _observe(self, state: ClientState, i: int, follows: int, partner: int, share: float) -> Observation:
        client = self.clients[i]
        train, held = client.divided()
        if not len(held[1]):
            return Observation(follows)
        local = plain(client.method.local, self.schedule.options.steps)
        with seeded(self.setting.seed, "noise", i, -1):
            judged = observe(client.model, state.bank[follows], state.bank[partner], share, train, held, local)
        return Observation(follows, *judged)

    def _carry_out(
        self, states: Sequence[ClientState], plans: Sequence[tuple[set[int], Plan]], now: int
    ) -> list[ClientState]:
        self.pending, self.losses = None, {}
        states = [state.merged(next(plan for part, plan in plans if i in part)) for i, state in enumerate(states)]
        left = max(len(state.bank) - len(state.closed) for state in states)
        merged = any(plan.merges for _, plan in plans)
        self.schedule = self.schedule.after(now, merged, (), left)
        if self.schedule.over:
            self.clients = self._later
            orders = [order_of(len(state.bank), state.closed) for state in states]
            states = [state.renumbered(order, left) for state, order in zip(states, orders, strict=True)]
        return states


def _pick_personal_steps(
    setting: Setting, clients: Sequence[Client], states: Sequence[ClientState]
) -> list[ClientState]:
    """Let every client pick the steps of its personal last step by its curve and those of its neighbours."""
    pairs = zip(clients, states, strict=True)
    slices = (measure_in_slices(client, state.bank, *client.divided(), state.closed) for client, state in pairs)
    measured = [measured for one in slices for measured in one if measured is not None]
    graphs = {"server": nx.complete_graph(len(clients)), "none": nx.empty_graph(len(clients))}
    graph = graphs.get(setting.algorithm.exchange, setting.graph)
    sound = [i for i, (_, _, curve) in enumerate(measured) if bool(curve.isfinite().all())]
    near = {i: [m for m in graph.neighbors(i) if m in sound and measured[m][0] == measured[i][0]] for i in sound}
    pools = {i: curve for i, (_, _, curve) in enumerate(measured)}
    for _ in range(SWEEPS):
        pools |= {i: average(pools[i], [(pools[m], len(near[m])) for m in near[i]]) for i in sound}
    steps = [pick(curve, samples, pools[i]) if samples else 0 for i, (_, samples, curve) in enumerate(measured)]
    return [replace(state, personal_steps=many) for state, many in zip(states, steps, strict=True)]


def _average_with_chosen(
    setting: Setting,
    clients: Sequence[Client],
    states: Sequence[ClientState],
    sent: Sequence[Message],
    present: set[int],
    now: int,
) -> list[ClientState]:
    """Let every client of the round draw its peers, look at their models and average with them: `rules.choosing`."""
    choice, models = setting.algorithm.peers, {message.sender: message.model for message in sent}
    assert choice is not None
    after = list(states)
    for i in sorted(present):
        client, memory = clients[i], states[i].memory
        assert memory is not None
        near = candidates_of(choice, setting.graph, i, sorted(models))
        random = partial(stream, setting.seed, "peers", i, now)
        linked = sorted(setting.graph.adj[i])
        peers = choice.ask(PeerDraw(i, now, near, memory, random, [j for j in near if j in linked]))
        received = [states[i].bank[0], *(models[j] for j in peers)]
        held = client.divided()[1]
        samples = held if choice.unseen and len(held[1]) else client.samples(now)
        score = partial(_score, client, torch.stack(received), samples)
        seen = losses(client.model, torch.stack(received), *samples)[1:]
        sizes = torch.tensor([len(clients[j].samples(now)[1]) for j in (i, *peers)])
        told = torch.stack([memory, *(_memory(states[j]) for j in peers)])[1:]
        drawn = partial(stream, setting.seed, "merge", i, now)
        average = choice.average(Received(i, now, peers, seen, sizes, memory, told, linked, drawn, score))
        model = sum(float(weight) * vector for weight, vector in zip(average.weights, received, strict=True))
        assert isinstance(model, torch.Tensor)
        after[i] = replace(states[i], bank=model[None], memory=average.memory)
    return after


def _score(client: Client, models: torch.Tensor, samples: tuple[Any, torch.Tensor], weights: torch.Tensor) -> Any:
    return losses(client.model, weights.to(models) @ models, *samples)


def _memory(state: ClientState) -> torch.Tensor:
    assert state.memory is not None
    return state.memory


def _relay(
    setting: Setting,
    clients: Sequence[Client],
    states: Sequence[ClientState],
    sent: Sequence[Message],
    present: set[int],
    now: int,
    settled: bool,
) -> list[list[Message]]:
    """Collect the copies that clients ask for of models that too few neighbours trained, before the round's folds."""
    offers = {i: clients[i].rules.offers(states[i]) for i in sorted(present)}
    relayed: list[list[Message]] = [[] for _ in clients]
    for i in sorted(present):
        near = [m for m in sorted(setting.graph.neighbors(i)) if m in present]
        beside = Counter(message.cluster for message in sent if message.sender in near)
        for j in range(len(states[i].bank)):
            offered = [offers[m][j] for m in near if j in offers[m]]
            if not clients[i].rules.looks_for_copies(states[i], j, beside[j], settled):
                continue
            chosen = clients[i].rules.wants(states[i], j, offered, now, beside[j])
            if chosen is not None:
                source = clients[chosen.sender]
                model = states[chosen.sender].bank[j]
                relayed[i].append(Message(chosen.sender, j, now, source.degree, model, chosen))
    return relayed
