"""Robust folds: models of one cluster are merged so that a few members that lie cannot move the result far.

n models x_1 .. x_n came for a cluster, c is the client's own copy, w_l the weight of x_l in the plain fold
(`rules.mixing`), d_l = ||x_l - c||:

  none       c + sum_l w_l (x_l - c)
  clip       c + sum_l v_l (x_l - c),  v_l = w_l t_l / (w_0 + sum_m w_m t_m),  t_l = min(1, BEYOND tau / d_l)^4,
             w_0 = 1 - sum_m w_m: the average of c and all x, where what is far counts less and the others more
  trimmed    c + g (T - c),  T = per coordinate, the mean of {c, x_1, .., x_n} without the t largest and t smallest,
             t = ceil(LIAR_SHARE (n + 1)),  g = (n + 1) / n sum_l w_l, which is 1 for uniform weights
  median     the same with the largest t that leaves one or two values

`clip` is self-centred (as in He, Karimireddy, Jaggi: Byzantine-robust decentralized learning via ClippedGossip, 2022).
Its radius tau is the lower quartile of d_1 .. d_n and of the quartiles of the cluster's last RECENT folds, at most
||c||. Two things differ from plain clipping, s_l = min(1, tau / d_l), where every liar pulls by tau in every round: t_l
falls faster than d_l grows, and leaves some weight, so that parts of a cluster that were apart for long still meet; and
the weight that a message loses goes to the others, not to the own copy, so that random starts do not end in the wrong
cluster. Below FEWEST messages nothing can be trimmed, and `trimmed` and `median` clip. What is folded at once is one
batch: in a synchronous round the models of the round; without waiting, what has arrived. docs/robustness.md has more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dfca.core.method import LIAR_SHARE, RobustRule
from dfca.core.rules.mixing import Mixer, WeightedLinks

RECENT = 8  # folds of a cluster of which a client remembers the lower quartile of the distances
FEWEST = 3  # messages from which on values are trimmed
BEYOND = 2.0
"""Multiple of tau from which on a model loses weight. Points that the honest lose with dfca-gi among 20 % liars in the
world of the preset `liars`, seeds 10 to 17; flip-signs, noise, stale, swap-labels: 1.3, 0.4, 3.8, 2.9. With 3 in place
of 2: 2.3, 1.5, 2.6, 4.5. With the median for tau, and models pulled to tau for the own copy: 5.9, 3.0, 3.2, 2.9."""
STEEPNESS = 4  # how fast it does; with 2 in place of 4 the same, without swap-labels: 1.9, 0.4, 4.2
NO_WEIGHT = 1e-9  # an own copy with less weight has none: the rest is rounding
FAR = torch.finfo(torch.float64).max  # the distance of a model that is too far to be measured: it has no weight
PIECE_BYTES = 4 * 2**20  # what the differences of some links may take at once


def distance(model: Tensor, own: Tensor) -> float:
    """Measure d = ||x - c|| in double precision; FAR where the numbers are too large for that."""
    return _finite(float(torch.linalg.vector_norm(model - own, dtype=torch.float64)))


def quartile(distances: Sequence[float]) -> float:
    """Return the lower quartile, one of the distances: of up to four the smallest."""
    return sorted(distances)[(len(distances) - 1) // 4]


def radius(distances: Sequence[float], recent: Sequence[float], norm: float) -> float:
    """Compute tau: the lower quartile of distances now and of recent ones, at most the norm of the own copy, if any."""
    return min(quartile([*distances, *recent]), norm or math.inf)


def trust(distance: float, tau: float) -> float:
    """Compute t = min(1, BEYOND tau / d)^STEEPNESS; 0 for a model that is too far to be measured."""
    if distance >= FAR:
        return 0.0
    return 1.0 if distance <= BEYOND * tau else (BEYOND * tau / distance) ** STEEPNESS


def trusted(weights: Sequence[float], distances: Sequence[float], tau: float) -> list[float]:
    """Weigh models by trust: v_l = w_l t_l / (w_0 + sum_m w_m t_m), w_0 the weight of the own copy.

    Where the own copy has none, as beside a relayed model, it keeps what the others lose: v_l = w_l t_l.
    """
    kept = [weight * trust(distance, tau) for weight, distance in zip(weights, distances, strict=True)]
    own = 1 - math.fsum(weights)
    total = own + math.fsum(kept) if own > NO_WEIGHT else 1.0
    return [weight / total for weight in kept]


def trim_count(rule: RobustRule, models: int) -> int:
    """Return t, how many values of a coordinate are left out at each end; models: n + 1, the own one included."""
    if rule == "median":
        return (models - 1) // 2
    return min((models - 1) // 2, math.ceil(LIAR_SHARE * models))


def trimmed_mean(models: Tensor, trim: int) -> Tensor:
    """Average each coordinate without its `trim` largest and smallest values: (n, P) -> (P,)."""
    kept = len(models) - 2 * trim
    # Divided before they are added: finite values have a finite mean, however large.
    return models.sort(dim=0).values[trim : trim + kept].div_(kept).sum(dim=0)


def strength(weights: Sequence[float]) -> float:
    """Compute g, by how much the own copy moves to the trimmed mean: (n + 1) / n sum_l w_l."""
    return min(1.0, math.fsum(weights) * (len(weights) + 1) / len(weights))


def clips(rule: RobustRule, messages: int) -> bool:
    """Return whether messages of that number are clipped rather than trimmed."""
    return rule == "clip" or messages < FEWEST


def fold_robust_(
    own: Tensor, models: Sequence[Tensor], weights: Sequence[float], rule: RobustRule, recent: tuple[float, ...]
) -> tuple[float, ...]:
    """Fold models (P,) into the own copy in place; returns the quartiles of recent folds, this one included.

    All models are finite; weights: those of the plain fold. The order of the models does not matter.
    """
    distances = [distance(model, own) for model in models]
    if clips(rule, len(models)):
        norm = _finite(float(torch.linalg.vector_norm(own, dtype=torch.float64)))
        tau = radius(distances, recent, norm)
        step = torch.zeros_like(own)
        for model, weight in zip(models, trusted(weights, distances, tau), strict=True):
            if weight:
                step.add_(model - own, alpha=weight)
        own.add_(step)
    else:
        mean = trimmed_mean(torch.stack([own, *models]), trim_count(rule, len(models) + 1))
        own.lerp_(mean, strength(weights))
    return (*recent, quartile(distances))[-RECENT:]


class RobustMixer:
    """`fold_robust_` for some rows of a bank and a block of columns at a time, as `rules.mixing.Mixer` mixes.

    Distances need whole models: every block is shown to `measure` first, then `settle` fixes the weights, then every
    block is mixed by `apply_`. sources (S,) are the senders of the links in the order in which they come in.
    """

    def __init__(self, links: WeightedLinks, sources: Tensor, first: int, rule: RobustRule, held: bool = True) -> None:
        """Prepare for a block whose row 0 is the model of client `first`; held: senders hold what they sent."""
        names, places = sources.sort()
        self._links, self._sources, self._first, self._rule, self._held = links, sources, first, rule, held
        self._column = places[torch.searchsorted(names, links.sender)]
        self._row = links.receiver - first
        self._squares: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self._clipper: Mixer | None = None
        self._trimmed: list[tuple[int, Tensor, int, float]] = []

    def measure(self, columns: slice, block: Tensor, incoming: Tensor) -> None:
        """Look at a block (L, w) and at what was sent (S, w)."""
        row, column = self._row.to(block.device), self._column.to(block.device)
        squares = torch.empty(len(row), dtype=torch.float64)
        many = max(1, PIECE_BYTES // max(1, block.shape[1] * block.element_size()))
        for begin in range(0, len(row), many):
            some = slice(begin, begin + many)
            far = torch.linalg.vector_norm(incoming[column[some]] - block[row[some]], dim=1, dtype=torch.float64)
            squares[some] = far.square().cpu()
        self._squares[columns.start] = squares  # by block: threads finish in any order
        self._norms[columns.start] = torch.linalg.vector_norm(block, dim=1, dtype=torch.float64).square().cpu()

    def settle(self, recent: Tensor, like: Tensor) -> Tensor:
        """Fix the weights; recent (L, RECENT): quartiles of the last folds, NaN for none; like (L, w): a block.

        Returns the quartiles of the distances of this fold (L,), NaN for rows that received nothing.
        """
        total, norms = (
            torch.stack([blocks[begin] for begin in sorted(blocks)]).sum(dim=0).sqrt()
            for blocks in (self._squares, self._norms)
        )
        distances, weights = [_finite(distance) for distance in total.tolist()], self._links.weight.clone()
        quartiles = torch.full((len(recent),), float("nan"), dtype=torch.float64)
        clipped = torch.ones(len(weights), dtype=torch.bool)
        places: dict[int, list[int]] = {}
        for place, row in enumerate(self._row.tolist()):
            places.setdefault(row, []).append(place)
        for row, mine in places.items():
            near = [distances[place] for place in mine]
            quartiles[row] = quartile(near)
            if clips(self._rule, len(mine)):
                earlier = recent[row][~recent[row].isnan()].tolist()
                tau = radius(near, earlier, _finite(float(norms[row])))
                weights[mine] = weights.new_tensor(trusted(weights[mine].tolist(), near, tau))
            else:
                clipped[mine] = False
                trim = trim_count(self._rule, len(mine) + 1)
                self._trimmed.append((row, self._column[mine], trim, strength(weights[mine].tolist())))
        if bool(clipped.any()):
            links = WeightedLinks(*(part[clipped] for part in self._links._replace(weight=weights)))
            self._clipper = Mixer(links, self._sources, self._first, len(like), like.dtype, like.device, self._held)
        return quartiles

    def apply_(self, block: Tensor, incoming: Tensor) -> None:
        """Mix what was sent, incoming (S, w), into a block (L, w)."""
        if self._clipper is not None:
            self._clipper.apply_(block, incoming)
        for row, columns, trim, share in self._trimmed:
            own = block[row]
            mean = trimmed_mean(torch.cat([own[None], incoming[columns.to(incoming.device)]]), trim)
            block[row] = own.lerp(mean, share)


def shift(recent: Tensor, quartiles: Tensor) -> Tensor:
    """Remember quartiles (L,), where there is one, among recent ones (L, RECENT)."""
    moved = torch.cat([recent[:, 1:], quartiles[:, None]], dim=1)
    return torch.where(quartiles.isnan()[:, None], recent, moved)


def _finite(distance: float) -> float:
    return distance if distance < FAR else FAR  # also where it is NaN
