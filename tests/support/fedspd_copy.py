"""FedSPD written a second time: plain loops, nothing of dfca but the data. The last phase is that of the public code.

`literal` takes over what else the public code has: own starts, random first groups, everybody trains all models for
twice the steps in the first round, later an equal random division of the clients says who trains what, only those who
train a model average it, a group has at least ten points, and the last phase holds out a tenth. Never the alignment of
clusters, and always the steps of the setting.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import networkx as nx
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

FEWEST_POINTS = 10

Samples = tuple[Tensor, Tensor]
State = dict[str, Tensor]


class Training(NamedTuple):
    """The setting: models per client, rounds, full-batch steps per round, learning rate; literal: see above."""

    clusters: int
    rounds: int
    steps: int
    learning_rate: float
    literal: bool = False


def fedspd_copy(
    network: nn.Module, train: Sequence[Samples], test: Sequence[Samples], graph: nx.Graph, how: Training, seed: int
) -> float:
    """Train with FedSPD; returns the mean accuracy of the clients' personal models."""
    torch_state, random_state = torch.get_rng_state(), random.Random(seed)
    torch.manual_seed(seed)
    one, clients = [fresh(network) for _ in range(how.clusters)], list(range(len(train)))
    models = [[fresh(network) for _ in one] if how.literal else list(one) for _ in clients]
    groups = [torch.randint(how.clusters, (len(y),)) for _, y in train]
    fewest = FEWEST_POINTS if how.literal else 0
    if not how.literal:
        groups = [grouped(network, models[i], train[i], fewest) for i in range(len(train))]
    for now in range(how.rounds):
        random_state.shuffle(clients)
        drawn = {i: int(groups[i][random_state.randrange(len(groups[i]))]) for i in clients}
        for s in range(how.clusters):
            if how.literal:
                trainers = clients if now == 0 else clients[s :: how.clusters]
            else:
                trainers = [i for i in clients if drawn[i] == s]
            steps = 2 * how.steps if how.literal and now == 0 else how.steps
            trained = {}
            for i in trainers:
                x, y = (part[groups[i] == s] for part in train[i])
                trained[i] = descend(network, models[i][s], [(x, y)] * steps, how.learning_rate, 0.0)
            for i in trainers if how.literal else clients:
                there = [trained.get(i, models[i][s])] + [trained[j] for j in graph[i] if j in trained]
                models[i][s] = {key: sum(model[key] for model in there) / len(there) for key in there[0]}
        groups = [grouped(network, models[i], train[i], fewest) for i in range(len(train))]
    scores = []
    for i, samples in enumerate(train):
        shares = [float((groups[i] == s).double().mean()) for s in range(how.clusters)]
        own = {key: sum(u * model[key] for u, model in zip(shares, models[i], strict=True)) for key in models[i][0]}
        network.load_state_dict(last_phase(network, own, samples, how.learning_rate, 10 if how.literal else 0))
        with torch.no_grad():
            scores.append(float((network(test[i][0]).argmax(dim=1) == test[i][1]).double().mean()))
    torch.set_rng_state(torch_state)
    return sum(scores) / len(scores)


def fresh(network: nn.Module) -> State:
    """Draw new weights."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return deepcopy(network.state_dict())


def descend(network: nn.Module, start: State, batches: Sequence[Samples], rate: float, momentum: float) -> State:
    """Take one step of SGD per batch; batches without samples are passed over."""
    network.load_state_dict(start)
    optimiser = torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum)
    for x, y in batches:
        if len(y):
            optimiser.zero_grad()
            cross_entropy(network(x), y).backward()
            optimiser.step()
    return deepcopy(network.state_dict())


def grouped(network: nn.Module, models: Sequence[State], samples: Samples, fewest: int) -> Tensor:
    """Give every point to the model with the lowest loss; a group with too few gets points of the largest."""
    losses, (x, y) = [], samples
    for model in models:
        network.load_state_dict(model)
        with torch.no_grad():
            losses.append(cross_entropy(network(x), y, reduction="none"))
    groups = torch.stack(losses).argmin(dim=0)
    for s in range(len(models)):
        if int((groups == s).sum()) < fewest:
            largest = int(torch.bincount(groups, minlength=len(models)).argmax())
            groups[(groups == largest).nonzero()[-fewest:, 0]] = s
    return groups


def last_phase(network: nn.Module, model: State, samples: Samples, rate: float, held_out: int) -> State:
    """Fine-tune: 5 times 5 epochs, batches of 50, half the rate, momentum 0.5, 0.8 of the rate after three of five.

    held_out: one of this many points is left out, others in each of the five; 0: none.
    """
    rate /= 2
    x, y = samples
    for time in range(5):
        if time == 3:
            rate *= 0.8
        kept = torch.randperm(len(y))[len(y) // held_out if held_out else 0 :]
        order = [kept[torch.randperm(len(kept))] for _ in range(5)]
        batches = [(x[rows], y[rows]) for epoch in order for rows in epoch.split(50)]
        model = descend(network, model, batches, rate, 0.5)
    return model
