"""The nodes of a swarm, as processes (`swarm.processes`) or as tasks of this process (`swarm.memory`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class NodeStatus(NamedTuple):
    """What a node reports about itself."""

    state: str = "starting"
    round: int = 0
    clusters: int = 0
    cluster: int | None = None
    accuracy: float | None = None
    links: int = 0  # neighbours in reach
    sent_bytes: int = 0
    refused: int = 0
    lives: int = 1  # how often it was started
    error: str = ""  # the last one
    staleness: float | None = None  # mean age of the models that it folds, in updates


class Fleet(Protocol):
    """The nodes of a swarm."""

    async def start(self) -> None:
        """Make all members of a swarm and start them."""

    async def status(self) -> list[NodeStatus]:
        """Return the status of every node; one that does not answer is "down"."""

    async def kill(self, client: int) -> None:
        """Kill a node (kill -9), and start it again."""

    async def cut(self, links: Sequence[tuple[int, int]], seconds: float) -> None:
        """Cut links for some seconds."""

    async def stop(self) -> None:
        """End all nodes, with their last save on the disk. Raises RunError for one that does not end."""
