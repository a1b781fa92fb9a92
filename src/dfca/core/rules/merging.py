"""Which clusters are worth the data that they take away from the others, and the merging of those that are not.

docs/auto.md (section 6) explains why. During training the clients survey which two clusters would do better as one. A
survey runs beside the rounds and asks twice.

**The poll** costs no work. A client says which cluster it follows, with how many samples, and the losses l_j of all
models by which it chose. Clusters are paired so that each has one partner at most, the most promising pairs first, by

  D_ab     = mean over the followers of a of  l_b - l_a
  n_a n_b / (n_a + n_b) * (D_ab + D_ba) / 2                               n_j: training samples of the followers of j

**The survey** proper: some followers of a (`observes`) judge a, its partner b and their average A_ab, weighted by
followers. Every client i holds out a fifth of its samples, H_i (`held_out`), by which it also chooses its cluster until
the last survey. With L_j(d, s) the loss below of model j on sample d, after s plain personal steps on its other
samples, s = 0 or `steps`:

  c_i(d)   = which of a and b the client would choose by H_i without d
  right_i  = mean over d of  L_a(d, s) if c_i(d) = a, else L_b(d, s)
  wrong_i  = mean over d of  L_b(d, s) if c_i(d) = a, else L_a(d, s)
  E_ab     = (min over s of the mean of wrong_i over the followers of a) - (the same of right_i)
  B_ab     = (E_ab + E_ba) / 2
  o_i      = max(LEAST_OPTIMISM, held-out - training loss of the model that i follows, after `steps` steps)
  c        = mean over clusters j of n_j (mean of o_i over the followers of j) / 2
  worth_ab = n_a n_b / (n_a + n_b) * B_ab / c
  G_ab     = (min over s of the mean over the followers of a of L_A(d, s)) - (the same of L_a(d, s)), d with c_i(d) = a
  harm_ab  = (n_a G_ab + n_b G_ba) / (n_a + n_b)

One model for both costs its n = n_a + n_b samples n_a (n_b / n)^2 B + n_b (n_a / n)^2 B = n_a n_b / n B in loss, and
saves c, what the estimation of one more model costs. Pairs with worth_ab < `worth` and harm_ab < HARM are merged, the
smallest worth first: every client replaces theta_a by (n_a theta_a + n_b theta_b) / (n_a + n_b) in its own bank and
closes b, which is then not chosen, trained or sent. A cluster without followers is closed. A cluster is unsettled, and
has no partner, while the losses of many of its followers have just risen (`rules.revival`).

The loss is Brier's, |softmax(z) - onehot(y)|^2 / 2, which is bounded. Of labels it is the mean of (s(z) - y)^2, of
tokens the mean of Brier's, of numbers the squared error, and of targets of any other kind the task's own loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, combinations
from operator import add as plus
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dfca.core.learning.inputs import Samples
from dfca.core.learning.local import infer, local_steps, sample_losses
from dfca.core.learning.params import FlatModel
from dfca.core.learning.task import NO_TOKEN, Task
from dfca.core.method import LocalOptions
from dfca.core.method import MergeOptions as MergeOptions
from dfca.core.rng import derive
from dfca.core.rules.election import SCALE, fixed

SMALLEST_COST = 1e-9  # what one more model costs at least
LEAST_OPTIMISM = 0.1  # of losses within [0, 1]: where little is left to win, a share of it is not worth a cluster
BOUNDED = ("classes", "tokens", "labels")  # targets that are judged by a loss within [0, 1]
HARM = 0.009  # an average of two models must be worse than they are by less than this, of losses within [0, 1]
TYPICAL_LOSS = 0.18
"""Other losses are scaled so that the mean of a model's own and of its average's is this: the average may be worse by
5 % of it."""
EXCESSES = 6
"""What a follower of a says of its partner b: wrong(0), wrong(steps) and right(steps), each minus right(0); the losses
of the average of a and b, without and with steps, and that of a with them, each minus that of a without."""
OF_PARTNER, OF_AVERAGE = 0, 3  # where the three numbers begin that E_ab is made of, and those of G_ab
OBSERVERS = 12  # mean number of followers of a cluster that take personal steps; none with a probability of e^-12
JUDGED = 3  # models that an observer takes personal steps from: a, b and their average
NOBODY = -1  # the partner of a cluster that has none
UNFIT, FEWEST_UNFIT = 0.25, 2  # share and number of followers whose loss must have risen for a cluster to be unsettled


class Opinion(NamedTuple):
    """What one client says in a poll."""

    follows: int  # the cluster that it trains
    samples: int  # how many it trains with
    losses: tuple[float, ...] = ()  # of the clusters that are open, in ascending order; none where it has not looked
    unfit: bool = False  # its loss has risen (`rules.revival`)


class Poll(NamedTuple):
    """What some clients say of the k clusters that are open, summed; losses in fixed point, so that any order of adding
    gives the same."""

    slots: tuple[int, ...]  # the clusters
    followers: tuple[int, ...]  # by cluster
    samples: tuple[int, ...]  # of the followers, to train with
    unfit: tuple[int, ...]  # followers whose loss has risen
    voters: tuple[int, ...]  # followers that say their losses
    excess: tuple[int, ...]  # (k * k,): sums over the voters of a of l_b - l_a, row by row


class Observation(NamedTuple):
    """What one client says of the cluster that it follows and its partner; nothing where it holds nothing out."""

    follows: int
    excess: tuple[float, ...] = ()  # `EXCESSES` numbers
    optimism: float = math.nan  # o_i


class Survey(NamedTuple):
    """What some clients say of k clusters and their partners, summed; in fixed point."""

    slots: tuple[int, ...]  # the clusters
    voters: tuple[int, ...]  # followers that have judged, by cluster
    excess: tuple[int, ...]  # (EXCESSES * k,): the sums over the voters, one kind after the other
    optimism: tuple[int, ...]  # the sum over the voters


class Merge(NamedTuple):
    """Two clusters that become one."""

    into: int
    closed: int
    share: float  # weight of the closed one
    worth: float


class Plan(NamedTuple):
    """What a survey decides."""

    merges: tuple[Merge, ...] = ()
    empty: tuple[int, ...] = ()  # clusters without followers, which are closed

    @property
    def closed(self) -> tuple[int, ...]:
        """The clusters that are closed by it."""
        return tuple(sorted((*self.empty, *(merge.closed for merge in self.merges))))


def count_opinion(slots: Sequence[int], said: Opinion) -> Poll:
    """Count what one client says; one that follows no open cluster says nothing, and losses that are not finite count
    for nothing."""
    k = len(slots)
    place = slots.index(said.follows) if said.follows in slots else None
    counted = place is not None and len(said.losses) == k and all(map(math.isfinite, said.losses))
    excess = [0] * (k * k)
    if place is not None and counted:
        excess[place * k : (place + 1) * k] = (fixed(loss - said.losses[place]) for loss in said.losses)
    one, samples, unfit, voters = (_only(k, place, value) for value in (1, said.samples, int(said.unfit), int(counted)))
    return Poll(tuple(slots), one, samples, unfit, voters, tuple(excess))


def count(slots: Sequence[int], said: Observation) -> Survey:
    """Count what one client says; one whose numbers are not finite has no vote."""
    k = len(slots)
    numbers = (*said.excess, said.optimism)
    sound = len(said.excess) == EXCESSES and all(map(math.isfinite, numbers))
    place = slots.index(said.follows) if sound and said.follows in slots else None
    excess = (_only(k, place, fixed(value)) for value in said.excess) if place is not None else ((0,) * (EXCESSES * k),)
    optimism = fixed(said.optimism) if place is not None else 0
    return Survey(tuple(slots), _only(k, place, 1), tuple(chain(*excess)), _only(k, place, optimism))


def _only(k: int, place: int | None, value: int) -> tuple[int, ...]:
    return tuple(value if j == place else 0 for j in range(k))


Sums = TypeVar("Sums", Poll, Survey)


def add(one: Sums, other: Sums) -> Sums:
    """Add what two groups of clients say of the same clusters."""
    return type(one)(one[0], *(tuple(map(plus, a, b)) for a, b in zip(one[1:], other[1:], strict=True)))


def poll(slots: Sequence[int], said: Iterable[Opinion]) -> Poll:
    """Count what all clients say in a poll."""
    return reduce(add, (count_opinion(slots, opinion) for opinion in said), count_opinion(slots, Opinion(-1, 0)))


def total(slots: Sequence[int], said: Iterable[Observation]) -> Survey:
    """Count what all clients have observed."""
    return reduce(add, (count(slots, observation) for observation in said), count(slots, Observation(-1)))


def pair_up(heard: Poll, alone: Collection[int] = (), asked: int = 0) -> tuple[int, ...]:
    """Return the partner of every cluster, `NOBODY` for none: (k,). Clusters that are to stay alone have none.

    asked: how many surveys in a row have merged nothing; their pairs are left out, until all were asked about.
    """
    used = [place for place, followers in enumerate(heard.followers) if followers and heard.slots[place] not in alone]
    ranked = sorted((_distance(heard, a, b), a, b) for a, b in combinations(used, 2))
    left = ranked
    for _ in range(asked + 1):
        left = left or ranked
        partners = [NOBODY] * len(heard.slots)
        for _, a, b in left:
            if partners[a] == partners[b] == NOBODY:
                partners[a], partners[b] = heard.slots[b], heard.slots[a]
        left = [pair for pair in left if partners[pair[1]] != heard.slots[pair[2]]]
    return tuple(partners)


def _distance(heard: Poll, a: int, b: int) -> float:
    """Forecast what two clusters are worth by the losses that their followers chose by; 0 where nobody says any."""
    k, n, m = len(heard.slots), heard.samples[a], heard.samples[b]
    sides = [heard.excess[i * k + j] / SCALE / heard.voters[i] for i, j in ((a, b), (b, a)) if heard.voters[i]]
    return n * m / max(1, n + m) * sum(sides) / max(1, len(sides))


def worths(heard: Poll, survey: Survey, partners: Sequence[int]) -> dict[tuple[int, int], float]:
    """Compute the worth of every pair; 0 where nobody has anything to say for it."""
    costs = [
        heard.samples[j] * survey.optimism[j] / SCALE / voters / 2 for j, voters in enumerate(survey.voters) if voters
    ]
    cost = max(SMALLEST_COST, sum(costs) / len(costs)) if costs else SMALLEST_COST
    worth = {}
    for a, b in _pairs(heard.slots, partners):
        sides = [_excess(survey, j) for j in (a, b) if survey.voters[j]]
        n, m = heard.samples[a], heard.samples[b]
        bias = sum(sides) / len(sides) if sides else 0.0
        worth[heard.slots[a], heard.slots[b]] = n * m / max(1, n + m) * bias / cost
    return worth


def harms(heard: Poll, survey: Survey, partners: Sequence[int]) -> dict[tuple[int, int], float]:
    """Compute the harm of merging every pair; 0 where nobody has anything to say."""
    harm = {}
    for a, b in _pairs(heard.slots, partners):
        sides = [(heard.samples[j], _excess(survey, j, OF_AVERAGE)) for j in (a, b) if survey.voters[j]]
        samples = max(1, sum(many for many, _ in sides))
        harm[heard.slots[a], heard.slots[b]] = sum(many * excess for many, excess in sides) / samples
    return harm


def _pairs(slots: Sequence[int], partners: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the places of the clusters of every pair."""
    for a, partner in enumerate(partners):
        if partner in slots and a < (b := slots.index(partner)):
            yield a, b


def _excess(survey: Survey, place: int, first: int = OF_PARTNER) -> float:
    """Compute E_ab of the cluster at a place and its partner, or G_ab: the kinds of excess from the first on."""
    k = len(survey.slots)
    sums = (survey.excess[kind * k + place] for kind in range(first, first + 3))
    plain, tuned, right = (value / SCALE / survey.voters[place] for value in sums)
    return min(plain, tuned) - min(0.0, right)


def decide(heard: Poll, survey: Survey, partners: Sequence[int], options: MergeOptions) -> Plan:
    """Decide what becomes of the clusters that are open, by what all clients said in the poll and what observers did
    of them and their partners (`pair_up`)."""
    empty = [slot for slot, followers in zip(heard.slots, heard.followers, strict=True) if not followers]
    if len(empty) == len(heard.slots):  # one is left
        empty = empty[1:]
    samples = dict(zip(heard.slots, heard.samples, strict=True))
    harm = harms(heard, survey, partners)
    ranked = sorted((worth, pair) for pair, worth in worths(heard, survey, partners).items() if harm[pair] < HARM)
    merges = (
        Merge(a, b, samples[b] / max(1, samples[a] + samples[b]), worth)
        for worth, (a, b) in ranked
        if worth < options.worth
    )
    return Plan(tuple(merges), tuple(empty))


def unsettled(heard: Poll, quiet: int = 0) -> set[int]:
    """List the clusters with many followers whose loss has risen; none where the survey before has merged nothing."""
    counts = zip(heard.slots, heard.unfit, heard.followers, strict=True)
    many = {slot for slot, unfit, followers in counts if unfit >= max(FEWEST_UNFIT, UNFIT * followers)}
    return set() if quiet else many


def merge_(bank: Tensor, merges: Iterable[Merge]) -> None:
    """Merge models in place: bank (m, ..., P). One that is not finite is left out."""
    for into, closed, share, _ in merges:
        kept, joining = bank[into], bank[closed]
        merged = torch.lerp(kept, joining, share)
        sound = joining.isfinite().all(dim=-1, keepdim=True)
        kept.copy_(torch.where(sound, torch.where(kept.isfinite().all(dim=-1, keepdim=True), merged, joining), kept))


def hide_closed(bank: Tensor, closed: Collection[int]) -> Tensor:
    """Replace closed models by the first open one, for readers of the whole bank: (m, P)."""
    if not closed:
        return bank
    shown = bank.clone()
    shown[list(closed)] = bank[next(j for j in range(len(bank)) if j not in closed)]
    return shown


def order_of(clusters: int, closed: Collection[int]) -> list[int]:
    """Number clusters anew after the last survey: those that are open first. Returns which one becomes 0, 1, ..."""
    return sorted(range(clusters), key=lambda j: (j in closed, j))


def judge(task: Task, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the mean loss that clusters are judged by: outputs (C, n, ...), y (C, n, ...) -> (C,) in double
    precision; NaN where there are no samples."""
    return judge_each(task, outputs, y).mean(dim=1)


def judge_each(task: Task, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the loss that clusters are judged by on every sample: (C, n, ...), (C, n, ...) -> (C, n)."""
    if task.targets == "classes":
        losses = _brier(outputs, y)
    elif task.targets == "tokens":
        counts = y != NO_TOKEN
        losses = (_brier(outputs, y.clamp_min(0)) * counts).sum(dim=2) / counts.sum(dim=2).clamp_min(1)
    elif task.targets in ("labels", "numbers"):
        values = outputs.double().sigmoid() if task.targets == "labels" else outputs.double()
        losses = (values.reshape(y.shape) - y).square()[..., None].flatten(2).mean(dim=2)
    else:
        losses = task.loss(outputs.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])
    return losses.double()


def observe(
    model: FlatModel,
    own: Tensor,
    partner: Tensor,
    share: float,
    train: tuple[Samples, Tensor],
    held: tuple[Samples, Tensor],
    local: LocalOptions,
) -> tuple[tuple[float, ...], float]:
    """Judge the model (P,) that a client follows, its partner's and their average by `share_of`, with the samples that
    it trains with and those that it holds out, at least one; returns excess and optimism of an `Observation`."""
    *_, judged = observe_in_slices(model, own, partner, share, train, held, local, max(1, local.steps))
    assert judged is not None
    return judged


def observe_in_slices(
    model: FlatModel,
    own: Tensor,
    partner: Tensor,
    share: float,
    train: tuple[Samples, Tensor],
    held: tuple[Samples, Tensor],
    local: LocalOptions,
    steps: int,
) -> Iterator[tuple[tuple[float, ...], float] | None]:
    """Do what `observe` does, a few personal steps at a time: yields None after each, and the result at the end."""
    vectors = [own, partner, torch.lerp(own, partner, share)]
    tuned = []
    for vector in vectors:
        for begin in range(0, local.steps, steps):
            some = replace(local, steps=min(steps, local.steps - begin))
            vector = local_steps(model, vector, *train, some)
            yield None
        tuned.append(vector)

    def judged(vector: Tensor, x: Samples, y: Tensor) -> Tensor:
        with torch.no_grad():
            return judge_each(model.task, infer(model, vector, x, "score")[None], y[None])[0]

    losses = torch.stack([torch.stack([judged(vector, *held) for vector in some]) for some in (vectors, tuned)])
    chosen = choose_without(sample_losses(model, torch.stack(vectors[:2]), *held), 0)
    optimism = float(losses[1, 0].mean() - judged(tuned[0], *train).mean())
    yield compare(losses, chosen, model.task), at_least(model.task, optimism)


def share_of(followers: int, partners: int) -> float:
    """Return how much the partner weighs in its average with a cluster, by their followers."""
    return partners / max(1, followers + partners)


def choose_without(losses: Tensor, follows: int) -> Tensor:
    """Choose a cluster for each sample, by the losses of all models on the others: (k, n) -> (n,), the lowest index on
    ties. A single sample goes with what its client follows, and a model that is not finite somewhere is not chosen."""
    k, n = losses.shape
    if n == 1:
        return torch.full((1,), follows)
    sound = losses.isfinite().all(dim=1, keepdim=True)
    others = torch.where(sound, losses.double().sum(dim=1, keepdim=True) - losses.double(), math.inf)
    best = others == others.min(dim=0).values
    return torch.where(best, torch.arange(k, device=losses.device)[:, None], k).min(dim=0).values.cpu()


def differ(own: float, partner: float) -> tuple[float, ...]:
    """Make the excess of a follower to whom all its samples say the same, and personal steps nothing: from the losses
    of its own cluster and the partner; the average does no harm."""
    return (partner - own, partner - own, *(0.0,) * 4)


def compare(losses: Tensor, chosen: Tensor, task: Task) -> tuple[float, ...]:
    """Compute what a follower of a says of its partner b: the excess of an `Observation`.

    losses (2, 3, n): of a, b and their average on n samples, without and with personal steps; chosen (n,): c_i(d), 0
    for a and 1 for b.
    """
    losses, mine = losses.cpu(), chosen == 0
    own, partner, average = losses.unbind(dim=1)
    right, wrong = torch.where(mine, own, partner).mean(dim=1), torch.where(mine, partner, own).mean(dim=1)
    excess = torch.stack([wrong[0], wrong[1], right[1]]) - right[0]
    kept = mine if bool(mine.any()) else torch.ones_like(mine)
    plain, tuned = own[:, kept].mean(dim=1)
    merged = average[:, kept].mean(dim=1)
    harm = torch.stack([merged[0], merged[1], tuned]) - plain
    if task.targets not in BOUNDED:  # by both losses, because a single one may be near 0 by luck
        harm = 2 * TYPICAL_LOSS * harm / (merged.min() + torch.minimum(plain, tuned)).clamp_min(SMALLEST_COST)
    return tuple(torch.cat([excess, harm]).tolist())


def at_least(task: Task, optimism: float) -> float:
    """Return o_i: of losses within [0, 1] at least LEAST_OPTIMISM; NaN stays."""
    return LEAST_OPTIMISM if task.targets in BOUNDED and optimism < LEAST_OPTIMISM else optimism


def _brier(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute |p - onehot(y)|^2 / 2 = (1 - 2 p_y + |p|^2) / 2 with p = softmax(z): (..., classes), (...) -> (...)."""
    p = outputs.double().softmax(dim=-1)
    right = p.gather(-1, y[..., None])[..., 0]
    return (1 - 2 * right + p.square().sum(dim=-1)) / 2


def observes(seed: int, now: int, client: int, followers: int) -> bool:
    """Draw whether a client takes personal steps in a survey after `now` rounds: by its own lot, and the number of
    those that follow the same cluster, so that nobody has to be asked."""
    return derive(seed, "survey", now, client) * followers < OBSERVERS << 32
