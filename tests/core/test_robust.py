"""Robust folds: closed forms, what liars cannot do, and one rule for all drivers."""

from __future__ import annotations

import json
import math
from typing import Any

import networkx as nx
import pytest
import torch
from driver_checks import assert_same
from event_runs import assert_same as assert_same_events
from event_runs import run as run_events
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import make_toy_setting, pairwise, quick

from dfca.core.exchange import Rules
from dfca.core.rules.mixing import WeightedLinks, mix
from dfca.core.rules.robust import (
    BEYOND,
    FAR,
    RECENT,
    RobustMixer,
    clips,
    distance,
    fold_robust_,
    quartile,
    shift,
    trim_count,
    trimmed_mean,
    trust,
    trusted,
)
from dfca.core.state import ClientState, Message
from dfca.sim.rounds.simulation import Simulation

GUARDS = ("clip", "trimmed", "median")


def vectors(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


def folded(own: float, came: list[float], rule: str, recent: tuple[float, ...] = ()) -> float:
    """Fold numbers with uniform weights."""
    (mine,) = vectors(own)
    fold_robust_(mine, vectors(*came), [1 / (len(came) + 1)] * len(came), rule, recent)
    return float(mine)


def test_clip_by_hand() -> None:
    # distances 1, 2, 2: tau is 1, nothing is beyond 2 tau, and the fold is the plain one
    assert folded(0.0, [1.0, 2.0, -2.0], "clip") == pytest.approx((1 + 2 - 2) / 4)
    # what is at 4 tau counts as a sixteenth of a message
    assert folded(0.0, [1.0, 2.0, 4.0], "clip") == pytest.approx((1 + 2 + 4 / 16) / (3 + 1 / 16))
    # alone, a model is held against what came before
    assert folded(0.0, [6.0], "clip", recent=(2.0, 2.0, 1.5)) == pytest.approx(6 / 16 / (1 + 1 / 16))
    assert folded(0.0, [100.0], "clip") == pytest.approx(50.0)


def test_a_quarter_of_honest_messages_is_enough_for_clip() -> None:
    honest, lies = [1.0, -1.0], [-40.0, -40.0, -40.0]
    assert folded(0.0, [*honest, *lies], "clip") == pytest.approx(0.0, abs=1e-2)
    assert folded(0.0, [*lies, *lies], "clip") < -30, "but some of it must be"


def test_what_a_far_model_loses_goes_to_the_others_and_not_to_the_own_copy() -> None:
    near = [1.0, 1.5, 2.0]
    assert folded(0.0, [*near, 1e6], "clip") == pytest.approx(folded(0.0, near, "clip"))
    assert trusted([0.5, 0.5], [1.0, 4.0], 1.0) == pytest.approx([0.5, 0.5 / 16]), "an own copy without weight keeps it"
    assert trusted([0.4, 0.4], [1.0, 4.0], 1.0) == pytest.approx([0.4 / 0.625, 0.025 / 0.625])


def test_a_first_contact_is_compared_with_the_size_of_the_own_copy() -> None:
    own = torch.tensor([3.0, 4.0], dtype=torch.float64)  # of norm 5
    for far, moved in ((500.0, 500 / (1 + 50**4)), (7.0, 3.5)):  # 100 times the norm; as two random starts
        copy = own.clone()
        recent = fold_robust_(copy, [own + torch.tensor([far, 0.0])], [0.5], "clip", ())
        assert float(copy[0] - own[0]) == pytest.approx(moved)
        assert recent == (far,)
    again = own.clone()  # what came first does not make it sound
    fold_robust_(again, [own + torch.tensor([500.0, 0.0])], [0.5], "clip", (500.0,) * 8)
    assert float(again[0] - own[0]) < 0.01
    nothing = torch.zeros(2, dtype=torch.float64)
    fold_robust_(nothing, [torch.tensor([1.0, 0.0], dtype=torch.float64)], [0.5], "clip", ())
    assert nothing.tolist() == [0.5, 0.0]  # a copy of zeros says nothing


def test_trimmed_and_median_by_hand() -> None:
    came = [1.0, 2.0, 3.0, 1000.0]
    assert [trim_count("trimmed", n) for n in (4, 5, 6, 10, 11)] == [1, 1, 2, 2, 3]
    assert [trim_count("median", n) for n in (4, 5, 6)] == [1, 2, 2]
    assert folded(0.0, came, "trimmed") == pytest.approx(2.0)  # of 0, 1, 2, 3, 1000: without 0 and 1000
    assert folded(0.0, came, "median") == pytest.approx(2.0)
    assert folded(0.0, [*came, 1000.0], "median") == pytest.approx(2.5)
    assert folded(0.0, [1.0, 2.0], "trimmed") == folded(0.0, [1.0, 2.0], "clip") == pytest.approx(1.0)


def test_metropolis_weights_move_less() -> None:
    own, came = torch.zeros(1, dtype=torch.float64), vectors(1.0, 2.0, 3.0, 1000.0)
    fold_robust_(own, came, [0.1] * 4, "trimmed", ())  # of a degree of 9: 0.4 of 0.8
    assert float(own) == pytest.approx(0.5 * 2.0)


finite = st.floats(-1e3, 1e3)
anything = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(("trimmed", "median")), st.integers(3, 12))
def test_few_liars_leave_every_coordinate_between_honest_values(data: st.DataObject, rule: str, came: int) -> None:
    lying = data.draw(st.integers(0, trim_count(rule, came + 1)))
    honest = data.draw(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=came - lying, max_size=came - lying))
    lies = data.draw(st.lists(st.lists(anything, min_size=3, max_size=3), min_size=lying, max_size=lying))
    own = torch.tensor(data.draw(st.lists(finite, min_size=3, max_size=3)))
    models = torch.tensor([*honest, *lies]).reshape(came, 3)
    good = torch.cat([own[None], models[: came - lying]])
    order = data.draw(st.permutations(range(came)))
    fold_robust_(own, [models[place] for place in order], [1 / (came + 1)] * came, rule, ())
    slack = 1e-3  # of float32 at 1e3
    assert (own >= good.min(dim=0).values - slack).all()
    assert (own <= good.max(dim=0).values + slack).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(anything, min_size=1, max_size=9), finite, st.sampled_from(GUARDS), st.lists(st.floats(0, 10), max_size=3)
)
def test_whatever_comes_the_result_is_finite_and_a_clipped_one_near(
    came: list[float], own: float, rule: str, recent: list[float]
) -> None:
    mine, models = torch.tensor([own]), [torch.tensor([value]) for value in came]
    before = mine.clone()
    recent = fold_robust_(mine, models, [1 / (len(came) + 1)] * len(came), rule, tuple(recent))
    assert mine.isfinite().all()
    assert all(map(math.isfinite, recent))
    if clips(rule, len(came)):
        tau = quartile([*(distance(model, before) for model in models), *recent[:-1]])
        assert float((mine - before).abs()) <= len(came) * BEYOND * tau * (1 + 1e-5) + 1e-3


def test_what_is_too_far_to_be_measured_has_no_weight() -> None:
    far = [torch.tensor([3e38, -3e38]), torch.tensor([-3e38, 3e38])]
    own = torch.tensor([-3e38, 3e38])
    assert distance(far[0], own) == FAR
    assert trust(FAR, FAR) == 0
    fold_robust_(own, far[:1], [0.5], "clip", ())
    assert own.tolist() == torch.tensor([-3e38, 3e38]).tolist()
    assert trimmed_mean(torch.full((4, 2), 3e38), 1).isfinite().all()


def test_only_the_last_folds_are_remembered() -> None:
    recent: tuple[float, ...] = ()
    for value in range(2 * RECENT):
        models = [torch.tensor([x], dtype=torch.float64) for x in (value, 1e9, 1.0 + value)]
        recent = fold_robust_(torch.zeros(1, dtype=torch.float64), models, [0.0] * 3, "clip", recent)
    assert recent == tuple(float(value) for value in range(RECENT, 2 * RECENT))
    table = torch.full((2, RECENT), float("nan"), dtype=torch.float64)
    for value in range(2 * RECENT):
        table = shift(table, torch.tensor([float(value), float("nan")], dtype=torch.float64))
    assert tuple(table[0].tolist()) == recent
    assert table[1].isnan().all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(GUARDS))
def test_all_at_once_is_one_by_one(seed: int, rule: str) -> None:
    random = torch.Generator().manual_seed(seed)
    models = torch.randn(7, 5, generator=random, dtype=torch.float64)
    sent = models * (1 + 5 * (torch.rand(7, 1, generator=random) < 0.3))
    matrix = (torch.rand(7, 7, generator=random) < 0.6).fill_diagonal_(False)
    receiver, sender = matrix.nonzero().T
    recent = torch.rand(7, RECENT, generator=random, dtype=torch.float64)
    recent[::2, : RECENT // 2] = float("nan")
    weight = torch.rand(len(receiver), generator=random, dtype=torch.float64) / 7
    mixer = RobustMixer(WeightedLinks(receiver, sender, weight), torch.arange(7), 0, rule, held=False)
    blocks = (slice(0, 2), slice(2, 5))
    for columns in blocks:
        mixer.measure(columns, models[:, columns], sent[:, columns])
    quartiles = mixer.settle(recent, models)
    together = models.clone()
    for columns in blocks:
        mixer.apply_(together[:, columns], sent[:, columns])
    for i in range(7):
        own, places = models[i].clone(), (receiver == i).nonzero()[:, 0]
        if not len(places):
            assert quartiles[i].isnan()
            continue
        known = tuple(value for value in recent[i].tolist() if value == value)
        later = fold_robust_(own, list(sent[sender[places]]), weight[places].tolist(), rule, known)
        torch.testing.assert_close(together[i], own, rtol=1e-12, atol=1e-12)
        assert float(quartiles[i]) == pytest.approx(later[-1], rel=1e-12)


def test_where_nothing_is_clipped_clip_is_the_plain_fold() -> None:
    models = torch.eye(4, dtype=torch.float64)  # all as far from each other
    receiver, sender = (~torch.eye(4, dtype=torch.bool)).nonzero().T
    links = WeightedLinks(receiver, sender, torch.full((12,), 0.25, dtype=torch.float64))
    own = models[0].clone()
    fold_robust_(own, list(models[1:]), [0.25] * 3, "clip", ())
    torch.testing.assert_close(own, mix(models, links)[0])


def test_a_relayed_copy_counts_as_one_message() -> None:
    rules, offer = Rules(0, 1, share="relay", robust="clip"), (1, 3, 1)
    from dfca.core.rules.relay import Offer

    state = ClientState.of(torch.zeros(1, 2, dtype=torch.float64))
    for size, share in ((1.0, 1.0), (1.0, 1.0), (4.0, 1 / 16)):
        before = state.bank[0].clone()
        model = before + torch.tensor([size, 0.0], dtype=torch.float64)
        state = rules.receive(state, Message(1, 0, 3, 1, model, Offer(*offer)))
        moved = float((state.bank[0] - before).norm())
        assert moved == pytest.approx(share * size)  # a listener takes a copy as a whole, but little of a far one
    assert state.distances[0] == pytest.approx((1.0, 1.0, 4.0))


AXES: dict[str, list[Any]] = {
    "robust": list(GUARDS),
    "algorithm": ["dfca-gi", "dfca-li", "dfca-auto", "dfedavgm", "fedspd", "ifca"],
    "weights": ["uniform", "metropolis"],
    "aggregation": ["batch", "sequential"],
    "share": ["trained", "all", "relay"],
    "graph": ["ring", "complete"],
    "liars": [None, "flip-signs", "noise", "stale", "swap-labels", "self-vote"],
    "participation": [1.0, 0.6],
}
GRAPHS = {"ring": nx.cycle_graph(6), "complete": nx.complete_graph(6)}


def setting_of(row: dict[str, Any], **changes: Any) -> Any:
    from dfca.sim.local.choices import LiarOptions

    values = {name: row[name] for name in ("robust", "weights", "aggregation", "share", "participation")}
    liars = None if row["liars"] is None else LiarOptions(0.3, row["liars"])
    return make_toy_setting(quick(row["algorithm"]), graph=GRAPHS[row["graph"]], liars=liars, **values, **changes)


ROWS = pairwise(AXES)


@pytest.mark.no_cover
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_rounds_equal_lockstep(row: dict[str, Any]) -> None:
    assert_same(setting_of(row))


@pytest.mark.parametrize("row", ROWS[::3], ids=lambda row: "-".join(str(value) for value in row.values()))
def test_the_ideal_world_equals_rounds(row: dict[str, Any]) -> None:
    setting = setting_of(row, rounds=3)
    assert_same_events(setting, run_events(setting))


def test_stop_and_resume_is_bit_identical() -> None:
    from dfca.sim.local.choices import LiarOptions

    changes = {"rounds": 5, "robust": "clip", "dtype": torch.float32, "liars": LiarOptions(0.3, "stale")}
    setting = make_toy_setting("dfca-gi", **changes)
    whole = Simulation(setting)
    for _ in range(2):
        whole.step()
    tensors, facts = whole.state()
    stored = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts))
    second = Simulation(setting)
    second.restore(*stored)
    for _ in range(3):
        whole.step()
        second.step()
    assert torch.equal(second.banks, whole.banks)
