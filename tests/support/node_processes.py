"""Nodes as processes: `dfca node run` and what a test asks them."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from node_swarm import until
from typer.testing import CliRunner

from dfca.cli import app
from dfca.node.disk.folder import NodeFolder
from dfca.node.operate.control import call
from dfca.node.run import make_transport
from dfca.node.service import Service, ServiceOptions


def dfca(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["node", *map(str, arguments)])


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dfca", "node", "run", str(path), *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_round(path: Path, process: subprocess.Popen[str], least: int, seconds: float = 300) -> dict[str, Any]:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        assert process.poll() is None, process.communicate()[1]
        if (path / "control.json").exists():
            try:
                status = call(path, "status")
            except Exception:
                status = {"round": -1}
            if status["round"] >= least and status["clusters"]:
                return status
        time.sleep(0.05)
    raise AssertionError("no such round in time")


async def grpc_service(path: Path, **options: Any) -> tuple[Service, asyncio.Task[None]]:
    service = Service(NodeFolder.load(path), ServiceOptions(log_stream=io.StringIO(), **options), make_transport)
    task = asyncio.create_task(service.run())
    await until(lambda: task.done() or (path / "control.json").exists())
    return service, task
