"""Measure what `dfca watch` costs while it follows a run: its CPU time, the delay, and the bytes of the page.

    python docs/measure_watch.py [SECONDS]

It starts a run of 240 clients that is evaluated every round, watches it as one open page does (the stream, and the
clusters of the newest trial after every change), and prints one line per measure.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import psutil

DFCA = (sys.executable, "-m", "dfca")
RUN = ("--algorithms", "dfca-auto,dfca-gi", "--seeds", "1", "--quiet", "--threads", "1", "--workers", "1")
SETTINGS = ("clients=240", "rounds=100000", "evaluation.every=1", "data.samples_per_client=20")
PAGE = ("", "style.css", "main.js", "charts.js", "graph.js", "format.js")


def main(seconds: float) -> None:
    """Measure for some seconds."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        run = subprocess.Popen([*DFCA, "run", "quickstart", *RUN, *settings, "--out", str(folder)])
        watch = None
        try:
            while not list(folder.glob("metrics/*.jsonl")):
                if run.poll() is not None:
                    raise SystemExit("the run has ended before its first evaluation")
                time.sleep(0.5)
            watch = subprocess.Popen(
                [*DFCA, "watch", str(folder), "--no-browser"], stdout=subprocess.PIPE, text=True, bufsize=1
            )
            assert watch.stdout is not None
            address = re.search(r"http://\S+", watch.stdout.readline())
            assert address is not None
            follow(address[0], folder, psutil.Process(watch.pid), seconds)
        finally:
            for process in (watch, run):
                if process is not None:
                    process.kill()
                    process.wait()


def follow(url: str, folder: Path, process: psutil.Process, seconds: float) -> None:
    """Follow the run as a page does, and print what it cost."""
    files = sum(len(read(url + name)) for name in PAGE)
    ages, received, first = [], 0, 0
    began = end = cost = 0.0
    after = -1
    with urllib.request.urlopen(url + "events") as stream:
        for line in stream:
            if not line.startswith(b"data: "):
                continue
            news = json.loads(line[6:])
            for key, trial in news.get("trials", {}).items():
                if trial["x"]:
                    query = urllib.parse.urlencode({"trial": key, "after": after})
                    answer = read(f"{url}frames?{query}")
                    frames = json.loads(answer)["frames"]
                    after = frames[-1][0] if frames else after
                    received += len(answer)
                    if first == 0:
                        first = len(line) + len(answer) + len(read(f"{url}graph?{query}"))
                        time.sleep(5)  # what loads late has loaded
                        began, cost = time.monotonic(), cpu(process)
                    elif frames:
                        ages.append(
                            time.time() - (folder / "metrics" / f"{trial['algorithm']}-0.jsonl").stat().st_mtime
                        )
            received += len(line)
            end = time.monotonic()
            if began and end - began > seconds:
                break
    passed = end - began
    print(f"CPU of dfca watch: {100 * (cpu(process) - cost) / passed:.2f} % of one core over {passed:.0f} s")
    print(f"page: {files / 1e3:.0f} kB of files, {first / 1e3:.0f} kB of data at first")
    print(f"then {received / passed / 1e3:.1f} kB/s; memory: {process.memory_info().rss / 1e6:.0f} MB")
    ages = sorted(ages)
    print(f"age of the newest line when it comes: median {ages[len(ages) // 2]:.2f} s, most {ages[-1]:.2f} s")


def cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def read(url: str) -> bytes:
    """Read one answer."""
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
