"""Samples that are read when they are used: the same runs, no copies, and augmentations that are drawn anew."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dfca
from dfca.base.errors import ConfigError, DataError
from dfca.core.learning.local import local_steps

OPTIONS: dict[str, Any] = {"clusters": 2, "rounds": 4, "topology": "complete", "engine": "loop"}


def network() -> nn.Module:
    return dfca.mlp((5,), 3, 4)


def write(path: Path, kind: type = np.float32) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(6, 20, 5)).astype(kind) if kind is np.float32 else random.integers(0, 256, (6, 20, 5))
    np.savez(path, x=x.astype(kind), y=random.integers(0, 3, (6, 20)))
    return path


class Shaken(Dataset[Any]):
    """A random augmentation in a Dataset; `reads` counts what is read."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        Shaken.reads += 1
        return torch.full((5,), float(index)) + torch.rand(5), index % 3

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
@pytest.mark.parametrize("algorithm", ["dfca-gi", "dfca-auto", "fedem", "fedavg"])
def test_runs_on_mapped_files_are_those_on_arrays(tmp_path: Path, algorithm: str, kind: type) -> None:
    path = write(tmp_path / "x.npz", kind)
    mapped, read = dfca.map_npz(path), np.load(path)
    assert all(np.array_equal(mapped[name], read[name]) for name in ("x", "y"))
    assert not mapped["x"].flags.owndata
    lazy, kept = (dfca.split_from((data["x"], data["y"]), lazy=lazy) for data, lazy in ((mapped, True), (read, False)))
    assert (lazy.train.nbytes, lazy.test.nbytes) == (0, 0)
    assert repr(lazy) == repr(kept)
    assert lazy.train.x.dtype == kept.train.x.dtype
    options = {**OPTIONS, "clusters": "auto" if algorithm == "dfca-auto" else 2}
    runs = [dfca.simulate(network, split, algorithm, **options) for split in (lazy, kept)]
    torch.testing.assert_close(runs[0].banks, runs[1].banks)  # dfca-auto judges several clients in one call
    assert runs[0].score == runs[1].score
    late = [dfca.simulate(network, split, algorithm, **options, world="ideal") for split in (lazy, kept)]
    torch.testing.assert_close(late[0].banks, late[1].banks)


def test_an_augmentation_is_drawn_anew_in_every_round_and_replayed() -> None:
    split = dfca.split_from([Shaken()] * 4, lazy=True)
    here = [split.train.of(1, round)[0] for round in (-1, 0, 0, 1)]
    assert not torch.equal(here[0], here[1])
    assert torch.equal(here[1], here[2])
    assert not torch.equal(here[2], here[3])
    assert not torch.equal(here[1], split.train.of(2, 0)[0])
    before = torch.random.get_rng_state()
    runs = [dfca.simulate(network, split, "dfca-gi", **OPTIONS) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(runs[0].banks, runs[1].banks)
    Shaken.reads = 0
    dfca.simulate(network, split, "dfca-gi", **{**OPTIONS, "rounds": 1, "evaluate_every": 1})
    few = Shaken.reads
    Shaken.reads = 0
    dfca.simulate(network, split, "dfca-gi", **{**OPTIONS, "rounds": 3, "evaluate_every": 3})
    assert Shaken.reads == few + 2 * split.train.of(0)[1].numel() * 4
    with pytest.warns(dfca.DfcaWarning, match=r"read anew in every round: split_from\(..., lazy=True\)"):
        dfca.split_from([Shaken()] * 4)


class Still(Shaken):
    """Samples that stay as they are."""

    def __init__(self, inputs: int = 5) -> None:
        self.inputs = inputs

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        Shaken.reads += 1
        return torch.linspace(-1, 1, self.inputs) + index / 5, index % 3


EPOCHS: dict[str, dict[str, Any]] = {
    "full batches": {"batch_size": None},
    "batches": {"batch_size": 5},
    "momentum": {"batch_size": 5, "momentum": 0.5},
    "adam": {"batch_size": 4, "optimizer": "adam", "learning_rate": 0.01},
}


def run_epochs(split: dfca.Split, algorithm: str, how: str, **more: Any) -> dfca.Result:
    return dfca.simulate(network, split, algorithm, **{**OPTIONS, "epochs": 3, **EPOCHS[how], **more})


@pytest.mark.parametrize("how", EPOCHS)
def test_a_dataset_is_read_once_per_epoch(how: str) -> None:
    for kind in (Shaken, Still):
        split = dfca.split_from([kind()] * 4, lazy=True)
        counts = []
        for rounds in (1, 3):
            Shaken.reads = 0
            run_epochs(split, "dfca-gi", how, rounds=rounds, evaluate_every=rounds)
            counts.append(Shaken.reads)
        assert counts[1] - counts[0] == 2 * len(split.train.y) * 3


@pytest.mark.parametrize("algorithm", ["dfca-gi", "fedem", "fedspd"])
def test_what_epochs_read_is_drawn_again_in_the_same_run(algorithm: str) -> None:
    split = dfca.split_from([Shaken()] * 4, lazy=True)
    runs = [run_epochs(split, algorithm, "batches") for _ in range(2)]
    assert torch.equal(runs[0].banks, runs[1].banks)
    with pytest.warns(dfca.DfcaWarning, match="read anew"):
        once = run_epochs(dfca.split_from([Shaken()] * 4), algorithm, "batches")
    assert not torch.equal(runs[0].banks, once.banks)


@pytest.mark.parametrize("inputs", [5, 4000])  # more than samples: steps are taken in their span
@pytest.mark.parametrize("how", EPOCHS)
def test_a_dataset_that_stays_as_it_is_gives_the_bits_of_one_read_per_round(how: str, inputs: int) -> None:
    def model() -> nn.Module:
        return dfca.mlp((inputs,), 3, 16)

    split = dfca.split_from([Still(inputs)] * 4, lazy=True)
    once = replace(split, train=replace(split.train, x=replace(split.train.x, fixed=True)))
    runs = [dfca.simulate(model, one, "dfca-gi", **{**OPTIONS, "epochs": 3, **EPOCHS[how]}) for one in (split, once)]
    assert torch.equal(runs[0].banks, runs[1].banks)


@pytest.mark.parametrize("hidden", [(), (4,)])
def test_the_steps_of_an_epoch_are_on_what_was_read_for_it(hidden: tuple[int, ...]) -> None:
    split = dfca.split_from([Shaken()] * 4, lazy=True)
    local = dfca.LocalOptions(epochs=3, learning_rate=0.5)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)) if hidden else nn.Linear(5, 3)

    setting = dfca.Setting(
        split=split, graph=nx.complete_graph(4), make_model=model, algorithm=dfca.ALGORITHMS["local"](), clusters=1,
        rounds=2, seed=0, local=local, engine="loop",
    )  # fmt: skip
    whole, first, second = (dfca.Simulation(setting) for _ in range(3))
    for round in range(2):
        expected = whole.banks[0].clone()
        whole.step()
        for client, vector in enumerate(expected):
            for epoch in range(3):
                x, y = split.train.of(client, round, epoch)
                vector.copy_(local_steps(whole.flat, vector, x, y, replace(local, epochs=1)))
        torch.testing.assert_close(whole.banks[0], expected)
    first.step()
    second.restore(*first.state())
    second.step()
    assert torch.equal(second.banks, whole.banks)


def test_parts_of_lazy_samples_are_lazy() -> None:
    data = dfca.split_from([Shaken()] * 4, lazy=True).train
    part = data.subset([2, 0])
    assert part.nbytes == 0
    assert torch.equal(part.of(0)[0], data.of(2)[0])
    assert torch.equal(part.of(1)[1], data.of(0)[1])
    assert data.subset([]).clients == 0
    assert data.to("cpu", torch.float64).of(0)[0].dtype == torch.float64
    assert len(data.x[:0].now(0)) == 0


@pytest.mark.parametrize("engine", ["stacked", "threads"])
def test_other_engines_are_refused(engine: str) -> None:
    with pytest.raises(ConfigError, match="samples are read when they are used"):
        dfca.simulate(network, dfca.split_from([Shaken()] * 4, lazy=True), "dfca-gi", **{**OPTIONS, "engine": engine})
    assert dfca.simulate(
        network, dfca.split_from([Shaken()] * 4, lazy=True), "dfca-gi", **{**OPTIONS, "engine": "auto"}
    )


def test_samples_of_several_clients_come_in_the_order_of_their_rows() -> None:
    pair = torch.arange(6.0 * 20 * 2).view(6, 20, 2), torch.zeros(6, 20, dtype=torch.int64)
    lazy, kept = (dfca.split_from(pair, lazy=lazy).train for lazy in (True, False))
    rows = torch.randperm(len(kept.x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(lazy.x[rows].now(0), kept.x[rows])


def test_rows_of_frames_go_by_their_places() -> None:
    pandas = pytest.importorskip("pandas")
    index = range(20, 0, -1)
    x = pandas.DataFrame(np.random.default_rng(0).normal(size=(20, 3)), index=index)
    y = pandas.Series(np.arange(20) % 3, index=index)
    lazy, kept = (dfca.Split.of_clients([(x, y)], [(x, y)], lazy=lazy) for lazy in (True, False))
    assert torch.equal(lazy.train.y, kept.train.y)
    assert torch.equal(lazy.train.of(0)[0], kept.train.of(0)[0])
    halves = [dfca.split_from([(x, y)], lazy=lazy).test for lazy in (True, False)]
    assert torch.equal(halves[0].of(0)[0], halves[1].of(0)[0])


class Growing(Shaken):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(1 + index), 0


PAIR = (np.ones((4, 2), np.float32), np.array([0, 1, 0, 1]))
WRONG: dict[str, tuple[Any, str]] = {
    "shapes": (Growing(), "samples must have equal shapes, client 0 has"),
    "numbers": ((np.full((4, 2), np.nan), PAIR[1]), "has NaN or infinity in its samples"),
    "counts": ((PAIR[0], PAIR[1][:3]), "4 samples but 3 labels"),
    "labels": ((PAIR[0], np.ones((4, 2), np.int64)), "labels of shape"),
    "fractions": ((PAIR[0], np.ones(4)), "labels of client 0"),
    "kind": (7, "client 0 .*is a int"),
    "several": ([((PAIR[0][0], PAIR[0][0]), 0)] * 3, "several tensors"),
    "types": (
        [(PAIR[0][0], 0), (np.ones(2, np.uint8), 1), (PAIR[0][0], 0)],
        "must be of one type, client 0 has torch.float32, client 0 has torch.uint8",
    ),
    "no pair": ([3, 4, 5], r"gives a int per sample; give a pair \(sample, label\)"),
    "empty": ((PAIR[0][:0], PAIR[1][:0]), "client 0 has no training samples"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_read_is_refused_in_a_sentence(what: str) -> None:
    client, sentence = WRONG[what]
    with pytest.raises(DataError, match=sentence):
        dfca.Split.of_clients([client], [PAIR], lazy=True)


def test_files_that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "small.npz", x=np.zeros(3))
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    (tmp_path / "text.npz").write_text("no")
    for name, sentence in (
        ("small", "is compressed; write it by numpy.savez"),
        ("objects", "holds objects"),
        ("text", "not a zip"),
        ("none", "No such file"),
    ):
        with pytest.raises(DataError, match=sentence):
            dfca.map_npz(tmp_path / f"{name}.npz")
    with pytest.raises(DataError, match="None cannot be mapped"):
        dfca.map_npz(None)  # type: ignore[arg-type]


HEADERS = {
    "{": "is damaged",
    "-" * 9000 + "1": "is damaged",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}": "cannot be mapped",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (10**9,)}": "cannot be mapped",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (30,)}": "is cut off",
    f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**22},)}}": "is cut off",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000, 4000000000)}": "is cut off",
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_that_lie_are_refused(tmp_path: Path, header: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        length = len(header).to_bytes(2, "little")
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + length + header.encode() + bytes(12))
    with pytest.raises(DataError, match=HEADERS[header]):
        dfca.map_npz(tmp_path / "x.npz")
