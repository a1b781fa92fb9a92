"""Differential privacy of what a client sends: its update of a round, clipped and noised (McMahan et al., ICLR 2018).

  y = theta + d min(1, C / |d|) + sigma C N(0, I),   d = what training changed of theta

The client stores y in the place of what it trained, so all its models are made of what was sent: theta is known to
everybody, and what one client's samples can change of y is at most C long. epsilon is that of T such releases for one
client whose samples are all left out (`sim.accountant`). Sampling of clients does not lower it: neighbours see who
sends. Which cluster a client trains is chosen by exact losses and is not covered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfca.core.method import PrivacyOptions


def protect(before: Tensor, trained: Tensor, options: PrivacyOptions, random: torch.Generator) -> Tensor:
    """Clip and noise what training changed of a model: (P,)."""
    change = trained - before
    norm = float(change.norm())
    noise = torch.randn(len(change), generator=random, dtype=torch.float64).to(change)
    return before + change * min(1.0, options.clip / max(norm, 1e-30)) + options.noise * options.clip * noise
