"""The Python blocks of README and CONTRIBUTING run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from dfca.report.results import stored_run
from dfca.report.rows import RunReport
from dfca.report.statistics import write_difference

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
PYTHON = re.findall(r"```python\n(.*?)```", README + CONTRIBUTING, re.DOTALL)


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_blocks_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


def test_commands_of_one_run_folder_agree_in_what_they_run() -> None:
    """A folder holds one config: the second of two that differ would be refused."""
    runs: dict[str, set[tuple[str, ...]]] = {}
    for line in re.findall(r"^dfca run (.*?)(?: *#.*)?$", README, re.MULTILINE):
        name, *words = line.split()
        given = dict(itertools.pairwise(words))
        scale = given.get("--scale", "desk")
        folder = given.get("--out", f"runs/{Path(name).stem}-{scale}")
        runs.setdefault(folder, set()).add((name, scale, given.get("--set", "")))
    assert len(runs) > 5
    assert [folder for folder, configs in runs.items() if len(configs) > 1] == []


def test_what_extras_change_agrees_with_the_results() -> None:
    label, differences = "dfca-auto, momentum 0.9 and last step", {}
    for name in ("quickstart", "har"):
        rows = RunReport.of(stored_run(ROOT / "results" / f"{name}.json")).rows
        (row,) = [row for row in rows if row.algorithm == label]
        assert row.reference == "dfca-auto"
        differences[name] = write_difference(row)
    (said,) = re.findall(r"They change little here \(([^)]*)\), and gain (\d) points\non `har`", README)
    assert said[0] == differences["quickstart"], "no dagger"
    assert differences["har"].startswith(f"+{said[1]}")
    assert differences["har"].endswith("†")


def test_the_first_block_finds_the_clusters() -> None:
    names: dict = {}
    exec(compile(PYTHON[0], "README.md", "exec"), names)
    found = names["result"].assignments
    assert len(set(found[::2].tolist())) == len(set(found[1::2].tolist())) == 1
    assert found[0] != found[1]
    assert names["result"].accuracy > 0.95
    assert names["bank"].shape == (2, 6)
