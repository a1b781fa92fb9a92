"""When clients call an election: the rules by hand, and their two users against each other."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.revival import PAUSE, ROUNDS, UNSEEN, has_risen, is_due, is_lost, next_pause
from dfca.peer.revival import DriftDetector
from dfca.sim.rounds.revival import Revival


def test_a_loss_has_risen_by_half_and_by_a_fifth_of_what_was_learned() -> None:
    assert has_risen(1.6, 1.0, 2.0)
    assert not has_risen(1.4, 1.0, 2.0)  # less than half more
    assert not has_risen(1.5, 1.0, 1.0)  # half more
    assert not has_risen(1.6, 1.0, 6.0)  # 0.6 of 5 that were learned
    assert not has_risen(2.0, 1.0, 6.0)  # a fifth
    assert not has_risen(9.0, math.inf, 9.0)  # nothing to compare with
    table = torch.tensor([[1.6, 1.0, 2.0], [1.4, 1.0, 2.0], [1.6, 1.0, 6.0]]).T.double()
    assert has_risen(*table).tolist() == [True, False, False]


def test_a_cluster_is_lost_after_longer_than_its_longest_gap() -> None:
    assert [is_lost(idle, False) for idle in (ROUNDS - 1, ROUNDS)] == [False, True]
    assert [is_lost(idle, False, gap=2) for idle in (ROUNDS + 3, ROUNDS + 4)] == [False, True]
    assert [is_lost(idle, False, seen=False) for idle in (UNSEEN - 1, UNSEEN)] == [False, True]
    assert not is_lost(99, given_up=True)


def test_an_election_is_due_by_alarms_or_a_loss_after_the_pause() -> None:
    assert is_due(2, 2, False, waited=10, pause=10)
    assert is_due(0, 2, True, waited=10, pause=10)
    assert not is_due(1, 2, False, waited=10, pause=10)
    assert not is_due(2, 2, True, waited=9, pause=10)
    assert next_pause(40, opened=False) == 80
    assert next_pause(40, opened=True) == PAUSE


@pytest.mark.parametrize("seed", range(5))
def test_a_detector_and_all_clients_at_once_watch_alike(seed: int) -> None:
    random, options, clients = Random(seed), ElectionOptions(support=2), 4
    revival, detectors = Revival(clients, 2), [DriftDetector() for _ in range(clients)]
    for now in range(60):
        losses = [random.choice([0.1, 0.5, 1.0, 2.0, math.inf]) for _ in range(clients)]
        revival.watch(torch.tensor(losses, dtype=torch.float64), range(clients))
        due = revival.calls_election(torch.zeros(clients, dtype=torch.int64), options, now, 1000, closed=[1])
        for detector, loss in zip(detectors, losses, strict=True):
            detector.grow(2)
            detector.newest[0] = now
            detector.look(loss)
            detector.end_round(2, unwatched=[1])
        for detector in detectors:
            for i, other in enumerate(detectors):
                detector.hear_alarm(i, now, other.alarmed, now)
            assert detector.is_due(now, options) == due
        assert [detector.alarm for detector in detectors] == revival.alarm.tolist()
        if due:
            opened = [0] * random.randrange(2)
            revival.close(now, 2, opened)
            for detector in detectors:
                detector.close(now, 2, tuple(opened))
            assert {detector.pause for detector in detectors} == {int(revival.pause)}
