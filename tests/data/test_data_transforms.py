"""How clusters differ: rotations against numpy, sensor axes by hand, permutations, skew."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dfca.base.errors import ConfigError
from dfca.core.rng import stream
from dfca.data.options import DataOptions
from dfca.data.transforms import (
    blur,
    dominant_mask,
    label_permutations,
    label_swaps,
    make_transforms,
    other_clusters,
    resolve,
    rotate,
    rotate_axes,
    rotate_by_sampling,
)


def images(n=2, c=3, side=5):
    return torch.rand(n, c, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("turns", [-1, 0, 1, 2, 3, 5])
def test_multiples_of_90_are_exactly_numpys_rot90(turns):
    x = images()
    assert np.array_equal(rotate(x, 90.0 * turns).numpy(), np.rot90(x.numpy(), turns, axes=(2, 3)))


@pytest.mark.parametrize("side", [4, 5])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_sampling_agrees_with_the_exact_rotation(side, degrees):
    x = images(side=side)
    assert torch.allclose(rotate_by_sampling(x, degrees), rotate(x, degrees), atol=1e-5)


def test_other_angles_turn_the_same_way_and_fill_with_zeros():
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 8] = 1  # on the right of the middle; 45 degrees counter-clockwise is up and right
    turned = rotate(x, 45)[0, 0]
    row, column = divmod(int(turned.argmax()), 9)
    assert (row, column) == (1, 7)
    assert rotate(torch.ones(1, 1, 9, 9), 45)[0, 0, 0, 0] == 0


def test_rotation_of_oblong_images_is_refused():
    with pytest.raises(ConfigError, match="square images, got 4x6"):
        rotate(torch.zeros(1, 1, 4, 6), 90)


def test_axes_turn_about_z_in_both_sensors():
    x = torch.tensor([1.0, 2, 3, 4, 5, 6])[None, :, None]
    assert rotate_axes(x, 90).flatten().tolist() == [-2, 1, 3, -5, 4, 6]
    assert rotate_axes(x, 180).flatten().tolist() == [-1, -2, 3, -4, -5, 6]
    assert rotate_axes(x, 360).flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert x.flatten().tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="triples x y z, got 4 channels"):
        rotate_axes(torch.zeros(1, 4, 2), 90)


@settings(deadline=None, max_examples=50)
@given(st.floats(-720, 720), st.integers(0, 100))
def test_axis_rotation_keeps_lengths_and_composes(degrees, seed):
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turned = rotate_axes(x, degrees)
    for start in (0, 3):
        assert torch.allclose(turned[:, start : start + 3].norm(dim=1), x[:, start : start + 3].norm(dim=1))
    assert torch.allclose(rotate_axes(turned, -degrees), x)


def test_default_angles_are_even_steps():
    x, y = images(), torch.zeros(2, dtype=torch.int64)
    for clusters, steps in ((2, 2), (4, 1), (1, 0)):
        for cluster, transform in enumerate(make_transforms("rotation", clusters, None, 10, 0)):
            assert torch.equal(transform(x, y)[0], torch.rot90(x, steps * cluster, dims=(2, 3)))
    third = make_transforms("rotation", 3, None, 10, 0)[1](x, y)[0]
    assert torch.equal(third, rotate_by_sampling(x, 120))


def test_angles_must_match_the_clusters():
    with pytest.raises(ConfigError, match=r"one angle per cluster \(3\), got 2"):
        make_transforms("rotation", 3, (0, 90), 10, 0)
    assert len(make_transforms("axis-rotation", 5, (0, 1, 2, 3, 4), 6, 0)) == 5


def test_label_permutations_differ_and_cluster_0_keeps_its_labels():
    orders = label_permutations(3, 6, seed=1)
    assert orders[0].tolist() == [0, 1, 2]
    assert len({tuple(order.tolist()) for order in orders}) == 6
    assert all(sorted(order.tolist()) == [0, 1, 2] for order in orders)
    with pytest.raises(ConfigError, match=r"clusters must be <= 6 \(orders of 3 labels\), got 7"):
        label_permutations(3, 7, seed=1)
    y = torch.tensor([0, 1, 2, 2])
    transform = make_transforms("label-permutation", 2, None, 3, 1)[1]
    assert transform(torch.zeros(4, 1), y)[1].tolist() == [int(orders[1][label]) for label in y]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 200), st.floats(0.01, 1.0), st.integers(0, 5))
def test_the_dominant_share_is_alpha(samples, alpha, seed):
    mask = dominant_mask(samples, alpha, torch.Generator().manual_seed(seed))
    assert int(mask.sum()) == round(alpha * samples)


def test_consistent_skew_is_one_draw_per_cluster_and_inconsistent_one_per_client():
    true = torch.arange(400) % 4
    same = other_clusters(DataOptions(skew="consistent"), true, 4, seed=3)
    drawn = other_clusters(DataOptions(skew="inconsistent"), true, 4, seed=3)
    for cluster in range(4):
        assert len(set(same[true == cluster].tolist())) == 1
        assert set(drawn[true == cluster].tolist()) == set(range(4)) - {cluster}
    assert not (same == true).any()
    with pytest.raises(ConfigError, match="needs clusters >= 2, got 1"):
        other_clusters(DataOptions(skew="consistent"), torch.zeros(3), 1, seed=0)


def test_auto_depends_on_the_kind_and_the_partition():
    assert resolve(DataOptions(), "image") == "rotation"
    assert resolve(DataOptions(partition="dirichlet"), "image") == "rotation"
    assert resolve(DataOptions(partition="owner"), "image") == "none"
    assert resolve(DataOptions(partition="owner"), "window") == "axis-rotation"
    assert resolve(DataOptions(transform="label-permutation"), "window") == "label-permutation"
    with pytest.raises(ConfigError, match="does not fit digits"):
        resolve(DataOptions(transform="axis-rotation"), "image")
    with pytest.raises(ConfigError, match='use "axis-rotation"'):
        resolve(DataOptions(transform="rotation"), "window")
    with pytest.raises(ConfigError, match="needs a transform"):
        resolve(DataOptions(partition="owner", skew="consistent"), "image")


def test_rotation_by_sampling_keeps_the_middle():
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1
    assert math.isclose(float(rotate(x, 33)[0, 0, 2, 2]), 1.0, abs_tol=1e-5)


def test_blur_averages_over_nine_pixels():
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 9.0
    assert torch.equal(blur(x, 0), x)
    once = blur(x, 1)
    assert torch.allclose(once[0, 0, 1:4, 1:4], torch.ones(3, 3))
    assert float(once.sum()) == pytest.approx(9.0)
    assert torch.allclose(blur(x, 2), blur(once, 1))


def test_noise_is_a_clients_own_and_has_its_level():
    x, y = torch.zeros(2000, 1, 2, 2), torch.zeros(2000, dtype=torch.int64)
    plain, noisy = make_transforms("noise", 2, None, 10, 0, (0.0, 0.5))
    assert torch.equal(plain(x, y, lambda: stream(0, "a"))[0], x)
    one, again, other = (noisy(x, y, lambda name=name: stream(0, name))[0] for name in "aab")
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert float(one.std()) == pytest.approx(0.5, rel=0.05)


def test_swaps_exchange_pairs_and_differ():
    orders = label_swaps(10, [0, 1, 1, 3], seed=2)
    assert torch.equal(orders[0], torch.arange(10))
    for order, pairs in zip(orders, (0, 1, 1, 3), strict=True):
        assert torch.equal(order[order], torch.arange(10))  # a swap undoes itself
        assert int((order != torch.arange(10)).sum()) == 2 * pairs
    assert not torch.equal(orders[1], orders[2])
    with pytest.raises(ConfigError, match=r"levels must be <= 5 \(pairs of 10 labels\), got 6"):
        label_swaps(10, [6], seed=0)
    with pytest.raises(ConfigError, match="cannot all swap other pairs of 2 labels"):
        label_swaps(2, [0, 1, 1], seed=0)


def test_levels_must_fit():
    with pytest.raises(ConfigError, match=r"levels must name one level per cluster \(3\), got 2"):
        make_transforms("blur", 3, None, 10, 0, (0, 1))
    with pytest.raises(ConfigError, match=r"levels of blur and label-swap must be integers, got 0\.5"):
        make_transforms("blur", 2, None, 10, 0, (0, 0.5))
    with pytest.raises(ConfigError, match='transform "blur" does not fit har'):
        resolve(DataOptions(name="har", transform="blur"), "window")
