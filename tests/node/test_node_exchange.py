"""What members of a swarm exchange over gRPC: payloads of codecs, those of their own included, and parts of models."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from node_processes import grpc_service
from node_swarm import make_swarm, until
from toy import free_port

from dfca import codecs
from dfca.base.errors import ConfigError, DataError, ModelError
from dfca.core.learning.parts import Layout
from dfca.core.method import CODECS
from dfca.core.state import Message
from dfca.node.disk.folder import NodeFolder
from dfca.node.operate.doctor import _check_data
from dfca.node.run import make_transport
from dfca.node.service import Service
from dfca.node.task.facts import Facts
from dfca.node.task.founding import JoinPlan, join_swarm
from dfca.node.task.learner import code_digest, measured, trusted_codec
from dfca.node.wire import payload
from dfca.node.work.guard import ModelGuard
from dfca.node.work.worker import Worker
from dfca.peer.records.messages import Update
from dfca.peer.records.work import Train

HALF = """
import torch
from dfca import Codec

def make():
    return Codec(
        "half",
        parts=lambda size: [(torch.float16, size)],
        outgoing=lambda model, context: (model.half(),),
        incoming=lambda payload, own, context: payload[0].to(own.dtype),
    )
"""
GOSSIP = {"algorithm": "dfca-gi", "clusters": 2}
PRIVATE = {"algorithm": "dfedavgm", "private": "head"}


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[payload.Expect]:
    """Return what was expected of every model that arrived."""
    expected: list[payload.Expect] = []
    unpack = payload.unpack

    def note(data: Any, expect: payload.Expect) -> Any:
        expected.append(expect)
        return unpack(data, expect)

    monkeypatch.setattr(payload, "unpack", note)
    return expected


def run_swarm(folders: list[NodeFolder], late: int = 0, rounds: int = 40) -> list[dict[str, Any]]:
    """Run nodes over gRPC, the last `late` of them once the others have trained; returns their statuses."""

    async def life() -> list[dict[str, Any]]:
        running: list[tuple[Service, asyncio.Task[None]]] = []
        for place, folder in enumerate(folders):
            if place >= len(folders) - late:
                await until(lambda: all(service.node.machine.round >= 10 for service, _ in running))
            running.append(await grpc_service(folder.path))
        await until(
            lambda: all(
                s.node.machine.round >= rounds and s.work.report and s.notes.counts["fold"] > 20 for s, _ in running
            )
        )
        statuses = [service.status() for service, _ in running]
        for service, _ in running:
            service.stop()
        await asyncio.gather(*(task for _, task in running))
        return statuses

    return asyncio.run(life())


# Codecs.


@pytest.mark.parametrize("name", [name for name in CODECS if name != "none"])
def test_members_send_payloads_of_the_codec_in_the_facts(
    name: str, tmp_path: Path, received: list[payload.Expect]
) -> None:
    folders = make_swarm(tmp_path, (0, 0), free_port(2), agreed={**GOSSIP, "codec": name, "keep": 0.2})
    codec = codecs.get(name, 0.2)
    assert codec is not None
    statuses = run_swarm(folders)
    assert all(status["accuracy"] > 0.7 for status in statuses)
    sizes = {expect.size for expect in received if expect.dtype == torch.uint8}
    assert sizes == {codec.bytes(folders[0].facts.model_size)}


def make_half(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / f"{name}.py").write_text(HALF)
    monkeypatch.syspath_prepend(folder)
    return f"{name}:make"


def test_a_codec_of_the_founders_own_is_named_trusted_and_run(
    tmp_path: Path, received: list[payload.Expect], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_half(tmp_path, "half_codec_run", monkeypatch)
    folders = make_swarm(tmp_path, (0, 0), free_port(2), {**GOSSIP, "codec": own}, {"codec": own})
    facts = folders[0].facts
    assert facts.codec_digest == code_digest(own)
    assert Facts.from_bytes(facts.to_bytes()) == facts
    assert all(status["accuracy"] > 0.7 for status in run_swarm(folders))
    assert {expect.size for expect in received if expect.dtype == torch.uint8} == {2 * facts.model_size}


def test_a_codec_that_is_code_is_refused_without_trust_and_where_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_half(tmp_path, "half_codec_a", monkeypatch)
    (folder,) = make_swarm(tmp_path, (0,), agreed={**GOSSIP, "codec": own})
    assert folder.config.training.codec == own  # the founder has named it
    facts, data = folder.facts, str(tmp_path / "0.csv")
    plan = JoinPlan(data, "activity")
    with pytest.raises(DataError, match=r"node\.toml of this device names none; if you have that module and trust it"):
        join_swarm(tmp_path / "n", facts, plan)
    other = make_half(tmp_path, "half_codec_b", monkeypatch)
    with pytest.raises(DataError, match=f'names "{other}"'):
        join_swarm(tmp_path / "n", facts, JoinPlan(data, "activity", settings={"training": {"codec": other}}))
    trusting = JoinPlan(data, "activity", settings={"training": {"codec": own}})
    config = join_swarm(tmp_path / "n", facts, trusting)
    ran = tmp_path / "ran"
    (tmp_path / "half_codec_a.py").write_text(HALF + f"\nopen({str(ran)!r}, 'w')\n")
    with pytest.raises(
        DataError, match=r'of the codec "half_codec_a:make" has the SHA-256 .* here and .* at the founder'
    ):
        join_swarm(tmp_path / "n", facts, trusting)
    assert not ran.exists()  # it was not run
    assert _check_data(folder.path, config, facts).outcome == "failure"
    with pytest.raises(ConfigError, match='there is no Python module "half_codec_c", of "half_codec_c:make", here'):
        trusted_codec(facts.changed(codec="half_codec_c:make"), "half_codec_c:make")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"codec": "mine:make"}, 'codec_digest is given exactly where codec is "module:function"'),
        ({"codec": "int8", "codec_digest": "0" * 64}, "codec_digest is given exactly where codec is"),
        ({"codec": "int8", "private": "head"}, 'codecs are of whole models, got "int8" with private'),
        ({"private": "head", "algorithm": "dfca-auto"}, 'private is for dfca-gi, dfca-li, dfedavgm, got "dfca-auto"'),
        ({"private": "("}, 'private must be "head", "adapters" or a regular expression, got "'),
    ],
)
def test_facts_that_make_no_sense_are_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (folder,) = make_swarm(tmp_path, (0,), agreed=GOSSIP)
    plain = json.loads(folder.facts.to_bytes())
    assert not {"codec", "codec_digest", "private"} & plain.keys()  # swarms without them keep their names
    with pytest.raises(ConfigError, match=sentence):
        Facts.from_bytes(json.dumps({**plain, **changes}).encode())


def test_a_codec_that_declares_nothing_is_refused_at_the_founding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_codec.py").write_text(HALF.replace("[(torch.float16, size)]", "[size]"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"parts of codec half must list pairs of a torch.dtype and a length"):
        make_swarm(tmp_path, (0,), agreed={**GOSSIP, "codec": "bad_codec:make"})
    (tmp_path / "no_codec.py").write_text("def make():\n    return 5\n")
    with pytest.raises(ConfigError, match=r'mixing.codec "no_codec:make" must return a dfca.Codec, got int'):
        make_swarm(tmp_path, (0,), agreed={**GOSSIP, "codec": "no_codec:make"})


# Private parts.


def test_devices_that_keep_their_heads_share_a_body_and_late_ones_draw_a_head(
    tmp_path: Path, received: list[payload.Expect]
) -> None:
    """Their labels contradict each other: one model for all is right for half of them."""
    folders = make_swarm(tmp_path, (0, 1, 1), free_port(3), agreed=PRIVATE)
    layout, facts = folders[0].layout, folders[0].facts
    assert layout is not None
    statuses = run_swarm(folders, late=1)
    assert all(status["accuracy"] > 0.7 for status in statuses)
    assert layout.kept == 8 * 2 + 2
    assert facts.robust == "none"  # folds of parts are not guarded
    assert {expect.size for expect in received} == {facts.model_size - layout.kept}
    heads = []
    for folder in folders:
        saved = NodeFolder.load(folder.path).store().load()
        assert saved is not None
        assert saved.bank is not None
        heads.append(saved.bank[0, layout.private[0]])
    assert not torch.allclose(heads[0], heads[1], atol=0.1)
    assert all(bool(head.any()) for head in heads)


def test_a_pattern_that_fits_no_tensor_is_refused_at_the_founding(tmp_path: Path) -> None:
    for pattern, which in (("adapters", "no"), (".", "every")):
        (tmp_path / which).mkdir()
        with pytest.raises(ModelError, match=f"is in the name of {which} tensor that the model trains or averages"):
            make_swarm(tmp_path / which, (0,), agreed={**PRIVATE, "private": pattern})


def test_a_head_that_did_not_come_is_drawn_before_training(tmp_path: Path) -> None:
    (folder,) = make_swarm(tmp_path, (0,), agreed={**PRIVATE, "algorithm": "dfca-gi", "clusters": 2})
    layout, model = folder.layout, folder.model
    assert layout is not None
    samples = torch.randn(30, 3), torch.randint(2, (30,))
    worker = Worker(folder.facts.client(5, 1, samples, model))
    drawn = worker.client.start().bank
    taken = torch.stack([layout.hide(drawn[0]), drawn[1] + 1])
    assert torch.equal(worker._whole(taken), torch.stack([drawn[0], drawn[1] + 1]))
    assert torch.equal(worker.run(Train(3), taken).model, worker.run(Train(3), worker._whole(taken)).model)
    whole = drawn.clone()
    assert worker._whole(whole) is whole


def test_the_guard_scores_models_with_its_own_head_and_lets_payloads_pass(tmp_path: Path) -> None:
    scored: list[torch.Tensor] = []
    layout = Layout((), (slice(0, 2),), (slice(2, 3),))
    guard = ModelGuard(1.0, tmp_path, lambda: 0.0, layout=layout)
    guard.score = lambda model: scored.append(model) or 0.1  # type: ignore[func-returns-value]
    for loss in [0.1] * 25:
        guard.settle(torch.tensor([[1.0, 2.0, 3.0]]), 0, loss)
    guard.watched[7] = SimpleNamespace(left_out=0, sound=0, loss=0.0)  # type: ignore[assignment]
    update = Update(Message(7, 0, 3, 2, torch.tensor([4.0, 5.0, 0.0])), 1, (), 0.0, (), ())
    assert guard.doubts(7, update)
    assert guard.admit(7, update) is update
    assert scored[-1].tolist() == [4.0, 5.0, 3.0]
    coded = Update(Message(7, 0, 3, 2, torch.zeros(9, dtype=torch.uint8)), 1, (), 0.0, (), ())
    assert not guard.doubts(7, coded)


@pytest.mark.parametrize("private", [{}, PRIVATE])
def test_statistics_of_batch_norm_leave_a_node_exact_with_int8(private: dict[str, str], tmp_path: Path) -> None:
    """Rounded to 8 bits they cost a CNN 46 points of accuracy (docs/protocol.md)."""
    (folder,) = make_swarm(tmp_path, (0,), free_port())
    content = {"name": "s", "founder": folder.identity.id, "classes": ["0", "1"], "payload": "int8"} | private
    images = {"inputs": {"shape": [1, 12, 12], "kind": "images"}, "model": {"name": "cnn", "hidden": [8]}}
    folder = replace(folder, facts=measured(Facts.checked(content | images)))
    flat, swarm = folder.model.flat, make_transport(folder)._swarm
    model = torch.rand(flat.size) + 0.01
    model[flat.trained - 1] = 1e4  # a large number in the same block of 64
    sent = payload.pack(swarm.cut(model), "int8", tail=swarm.tail)
    arrived = swarm.fill(payload.unpack(sent, payload.Expect(swarm.sent_size, encoding="int8")))
    assert flat.size > flat.trained
    assert torch.equal(arrived[flat.trained :], model[flat.trained :])
