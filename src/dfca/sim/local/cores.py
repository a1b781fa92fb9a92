"""Work on several cores: threads with one core each, for torch releases the interpreter lock while it computes.

How many cores there are for us: those that this process may use, less those that others keep busy (`free_cores`).
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from dfca.base.device import one_thread

T = TypeVar("T")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max 100000", or microseconds of each period: of a container


def usable_cores(quota: Path = QUOTA) -> int:
    """Count the cores that this process may use: by its affinity, and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text(encoding="ascii").split()
        cores = min(cores, math.ceil(int(limit) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # no container, or one without a quota
    return max(1, cores)


def free_cores(cores: int | None = None, load: float | None = None) -> int:
    """Count the cores that are not kept busy by others, at least one: cores less the load of the last minute.

    Threads wait for the slowest of them: with more threads than free cores every parallel call takes as long as the
    system lets another process run in between.
    """
    cores = usable_cores() if cores is None else cores
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, cores - math.floor(load + 0.5))


def each(jobs: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    """Carry out jobs and yield what they return, in their order; by several workers at the same time on one core each,
    by one worker as they are."""
    if workers == 1:
        for job in jobs:
            yield job()
        return
    ahead: deque[Future[T]] = deque()
    with (
        one_thread(),  # the calls themselves run at the same time
        # of this call: a job may make calls of its own, which would wait for the threads that wait for them
        ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        busy: set[int] = set()
        try:
            for job in jobs:
                ahead.append(pool.submit(_run, job, busy))
                if len(ahead) > workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except KeyboardInterrupt:
            for thread in tuple(busy):  # a client's work may take minutes, and the pool waits for its threads
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
            raise
        finally:
            for future in ahead:
                future.cancel()


def _run(job: Callable[[], T], busy: set[int]) -> T:
    """Carry out a job; `busy` has the thread meanwhile."""
    busy.add(thread := threading.get_ident())
    try:
        return job()
    finally:
        busy.discard(thread)


def share_out(count: int, parts: int) -> list[range]:
    """Cut things into runs, one per part, whose lengths differ by one at most."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def even(count: int, parts: int) -> list[slice]:
    """Cut things like `share_out`, without the empty runs where there are more parts than things."""
    return [slice(run.start, run.stop) for run in share_out(count, parts) if run]
