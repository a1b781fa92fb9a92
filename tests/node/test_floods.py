"""Floods of a node's own ports: control, metrics, pairing. The node continues, and those who may ask are answered."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from node_swarm import make_swarm, memory_service, until
from toy import free_port

from dfca.base.errors import ConfigError
from dfca.node.disk.folder import NodeFolder
from dfca.node.memory import MemoryNetwork
from dfca.node.operate import control, metrics
from dfca.node.operate.control import ControlServer, call
from dfca.node.operate.metrics import FRESH_S, serve_metrics
from dfca.node.service import Service
from dfca.node.task.config import NodeConfig
from dfca.node.trust.identity import Identity
from dfca.node.trust.invite import Invite
from dfca.node.trust.joining import join

HUGE = b"x" * (1 << 20)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def connect(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Open connections; every third says nothing, every third a byte, every third a megabyte without an end."""
    writers = []
    for i in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((b"", b"G", HUGE)[i % 3])
        writers.append(writer)
    return writers


@asynccontextmanager
async def flooded(*ports: int, count: int = 150) -> AsyncIterator[None]:
    """Keep ports under connections that are too many, too slow and too long."""
    open_ = [writer for port in ports for writer in await connect(port, count)]

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.1)
            for writer in open_:
                if not writer.transport.is_closing():
                    writer.write(b".")

    dripping = asyncio.create_task(drip())
    try:
        yield
    finally:
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        for writer in open_:
            writer.transport.abort()


def test_a_node_trains_answers_and_pairs_while_its_ports_are_flooded(tmp_path: Path) -> None:
    port = free_port(2)
    folder, second = make_swarm(tmp_path, (0, 0))
    text = (folder.path / "node.toml").read_text()
    (folder.path / "node.toml").write_text(text.replace("# metrics_port = ", f"metrics_port = {port}", 1))
    assert NodeConfig.load(folder.path).log.metrics_port == port

    async def scenario() -> None:
        network = MemoryNetwork(())
        service: Service = memory_service(network, NodeFolder.load(folder.path))
        other = memory_service(network, second)
        running = [asyncio.create_task(node.run()) for node in (service, other)]
        await until(lambda: (folder.path / "control.json").exists() and service.node.machine.round > 2)
        invite = Invite.parse((await asyncio.to_thread(call, folder.path, "invite"))["invite"])
        listening: Any = service._closers[1].__self__  # type: ignore[attr-defined]
        ports = (listening._server.sockets[0].getsockname()[1], port, invite.port)
        threads, memory = threading.active_count(), resident_mb()
        async with flooded(*ports):
            before = service.node.machine.round
            await until(lambda: service.node.machine.round > before + 5)
            assert (await asyncio.to_thread(call, folder.path, "status"))["round"] > before
            scraped = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics", None, 60)
            assert b"dfca_round" in scraped.read()
            device = Identity.create(tmp_path / "new")
            joined = await join(invite, device, "new", (), lambda facts: None)
            assert joined.inviter.id == folder.identity.id
            assert threading.active_count() - threads <= metrics.MOST_CONNECTIONS + 8
            assert resident_mb() - memory < 60
        for node in (service, other):
            node.stop()
        await asyncio.gather(*running)

    asyncio.run(scenario())


def test_commands_are_answered_among_connections_that_say_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def greet(request: dict[str, Any]) -> dict[str, Any]:
            return {"hello": 1}

        server = ControlServer(tmp_path, {"greet": greet})
        await server.open()
        assert server._server is not None
        port = server._server.sockets[0].getsockname()[1]
        async with flooded(port, count=4 * control.MOST_CONNECTIONS):
            for _ in range(3):
                assert await asyncio.to_thread(call, tmp_path, "greet") == {"hello": 1}
            await until(lambda: len(server._calls) <= control.MOST_CONNECTIONS)
        await server.close()

    asyncio.run(scenario())


def test_scrapes_without_end_ask_the_node_a_few_times_per_second(tmp_path: Path) -> None:
    port, asked, begin = free_port(1), [], time.monotonic()

    def status() -> dict[str, Any]:
        asked.append(1)
        return {"round": len(asked)}

    close = serve_metrics(port, status)
    try:
        for _ in range(60):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", None, 60).read()
        with socket.create_connection(("127.0.0.1", port)) as garbage, suppress(OSError):
            garbage.sendall(b"\x16\x03\x01" + os.urandom(200_000) + b"\r\n\r\n")
        assert b"dfca_round" in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", None, 60).read()
        with pytest.raises(ConfigError, match=f"port {port} for metrics is in use"):
            serve_metrics(port, status)
    finally:
        close()
    assert len(asked) <= 1 + (time.monotonic() - begin) / FRESH_S
