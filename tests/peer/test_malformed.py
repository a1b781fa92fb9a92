"""Malformed files and values: a sentence, never a traceback or an "unexpected ...Error", no hang, and nothing lost."""

from __future__ import annotations

import json
import shutil
import string
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dfca.base.errors import DfcaError, RunError
from dfca.cli import app
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment, load_experiment, preset_text
from dfca.experiment.reference import reference
from dfca.experiment.sweep import Point, Trial
from dfca.runs.store.checkpoints import Checkpoint, Checkpoints
from dfca.runs.store.folder import RunFolder
from dfca.runs.store.reading import load_run
from dfca.runs.store.repair import repair

few = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
many = settings(few, max_examples=40)

FILES = ("summary.json", "environment.json", "topology.json", "metrics/ifca-1.jsonl", "metrics/local-0.jsonl")
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(string.printable, max_size=8),
    st.sampled_from([[], {}, [[]], {"a": {}}, "x" * 5000, 1e308, -1]),
)


@st.composite
def byte_changes(draw: Any) -> Any:
    """Draw a way to damage bytes: cut off, a piece overwritten, a piece twice, a line lost."""
    kind = draw(st.sampled_from(["cut", "overwrite", "repeat", "drop a line"]))
    at, size, junk = draw(st.floats(0, 1)), draw(st.integers(1, 40)), draw(st.binary(min_size=1, max_size=12))

    def change(data: bytes) -> bytes:
        place = int(at * len(data))
        if kind == "cut":
            return data[:place]
        if kind == "overwrite":
            return data[:place] + junk + data[place + len(junk) :]
        if kind == "repeat":
            return data[: place + size] + data[place:]
        lines = data.split(b"\n")
        return b"\n".join(lines[: int(at * (len(lines) - 1))] + lines[int(at * (len(lines) - 1)) + 1 :])

    return change


@st.composite
def json_changes(draw: Any) -> Any:
    """Draw a way to change one value somewhere inside a JSON text, line by line where there are lines."""
    steps, value, remove = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5)), draw(JUNK), draw(st.booleans())

    def change(data: bytes) -> bytes:
        try:
            whole = json.loads(data)
            lines = [whole]
        except ValueError:
            lines = [json.loads(line) for line in data.splitlines()]
        inner: Any = lines
        for depth, step in enumerate(steps):
            if not isinstance(inner, dict | list) or not inner:
                break
            place = list(inner)[step % len(inner)] if isinstance(inner, dict) else step % len(inner)
            below = inner[place]
            if depth == len(steps) - 1 or not isinstance(below, dict | list) or not below:
                if remove:
                    del inner[place]
                else:
                    inner[place] = value
            inner = below
        return "\n".join(map(json.dumps, lines)).encode("utf-8", "replace") + b"\n"

    return change


@pytest.fixture(scope="module")
def copy(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("malformed") / "run"
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("report.html", "figures", ".lock"))
    return folder


def contents(folder: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def report_and_repair(folder: Path, name: str, data: bytes) -> None:
    """Put bytes into a file: a report says a sentence and changes nothing, a repair loses nothing and is enough."""
    path, original = folder / name, (folder / name).read_bytes()
    untouched = {file: (folder / file).read_bytes() for file in FILES}
    path.write_bytes(data)
    try:
        before = contents(folder)
        result = CliRunner().invoke(app, ["report", str(folder), "--format", "csv"])
        assert_sentence(result)
        assert contents(folder) == before, "a report changed a file"
        assert_sentence(CliRunner().invoke(app, ["repair", str(folder)]))
        assert not set(before) - set(contents(folder)), "a repair lost bytes"
        RunFolder(folder).summary()  # raises where it cannot be continued
    finally:
        path.write_bytes(original)
        for file, kept in untouched.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(kept)
        shutil.rmtree(folder / "damaged", ignore_errors=True)


def assert_sentence(result: Any) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2, 3)
    assert "Traceback" not in result.output
    assert "unexpected" not in result.output
    if result.exit_code:
        assert result.output.strip().startswith(("error:", "Usage:")), result.output


@pytest.mark.parametrize("name", FILES)
def test_files_that_hold_something_else(copy: Path, name: str) -> None:
    for text in (
        "",
        "\ufeff{}",
        "null",
        "[]",
        "[" * 3000,
        '{"runs": 3}',
        '{"runs": [3]}',
        "{}",
        '{"a": NaN}',
        "9" * 5000,
        "\x00",
    ):
        report_and_repair(copy, name, text.encode())
    report_and_repair(copy, name, b"\xff\xfe\x00" * 9)


@few
@given(name=st.sampled_from(FILES), change=byte_changes())
def test_files_with_damaged_bytes(copy: Path, name: str, change: Any) -> None:
    report_and_repair(copy, name, change((copy / name).read_bytes()))


@many
@given(name=st.sampled_from(FILES), change=json_changes())
def test_files_with_values_of_another_kind(copy: Path, name: str, change: Any) -> None:
    report_and_repair(copy, name, change((copy / name).read_bytes()))


# --- configs


@few
@given(change=byte_changes())
def test_experiment_files_with_damaged_bytes(tmp_path_factory: pytest.TempPathFactory, change: Any) -> None:
    path = tmp_path_factory.mktemp("toml") / "own.toml"
    path.write_bytes(change(preset_text("late-joiner").encode()))
    with suppress(DfcaError):  # a sentence
        load_experiment(path)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "{a=" * 3000, "rounds = " + "9" * 5000, "\x00", "[grid]\na=1"]
)
def test_experiment_files_that_are_no_experiment(tmp_path: Path, text: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(DfcaError):
        load_experiment(path)
    with pytest.raises(DfcaError):
        load_experiment("quickstart", overrides=[text.replace("a = ", "rounds = ")])


@many
@given(
    key=st.sampled_from([field.name for field in reference()]),
    value=st.one_of(
        JUNK.map(str),
        st.sampled_from(["nan", "-inf", "[]", "{}", "[[1]]", '""', "'", "[1,", "1979-05-27", "=", "0x1F", "[" * 500]),
    ),
)
def test_values_of_the_command_line(key: str, value: str) -> None:
    preset = "late-joiner" if key.startswith(("world", "clock")) else "quickstart"
    with suppress(DfcaError):  # a sentence
        load_experiment(preset, overrides=[f"{key}={value}"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "no-such-preset"],
        ["run", "quickstart", "--set", "rounds"],
        ["run", "quickstart", "--set", "clients=1000000000000"],
        ["run", "quickstart", "--seeds", "a,b"],
        ["run", "quickstart", "--seeds", "-3"],
        ["run", "quickstart", "--workers", "none"],
        ["run", "quickstart", "--threads", "0"],
        ["run", "quickstart", "--threads", "99999"],
        ["run", "quickstart", "--algorithms", ","],
        ["run", "quickstart", "--device", "toaster"],
        ["run", "/dev/null/x.toml"],
        ["run", ""],
        ["report", "/nowhere"],
        ["report", "/dev/null"],
        ["repair", "/nowhere"],
        ["repair", "/dev/null"],
        ["replay", "/nowhere"],
        ["options", "no.such.key"],
        ["show", "../quickstart"],
        ["no-such-command"],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_arguments_of_the_command_line(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert_sentence(result)


# --- checkpoints


@few
@given(suffix=st.sampled_from([".json", ".safetensors"]), change=byte_changes())
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, change: Any
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    config = Config.of({"clients": 8, "clusters": 2, "rounds": 3, "algorithms": ["local"]})
    trial, store = Trial("local", 0, Point(config)), Checkpoints(folder)
    for number in (1, 2):
        store.save(trial, Checkpoint(number, 1.5, {"bank": torch.full((2, 3), float(number))}, {"round": number}))
    path = folder / "checkpoint" / "local-0" / f"round-000002{suffix}"
    original = path.read_bytes()
    path.write_bytes(change(original))
    latest, warnings = store.latest(trial)
    assert latest is not None
    if path.read_bytes() == original:
        assert latest.round == 2
    else:
        assert (latest.round, len(warnings)) == (1, 1)
        assert torch.equal(latest.tensors["bank"], torch.full((2, 3), 1.0))


# --- repair


def test_a_trial_that_lacks_lines_is_noticed_and_run_again(run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    path = folder / "metrics" / "ifca-1.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[1:]))
    with pytest.raises(RunError, match=r"lacks lines of metrics: ifca, seed 1, has \d of \d"):
        load_run(folder)
    opened = RunFolder(folder)
    assert ("ifca", 1, "") not in opened.finished()
    assert ("ifca", 0, "") in opened.finished()
    assert repair(folder) == [
        "ifca, seed 1: lines of metrics are missing; the next `dfca run` computes it again",
        "summary.json: it names trials that are not whole; moved to damaged/summary.json",
    ]
    assert load_run(folder).trial_counts == (9, 10)
    assert repair(folder) == []


def test_a_folder_without_its_summary_is_repaired_and_continued_to_the_same_numbers(
    run_folder: Path, tmp_path: Path
) -> None:
    from dfca.runs.runner import run

    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    before = load_run(folder)
    (folder / "summary.json").write_text("{")
    assert repair(folder) == ["summary.json: it is not JSON; moved to damaged/summary.json"]
    experiment = Experiment(
        "quickstart", "default", Config.of(before.config).model_copy(update={"algorithms": ("local",)})
    )
    run(experiment, folder)
    after = load_run(folder)
    scores = {(row.algorithm, row.seed): row.score for row in before.trials}
    rows = [row for row in after.trials if row.finished]
    assert {row.algorithm for row in rows} == {"local"}
    assert all(row.score == scores[row.algorithm, row.seed] for row in rows)
