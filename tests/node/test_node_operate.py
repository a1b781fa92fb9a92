"""What people do with a node: commands, logs, metrics, its unit of systemd."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from dfca.base.errors import ConfigError, RunError
from dfca.cli import app
from dfca.cli.node import commands as node_commands
from dfca.node.operate.control import LOCK, ControlServer, NotRunning, RefusedCommand, call, stop_node
from dfca.node.operate.install import make_unit, unit_name, write_unit
from dfca.node.operate.logs import LOGGED, NodeLog, open_log
from dfca.node.operate.metrics import serve_metrics
from dfca.node.operate.status import read_status, save_status
from dfca.node.task.config import INVITE_PORT, PORT
from dfca.peer.records.work import Note

ROOT = Path(__file__).parents[2]
HIDDEN = ["ProtectHome=yes", "PrivateTmp=yes"]


def test_commands_reach_a_node_and_its_refusals_come_back(tmp_path: Path) -> None:
    async def double(request: dict[str, Any]) -> dict[str, Any]:
        if request["number"] < 0:
            raise ConfigError("number must be >= 0")
        return {"twice": 2 * request["number"]}

    async def broken(request: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("no")

    async def scenario() -> None:
        server = ControlServer(tmp_path, {"double": double, "broken": broken})
        await server.open()
        assert stat.S_IMODE(os.stat(tmp_path / "control.json").st_mode) == 0o600
        assert await asyncio.to_thread(call, tmp_path, "double", number=4) == {"twice": 8}
        with pytest.raises(RefusedCommand, match="number must be >= 0") as refused:
            await asyncio.to_thread(call, tmp_path, "double", number=-1)
        assert refused.value.status == 2
        with pytest.raises(RefusedCommand, match='unknown command of a node "dubble"; did you mean "double"'):
            await asyncio.to_thread(call, tmp_path, "dubble")
        with pytest.raises(RefusedCommand, match="unexpected ZeroDivisionError"):
            await asyncio.to_thread(call, tmp_path, "broken")
        access = json.loads((tmp_path / "control.json").read_text())
        (tmp_path / "control.json").write_text(json.dumps({**access, "token": "guessed"}))
        with pytest.raises(RefusedCommand, match="the token is not that of this node"):
            await asyncio.to_thread(call, tmp_path, "double", number=1)
        for garbage in (b"\n", b"[1]\n", b"{}\n", b"\xff\n", b'{"token": 1, "command": []}\n', b"x" * 2_000_000):
            await asyncio.to_thread(_poke, access["port"], garbage)
        (tmp_path / "control.json").write_text(json.dumps(access))
        assert await asyncio.to_thread(call, tmp_path, "double", number=1) == {"twice": 2}
        await server.close()
        with pytest.raises(NotRunning, match=r"no node runs in .*; start it: dfca node run"):
            await asyncio.to_thread(call, tmp_path, "double", number=1)

    asyncio.run(scenario())


def test_stop_waits_for_the_process_and_says_where_none_runs_or_none_ends(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / LOCK, thread_local=False)

    async def end(request: dict[str, Any]) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.1, lock.release)
        return {"name": "kitchen", "pid": 4711, "round": 7}

    async def stay(request: dict[str, Any]) -> dict[str, Any]:
        return {"name": "kitchen", "pid": 4711, "round": 7}

    async def scenario(handler: Any, stop: Any) -> Any:
        server = ControlServer(tmp_path, {"stop": handler})
        await server.open()
        lock.acquire()
        try:
            return await asyncio.to_thread(stop)
        finally:
            await server.close()
            lock.release(force=True)

    done = asyncio.run(scenario(end, lambda: CliRunner().invoke(app, ["node", "stop", str(tmp_path)])))
    assert done.output == f"kitchen is stopped, in round 7; continue: dfca node run {tmp_path}\n"
    with pytest.raises(RunError, match=r"has not ended within 0 s; wait, or end its process 4711 with kill -9"):
        asyncio.run(scenario(stay, lambda: stop_node(tmp_path, 0)))
    again = CliRunner().invoke(app, ["node", "stop", str(tmp_path)])
    assert (again.exit_code, again.output) == (2, f"error: no node runs in {tmp_path}; nothing was stopped\n")


def test_an_invite_in_a_pipe_is_one_line_and_waits_where_it_is_asked_to(tmp_path: Path) -> None:
    guests = [{"name": "garage", "id": "b" * 52, "code": "ZSLET5"}]

    async def invite(request: dict[str, Any]) -> dict[str, Any]:
        return {"invite": "dfca1:...", "lifetime_s": request["lifetime_s"], "joined": 0}

    async def joined(request: dict[str, Any]) -> dict[str, Any]:
        return {"joined": guests[request["since"] :], "open": False}

    async def scenario() -> list[tuple[int, str]]:
        server = ControlServer(tmp_path, {"invite": invite, "joined": joined})
        await server.open()
        outcomes = []
        for options in ([], ["--no-wait"], ["--wait"], ["--wait"]):
            line = ["node", "invite", str(tmp_path), *options]
            done = await asyncio.to_thread(lambda line=line: CliRunner().invoke(app, line))
            outcomes.append((done.exit_code, done.output))
            if "--wait" in options:
                guests.clear()
        await server.close()
        return outcomes

    alone, quiet, waited, nobody = asyncio.run(scenario())
    assert alone == quiet == (0, "dfca1:...\n")
    assert waited == (0, "dfca1:...\ngarage has joined; both screens show ZSLET5\n")
    assert nobody[0] == 2
    assert "nobody has joined in time, or with a wrong secret; make a new invite" in nobody[1]


def _poke(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(4096)
        except OSError:
            return


def test_a_stopped_node_has_left_its_status(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no node in .* \(node.toml is missing\)"):
        read_status(tmp_path)
    save_status(tmp_path, {"round": 7, "running": True})
    assert read_status(tmp_path) == {"round": 7, "running": False}
    (tmp_path / "control.json").write_text('{"port": 1, "token": "old"}')  # of a process that was killed
    assert read_status(tmp_path) == {"round": 7, "running": False}


def test_logs_are_for_people_or_machines_and_no_line_can_forge_another(tmp_path: Path) -> None:
    screen = io.StringIO()
    log = open_log(tmp_path, "human", "info", screen)
    log.info("round 3\n2026-01-01 00:00:00  forged\x1b[2J")
    log.debug("not shown")
    log.warning("the disk is full", left=0)
    assert log.last_error is not None
    assert log.last_error["text"] == "the disk is full"
    log.close()
    lines = screen.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in screen.getvalue()
    assert lines[1].endswith("warning: the disk is full")
    assert (tmp_path / "node.log").read_text() == screen.getvalue()
    screen = io.StringIO()
    log = open_log(tmp_path, "json", "debug", screen)
    log.debug("a\nb", event="x", round=3)
    log.close()
    (line,) = screen.getvalue().splitlines()
    assert json.loads(line) | {"time": ""} == {"time": "", "level": "debug", "text": "a\nb", "event": "x", "round": 3}


def test_books_count_and_log_what_matters(tmp_path: Path) -> None:
    screen = io.StringIO()
    books = NodeLog(open_log(None, "human", "info", screen, "books"), lambda number: f"member {number}")
    for round in range(120):
        books.note(Note("start", round=round))
        books.note(Note("finish", cluster=1, round=round))
    books.note(Note("fold", 5, 1, 3, 2.0))
    books.note(Note("fold", 5, 1, 3, 4.0))
    books.note(Note("finish", cluster=-1, round=120))
    books.note(Note("join", 5, number=3))
    assert books.counts["finish"] == 121
    assert books.staleness == 3.0
    text = screen.getvalue()
    assert text.count("is done") == 10 + 9 + 1
    assert "training diverged" in text
    assert "took over the 3 models of member 5" in text


@pytest.mark.parametrize("number", [1, 2])
def test_every_note_can_be_logged(number: int) -> None:
    """A note that raised once stopped every swarm after its last round."""
    screen = io.StringIO()
    books = NodeLog(open_log(None, "human", "debug", screen, "books"), lambda number: f"member {number}")
    for kind in LOGGED:
        books.note(Note(kind, 5, 1, 3, float(number)))
    lines = screen.getvalue().splitlines()
    assert len(lines) == len(LOGGED)
    assert not any("{" in line for line in lines)
    assert f"takes {number} personal step{'s' if number > 1 else ''} from the model that it uses" in screen.getvalue()


STATUS = {
    "name": "kitchen",
    "id": "a" * 52,
    "swarm": "b" * 52,
    "version": "1",
    "round": 12,
    "clusters": 2,
    "cluster": 1,
    "loss": 0.5,
    "accuracy": 0.75,
    "staleness": 1.5,
    "members": 3,
    "folds": 9,
    "refused": {"not_finite": 2, "member": 1},
    "problems": ["the disk is full"],
    "neighbours": [
        {"name": "garage", "state": "up", "bytes_in": 10, "bytes_out": 20, "rtt_s": 0.25},
        {"name": 'shed"\n', "state": "down", "bytes_in": 1, "bytes_out": 0, "rtt_s": None},
    ],
    "saves": {"count": 4, "bytes": 400, "seconds": 0.5},
}


def scrape(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def test_metrics_are_served_from_the_status(tmp_path: Path) -> None:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    close = serve_metrics(port, lambda: STATUS)
    try:
        text = scrape(port)
        for line in (
            "dfca_round 12.0",
            "dfca_assignment 1.0",
            "dfca_loss 0.5",
            "dfca_staleness_updates 1.5",
            'dfca_bytes_in_total{neighbour="garage"} 10.0',
            'dfca_bytes_in_total{neighbour="shed\\"\\n"} 1.0',
            'dfca_refused_total{reason="not_finite"} 2.0',
            'dfca_neighbours{state="up"} 1.0',
            'dfca_neighbours{state="dead"} 0.0',
            'dfca_round_trip_seconds{neighbour="garage"} 0.25',
            "dfca_saves_bytes_total 400.0",
            "dfca_problems 1.0",
        ):
            assert line in text.splitlines()
        with pytest.raises(ConfigError, match=f"port {port} for metrics is in use on 127"):
            serve_metrics(port, lambda: STATUS)
    finally:
        close()


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist() -> None:
    import re

    from prometheus_client import CollectorRegistry, generate_latest

    from dfca.node.operate.metrics import _Collector

    full = {**STATUS, "round_s": 1.0, "since_round_s": 1.0, "rest_s": 0.0, "incarnation": 0, "left_out": {"garage": 1}}
    registry = CollectorRegistry()
    registry.register(_Collector(lambda: full))
    known = set(re.findall(r"^(dfca_\w+)[ {]", generate_latest(registry).decode(), re.MULTILINE))
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    alerts = (ROOT / "docs" / "alerts.yml").read_text()
    for text in [*asked, alerts]:
        for name in re.findall(r"\bdfca_\w+", text):
            assert name in known, name
    assert len(asked) >= 8


def test_the_unit_of_systemd_names_the_folder_and_gives_nothing_away(tmp_path: Path) -> None:
    folder = tmp_path / "my kitchen"
    folder.mkdir()
    text = make_unit(folder, user="pi")
    assert f'node run "{folder}"' in text
    assert "User=pi" in text
    assert "ProtectSystem=strict" in text
    assert f"ReadWritePaths={str(folder).replace(' ', chr(92) + 'x20')}" in text
    assert "PrivateDevices=yes" in text
    assert "PrivateDevices=no" in make_unit(folder, device="cuda")
    sections = [line for line in text.splitlines() if line.startswith("[")]
    assert sections == ["[Unit]", "[Service]", "[Install]"]
    assert unit_name(folder) == "dfca-my-kitchen.service"
    assert write_unit(folder, text, tmp_path / "units").read_text() == text
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="run it as root"):
        write_unit(folder, text, tmp_path / "file")
    with pytest.raises(ConfigError, match="move it to a folder with a plain name"):
        make_unit(tmp_path / "100%")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    folder = tmp_path / "my kitchen"
    folder.mkdir()
    path = write_unit(folder, make_unit(folder, user="root", data=(folder / "a.csv",)), tmp_path / "units")
    checked = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
    newer = ("RestartSteps", "RestartMaxDelaySec")  # of systemd 254; older ones pass them over
    remarks = [
        line for line in checked.stderr.splitlines() if path.name in line and not any(key in line for key in newer)
    ]
    assert remarks == []
    assert checked.returncode == 0


@pytest.mark.parametrize(
    ("folder", "data", "python", "lines"),
    [
        ("/srv/kitchen", "/srv/data/a.csv", "/usr", HIDDEN),
        ("/srv/kitchen", "/home/pi/a.csv", "/usr", ["ProtectHome=read-only", "PrivateTmp=yes"]),
        ("/home/pi/kitchen", "/srv/a.csv", "/usr", ["ProtectHome=read-only", "PrivateTmp=yes"]),
        ("/srv/kitchen", "/srv/a.csv", "/root/venv", ["ProtectHome=read-only", "PrivateTmp=yes"]),
        ("/srv/kitchen", "/homework/a.csv", "/usr", HIDDEN),
        (
            "/srv/k",
            "/tmp/my data/a.csv",
            "/usr",
            [*HIDDEN, r"BindReadOnlyPaths=/tmp/my\x20data"],
        ),
        ("/var/tmp/k", "/srv/a.csv", "/usr", [*HIDDEN, "BindPaths=/var/tmp/k"]),
    ],
)
def test_the_unit_of_systemd_shows_a_node_its_data_and_no_other_home(
    monkeypatch: pytest.MonkeyPatch, folder: str, data: str, python: str, lines: list[str]
) -> None:
    monkeypatch.setattr("sys.prefix", python)
    monkeypatch.setattr("sys.base_prefix", python)
    text = make_unit(Path(folder), "pi", data=[Path(data)])
    written = [line for line in text.splitlines() if line.startswith(("ProtectHome", "PrivateTmp", "Bind"))]
    assert written == lines


def test_the_dockerfile_names_files_and_extras_that_exist() -> None:
    """It cannot be built here; what it names is checked instead."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert {"pyproject.toml", "src"} <= set(copied)
    for name in [*copied, project["readme"]]:
        assert (ROOT / name).exists(), name
    assert project["readme"] in copied  # the build reads it
    install = next(line for line in lines if "pip install" in line)
    extras = re.findall(r"'\.\[([a-z,]+)\]'", install)
    assert extras
    for extra in extras[0].split(","):
        assert extra in project["optional-dependencies"], extra
    python = re.findall(r"^FROM python:(3\.\d+)", "\n".join(lines), re.MULTILINE)[0]
    least = re.findall(r">=3\.(\d+)", project["requires-python"])[0]
    assert int(python.split(".")[1]) >= int(least)
    ports = {int(port) for line in lines if line.startswith("EXPOSE") for port in line.split()[1:]}
    assert ports == {PORT, INVITE_PORT}
    entry = json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).removeprefix("ENTRYPOINT "))
    assert entry[0] in project["scripts"]
    command = json.loads(next(line for line in lines if line.startswith("CMD")).removeprefix("CMD "))
    names = [
        command.name or command.callback.__name__ for command in node_commands.registered_commands if command.callback
    ]
    assert command[0] in names
