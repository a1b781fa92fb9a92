"""Several ranks compute what one process does: real processes, on gloo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from ranked import play, worlds
from safetensors.torch import load_file

HERE = Path(__file__).parent


def torchrun(ranks: int, *command: str | Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *map(str, command)]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=[2, 3])
def ranked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranked")
    command = torchrun(request.param, HERE / "ranked.py", out)
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=300)
    return out


@pytest.mark.parametrize("world", worlds())
def test_ranks_equal_one_process(world: str, ranked: Path) -> None:
    bank, rows = play(worlds()[world])
    torch.testing.assert_close(load_file(ranked / "banks.safetensors")[world], bank, rtol=1e-9, atol=1e-11)
    told = json.loads((ranked / "rows.json").read_text())[world]
    assert len(told) == len(rows)
    for here, there in zip(rows, told, strict=True):
        assert here.keys() == there.keys()
        for key, value in here.items():
            if key in ("disagreement", "mixing_drift"):
                assert there[key] == pytest.approx(value, rel=1e-6, abs=1e-12)
            elif isinstance(value, float):
                assert there[key] == pytest.approx(value, rel=1e-9)
            elif key != "election":
                assert there[key] == value, key


EXPERIMENT = """
clients = 6
clusters = 2
rounds = {rounds}
algorithms = ["dfca-li"]
topology = {{ name = "ring" }}
data = {{ name = "digits", samples_per_client = 20 }}
evaluation = {{ every = 5 }}
checkpoint = {{ every_s = 0.0 }}
"""


def write_experiment(folder: Path, rounds: int) -> Path:
    path = folder / "tiny.toml"
    path.write_text(EXPERIMENT.format(rounds=rounds))
    return path


def accuracy(run: Path) -> float:
    (row,) = json.loads((run / "summary.json").read_text())["runs"]
    assert row["finished"]
    return float(row["accuracy"])


def find_rank(launcher: int, rank: int) -> int:
    """Find the process of a rank among the children of torchrun."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked
            child = f"PPid:\t{launcher}\n" in (process / "status").read_text()
            if child and f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
    raise AssertionError(f"torchrun has no rank {rank}")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_run_with_one_sentence_and_any_number_of_ranks_resumes(
    victim: int, tmp_path: Path
) -> None:
    experiment = write_experiment(tmp_path, rounds=120)
    out, whole = tmp_path / "killed", tmp_path / "whole"
    run = ["-m", "dfca", "run", experiment, "--quiet", "--out"]
    launcher = subprocess.Popen(torchrun(2, *run, out), env=environment(), stderr=subprocess.PIPE, text=True)
    begun = out / "checkpoint" / "dfca-li-0"
    deadline = time.monotonic() + 120
    while not list(begun.glob("round-*.json")) and time.monotonic() < deadline and launcher.poll() is None:
        time.sleep(0.02)
    assert launcher.poll() is None
    os.kill(find_rank(launcher.pid, victim), signal.SIGKILL)
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    sentences = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(sentences) == 1, said
    assert f"rank {1 - victim} lost another rank (it was killed, ran out of memory" in sentences[0]
    assert list(begun.glob("round-*.json"))

    def finish(ranks: int, folder: Path) -> float:
        command = torchrun(ranks, *run, folder) if ranks > 1 else [sys.executable, *map(str, run), str(folder)]
        subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=300)
        return accuracy(folder)

    assert finish(1 if victim else 3, out) == pytest.approx(finish(1, whole), abs=0.02)


HANGING = """
import sys, time
import torch.distributed as dist
from dfca.runs.signals import StopSignal
from dfca.sim.rounds import ranks as distributed
from dfca.sim.rounds import watchdog

watchdog.GRACE_S, watchdog.PATIENCE_S = 1.0, 0.2
if sys.argv[1] == "parting":
    dist.destroy_process_group = lambda: time.sleep(60)
with distributed.joined("cpu"), StopSignal() as stop, stop.deferred():
    ranks = distributed.Ranks(2)
    ranks.either(False)
    print("met", flush=True)
    while True:
        ranks.either(False)
"""


@pytest.mark.parametrize("place", ["waiting", "parting"])
def test_a_rank_that_hangs_in_a_call_says_its_sentence_before_torchrun_kills_it(place: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = environment() | {
        "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }  # fmt: skip
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HANGING, place]
    ranks = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True)
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "met\n"
        # A stopped process keeps its connections, so that the other one waits for it.
        ranks[1].send_signal(signal.SIGSTOP if place == "waiting" else signal.SIGKILL)
        if place == "waiting":
            ranks[0].send_signal(signal.SIGTERM)
        _, said = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 1
    assert [line for line in said.splitlines() if line.startswith("error: rank 0 lost another rank (it was killed")]


def test_what_every_rank_refuses_is_said_once(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path, rounds=2)
    for extra, sentence in (
        (["--set", "model.name=cnn"], 'model "cnn" needs samples with 3 dimensions'),
        (["--workers", "2"], "--workers must be 1 where several ranks share each cell, got 2"),
        (["--set", "clients=2"], "clients must be >= the 3 ranks, got 2; start fewer ranks"),
    ):
        command = torchrun(3, "-m", "dfca", "run", experiment, "--quiet", "--out", tmp_path / "run", *extra)
        done = subprocess.run(command, env=environment(), capture_output=True, timeout=120, text=True, check=False)
        told = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert len(told) == 1, done.stderr
        assert sentence in told[0]


def can_make_networks() -> bool:
    if os.geteuid() or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "dfca-probe"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", "dfca-probe"], capture_output=True, check=False)
    return made


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    if not can_make_networks():
        pytest.skip("needs root and network namespaces")
    experiment = write_experiment(tmp_path, rounds=10)
    script = HERE.parent / "docs" / "two_machines.sh"
    command = ["sh", script, tmp_path / "logs", "dfca", "run", experiment, "--quiet", "--out", tmp_path / "two"]
    subprocess.run(
        command, env=environment() | {"PYTHON": sys.executable}, check=True, capture_output=True, timeout=300
    )
    alone = [sys.executable, "-m", "dfca", "run", experiment, "--quiet", "--out", tmp_path / "one"]
    subprocess.run(alone, env=environment(), check=True, capture_output=True, timeout=300)
    assert accuracy(tmp_path / "two") == pytest.approx(accuracy(tmp_path / "one"), abs=0.02)
