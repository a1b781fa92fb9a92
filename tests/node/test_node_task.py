"""The task of a node: facts, settings, model, scaling, export; and devices that learn from CSV files."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_nodes import run_devices
from safetensors import safe_open

from dfca import simulate
from dfca.base.errors import ConfigError, DataError, DfcaError, ModelError
from dfca.core.learning.params import initial
from dfca.data.clients import Split
from dfca.node.task.config import DataConfig, NodeConfig, found_format
from dfca.node.task.dataset import load, load_inputs
from dfca.node.task.export import Exported, predict_file, to_onnx, to_safetensors
from dfca.node.task.facts import FOREVER, VERSION, Facts, InputFacts, LocalFacts, ModelFacts
from dfca.node.task.founding import Founding, JoinPlan, check_fits, init_swarm, join_swarm
from dfca.node.task.learner import Architecture, build, deep_mlp, evaluate, measured, predict
from dfca.node.task.scaling import Scaling, measure

FOUNDER = "a" * 52


def make_facts(**changes: Any) -> Facts:
    plain: dict[str, Any] = {
        "name": "flat",
        "founder": FOUNDER,
        "nonce": "0" * 32,
        "inputs": InputFacts(features=("a", "b", "c")),
        "classes": ("sit", "walk"),
        "model": ModelFacts(hidden=(8,)),
    }
    facts = Facts.checked({**plain, **changes})
    return facts if "model" in changes else measured(facts)


def write_device(path: Path, turned: bool, seed: int, rows: int = 80) -> str:
    """Write samples whose class is the sign of a + b; on turned devices, of the opposite."""
    drawn = np.random.default_rng(seed).normal(size=(rows, 2))
    sign = -1 if turned else 1
    lines = [f"{a:.4f},{7 + 3 * b:.4f},5,{'walk' if sign * (a + b) > 0 else 'sit'}" for a, b in drawn]
    path.write_text("\n".join(["a,b,c,activity", *lines]) + "\n")
    return str(path)


# Facts.


def test_facts_survive_their_bytes_and_name_the_swarm_by_them() -> None:
    facts = make_facts()
    data = facts.to_bytes()
    assert Facts.from_bytes(data) == facts
    assert Facts.from_bytes(json.dumps(json.loads(data), indent=2).encode()).swarm_id == facts.swarm_id
    assert len(facts.swarm_id) == 52
    assert make_facts(seed=1).swarm_id != facts.swarm_id
    assert make_facts(nonce="1" * 32).swarm_id != facts.swarm_id


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"algorithm": "ifca"}, 'algorithm must be "dfca-auto", "dfca-fi"'),
        ({"algorithm": "dfca-gi"}, 'clusters must be given for "dfca-gi"; "dfca-auto" finds them'),
        ({"sed": 1}, 'unknown key "sed"; did you mean "seed"?'),
        ({"local": {"stps": 3}}, 'unknown key in [local] "stps"; did you mean "steps"?'),
        ({"classes": ["a", "a"]}, "the class 'a' stands there twice"),
        ({"classes": ["a"]}, "classes must be at least 2 long"),
        ({"inputs": {}}, "inputs: give features or shape, one of the two"),
        ({"scaling": {"mean": [1e39], "scale": [1]}}, "numbers that a float32 holds"),
        ({"scaling": {"mean": [0, 0], "scale": [1, 1]}}, "scaling must have 1 number or 3"),
        ({"version": VERSION + 1}, "upgrade this device"),
        ({"model": {"name": "factory"}}, 'factory is given exactly where name is "factory"'),
    ],
)
def test_wrong_facts_are_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    content = {**json.loads(make_facts().to_bytes()), **changes}
    with pytest.raises(ConfigError) as caught:
        Facts.from_bytes(json.dumps(content).encode())
    assert sentence in str(caught.value)


def test_all_problems_of_facts_are_named_at_once() -> None:
    content = {**json.loads(make_facts().to_bytes()), "seed": -1, "rounds": "x", "sed": 1}
    with pytest.raises(ConfigError, match=r"3 problems: seed .*; rounds .*; unknown key"):
        Facts.from_bytes(json.dumps(content).encode())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_bytes_do_more_than_be_refused(data: st.DataObject) -> None:
    good = bytearray(make_facts(model=ModelFacts(size=3, digest="0" * 64)).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(good) - 1))
        good[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        Facts.from_bytes(bytes(good))
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 50_000])
def test_bytes_that_are_no_facts_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="facts"):
        Facts.from_bytes(data)


def test_facts_make_the_options_of_a_peer_and_its_client() -> None:
    facts = make_facts(clusters=None, rounds=0, revives=False)
    options = facts.peer_options(2**62, (3, 5), join_s=1.0)
    assert (options.id, options.neighbours, options.size) == (2**62, (3, 5), facts.model_size)
    assert (options.rounds, options.clusters, options.start) == (FOREVER, None, "elected")
    assert (options.method.revives, options.join_s, options.method.aggregation) == (False, 1.0, "sequential")
    assert options.rules.degree == 2
    client = facts.client(7, 2, (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)), build(facts))
    assert client.rules == facts.peer_options(7, (3, 5)).rules
    assert client.start().bank.shape == (1, facts.model_size)


# The model.


def test_a_swarm_of_another_model_is_refused() -> None:
    facts = make_facts()
    other = facts.changed(model=facts.model.changed(size=5))
    with pytest.raises(ModelError, match="has 50 floats and the swarm's has 5"):
        build(other)


def test_a_model_that_is_too_large_takes_no_memory() -> None:
    vast = make_facts(model=ModelFacts(hidden=(65_536,) * 8), inputs=InputFacts(shape=(60_000,), kind="array"))
    with pytest.raises(ModelError, match="a model must have at most 536870912 floats, got 33997586434"):
        measured(vast)


def test_facts_run_no_code_that_the_device_does_not_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_d.py").write_text(
        "from torch import nn\n\ndef make(shape, classes):\n    return nn.Linear(shape[0], classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = ModelFacts(name="factory", factory="own_model_d:make", size=8, digest="0" * 64)
    with pytest.raises(ConfigError, match="code of its founder"):
        build(make_facts(model=model))
    assert "own_model_d" not in sys.modules
    facts = measured(make_facts(model=model))
    assert build(facts, "own_model_d:make").flat.size == 8


def test_several_hidden_layers() -> None:
    facts = measured(make_facts(model=ModelFacts(hidden=(4, 5))))
    assert build(facts).flat.size == 3 * 4 + 4 + 4 * 5 + 5 + 5 * 2 + 2
    assert build(facts).flat.dense is not None


# Scaling.


def test_scaling_by_hand() -> None:
    x = np.array([[1.0, 5.0, 1e9], [3.0, 5.0, 1e9 + 2]])
    facts = measure(x, "table")
    assert facts.mean == (2.0, 5.0, 1e9 + 1)
    assert facts.scale == (1.0, 1.0, 1.0)
    inputs = InputFacts(features=("a", "b", "c"))
    scaled = Scaling.of(facts, inputs).apply(torch.from_numpy(x))
    one = float(torch.tensor(1.0).asinh())
    torch.testing.assert_close(scaled, torch.tensor([[-one, 0, -one], [one, 0, one]]))
    far = Scaling.of(facts, inputs).apply(torch.tensor([[1e30, -1e30, 0.0]]))
    assert torch.isfinite(far).all()
    assert float(far.abs().max()) < 21  # a feature that explodes does not drown the others


def test_images_become_numbers_between_0_and_1() -> None:
    x = np.array([[[[0, 255], [51, 102]]]], np.uint8)
    scaled = Scaling.of(measure(x, "images"), InputFacts(shape=(1, 2, 2), kind="images")).apply(torch.from_numpy(x))
    torch.testing.assert_close(scaled, torch.tensor([[[[0, 1], [0.2, 0.4]]]]))


def test_arrays_are_scaled_by_channel() -> None:
    x = np.stack([np.zeros((4, 6)), np.arange(24.0).reshape(4, 6)], axis=1)
    facts = measure(x, "array")
    assert facts.mean == (0.0, 11.5)
    assert Scaling.of(facts, InputFacts(shape=(2, 6), kind="array")).apply(torch.from_numpy(x)).shape == (4, 2, 6)


# Settings.


@settings(max_examples=50, deadline=None)
@given(path=st.text(min_size=1, max_size=50).filter(lambda text: text.isprintable()), port=st.integers(0, 7000))
def test_settings_survive_their_file(path: str, port: int) -> None:
    config = NodeConfig.checked({"name": "kitchen", "data": {"path": path}, "network": {"port": port}})
    assert NodeConfig.checked(tomllib.loads(config.to_toml())) == config


def test_settings_say_all_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('nam = "x"\n[data]\npth = 1\n[network]\nport = 70000\nadvertise = ["a"]\n')
    with pytest.raises(ConfigError) as caught:
        NodeConfig.load(tmp_path)
    text = str(caught.value)
    assert "6 problems" in text
    for part in (
        "name is missing",
        "data.path is missing",
        'unknown key in [data] "pth"; did you mean "path"? Known: features',
        "network.port must be <= 65535, got 70000",
        'an address is HOST:PORT with a port from 1 to 65535, got "a"',
        'unknown key "nam"; did you mean "name"?',
    ):
        assert part in text


def test_settings_that_are_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no node in"):
        NodeConfig.load(tmp_path)
    (tmp_path / "node.toml").write_text("name =")
    with pytest.raises(ConfigError, match="is not TOML"):
        NodeConfig.load(tmp_path)
    config = NodeConfig(name="kitchen", data=DataConfig(path="a.csv"))
    config.save(tmp_path)
    assert NodeConfig.load(tmp_path) == config
    described = (tmp_path / "node.toml").read_text()
    assert described.count("#") > 30
    assert max(map(len, described.splitlines())) <= 120


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="an address is HOST:PORT with a port from 1 to 65535, got"):
        NodeConfig.checked({"name": "a", "data": {"path": "a.csv"}, "network": {"advertise": ["a:0"]}})


def test_formats_of_data() -> None:
    assert [found_format(path) for path in ("a.TSV", "b.pq", "c.npz", "m.d:load", "C:\\x", "photos")] == [
        "csv", "parquet", "npz", "factory", "images", "images",
    ]  # fmt: skip


# From a CSV file to a swarm.


@pytest.fixture
def founded(tmp_path: Path) -> tuple[Path, NodeConfig, Facts, Architecture]:
    data = write_device(tmp_path / "a.csv", False, 0)
    config, facts = init_swarm(tmp_path / "kitchen", FOUNDER, Founding(data, "activity", hidden=(8,)))
    return tmp_path, config, facts, build(facts)


def test_init_settles_everything(founded: tuple[Path, NodeConfig, Facts, Architecture]) -> None:
    folder, config, facts, _ = founded
    assert (config.name, facts.name, facts.label) == ("kitchen", "kitchen", "activity")
    assert facts.merging is not None  # as the algorithm has it
    assert facts.inputs.features == ("a", "b", "c")
    assert facts.classes == ("sit", "walk")
    assert facts.scaling.scale[2] == 1.0
    set_ = {"data": {"held_out": 0.3}}
    again, _ = init_swarm(folder / "attic", FOUNDER, Founding(config.data.path, "activity", settings=set_))
    assert again.data == config.data.changed(held_out=0.3)
    assert Facts.from_bytes(facts.to_bytes()) == facts


def test_columns_are_matched_by_name(founded: tuple[Path, NodeConfig, Facts, Architecture]) -> None:
    folder, _, facts, _ = founded
    (folder / "b.csv").write_text("c;activity;b;a\n3;walk;2,5;1\n3;sit;2;-1\n")
    config = join_swarm(folder / "garage", facts, JoinPlan(str(folder / "b.csv")))
    assert config.data.label == "activity"
    torch.testing.assert_close(
        load_inputs(config, folder, facts), torch.tensor([[1, 2.5, 3], [-1, 2, 3]], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("content", "sentences"),
    [
        ("a,b,activity\n1,2,sit\n", ['column "c" is missing']),
        (
            "a,b,c,d,activity\n1,2,3,4,sit\n",
            ['column "d" is not one of the swarm\'s: remove it, or name it in data.ig'],
        ),
        ("a,b,d,activity\n1,2,3,run\n", ['"c" is missing', '"d" is not one of', 'class "run" in "activity" is not']),
        ("a,b,c\n1,2,3\n", ['has no column "activity" for the class']),
    ],
)
def test_data_that_does_not_fit(
    founded: tuple[Path, NodeConfig, Facts, Architecture], content: str, sentences: list[str]
) -> None:
    folder, _, facts, _ = founded
    (folder / "b.csv").write_text(content)
    with pytest.raises(DataError) as caught:
        join_swarm(folder / "garage", facts, JoinPlan(str(folder / "b.csv")))
    for sentence in sentences:
        assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "mpl"}, 'unknown model "mpl"; did you mean "mlp"?'),
        ({"model": "cnn"}, 'model "cnn" needs samples with 3 dimensions'),
        ({"model": "no_such_module_d:make"}, "cannot be imported"),
        ({"hidden": (0,)}, "the swarm's facts: model.hidden[0] must be >= 1, got 0"),
        ({"classes": ("sit",)}, 'has the classes "walk", which --classes does not name'),
        ({"algorithm": "dfca-li"}, "clusters must be given"),
        ({"label": "c"}, "not a number"),
        ({"name": "a b"}, "name must be of the form"),
        ({"settings": {"network": {"prt": 1}}}, 'did you mean "port"'),
        ({"agreed": {"local": {"learning_rate": 0}}}, "local.learning_rate must be > 0"),
    ],
)
def test_init_refuses_in_a_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    data = write_device(tmp_path / "a.csv", False, 0)
    with pytest.raises(DfcaError) as caught:
        init_swarm(tmp_path / "kitchen", FOUNDER, Founding(**{"data": data, "label": "activity", **changes}))
    assert sentence in str(caught.value)


def test_all_that_does_not_fit_is_listed(founded: tuple[Path, NodeConfig, Facts, Architecture]) -> None:
    folder, config, facts, _ = founded
    assert check_fits(facts, config, folder) == []
    (folder / "a.csv").unlink()
    other = facts.changed(model=facts.model.changed(size=5))
    misfits = check_fits(other, config, folder)
    assert len(misfits) == 2
    assert "does not exist" in misfits[0]


def test_devices_with_csv_files_find_their_two_clusters(tmp_path: Path) -> None:
    """Four devices, two of them turned: founded and joined as a user does, run over the network in memory."""
    paths = [write_device(tmp_path / f"{i}.csv", i % 2 == 1, i) for i in range(4)]
    config, facts = init_swarm(
        tmp_path / "kitchen", FOUNDER, Founding(paths[0], "activity", hidden=(16,), agreed={"rounds": 64})
    )  # a guarded election opens more than two clusters, surveys merge them
    configs = [config, *(join_swarm(tmp_path / f"n{i}", facts, JoinPlan(paths[i])) for i in range(1, 4))]
    model, samples = build(facts), [load(device, tmp_path, facts) for device in configs]
    reports = []
    for i, node in run_devices(facts, samples, model).items():
        assert node.machine.bank is not None
        reports.append(evaluate(model, node.machine.bank, samples[i].train, samples[i].held_out))
    clusters = [report.cluster for report in reports]
    assert clusters[0] == clusters[2] != clusters[1] == clusters[3]
    for report in reports:
        assert report.own is not None
        assert report.own.accuracy > 0.8
        assert report.own == max(report.scores)


# Export and predictions.


def test_exports_compute_what_torch_does(founded: tuple[Path, NodeConfig, Facts, Architecture]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    folder, config, facts, model = founded
    vector = initial(model.flat, model.make, 3, "init", 0)
    exported = Exported(facts, model, vector, cluster=1, round=12)
    x = load_inputs(config, folder, facts)
    expected = predict(model, vector, x, Scaling.of(facts.scaling, facts.inputs))

    to_onnx(exported, folder / "m.onnx")
    session = onnxruntime.InferenceSession(str(folder / "m.onnx"))
    probabilities, classes = session.run(None, {"input": x.float().numpy()})
    np.testing.assert_array_equal(classes, expected.classes.numpy())
    np.testing.assert_allclose(probabilities.max(axis=1), expected.probabilities.numpy(), atol=1e-6)
    assert session.run(None, {"input": x[:1].float().numpy()})[0].shape == (1, 2)
    about = session.get_modelmeta().custom_metadata_map
    assert (about["swarm"], about["cluster"], about["round"]) == (facts.swarm_id, "1", "12")
    assert json.loads(about["classes"]) == ["sit", "walk"]

    to_safetensors(exported, folder / "m.safetensors")
    module = model.make()
    with safe_open(folder / "m.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["features"]) == ["a", "b", "c"]
        module.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    torch.testing.assert_close(model.flat.flatten(module), vector)


def test_predictions_of_a_file_keep_its_order(founded: tuple[Path, NodeConfig, Facts, Architecture]) -> None:
    folder, config, facts, model = founded
    vector = initial(model.flat, model.make, 0, "init", 0)
    exported = Exported(facts, model, vector, 0, 0)
    (folder / "new.csv").write_text("id,c,b,a\nx,5,1,2\ny,5,7,-1\n")
    header, *rows = predict_file(exported, str(folder / "new.csv"), config, folder).splitlines()
    assert header == "row,class,probability"
    assert [row.split(",")[0] for row in rows] == ["1", "2"]
    assert all(row.split(",")[1] in facts.classes and 0.5 <= float(row.split(",")[2]) <= 1 for row in rows)
    (folder / "new.csv").write_text("id,c,b,a\nx,5,1,\n")
    with pytest.raises(DataError, match='line 2, column "a" is empty'):
        predict_file(exported, str(folder / "new.csv"), config, folder)


def test_a_task_needs_no_heavy_libraries() -> None:
    code = (
        "import sys\n"
        "from dfca.node.task import config, facts\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])\n"
        "from dfca.node.task import dataset, export, founding, learner\n"
        "heavy = ('sklearn', 'scipy', 'pandas', 'matplotlib', 'networkx', 'dfca.sim', 'PIL', 'pyarrow', 'onnx')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["[]", "[]"], run


@pytest.mark.slow
def test_images_go_all_the_way_to_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    x = np.random.default_rng(0).integers(0, 256, (40, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 3)
    config, facts = init_swarm(
        tmp_path / "camera", FOUNDER, Founding(str(tmp_path / "a.npz"), model="cnn", hidden=(8,))
    )
    assert (facts.inputs.kind, facts.inputs.shape, facts.classes) == ("images", (1, 12, 12), ("0", "1", "2"))
    model = build(facts)
    vector = initial(model.flat, model.make, 3, "init", 0)
    raw = load_inputs(config, tmp_path, facts)
    expected = predict(model, vector, raw, Scaling.of(facts.scaling, facts.inputs))
    to_onnx(Exported(facts, model, vector, 0, 1), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    probabilities, classes = session.run(None, {"input": raw.float().numpy()})
    np.testing.assert_array_equal(classes, expected.classes.numpy())
    np.testing.assert_allclose(probabilities.max(axis=1), expected.probabilities.numpy(), atol=1e-5)


@pytest.mark.slow
def test_turned_digits_need_the_curve_and_are_learned_with_the_defaults() -> None:
    """Twelve devices, digits turned four ways, scaled by the founder's numbers: with asinh and without."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    local = LocalFacts()
    accuracy = {}
    for curve in ("asinh", "linear"):
        train, test = [], []
        scaling = None
        for i, rows in enumerate(np.array_split(order, 12)):
            x = np.ascontiguousarray(np.rot90(digits.images[rows], i % 4, axes=(1, 2))).reshape(len(rows), -1)
            if scaling is None:
                facts = measure(x, "table").changed(curve=curve)
                scaling = Scaling.of(facts, InputFacts(features=tuple(map(str, range(64)))))
            scaled, y = scaling.apply(torch.from_numpy(x)), torch.from_numpy(digits.target[rows])
            out = len(y) // 5
            train.append((scaled[out:], y[out:]))
            test.append((scaled[:out], y[:out]))
        result = simulate(
            lambda: deep_mlp((64,), 10, (100,)),
            Split.of_clients(train, test, [i % 4 for i in range(12)]),
            "dfca-auto",
            rounds=30,
            topology={"name": "erdos-renyi", "p": 0.4},
            evaluate_every=30,
            aggregation="sequential",
            **local.plain(),
        )
        accuracy[curve] = result.accuracy
    assert accuracy["asinh"] > 0.9
    assert accuracy["linear"] < 0.7
