"""Rows that were measured anew stand in a file of results beside the older ones, each with its commit."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dfca.report.results import load_results, save_results, stored_run
from dfca.report.rows import RunReport
from dfca.runs.store.reading import Run, load_run
from dfca.runs.store.rows import TrialRow

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("merge_results")


def on_commit(run: Run, commit: str | None, accuracy: float, algorithm: str) -> Run:
    """Make a run that has one algorithm of another, with scores of its own."""
    trials = [trial.changed(accuracy=accuracy) for trial in run.trials if trial.algorithm == algorithm]
    return replace(run, environment={"commit": commit}, trials=trials)


def test_new_rows_replace_old_ones_and_keep_their_commit(script: Any, run_folder: Path, tmp_path: Path) -> None:
    run = load_run(run_folder)
    first, second = run.algorithms[:2]
    both = replace(run, environment={"commit": None})
    merged = script.merge(both, on_commit(run, "abc", 0.25, second))
    save_results(RunReport.of(merged), tmp_path / "merged.json")
    rows = load_results(tmp_path / "merged.json")["runs"]
    assert {(row["algorithm"], row["commit"]) for row in rows if row["algorithm"] in (first, second)} == {
        (first, None),
        (second, "abc"),
    }
    assert {row["accuracy"] for row in rows if row["algorithm"] == second} == {0.25}
    assert len(rows) == len(run.trials)


def test_courses_and_timelines_of_old_rows_stay(script: Any) -> None:
    old = stored_run(DOCS.parent / "results" / "late-joiner.json")
    courses = [course for course in old.head["courses"] if course["algorithm"] == "dfca-auto"]
    anew = [course | {"megabytes": [7.0]} for course in courses]
    new = on_commit(old, "abc", 0.25, "dfca-auto")
    merged = script.merge(old, replace(new, head=old.head | {"courses": anew, "timelines": []}))
    assert [trial.algorithm for trial in merged.trials] == [trial.algorithm for trial in old.trials]
    assert {trial["accuracy"] for trial in merged.trials if trial.algorithm == "dfca-auto"} == {0.25}
    first, last = (old.head["courses"].index(course) for course in (courses[0], courses[-1]))
    assert merged.head["courses"] == [*old.head["courses"][:first], *anew, *old.head["courses"][last + 1 :]]
    kept = [line for line in old.head["timelines"] if line["algorithm"] != "dfca-auto"]
    assert sorted(map(str, merged.head["timelines"])) == sorted(map(str, kept))


def test_other_settings_and_other_graphs_are_refused(script: Any, run_folder: Path) -> None:
    run = load_run(run_folder)
    with pytest.raises(SystemExit, match=r"the settings differ.*rounds"):
        script.merge(run, replace(run, config=run.config | {"rounds": 7}))
    graphs = [replace(graph, facts={**graph.facts, "edges": graph.facts["edges"] + 1}) for graph in run.graphs]
    with pytest.raises(SystemExit, match=r"the graphs differ.*edges"):
        script.merge(run, replace(run, graphs=graphs))


def test_a_point_lists_the_algorithms_that_it_has_rows_of(script: Any) -> None:
    trials = [
        TrialRow.of({"algorithm": name, "seed": 0, "digest": digest})
        for name, digest in (("dfca-auto", "a"), ("ifca", "a"), ("dfca-auto", "b"), ("pens", "b"))
    ]
    assert script._names(trials, "a") == ["dfca-auto", "ifca"]
    assert script._names(trials, "b") == ["dfca-auto", "pens"]
