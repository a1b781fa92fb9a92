"""Runs: stopped anywhere and continued, the numbers are those of a run that was never stopped."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from rich.console import Console
from tiny_runs import TINY, Listener, numbers, tiny
from toy import make_toy_model, make_toy_split

import dfca
from dfca.base import files as disk
from dfca.base.errors import ConfigError, DfcaWarning, RunError
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment
from dfca.experiment.sweep import Point, Trial
from dfca.runs import trials
from dfca.runs.progress import Bars
from dfca.runs.runner import run
from dfca.runs.signals import Interrupted, StopSignal
from dfca.runs.trials import Cadence
from dfca.sim.local import cores
from dfca.sim.metrics_table import EvaluationRow
from dfca.sim.rounds.simulation import Simulation


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store a checkpoint after every round."""
    monkeypatch.setattr(Cadence, "due", lambda self: True)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    run(tiny(), out, save_models=True)
    return out


# --- a run


def test_a_run_leaves_the_promised_files(unbroken: Path) -> None:
    names = sorted(entry.name for entry in unbroken.iterdir() if not entry.name.startswith("."))
    files = ["config.toml", "environment.json", "metrics", "summary.json", "topology.json"]
    assert [name for name in names if name in files] == files
    assert "checkpoint" not in names
    lines, summary, models = numbers(unbroken)
    assert [(line["algorithm"], line["round"]) for line in lines] == [
        (name, round) for name in ("dfca-li", "ifca") for round in (2, 4, 6)
    ]
    assert [(row["algorithm"], row["seed"], row["rounds"], row["finished"]) for row in summary["runs"]] == [
        ("dfca-li", 0, 6, True),
        ("ifca", 0, 6, True),
    ]
    assert summary["runs"][0]["accuracy"] == lines[2]["accuracy"]
    assert sorted(models) == ["dfca-li-0.safetensors", "ifca-0.safetensors"]
    graph = json.loads((unbroken / "topology.json").read_text())["0"]
    assert graph["facts"]["nodes"] == len(graph["clusters"]) == 6
    assert graph["facts"]["edges"] == len(graph["edges"])
    environment = json.loads((unbroken / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["device"] == "cpu"


def test_after_a_drift_the_stored_clusters_are_those_of_the_end(tmp_path: Path) -> None:
    run(tiny(data=TINY["data"] | {"drift_share": 0.34}), tmp_path)
    assert json.loads((tmp_path / "topology.json").read_text())["0"]["clusters"].count(2) == 2


def test_finished_trials_are_not_run_again(unbroken: Path) -> None:
    before = numbers(unbroken)
    listener = Listener()
    run(tiny(), unbroken, listener)
    assert listener.trials == []
    assert numbers(unbroken) == before


def test_new_trials_join_the_finished_ones(tmp_path: Path) -> None:
    run(tiny(algorithms=["local"]), tmp_path / "run")
    listener = Listener()
    summary = run(tiny(algorithms=["fedavg", "local"], seeds=[0, 1]), tmp_path / "run", listener)
    assert [(name, seed) for name, seed, _ in listener.trials] == [("fedavg", 0), ("fedavg", 1), ("local", 1)]
    assert len(summary["runs"]) == 4


def test_notes_are_told_once_and_name_the_seed_where_it_matters(tmp_path: Path) -> None:
    listener = Listener()
    run(tiny(seeds=[0, 1], topology={"name": "erdos-renyi", "p": 0.2}, clients=7), tmp_path / "run", listener)
    assert len(set(listener.notes)) == len(listener.notes)
    graphs = [note for note in listener.notes if "graph: 7 clients" in note]
    assert [note.startswith("seed 1: ") for note in graphs] == [False, True]


def test_models_that_were_not_kept_are_told(tmp_path: Path) -> None:
    run(tiny(algorithms=["local"]), tmp_path / "run")
    listener = Listener()
    run(tiny(algorithms=["local"]), tmp_path / "run", listener, save_models=True)
    assert listener.notes == [
        "trials that were finished without --save-models are not run again (1, first: local, seed 0); "
        "--no-resume runs everything anew"
    ]


def test_a_terminal_shows_both_bars(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=120, color_system=None)) as bars:
        run(tiny(rounds=3), tmp_path / "run", bars)
        trials = [Trial(name, 0, Point(tiny(rounds=3).config)) for name in ("ifca", "local")]
        bars.start_run(trials, 0)
        for trial in trials:
            bars.start_trial(trial, 0)
            bars.finish_round(trial, 3, EvaluationRow.of({"round": 3, "accuracy": 0.5}))
        bars._progress.refresh()
        bars.fail_trial(trials[0], "it broke")
    text = screen.getvalue()
    assert "all trials" in text
    assert "1/2 trials" in text
    assert "· graph: 6 clients" in text
    for name in ("ifca", "local"):
        assert re.search(rf"{name}, seed 0 +━+ +round 3/3 .* accuracy 0.500", text)
    assert "1/2  ifca, seed 0: failed: it broke" in text


# --- stopped and continued


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stores_the_last_finished_round(tmp_path: Path, unbroken: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    listener = Listener(lambda round: signal.raise_signal(number) if round == 3 else None)
    with pytest.raises(Interrupted) as caught:
        run(tiny(), out, listener, save_models=True)
    assert str(caught.value) == "interrupted at round 3 of 6 of dfca-li, seed 0; the same command continues"
    assert listener.notes[-1] == "stopping: after this round, or in two seconds; Ctrl-C again stops at once"
    again = Listener()
    run(tiny(), out, again, save_models=True)
    assert again.trials == [("dfca-li", 0, 3), ("ifca", 0, 0)]
    assert "dfca-li, seed 0: continues after round 3 of 6" in again.notes
    assert numbers(out) == numbers(unbroken)


def test_a_signal_in_the_last_round_of_a_trial_lets_it_finish(tmp_path: Path) -> None:
    listener = Listener(lambda round: signal.raise_signal(signal.SIGINT) if round == 6 else None)
    with pytest.raises(Interrupted, match=r"^interrupted before ifca, seed 0; the same command continues$"):
        run(tiny(), tmp_path / "run", listener)
    assert [row["algorithm"] for row in listener.rows] == ["dfca-li"]


def test_a_second_signal_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)  # a shell ignores it for what it runs in the background
    with StopSignal() as stop:
        with stop.deferred():
            signal.raise_signal(signal.SIGINT)
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        stop.requested = False
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


class Killed(BaseException):
    """The end of the process, as far as a test can play it."""


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("first", range(5))
def test_killed_at_any_write_it_continues_to_the_same_bits(
    tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Make each disk operation in turn the last one of the process, and continue from what is there."""
    out, lives, replace, flush = tmp_path / "run", 0, os.replace, os.fsync
    budget = 0

    def counted(operation: Callable[..., None]) -> Callable[..., None]:
        def act(*arguments: Any) -> None:
            nonlocal budget
            budget -= 1
            if budget < 0:
                raise Killed
            operation(*arguments)

        return act

    monkeypatch.setattr(disk.os, "replace", counted(replace))
    monkeypatch.setattr(disk.os, "fsync", counted(flush))
    for allowed in range(first, 400, 5):
        budget = allowed
        lives += 1
        try:
            run(tiny(), out, save_models=True)
        except Killed:
            continue
        break
    assert lives > 5
    assert numbers(out) == numbers(unbroken)


@pytest.mark.usefixtures("often")
def test_damaged_checkpoints_cost_time_not_numbers(tmp_path: Path, unbroken: Path) -> None:
    out = tmp_path / "run"
    stop = Listener(lambda round: signal.raise_signal(signal.SIGINT) if round == 5 else None)
    for damaged, begins in ((("000005",), 4), (("000004", "000005"), 0)):
        with pytest.raises(Interrupted):
            run(tiny(), out, stop, resume=False, save_models=True)
        for stem in damaged:
            path = out / "checkpoint" / "dfca-li-0" / f"round-{stem}.safetensors"
            os.truncate(path, path.stat().st_size // 2)
        listener = Listener()
        run(tiny(), out, listener, save_models=True)
        assert listener.trials[0] == ("dfca-li", 0, begins)
        assert sum("is damaged (its checksum does not fit)" in note for note in listener.notes) == len(damaged)
        assert numbers(out) == numbers(unbroken)


def test_a_full_disk_loses_nothing_finished(tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        replace = os.replace

        def refuse(source: Path, target: Path) -> None:
            if "ifca" in str(target):
                raise full
            replace(source, target)

        patch.setattr(disk.os, "replace", refuse)
        with pytest.raises(RunError, match=r"^no space left for ifca-0.safetensors in .*; finished work is kept: fr"):
            run(tiny(), out, save_models=True)
    assert [row["algorithm"] for row in json.loads((out / "summary.json").read_text())["runs"]] == ["dfca-li"]
    run(tiny(), out, save_models=True)
    assert numbers(out) == numbers(unbroken)


@pytest.mark.parametrize("lives", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(tmp_path: Path, lives: int) -> None:
    """Real processes, really killed: each after some more rounds, at a random moment."""
    values = TINY | {"rounds": 40 if lives == 1 else 120, "algorithms": ["dfca-gi"], "checkpoint": {"every_s": 0.0}}
    experiment = Experiment("tiny", "default", Config.of(values))
    config, out = tmp_path / "tiny.toml", tmp_path / "run"
    config.write_text(experiment.config.to_toml())
    command = ["-m", "dfca", "run", str(config), "--out", str(out), "--save-models", "--quiet"]
    metrics = out / "metrics" / "dfca-gi-0.jsonl"
    moments = random.Random(lives)
    kills = 0
    for life in range(10 * lives):
        size = metrics.stat().st_size if metrics.exists() else 0
        process = Forked(command, os.environ, tmp_path, f"life-{life}")
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.stat().st_size > size + moments.randrange(5_000):
                time.sleep(moments.random() * 0.1)
                break
            time.sleep(0.001)
        process.kill()
        _, errors = process.communicate()
        assert errors == ""
        if process.returncode == 0:  # it had come to its end: begin anew
            shutil.rmtree(out)
            kills = 0
            continue
        kills += 1
        if kills == lives:
            break
    assert kills == lives
    listener = Listener()
    run(experiment, out, listener, save_models=True)
    assert all(round > 0 for _, _, round in listener.trials)
    run(experiment, tmp_path / "unbroken", save_models=True)
    broken, unbroken = numbers(out), numbers(tmp_path / "unbroken")
    assert broken == unbroken


# --- when to store


def test_checkpoints_are_apart_and_cheap() -> None:
    now = 0.0
    cadence = Cadence(30.0, clock=lambda: now)
    now = 29.9
    assert not cadence.due()
    now = 30.0
    assert cadence.due()
    with cadence.measured():
        now += 10.0
    assert not cadence.due()
    now += 199.0
    assert not cadence.due()
    now += 1.0
    assert cadence.due()


def test_seconds_add_up_over_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cadence, "due", lambda self: True)
    ticks = iter(range(10**6))
    monkeypatch.setattr(trials.time, "monotonic", lambda: float(next(ticks)))
    out = tmp_path / "run"
    experiment = tiny(algorithms=["local"])
    with pytest.raises(Interrupted):
        run(experiment, out, Listener(lambda round: signal.raise_signal(signal.SIGINT) if round == 2 else None))
    (sidecar,) = (out / "checkpoint" / "local-0").glob("round-000002.json")
    stored = json.loads(sidecar.read_text())["seconds"]
    summary = run(experiment, out)
    # One tick for the set-up of each part and one for each round.
    assert stored == 3
    assert summary["runs"][0]["seconds"] == 3 + 1 + 4


def be_interrupted() -> None:
    """Send SIGINT to this process, and then take a minute."""
    signal.raise_signal(signal.SIGINT)
    for _ in range(6000):
        time.sleep(0.01)


def stuck_from(round: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make that round send SIGINT to this process, and then take a minute."""
    real = Simulation.step

    def step(self: Simulation) -> Any:
        if self.round == round:
            be_interrupted()
        return real(self)

    monkeypatch.setattr(Simulation, "step", step)


@pytest.mark.usefixtures("often")
def test_a_signal_waits_two_seconds_for_a_round_at_most(
    tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        stuck_from(3, changed)
        began = time.monotonic()
        with pytest.raises(Interrupted) as caught:
            run(tiny(), tmp_path / "run", save_models=True)
    assert time.monotonic() - began < 10
    assert str(caught.value).startswith(
        "interrupted after round 3 of 6 of dfca-li, seed 0, which continues from its last"
    )
    run(tiny(), tmp_path / "run", save_models=True)
    assert numbers(tmp_path / "run") == numbers(unbroken)


def test_work_on_several_cores_is_abandoned_too() -> None:
    def job() -> None:
        for _ in range(6000):
            time.sleep(0.01)

    began = time.monotonic()
    with StopSignal() as stop, stop.deferred():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), stop.abandonable():
            list(cores.each([job, job, job], 2))
    assert time.monotonic() - began < 10


def test_an_interrupted_simulation_returns_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"rounds": 6, "clusters": 2, "topology": "ring"}
    stuck_from(3, monkeypatch)
    with pytest.warns(DfcaWarning, match="interrupted after round 3 of 6: the result is partial"):
        result = dfca.simulate(make_toy_model, make_toy_split(), "dfca-gi", **options)
    assert result.partial
    assert list(result.metrics["round"]) == [1, 2, 3], "a short run is evaluated often"
    assert "after 3 rounds (interrupted)" in repr(result)
    assert len(result.banks) == 2
    stuck_from(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="before the first evaluation"):
        dfca.simulate(make_toy_model, make_toy_split(), "dfca-gi", **options)


@pytest.mark.parametrize("where", ["the start", "the data", "the callback"])
def test_an_interrupted_comparison_keeps_what_it_has(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = Simulation.__init__, []

    def start(self: Simulation, setting: Any, *others: Any) -> None:
        if (where, setting.algorithm.name, setting.seed) == ("the start", "local", 1):
            be_interrupted()
        real(self, setting, *others)

    def data(seed: int) -> Any:
        if (where, seed) == ("the data", 2):
            be_interrupted()
        return make_toy_split(seed=seed)

    def callback(record: dict[str, Any]) -> None:
        seen.append(record["seed"])
        if where == "the callback" and seen.count(1) == 3:
            be_interrupted()

    monkeypatch.setattr(Simulation, "__init__", start)
    began = time.monotonic()
    options: dict[str, Any] = {"rounds": 2, "clusters": 2, "topology": "ring", "callback": callback}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DfcaWarning)
        made = dfca.simulate(make_toy_model, data, ["dfca-gi", "local"], seed=[0, 1, 2], **options)
    assert time.monotonic() - began < 20
    pairs = [(result.algorithm, result.seed) for result in made]
    lacks = [("local", 1)] if where == "the start" else []
    assert pairs == [pair for pair in [("dfca-gi", 0), ("local", 0), ("dfca-gi", 1), ("local", 1)] if pair not in lacks]
    told = {"the start": "no result of local, seed 1", "the callback": "local, seed 1, ends after round 1"}.get(where)
    assert repr(made).endswith(f"interrupted: {told}") if told else "interrupted" not in repr(made)
    assert "local & " in made.to_latex(["accuracy"])


def test_the_start_of_a_trial_has_a_bar(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=120, color_system=None)) as bars:
        bars.prepare_trial(Trial("dfca-auto", 0, Point(tiny().config)))
        bars._progress.refresh()
        bars.start_trial(Trial("dfca-auto", 0, Point(tiny().config)), 0)
        assert len(bars._progress.tasks) == 2
    assert re.search(r"dfca-auto, seed 0 .* start .* models, elections", screen.getvalue())


def make_linear(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), classes))


def test_options_of_a_model_beside_a_factory_are_noted(tmp_path: Path) -> None:
    listener = Listener()
    model = {"factory": f"{__name__}:make_linear", "hidden": 50}
    run(tiny(rounds=1, algorithms=["local"], model=model), tmp_path / "run", listener)
    assert any("model.hidden does nothing beside model.factory" in note for note in listener.notes)


def test_names_that_others_use_are_understood_in_files() -> None:
    with pytest.raises(ConfigError, match=r'unknown key "lr".*; "learning_rate" belongs in \[local\]'):
        Config.of(TINY | {"lr": 0.1})
    with pytest.raises(ConfigError, match=r'unknown key in \[local\] "lr"; did you mean "learning_rate"\?'):
        Config.of(TINY | {"local": {"lr": 0.1}})
