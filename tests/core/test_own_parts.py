"""docs/start.md followed to the letter in an empty folder, and the blocks of docs/python.md in their order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dfca.base import imports
from dfca.cli import app

ROOT = Path(__file__).parents[2]
Shell = Callable[[str], str]


def section(title: str) -> str:
    """Return a section of the first steps."""
    (text,) = re.findall(rf"\n## {title}\n(.*?)\n## ", (ROOT / "docs/start.md").read_text(), re.DOTALL)
    return text


def blocks(text: str) -> list[tuple[str, str, str]]:
    """List the blocks of code: language, title, content."""
    return re.findall(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', text, re.DOTALL)


def follow(text: str, folder: Path, shell: Shell) -> str:
    """Do what a section says: write its files, run its commands and, at last, the Python that is not imported."""
    transcript, later = "", []
    page_blocks = blocks(text)
    for kind, title, content in page_blocks:
        if kind in ("python", "toml"):
            (folder / title).write_text(content)
        if title == "look.py":
            later.append("python look.py")
    commands = [line for kind, _, content in page_blocks if kind == "sh" for line in content.splitlines()]
    for command in [*commands, *later]:
        transcript += f"$ {command}\n{shell(command)}\n"
    return transcript


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder; forget what is imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imports, "_folders", [])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def in_this_process(command: str) -> str:
    """Run a command of the page without a new process, which would take seconds to import torch."""
    program, *arguments = shlex.split(command)
    if program == "dfca":
        done = CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.output
    if program == "pytest":
        names: dict = {}
        exec(compile(Path(arguments[0]).read_text(), arguments[0], "exec"), names)
        tests = [name for name in names if name.startswith("test_")]
        for name in tests:
            names[name]()
        return f"{len(tests)} passed"
    assert (program, arguments[0]) == ("python", "look.py")
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(Path(arguments[0]).read_text(), arguments[0], "exec"), {"__name__": "__main__"})
    return out.getvalue()


def in_a_shell(command: str) -> str:
    """Run a command of the page as a user does, in a process of its own."""
    words = shlex.split(command)
    program = {"dfca": ["-m", "dfca"], "pytest": ["-m", "pytest", "-p", "no:cacheprovider"], "python": []}[words[0]]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *program, *words[1:]], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SHELLS = [
    pytest.param(in_this_process, id="in-process"),
    pytest.param(in_a_shell, id="shell", marks=pytest.mark.slow),
]


@pytest.mark.no_cover
@pytest.mark.parametrize("shell", SHELLS)
def test_a_new_user_has_own_metrics_in_pandas_from_the_page_alone(here: Path, shell: Shell) -> None:
    transcript = follow(section("Your own experiment, in ten minutes"), here, shell)
    print(transcript)
    assert re.search(r"dfca-auto +neighbours +9\d\.\d", transcript)
    assert "runs/sensors/export/dfca-auto-seed0-cluster1.safetensors" in transcript
    assert re.search(r"^10 +0\.9\d+ +0\.\d+ +0\.[89]\d+$", transcript, re.MULTILINE), "the mean accuracies, by pandas"
    assert re.search(r"Linear\(in_features=10, out_features=2", transcript), "the module is the user's own"
    clusters = re.findall(r"^\d+ +\d+ +(\d)$", transcript, re.MULTILINE)
    assert clusters in (["0", "1"] * 12, ["1", "0"] * 12), "rooms with the same wiring share a cluster"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_new_algorithm_of_the_page_runs_and_keeps_the_contracts(here: Path, shell: Shell) -> None:
    transcript = follow(section("A new algorithm in twenty lines"), here, shell)
    assert re.search(r"curious:curious +neighbours +\d\d\.\d", transcript)
    assert "1 passed" in transcript
    assert (here / "runs/curious/metrics/curious.curious-0.jsonl").exists()


@pytest.mark.no_cover
def test_the_blocks_of_the_python_page_run_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict = {"__name__": "page"}
    for kind, title, code in blocks((ROOT / "docs/python.md").read_text()):
        assert (kind, title) == ("python", "")
        exec(compile(code, "docs/python.md", "exec"), names)
    out = capsys.readouterr().out
    assert "rounds must be an integer, got 2.5" in out
    assert "Split(8 clients with 24 training and 6 test samples each, shape (3,), 2 classes)" in out
    assert names["slow"].evaluations[-1].time_s > 2 * names["late"].evaluations[-1].time_s
    assert len(set(names["result"].assignments.tolist())) == 2
    assert names["result"].accuracy > 0.7
