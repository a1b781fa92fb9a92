"""Differences between algorithms, paired by seed: intervals, and which of them are beyond chance.

The same seed has the same split and graph, so what two algorithms scored with it is a pair, and what the seed did to
both cancels. Of n differences d with mean m and sample standard deviation s:

    interval   m ± t(n - 1) s / sqrt(n)      t: the two-sided 95 % point of Student's distribution
    p          P(|T| >= |m| sqrt(n) / s)

Several algorithms against one reference are several tests: Holm's step-down keeps the chance of any false claim at 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Literal, NamedTuple

LEVEL = 0.05
FIRST_CHOICE = "dfca-auto"
BEYOND_CHANCE = "†"  # stands behind a difference that is beyond chance
Scores = Mapping[int, float | None]
"""What an algorithm scored with each seed."""
Verdict = Literal["better", "worse", "not told apart"]


class Difference(NamedTuple):
    """The mean of paired differences."""

    mean: float
    half: float | None  # of its 95 % interval; None with one pair
    p: float | None
    pairs: int


class Compared(NamedTuple):
    """How an algorithm compares with the reference."""

    difference: Difference
    verdict: Verdict | None  # after Holm's correction, None with one pair

    @property
    def beyond_chance(self) -> bool:
        """Whether the two differ beyond chance."""
        return self.verdict in ("better", "worse")


def two_sided(t: float, freedom: int) -> float:
    """Return P(|T| >= t) of Student's distribution, by its finite sums for a whole number of degrees of freedom.

    With theta = atan(t / sqrt(freedom)), P(|T| < t) is (Abramowitz and Stegun, 26.7.3 and 26.7.4)
        odd    2/pi (theta + sin(theta) (cos(theta) + 2/3 cos^3(theta) + 2 4 / (3 5) cos^5(theta) + ...))
        even   sin(theta) (1 + 1/2 cos^2(theta) + 1 3 / (2 4) cos^4(theta) + ...)
    up to the power freedom - 2.

    >>> round(two_sided(12.706, 1), 4), round(two_sided(2.776, 4), 4)
    (0.05, 0.05)
    """
    theta = math.atan(abs(t) / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(theta) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(theta) ** 2 * (power + 1) / (power + 2)
    inside = math.sin(theta) * total
    return max(0.0, 1 - (2 / math.pi * (theta + inside) if odd else inside))


@lru_cache(maxsize=256)
def critical(freedom: int) -> float:
    """Return the t that |T| exceeds with probability 5 %, by bisection to the last bits.

    >>> round(critical(1), 3), round(critical(4), 3)
    (12.706, 2.776)
    """
    low, high = 0.0, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > LEVEL else (low, middle)
    return (low + high) / 2


def paired(differences: Sequence[float]) -> Difference:
    """Test the mean of paired differences against 0.

    Differences that are all alike have no spread to measure by, and scores are counts of samples, so this happens by
    chance. Then p is that of the signs: all of n the same way, 2 / 2^n.

    Raises ValueError without any difference.
    """
    n = len(differences)
    mean = fmean(differences)
    if n < 2:
        return Difference(mean, None, None, n)
    error = stdev(differences) / math.sqrt(n)
    if error <= 1e-9 * max(map(abs, differences)):  # alike, up to rounding
        return Difference(mean, 0.0, 2.0 ** (1 - n) if mean else 1.0, n)
    return Difference(mean, critical(n - 1) * error, two_sided(mean / error, n - 1), n)


def pair_up(scores: Scores, reference: Scores) -> list[float] | None:
    """Return the differences by seed to the reference, over the seeds of both; None where a score is not finite.

    To leave such a seed out would favour the algorithm that failed with it.
    """
    pairs = [(scores[seed], reference[seed]) for seed in scores if seed in reference]
    made = [one - other for one, other in pairs if one is not None and other is not None]
    return made if made and len(made) == len(pairs) and all(map(math.isfinite, made)) else None


def holm(ps: Mapping[str, float]) -> set[str]:
    """Return which hypotheses are rejected at 5 % for all of them together, by Holm's step-down.

    >>> sorted(holm({"a": 0.01, "b": 0.03, "c": 0.02}))
    ['a', 'b', 'c']
    """
    rejected: set[str] = set()
    for number, name in enumerate(sorted(ps, key=ps.__getitem__)):
        if ps[name] > LEVEL / (len(ps) - number):
            break
        rejected.add(name)
    return rejected


def compare(scores: Mapping[str, Scores], reference: str, higher_is_better: bool = True) -> dict[str, Compared]:
    """Compare every algorithm with the reference by the scores of each seed; without a common seed it is left out."""
    pairs = {name: pair_up(own, scores[reference]) for name, own in scores.items() if name != reference}
    tested = {name: paired(differences) for name, differences in pairs.items() if differences is not None}
    rejected = holm({name: test.p for name, test in tested.items() if test.p is not None})
    return {name: Compared(test, _verdict(test, name in rejected, higher_is_better)) for name, test in tested.items()}


def _verdict(difference: Difference, rejected: bool, higher_is_better: bool) -> Verdict | None:
    if difference.p is None:
        return None
    if not rejected:
        return "not told apart"
    return "better" if (difference.mean > 0) == higher_is_better else "worse"


def choose_reference(
    scores: Mapping[str, Scores], higher_is_better: bool = True, bounds: Collection[str] = ()
) -> str | None:
    """Choose what the others are compared with: dfca-auto where it is there, else the best mean.

    bounds: algorithms that know the true clusters, which are not methods. None: there are fewer than two algorithms.
    """
    means = {name: _mean(own) for name, own in scores.items()}
    known = {name: mean for name, mean in means.items() if mean is not None}
    if len(known) < 2:
        return None
    if FIRST_CHOICE in known:
        return FIRST_CHOICE
    methods = {name: mean for name, mean in known.items() if name not in bounds} or known
    return max(methods, key=lambda name: methods[name] if higher_is_better else -methods[name])


def quoted(name: str) -> str:
    """Write the name of an algorithm for a list of names: in quotes where it has a comma of its own.

    >>> quoted("dfca-auto"), quoted("fedavg, momentum 0.9")
    ('dfca-auto', '"fedavg, momentum 0.9"')
    """
    return f'"{name}"' if "," in name else name


def _mean(scores: Scores) -> float | None:
    values = [value for value in scores.values() if value is not None and math.isfinite(value)]
    return fmean(values) if values else None


def explanation(reference: str, compared: Iterable[Compared], metric: str, higher_is_better: bool) -> list[str]:
    """Say how differences to the reference are to be read; nothing where there are none."""
    differences = [result.difference for result in compared]
    if not differences:
        return []
    best = "" if reference == FIRST_CHOICE else ", which is the best here"
    signs = "" if higher_is_better else f"; + is more {metric}, which is worse"
    if all(difference.half is None for difference in differences):
        return [f"minus {reference}: difference to {reference}{best}{signs}; one seed: no interval, it may be chance"]
    return [
        f"minus {reference}: mean difference to {reference}{best}, paired by seed (same data and graph), ± half of its "
        f"95 % confidence interval (Student t){signs}"
    ]


def verdict_line(
    reference: str, compared: Mapping[str, Compared], marks: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """Say which differences to the reference are beyond chance; None where no seeds were paired.

    marks: what stands behind the name of some algorithms.
    """
    judged = {name: result.verdict for name, result in compared.items() if result.verdict is not None}
    if not judged:
        return None

    def listed(verdict: Verdict) -> str:
        return ", ".join(quoted(name) + marks.get(name, "") for name, own in judged.items() if own == verdict)

    told = [f"{verdict} than {reference}: {listed(verdict)}" for verdict in ("worse", "better") if listed(verdict)]
    told = told or ["none"]
    if level := listed("not told apart"):
        told.append(f"not told apart from {reference}: {level}")
    number = f"Holm over {len(judged)} comparisons" if len(judged) > 1 else "one comparison"
    return f"{BEYOND_CHANCE} beyond chance (95 %, {number}): {'; '.join(told)}"
