"""Samples of bytes stay bytes in memory, and give the numbers that floats give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from toy import pairwise, quick

import dfca
from dfca.data import clients
from dfca.sim.local import engine


def samples(clients: int, count: int, shape: tuple[int, ...], floats: bool) -> list[Any]:
    random = np.random.default_rng(0)
    pairs = [(random.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 3) for _ in range(clients)]
    return [((x.astype(np.float32) / np.float32(255)) if floats else x, y) for x, y in pairs]


def make_split(floats: bool) -> dfca.Split:
    data = samples(4, 12, (1, 10, 10), floats)
    return dfca.Split.of_clients(data, data, clusters=[0, 1, 0, 1])


class Images(Dataset[Any]):
    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full((1, 10, 10), index, dtype=np.uint8), index % 2

    def __len__(self) -> int:
        return 6


def test_25_megabytes_stay_25_megabytes() -> None:
    data = samples(8, 1000, (1, 56, 56), floats=False)
    split = dfca.Split.of_clients(data, [(x[:2], y[:2]) for x, y in data], classes=3)
    assert split.train.nbytes == 8 * 1000 * 56 * 56  # 25 MB
    x, _ = split.train.of(3)
    assert x.dtype == torch.float32
    assert torch.equal(x, torch.from_numpy(data[3][0]).float() / 255)
    assert split.train.subset([1, 3]).nbytes == split.train.nbytes // 4
    assert split.to("cpu").train.nbytes == split.train.nbytes
    assert split.train.to("cpu", torch.float64).of(0)[0].dtype == torch.float64
    assert dfca.Split.of_clients([Images()], [Images()]).train.x.dtype == torch.uint8


MODELS = {
    "cnn": lambda: dfca.cnn((1, 10, 10), 3, 6, (2, 2)),
    "mlp": lambda: dfca.mlp((1, 10, 10), 3, 6),
    "module": lambda: nn.Sequential(nn.Flatten(), nn.Linear(100, 4), nn.Softplus(), nn.Linear(4, 3)),
}


CASES = pairwise({"model": MODELS, "algorithm": ["dfca-gi", "dfca-auto", "fedem"], "world": [None, "ideal"]})


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_runs_on_bytes_are_bit_identical_to_runs_on_floats(case: dict[str, Any]) -> None:
    make, algorithm = MODELS[case["model"]], case["algorithm"]
    options: dict[str, Any] = {"rounds": 2, "topology": "complete", "batch_size": 5, "world": case["world"]}
    options |= {"clusters": 2} if algorithm != "dfca-auto" else {"clusters": "auto", "personal_steps": 5}
    runs = [dfca.simulate(make, make_split(floats), quick(algorithm), **options) for floats in (False, True)]
    assert torch.equal(runs[0].banks, runs[1].banks)
    assert [run.score for run in runs[:1]] == [run.score for run in runs[1:]]


def test_stacked_clients_turn_bytes_into_numbers_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        converted.append(x.numel())
        return x.to(torch.float32).div_(255)

    split = make_split(floats=False)
    monkeypatch.setattr(clients, "_from_bytes", note)
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1)
    options: dict[str, Any] = {"clusters": 2, "rounds": 2, "topology": "complete", "engine": "stacked"}
    dfca.simulate(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(100, 4), nn.Tanh(), nn.Linear(4, 3)), split, "dfca-gi", **options
    )
    assert 0 < max(converted) <= split.train.sizes[0] * 100  # of one client
    assert split.train.stacked()[0][1].dtype == torch.float32
