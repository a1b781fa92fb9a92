"""`dfca node run`: one process that runs one node, over gRPC, until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfca.node.disk.folder import NodeFolder
from dfca.node.service import Service, ServiceOptions

if TYPE_CHECKING:
    from dfca.node.net.links.wire import Wire
    from dfca.node.net.transport import GrpcTransport

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORK_THREADS = ("work", "disk")


def run_node(
    path: Path,
    options: ServiceOptions,
    with_parent: bool = False,
    leave: Callable[[], None] = lambda: None,
) -> None:
    """Run the node of a folder until SIGINT or SIGTERM; a second signal ends it at once.

    with_parent: also end when the standard input is closed: the system closes it when the parent process ends. leave:
    called when everything is saved and closed. Raises DfcaError if the node cannot run.
    """
    service = Service(NodeFolder.load(path), options, make_transport)
    asyncio.run(_run(service, with_parent, leave))
    if any(thread.name in WORK_THREADS for thread in threading.enumerate()):
        # A round in progress is abandoned. Its thread is inside torch, which must not see a dying interpreter.
        leave_at_once()


def leave_at_once() -> None:
    """End the process without waiting for its threads: one was seen to hang after it had logged its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _run(service: Service, with_parent: bool, leave: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        service.stop()

    for number in SIGNALS:
        loop.add_signal_handler(number, end)
    if with_parent:
        threading.Thread(target=_wait_for_end, args=(0, loop, service.stop), name="parent", daemon=True).start()
    await service.run()
    leave()


def _wait_for_end(pipe: int, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Read a pipe to its end, then call back in the loop."""
    with suppress(OSError):
        while os.read(pipe, 4096):
            continue
    with suppress(RuntimeError):  # the loop is closed: the node has ended
        loop.call_soon_threadsafe(stop)


def make_transport(folder: NodeFolder, wire: Wire | None = None, **changes: Any) -> GrpcTransport:
    """Make the transport of a node from its settings and the swarm's facts.

    wire: None for gRPC. changes: other fields of `NetOptions`.
    """
    import torch

    from dfca.node.net.options import NetOptions, Swarm
    from dfca.node.net.transport import GrpcTransport

    config, facts = folder.config, folder.facts
    given, known = vars(config.network) | vars(config.limits), {field.name for field in fields(NetOptions)}
    options = NetOptions(**{name: value for name, value in given.items() if name in known})
    encoding = facts.payload if config.payload == "swarm" else config.payload
    codec, layout = folder.codec, folder.layout
    swarm = Swarm(
        facts.swarm_id,
        facts.model_size,
        encoding=encoding,
        compress=facts.compression == "zstd",
        payload_bytes=None if codec is None else codec.bytes(facts.model_size),
        kept=() if layout is None else layout.private,
    )
    if encoding == "int8":  # what is not trained, such as the statistics of batch norm, stays exact
        flat = folder.model.flat
        swarm = replace(swarm, tail=int(swarm.cut((torch.arange(flat.size) >= flat.trained).float()).sum()))
    options = replace(options, **changes)
    return GrpcTransport(folder.identity, folder.roster, swarm, options, folder.path, wire, folder.around)
