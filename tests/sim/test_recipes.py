"""Epochs, decay and augmentation: every engine and driver takes the steps that plain torch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver_checks import assert_same, run
from event_runs import STRAGGLERS, TIMED_LINK, assert_identical, through_disk
from event_runs import assert_same as assert_same_events
from event_runs import run as run_events
from memory_nodes import assert_banks, make_nodes, network_of, run_all
from recipes import CROPS, EPOCHS, MODELS, RECIPES, SHAPE, make_image_split
from torch import nn
from torch.nn.functional import cross_entropy
from toy import make_toy_setting

from dfca.base.errors import ConfigError, ModelError
from dfca.core.algorithm import Choice
from dfca.core.learning.images import augmented, draw_changes
from dfca.core.learning.local import LocalOptions, draw_batches, draw_steps, losses, lowest, weight_decays
from dfca.core.learning.params import FlatModel, initial
from dfca.core.method import Augment
from dfca.core.rng import stream
from dfca.models import cnn_tutorial
from dfca.node.memory import VirtualTimeLoop
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import World
from dfca.sim.local.engine import Engine, LocalTask
from dfca.sim.rounds.simulation import Simulation

ROUNDS = (3, 3, 1, 4)
"""In which round each client is: the learning rates differ."""
HOWS = {"mlp": ("loop", "stacked", "threads"), "cropping mlp": ("loop", "stacked"), "cropping cnn": ("loop", "threads")}
CASES = [
    (model, how, recipe)
    for model, hows in HOWS.items()
    for how in hows
    for recipe, options in RECIPES.items()
    if (options.augment is not None and options.augment.crop is not None) <= (model != "mlp")
]


def by_torch(module: nn.Module, x: torch.Tensor, y: torch.Tensor, options: LocalOptions, *names: int) -> nn.Module:
    """Take the steps with `torch.optim.SGD`, as a first script would."""
    rate = options.learning_rate * options.decay ** names[1]
    sgd = torch.optim.SGD(module.train().parameters(), rate, momentum=options.momentum)
    size, epochs, generator = options.batch_size or len(y), options.epochs, stream(7, "batches", *names)
    if epochs is None or options.batch_size is None:
        batches = [torch.arange(len(y))] * (epochs or options.steps)
    else:
        batches = [batch for _ in range(epochs) for batch in torch.randperm(len(y), generator=generator).split(size)]
    changes = draw_changes(len(batches), size, stream(7, "augment", *names))
    for batch, drawn in zip(batches, changes, strict=True):
        images = x[batch] if options.augment is None else augmented(x[batch], drawn, options.augment)
        sgd.zero_grad()
        cross_entropy(module(images), y[batch]).backward()
        sgd.step()
    return module


@pytest.mark.parametrize(("model", "how", "recipe"), CASES)
def test_every_engine_takes_the_steps_of_plain_torch(model: str, how: str, recipe: str) -> None:
    options, data = RECIPES[recipe], make_image_split().train.to("cpu", torch.float64)
    flat = FlatModel(MODELS[model]().double())
    starts = [initial(flat, lambda: MODELS[model]().double(), 0, "start", j) for j in range(8)]
    bank = torch.stack(starts).view(2, 4, -1)
    task = LocalTask(bank, data, lambda i, means, _: Choice(lowest(means)), ROUNDS)
    done = list(Engine(flat, options, 7, how).work(task, range(4)))
    models = torch.cat([part.vectors for part in done])
    chosen = [choice.cluster for part in done for choice in part.choices]
    for client, cluster in enumerate(chosen):
        x, y = data.of(client)
        assert cluster == lowest(losses(flat, bank[:, client], x, y))  # on images that are not changed
        trained = by_torch(flat.to_module(bank[cluster, client]), x, y, options, client, ROUNDS[client])
        torch.testing.assert_close(models[client], flat.flatten(trained), rtol=1e-9, atol=1e-10)


def setting_of(model: str, recipe: str, algorithm: str = "dfca-gi", **changes: Any) -> Any:
    changes = {"local": RECIPES[recipe], "make_model": MODELS[model], "rounds": 3} | changes
    return make_toy_setting(algorithm, **{"split": make_image_split()} | changes)


@pytest.mark.parametrize(
    ("model", "recipe", "algorithm"),
    [
        ("mlp", "epochs", "dfca-li"),
        ("mlp", "whole batches", "dfca-gi"),
        ("mlp", "changes of full batches", "fedspd"),
        ("cropping mlp", "crops", "fedspd"),
        ("cropping mlp", "crops", "dfedavgm"),
        ("cropping cnn", "crops", "ifca"),
        ("cropping cnn", "crops", "deprl"),
    ],
)
def test_rounds_virtual_time_and_nodes_equal_the_clients_in_lockstep(model: str, recipe: str, algorithm: str) -> None:
    for split in (make_image_split(), make_image_split(samples=[12, 7, 5, 11])):
        setting = setting_of(model, recipe, algorithm, split=split)
        assert_same(setting)
        assert_same_events(setting, run_events(setting))
        nodes = make_nodes(setting, network_of(setting))
        run_all(nodes, VirtualTimeLoop())
        assert_banks(setting, nodes)


def test_virtual_time_counts_the_steps_of_an_epoch() -> None:
    setting = setting_of("mlp", "epochs", split=make_image_split(samples=12))
    assert run_events(setting).time_s == 3 * 2 * 3  # rounds, epochs, batches of 5 among 12 samples
    uneven = setting_of("mlp", "epochs", split=make_image_split(samples=[12, 5, 5, 5]))
    assert run_events(uneven).time_s == 3 * 2 * 3  # everybody waits for the client with 3 batches


def test_stop_and_resume_is_bit_identical() -> None:
    setting = setting_of("cropping cnn", "crops", dtype=torch.float32, rounds=4)
    whole = run(setting).banks
    first = Simulation(setting)
    for _ in range(1, 4):
        first.step()
        tensors, facts = first.state()
        second = Simulation(setting)
        second.restore({name: tensor.clone() for name, tensor in tensors.items()}, facts)
        while not second.done:
            second.step()
        assert torch.equal(second.banks, whole)


def test_virtual_time_that_is_cut_is_bit_identical() -> None:
    def make() -> EventSimulation:
        setting = setting_of("cropping mlp", "crops", "dfca-li", aggregation="sequential", evaluate_every=1)
        return EventSimulation(setting, World(STRAGGLERS, TIMED_LINK), EventOptions(until_s=40.0))

    whole, simulation = make().run(), make()
    while not simulation.done:
        simulation.step()
        state = through_disk(*simulation.state())
        simulation = make()
        simulation.restore(*state)
    assert_identical(simulation.result(), whole)


def test_an_epoch_sees_every_sample_once() -> None:
    batches = draw_batches(12, EPOCHS, stream(0, "batches"))
    assert batches is not None
    assert batches.shape == (6, 5)
    for epoch in batches.view(2, 15):
        assert sorted(epoch[:12].tolist()) == list(range(12))
        assert epoch[12:].tolist() == [-1, -1, -1]
    assert EPOCHS.steps_of(12) == 6
    assert EPOCHS.steps_of(3) == 2  # fewer samples than a batch has
    assert draw_steps(3, EPOCHS, 0, 1, 2).batches is None
    assert LocalOptions(epochs=0, batch_size=5).steps_of(12) == 0


def test_the_rate_decays_by_round() -> None:
    assert LocalOptions(learning_rate=0.2, decay=0.5).at(3).learning_rate == 0.2 * 0.5**3
    plain = LocalOptions(learning_rate=0.2)
    assert plain.at(3) is plain


def test_weight_decay_of_single_layers() -> None:
    flat = FlatModel(cnn_tutorial(SHAPE, 3, 8, (3, 4)))
    options = LocalOptions(weight_decay=0.1, layer_decay={"dense1.weight": 0.004, "dense2": 0.0})
    decays = dict(zip(flat.names, weight_decays(flat, options), strict=True))
    assert {name: decay for name, decay in decays.items() if decay != 0.1} == {
        "dense1.weight": 0.004,
        "dense2.weight": 0.0,
        "dense2.bias": 0.0,
    }
    with pytest.raises(ModelError) as error:
        Engine(flat, LocalOptions(layer_decay={"dense": 0.1}), 0, "loop")
    assert str(error.value) == (
        'local.layer_decay has "dense", and the model has no such layer; it has conv1, conv2, dense1, dense2, output'
    )


@pytest.mark.parametrize("model", MODELS)
def test_decay_by_layer_is_that_of_torch(model: str) -> None:
    module, (x, y) = MODELS[model]().double(), make_image_split().train.to("cpu", torch.float64).of(0)
    flat = FlatModel(module)
    name = flat.names[-2]
    options = LocalOptions(2, 0.2, layer_decay={name: 0.3}, momentum=0.5)
    bank = flat.flatten(module)[None, None]
    split = make_image_split(clients=1).train.to("cpu", torch.float64)
    for how in HOWS[model]:
        (part,) = Engine(flat, options, 0, how).work(LocalTask(bank, split, lambda *_: Choice(0), 0), [0])
        twin = flat.to_module(bank[0, 0]).train()
        tensors = dict(twin.named_parameters())
        groups = [
            {"params": [tensors.pop(name)], "weight_decay": 0.3},
            {"params": list(tensors.values()), "weight_decay": 0.0},
        ]
        sgd = torch.optim.SGD(groups, 0.2, momentum=0.5)
        for _ in range(2):
            sgd.zero_grad()
            cross_entropy(twin(x), y).backward()
            sgd.step()
        torch.testing.assert_close(part.vectors[0], flat.flatten(twin), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epochs": -1}, "local.epochs must be >= 0, got -1"),
        ({"decay": 0.0}, "local.decay must be in (0, 1], got 0.0"),
        ({"decay": 1.5}, "local.decay must be in (0, 1], got 1.5"),
        ({"layer_decay": {"dense1": -1.0}}, "local.layer_decay.dense1 must be >= 0, got -1.0"),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        LocalOptions(**options)
    assert str(error.value) == sentence


def test_augmentation_that_does_not_fit_the_samples() -> None:
    with pytest.raises(ConfigError) as error:
        make_toy_setting(local=LocalOptions(augment=CROPS))
    assert str(error.value) == (
        "data.augment is for images (channels, height, width), and a sample has shape (4,); leave it out"
    )
    with pytest.raises(ConfigError) as error:
        setting_of("mlp", "epochs", local=LocalOptions(augment=Augment(crop=15)))
    assert str(error.value) == "data.augment.crop must be <= 14, the smaller side of the images (14 x 14), got 15"
