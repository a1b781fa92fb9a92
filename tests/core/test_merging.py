"""Which clusters are worth their data: closed forms, the record that is summed, and surveys in both drivers."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

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
    NOBODY,
    TYPICAL_LOSS,
    Merge,
    MergeOptions,
    Observation,
    Opinion,
    Plan,
    Poll,
    Survey,
    add,
    at_least,
    choose_without,
    compare,
    count,
    count_opinion,
    decide,
    differ,
    harms,
    judge,
    judge_each,
    merge_,
    observe,
    observe_in_slices,
    pair_up,
    poll,
    share_of,
    total,
    unsettled,
    worths,
)
from dfca.core.rules.relay import MANY, NEVER
from dfca.core.rules.surveys import LAG, is_last, wait_after
from dfca.core.state import ClientState
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.testing import lockstep, stack

OPTIONS = MergeOptions()


Heard = tuple[Poll, Survey, tuple[int, ...]]


def ask(slots: Sequence[int], said: Sequence[tuple[Opinion, Observation | None]], alone: Collection[int] = ()) -> Heard:
    """What a survey hears, and who is whose partner."""
    heard = poll(slots, (opinion for opinion, _ in said))
    return heard, total(slots, (seen for _, seen in said if seen is not None)), pair_up(heard, alone)


def alike(*follows: int, samples: int = 20, unfit: bool = False, k: int = 4) -> list[tuple[Opinion, Observation]]:
    """Followers of clusters that do not differ."""
    return [(Opinion(j, samples, (0.3,) * k, unfit), Observation(j, differ(0.3, 0.3), 0.1)) for j in follows]


def pair(bias: float, n: int = 40, m: int = 40, optimism: float = 0.1) -> Heard:
    """Two clusters with two followers each, who find the other model worse by `bias`."""
    first = Opinion(0, n // 2, (0.3, 0.3 + bias)), Observation(0, differ(0.3, 0.3 + bias), optimism)
    second = Opinion(1, m // 2, (0.2 + bias, 0.2)), Observation(1, differ(0.2, 0.2 + bias), optimism)
    return ask((0, 1), [first, first, second, second])


def test_worth_by_hand() -> None:
    # c = mean of 40 x 0.1 / 2 and 60 x 0.1 / 2 = 2.5; n m / (n + m) = 24; B = 0.05
    assert worths(*pair(0.05, 40, 60))[0, 1] == pytest.approx(24 * 0.05 / 2.5, abs=1e-6)
    uneven = [
        (Opinion(0, 40), Observation(0, differ(0.3, 0.4), 0.1)),
        (Opinion(1, 60), Observation(1, (0.0,) * EXCESSES, 0.1)),
    ]  # 1 sees no difference
    assert worths(*ask((0, 1), uneven))[0, 1] == pytest.approx(24 * 0.05 / 2.5, abs=1e-6)


def test_each_model_is_judged_with_as_many_personal_steps_as_suit_it() -> None:
    def worth(wrong: float, tuned: float, right: float) -> float:
        said = [
            (Opinion(j, samples), Observation(j, (wrong, tuned, right, 0.0, 0.0, 0.0), 0.1))
            for j, samples in ((0, 40), (1, 60))
        ]
        return worths(*ask((0, 1), said))[0, 1] / (24 / 2.5)

    assert worth(0.4, 0.05, 0.02) == pytest.approx(0.05)  # steps help the other model, and would harm one's own
    assert worth(0.4, 0.05, -0.02) == pytest.approx(0.07)  # they help both
    assert worth(0.01, 0.05, 0.02) == pytest.approx(0.01)  # they harm both


def test_a_cluster_that_is_worth_its_data_stays_and_another_is_merged() -> None:
    assert decide(*pair(0.2), OPTIONS) == Plan()
    plan = decide(*pair(0.02, 30, 90), OPTIONS)
    assert plan.closed == (1,)
    (merge,) = plan.merges
    assert (merge.into, merge.closed, merge.share) == (0, 1, 0.75)
    assert merge.worth < OPTIONS.worth


def test_models_without_optimism_cost_nothing_so_that_any_difference_is_worth_a_cluster() -> None:
    assert decide(*pair(0.001, optimism=-0.1), OPTIONS) == Plan()
    assert decide(*pair(-0.001, optimism=-0.1), OPTIONS).closed == (1,)


def test_a_cluster_without_followers_is_closed_and_one_without_votes_is_not_worth_it() -> None:
    silent = [(Opinion(0, 3), None), (Opinion(4, 4), None), (Opinion(4, 4), None)]
    plan = decide(*ask((0, 2, 4), silent), OPTIONS)
    assert plan == Plan((Merge(0, 4, 8 / 11, 0.0),), (2,))
    assert plan.closed == (2, 4)


def test_a_cluster_is_left_alone_while_the_losses_of_a_quarter_of_its_followers_have_risen() -> None:
    for many, pairs in ((0, [(0, 1)]), (1, [(0, 1)]), (2, [(1, 2)])):
        said = [*alike(0, 0, 0, 1, 2, k=3), *alike(*[0] * many, unfit=True, k=3)]
        heard, *_ = ask(range(3), said)
        assert (alone := unsettled(heard)) == ({0} if many == 2 else set())
        assert unsettled(heard, quiet=1) == set()  # not twice
        assert heard.unfit == (many, 0, 0)
        assert [merge[:2] for merge in decide(*ask(range(3), said, alone), OPTIONS).merges] == pairs


def test_every_cluster_has_one_partner_at_most_the_closest_pairs_first() -> None:
    rows = [(0.1, 0.2, 0.9, 0.9, 0.9), (0.2, 0.1, 0.3, 0.9, 0.9), (0.9, 0.3, 0.1, 0.8, 0.9), (0.9, 0.9, 0.8, 0.1, 0.9)]
    said = [Opinion(2 * j, 20, row) for j, row in enumerate(rows)]
    slots = (0, 2, 4, 6, 8)  # nobody follows the last
    assert pair_up(poll(slots, said)) == (2, 0, 6, 4, NOBODY)
    assert pair_up(poll(slots, said), asked=1) == (6, 4, 2, 0, NOBODY)  # others than before
    assert pair_up(poll(slots, said), asked=2) == (4, 6, 0, 2, NOBODY)
    assert pair_up(poll(slots, said), asked=3) == pair_up(poll(slots, said))  # all were asked about
    assert pair_up(poll(slots, said), alone={2}) == (NOBODY, NOBODY, 6, 4, NOBODY)
    large = [said[0], said[1]._replace(samples=2000), *said[2:]]  # what many samples tell is worth more
    assert pair_up(poll(slots, large)) == (2, 0, 6, 4, NOBODY)
    assert pair_up(poll((0, 2), [Opinion(0, 5), Opinion(2, 5)])) == (2, 0)  # nobody has looked
    assert pair_up(poll((3,), [Opinion(3, 5)])) == (NOBODY,)


def test_losses_that_are_not_finite_or_of_other_clusters_count_for_nothing() -> None:
    for losses in ((0.1, math.nan), (0.1, math.inf), (0.1,), ()):
        heard = count_opinion((0, 1), Opinion(0, 7, losses))
        assert (heard.followers, heard.samples, heard.voters, heard.excess) == ((1, 0), (7, 0), (0, 0), (0,) * 4)
    assert count_opinion((0, 1), Opinion(5, 7, (0.1, 0.2))).followers == (0, 0)


def test_only_pairs_without_a_cluster_in_common_are_merged_at_once() -> None:
    assert [merge[:2] for merge in decide(*ask(range(4), alike(*range(4))), OPTIONS).merges] == [(0, 1), (2, 3)]


def test_one_cluster_is_left_where_others_have_no_followers() -> None:
    assert decide(*ask(range(4), alike(0)), OPTIONS) == Plan((), (1, 2, 3))
    assert decide(*ask(range(4), alike(2)), OPTIONS) == Plan((), (0, 1, 3))
    assert decide(*ask(range(4), []), OPTIONS) == Plan((), (1, 2, 3))


NUMBERS = st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf, -math.inf])


Said = tuple[Opinion, Observation]


@st.composite
def crowds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Said]]:
    slots = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))))
    follows, samples = st.sampled_from((*slots, -1, 77)), st.integers(0, 10**6)
    losses = st.tuples(*[NUMBERS] * len(slots)) | st.just(())
    excess = st.tuples(*[NUMBERS] * EXCESSES) | st.just(())
    said = st.tuples(
        st.builds(Opinion, follows, samples, losses, st.booleans()), st.builds(Observation, follows, excess, NUMBERS)
    )
    return slots, draw(st.lists(said, max_size=8))


def summed(parts: list[Any], random: Any) -> Any:
    random.shuffle(parts)
    while len(parts) > 1:
        parts.append(add(parts.pop(0), parts.pop(0)))
    return parts[0]


@settings(max_examples=60, deadline=None)
@given(crowds(), st.randoms(use_true_random=False))
def test_any_tree_of_sums_decides_alike(crowd: tuple, random: object) -> None:
    slots, said = crowd
    heard, survey, partners = ask(slots, said)
    assert summed([count_opinion(slots, opinion) for opinion, _ in said] + [poll(slots, ())], random) == heard
    assert summed([count(slots, seen) for _, seen in said] + [total(slots, ())], random) == survey
    for place, partner in enumerate(partners):
        assert partner == NOBODY or partners[slots.index(partner)] == slots[place] != partner
    plan = decide(heard, survey, partners, OPTIONS)
    assert len(plan.closed) < len(slots)
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


def test_a_sample_is_of_the_cluster_that_the_other_samples_choose() -> None:
    losses = torch.tensor([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [5.0, math.inf, 0.0]])
    assert choose_without(losses, 1).tolist() == [1, 1, 0]
    assert choose_without(losses[:, :1], 1).tolist() == [1]  # there are no others
    assert choose_without(torch.ones(3, 4), 2).tolist() == [0] * 4  # the lowest index on ties
    assert choose_without(torch.full((2, 2), math.nan), 1).tolist() == [0, 0]


def test_the_observation_of_a_client_by_hand() -> None:
    own, partner, average = [0.1, 0.2, 0.3], [0.4, 0.4, 0.0], [0.2, 0.4, 0.9]
    plain = torch.tensor([own, partner, average], dtype=torch.float64)
    losses = torch.stack([plain, torch.stack([plain[0] / 2, plain[1] / 2, plain[2] / 4])])
    said = compare(losses, torch.tensor([0, 0, 1]), CLASSIFICATION)
    # right 0.1 + 0.2 + 0.0, wrong 0.4 + 0.4 + 0.3; with steps half of it
    assert said[:3] == pytest.approx((0.8 / 3, (0.55 - 0.3) / 3, -0.15 / 3))
    # the average on the samples that choose the own one, 0.1 and 0.2
    assert said[3:] == pytest.approx((0.3 - 0.15, 0.3 / 4 - 0.15, -0.075))
    same = torch.stack([plain, plain])
    same[:, 2] = plain[0]
    assert compare(same, torch.zeros(3), CLASSIFICATION) == pytest.approx(differ(0.2, 0.8 / 3))
    # nobody's samples choose what it follows: then all of them count
    assert compare(losses, torch.ones(3), CLASSIFICATION)[3] == pytest.approx(0.5 - 0.2)


def test_of_losses_without_a_bound_the_harm_is_a_share_of_both() -> None:
    losses = torch.tensor([[8.0], [9.0], [8.8]], dtype=torch.float64).expand(2, -1, 4)
    chosen = torch.zeros(4, dtype=torch.int64)
    assert compare(losses, chosen, build_task("regression"))[3] == pytest.approx(0.8 / 8.4 * TYPICAL_LOSS)  # 10 % worse
    lucky = losses.clone()
    lucky[:, :2] = 0.0
    assert compare(lucky, chosen, build_task("regression"))[3] == pytest.approx(2 * TYPICAL_LOSS)  # and no more
    assert compare(losses, chosen, CLASSIFICATION)[3] == pytest.approx(0.8)


def harmful(harm: float, samples: int = 20) -> list[tuple[Opinion, Observation]]:
    """Two clusters that are worth nothing, the average of which is worse than they are."""
    excess = (0.0, 0.0, 0.0, harm, harm, 0.0)
    return [(Opinion(j, samples), Observation(j, excess, 0.1)) for j in (0, 1)]


def test_clusters_are_not_merged_where_their_average_is_worse() -> None:
    for harm, merged in ((HARM - 0.001, True), (HARM + 0.001, False)):
        survey = ask((0, 1), harmful(harm))
        assert harms(*survey)[0, 1] == pytest.approx(harm, abs=1e-6)
        assert worths(*survey)[0, 1] == 0
        assert bool(decide(*survey, MergeOptions()).merges) is merged


def test_the_larger_cluster_counts_more_in_the_harm_and_a_client_without_a_vote_not_at_all() -> None:
    (one, _), (_, other) = harmful(0.04, 30), harmful(0.0, 90)
    assert harms(*ask((0, 1), [one, other]))[0, 1] == pytest.approx(0.01, abs=1e-6)
    assert harms(*ask((0, 1), [one, (Opinion(1, 90), None)]))[0, 1] == pytest.approx(0.04, abs=1e-6)
    assert harms(*ask((0, 1), [(Opinion(0, 30), None), (Opinion(1, 90), None)])) == {(0, 1): 0.0}


def test_in_an_average_a_cluster_weighs_as_much_as_it_has_followers() -> None:
    assert [share_of(6, 2), share_of(6, 0), share_of(0, 3), share_of(0, 0)] == [0.25, 0.0, 1.0, 0.0]


def test_models_that_are_alike_do_not_seem_apart_because_each_client_chose_the_one_that_fits_its_samples() -> None:
    random = torch.Generator().manual_seed(0)
    fair = naive = 0.0
    for _ in range(400):
        losses = torch.rand(2, 6, dtype=torch.float64, generator=random)
        order = losses.mean(dim=1).argsort()
        losses = losses[order]  # the first is the one that it follows
        judged = torch.cat([losses, losses[:1]]).expand(2, -1, -1)
        fair += compare(judged, choose_without(losses, 0), CLASSIFICATION)[0]
        naive += float(losses[1].mean() - losses[0].mean())
    assert naive / 400 > 0.1
    assert abs(fair) < 0.1 * naive


def test_optimism_has_a_floor_where_losses_are_bounded() -> None:
    assert at_least(build_task("classification"), -0.3) == LEAST_OPTIMISM
    assert at_least(build_task("classification"), 0.3) == 0.3
    assert at_least(build_task("regression"), -0.3) == -0.3
    assert math.isnan(at_least(build_task("classification"), math.nan))


def test_a_client_observes_the_models_without_and_after_personal_steps() -> None:
    flat = FlatModel(make_toy_model().double(), build_task("classification"))
    x, y = torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    own, other = (flat.flatten(make_toy_model().double()) for _ in range(2))
    local, held = LocalOptions(steps=0), (x[8:], y[8:])
    plain, _ = observe(flat, own, other, 0.25, (x[:8], y[:8]), held, local)
    assert len(plain) == EXCESSES
    assert plain[0] == plain[1]  # no steps
    assert plain[2] == 0
    average = torch.lerp(own, other, 0.25)
    outputs = torch.stack([infer(flat, vector, held[0], "score") for vector in (average, own)])
    kept = choose_without(sample_losses(flat, torch.stack([own, other]), *held), 0) == 0
    judged = judge_each(flat.task, outputs, held[1].expand(2, -1))[:, kept if kept.any() else ~kept].mean(dim=1)
    assert plain[3:5] == pytest.approx((float(judged[0] - judged[1]),) * 2)
    steps = replace(local, steps=20, learning_rate=0.5)
    tuned, optimism = observe(flat, own, other, 0.25, (x[:8], y[:8]), (x[:8], y[:8]), steps)
    assert tuned[1] < tuned[0]
    assert tuned[2] < 0
    assert optimism == LEAST_OPTIMISM  # of samples that are held out and trained on


def test_an_observation_in_slices_is_the_same() -> None:
    flat = FlatModel(make_toy_model().double(), build_task("classification"))
    x, y = torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    own, other = (flat.flatten(make_toy_model().double()) for _ in range(2))
    given = flat, own, other, 0.25, (x[:8], y[:8]), (x[8:], y[8:]), LocalOptions(steps=7, learning_rate=0.3)
    *pieces, judged = observe_in_slices(*given, 2)
    assert pieces == [None] * 12  # 2 + 2 + 2 + 1 steps of three models
    assert judged == observe(*given)


def test_an_observer_takes_150_local_steps() -> None:
    flat = FlatModel(make_toy_model().double(), build_task("classification"))
    x, y = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    own, local = flat.flatten(make_toy_model().double()), LocalOptions(steps=MergeOptions().steps)
    *steps, _ = observe_in_slices(flat, own, own, 0.5, (x, y), (x, y), local, 1)
    assert len(steps) == 150


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
    """List the rounds after which surveys begin, where some merge clusters, or leave some alone."""
    begun, quiet = [OPTIONS.first], 0
    while True:
        now, quiet = begun[-1], 0 if begun[-1] in merging else quiet + 1
        if is_last(now + LAG, quiet, unsure & {now}, OPTIONS, rounds):
            return begun
        begun.append(now + LAG + wait_after(quiet, OPTIONS))


def test_surveys_end_with_the_second_in_a_row_that_merges_nothing_unless_it_has_left_clusters_alone() -> None:
    assert surveys_of(1000, set(), set()) == [10, 15]
    assert surveys_of(1000, {10, 13}, set()) == [10, 13, 16, 21]
    assert surveys_of(1000, {15}, {10}) == [10, 15, 18, 23]
    assert surveys_of(1000, {10}, {13, 18}) == [10, 13, 18, 23]
    assert surveys_of(20, {10, 13}, {14}) == [10, 13]  # what would take effect after three quarters is not held
    assert surveys_of(24, set(range(24)), set()) == [10, 13, 16]


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
    "loop": {"engine": "loop", "graph": nx.cycle_graph(12)},
    "uneven, half of the clients": {
        "split": make_toy_split(12, samples=[3, 30, 25, 20, 30, 12, 30, 9, 30, 30, 22, 4]),
        "participation": 0.6,
    },
    "parts": {"graph": nx.disjoint_union(nx.complete_graph(9), nx.path_graph(3))},
    "batches": {"local": LocalOptions(steps=3, learning_rate=0.3, batch_size=7)},
}


SLOW = ("loop", "batches")
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
    assert any(line["merged"] for line in rows[-1]["merges"]) or world != "k unknown"
    assert [tuple(closed.nonzero()[:, 0].tolist()) for closed in merging.closed.T] == [state.closed for state in states]
    assert simulation.assignments.tolist() == [-1 if s.assignment is None else s.assignment for s in states]
    torch.testing.assert_close(simulation.banks, stack(states), rtol=1e-9, atol=1e-11)


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
    given = Simulation(make_world(clusters=3))
    assert len(given.elections[0].centres) == given.models == 3
    assert given.merging is None


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
    assert any(round == opened + 1 + algorithm.merging.first + LAG for round in surveys)
    assert left[-1] == 3
    assert not held[-1]
