"""The reference driver, for tests of yours and ours: the sans-I/O clients themselves, one by one, in lockstep.

Slow and plain on purpose. Whatever drives clients (the vectorised simulator, later the event simulator and real nodes)
must give the same assignments and the same models as this, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from dfca.core.client import Client, ClientState, Message, participates
from dfca.core.params import FlatModel
from dfca.sim.rounds import Setting, initial_module


def make_clients(setting: Setting) -> list[Client]:
    """Make the clients of a setting."""
    flat = FlatModel(initial_module(setting).to(setting.dtype))
    train = setting.split.train.to("cpu", setting.dtype)
    truth = setting.split.clusters
    return [
        Client(
            id=i,
            degree=setting.graph.degree(i),
            x=train.of(i)[0],
            y=train.of(i)[1],
            model=flat,
            make_model=setting.make_model,
            algorithm=setting.algorithm,
            clusters=setting.clusters,
            local=setting.local,
            seed=setting.seed,
            weights=setting.weights,
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
    states = [client.start() for client in clients]
    server = setting.algorithm.exchange == "server"
    for now in range(setting.rounds):
        present = {i for i in range(len(clients)) if participates(setting.seed, i, now, setting.participation)}
        sent: list[Message] = []
        for client in clients:
            if client.id in present:
                states[client.id], messages = client.start_round(states[client.id])
                sent += messages
            else:
                states[client.id] = client.skip_round(states[client.id])
        for client in clients:
            if not server and client.id not in present:
                continue
            heard = [
                message
                for message in sent
                if message.sender != client.id and (server or setting.graph.has_edge(client.id, message.sender))
            ]
            for message in order(client.id, heard):
                states[client.id] = client.receive(states[client.id], message)
    return states


def stack(states: list[ClientState]) -> torch.Tensor:
    """Stack the banks of all clients: (k, N, P)."""
    return torch.stack([state.bank for state in states], dim=1)
