"""Nodes as real processes: signals, kill -9, and the command line with its mistakes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from node_processes import dfca, start, wait_for_round
from node_swarm import make_swarm, write_samples
from saved_peers import make_saved
from toy import free_port

from dfca.node.disk.folder import NodeFolder
from dfca.node.disk.store import DiskStore
from dfca.node.operate.control import call
from dfca.node.operate.status import read_status


def test_kill_9_loses_at_most_the_round_in_progress_and_a_signal_ends_a_node_at_once(tmp_path: Path) -> None:
    (folder,) = make_swarm(tmp_path, (0,))
    path = folder.path
    process = start(path)
    first = wait_for_round(path, process, 5)
    process.kill()
    process.communicate()
    saved = folder.store().load()
    assert saved is not None
    assert saved.bank is not None
    assert saved.round >= first["round"] - 1
    left = read_status(path)
    assert (left["running"], left["saved"]["round"]) == (False, saved.round)
    process = start(path, "--log-format", "json")
    second = wait_for_round(path, process, saved.round + 3)
    assert second["incarnation"] == first["incarnation"] + 1
    assert second["clusters"] == len(saved.bank)
    process.send_signal(signal.SIGTERM)
    log = [json.loads(line) for line in process.communicate(timeout=60)[1].splitlines()]
    assert process.returncode == 0
    assert log[0]["event"] == "start"
    assert log[-1]["event"] == "end"
    last = read_status(path)
    assert last["running"] is False
    assert last["round"] >= second["round"]
    assert not (path / "control.json").exists()
    again = NodeFolder.load(path).store().load()
    assert again is not None
    assert again.round == last["round"]


def test_kill_9_in_the_middle_of_saves_leaves_the_last_or_the_one_before(tmp_path: Path) -> None:
    draw = random.Random(0)
    bank = torch.ones(4, 50_000)
    last = 0
    for _ in range(8):
        begin, ready = os.pipe()
        child = os.fork()
        if child == 0:  # nothing but saves, until it is killed
            store = DiskStore(tmp_path)
            store.load()
            os.write(ready, b"x")
            for round in range(last + 1, last + 100_000):
                store.save(make_saved(round, bank * round))
                os.write(ready, b"x")
            os._exit(0)
        os.read(begin, 1)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        done = last
        while data := os.read(begin, 4096):
            done += len(data)
        os.close(begin)
        store = DiskStore(tmp_path)
        saved = store.load()
        if saved is None:
            assert done == last == 0
            continue
        assert store.warnings == []
        assert saved.bank is not None
        assert done <= saved.round <= done + 1  # what was reported as saved is there
        assert torch.equal(saved.bank, bank * saved.round)
        store.clean()
        assert {entry.suffix for entry in tmp_path.iterdir()} == {".safetensors"}
        last = saved.round


@pytest.fixture
def founder(tmp_path: Path) -> Path:
    data = write_samples(tmp_path / "a.csv", 0, 1)
    made = dfca("init", tmp_path / "a", "--data", data, "--label", "activity", "--hidden", "4", "--port", "0")
    assert made.exit_code == 0, made.output
    return tmp_path / "a"


def test_init_prints_the_id_and_what_is_next(founder: Path) -> None:
    again = dfca("init", founder, "--data", founder.parent / "a.csv")
    assert again.exit_code == 2
    assert "there is a node in" in again.output
    status = dfca("status", founder)
    assert status.exit_code == 2
    assert "has left no status; start it: dfca node run" in status.output
    invite = dfca("invite", founder)
    assert invite.exit_code == 2
    assert "no node runs in" in invite.output
    unit = dfca("install", founder)
    assert unit.exit_code == 0
    assert "ExecStart=" in unit.output
    doctor = dfca("doctor", founder)
    assert doctor.exit_code == 0, doctor.output
    assert "none but this device" in doctor.output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: (path / "key.pem").unlink(), "key.pem does not exist"),
        (lambda path: (path / "facts.json").write_text("{"), "the swarm's facts are not JSON"),
        (lambda path: (path / "roster.json").write_text("{"), "roster.json is not a roster"),
        (lambda path: (path / "node.toml").write_text("port = 1"), "node.toml"),
        (lambda path: (path.parent / "a.csv").write_text("a,b,d,activity\n1,2,3,walk\n"), 'column "c" is missing'),
        (lambda path: (path.parent / "a.csv").unlink(), "a.csv"),
        (lambda path: (path / "state").write_text(""), "state"),
    ],
)
def test_whatever_is_wrong_with_a_folder_is_one_sentence_and_status_2(
    founder: Path, change: Any, sentence: str
) -> None:
    change(founder)
    before = sorted(entry.name for entry in founder.iterdir())
    result = dfca("run", founder)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert sentence in line
    assert {entry.name for entry in founder.iterdir()} <= {*before, "lock", "node.log", "partial"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("join", "b", "dfca1:nowhere", "--data", "x.csv"), "an invite is one line of the form"),
        (("init", "b", "--data", "missing.csv"), "missing.csv"),
        (("init", "b", "--data", "missing.csv", "--set", "port"), "--set takes KEY=VALUE"),
        (("init", "b", "--data", "missing.csv", "--set", "network.prot=1"), "prot"),
        (("init", "b", "--data", "missing.csv", "--hidden", "ten"), "--hidden takes numbers"),
        (("run", "nowhere"), "there is no node in nowhere"),
        (("run", "nowhere", "--log-format", "xml"), "--log-format must be human or json"),
        (("export", "nowhere"), "name a file to write"),
        (("remove", "nowhere", "garage"), "there is no node in nowhere"),
        (("stop", "nowhere"), "no node runs in nowhere; nothing was stopped"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dfca(*arguments)
    assert result.exit_code == 2, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_remove_works_on_the_files_where_no_node_runs(tmp_path: Path) -> None:
    first, _second = make_swarm(tmp_path, (0, 0))
    assert "the others hear of it when this node runs" in dfca("remove", first.path, "node1").output
    assert [member.name for member in NodeFolder.load(first.path).roster.members().values()] == ["node0"]
    wrong = dfca("remove", first.path, "node1")
    assert wrong.exit_code == 2
    assert '"node1" is not a member of the swarm; members: node0' in wrong.output


STUCK = """
import asyncio, threading
from pathlib import Path
from dfca.node import run

class Stuck:
    def __init__(self, *arguments): pass
    def stop(self): pass
    async def run(self):
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)

run.Service, run.NodeFolder.load = Stuck, lambda *arguments: None
run.run_node(Path("."), None, leave=run.leave_at_once)
"""


def test_a_node_that_has_closed_everything_ends_whatever_its_threads_do() -> None:
    """A node was seen that had said that it ended, and whose process did not."""
    assert subprocess.run([sys.executable, "-c", STUCK], timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_four_processes_pair_train_and_find_two_clusters(tmp_path: Path) -> None:
    """As a user would: init, run, invite, join, run; then one is killed again and again."""
    port = free_port(8)
    paths = [tmp_path / name for name in ("kitchen", "garage", "shed", "attic")]
    processes: list[subprocess.Popen[str]] = []
    try:
        for i, path in enumerate(paths):
            data = write_samples(tmp_path / f"{i}.csv", i % 2, i, samples=300)
            ports = [
                "--host",
                "127.0.0.1",
                "--port",
                str(port + 2 * i),
                "--set",
                f"network.invite_port={port + 2 * i + 1}",
            ]
            if i == 0:
                made = dfca("init", path, "--data", data, "--label", "activity", *ports)
            else:
                invite = dfca("invite", paths[0]).output.strip()
                made = dfca("join", path, invite, "--data", data, *ports)
            assert made.exit_code == 0, made.output
            processes.append(start(path))
            wait_for_round(path, processes[-1], 1)
        draw = random.Random(0)
        for life in range(1, 4):
            time.sleep(draw.uniform(1, 4))
            before = call(paths[3], "status")
            processes[3].kill()
            processes[3].communicate()
            processes[3] = start(paths[3])
            after = wait_for_round(paths[3], processes[3], before["round"])
            assert after["incarnation"] == life
            assert after["clusters"] >= before["clusters"]
        limit = time.monotonic() + 120
        statuses: list[dict[str, Any]] = []
        while time.monotonic() < limit:
            statuses = [call(path, "status") for path in paths]
            if all((status["accuracy"] or 0) > 0.9 and status["clusters"] >= 2 for status in statuses):
                break
            time.sleep(1)
        assert [status["accuracy"] > 0.9 for status in statuses] == [True] * 4
        assert statuses[0]["cluster"] != statuses[1]["cluster"]
        assert [len(status["neighbours"]) for status in statuses] == [3] * 4
        begin = time.monotonic()
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.communicate(timeout=10)
        assert time.monotonic() - begin < 10
        assert [process.returncode for process in processes] == [0] * 4
        onnx = dfca("export", paths[1], "--safetensors", tmp_path / "m.safetensors")
        assert onnx.exit_code == 0, onnx.output
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
