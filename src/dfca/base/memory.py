"""Memory: how much there is, how much a process took, and one sentence where it was not enough."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from dfca.base.errors import DfcaError, ShortOfMemory

GIB = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def available_bytes(device: str = "cpu") -> int | None:
    """Return how much memory can be used without pushing anything out; None for a device that does not report it."""
    if device.startswith("cuda"):
        import torch  # late, as below: commands start without it

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) if device == "cpu" else None


def peak_bytes(pid: int | None = None) -> int:
    """Return the peak memory of a process (this one by default); where the system keeps no peak, what it uses now.

    Linux: VmHWM. (getrusage would also count the peak of the parent, which a child inherits.) Raises
    psutil.NoSuchProcess if it has ended.
    """
    process = psutil.Process(pid)
    status = Path(f"/proc/{process.pid}/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    memory = process.memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))


def keep_freed_memory() -> bool:
    """Let the C library keep large blocks that are freed, for this process; return whether it could be told.

    glibc returns blocks above 32 MB to the system and asks for them again, page by page: the activations of a CNN cost
    more in page faults than in arithmetic. Measured on one core (CIFAR-10, 4 clients x 2,000 images): 52 s per round
    before, 22 s with it. Numbers do not change.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def format_bytes(size: int) -> str:
    """Write a number of bytes for people.

    >>> format_bytes(3 * 2**30), format_bytes(2**20)
    ('3.0 GiB', '1.0 MiB')
    """
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / 2**20:.1f} MiB"


@contextmanager
def explain_oom() -> Iterator[None]:
    """Turn an allocation that failed into a ShortOfMemory with one sentence."""
    try:
        yield
    except DfcaError:
        raise
    except (MemoryError, RuntimeError) as error:
        import torch

        text = str(error)
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in text:
            raise
        first = " ".join(text.split())[:200] or "no more memory"
        raise ShortOfMemory(
            f'out of memory ({first}); what is stored is kept: use fewer --workers, bank = "disk", a smaller model or '
            "batch, or more ranks (torchrun), and run the command again"
        ) from error
