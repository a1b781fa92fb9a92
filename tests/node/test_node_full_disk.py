"""A node whose disk is full, on a real small one: it continues, says so, loses nothing, and saves again by itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_swarm import make_swarm, memory_service, until
from typer.testing import CliRunner

from dfca.cli import app
from dfca.node.disk.folder import NodeFolder
from dfca.node.memory import MemoryNetwork

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system: needs root on Linux"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount 400 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounts")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> Path:
    path = disk / "ballast"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    return path


def test_a_node_on_a_full_disk_keeps_training_and_saves_again_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfca.node.service.RETRY_S", 0.05)
    folder = make_swarm(small_disk, (0,))[0]

    async def scenario() -> None:
        service = memory_service(MemoryNetwork(()), folder)
        running = asyncio.create_task(service.run())
        await until(lambda: hasattr(service, "node") and service.node.machine.round >= 2)
        ballast = fill(small_disk)
        await until(lambda: service.node.saving.problem is not None)
        assert "no space left" in str(service.node.saving.problem)
        before = service.node.machine.round
        await until(lambda: service.node.machine.round > before + 2)  # it continues
        assert not running.done()
        status = service.status()
        assert any("no space left" in text for text in (*status["problems"], str(service.node.saving.problem)))
        saved = NodeFolder.load(folder.path).store().load()
        assert saved is not None
        assert saved.bank is not None
        assert saved.round <= before  # what was saved before is whole
        ballast.unlink()
        await until(lambda: service.node.saving.problem is None)
        service.stop()
        await running

    asyncio.run(scenario())
    saved = NodeFolder.load(folder.path).store().load()
    assert saved is not None
    assert saved.round > 4


def test_a_node_does_not_start_on_a_full_disk_and_says_why_in_one_sentence(small_disk: Path) -> None:
    folder = make_swarm(small_disk, (0,))[0]
    ballast = fill(small_disk)
    ran = CliRunner().invoke(app, ["node", "run", str(folder.path)])
    assert ran.exit_code == 2, ran.output
    assert "no space left" in ran.output
    assert "Traceback" not in ran.output
    assert len([line for line in ran.output.splitlines() if line.startswith("error:")]) == 1
    doctor = CliRunner().invoke(app, ["node", "doctor", str(folder.path)])
    assert doctor.exit_code == 1
    assert "FAIL  disk" in doctor.output
    assert "free some space" in doctor.output
    ballast.unlink()
    assert NodeFolder.load(folder.path).config == folder.config
