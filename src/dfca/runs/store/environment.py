"""Where a run takes place: what one needs to know when the same config gives other digits elsewhere."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import dfca
from dfca.sim.metrics_table import JsonObject


def environment(device: str) -> JsonObject:
    """Describe the machine and the versions, as environment.json holds them."""
    return {
        "dfca": dfca.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    }


def _commit() -> str | None:
    """Name the commit of the checkout that dfca runs from, if it runs from one."""
    root = Path(dfca.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
