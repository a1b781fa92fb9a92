"""`ranks`: the same experiment in one process with all threads, and sharded over processes by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from benchmarks.measurements import Row, Skip, Tick
from dfca.base.memory import peak_bytes
from dfca.data.registry import catalogue

POLL_S = 0.1
PHASES = ("assign", "train", "mix")


@dataclass(frozen=True)
class RanksPlan:
    """The experiment, as a TOML file would hold it, the number of ranks, and how often both run."""

    experiment: dict[str, Any]
    ranks: int
    repeats: int
    count: int = 2


def make_plan(quick: bool) -> RanksPlan:
    """Choose MNIST where it is in the cache, otherwise digits; N = 240 either way, and models of 3 GB together, beside
    which the data set that every rank reads is small."""
    mnist = any(entry.name == "mnist" and entry.ready for entry in catalogue())
    samples = (50 if quick else 100) if mnist else 20
    hidden = (200 if quick else 1000) if mnist else (2000 if quick else 10_000)
    experiment = {
        "clients": 240,
        "clusters": 4,
        "rounds": 2 if quick else 5,
        "algorithms": ["dfca-gi"],
        "seeds": [0],
        "data": {
            "name": "mnist" if mnist else "digits",
            "samples_per_client": samples,
            "test_samples_per_client": 5,
        },
        "model": {"name": "mlp", "hidden": hidden},
        "topology": {"name": "erdos-renyi", "p": 0.1},
        "evaluation": {"every": 1000},
    }
    return RanksPlan(experiment, ranks=2, repeats=1 if quick else 3)


def rows(plan: RanksPlan, tick: Tick) -> Iterator[Row]:
    """Run both in turn, then yield a row for time and one for memory."""
    data, model = plan.experiment["data"], plan.experiment["model"]
    about = (
        f"N = {plan.experiment['clients']}, {data['name']}, {data['samples_per_client']} samples, "
        f"MLP {model['hidden']}, k = {plan.experiment['clusters']}"
    )
    one, many = f"1 process, {plan.ranks} threads", f"{plan.ranks} ranks"
    names = (f"time of {many}", f"memory of a rank of {plan.ranks}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(plan.ranks), "-m", "dfca"]
    commands = {one: [sys.executable, "-m", "dfca"], many: torchrun}
    threads = {one: plan.ranks, many: 1}
    seconds: dict[str, list[float]] = {one: [], many: []}
    memory: dict[str, list[float]] = {one: [], many: []}
    try:
        tick("memory without clients")
        base = run_once(commands[one], tiny(plan.experiment), 1).memory
        for repeat in range(plan.repeats):
            for subject, command in commands.items():
                tick(f"{subject}, {repeat + 1} of {plan.repeats}")
                measured = run_once(command, plan.experiment, threads[subject])
                seconds[subject].append(measured.seconds)
                memory[subject].append(max(1, measured.memory - base))
    except Skip as reason:
        yield from [Row(name, about, skipped=str(reason)) for name in names]
        return
    yield Row(names[0], f"{about}; per round", seconds, of=many, to=one, most=1.2)
    yield Row(names[1], f"{about}; the larger rank, libraries not counted", memory, "bytes", many, one, most=0.6)


@dataclass(frozen=True)
class Found:
    """Seconds per round, and the peak memory of the largest process."""

    seconds: float
    memory: int


def run_once(command: list[str], experiment: dict[str, Any], threads: int) -> Found:
    """Run an experiment in a temporary folder, and poll the memory of its processes meanwhile.

    Raises Skip with its error message where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="dfca-bench-") as folder:
        path, out = Path(folder) / "ranks.toml", Path(folder) / "run"
        path.write_text(tomli_w.dumps(experiment))
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, "run", str(path), "--out", str(out), "--threads", str(threads), "--quiet"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
            peaks: dict[int, int] = {}
            try:
                while process.poll() is None:
                    for pid, peak in peaks_under(process.pid).items():
                        peaks[pid] = max(peak, peaks.get(pid, 0))
                    time.sleep(POLL_S)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            output = [line.strip() for line in log.read_text().splitlines() if line.strip()]
            error = next((line for line in output if line.startswith("error:")), output[-1] if output else "")
            raise Skip(f"the run failed: {error[:200]}")
        lines = next(out.rglob("metrics/*.jsonl")).read_text().splitlines()
        spent = json.loads(lines[-1])["seconds"]
        return Found(sum(spent[phase] for phase in PHASES) / experiment["rounds"], max(peaks.values(), default=0))


def peaks_under(root: int) -> dict[int, int]:
    """Read the peak memory of a process and all below it, by id."""
    peaks = {}
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(root)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error, OSError):  # it ended meanwhile
                peaks[process.pid] = peak_bytes(process.pid)
    return peaks


def tiny(experiment: dict[str, Any]) -> dict[str, Any]:
    """Shrink an experiment until almost only the libraries take memory."""
    data = {**experiment["data"], "samples_per_client": 2, "test_samples_per_client": 2}
    return {**experiment, "clients": 8, "rounds": 1, "data": data, "model": {**experiment["model"], "hidden": 4}}
