"""The peers, and a virtual environment for each, made once and kept in a cache folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dfca.bench.rows import Skip

LONGEST_S = 1800.0
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    installs: the arguments of one `pip install` after the other. differs: what it does otherwise than our side.
    least: how many times faster we want to be.
    """

    name: str
    script: str
    installs: tuple[tuple[str, ...], ...]
    differs: str
    least: float = 1.0


# gossipy and fluke ask for much that this work does not use; what they do use is named, and the scripts put stand-ins
# for the rest.
PEERS = (
    Peer(
        "Flower 1.41.0",
        "run_flower.py",
        ((TORCH, "flwr[simulation]==1.41.0"),),
        "a server averages all models and sends the mean to all; clients run in Ray actors, models are serialised",
        least=5.0,
    ),
    Peer(
        "gossipy 0.0.1",
        "run_gossipy.py",
        (
            (TORCH, "numpy", "scipy", "pandas", "scikit-learn", "networkx", "matplotlib", "dill", "rich", "tqdm"),
            ("--no-deps", "gossipy-dfl==0.0.1"),
        ),
        "a client sends to one random neighbour per round, not to all; "
        "whoever receives merges the two models and trains",
    ),
    Peer(
        "fluke 0.8.1",
        "run_fluke.py",
        (
            (TORCH, "numpy", "pandas", "scikit-learn", "networkx", "matplotlib", "seaborn", "rich", "typer", "pyyaml"),
            ("cerberus", "datasets", "diskcache", "hydra-core", "omegaconf", "psutil", "requests", "tensorboard"),
            (TORCH, "torchmetrics"),
            ("--no-deps", "fluke-fl==0.8.1"),
        ),
        "a client sends to one random neighbour per round, and only those with mail train; "
        "the time is scaled to all clients",
    ),
)


def environment_of(peer: Peer, cache: Path) -> Path:
    """Find or make the virtual environment of a peer; returns its Python.

    Raises Skip with what pip said where the peer cannot be installed.
    """
    folder = cache / re.sub(r"[^a-z0-9.]+", "-", peer.name.lower())
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    ready = folder / "ready.json"
    wanted = json.dumps({"installs": peer.installs, "python": sys.version.split()[0]}, indent=1)
    if ready.exists() and ready.read_text() == wanted:
        return python
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], peer)
    for arguments in peer.installs:
        _run([str(python), "-m", "pip", "install", "--quiet", *arguments], peer)
    ready.write_text(wanted)
    return python


def script_of(peer: Peer) -> Path:
    """Find the script that runs inside the peer's environment."""
    return Path(__file__).with_name(peer.script)


def _run(command: list[str], peer: Peer) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise Skip(f"{peer.name} was not installed within {LONGEST_S / 60:.0f} minutes") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = re.sub(r"\S+://\S+", "...", said[-1]) if said else f"exit status {done.returncode}"
        raise Skip(f"{peer.name} cannot be installed: {reason.removeprefix('ERROR: ')[:200]}")
