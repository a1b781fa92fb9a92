"""The real data sets, where `DFCA_DATA` has them."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dfca.data.files.cache import cached_path
from dfca.data.options import DataOptions
from dfca.data.partitions import make_split
from dfca.data.sources import load


@cache
def load_once(name):
    return load(name)


def real(name):
    if not os.environ.get("DFCA_DATA"):
        pytest.skip("DFCA_DATA is not set")
    if cached_path(name) is None:
        pytest.skip(f"{name} is not in {Path(os.environ['DFCA_DATA'])}")
    return load_once(name)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("mnist", (1, 28, 28), 10),
        ("emnist", (1, 28, 28), 47),
        ("cifar10", (3, 32, 32), 10),
        ("femnist", (1, 28, 28), 62),
        ("har", (6, 128), 6),
    ],
)
def test_the_file_is_what_it_says(name, shape, classes):
    dataset = real(name)
    assert dataset.x.shape[1:] == shape
    assert set(np.unique(dataset.y)) == set(range(classes))


def test_mnist_splits_as_in_the_paper():
    dataset = real("mnist")
    split = make_split(DataOptions(name="mnist", samples_per_client=100, test_samples_per_client=10), 240, 4, seed=0)
    assert set(split.train.sizes) == {100}
    assert torch.bincount(split.clusters).tolist() == [60] * 4
    upright = torch.rot90(split.train.of(5)[0], -int(split.clusters[5]), dims=(2, 3))
    first = (upright[0, 0] * 255).round().to(torch.uint8).numpy()
    assert (dataset.x[:, 0] == first).all(axis=(1, 2)).any()


def test_femnist_has_a_writer_per_client():
    real("femnist")
    split = make_split(DataOptions(name="femnist", partition="owner", minimum_samples=100), 200, 4, seed=0)
    assert min(split.train.sizes) + min(split.test.sizes) >= 90
    assert split.clusters is None


def test_har_has_a_subject_per_client_and_gravity_turns_with_the_phone():
    real("har")
    split = make_split(DataOptions(name="har", partition="owner"), 30, 4, seed=0)
    for client, cluster in enumerate(split.clusters.tolist()):
        x, y = split.train.of(client)
        gravity = x[y == 4].mean(dim=(0, 2))[:3]  # standing: along x in the phone's frame
        axis, sign = [(0, 1), (1, 1), (0, -1), (1, -1)][cluster]
        assert int(gravity.abs().argmax()) == axis
        assert float(gravity[axis]) * sign > 0.7


@pytest.mark.parametrize("name", ["mnist", "emnist", "femnist"])
def test_nothing_is_zero_in_every_data_set_of_handwriting(name):
    real(name)
    assert np.median(load(name).x[:1000]) == 0
