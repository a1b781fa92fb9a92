"""Clients with small images, and ways to train on them: epochs, decay, augmentation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dfca.core.learning.images import CentreCrop, Standardise
from dfca.core.learning.local import LocalOptions
from dfca.core.method import Augment
from dfca.data.clients import Split
from dfca.models import cnn_tutorial

SHAPE, CROP = (2, 14, 14), 12
CHANGES = Augment(flip=True, brightness=0.3, contrast=(0.5, 1.5))
CROPS = Augment(crop=CROP, flip=True, brightness=0.3, contrast=(0.5, 1.5))
EPOCHS = LocalOptions(epochs=2, learning_rate=0.2, batch_size=5, decay=0.7)
RECIPES = {
    "epochs": EPOCHS,
    "full-batch epochs": LocalOptions(epochs=2, learning_rate=0.2, decay=0.7),
    "whole batches": LocalOptions(epochs=2, learning_rate=0.2, batch_size=4, momentum=0.5),
    "changes of full batches": LocalOptions(steps=2, learning_rate=0.2, augment=CHANGES),
    "crops": LocalOptions(epochs=2, learning_rate=0.2, batch_size=5, decay=0.7, momentum=0.5, augment=CROPS),
}


def make_image_split(clients: int = 4, samples: int | list[int] = 12) -> Split:
    """Make clients of two clusters whose images are brighter on one side or the other."""
    generator = torch.Generator().manual_seed(5)
    truth = torch.arange(clients) % 2
    sizes = [samples] * clients if isinstance(samples, int) else samples

    def draw(count: int, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.randn(count, *SHAPE, generator=generator), torch.arange(count) % 3
        x[torch.arange(count), :, 4 * y + 1] += 2.0
        return (x if cluster == 0 else x.flip(2)), y

    train = [draw(n, int(c)) for n, c in zip(sizes, truth, strict=True)]
    test = [draw(6, int(c)) for c in truth]
    return Split.of_clients(train, test, clusters=truth, classes=3)


def image_mlp() -> nn.Module:
    """Build a network of linear layers, which has steps of its own without augmentation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 14 * 14, 6), nn.ReLU(), nn.Linear(6, 3))


def cropping_mlp() -> nn.Module:
    """Build a network on centre crops that stacks."""
    return nn.Sequential(
        CentreCrop(CROP), Standardise(), nn.Flatten(), nn.Linear(2 * CROP**2, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def cropping_cnn() -> nn.Module:
    """Build the tutorial's CNN on centre crops, with larger weights than its start has."""
    network = cnn_tutorial((2, CROP, CROP), 3, 8, (3, 4))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4)
    return nn.Sequential(CentreCrop(CROP), Standardise(), network)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": image_mlp,
    "cropping mlp": cropping_mlp,
    "cropping cnn": cropping_cnn,
}
