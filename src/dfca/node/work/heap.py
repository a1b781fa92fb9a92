"""Return free memory to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back_memory() -> None:
    """Collect garbage and return free memory that the C library (glibc) keeps: after work that needed much once."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
