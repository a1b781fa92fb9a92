"""Several ranks compute what one process does: real processes, on gloo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from forked import Forked
from ranked import RESUMED, play, worlds
from safetensors.torch import load_file
from toy import free_port, make_once

from dfca.cli import main

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"


def torchrun(folder: Path, *command: str | Path) -> Forked:
    """Start two ranks with the launcher. folder: for what they print."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    return Forked([*launcher, *command], environment(), folder, "launcher")


def start_ranks(folder: Path, count: int, *command: str | Path, **variables: str) -> list[Forked]:
    """Start ranks without a launcher. folder: for what they print."""
    shared = environment() | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [Forked(command, shared | variables | {"RANK": str(rank)}, folder, f"rank-{rank}") for rank in range(count)]


def environment() -> dict[str, str]:
    given = os.environ.get("PYTHONPATH")  # first: it may lead to a changed copy (`tests/mutants`)
    path = os.pathsep.join(filter(None, [given, str(ROOT / "src"), str(SUPPORT), str(ROOT / "tests")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Start three ranks once for all workers of pytest; they run everything in `ranked.py`."""

    def start(out: Path) -> None:
        out.mkdir(parents=True)
        ranks = start_ranks(out, 3, SUPPORT / "ranked.py", out)
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0, 0], said

    return make_once(tmp_path_factory, "ranked", start)


@pytest.mark.parametrize("world", worlds())
def test_ranks_equal_one_process(world: str, ranked: Path) -> None:
    bank, rows = play(worlds()[world])
    torch.testing.assert_close(load_file(ranked / "banks.safetensors")[world], bank, rtol=1e-9, atol=1e-11)
    on_ranks = json.loads((ranked / "rows.json").read_text())[world]
    assert len(on_ranks) == len(rows)
    for here, there in zip(rows, on_ranks, strict=True):
        assert here.keys() == there.keys()
        for key, value in here.items():
            if key in ("disagreement", "mixing_drift"):
                assert there[key] == pytest.approx(value, rel=1e-6, abs=1e-12)
            elif isinstance(value, float):
                assert there[key] == pytest.approx(value, rel=1e-9)
            elif key != "election":
                assert there[key] == value, key


@pytest.mark.parametrize("world", RESUMED)
def test_a_state_of_one_process_continues_on_several_ranks(world: str, ranked: Path) -> None:
    bank, rows = play(worlds()[world])
    torch.testing.assert_close(load_file(ranked / "resumed.safetensors")[world], bank, rtol=1e-9, atol=1e-11)
    last = json.loads((ranked / "resumed.json").read_text())[world][-1]
    for key in ("round", "assignments", "models", "messages_sent", "bytes_sent"):
        assert last[key] == rows[-1][key]


def test_more_ranks_than_clients_are_refused(ranked: Path) -> None:
    said = json.loads((ranked / "refused.json").read_text())
    assert said == "clients must be >= the 3 ranks, got 2; start fewer ranks"


EXPERIMENT = """
clients = 6
clusters = 2
rounds = {rounds}
algorithms = ["dfca-li"]
topology = {{ name = "ring" }}
data = {{ name = "digits", samples_per_client = 20 }}
model = {{ name = "mlp", hidden = 16 }}
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


def dfca(*arguments: str | Path) -> None:
    """Run the command line in this process; it must end well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dfca", *map(str, arguments)])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            main()
    torch.set_num_threads(1)
    assert ended.value.code == 0


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_a_rank_that_dies_ends_the_run_with_one_sentence_and_one_process_resumes(tmp_path: Path) -> None:
    """Rank 0 is killed under torchrun, rank 1 among ranks that were started one by one."""
    run = ["run", write_experiment(tmp_path, rounds=120), "--quiet", "--out"]
    survivor, victim = start_ranks(tmp_path, 2, "-m", "dfca", *run, tmp_path / "killed-1")
    launcher = torchrun(tmp_path, "-m", "dfca", *run, tmp_path / "killed-0")
    running, deadline = {"killed-0": launcher, "killed-1": survivor}, time.monotonic() + 120
    while running:  # each as soon as it has stored something: neither may come to its end
        for name, process in list(running.items()):
            assert process.poll() is None
            if list((tmp_path / name / "checkpoint" / "dfca-li-0").glob("round-*.json")):
                os.kill(find_rank(launcher.pid, 0) if process is launcher else victim.pid, signal.SIGKILL)
                del running[name]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dfca(*run, tmp_path / "whole")
    for number, process in enumerate((launcher, survivor)):
        _, said = process.communicate(timeout=120)
        assert process.returncode != 0
        sentences = [line for line in said.splitlines() if line.startswith("error:")]
        assert len(sentences) == 1, said
        assert f"rank {1 - number} lost another rank (it was killed, ran out of memory" in sentences[0]
        killed = tmp_path / f"killed-{number}"
        assert list((killed / "checkpoint" / "dfca-li-0").glob("round-*.json"))
        dfca(*run, killed)
        assert accuracy(killed) == pytest.approx(accuracy(tmp_path / "whole"), abs=0.02)
    victim.communicate()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    run = ["run", write_experiment(tmp_path, rounds=100_000), "--quiet", "--out", tmp_path / "run"]
    launcher = torchrun(tmp_path, "-m", "dfca", *run)
    wait_until(lambda: bool(list((tmp_path / "run" / "checkpoint" / "dfca-li-0").glob("round-*.json"))))
    ranks = [find_rank(launcher.pid, rank) for rank in range(2)]
    launcher.kill()
    launcher.communicate()
    try:
        wait_until(lambda: not any(map(runs, ranks)))
    finally:
        for rank in filter(runs, ranks):
            os.kill(rank, signal.SIGKILL)


def runs(process: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its new parent."""
    with suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
def test_a_rank_that_hangs_in_a_call_says_its_sentence_before_torchrun_kills_it(place: str, tmp_path: Path) -> None:
    ranks = start_ranks(tmp_path, 2, "-c", HANGING, place, TORCHELASTIC_RUN_ID="none")
    try:
        for rank in ranks:
            rank.wait_for_output("met\n")
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


def test_an_error_of_every_rank_is_said_once(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path, rounds=2)
    run = ["run", experiment, "--quiet", "--out", tmp_path / "run"]
    ranks = start_ranks(tmp_path, 2, "-m", "dfca", *run, "--set", "model.name=cnn")
    said = [line for rank in ranks for line in rank.communicate(timeout=120)[1].splitlines()]
    (sentence,) = [line for line in said if line.startswith("error:")]
    assert 'model "cnn" needs samples with 3 dimensions' in sentence
    assert all(rank.returncode for rank in ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_several_workers_are_refused_by_the_first_rank_alone(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write_experiment(tmp_path, rounds=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(
        sys, "argv", ["dfca", "run", str(experiment), "--quiet", "--out", str(tmp_path / "run"), "--workers", "2"]
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main()
    torch.set_num_threads(1)
    assert ended.value.code
    said = " ".join(capsys.readouterr().err.split())
    assert ("--workers must be 1 where several ranks share each" in said) == (rank == 0)


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
    script = ROOT / "docs" / "two_machines.sh"
    command = ["sh", script, tmp_path / "logs", "dfca", "run", experiment, "--quiet", "--out", tmp_path / "two"]
    subprocess.run(
        command, env=environment() | {"PYTHON": sys.executable}, check=True, capture_output=True, timeout=300
    )
    alone = [sys.executable, "-m", "dfca", "run", experiment, "--quiet", "--out", tmp_path / "one"]
    subprocess.run(alone, env=environment(), check=True, capture_output=True, timeout=300)
    assert accuracy(tmp_path / "two") == pytest.approx(accuracy(tmp_path / "one"), abs=0.02)
