from __future__ import annotations

import pytest
import torch
from torch import nn

from dfca.base.errors import ModelError
from dfca.core.learning.local import LocalOptions, infer, local_steps, losses
from dfca.core.learning.params import FlatModel, initial


class Tied(nn.Module):
    """An autoencoder-like model whose first and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.relu(self.encode(x)))


class Words(nn.Module):
    """Integer inputs, an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x).mean(dim=1))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 4, 3))


MODULES = {
    "linear": (lambda: nn.Linear(4, 3), torch.randn(5, 4)),
    "conv and batch norm": (convolution, torch.randn(5, 1, 4, 4)),
    "embedding": (Words, torch.randint(0, 7, (5, 6))),
    "tied weights": (Tied, torch.randn(5, 4)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), torch.randn(5, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_flattened_module_computes_what_the_module_computes(name: str) -> None:
    make, x = MODULES[name]
    module = make()
    module.train()
    if not isinstance(x, torch.LongTensor):
        module(x)  # moves the running statistics away from their start
    flat = FlatModel(module)
    vector = flat.flatten(module)
    assert vector.shape == (flat.size,)
    module.eval()
    torch.testing.assert_close(infer(flat, vector, x, "score"), module(x))
    torch.testing.assert_close(flat.to_module(vector)(x), module(x))
    module.train()
    torch.testing.assert_close(infer(flat, vector, x, "train"), module(x))


@pytest.mark.parametrize("name", MODULES)
def test_a_local_step_is_the_step_of_torch_sgd(name: str) -> None:
    make, x = MODULES[name]
    module, x = make().double(), x.double() if x.is_floating_point() else x
    flat = FlatModel(module)
    y = torch.zeros(len(x), dtype=torch.int64)
    options = LocalOptions(steps=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01)
    ours = local_steps(flat, flat.flatten(module), x, y, options)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    module.train()
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    torch.testing.assert_close(ours, flat.flatten(module))


def test_tied_weights_are_stored_once() -> None:
    assert FlatModel(Tied()).size == 16


def test_running_statistics_are_in_the_vector_and_the_step_counter_is_not() -> None:
    flat = FlatModel(nn.BatchNorm1d(3))
    assert flat.names == ["weight", "bias", "running_mean", "running_var"]
    assert (flat.trained, flat.size) == (6, 12)


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize("known", [True, False])
def test_frozen_parameters_are_constants(known: bool) -> None:
    module = half_frozen()
    if not known:
        module.append(nn.PReLU().requires_grad_(False))
    flat = FlatModel(module)
    assert (flat.known, flat.trained, flat.size) == (known, 10, 14)
    assert list(flat.frozen) == ["0.weight", "0.bias", *([] if known else ["3.weight"])]
    x, start = torch.randn(4, 2), flat.flatten(module)
    after = flat.to_module(local_steps(flat, start, x, torch.tensor([0, 1, 0, 1]), LocalOptions(steps=2)))
    assert torch.equal(after[0].weight, module[0].weight)
    assert not torch.equal(after[2].weight, module[2].weight)
    torch.testing.assert_close(infer(flat, start, x, "score"), module.eval()(x))


def test_constants_are_held_once() -> None:
    flat = FlatModel(half_frozen())
    places = {twin[0].weight.data_ptr() for twin in flat._modules.values()}
    assert places == {flat.constants["0.weight"].data_ptr()}


def test_constants_may_be_carried_as_in_old_files() -> None:
    module = half_frozen()
    flat = FlatModel(module, carried={"0.weight", "0.bias"})
    assert flat.names[flat.count :] == ["0.weight", "0.bias", "1.running_mean", "1.running_var"]
    torch.testing.assert_close(
        infer(flat, flat.flatten(module), torch.ones(3, 2), "score"), module.eval()(torch.ones(3, 2))
    )


class Positions(nn.Module):
    """A buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("positions", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.positions)


def test_buffers_that_are_not_persistent_are_constants() -> None:
    module = Positions()
    flat = FlatModel(module)
    assert (flat.size, list(flat.constants)) == (15, ["positions"])
    torch.testing.assert_close(infer(flat, flat.flatten(module), torch.ones(2, 4), "train"), module(torch.ones(2, 4)))


def test_inference_leaves_the_vector_alone() -> None:
    module = convolution()
    flat = FlatModel(module)
    vector = flat.flatten(module)
    before = vector.clone()
    infer(flat, vector, torch.randn(5, 1, 4, 4), "objective")
    assert torch.equal(vector, before)


class Normed(nn.Module):
    """Batch norm in a module that is no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


@pytest.mark.parametrize("mode", ["objective", "score", "train"])
def test_inference_leaves_running_statistics_alone_in_any_module(mode: str) -> None:
    flat = FlatModel(Normed())
    assert not flat.known
    vector = flat.flatten(Normed())
    before = vector.clone()
    infer(flat, vector, 5 + torch.randn(6, 4), mode)
    assert torch.equal(vector, before)
    losses(flat, vector[None], 5 + torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    assert torch.equal(vector, before)


class Scaled(nn.Module):
    """A buffer of another type than the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 0.25, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self.scale.to(x.dtype)


def test_buffers_of_another_type_take_the_parameters_type() -> None:
    module, x = Scaled(), torch.randn(5, 4)
    flat = FlatModel(module)
    vector = flat.flatten(module)
    assert vector.dtype == flat.dtype == torch.float32
    assert vector[flat.trained :].tolist() == [0.25] * 3
    torch.testing.assert_close(infer(flat, vector, x, "score"), module(x))
    back = flat.to_module(2 * vector)
    assert (back.scale.dtype, back.scale.tolist()) == (torch.float64, [0.5] * 3)


def test_the_objective_has_no_dropout_and_batch_statistics() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    flat = FlatModel(module)
    x, vector = torch.randn(6, 4), flat.flatten(module)
    assert torch.equal(infer(flat, vector, x, "objective"), infer(flat, vector, x, "objective"))
    module.eval()
    module[1].train()
    torch.testing.assert_close(infer(flat, vector, x, "objective"), module(x))


def test_starts_are_named_and_leave_the_global_generator_alone() -> None:
    flat = FlatModel(nn.Linear(4, 3))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = initial(flat, lambda: nn.Linear(4, 3), 0, "init", 1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one, initial(flat, lambda: nn.Linear(4, 3), 0, "init", 1))
    assert not torch.equal(one, initial(flat, lambda: nn.Linear(4, 3), 0, "init", 2))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def complex_module() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    return module


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nn.ReLU, "ReLU has no trainable parameter; there is nothing to learn"),
        (lambda: nn.LazyLinear(3), "LazyLinear: 'weight' has no shape yet (a lazy layer); run one batch"),
        (lambda: nn.Linear(2, 2, device="meta"), "Linear: 'weight' is on the meta device"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "mixes torch.float32 and torch.float64"),
        (Counter, "parameter 'count' is torch.int64; only floating point can be averaged"),
        (complex_module, "'weight' is sparse, quantised or complex"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)),
            "Sequential: '1' has momentum=None, a cumulative average by a counter that is not exchanged; give it a "
            "momentum, e.g. 0.1, or track_running_stats=False",
        ),
    ],
)
def test_a_module_that_cannot_be_flattened_is_refused(make: object, sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        FlatModel(make())  # type: ignore[operator]
    assert sentence in str(error.value)


def test_batch_norm_without_statistics_needs_no_momentum() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None, track_running_stats=False))
    x = torch.randn(5, 2)
    flat = FlatModel(module)
    for mode in ("train", "objective", "score"):
        torch.testing.assert_close(infer(flat, flat.flatten(module), x, mode), module(x))


def test_another_architecture_is_refused() -> None:
    flat = FlatModel(nn.Linear(4, 3))
    with pytest.raises(ModelError, match=r"'weight' must have shape \(3, 4\), got \(3, 5\)"):
        flat.flatten(nn.Linear(5, 3))
    with pytest.raises(ModelError, match="the module has no 'bias'"):
        flat.flatten(nn.Linear(4, 3, bias=False))
