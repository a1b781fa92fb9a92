"""Paired differences against published tables, brute force and simulated seeds."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfca.base import paired

# Two-sided 5 % points of Student's t, as printed in every table of it.
PUBLISHED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 19: 2.093, 29: 2.045, 120: 1.980}


@pytest.mark.parametrize(("freedom", "t"), PUBLISHED.items())
def test_quantiles_are_the_published_ones(freedom: int, t: float) -> None:
    assert round(paired.critical(freedom), 3) == t


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(6.314, 1, 0.10), (63.657, 1, 0.01), (9.925, 2, 0.01), (1.533, 4, 0.20), (4.604, 4, 0.01), (3.169, 10, 0.01)],
)
def test_tails_are_the_published_ones(t: float, freedom: int, p: float) -> None:
    assert paired.two_sided(t, freedom) == pytest.approx(p, rel=1e-3)
    assert paired.two_sided(-t, freedom) == paired.two_sided(t, freedom)


def test_tails_agree_with_numerical_integration() -> None:
    for freedom in (1, 2, 3, 4, 7, 8, 30):
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
        steps = 4000
        heights = [scale * (1 + (2.5 * i / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps + 1)]
        simpson = (
            sum(h * (1 if i in (0, steps) else 4 if i % 2 else 2) for i, h in enumerate(heights)) * 2.5 / steps / 3
        )
        assert paired.two_sided(2.5, freedom) == pytest.approx(1 - 2 * simpson, abs=1e-12)


def test_an_interval_by_hand() -> None:
    # d = 1, 2, 3: mean 2, s = 1, t(2) = 4.303, half = 4.303 / sqrt(3) = 2.484; t = 2 sqrt(3) = 3.464, p = 0.0742
    interval = paired.paired([1.0, 2.0, 3.0])
    assert (interval.mean, interval.pairs) == (2.0, 3)
    assert interval.half == pytest.approx(2.484, abs=1e-3)
    assert interval.p == pytest.approx(0.0742, abs=1e-4)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12), st.floats(-3, 3))
@settings(max_examples=60, deadline=None)
def test_an_interval_has_zero_inside_where_the_test_does_not_reject(values: list[float], shift: float) -> None:
    interval = paired.paired([value + shift for value in values])
    assert interval.p is not None
    flipped = paired.paired([-value - shift for value in values])
    assert (flipped.mean, flipped.half, flipped.p) == (-interval.mean, interval.half, interval.p)
    if interval.half is not None and interval.half > 1e-6 and abs(abs(interval.mean) - interval.half) > 1e-9:
        assert (abs(interval.mean) > interval.half) == (interval.p < paired.LEVEL)


def sign_flip(differences: list[float]) -> float:
    """Count the sign flips of the differences whose mean is at least as far from 0: the exact test by brute force."""
    seen = abs(fmean(differences))
    flips = itertools.product((1, -1), repeat=len(differences))
    far = [abs(fmean(s * d for s, d in zip(signs, differences, strict=True))) >= seen - 1e-12 for signs in flips]
    return fmean(far)


def test_p_values_are_near_those_of_all_sign_flips() -> None:
    random_ = random.Random(3)
    for _ in range(12):
        differences = [random_.gauss(0.6, 1) for _ in range(10)]
        exact, student = sign_flip(differences), paired.paired(differences).p
        assert student == pytest.approx(exact, abs=0.03), "1,024 flips; the two tests differ by little at n = 10"


def test_differences_that_are_all_alike_are_judged_by_their_signs() -> None:
    assert paired.paired([0.1] * 5) == (pytest.approx(0.1), None, sign_flip([0.1] * 5), 5), "p = 0.0625: no interval"
    assert paired.paired([0.1] * 6).half == 0.0
    assert paired.paired([0.0, 0.0]).p == 1.0
    noisy = [0.9 - 0.8, 0.7 - 0.6, 0.5 - 0.4]  # 0.1 each, up to rounding
    assert paired.paired(noisy).p == 0.25


def test_intervals_cover_the_truth_in_95_of_100_worlds() -> None:
    random_ = random.Random(0)
    draws = 2000
    hits = 0
    for _ in range(draws):
        interval = paired.paired([0.3 + random_.gauss(0, 1) for _ in range(5)])
        assert interval.half is not None
        hits += abs(interval.mean - 0.3) <= interval.half
    assert hits / draws == pytest.approx(0.95, abs=0.015)


def test_all_intervals_of_a_table_cover_their_truths_in_95_of_100_worlds() -> None:
    random_ = random.Random(1)
    draws, family = 1000, 8
    hits = 0
    for _ in range(draws):
        rows = [paired.paired([random_.gauss(0, 1) for _ in range(5)], family) for _ in range(family)]
        hits += all(row.half is not None and abs(row.mean) <= row.half for row in rows)
        assert not any((abs(row.mean) > (row.half or 0)) != paired.beyond_chance(row, family) for row in rows)
    assert 0.94 <= hits / draws <= 0.98


def test_pairing_cancels_what_the_seed_does() -> None:
    seeds = {0: 0.10, 1: 0.50, 2: 0.90, 3: 0.30, 4: 0.70}
    jitter = {0: 0.001, 1: -0.001, 2: 0.0, 3: 0.002, 4: -0.002}
    scores = {"dfca-auto": {s: v + 0.02 + jitter[s] for s, v in seeds.items()}, "other": seeds}
    compared = paired.compare(scores, "dfca-auto")["other"]
    assert compared.verdict == "worse", "2 points with a spread over seeds of 32 points"
    assert compared.difference.mean == pytest.approx(-0.02)
    assert paired.compare(scores, "dfca-auto", higher_is_better=False)["other"].verdict == "better"


def test_pairs_are_by_seed_whatever_the_order() -> None:
    first = {0: 0.5, 1: 0.7, 2: 0.9}
    second = {2: 0.8, 0: 0.4, 1: 0.6, 9: 0.0}
    assert paired.pair_up(second, first) == pytest.approx([-0.1] * 3)
    assert paired.pair_up({7: 0.5}, first) is None
    assert paired.pair_up({0: float("nan"), 1: 0.5}, first) is None, "a seed that failed is not left out"
    assert paired.pair_up({0: None, 1: 0.5}, first) is None


def test_the_reference() -> None:
    scores = {"ifca": {0: 0.9}, "local": {0: 0.5}, "oracle": {0: 0.95}}
    assert paired.choose_reference({**scores, "dfca-auto": {0: 0.1}}) == "dfca-auto"
    assert paired.choose_reference(scores) == "oracle"
    assert paired.choose_reference(scores, bounds={"oracle"}) == "ifca"
    assert paired.choose_reference(scores, higher_is_better=False) == "local"
    assert paired.choose_reference({"ifca": {0: 0.9}, "dfca-auto": {0: None}}) is None


def test_the_line_says_which_differences_are_beyond_chance() -> None:
    base = {seed: 0.8 + 0.01 * seed for seed in range(5)}
    wobble = (0.0, 0.001, -0.001, 0.002, -0.002)
    scores = {
        "dfca-auto": base,
        "local": {s: v - 0.1 + wobble[s] for s, v in base.items()},
        "oracle": {s: v + 0.05 + wobble[s] for s, v in base.items()},
        "ifca": {s: v + 10 * wobble[s] for s, v in base.items()},
    }
    compared = paired.compare(scores, "dfca-auto")
    assert paired.verdict_line("dfca-auto", compared, {"local": " ‡"}) == (
        "† beyond chance: worse than dfca-auto: local ‡; better than dfca-auto: oracle; within chance: ifca"
    )
    one = paired.compare({name: {0: by_seed[0]} for name, by_seed in scores.items()}, "dfca-auto")
    assert paired.verdict_line("dfca-auto", one, {}) is None
    assert "one seed: no interval" in paired.explanation("dfca-auto", one.values(), "accuracy", True)[0]
    assert "which is worse" in paired.explanation("dfca-auto", compared.values(), "RMSE", False)[0]
