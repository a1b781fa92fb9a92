"""Swarms: an experiment on real nodes ends like a simulation, also where nodes are killed and links are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dfca.cli import app
from dfca.errors import ConfigError, RunError
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment
from dfca.node.store import DiskStore
from dfca.runs.runner import run
from dfca.runs.store.reading import load_run
from dfca.swarm.faults import FaultOptions, FaultPlan
from dfca.swarm.run import SwarmOptions, run_swarm

TINY = {
    "clients": 8,
    "clusters": 2,
    "rounds": 12,
    "algorithms": ["dfca"],
    "data": {"name": "digits", "samples_per_client": 60, "test_samples_per_client": 20},
    "model": {"hidden": 16},
    "local": {"learning_rate": 0.5},
    "topology": {"p": 0.6},
    "evaluation": {"every": 6, "samples": 40},
}


def experiment(**values: Any) -> Experiment:
    return Experiment("tiny", "default", Config.of(TINY | values))


def test_a_swarm_in_memory_finds_the_clusters_and_leaves_a_run_folder(tmp_path: Path) -> None:
    out = tmp_path / "swarm"
    shown: list[int] = []
    options = SwarmOptions(8, "memory", limit_s=60)
    summary = run_swarm(experiment(), out, options, show=lambda progress: shown.append(len(progress.nodes)))
    (row,) = summary["runs"]
    assert (row["finished"], row["lineages"], row["nodes"], row["kills"]) == (True, 1, "memory", 0)
    assert row["cluster_accuracy"] == 1
    assert shown[0] == 8
    found = load_run(out)  # rows and metrics agree
    assert found.metrics[-1]["round"] == 12
    assert len(json.loads((out / "nodes.json").read_text())) == 8
    simulated = run(experiment(), tmp_path / "simulated")["runs"][0]
    assert abs(row["accuracy"] - simulated["accuracy"]) < 0.1


def test_killed_nodes_and_cut_links_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "swarm"
    faults = FaultOptions(kill_every_s=0.3, cut_every_s=0.5)
    (row,) = run_swarm(experiment(rounds=60), out, SwarmOptions(8, "memory", faults, limit_s=60))["runs"]
    assert row["finished"]
    assert row["kills"] > 0
    assert row["lineages"] == 1
    for i in range(8):
        saved = DiskStore(out / "nodes" / f"node-{i:02d}" / "state").load()
        assert saved is not None
        assert saved.bank is not None
        assert saved.round == 60
        assert bool(torch.isfinite(saved.bank).all())


def test_faults_are_drawn_by_the_seed() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    plans = [FaultPlan(FaultOptions(5.0, 20.0, seed=3), 4, edges) for _ in range(2)]
    victims = [[plan.victim(now) for now in (1.0, 5.0, 6.0, 10.0)] for plan in plans]
    assert victims[0] == victims[1]
    assert [each is None for each in victims[0]] == [True, False, True, False]
    cuts = [[plan.links(now) for now in (19.0, 20.0, 41.0)] for plan in plans]
    assert cuts[0] == cuts[1]
    assert cuts[0][0] is None
    assert len(cuts[0][1]) == 2
    assert (plans[0].kills, plans[0].cuts) == (2, 2)


@pytest.mark.parametrize(
    ("values", "nodes", "sentence"),
    [
        ({"algorithms": ["ifca"]}, 8, r'^nodes cannot run "ifca"; use --algorithm with one of dfca, '),
        ({"world": {"preset": "wifi"}}, 8, r"^a swarm runs in real time, and this experiment has a \[world\]"),
        ({"participation": 0.5}, 8, r"^in a swarm every node takes part, got participation = 0.5"),
        ({"data": TINY["data"] | {"drift_share": 0.2}}, 8, r"^a swarm has no drift yet"),  # type: ignore[operator]
        ({}, 1, r"^--nodes must be >= 2, got 1"),
    ],
)
def test_what_nodes_cannot_run_is_refused(tmp_path: Path, values: dict[str, Any], nodes: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_swarm(experiment(**values), tmp_path / "out", SwarmOptions(nodes, "memory"))


def test_a_swarm_is_not_run_into_another_and_has_a_limit(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^the swarm was not done after 0\.01 s: node-0\d is "):
        run_swarm(experiment(), tmp_path / "out", SwarmOptions(8, "memory", limit_s=0.01))
    with pytest.raises(RunError, match="holds a swarm already; use another --out"):
        run_swarm(experiment(), tmp_path / "out", SwarmOptions(8, "memory"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--kill-every 0", "--kill-every must be > 0 seconds, got 0"),
        ("--transport tcp", '--transport must be grpc or memory, got "tcp"'),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(arguments: str, sentence: str) -> None:
    result = CliRunner().invoke(app, ["swarm", "quickstart", *arguments.split()])
    assert result.exit_code == 2
    assert sentence in result.output


@pytest.mark.slow
@pytest.mark.parametrize("faults", [FaultOptions(), FaultOptions(kill_every_s=5, cut_every_s=20)])
def test_a_swarm_of_processes(tmp_path: Path, faults: FaultOptions) -> None:
    """Four processes with mutual TLS, paired by invites."""
    out = tmp_path / "swarm"
    (row,) = run_swarm(experiment(rounds=60), out, SwarmOptions(4, "grpc", faults, limit_s=240))["runs"]
    assert (row["finished"], row["lineages"], row["models"]) == (True, 1, 2)
    assert row["cluster_accuracy"] == 1
