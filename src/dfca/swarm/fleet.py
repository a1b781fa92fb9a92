"""What runs the nodes of a swarm: processes on the loopback, or tasks of this process (`swarm.processes`, `memory`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class NodeStatus(NamedTuple):
    """What a node says of itself. links: neighbours in reach; lives: how often it was started; error: its last one;
    staleness: the mean age of the models that it folds, in updates."""

    state: str = "starting"
    round: int = 0
    clusters: int = 0
    cluster: int | None = None
    accuracy: float | None = None
    links: int = 0
    sent_bytes: int = 0
    refused: int = 0
    lives: int = 1
    error: str = ""
    staleness: float | None = None


class Fleet(Protocol):
    """The nodes of a swarm."""

    async def start(self) -> None:
        """Make all members of one swarm, and start them."""

    async def status(self) -> list[NodeStatus]:
        """Ask every node how it is; one that does not answer is "down"."""

    async def kill(self, client: int) -> None:
        """Kill a node (kill -9), and start it again."""

    async def cut(self, links: Sequence[tuple[int, int]], seconds: float) -> None:
        """Cut links for some seconds."""

    async def stop(self) -> None:
        """End all nodes, with their last save on the disk. Raises RunError for one that does not end."""
