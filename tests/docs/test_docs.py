"""The pages: their code runs; the pictures, files and commands that they name exist; their blocks are the script's."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toy import make_toy_setting
from typer.main import get_command

from dfca.cli import app
from dfca.contracts import check_algorithm
from dfca.core.algorithm import Algorithm
from dfca.core.codec import Codec
from dfca.experiment.load import load_experiment
from dfca.experiment.reference import reference
from dfca.runs.runner import run
from dfca.sim.rounds.simulation import Simulation

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "asynchrony.md").read_text()
ROOT = DOCS.parent
PAGES = {
    path.name: path.read_text() for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md")) if path.name != "CHANGELOG.md"
}


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_pictures_of_a_page_exist(path: Path) -> None:
    for picture in re.findall(r"!\[.*?\]\(([^)]+)\)", path.read_text(), re.DOTALL):
        assert (DOCS / picture).exists(), picture


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "asynchrony.md", "exec"), {"__name__": "page"})
        assert capsys.readouterr().out


def test_algorithms_of_the_page_keep_the_contracts() -> None:
    """Every block with an algorithm has at most twenty lines, and its algorithm passes `check_algorithm`."""
    names: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGES["algorithms.md"], re.DOTALL)
    for code in blocks:
        assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
        exec(compile(code, "algorithms.md", "exec"), names)
    mine = [record for record in names.values() if isinstance(record, Algorithm)]
    assert [record.name for record in mine] == ["soft", "private-head", "patient", "cautious"]
    for record in mine:
        check_algorithm(record)
    codecs = [record for record in names.values() if isinstance(record, Codec)]
    assert [codec.name for codec in codecs] == ["largest"]
    own, ours = (
        Simulation(make_toy_setting("dfca-gi", rounds=3, codec=codec, keep=0.05)) for codec in (*codecs, "top-k")
    )
    for _ in range(3):
        own.step()
        ours.step()
    assert torch.equal(own.banks, ours.banks)


def test_the_experiment_of_the_page_runs(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "my-world.toml"
    file.write_text(text + '\n[model]\nname = "mlp"\nhidden = 8\n\n[data]\nsamples_per_client = 20\n')
    summary = run(load_experiment(file), tmp_path / "run")
    assert all(row["finished"] for row in summary["runs"])


def test_the_tables_of_keys_name_what_there_is() -> None:
    """Every key in code quotes in the table of keys is a key of its section."""
    known = {key.name.replace("[]", "") for key in reference()}
    for table, keys in re.findall(r"^\| `\[+([a-z_.]+)\]+` \| (.*) \|$", PAGE, re.MULTILINE):
        named = [key for key in re.findall(r"`([a-z_]+)`", keys) if key not in ("share", "client")]
        assert named
        assert {key for key in named if f"{table}.{key}" not in known} <= {"slowdown"}, table


def test_blocks_are_those_that_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import asynchrony_page

    for name in ("verdicts", *asynchrony_page.SHOWN):
        assert re.search(rf"<!-- {name} -->.*?<!-- end {name} -->", PAGE, re.DOTALL), name
    assert "TO BE WRITTEN" not in PAGE
    for name in ("delays", "lossy", "stragglers"):  # a row of 0 % comes with a line that says what it means
        line = asynchrony_page._explain_zeros(asynchrony_page.load(name))
        assert line in PAGE
        assert bool(line) == (name != "stragglers")
    sys.modules.pop("asynchrony_page")


def test_every_bid_has_a_tick_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    monkeypatch.syspath_prepend(str(DOCS))
    from make_docs import plot_bids

    axes = Figure().subplots()
    plot_bids(axes, [[SimpleNamespace(bid=4.0 - i, accepted=i < 2) for i in range(length)] for length in (4, 8, 3)])
    assert list(axes.get_xticks()) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert [tuple(points.get_offsets()[0]) for points in axes.collections][:2] == [(2, 4), (3, 3)]


def test_the_page_names_every_world() -> None:
    from dfca.sim.events.world import presets

    text = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])
    assert text["world"]["preset"] in presets()
    line = next(line for line in PAGE.splitlines() if line.startswith("preset = "))
    assert all(name in line for name in presets())


def is_there(name: str) -> bool:
    """Return whether a path of a document exists: from the root, from the package, or a module of it."""
    return any((place / name).exists() for place in (ROOT, ROOT / "src" / "dfca")) or (
        (ROOT / "src" / "dfca" / f"{name}.py").exists()
    )


@pytest.mark.parametrize("page", sorted(PAGES))
def test_files_that_a_page_names_exist(page: str) -> None:
    """In code quotes, what begins with a folder of the project is a path; what ends in .py is one everywhere."""
    folders = r"(?:src|tests|docs|results|benchmarks|core|peer|node|sim|report|cli|data|experiment)/"
    named = {name for name in re.findall(r"`([\w./-]+)`", PAGES[page]) if re.match(folders, name)}
    named |= set(re.findall(r"[\w/]+/\w+\.py\b", PAGES[page]))
    named.discard("src/dfca/algorithms/curious.py")  # docs/start.md says how to write it
    assert [name for name in sorted(named) if not is_there(name)] == []
    if page in ("DESIGN.md", "CONTRIBUTING.md"):
        assert len(named) > 5


@pytest.mark.parametrize("page", sorted(PAGES))
def test_commands_that_a_page_names_exist(page: str) -> None:
    known = {command.name for command in get_command(app).commands.values()}  # type: ignore[attr-defined]
    presets = {path.stem for path in (ROOT / "src/dfca/experiment/presets").glob("*.toml")}
    for command, first in re.findall(
        r"(?:^|`|-m )dfca ([a-z]+)(?: ([a-z][\w.-]*))?(?=[ `\n])", PAGES[page], re.MULTILINE
    ):
        assert command in known, command
        if command == "run" and first and not first.endswith(".toml"):
            assert first in presets, first
    makes = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z]+)", PAGES[page])) <= set(makes)


def test_the_table_of_the_design_names_every_folder() -> None:
    package = ROOT / "src" / "dfca"
    folders = {str(path.parent.relative_to(package)) for path in package.rglob("*.py")}
    assert set(re.findall(r"^\| `([a-z_./]+)` \| ", PAGES["DESIGN.md"], re.MULTILINE)) == folders


def test_no_test_imports_another_test() -> None:
    """What tests share is in tests/support: a test file can be read, moved and run alone."""
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert len(files) > 100
    shared = re.compile(r"^\s*(?:from|import) (?:\w+\.)*(?:test_\w+|conftest)\b", re.MULTILINE)
    assert [str(path) for path, text in files.items() if shared.search(text)] == []
