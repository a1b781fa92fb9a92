"""Codecs: what travels in place of models is as large as declared, and every driver makes the same of it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import networkx as nx
import pytest
import torch
from event_runs import ROUGH, assert_identical, assert_same, run, through_disk
from memory_nodes import assert_banks, make_nodes, network_of, run_all
from toy import make_toy_model, make_toy_setting, make_toy_split, quick

import dfca
from dfca import codecs
from dfca.base.errors import ConfigError
from dfca.core.codec import BadPayload, Codec, Context, decode, encode
from dfca.core.rng import stream
from dfca.node.memory import VirtualTimeLoop
from dfca.node.task.facts import Facts
from dfca.node.task.learner import trusted_codec
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Compute, Link, World
from dfca.sim.rounds.simulation import Simulation
from dfca.testing import lockstep, stack

P = 200
NAMES = tuple(codecs.CODECS)
FIRST = Context(lambda: stream(0, "codec", 1, 2, 3))


def make(name: str, keep: float = 0.1) -> Codec:
    codec = codecs.get(name, keep)
    assert codec is not None
    return codec


def model(seed: int = 0, size: int = P) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 63, 64, 200, 40_000])
def test_a_payload_is_as_large_as_declared_and_becomes_a_model(name: str, size: int) -> None:
    codec, sent = make(name), model(size=size)
    data, _ = encode(codec, sent, FIRST)
    assert (data.dtype, len(data)) == (torch.uint8, codec.bytes(size))
    update, _ = decode(codec, data, torch.zeros(size), FIRST)
    assert update.shape == (size,)
    assert bool(torch.isfinite(update).all())


@pytest.mark.parametrize(
    ("name", "ratio"), [("bf16", 2), ("int8", 3.7), ("1-bit", 20), ("top-k", 50), ("random-k", 50)]
)
def test_bytes_are_fewer_by_what_the_documents_say(name: str, ratio: float) -> None:
    assert 4 * 100_000 / make(name, 0.01).bytes(100_000) >= ratio


@pytest.mark.parametrize(("name", "most"), [("bf16", 2**-8), ("int8", 1 / 127)])
def test_rounding_errors_are_bounded(name: str, most: float) -> None:
    sent = model()
    update, _ = decode(make(name), encode(make(name), sent, FIRST)[0], torch.zeros(P), FIRST)
    assert float((update - sent).abs().max()) <= most * float(sent.abs().max())


def test_top_k_sends_what_changed_most_and_the_rest_later() -> None:
    codec, sent, own = make("top-k", 0.25), torch.tensor([4.0, -3.0, 2.0, 1.0]), torch.full((4,), 9.0)
    data, known = encode(codec, sent, FIRST)
    update, kept = decode(codec, data, own, FIRST)
    assert update.tolist() == [4.0, 9.0, 9.0, 9.0]
    data, _ = encode(codec, sent, FIRST._replace(sent=known))
    assert decode(codec, data, own, FIRST._replace(received=kept))[0].tolist() == [4.0, -3.0, 9.0, 9.0]


@pytest.mark.parametrize("name", ["top-k", "random-k", "1-bit"])
def test_who_gets_all_payloads_or_comes_late_has_the_model_in_the_end(name: str) -> None:
    codec, sent, own = make(name), model(), model(1)
    known, kept, late = None, None, None
    for number in range(150):
        context = Context(lambda number=number: stream(0, "codec", number), sent=known)
        data, known = encode(codec, sent, context)
        update, kept = decode(codec, data, own, FIRST._replace(received=kept))
        if number >= 5 and number != 7:  # it comes later, and misses one
            joined, late = decode(codec, data, own, FIRST._replace(received=late))
    assert float((update - sent).norm() / sent.norm()) < 0.2
    if name != "top-k":  # whose early values are not sent again before they change
        assert float((joined - sent).norm() / sent.norm()) < 0.2


# The drivers.

CHANGES: dict[str, dict[str, Any]] = {
    "batch": {},
    "metropolis": {"weights": "metropolis"},
    "all models": {"share": "all"},
    "relay": {"share": "relay"},
    "half of the clients": {"participation": 0.5},
}


@pytest.mark.no_cover
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_rounds_equal_lockstep(name: str, change: str) -> None:
    setting = make_toy_setting("dfca-gi", rounds=4, codec=name, keep=0.1, **CHANGES[change])
    simulation, states = Simulation(setting), lockstep(setting)
    while not simulation.done:
        simulation.step()
    torch.testing.assert_close(simulation.banks, stack(states), rtol=1e-9, atol=1e-11)
    dense = Simulation(make_toy_setting("dfca-gi", rounds=4, **CHANGES[change]))
    while not dense.done:
        dense.step()
    assert not torch.allclose(simulation.banks, dense.banks, rtol=1e-6)  # what arrives is what was sent


@pytest.mark.no_cover
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", ["dfca-gi", "dfca-auto", "dfedavgm", "ifca"])
def test_the_ideal_world_and_nodes_in_memory_equal_the_synchronous_simulator(algorithm: str, name: str) -> None:
    if algorithm == "ifca" and make(name).remembers:
        with pytest.raises(ConfigError, match=f"codec {name} fills in .* use bf16 or int8"):
            make_toy_setting(algorithm, codec=name)
        return
    setting = make_toy_setting(quick(algorithm), rounds=3, codec=name, keep=0.1)
    assert_same(setting, run(setting))
    nodes = make_nodes(setting, network_of(setting))
    run_all(nodes, VirtualTimeLoop())
    assert_banks(setting, nodes)


@pytest.mark.parametrize("engine", ["stacked", "threads"])
def test_engines_agree(engine: str) -> None:
    changes = {"rounds": 3, "codec": "top-k", "keep": 0.1}
    one, other = (Simulation(make_toy_setting("dfca-gi", engine=name, **changes)) for name in ("loop", engine))
    while not one.done:
        one.step(), other.step()
    torch.testing.assert_close(one.banks, other.banks, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["top-k", "1-bit", "int8"])
def test_stop_and_resume_is_bit_identical(name: str) -> None:
    setting = make_toy_setting("dfca-auto", rounds=5, codec=name, keep=0.1, dtype=torch.float32)
    whole, second = Simulation(setting), Simulation(setting)
    for _ in range(2):
        whole.step()
    tensors, facts = whole.state()
    second.restore({key: tensor.clone() for key, tensor in tensors.items()}, json.loads(json.dumps(facts)))
    while not whole.done:
        rows = [dict(simulation.step() or {}) for simulation in (whole, second)]
        assert [row.pop("seconds", None) is None for row in rows] == [not row for row in rows]
        assert rows[0] == rows[1]
    assert torch.equal(whole.banks, second.banks)


@pytest.mark.parametrize("name", ["top-k", "1-bit"])
def test_a_run_in_a_rough_world_that_is_cut_is_the_run_that_is_not(name: str) -> None:
    setting = make_toy_setting("dfca-gi", aggregation="sequential", codec=name, keep=0.1, evaluate_every=1)
    options = EventOptions(until_s=14.0)
    whole, simulation = EventSimulation(setting, ROUGH, options), EventSimulation(setting, ROUGH, options)
    expected = whole.run()
    while not simulation.done:
        simulation.step()
        state = simulation.state()
        simulation = EventSimulation(setting, ROUGH, options)
        simulation.restore(*through_disk(*state))
    assert torch.equal(simulation.banks, expected.banks)
    assert bool(torch.isfinite(expected.banks).all())


# Traffic and time.


def test_bytes_are_those_of_payloads_and_copies_that_are_asked_for_stay_models() -> None:
    changes: dict[str, Any] = {"rounds": 4, "evaluate_every": 4}
    for algorithm in ("dfca-gi", "dfca-auto", "ifca"):
        setting = make_toy_setting(algorithm, codec="int8", **changes)
        simulation = Simulation(setting)
        rows = [row for row in (simulation.step() for _ in range(4)) if row is not None]
        timed = run(setting).metrics[-1]
        row, coded = rows[-1], simulation.traffic.coded
        payload = make("int8").bytes(simulation.flat.size)
        dense = row["messages_sent"] + simulation.traffic.start_messages - coded
        assert row["payload_bytes"] == timed["payload_bytes"] == payload
        assert row["bytes_sent"] == coded * payload + dense * row["model_bytes"] + 4 * row["scalars_sent"]
        assert 0 < coded <= row["messages_sent"]
        if algorithm != "dfca-auto":
            timed_bytes, bytes_sent = (one["bytes_sent"] - 4 * one["scalars_sent"] for one in (timed, row))
            assert timed_bytes == bytes_sent


def test_transfers_take_the_time_of_the_declared_bytes() -> None:
    world = World(Compute(1.0), Link(bandwidth_bytes_s=100.0))
    dense, coded = (run(make_toy_setting("dfca-gi", rounds=3, codec=name), world).time_s for name in ("none", "int8"))
    assert coded < dense


# Wrong hooks, and hostile payloads.

FINE: dict[str, Any] = {
    "parts": lambda size: [(torch.float32, size)],
    "outgoing": lambda model, context: (model.float(),),
    "incoming": lambda payload, own, context: payload[0].to(own.dtype),
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"outgoing": lambda model, context: [model]}, "must return a tuple of tensors, got list"),
    "another type": ({"outgoing": lambda model, context: (model.int(),)}, "declares parts .* and returned"),
    "fewer numbers": ({"outgoing": lambda model, context: (model[1:].float(),)}, "declares parts .* and returned"),
    "more bytes": ({"outgoing": lambda model, context: (model.double(),)}, "returned 344 bytes, and declares 172"),
    "not a number": ({"outgoing": lambda model, context: (model.float() / 0 * 0,)}, "a number that is not finite"),
    "an exception": ({"outgoing": lambda model, context: 1 / 0}, "outgoing of codec mine failed with ZeroDivision"),
    "another shape": ({"incoming": lambda payload, own, context: payload[0][1:]}, r"must return \(43,\) of .* \(42,\)"),
    "no tensor": ({"incoming": lambda payload, own, context: None}, r"must return \(43,\) of .* got NoneType"),
    "not finite": ({"incoming": lambda payload, own, context: own / 0}, "incoming .* a number that is not finite"),
    "parts fail": ({"parts": lambda size: 1 / 0}, "parts of codec mine failed with ZeroDivisionError"),
    "parts are no pairs": ({"parts": lambda size: [size]}, r"must list pairs of a torch.dtype .* got 43"),
    "a length below 0": ({"parts": lambda size: [(torch.int8, -1)]}, "a length >= 0, .* got "),
    "no parts": ({"parts": None}, "parts of codec mine failed with TypeError"),
    "incoming fails": (
        {"incoming": lambda payload, own, context: 1 / 0},
        r"incoming of codec mine failed with ZeroDiv.* \(.*test_codecs\.py, line",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_hook_that_does_not_keep_its_word_is_named(case: str) -> None:
    change, sentence = WRONG[case]
    options = {"codec": Codec("mine", **{**FINE, **change}), "rounds": 1}
    for world in (None, "ideal"):
        with pytest.raises(ConfigError, match=sentence):
            dfca.simulate(make_toy_model, make_toy_split(), "dfca-gi", topology="ring", world=world, **options)


def test_what_came_is_refused_unless_it_becomes_a_model() -> None:
    codec, own = make("top-k"), model()
    data, _ = encode(codec, own, FIRST)
    wrong = data.clone()
    wrong[:2] = torch.tensor([255, 127], dtype=torch.uint8)  # a place beyond the model
    infinite = torch.cat([data[: len(data) - 4], torch.tensor([math.inf]).view(torch.uint8)])
    for bad in (data[:-1], torch.cat([data, data]), data.float(), wrong, infinite, torch.full_like(data, 255)):
        with pytest.raises(BadPayload):
            decode(codec, bad, own, FIRST)


def test_a_peer_counts_a_payload_that_does_not_become_a_model() -> None:
    setting = make_toy_setting("dfca-gi", rounds=1, codec="top-k", keep=0.1, graph=nx.complete_graph(6))
    from dfca.core.state import Message
    from dfca.testing import make_clients

    client = make_clients(setting)[0]
    state = client.start()
    bad = torch.full((make("top-k").bytes(43),), 255, dtype=torch.uint8)
    after = client.rules.receive(state, Message(1, 0, 0, 5, bad))
    assert after.rejected == 1
    assert torch.equal(after.bank, state.bank)


def test_names_of_codecs() -> None:
    with pytest.raises(ConfigError, match=r"unknown mixing\.codec"):
        make_toy_setting("dfca-gi", codec="zip")
    with pytest.raises(ConfigError, match="keep must be"):
        make_toy_setting("dfca-gi", codec="top-k", keep=0.0)
    with pytest.raises(ConfigError, match=r"must be a name or a dfca\.Codec, got function"):
        make_toy_setting("dfca-gi", codec=lambda model: model)
    for name, options, got in (
        ("dfca-gi", {"robust": "clip"}, 'mixing.robust = "clip"'),
        ("dfca-gi", {"private": "head"}, "dfca-gi with mixing.private, or its own private head"),
        ("facade", {}, "facade"),
        ("fedem", {}, "fedem"),
    ):
        sentence = f"codec int8 is for honest clients that average whole models, got {got}; leave the codec or that out"
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            make_toy_setting(name, codec="int8", **options)
    with pytest.raises(ConfigError, match=r"must return a dfca\.Codec, got Counter"):
        make_toy_setting("dfca-gi", codec="collections:Counter")
    assert make_toy_setting("dfca-gi", codec="dfca.codecs.quantised:int8").codec.name == "int8"


def test_one_run_replays_bit_by_bit() -> None:
    setting = make_toy_setting("dfca-gi", rounds=3, codec="random-k", keep=0.2)
    assert_identical(run(setting), run(setting))


def test_facts_name_a_codec_run_no_code_and_leave_other_swarms_as_they_are() -> None:
    table = {"name": "s", "founder": "a" * 52, "nonce": "0" * 32, "inputs": {"features": ["a"]}, "classes": ["0", "1"]}
    plain = Facts.checked(table)
    assert Facts.checked(table | {"codec": "none", "keep": 0.01}).swarm_id == plain.swarm_id
    assert b"codec" not in plain.to_bytes()
    coded = Facts.checked(table | {"codec": "top-k", "keep": 0.05})
    assert coded.swarm_id != plain.swarm_id
    codec = trusted_codec(Facts.from_bytes(coded.to_bytes()))
    assert codec is not None
    assert codec.bytes(100) == 5 * 6
    for name, sentence in (("mine:codec", "codec_digest is given exactly where codec is"), ("zip", "codec")):
        with pytest.raises(ConfigError, match=sentence):
            Facts.checked(table | {"codec": name})
