"""The nodes of a swarm as processes of this machine: `dfca node run`, with mutual TLS on the loopback.

Members are paired like devices: the first founds the swarm and runs; the others join by its invites.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dfca.base.errors import DfcaError, RunError
from dfca.node.disk import folder as node_folder
from dfca.node.operate.control import call
from dfca.node.task.facts import Facts
from dfca.node.trust.identity import Identity
from dfca.node.trust.joining import join
from dfca.node.trust.roster import Roster
from dfca.swarm.plan import NodeStatus, SwarmPlan

START_S = 120.0  # how long a node may take until it answers; many start at the same time
STOP_S = 30.0
LAST_LINES = 3


@dataclass
class NodeProcess:
    """One node: its folder, and the process that runs it."""

    folder: Path
    parent_pipe: int | None = None  # the node ends when this process, which holds the other end, ends
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0  # how often it was started
    last: NodeStatus = field(default_factory=NodeStatus)

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, "-m", "dfca", "node", "run", str(self.folder)]
        with (self.folder / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                command if self.parent_pipe is None else [*command, "--with-parent"],
                stdin=subprocess.DEVNULL if self.parent_pipe is None else self.parent_pipe,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the swarm, which ends its nodes in order
            )
        self.lives += 1

    def check(self) -> None:
        """Raise RunError with the last lines of output if the process has ended by itself."""
        if self.process is not None and self.process.poll() not in (None, 0, -signal.SIGKILL):
            lines = (self.folder / "output.txt").read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
            raise RunError(f"{self.folder.name} ended with status {self.process.returncode}: {' / '.join(lines)}")

    def ask(self) -> NodeStatus:
        try:
            answer = call(self.folder, "status", timeout_s=5.0)
        except DfcaError as error:
            return self.last._replace(state="down", lives=self.lives, error=str(error))
        self.last = _status(answer)._replace(lives=self.lives)
        return self.last

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def terminate(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()


class ProcessFleet:
    """Nodes as processes."""

    def __init__(self, plan: SwarmPlan) -> None:
        self.plan = plan
        self._pipe: tuple[int, ...] = ()
        self.nodes = [NodeProcess(plan.folder(i)) for i in range(plan.setting.clients)]

    async def start(self) -> None:
        """Found the swarm, pair all others with its founder, and start all nodes."""
        founder, *others = range(len(self.nodes))
        self._pipe = os.pipe()
        for node in self.nodes:
            node.parent_pipe = self._pipe[0]
        self._found(founder)
        self.nodes[founder].start()
        await self._wait_for(founder)
        for i in others:
            await self._pair(i, founder)
            self.nodes[i].start()
        for i in others:
            await self._wait_for(i)

    async def status(self) -> list[NodeStatus]:
        """Return the status of every node. Raises RunError for one that has ended by itself."""
        for node in self.nodes:
            node.check()
        return list(await asyncio.gather(*(asyncio.to_thread(node.ask) for node in self.nodes)))

    async def kill(self, client: int) -> None:
        node = self.nodes[client]
        await asyncio.to_thread(node.kill)
        node.start()

    async def cut(self, links: Sequence[tuple[int, int]], seconds: float) -> None:
        """Tell both ends of every link to refuse each other for some seconds."""
        for i, node in enumerate(self.nodes):
            others = [self.plan.names[k if j == i else j] for j, k in links if i in (j, k)]
            if others:
                try:
                    await asyncio.to_thread(call, node.folder, "block", members=others, seconds=seconds)
                except DfcaError:
                    continue  # it was just killed: its links are down anyway

    async def stop(self) -> None:
        """End all nodes; kill those that do not end in time, or when this is cancelled. Raises RunError."""
        for node in self.nodes:
            node.terminate()
        try:
            await self._wait_for_ends()
        finally:
            for node in self.nodes:
                if node.process is not None and node.process.poll() is None:
                    node.kill()
            for end in self._pipe:
                os.close(end)
            self._pipe = ()

    async def _wait_for_ends(self) -> None:
        end = time.monotonic() + STOP_S
        late = []
        for node in self.nodes:
            if node.process is None:
                continue
            try:
                await asyncio.to_thread(node.process.wait, max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(node.folder.name)
                node.kill()
        if late:
            raise RunError(f"{', '.join(late)} did not end within {STOP_S:g} s and had to be killed")

    def _found(self, client: int) -> None:
        path = self._prepare(client)
        identity = Identity.create(path)
        facts = self.plan.facts(identity.id)
        roster = Roster.found(identity, facts.swarm_id, self.plan.names[client], ())
        node_folder.write(path, self.plan.node_config(client), facts, roster)

    async def _pair(self, client: int, inviter: int) -> None:
        answer = await asyncio.to_thread(call, self.nodes[inviter].folder, "invite")
        path = self._prepare(client)
        identity = Identity.create(path)
        joined = await join(answer["invite"], identity, self.plan.names[client], (), lambda data: None)
        facts = Facts.from_bytes(joined.facts)
        node_folder.write(path, self.plan.node_config(client), facts, joined.roster)

    def _prepare(self, client: int) -> Path:
        self.plan.write_samples(client)
        path = self.plan.folder(client)
        node_folder.prepare(path)
        return path

    async def _wait_for(self, client: int) -> None:
        node, end = self.nodes[client], time.monotonic() + START_S
        while (await asyncio.to_thread(node.ask)).state == "down":
            node.check()
            if time.monotonic() > end:
                raise RunError(f"{node.folder.name} did not start within {START_S:g} s; see {node.folder}")
            await asyncio.sleep(0.2)


def _status(answer: dict[str, Any]) -> NodeStatus:
    return NodeStatus(
        state=str(answer.get("state")),
        round=int(answer.get("round") or 0),
        clusters=int(answer.get("clusters") or 0),
        cluster=answer.get("cluster"),
        accuracy=answer.get("accuracy"),
        links=sum(neighbour.get("state") == "up" for neighbour in answer.get("neighbours") or ()),
        sent_bytes=int(answer.get("bytes_out") or 0),
        refused=sum((answer.get("refused") or {}).values()),
        error=str((answer.get("last_error") or {}).get("text", "")),
        staleness=answer.get("staleness"),
    )
