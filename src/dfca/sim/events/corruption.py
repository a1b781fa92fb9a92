"""How a bad link breaks a payload."""

from __future__ import annotations

import math
from dataclasses import replace

from dfca.core.client import Message
from dfca.sim.events.world import draw


def corrupted(message: Message, seed: int, receiver: int) -> Message:
    """Break a payload as a bad link does: a NaN in it, or numbers missing at the end."""
    if draw(seed, "corrupt", message.sender, receiver, message.cluster, message.round) < 0.5:
        return replace(message, model=message.model[:-1])
    broken = message.model.clone()
    broken[len(broken) // 2] = math.nan
    return replace(message, model=broken)
