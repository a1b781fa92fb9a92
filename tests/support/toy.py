"""Small settings that tests share: numbers a person can follow."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from filelock import FileLock
from torch import nn

from dfca import algorithms
from dfca.core.algorithm import Algorithm
from dfca.core.learning.local import LocalOptions
from dfca.data.clients import Split
from dfca.sim.setting import Setting


def make_toy_split(clients: int = 6, clusters: int = 2, samples: int | list[int] = 12, seed: int = 0) -> Split:
    """Make clients whose labels are one linear rule per cluster: separable, tiny, and clearly different."""
    generator = torch.Generator().manual_seed(seed)
    rules = torch.randn(clusters, 4, 3, generator=generator)
    truth = torch.arange(clients) % clusters
    sizes = [samples] * clients if isinstance(samples, int) else samples

    def draw(n: int, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, 4, generator=generator)
        return x, (x @ rules[cluster]).argmax(dim=1)

    train = [draw(n, int(c)) for n, c in zip(sizes, truth, strict=True)]
    test = [draw(8, int(c)) for c in truth]
    return Split.of_clients(train, test, clusters=truth, classes=3)


def make_toy_model(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Make a network whose training is written out in `learning.dense`; any other takes several times as long."""
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3))


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """List rows of one value per axis so that every pair of values of two axes stands together in some row.

    Greedy and deterministic: a row begins with the first pair that is missing, and each further axis takes the value
    that adds most missing pairs. Values must be hashable.
    """
    names = list(axes)
    missing = {
        ((a, x), (b, y)): None for a, b in combinations(names, 2) for x in axes[a] for y in axes[b]
    }  # a dict: sets have no order

    def new(row: dict[str, Any], name: str, value: Any) -> int:
        ends = ((other, kept) for other, kept in row.items())
        return sum(((end, (name, value)) in missing) + (((name, value), end) in missing) for end in ends)

    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in names:
            if name not in row:
                row[name] = max(axes[name], key=lambda value: new(row, name, value))
        row = {name: row[name] for name in names}
        for pair in combinations(row.items(), 2):
            missing.pop(pair, None)
        rows.append(row)
    return rows


def quick(algorithm: str) -> Algorithm:
    """Make an algorithm whose election, if it holds one, warms up in a few steps."""
    elects = algorithms.get(algorithm).start == "elected"
    return algorithms.get(algorithm, warmup_steps=5) if elects else algorithms.get(algorithm)


def make_toy_setting(algorithm: Any = "dfca-gi", **changes: Any) -> Setting:
    split = changes.pop("split", None) or make_toy_split()
    clients = len(split.train.sizes)
    fields: dict[str, Any] = {
        "split": split,
        "graph": nx.cycle_graph(clients),
        "make_model": make_toy_model,
        "algorithm": algorithms.get(algorithm) if isinstance(algorithm, str) else algorithm,
        "clusters": 2,
        "rounds": 4,
        "seed": 3,
        "local": LocalOptions(steps=2, learning_rate=0.3),
        "evaluate_every": 2,
        "dtype": torch.float64,
        "personal_steps": 0,  # `dfca-auto` would take 200 steps per client; tests/core/test_personal.py asks for them
    }
    return Setting(**{**fields, **changes})


# Below those that the system gives to connections, which come and go by the thousand in other tests; where each process
# of pytest begins differs, and none is given twice.
PORTS = iter(range(20_000 + os.getpid() * 37 % 1000 * 11, 32_700, 11))


def free_port(count: int = 1) -> int:
    """Find up to 11 free ports in a row; return the first."""
    for base in PORTS:
        try:
            for port in range(base, base + count):
                with socket.socket() as trial:
                    trial.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base
    raise AssertionError


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first worker to come has filled; the others wait for it."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder, made = root / "once" / name, root / f"{name}.made"
    with FileLock(root / f"{name}.lock"):
        if not made.exists():
            make(folder)
            made.touch()
    return folder


def run_virtual(out: Path, values: dict[str, Any], sweep: Any) -> None:
    """Run an experiment in virtual time, and write its report."""
    from dfca.experiment.load import Experiment
    from dfca.experiment.sweep import NO_SWEEP
    from dfca.report.page import write_report
    from dfca.runs.runner import run

    sweep = sweep or NO_SWEEP
    run(Experiment("tiny", "default", sweep.base(values), sweep), out, workers=1)
    write_report(out)
