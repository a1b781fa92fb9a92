"""Named random streams: every random choice can be replayed alone, in any driver, in any process.

A stream is named by the run's seed and by what it is for: `stream(seed, "batches", client, round)`. The name is hashed
(SHA-256), so streams do not depend on the order in which they are asked for. Generators live on the CPU: the same
numbers on every device. Nothing in dfca touches torch's global generator without restoring it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: str | int) -> int:
    """Derive an integer seed in [0, 2**32) from a seed and a name.

    torch's CPU generator uses 32 bits of its seed, so more would only look like more.
    """
    text = "/".join(map(str, (int(seed), *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def stream(seed: int, *names: str | int) -> torch.Generator:
    """Open the random stream of that name."""
    import torch  # late, as below: `derive` does without

    return torch.Generator().manual_seed(derive(seed, *names))


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Run code that can only use torch's global generator (initialisers, dropout) on a named stream."""
    import torch

    with torch.random.fork_rng(devices=_cuda_devices()):
        number = derive(seed, *names)
        torch.default_generator.manual_seed(number)  # torch.manual_seed also queues a call for every absent device
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(number)
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(number)
        yield


class Noise:
    """A named stream for code that can only use torch's global generator, in pieces.

    Every `with` block continues where the last one ended, whatever else used the generator in between.
    """

    def __init__(self, seed: int, *names: str | int) -> None:
        self._begin = seeded(seed, *names)
        self._states: list[torch.Tensor] | None = None
        self._block = ExitStack()

    def __enter__(self) -> None:
        import torch

        if self._states is None:
            self._block.enter_context(self._begin)
            return
        self._block.enter_context(torch.random.fork_rng(devices=_cuda_devices()))
        torch.set_rng_state(self._states[0])
        for device, state in zip(_cuda_devices(), self._states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def __exit__(self, *error: object) -> None:
        import torch

        self._states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _cuda_devices())]
        self._block.close()


def _cuda_devices() -> list[int]:
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
