"""Run folders and settings from anybody: links, pipes, devices, endless and deeply nested files end in one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dfca
from dfca.base.errors import ConfigError, DataError, RunError
from dfca.base.validation import DEEPEST, parse_toml
from dfca.cli import app
from dfca.experiment.config import MOST_SEEDS, Config
from dfca.experiment.load import load_experiment
from dfca.node.task.config import DataConfig
from dfca.node.task.csv_table import read_csv
from dfca.node.task.reading import MOST_COLUMNS, DataRequest
from dfca.runs.runner import run
from dfca.runs.store.reading import load_run
from dfca.runs.store.repair import repair
from dfca.watch.run_source import RunSource

EXPERIMENT = """
clients = 3
clusters = 1
rounds = 1
algorithms = ["local"]
data = { name = "digits", samples_per_client = 10 }
model = { name = "mlp", hidden = 4 }
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd")
    (path / "größe.toml").write_text(EXPERIMENT)
    run(load_experiment(path / "größe.toml"), path / "run", save_models=True)
    return path / "run"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


SMALL = {"clients": 3, "clusters": 1, "rounds": 1, "algorithms": ["local"]}
FILES = ["config.toml", "summary.json", "environment.json", "topology.json", "metrics/local-0.jsonl"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["device", "pipe", "link", "large"])
def test_a_report_reads_regular_files_of_bounded_size_only(
    folder: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / name
    kept = path.rename(path.with_suffix(".kept"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        shutil.copy(kept, path)
        monkeypatch.setattr("dfca.base.files.MOST_TEXT_BYTES", 16)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else kept)
    what = {"pipe": "it is a pipe", "large": "it must have at most 16 bytes, got"}.get(kind, "it is a link")
    with pytest.raises(RunError, match=what):
        load_run(folder)
    shown = CliRunner().invoke(app, ["report", str(folder)])
    assert shown.exit_code == 1
    if kind == "pipe" and name != "config.toml":
        assert any(sentence.startswith(f"{name} ") or name in sentence for sentence in repair(folder))
    elif kind == "pipe":
        with pytest.raises(RunError, match=r"config\.toml cannot be read \(it is a pipe, not a regular file\)"):
            repair(folder)


def test_a_linked_folder_of_metrics_is_not_followed(folder: Path) -> None:
    (folder / "metrics").rename(folder / "elsewhere")
    (folder / "metrics").symlink_to(folder / "elsewhere")
    with pytest.raises(RunError, match="metrics is a link, and links in a run folder are not followed; remove it"):
        load_run(folder)


def test_stored_models_are_regular_files(folder: Path) -> None:
    path = folder / "models" / "local-0.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match="it is a pipe, not a regular file"):
        dfca.load_run(folder).bank(0)


def test_an_export_follows_no_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (folder / "export").symlink_to(tmp_path / "target")
    shown = CliRunner().invoke(app, ["export", str(folder)])
    assert shown.exit_code == 1
    assert "is a link, and dfca writes to no link; remove it, or name a folder with --out" in shown.output
    assert list((tmp_path / "target").iterdir()) == []
    shown = CliRunner().invoke(app, ["export", str(folder), "--out", str(tmp_path / "target")])
    assert shown.exit_code == 0, shown.output


def test_a_terminal_without_unicode_shows_a_run(folder: Path) -> None:
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "dfca", "report", str(folder)]
    shown = subprocess.run(command, env=os.environ | ascii, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "report.html" in shown.stdout
    assert "?" in shown.stdout


def nested(*first: str) -> str:
    """Make a table that is deeper than Python's stack."""
    return f"[{'.'.join([*first, *['a'] * 5_000])}]\nb = 1\n"


def test_deeply_nested_tables_are_refused(tmp_path: Path) -> None:
    for key in ((), ("data",), ("algorithm",), ("scale",), ("grid",), ("world",)):
        (tmp_path / "deep.toml").write_text(nested(*key))
        with pytest.raises(ConfigError, match=r"deep\.toml is not valid TOML: it is nested more than 32 deep"):
            load_experiment(tmp_path / "deep.toml")
    with pytest.raises(ConfigError, match="--set takes a key of at most 32 parts, got 5001"):
        load_experiment("quickstart", overrides=[f"data.{'.'.join(['a'] * 5_000)}=1"])


@pytest.mark.parametrize("text", [nested(), f"a = {'[' * 5000}", f"a = {'[' * DEEPEST}{']' * DEEPEST}"])
def test_toml_has_a_bounded_depth(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested more than 32 deep"):
        parse_toml(text)


def test_toml_within_the_bound_is_read() -> None:
    inner = DEEPEST - 1
    assert parse_toml(f"a = {'[' * inner}{']' * inner}")["a"]


@pytest.mark.parametrize("seeds", [2_000_000, 10**30, list(range(MOST_SEEDS + 1))])
def test_millions_of_seeds_are_refused_at_once(seeds: int | list[int]) -> None:
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"at most 10000 seeds fit into one run, got \d+; use several folders"):
        Config.of({**SMALL, "seeds": seeds})
    assert time.process_time() - begin < 5.0


def test_many_seeds_are_checked_in_linear_time() -> None:
    begin = time.process_time()
    assert len(Config.of({**SMALL, "seeds": MOST_SEEDS}).seeds) == MOST_SEEDS
    with pytest.raises(ConfigError, match="seeds must not repeat a value, got 7 2 times"):
        Config.of({**SMALL, "seeds": [*range(MOST_SEEDS - 1), 7]})
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize("columns", [MOST_COLUMNS, 1_000_000])
def test_a_table_with_a_million_columns_is_refused_at_once(columns: int, tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{i}" for i in range(columns)) + "\n" + ",".join(["1"] * columns) + "\n")
    begin, request = time.process_time(), DataRequest(DataConfig(path=str(path), label="c3"), tmp_path)
    if columns > MOST_COLUMNS:
        with pytest.raises(DataError, match=r"must have at most 65536 columns, got 1000000; leave some out"):
            read_csv(path, request)
    else:
        assert read_csv(path, request).values.shape == (1, columns - 1)
    assert time.process_time() - begin < 20.0


def test_the_live_page_names_a_config_that_is_nested_too_deeply(folder: Path) -> None:
    (folder / "config.toml").write_text(nested("data"))
    file = RunSource(folder)._config
    file.poll()
    assert file.value == {}
    assert file.problem is not None
    assert "config.toml" in file.problem
