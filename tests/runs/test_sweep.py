"""Sweeps: their points, what is run again and what is not, and the same bits from one process or several."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, Listener, numbers

from dfca.base.errors import ConfigError, RunError
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment, load_experiment, read_stored
from dfca.experiment.sweep import Point, Sweep, Trial
from dfca.report.page import write_report
from dfca.report.rows import RunReport
from dfca.runs.runner import make_groups, run
from dfca.runs.signals import Interrupted
from dfca.runs.store.reading import load_run
from dfca.sim.metrics_table import EvaluationRow

BASE = {**TINY, "algorithms": ["dfca-li", "local"], "rounds": 4}


def sweep(grid: Any = None, points: Any = None, **values: Any) -> Experiment:
    tables = {key: value for key, value in (("grid", grid), ("points", points)) if value is not None}
    return Experiment("tiny", "default", Config.of(BASE | values), Sweep.of(tables))


def labels(experiment: Experiment) -> list[str]:
    return [point.label for point in experiment.points]


def sorted_numbers(out: Path) -> Any:
    """Read the numbers of the finished trials in an order that does not depend on which one came first."""
    lines, summary, models = numbers(out)
    rows = [row for row in summary["runs"] if row["finished"]]
    traces = {path.name: path.read_bytes() for kind in ("trace", "timeline") for path in out.glob(f"{kind}/*.json*")}
    return sorted(map(json.dumps, lines)), sorted(map(json.dumps, rows)), models, traces


# --- points


def test_a_grid_is_every_combination() -> None:
    experiment = sweep({"clients": [6, 8], "topology": {"p": [0.5, 0.7]}})
    assert labels(experiment) == [f"clients={n}, topology.p={p}" for n in (6, 8) for p in (0.5, 0.7)]
    assert [(point.config.clients, point.config.topology.p) for point in experiment.points][1] == (6, 0.7)
    assert labels(sweep({"clients": [6, 8], "topology.p": [0.5, 0.7]})) == labels(experiment)


def test_points_are_laid_over_the_base_and_multiply_the_grid() -> None:
    points = [{"topology.name": "ring", "seeds": [7]}, {"topology": {"p": 0.3}, "algorithms": ["ifca"]}]
    experiment = sweep({"clients": [6, 8]}, points)
    assert labels(experiment) == [
        "topology.name=ring, clients=6",
        "topology.name=ring, clients=8",
        "topology.p=0.3, clients=6",
        "topology.p=0.3, clients=8",
    ]
    ring, sparse = experiment.points[0].config, experiment.points[2].config
    assert (ring.seeds, ring.algorithms) == ((7,), ("dfca-li", "local"))
    assert (sparse.seeds, sparse.algorithms, sparse.topology.name) == ((0,), ("ifca",), "erdos-renyi")


def test_a_label_leaves_out_what_all_points_share() -> None:
    assert labels(sweep({"clients": [6, 8], "rounds": [4]})) == ["clients=6", "clients=8"]
    assert labels(sweep({"clients": [8]})) == ["clients=8"]
    assert labels(sweep(points=[{}, {"clients": 8}])) == ["base", "clients=8"]


def test_without_a_sweep_the_one_point_is_the_config() -> None:
    (point,) = sweep().points
    assert (point.at, point.label, point.config) == (None, "", sweep().config)
    assert Trial("local", 3, point).name == "local-3"
    assert Trial("local", 3, point).head == {"algorithm": "local", "seed": 3}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        (
            {"grid": {"clientz": [6]}},
            'point clientz=6: unknown key "clientz"; did you mean "clients"? Known: ',
        ),
        ({"grid": {"clients": []}}, "grid.clients must be a list of at least 1, got []; leave the key out instead"),
        ({"grid": {"clients": 6}}, "grid.clients must be a list of values, got 6; try [6]"),
        ({"grid": {"clients": [6, -1]}}, "point clients=-1: clients must be >= 1 and <= 1000000, got -1"),
        ({"grid": 3}, "grid must be a table of lists ([grid] clients = [12, 24]), got 3"),
        (
            {"grid": {"seeds": [1, 2]}},
            "grid cannot vary seeds; algorithms and seeds belong at the top of the",
        ),
        ({"grid": {"clients": [6, 6]}}, 'two points of the sweep are the same: "base" and "base"; leave one out'),
        ({"points": {"clients": 6}}, 'points must be a list of tables ([[points]]), got {"clients": 6}'),
        ({"points": [{"local": {"steps": -1}}]}, "point local.steps=-1: local.steps must be >= 0, got -1"),
        ({"points": [{"device": "cpu"}]}, "device is the same for all points; set it at the top of the file or by"),
    ],
)
def test_a_bad_sweep_is_told_before_anything_runs(tmp_path: Path, tables: dict[str, Any], sentence: str) -> None:
    import tomli_w

    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(BASE | tables))
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    assert str(caught.value).startswith(sentence)


FILE = """
clusters = 2
rounds = 4
algorithms = ["local"]
[grid]
clients = [6, 8]
"topology.p" = [0.5]
[[points]]
seeds = 3
algorithms = ["ifca"]
[scale.paper.grid]
topology.p = [0.1, 0.2]
"""


def test_an_experiment_file_with_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    experiment = load_experiment(path)
    assert labels(experiment) == ["clients=6", "clients=8"]
    assert experiment.points[1].config.seeds == (0, 1, 2)
    assert labels(load_experiment(path, "paper"))[-1] == "clients=8, topology.p=0.2"
    assert labels(load_experiment(path, overrides=["grid.topology.p=[0.3, 0.4]"]))[0] == "clients=6, topology.p=0.3"
    named = load_experiment(path, algorithms=["local"], seeds=1)
    assert {(point.config.algorithms, point.config.seeds) for point in named.points} == {(("local",), (0,))}
    config, stored = read_stored(experiment.to_toml())
    assert [point.digest for point in stored.expand(config)] == [point.digest for point in experiment.points]
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, overrides=["clients=12"])
    assert str(caught.value) == "clients varies in the grid of this experiment; use --set grid.clients=[6, 8]"


def test_jobs_share_a_split_where_there_are_enough_of_them() -> None:
    (point,) = sweep().points
    trials = [Trial(name, seed, point) for seed in (0, 1) for name in ("local", "ifca")]
    assert [(group.seed, group.algorithms) for group in make_groups(trials, 2)] == [
        (0, ("local", "ifca")),
        (1, ("local", "ifca")),
    ]
    assert [(group.seed, group.algorithms) for group in make_groups(trials, 3)][:2] == [(0, ("local",)), (0, ("ifca",))]


# --- running


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("serial") / "run"
    run(sweep({"clients": [6, 8]}), out, save_models=True, workers=1)
    return out


def test_rows_lines_and_graphs_name_their_point(serial: Path) -> None:
    lines, summary, models = numbers(serial)
    points = sweep({"clients": [6, 8]}).points
    heads = [(row["algorithm"], row["point"], row["digest"]) for row in summary["runs"]]
    assert heads == [(name, point.at, point.digest) for point in points for name in ("dfca-li", "local")]
    assert {(line["point"]["clients"], line["digest"]) for line in lines} == {
        (6, points[0].digest),
        (8, points[1].digest),
    }
    assert list(json.loads((serial / "topology.json").read_text())) == ["clients=6/0", "clients=8/0"]
    assert [point["label"] for point in summary["points"]] == ["clients=6", "clients=8"]
    assert f"local-0-{points[0].digest[:12]}.safetensors" in models


def test_a_point_has_the_numbers_of_a_run_of_its_own(tmp_path: Path, serial: Path) -> None:
    alone = run(Experiment("tiny", "default", Config.of(BASE | {"clients": 8})), tmp_path / "run")
    in_sweep = [
        row for row in json.loads((serial / "summary.json").read_text())["runs"] if row["point"]["clients"] == 8
    ]
    for mine, theirs in zip(alone["runs"], in_sweep, strict=True):
        assert {**mine, "seconds": 0} == {key: value for key, value in theirs.items() if key != "point"} | {
            "seconds": 0
        }


def test_a_sweep_may_grow_and_shrink_and_runs_only_what_is_new(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(sweep({"clients": [6]}, algorithms=["local"]), out, workers=1)
    grown, again = Listener(), Listener()
    run(sweep({"clients": [6, 8], "topology.p": [0.6, 0.8]}, algorithms=["local"], seeds=2), out, grown, workers=1)
    assert len(grown.trials) == 2 * 2 * 2 - 1
    summary = run(sweep({"clients": [8]}, algorithms=["fedavg", "local"]), out, again, workers=1)
    assert again.trials == [("fedavg", 0, 0)]
    assert len(summary["runs"]) == 9, "what is no longer asked for stays in the file"
    rows = RunReport.of(load_run(out)).rows
    assert [(row.label, row.algorithm, row.runs) for row in rows] == [
        ("clients=8", "local", 2),
        ("clients=8", "fedavg", 1),
    ]


def test_another_base_is_refused_where_it_would_orphan_cells(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(sweep({"clients": [6]}, algorithms=["local"]), out, workers=1)
    sentence = "holds a run of another config: rounds is 4 there and 5 here; use --out for another folder"
    with pytest.raises(RunError, match=sentence):
        run(sweep({"clients": [6]}, algorithms=["local"], rounds=5), out, workers=1)
    listener = Listener()
    run(sweep({"clients": [6], "rounds": [5, 4]}, algorithms=["local"], rounds=5), out, listener, workers=1)
    assert len(listener.trials) == 1
    with pytest.raises(RunError, match="it has a sweep there and no sweep here"):
        run(sweep(), out)


FRAGILE = """
import os, signal
from pathlib import Path
from torch import nn

def fail(shape, classes):
    raise ValueError("a model that\\ncannot be made")

def die_once(shape, classes):
    if not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
IN_VIRTUAL_TIME = {
    "world": {"trace": True, "compute": {"kind": "lognormal"}, "link": {"latency_s": 0.1}, "faults": {"loss": 0.05}},
    "clock": {"until_s": 6.0, "evaluate_every_s": 2.0, "timeout_s": 4.0},
}


def test_several_processes_give_the_bits_of_one_and_go_on_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pool of real processes: points of both simulators, one whose model fails, one whose worker is killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("fragile.py").write_text(FRAGILE)
    good, bad = [{}, IN_VIRTUAL_TIME], [{"model.factory": f"fragile:{name}"} for name in ("fail", "die_once")]
    experiment, listener = sweep(points=[*good, *bad], algorithms=["local", "dfca-li"], rounds=2), Listener()
    summary = run(experiment, "run", listener, save_models=True, workers=2)
    died = (
        "local, seed 0, model.factory=fragile:die_once: the worker process ended by signal SIGKILL; out of memory? try "
        "fewer --workers"
    )
    failed = [
        f'{name}, seed 0, model.factory=fragile:fail: model.factory "fragile:fail" failed with ValueError: a model '
        "that cannot be made; it is called as make(shape, classes), here make((1, 8, 8), 10)"
        for name in ("local", "dfca-li")
    ]
    shown = [re.sub(r" \(\S+fragile\.py, line \d+\)", "", failure) for failure in listener.failures]
    assert sorted(shown) == sorted([*failed, died])
    assert sum("fragile.py, line " in failure for failure in listener.failures) == 2
    assert sorted((row["algorithm"], row["finished"]) for row in summary["runs"]) == [
        *[("dfca-li", False)] + [("dfca-li", True)] * 3,
        *[("local", False)] * 2 + [("local", True)] * 2,
    ]
    assert len(listener.rows) == 5
    assert load_run("run").trial_counts == (5, 8)

    again = Listener()
    run(experiment, "run", again, save_models=True, workers=1)
    assert again.trials == [("local", 0, 0)], "what failed is tried again"
    assert len(again.failures) == 2
    run(sweep(points=[*good, bad[1]], algorithms=["local", "dfca-li"], rounds=2), "one", save_models=True, workers=1)
    several, one = sorted_numbers(Path("run")), sorted_numbers(Path("one"))
    assert len(one[-1]) == 4, "a trace and a timeline of each trial in virtual time"
    assert several == one


def test_a_failed_trial_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fragile_too.py").write_text(FRAGILE)
    points = [{}, {"model.factory": "fragile_too:fail"}]
    run(sweep(points=points, algorithms=["local"], rounds=1), tmp_path / "run", workers=1)
    page = write_report(tmp_path / "run").read_text()
    assert "1 of 2 runs are done" in page
    assert "ValueError: a model that cannot be made" in page


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_kill_9_leaves_no_worker_and_two_processes_continue_to_the_bits_of_one(tmp_path: Path) -> None:
    """What is killed runs in two processes, continues in two others, and is equal to an unbroken run in this one."""
    experiment = sweep({"clients": [6, 8]}, algorithms=["dfca-gi"], rounds=40, checkpoint={"every_s": 0.0})
    path, out = tmp_path / "tiny.toml", tmp_path / "run"
    path.write_text(experiment.to_toml())
    command = [
        sys.executable,
        "-m",
        "dfca-auto",
        "run",
        str(path),
        "--out",
        str(out),
        "--save-models",
        "--workers",
        "2",
        "-q",
    ]
    threads = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, env=threads, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not list(out.glob("checkpoint/*/round-*.json")):
            time.sleep(0.005)
        workers = children(process.pid)
        process.kill()
    assert workers
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers):
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    listener = Listener()
    run(experiment, out, listener, save_models=True, workers=2)
    assert any(round > 0 for _, _, round in listener.trials)
    run(experiment, tmp_path / "unbroken", save_models=True, workers=1)
    assert sorted_numbers(out) == sorted_numbers(tmp_path / "unbroken")


@pytest.mark.slow
def test_a_signal_stores_every_trial_under_way(tmp_path: Path) -> None:
    experiment = sweep({"clients": [6, 8]}, algorithms=["dfca-gi"], rounds=200_000)
    begun: set[tuple[str, int, str]] = set()

    class Stopper(Listener):
        def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
            if trial.key not in begun:
                begun.add(trial.key)
                if len(begun) == 2:
                    signal.raise_signal(signal.SIGINT)

    listener = Stopper()
    with pytest.raises(Interrupted) as caught:
        run(experiment, tmp_path / "run", listener, workers=2)
    assert str(caught.value).startswith("interrupted at round ")
    assert str(caught.value).endswith(" and 1 more under way; the same command continues")
    assert len(list((tmp_path / "run" / "checkpoint").iterdir())) == 2


def test_a_point_knows_its_digest_and_nothing_else_matters() -> None:
    one = Point(sweep(seeds=[1]).config, {"clients": 6})
    other = Point(sweep(seeds=[2], title="x").config, {})
    assert one.digest == other.digest
