"""docs/deploy.md: a new user types every command of the page on three devices, which are network namespaces."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from deploy_page import PAGE, Command, Desk, blocks, console_commands, missing, pattern_of
from typer.main import get_command
from typer.testing import CliRunner

from dfca.cli import app
from dfca.node.operate.status import read_status
from dfca.node.task.config import NodeConfig

ROOT = Path(__file__).parents[2]
NEEDED = ("ip", "curl", "tar", "sed")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in NEEDED):
        return False
    name = f"dfca-try-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError:
        return False
    run("ip", "netns", "delete", name)
    return True


@contextmanager
def three_namespaces() -> Iterator[dict[str, str]]:
    """Make three devices at one switch, which leads nowhere else."""
    tag = f"dfca{os.getpid()}"
    switch, devices = f"{tag}-sw", {letter: f"{tag}-{letter}" for letter in "ABC"}
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for place, (letter, name) in enumerate(devices.items(), 1):
            run("ip", "netns", "add", name)
            cable = ("link", "add", f"port{letter}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", switch, *cable)
            run("ip", "-n", switch, "link", "set", f"port{letter}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.15.{place}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", link, "up")
        yield devices
    finally:
        for name in (*devices.values(), switch):
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)


@contextmanager
def two_walled_namespaces() -> Iterator[dict[str, str]]:
    """Make A in public, and B and C each behind a router of its own that masquerades; both have the same address."""
    tag = f"dfca{os.getpid()}"
    devices = {letter: f"{tag}-{letter}" for letter in "ABC"}
    names = [f"{tag}-sw", *devices.values(), *(f"{tag}-R{letter}" for letter in "BC")]
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        switch = names[0]
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for place, name in enumerate((devices["A"], *names[-2:]), 1):
            run("ip", "-n", switch, "link", "add", f"port{place}", "type", "veth", "peer", "name", "wan", "netns", name)
            run("ip", "-n", switch, "link", "set", f"port{place}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.15.{place}/24", "dev", "wan")
            run("ip", "-n", name, "link", "set", "wan", "up")
        for letter, router in zip("BC", names[-2:], strict=True):
            name = devices[letter]
            run("ip", "-n", router, "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", name)
            for namespace, link, host in ((router, "lan", 1), (name, "eth0", 2)):
                run("ip", "-n", namespace, "addr", "add", f"192.168.1.{host}/24", "dev", link)
                run("ip", "-n", namespace, "link", "set", link, "up")
            run("ip", "-n", name, "route", "add", "default", "via", "192.168.1.1")
            inside = ("ip", "netns", "exec", router)
            run(*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            run(*inside, "nft", "add table ip nat")
            run(*inside, "nft", "add chain ip nat out { type nat hook postrouting priority 100 ; }")
            run(*inside, "nft", "add rule ip nat out oifname wan masquerade")
        yield devices
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces() or not shutil.which("nft"), reason="needs root, ip and nft")
def test_devices_behind_two_routers_train_with_one_in_public(tmp_path: Path) -> None:
    with two_walled_namespaces() as names:
        desk = Desk(tmp_path / "desk", {letter: ["ip", "netns", "exec", name] for letter, name in names.items()})
        try:
            train_behind_routers(desk)
        finally:
            desk.close()


def train_behind_routers(desk: Desk) -> None:
    nodes = {"A": "kitchen", "B": "garage", "C": "attic"}
    for device in nodes:
        desk.type(Command(device, f"python samples.py {device.lower()}.csv", ()))
    founding = "--label activity --clusters 1 --expect 3 --agree personal=0"
    desk.type(Command("A", f"dfca node init kitchen --data a.csv {founding}", ()))
    desk.type(Command("A", "dfca node run kitchen", ("... waits until 3 members run; so far 1",)))
    for device, node in (("B", "garage"), ("C", "attic")):
        desk.type(Command("A", "dfca node invite kitchen", ("... both screens show 7UZ3XM...",)))
        desk.type(Command(device, f"dfca node join {node} 'dfca1:' --data {device.lower()}.csv", ()))
        desk.type(Command(device, f"dfca node run {node}", ()))
    folders = {device: desk.folder / device / node for device, node in nodes.items()}
    for folder in folders.values():
        state = wait_for_round(folder, 10)
        assert state["clusters"] == 1
        assert state["accuracy"] > 0.85
        assert state["refused"] == {}
    # Each folds the models of those that it has a link with: A of both, B and C of A.
    folded = {device: wait_for_folds(folder, 10) for device, folder in folders.items()}
    for device, state in folded.items():
        linked = {entry["name"]: entry for entry in state["neighbours"] if entry["state"] == "up"}
        assert set(linked) == ({"garage", "attic"} if device == "A" else {"kitchen"})
        assert all(min(entry["bytes_in"], entry["bytes_out"]) > 20_000 for entry in linked.values())
        assert [entry["walled"] for entry in linked.values()] == ([True, True] if device == "A" else [False])
    behind = "(192.168.1.2:7447: ...): it is behind a NAT or a firewall, and dials itself"
    seen = [f"ok    reach         {name} does not answer {behind}" for name in ("attic", "garage")]
    for line in seen:
        desk.type(Command("A", "dfca node doctor kitchen", (line,)))
    desk.type(
        Command(
            "B",
            "dfca node doctor garage",
            (f"ok    reach back    kitchen does not reach this device {behind}",),
        )
    )
    apart = "warn  reach         attic does not answer (192.168.1.2:7447: ...)"
    printed = desk.type(Command("B", "dfca node doctor garage", (apart,)))
    assert "their models travel through members that both reach" in " ".join(printed.split())


def wait_for_folds(folder: Path, least: int) -> dict:
    limit = time.monotonic() + 60
    while (state := read_status(folder))["folds"] < least:
        assert time.monotonic() < limit, state
        time.sleep(0.1)
    return state


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason=f"needs root and {', '.join(NEEDED)}")
def test_every_command_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    """In order; then what the lines of the page do not say."""
    with three_namespaces() as names:
        desk = Desk(tmp_path / "desk", {letter: ["ip", "netns", "exec", name] for letter, name in names.items()})
        try:
            follow_the_page(desk)
        finally:
            desk.close()


def follow_the_page(desk: Desk) -> None:
    before_kill = 0
    for command in console_commands():
        if command.text.startswith("kill"):
            before_kill = desk.status("B", "garage")["round"]
        printed = desk.type(command)
        if command == models_emerge():
            print(f"init to models: {time.monotonic() - desk.began:.0f} s")
            check_models(desk)
        elif " predict " in command.text:
            check_predictions(desk, printed)
        elif command.text == "dfca node run garage" and before_kill:
            again = desk.status("B", "garage")
            assert again["clusters"] == 2, "a device that was killed comes back with its models"
            assert again["incarnation"] == 1
            assert again["round"] >= before_kill - 1
            before_kill = 0
        elif " remove " in command.text:
            check_removal(desk)


def models_emerge() -> Command:
    """Return the first look at the device that was last: everybody has models then."""
    return next(command for command in console_commands() if command.text == "dfca node status attic")


def check_models(desk: Desk) -> None:
    statuses = [desk.status(*words) for words in (("A", "kitchen"), ("B", "garage"), ("C", "attic"))]
    assert [status["clusters"] for status in statuses] == [2, 2, 2]
    assert statuses[0]["cluster"] == statuses[1]["cluster"] != statuses[2]["cluster"]
    assert min(status["accuracy"] for status in statuses) > 0.85
    for status in statuses:
        assert len({neighbour["name"] for neighbour in status["neighbours"]}) == 2


def check_predictions(desk: Desk, printed: str) -> None:
    rows = list(csv.DictReader(io.StringIO(printed)))
    with (desk.folder / "A" / "new.csv").open() as file:
        truth = [row["activity"] for row in csv.DictReader(file)]
    assert len(rows) == len(truth) == 300
    assert sum(row["class"] == label for row, label in zip(rows, truth, strict=True)) > 0.9 * len(truth)


def check_removal(desk: Desk) -> None:
    """Nobody is linked with a device that was removed, soon and later."""
    for device, node in (("A", "kitchen"), ("B", "garage")):
        limit = time.monotonic() + 30
        while any(link["name"] == "attic" or link["state"] != "up" for link in links(desk, device, node)):
            assert time.monotonic() < limit, links(desk, device, node)
            time.sleep(0.5)
    assert desk.status("A", "kitchen")["members"] == desk.status("B", "garage")["members"] == 2


def links(desk: Desk, device: str, node: str) -> list[dict[str, str]]:
    return desk.status(device, node)["neighbours"]


def test_two_devices_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The essential path of the page in few processes: found, run, invite, join, run, predict."""
    desk = Desk(tmp_path / "desk", {"A": [], "B": []})
    local = ["--host", "127.0.0.1", "--port", "0", "--set", "network.invite_port=0"]

    def dfca(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.output

    try:
        for device, file in (("A", "a.csv"), ("A", "new.csv"), ("B", "b.csv upside-down")):
            desk.type(Command(device, f"python samples.py {file}", ()))
        monkeypatch.chdir(desk.folder / "A")
        swarm = ["--label", "activity", "--clusters", "2", "--expect", "2"]
        assert "device ID  " in dfca("node", "init", "kitchen", "--data", "a.csv", *swarm, *local)
        desk.type(Command("A", "dfca node run kitchen", ("... waits until 2 members run; so far 1",)))
        invite = dfca("node", "invite", "kitchen", "--no-wait").split()[0]
        monkeypatch.chdir(desk.folder / "B")
        joined = dfca("node", "join", "garage", invite, "--data", "b.csv", *local)
        (code,) = re.findall(r"code\s+([A-Z2-7]{6}) ", joined)
        assert f"the code on both screens is {code}" in (desk.folder / "A/kitchen/node.log").read_text()
        desk.type(Command("B", "dfca node run garage", ("... an election ended: there are 2 clusters",)))
        states = [wait_for_round(desk.folder / name, 10) for name in ("A/kitchen", "B/garage")]
        assert [state["clusters"] for state in states] == [2, 2]
        assert states[0]["cluster"] != states[1]["cluster"]
        monkeypatch.chdir(desk.folder / "A")
        check_predictions(desk, dfca("node", "predict", "kitchen", "new.csv"))
    finally:
        desk.close()


def wait_for_round(folder: Path, least: int) -> dict:
    limit = time.monotonic() + 300
    while (status := read_status(folder))["round"] < least:
        assert time.monotonic() < limit, status
        time.sleep(0.1)
    return status


# What needs no devices.


def test_a_page_that_says_something_else_is_noticed() -> None:
    printed = "node       kitchen (cll33ah), runs\nround      7, training, 1e-05 s each\ncluster    0 of 2\n"
    assert missing(("node       kitchen (aaaaaaa), runs", "...", "cluster    1 of 3"), printed) == []
    assert missing(("cluster    1 of 3", "node       kitchen (aaaaaaa), runs"), printed) != []  # another order
    assert missing(("node       garage (aaaaaaa), runs",), printed) != []
    assert missing(("node       kitchen (aaaaaaa), does not run",), printed) != []
    assert not pattern_of("m.onnx: cluster 0").fullmatch("m.onnx: cluster none")


def test_every_block_is_typed_or_known() -> None:
    """The blocks that no test can type hold nothing but packages, services and firewalls."""
    assert {*re.findall(r"^```([a-z]+)$", PAGE, re.MULTILINE)} == {"sh", "python", "console", "yaml"}
    heads = {line.split()[0] for block in blocks("sh") for line in block.splitlines()}
    assert heads == {"pip", "sudo", "journalctl"}
    assert len(console_commands()) > 40
    for file in ("alerts.yml", "grafana-dashboard.json"):
        assert f"docs/{file}" in PAGE
        assert (ROOT / "docs" / file).exists()


def test_the_commands_and_options_of_the_page_exist() -> None:
    groups = get_command(app).commands  # type: ignore[attr-defined]
    for group, name, rest in re.findall(r"dfca (node|keys) ([a-z]+)([^`\n|]*)", PAGE):
        command = groups[group].commands[name]
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", rest)) <= known, (name, rest)
    for option in re.findall(r"`(--[a-z-]+)", PAGE):
        assert any(option in (*declared.opts, *declared.secondary_opts) for declared in all_options(groups)), option


def all_options(groups: dict) -> Iterator:
    for group in ("node", "keys"):
        for command in groups[group].commands.values():
            yield from command.params


def test_the_settings_of_the_page_exist() -> None:
    for section, key in re.findall(r"`(data|network|training|log|limits)\.([a-z_]+)", PAGE):
        assert (
            key in type(getattr(NodeConfig.checked({"name": "a", "data": {"path": "a.csv"}}), section)).descriptions()
        ), key


def test_the_names_of_the_prompts_are_devices() -> None:
    assert {command.device for command in console_commands()} == {"A", "B", "C"}
