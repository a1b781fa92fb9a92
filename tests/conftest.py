"""Fixtures of all tests; helpers that are imported by name are in tests/support."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

# Tensors of tests are tiny, and pytest-xdist fills the cores with processes: more threads would only wait for each
# other, and by default OpenMP waits in a busy loop. Before torch is imported, so that this holds here and in children.
# `pytest tests/benchmarks -k plain_schedule`, which needs two threads, took 6.5 s without and 2.6 s with the second.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from toy import make_once, make_toy_setting, make_toy_split, run_virtual

from dfca.data.clients import Split
from dfca.sim.setting import Setting

torch.set_num_threads(1)

# How long an example takes says how busy the machine is. Beside that, what hypothesis chose: in CI the same examples
# in every run, so that a change is judged by what it changes.
settings.register_profile("tests", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of every search for garbage, which a node begins after each large piece of work.

    `pytest -k test_three_services tests` took 4.6 s of CPU without, and takes 0.3 s.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Wait for the last round of nodes that tests have stopped: torch must not find a dying interpreter."""
    for thread in threading.enumerate():
        if thread.name in ("work", "disk"):  # `dfca.node.run.WORK_THREADS`, which loads much
            thread.join(5)


def pytest_runtest_setup() -> None:
    """Let tests draw the same numbers from the global generators, whatever the process has run before."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


@pytest.fixture
def toy_setting() -> Callable[..., Setting]:
    return make_toy_setting


@pytest.fixture
def toy_split() -> Callable[..., Split]:
    return make_toy_split


# --- run folders that are made once per test session, also where several workers run the tests

DIGITS = ("data.name=digits", "data.samples_per_client=20", "data.test_samples_per_client=10", "model.hidden=4")


def run_preset(out: Path, name: str, changes: Sequence[str], algorithms: Sequence[str] | None, seeds: int) -> None:
    """Run a preset in small, and write its report."""
    from dfca.experiment.load import load_experiment
    from dfca.report.page import write_report
    from dfca.runs.runner import run

    run(load_experiment(name, None, [*DIGITS, *changes], algorithms, seeds=seeds), out, workers=1)
    write_report(out)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five algorithms with two seeds, without a sweep. Not to be changed: copy it."""
    changes = ["clients=8", "clusters=2", "rounds=4", "evaluation.every=2"]
    changes.append('description="Half of the `<8>` clients are turned."')
    names = ["dfca-gi", "ifca", "dfedavgm", "local", "oracle"]
    return make_once(tmp_path_factory, "run", lambda out: run_preset(out, "quickstart", changes, names, 2))


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over the density of the graph. Not to be changed: copy it."""
    changes = ["clients=12", "rounds=2", "evaluation.every=1", 'grid={"topology.p"=[0.1,0.9]}']
    names = ["dfca-gi", "dfca-li"]
    return make_once(tmp_path_factory, "sweep", lambda out: run_preset(out, "figure-connectivity", changes, names, 2))


@pytest.fixture(scope="session")
def theory_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that measures the lemmas of the paper. Not to be changed: copy it."""
    changes = ["clients=8", "rounds=4"]
    return make_once(tmp_path_factory, "theory", lambda out: run_preset(out, "theory", changes, None, 1))


@pytest.fixture(scope="session")
def virtual_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep in virtual time, with traces. Not to be changed: copy it."""
    from tiny_worlds import SWEEP, TINY

    return make_once(tmp_path_factory, "virtual", lambda out: run_virtual(out, TINY | {"seeds": [0, 1]}, SWEEP))


@pytest.fixture(scope="session")
def virtual_point_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trial in virtual time, with its trace. Not to be changed: copy it."""
    from tiny_worlds import TINY

    return make_once(tmp_path_factory, "virtual-point", lambda out: run_virtual(out, TINY, None))
