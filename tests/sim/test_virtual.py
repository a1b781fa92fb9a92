"""Experiments in virtual time: trials, traces, replays."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from rich.console import Console
from tiny_worlds import TINY
from typer.testing import CliRunner

from dfca import algorithms
from dfca.base.errors import ConfigError, RunError
from dfca.cli import app
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment
from dfca.experiment.sweep import Sweep, Trial
from dfca.experiment.world import ClockConfig, TimelineConfig
from dfca.runs.progress import Bars
from dfca.runs.replay import replay_run
from dfca.runs.runner import run
from dfca.runs.signals import Interrupted
from dfca.runs.sink import NullSink
from dfca.runs.store.metrics import read_metrics
from dfca.runs.timeline import Timeline, choose_lanes, usual_span
from dfca.runs.trials import Cadence
from dfca.runs.virtual import Milestones, StuckError, TraceFile
from dfca.sim.events.books import TraceRecord
from dfca.sim.events.world import Compute, Devices, LateJoiner, Partition, World
from dfca.sim.metrics_table import EvaluationRow


def tiny(**values: Any) -> Experiment:
    return Experiment("tiny", "default", Config.of(TINY | values))


def lines_of(out: Path) -> list[dict[str, Any]]:
    lines = [dict(line) for line in read_metrics(out)]
    assert len(lines) == sum(len(path.read_text().splitlines()) for path in (out / "metrics").iterdir()), "none twice"
    for line in lines:
        line.pop("seconds", None)
    return lines


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in json.loads((out / "summary.json").read_text())["runs"]
    ]


@pytest.fixture
def one(virtual_point_folder: Path) -> Path:
    return virtual_point_folder


@pytest.fixture
def swept(virtual_folder: Path) -> Path:
    return virtual_folder


# --- a trial


def test_a_trial_leaves_rows_in_virtual_time(one: Path) -> None:
    lines = lines_of(one)
    assert [line["time_s"] for line in lines] == [float(second) for second in range(1, 9)]
    assert all(len(line["accuracy_by_client"]) == 6 for line in lines)
    (row,) = rows_of(one)
    assert row["finished"]
    assert row["time_s"] == 8.0
    assert row["accuracy"] == lines[-1]["accuracy"]
    first = next(line for line in lines if line["accuracy"] >= 0.12)
    assert (row["time_to_target_s"], row["bytes_to_target"]) == (first["time_s"], first["bytes_sent"])
    assert 0 <= row["idle_share"] <= row["idle_share_max"] <= 1
    assert row["compute_s"] > 0
    assert sum(row["staleness"].values()) == row["records"]["fold"]
    assert row["client_rounds"]["min"] < row["client_rounds"]["max"]
    assert set(row["caught_up_s"]) == {"2"}


def test_the_summary_holds_the_resolved_world(one: Path) -> None:
    summary = json.loads((one / "summary.json").read_text())
    assert summary["world"]["compute"]["devices"] == [{"share": 0.1, "slowdown": 5.0}]
    assert summary["clock"]["until_s"] == 8.0


def test_rounds_end_a_run_without_a_clock(tmp_path: Path) -> None:
    run(
        tiny(world={"preset": "datacentre"}, clock={}, rounds=3, evaluation={"every": 1, "samples": 20}),
        tmp_path / "run",
    )
    (row,) = rows_of(tmp_path / "run")
    assert row["client_rounds"] == {"min": 3, "mean": 3, "max": 3}


def test_a_run_that_cannot_continue_fails_with_its_diagnosis(tmp_path: Path) -> None:
    stuck: dict[str, Any] = {"algorithms": ["ifca"], "world": {"faults": {"loss": 1.0}}, "clock": {"until_s": 20.0}}
    with pytest.raises(StuckError, match=r"no client can continue at .* client 0 waits for the server.*give timeout_s"):
        run(tiny(**stuck), tmp_path / "run")
    out = tmp_path / "swept"
    both = Sweep.of({"grid": {"world.faults.loss": [0.0, 1.0]}})
    run(Experiment("tiny", "default", both.base(TINY | stuck), both), out, workers=1)
    fine, bad = sorted(rows_of(out), key=lambda row: row["point"]["world.faults.loss"])
    assert fine["finished"]
    assert bad["error"].startswith("no client can continue")


def test_the_bars_count_virtual_seconds(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Bars(console) as bars:
        run(tiny(), tmp_path / "run", bars)
        bars.start_trial(Trial("dfca-gi", 0, tiny().points[0]), 2, 4.0)
        (task,) = [bar for bar in bars._progress.tasks if bar.description.startswith("dfca-gi")]
    assert (task.fields["count"], task.percentage) == ("4/8 virtual s", 50.0)


# --- stopping and continuing


class Stopper(NullSink):
    """Asks for a stop once a virtual time has come."""

    def __init__(self, at_s: float) -> None:
        self.at_s, self.places = at_s, []

    def start_trial(self, trial: Trial, round: int, time_s: float = 0.0) -> None:
        self.places.append(time_s)

    def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
        if time_s >= self.at_s:
            import os
            import signal

            self.at_s = float("inf")
            os.kill(os.getpid(), signal.SIGINT)


def test_stopped_and_continued_is_bit_identical(one: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for at_s in (2.5, 5.0):
        with pytest.raises(Interrupted, match="virtual seconds"):
            run(tiny(), out, Stopper(at_s))
    last = Stopper(float("inf"))
    run(tiny(), out, last)
    assert last.places[0] >= 5.0
    assert lines_of(out) == lines_of(one)
    assert rows_of(out) == rows_of(one)
    for name in ("trace/dfca-gi-0.jsonl", "timeline/dfca-gi-0.json"):
        assert (out / name).read_bytes() == (one / name).read_bytes()


@pytest.mark.parametrize("algorithm", ["ifca", "dfca-auto", "fedspd", "dfedavgm", "fedem"])
def test_every_kind_of_algorithm_is_carried_over_a_stop(algorithm: str, tmp_path: Path) -> None:
    runs = {}
    for name, stops in (("unbroken", ()), ("stopped", (3.0, 6.0))):
        for at_s in stops:
            with pytest.raises(Interrupted, match="virtual seconds"):
                run(tiny(algorithms=[algorithm]), tmp_path / name, Stopper(at_s))
        run(tiny(algorithms=[algorithm]), tmp_path / name)
        runs[name] = lines_of(tmp_path / name), rows_of(tmp_path / name)
    assert runs["stopped"] == runs["unbroken"]


def test_killed_between_checkpoints_is_bit_identical(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines and records beyond the last checkpoint are dropped and made again."""
    out, due = tmp_path / "run", iter([False] * 4 + [True] + [False] * 1000)
    monkeypatch.setattr(Cadence, "due", lambda self: next(due))

    class Killer(NullSink):
        def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
            if time_s >= 6.0:
                raise MemoryError("killed")

    with pytest.raises(MemoryError):
        run(tiny(), out, Killer())
    assert lines_of(out)[-1]["time_s"] >= 5.0
    run(tiny(), out)
    assert lines_of(out) == lines_of(one)
    assert (out / "trace/dfca-gi-0.jsonl").read_bytes() == (one / "trace/dfca-gi-0.jsonl").read_bytes()


# --- traces and replays


def test_a_replay_is_bit_identical_and_says_so(one: Path, swept: Path) -> None:
    shown = CliRunner().invoke(app, ["replay", str(one)])
    assert shown.exit_code == 0
    assert "1 replay, bit-identical to the run" in shown.output
    verdicts = list(replay_run(swept, lambda trial: trial.seed == 0))
    assert len(verdicts) == 6
    assert not any(verdict.difference for verdict in verdicts)


def test_a_replay_uses_the_threads_that_the_run_recorded(one: Path) -> None:
    recorded = json.loads((one / "environment.json").read_text())["threads"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(recorded + 1)
        assert not any(verdict.difference for verdict in replay_run(one))
        assert torch.get_num_threads() == recorded
    finally:
        torch.set_num_threads(before)


def test_a_replay_finds_what_was_changed(one: Path, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "run"
    shutil.copytree(one, out)
    path = out / "metrics" / "dfca-gi-0.jsonl"
    text = path.read_text().splitlines()
    line = json.loads(text[3])
    line["accuracy"] += 1e-9
    path.write_text("\n".join([*text[:3], json.dumps(line), *text[4:]]) + "\n")
    (verdict,) = replay_run(out)
    assert verdict.difference.startswith("accuracy at 4 s is ")
    shown = CliRunner().invoke(app, ["replay", str(out)])
    assert shown.exit_code == 1


def test_a_trace_of_another_run_or_none_is_refused(one: Path, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "run"
    shutil.copytree(one, out)
    trace = out / "trace" / "dfca-gi-0.jsonl"
    strange = json.dumps(TraceRecord(0.0, "start", 77)._asdict())
    trace.write_text(strange + "\n" + trace.read_text())
    with pytest.raises(ConfigError, match=r"the trace names client 77; the clients are 0\.\.5"):
        list(replay_run(out))
    trace.unlink()
    with pytest.raises(RunError, match=r"no trace of a finished trial; run it with --set world\.trace=true"):
        list(replay_run(out))


def test_a_trace_that_is_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"x.jsonl.part is not in .*, so its beginning is lost; use --set world.trace=fal"
    ):
        TraceFile(tmp_path / "x.jsonl").cut(0)
    file = TraceFile(tmp_path / "x.jsonl")
    file.append([TraceRecord(0.0, "start", 0)])
    size = file.flush()
    with pytest.raises(RunError, match=f"has {size} bytes and its checkpoint counts {size + 1}"):
        TraceFile(tmp_path / "x.jsonl").cut(size + 1)
    again = TraceFile(tmp_path / "x.jsonl")
    again.cut(0)
    again.append([TraceRecord(1.0, "start", 1)])
    again.close()
    assert json.loads((tmp_path / "x.jsonl").read_text())["client"] == 1


# --- what is seen


def test_targets_and_joiners_by_hand() -> None:
    milestones = Milestones(ClockConfig(target_accuracy=0.5), {1: 2.0})

    def look(time_s: float, scores: list[float], sent: int) -> None:
        mean = sum(scores) / len(scores)
        seen = {"time_s": time_s, "bytes_sent": sent, "compute_s": time_s}
        milestones.update(EvaluationRow.of({**seen, "accuracy": mean, "accuracy_by_client": scores}))

    look(1.0, [0.4, 0.9, 0.4], 10)  # client 1 has not joined
    look(3.0, [0.6, 0.5, 0.6], 20)
    look(4.0, [0.6, 0.571, 0.6], 30)
    assert milestones.facts() == {
        "target_accuracy": 0.5,
        "time_to_target_s": 1.0,
        "bytes_to_target": 10,
        "compute_to_target_s": 1.0,
        "caught_up_s": {"1": 2.0},
    }


# --- timelines


def test_a_timeline_by_hand() -> None:
    timeline = Timeline(TimelineConfig(begin_s=1.0, span_s=9.0), [0, 1], span_s=10.0, send_s=[0.5, 0.5, 0.5])
    timeline.add(
        [
            TraceRecord(0.0, "start", 0),
            TraceRecord(0.0, "start", 1),
            TraceRecord(0.0, "start", 2),
            TraceRecord(2.0, "finish", 0, round=0),
            TraceRecord(2.5, "send", 0, 1, cluster=0, round=0),
            TraceRecord(2.5, "send", 0, 2, cluster=0, round=0),
            TraceRecord(3.0, "hold", 1, 0, cluster=0, round=0),
            TraceRecord(4.0, "finish", 1, round=0),
            TraceRecord(4.0, "fold", 1, 0, cluster=0, round=0),
            TraceRecord(4.5, "send", 1, 0, cluster=1, round=0),
            TraceRecord(4.5, "lost", 0, 1, cluster=1, round=0),
            TraceRecord(5.0, "leave", 0),
            TraceRecord(11.0, "return", 0),
        ]
    )
    assert timeline.over
    table = timeline.table([1.0, 10.0, 1.0], {0: 1.5})
    assert table["lanes"] == [{"client": 0, "note": "joins at 1.5 s"}, {"client": 1, "note": "10x slower"}]
    spans = [tuple(span) for span in table["spans"]]
    assert spans[0] == (0, "train", 1.0, 2.0)
    assert spans.count((0, "send", 2.0, 2.5)) == 2
    assert (1, "train", 1.0, 4.0) in spans
    assert (0, "offline", 5.0, 10.0) in spans
    assert table["arrows"] == [[0, 1, 2.5, 3.0, "used"], [1, 0, 4.5, 4.5, "lost"]]
    twin = Timeline(TimelineConfig(begin_s=1.0, span_s=9.0), [0, 1], span_s=10.0, send_s=[0.5, 0.5, 0.5])
    twin.restore(json.loads(json.dumps(timeline.state())))
    assert twin.table([1.0, 10.0, 1.0], {0: 1.5}) == table
    twin.restore({})  # of a trial whose timeline was not gathered before
    assert twin.table([1.0, 10.0, 1.0], {})["spans"] == []


def test_the_window_of_a_timeline_reaches_beyond_the_warm_up() -> None:
    assert usual_span(algorithms.get("dfca-gi"), steps=5, step_s=0.2) == pytest.approx(10)
    assert usual_span(algorithms.get("dfca-auto", warmup_steps=30), steps=5, step_s=0.2) == pytest.approx(16)


def test_the_lanes_are_of_those_that_something_happens_to() -> None:
    graph = nx.cycle_graph(20)
    slow = World(compute=Compute(devices=(Devices(0.1, 10.0),)))
    (first, *_), slowest = choose_lanes(TimelineConfig(lanes=6), slow, graph, 0), slow.compute.slowdowns(0, 20)
    lanes = choose_lanes(TimelineConfig(lanes=6), slow, graph, 0)
    assert len(lanes) == 6
    assert first == min(lanes)
    assert any(slowest[i] > 1 for i in lanes)
    late = choose_lanes(TimelineConfig(lanes=4), World(late_joiners=(LateJoiner(7, 1.0),)), graph, 0)
    assert {6, 7, 8} < set(late)
    apart = World(partitions=(Partition(1.0, 2.0, (tuple(range(10)), tuple(range(10, 20)))),))
    sides = [i < 10 for i in choose_lanes(TimelineConfig(lanes=4), apart, graph, 0)]
    assert sides == [True, True, False, False]
    assert choose_lanes(TimelineConfig(clients=(9, 3)), World(), graph, 0) == [3, 9]
