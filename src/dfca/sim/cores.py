"""Work on several cores: Python threads with one core each, for torch lets go of the interpreter while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch

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
        one_thread_each(),
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


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let torch use one thread per call meanwhile: the calls themselves run at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def even(count: int, parts: int) -> list[slice]:
    """Cut things into parts that differ by one at the most; no more parts than things."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends) if begin < end]
