"""The bench measures; these tests check what it computes and keeps. Nothing here depends on how fast a machine is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import bench_file, child, events, floor, ranks, run, scaling, tables
from benchmarks.__main__ import commands
from benchmarks.baselines import environments
from benchmarks.baselines import measure as baselines
from benchmarks.baselines.environments import LIBRARIES, Library, environment_of, script_of
from benchmarks.baselines.work import CPU, Work, circulant, layers, now, samples_of
from benchmarks.figures import draw
from benchmarks.measurements import Row, Skip, fit, in_turn, met, ratio
from benchmarks.plain_torch import PlainTorch
from benchmarks.sizes import Size, make_setting, regular_graph
from dfca.base.errors import ConfigError, RunError
from dfca.cli import INTERRUPTED
from dfca.runs.signals import Interrupted
from dfca.sim.rounds.simulation import Simulation

MLP = Size(inputs=16, hidden=6, classes=4, clients=4, samples=8, clusters=2, degree=2, steps=2)
CNN = Size(model="cnn", inputs=144, hidden=6, classes=4, clients=2, samples=6, clusters=2, degree=1, steps=2)
TUTORIAL = replace(CNN, model="cnn-tutorial", colours=3, clusters=1, algorithm="local", batch_size=4)
WORK = Work(clients=4, hidden=6, samples=8, batch=4, degree=2, rounds=2, threads=1)
ABSENT = Library("absent 1.0", "run_flower.py", (("--no-index", "dfca-has-no-such-library==1"),), "it does not exist")
HERE = {"processor": "p", "cpus": 2, "threads": 1, "load": 0.1, "torch": "2", "dfca": "0", "commit": None, "bf16": "?"}


class Counter:
    """A progress sink that keeps the rows."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.stop_after = stop_after

    def start(self, part: str, count: int) -> None:
        self.part, self.count = part, count

    def tick(self, what: str) -> None:
        assert what

    def finish_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.stop_after == len(self.rows):
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "machine", lambda: HERE)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the work of child processes here, with the same JSON: `test_the_bf16_probe` starts a real one."""

    def call(kind: str, **arguments: Any) -> Any:
        return json.loads(json.dumps(child.KINDS[kind](**json.loads(json.dumps(arguments)))))

    monkeypatch.setattr(child, "call", call)


def tiny_floor() -> floor.FloorPlan:
    workloads = (("mlp", MLP, 1.15), ("cnn", CNN, 1.15))
    step, images = replace(CNN, clusters=1, algorithm="local"), replace(TUTORIAL, inputs=26 * 26, augmented=True)
    return floor.FloorPlan(workloads, (("augmentation", images),), step, MLP, repeats=2, tries=1)


def tiny_scaling() -> scaling.ScalingPlan:
    points = {"N": [(4, MLP), (6, replace(MLP, clients=6))]}
    return scaling.ScalingPlan(points, cycles=1, rounds=1)


def measured(part: str, rows: list[Row]) -> dict[str, Any]:
    """Make the content of a bench.json without measuring."""
    lines = [row.to_json() for row in rows]
    content = {
        "date": "2026-01-01",
        "command": "python -m benchmarks",
        "quick": False,
        "finished": True,
        "environment": HERE,
    }
    part_content = {**content, "rows": lines, **({"fits": scaling.fits(lines)} if part == "scaling" else {})}
    return {"format": bench_file.FORMAT, "parts": {part: part_content}}


def scaling_rows() -> list[Row]:
    """Time grows as N^1, memory as N^2."""
    return [
        Row(f"N = {n}", "", {"round": [0.001 * n] * 3}, details={
            "axis": "N", "x": n, "memory_bytes": [1000 * n * n], "phases": {"assign": 1.0, "train": 2.0, "mix": 1.0}})
        for n in (10, 100, 1000)
    ]  # fmt: skip


def test_in_turn_alternates_and_does_not_count_warm_ups() -> None:
    calls: list[str] = []
    subjects = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = in_turn(subjects, repeats=2, tick=lambda _: None, warmups=1)
    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_ratios_are_taken_repeat_by_repeat() -> None:
    # the machine was twice as slow in the second repeat: the ratio does not see it
    assert ratio([1.0, 2.0, 3.0], [2.0, 4.0, 2.0]) == (0.5, 0.5, 1.5)
    row = Row("x", "", {"a": [2.0], "b": [1.0]}, of="a", to="b", most=1.5).to_json()
    assert row["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert row["met"] is False
    assert met(2.0, None, 1.8) is True
    assert met(2.0, None, None) is None


def test_exponents_of_powers_are_found() -> None:
    exponent = fit([10, 1000, 100], [3 * x**1.5 for x in (10, 1000, 100)])
    assert exponent is not None
    assert exponent == pytest.approx((1.5, 3.0, 1.5))
    bent = fit([1, 10, 100], [1, 1, 10])
    assert bent is not None
    assert bent.exponent == pytest.approx(0.5)
    assert bent.last == pytest.approx(1.0)
    assert fit([1], [1]) is None
    assert fit([1, 2], [0, 1]) is None


@pytest.mark.parametrize(
    ("size", "schedules"),
    [(MLP, 6), (CNN, 10), (replace(CNN, batch_size=4), 10), (TUTORIAL, 4)],
    ids=["mlp", "cnn", "cnn in batches", "tutorial"],
)
def test_every_plain_schedule_computes_what_the_simulator_computes(size: Size, schedules: int) -> None:
    torch.set_num_threads(2)  # so that the threaded schedules exist
    try:
        setting = replace(make_setting(size), graph=nx.empty_graph(size.clients))
        names = list(PlainTorch(setting).schedules)
        assert len(names) == schedules
        simulation = Simulation(setting)
        for _ in range(2):
            simulation.step()
        assert len(set(simulation.assignments.tolist())) == size.clusters  # all models are in use
        for name in names:
            plain = PlainTorch(setting)
            for _ in range(2):
                plain.schedules[name]()
            plain.close()
            for client in range(size.clients):
                for j in range(size.clusters):
                    ours = list(simulation.model(client, j).parameters())
                    for a, b in zip(ours, plain.tensors[client][j], strict=True):
                        assert torch.allclose(a, b, atol=1e-5), (name, client, j)
    finally:
        torch.set_num_threads(1)


def test_regular_graphs_have_the_degree() -> None:
    for clients, degree in ((10, 3), (10, 9), (10, 50), (7, 4), (20, 15)):
        wanted = min(degree, clients - 1)
        assert set(dict(regular_graph(clients, degree, 0).degree).values()) == {wanted}
    assert set(dict(regular_graph(5, 3, 0).degree).values()) == {2}  # 5 x 3 is odd


@pytest.mark.usefixtures("in_process")
def test_floor_at_a_tiny_size(tmp_path: Path) -> None:
    content = run.run({"floor": tiny_floor()}, tmp_path, "python -m benchmarks floor", True, Counter())
    part = content["parts"]["floor"]
    assert part["finished"]
    assert [row["name"] for row in part["rows"]] == [
        "mlp", "cnn", "augmentation", "CNN, local step", "mixing's share of a round",
    ]  # fmt: skip
    for row in part["rows"]:
        assert row["skipped"] is None
        assert all(value > 0 for values in row["values"].values() for value in values)
    assert part["rows"][0]["details"]["floor"] in part["rows"][0]["details"]["schedules"]
    differences = part["rows"][3]["details"]["differences"]
    assert len(differences) == 2
    assert all(value < 1e-5 for values in differences.values() for value in values.values())
    assert all(values["plain from double"] > 0 for values in differences.values())
    assert json.loads((tmp_path / "bench.json").read_text()) == content
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench.json",
        "bench.md",
        "bench-ratios.png",
        "bench-ratios.svg",
    }
    text = (tmp_path / "bench.md").read_text()
    assert "quick look" in text
    assert "backward by hand" in text or "tensors" in text or "modules" in text


@pytest.mark.usefixtures("in_process")
def test_scaling_at_a_tiny_size_and_parts_meet_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "draw", lambda content, folder: None)  # the next test draws
    (tmp_path / "bench.json").write_text(json.dumps(measured("floor", [Row("old", "", skipped="why")])))
    content = run.run({"scaling": tiny_scaling()}, tmp_path, "python -m benchmarks scaling", False, Counter())
    assert list(content["parts"]) == ["floor", "scaling"]
    part = content["parts"]["scaling"]
    assert [row["details"]["x"] for row in part["rows"]] == [4, 6]
    assert "N" in part["fits"]
    assert "exponent" in part["fits"]["N"]["time"]


def test_the_record_reaches_100_000_clients_with_models_of_1_000_numbers() -> None:
    (points,) = scaling.make_record(quick=False).points.values()
    assert points[-1][0] == points[-1][1].clients == 100_000
    assert {(size.clusters, size.steps, size.samples) for _, size in points} == {(2, 5, 20)}
    assert points[-1][1].parameters == 997
    content = {"format": 1, "parts": {"record": measured("scaling", scaling_rows())["parts"]["scaling"]}}
    assert tables.markdown(content).startswith("**record: clients that keep their models, on one machine**")


def test_exponents_reach_the_tables_and_the_picture(tmp_path: Path) -> None:
    content = measured("scaling", scaling_rows())
    text = tables.markdown(content)
    assert "| N, clients | 1.00 (1.00) | 2.00 (2.00) | ≤ 1.05 | no |" in text
    assert "25 / 50 / 25" in text
    assert {path.name for path in draw(content, tmp_path)} == {"bench-scaling.png", "bench-scaling.svg"}


def test_events_at_a_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "draw", lambda content, folder: None)
    monkeypatch.setattr(events, "LEAST_EVENTS", 1)
    tiny = Size(inputs=16, hidden=2, samples=6, classes=3, clusters=2, clients=6, degree=4)
    plan = events.EventsPlan(tiny, tiny, 2, replace(tiny, algorithm="dfca-fi"), clients=(6, 12), until_s=2.0, repeats=1)
    content = run.run({"events": plan}, tmp_path, "python -m benchmarks events", True, Counter())
    part = content["parts"]["events"]
    assert len(part["rows"]) == plan.count
    assert part["rows"][1]["ratio"]["median"] > 0
    six, twelve = (row["details"] for row in part["rows"][-2:])
    assert 0 < six["turn"] < twelve["turn"] < twelve["flooding"]
    assert set(part["fits"]) == {"wave", "turn", "flooding"}
    (expected,) = Simulation(make_setting(replace(tiny, algorithm="dfca-fi", clients=12))).elections
    sent = twelve["wave"] + twelve["turn"] * twelve["candidates"]
    assert sent == pytest.approx(expected.scalars_sent, rel=0.02)
    first, costs = tables.tables_of("events", part)
    assert [row[:2] for row in costs.rows] == [["6", "12"], ["12", "24"]]
    (dry,) = (row for row in first.rows if row[0] == "events without training")
    assert dry[2:] == ["≥ 1/s", "yes"]


def test_an_interrupted_bench_keeps_finished_rows(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match=r"1 finished row is kept in .*bench\.json"):
        run.run({"floor": tiny_floor()}, tmp_path, "python -m benchmarks", True, Counter(stop_after=1))
    part = bench_file.load(tmp_path / "bench.json")["parts"]["floor"]
    assert [row["name"] for row in part["rows"]] == ["mlp"]
    assert not part["finished"]
    assert "interrupted" in (tmp_path / "bench.md").read_text()


def test_interrupted_before_the_first_row_the_old_ones_stay(tmp_path: Path) -> None:
    old = measured("floor", [Row("old", "", skipped="why")])
    (tmp_path / "bench.json").write_text(json.dumps(old))

    def stop(plan: Any, tick: Any) -> Iterator[Row]:
        raise KeyboardInterrupt
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run.MEASURES, "floor", stop)
        with pytest.raises(Interrupted, match="0 finished rows"):
            run.run({"floor": tiny_floor()}, tmp_path, "python -m benchmarks", True, Counter())
    assert bench_file.load(tmp_path / "bench.json") == old


def test_a_library_that_cannot_be_installed_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = environments._run

    def without_venv(command: list[str], library: Library) -> None:
        """Put this Python in place of a fresh environment's, which takes pip half a minute to make."""
        if "venv" not in command:
            install([sys.executable, *command[1:]], library)

    monkeypatch.setattr(environments, "_run", without_venv)
    plan = baselines.BaselinesPlan((WORK,), (ABSENT,), repeats=1, cache=tmp_path)
    (row,) = baselines.rows(plan, lambda _: None)
    assert row.skipped is not None
    assert row.skipped.startswith("absent 1.0 cannot be installed: ")
    assert "dfca-has-no-such-library" in row.skipped
    text = tables.markdown(measured("peers", [row]))
    assert "it does not exist." in text
    assert "cannot be installed" in text


@pytest.mark.usefixtures("in_process")
def test_a_library_that_fails_once_is_skipped_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, starts = replace(ABSENT, name="good 1.0"), []

    def theirs(library: Library, python: Path, work: Work) -> float:
        starts.append(library.name)
        if library == ABSENT:
            raise Skip("it crashed")
        return 2.0

    monkeypatch.setattr(baselines, "environment_of", lambda library, cache: Path("python"))
    monkeypatch.setattr(baselines, "theirs", theirs)
    plan = baselines.BaselinesPlan((WORK,), (ABSENT, good), repeats=2, cache=tmp_path)
    failed, compared = baselines.rows(plan, lambda _: None)
    assert starts == ["absent 1.0", "good 1.0", "good 1.0"]
    assert failed.skipped == "it crashed"
    assert compared.values["good 1.0"] == [2.0, 2.0]
    assert all(seconds > 0 for seconds in compared.values["dfca"])


def test_the_time_of_a_library_is_scaled_to_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "run_script", lambda *_, **__: {"seconds": [2.0, 2.0], "trained": 4})
    # 4 clients x 2 rounds should have trained, 4 did
    assert baselines.theirs(ABSENT, Path("python"), replace(WORK, rounds=3)) == 4.0
    monkeypatch.setattr(baselines, "run_script", lambda *_, **__: {"seconds": [2.0], "trained": 0})
    with pytest.raises(Skip, match="trained no client"):
        baselines.theirs(ABSENT, Path("python"), WORK)


def test_a_ready_environment_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def record(command: list[str], library: Library) -> None:
        commands.append(command)
        (tmp_path / "absent-1.0").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "_run", record)
    python = environment_of(ABSENT, tmp_path)
    assert len(commands) == 2
    assert environment_of(ABSENT, tmp_path) == python
    assert len(commands) == 2
    environment_of(replace(ABSENT, installs=(("other",),)), tmp_path)  # another version: made anew
    assert len(commands) == 4


def test_a_library_gets_a_python_that_it_runs_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environments.python_for(ABSENT) == sys.executable
    newer = replace(ABSENT, needs=(3, 99))
    monkeypatch.setattr(environments.shutil, "which", {"python3.100": "/there"}.get)
    assert environments.python_for(newer) == "/there"
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    with pytest.raises(Skip, match=r"absent 1.0 needs Python 3.99 or newer, which is not in PATH"):
        environments.python_for(newer)


def test_the_cnn_of_both_sides_is_the_same() -> None:
    work = Work(clients=2, hidden=5, samples=4, batch=2, degree=1, rounds=2, threads=1, model="cnn")
    theirs, ours = (
        torch.nn.Sequential(*layers(work)),
        Size(model="cnn-pfl", colours=3, inputs=1024, hidden=5).make_model(),
    )
    assert theirs(samples_of(0, work)[0]).shape == (4, 10)
    assert str(ours) == str(theirs)
    assert (
        sum(p.numel() for p in Size(model="cnn-pfl", colours=3, inputs=1024, hidden=128).make_model().parameters())
        == 1_626_442
    )


@pytest.mark.usefixtures("in_process")
def test_our_side_does_the_work_of_both_models() -> None:
    tiny = Work(clients=3, hidden=2, samples=4, batch=2, degree=2, rounds=2, threads=1)
    assert all(baselines.ours(replace(tiny, model=model)) > 0 for model in ("mlp", "cnn"))


def test_the_scripts_of_other_libraries_do_not_import_dfca() -> None:
    for library in (*LIBRARIES, environments.AUTHORS):
        assert "dfca" not in [line.split()[1].split(".")[0] for line in _imports(script_of(library))]
    neighbours = circulant(replace(WORK, clients=10, degree=4))
    assert neighbours[0] == [1, 2, 8, 9]
    assert all(i in neighbours[m] for i in range(10) for m in neighbours[i])


AUTHORS_CODE = """
import seaborn as sns
import torchvision.datasets as datasets
from util import *

class TrainMNISTCluster:
    def __init__(self, config, device):
        self.config = config

    def setup_models(self):
        self.steps = []

    def train(self, cluster_assign, lr):
        for m_i in range(self.config["m"]):
            X, y = self.load_data(m_i)
            self.steps.append((len(X), len(y), self.config["tau"], cluster_assign[m_i]))
        assert self.steps[-1] == (2, 2, 2, 0), self.steps
"""


def test_the_code_of_the_authors_is_a_peer_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFCA_AUTHORS", raising=False)
    assert environments.AUTHORS not in baselines.make_plan(True, tmp_path).libraries
    monkeypatch.setenv("DFCA_AUTHORS", str(tmp_path))
    assert environments.AUTHORS in baselines.make_plan(True, tmp_path).libraries
    tiny = Work(clients=3, hidden=2, samples=4, batch=2, degree=2, rounds=3, threads=1)
    with pytest.raises(Skip, match="DFCA_AUTHORS must name a clone of the authors' code: there is no"):
        baselines.theirs(environments.AUTHORS, Path(sys.executable), tiny)
    folder = tmp_path / "mnist/notebooks/exp_1"
    folder.mkdir(parents=True)
    (folder / "util.py").write_text("")
    (folder / "dfca.py").write_text(AUTHORS_CODE)
    assert baselines.theirs(environments.AUTHORS, Path(sys.executable), tiny) > 0
    with pytest.raises(Skip, match="has an MLP only"):
        baselines.theirs(environments.AUTHORS, Path(sys.executable), replace(tiny, model="cnn"))


def test_a_child_that_dies_gives_a_reason() -> None:
    with pytest.raises(Skip, match="ended by SIGILL"):
        child.run_script([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"])
    with pytest.raises(Skip, match="failed: ValueError: no"):
        child.run_script([sys.executable, "-c", "raise ValueError('no')"])
    with pytest.raises(Skip, match="longer than 0 s"):
        child.run_script([sys.executable, "-c", "import time; time.sleep(60)"], longest_s=0.2)


def test_the_bf16_probe_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_file.probe_bf16(size=8, repeats=1).startswith(("works", "crashes"))

    def crash(*_: Any, **__: Any) -> None:
        raise Skip("the process was ended by SIGILL")

    monkeypatch.setattr(bench_file, "call", crash)
    assert bench_file.probe_bf16() == "crashes: the process was ended by SIGILL"


def test_processor_time_does_not_grow_while_others_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CPU, "1")
    begin = now()
    time.sleep(0.3)
    assert now() - begin < 0.2
    several = Library("several 1.0", "run_flower.py", (), "it has workers", processes=True)
    plan = baselines.BaselinesPlan((Work(4, 2, 4, 2, 2, 2, 1),), (several,), 1, tmp_path)
    (row,) = baselines.rows(plan, lambda _: None)
    assert row.skipped == "several 1.0 works in several processes, whose processor time is not counted"


def test_too_large_a_size_is_skipped_with_the_numbers() -> None:
    with pytest.raises(Skip, match=r"it needs [\d.]+ GiB of memory, [\d.]+ GiB are free"):
        child.need_memory(replace(MLP, clients=10**9))


def test_ranks_read_time_and_memory_of_a_run(tmp_path: Path) -> None:
    experiment = ranks.tiny(ranks.make_plan(quick=True).experiment)
    experiment["data"]["name"] = "digits"
    usage = ranks.run_once([sys.executable, "-m", "dfca"], experiment, 1)
    assert usage.seconds > 0
    assert usage.memory > 2**20 or not Path("/proc/self/status").exists()


def test_ranks_are_skipped_with_the_error_of_the_run() -> None:
    script = "import sys; print('at first'); print('error: clients must be >= 1'); print('and more'); sys.exit(2)"
    plan = replace(ranks.make_plan(quick=True), repeats=1)
    with pytest.raises(Skip, match=r"^the run failed: error: clients must be >= 1$"):
        ranks.run_once([sys.executable, "-c", script], plan.experiment, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "run_once", lambda *_: (_ for _ in ()).throw(Skip("the run failed: error: no")))
        rows = list(ranks.rows(plan, lambda _: None))
    assert [row.skipped for row in rows] == ["the run failed: error: no"] * 2


def test_parts_and_repeats_are_checked(tmp_path: Path) -> None:
    assert run.choose_parts([]) == ["floor", "peers", "scaling", "record", "ranks", "events"]
    assert run.choose_parts(["all"]) == run.choose_parts([])
    assert run.choose_parts(["ranks", "floor"]) == ["floor", "ranks"]
    with pytest.raises(ConfigError, match='unknown part "flor"; did you mean "floor"'):
        run.choose_parts(["flor"])
    assert [work.model for work in run.make_plans(["peers"], False, None, tmp_path, ["CNN"])["peers"].works] == ["cnn"]
    with pytest.raises(ConfigError, match=r"no work of peers has 'RNN' in its name; there are .*'MLP 200, N = 20'"):
        run.make_plans(["peers"], False, None, tmp_path, ["RNN"])
    plans = run.make_plans(["floor", "scaling"], True, 7, tmp_path)
    assert plans["floor"].repeats == plans["scaling"].cycles == 7
    with pytest.raises(ConfigError, match="repeats must be >= 1, got 0"):
        run.make_plans(["floor"], True, 0, tmp_path)


def test_a_foreign_bench_json_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("[]")
    with pytest.raises(RunError, match="is not a result of python -m benchmarks"):
        bench_file.BenchFile(tmp_path)
    path.write_text('{"format": 99}')
    with pytest.raises(RunError, match="has format 99"):
        bench_file.BenchFile(tmp_path)


def test_the_page_is_made_of_what_was_measured() -> None:
    blocks = tables.page_blocks(measured("scaling", scaling_rows()))
    assert "1.00 (1.00)" in blocks["scaling"]
    assert blocks["floor"] == "Not measured yet."


def test_ctrl_c_on_the_command_line_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(plan: Any, tick: Any) -> Iterator[Row]:
        yield Row("first", "", skipped="why")
        raise KeyboardInterrupt

    monkeypatch.setitem(run.MEASURES, "ranks", stop)
    done = CliRunner().invoke(commands, ["ranks", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == INTERRUPTED
    assert "1 finished row is kept" in done.output
    assert bench_file.load(tmp_path / "bench.json")["parts"]["ranks"]["command"] == "python -m benchmarks ranks --quick"


def test_the_command_prints_tables_and_names_unknown_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("pair", "per round", {"a": [1.0], "b": [2.0]}, of="a", to="b", most=1.0)
    monkeypatch.setitem(run.MEASURES, "ranks", lambda plan, tick: iter([row]))
    done = CliRunner().invoke(commands, ["ranks", "--out", str(tmp_path)])
    assert done.exit_code == 0
    assert "0.50 (0.50 to 0.50)" in done.output
    done = CliRunner().invoke(commands, ["speed", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert 'unknown part "speed"' in done.output


def _imports(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
