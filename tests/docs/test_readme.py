"""The Python blocks of README and CONTRIBUTING run, and the numbers that README states are the measured ones."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from benchmarks.bench_file import load as load_bench
from dfca.report.results import stored_run
from dfca.report.rows import RunReport
from dfca.report.statistics import write_difference

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
START = (ROOT / "docs" / "start.md").read_text()
LIBRARIES = ("dfca", "Flower", "NVFlare", "p2pfl", "PFLlib", "fluke", "decentralizepy")
PYTHON = re.findall(r"```python\n(.*?)```", README + CONTRIBUTING, re.DOTALL)


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_blocks_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


def test_commands_of_one_run_folder_agree_in_what_they_run() -> None:
    """A folder holds one config: the second of two that differ would be refused."""
    runs: dict[str, set[tuple[str, ...]]] = {}
    for line in re.findall(r"^dfca run (.*?)(?: *#.*)?$", START, re.MULTILINE):
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
    (said,) = re.findall(r"They change little here \(([^)]*)\), and gain (\d) points on `har`", START)
    assert said[0] == differences["quickstart"], "no dagger"
    assert differences["har"].startswith(f"+{said[1]}")
    assert differences["har"].endswith("†")


def test_the_first_block_finds_the_clusters_with_the_accuracies_of_the_table() -> None:
    names: dict = {}
    exec(compile(PYTHON[0], "README.md", "exec"), names)
    comparison = names["comparison"]
    for seed in range(5):
        picks = comparison["dfca-auto", seed].assignments.tolist()
        assert len(set(picks[::2])) == len(set(picks[1::2])) == 1
        assert picks[0] != picks[1]
    measured = comparison.to_pandas()["accuracy"]
    stated = re.findall(r"^\| `([a-z-]+)`: .* \| ([\d.]+) ± ([\d.]+) % \|$", README, re.MULTILINE)
    assert [name for name, *_ in stated] == ["dfca-auto", "local", "dfedavgm"]
    for name, mean, deviation in stated:
        assert 100 * measured.loc[name, "mean"] == pytest.approx(float(mean), abs=0.06)
        assert 100 * measured.loc[name, "std"] == pytest.approx(float(deviation), abs=0.06)


def test_readme_is_short_and_its_speeds_are_the_measured_ones() -> None:
    assert len(README.splitlines()) <= 150
    (cells,) = re.findall(r"^\| time of a round, dfca = 1 \| (.*) \|$", README, re.MULTILINE)
    stated = {
        name: tuple(map(int, re.findall(r"\d+", cell)))
        for name, cell in zip(LIBRARIES, cells.split(" | "), strict=True)
    }
    rows = load_bench(ROOT / "results" / "bench.json")["parts"]["peers"]["rows"]
    works = {row["name"].rpartition(", ")[0] for row in rows}
    for library in ("Flower", "fluke"):
        ratios = [row["ratio"]["median"] for row in rows if library in row["name"]]
        assert len(ratios) == len(works) >= 4
        assert stated[library] == (round(min(ratios)), round(max(ratios)))
