"""The command line: what it prints, one sentence for every error, and the exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from forked import Forked
from typer.testing import CliRunner

import dfca
from dfca.base.errors import ConfigError
from dfca.cli import app
from dfca.experiment.load import presets, read_stored
from dfca.report.rows import RunReport
from dfca.runs import runner
from dfca.runs.signals import Interrupted
from dfca.runs.store.metrics import read_metrics
from dfca.runs.store.reading import Run

TINY = """
title = "A tiny one"
clients = 6
clusters = 2
rounds = 4
algorithms = ["dfca-gi", "local"]
[data]
name = "digits"
samples_per_client = 20
test_samples_per_client = 10
[model]
hidden = 4
[topology]
p = 0.6
[evaluation]
every = 2
samples = 20
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call dfca in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Tiny tensors on a busy machine: the threads of child processes would only wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), prog_name="dfca")


def error(*arguments: str, status: int) -> str:
    result = call(*arguments)
    assert result.exit_code == status
    assert "Traceback" not in result.output
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


@pytest.fixture
def tiny() -> Path:
    path = Path("tiny.toml")
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the tiny experiment once; return its folder and what the command printed."""
    folder = tmp_path_factory.mktemp("finished")
    before = os.getcwd()
    os.chdir(folder)
    try:
        Path("tiny.toml").write_text(TINY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", list(sys.path))
            result = call("run", "tiny.toml")
    finally:
        os.chdir(before)
    assert result.exit_code == 0, result.output
    return folder / "runs" / "tiny", result.output


@pytest.fixture
def finished(finished_once: tuple[Path, str], tiny: Path) -> Path:
    """Return a copy of the finished run at runs/tiny, beside its tiny.toml."""
    return Path(shutil.copytree(finished_once[0], "runs/tiny"))


# --- help


def test_help_and_version_start_fast_in_a_real_process() -> None:
    """`python -m dfca --help` takes 0.21 s of a quiet core; the bound leaves room for a busy one."""
    script = (
        "import runpy, sys, time\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'networkx', 'scipy', 'sklearn'}\n"
        "for argument in ('--help', 'version'):\n"
        "    sys.argv = ['dfca', argument]\n"
        "    try: runpy.run_module('dfca', run_name='__main__')\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "    assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "    if argument == '--help': print(time.process_time(), 'pydantic' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Clustered federated learning without a server" in done.stdout
    *_, spent, version = done.stdout.splitlines()
    seconds, pydantic = spent.split()
    assert float(seconds) < 0.6
    assert pydantic == "False"
    assert version == dfca.__version__


def commands_of(group: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """List the names of a command and of all below it."""
    below = getattr(group, "commands", {})
    return [path, *(name for key, command in below.items() for name in commands_of(command, (*path, key)))]


@pytest.mark.parametrize("command", commands_of(typer.main.get_command(app)), ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        result = call(*command, flag)
        assert result.exit_code == 0
        assert "Usage: " in result.output
        assert not {"cell", "cells"} & set(result.output.lower().split())


def test_the_commands_are_these() -> None:
    names = {" ".join(command) for command in commands_of(typer.main.get_command(app))}
    alone = "run watch swarm list show options version export report cite repair replay faults"
    groups = {
        "data": "list fetch import",
        "keys": "init show request sign accept remove",
        "node": "init run invite join status doctor remove stop export predict install replay",
    }
    listed = {f"{group} {name}" for group, words in groups.items() for name in words.split()}
    assert names == {"", *alone.split(), *groups, *listed}


def test_version() -> None:
    for arguments in (("version",), ("--version",)):
        assert call(*arguments).output == f"{dfca.__version__}\n"


def test_list_shows_everything_there_is() -> None:
    output = call("list").output
    for name in (*presets(), "dfca-gi", "oracle", "erdos-renyi", "cnn1d", "digits", "femnist"):
        assert name in output


def test_data_list_says_where_it_comes_from() -> None:
    output = call("data", "list").output
    assert "ready: inside scikit-learn" in output
    assert "https://" in output


# --- run


def test_run_prints_a_line_per_trial_the_table_and_the_report(finished_once: tuple[Path, str], finished: Path) -> None:
    folder, output = finished_once
    lines = output.splitlines()
    assert lines[0] == "A tiny one"
    assert lines[1] == "· tiny: 2 algorithms x 1 seed, 6 clients, 2 clusters, 4 rounds, on cpu"
    assert any(line.startswith("    1/2  dfca-gi, seed 0: accuracy 0.") for line in lines)
    assert any(line.startswith("    2/2  local, seed 0: accuracy 0.") for line in lines)
    assert lines[-1] == "report: runs/tiny/report.html"
    assert (folder / "report.html").exists()
    again = call("run", "tiny.toml").output
    assert "· 2 of 2 trials are finished already" in again


def test_run_quietly_prints_only_the_table(tiny: Path) -> None:
    output = call("run", str(tiny), "--quiet", "--algorithms", "local").output
    assert "seed 0" not in output
    assert "local" in output
    assert output.splitlines()[-1] == "report: runs/tiny/report.html"


def test_options_reach_the_config(tiny: Path) -> None:
    arguments = "--algorithms local,fedavg --seeds 3, --set rounds=2 --set evaluation.every=1 --out deep/folder"
    result = call("run", str(tiny), *arguments.split(), "--device", "cpu", "--save-models", "--threads", "1")
    assert result.exit_code == 0, result.output
    config = read_stored(Path("deep/folder/config.toml").read_text())[0]
    assert (config.algorithms, config.seeds, config.rounds) == (("local", "fedavg"), (3,), 2)
    assert len(read_metrics(Path("deep/folder"))) == 4
    assert Path("deep/folder/models/local-3.safetensors").exists()


def test_more_threads_than_cores_are_refused(tiny: Path) -> None:
    result = call("run", str(tiny), "--threads", "9999")
    assert result.exit_code == 2
    assert re.search(r"--threads must be <= \d+, the cores of this machine, got 9999", result.output)


def test_another_scale_has_another_folder(tiny: Path) -> None:
    tiny.write_text(f"{TINY}[scale.desk]\nrounds = 2\n[scale.paper]\nrounds = 3\n")
    for scale, folder in (("desk", "tiny"), ("paper", "tiny-paper")):
        output = call("run", str(tiny), "-q", "--algorithms", "local", "--scale", scale).output
        assert f"runs/{folder}/report.html" in output


def test_a_model_of_the_users_own_is_found_where_dfca_is_called(tiny: Path) -> None:
    Path("my_own_model.py").write_text(
        "from torch import nn\n"
        "def make(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    result = call("run", str(tiny), "-q", "--set", "model.factory=my_own_model:make", "--algorithms", "local")
    assert result.exit_code == 0, result.output


def test_report_writes_the_page_again(finished: Path) -> None:
    page = finished / "report.html"
    page.unlink()
    result = call("report", "runs/tiny")
    assert result.exit_code == 0, result.output
    assert page.exists()
    assert result.output.splitlines()[0] == "tiny runs/tiny"


def test_the_table_fits_the_terminal_and_shows_what_is_unfinished(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("run", str(tiny), "-q", "--seeds", "2", "--algorithms", "local")
    path = Path("runs/tiny/summary.json")
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"runs": summary["runs"][:-1]}))
    monkeypatch.setenv("COLUMNS", "60")
    output = call("report", "runs/tiny").output
    assert max(map(len, output.splitlines())) <= 60
    assert "…" not in output
    assert "runs: finished + unfinished" in output
    lines = " ".join(output.split())
    assert "not finished: 1 of 2 runs are done; the same `dfca run` command continues" in lines
    assert call("report", "runs/tiny", "--format", "csv").stderr.startswith("not finished: 1 of 2 runs are done; ")


@pytest.mark.usefixtures("finished")
def test_a_command_averages_a_run_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Run] = []
    make = RunReport.of
    monkeypatch.setattr(RunReport, "of", lambda run: made.append(run) or make(run))
    for command in (("run", str(tiny), "-q"), ("report", "runs/tiny", "--save", "kept.json", "--figures", "figures")):
        made.clear()
        assert call(*command).exit_code == 0
        assert len(made) == 1, command


def test_every_format_from_the_folder_and_from_a_saved_file(finished: Path) -> None:
    assert call("report", "runs/tiny", "--save", "tiny.json").exit_code == 0
    for name, beginning in (("markdown", "| algorithm |"), ("csv", "algorithm,runs,"), ("latex", r"\begin{tabular}")):
        outputs = [call("report", path, "--format", name).output for path in ("runs/tiny", "tiny.json")]
        assert outputs[0] == outputs[1]
        assert outputs[0].startswith(beginning)
    assert call("report", "tiny.json").output.splitlines()[0] == "tiny tiny.json"


def test_a_sweep_with_a_failed_trial_ends_with_status_1(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFCA_DATA", str(Path.cwd() / "nothing"))
    tiny.write_text(f'{TINY}[[points]]\ndata.name = "mnist"\n[[points]]\nclients = 4\n')
    result = call("run", str(tiny), "--workers", "1", "--algorithms", "local")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[1] == "· tiny: 2 points, 2 trials, on cpu"
    assert any(line.startswith("    1/2  local, seed 0, data.name=mnist: failed: ") for line in lines)
    assert any(line.startswith("    2/2  local, seed 0, clients=4: accuracy ") for line in lines)
    assert result.stderr.startswith("error: 1 of 2 trials failed, first local, seed 0: ")
    assert result.stderr.endswith("; the same command tries them again\n")


# --- errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run quikstart", 'error: unknown preset "quikstart"; did you mean "quickstart"? Known: '),
        ("run tiny", 'error: unknown preset "tiny"; for the experiment file here write tiny.toml'),
        ("run tiny.toml --algorithms dfca-ig", 'error: unknown algorithm "dfca-ig"; did you mean "dfca-gi"'),
        (
            "run tiny.toml --set local.learnig_rate=1",
            'error: unknown key in [local] "learnig_rate"; did you mean "lear',
        ),
        ("run tiny.toml --set local.learning_rate=-0.1", "error: local.learning_rate must be > 0, got -0.1; "),
        ("run tiny.toml --set topology.name=rings", 'error: unknown topology "rings"; did you mean "ring"'),
        ("run tiny.toml --set data.name=mnits", 'error: unknown dataset "mnits"; did you mean '),
        (
            "run tiny.toml --set clusters=7",
            "error: clusters must be <= clients (6), got 7; lower clu",
        ),
        ("run tiny.toml --workers 0", 'error: --workers must be >= 1 or "auto", got "0"'),
        ("run tiny.toml --workers two", 'error: --workers must be >= 1 or "auto", got "two"'),
        ("report . --format html", 'error: unknown format "html". Known: csv, latex, markdown, terminal'),
        (
            "report a b --save c.json",
            "error: --save and --figures take one run; call it once for each, or --together for all",
        ),
        ("run tiny.toml --seeds many", 'error: --seeds must be a number or a list such as 3,4, got "many"'),
        ("run tiny.toml --device cuda:99", 'error: device "cuda:99" is not on this machine (it has: '),
        (
            "run none.toml",
            "error: cannot read the experiment file none.toml: No such file or directory; ",
        ),
        ("data fetch mnits", 'error: unknown dataset "mnits"; did you mean '),
        (
            "run tiny.toml --clients 3",
            "error: dfca run has no option --clients; it is a key of the experiment: --set clients=3",
        ),
        (
            "run tiny.toml -q --learning-rate=0.1",
            "error: dfca run has no option --learning-rate; it is a key of the experiment: --set local.learning_rate=",
        ),
        (
            "swarm tiny.toml --clients 3",
            "error: dfca swarm has no option --clients; how many devices there are is --nodes 3",
        ),
        (
            "swarm tiny.toml --warmup-steps --nodes 4",
            "error: dfca swarm has no option --warmup-steps; it is a key of the experiment: "
            "--set algorithm.NAME.warmup_steps=VALUE",
        ),
        ("faults --worlds -3", "error: --worlds must be >= 1, got -3; leave it out for 200"),
        ("faults --worlds many", 'error: --worlds must be an integer, got "many"; leave it out for 200'),
        ("faults --minutes nan", "error: --minutes must be >= 0, got nan"),
        ("swarm tiny.toml --nodes 1", "error: --nodes must be >= 2, got 1; leave it out for 8"),
        ("swarm tiny.toml --seed 1,2", 'error: --seed must be an integer, got "1,2"; leave it out for the first'),
        ("run tiny.toml --threads 0", "error: --threads must be >= 1, got 0; leave it out for as many as are free and"),
        ("node init k --data a.csv --expect 0", "error: --expect must be >= 1, got 0; leave it out for 1"),
        ("node init k --data a.csv --expect 1000000", "error: --expect must be <= 100000, got 1000000; leave it out"),
        ("node init k --data a.csv --port x", 'error: --port must be an integer, got "x"; leave it out for 7447'),
        ("node invite k --minutes 0", "error: --minutes must be >= 0.1, got 0; leave it out for 10"),
    ],
)
def test_a_bad_value_ends_with_one_sentence_and_status_2(tiny: Path, arguments: str, sentence: str) -> None:
    assert error(*arguments.split(), status=2).startswith(sentence)
    assert not Path("runs").exists()


def test_a_folder_of_another_config_is_refused_with_status_1(finished: Path) -> None:
    assert error("run", "tiny.toml", "--set", "rounds=5", "-q", status=1) == (
        "error: runs/tiny holds a run of another config: rounds is 4 there and 5 here; use --out for another folder, "
        "or --no-resume to discard this one"
    )
    assert call("run", "tiny.toml", "--set", "rounds=5", "-q", "--algorithms", "local", "--no-resume").exit_code == 0
    assert [row["rounds"] for row in json.loads(Path("runs/tiny/summary.json").read_text())["runs"]] == [5]


@pytest.mark.parametrize("option", ["--figure-width", "--font-size"])
def test_figures_of_no_size_are_refused(finished: Path, tmp_path: Path, option: str) -> None:
    said = error("report", str(finished), "--figures", str(tmp_path / "figures"), option, "0", status=2)
    assert "figures must be 1 to 40 inches wide, letters 3 to 40" in said
    assert "need --figures DIR" in error("report", str(finished), option, "0", status=2)


def test_a_report_of_nothing_is_refused() -> None:
    assert error("report", ".", status=1).startswith("error: . is not a run folder (it has no summary.json)")


@pytest.mark.parametrize(
    ("raised", "status", "sentence"),
    [
        (
            ZeroDivisionError("by zero"),
            1,
            "error: unexpected ZeroDivisionError: by zero; run again with --debug to see whe",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            1,
            "error: no space left on the disk (/x); free some and run the same command again",
        ),
        (KeyboardInterrupt(), 130, "interrupted; the same command continues"),
        (Interrupted("interrupted at round 3"), 130, "interrupted at round 3"),
    ],
)
def test_what_goes_wrong_inside_is_one_sentence(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, sentence: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(runner, "run", fail)
    assert error("run", str(tiny), "-q", status=status).startswith(sentence)


@pytest.mark.parametrize("arguments", [("--debug", "run", "quikstart"), ("run", "quikstart", "--debug")])
def test_debug_lets_the_error_through(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith('unknown preset "quikstart"')


def test_ctrl_c_in_a_real_process_ends_with_130_and_one_line(tiny: Path, tmp_path: Path) -> None:
    command = ["-m", "dfca", "run", str(tiny), "--set", "rounds=100000", "--set", "evaluation.every=1"]
    process = Forked(command, os.environ, tmp_path, "interrupted")
    metrics, deadline = Path("runs/tiny/metrics/dfca-gi-0.jsonl"), time.monotonic() + 300
    while (not metrics.exists() or metrics.stat().st_size == 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.startswith("interrupted at round ")
    assert errors.endswith(" of 100000 of dfca-gi, seed 0; the same command continues\n")
    assert errors.count("\n") == 1
    assert list(Path("runs/tiny/checkpoint/dfca-gi-0").glob("round-*.safetensors"))
