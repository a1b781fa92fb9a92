"""Client data and splits of a user's own arrays: views, stacking, and one clear sentence per mistake."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dfca.base.errors import ConfigError, DataError, DfcaWarning
from dfca.data.clients import ClientData, Split


def pair(n=3, shape=(2,), label=0):
    return np.arange(n * int(np.prod(shape)), dtype=np.float32).reshape(n, *shape), np.full(n, label)


def test_of_returns_views_of_the_right_rows():
    data = ClientData(torch.arange(10.0).reshape(5, 2), torch.arange(5), (0, 2, 5))
    x, y = data.of(1)
    assert x.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert y.tolist() == [2, 3, 4]
    x[0, 0] = -1
    assert data.x[2, 0] == -1
    assert data.sizes == (2, 3)
    assert data.clients == 2


def test_stacked_is_a_view_for_equal_sizes_and_none_otherwise():
    data = ClientData(torch.arange(12.0).reshape(6, 2), torch.arange(6), (0, 2, 4, 6))
    x, y = data.stacked()
    assert x.shape == (3, 2, 2)
    assert y.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert x.data_ptr() == data.x.data_ptr()
    assert ClientData(data.x, data.y, (0, 1, 4, 6)).stacked() is None


def test_subset_copies_clients_in_order():
    data = ClientData(torch.arange(5.0), torch.arange(5), (0, 2, 5))
    assert data.subset([1, 0]).x.tolist() == [2, 3, 4, 0, 1]
    assert data.subset([1, 0]).offsets == (0, 3, 5)
    assert data.subset([]).sizes == ()


def test_of_clients_joins_pairs_and_finds_the_classes():
    split = Split.of_clients([pair(2), pair(4, label=3)], [pair(1), pair(1, label=4)], clusters=[1, 0])
    assert split.train.offsets == (0, 2, 6)
    assert split.train.y.tolist() == [0, 0, 3, 3, 3, 3]
    assert split.train.x.dtype == torch.float32
    assert split.train.y.dtype == torch.int64
    assert split.classes == 5
    assert split.clusters.tolist() == [1, 0]


def test_bytes_become_0_to_1_and_floats_stay():
    bytes_ = np.array([[0, 51, 255]], dtype=np.uint8), np.array([0])
    floats = np.array([[0, 51, 255]], dtype=np.float64), np.array([0])
    split = Split.of_clients([bytes_, floats], [bytes_, floats])
    assert split.train.x.tolist() == [[0, pytest.approx(0.2), 1], [0, 51, 255]]


def test_tokens_stay_integers():
    tokens = np.array([[5, 0, 300]]), np.array([1])
    split = Split.of_clients([tokens], [tokens])
    assert split.train.x.dtype == torch.int64
    assert split.train.x.tolist() == [[5, 0, 300]]


class Squares(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([float(i), float(i * i)]), i % 2


def test_torch_datasets_are_read_sample_by_sample():
    tensors = TensorDataset(torch.ones(2, 2), torch.tensor([1, 0]))
    split = Split.of_clients([Squares(3), tensors], [Squares(1), tensors])
    assert split.train.of(0)[0].tolist() == [[0, 0], [1, 1], [2, 4]]
    assert split.train.y.tolist() == [0, 1, 0, 1, 0]


class Growing(Squares):
    def __getitem__(self, i):
        return torch.zeros(i + 1), 0


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ([pair(), pair(0)], "client 1 has no training samples; give it at least 1"),
        ([pair(), Squares(0)], "client 1 has no training samples; give it at least 1"),
        ([pair(), pair(label=7)], "client 1 has the training label 7; labels must be in 0..2"),
        ([pair(), pair(label=-1)], "client 1 has the training label -1; labels must be in 0..2"),
        ([pair(), (np.full((2, 2), np.nan), np.zeros(2, int))], "client 1 has NaN or infinity in its training samples"),
        ([pair(), (np.full((2, 2), np.inf), np.zeros(2, int))], "client 1 has NaN or infinity in its training samples"),
        ([pair(), pair(shape=(3,))], "client 0 (training) has (2,), client 1 has (3,)"),
        ([pair(), (np.zeros((2, 2)), np.zeros(3, int))], "has 2 samples but labels of shape (3,)"),
        ([pair(), (np.zeros((2, 2)), np.zeros(2))], "labels of client 1 (training) are torch.float64; give integers"),
        ([pair(), (np.zeros((2, 2), bool), np.zeros(2, int))], "x of client 1 (training) is torch.bool; give floats"),
        ([pair(), Endless()], "client 1 (training) is a Endless; give a pair (x, y) or a map-style torch Dataset"),
        ([pair(), Growing(2)], "samples of client 1 (training) must have equal shapes"),
        (
            [pair(), (["a"], [0])],
            "client 1 (training) holds the text 'a', and numbers are wanted; labels of all clients",
        ),
        ([pair(), (np.array([[None]]), [0])], "client 1 (training) holds ndarray that is no numeric array"),
        ([pair()], "train and test must list the same clients, at least 1, got 1 and 2"),
    ],
)
def test_mistakes_name_the_client(train, sentence):
    with pytest.raises(DataError) as caught:
        Split.of_clients(train, [pair(), pair()], classes=3)
    assert sentence in str(caught.value)


def test_a_client_without_test_samples_is_named():
    with pytest.raises(DataError, match="client 0 has no test samples; give it at least 1"):
        Split.of_clients([pair()], [pair(0)])


def test_test_samples_must_look_like_training_samples():
    with pytest.raises(DataError, match=r"training has \(2,\), test \(3,\)"):
        Split.of_clients([pair()], [pair(shape=(3,))])


def test_nan_is_found_in_samples_that_are_single_numbers():
    with pytest.raises(DataError, match="client 1 has NaN or infinity"):
        Split.of_clients([pair(shape=()), (np.array([np.nan]), np.array([0]))], [pair(shape=()), pair(shape=())])


@pytest.mark.parametrize("clusters", [[0], [0, -1], [[0, 1]]])
def test_clusters_must_fit_the_clients(clusters):
    with pytest.raises(ConfigError, match="clusters must"):
        Split.of_clients([pair(), pair()], [pair(), pair()], clusters=clusters)


def test_pictures_that_are_no_arrays_get_the_way_out():
    class Pictures(Squares):
        def __getitem__(self, i):
            return object(), 0

    with pytest.raises(DataError, match="transform=ToTensor"):
        Split.of_clients([Pictures(1)], [pair()])


def test_to_moves_everything():
    split = Split.of_clients([pair()], [pair()], clusters=[0]).to("meta")
    assert {split.train.x.device.type, split.test.y.device.type, split.clusters.device.type} == {"meta"}


class Flipped(Dataset):
    """A random augmentation."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3), index % 2


def test_an_augmentation_that_would_be_frozen_is_warned_of() -> None:
    with pytest.warns(DfcaWarning, match=r"client 0 \(training\) gives other samples when it is read again"):
        Split.of_clients([Flipped()], [pair(shape=(3,))])
