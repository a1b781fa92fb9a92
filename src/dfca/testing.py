"""The reference driver, for tests of yours and ours: the sans-I/O clients themselves, one by one, in lockstep.

Slow and plain on purpose. Whatever drives clients (the vectorised simulator, later the event simulator and real nodes)
must give the same assignments and the same models as this, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from dfca.core.client import Client, ClientState, Message, participates
from dfca.core.params import FlatModel
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting, initial_module


def make_clients(setting: Setting) -> list[Client]:
    """Make the clients of a setting."""
    flat = FlatModel(initial_module(setting).to(setting.dtype))
    train = setting.split.train.to("cpu", setting.dtype)
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
            local=setting.local,
            seed=setting.seed,
            weights=setting.weights,
            share=setting.share,
            true_cluster=None if truth is None else int(truth[i]),
        )
        for i in range(setting.clients)
    ]


def lockstep(
    setting: Setting, order: Callable[[int, Iterable[Message]], Iterable[Message]] = lambda receiver, messages: messages
) -> list[ClientState]:
    """Run all rounds: everybody starts the round, then everything sent is delivered.

    `order` arranges what a receiver gets, by its id. A server is a complete graph on which a client's own copy counts
    only if the client trained it, and that also reaches the clients that sat the round out.
    """
    clients = make_clients(setting)
    states = _begin(setting, clients)
    server = setting.algorithm.exchange == "server"
    for now in range(setting.rounds):
        present = {i for i in range(len(clients)) if participates(setting.seed, i, now, setting.participation)}
        sent: list[Message] = []
        for client in clients:
            if client.id in present:
                states[client.id], messages = client.start_round(states[client.id])
                sent += messages
            else:
                states[client.id] = client.rules.skip_round(states[client.id])
        relayed = _relay(setting, clients, states, sent, present, now)
        for client in clients:
            if not server and client.id not in present:
                continue
            received = [
                message
                for message in sent
                if message.sender != client.id and (server or setting.graph.has_edge(client.id, message.sender))
            ]
            for message in (*order(client.id, received), *relayed[client.id]):
                states[client.id] = client.rules.receive(states[client.id], message)
    return states


def stack(states: list[ClientState]) -> torch.Tensor:
    """Stack the banks of all clients: (k, N, P)."""
    return torch.stack([state.bank for state in states], dim=1)


def _begin(setting: Setting, clients: Sequence[Client]) -> list[ClientState]:
    """Start every client; an elected start is that of the synchronous simulator (tests compare it with the peers)."""
    if setting.algorithm.start != "elected":
        return [client.start() for client in clients]
    banks = Simulation(setting).banks
    return [ClientState.of(banks[:, client.id].clone()) for client in clients]


def _relay(
    setting: Setting,
    clients: Sequence[Client],
    states: Sequence[ClientState],
    sent: Sequence[Message],
    present: set[int],
    now: int,
) -> list[list[Message]]:
    """Collect the copies that clients ask for of models that no neighbour trained, as of before the round's folds."""
    offers = {i: clients[i].rules.offers(states[i]) for i in sorted(present)}
    relayed: list[list[Message]] = [[] for _ in clients]
    for i in sorted(present):
        near = [m for m in sorted(setting.graph.neighbors(i)) if m in present]
        trained = {message.cluster for message in sent if message.sender in near}
        for j in range(len(states[i].bank)):
            offered = [offers[m][j] for m in near if j in offers[m]]
            chosen = None if j in trained else clients[i].rules.wants(states[i], j, offered, now)
            if chosen is not None:
                source = clients[chosen.sender]
                model = states[chosen.sender].bank[j]
                relayed[i].append(Message(chosen.sender, j, now, source.degree, model, chosen))
    return relayed
