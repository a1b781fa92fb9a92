"""Nodes that predict numbers: founded from CSV, clustered over a network in memory, scored, exported."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_nodes import end_in_two_clusters
from safetensors import safe_open

from dfca.base.errors import ConfigError, DataError
from dfca.core.learning.params import initial
from dfca.node.operate.status import _facts as shown
from dfca.node.task.dataset import load, load_inputs
from dfca.node.task.export import Deployed, Exported, predict_file, to_onnx, to_safetensors
from dfca.node.task.facts import Facts
from dfca.node.task.founding import Founding, JoinPlan, init_swarm, join_swarm
from dfca.node.task.learner import build, predict
from dfca.node.task.scaling import Scaling

FOUNDER = "a" * 52


def write_rooms(path: Path, sign: float, seed: int, rows: int = 120) -> str:
    """Write a table whose temperature rises or falls with the heating, around 20 degrees."""
    random = np.random.default_rng(seed)
    heating, window = random.uniform(0, 100, rows), random.uniform(0, 1, rows)
    degrees = 20 + sign * 0.08 * (heating - 50) - 3 * window
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["heating", "window", "degrees"])
        table.writerows(zip(heating.round(3), window.round(3), degrees.round(4), strict=True))
    return str(path)


def found_swarm(tmp_path: Path, **agreed: object) -> tuple[list[str], object, Facts]:
    paths = [write_rooms(tmp_path / f"{i}.csv", 1 - 2 * (i % 2), i) for i in range(4)]
    options = Founding(paths[0], "degrees", hidden=(16,), task="regression", agreed=agreed)
    config, facts = init_swarm(tmp_path / "kitchen", FOUNDER, options)
    return paths, config, facts


def test_devices_that_predict_numbers_find_their_two_clusters(tmp_path: Path) -> None:
    paths, config, facts = found_swarm(tmp_path, rounds=8)
    assert Facts.from_bytes(facts.to_bytes()) == facts
    assert (facts.task, facts.classes, facts.outputs) == ("regression", (), 1)
    assert 15 < facts.target.mean < 22
    for path, device, own, vector in end_in_two_clusters(tmp_path, paths, config, facts):
        assert own.rmse is not None
        assert own.rmse < 0.5  # degrees; the spread is about 2.5
        lines = predict_file(Exported(facts, build(facts), vector, 0, 0), path, device, tmp_path).splitlines()
        with open(path) as file:
            true = [float(row["degrees"]) for row in csv.DictReader(file)]
        values = [float(line.split(",")[1]) for line in lines[1:]]
        assert lines[0] == "row,value"
        assert float(np.sqrt(np.mean((np.array(values) - true) ** 2))) < 0.5


def make_export(tmp_path: Path) -> tuple[Exported, torch.Tensor, torch.Tensor]:
    """Make a model to export, samples, and what it predicts for them."""
    _, config, facts = found_swarm(tmp_path)
    model = build(facts)
    vector = initial(model.flat, model.make, 3, "init", 0)
    x = load_inputs(config, tmp_path, facts)
    expected = predict(model, vector, x, Scaling.of(facts.scaling, facts.inputs)).values
    assert expected is not None
    return Exported(facts, model, vector, cluster=0, round=1), x, expected


@pytest.mark.slow  # torch's exporter takes seconds to load
def test_onnx_predicts_in_the_unit_of_the_data(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    exported, x, expected = make_export(tmp_path)
    to_onnx(exported, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (values,) = session.run(["value"], {"input": x.float().numpy()})
    np.testing.assert_allclose(values, expected.numpy(), rtol=1e-5)


def test_exports_predict_in_the_unit_of_the_data(tmp_path: Path) -> None:
    exported, x, expected = make_export(tmp_path)
    facts = exported.facts
    values = Deployed(exported).eval()(x)
    np.testing.assert_allclose(values.detach().numpy(), expected.numpy(), rtol=1e-5)
    to_safetensors(exported, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        about = file.metadata()
    assert about["task"] == "regression"
    assert json.loads(about["target"]) == facts.target.plain()


def test_swarms_that_classify_keep_their_names(tmp_path: Path) -> None:
    facts = Facts.checked({"name": "a", "founder": FOUNDER, "inputs": {"features": ["f"]}, "classes": ["x", "y"]})
    assert b"task" not in facts.to_bytes()
    assert b"target" not in facts.to_bytes()


def test_labels_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    paths, _, facts = found_swarm(tmp_path)
    text = Path(paths[1]).read_text().splitlines()
    text[3] = text[3].rpartition(",")[0] + ",warm"
    Path(paths[1]).write_text("\n".join(text) + "\n")
    with pytest.raises(DataError, match='line 4, column "degrees": "warm" is not a number; correct the file'):
        join_swarm(tmp_path / "n1", facts, JoinPlan(paths[1]))
    with pytest.raises(DataError, match='line 4, column "degrees": "warm" is not a number; correct the file'):
        init_swarm(tmp_path / "k", FOUNDER, Founding(paths[1], "degrees", task="regression"))
    with pytest.raises(ConfigError, match="--classes is for a classification"):
        init_swarm(tmp_path / "k", FOUNDER, Founding(paths[0], "degrees", task="regression", classes=("a", "b")))
    with pytest.raises(ConfigError, match='unknown task of a swarm "regresion"; did you mean "regression"'):
        init_swarm(tmp_path / "k", FOUNDER, Founding(paths[0], "degrees", task="regresion"))


def test_numbers_in_arrays(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(tmp_path / "a.npz", x=x, y=x[:, 0] * 2.5 + 7)
    config, facts = init_swarm(tmp_path / "k", FOUNDER, Founding(str(tmp_path / "a.npz"), task="regression"))
    samples = load(config, tmp_path, facts)
    back = samples.train[1].double() * facts.target.scale + facts.target.mean
    assert samples.train[1].dtype == torch.float32
    assert set(back.numpy().round(4)) <= set((x[:, 0] * 2.5 + 7).round(4))


def test_the_status_shows_the_rmse() -> None:
    scores = [{"accuracy": None, "loss": 0.1, "rmse": 0.25}, {"accuracy": None, "loss": 0.2, "rmse": 1.5}]
    rows = dict(shown({"accuracy": None, "rmse": 0.25, "scores": scores, "samples": {"held_out": 9}, "members": 2}))
    assert rows["RMSE"] == "0.25 on 9 held-out samples (all clusters: 0.25, 1.5)"
    assert "accuracy" not in rows
