from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dfca.base.errors import ConfigError, ModelError
from dfca.core.learning.params import FlatModel
from dfca.model_options import ModelOptions, make_factory


@pytest.mark.parametrize(
    ("options", "shape", "classes", "floats"),
    [
        (ModelOptions(name="mlp", hidden=2048), (1, 28, 28), 10, 784 * 2048 + 2048 + 2048 * 10 + 10),
        (ModelOptions(name="mlp", hidden=2048), (1, 28, 28), 62, 784 * 2048 + 2048 + 2048 * 62 + 62),
        (ModelOptions(name="cnn"), (1, 28, 28), 47, None),
        (ModelOptions(name="cnn"), (3, 32, 32), 10, None),
        (ModelOptions(name="cnn1d", hidden=100), (6, 128), 6, None),
    ],
)
def test_models_fit_their_data(options: ModelOptions, shape: tuple[int, ...], classes: int, floats: int | None) -> None:
    module = make_factory(options, shape, classes)()
    assert module(torch.rand(3, *shape)).shape == (3, classes)
    if floats is not None:
        assert FlatModel(module).size == floats


def test_the_cnn_has_the_papers_layers_in_the_papers_order() -> None:
    module = make_factory(ModelOptions(name="cnn"), (1, 28, 28), 47)()
    block = ["Conv2d", "ReLU", "MaxPool2d", "BatchNorm2d"]
    assert [type(layer).__name__ for layer in module] == [*block, *block, "Flatten", "Linear", "ReLU", "Linear"]


def test_a_module_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_models.py").write_text(
        "from torch import nn\nimport math\nnumber = 3\n"
        "def fail(shape, classes):\n    return 1 / 0\n"
        "def forget(shape, classes):\n    return None\n"
        "def make(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = make_factory(ModelOptions(factory="their_models:make"), (1, 8, 8), 10)()
    assert module(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ConfigError, match='"their_models:made" cannot be imported'):
        make_factory(ModelOptions(factory="their_models:made"), (1, 8, 8), 10)
    with pytest.raises(ConfigError, match="must be callable, got int"):
        make_factory(ModelOptions(factory="their_models:number"), (1, 8, 8), 10)
    with pytest.raises(ModelError, match=r"fail\" failed with ZeroDivisionError: .* make\(\(1, 8, 8\), 10\)"):
        make_factory(ModelOptions(factory="their_models:fail"), (1, 8, 8), 10)()
    with pytest.raises(ModelError, match=r'"their_models:forget" must return a torch.nn.Module, got NoneType'):
        make_factory(ModelOptions(factory="their_models:forget"), (1, 8, 8), 10)()


@pytest.mark.parametrize(
    ("options", "shape", "sentence"),
    [
        ({"name": "cnm"}, (1, 8, 8), 'unknown model "cnm"; did you mean "cnn"'),
        ({"factory": "nowhere"}, (1, 8, 8), 'model.factory must be "package.module:function", got "nowhere"'),
        ({"factory": "no_such_module:make"}, (1, 8, 8), '"no_such_module:make" cannot be imported'),
    ],
)
def test_unknown_models_are_refused(options: dict[str, str], shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_factory(ModelOptions(**options), shape, 10)
    assert sentence in str(error.value)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r'model "cnn" needs samples with 3 dimensions, .* got \(1, 8, 8\); "mlp" takes any'
    ):
        make_factory(ModelOptions(name="cnn"), (1, 8, 8), 10)
    with pytest.raises(ModelError, match='model "cnn1d" needs samples with 2 dimensions'):
        make_factory(ModelOptions(name="cnn1d"), (1, 28, 28), 10)
