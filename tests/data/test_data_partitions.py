"""Who holds what: every sample carries its number, so that a deal can be read back from the split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dfca.base.errors import ConfigError, DataError
from dfca.data.deals import _draw_counts, apportion
from dfca.data.options import DataOptions
from dfca.data.partitions import make_split, spread_clusters

TRAIN, TEST, OWNERS = 603, 101, 20


def numbered_images(n):
    """Images whose top left pixels are their number, so that a rotation can be undone and the number read."""
    x = np.zeros((n, 28, 28), dtype=np.uint8)
    x[:, 0, 0], x[:, 0, 1] = np.arange(n) // 256, np.arange(n) % 256
    x[:, 0, 2] = 255
    return x


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with small stand-ins for mnist and har."""
    monkeypatch.setenv("DFCA_DATA", str(tmp_path))
    np.savez_compressed(
        tmp_path / "mnist.npz",
        x_train=numbered_images(TRAIN),
        y_train=(np.arange(TRAIN) % 10).astype(np.uint8),
        x_test=numbered_images(TEST),
        y_test=np.arange(TEST, dtype=np.uint8) % 10,
        writer_train=np.arange(TRAIN, dtype=np.int16) % OWNERS,
    )
    windows = np.zeros((240, 128, 6), dtype=np.float16)
    windows[:, :, 2] = np.arange(240)[:, None]  # z is not touched by the rotation
    windows[:, :, 0] = 1
    subject = np.repeat(np.arange(1, 5, dtype=np.uint8), 60)
    np.savez_compressed(
        tmp_path / "hapt_har.npz", x=windows, y=np.tile(np.repeat(np.arange(6), 10), 4), subject=subject
    )
    return tmp_path


def read_back(data, turns):
    """Read, per client, the numbers of its samples; `turns[i]` are the quarter turns of client i."""
    numbers = []
    for client in range(data.clients):
        x = torch.rot90(data.of(client)[0], -turns[client], dims=(2, 3)).mul(255).round().long()
        assert (x[:, 0, 0, 2] == 255).all(), "the rotation is not the one of the cluster"
        numbers.append((x[:, 0, 0, 0] * 256 + x[:, 0, 0, 1]).tolist())
    return numbers


def test_every_cluster_deals_the_whole_set_without_overlap(cache):
    split = make_split(DataOptions(name="mnist"), clients=12, clusters=4, seed=0)
    true = split.clusters.tolist()
    for data, total in ((split.train, TRAIN), (split.test, TEST)):
        numbers = read_back(data, true)
        orders = []
        for cluster in range(4):
            dealt = [n for client in range(12) if true[client] == cluster for n in numbers[client]]
            assert len(dealt) == len(set(dealt)) == total // 3 * 3
            orders.append(tuple(dealt))
        assert len(set(orders)) == 4, "each cluster takes a fresh permutation"
        assert set(data.sizes) == {total // 3}


def test_labels_travel_with_their_images_in_0_to_1(cache):
    split = make_split(DataOptions(name="mnist"), clients=4, clusters=2, seed=0)
    turns = [2 * cluster for cluster in split.clusters.tolist()]
    for client, numbers in enumerate(read_back(split.train, turns)):
        assert split.train.of(client)[1].tolist() == [number % 10 for number in numbers]
    assert split.train.x.dtype == torch.float32
    assert float(split.train.x.max()) == 1.0
    assert split.classes == 10


def test_the_seed_decides_everything(cache):
    options = DataOptions(name="mnist", skew="inconsistent", alpha=0.7)
    first, again, other = (make_split(options, 6, 3, seed) for seed in (0, 0, 1))
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.x, again.test.x)
    assert torch.equal(first.clusters, again.clusters)
    assert not torch.equal(first.train.y, other.train.y)


def test_clusters_are_balanced_and_mixed():
    true = spread_clusters(24, 5, seed=0)
    assert sorted(torch.bincount(true).tolist()) == [4, 5, 5, 5, 5]
    assert true.tolist() != (torch.arange(24) % 5).tolist()
    assert not torch.equal(true, spread_clusters(24, 5, seed=1))


def test_an_uneven_number_of_clients_is_said_once(cache):
    assert make_split(DataOptions(name="mnist"), 24, 5, 0).notes == ("24 clients over 5 clusters: 4 or 5 each",)
    assert make_split(DataOptions(name="mnist"), 20, 5, 0).notes == ()


def test_samples_per_client_cuts_the_deal(cache):
    whole = make_split(DataOptions(name="mnist"), 6, 2, 0)
    cut = make_split(DataOptions(name="mnist", samples_per_client=7, test_samples_per_client=3), 6, 2, 0)
    assert set(cut.train.sizes) == {7}
    assert set(cut.test.sizes) == {3}
    for client in range(6):
        assert torch.equal(cut.train.of(client)[0], whole.train.of(client)[0][:7])


@pytest.mark.parametrize(
    ("values", "clients", "clusters", "sentence"),
    [
        ({"samples_per_client": 202}, 6, 2, r"samples_per_client must be <= 201 \(603 training samples of mnist"),
        ({"test_samples_per_client": 99}, 6, 2, "test_samples_per_client must be <= 33"),
        ({"samples_per_client": 202, "partition": "uneven"}, 6, 2, "samples_per_client must be <= 201"),
        ({"samples_per_client": 202, "partition": "dirichlet"}, 6, 2, "samples_per_client must be <= 201"),
        ({}, 102, 1, "101 test samples of mnist dealt to the 102 clients of a cluster leave some with none"),
        ({}, 2, 3, r"clusters must be <= clients \(2\), got 3"),
        ({}, 0, 1, "clients and clusters must be >= 1, got 0 and 1"),
        ({"angles": (0, 90, 180)}, 4, 2, r"one angle per cluster \(2\), got 3"),
        ({"name": "mnits"}, 4, 2, 'unknown dataset "mnits"; did you mean "emnist" or "mnist"'),
        ({"skew": "consistent"}, 4, 1, "needs clusters >= 2"),
        ({"partition": "owner"}, 21, 2, r"clients must be <= 20, the owners in mnist with >= 2 samples, got 21"),
        ({"partition": "owner", "minimum_samples": 31}, 4, 2, "clients must be <= 3, .* with >= 31 samples, got 4"),
        ({"partition": "owner", "samples_per_client": 25}, 4, 2, "clients must be <= 3, .*>= 25 for training"),
    ],
)
def test_numbers_that_do_not_fit_name_value_and_bound(cache, values, clients, clusters, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_split(DataOptions(**{"name": "mnist", **values}), clients, clusters, 0)


def test_skew_shows_the_share_alpha_the_dominant_way(cache):
    options = DataOptions(name="mnist", skew="consistent", alpha=0.7)
    split = make_split(options, 8, 4, 0)
    others = {cluster: set() for cluster in range(4)}
    for data in (split.train, split.test):
        for client, cluster in enumerate(split.clusters.tolist()):
            x = data.of(client)[0]
            seen = [int((torch.rot90(x, -turns, dims=(2, 3))[:, 0, 0, 2] == 1).sum()) for turns in range(4)]
            assert sum(seen) == len(x)
            assert seen[cluster] == round(0.7 * len(x))
            others[cluster] |= {turns for turns in range(4) if seen[turns] and turns != cluster}
    assert all(len(other) == 1 for other in others.values())


def test_skewed_samples_are_not_all_at_the_end(cache):
    split = make_split(DataOptions(name="mnist", skew="inconsistent", alpha=0.5), 4, 4, 0)
    cluster = int(split.clusters[0])
    upright = torch.rot90(split.train.of(0)[0], -cluster, dims=(2, 3))[:, 0, 0, 2] == 1
    assert 0.4 < float(upright[: TRAIN // 2].float().mean()) < 0.6


def test_uneven_sizes_add_up_and_overlap_nowhere(cache):
    split = make_split(DataOptions(name="mnist", partition="uneven", spread=1.0), 12, 4, 0)
    true = split.clusters.tolist()
    numbers = read_back(split.train, true)
    for cluster in range(4):
        dealt = [n for client in range(12) if true[client] == cluster for n in numbers[client]]
        assert sorted(dealt) == list(range(TRAIN))
    assert len(set(split.train.sizes)) > 6
    assert set(split.test.sizes) == {TEST // 3}


def test_uneven_sizes_have_the_mean_that_is_asked(cache):
    split = make_split(DataOptions(name="mnist", partition="uneven", samples_per_client=50), 12, 4, 0)
    for cluster in range(4):
        assert sum(size for size, own in zip(split.train.sizes, split.clusters, strict=True) if own == cluster) == 150


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30), st.integers(0, 500))
def testapportioned_sizes_are_whole_positive_and_complete(weights, extra):
    sizes = apportion(torch.tensor(weights, dtype=torch.float64), len(weights) + extra)
    assert sum(sizes) == len(weights) + extra
    assert min(sizes) >= 1
    ideal = np.asarray(weights) / np.sum(weights) * extra + 1
    assert np.abs(np.asarray(sizes) - ideal).max() < 1 + 1e-6


def test_dirichlet_mixes_labels_per_client_and_deals_nothing_twice(cache):
    options = DataOptions(name="mnist", partition="dirichlet", concentration=0.1, samples_per_client=30)
    split = make_split(options, 12, 2, 0)
    turns = [2 * cluster for cluster in split.clusters.tolist()]
    numbers = read_back(split.train, turns)
    for cluster in range(2):
        dealt = [n for client in range(12) if turns[client] == 2 * cluster for n in numbers[client]]
        assert len(dealt) == len(set(dealt)) == 180
    shares = torch.stack([torch.bincount(split.train.of(i)[1], minlength=10) / 30 for i in range(12)])
    assert float(shares.max(1).values.mean()) > 0.5, "a small concentration is one-sided"
    even = make_split(
        DataOptions(name="mnist", partition="dirichlet", concentration=1000, samples_per_client=30), 12, 2, 0
    )
    flat = torch.stack([torch.bincount(even.train.of(i)[1], minlength=10) / 30 for i in range(12)])
    assert float(flat.max(1).values.mean()) < 0.35


def test_dirichlet_tests_follow_the_mix_that_is_trained(cache):
    options = DataOptions(name="mnist", partition="dirichlet", concentration=0.1, samples_per_client=30)
    split = make_split(options, 12, 2, 0)
    turns = [2 * cluster for cluster in split.clusters.tolist()]
    for client, numbers in enumerate(read_back(split.test, turns)):
        assert len(numbers) == len(set(numbers)) == TEST // 6
        trained = torch.bincount(split.train.of(client)[1], minlength=10)
        tested = torch.bincount(split.test.of(client)[1], minlength=10)
        if (trained > 0).sum() > 2:  # 10 test samples per label are enough: nothing is filled up with other labels
            assert set(tested.nonzero().flatten().tolist()) <= set(trained.nonzero().flatten().tolist())


def test_dirichlet_gives_the_whole_pool_away_when_nothing_is_cut(cache):
    split = make_split(DataOptions(name="mnist", partition="dirichlet", concentration=0.05), 9, 3, 0)
    assert set(split.train.sizes) == {TRAIN // 3}
    labels = split.train.of(0)[1]
    assert (labels.diff() < 0).any(), "samples are in random order, not sorted by label"


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda mix: sum(mix) > 0),
    st.integers(1, 40),
    st.integers(0, 9),
)
def test_drawn_counts_fill_the_size_from_what_there_is(mix, size, seed):
    available = [size // 2 + 1] * len(mix)
    counts = _draw_counts(np.asarray(mix), size, available, np.random.default_rng(seed))
    assert sum(counts) == size
    assert all(0 <= count <= there for count, there in zip(counts, available, strict=True))


def test_owner_gives_each_client_one_writer(cache):
    split = make_split(DataOptions(name="mnist", partition="owner", test_share=0.25), 12, 3, 0)
    assert split.clusters is None
    assert split.notes == ()
    train, test = read_back(split.train, [0] * 12), read_back(split.test, [0] * 12)
    owners = []
    for mine, tests in zip(train, test, strict=True):
        (owner,) = {number % OWNERS for number in mine + tests}
        owners.append(owner)
        assert sorted(mine + tests) == list(range(owner, TRAIN, OWNERS))
        assert len(tests) == round(0.25 * len(mine + tests))
    assert len(set(owners)) == 12


def test_owner_with_rotation_knows_its_clusters(cache):
    split = make_split(DataOptions(name="mnist", partition="owner", transform="rotation"), 8, 4, 0)
    assert sorted(split.clusters.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    read_back(split.train, split.clusters.tolist())


def test_owner_needs_owners(cache):
    with pytest.raises(DataError, match="digits in the cache does not say who made each sample"):
        make_split(DataOptions(partition="owner"), 4, 2, 0)


def test_windows_turn_about_z_and_the_last_of_each_label_are_tests(cache):
    split = make_split(DataOptions(name="har", partition="owner"), 4, 2, 0)
    assert split.train.x.shape[1:] == (6, 128)
    for client, cluster in enumerate(split.clusters.tolist()):
        (x, y), (x_test, y_test) = split.train.of(client), split.test.of(client)
        assert (x[:, 0] == (1, -1)[cluster]).all()
        numbers, tests = x[:, 2, 0].long(), x_test[:, 2, 0].long()
        assert len({number // 60 for number in [*numbers.tolist(), *tests.tolist()]}) == 1
        for label in range(6):
            assert sorted((tests[y_test == label] % 10).tolist()) == [8, 9]
            assert sorted((numbers[y == label] % 10).tolist()) == list(range(8))


def test_a_set_without_tests_keeps_a_share_back_for_the_deal(cache):
    split = make_split(DataOptions(name="har", test_share=0.5), 4, 2, 0)
    trained, tested = set(split.train.x[:, 2, 0].tolist()), set(split.test.x[:, 2, 0].tolist())
    assert not trained & tested
    assert len(trained) == len(tested) == 120


def test_no_transform_means_that_nobody_knows_the_clusters(cache):
    split = make_split(DataOptions(name="mnist", transform="none"), 4, 2, 0)
    assert split.clusters is None
    read_back(split.train, [0] * 4)


def test_label_permutation_leaves_the_images_alone(cache):
    split = make_split(DataOptions(name="mnist", transform="label-permutation"), 4, 2, 0)
    numbers = read_back(split.train, [0] * 4)
    for client, cluster in enumerate(split.clusters.tolist()):
        labels = split.train.of(client)[1].tolist()
        orders = {(number % 10, label) for number, label in zip(numbers[client], labels, strict=True)}
        assert len(orders) == 10, "one label for each"
        assert all(old == new for old, new in orders) == (cluster == 0)


def test_the_number_of_threads_is_left_as_it_was(cache):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make_split(DataOptions(name="mnist"), 4, 2, 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_digits_need_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFCA_DATA", str(tmp_path / "none"))
    split = make_split(DataOptions(), 24, 4, 0)
    assert split.train.x.shape[1:] == (1, 8, 8)
    assert set(split.train.sizes) == {1437 // 6}
    assert set(split.test.sizes) == {360 // 6}
    assert 0.99 < float(split.train.x.max()) <= 1


def test_cluster_shares_divide_the_clients():
    true = spread_clusters(24, 3, 0, (3, 2, 1))
    assert torch.bincount(true).tolist() == [12, 8, 4]
    assert torch.bincount(spread_clusters(5, 3, 0, (100, 1, 1))).tolist() == [3, 1, 1]
    with pytest.raises(ConfigError, match=r"cluster_shares must name one number per cluster \(3\), got 2"):
        spread_clusters(24, 3, 0, (1, 1))
    split = make_split(DataOptions(name="digits", cluster_shares=(3, 1), samples_per_client=10), 8, 2, 0)
    assert torch.bincount(split.clusters).tolist() == [6, 2]
    assert not split.notes


@pytest.mark.parametrize("transform", ["noise", "blur", "label-swap"])
def test_graded_clusters_are_known_and_drawn_alike(transform: str):
    options = DataOptions(name="digits", transform=transform, samples_per_client=10)
    one, two = (make_split(options, 4, 2, 0) for _ in range(2))
    assert torch.equal(one.train.x, two.train.x)
    assert torch.equal(one.train.y, two.train.y)
    assert one.clusters is not None
    plain = make_split(DataOptions(name="digits", transform="none", samples_per_client=10), 4, 2, 0)
    for client in range(4):
        same = [torch.equal(a, b) for a, b in zip(one.train.of(client), plain.train.of(client), strict=True)]
        assert all(same) == (int(one.clusters[client]) == 0)
