"""Which clusters are worth the data that they take away from the others, and the merging of those that are not.

An election that opens a cluster where a difference is significant opens too many of them under label skew, and too few
where clients have few samples. So more centres are elected than needed, and every few rounds of training the clients
survey which two clusters would do better as one. Every client i holds out a fifth of its samples, H_i (`holdout`). With
L_j(d, s) the loss of model j of its bank on sample d, after s plain personal steps on its other samples, s = 0 or
`steps`:

  c_i(d)   = the open cluster that i would choose by H_i without d
  right_i  = 1/|H_i| sum over d of  L_a(d, s) if c_i(d) = a,  L_b(d, s) if c_i(d) = b        i follows a; for every b
  wrong_i  = 1/|H_i| sum over d of  L_b(d, s) if c_i(d) = a,  L_a(d, s) if c_i(d) = b
  E_ab     = (min over s of the mean of wrong_i over the followers of a) - (the same of right_i)
  B_ab     = (E_ab + E_ba) / 2
  o_i      = max(LEAST_OPTIMISM, held-out - training loss of the model that i follows, after `steps` steps)
  c        = mean over clusters j of n_j (mean of o_i over the followers of j) / 2
  worth_ab = n_a n_b / (n_a + n_b) * B_ab / c                              n_j: training samples of the followers of j
  A_ab     = the average of models a and b, weighted by their followers
  G_ab     = (min over s of the mean over the followers of a of L_A(d, s)) - (the same of L_a(d, s)), d with c_i(d) = a
  harm_ab  = (n_a G_ab + n_b G_ba) / (n_a + n_b)

One model for both costs n_a (n_b / n)^2 B + n_b (n_a / n)^2 B = n_a n_b / n B in loss, n = n_a + n_b, and saves c, the
cost of estimating one more model (its optimism, as in Akaike's criterion). What personal steps can adapt, such as a
skew of labels, needs no cluster; but where clusters disagree about labels steps harm the right model: hence the minimum
over s. A sample is judged by the cluster chosen without it, for clients choose by the same held-out samples.

The worth is a forecast from half-trained models. Where a task is hard (47 letters in four rotations, 100 samples per
client) personal steps make up for a wrong model while the right one is no better, and c is large. So a merged model
must also be no worse than what it replaces: a pair with harm_ab >= HARM stays as it is. Until the last survey a client
also chooses its cluster by its held-out samples: a model that overfits the others would keep it.

Disjoint pairs are merged, the smallest worth first, while it is below `worth`; a cluster without followers is closed. A
cluster is unsettled, and left alone, while the losses of many of its followers have just risen (`rules.revival`): after
a change of distributions, clusters that will differ look alike at first. Where the number of clusters is given they are
merged down to it, until a by-election opens one more. Merging needs no message beyond the survey: every client replaces
theta_a by (n_a theta_a + n_b theta_b) / (n_a + n_b) in its own bank and closes b. A closed cluster is not chosen,
trained or sent. After the last survey the clusters that are left are numbered anew; `rules.surveys` says when.

The loss is Brier's, |softmax(z) - onehot(y)|^2 / 2: it is bounded, and the overconfident models of small clusters do
not outweigh the rest. Of labels it is the mean of (s(z) - y)^2, of tokens the mean of Brier's, of numbers the squared
error, and of any other targets the task's own loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from itertools import combinations
from operator import add as plus
from typing import NamedTuple

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
"""What a follower of a says of every b: wrong(0), wrong(steps) and right(steps), each minus right(0); the losses of the
average of a and b, without and with steps, and that of a with them, each minus that of a without."""
OF_OTHERS, OF_AVERAGES = 0, 3  # where the three kinds begin that E_ab is made of, and those of G_ab
OBSERVERS = 12  # mean number of followers of a cluster that take personal steps; none with a probability of e^-12
UNFIT, FEWEST_UNFIT = 0.25, 2  # share and number of followers whose loss must have risen for a cluster to be unsettled


class Observation(NamedTuple):
    """What one client says in a survey; one that holds nothing out has no excess and no optimism."""

    follows: int  # the cluster that it trains
    samples: int  # how many it trains with
    excess: tuple[float, ...] = ()  # (EXCESSES * k,), one kind after the other, open clusters in ascending order
    optimism: float = math.nan  # o_i
    unfit: bool = False  # its loss has risen (`rules.revival`)


class Survey(NamedTuple):
    """What some clients say of the k open clusters, summed; losses in fixed point: any order of adding is the same."""

    slots: tuple[int, ...]  # the clusters
    followers: tuple[int, ...]  # clients that train each of them
    samples: tuple[int, ...]  # their training samples
    voters: tuple[int, ...]  # followers that have judged
    excess: tuple[int, ...]  # (EXCESSES * k * k,): sums over the voters of a, row by row, one kind after the other
    optimism: tuple[int, ...]  # sums over the voters
    unfit: tuple[int, ...]  # followers whose loss has risen


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


def nothing(slots: Sequence[int]) -> Survey:
    """Survey nobody, where these clusters are open."""
    zeros = (0,) * len(slots)
    return Survey(tuple(slots), zeros, zeros, zeros, zeros * (EXCESSES * len(slots)), zeros, zeros)


def count(slots: Sequence[int], said: Observation) -> Survey:
    """Count what one client says; one whose numbers are not finite has no vote, and one that follows no open cluster
    says nothing."""
    empty = nothing(slots)
    if said.follows not in slots:
        return empty
    place, k = slots.index(said.follows), len(slots)

    def at(value: int) -> tuple[int, ...]:
        return tuple(value if j == place else 0 for j in range(k))

    counted = empty._replace(followers=at(1), samples=at(said.samples), unfit=at(int(said.unfit)))
    if len(said.excess) != EXCESSES * k or not all(map(math.isfinite, (*said.excess, said.optimism))):
        return counted
    excess = [0] * (EXCESSES * k * k)
    for kind in range(EXCESSES):
        begin = (kind * k + place) * k
        excess[begin : begin + k] = map(fixed, said.excess[kind * k : (kind + 1) * k])
    return counted._replace(voters=at(1), excess=tuple(excess), optimism=at(fixed(said.optimism)))


def add(one: Survey, other: Survey) -> Survey:
    """Add what two groups of clients say of the same clusters."""
    sums = (tuple(map(plus, a, b)) for a, b in zip(one[1:], other[1:], strict=True))
    return Survey(one.slots, *sums)


def total(slots: Sequence[int], said: Iterable[Observation]) -> Survey:
    """Count what all clients say."""
    return reduce(add, (count(slots, observation) for observation in said), nothing(slots))


def worths(survey: Survey) -> dict[tuple[int, int], float]:
    """Compute the worth of every pair of clusters that have followers; 0 where nobody has anything to say for it."""
    used = _followed(survey)
    costs = [survey.samples[j] * survey.optimism[j] / SCALE / survey.voters[j] / 2 for j in used if survey.voters[j]]
    cost = max(SMALLEST_COST, sum(costs) / len(costs)) if costs else SMALLEST_COST
    worth = {}
    for a, b in combinations(used, 2):
        sides = [_excess(survey, i, j) for i, j in ((a, b), (b, a)) if survey.voters[i]]
        bias = sum(sides) / len(sides) if sides else 0.0
        n, m = survey.samples[a], survey.samples[b]
        worth[survey.slots[a], survey.slots[b]] = n * m / max(1, n + m) * bias / cost
    return worth


def harms(survey: Survey) -> dict[tuple[int, int], float]:
    """Compute the harm of merging every pair of clusters that have followers; 0 where nobody has anything to say."""
    harm = {}
    for a, b in combinations(_followed(survey), 2):
        sides = [
            (survey.samples[i], _excess(survey, i, j, OF_AVERAGES)) for i, j in ((a, b), (b, a)) if survey.voters[i]
        ]
        samples = max(1, sum(many for many, _ in sides))
        harm[survey.slots[a], survey.slots[b]] = sum(many * excess for many, excess in sides) / samples
    return harm


def _followed(survey: Survey) -> list[int]:
    """List the places of the clusters that have followers."""
    return [place for place, many in enumerate(survey.followers) if many]


def _excess(survey: Survey, a: int, b: int, first: int = OF_OTHERS) -> float:
    """Compute E_ab of the clusters at two places, or G_ab: the kinds of excess from the first on."""
    k = len(survey.slots)
    sums = (survey.excess[(kind * k + a) * k + b] for kind in range(first, first + 3))
    plain, tuned, right = (total / SCALE / survey.voters[a] for total in sums)
    return min(plain, tuned) - min(0.0, right)


def decide(
    survey: Survey, options: MergeOptions, clusters: int | None = None, alone: Collection[int] = (), grown: bool = False
) -> Plan:
    """Decide what becomes of the clusters that are open.

    Where more than `clusters` are left, and all of them are worth their data, only the two that are worth least are
    merged, of pairs that merging does not harm if there are some: the worth of the result is not known yet.

    Args:
        survey: What all clients say.
        options: How clusters are merged.
        clusters: How many are to be left; None: as many as are worth their data.
        alone: Clusters that are not merged now.
        grown: Whether a by-election has opened a cluster: then none is merged for the sake of the number.
    """
    room = len(survey.slots) - (1 if clusters is None else clusters)
    empty = [slot for slot, many in zip(survey.slots, survey.followers, strict=True) if not many]
    empty = empty[len(empty) - max(0, min(room, len(empty))) :]
    room -= len(empty)
    samples = dict(zip(survey.slots, survey.samples, strict=True))
    harm = harms(survey)
    pairs = sorted((harm[pair] >= HARM, worth, pair) for pair, worth in worths(survey).items())
    merges: list[Merge] = []
    taken = set(alone)
    for harmed, worth, (a, b) in pairs:
        forced = clusters is not None and not grown and not merges
        if len(merges) >= room or ((harmed or worth >= options.worth) and not forced):
            break
        if taken.isdisjoint((a, b)):
            taken |= {a, b}
            merges.append(Merge(a, b, samples[b] / max(1, samples[a] + samples[b]), worth))
    return Plan(tuple(merges), tuple(empty))


def unsettled(survey: Survey, clusters: int | None = None, quiet: int = 0) -> set[int]:
    """List the clusters with many followers whose loss has risen; none where a number of clusters is to be reached, or
    the survey before has merged nothing because of them."""
    counts = zip(survey.slots, survey.unfit, survey.followers, strict=True)
    many = {slot for slot, unfit, followers in counts if unfit >= max(FEWEST_UNFIT, UNFIT * followers)}
    return many if clusters is None and not quiet else set()


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
    bank: Tensor,
    slots: Sequence[int],
    follows: int,
    followers: Sequence[int],
    train: tuple[Samples, Tensor],
    held: tuple[Samples, Tensor],
    local: LocalOptions,
) -> Observation:
    """Compute what one client says of the open clusters (slots), given how many clients follow them.

    bank (m, P): its models; follows: the cluster that it trains; train, held: its samples; local: its personal steps.
    """
    n = len(train[1])
    if follows not in slots or not len(held[1]):
        return Observation(follows, n)
    place, vectors = slots.index(follows), bank[list(slots)]
    shares = zip(vectors, shares_of(followers, place), strict=True)
    averages = [torch.lerp(vectors[place], vector, share) for vector, share in shares]
    tuned = [local_steps(model, vector, *train, local) for vector in vectors]
    tuned_averages = [
        tuned[j] if j == place else local_steps(model, vector, *train, local) for j, vector in enumerate(averages)
    ]

    def judged(vector: Tensor, x: Samples, y: Tensor) -> Tensor:
        with torch.no_grad():
            return judge_each(model.task, infer(model, vector, x, "score")[None], y[None])[0]

    def judged_all(*models: Iterable[Tensor]) -> Tensor:
        return torch.stack([torch.stack([judged(vector, *held) for vector in some]) for some in models])

    losses, averaged = judged_all(vectors, tuned), judged_all(averages, tuned_averages)
    chosen = choose_without(sample_losses(model, vectors, *held), place)
    optimism = float(losses[1, place].mean() - judged(tuned[place], *train).mean())
    excess = compare(losses, averaged, chosen, place, model.task)
    return Observation(follows, n, excess, at_least(model.task, optimism))


def shares_of(followers: Sequence[int], place: int) -> list[float]:
    """Return by how much each cluster weighs in its average with the one at a place: (k,)."""
    return [many / max(1, many + followers[place]) for many in followers]


def models_judged(clusters: int) -> int:
    """Count the models that take personal steps in an observation: those of all clusters, and the averages."""
    return 2 * clusters - 1


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


def differ(losses: Sequence[float], follows: int) -> tuple[float, ...]:
    """Make the excess of a follower of one cluster to whom all its samples say the same, and personal steps nothing:
    from the loss of every cluster; averages do no harm."""
    wrong = tuple(loss - losses[follows] for loss in losses)
    return (*wrong, *wrong, *(0.0,) * (4 * len(wrong)))


def compare(losses: Tensor, averaged: Tensor, chosen: Tensor, follows: int, task: Task) -> tuple[float, ...]:
    """Compute what a follower of one cluster says of every cluster: losses (2, k, n) without and with personal steps,
    and those of the averages with its own; chosen (n,) -> the excess of an `Observation`."""
    losses, averaged = losses.cpu(), averaged.cpu()
    mine, theirs = (chosen == follows).double(), (chosen == torch.arange(losses.shape[1])[:, None]).double()
    own = losses[:, follows : follows + 1]
    right, wrong = (mine * own + theirs * losses).mean(dim=2), (mine * losses + theirs * own).mean(dim=2)
    others = torch.stack([wrong[0], wrong[1], right[1]]) - right[0]
    kept = chosen == follows if bool((chosen == follows).any()) else torch.ones_like(chosen, dtype=torch.bool)
    plain, tuned = own[:, 0, kept].mean(dim=1)
    merged = averaged[:, :, kept].mean(dim=2)
    harm = torch.stack([merged[0], merged[1], tuned.expand_as(merged[0])]) - plain
    if task.targets not in BOUNDED:  # by both losses, for a single one may be near 0 by luck
        harm = 2 * TYPICAL_LOSS * harm / (merged.amin(dim=0) + torch.minimum(plain, tuned)).clamp_min(SMALLEST_COST)
    excess = torch.cat([others, harm])
    excess[:, follows] = 0.0
    return tuple(excess.flatten().tolist())


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
