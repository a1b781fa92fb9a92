"""What a peer counts in an election, and what it believes of what its neighbours claim."""

from __future__ import annotations

import torch

from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.revival import ROUNDS
from dfca.peer.records.messages import MOST_PEERS, Count, Key, Open, Probe, Refuse
from dfca.peer.records.work import Losses, Warm
from dfca.peer.revival import DriftDetector
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.election import Election

LOSSES = Losses(torch.zeros(1, 2), torch.zeros(1, 2))
WARM = Warm(torch.zeros(3), LOSSES)


def election(**values: object) -> Election:
    return Election(
        1,
        0,
        0,
        2,
        ElectionOptions(),
        0.8,
        AnswerTime(1.0),
        3,
        torch.float32,
        (),
        links={2, 3},
        **values,  # type: ignore[arg-type]
    )


def test_a_root_counts_no_more_voters_than_there_are() -> None:
    for most, voters in ((3, 3), (MOST_PEERS, 1 + 2 * 1000)):
        root = election(most=most, warm=WARM)
        root.begin(0.0)
        for kid in (2, 3):
            root.receive(kid, Count(root.key, 1000, 1000), 0.1)
        assert root.voters == voters
        assert [message.voters for _, message in root.out if isinstance(message, Open)] == [voters] * 2


def test_a_child_hands_on_no_more_than_there_are() -> None:
    child = election(most=3)
    key = Key(5, 0, 2**60, 2, 0)
    child._enter(key, 2, None, 0.0)
    child.receive(3, Count(key, 1000, 7), 0.1)
    assert [(message.size, message.ready) for _, message in child.out if isinstance(message, Count)] == [(3, 3)]
    child.receive(2, Open(key, 4, ()), 0.2)
    assert not child.opened
    child.receive(2, Open(key, 3, ()), 0.2)
    assert child.opened
    assert child.voters == 3


def test_a_peer_that_refused_a_wave_and_begins_a_worse_one_is_answered() -> None:
    worse = Key(0, 0, -(2**70), 3, 0)
    for opened in (False, True):
        root = election(warm=WARM)
        root.begin(0.0)
        root.receive(3, Refuse(root.key), 0.1)
        if opened:
            root.receive(2, Count(root.key, 1, 1), 0.2)
        root.out.clear()
        root.receive(3, Probe(worse, (), None), 0.3)
        answer = Refuse(worse) if opened else Probe(root.key, (), None)
        assert root.out == [(3, answer)]


def test_a_peer_that_does_not_warm_up_is_not_waited_for() -> None:
    root = election(warm=WARM)
    root.begin(0.0)
    root.receive(2, Count(root.key, 0, 0), 0.1)  # it has just come back
    assert not root.opened
    root.receive(3, Count(root.key, 1, 1), 0.2)
    assert root.opened
    assert root.voters == 2


def test_a_loss_that_a_model_trained_alone_reached_is_nothing_to_compare_with() -> None:
    detector = DriftDetector()
    detector.look(1.0)
    detector.look(0.1, mixed=False)
    for _ in range(ROUNDS):
        detector.look(0.9)
    assert not detector.alarmed
    for _ in range(ROUNDS):
        detector.look(1.4)
    assert detector.alarmed


def test_a_cluster_is_not_lost_to_a_peer_that_is_cut_off_or_knows_better() -> None:
    cut_off, alone, knows = DriftDetector(), DriftDetector(), DriftDetector()
    for detector in (cut_off, alone, knows):
        detector.grow(2)
        detector.learn((5, 5))
        detector.end_round(2)
    for round in range(6, 6 + ROUNDS):
        cut_off.end_round(2, informed=False)
        alone.newest[1] = knows.newest[0] = knows.newest[1] = round
        alone.end_round(2)
        knows.end_round(2)
    assert cut_off.lost() == ()
    assert alone.lost() == (0,)
    assert not knows.believes((0,), 6 + ROUNDS)
    assert alone.believes((0,), 6 + ROUNDS)
    assert not alone.believes((0, 1), 6 + ROUNDS)


def test_a_loss_near_zero_that_doubles_is_no_drift() -> None:
    detector = DriftDetector()
    for loss in (1.0, 0.02, *[0.05] * ROUNDS):
        detector.look(loss)
    assert not detector.alarmed
    for _ in range(ROUNDS):
        detector.look(0.3)
    assert detector.alarmed
