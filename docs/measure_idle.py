"""What a converged swarm of three nodes costs an hour: CPU, traffic and writes of one node, on the loopback.

    python docs/measure_idle.py [--settle 1300] [--seconds 900]                          # at rest
    python docs/measure_idle.py --settle 240 --seconds 180 --set training.rest_s=0       # at full pace

The data are those of docs/deploy.md: three motion sensors, one of them upside down. The nodes run for `--settle`
seconds, then one of them is watched for `--seconds`.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from dfca.node.operate.control import call

CENTRES = {"sit": (0, 2, 1, 0), "lie": (0, -2, -1, 0), "walk": (2, 0, 0, 1), "run": (-2, 0, 0, -1)}
NAMES = ("kitchen", "garage", "attic")


def write_samples(path: Path, sign: int) -> None:
    """Write 300 samples, as samples.py of the page does."""
    draw = random.Random(path.name)
    with open(path, "w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["ax", "ay", "gx", "gy", "activity"])
        for _ in range(300):
            activity = draw.choice(list(CENTRES))
            table.writerow([*(f"{sign * value + draw.gauss(0, 0.7):.3f}" for value in CENTRES[activity]), activity])


def dfca(*arguments: str) -> str:
    """Run a command of `dfca node`; returns what it prints."""
    command = [sys.executable, "-m", "dfca", "node", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start a node and wait until it answers."""
    command = [sys.executable, "-m", "dfca", "node", "run", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (folder / "control.json").exists():
        time.sleep(0.1)
    return process


def counts(folder: Path, process: psutil.Process) -> dict[str, float]:
    """Count what a node has used since it started."""
    status, times = call(folder, "status"), process.cpu_times()
    return {
        "CPU s": times.user + times.system,
        "MB sent and received": (status["bytes_in"] + status["bytes_out"]) / 1e6,
        "MB written": process.io_counters().write_bytes / 1e6,
        "saves": status["saves"]["count"],
        "rounds": status["round"],
    }


def main() -> None:
    """Run the swarm and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settle", type=float, default=1300.0)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--port", type=int, default=27447)
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    settings = [option for pair in given.set for option in ("--set", pair)]
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        try:
            for place, name in enumerate(NAMES):
                data, port = root / f"{name}.csv", given.port + 2 * place
                write_samples(data, -1 if name == "attic" else 1)
                network = ["--host", "127.0.0.1", "--port", str(port), "--set", f"network.invite_port={port + 1}"]
                mine = ["--data", str(data), *network, *settings]
                if place == 0:
                    dfca("init", str(root / name), *mine, "--label", "activity", "--clusters", "2", "--expect", "3")
                else:
                    dfca("join", str(root / name), dfca("invite", str(root / NAMES[0]), "--no-wait").strip(), *mine)
                running.append(start(root / name))
            time.sleep(given.settle)
            watched, process = root / NAMES[0], psutil.Process(running[0].pid)
            before, begin = counts(watched, process), time.monotonic()
            time.sleep(given.seconds)
            after, seconds = counts(watched, process), time.monotonic() - begin
            status = call(watched, "status")
            print(f"accuracy {status['accuracy']:.1%}, memory {process.memory_info().rss / 1e6:.0f} MB")
            for name in after:
                print(f"{name:22} {3600 * (after[name] - before[name]) / seconds:12.1f} an hour")
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


if __name__ == "__main__":
    main()
