"""Local steps on the meta device, in the place of a GPU: a tensor that was left on the CPU, or is looked at, fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dfca
from dfca.core.learning.inputs import Lazy, sent
from dfca.core.learning.local import Drawn, TrainingSet, batch_at, draw_steps, local_steps, losses
from dfca.core.learning.optimisers import State, make_stepper
from dfca.core.learning.params import FlatModel
from dfca.core.method import LocalOptions
from dfca.sim.local.engine import Engine

META = torch.device("meta")
MODELS = {
    "dense": lambda: dfca.mlp((1, 12, 12), 3, 4),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Tanh(), nn.Linear(4, 3)),
    "cnn": lambda: dfca.cnn((1, 12, 12), 3, 6, (2, 2)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam"},
    {"clip": 1.0},
    {"batch_size": 4},
    {"batch_size": 4, "epochs": 2},
    {"momentum": 0.9, "optimizer_state": "kept"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_local_steps_stay_on_their_device(model: str, options: dict[str, Any]) -> None:
    flat, local = FlatModel(MODELS[model]()).to("meta"), LocalOptions(steps=2, **options)
    x, y = torch.zeros(10, 1, 12, 12, device=META), torch.zeros(10, dtype=torch.int64, device=META)
    trained = local_steps(
        flat, torch.zeros(flat.size, device=META), x, y, local, draw_steps(10, local, 0, 0, 0).batches
    )
    assert trained.device == losses(flat, trained[None], x, y).device == META
    if model == "cnn":  # runs alone
        return
    drawn = Drawn.stacked([draw_steps(10, local, 0, client, 0) for client in range(3)], META)
    data = TrainingSet(x.expand(3, *x.shape), y.expand(3, 10), drawn.batches)
    Engine(flat, local, 0, "stacked").stacked_steps_(torch.zeros(3, flat.size, device=META), data, local)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adam"}], ids=str)
def test_a_state_from_a_checkpoint_moves_to_the_device(options: dict[str, Any]) -> None:
    local, state = LocalOptions(optimizer_state="kept", **options), State()
    make_stepper([torch.zeros(3)], local, [0.0], state=state)([torch.ones(3)])
    theta = [torch.zeros(3, device=META)]
    make_stepper(theta, local, [0.0], state=state)([torch.ones(3, device=META)])
    assert {tensor.device for tensor in state.values() if tensor.dim()} == {META}


@pytest.mark.parametrize(("device", "pinned"), [("cuda", 1), ("cuda:1", 1), ("cpu", 0), ("meta", 0), ("mps", 0)])
def test_batches_are_copied_to_cuda_out_of_pinned_memory(
    device: str, pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins, copies = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda batch: pins.append(batch) or batch)
    monkeypatch.setattr(torch.Tensor, "to", lambda batch, *to, **how: copies.append((*to, how)) or batch)
    lazy = Lazy(
        lambda rows, round, epoch: [torch.ones(3)] * len(rows), torch.arange(2), (3,), torch.float32, True, device
    )
    assert lazy.now(0).shape == (2, 3)
    batches = torch.tensor([[[0, 1, 2], [3, -1, -1]]] * 2)
    assert [batch_at(batches, step, torch.device(device)).shape[1] for step in range(2)] == [3, 1]
    assert len(pins) == 3 * pinned
    how = {"non_blocking": True}
    assert copies == [(device, None, how), *[(torch.device(device), None, how)] * 2]


def test_what_is_on_a_device_is_not_pinned() -> None:
    assert sent(torch.zeros(2, device=META), META, torch.float64).dtype == torch.float64
