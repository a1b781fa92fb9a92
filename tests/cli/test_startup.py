"""Commands that compute nothing start without torch: a mistake in an experiment is reported at once."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dfca.base.errors import ConfigError
from dfca.experiment.load import load_experiment

RUNNER = """
import contextlib, io, json, runpy, sys, time
heavy = {"torch", "numpy", "scipy", "networkx", "pandas", "matplotlib", "sklearn"}
done = []
for line in json.loads(sys.argv[1]):
    sys.argv = ["dfca", *line]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("dfca", run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
    done.append([status, out.getvalue(), err.getvalue(), sorted(heavy & set(sys.modules)), time.process_time()])
print(json.dumps(done))
"""
BASE = 'clients = 6\nclusters = 2\nrounds = 4\nalgorithms = ["dfca-gi", "local"]\n'


def run_commands(*lines: list[str], folder: Path) -> list[tuple[int, str, str, list[str], float]]:
    """Run command lines in one fresh process: status, output, errors, heavy libraries, CPU seconds so far."""
    command = [sys.executable, "-c", RUNNER, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return [tuple(outcome) for outcome in json.loads(done.stdout)]


def test_a_mistyped_key_is_reported_within_a_second_and_without_torch(tmp_path: Path) -> None:
    """It takes 0.4 s of CPU time; half of it is typer, rich and pydantic."""
    line = ["run", "quickstart", "--set", "local.learning_rat=1"]
    [(status, _, errors, heavy, cpu_s)] = run_commands(line, folder=tmp_path)
    assert status == ConfigError.status
    assert 'unknown key in [local] "learning_rat"; did you mean "learning_rate"?' in errors
    assert heavy == []
    assert cpu_s < 1


def test_files_with_mistakes_are_reported_without_torch(tmp_path: Path) -> None:
    files = {
        "several": (BASE + '[local]\nsteps = -1\nlearning_rate = "fast"\n[data]\nnam = "mnist"\n', "3 problems: (1)"),
        "algorithm": (BASE.replace("dfca-gi", "dfca-gj"), 'unknown algorithm "dfca-gj"; did you mean'),
        "option": (BASE + "[algorithm.dfca-auto]\nlevel = 0.7\n", "level must be in (0, 0.5), got 0.7"),
        "data": (BASE + '[data]\nname = "minst"\n', 'unknown dataset "minst"; did you mean'),
        "transform": (BASE + '[data]\ntransform = "axis-rotation"\n', 'transform "axis-rotation" does not fit digits'),
        "model": (BASE + '[model]\nname = "mpl"\n', 'unknown model "mpl"; did you mean "mlp"'),
        "engine": (BASE.replace("rounds", 'engine = "stack"\nrounds'), 'engine must be "auto", "stacked", "loop"'),
        "task": (BASE + 'task = "regression"\n', 'the task is "regression", and data "digits" is for "classification"'),
        "metric": (BASE + '[task]\nmetric = "acuracy"\n', 'unknown metric "acuracy"; did you mean "accuracy"'),
        "graph": (BASE + '[topology]\nname = "regular"\ndegree = 9\n', "topology.degree must be in 1..5 for 6 clients"),
        "world": (BASE + '[world]\npreset = "wify"\n', 'unknown world "wify"; did you mean "wifi"'),
        "sweep": (BASE + '[grid]\n"topology.p" = [0.5, 1.5]\n', "point topology.p=1.5: topology.p must be in 0..1"),
    }
    for name, (text, _) in files.items():
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    outcomes = run_commands(*(["run", f"{name}.toml"] for name in files), folder=tmp_path)
    for (_, sentence), (status, _, errors, heavy, _) in zip(files.values(), outcomes, strict=True):
        assert (status, heavy) == (ConfigError.status, []), errors
        assert sentence in errors


def test_a_swarm_reports_a_mistake_without_torch(tmp_path: Path) -> None:
    line = ["swarm", "quickstart", "--nodes", "4", "--set", "local.learning_rat=1"]
    [(status, _, errors, heavy, _)] = run_commands(line, folder=tmp_path)
    assert (status, heavy) == (ConfigError.status, [])
    assert 'unknown key in [local] "learning_rat"' in errors


def test_a_wrong_invite_is_reported_without_torch(tmp_path: Path) -> None:
    damaged = f"dfca1:192.0.2.1:7448/{'a' * 51}/{'a' * 26}"
    lines = (["node", "join", "shed", invite, "--data", "b.csv"] for invite in ("dfca1:nowhere", damaged))
    for status, _, errors, heavy, _ in run_commands(*lines, folder=tmp_path):
        assert (status, heavy) == (ConfigError.status, [])
        assert "an invite is one line of the form dfca1:HOST:PORT/ID/SECRET" in errors
    assert list(tmp_path.iterdir()) == []


def test_the_state_of_a_node_that_does_not_run_is_shown_without_torch(tmp_path: Path) -> None:
    from saved_peers import make_saved

    from dfca.node.disk.store import DiskStore
    from dfca.node.operate.status import save_status

    save_status(tmp_path, {"name": "shed", "round": 200, "time": "2026-01-01T00:00:00+00:00"})
    DiskStore(tmp_path / "state").save(make_saved(412))
    [(status, output, errors, heavy, _)] = run_commands(["node", "status", str(tmp_path)], folder=tmp_path)
    assert (status, errors, heavy) == (0, "", [])
    assert "round 412, of " in output


def test_what_there_is_is_shown_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFCA_DATA", str(tmp_path))
    lines = (["show", "quickstart"], ["show", "quickstart", "--complete"], ["options"], ["list"], ["data", "list"])
    expected = ("clients =", "learning_rate =", "local.learning_rate", "dfca-gi", "mnist")
    for text, (status, output, errors, heavy, _) in zip(expected, run_commands(*lines, folder=tmp_path), strict=True):
        assert (status, errors, heavy) == (0, "", [])
        assert text in output


def test_every_point_is_checked_before_the_device_and_the_users_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_startup_part.py").write_text("raise RuntimeError('imported too early')\n", encoding="utf-8")
    own = BASE.replace('"local"', '"own_startup_part:mine"')
    file = tmp_path / "own.toml"
    file.write_text(f'device = "cuda:99"\n{own}[grid]\n"topology.p" = [0.5, 1.5]\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^point topology\.p=1\.5: topology\.p must be in 0\.\.1"):
        load_experiment(file)
    file.write_text(f'device = "cuda:99"\n{own}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r'^device "cuda:99" is not on this machine'):
        load_experiment(file)
    file.write_text(own, encoding="utf-8")
    with pytest.raises(ConfigError, match="imported too early"):
        load_experiment(file)


@pytest.mark.parametrize(
    ("home", "path", "name"),
    [
        ("dfca.core.method", "dfca.core.learning.local", "LocalOptions"),
        ("dfca.core.method", "dfca.core.rules.election", "ElectionOptions"),
        ("dfca.core.method", "dfca.core.rules.mixing", "WEIGHT_RULES"),
        ("dfca.core.method", "dfca.core.algorithm", "SHARES"),
        ("dfca.sim.local.choices", "dfca.sim.local.engine", "ENGINES"),
        ("dfca.sim.local.choices", "dfca.sim.local.bank", "PLACES"),
        ("dfca.topology_options", "dfca.topology", "TopologyOptions"),
        ("dfca.topology_options", "dfca.topology", "TOPOLOGIES"),
        ("dfca.data.options", "dfca.data.transforms", "resolve"),
    ],
)
def test_names_are_found_where_they_were(home: str, path: str, name: str) -> None:
    assert getattr(importlib.import_module(path), name) is getattr(importlib.import_module(home), name)
