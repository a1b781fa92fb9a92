"""bench.json: what was measured, where and by which command, also if its parts were measured at different times."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import events, scaling
from benchmarks.child import call
from benchmarks.measurements import Row, Skip, ratio
from dfca.base.errors import RunError
from dfca.base.files import atomic_write
from dfca.runs.store.environment import environment

FORMAT = 1
PARTS = ("floor", "peers", "scaling", "record", "ranks", "events")
FITS = {"scaling": scaling.fits, "record": scaling.fits, "events": events.fits}
Json = dict[str, Any]


class BenchFile:
    """The bench.json of an out folder; every finished row is on the disk before the next one is measured.

    A part that is measured again replaces the old one with its first new row.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bench.json"
        self.content: Json = load(self.path) if self.path.exists() else {"format": FORMAT, "parts": {}}

    def start(self, part: str, command: str, quick: bool, where: Json) -> None:
        """Begin a part; nothing is written yet."""
        self._part = part
        self._fresh: Json = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "quick": quick,
            "finished": False,
            "environment": where,
            "rows": [],
        }

    def add(self, row: Row) -> Json:
        """Store a row; return it as JSON holds it."""
        record = row.to_json()
        self._fresh["rows"].append(record)
        if self._part in FITS:
            self._fresh["fits"] = FITS[self._part](self._fresh["rows"])
        self.content["parts"][self._part] = self._fresh
        self._write()
        return record

    def finish(self) -> None:
        """Mark the part as complete."""
        self._fresh["finished"] = True
        self._write()

    def _write(self) -> None:
        parts = self.content["parts"]
        self.content["parts"] = {name: parts[name] for name in PARTS if name in parts}
        atomic_write(self.path, json.dumps(self.content, indent=1) + "\n")


def load(path: Path) -> Json:
    """Read a bench.json.

    Raises RunError where it is not one.
    """
    try:
        content: Json = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is not a result of python -m benchmarks ({error}); move it away or use another --out"
        ) from error
    if version != FORMAT:
        raise RunError(f"{path} has format {version}, this version of dfca reads {FORMAT}; use another --out")
    return content


def machine() -> Json:
    """Describe where the bench runs: processor, cores, threads, versions, how busy it is, and what bf16 does."""
    machine = environment("cpu")
    machine["processor"] = _processor() or machine["processor"]
    machine["load"] = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    machine["bf16"] = probe_bf16()
    return machine


def probe_bf16(size: int = 1024, repeats: int = 5) -> str:
    """Compare a matrix product in bfloat16 with float32 on this machine. It runs in a child process: where a virtual
    machine advertises AMX without granting it, the process dies of an illegal instruction."""
    try:
        times = call("bf16", size=size, repeats=repeats)
    except Skip as reason:
        return f"crashes: {reason}"
    return f"works, takes {ratio(times['bf16'], times['float32']).median:.2f} x the time of float32"


def _processor() -> str | None:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return None
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
