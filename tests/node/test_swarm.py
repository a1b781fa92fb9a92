"""Swarms: an experiment on real nodes ends like a simulation, also where nodes are killed and links are cut."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from dfca.base.errors import ConfigError, RunError
from dfca.cli import app
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment
from dfca.node.disk.store import DiskStore
from dfca.node.run import WORK_THREADS
from dfca.node.run import _wait_for_end as wait_for_pipe
from dfca.runs.runner import run
from dfca.runs.signals import Interrupted
from dfca.runs.sink import NullSink
from dfca.runs.store.reading import load_run
from dfca.swarm.memory import MemoryFleet
from dfca.swarm.plan import NodeStatus, SwarmPlan, make_plan
from dfca.swarm.processes import ProcessFleet, _status
from dfca.swarm.run import FaultOptions, FaultPlan, Progress, SwarmOptions, run_swarm

TINY = {
    "clients": 8,
    "clusters": 2,
    "rounds": 12,
    "algorithms": ["dfca-auto"],
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
    options = SwarmOptions(8, "memory", limit_s=300)
    summary = run_swarm(experiment(), out, options, show=lambda progress: shown.append(len(progress.nodes)))
    (row,) = summary["runs"]
    assert (row["finished"], row["lineages"], row["nodes"], row["kills"]) == (True, 1, "memory", 0)
    assert row["cluster_accuracy"] == 1
    assert shown[0] == 8
    stored = load_run(out)  # rows and metrics agree
    assert stored.metrics[-1]["round"] == 12
    assert len(json.loads((out / "nodes.json").read_text())) == 8
    simulated = run(experiment(), tmp_path / "simulated")["runs"][0]
    assert abs(row["accuracy"] - simulated["accuracy"]) < 0.1


def test_a_swarm_whose_killed_nodes_start_slowly_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a start takes longer than the time between kills, somebody is always down: kills end with the rounds."""

    class SlowToStart(MemoryFleet):
        def __init__(self, plan: SwarmPlan) -> None:
            super().__init__(plan)
            self.down: dict[int, int] = {}

        async def kill(self, client: int) -> None:
            await super().kill(client)
            self.down[client] = 3

        async def status(self) -> list[NodeStatus]:
            self.down = {client: looks - 1 for client, looks in self.down.items() if looks}
            statuses = await super().status()
            return [one._replace(state="down") if i in self.down else one for i, one in enumerate(statuses)]

    monkeypatch.setattr("dfca.swarm.memory.MemoryFleet", SlowToStart)
    monkeypatch.setattr("dfca.swarm.run.POLL_S", 0.05)
    options = SwarmOptions(8, "memory", FaultOptions(kill_every_s=0.01), limit_s=60)
    (row,) = run_swarm(experiment(algorithms=["local"]), tmp_path / "swarm", options)["runs"]
    assert row["finished"]
    assert row["kills"] > 0


def test_killed_nodes_and_cut_links_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "swarm"
    faults = FaultOptions(kill_every_s=0.3, cut_every_s=0.5)
    (row,) = run_swarm(experiment(rounds=60), out, SwarmOptions(8, "memory", faults, limit_s=300))["runs"]
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
    assert [victim is None for victim in victims[0]] == [True, False, True, False]
    cuts = [[plan.links(now) for now in (19.0, 20.0, 41.0)] for plan in plans]
    assert cuts[0] == cuts[1]
    assert cuts[0][0] is None
    assert len(cuts[0][1]) == 2
    assert (plans[0].kills, plans[0].cuts) == (2, 2)


@pytest.mark.parametrize(
    ("values", "nodes", "sentence"),
    [
        ({"algorithms": ["ifca"]}, 8, r'^nodes cannot run "ifca"; use --algorithm with one of dfca-auto, '),
        ({"world": {"preset": "wifi"}}, 8, r"^a swarm runs in real time, and this experiment has a \[world\]"),
        ({"participation": 0.5}, 8, r"^in a swarm every node takes part, got participation = 0.5"),
        (
            {"mixing": {"private": "head"}},
            8,
            r"^mixing\.private is for algorithms that gossip whole models and draw their starts",
        ),
        ({"data": TINY["data"] | {"drift_share": 0.2}}, 8, r"^a swarm has no drift yet"),  # type: ignore[operator]
        ({}, 1, r"^--nodes must be >= 2, got 1"),
    ],
)
def test_what_nodes_cannot_run_is_refused(tmp_path: Path, values: dict[str, Any], nodes: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_swarm(experiment(**values), tmp_path / "out", SwarmOptions(nodes, "memory"))


def test_a_swarm_is_not_run_into_another_and_has_a_limit(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^the swarm was not done after 0\.01 s: node-0\d is "):
        run_swarm(experiment(rounds=100_000), tmp_path / "out", SwarmOptions(8, "memory", limit_s=0.01))
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_nodes(tmp_path: Path, number: int) -> None:
    def show(progress: Progress) -> None:
        os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match=r"^interrupted; all nodes have ended; to begin again, remove "):
        run_swarm(experiment(rounds=100_000), tmp_path / "out", SwarmOptions(4, "memory"), show=show)
    assert [thread.name for thread in threading.enumerate() if thread.name in WORK_THREADS] == []


STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


def test_a_second_signal_kills_processes_that_do_not_end(tmp_path: Path) -> None:
    fleet = ProcessFleet(make_plan(experiment(), tmp_path, NullSink()))
    for node in fleet.nodes:
        node.process = subprocess.Popen([sys.executable, "-SEc", STUBBORN], stdout=subprocess.PIPE)
        assert node.process.stdout is not None
        node.process.stdout.readline()  # the handler is in place

    async def end_twice() -> None:
        task = asyncio.ensure_future(fleet.stop())
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(end_twice())
    assert [node.process and node.process.returncode for node in fleet.nodes] == [-signal.SIGKILL] * len(fleet.nodes)
    for node in fleet.nodes:
        assert node.process is not None
        assert node.process.stdout is not None
        node.process.stdout.close()


def test_a_node_is_stopped_when_the_process_that_started_it_is_gone() -> None:
    """However that process ended, the system closes its end of the pipe. The slow test below kills a whole swarm."""

    async def scenario() -> list[bool]:
        ended, (ours, theirs) = asyncio.Event(), os.pipe()
        waiting = asyncio.create_task(asyncio.to_thread(wait_for_pipe, ours, asyncio.get_running_loop(), ended.set))
        os.write(theirs, b"what it is sent does not matter")
        await asyncio.sleep(0.05)
        seen = [ended.is_set()]
        os.close(theirs)
        await waiting
        await asyncio.wait_for(ended.wait(), 60)
        os.close(ours)
        return [*seen, ended.is_set()]

    assert asyncio.run(scenario()) == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_command_leaves_no_process(tmp_path: Path, number: int) -> None:
    out = tmp_path / "swarm"
    command = [sys.executable, "-m", "dfca", "swarm", "quickstart", "--nodes", "2", "--set", "rounds=10000"]
    swarm = subprocess.Popen(
        [*command, "--set", "clusters=2", "--set", "data.distributions=2", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + 120
    while len(list(out.glob("nodes/*/control.json"))) < 2:
        assert swarm.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    nodes = [json.loads(path.read_text())["pid"] for path in out.glob("nodes/*/control.json")]
    swarm.send_signal(number)
    shown, _ = swarm.communicate(timeout=60)
    if number == signal.SIGKILL:  # nobody waits for the nodes: they end by themselves
        end = time.monotonic() + 30
        while any(map(runs, nodes)) and time.monotonic() < end:
            time.sleep(0.1)
    else:
        assert swarm.returncode == 130
        assert "all nodes have ended" in " ".join(shown.split())
    assert not any(map(runs, nodes))


def runs(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("faults", [FaultOptions(), FaultOptions(kill_every_s=5, cut_every_s=20)])
def test_a_swarm_of_processes(tmp_path: Path, faults: FaultOptions) -> None:
    """Four processes with mutual TLS, paired by invites."""
    out = tmp_path / "swarm"
    (row,) = run_swarm(experiment(rounds=60), out, SwarmOptions(4, "grpc", faults, limit_s=240))["runs"]
    assert (row["finished"], row["lineages"], row["models"]) == (True, 1, 2)
    assert row["cluster_accuracy"] == 1


def test_the_status_of_a_process_counts_the_links_that_are_up() -> None:
    neighbours = [{"state": "up"}, {"state": "down"}, {"state": "up"}, {"state": "dead"}]
    assert _status({"state": "training", "neighbours": neighbours}).links == 2
