"""Optimisers of local steps are those of torch, alone and stacked; the fast paths are those of plain SGD."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn
from toy import make_toy_setting, make_toy_split, pairwise, quick

import dfca
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Choice
from dfca.core.learning.local import draw_steps, local_steps, spans
from dfca.core.learning.optimisers import Kept, clipped
from dfca.core.learning.params import FlatModel
from dfca.core.method import LocalOptions, Precision, StepTable
from dfca.models import cnn, cnn_tutorial
from dfca.node.task.facts import LocalFacts
from dfca.node.work.worker import Worker
from dfca.peer.records.work import Train
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.local.engine import make_engine
from dfca.sim.rounds.simulation import Simulation
from dfca.testing import lockstep, make_clients, stack

SPLIT = make_toy_split()
OPTIONS = {"clusters": 2, "rounds": 3, "topology": "complete", "evaluate_every": 3}
MODELS = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    "sequence": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
}
PRECISIONS = get_args(Precision)
KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "own": torch.optim.RMSprop}


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_local_steps_are_those_of_torch(model: str, name: str, clip: float | None, batch_size: int | None) -> None:
    module = MODELS[model]().double()
    flat, (x, y) = FlatModel(module), SPLIT.train.of(0)
    optimizer = name if name != "own" else torch.optim.RMSprop
    options = LocalOptions(
        steps=4, learning_rate=0.01, weight_decay=0.02, optimizer=optimizer, clip=clip, batch_size=batch_size
    )
    batches = draw_steps(len(y), options, 0, 1, 2).batches
    ours = local_steps(flat, flat.flatten(module), x.double(), y, options, batches)
    optimiser = KINDS[name](module.parameters(), lr=0.01, weight_decay=0.02)
    for step in range(4):
        rows = slice(None) if batches is None else batches[step]
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x[rows].double()), y[rows]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimiser.step()
    torch.testing.assert_close(ours, flat.flatten(module), rtol=1e-5, atol=1e-6)


CHANGES: dict[str, dict] = {
    "adam": {"optimizer": "adam"},
    "adamw in batches": {"optimizer": "adamw", "batch_size": 4},
    "clipped": {"clip": 0.1},
}
CASES = pairwise(
    {"model": MODELS, "algorithm": ["dfca-gi", "dfca-auto", "dfedavgm", "deprl", "fedem"], "change": CHANGES}
)


@pytest.mark.no_cover
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_all_engines_and_virtual_time_agree(case: dict[str, str]) -> None:
    model, algorithm = case["model"], case["algorithm"]
    given = {**OPTIONS, **CHANGES[case["change"]], "learning_rate": 0.05, "dtype": torch.float64, "personal_steps": 0}
    runs = [
        dfca.simulate(MODELS[model], SPLIT, quick(algorithm), engine=engine, **given)
        for engine in ("loop", "stacked", "threads")
    ]
    for other in runs[1:]:
        torch.testing.assert_close(other.banks, runs[0].banks, rtol=1e-6, atol=1e-8)
    if algorithm != "dfca-auto":  # its elections are equal by tests of their own
        ideal = dfca.simulate(MODELS[model], SPLIT, algorithm, world="ideal", aggregation="batch", **given)
        torch.testing.assert_close(ideal.banks, runs[0].banks, rtol=1e-6, atol=1e-8)


def test_fast_paths_are_for_plain_sgd() -> None:
    plain, flat = LocalOptions(steps=2), FlatModel(dfca.mlp((64,), 3, 128))
    assert plain.written_out
    assert spans(flat, 4, replace(plain, steps=5))
    for change in ({"optimizer": "adam"}, {"clip": 1.0}, {"optimizer": torch.optim.SGD}, {"precision": "bf16"}):
        assert not replace(plain, **change).written_out
        assert not spans(flat, 4, replace(plain, **change))
    for optimizer, how in (("sgd", "stacked"), ("adam", "stacked")):
        engine = make_engine("auto", flat, replace(plain, optimizer=optimizer), 0, SPLIT.train, "cpu")
        assert engine.how == how
    own = replace(plain, optimizer=torch.optim.RMSprop)
    assert make_engine("auto", flat, own, 0, SPLIT.train, "cpu").how != "stacked"
    with pytest.raises(ConfigError, match="an optimiser of your own may not treat numbers one by one"):
        make_engine("stacked", flat, own, 0, SPLIT.train, "cpu")


KEPT: list[dict] = [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": torch.optim.RMSprop}]


@pytest.mark.parametrize("options", KEPT)
@pytest.mark.parametrize("model", MODELS)
def test_rounds_with_a_kept_state_are_one_long_training(model: str, options: dict) -> None:
    """A client without neighbours, three rounds of two steps: the state of its optimiser is never begun anew."""
    given = {**OPTIONS, **options, "steps": 2, "learning_rate": 0.01, "dtype": torch.float64, "evaluate_every": 1}
    kept, fresh = (
        dfca.simulate(MODELS[model], SPLIT, "local", optimizer_state=state, **given) for state in ("kept", "fresh")
    )
    whole = dfca.simulate(MODELS[model], SPLIT, "local", **{**given, "steps": 6, "rounds": 1})
    torch.testing.assert_close(kept.banks, whole.banks, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(fresh.banks, whole.banks)


@pytest.mark.no_cover
@pytest.mark.parametrize("options", KEPT)
@pytest.mark.parametrize("algorithm", ["dfca-gi", "dfca-auto", "fedavg", "dfedavgm"])
def test_a_kept_state_is_the_same_in_every_engine_virtual_time_and_lockstep(algorithm: str, options: dict) -> None:
    given = {**OPTIONS, **options, "learning_rate": 0.05, "dtype": torch.float64, "optimizer_state": "kept"}
    loop, threads, auto = (
        dfca.simulate(MODELS["dense"], SPLIT, quick(algorithm), engine=engine, personal_steps=0, **given)
        for engine in ("loop", "threads", "auto")
    )
    assert torch.equal(loop.banks, threads.banks)
    torch.testing.assert_close(loop.banks, auto.banks)
    if algorithm == "dfca-auto":
        return
    ideal = dfca.simulate(MODELS["dense"], SPLIT, algorithm, world="ideal", aggregation="batch", **given)
    torch.testing.assert_close(ideal.banks, loop.banks, rtol=1e-6, atol=1e-8)
    local = LocalOptions(learning_rate=0.05, optimizer_state="kept", **options)
    setting = make_toy_setting(algorithm, rounds=3, local=local, clusters=2)
    simulation = Simulation(setting)
    for _ in range(3):
        simulation.step()
    stacked = stack(lockstep(setting))
    torch.testing.assert_close(simulation.banks.expand_as(stacked), stacked, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [Simulation, EventSimulation])
def test_a_kept_state_survives_a_checkpoint(kind: type) -> None:
    local = LocalOptions(learning_rate=0.05, optimizer="adam", optimizer_state="kept")
    setting = make_toy_setting("dfca-gi", rounds=4, local=local, aggregation="batch")
    one, two = kind(setting), kind(setting)
    for _ in range(2):
        one.step()
    tensors, facts = one.state()
    two.restore({name: tensor.clone() for name, tensor in tensors.items()}, facts)
    while not one.done:
        one.step()
    while not two.done:
        two.step()
    assert torch.equal(one.banks, two.banks)


def test_a_round_that_is_done_again_begins_where_it_began() -> None:
    kept = Kept()
    kept.after(1, 0, 3, {"velocity/0": torch.ones(2)})
    kept.after(1, 0, 4, {"velocity/0": torch.full((2,), 5.0)})
    assert kept.before(1, 0, 4)["velocity/0"].tolist() == [1, 1]
    kept.after(1, 0, 4, {"velocity/0": torch.full((2,), 6.0)})
    assert kept.before(1, 0, 5)["velocity/0"].tolist() == [6, 6]
    assert kept.before(1, 1, 5) == {}  # another cluster
    assert kept.before(2, 0, 5) == {}
    again = Kept()
    again.restore(kept.tensors())
    assert again.before(1, 0, 4)["velocity/0"].tolist() == [1, 1]


def stateless(groups: list, lr: float) -> object:
    return type("Still", (), {"step": lambda self: None, "state": None})()


@pytest.mark.parametrize(
    ("algorithm", "options", "sentence"),
    [
        ("deprl", {"momentum": 0.5}, "methods that train one whole model, got deprl"),
        ("fedem", {"optimizer": "adam"}, "methods that train one whole model, got fedem"),
        ("dfca-gi", {"optimizer": "adam", "engine": "stacked"}, "every client keeps the state of its optimiser"),
        ("dfca-gi", {"optimizer": stateless}, "has no state of tensors"),
        ("dfca-gi", {"optimizer": torch.optim.SparseAdam}, r"SparseAdam.step\(\) failed with RuntimeError"),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused(algorithm: str, options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        dfca.simulate(MODELS["dense"], SPLIT, algorithm, **OPTIONS, optimizer_state="kept", **options)


def test_a_device_keeps_the_state_of_its_optimiser() -> None:
    assert LocalFacts(optimizer="adam", optimizer_state="kept").options().keeps_state
    assert "optimizer_state" not in LocalFacts().as_of(1)
    local = LocalOptions(steps=2, learning_rate=0.01, optimizer="adam", optimizer_state="kept")
    client = make_clients(make_toy_setting("local", local=local))[0]
    bank = client.start().bank
    worker = Worker(client)
    for round in range(3):
        bank = worker.run(Train(round), bank).model[None]
    whole = replace(client, method=client.method.changed(local=replace(local, steps=6)))
    torch.testing.assert_close(bank[0], whole.train(client.start().bank, Choice(0), 0))


def test_schedules() -> None:
    rates = [LocalOptions(learning_rate=1.0, warmup_rounds=3).at(r).learning_rate for r in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = [LocalOptions(learning_rate=1.0, cosine_rounds=4).at(r).learning_rate for r in (0, 2, 3, 9)]
    assert cosine == pytest.approx([1.0, 0.5, (1 + math.cos(0.75 * math.pi)) / 2, (1 + math.cos(0.75 * math.pi)) / 2])
    both = LocalOptions(learning_rate=1.0, decay=0.5, warmup_rounds=1).at(1)
    assert both.learning_rate == 0.5
    options = LocalOptions()
    assert options.at(7) is options


def test_a_schedule_counts_in_every_engine() -> None:
    given = {**OPTIONS, "cosine_rounds": 3, "warmup_rounds": 1, "dtype": torch.float64}
    runs = [dfca.simulate(MODELS["dense"], SPLIT, "dfca-gi", engine=e, **given) for e in ("loop", "stacked")]
    torch.testing.assert_close(runs[0].banks, runs[1].banks)
    ideal = dfca.simulate(MODELS["dense"], SPLIT, "dfca-gi", world="ideal", aggregation="batch", **given)
    torch.testing.assert_close(runs[0].banks, ideal.banks)
    constant = dfca.simulate(MODELS["dense"], SPLIT, "dfca-gi", **OPTIONS, dtype=torch.float64)
    assert not torch.allclose(constant.banks, runs[0].banks)


def test_gradients_are_clipped_by_client() -> None:
    gradients = [torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])]
    assert torch.cat(clipped(gradients, 1.0, stacked=True), dim=1).tolist() == [
        pytest.approx([0.6, 0.8]),
        pytest.approx([0.3, 0.4]),
    ]
    assert clipped([torch.zeros(2)], 1.0, stacked=False)[0].tolist() == [0.0, 0.0]


def broken(groups: list, lr: float) -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimizer": "sgdd"}, 'local.optimizer "sgdd"'),
        ({"optimizer": "adam", "momentum": 0.5}, 'local.momentum is of optimizer "sgd", got 0.5 and "adam"'),
        ({"optimizer": broken}, "local.optimizer broken failed with ValueError: no ("),
        ({"optimizer": lambda groups, lr: 3}, "must return an object with step"),
        ({"clip": 0.0}, "clip"),
        ({"cosine_rounds": 0}, "cosine_rounds"),
        ({"precision": "fp8"}, "precision"),
    ],
)
def test_an_optimiser_that_is_none_is_refused(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        dfca.simulate(MODELS["dense"], SPLIT, "dfca-gi", **OPTIONS, **options)
    assert sentence in str(error.value)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("model", MODELS)
def test_passes_in_bfloat16_are_near_those_in_float32(model: str, engine: str) -> None:
    given = {**OPTIONS, "engine": engine, "learning_rate": 0.05}
    plain, half = (dfca.simulate(MODELS[model], SPLIT, "dfca-gi", precision=p, **given) for p in ("float32", "bf16"))
    assert half.banks.dtype == torch.float32
    assert 0 < float((half.banks - plain.banks).abs().max()) < 0.02
    again = dfca.simulate(MODELS[model], SPLIT, "dfca-gi", precision="bf16", **given)
    assert torch.equal(again.banks, half.banks)


@pytest.mark.parametrize(
    "make", [lambda: cnn((1, 12, 12), 3, 8, (2, 4)), lambda: cnn_tutorial((1, 12, 12), 3, 8, (4, 4))]
)
def test_known_layers_of_images_run_in_bfloat16(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    flat, x, y = FlatModel(make()), torch.rand(8, 1, 12, 12), torch.arange(8) % 3
    start = flat.flatten(make())
    runs = [local_steps(flat, start, x, y, LocalOptions(steps=3, learning_rate=0.05, precision=p)) for p in PRECISIONS]
    assert 0 < float((runs[0] - runs[1]).abs().max()) < 0.05


def test_facts_of_a_swarm_name_no_code() -> None:
    assert LocalFacts(optimizer="adam").options().optimizer == "adam"
    with pytest.raises(ValueError, match="facts run no code"):
        LocalFacts(optimizer="os:system")
    assert "optimizer" not in LocalFacts().as_of(1)
    assert StepTable(optimizer="torch.optim:RMSprop").options().optimizer == "torch.optim:RMSprop"
