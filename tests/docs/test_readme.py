"""The Python blocks of README and CONTRIBUTING run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

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


def test_why_plain_is_not_the_default_agrees_with_the_results() -> None:
    results = (ROOT / "docs" / "results.md").read_text()
    table = results.partition("<!-- causes -->")[2].partition("<!-- end causes -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    plain = {row[0]: row[-1] for row in rows}
    (text,) = re.findall(r"^`dfca-auto, plain` is `dfca-auto` without .*?\n\n", README, re.DOTALL | re.MULTILINE)
    said = dict(reversed(pair) for pair in re.findall(r"([+−][\d.]+ ± [\d.]+) on `(\w+)`", text))
    assert said == {name: plain[name].removesuffix("†") for name in ("har", "soft")}
    assert [plain[name].endswith("†") for name in ("har", "soft", "forecast (RMSE)")] == [True, True, False]
    (better,) = re.findall(r"the better one here, by ([\d.]+) points", text)
    assert plain["quickstart"].startswith(f"−{better} ")


def test_the_first_block_finds_the_clusters() -> None:
    names: dict = {}
    exec(compile(PYTHON[0], "README.md", "exec"), names)
    found = names["result"].assignments
    assert len(set(found[::2].tolist())) == len(set(found[1::2].tolist())) == 1
    assert found[0] != found[1]
    assert names["result"].accuracy > 0.95
    assert names["bank"].shape == (2, 6)
