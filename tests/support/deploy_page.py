"""Types the console blocks of docs/deploy.md into three devices, and compares what they print with the page."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
PATIENCE_S = 120.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RETRIED = ("status", "doctor", "curl")
"""Commands that change nothing: typed again until the page's lines are there, as a person would."""


@dataclass(frozen=True)
class Command:
    """One line of the page that somebody types. expected: what it prints, "..." for what is left out."""

    device: str
    text: str
    expected: tuple[str, ...]


def console_commands(page: str = PAGE) -> list[Command]:
    """List the commands of the console blocks in their order."""
    commands: list[Command] = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for part in re.split(r"^(?=[ABC]\$ )", block, flags=re.MULTILINE):
            if part.strip():
                first, *rest = part.rstrip("\n").split("\n")
                commands.append(Command(first[0], first[3:], tuple(rest)))
    return commands


def blocks(kind: str, page: str = PAGE) -> list[str]:
    """List the blocks of a kind."""
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def pattern_of(line: str) -> re.Pattern[str]:
    """Make what a printed line must look like: IDs, codes, numbers and spaces may differ from the page's.

    >>> bool(pattern_of("round  7, 0.05 s each ...").fullmatch("round 123, 1e-05 s each; more"))
    True
    """
    kinds = (
        (r"dfca1:\S+", r"dfca1:\\S+"),
        (r"(?:[a-z2-7]{4} ){12}[a-z2-7]{4}", r"(?:[a-z2-7]{4} ){12}[a-z2-7]{4}"),
        (r"\b[a-z2-7]{52}\b", "[a-z2-7]{52}"),
        (r"\([a-z2-7]{7}\)", r"\\([a-z2-7]{7}\\)"),
        (r"\b[A-Z2-7]{6}\b", "[A-Z2-7]{6}"),
        (r"(?<=,)(?:sit|lie|walk|run)(?=,)", "(?:sit|lie|walk|run)"),
        (r"\b[kMG]?B\b", "[kMG]?B"),
        (r"(?<=[^A-Za-z])\d[\d.:+T-]*(?:e-?\d+)?", r"[\\d.:+Te-]+"),
        (r"\.\.\.", ".*"),
        (r"\s+", r"\\s+"),
    )
    out, place = "", 0
    text = line.rstrip()
    while place < len(text):
        for kind, meaning in kinds:
            if match := re.compile(kind).match(text, place):
                out, place = out + meaning.replace("\\\\", "\\"), match.end()
                break
        else:
            out, place = out + re.escape(text[place]), place + 1
    return re.compile(out + r"\s*")


def missing(expected: tuple[str, ...], printed: str) -> list[str]:
    """List the lines of the page that were not printed, in their order."""
    lines = iter([ANSI.sub("", line).rstrip() for line in printed.splitlines()])
    return [
        line
        for line in expected
        if line != "..." and line.strip() and not any(pattern_of(line).fullmatch(shown) for shown in lines)
    ]


def copy_terminal(terminal: int, output: Path) -> None:
    """Write what a terminal shows into a file, until its program ends."""
    with output.open("wb", buffering=0) as file, suppress(OSError):
        while data := os.read(terminal, 4096):
            file.write(data)
    os.close(terminal)


@dataclass
class Running:
    """A command that keeps running: a node, or an invite that waits for a device."""

    command: Command
    process: subprocess.Popen[bytes]
    output: Path

    def wait_for_output(self) -> str:
        """Wait until it has printed what the page says; returns everything."""
        limit = time.monotonic() + PATIENCE_S
        while left := missing(self.command.expected, self.output.read_text(errors="replace")):
            assert time.monotonic() < limit, f"{self.command.text}: never printed {left}: {self.output.read_text()}"
            time.sleep(0.2)
        return self.output.read_text(errors="replace")


@dataclass
class Desk:
    """Three devices. inside: the words before a command that run it on a device; environment: of all commands."""

    folder: Path
    inside: dict[str, list[str]]
    invite: str = ""
    nodes: dict[str, Running] = field(default_factory=dict)
    invites: list[Running] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tools = self.folder / "bin"
        tools.mkdir()
        (tools / "dfca").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dfca "$@"\n')
        (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        for tool in tools.iterdir():
            tool.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "250",
            "TERM": "dumb",
        }
        (script,) = blocks("python")
        for device in self.inside:
            (self.folder / device).mkdir()
            (self.folder / device / "samples.py").write_text(script)

    def type(self, command: Command) -> str:
        """Type a command; returns what it printed once that is what the page says."""
        text = re.sub(r"'dfca1:[^']*'", f"'{self.invite}'", command.text)
        text = re.sub(r"^scp ([ABC]):", r"cp ../\1/", text)
        words = text.split()
        if words[:3] == ["dfca", "node", "run"]:
            return self._start(command, text)
        if words[:3] == ["dfca", "node", "invite"]:
            return self._invite(command, text)
        patient = words[0] in RETRIED or (words[2:3] and words[2] in RETRIED)
        limit = time.monotonic() + (PATIENCE_S if patient else 0)
        while True:
            done = subprocess.run(
                self._words(command.device, text),
                cwd=self.folder / command.device,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            left = missing(command.expected, done.stdout)
            failed = done.returncode != (1 if any(line.startswith("FAIL") for line in command.expected) else 0)
            if not left and not failed:
                break
            assert time.monotonic() < limit, (command.text, done.returncode, left, done.stdout, done.stderr)
            time.sleep(0.5)
        if words[2:3] == ["join"]:
            self._check_code(done.stdout)
        if words[2:3] == ["stop"]:
            self.nodes.pop(words[3]).process.wait(15)
        return done.stdout

    def _words(self, device: str, text: str) -> list[str]:
        return [*self.inside[device], "sh", "-c", text]

    def _start(self, command: Command, text: str) -> str:
        name = text.split()[3]
        if name in self.nodes:  # it was killed: this one is gone
            self.nodes.pop(name).process.wait(10)
        output = self.folder / f"{name}.{time.monotonic_ns()}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._words(command.device, f"exec {text}"),
                cwd=self.folder / command.device,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.nodes[name] = Running(command, process, output)
        return self.nodes[name].wait_for_output()

    def _invite(self, command: Command, text: str) -> str:
        """Invite at a terminal, where it shows the QR code and waits."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            self._words(command.device, f"exec {text}"),
            cwd=self.folder / command.device,
            env=self.environment,
            stdout=theirs,
            stderr=theirs,
            stdin=theirs,
        )
        os.close(theirs)
        output = self.folder / f"invite.{time.monotonic_ns()}.out"
        output.touch()
        threading.Thread(target=copy_terminal, args=(ours, output), daemon=True).start()
        limit = time.monotonic() + PATIENCE_S
        while not (invite := re.search(r"dfca1:\S+(?=\s)", output.read_text(errors="replace"))):
            assert time.monotonic() < limit, output.read_text(errors="replace")
            time.sleep(0.1)
        self.invite = invite[0]
        self.invites.append(Running(command, process, output))
        return self.invite

    def _check_code(self, joined: str) -> None:
        """Compare the code of a device that joined with that on the inviter's screen."""
        waiting = self.invites[-1]
        seen = waiting.wait_for_output()
        assert waiting.process.wait(10) == 0
        assert "█" in seen, "a QR code"
        (here,) = re.findall(r"^code\s+([A-Z2-7]{6}) ", ANSI.sub("", joined), re.MULTILINE)
        (there,) = re.findall(r"both screens show ([A-Z2-7]{6})", seen)
        assert here == there

    def status(self, device: str, node: str) -> dict[str, Any]:
        """Return everything about a node."""
        text = self.type(Command(device, f"dfca node status {node} --json", ()))
        return json.loads(text)

    def close(self) -> None:
        """End everything that was started here."""
        for shell in [*self.nodes.values(), *self.invites]:
            if shell.process.poll() is None:
                shell.process.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                shell.process.wait(5)
