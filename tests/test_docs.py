"""The pages under docs/: their code runs, their pictures exist, their blocks are the script's."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment
from dfca.runs.runner import run

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "asynchrony.md").read_text()


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_pictures_of_a_page_exist(path: Path) -> None:
    for picture in re.findall(r"!\[.*?\]\(([^)]+)\)", path.read_text(), re.DOTALL):
        assert (DOCS / picture).exists(), picture


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "asynchrony.md", "exec"), {"__name__": "page"})
        assert capsys.readouterr().out


def test_the_experiment_of_the_page_runs(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "my-world.toml"
    file.write_text(text + '\n[model]\nname = "mlp"\nhidden = 8\n\n[data]\nsamples_per_client = 20\n')
    summary = run(load_experiment(file), tmp_path / "run")
    assert all(row["finished"] for row in summary["runs"])


def test_the_tables_of_keys_name_what_there_is() -> None:
    """Every key in code quotes in the table of keys is a key of its section."""
    known = Config.model_json_schema()["$defs"]
    for table, keys in re.findall(r"^\| `\[+([a-z_.]+)\]+` \| (.*) \|$", PAGE, re.MULTILINE):
        name = {"link": "Link", "faults": "Faults", "late_joiners": "LateJoiner", "partitions": "Partition"}
        last = table.rpartition(".")[2]
        section = name.get(last, last.capitalize()) + "Config"
        named = [key for key in re.findall(r"`([a-z_]+)`", keys) if key not in ("share", "client")]
        assert named
        assert set(named) - set(known[section]["properties"]) <= {"slowdown"}, section


def test_blocks_are_those_that_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import asynchrony_page

    for name in ("verdicts", *asynchrony_page.SHOWN):
        assert re.search(rf"<!-- {name} -->.*?<!-- end {name} -->", PAGE, re.DOTALL), name
    assert "TO BE WRITTEN" not in PAGE
    sys.modules.pop("asynchrony_page")


def test_the_page_names_every_world() -> None:
    from dfca.sim.events.world import presets

    text = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])
    assert text["world"]["preset"] in presets()
    line = next(line for line in PAGE.splitlines() if line.startswith("preset = "))
    assert all(name in line for name in presets())
