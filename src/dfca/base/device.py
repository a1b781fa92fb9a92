"""Which processor computes: the CPU, a GPU by CUDA, or Apple's by MPS; and with how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dfca.base.errors import ConfigError


def find_device(device: str, option: str = "device", remedy: str = "use --device auto") -> str:
    """Choose the device for "auto" (CUDA, then MPS, then the CPU), and check that a named one exists.

    option: what an error calls the setting; remedy: how it says to mend it. Raises ConfigError if this machine does not
    have the device.
    """
    if device == "cpu":
        return device
    import torch  # late: most mistakes in an experiment are found before

    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(name for name, available in here.items() if available)
    kind, _, index = device.partition(":")
    if not here[kind] or (index and int(index) >= torch.cuda.device_count()):
        have = ", ".join(name for name, available in here.items() if available)
        raise ConfigError(f'{option} "{device}" is not on this machine (it has: {have}); {remedy}')
    return device


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread per call inside the block."""
    import torch  # late, as above

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
