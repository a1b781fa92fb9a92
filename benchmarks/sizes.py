"""The sizes of what is measured, and settings of these sizes: random samples of the right shape, no data set.

The labels of cluster j are what start model j predicts: from the first round on every client trains the model of its
own cluster, and all k are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
import torch
from torch import nn

from benchmarks.baselines.work import cnn
from dfca import algorithms
from dfca.core.learning.local import LocalOptions, infer
from dfca.core.learning.params import FlatModel, initial
from dfca.core.method import Augment
from dfca.data.clients import ClientData, Split
from dfca.models import known_factory, on_images
from dfca.sim.setting import Setting

NEVER = 10**9
"""A round that is never reached: nothing is evaluated while rounds are timed."""

AUGMENT = Augment(crop=24, flip=True, brightness=0.247, contrast=(0.2, 1.8))
"""What the paper's authors do to CIFAR-10 (`table1-cifar10 --recipe authors`)."""


@dataclass(frozen=True)
class Size:
    """The size of everything in a round."""

    model: str = "mlp"
    inputs: int = 784  # of a CNN: pixels of a square image
    colours: int = 1
    hidden: int = 200
    classes: int = 10
    clients: int = 20
    samples: int = 50
    clusters: int = 1
    degree: int = 10
    steps: int = 5
    batch_size: int | None = None
    algorithm: str = "dfca-gi"
    learning_rate: float = 0.05
    augmented: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample."""
        side = round(self.inputs**0.5)
        return (self.inputs,) if self.model == "mlp" else (self.colours, side, side)

    @property
    def make_model(self) -> Callable[[], nn.Module]:
        """Return the function that builds a fresh model; it crops and standardises what is augmented."""
        if self.model == "cnn-pfl":
            return lambda: nn.Sequential(*cnn(self.hidden, self.shape[1]))
        crop = AUGMENT.crop if self.augmented else None
        shape = self.shape if crop is None else (self.colours, crop, crop)
        channels = (64, 64) if self.model == "cnn-tutorial" else (32, 64)
        build = known_factory(self.model, shape, self.classes, self.hidden, channels)
        return on_images(build, crop, standardise=self.augmented)

    @property
    def parameters(self) -> int:
        """Count P."""
        return FlatModel(self.make_model()).size


def make_setting(size: Size, seed: int = 0) -> Setting:
    """Draw the samples and the graph (regular, as near to the degree as N allows)."""
    flat = FlatModel(size.make_model())
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(size.clients * size.samples, *size.shape, generator=random)
    y = torch.empty(len(x), dtype=torch.int64)
    offsets = tuple(range(0, len(x) + 1, size.samples))
    starts = [initial(flat, size.make_model, seed, "init", j) for j in range(size.clusters)]
    with torch.no_grad():
        for client in range(size.clients):
            mine = slice(offsets[client], offsets[client + 1])
            y[mine] = infer(flat, starts[client % size.clusters], x[mine], "objective").argmax(dim=1)
    train = ClientData(x, y, offsets)
    test = ClientData(x[: size.clients], y[: size.clients], tuple(range(size.clients + 1)))
    return Setting(
        split=Split(train, test, None, size.classes),
        graph=regular_graph(size.clients, size.degree, seed),
        make_model=size.make_model,
        algorithm=algorithms.get(size.algorithm),
        clusters=size.clusters,
        rounds=NEVER,
        seed=seed,
        local=LocalOptions(
            steps=size.steps,
            learning_rate=size.learning_rate,
            batch_size=size.batch_size,
            augment=AUGMENT if size.augmented else None,
        ),
        evaluate_every=NEVER,
    )


def regular_graph(clients: int, degree: int, seed: int) -> nx.Graph:
    """Draw a graph in which all clients have the same number of neighbours, as near to `degree` as possible."""
    degree = min(degree, clients - 1)
    if clients * degree % 2:
        degree -= 1
    if degree > (clients - 1) // 2:  # a dense graph is drawn as the complement of a sparse one
        return nx.complement(nx.random_regular_graph(clients - 1 - degree, clients, seed=seed))
    return nx.random_regular_graph(degree, clients, seed=seed)
