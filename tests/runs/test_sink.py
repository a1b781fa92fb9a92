"""The stream of a run: the order of its calls, the same through a pipe, and notes that are passed on once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny

from dfca.experiment.sweep import Point, Trial, TrialGroup
from dfca.runs.progress import Bars
from dfca.runs.runner import run
from dfca.runs.sink import Broadcast, FolderSink, NullSink, PipeSink, RunSink, deliver
from dfca.runs.store.rows import TrialRow
from dfca.sim.metrics_table import EvaluationRow

CALLS = (
    "start_run",
    "note",
    "start_group",
    "prepare_trial",
    "start_trial",
    "finish_round",
    "finish_trial",
    "fail_trial",
    "end_run",
)


class Recorder:
    """Remembers every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        assert name in CALLS, name
        return lambda *arguments: self.calls.append((name, arguments))


def test_every_sink_has_every_call() -> None:
    for kind in (RunSink, NullSink, FolderSink, PipeSink, Broadcast, Bars):
        assert all(callable(getattr(kind, name)) for name in CALLS), kind


def test_the_calls_of_a_run_are_in_the_order_of_the_contract(tmp_path: Path) -> None:
    recorder = Recorder()
    run(tiny(rounds=2), tmp_path / "run", recorder)
    order = [name for name, _ in recorder.calls if name != "note"]
    trial = ["prepare_trial", "start_trial", "finish_round", "finish_round", "finish_trial"]
    assert order == ["start_run", "start_group", *trial, *trial, "end_run"]
    (trials, finished), (group, graph) = recorder.calls[0][1], dict(recorder.calls)["start_group"]
    assert ([trial.algorithm for trial in trials], finished) == (["dfca-li", "ifca"], 0)
    assert group.trials == list(trials)
    assert graph.keys() == {"facts", "edges", "clusters"}
    rounds = [arguments[1:] for name, arguments in recorder.calls if name == "finish_round"]
    assert [(round, metrics is None, time_s) for round, metrics, time_s in rounds] == [(1, True, 0), (2, False, 0)] * 2


def test_a_sink_that_raises_ends_the_run_and_the_end_is_passed_on(tmp_path: Path) -> None:
    class Broken(Recorder):
        def start_trial(self, *_: object) -> None:
            raise OSError("the tracker is gone")

    broken = Broken()
    with pytest.raises(OSError, match="the tracker is gone"):
        run(tiny(rounds=2), tmp_path / "run", broken)
    assert broken.calls[-1] == ("end_run", ())


def test_a_pipe_repeats_every_call_with_the_same_values() -> None:
    group = TrialGroup(Point(tiny().config), 3, ("ifca", "local"))
    trial = group.trial("local")
    ours, theirs = Recorder(), Recorder()
    sent: list[list[Any]] = []
    pipe = PipeSink(lambda *message: sent.append(json.loads(json.dumps(message))))
    for sink in (ours, pipe):
        sink.note("a note", group)
        sink.note("another")
        sink.start_group(group, {"facts": {"p": 0.1}, "edges": [[0, 1]], "clusters": None})
        sink.start_trial(trial, 2, 1.5)
        sink.finish_round(trial, 3, None, 2.0)
        sink.finish_round(trial, 4, EvaluationRow.of({"round": 4, "accuracy": 0.1 + 0.2}), 2.5)
        sink.finish_trial(trial, TrialRow.of({"algorithm": "local", "seed": 3, "accuracy": 1 / 3}))
        sink.fail_trial(trial, "it broke")
    memory = [message for message in sent if message[0] == "memory"]
    assert memory[0][1] > 2**20
    for message in sent:
        if message[0] != "memory":
            deliver(message, group, theirs)
    ours.calls[1] = ("note", ("another", None))
    assert theirs.calls == ours.calls
    with pytest.raises(ValueError, match="'rm' is no call of a sink"):
        deliver(["rm", "-rf"], group, theirs)


def test_notes_are_passed_on_once_and_name_the_point_and_a_seed_that_is_not_the_first() -> None:
    recorder = Recorder()
    sink = Broadcast(recorder, NullSink())
    config = tiny().config
    first, second = (TrialGroup(Point(config, {"clients": 6}), seed, ("ifca",)) for seed in (0, 1))
    for text, group in (
        ("a", None),
        ("b", first),
        ("b", second),
        ("c", second),
        ("a", first),
        ("d", TrialGroup(Point(config), 1, ())),
    ):
        sink.note(text, group)
    assert [arguments[0] for _, arguments in recorder.calls] == [
        "a",
        "clients=6: b",
        "clients=6, seed 1: c",
        "seed 1: d",
    ]


def test_a_job_knows_its_trials() -> None:
    group = TrialGroup(Point(tiny().config), 3, ("ifca", "local"))
    assert group.trials == [Trial("ifca", 3, group.point), Trial("local", 3, group.point)]
