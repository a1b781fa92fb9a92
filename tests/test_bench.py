"""The bench measures; these tests check what it computes and keeps. Nothing here depends on how fast a machine is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from dfca.bench.bare import Bare
from dfca.bench.page import blocks
from dfca.bench.rows import Row, Skip, met
from dfca.bench.timing import fit, in_turn, ratio
from dfca.bench.worlds import World, make_setting, regular_graph

from dfca.bench import child, floor, ranks, record, run, scaling, tables
from dfca.bench.baselines import measure as peers
from dfca.bench.baselines.environments import PEERS, Peer, environment_of, script_of
from dfca.bench.baselines.work import Work, circulant
from dfca.bench.figures import draw
from dfca.errors import ConfigError, RunError
from dfca.sim.rounds.simulation import Simulation

MLP = World(inputs=16, hidden=6, classes=4, clients=4, samples=8, clusters=2, degree=2, steps=2)
CNN = World(model="cnn", inputs=144, hidden=6, classes=4, clients=2, samples=6, clusters=2, degree=1, steps=2)
WORK = Work(clients=4, hidden=6, samples=8, batch=4, degree=2, rounds=2, threads=1)
ABSENT = Peer("absent 1.0", "run_flower.py", (("--no-index", "dfca-has-no-such-peer==1.0"),), "it does not exist")
HERE = {"processor": "p", "cpus": 2, "threads": 1, "load": 0.1, "torch": "2", "dfca": "0", "commit": None, "bf16": "?"}


class Silent:
    """A listener that counts."""

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


def tiny_floor() -> floor.Plan:
    workloads = (("mlp", MLP, 1.15), ("cnn", CNN, 1.15))
    return floor.Plan(workloads, replace(CNN, clusters=1, algorithm="local"), MLP, repeats=2, tries=1)


def tiny_scaling() -> scaling.Plan:
    points = {"N": [(4, MLP), (6, replace(MLP, clients=6))]}
    return scaling.Plan(points, cycles=1, rounds=1)


def measured(part: str, rows: list[Row]) -> dict[str, Any]:
    """Make the content of a bench.json without measuring."""
    found = [row.to_json() for row in rows]
    content = {"date": "2026-01-01", "command": "dfca bench", "quick": False, "finished": True, "environment": HERE}
    part_content = {**content, "rows": found, **({"fits": scaling.fits(found)} if part == "scaling" else {})}
    return {"format": record.FORMAT, "parts": {part: part_content}}


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
    found = fit([10, 1000, 100], [3 * x**1.5 for x in (10, 1000, 100)])
    assert found is not None
    assert found == pytest.approx((1.5, 3.0, 1.5))
    bent = fit([1, 10, 100], [1, 1, 10])
    assert bent is not None
    assert bent.exponent == pytest.approx(0.5)
    assert bent.last == pytest.approx(1.0)
    assert fit([1], [1]) is None
    assert fit([1, 2], [0, 1]) is None


@pytest.mark.parametrize("world", [MLP, CNN], ids=["mlp", "cnn"])
def test_every_bare_schedule_computes_what_the_simulator_computes(world: World) -> None:
    torch.set_num_threads(2)  # so that the threaded schedules exist
    try:
        setting = replace(make_setting(world), graph=nx.empty_graph(world.clients))
        names = list(Bare(setting).schedules)
        assert len(names) == (8 if world.model == "cnn" else 6)
        simulation = Simulation(setting)
        for _ in range(2):
            simulation.step()
        assert len(set(simulation.assignments.tolist())) == world.clusters  # all models are in use
        for name in names:
            bare = Bare(setting)
            for _ in range(2):
                bare.schedules[name]()
            bare.close()
            for client in range(world.clients):
                for j in range(world.clusters):
                    ours = list(simulation.model(client, j).parameters())
                    for a, b in zip(ours, bare.tensors[client][j], strict=True):
                        assert torch.allclose(a, b, atol=1e-5), (name, client, j)
    finally:
        torch.set_num_threads(1)


def test_regular_graphs_have_the_degree() -> None:
    for clients, degree in ((10, 3), (10, 9), (10, 50), (7, 4), (20, 15)):
        wanted = min(degree, clients - 1)
        assert set(dict(regular_graph(clients, degree, 0).degree).values()) == {wanted}
    assert set(dict(regular_graph(5, 3, 0).degree).values()) == {2}  # 5 x 3 is odd


def test_floor_at_a_tiny_size(tmp_path: Path) -> None:
    content = run.run({"floor": tiny_floor()}, tmp_path, "dfca bench floor", True, Silent())
    part = content["parts"]["floor"]
    assert part["finished"]
    assert [row["name"] for row in part["rows"]] == ["mlp", "cnn", "CNN, local step", "mixing's share of a round"]
    for row in part["rows"]:
        assert row["skipped"] is None
        assert all(value > 0 for values in row["values"].values() for value in values)
    assert part["rows"][0]["details"]["floor"] in part["rows"][0]["details"]["schedules"]
    differences = part["rows"][2]["details"]["differences"]
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


def test_scaling_at_a_tiny_size_and_parts_meet_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(measured("floor", [Row("old", "", skipped="why")])))
    content = run.run({"scaling": tiny_scaling()}, tmp_path, "dfca bench scaling", False, Silent())
    assert list(content["parts"]) == ["floor", "scaling"]
    part = content["parts"]["scaling"]
    assert [row["details"]["x"] for row in part["rows"]] == [4, 6]
    assert "N" in part["fits"]
    assert "exponent" in part["fits"]["N"]["time"]


def test_exponents_reach_the_tables_and_the_picture(tmp_path: Path) -> None:
    content = measured("scaling", scaling_rows())
    text = tables.markdown(content)
    assert "| N, clients | 1.00 (1.00) | 2.00 (2.00) | ≤ 1.05 | no |" in text
    assert "25 / 50 / 25" in text
    assert {path.name for path in draw(content, tmp_path)} == {"bench-scaling.png", "bench-scaling.svg"}


def test_an_interrupted_bench_keeps_finished_rows(tmp_path: Path) -> None:
    with pytest.raises(run.Interrupted, match=r"1 finished row is kept in .*bench\.json"):
        run.run({"floor": tiny_floor()}, tmp_path, "dfca bench", True, Silent(stop_after=1))
    part = record.load(tmp_path / "bench.json")["parts"]["floor"]
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
        with pytest.raises(run.Interrupted, match="0 finished rows"):
            run.run({"floor": tiny_floor()}, tmp_path, "dfca bench", True, Silent())
    assert record.load(tmp_path / "bench.json") == old


def test_a_peer_that_cannot_be_installed_is_skipped_with_the_reason(tmp_path: Path) -> None:
    plan = peers.Plan((WORK,), (ABSENT,), repeats=1, cache=tmp_path)
    (row,) = peers.rows(plan, lambda _: None)
    assert row.skipped is not None
    assert row.skipped.startswith("absent 1.0 cannot be installed: ")
    assert "dfca-has-no-such-peer" in row.skipped
    text = tables.markdown(measured("peers", [row]))
    assert "it does not exist." in text
    assert "cannot be installed" in text


def test_the_time_of_a_peer_is_scaled_to_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "run_script", lambda *_, **__: {"seconds": [2.0, 2.0], "trained": 4})
    # 4 clients x 2 rounds should have trained, 4 did
    assert peers.theirs(ABSENT, Path("python"), replace(WORK, rounds=3)) == 4.0
    monkeypatch.setattr(peers, "run_script", lambda *_, **__: {"seconds": [2.0], "trained": 0})
    with pytest.raises(Skip, match="trained no client"):
        peers.theirs(ABSENT, Path("python"), WORK)


def test_a_ready_environment_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dfca.bench.baselines import environments

    commands: list[list[str]] = []

    def pretend(command: list[str], peer: Peer) -> None:
        commands.append(command)
        (tmp_path / "absent-1.0").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "_run", pretend)
    python = environment_of(ABSENT, tmp_path)
    assert len(commands) == 2
    assert environment_of(ABSENT, tmp_path) == python
    assert len(commands) == 2
    environment_of(replace(ABSENT, installs=(("other",),)), tmp_path)  # another version: made anew
    assert len(commands) == 4


def test_the_peers_scripts_import_nothing_of_dfca() -> None:
    for peer in PEERS:
        assert "dfca" not in [line.split()[1].split(".")[0] for line in _imports(script_of(peer))]
    neighbours = circulant(replace(WORK, clients=10, degree=4))
    assert neighbours[0] == [1, 2, 8, 9]
    assert all(i in neighbours[m] for i in range(10) for m in neighbours[i])


def test_our_side_of_the_peers_work() -> None:
    assert peers.ours(WORK) > 0


def test_a_child_that_dies_gives_a_reason() -> None:
    import sys

    with pytest.raises(Skip, match="ended by SIGILL"):
        child.run_script([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"])
    with pytest.raises(Skip, match="failed: ValueError: no"):
        child.run_script([sys.executable, "-c", "raise ValueError('no')"])
    with pytest.raises(Skip, match="longer than 0 s"):
        child.run_script([sys.executable, "-c", "import time; time.sleep(60)"], longest_s=0.2)


def test_the_bf16_probe_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    assert record.probe_bf16(size=8, repeats=1).startswith(("works", "crashes"))

    def crash(*_: Any, **__: Any) -> None:
        raise Skip("the process was ended by SIGILL")

    monkeypatch.setattr(record, "call", crash)
    assert record.probe_bf16() == "crashes: the process was ended by SIGILL"


def test_too_large_a_world_is_skipped_with_the_numbers() -> None:
    with pytest.raises(Skip, match=r"it needs [\d.]+ GiB of memory, [\d.]+ GiB are free"):
        child.need_memory(replace(MLP, clients=10**9))


def test_ranks_are_skipped_where_nothing_can_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda _: None)
    rows = list(ranks.rows(ranks.plan(quick=True), lambda _: None))
    assert [row.skipped is not None for row in rows] == [True, True]


def test_ranks_read_time_and_memory_of_a_run() -> None:
    import sys

    experiment = ranks.tiny(ranks.plan(quick=True).experiment)
    experiment["data"]["name"] = "digits"
    found = ranks.run_once([sys.executable, "-m", "dfca"], experiment, 1)
    assert found.seconds > 0
    assert found.memory > 2**20 or not Path("/proc/self/status").exists()
    with pytest.raises(Skip, match=r"the run failed: error: .*clients"):
        ranks.run_once([sys.executable, "-m", "dfca"], {**experiment, "clients": -1}, 1)


def test_parts_and_repeats_are_checked(tmp_path: Path) -> None:
    assert run.chosen_parts([]) == ["floor", "peers", "scaling", "ranks"]
    assert run.chosen_parts(["all"]) == ["floor", "peers", "scaling", "ranks"]
    assert run.chosen_parts(["ranks", "floor"]) == ["floor", "ranks"]
    with pytest.raises(ConfigError, match='unknown part "flor"; did you mean "floor"'):
        run.chosen_parts(["flor"])
    plans = run.make_plans(["floor", "scaling"], True, 7, tmp_path)
    assert plans["floor"].repeats == plans["scaling"].cycles == 7
    with pytest.raises(ConfigError, match="repeats must be >= 1, got 0"):
        run.make_plans(["floor"], True, 0, tmp_path)


def test_a_foreign_bench_json_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("[]")
    with pytest.raises(RunError, match="is not a result of dfca bench"):
        record.Record(tmp_path)
    path.write_text('{"format": 99}')
    with pytest.raises(RunError, match="has format 99"):
        record.Record(tmp_path)


def test_the_page_is_made_of_what_was_measured() -> None:
    found = blocks(measured("scaling", scaling_rows()))
    assert "1.00 (1.00)" in found["scaling"]
    assert found["floor"] == "Not measured yet."


def test_ctrl_c_on_the_command_line_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from dfca.cli import INTERRUPTED, app

    def stop(plan: Any, tick: Any) -> Iterator[Row]:
        yield Row("first", "", skipped="why")
        raise KeyboardInterrupt

    monkeypatch.setitem(run.MEASURES, "ranks", stop)
    done = CliRunner().invoke(app, ["bench", "ranks", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == INTERRUPTED
    assert "1 finished row is kept" in done.output
    assert record.load(tmp_path / "bench.json")["parts"]["ranks"]["command"] == "dfca bench ranks --quick"


def test_the_command_prints_tables_and_names_unknown_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from dfca.cli import app

    row = Row("pair", "per round", {"a": [1.0], "b": [2.0]}, of="a", to="b", most=1.0)
    monkeypatch.setitem(run.MEASURES, "ranks", lambda plan, tick: iter([row]))
    done = CliRunner().invoke(app, ["bench", "ranks", "--out", str(tmp_path)])
    assert done.exit_code == 0
    assert "0.50 (0.50 to 0.50)" in done.output
    done = CliRunner().invoke(app, ["bench", "speed", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert 'unknown part "speed"' in done.output


def _imports(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
