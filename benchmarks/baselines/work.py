"""The work that every library does, for the scripts of this folder: torch and the standard library only, no dfca.

N clients hold random images and train an MLP 784 - hidden - 10, or the CNN of pfl-research's CIFAR-10 benchmark: each
round one pass over the client's samples in batches, plain SGD. A script reads the work as JSON from its command line
and prints seconds per round as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor, nn

INPUTS, CLASSES, LEARNING_RATE = 784, 10, 0.1
CIFAR = (3, 32, 32)
MARK = "DFCA-BENCH "
"""What the line with the result begins with: the libraries print much of their own."""


CPU = "DFCA_BENCH_CPU"
"""The variable that makes `now` tell the time of the processor."""


def now() -> float:
    """Return a time in seconds; of the processor where asked for, which other work on the machine does not stretch."""
    return time.process_time() if os.environ.get(CPU) else time.perf_counter()


@dataclass(frozen=True)
class Work:
    """What is done in a round, and how many rounds; the first is a warm-up and is dropped."""

    clients: int
    hidden: int
    samples: int
    batch: int
    degree: int
    rounds: int
    threads: int
    model: str = "mlp"  # or "cnn"

    @property
    def name(self) -> str:
        """Name the model and the number of clients."""
        return f"{self.model.upper()} {self.hidden}, N = {self.clients}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample."""
        return (INPUTS,) if self.model == "mlp" else CIFAR

    @property
    def steps(self) -> int:
        """Count the gradient steps of a client in one round."""
        return -(-self.samples // self.batch)


def read_work() -> Work:
    """Read the work from the command line, and use as many threads as it says."""
    work = Work(**json.loads(sys.argv[1]))
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    return work


def samples_of(client: int, work: Work) -> tuple[Tensor, Tensor]:
    """Draw a client's samples: x (n, *shape), y (n,)."""
    random = torch.Generator().manual_seed(client)
    x = torch.randn(work.samples, *work.shape, generator=random)
    return x, torch.randint(CLASSES, (work.samples,), generator=random)


def layers(work: Work) -> list[nn.Module]:
    """Build the layers of the model."""
    return cnn(work.hidden) if work.model == "cnn" else mlp(work.hidden)


def mlp(hidden: int) -> list[nn.Module]:
    """Build the layers of the MLP."""
    return [nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)]


def cnn(hidden: int, side: int = CIFAR[1]) -> list[nn.Module]:
    """Build the layers of pfl-research's CNN for CIFAR-10, without its dropout."""
    pooled = (side - 4) // 2
    return [
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * pooled**2, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES),
    ]  # fmt: skip


def circulant(work: Work) -> list[list[int]]:
    """List the neighbours of each client: the `degree` nearest on a circle."""
    reach = range(1, work.degree // 2 + 1)
    return [sorted({(i + sign * d) % work.clients for d in reach for sign in (1, -1)}) for i in range(work.clients)]


def print_result(times: list[float], trained: int) -> None:
    """Print the result: times when rounds ended (the first is where measuring begins), clients trained meanwhile."""
    seconds = [end - begin for begin, end in pairwise(times)]
    print("\n" + MARK + json.dumps({"seconds": seconds, "trained": trained}), flush=True)


class _Stub(ModuleType):
    """A module in which every name exists and is a class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stub(*modules: str) -> None:
    """Put empty stubs in place of modules that a library imports and this work does not use."""
    for name in modules:
        sys.modules[name] = _Stub(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)  # so that it counts as installed
