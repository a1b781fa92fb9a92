"""Work on several cores: threads with one core each, for torch releases the interpreter lock while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

from dfca.core.threads import one_thread

T = TypeVar("T")


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
        try:
            for job in jobs:
                ahead.append(pool.submit(job))
                if len(ahead) > workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def share_out(count: int, parts: int) -> list[range]:
    """Cut things into runs, one per part, whose lengths differ by one at most."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def even(count: int, parts: int) -> list[slice]:
    """Cut things like `share_out`, without the empty runs where there are more parts than things."""
    return [slice(run.start, run.stop) for run in share_out(count, parts) if run]
