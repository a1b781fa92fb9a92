"""Which client gets which rows: one function per partition, each returning the rows of every client, training and test.

Rows index the samples of a `SamplePool`. Within a cluster no training row is dealt twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dfca.base.errors import ConfigError, DataError
from dfca.core.rng import derive, stream
from dfca.data.options import DataOptions
from dfca.data.sources import DataSet


@dataclass(frozen=True, eq=False)
class SamplePool:
    """Samples that can be dealt: `rows` of x `(n, *shape)` and y `(n,)`."""

    x: Tensor
    y: Tensor
    rows: Tensor


@dataclass(frozen=True, eq=False)
class DealRequest:
    """Everything that a deal needs. true: `(N,)`, the cluster of each client."""

    options: DataOptions
    dataset: DataSet
    train: SamplePool
    test: SamplePool
    true: Tensor
    clusters: int
    seed: int

    def members(self, cluster: int) -> list[int]:
        """List the clients of a cluster."""
        return (self.true == cluster).nonzero()[:, 0].tolist()


Rows = list[Tensor]
Deal = Callable[[DealRequest], tuple[Rows, Rows]]


def open_pools(dataset: DataSet, test_share: float, seed: int) -> tuple[SamplePool, SamplePool]:
    """Make the training and test pool; without an official test part, a share is kept back."""
    x, y = torch.from_numpy(dataset.x), torch.from_numpy(dataset.y)
    if dataset.x_test is not None and dataset.y_test is not None:
        x_test, y_test = torch.from_numpy(dataset.x_test), torch.from_numpy(dataset.y_test)
        return SamplePool(x, y, torch.arange(len(y))), SamplePool(x_test, y_test, torch.arange(len(y_test)))
    train, test = keep_back(dataset, torch.arange(len(y)), test_share, stream(seed, "keep-back"))
    return SamplePool(x, y, train), SamplePool(x, y, test)


def keep_back(dataset: DataSet, rows: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Divide rows into training and test, both in random order; at least one of each where there are two.

    Images: at random. Windows overlap by half, so a random draw would test on what was trained on: of each owner and
    label, the last part in recording order is kept.
    """
    if dataset.kind == "image":
        mixed = rows[torch.randperm(len(rows), generator=generator)]
        tests = _test_count(len(rows), share)
        return mixed[tests:], mixed[:tests]
    owner = np.zeros(len(rows), dtype=np.int64) if dataset.owner is None else dataset.owner[rows.numpy()]
    groups = owner * dataset.classes + dataset.y[rows.numpy()]
    is_test = np.zeros(len(rows), dtype=bool)
    for group in np.unique(groups):
        places = np.flatnonzero(groups == group)
        is_test[places[len(places) - _test_count(len(places), share) :]] = True
    mask = torch.from_numpy(is_test)
    train, test = rows[~mask], rows[mask]
    return (
        train[torch.randperm(len(train), generator=generator)],
        test[torch.randperm(len(test), generator=generator)],
    )


def deal_rotated(request: DealRequest) -> tuple[Rows, Rows]:
    """Deal a fresh permutation of the whole pool evenly to the clients of each cluster; the remainder is dropped."""
    return _deal_evenly(request, request.train, "deal", "samples_per_client"), _deal_tests(request)


def deal_uneven(request: DealRequest) -> tuple[Rows, Rows]:
    """Deal as in `rotated`, in sizes proportional to lognormal(0, spread) draws, at least 1 each; tests evenly."""
    dealt: Rows = [torch.empty(0)] * len(request.true)
    for cluster in range(request.clusters):
        members, mixed = request.members(cluster), _mix(request, request.train, "deal", cluster)
        share = _share(request, len(mixed), len(members), "samples_per_client")
        wanted = request.options.samples_per_client
        total = len(mixed) if wanted is None else share * len(members)
        draws = torch.randn(len(members), generator=stream(request.seed, "sizes", cluster), dtype=torch.float64)
        sizes = apportion((request.options.spread * draws).exp(), total)
        for client, rows in zip(members, torch.split(mixed[:total], sizes), strict=True):
            dealt[client] = rows
    return dealt, _deal_tests(request)


def deal_dirichlet(request: DealRequest) -> tuple[Rows, Rows]:
    """Deal equal sizes as in `rotated`, with a label mix per client drawn from Dirichlet(concentration).

    A label that runs out is replaced by the client's other labels. Test samples follow the mix that the client
    trains on; they are drawn anew for each client, so that two clients may be tested on the same sample.
    """
    train: Rows = [torch.empty(0)] * len(request.true)
    test: Rows = [torch.empty(0)] * len(request.true)
    classes = request.dataset.classes
    for cluster in range(request.clusters):
        members = request.members(cluster)
        held = _by_label(request.train, _mix(request, request.train, "deal", cluster), classes)
        kept = _by_label(request.test, _mix(request, request.test, "deal-test", cluster), classes)
        size = _share(request, len(request.train.rows), len(members), "samples_per_client")
        tests = _share(request, len(request.test.rows), len(members), "test_samples_per_client")
        for client in members:
            random = np.random.default_rng(derive(request.seed, "label-mix", client))
            mix = random.dirichlet(np.full(classes, request.options.concentration))
            counts = _draw_counts(mix, size, [len(rows) for rows in held], random)
            train[client] = _take(held, counts, random)
            held = [rows[count:] for rows, count in zip(held, counts, strict=True)]
            tested = [rows[torch.from_numpy(random.permutation(len(rows)))] for rows in kept]
            counts = _draw_counts(np.asarray(counts) / size, tests, [len(rows) for rows in tested], random)
            test[client] = _take(tested, counts, random)
    return train, test


def deal_owner(request: DealRequest) -> tuple[Rows, Rows]:
    """Draw one owner (writer, subject) per client without replacement; divide its samples by test_share."""
    options, dataset, clients = request.options, request.dataset, len(request.true)
    if dataset.owner is None:
        raise DataError(
            f'{dataset.name} in the cache does not say who made each sample, so partition "owner" cannot be used; '
            "use femnist or har, or another partition"
        )
    train: Rows = []
    test: Rows = []
    fewest = max(options.minimum_samples, 2)
    owners = np.unique(dataset.owner)
    for owner in owners[torch.randperm(len(owners), generator=stream(request.seed, "owners")).numpy()]:
        if len(train) == clients:
            break
        rows = torch.from_numpy(np.flatnonzero(dataset.owner == owner))
        if len(rows) < fewest:
            continue
        held, kept = keep_back(dataset, rows, options.test_share, stream(request.seed, "owner", int(owner)))
        enough = len(held) >= (options.samples_per_client or 1)
        if enough and len(kept) >= (options.test_samples_per_client or 1):
            train.append(held[: options.samples_per_client])
            test.append(kept[: options.test_samples_per_client])
    if len(train) < clients:
        raise ConfigError(
            f"clients must be <= {len(train)}, the owners in {dataset.name} with {_owner_bound(options, fewest)}, "
            f"got {clients}; ask for fewer clients or fewer samples"
        )
    return train, test


DEALS: dict[str, Deal] = {
    "rotated": deal_rotated,
    "uneven": deal_uneven,
    "dirichlet": deal_dirichlet,
    "owner": deal_owner,
}


def _owner_bound(options: DataOptions, fewest: int) -> str:
    bounds = [f">= {fewest} samples"]
    if options.samples_per_client:
        bounds.append(f">= {options.samples_per_client} for training")
    if options.test_samples_per_client:
        bounds.append(f">= {options.test_samples_per_client} for testing")
    return ", ".join(bounds)


def _test_count(samples: int, share: float) -> int:
    return min(max(round(share * samples), 1), samples - 1) if samples > 1 else 0


def _mix(request: DealRequest, pool: SamplePool, purpose: str, cluster: int) -> Tensor:
    return pool.rows[torch.randperm(len(pool.rows), generator=stream(request.seed, purpose, cluster))]


def _deal_tests(request: DealRequest) -> Rows:
    return _deal_evenly(request, request.test, "deal-test", "test_samples_per_client")


def _deal_evenly(request: DealRequest, pool: SamplePool, purpose: str, key: str) -> Rows:
    dealt: Rows = [torch.empty(0)] * len(request.true)
    for cluster in range(request.clusters):
        members, mixed = request.members(cluster), _mix(request, pool, purpose, cluster)
        size = _share(request, len(mixed), len(members), key)
        hand = len(mixed) // len(members)
        for place, client in enumerate(members):
            dealt[client] = mixed[place * hand : place * hand + size]
    return dealt


def _share(request: DealRequest, samples: int, members: int, key: str) -> int:
    """Return how many samples each client of a cluster gets: an even share, or fewer if the options ask for fewer."""
    hand = samples // members
    part = "test" if key.startswith("test") else "training"
    deal = f"{samples} {part} samples of {request.dataset.name} dealt to the {members} clients of a cluster"
    if hand < 1:
        raise ConfigError(f"{deal} leave some with none; use fewer clients or more clusters")
    asked = getattr(request.options, key)
    if asked is not None and asked > hand:
        raise ConfigError(f"{key} must be <= {hand} ({deal}), got {asked}; lower it or use fewer clients")
    return hand if asked is None else asked


def apportion(weights: Tensor, total: int) -> list[int]:
    """Divide `total` into sizes >= 1 proportional to the weights, by largest remainders."""
    ideal = weights / weights.sum() * (total - len(weights))
    sizes = ideal.floor()
    left = total - len(weights) - int(sizes.sum())
    sizes[(ideal - sizes).argsort(descending=True, stable=True)[:left]] += 1
    return [int(size) + 1 for size in sizes]


def _by_label(pool: SamplePool, rows: Tensor, classes: int) -> Rows:
    labels = pool.y[rows]
    return [rows[labels == label] for label in range(classes)]


def _take(by_label: Rows, counts: list[int], random: np.random.Generator) -> Tensor:
    """Take the first rows of each label, in random order."""
    rows = torch.cat([rows[:count] for rows, count in zip(by_label, counts, strict=True)])
    return rows[torch.from_numpy(random.permutation(len(rows)))]


def _draw_counts(mix: np.ndarray, size: int, available: list[int], random: np.random.Generator) -> list[int]:
    """Draw how many samples of each label make up `size`, by the mix, never more than there are."""
    left = np.asarray(available, dtype=np.int64)
    counts = np.zeros_like(left)
    while (missing := size - int(counts.sum())) > 0:
        room = left - counts
        weights = np.where(room > 0, mix, 0.0)
        if weights.sum() < 1e-12:
            weights = room.astype(np.float64)
        counts += np.minimum(random.multinomial(missing, weights / weights.sum()), room)
    return [int(count) for count in counts]
