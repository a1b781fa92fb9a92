"""`dfca watch`: what it reads of a folder, what it says of it, and that nothing in a folder can harm it."""

from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console
from toy import make_toy_setting
from typer.testing import CliRunner
from watch_folder import CONFIG, Folder

from dfca.base.errors import RunError
from dfca.cli import app
from dfca.report.drawing import plots
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import LateJoiner, World
from dfca.sim.rounds.simulation import Simulation
from dfca.watch.graph import MOST_EDGES, colours_of, drawn, load_registry
from dfca.watch.reading import JsonFile, LinesFile
from dfca.watch.run_source import RunSource
from dfca.watch.terminal import screen, show
from dfca.watch.trials import MOST_KEPT, TrialView

KEY = "dfca-auto/0/"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def read(file: LinesFile) -> tuple[bool, list[dict[str, Any]]]:
    entry = os.stat(file.path)
    return file.poll(entry.st_size, entry.st_ino)


# --- files


def test_lines_are_read_once_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a"')
    file = LinesFile(path)
    assert read(file) == (True, [{"a": 1}, {"a": 2}])
    assert read(file) == (False, [])
    with path.open("ab") as more:
        more.write(b":3}\n")
    assert read(file) == (False, [{"a": 3}])
    assert file.problem is None


def test_a_file_that_was_replaced_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n')
    file = LinesFile(path)
    read(file)
    (tmp_path / "b").write_bytes(b'{"a":1}\n')
    os.replace(tmp_path / "b", path)
    assert read(file) == (True, [{"a": 1}])


def test_a_damaged_line_is_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n\xff\xfe\n[1]\n' + b"[" * 100_000 + b'\n{"a":2}\n')
    file = LinesFile(path)
    assert read(file)[1] == [{"a": 1}, {"a": 2}]
    assert file.problem is not None
    assert file.problem.startswith("a.jsonl, line 4, is left out")


def test_pipes_links_and_large_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it for reading would wait for ever
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "large").write_text('{"a": 1}' + " " * 100)
    problems = {}
    for name in ("pipe", "link", "large"):
        file = JsonFile(tmp_path / name, most=100)
        assert file.poll()
        assert file.value == {}
        problems[name] = file.problem
    assert problems["pipe"] == "pipe cannot be read: it is a pipe, not a regular file"
    assert problems["link"] is not None
    assert problems["link"].startswith("link cannot be read")
    assert problems["large"] == "large has 108 bytes, more than the 100 shown here"


# --- trials


def line(round_: int, assignments: list[int], **more: Any) -> dict[str, Any]:
    return {"round": round_, "accuracy": 0.5, "cluster_accuracy": 1.0, "models": 2, "assignments": assignments} | more


def test_switches_and_absences_are_told_as_they_happen() -> None:
    trial = TrialView("dfca-auto", 0)
    trial.add(line(5, [0, 0, 1, 1], away_clients=[]))
    trial.add(line(10, [0, 1, 1, 1], away_clients=[2, 3]))
    trial.add(line(15, [0, 1, 1, 1], away_clients=[3]))
    assert [(event["when"], event["what"]) for event in trial.log] == [
        ("round 10", "1 client switched: 1 (0→1)"),
        ("round 10", "2 clients left: 2, 3"),
        ("round 15", "1 client came back: 2"),
    ]
    assert trial.curve(100)["switches"] == [None, 1, 0]


def test_a_lost_cluster_raises_the_alarm_until_somebody_uses_it_again() -> None:
    trial = TrialView("dfca-auto", 0, asked_clusters=2)
    trial.add(line(5, [0, 0, 1, 1]))
    assert trial.alarm() == ""
    trial.add(line(10, [0, 0, 0, 0]))
    trial.add(line(15, [0, 0, 0, 0]))
    assert trial.alarm() == "dfca-auto, seed 0: only 1 of 2 clusters have clients since round 10; nobody uses 1"
    trial.add(line(20, [0, 0, 0, 1]))
    assert trial.alarm() == ""
    assert [event["kind"] for event in trial.log if event["kind"] != "switch"] == ["lost", "found"]


def test_algorithms_with_one_model_and_peers_without_models_lose_no_cluster() -> None:
    plain, early = TrialView("fedavg", 0, asked_clusters=2), TrialView("dfca-auto", 0, asked_clusters=2)
    plain.add(line(5, [0, 0, 0, 0], models=1, cluster_accuracy=None))
    early.add(line(0, [0, 0, 0, 0], models=1, accuracy=0.0))
    assert (plain.alarm(), early.alarm()) == ("", "")


def test_neither_a_first_model_is_a_switch_nor_a_cluster_of_unseen_clients_lost() -> None:
    trial = TrialView("nodes", 0, complete=False, names=["kitchen", "garage"])
    trial.add(line(5, [-1, 1], cluster_accuracy=None))
    trial.add(line(10, [1, 1], cluster_accuracy=None))
    trial.add(line(15, [1, 0], cluster_accuracy=None))
    trial.add(line(20, [0, 0], cluster_accuracy=None))
    assert [event["what"] for event in trial.log] == [
        "1 client switched: garage (1→0)",
        "1 client switched: kitchen (1→0)",
    ]
    assert trial.alarm() == ""


def test_no_score_is_drawn_before_a_client_has_a_model() -> None:
    trial = TrialView("dfca-auto", 0)
    trial.add(line(5, [-1, -1], accuracy=0.0, live_clusters=1))
    trial.add(line(10, [0, 1], accuracy=0.0, live_clusters=2))
    assert (trial.curve(9)["score"], trial.curve(9)["live_clusters"]) == ([None, 0.0], [None, 2])


def test_staleness_is_that_of_the_models_folded_since_the_last_line() -> None:
    trial = TrialView("dfca-auto", 0)
    for time_s, folds, ages in ((1.0, 10, 5), (2.0, 30, 45), (3.0, 30, 45)):
        trial.add(line(1, [0], time_s=time_s, folds=folds, fold_ages=ages))
    assert trial.curve(100)["staleness"] == [0.5, 2, None]
    assert trial.curve(100)["x"] == [1, 2, 3]


def test_long_trials_are_thinned_and_keep_their_last_evaluation() -> None:
    trial = TrialView("dfca-auto", 0)
    for round_ in range(3 * MOST_KEPT):
        trial.add(line(round_, [round_ % 2]))
    assert len(trial.evaluations) <= MOST_KEPT
    assert trial.curve(60)["x"][-1] == 3 * MOST_KEPT - 1
    assert len(trial.curve(60)["x"]) <= 60
    assert trial.frames(3 * MOST_KEPT - 3)["frames"][-1][2] == 3 * MOST_KEPT - 1


# --- a folder


def test_a_regression_shows_its_metric_with_name_unit_and_direction(folder: Folder) -> None:
    (folder.path / "config.toml").write_text(CONFIG + '[task]\nname = "regression"\nunit = "°C"\n')
    scores = {"rmse": 0.01234, "all_models_rmse": 0.5, "rmse_by_cluster": [0.01, 0.02], "rmse_by_client": [0.0123456]}
    folder.append(5, [0, 0, 1, 1], **scores)
    source = RunSource(folder.path)
    source.poll()
    page = source.whole()
    metric = page["run"]["metric"]
    assert (metric["label"], metric["higher_is_better"], page["trials"][KEY]["score"]) == (
        "RMSE (°C)",
        False,
        [0.01234],
    )
    frames = source.frames(KEY, -1)
    assert frames is not None
    assert (frames["frames"][0][5], frames["by_client"]) == ([0.01, 0.02], [0.01235])
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(screen(page))
    shown = console.export_text()
    assert "RMSE °C" in shown
    assert "0.0123" in shown
    assert "less RMSE is better" in shown
    assert "accuracy" not in shown
    facts = {"name": "error\x1b[2J", "key": "rmse", "higher_is_better": False, "percent": "no", "unit": ["K"]}
    row = {"algorithm": "dfca-auto", "seed": 0, "finished": True, "metric": facts}
    folder.write("summary.json", {"form": 2, "runs": ["odd", row]})
    assert source.poll()["run"]["metric"] == {
        "name": "error[2J",
        "key": "rmse",
        "higher_is_better": False,
        "percent": False,
        "unit": "",
        "capitalised": "Error[2J",
        "label": "error[2J",
    }


def test_a_run_is_followed_change_by_change(folder: Folder) -> None:
    source = RunSource(folder.path)
    first = source.poll()
    assert first["run"]["state"] == "running"
    assert [trial["state"] for trial in first["trials"].values()] == ["waiting", "waiting"]
    assert source.poll() == {}
    folder.append(5, [0, 0, 1, 1])
    change = source.poll()
    assert set(change["trials"]) == {KEY}
    assert change["trials"][KEY]["score"] == [0.9]
    assert source.poll() == {}
    row = {"algorithm": "dfca-auto", "seed": 0, "finished": True}
    folder.write("summary.json", {"form": 2, "experiment": "toy", "clients": 4, "clusters": 2, "runs": [row]})
    change = source.poll()
    assert change["trials"][KEY]["state"] == "finished"
    assert change["run"]["finished"] == 1
    assert json.dumps(source.whole(), allow_nan=False)


def test_a_run_that_nobody_writes_is_stopped_and_a_continued_one_begins_anew(folder: Folder) -> None:
    folder.append(5, [0, 0, 1, 1])
    folder.append(10, [0, 0, 1, 1])
    source = RunSource(folder.path)
    source.poll()
    (folder.path / ".lock").write_text("process 999999999")
    assert source.poll()["trials"][KEY]["state"] == "stopped"
    lines = (folder.path / "metrics" / "dfca-auto-0.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "metrics" / "new").write_text(lines[0])  # as `rewind` does
    os.replace(folder.path / "metrics" / "new", folder.path / "metrics" / "dfca-auto-0.jsonl")
    change = source.poll()["trials"][KEY]
    assert (change["generation"], change["x"]) == (1, [5])


def test_nothing_is_written_and_no_lock_is_taken(folder: Folder) -> None:
    folder.append(5, [0, 0, 1, 1])

    def tree() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.path.rglob("*")}

    before = tree()
    with FileLock(folder.path / ".lock", timeout=0) as _:
        before = tree()
        source = RunSource(folder.path)
        source.poll()
        source.graph(KEY)
        source.frames(KEY, -1)
        assert tree() == before
    source.poll()
    with FileLock(folder.path / ".lock", timeout=0):
        pass


def test_a_sweep_has_points_and_trials_that_are_no_longer_asked_for_are_left_out(folder: Folder) -> None:
    points = [
        {
            "digest": digest * 20,
            "label": f"p={digest}",
            "algorithms": ["dfca-auto"],
            "seeds": [0, 1],
            "clusters": 2,
            "point": {},
        }
        for digest in ("a", "b")
    ]
    folder.write("summary.json", {"form": 2, "points": points, "runs": []})
    folder.append(5, [0, 0, 1, 1], digest="a" * 20)
    folder.append(5, [0, 0, 1, 1], "ifca", digest="c" * 20)
    source = RunSource(folder.path)
    page = source.poll()
    assert [point["label"] for point in page["points"]] == ["p=a", "p=b"]
    assert len(page["trials"]) == 4
    assert page["trials"][f"dfca-auto/0/{'a' * 12}"]["x"] == [5]
    graph = {"facts": {"nodes": 4}, "edges": [[0, 1]], "clusters": None, "digest": "a" * 20}
    folder.write("topology.json", {"p=a/0": graph, "p=b/0": graph | {"digest": "b" * 20, "edges": []}})
    first = source.graph(f"dfca-auto/0/{'a' * 12}")
    assert first is not None
    assert first["edges"] == [[0, 1]]


@pytest.mark.parametrize("name", ["rounds", "virtual"])
def test_a_run_of_version_0_1_shows_what_it_has(name: str) -> None:
    source = RunSource(Path(__file__).parents[1] / "fixtures" / "run-0.1" / name)
    page = source.poll()
    begun = [key for key, trial in page["trials"].items() if trial["x"]]
    assert begun
    assert page["problems"] == []
    assert page["trials"][begun[0]]["score"][-1] is not None
    assert source.graph(begun[0]) is not None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("summary.json", "{", "summary.json is damaged"),
        ("summary.json", "[]", "summary.json must hold an object, got list"),
        ("config.toml", "a = = 1", "config.toml is damaged"),
        ("metrics/dfca-auto-0.jsonl", "x\n", "dfca-auto-0.jsonl, line 1, is left out"),
        ("summary.json", '{"form": 9, "runs": []}', "newer version"),
    ],
)
def test_damaged_files_are_sentences_on_the_page(folder: Folder, name: str, content: str, said: str) -> None:
    (folder.path / name).write_text(content)
    assert said in " ".join(RunSource(folder.path).poll()["problems"])


AWKWARD: list[Any] = [
    *(None, True, 0, 1, 3, -1, 10**30, 1e308, float("nan"), float("-inf"), "", "dfca-auto", "<b>x</b>", "x" * 5000),
    *("\ud800", "\u202e", [], {}, [[]], [0, 1, 1, 0], [-2, 99], [1, "a", None], [10**30], {"a": {"b": []}}),
    *(
        [{"digest": "a" * 20, "algorithms": ["dfca-auto", 3], "seeds": 2, "label": 7}],
        [{}],
        [{"algorithm": "dfca-auto", "seed": 0}],
    ),
    *({"facts": {"nodes": 3}, "edges": [[0, 1], [5, 6], 3], "clusters": [0, "a"]}, {"facts": 3, "edges": {}}),
]
HEADS = ("runs", "points", "clusters", "clients", "form", "experiment", "0", "1")
LINES = (
    *("algorithm", "seed", "digest", "round", "time_s", "accuracy", "cluster_accuracy", "assignments", "away_clients"),
    *("accuracy_by_cluster", "accuracy_by_client", "models", "folds", "fold_ages", "without_models", "live_clusters"),
)


def awkward(draw: random.Random, keys: tuple[str, ...], base: dict[str, Any]) -> Any:
    if draw.random() < 0.1:
        return draw.choice(AWKWARD)
    return base | {key: draw.choice(AWKWARD) for key in draw.sample(keys, draw.randrange(1, 6))}


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_folder_holds_the_page_gets_json(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(40):
        place = tmp_path / str(number)
        folder = Folder(place)
        folder.write("summary.json", awkward(draw, HEADS, {"runs": []}))
        folder.write("topology.json", awkward(draw, HEADS, {}))
        base = {"algorithm": "dfca-auto", "seed": 0, "round": 1}
        lines = [json.dumps(awkward(draw, LINES, base | {"round": i})) + "\n" for i in range(4)]
        (place / "metrics" / "dfca-auto-0.jsonl").write_text("".join(lines))
        source = RunSource(place)
        source.poll()
        page = source.whole()
        json.dumps(page, allow_nan=False)
        for key in page["trials"]:
            json.dumps(source.frames(key, -1), allow_nan=False)
            if (graph := source.graph(key)) is not None:
                json.dumps(drawn(graph), allow_nan=False)
        Console(file=io.StringIO()).print(screen(page))


# --- what runs write for the page


def test_evaluations_say_how_good_each_cluster_is(toy_rows: tuple[dict[str, Any], dict[str, Any]]) -> None:
    rounds, virtual = toy_rows
    for row, holding in ((rounds, rounds["assignments"]), (virtual, virtual["assignments"][2:])):
        sizes = [holding.count(cluster) for cluster in range(row["models"])]
        assert [value is None for value in row["accuracy_by_cluster"]] == [size == 0 for size in sizes]
        mean = sum(n * (value or 0.0) for n, value in zip(sizes, row["accuracy_by_cluster"], strict=True)) / sum(sizes)
        assert mean == pytest.approx(row["accuracy"])
    assert (virtual["away_clients"], virtual["away"]) == ([0, 1], 2)
    assert virtual["folds"] > 0
    assert virtual["fold_ages"] >= 0


@pytest.fixture
def toy_rows() -> tuple[dict[str, Any], dict[str, Any]]:
    """The last row of a run by rounds, and of one in virtual time that two clients never join."""
    simulation = Simulation(make_toy_setting(rounds=2))
    while not simulation.done:
        row = simulation.step() or {}
    never = tuple(LateJoiner(client, 1e6) for client in (0, 1))
    events = EventSimulation(make_toy_setting(rounds=2), World(late_joiners=never), EventOptions(until_s=4.0))
    while not events.done:
        last = events.step() or {}
    return row, last


# --- pictures


def test_graphs_are_placed_alike_every_time_and_bad_edges_are_dropped() -> None:
    graph = {
        "nodes": 4,
        "edges": [[0, 1], [1, 9], "x", [2, 3, 4], [2, -1], [2, 3]],
        "clusters": None,
        "seed": 3,
        "topology": "",
    }
    placed = drawn(graph)
    assert placed["edges"] == [0, 1, 2, 3]
    assert len(placed["positions"]) == 8
    assert all(-1000 <= position <= 1000 for position in placed["positions"])
    assert drawn(dict(graph))["positions"] == placed["positions"]


def test_a_dense_graph_is_drawn_with_a_part_of_its_edges() -> None:
    edges = [[i, j] for i in range(240) for j in range(i)]
    placed = drawn({"nodes": 240, "edges": edges, "clusters": None, "seed": 0, "topology": "complete"})
    assert placed["all_edges"] == len(edges)
    assert len(placed["edges"]) <= 2 * MOST_EDGES


def test_lines_look_as_in_reports() -> None:
    load_registry()
    names = ["dfca-auto", "ifca", "local", "oracle", "my-own"]
    style = plots.styles(names)
    sent = colours_of(names)["algorithms"]
    assert {name: look["colour"] for name, look in sent.items()} == {name: look.colour for name, look in style.items()}
    dashes = {"-": "", "--": "6 4", ":": "2 3", "-.": "7 3 2 3"}
    assert {name: look["dash"] for name, look in sent.items()} == {
        name: dashes[look.dash] for name, look in style.items()
    }


# --- terminal and command


def test_the_terminal_takes_nothing_for_markup(folder: Folder) -> None:
    (folder.path / "config.toml").write_text(
        'title = "[red]x[/red] \\u001b[2J"\nalgorithms = ["dfca-auto"]\nclusters = 2\n'
    )
    folder.append(5, [0, 0, 0, 0])
    console = Console(file=io.StringIO(), width=150)
    show(RunSource(folder.path), console, once=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]x[/red] [2J" in text
    assert "\x1b" not in text
    assert "Lost cluster: dfca-auto, seed 0: only 1 of 2 clusters" in text


def test_the_command_explains_what_it_wants(tmp_path: Path, folder: Folder) -> None:
    command = CliRunner()
    assert command.invoke(app, ["watch"]).exit_code == 2
    assert command.invoke(app, ["watch", str(folder.path), "--node", str(tmp_path)]).exit_code == 2
    with pytest.raises(RunError, match="there is no such directory"):
        RunSource(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"it has no config\.toml"):
        RunSource(tmp_path)
    result = command.invoke(app, ["watch", str(folder.path), "--terminal"])
    assert result.exit_code == 0
    assert "running, 0 of 2 trials finished" in result.stdout
