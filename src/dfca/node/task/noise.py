"""The noise of [privacy] on a device: from the operating system, so that nobody who knows the swarm's seed knows it."""

from __future__ import annotations

import os

import torch
from torch import Tensor


def secret_noise(size: int) -> Tensor:
    """Draw standard normal numbers (size,), by the inverse of their distribution."""
    if not size:
        return torch.zeros(0, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(os.urandom(8 * size)), dtype=torch.int64) & (2**53 - 1)
    drawn: Tensor = torch.special.ndtri((bits.double() + 0.5) / 2**53)
    return drawn
