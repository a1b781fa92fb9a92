"""Differential privacy of what a client sends: its update of a round, clipped and noised (McMahan et al., ICLR 2018).

  y = theta + d min(1, C / |d|) + sigma C N(0, I),   d = what training changed of theta

The client stores y in the place of what it trained, so all its models are made of what was sent: theta is known to
everybody, and what one client's samples can change of y is at most C long. epsilon is that of T such releases for one
client whose samples are all left out (`base.accountant`). Sampling of clients does not lower it: neighbours see who
sends. Which cluster a client trains is chosen by exact losses and is not covered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfca.core.method import PrivacyOptions
from dfca.core.rng import stream


def protect(before: Tensor, trained: Tensor, options: PrivacyOptions, noise: Tensor) -> Tensor:
    """Clip and noise what training changed of a model: (P,), with standard normal noise (P,)."""
    change = trained - before
    norm = float(change.norm())
    shorter = change * min(1.0, options.clip / max(norm, 1e-30))
    return before + shorter + options.noise * options.clip * noise.to(change)


def simulated_noise(size: int, seed: int, client: int, round: int) -> Tensor:
    """Draw the noise of a client in a round (P,): who knows the seed of a simulation can draw it again."""
    return torch.randn(size, generator=stream(seed, "privacy", client, round), dtype=torch.float64)
