"""Known layers as direct calls: the values and gradients of the modules, in the order of the paper."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dfca.core.learning.images import CentreCrop, Standardise
from dfca.core.learning.layers import Mode
from dfca.core.learning.local import LocalOptions, TrainingSet, forward, infer, local_steps, local_steps_
from dfca.core.learning.params import FlatModel
from dfca.models import cnn, cnn1d, cnn_tutorial, mlp

MODULES = {
    "mlp": (lambda: mlp((1, 8, 8), 5, 16), (1, 8, 8)),
    "cnn": (lambda: cnn((1, 28, 28), 47), (1, 28, 28)),
    "colours": (lambda: cnn((3, 12, 12), 5, 16, (4, 6)), (3, 12, 12)),
    "tutorial": (lambda: cnn_tutorial((3, 12, 12), 5, 16, (12, 14)), (3, 12, 12)),
    "response norm": (
        lambda: nn.Sequential(
            CentreCrop(6),
            Standardise(),
            nn.Conv2d(2, 12, 3),
            nn.LocalResponseNorm(4, 2.0, 0.6, 0.5),
            nn.Flatten(),
            nn.Linear(192, 5),
        ),
        (2, 8, 8),
    ),
    "cnn1d": (lambda: cnn1d((6, 32), 5, 16, (4, 6)), (6, 32)),
    "relu before norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)),
        (2, 6, 6),
    ),
    "norm without weights": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(48, 5)),
        (2, 6, 6),
    ),
    "norm of features": (
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, 5)),
        (6,),
    ),
    "norm without statistics": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 5)),
        (6,),
    ),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ELU()), nn.Dropout(0.0), nn.Linear(8, 5)), (6,)),
    "padded": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4, 5),
        ),
        (2, 4, 4),
    ),
}


def sample(shape: tuple[int, ...], count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, generator=generator), torch.randint(0, 5, (count,), generator=generator)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", ["train", "objective", "score"])
def test_known_layers_compute_what_their_modules_compute(name: str, mode: Mode) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, (x, _) = make(), sample(shape)
    module.train()
    module(x + 1)  # running statistics of their own
    flat = FlatModel(module)
    assert flat.known
    expected = copy.deepcopy(module).train(mode != "score")(x)
    torch.testing.assert_close(infer(flat, flat.flatten(module), x, mode), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_local_steps_of_known_layers_are_those_of_torch(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, (x, y) = make(), sample(shape, 100 if name == "cnn" else 24)
    flat = FlatModel(module)
    ours = local_steps(flat, flat.flatten(module), x, y, LocalOptions(steps=5, learning_rate=0.1))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    module.train()
    for _ in range(5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    torch.testing.assert_close(ours, flat.flatten(module), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_a_forward_pass_spares_the_first_step_its_own(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    flat, (x, y) = FlatModel(make().double()), sample(shape)
    vector, options = flat.flatten(make().double()), LocalOptions(steps=3)
    expected = local_steps(flat, vector, x.double(), y, options)
    trained = vector.clone()
    local_steps_(flat, trained, TrainingSet(x.double(), y), options, forward(flat, vector, x.double()))
    assert torch.equal(trained, expected)


def test_changed_layers_are_not_known() -> None:
    class Louder(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    hooked = nn.Sequential(nn.Linear(6, 5))
    hooked[0].register_forward_hook(lambda module, inputs, output: output + 1)
    for module in (Louder(6, 5), nn.Sequential(Louder(6, 5)), hooked, nn.Sequential(nn.Linear(6, 5), nn.Softmax(1))):
        flat, (x, _) = FlatModel(module), sample((6,))
        assert not flat.known
        assert flat.dense is None
        assert flat.noisy  # who knows
        torch.testing.assert_close(infer(flat, flat.flatten(module), x, "score"), module(x))
    assert FlatModel(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1))).noisy


def test_batch_norm_of_many_images_is_as_exact_as_a_double() -> None:
    """torch's own kernel for channels-last images is off by 1e-4 here."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32))
    x = torch.randn(500, 1, 15, 15).relu()
    flat = FlatModel(module)
    exact = FlatModel(copy.deepcopy(module).double())
    vector = flat.flatten(module)
    outputs = infer(flat, vector, x, "objective").double()
    assert (outputs - infer(exact, vector.double(), x.double(), "objective")).abs().max() < 5e-6
