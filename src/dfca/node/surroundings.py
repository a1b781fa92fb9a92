"""What a node takes from its machine: clock, disk, threads, random numbers, a door. Simulations replace them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from dfca.node.disk.disk import SYSTEM_DISK, Disk
from dfca.node.trust.doors import Listen, TlsDoor
from dfca.node.work.threads import OneThread


class NodeClock(Protocol):
    """The time. Waiting is the event loop's part."""

    def steady(self) -> float:
        """Return seconds that never go back."""

    def wall(self) -> float:
        """Return the seconds since 1970."""


class SystemClock:
    """The clock of this machine."""

    def steady(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


SYSTEM_CLOCK = SystemClock()


def start_threads(name: str, count: int = 1) -> Executor:
    """Start threads; a single one does not keep the process alive."""
    return OneThread(name) if count == 1 else ThreadPoolExecutor(count, name)


@dataclass(frozen=True)
class Surroundings:
    """What a node takes from its machine."""

    clock: NodeClock = SYSTEM_CLOCK
    disk: Disk = SYSTEM_DISK
    threads: Callable[[str, int], Executor] = start_threads
    random_bits: Callable[[int], int] = secrets.randbits
    listen: Listen = TlsDoor


SYSTEM = Surroundings()
