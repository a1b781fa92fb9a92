"""The other libraries, and a virtual environment for each, made once and kept in a cache folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurements import Skip

LONGEST_S = 1800.0
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Library:
    """A library to compare with.

    installs: the arguments of one `pip install` after the other. differs: what it does differently from us.
    least: how many times longer it should take than we do. needs: the lowest Python that it runs with, as (3, 12).
    processes: whether it works in several, whose processor time is not counted.
    """

    name: str
    script: str
    installs: tuple[tuple[str, ...], ...]
    differs: str
    least: float = 1.0
    needs: tuple[int, int] = (3, 11)
    processes: bool = False


# gossipy and fluke require many packages that this work does not use: those in use are named, and the scripts stub
# the others.
LIBRARIES = (
    Library(
        "Flower 1.41.0",
        "run_flower.py",
        ((TORCH, "flwr[simulation]==1.41.0"),),
        "a server averages all models and sends the mean to all; clients run in Ray actors, models are serialised",
        least=5.0,
        processes=True,
    ),
    Library(
        "gossipy 0.0.1",
        "run_gossipy.py",
        (
            (TORCH, "numpy", "scipy", "pandas", "scikit-learn", "networkx", "matplotlib", "dill", "rich", "tqdm"),
            ("--no-deps", "gossipy-dfl==0.0.1"),
        ),
        "a client sends to one random neighbour per round, not to all; the receiver merges the two models and trains",
    ),
    Library(
        "fluke 0.8.1",
        "run_fluke.py",
        (
            (TORCH, "numpy", "pandas", "scikit-learn", "networkx", "matplotlib", "seaborn", "rich", "typer", "pyyaml"),
            ("cerberus", "datasets", "diskcache", "hydra-core", "omegaconf", "psutil", "requests", "tensorboard"),
            (TORCH, "torchmetrics"),
            ("--no-deps", "fluke-fl==0.8.1"),
        ),
        "a client sends to one random neighbour per round, and only clients that received one train; "
        "the time is scaled to all clients",
    ),
    Library(
        "BlazeFL 2.0.3",
        "run_blazefl.py",
        ((TORCH, "numpy", "tqdm", "blazefl==2.0.3"),),
        "a server averages all models and sends the mean to all; of its trainers, one by one and in a pool of threads, "
        "the faster",
        needs=(3, 12),
    ),
    Library(
        "pfl-research 0.6.0",
        "run_pfl.py",
        # Its accountants of privacy are imported and not used: the script stubs them.
        ((TORCH, "numpy", "scipy", "multiprocess", "packaging"), ("--no-deps", "pfl==0.6.0")),
        "a server averages the updates of all users, who train one after the other",
    ),
)

AUTHORS = Library(
    "authors' code",
    "run_authors.py",
    ((TORCH, "numpy"),),
    "the public code of DFCA's authors, k = 1; a client averages with 1 to 14 random others, pair by pair",
)


def libraries() -> tuple[Library, ...]:
    """List the libraries, with the authors' code where DFCA_AUTHORS names a clone of it."""
    return (*LIBRARIES, *([AUTHORS] if os.environ.get("DFCA_AUTHORS") else []))


def default_cache() -> Path:
    """Name the folder of the environments in the user's cache."""
    import pooch  # late: only this function needs it, and it imports requests

    return Path(pooch.os_cache("dfca")) / "bench"


def environment_of(library: Library, cache: Path) -> Path:
    """Find or make the virtual environment of a library; return its Python.

    Raises Skip where the library cannot be installed, with the error of pip, or lacks its Python.
    """
    base = python_for(library)
    folder = cache / re.sub(r"[^a-z0-9.]+", "-", library.name.lower())
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    ready = folder / "ready.json"
    wanted = json.dumps({"installs": library.installs, "python": base}, indent=1)
    if ready.exists() and ready.read_text() == wanted:
        return python
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([base, "-m", "venv", str(folder)], library)
    for arguments in library.installs:
        _run([str(python), "-m", "pip", "install", "--quiet", *arguments], library)
    ready.write_text(wanted)
    return python


def python_for(library: Library) -> str:
    """Find a Python that a library runs with: this one, or one of the search path. Raises Skip where there is none."""
    if sys.version_info >= library.needs:
        return sys.executable
    for minor in range(library.needs[1], library.needs[1] + 3):
        if found := shutil.which(f"python3.{minor}"):
            return found
    raise Skip(f"{library.name} needs Python {library.needs[0]}.{library.needs[1]} or newer, which is not in PATH")


def script_of(library: Library) -> Path:
    """Find the script that runs inside the library's environment."""
    return Path(__file__).with_name(library.script)


def _run(command: list[str], library: Library) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise Skip(f"{library.name} was not installed within {LONGEST_S / 60:.0f} minutes") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        reason = re.sub(r"\S+://\S+", "...", errors[-1]) if errors else f"exit status {done.returncode}"
        raise Skip(f"{library.name} cannot be installed: {reason.removeprefix('ERROR: ')[:200]}")
