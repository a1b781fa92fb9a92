"""Split a data set over clients: which samples each client holds, under which cluster's transform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from dfca.base.device import one_thread
from dfca.base.errors import ConfigError
from dfca.core.learning.task import Task
from dfca.core.rng import stream
from dfca.data.clients import ClientData, Split, validate
from dfca.data.deals import DEALS, DealRequest, Rows, SamplePool, apportion, open_pools
from dfca.data.forecast import make_forecast_split
from dfca.data.options import DataOptions
from dfca.data.own import call_factory
from dfca.data.registry import source_of
from dfca.data.sources import load
from dfca.data.transforms import (
    Draw,
    Transform,
    dominant_mask,
    dominant_share,
    make_transforms,
    other_clusters,
    resolve,
)


def make_split(
    options: DataOptions, clients: int, clusters: int, seed: int, drifted: bool = False, task: Task | None = None
) -> Split:
    """Split a data set over clients; the same arguments give the same split.

    The true clusters are as equal in size as possible and spread over the clients at random. They are unknown (None)
    where no transform distinguishes clusters.

    Args:
        options: The data set, and how it is divided.
        clients: The number of clients, N.
        clusters: The number of true clusters, k.
        seed: Determines every random choice.
        drifted: Return what the clients hold after the drift: a share of them is then in the true cluster k.
        task: What data of your own (`DataOptions.factory`) is for, where it does not say.

    Returns:
        The split.

    Raises:
        ConfigError: If the numbers do not fit each other or the data.
        DataError: If the data cannot be used.

    Example:
        >>> import dfca
        >>> dfca.make_split(dfca.DataOptions(name="digits", samples_per_client=20), clients=8, clusters=2, seed=0)
        Split(8 clients with 20 training and 90 test samples each, shape (1, 8, 8), 10 classes, 2 true clusters)
    """
    if not isinstance(options, DataOptions):
        raise ConfigError(f'data must be DataOptions, got {options!r}; give dfca.DataOptions(name="digits")')
    if clients < 1 or clusters < 1:
        raise ConfigError(f"clients and clusters must be >= 1, got {clients} and {clusters}")
    if clusters > clients:
        raise ConfigError(f"clusters must be <= clients ({clients}), got {clusters}; use fewer clusters")
    if options.factory is not None:
        return call_factory(options.factory, clients, seed, options.test_share, task)
    drifted = drifted and options.drift_share > 0
    if source_of(options.name).kind == "series":
        resolve(options, "series")
        true = spread_clusters(clients, clusters, seed, options.cluster_shares, options.placement)
        true = drift_clusters(true, clusters, options.drift_share, seed) if drifted else true
        return replace(make_forecast_split(options, true, clusters, seed), notes=_notes(clients, clusters, options))
    dataset = load(options.name)
    transform = resolve(options, dataset.kind)
    transforms = make_transforms(transform, clusters, options.angles, dataset.classes, seed, options.levels)
    if drifted:
        transforms += make_transforms(transform, 1, (options.drift_angle,), dataset.classes, seed)
    true = spread_clusters(clients, clusters, seed, options.cluster_shares, options.placement)
    others = None if options.skew == "none" else other_clusters(options, true, clusters, seed)
    train, test = open_pools(dataset, options.test_share, seed)
    request = DealRequest(options, dataset, train, test, true, clusters, seed)
    train_rows, test_rows = DEALS[options.partition](request)
    if drifted:
        request = replace(request, true=drift_clusters(true, clusters, options.drift_share, seed))
    if options.partition == "owner":
        test = train  # both parts of an owner's samples come from the training pool's tensors
    # Thousands of short copies gain nothing from more threads, and on a busy machine wait for them:
    # `make_split(DataOptions(name="mnist"), 240, 4, 0)` on 2 cores at a load of 5 took 22 s with two, 2 s with one.
    with one_thread():
        held = _gather(request, train, train_rows, transforms, others, "train")
        kept = _gather(request, test, test_rows, transforms, others, "test")
    split = Split(held, kept, None, dataset.classes)
    if transform != "none":
        split = replace(split, clusters=request.true, notes=_notes(clients, clusters, options))
    validate(split)
    return split


def spread_clusters(
    clients: int, clusters: int, seed: int, shares: Sequence[float] | None = None, placement: str = "random"
) -> Tensor:
    """Assign a true cluster to each client, in random order: sizes differ by at most 1, or are proportional to shares,
    at least 1 each."""
    even = torch.arange(clients) % clusters
    if shares is not None:
        if len(shares) != clusters:
            raise ConfigError(
                f"cluster_shares must name one number per cluster ({clusters}), got {len(shares)}; leave them out for "
                "clusters of equal size"
            )
        sizes = torch.tensor(apportion(torch.tensor(shares, dtype=torch.float64), clients))
        even = torch.repeat_interleave(torch.arange(clusters), sizes)
    if placement == "blocks":
        return even.sort().values
    return even[torch.randperm(clients, generator=stream(seed, "clusters"))]


def drift_clusters(true: Tensor, clusters: int, share: float, seed: int) -> Tensor:
    """Move a share of the clients, drawn at random, to the new cluster k; at least one moves, and one stays."""
    count = min(len(true) - 1, max(1, round(share * len(true))))
    moved = true.clone()
    moved[torch.randperm(len(true), generator=stream(seed, "drift"))[:count]] = clusters
    return moved


def _notes(clients: int, clusters: int, options: DataOptions) -> tuple[str, ...]:
    if clients % clusters == 0 or options.cluster_shares is not None:
        return ()
    fewer = clients // clusters
    return (f"{clients} clients over {clusters} clusters: {fewer} or {fewer + 1} each",)


def _gather(
    request: DealRequest, pool: SamplePool, rows: Rows, transforms: list[Transform], others: Tensor | None, part: str
) -> ClientData:
    """Copy every client's samples, transformed, to its place in one tensor."""
    offsets = tuple(accumulate((len(mine) for mine in rows), initial=0))
    x = torch.empty(offsets[-1], *pool.x.shape[1:], dtype=torch.float32)
    y = torch.empty(offsets[-1], dtype=torch.int64)
    for client, mine in enumerate(rows):
        place = slice(offsets[client], offsets[client + 1])
        own, draw = int(request.true[client]), partial(stream, request.seed, "noise", part, client)
        if others is None:
            x[place], y[place] = _transformed(pool, mine, transforms[own], draw)
            continue
        generator = stream(request.seed, "dominant", part, client)
        share = dominant_share(request.options, client, request.seed)
        dominant = dominant_mask(len(mine), share, generator)
        for mask, cluster in ((dominant, own), (~dominant, int(others[client]))):
            if mask.any():
                x[place][mask], y[place][mask] = _transformed(pool, mine[mask], transforms[cluster], draw)
    return ClientData(x, y, offsets)


def _transformed(pool: SamplePool, rows: Tensor, transform: Transform, draw: Draw) -> tuple[Tensor, Tensor]:
    """Take rows of a pool as float32 (uint8 images become 0..1) and transform them."""
    x = pool.x[rows]
    x = x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x.to(torch.float32)
    return transform(x, pool.y[rows], draw)
