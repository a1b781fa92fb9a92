"""Differences between algorithms, paired by seed: intervals, and which of them are beyond chance.

The same seed has the same split and graph, so what two algorithms scored with it is a pair, and what the seed did to
both cancels. Of n differences d with mean m and sample standard deviation s, in a table of f comparisons:

    interval   m ± t(n - 1) s / sqrt(n)      t: the two-sided point of Student's distribution for 5 % / f
    p          P(|T| >= |m| sqrt(n) / s)

All intervals of a table hold together with 95 % (Bonferroni), and a difference is beyond chance where its interval
does not contain 0: p <= 5 % / f.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

LEVEL = 0.05
FIRST_CHOICE = "dfca-auto"
BEYOND_CHANCE = "†"  # stands behind a difference that is beyond chance
Scores = Mapping[int, float | None]
"""What an algorithm scored with each seed."""
Verdict = Literal["better", "worse", "within chance"]


class Difference(NamedTuple):
    """The mean of paired differences."""

    mean: float
    half: float | None  # of its interval; None with one pair, or where equal differences are too few to give one
    p: float | None
    pairs: int


class Compared(NamedTuple):
    """How an algorithm compares with the reference."""

    difference: Difference
    verdict: Verdict | None  # by the interval, None with one pair

    @property
    def beyond_chance(self) -> bool:
        return self.verdict in ("better", "worse")


def two_sided(t: float, freedom: int) -> float:
    """Return P(|T| >= t) of Student's distribution.

    >>> round(two_sided(12.706, 1), 4), round(two_sided(2.776, 4), 4)
    (0.05, 0.05)
    """
    from scipy.special import stdtr

    return 2 * float(stdtr(freedom, -abs(t)))


def critical(freedom: int, level: float = LEVEL) -> float:
    """Return the t that |T| exceeds with probability `level`.

    >>> round(critical(1), 3), round(critical(4), 3), round(critical(4, LEVEL / 10), 3)
    (12.706, 2.776, 5.598)
    """
    from scipy.special import stdtrit

    return -float(stdtrit(freedom, level / 2))


def paired(differences: Sequence[float], family: int = 1) -> Difference:
    """Test the mean of paired differences against 0; family: the comparisons whose intervals hold together.

    Differences that are all alike have no spread to measure by, and scores are counts of samples, so this happens by
    chance. Then p is that of the signs: all of n the same way, 2 / 2^n.
    """
    n, level = len(differences), LEVEL / family
    mean = fmean(differences)
    if n < 2:
        return Difference(mean, None, None, n)
    error = stdev(differences) / math.sqrt(n)
    if error <= 1e-9 * max(map(abs, differences)):  # alike, up to rounding
        p = 2.0 ** (1 - n) if mean else 1.0
        return Difference(mean, 0.0 if p <= level or not mean else None, p, n)
    return Difference(mean, critical(n - 1, level) * error, two_sided(mean / error, n - 1), n)


def beyond_chance(difference: Difference, family: int = 1) -> bool:
    """Return whether a difference is beyond chance in a table of `family` comparisons."""
    return difference.p is not None and difference.p <= LEVEL / family


def pair_up(scores: Scores, reference: Scores) -> list[float] | None:
    """Return the differences by seed to the reference, over the seeds of both; None where a score is not finite.

    To leave such a seed out would favour the algorithm that failed with it.
    """
    pairs = [(scores[seed], reference[seed]) for seed in scores if seed in reference]
    made = [one - other for one, other in pairs if one is not None and other is not None]
    return made if made and len(made) == len(pairs) and all(map(math.isfinite, made)) else None


def pairs_with(scores: Mapping[str, Scores], reference: str) -> dict[str, list[float]]:
    """Return the differences by seed of every algorithm to the reference; without a common seed it is left out."""
    pairs = {name: pair_up(own, scores[reference]) for name, own in scores.items() if name != reference}
    return {name: differences for name, differences in pairs.items() if differences is not None}


def family_of(pairs: Iterable[Sequence[float]]) -> int:
    """Count the comparisons of a table that can be tested, at least 1."""
    return max(1, sum(len(differences) > 1 for differences in pairs))


def compare(
    scores: Mapping[str, Scores], reference: str, higher_is_better: bool = True, family: int | None = None
) -> dict[str, Compared]:
    """Compare every algorithm with the reference by the scores of each seed; without a common seed it is left out.

    family: the number of comparisons of the whole table; None: those made here.
    """
    pairs = pairs_with(scores, reference)
    family = family or family_of(pairs.values())
    tested = {name: paired(differences, family) for name, differences in pairs.items()}
    return {name: Compared(test, _verdict(test, family, higher_is_better)) for name, test in tested.items()}


def _verdict(difference: Difference, family: int, higher_is_better: bool) -> Verdict | None:
    if difference.p is None:
        return None
    if not beyond_chance(difference, family):
        return "within chance"
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
    best = "" if reference.lower() == FIRST_CHOICE else ", which is the best here"
    signs = "" if higher_is_better else f"; + is more {metric}, which is worse"
    if all(difference.p is None for difference in differences):
        return [f"minus {reference}: difference to {reference}{best}{signs}; one seed: no interval, it may be chance"]
    family = sum(difference.p is not None for difference in differences)
    return [
        f"minus {reference}: mean difference to {reference}{best}, paired by seed (same data and graph){signs}; "
        f"{intervals_line(family)}"
    ]


def intervals_line(family: int) -> str:
    """Say in a line how the intervals and daggers of a table are to be read.

    >>> intervals_line(7)
    '± half of its 95 % interval, adjusted for the 7 comparisons of this table; † the interval does not contain 0'
    """
    adjusted = f", adjusted for the {family} comparisons of this table" if family > 1 else ""
    return f"± half of its 95 % interval{adjusted}; {BEYOND_CHANCE} the interval does not contain 0"


def verdict_line(reference: str, compared: Mapping[str, Compared], marks: Mapping[str, str]) -> str | None:
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
    if level := listed("within chance"):
        told.append(f"within chance: {level}")
    return f"{BEYOND_CHANCE} beyond chance: {'; '.join(told)}"
