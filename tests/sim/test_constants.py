"""Frozen tensors are constants, in simulations, files and swarms; tensors that clients keep to themselves."""

from __future__ import annotations

import re
from functools import partial
from importlib import invalidate_caches
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import tiny
from torch import nn
from toy import make_toy_split

import dfca
from dfca.base.errors import ConfigError, ModelError
from dfca.core.algorithm import ADAPTERS
from dfca.node.task.facts import Facts, ModelFacts
from dfca.node.task.learner import build, measured, weights_digest
from dfca.runs.runner import run
from dfca.text.encoder import AdaptedLinear

OPTIONS = {"clusters": 2, "rounds": 3, "topology": "complete", "evaluate_every": 3}
MESSAGES = 6 * 5 * 3  # clients, neighbours, rounds


def adapted() -> nn.Module:
    """A frozen base and a trained head."""
    base = nn.Linear(4, 8)
    base.requires_grad_(False)
    return nn.Sequential(base, nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("algorithm", ["dfca-gi", "dfca-li", "dfca-auto", "dfedavgm", "ifca", "facade"])
@pytest.mark.parametrize("world", [None, "ideal"])
def test_only_what_is_trained_is_in_the_bank_and_travels(algorithm: str, world: str | None) -> None:
    result = dfca.simulate(adapted, make_toy_split(), algorithm, world=world, **OPTIONS)
    assert result.banks.shape[-1] == result.flat.size == 8 * 3 + 3
    weights = {result.model(client)[0].weight.sum().item() for client in range(6)}
    assert len(weights) == 1
    if world is None and algorithm == "dfca-gi":
        assert result.evaluations[-1].bytes_sent == MESSAGES * 27 * 4


def test_constants_come_from_the_seed_a_module_or_given_weights() -> None:
    split = make_toy_split()
    first, again, other = (dfca.simulate(adapted, split, "dfca-gi", seed=s, **OPTIONS) for s in (0, 0, 1))
    base = [result.model(0)[0].weight for result in (first, again, other)]
    assert torch.equal(base[0], base[1])
    assert not torch.equal(base[0], base[2])
    module = adapted()
    kept = dfca.simulate(module, split, "dfca-gi", seed=5, **OPTIONS)
    assert torch.equal(kept.model(0)[0].weight, module[0].weight)
    assert not torch.equal(kept.model(0)[2].weight, module[2].weight)
    given = dfca.simulate(adapted, split, "dfca-gi", start_from=module.state_dict(), **OPTIONS)
    assert torch.equal(given.model(0)[0].weight, module[0].weight)


def test_given_weights_that_disagree_about_a_constant_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'0.weight' is frozen \(requires_grad is False\), so it must be the same"):
        dfca.simulate(adapted, make_toy_split(), "dfca-gi", start_from=[adapted(), adapted()], **OPTIONS)


def test_a_frozen_layer_needs_no_way_to_start_afresh() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.eye(4), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.table

    result = dfca.simulate(nn.Sequential(Table(), nn.Linear(4, 3)), make_toy_split(), "dfca-gi", **OPTIONS)
    assert result.flat.size == 15


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user with a model whose base is frozen."""
    name = f"frozen_base_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n\n\ndef make(shape, classes):\n"
        "    size = 1\n    for n in shape:\n        size *= n\n"
        "    base = nn.Linear(size, 4).requires_grad_(False)\n"
        "    return nn.Sequential(nn.Flatten(), base, nn.ReLU(), nn.Linear(4, classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    invalidate_caches()
    return f"{name}:make"


def test_a_run_folder_keeps_constants_once(own_module: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(rounds=2, model={"factory": own_module}), folder, save_models=True)
    stored = load_file(folder / "models/dfca-li-0.safetensors")
    assert sorted(name for name in stored if name.startswith("constant")) == ["constant.1.bias", "constant.1.weight"]
    assert sum(name.endswith(".1.weight") for name in stored) == 1
    loaded = dfca.load_run(folder)
    assert torch.equal(loaded.model(0)[1].weight, stored["constant.1.weight"])
    (path,) = loaded.export(tmp_path / "out", client=0)
    assert torch.equal(load_file(path)["1.weight"], stored["constant.1.weight"])


def facts_of(model: ModelFacts) -> Facts:
    content = {"name": "s", "founder": "a" * 52, "inputs": {"features": ["a", "b", "c"]}, "classes": ["n", "y"]}
    return Facts.checked({**content, "model": model.plain()})


def test_members_of_a_swarm_have_the_same_constants_or_are_refused(own_module: str, tmp_path: Path) -> None:
    model = ModelFacts(name="factory", factory=own_module)
    facts = measured(facts_of(model))
    assert build(facts, own_module).flat.size == 10
    with pytest.raises(ModelError, match="or its frozen ones other values; take the same version"):
        build(facts.changed(seed=1), own_module)
    weights = {name: torch.ones_like(value) for name, value in build(facts, own_module).make().state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, tmp_path / "other.safetensors")
    path = str(tmp_path / "w.safetensors")
    digest = weights_digest(path)
    given = measured(facts_of(model.changed(weights=digest)), path)
    assert build(given, own_module, path).flat.frozen["1.weight"].unique().tolist() == [1.0]
    with pytest.raises(ConfigError, match=f"with the SHA-256 {digest}; get it from the founder"):
        build(given, own_module)
    with pytest.raises(ModelError, match="take the founder's file"):
        build(given, own_module, str(tmp_path / "other.safetensors"))
    with pytest.raises(ConfigError, match=r"start afresh; leave training\.weights out"):
        build(facts, own_module, path)
    with pytest.raises(ModelError, match="cannot be read"):
        build(given, own_module, str(tmp_path / "none"))


@pytest.mark.parametrize("private", ["head", r"^3\."])
@pytest.mark.parametrize("world", [None, "ideal"])
def test_private_tensors_stay_at_home(private: str, world: str | None) -> None:
    model = partial(dfca.mlp, (4,), 3, 4)
    result = dfca.simulate(model, make_toy_split(), "dfedavgm", private=private, world=world, **OPTIONS)
    heads = {tuple(result.bank(client)[0, -2:].tolist()) for client in range(6)}
    assert len(heads) == 6
    scalars = 0 if world is None else 0.1  # a message in virtual time says a little more
    assert result.evaluations[-1].bytes_sent == pytest.approx(MESSAGES * (4 * 4 + 4) * 4, rel=scalars)


class Adapted(nn.Linear):
    """A linear layer with a low-rank adapter, named as peft names its."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.lora_B = nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x))


def test_private_adapters_are_found_by_their_names() -> None:
    result = dfca.simulate(Adapted, make_toy_split(), "dfedavgm", private="adapters", **OPTIONS)
    assert result.evaluations[-1].bytes_sent == MESSAGES * (4 * 3 + 3) * 4
    own = AdaptedLinear(4, 2, 1.0)
    assert [re.search(ADAPTERS, f"layers.0.query.{name}") is not None for name, _ in own.named_parameters()] == [
        name in ("down", "up") for name, _ in own.named_parameters()
    ]


@pytest.mark.parametrize(
    ("algorithm", "private", "sentence"),
    [
        ("dfedavgm", "adapters", "is in the name of no tensor"),
        ("dfedavgm", "no such", "'no such' is in the name of no tensor that the model trains or averages; it has 1.w"),
        ("dfedavgm", ".", "'.' is in the name of every tensor"),
        ("dfedavgm", 3, 'mixing.private must be "head", "adapters" or a regular expression, got 3'),
        ("dfedavgm", "(", 'mixing.private must be "head", "adapters" or a regular expression, got \'(\''),
        ("dfca-auto", "head", "mixing.private is for algorithms that gossip whole models and draw their starts"),
        ("deprl", "head", "got 'head' for deprl; leave one of the two out"),
    ],
)
def test_a_pattern_that_makes_no_sense_is_refused(algorithm: str, private: str, sentence: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=re.escape(sentence)):
        dfca.simulate(lambda: dfca.mlp((4,), 3, 4), make_toy_split(), algorithm, private=private, **OPTIONS)
