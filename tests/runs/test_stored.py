"""Run folders from Python: tables, assignments, models of every kind of run; `dfca export`; plugged-in algorithms."""

from __future__ import annotations

import json
import sys
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import tiny
from typer.testing import CliRunner

import dfca
from dfca import algorithms
from dfca.base import imports
from dfca.base.errors import ConfigError, RunError
from dfca.cli import app
from dfca.experiment.load import load_experiment
from dfca.runs.runner import run
from dfca.runs.store import models
from dfca.runs.store.models import StoredModels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two algorithms, one of them with a server, with its models."""
    out = tmp_path_factory.mktemp("runs") / "run"
    run(tiny(rounds=2, evaluation={"every": 1}), out, save_models=True)
    return out


def test_a_run_folder_is_config_tables_and_models(folder: Path) -> None:
    stored = dfca.load_run(folder)
    assert stored.config["rounds"] == 2
    assert stored.algorithms == ["dfca-li", "ifca"]
    assert list(stored.metrics.columns[:3]) == ["algorithm", "seed", "round"]
    assert len(stored.metrics) == 4
    lines = [json.loads(line) for line in (folder / "metrics/ifca-0.jsonl").read_text().splitlines()]
    assert stored.metrics.query("algorithm == 'ifca'")["accuracy"].tolist() == [line["accuracy"] for line in lines]
    assert stored.results["finished"].all()
    mine = stored.assignments.query("algorithm == 'ifca'")
    assert mine["cluster"].tolist() == lines[-1]["assignments"]
    assert mine["true_cluster"].tolist() == json.loads((folder / "topology.json").read_text())["0"]["clusters"]
    assert "2 of 2 trials finished" in repr(stored)
    assert "ifca" in stored._repr_html_()


@pytest.mark.parametrize("algorithm", ["dfca-li", "ifca"])
def test_stored_models_are_those_of_the_simulation(folder: Path, algorithm: str) -> None:
    config = dfca.load_run(folder).run.config
    split = dfca.make_split(dfca.DataOptions(**config["data"]), config["clients"], config["clusters"], seed=0)
    result = dfca.simulate(
        lambda: dfca.mlp((1, 8, 8), 10, config["model"]["hidden"]), split, algorithm, clusters=config["clusters"],
        rounds=2, topology=config["topology"], evaluate_every=1, participation=config["participation"],
        **config["local"],
    )  # fmt: skip
    stored = dfca.load_run(folder)
    assert torch.equal(stored.bank(3, algorithm), result.bank(3))
    x = split.test.of(3)[0]
    assert torch.equal(stored.model(3, algorithm=algorithm)(x), result.model(3)(x))
    assert torch.equal(stored.model(3, 0, algorithm=algorithm)(x), result.model(3, 0)(x))


def test_tensors_have_names_and_the_file_says_what_it_is(folder: Path) -> None:
    own, shared = (load_file(folder / f"models/{name}-0.safetensors") for name in ("dfca-li", "ifca"))
    assert {"client.5.cluster.1.1.weight", "client.0.cluster.0.3.bias"} <= own.keys()
    assert {name for name in shared if name.startswith("cluster.1.")} == {
        f"cluster.1.{name}" for name in ("1.weight", "1.bias", "3.weight", "3.bias")
    }
    with safe_open(folder / "models/ifca-0.safetensors", "pt") as file:
        facts = file.metadata()
    assert (facts["format"], facts["algorithm"], facts["shape"], facts["classes"]) == (
        "dfca-models-1", "ifca", "[1, 8, 8]", "10"
    )  # fmt: skip


def test_a_bank_without_names_is_read_too(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = dfca.load_run(folder)
    banks = torch.stack([stored.bank(i, "dfca-li") for i in range(6)], dim=1)
    old = tmp_path / "models" / "dfca-li-0.safetensors"  # as version 0.2 wrote it
    old.parent.mkdir()
    save_file({"bank": banks}, old)
    for source in (StoredModels.open(old), StoredModels.open(folder / "models/dfca-li-0.safetensors")):
        assert source.models == 2
        assert torch.equal(source.bank(5), banks[:, 5])
        with pytest.raises(ConfigError, match=r"client must be in 0\.\.5, got 6"):
            source.vector(6, 0)
        with pytest.raises(ConfigError, match=r"cluster must be in 0\.\.1, got 2"):
            source.vector(0, 2)
    monkeypatch.setattr(models, "MOST_NAMED", 3)
    run(tiny(rounds=2), tmp_path / "many", save_models=True)
    assert torch.equal(StoredModels.open(tmp_path / "many/models/dfca-li-0.safetensors").vector(5, 1), banks[1, 5])


def test_what_is_not_there_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    stored = dfca.load_run(folder)
    with pytest.raises(ConfigError, match='unknown algorithm of this run "dfca-auto"; did you mean "dfca-li"'):
        stored.model(0, algorithm="dfca-auto")
    with pytest.raises(ConfigError, match="has no trial of ifca, seed 5; it has "):
        stored.model(0, algorithm="ifca", seed=5)
    with pytest.raises(ConfigError, match=r"client must be in 0\.\.5, got 6"):
        stored.model(6)
    run(tiny(rounds=1, algorithms=["local"]), tmp_path / "run")
    with pytest.raises(RunError, match="has no models of local-0; run it again with --save-models"):
        dfca.load_run(tmp_path / "run").model(0)
    (tmp_path / "run/models").mkdir()
    (tmp_path / "run/models/local-0.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{]")
    with pytest.raises(RunError, match=r"local-0\.safetensors cannot be read"):
        dfca.load_run(tmp_path / "run").model(0)
    with pytest.raises(RunError, match="is not a run folder"):
        dfca.load_run(tmp_path)


def test_export_writes_files_with_metadata(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["export", str(folder), "--algorithm", "ifca", "--client", "3", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    path = Path(done.output.strip())
    with safe_open(path, "pt") as file:
        facts = file.metadata()
        assert set(file.keys()) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    line = json.loads((folder / "metrics/ifca-0.jsonl").read_text().splitlines()[-1])
    assert facts["cluster"] == str(line["assignments"][3])
    assert json.loads(facts["accuracy"]) == line["accuracy_by_client"][3]
    assert json.loads(facts["model"])["name"] == "mlp"
    wrong = CliRunner().invoke(app, ["export", str(folder), "--format", "pt"])
    assert (wrong.exit_code, "unknown format" in wrong.output) == (2, True)
    wrong = CliRunner().invoke(app, ["export", str(folder), "--at", "p"])
    assert (wrong.exit_code, "--at needs key=value" in wrong.output) == (2, True)
    link = tmp_path / "link"
    link.mkdir()
    (link / path.name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is a link; name a file to write"):
        dfca.load_run(folder).export(link, client=3, algorithm="ifca")
    assert not (tmp_path / "elsewhere").exists()


def test_points_of_a_sweep_are_columns(tmp_path: Path) -> None:
    out = tmp_path / "run"
    file = tmp_path / "sweep.toml"
    file.write_text(
        tiny(rounds=1, algorithms=["local"], participation=1.0).to_toml() + '\n[grid]\n"local.steps" = [1, 2]\n'
    )
    run(load_experiment(file), out, save_models=True, workers=1)
    stored = dfca.load_run(out)
    assert stored.metrics["local.steps"].tolist() == [1, 2]
    assert sorted(stored.assignments["local.steps"].unique()) == [1, 2]
    one, two = (stored.bank(0, point={"local.steps": steps}) for steps in (1, 2))
    assert not torch.equal(one, two)
    (path,) = stored.export(tmp_path / "out", client=0, point={"local.steps": 2})
    with safe_open(path, "pt") as file_:
        assert file_.metadata()["point"] == "local.steps=2"
    _, title, *rows = repr(stored).splitlines()
    assert title.split()[:2] == ["local.steps", "algorithm"]
    assert [row.split()[:2] for row in rows] == [["1", "local"], ["2", "local"]]


PARTS = """
import torch
from dfca import Algorithm, Choice, lowest

def data(clients, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, 10, 3, generator=random)
    return {"train": list(zip(x, (x[..., 0] > 0).long())), "clusters": [i % 2 for i in range(clients)]}

def model(shape, classes):
    return torch.nn.Linear(*shape, classes)

def mine(patience: int = 3):
    return Algorithm("mine", start="own", exchange="gossip", choose=lambda view: Choice(lowest(view.losses)))

RECORD = mine()
not_one = lambda: 3

def ring(clients, seed):
    return [(i, (i + 1) % clients) for i in range(clients)]
"""
FILE: dict[str, Any] = {
    "clients": 4, "clusters": 2, "rounds": 2, "algorithms": ["stored_parts:mine", "stored_parts:RECORD"],
}  # fmt: skip


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment file and its module in a folder that is not the working directory."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imports, "_folders", [])
    monkeypatch.delitem(sys.modules, "stored_parts", raising=False)
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "stored_parts.py").write_text(PARTS)
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in FILE.items())
    text += '[algorithm."stored_parts:mine"]\npatience = 4\n[data]\nfactory = "stored_parts:data"\n'
    text += '[model]\nfactory = "stored_parts:model"\n[topology]\nname = "stored_parts:ring"\n'
    (place / "own.toml").write_text(text)
    return place


def test_all_parts_of_an_experiment_may_be_the_users_own(parts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = run(load_experiment(parts / "own.toml"), out, save_models=True)
    assert [(row["algorithm"], row["clusters"]) for row in summary["runs"]] == [
        ("stored_parts:mine", 2), ("stored_parts:RECORD", 2)
    ]  # fmt: skip
    assert sorted(path.name for path in (out / "metrics").iterdir()) == [
        "stored_parts.RECORD-0.jsonl", "stored_parts.mine-0.jsonl"
    ]  # fmt: skip
    run(load_experiment(parts / "own.toml"), out)  # nothing is left to do
    stored = dfca.load_run(out)
    assert np.array_equal(stored.assignments["true_cluster"], [0, 1, 0, 1] * 2)
    sys.path[:] = [entry for entry in sys.path if entry != str(parts)]
    sys.modules.pop("stored_parts")
    imports._folders.clear()
    module = stored.model(0)
    assert module.weight.shape == (2, 3), "load_run finds the module where the experiment file was"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("algorithms=['stored_parts:nobody']", 'algorithm "stored_parts:nobody" cannot be imported from'),
        ("algorithms=['stored_parts:not_one']", 'algorithm "stored_parts:not_one" must return an Algorithm, got int'),
        ("algorithms=['nowhere:x']", 'algorithm "nowhere:x" cannot be imported from'),
        ("algorithms=['a/b:x']", 'an algorithm must be "package.module:function", got "a/b:x"'),
        ("algorithm.'stored_parts:mine'.patiense=3", 'unknown option of stored_parts:mine "patiense"'),
        ("data.factory=nowhere:x", 'data.factory "nowhere:x" cannot be imported from'),
        ("data.drift_share=0.5", "drift_share has no meaning with factory"),
        ("topology.name=nowhere:x", 'topology.name "nowhere:x" cannot be imported from'),
        ("topology.name=rng", 'unknown topology "rng"; did you mean "ring"?'),
    ],
)
def test_what_cannot_be_imported_is_told_before_anything_runs(parts: Path, override: str, sentence: str) -> None:
    if override.startswith("algorithm.'"):
        (parts / "own.toml").write_text((parts / "own.toml").read_text().replace("patience", "patiense"))
        override = "rounds=2"
    with pytest.raises(ConfigError) as error:
        load_experiment(parts / "own.toml", overrides=[override])
    assert sentence in str(error.value)


def test_a_stored_config_imports_nothing(parts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(load_experiment(parts / "own.toml"), out)
    (parts / "stored_parts.py").write_text("raise SystemExit('it ran')")
    sys.modules.pop("stored_parts")
    assert len(dfca.load_run(out).metrics) == 2
    done = CliRunner().invoke(app, ["report", str(out)])
    assert done.exit_code == 0, done.output
    assert "stored_parts:mine" in done.output


def test_an_installed_package_brings_algorithms(parts: Path, tmp_path: Path) -> None:
    info = parts / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dfca.algorithms]\nplugged = stored_parts:mine\nbroken = nowhere:x\ndfca = stored_parts:mine\n"
        "dfca-auto = stored_parts:mine\n"
    )
    imports.look_in(parts)
    invalidate_caches()
    assert set(algorithms.installed()) == {"plugged", "broken"}, "nothing replaces an algorithm of ours"
    assert algorithms.get("plugged", patience=2).name == "mine"
    with pytest.raises(ConfigError, match='algorithm "broken" of the entry point nowhere:x cannot be loaded'):
        algorithms.get("broken")
    with pytest.raises(ConfigError, match='unknown algorithm "pluged"; did you mean "plugged"'):
        algorithms.get("pluged")
