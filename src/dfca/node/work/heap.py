"""Give memory that is free again back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back_memory() -> None:
    """Collect garbage and return free memory to the system, where the C library keeps it (glibc).

    Called where much was used once: when a node has started, has warmed up, or has read its data again.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
