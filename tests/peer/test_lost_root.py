"""What it costs a by-election to lose its root: whole waves on a graph, in virtual time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import networkx as nx
import pytest
import torch
from torch import Tensor

from dfca.core.rules.election import ElectionOptions
from dfca.peer.records.lineage import Entry
from dfca.peer.records.messages import LARGE, Call, Probe
from dfca.peer.records.work import Losses, Warm
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.election import Election

PEERS, DEGREE = 60, 6
SMALL_S, MODEL_S, SCORE_S = 0.02, 0.5, 0.1
"""How long a small message takes, one with a model, and the losses of a model."""


class Held(NamedTuple):
    """A by-election that was held."""

    ends: list[float]  # when a peer knew the result
    entries: set[Entry | None]
    small: int  # messages
    models: int


def losses(models: Tensor, peer: int) -> Losses:
    """Return the losses of a peer of one of two kinds."""
    away = (models - 10.0 * (peer % 2)).abs() + torch.tensor([0.0, 0.1, 0.2, 0.3])
    return Losses(away, away)


def hold(lose: Callable[[dict[int, Election]], int] | None = None, after_s: float = 0.0) -> Held:
    """Hold a by-election for a lost cluster; a peer that `lose` names leaves it after some seconds."""
    graph = nx.random_regular_graph(DEGREE, PEERS, seed=0)
    waves: dict[int, Election] = {}
    events: list[tuple[float, int, int, int, Any]] = []  # when, number, sender, receiver, message or job
    number, sent, ends, gone = count(), Counter[bool](), dict[int, float](), set[int]()

    def wave_of(i: int) -> Election:
        if i not in waves:
            own = torch.full((1,), 10.0 * (i % 2))
            usual: dict[str, Any] = {"seed": 0, "incarnation": 0, "clusters": None, "quorum": 0.5, "size": 1}
            waves[i] = Election(
                id=i,
                options=ElectionOptions(support=1),
                answer_time=AnswerTime(10.0),
                dtype=torch.float32,
                base=(Entry(PEERS, 0, 0, 0, 1, (0, 1)),),
                call=Call((1,), 2),
                links={*graph[i]} - gone,
                held=torch.zeros(2, 1),
                alarmed=True,
                stage=1,
                warm=Warm(own, losses(own[None], i)),
                **usual,
            )
        return waves[i]

    def hand_over(i: int, now: float) -> None:
        messages, jobs = waves[i].drain()
        for to, message in messages:
            sent[isinstance(message, LARGE)] += 1
            takes_s = MODEL_S if isinstance(message, LARGE) else SMALL_S
            heapq.heappush(events, (now + takes_s, next(number), i, to, message))
        for job in jobs:
            heapq.heappush(events, (now + SCORE_S, next(number), i, i, job))
        if waves[i].outcome is not None:
            ends.setdefault(i, now)

    wave_of(0).begin(0.0)
    hand_over(0, 0.0)
    while events:
        now, _, sender, i, event = heapq.heappop(events)
        if lose is not None and now >= after_s and not gone:
            gone.add(lose(waves))
            waves = {peer: wave for peer, wave in waves.items() if peer not in gone}
            for peer, wave in waves.items():
                if wave.links & gone:
                    wave.lost(*gone, now)
                    hand_over(peer, now)
        if {sender, i} & gone:
            continue
        if sender == i:
            waves[i].scored(event, losses(event.models, i))
        elif i in waves or isinstance(event, Probe):
            wave_of(i).receive(sender, event, now)
        else:
            continue
        hand_over(i, now)
    outcomes = [wave.outcome for wave in waves.values() if wave.outcome is not None]
    times = sorted(end for peer, end in ends.items() if peer not in gone)
    return Held(times, {outcome.entry for outcome in outcomes}, sent[False], sent[True])


@cache
def undisturbed() -> Held:
    return hold()


def root_of(waves: dict[int, Election]) -> int:
    return Counter(wave.key.root for wave in waves.values()).most_common(1)[0][0]


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9])
def test_a_lost_root_costs_one_more_wave_and_no_decided_turn(share: float) -> None:
    usual = undisturbed()
    held = hold(root_of, share * usual.ends[-1])
    print(
        f"{usual.ends[-1]:.1f} s, {usual.small}, {usual.models} -> {held.ends[-1]:.1f} s, {held.small}, {held.models}"
    )
    assert len(held.ends) == PEERS - 1
    assert len(held.entries) == 1
    assert held.small <= 1.8 * usual.small  # one more wave
    assert held.models <= usual.models + PEERS  # one more turn
    assert held.ends[-1] <= 1.25 * usual.ends[-1]
