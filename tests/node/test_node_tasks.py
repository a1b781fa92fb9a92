"""Nodes that forecast a series or predict several labels: founded, clustered in memory, scored, exported."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_nodes import end_in_two_clusters
from safetensors import safe_open
from typer.testing import CliRunner

from dfca.base.errors import ConfigError, DataError
from dfca.cli import app
from dfca.core.learning.params import initial
from dfca.node.operate.members import overview_table
from dfca.node.operate.metrics import metrics_of
from dfca.node.operate.status import _facts as shown
from dfca.node.operate.status import _score, guess_loss
from dfca.node.task.config import NodeConfig
from dfca.node.task.dataset import load, load_inputs
from dfca.node.task.export import Deployed, Exported, predict_file, to_onnx, to_safetensors
from dfca.node.task.facts import Facts
from dfca.node.task.founding import Founding, JoinPlan, init_swarm, join_swarm
from dfca.node.task.learner import build, evaluate, predict
from dfca.node.task.scaling import Scaling

FOUNDER = "a" * 52
ROUNDS = {"rounds": 12}


def write_tank(path: Path, sign: float, seed: int, rows: int = 300) -> str:
    """Write the level of a tank in litres, which rises or falls with what its valve did two rows before."""
    random = np.random.default_rng(seed)
    valve, level = random.uniform(-1, 1, rows), np.zeros(rows)
    for t in range(2, rows):
        level[t] = 0.7 * level[t - 1] + sign * 5 * valve[t - 2]
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["time", "valve", "level"])
        table.writerows(zip(range(rows), valve.round(4), (level + 100).round(4), strict=True))
    return str(path)


def write_rooms(path: Path, sign: float, seed: int, rows: int = 160) -> str:
    """Write readings and which of three lamps are on; on some devices a reading means the opposite."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3))
    on = (sign * x + 0.3 > 0).astype(int)
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["a", "b", "c", "desk", "wall", "door"])
        table.writerows([*line, *lamps] for line, lamps in zip(x.round(4).tolist(), on.tolist(), strict=True))
    return str(path)


def found_tanks(tmp_path: Path, **agreed: object) -> tuple[list[str], NodeConfig, Facts]:
    paths = [write_tank(tmp_path / f"{i}.csv", 1 - 2 * (i % 2), i) for i in range(4)]
    options = Founding(
        paths[0], "level", hidden=(16,), task="forecasting", window=4, horizon=2, ignore=("time",), agreed=agreed
    )
    return paths, *init_swarm(tmp_path / "kitchen", FOUNDER, options)


def found_lamps(tmp_path: Path, **agreed: object) -> tuple[list[str], NodeConfig, Facts]:
    paths = [write_rooms(tmp_path / f"{i}.csv", 1 - 2 * (i % 2), i) for i in range(4)]
    options = Founding(paths[0], "desk,wall,door", hidden=(16,), task="multilabel", agreed=agreed)
    return paths, *init_swarm(tmp_path / "kitchen", FOUNDER, options)


# Forecasts.


def test_devices_that_forecast_find_their_two_clusters(tmp_path: Path) -> None:
    paths, config, facts = found_tanks(tmp_path, **ROUNDS)
    assert Facts.from_bytes(facts.to_bytes()) == facts
    assert (facts.inputs.sample_shape, facts.outputs, facts.classes) == ((2, 4), 1, ())
    for path, device, own, vector in end_in_two_clusters(tmp_path, paths, config, facts):
        # The valve of the row before is not known two rows ahead: 5 times its deviation of 0.58 stays, less is luck.
        assert own.rmse is not None
        assert own.rmse < 0.8  # litres; the spread is about 4
        lines = list(
            csv.reader(io.StringIO(predict_file(Exported(facts, build(facts), vector, 0, 0), path, device, tmp_path)))
        )
        with open(path) as file:
            level = [float(row["level"]) for row in csv.DictReader(file)]
        assert lines[0] == ["row", "value"]
        assert [int(row) for row, _ in lines[1:]] == list(range(6, 303))  # the last two are beyond the end of the file
        errors = [float(value) - level[int(row) - 1] for row, value in lines[1:-2]]
        assert float(np.sqrt(np.mean(np.square(errors)))) < 0.8


def test_a_sample_of_a_forecast_is_what_was_known_then(tmp_path: Path) -> None:
    values = np.arange(10.0)
    np.savez(tmp_path / "a.npz", y=values, x=10 * values[:, None])
    path = str(tmp_path / "a.npz")
    options = Founding(path, task="forecasting", window=3, horizon=2, hidden=(4,))
    config, facts = init_swarm(tmp_path / "k", FOUNDER, options)
    assert facts.inputs.features == ("x0",)
    inputs = load_inputs(config, tmp_path, facts)
    assert inputs.shape == (8, 2, 3)
    assert inputs[1].tolist() == [[1, 2, 3], [10, 20, 30]]
    samples = load(config, tmp_path, facts)
    targets = [(y.double() * facts.target.scale + facts.target.mean) for _, y in (samples.train, samples.held_out)]
    torch.testing.assert_close(targets[0], torch.arange(4.0, 9).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(targets[1], torch.tensor([9.0]).double(), rtol=0, atol=1e-5)  # the newest
    x = Scaling.of(facts.scaling, facts.inputs).apply(inputs)
    assert torch.equal(torch.cat([samples.train[0], samples.held_out[0]]), x[:6])
    np.savez(tmp_path / "alone.npz", y=values)
    alone = init_swarm(tmp_path / "l", FOUNDER, Founding(str(tmp_path / "alone.npz"), task="forecasting", window=3))[1]
    assert alone.inputs.sample_shape == (1, 3)


def test_exports_of_forecasts_answer_in_the_unit_of_the_data(tmp_path: Path) -> None:
    _, config, facts = found_tanks(tmp_path)
    model = build(facts)
    vector, x = initial(model.flat, model.make, 3, "init", 0), load_inputs(config, tmp_path, facts)
    expected = predict(model, vector, x, Scaling.of(facts.scaling, facts.inputs)).values
    exported = Exported(facts, model, vector, cluster=0, round=1)
    assert expected is not None
    np.testing.assert_allclose(Deployed(exported).eval()(x).detach().numpy(), expected.numpy(), rtol=1e-5)
    to_safetensors(exported, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        about = file.metadata()
    assert (about["task"], json.loads(about["shape"]), about["horizon"]) == ("forecasting", [2, 4], "2")
    assert json.loads(about["target"]) == facts.target.plain()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"window": 400}, DataError, "has 300 rows, and a forecast 1 ahead from 400 needs at least 401; collect more"),
        ({"task": "regression", "window": 4}, ConfigError, '--window and --horizon are for "forecasting", the task is'),
        ({"classes": ("a", "b")}, ConfigError, "--classes is for a classification; a forecasting predicts numbers"),
        ({"drop_missing": True}, DataError, "a forecast needs every row: fill empty values"),
        ({"label": "volume"}, DataError, 'has no column "volume" with the numbers to predict; it has "time", "valve"'),
        ({"task": "multilabel", "label": "valve,level"}, DataError, 'for the label "valve"; a label is 0 or 1'),
        ({"task": "multilabel", "classes": ("a", "b")}, ConfigError, "--label A,B names the columns of several labels"),
        ({"window": 70_000}, ConfigError, "window must be <= 65536"),
    ],
)
def test_what_is_no_forecast_is_refused(
    options: dict[str, object], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    path = write_tank(tmp_path / "a.csv", 1, 0)
    with pytest.raises(error, match=sentence):
        init_swarm(
            tmp_path / "k", FOUNDER, Founding(**{"data": path, "label": "level", "task": "forecasting"} | options)
        )


def test_a_device_with_too_few_rows_cannot_join_a_forecast(tmp_path: Path) -> None:
    _, _, facts = found_tanks(tmp_path)
    few = write_tank(tmp_path / "few.csv", 1, 9, rows=3)
    with pytest.raises(DataError, match="3 rows are too few: a forecast looks at 4 of them"):
        join_swarm(tmp_path / "n1", facts, JoinPlan(few))
    few = write_tank(tmp_path / "few.csv", 1, 9, rows=5)
    with pytest.raises(DataError, match="has 5 rows, and a forecast 2 ahead from 4 needs at least 6; collect more"):
        join_swarm(tmp_path / "n1", facts, JoinPlan(few))
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    pytest.importorskip("PIL.Image").new("L", (4, 4)).save(tmp_path / "photos" / "cat" / "1.png")
    with pytest.raises(DataError, match='and the task is "forecasting"; give the samples as a table or as arrays'):
        join_swarm(tmp_path / "n1", facts, JoinPlan(str(tmp_path / "photos")))


# Several labels.


def test_devices_with_several_labels_find_their_two_clusters(tmp_path: Path) -> None:
    paths, config, facts = found_lamps(tmp_path, **ROUNDS)
    assert Facts.from_bytes(facts.to_bytes()) == facts
    assert b"target" not in facts.to_bytes()
    assert (facts.classes, facts.outputs, facts.inputs.features) == (("desk", "wall", "door"), 3, ("a", "b", "c"))
    for path, device, own, vector in end_in_two_clusters(tmp_path, paths, config, facts):
        assert own.f1 is not None
        assert own.f1 > 0.9
        lines = predict_file(Exported(facts, build(facts), vector, 0, 0), path, device, tmp_path).splitlines()
        assert lines[0] == "row,desk,wall,door"
        with open(path) as file:
            true = [[int(row[name]) for name in facts.classes] for row in csv.DictReader(file)]
        said = [[float(chance) > 0.5 for chance in line.split(",")[1:]] for line in lines[1:]]
        assert np.mean(np.array(said) == np.array(true)) > 0.9


def test_labels_in_arrays_and_labels_that_do_not_fit(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    y = (x > 0).astype(np.int64)[:, :2]
    np.savez(tmp_path / "a.npz", x=x, y=y, classes=np.array(["left", "right"]))
    options = Founding(str(tmp_path / "a.npz"), task="multilabel", hidden=(4,))
    config, facts = init_swarm(tmp_path / "k", FOUNDER, options)
    assert facts.classes == ("left", "right")
    samples = load(config, tmp_path, facts)
    assert samples.train[1].shape == (len(samples.train[0]), 2)
    np.savez(tmp_path / "b.npz", x=x, y=(x > 0).astype(np.int64))
    with pytest.raises(
        DataError, match=r'3 labels \("0", "1", "2"\) are not the swarm\'s 2, "left", "right": name these'
    ):
        join_swarm(tmp_path / "n", facts, JoinPlan(str(tmp_path / "b.npz")))
    np.savez(tmp_path / "b.npz", x=x, y=y[:, 0])
    with pytest.raises(DataError, match=r"y must have one row per sample, \(60, labels\), got \(60,\)"):
        join_swarm(tmp_path / "n", facts, JoinPlan(str(tmp_path / "b.npz")))
    np.savez(tmp_path / "b.npz", x=x, y=y + 0.5)
    with pytest.raises(DataError, match=r'sample 1 has .* for the label "0"; a label is 0 or 1: correct it'):
        join_swarm(tmp_path / "n", facts, JoinPlan(str(tmp_path / "b.npz")))


@pytest.mark.slow  # torch's exporter takes seconds to load
def test_onnx_gives_the_probability_of_every_label(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    _, config, facts = found_lamps(tmp_path)
    model = build(facts)
    vector, x = initial(model.flat, model.make, 3, "init", 0), load_inputs(config, tmp_path, facts)
    to_onnx(Exported(facts, model, vector, cluster=0, round=1), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (chances,) = session.run(["probabilities"], {"input": x.float().numpy()})
    expected = predict(model, vector, x, Scaling.of(facts.scaling, facts.inputs)).probabilities
    np.testing.assert_allclose(chances, expected.numpy(), rtol=1e-4, atol=1e-6)


def test_status_metrics_and_overview_show_f1(tmp_path: Path) -> None:
    _, config, facts = found_lamps(tmp_path)
    model, samples = build(facts), load(config, tmp_path, facts)
    bank = torch.stack([initial(model.flat, model.make, 3, "init", j) for j in range(2)])
    report = evaluate(model, bank, samples.train, samples.held_out)
    scores = [_score(score) for score in report.scores]
    outputs = [model.flat.to_module(vector)(samples.held_out[0]) for vector in bank]
    for score, z in zip(scores, outputs, strict=True):
        assert score["f1"] == float(model.flat.task.metric.score(z[None], samples.held_out[1][None]))
    status = {"accuracy": None, "f1": 0.75, "scores": [{"f1": 0.75}, {"f1": 0.5}], "samples": {"held_out": 9}}
    assert dict(shown({**status, "members": 2}))["F1"] == "75.0% on 9 held-out samples (all clusters: 75.0%, 50.0%)"
    assert [sample.value for family in metrics_of(status) if family.name == "dfca_f1" for sample in family.samples] == [
        0.75
    ]
    assert "75.0%" in str(vars(overview_table({"members": [{"name": "a", **status}]}).renderables[0].columns[5]))
    assert guess_loss(facts) == pytest.approx(0.6931, abs=1e-4)


def test_init_says_what_is_predicted(tmp_path: Path) -> None:
    tank, rooms = write_tank(tmp_path / "tank.csv", 1, 0), write_rooms(tmp_path / "rooms.csv", 1, 0)
    asked = {
        "forecasts level 3 ahead from 8": ["tank", "--data", tank, "--label", "level", "--task", "forecasting",
                                           "--window", "8", "--horizon", "3", "--ignore", "time"],
        "3 labels": ["rooms", "--data", rooms, "--label", "desk,wall,door", "--task", "multilabel"],
    }  # fmt: skip
    for said, (name, *options) in asked.items():
        done = CliRunner().invoke(app, ["node", "init", str(tmp_path / name), *options])
        assert done.exit_code == 0, done.output
        assert said in " ".join(done.output.split())
