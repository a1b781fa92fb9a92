"""ProFed's split of MNIST over regions (Domini et al., JORS 2026): `data.factory = "dfca.data.profed:hard"`.

The package ProFed deals the samples: every region has a label mix of its own, its devices share that of their region.
"hard" gives each of 5 regions 2 labels, "dirichlet" draws the mixes by Dirichlet(0.5), "iid" gives all alike. Samples
come from the cache (`dfca data get mnist`): the first SAMPLES of the 60,000 training images, which keeps a run small.
Devices of a region have consecutive numbers. The last fifth of what a device is dealt is its test part: ProFed deals
test samples by a second draw, whose Dirichlet mixes are others than those of the training samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from dfca.base.errors import ConfigError, DataError
from dfca.data.clients import Split
from dfca.data.sources import load

REGIONS = 5
SAMPLES = 12_500


def deal(method: str, clients: int, seed: int) -> Split:
    """Let ProFed deal samples to regions, and those of a region to its devices.

    Raises DataError where ProFed is missing, ConfigError where there are fewer devices than regions.
    """
    partition = _partition()
    if clients < REGIONS:
        raise ConfigError(f"clients must be >= {REGIONS}, one per region, got {clients}")
    data = load("mnist")
    dealt = _Labelled(torch.as_tensor(data.y[:SAMPLES]), [str(label) for label in range(data.classes)])
    everything: Subset[Any] = Subset(dealt, list(range(SAMPLES)))  # type: ignore[arg-type]
    regions = partition(everything, everything, "MNIST", method, REGIONS, seed)
    train: list[Any] = []
    test: list[Any] = []
    true: list[int] = []
    for region, devices in enumerate(np.array_split(np.arange(clients), REGIONS)):
        for subset, _ in regions.from_subregion_to_devices(region, len(devices)).values():
            cut = len(subset.indices) * 4 // 5
            for part, indices in ((train, subset.indices[:cut]), (test, subset.indices[cut:])):
                part.append((data.x[indices], data.y[indices]))
            true.append(region)
    return Split.of_clients(train, test, clusters=None if method == "IID" else true, classes=data.classes)


hard, dirichlet, iid = (partial(deal, method) for method in ("Hard", "Dirichlet", "IID"))


class _Labelled(NamedTuple):
    """What ProFed asks of a data set: its labels, and the names of its classes."""

    targets: torch.Tensor
    classes: list[str]


def _partition() -> Callable[..., Any]:
    """Import ProFed's function, which brings torchvision and datasets along."""
    try:
        module = import_module("ProFed.partitioner")
    except (ImportError, RuntimeError) as error:  # torchvision raises the latter beside another torch
        raise DataError(
            f"ProFed's split needs the package ProFed (Python 3.12 or later): pip install 'dfca[profed]'; {error}"
        ) from None
    partition: Callable[..., Any] = module.partition_to_subregions
    return partition
