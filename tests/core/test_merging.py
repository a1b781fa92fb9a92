"""Which clusters are worth their data: closed forms, the record that is summed, and surveys in both drivers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_worlds import make_world
from toy import make_toy_model, make_toy_split

from dfca import algorithms
from dfca.base.errors import ConfigError
from dfca.core.learning.local import LocalOptions, infer, sample_losses
from dfca.core.learning.params import FlatModel
from dfca.core.learning.task import CLASSIFICATION, build_task
from dfca.core.rules.merging import (
    EXCESSES,
    HARM,
    LEAST_OPTIMISM,
    TYPICAL_LOSS,
    Merge,
    MergeOptions,
    Observation,
    Plan,
    add,
    at_least,
    choose_without,
    compare,
    count,
    decide,
    differ,
    harms,
    judge,
    judge_each,
    merge_,
    nothing,
    observe,
    shares_of,
    total,
    unsettled,
    worths,
)
from dfca.core.rules.relay import MANY, NEVER
from dfca.core.rules.surveys import is_last, wait_after
from dfca.core.state import ClientState
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.testing import lockstep, stack

OPTIONS = MergeOptions()


def pair(bias: float, n: int = 40, m: int = 40, optimism: float = 0.1) -> list[Observation]:
    """Two clusters with two followers each, who find the other model worse by `bias`."""
    return [
        *[Observation(0, n // 2, differ((0.3, 0.3 + bias), 0), optimism)] * 2,
        *[Observation(1, m // 2, differ((0.2 + bias, 0.2), 1), optimism)] * 2,
    ]


def test_worth_by_hand() -> None:
    # c = mean of 40 x 0.1 / 2 and 60 x 0.1 / 2 = 2.5; n m / (n + m) = 24; B = 0.05
    found = worths(total((0, 1), pair(0.05, 40, 60)))
    assert found[0, 1] == pytest.approx(24 * 0.05 / 2.5, abs=1e-6)
    uneven = [
        Observation(0, 40, differ((0.3, 0.4), 0), 0.1),
        Observation(1, 60, (0.0,) * (2 * EXCESSES), 0.1),
    ]  # 1 sees no difference
    assert worths(total((0, 1), uneven))[0, 1] == pytest.approx(24 * 0.05 / 2.5, abs=1e-6)


def test_each_model_is_judged_with_as_many_personal_steps_as_suit_it() -> None:
    def worth(wrong: float, tuned: float, right: float) -> float:
        said = [
            Observation(0, 40, (0, wrong, 0, tuned, 0, right, *(0.0,) * 6), 0.1),
            Observation(1, 60, (wrong, 0, tuned, 0, right, 0, *(0.0,) * 6), 0.1),
        ]
        return worths(total((0, 1), said))[0, 1] / (24 / 2.5)

    assert worth(0.4, 0.05, 0.02) == pytest.approx(0.05)  # steps help the other model, and would harm one's own
    assert worth(0.4, 0.05, -0.02) == pytest.approx(0.07)  # they help both
    assert worth(0.01, 0.05, 0.02) == pytest.approx(0.01)  # they harm both


def test_what_is_worth_its_data_stays_and_what_is_not_is_merged() -> None:
    assert decide(total((0, 1), pair(0.2)), OPTIONS) == Plan()
    plan = decide(total((0, 1), pair(0.02, 30, 90)), OPTIONS)
    assert plan.closed == (1,)
    (merge,) = plan.merges
    assert (merge.into, merge.closed, merge.share) == (0, 1, 0.75)
    assert merge.worth < OPTIONS.worth


def test_models_without_optimism_cost_nothing_so_that_any_difference_is_worth_a_cluster() -> None:
    assert decide(total((0, 1), pair(0.001, optimism=-0.1)), OPTIONS) == Plan()
    assert decide(total((0, 1), pair(-0.001, optimism=-0.1)), OPTIONS).closed == (1,)


def test_a_cluster_without_followers_is_closed_and_one_without_votes_is_not_worth_it() -> None:
    silent = [Observation(0, 3), Observation(4, 4), Observation(4, 4)]
    plan = decide(total((0, 2, 4), silent), OPTIONS)
    assert plan == Plan((Merge(0, 4, 8 / 11, 0.0),), (2,))
    assert plan.closed == (2, 4)


def test_a_cluster_is_left_alone_while_the_losses_of_a_quarter_of_its_followers_have_risen() -> None:
    alike = [Observation(j, 20, differ((0.3,) * 3, j), 0.1) for j in (0, 0, 0, 1, 2)]
    for many, pairs in ((0, [(0, 1)]), (1, [(0, 1)]), (2, [(1, 2)])):
        survey = total(range(3), [*alike, *[Observation(0, 20, differ((0.3,) * 3, 0), 0.1, unfit=True)] * many])
        assert (alone := unsettled(survey)) == ({0} if many == 2 else set())
        assert (
            unsettled(survey, quiet=1) == unsettled(survey, clusters=2) == set()
        )  # not twice, and a number is reached
        assert survey.unfit == (many, 0, 0)
        assert [merge[:2] for merge in decide(survey, OPTIONS, alone=alone).merges] == pairs


def test_only_pairs_without_a_cluster_in_common_are_merged_at_once() -> None:
    alike = [Observation(j, 20, differ((0.3,) * 4, j), 0.1) for j in range(4)]
    assert [merge[:2] for merge in decide(total(range(4), alike), OPTIONS).merges] == [(0, 1), (2, 3)]


def test_a_given_number_of_clusters_is_reached_and_kept() -> None:
    apart = [
        Observation(j, 20, differ([0.1 if i == j else 0.5 + 0.1 * abs(i - j) for i in range(4)], j), 0.1)
        for j in range(4)
    ]
    survey = total(range(4), apart)
    assert decide(survey, OPTIONS) == Plan()
    plan = decide(survey, OPTIONS, clusters=2)
    assert [merge[:2] for merge in plan.merges] == [(0, 1)]  # one only: all are worth their data
    alike = total(range(4), [Observation(j, 20, differ((0.3,) * 4, j), 0.1) for j in range(4)])
    assert decide(survey, OPTIONS, clusters=2, grown=True) == Plan()  # a by-election has found one more
    assert len(decide(alike, OPTIONS, clusters=3, grown=True).closed) == 1  # but not worth its data, it is merged
    assert len(decide(alike, OPTIONS, clusters=2).closed) == 2
    assert len(decide(alike, OPTIONS, clusters=3).closed) == 1
    assert decide(alike, OPTIONS, clusters=4) == Plan()
    deserted = total(range(4), [Observation(0, 20, differ((0.3,) * 4, 0), 0.1)])
    assert decide(deserted, OPTIONS, clusters=3) == Plan((), (3,))
    assert decide(deserted, OPTIONS) == Plan((), (1, 2, 3))


NUMBERS = st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def crowds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Observation]]:
    slots = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))))
    k = len(slots)
    said = st.builds(
        Observation,
        st.sampled_from((*slots, -1, 77)),
        st.integers(0, 10**6),
        st.tuples(*[NUMBERS] * (EXCESSES * k)) | st.just(()),
        NUMBERS,
    )
    return slots, draw(st.lists(said, max_size=8))


@settings(max_examples=60, deadline=None)
@given(crowds(), st.randoms(use_true_random=False), st.none() | st.integers(1, 5))
def test_any_tree_of_sums_decides_alike(crowd: tuple, random: object, clusters: int | None) -> None:
    slots, said = crowd
    whole = total(slots, said)
    parts = [count(slots, each) for each in said] + [nothing(slots)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    while len(parts) > 1:
        parts.append(add(parts.pop(0), parts.pop(0)))
    assert parts[0] == whole
    plan = decide(whole, OPTIONS, clusters)
    left = len(slots) - len(plan.closed)
    assert left >= min(len(slots), clusters or 1)
    assert len(set(plan.closed)) == len(plan.closed)
    for merge in plan.merges:
        assert merge.into not in plan.closed
        assert merge.into < merge.closed
        assert 0 <= merge.share <= 1
        assert math.isfinite(merge.worth)


def test_a_bank_is_merged_by_samples_and_never_takes_what_is_not_finite() -> None:
    bank = torch.tensor([[0.0, 4.0], [1.0, 1.0], [4.0, 8.0], [math.nan, 1.0]])
    merge_(bank, [Merge(0, 2, 0.25, 0.0), Merge(1, 3, 0.5, 0.0)])
    assert bank[:3].tolist() == [[1.0, 5.0], [1.0, 1.0], [4.0, 8.0]]
    broken = torch.tensor([[math.inf, 0.0], [1.0, 1.0]])
    merge_(broken, [Merge(0, 1, 0.1, 0.0)])
    assert broken[0].tolist() == [1.0, 1.0]
    stacked = torch.arange(12.0).view(2, 3, 2)
    merge_(stacked, [Merge(0, 1, 0.5, 0.0)])
    assert stacked[0].tolist() == [[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]


def test_the_loss_that_clusters_are_judged_by() -> None:
    z = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0]]])
    classes = judge(build_task("classification"), z, torch.tensor([[0, 0]]))
    assert classes.tolist() == pytest.approx([(0.25 + 0.0625) / 2])
    numbers = judge(build_task("regression"), torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[0.0], [1.0]]]))
    assert numbers.tolist() == [2.5]
    labels = judge(build_task("multilabel"), torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
    assert labels.tolist() == [0.25]
    tokens = judge(build_task("tokens"), torch.zeros(1, 1, 3, 2), torch.tensor([[[0, 1, -100]]]))
    assert tokens.tolist() == [0.25]
    assert math.isnan(float(judge(build_task("classification"), z[:, :0], torch.zeros(1, 0, dtype=torch.int64))))


def test_a_sample_goes_with_the_cluster_that_the_other_samples_choose() -> None:
    losses = torch.tensor([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [5.0, math.inf, 0.0]])
    assert choose_without(losses, 1).tolist() == [1, 1, 0]
    assert choose_without(losses[:, :1], 1).tolist() == [1]  # there are no others
    assert choose_without(torch.ones(3, 4), 2).tolist() == [0] * 4  # the lowest index on ties
    assert choose_without(torch.full((2, 2), math.nan), 1).tolist() == [0, 0]


def test_what_a_client_says_by_hand() -> None:
    plain = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.4, 0.0], [0.5, 0.5, 0.5]]).double()
    tuned = plain / 2
    averaged = torch.tensor([[0.1, 0.2, 0.3], [0.2, 0.4, 0.9], [0.1, 0.1, 0.9]]).double()
    averages = torch.stack([averaged, averaged / 4])
    found = compare(torch.stack([plain, tuned]), averages, torch.tensor([0, 0, 1]), 0, CLASSIFICATION)
    # of cluster 1: right 0.1 + 0.2 + 0.0, wrong 0.4 + 0.4 + 0.3; of cluster 2, which no sample chooses: 0.3 and 1.0
    assert found[:3] == pytest.approx((0, 0.8 / 3, 0.7 / 3))
    assert found[3:6] == pytest.approx((0, (0.55 - 0.3) / 3, (0.5 - 0.3) / 3))
    assert found[6:9] == pytest.approx((0, -0.15 / 3, -0.15 / 3))
    # the averages, on the samples that choose 0: 0.1 and 0.2, with steps half of it
    assert found[9:12] == pytest.approx((0, 0.3 - 0.15, 0.1 - 0.15))
    assert found[12:15] == pytest.approx((0, 0.3 / 4 - 0.15, 0.1 / 4 - 0.15))
    assert found[15:] == pytest.approx((0, -0.075, -0.075))
    everything = torch.zeros(3, dtype=torch.int64)
    same = plain[:1].expand(3, -1).expand(2, -1, -1)
    alike = compare(torch.stack([plain, plain]), same, everything, 0, CLASSIFICATION)
    assert alike == pytest.approx(differ(plain.mean(dim=1).tolist(), 0))
    # nobody's samples choose what it follows: then all of them count
    assert compare(torch.stack([plain, tuned]), averages, everything + 2, 0, CLASSIFICATION)[10] == pytest.approx(0.3)


def test_of_losses_without_a_bound_the_harm_is_a_share_of_both() -> None:
    losses = torch.tensor([[8.0], [9.0]], dtype=torch.float64).expand(2, -1, 4)
    averaged = torch.tensor([[8.0], [8.8]], dtype=torch.float64).expand(2, -1, 4)
    chosen = torch.zeros(4, dtype=torch.int64)
    found = compare(losses, averaged, chosen, 0, build_task("regression"))
    assert found[7] == pytest.approx(0.8 / 8.4 * TYPICAL_LOSS)  # 10 % worse than the own one
    lucky = compare(losses * 0.0, averaged, chosen, 0, build_task("regression"))
    assert lucky[7] == pytest.approx(2 * TYPICAL_LOSS)  # an own loss of 0 says no more than that
    assert compare(losses, averaged, chosen, 0, CLASSIFICATION)[7] == pytest.approx(0.8)


def harmful(harm: float, samples: int = 20) -> list[Observation]:
    """Two clusters that are worth nothing, the average of which is worse than they are."""
    excess = [(0.0, 0.0) * 3 + each for each in ((0.0, harm, 0.0, harm, 0.0, 0.0), (harm, 0.0, harm, 0.0, 0.0, 0.0))]
    return [Observation(j, samples, excess[j], 0.1) for j in (0, 1)]


def test_clusters_are_not_merged_where_their_average_is_worse() -> None:
    for harm, merged in ((HARM - 0.001, True), (HARM + 0.001, False)):
        survey = total((0, 1), harmful(harm))
        assert harms(survey)[0, 1] == pytest.approx(harm, abs=1e-6)
        assert worths(survey)[0, 1] == 0
        assert bool(decide(survey, MergeOptions()).merges) is merged
        assert decide(survey, MergeOptions(), clusters=1).merges  # where a number is given it is reached


def test_the_larger_cluster_counts_more_in_the_harm_and_who_has_no_vote_not_at_all() -> None:
    (one, _), (_, other) = harmful(0.04, 30), harmful(0.0, 90)
    assert harms(total((0, 1), [one, other]))[0, 1] == pytest.approx(0.01, abs=1e-6)
    assert harms(total((0, 1), [one, Observation(1, 90)]))[0, 1] == pytest.approx(0.04, abs=1e-6)
    assert harms(total((0, 1), [Observation(0, 30), Observation(1, 90)])) == {(0, 1): 0.0}


def test_in_an_average_a_cluster_weighs_as_much_as_it_has_followers() -> None:
    assert shares_of((6, 2, 0), 0) == [0.5, 0.25, 0.0]
    assert shares_of((0, 3), 0) == [0.0, 1.0]


def test_models_that_are_alike_do_not_seem_apart_because_each_client_chose_the_one_that_fits_its_samples() -> None:
    random = torch.Generator().manual_seed(0)
    for models, share in ((2, 0.1), (4, 0.3)):
        fair = naive = 0.0
        for _ in range(400):
            losses = torch.rand(models, 6, dtype=torch.float64, generator=random)
            follows = int(losses.mean(dim=1).argmin())
            each, chosen = losses.expand(2, -1, -1), choose_without(losses, follows)
            fair += sum(compare(each, each, chosen, follows, CLASSIFICATION)[:models])
            naive += float((losses.mean(dim=1) - losses[follows].mean()).sum())
        assert naive / 400 > 0.1
        assert abs(fair) < share * naive


def test_optimism_has_a_floor_where_losses_are_bounded() -> None:
    assert at_least(build_task("classification"), -0.3) == LEAST_OPTIMISM
    assert at_least(build_task("classification"), 0.3) == 0.3
    assert at_least(build_task("regression"), -0.3) == -0.3
    assert math.isnan(at_least(build_task("classification"), math.nan))


def test_a_client_observes_the_models_without_and_after_personal_steps() -> None:
    flat = FlatModel(make_toy_model().double(), build_task("classification"))
    x, y = torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    bank = torch.stack([flat.flatten(make_toy_model().double()) for _ in range(3)])
    local = LocalOptions(steps=0)
    asked = (0, 2), 2, (1, 3)
    plain = observe(flat, bank, *asked, (x[:8], y[:8]), (x[8:], y[8:]), local)
    assert (plain.follows, plain.samples, len(plain.excess)) == (2, 8, 2 * EXCESSES)
    assert plain.excess[:2] == plain.excess[2:4]  # no steps
    assert plain.excess[4:6] == (0, 0)
    assert plain.excess[1] == 0
    average, own = torch.lerp(bank[2], bank[0], 0.25), bank[2]
    outputs = torch.stack([infer(flat, each, x[8:], "score") for each in (average, own)])
    kept = choose_without(sample_losses(flat, bank[[0, 2]], x[8:], y[8:]), 1) == 1
    judged = judge_each(flat.task, outputs, y[8:].expand(2, -1))[:, kept if kept.any() else ~kept].mean(dim=1)
    assert plain.excess[6:8] == plain.excess[8:10] == pytest.approx((float(judged[0] - judged[1]), 0))
    tuned = observe(flat, bank, *asked, (x[:8], y[:8]), (x[:8], y[:8]), replace(local, steps=20, learning_rate=0.5))
    assert tuned.excess[2] < tuned.excess[0]
    assert tuned.excess[4] < 0
    assert tuned.optimism == LEAST_OPTIMISM  # of samples that are held out and trained on
    assert observe(flat, bank, (0, 2), 1, (1, 3), (x[:8], y[:8]), (x[8:], y[8:]), local) == Observation(1, 8)
    nobody = observe(flat, bank, *asked, (x, y), (x[:0], y[:0]), local)
    assert nobody.excess == ()


def test_a_state_forgets_what_is_closed_and_knows_what_was_merged() -> None:
    state = ClientState(
        torch.arange(8.0).view(4, 2), (0,) * 4, assignment=2, trained=2, stamps=(3, 5, 7, 1), origins=(1, 1, 1, 1),
        folded=(2, 9, 1, 4), updates=(1, 2, 3, 4), own={0: torch.zeros(2), 1: torch.zeros(2)},
    )  # fmt: skip
    after = state.merged(Plan((Merge(0, 2, 0.5, 0.1),), (3,)))
    assert after.bank[:2].tolist() == [[2.0, 3.0], [2.0, 3.0]]
    assert (after.assignment, after.trained, after.closed) == (0, 0, (2, 3))
    assert (after.stamps, after.origins) == ((7, 5, NEVER, NEVER), (MANY, 1, MANY, MANY))
    assert (after.folded, after.updates) == ((2, 9, NEVER, NEVER), (4, 2, 0, 0))
    assert list(after.own) == [1]
    assert after.with_model(2, after.bank).closed == (3,)


def surveys_of(rounds: int, merging: set[int], unsure: set[int]) -> list[int]:
    """List the rounds after which surveys are held, where those after some merge clusters, or leave some alone."""
    found, quiet = [OPTIONS.first], 0
    while True:
        now, quiet = found[-1], 0 if found[-1] in merging else quiet + 1
        if is_last(now, quiet, unsure & {now}, OPTIONS, rounds):
            return found
        found.append(now + wait_after(quiet, OPTIONS))


def test_surveys_end_with_one_that_merges_nothing_unless_it_has_left_clusters_alone() -> None:
    assert surveys_of(1000, set(), set()) == [10]
    assert surveys_of(1000, {10, 12}, set()) == [10, 12, 14]
    assert surveys_of(1000, {14}, {10}) == [10, 14, 16]
    assert surveys_of(1000, {10, 12}, {12, 14}) == [10, 12, 14, 18]
    assert surveys_of(20, {10, 12}, {14}) == [10, 12, 14]  # after three quarters of the rounds there is none
    assert surveys_of(24, set(range(24)), set()) == [10, 12, 14, 16, 18]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"opens": 1}, "opens of merging must be an integer >= 2, got 1"),
        ({"first": 2.5}, "first of merging must be an integer >= 1, got 2.5"),
        ({"worth": 0.0}, "worth of merging must be > 0, got 0.0"),
    ],
)
def test_options_say_what_is_wrong(fields: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        MergeOptions(**fields)
    with pytest.raises(ConfigError, match="merges clusters, which needs"):
        replace(algorithms.get("dfca-gi"), merging=MergeOptions())


# Surveys in both drivers.


def finish(setting: Setting) -> tuple[Simulation, list[dict]]:
    simulation, rows = Simulation(setting), []
    while not simulation.done:
        rows += [row] if (row := simulation.step()) else []
    return simulation, rows


WORLDS = {
    "k unknown": {},
    "k given": {"clusters": 2},
    "k given, more than are worth it": {"clusters": 3},
    "loop": {"engine": "loop", "graph": nx.cycle_graph(12)},
    "uneven, half of the clients": {
        "split": make_toy_split(12, samples=[3, 30, 25, 20, 30, 12, 30, 9, 30, 30, 22, 4]),
        "participation": 0.6,
    },
    "parts": {"graph": nx.disjoint_union(nx.complete_graph(9), nx.path_graph(3))},
    "batches": {"local": LocalOptions(steps=3, learning_rate=0.3, batch_size=7)},
}


SLOW = ("k given, more than are worth it", "loop", "batches")
"""Worlds that differ from others by one option; other tests see to it."""


@pytest.mark.parametrize(
    "world", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WORLDS]
)
def test_rounds_equal_lockstep(world: str) -> None:
    setting = make_world(**WORLDS[world])
    (simulation, rows), states = finish(setting), lockstep(setting)
    merging = simulation.merging
    assert merging is not None
    assert merging.over
    assert simulation.start.held is None  # the last rounds train on all samples
    assert any(line["merged"] for line in rows[-1]["merges"]) or world not in ("k unknown", "k given")
    assert [tuple(closed.nonzero()[:, 0].tolist()) for closed in merging.closed.T] == [state.closed for state in states]
    assert simulation.assignments.tolist() == [-1 if s.assignment is None else s.assignment for s in states]
    torch.testing.assert_close(simulation.banks, stack(states), rtol=1e-9, atol=1e-11)
    if setting.clusters is not None:
        assert rows[-1]["models"] == setting.clusters


def test_two_rules_are_found_whatever_was_opened() -> None:
    simulation, rows = finish(make_world())
    assert rows[-1]["cluster_accuracy"] == 1.0
    assert (rows[-1]["models"], rows[-1]["live_clusters"], simulation.models) == (2, 2, 2)
    assert set(rows[-1]["assignments"]) == {0, 1}  # numbered anew
    assert len(simulation.elections[0].centres) == 4
    assert simulation.notes == (
        "dfca-auto opened 4 clusters and merged those that are not worth their data: 2 are left",
    )
    plain = Simulation(make_world(rounds=11))  # too few rounds for surveys: the verdict decides
    assert plain.merging is None
    assert plain.start.held is None


def test_stop_and_resume_is_bit_identical() -> None:
    setting = make_world(dtype=torch.float32, participation=0.7)
    whole, stored, rows = Simulation(setting), {}, []
    while not whole.done:
        rows.append(whole.step())
        tensors, facts = whole.state()
        stored[whole.round] = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts))
    for stop in (5, 6, 7, 9):
        second = Simulation(setting)
        second.restore(*stored[stop])
        later = [second.step() for _ in range(stop, setting.rounds)]
        assert torch.equal(second.banks, whole.banks)
        for mine, theirs in zip(later, rows[stop:], strict=True):
            assert {**(mine or {}), "seconds": 0} == {**(theirs or {}), "seconds": 0}


def test_a_new_distribution_opens_a_cluster_after_the_last_survey_and_is_surveyed_again() -> None:
    before, after = make_toy_split(12, samples=60), make_toy_split(12, samples=60)
    for client in (0, 2, 4):  # from now on its labels are others
        after.train.of(client)[1].copy_((after.train.of(client)[1] + 1) % 3)
        after.test.of(client)[1].copy_((after.test.of(client)[1] + 1) % 3)
    setting = make_world(split=before, drift=(16, after), rounds=48)
    algorithm = replace(setting.algorithm, revives=True, merging=replace(setting.algorithm.merging, opens=3))
    simulation = Simulation(replace(setting, algorithm=algorithm))
    merging, left, held = simulation.merging, [], []
    assert merging is not None
    while not simulation.done:
        simulation.step()
        left.append(int((~merging.closed[:, 0]).sum()))
        held.append(simulation.start.held is not None)
    assert left[14] == 2
    opened = left.index(3, 16)
    assert held[opened]
    surveys = [line["round"] for line in merging.log]
    assert any(round == opened + 1 + algorithm.merging.first for round in surveys)
    assert left[-1] == 3
    assert not held[-1]
