"""Peers that are slower than their neighbours, under `batch` with a time-out; and models that overtake each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from event_runs import run
from toy import make_toy_setting

from dfca import algorithms
from dfca.core.client import participates
from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.core.state import Message
from dfca.faults.check import check_world
from dfca.faults.world import read_world
from dfca.peer.machine import Memory
from dfca.peer.peer import Peer
from dfca.peer.records.messages import Hello, Served, Update
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Draw, Train, Trained
from dfca.peer.server import ServerClient
from dfca.sim.events.world import Compute, Devices, Link, World


@pytest.mark.parametrize("slowdown", [10.0, 20.0])
@pytest.mark.parametrize("algorithm", ["dfca-gi", "dfca-auto"])
def test_a_laggard_folds_a_model_of_every_neighbour_in_every_round(algorithm: str, slowdown: float) -> None:
    setting = replace(make_toy_setting(algorithms.get(algorithm), rounds=60), aggregation="batch")
    compute = Compute(1.0 / setting.local.steps, devices=(Devices(share=0.2, slowdown=slowdown),))
    result = run(setting, World(compute, Link(0.01)), timeout_s=4.0, trace=True, until_s=300.0)
    laggard = min(range(setting.clients), key=lambda i: result.rounds[i])
    rounds, others = result.rounds[laggard], sorted(result.rounds)[1]
    assert others > 2 * rounds > 10
    folds = [record for record in result.trace or [] if record.kind == "fold" and record.client == laggard]
    assert len(folds) == setting.graph.degree(laggard) * rounds


class Laggard:
    """A peer that has trained round 0 and waits for its only neighbour, whose models come one after another."""

    def __init__(self, participation: float = 1.0, seed: int = 0) -> None:
        options = PeerOptions(
            Rules(0, 1),
            (1,),
            1,
            "shared",
            20,
            seed,
            1,
            torch.float64,
            Method(timeout_s=4.0, participation=participation),
        )
        self.peer = peer = Peer(options, Memory(1, torch.float64))
        peer.begin(0.0)
        peer.connected(1, 0.0)
        peer.receive(1, Hello(0, 0, 1, ()), 0.0)
        (draw,) = peer.ready().work
        assert isinstance(draw, Draw)
        peer.finished(draw, torch.zeros(1, 1, dtype=torch.float64), 0.0)
        peer.wake(0.0)

    def train(self, now: float) -> None:
        """End the round that runs with the model 0."""
        job = self.peer.job
        assert isinstance(job, Train)
        self.peer.finished(job, Trained(0, True, torch.zeros(1, dtype=torch.float64), 0.0), now)

    def send(self, round: int, value: float) -> None:
        """Let the neighbour send the model of a round."""
        model = torch.full((1,), value, dtype=torch.float64)
        self.peer.receive(1, Update(Message(1, 0, round, 1, model), 1, ()), self.peer.now)

    def end(self, now: float) -> float:
        """Fold and close the round; returns the model that comes of it."""
        while self.peer.next_wake() == -math.inf:
            self.peer.wake(now)
        assert self.peer.bank is not None
        return self.peer.bank.item()


def test_a_model_of_the_next_round_waits_for_it() -> None:
    laggard = Laggard()
    laggard.train(1.0)
    laggard.send(0, 2.0)
    laggard.send(1, 8.0)
    assert laggard.end(1.0) == 1.0  # the mean of 0 and 2
    laggard.train(2.0)
    assert laggard.end(2.0) == 4.0


def test_the_newest_model_of_a_neighbour_that_did_not_wait_is_folded() -> None:
    laggard = Laggard()
    for round in range(6):
        laggard.send(round, 2.0 * round)
    laggard.train(9.0)
    assert laggard.end(9.0) == 5.0  # the mean of 0 and 10, of round 5
    laggard.send(6, 12.0)
    laggard.train(18.0)
    assert laggard.end(18.0) == 6.0


def test_a_neighbour_that_sits_a_round_out_is_not_ahead() -> None:
    # It need not wait for round 1, in which it rests: its model of round 2 is for round 2.
    def fits(seed: int) -> bool:
        mine, other = ([participates(seed, i, round, 0.5) for round in range(3)] for i in (0, 1))
        return all(mine) and other == [True, False, True]

    laggard = Laggard(0.5, next(seed for seed in range(1000) if fits(seed)))
    laggard.train(1.0)
    laggard.send(0, 2.0)
    laggard.send(2, 8.0)
    assert laggard.end(1.0) == 1.0
    laggard.train(2.0)
    assert laggard.end(2.0) == 0.0
    laggard.train(3.0)
    assert laggard.end(3.0) == 4.0


def test_a_servers_older_models_that_were_overtaken_are_dropped() -> None:
    client = ServerClient(PeerOptions(Rules(0, 1, "server"), (-1,), 1, "shared", 9, 0, 1), Memory(1, torch.float32))
    client.begin(0.0)
    client.connected(-1, 0.0)
    client.receive(-1, Served(5, torch.tensor([[5.0]])), 0.0)
    client.receive(-1, Served(4, torch.tensor([[4.0]])), 0.0)
    assert client.round == 5
    client.wake(0.0)
    client.receive(-1, Served(3, torch.tensor([[3.0]])), 0.5)
    (job,) = client.ready().work
    client.finished(job, Trained(0, True, torch.tensor([2.0]), 0.0), 1.0)
    assert client.round == 6
    assert client.next_wake() is None  # it waits for round 6
    client.disconnected(-1, 2.0)
    client.connected(-1, 2.0)  # the report may be lost: the server says which round it is in
    client.receive(-1, Served(5, torch.tensor([[5.0]])), 3.0)
    assert client.round == 5


LINES = (
    "FaultWorld(6, peers=4, algorithm='ifca', clusters=2, delay_s=1.5, spread=1.5, "
    "cuts=(Cut(begin_s=0.4, end_s=20.0, side=(1, 3)),), rounds=12)",
)


@pytest.mark.parametrize("line", LINES)
def test_worlds_that_failed_before(line: str) -> None:
    assert check_world(read_world(line)) is None
