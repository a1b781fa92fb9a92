"""Farthest-first election of the k starting models, without a server; the clients also decide k.

Every client i splits its samples into three parts, warms up one model theta_i on the first (all from the same start),
and the clients elect centres one by one. L_i(theta) is the mean loss of theta on a held-out part of client i.

  first centre   by lot: the smallest hash of (seed, id)                                   min-consensus on one scalar
  bid            regret_i = min_c L_i(c) - L_i(theta_i) minus its standard error           max-consensus on one scalar
  candidate m    the client with the largest bid; its theta_m is flooded along the graph   one model per client
  vote           every client says which centre it follows, whether it prefers m, and on the third part of its samples,
                 which had no say so far, the sums of d_c = L(c) - L(theta_m) for every centre c      scalars, summed
  verdict        one client has the sums of all votes and decides (`decide` below)

The verdict tests for every centre c whether the clients that prefer m (movers) have a larger mean d_c than the
followers of c that stay, by more than chance at `level` explains, and whether m helps at least `support` clients. So a
candidate from a cluster that has a centre already is accepted with probability `level` (docs/auto.md says why).

**Bounded votes** (`ElectionOptions.bounded`, where clients guard against liars): d_c is in units of the voter's own
losses and clipped to [-1, 1], a vote counts at most MOST_SAMPLES samples, and sums that a group of voters cannot have
said (`is_sayable`) are not added. An election tolerates ceil(LIAR_SHARE voters) more rejected candidates, for liars bid
as they like. A centre at which nobody stays is no obstacle, and a candidate that all but as many voters prefer is
accepted: a liar that won the lot for the first centre has opened one that fits nobody.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add as plus
from operator import mul
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.base.errors import DataError
from dfca.core.method import ElectionOptions as ElectionOptions

SCALE = 2**32  # sums of losses travel in units of 1 / SCALE
LIMIT = 2**50  # the largest sum of one client: no client outweighs the others by a loss that exploded
MOST_SAMPLES = 20
"""Largest number of samples that a bounded vote counts: nobody can check it. With 1000, one of 30 members that claims
to have them (the others have 18) outvotes all that stay, and no cluster opens."""


class Parts(NamedTuple):
    """Indices of a client's samples."""

    warm: Tensor  # to warm up on
    bid: Tensor  # to bid and prefer with
    vote: Tensor  # to vote with


class Vote(NamedTuple):
    """What one client says of a candidate: a few scalars."""

    follows: int  # the centre that it follows
    gain: float  # how much lower the candidate's loss is on the bidding part
    left: float  # regret that would remain with the better of the two
    samples: int  # n on the voting part
    totals: tuple[float, ...]  # sum d_c there, for every centre
    squares: tuple[float, ...]  # sum d_c^2


class Tally(NamedTuple):
    """The votes of some clients on a candidate, summed; losses in fixed point: any order of adding is the same."""

    voters: int
    movers: int  # clients that prefer the candidate
    samples: int  # theirs
    totals: tuple[int, ...]  # by centre
    squares: tuple[int, ...]
    followers: tuple[int, ...]  # of every centre, movers included
    stay_samples: tuple[int, ...]  # the same sums over the followers of a centre that stay
    stay_totals: tuple[int, ...]
    stay_squares: tuple[int, ...]
    unfit: tuple[int, ...]  # followers of a centre that neither it nor the candidate fits
    unfit_samples: tuple[int, ...]  # the same sums over them
    unfit_totals: tuple[int, ...]
    unfit_squares: tuple[int, ...]


class Verdict(NamedTuple):
    """What everybody concludes from the votes."""

    accepted: bool
    support: int  # clients that prefer the candidate
    z: float  # smallest of the statistics, one per centre


def divide(samples: int, generator: torch.Generator) -> Parts:
    """Split a client's samples 50 : 20 : 30, at least one in every part.

    Raises DataError for fewer than three samples.
    """
    if samples < 3:
        raise DataError(f"the election needs at least 3 samples per client, got {samples}; use dfca-gi or dfca-li")
    bidding, voting = max(1, samples // 5), max(1, samples * 3 // 10)
    order = torch.randperm(samples, generator=generator)
    return Parts(order[bidding + voting :], order[:bidding], order[bidding : bidding + voting])


def lot(seed: int, client: int) -> int:
    """Draw a client's lot for the first centre: the smallest wins. 48 bits, so that a float holds it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/lot/{client}".encode()).digest()[:6], "big")


def bid(centres: Tensor, own: Tensor) -> float:
    """Compute a client's bid: its regret minus one standard error, so that small clients do not overbid.

    centres (c, n) and own (n,) are losses per sample on the bidding part; the centre that it follows is the best of c.
    A client whose own model is not finite bids minus infinity: it cannot be a centre.
    """
    regrets = centres[follows(centres)] - own
    error = float(regrets.std()) / math.sqrt(len(regrets)) if len(regrets) > 1 else 0.0
    value = float(regrets.mean()) - error
    return value if math.isfinite(value) else -math.inf


def follows(centres: Tensor) -> int:
    """Find the centre that fits best: losses (c, n) -> the lowest mean, the lowest index on ties."""
    means = centres.mean(dim=1).tolist()
    numbers = [math.inf if value != value else value for value in means]
    return numbers.index(min(numbers))


def cast(
    centres: Tensor, own: Tensor, candidate: Tensor, centres_vote: Tensor, candidate_vote: Tensor, bounded: bool = False
) -> Vote:
    """Cast a client's vote on a candidate, from losses per sample on the bidding part and on the voting part.

    bounded: d_c / u_c clipped to [-1, 1], u_c the mean size of the losses of c and of the candidate. It is taken on the
    voting part, which has no say in who prefers what, so that the error rate of the verdict stays.
    """
    centre = follows(centres)
    before, after, alone = float(centres[centre].mean()), float(candidate.mean()), float(own.mean())
    d = (centres_vote - candidate_vote).cpu().double()
    samples, weight = d.shape[1], 1.0
    if bounded:
        sizes = centres_vote.abs().mean(dim=1) + candidate_vote.abs().mean()
        unit = (sizes / 2).cpu().double().clamp_min(torch.finfo(torch.float64).tiny)
        d = (d / unit[:, None]).clamp(-1, 1)
        weight = min(1.0, MOST_SAMPLES / samples)
        samples = min(samples, MOST_SAMPLES)
    totals, squares = ((weight * values.sum(dim=1)).tolist() for values in (d, d.square()))
    return Vote(centre, before - after, min(before, after) - alone, samples, tuple(totals), tuple(squares))


def fixed(value: float) -> int:
    """Write a sum in fixed point, in units of 1 / SCALE, at most LIMIT in size: integers add up alike in any order."""
    return max(-LIMIT, min(LIMIT, round(value * SCALE)))


def count(vote: Vote, gain: float) -> Tally:
    """Count one client's vote on a candidate whose own gain is `gain`.

    A client whose sums are not finite follows its centre and has no say. One that no model fits (what is left of its
    regret is more than half of the candidate's gain) is counted apart.
    """
    centres = len(vote.totals)
    followers = tuple(int(c == vote.follows) for c in range(centres))
    counted = no_votes(centres)._replace(voters=1, followers=followers)
    if not all(map(math.isfinite, (vote.gain, vote.left, *vote.totals, *vote.squares))):
        return counted
    totals, squares = tuple(map(fixed, vote.totals)), tuple(map(fixed, vote.squares))
    unfit = vote.left > max(0.0, gain) / 2
    if vote.gain > 0 and not unfit:
        return counted._replace(movers=1, samples=vote.samples, totals=totals, squares=squares)
    samples = (vote.samples,) * centres
    samples, totals, squares = (tuple(map(mul, followers, sums)) for sums in (samples, totals, squares))
    if unfit:
        return counted._replace(unfit=followers, unfit_samples=samples, unfit_totals=totals, unfit_squares=squares)
    return counted._replace(stay_samples=samples, stay_totals=totals, stay_squares=squares)


def is_sayable(tally: Tally, clients: int) -> bool:
    """Return whether as many clients with bounded votes can have said this."""
    groups = [
        (tally.movers, tally.samples, total, square) for total, square in zip(tally.totals, tally.squares, strict=True)
    ]
    groups += list(zip(tally.followers, tally.stay_samples, tally.stay_totals, tally.stay_squares, strict=True))
    groups += list(zip(tally.unfit, tally.unfit_samples, tally.unfit_totals, tally.unfit_squares, strict=True))
    if not (tally.voters <= clients and tally.movers <= tally.voters and sum(tally.followers) <= tally.voters):
        return False
    if any(unfit > followers for unfit, followers in zip(tally.unfit, tally.followers, strict=True)):
        return False
    for voters, samples, total, square in groups:
        size = max(0, abs(total) - clients)  # every client has rounded once
        enough = voters >= 0 and 0 <= samples <= MOST_SAMPLES * voters and 0 <= square <= samples * SCALE
        if not enough or abs(total) > samples * SCALE or size * size > samples * SCALE * (square + clients):
            return False
    return True


def no_votes(centres: int) -> Tally:
    """Count nobody."""
    nothing = (0,) * centres
    return Tally(0, 0, 0, *[nothing] * 10)


def add(one: Tally, other: Tally) -> Tally:
    """Add the votes of two groups of clients."""
    pairs: Iterable[tuple[Any, Any]] = zip(one, other, strict=True)
    sums: Iterable[Any] = (a + b if isinstance(a, int) else tuple(map(plus, a, b)) for a, b in pairs)
    return Tally(*sums)


def decide(tally: Tally, gain: float, options: ElectionOptions, held: int = 0) -> Verdict:
    """Decide whether a candidate, whose own gain is `gain`, opens a new cluster; tally: the votes of all clients.

    For every centre c, Welch's statistic z over samples compares mean d_c of the movers and of the followers of c that
    stay, against the normal quantile of 1 - level.

    The first `held` centres are models that the clients were training when the election was called. One of them may fit
    nobody, where two halves that had elected apart train the only model of one of them. Where nobody stays at such a
    centre, the movers are compared with its followers that no model fits, if there are at least `support` of them; who
    is which is settled on the bidding part, so that the error rate stays `level`. A centre that nobody follows is left
    out, and where votes are bounded every later one at which nobody stays.
    """
    apart = []
    for c in range(len(tally.totals)):
        group = (tally.stay_samples[c], tally.stay_totals[c], tally.stay_squares[c])
        if options.bounded and c >= held and not tally.stay_samples[c]:
            continue
        if c < held:
            if not tally.followers[c]:
                continue
            if not tally.stay_samples[c] and tally.unfit[c] >= options.support:
                group = (tally.unfit_samples[c], tally.unfit_totals[c], tally.unfit_squares[c])
        apart.append(_welch((tally.samples, tally.totals[c], tally.squares[c]), group))
    bound = NormalDist().inv_cdf(1 - options.level)
    z = min(apart, default=-math.inf)
    wanted = options.bounded and tally.voters - tally.movers <= options.liars(tally.voters)
    return Verdict(gain > 0 and tally.movers >= options.support and (z > bound or wanted), tally.movers, z)


def verdict(votes: Sequence[Vote], candidate: int, options: ElectionOptions, held: int = 0) -> Verdict:
    """Count the votes of all clients, of which one is the candidate's own, and decide."""
    gain, nobody = votes[candidate].gain, no_votes(len(votes[candidate].totals))
    return decide(reduce(add, (count(vote, gain) for vote in votes), nobody), gain, options, held)


def _welch(movers: tuple[int, int, int], stayers: tuple[int, int, int]) -> float:
    """Compute z = (mean_1 - mean_2) / sqrt(var_1/n_1 + var_2/n_2) over samples; minus infinity without two groups."""
    moments = []
    for n, total, square in (movers, stayers):
        if n < 2:
            return -math.inf
        mean = total / SCALE / n
        variance = max(0.0, square / SCALE / n - mean * mean) * n / (n - 1)
        moments.append((mean, variance / n))
    (first, a), (second, b) = moments
    return (first - second) / math.sqrt(a + b) if a + b > 0 else math.copysign(math.inf, first - second)
