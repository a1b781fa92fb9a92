"""How many threads a run uses: by the cores that are free, by the size of the work, and always the same in one run."""

import json

import pytest
import torch

from dfca.experiment.load import load_experiment
from dfca.runs import threads
from dfca.runs.store.folder import RunFolder
from dfca.sim.local.cores import free_cores, usable_cores


@pytest.mark.parametrize(
    ("cores", "load", "free"), [(8, 0.0, 8), (8, 0.4, 8), (8, 3.2, 5), (8, 7.6, 1), (2, 50.0, 1), (1, 0.0, 1)]
)
def test_cores_that_others_keep_busy_are_not_free(cores, load, free):
    assert free_cores(cores, load) == free


@pytest.mark.parametrize(("quota", "at_most"), [("100000 100000\n", 1), ("150000 100000\n", 2), ("max 100000\n", None)])
def test_the_quota_of_a_container_bounds_the_cores(tmp_path, quota, at_most):
    (tmp_path / "cpu.max").write_text(quota)
    everything = usable_cores(tmp_path / "missing")
    assert usable_cores(tmp_path / "cpu.max") == (everything if at_most is None else min(everything, at_most))


@pytest.fixture
def busy(monkeypatch):
    """Eight usable cores, two of them busy; no number of threads is given."""
    monkeypatch.delenv(threads.ASKED_FOR, raising=False)
    monkeypatch.setattr(threads, "free_cores", lambda: 6)
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)


def test_small_work_has_one_thread_and_large_work_the_free_cores(busy, tmp_path):
    small, large = load_experiment("quickstart"), load_experiment("mnist-small")
    assert threads.choose_threads(RunFolder(tmp_path), small, 1) == 1
    assert threads.choose_threads(RunFolder(tmp_path), large, 1) == 6
    assert threads.choose_threads(RunFolder(tmp_path), large, 4) == 1


def test_a_continued_run_uses_the_threads_it_began_with_however_busy_the_machine_is_now(busy, tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"threads": 3}))
    for name in ("quickstart", "mnist-small"):
        assert threads.choose_threads(RunFolder(tmp_path), load_experiment(name), 1) == 3
    (tmp_path / "environment.json").write_text(json.dumps({"threads": "three"}))
    assert threads.choose_threads(RunFolder(tmp_path), load_experiment("mnist-small"), 1) == 6


def test_a_given_number_of_threads_counts_most(busy, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    (tmp_path / "environment.json").write_text(json.dumps({"threads": 3}))
    monkeypatch.setenv(threads.ASKED_FOR, "2")
    try:
        torch.set_num_threads(2)
        assert threads.choose_threads(RunFolder(tmp_path), load_experiment("mnist-small"), 1) == 2
    finally:
        torch.set_num_threads(before)
