"""Data of the user's own becomes a split: arrays, lists, Hugging Face and flwr-datasets partitions, factories."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import dfca
from dfca.base import imports
from dfca.base.errors import ConfigError, DataError
from dfca.data.own import split_from

X = torch.arange(5 * 10 * 3, dtype=torch.float32).view(5, 10, 3)
Y = torch.arange(50).view(5, 10) % 2


def rows_of(split: dfca.Split, client: int) -> list[float]:
    """Return the first feature of all samples of a client, in order: each sample has its own."""
    parts = (split.train.of(client)[0], split.test.of(client)[0])
    return sorted(torch.cat([part[:, 0] for part in parts]).tolist())


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        [(x, y) for x, y in zip(X, Y, strict=True)],
        [(x.tolist(), y.tolist()) for x, y in zip(X, Y, strict=True)],
        [TensorDataset(x, y) for x, y in zip(X, Y, strict=True)],
        (X.flatten(0, 1), Y.flatten(), torch.arange(5).repeat_interleave(10)),
        (X.flatten(0, 1).numpy(), Y.flatten().numpy(), np.repeat(["a", "b", "c", "d", "e"], 10)),
        {"train": list(zip(X, Y, strict=True)), "classes": 2},
        [(pd.DataFrame(x.numpy()), pd.Series(y.numpy())) for x, y in zip(X, Y, strict=True)],
        (
            pd.DataFrame(X.flatten(0, 1).numpy()),
            pd.Series(Y.flatten().numpy()),
            pd.Series(np.repeat(["a", "b", "c", "d", "e"], 10)),
        ),
    ],
)
def test_every_form_gives_the_same_clients(source: Any) -> None:
    split = split_from(source, clients=5, test_share=0.3, seed=1)
    assert split.train.sizes == (7,) * 5
    assert split.test.sizes == (3,) * 5
    for client in range(5):
        assert rows_of(split, client) == X[client, :, 0].tolist(), "each sample is in one part, once"
    again = split_from((X, Y), test_share=0.3, seed=1)
    assert torch.equal(split.train.x, again.train.x)
    assert not torch.equal(split.train.x, split_from((X, Y), test_share=0.3, seed=2).train.x)


@pytest.mark.parametrize(
    ("clusters", "got"),
    [(["a", "b", "a", "b", "a"], "'a'"), ([0.0, 0.5, 0.0, 0.5, 1.0], "0.0"), ([None, 0, 0, 0, 0], "None")],
)
def test_clusters_that_are_no_integers_are_refused(clusters: list[Any], got: str) -> None:
    with pytest.raises(ConfigError, match=f"clusters must be integers >= 0, one per client, got {got}; number them"):
        split_from({"train": list(zip(X, Y, strict=True)), "clusters": clusters})


def test_clusters_are_a_list_an_array_or_a_tensor_of_integers() -> None:
    for given_as in (list, np.array, torch.tensor, lambda clusters: torch.tensor(clusters, dtype=torch.uint8)):
        split = split_from({"train": list(zip(X, Y, strict=True)), "clusters": given_as([0, 1, 0, 1, 2])})
        assert split.clusters is not None
        assert split.clusters.tolist() == [0, 1, 0, 1, 2]


def test_test_data_and_clusters_are_taken_as_they_are() -> None:
    pairs = list(zip(X, Y, strict=True))
    split = split_from((pairs, pairs[::-1], [0, 1, 0, 1, 0]))
    assert split.clusters is not None
    assert split.clusters.tolist() == [0, 1, 0, 1, 0]
    assert torch.equal(split.test.of(0)[0], X[4])
    assert split_from(split) is split


@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.floats(0.01, 0.99), st.integers(0, 5))
def test_a_part_is_held_out_of_every_client(sizes: list[int], share: float, seed: int) -> None:
    source = [(np.arange(n, dtype=np.float32)[:, None], np.zeros(n, dtype=np.int64)) for n in sizes]
    split = split_from(source, test_share=share, seed=seed)
    for client, n in enumerate(sizes):
        assert rows_of(split, client) == list(range(n))
        assert split.test.sizes[client] == min(n - 1, max(1, round(share * n)))


class Feature:
    num_classes = 7


class Partition:
    """A Hugging Face dataset as flwr-datasets hands it out: columns by name."""

    column_names = ("image", "label")
    features = {"image": None, "label": Feature()}  # noqa: RUF012

    def __init__(self, client: int, images: bool) -> None:
        from PIL import Image

        pixels = (np.full((4, 4), 10 * client + i, dtype=np.uint8) for i in range(5))
        self.columns = {"image": [Image.fromarray(p) if images else p for p in pixels], "label": [client % 7] * 5}

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return 5


class Partitioner:
    num_partitions = 3


class FederatedDataset:
    """As documented by flwr-datasets: partitions by number."""

    partitioners = {"train": Partitioner()}  # noqa: RUF012

    def __init__(self, images: bool = True) -> None:
        self.images = images

    def load_partition(self, partition_id: int, split: str | None = None) -> Partition:
        return Partition(partition_id, self.images)


def test_partitions_of_flower_become_clients() -> None:
    split = split_from(FederatedDataset())
    assert split.train.clients == 3
    assert split.classes == 7
    assert tuple(split.train.x.shape[1:]) == (1, 4, 4), "images have their channels first"
    assert sorted((split.train.of(2)[0][:, 0, 0, 0] * 255).round().tolist())[0] >= 20
    assert split_from(FederatedDataset(), clients=2).train.clients == 2
    named = split_from(FederatedDataset(images=False), columns=("image", "label"))
    assert tuple(named.train.x.shape[1:]) == (4, 4)
    with pytest.raises(DataError, match='no column "pixels"; its columns: image, label'):
        split_from(FederatedDataset(), columns=("pixels", "label"))


class Streamed(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise IndexError


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (3, "cannot make clients of this (int); give a dfca.Split, a list with the samples of each client"),
        ("digits", "cannot make clients of this (str)"),
        ((X[0], Y[0]), "arrays (x, y) have the clients first"),
        ((X[0], Y[0], Y[0][:3]), "arrays (x, y, owner) have one row per sample"),
        ({"test": []}, "train is missing"),
        ({"train": [], "trian": []}, "trian is unknown"),
        ([(X[0][:1], Y[0][:1])], "client 0 has 1 samples, and one of each client is held out"),
        ([3], "client 0 is a int; give a pair (x, y)"),
        ([], "train and test must list the same clients, at least 1"),
    ],
)
def test_what_is_no_data_is_refused(source: Any, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        split_from(source)
    assert sentence in str(error.value)


def test_another_number_of_clients_is_refused() -> None:
    with pytest.raises(DataError, match="the data is of 5 clients and 6 are asked for; set clients = 5"):
        split_from((X, Y), clients=6)
    with pytest.raises(ConfigError, match="test_share must be > 0 and < 1, got 1"):
        split_from((X, Y), test_share=1)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module of the user's own, and look for modules in its folder."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(imports, "_folders", [])
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    (tmp_path / "own_data.py").write_text(
        "import torch, networkx\n"
        "def pairs(clients, seed):\n"
        "    return torch.ones(clients, 5, 2) * seed, torch.arange(5).repeat(clients, 1) % 2\n"
        "def broken(clients, seed):\n    return 1 / 0\n"
        "def nothing(clients, seed):\n    return None\n"
        "def few(clients, seed):\n    return pairs(clients - 1, seed)\n"
        "def hub(clients, seed):\n    return [(0, i) for i in range(1, clients)]\n"
        "def graph(clients, seed):\n    return networkx.path_graph(clients + 1)\n"
        "number = 3\n"
    )
    return tmp_path


def test_a_factory_is_called_with_clients_and_seed(module: Path) -> None:
    split = dfca.make_split(dfca.DataOptions(factory="own_data:pairs", test_share=0.4), clients=4, clusters=1, seed=7)
    assert split.train.sizes == (3,) * 4
    assert split.train.x.unique().tolist() == [7]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_data:broken", 'data.factory "own_data:broken" failed with ZeroDivisionError: division by zero ('),
        ("own_data:nothing", 'data.factory "own_data:nothing": cannot make clients of this (NoneType)'),
        ("own_data:few", 'data.factory "own_data:few": the data is of 3 clients and 4 are asked for'),
        ("own_data:number", 'data.factory "own_data:number" must be callable, got int'),
        ("own_data:none", "cannot be imported from"),
        ("own_data", 'data.factory must be "package.module:function", got "own_data"'),
        ("../own:x", 'data.factory must be "package.module:function"'),
    ],
)
def test_a_factory_that_fails_is_one_sentence(module: Path, name: str, sentence: str) -> None:
    with pytest.raises((DataError, ConfigError)) as error:
        dfca.make_split(dfca.DataOptions(factory=name), clients=4, clusters=1, seed=0)
    assert sentence in str(error.value)


def test_a_graph_of_the_users_own(module: Path) -> None:
    graph = dfca.make_graph(dfca.TopologyOptions(name="own_data:hub"), 5, 0)
    assert sorted(dict(graph.degree).values()) == [1, 1, 1, 1, 4]
    for name, sentence in (
        ("own_data:graph", 'the graph of topology "own_data:graph" must have the nodes 0..4, one per client; it has 6'),
        ("own_data:broken", "failed with ZeroDivisionError"),
        ("own_data:nothing", "must return a networkx graph or a list of edges"),
    ):
        with pytest.raises(ConfigError) as error:
            dfca.make_graph(dfca.TopologyOptions(name=name), 5, 0)
        assert sentence in str(error.value)


def test_a_module_of_another_folder_is_not_taken_for_this_one(module: Path) -> None:
    imports.import_object("own_data:number", "key")
    other = module / "other"
    other.mkdir()
    (other / "own_data.py").write_text("number = 4\n")
    imports.look_in(other)
    with pytest.raises(ConfigError, match=r"a module own_data was imported from .* rename one of them"):
        imports.import_object("own_data:number", "key")


def test_keys_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="partition has no meaning with factory"):
        dfca.DataOptions(factory="a:b", partition="uneven")
    options = dfca.DataOptions(factory="a:b", distributions=3)
    assert options.name == "a:b"
    assert dfca.DataOptions(**options.model_dump()) == options, "a stored config gives every key"


def test_splits_show_themselves() -> None:
    split = split_from({"train": list(zip(X, Y, strict=True)), "clusters": [0, 0, 1, 1, 1]})
    assert repr(split) == (
        "Split(5 clients with 8 training and 2 test samples each, shape (3,), 2 classes, 2 true clusters)"
    )
    html = split._repr_html_()
    assert "2 of 0, 3 of 1" in html
    assert "color:inherit" in html
