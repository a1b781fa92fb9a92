"""Ways to train, in experiment files, `simulate` and the facts of a swarm: epochs, decay, augmentation, recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dfca
from dfca.base.errors import ConfigError
from dfca.core.learning.images import CentreCrop, Standardise
from dfca.core.method import Augment
from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment, read_stored
from dfca.model_options import make_factory
from dfca.node.task.facts import Facts
from dfca.node.task.learner import build, measured
from dfca.runs.runner import run

PLAIN: dict[str, Any] = {"clients": 4, "clusters": 2, "rounds": 2, "algorithms": ["dfca-gi"]}
NEW = {"epochs", "decay", "layer_decay", "augment", "standardise", "crop"}
CROPS = {"crop": 6, "flip": True, "brightness": 0.1, "contrast": [0.5, 1.5]}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"local": {"steps": 5, "epochs": 2}},
            "local.steps and local.epochs exclude each other, got 5 and 2; leave one out",
        ),
        ({"local": {"decay": 0.0}}, "local.decay must be > 0 and <= 1, got 0.0"),
        ({"local": {"decay": 1.5}}, "local.decay must be > 0 and <= 1, got 1.5"),
        ({"local": {"epochs": -1}}, "local.epochs must be >= 0, got -1"),
        (
            {"data": {"name": "har", "augment": {"flip": True}}},
            "data.augment is for images (channels, height, width), and a sample has shape (6, 128); leave it out",
        ),
        (
            {"data": {"augment": {"crop": 9}}},
            "data.augment.crop must be <= 8, the smaller side of the images (8 x 8), got 9",
        ),
        ({"data": {"augment": {"crop": 0}}}, "data.augment.crop must be >= 1, got 0"),
        (
            {"data": {"augment": {"contrast": [2.0, 1.0]}}},
            "data.augment.contrast must be two factors 0 <= low <= high, got 2.0 and 1.0",
        ),
    ],
)
def test_bad_values_are_refused_with_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.of(PLAIN | values)
    assert str(error.value) == sentence


def test_they_are_listed_with_all_other_problems() -> None:
    with pytest.raises(ConfigError) as error:
        Config.of(PLAIN | {"rounds": 0, "local": {"steps": 5, "epochs": 2}, "data": {"augment": {"crop": 0}}})
    assert str(error.value).startswith("3 problems: ")


def test_what_is_not_used_is_not_stored() -> None:
    config = Config.of(PLAIN)
    assert not NEW & {key for section in config.values().values() if isinstance(section, dict) for key in section}
    assert config.local.options() == dfca.LocalOptions()


def test_a_config_with_them_is_stored_complete() -> None:
    local = {"epochs": 2, "batch_size": 5, "decay": 0.9, "layer_decay": {"3.weight": 0.1}}
    values = PLAIN | {"local": local, "data": {"augment": CROPS}, "model": {"standardise": True}}
    config = Config.of(values)
    assert read_stored(config.to_toml())[0] == config
    assert config.digest() != Config.of(PLAIN).digest()
    options = config.local.options(config.data.augment)
    assert options.steps_of(12) == 6
    assert options.augment == Augment(6, True, 0.1, (0.5, 1.5))


def test_epochs_of_the_command_line_replace_the_steps_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('clients = 4\nclusters = 2\nrounds = 2\nalgorithms = ["dfca-gi"]\n[local]\nsteps = 5\n')
    local = load_experiment(file, overrides=["local.epochs=2"]).config.local
    assert (local.steps, local.epochs) == (None, 2)
    last = load_experiment(file, overrides=["local.epochs=2", "local.steps=3"]).config.local
    assert (last.steps, last.epochs) == (3, None)


def test_recipes_are_laid_over_a_file_before_its_scales(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'clients = 4\nclusters = 2\nrounds = 2\nalgorithms = ["dfca-gi"]\n[local]\nsteps = 5\n'
        "[recipe.passes]\nlocal.epochs = 2\n[recipe.passes.scale.small]\nrounds = 3\n"
        '[recipe.slow]\nlocal.learning_rate = 0.01\n[scale.small]\nclients = 3\n[scale.large]\nrecipe = "slow"\n'
    )
    assert load_experiment(file).config.local.epochs == 2  # the first one
    small = load_experiment(file, "small").config
    assert (small.clients, small.rounds, small.local.epochs) == (3, 3, 2)
    large = load_experiment(file, "large").config.local
    assert (large.steps, large.learning_rate) == (5, 0.01)
    assert load_experiment(file, "large", recipe="passes").config.local.epochs == 2
    text = load_experiment(file, recipe="text").config.local
    assert (text.steps, text.epochs, text.learning_rate) == (5, None, 0.1)
    with pytest.raises(ConfigError) as error:
        load_experiment(file, recipe="quick")
    assert str(error.value) == 'unknown recipe "quick". Known: passes, slow, text'
    with pytest.raises(ConfigError) as error:
        load_experiment("quickstart", recipe="text")
    assert str(error.value) == 'this experiment has no recipes, got --recipe "text"; leave --recipe out'


@pytest.mark.parametrize(
    ("preset", "recipe", "model"),
    [
        ("table1-cifar10", "authors", "cnn-tutorial"),
        ("table2-femnist", "batches", "cnn"),
        ("table4-femnist-k", "batches", "cnn"),
        ("figure-femnist-k", "batches", "cnn"),
    ],
)
def test_presets_train_by_epochs_and_keep_what_the_text_says(preset: str, recipe: str, model: str) -> None:
    config, text = load_experiment(preset, "paper").config, load_experiment(preset, "paper", recipe="text").config
    assert (config.model.name, config.local.epochs, config.local.batch_size) == (model, 5, 50)
    assert (text.local.steps, text.local.batch_size) == (5, "full")
    assert f"({recipe})" in config.title
    assert "(text)" in text.title
    shape, classes = ((3, 32, 32), 10) if preset == "table1-cifar10" else ((1, 28, 28), 62)
    crop = None if config.data.augment is None else config.data.augment.crop
    module = make_factory(config.model, shape, classes, crop)()
    assert module(torch.zeros(2, *shape)).shape == (2, classes)


def test_a_model_on_crops_takes_whole_images_and_keeps_the_names_of_its_layers() -> None:
    config = Config.of(PLAIN | {"data": {"augment": {"crop": 6}}, "model": {"standardise": True, "hidden": 8}})
    module = make_factory(config.model, (1, 8, 8), 10, 6)()
    assert [type(layer) for layer in list(module)[:2]] == [CentreCrop, Standardise]
    plain = make_factory(Config.of(PLAIN | {"model": {"hidden": 8}}).model, (1, 6, 6), 10)()
    assert list(module.state_dict()) == list(plain.state_dict())
    module.load_state_dict(plain.state_dict())
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(module(x), plain(Standardise()(x[..., 1:7, 1:7])))


def test_a_run_on_crops_keeps_its_models_for_export(tmp_path: Path) -> None:
    local = {"epochs": 1, "batch_size": 7, "decay": 0.9}
    data = {"samples_per_client": 12, "test_samples_per_client": 10, "augment": CROPS}
    file = tmp_path / "mine.toml"
    file.write_text(
        Config.of(PLAIN | {"data": data, "local": local, "model": {"hidden": 8, "standardise": True}}).to_toml()
    )
    run(load_experiment(file), tmp_path / "run", save_models=True)
    stored = dfca.load_run(tmp_path / "run")
    module = stored.model(client=0)
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_simulate_takes_them_too() -> None:
    split = dfca.make_split(dfca.DataOptions(samples_per_client=20), clients=4, clusters=2, seed=0)
    options: dict[str, Any] = {"rounds": 2, "clusters": 2, "topology": "ring", "batch_size": 8}
    train = {"epochs": 1, "decay": 0.9, "layer_decay": {"1.weight": 0.01}, "augment": CROPS}
    result = dfca.simulate(lambda: dfca.mlp((1, 6, 6), 10, 8), split, "dfca-gi", **options, **train)
    assert result.module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ConfigError) as error:
        dfca.simulate(lambda: dfca.mlp((1, 6, 6), 10, 8), split, "dfca-gi", steps=2, **options, **train)
    assert str(error.value) == "local.steps and local.epochs exclude each other, got 2 and 1; leave one out"


def test_facts_of_a_swarm_hold_them_and_old_ones_keep_their_name() -> None:
    content: dict[str, Any] = {
        "name": "swarm", "founder": "a" * 52, "nonce": "0" * 32, "algorithm": "local", "classes": ["0", "1"],
        "inputs": {"shape": [1, 8, 8], "kind": "images"}, "model": {"hidden": [8]},
    }  # fmt: skip
    plain = Facts.checked(content)
    assert not any(f'"{key}"'.encode() in plain.to_bytes() for key in NEW)
    assert plain.method().local.steps == 20
    changed = content | {"augment": CROPS, "local": {"epochs": 2, "decay": 0.9}}
    facts = Facts.checked(changed | {"model": {"hidden": [8], "standardise": True}})
    facts = measured(facts)
    assert Facts.from_bytes(facts.to_bytes()) == facts
    assert facts.method().local.steps_of(64) == 4
    assert facts.method().local.augment == Augment(6, True, 0.1, (0.5, 1.5))
    assert build(facts).make()(torch.zeros(2, 1, 8, 8)).shape == (2, 2)
    with pytest.raises(ConfigError, match=r"data.augment.crop must be <= 8"):
        Facts.checked(content | {"augment": {"crop": 9}})


def test_problems_of_several_keys_are_listed_with_those_of_single_ones(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'clients = 8\nclusters = 2\nrounds = 3\nalgorithms = ["dfca-gi"]\n'
        '[data]\nname = "digits"\naugment = {crop = 20}\n[local]\nsteps = 3\nepochs = 2\ndecay = 1.5\n'
    )
    with pytest.raises(ConfigError) as error:
        load_experiment(file)
    assert str(error.value) == (
        "3 problems: (1) local.decay must be > 0 and <= 1, got 1.5; "
        "(2) local.steps and local.epochs exclude each other, got 3 and 2; leave one out; "
        "(3) data.augment.crop must be <= 8, the smaller side of the images (8 x 8), got 20"
    )
